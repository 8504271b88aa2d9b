"""The exported file runs without the package, and its gradients are eager's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import torch

import tracefuse
from tracefuse.errors import ExportError

# Runs every exported file in one fresh process that cannot import tracefuse.
RUNNER = """
import importlib.util, sys, torch
sys.modules["tracefuse"] = None
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location(path.rpartition("/")[2][:-3], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    inputs, seed = torch.load(path + ".inputs")
    torch.manual_seed(seed)
    results = module.run(*inputs)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results)
    torch.save([[r.detach() for r in results], [t.grad for t in inputs]], path + ".outputs")
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> dict[str, tuple[list, list, list, list]]:
    """By program: eager's results and gradients by input, then those of the exported file."""
    folder = tmp_path_factory.mktemp("exported")
    eager = {}
    for name, make in programs.PROGRAMS.items():
        program = make(torch.float64).fresh()
        torch.manual_seed(3)
        c = tracefuse.capture(program.run)
        results, leaves = c.replay(), dict(zip((i.name for i in c.trace.inputs), c.example_inputs, strict=True))
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in c.example_inputs]
        inputs = inputs[: sum(i.kind != "cotangent" for i in c.trace.inputs)]
        torch.save((inputs, 3), folder / f"{name}.py.inputs")
        c.optimize().export(folder / f"{name}.py")
        eager[name] = (
            [v for out, v in zip(c.trace.outputs, results, strict=True) if out.kind == "result"],
            [t.grad for t in list(leaves.values())[: len(inputs)]],
        )
    files = [str(folder / f"{name}.py") for name in programs.PROGRAMS]
    done = subprocess.run([sys.executable, "-c", RUNNER, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: (*eager[name], *torch.load(folder / f"{name}.py.outputs")) for name in eager}


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_results_and_gradients_are_eagers(exported, name):
    results, gradients, our_results, our_gradients = exported[name]
    # Autocast computes in bfloat16, whose sums depend on the order that fusion changes.
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if name == "autocast" else {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(our_results, results, **tolerance)
    assert [g is None for g in our_gradients] == [g is None for g in gradients]
    torch.testing.assert_close(
        [g for g in our_gradients if g is not None], [g for g in gradients if g is not None], **tolerance
    )


def test_the_file_imports_only_torch_triton_and_the_standard_library(tmp_path):
    c = tracefuse.capture(programs.gpt(torch.float32).run)
    tree = ast.parse(c.optimize().export(tmp_path / "step.py").read_text())
    names = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names - set(sys.stdlib_module_names) <= {"torch", "triton"}


def run_file(path: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)


def test_the_file_checks_itself_and_times_both(tmp_path):
    c = tracefuse.capture(programs.rope(torch.float32).run)
    done = run_file(c.optimize().export(tmp_path / "rope.py"))
    assert done.returncode == 0, done.stderr
    assert "ok   gradient of t" in done.stdout
    assert "captured " in done.stdout
    assert "optimised " in done.stdout
    assert "measured on CPU" in done.stdout


def test_a_wrong_file_fails_its_own_check(tmp_path):
    c = tracefuse.capture(programs.rope(torch.float32).run)
    path = c.optimize(fuse=False).export(tmp_path / "rope.py")
    start = path.read_text().index("def backward(boxed)")
    text = path.read_text()
    path.write_text(text[:start] + text[start:].replace("aten.neg.default(", "aten.abs.default(", 1))
    done = run_file(path)
    assert done.returncode != 0
    assert "BAD  gradient of t" in done.stdout


def test_other_shapes_are_refused_and_other_strides_are_laid_out():
    t = torch.randn(4, 6, requires_grad=True)
    with tracefuse.capture() as c:
        y = t.sin() * t.cos()
        y.backward(torch.ones(4, 6))
    program = c.optimize().compile()
    with pytest.raises(ValueError, match="capture it again"):
        program(torch.randn(5, 6))
    other = torch.randn(6, 4).t().requires_grad_()
    ours = torch.autograd.grad(program(t=other).sum(), other)[0]
    torch.testing.assert_close(ours, torch.cos(2 * other))


def test_the_compiled_program_trains_the_live_parameters():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    x = torch.randn(16, 6)

    def step() -> torch.Tensor:
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    program = tracefuse.capture(step).optimize().compile()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = program()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_running_statistics_are_updated():
    norm = torch.nn.BatchNorm1d(3)
    x = torch.randn(8, 3, requires_grad=True)
    program = tracefuse.capture(lambda: norm(x).square().sum().backward()).optimize().compile()
    before = norm.running_mean.clone()
    program().backward()
    torch.testing.assert_close(norm.running_mean, 0.9 * before + 0.1 * x.detach().mean(0))
    assert int(norm.num_batches_tracked) == 2


def test_backward_runs_once_per_run():
    x = torch.randn(3, requires_grad=True)
    program = tracefuse.capture(lambda: x.exp().sum().backward()).optimize().compile()
    loss = program()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call `run` again"):
        loss.backward()


def test_unknown_inputs_are_refused_by_name():
    x = torch.randn(3, requires_grad=True)
    program = tracefuse.capture(lambda: x.exp().sum().backward()).optimize().compile()
    with pytest.raises(tracefuse.TracefuseError, match="choose from x"):
        program(z=x)


def test_more_than_one_step_is_refused():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        (weight * 2).sum().backward()
        optimizer.step()

    with pytest.raises(ExportError, match="Capture only those"):
        _ = tracefuse.capture(step).optimize().source
