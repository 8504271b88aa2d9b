"""A variant as CUDA graphs: eager's gradients on a GPU, new inputs and draws at each replay, a reason for each refusal."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import tracefuse
from tracefuse.errors import NotSupported, OptionError
from tracefuse.execution import graphs
from tracefuse.execution.graphed_program import check_replayable
from tracefuse.execution.graphs import recording
from tracefuse.optimizers.trace import Trace

gpu = pytest.mark.gpu


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_program_on_the_cpu_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    variant = tracefuse.capture(lambda: x.exp().sum().backward()).optimize()
    for act in (lambda: variant.compile(cuda_graph=True), lambda: variant.measure(budget_s=0.1, cuda_graph=True)):
        with pytest.raises(NotSupported, match=r"x is on the CPU.*leave out cuda_graph"):
            act()


def test_overwritten_inputs_are_refused() -> None:
    norm, x = nn.BatchNorm1d(3), torch.randn(8, 3, requires_grad=True)
    variant = tracefuse.capture(lambda: norm(x).square().sum().backward()).optimize()
    with pytest.raises(NotSupported, match=r"it overwrites its input (running_|num_)"):
        variant.compile(cuda_graph=True)


def on_gpu(run: Callable[[], object], stays: str = "") -> Trace:
    """The trace of `run` with its values on a GPU that need not exist, all but the one called `stays`."""
    trace = tracefuse.capture(run).trace.copy()
    with FakeTensorMode():
        for node in trace.graph.nodes:
            if node.name != stays:
                node.meta = {**node.meta, "val": tree_map_only(Tensor, _on_gpu, node.meta.get("val"))}
    return trace


def _on_gpu(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def loss_of(value: Tensor) -> None:
    value.square().sum().backward()


def test_what_runs_on_one_gpu_is_allowed() -> None:
    x, rows = torch.randn(5, 3, requires_grad=True), torch.tensor([0, 2])
    check_replayable(on_gpu(lambda: loss_of(F.dropout(x[rows].softmax(-1)))))


def test_a_value_on_the_cpu_is_refused() -> None:
    x = torch.randn(3, requires_grad=True)
    trace = on_gpu(lambda: loss_of(x.exp() * 2), stays="exp")
    with pytest.raises(NotSupported, match="exp is on the CPU, and a graph replays the work of a GPU only"):
        check_replayable(trace)


def test_one_of_several_results_may_be_on_the_cpu() -> None:
    """As attention's seed is, but while a graph is captured."""
    x = torch.randn(5, requires_grad=True)
    check_replayable(on_gpu(lambda: loss_of(x.sort().values), stays="sort_1"))


@pytest.mark.parametrize(
    ("run", "op"),
    [
        (lambda x: x[x.detach() > 0], "aten.index.Tensor"),
        (lambda x: x[(x.detach() > 0).nonzero().squeeze(1)], "aten.nonzero.default"),
        (lambda x: x.masked_select(x.detach() > 0), "aten.masked_select.default"),
    ],
)
def test_shapes_that_depend_on_numbers_are_refused(run: Callable[[Tensor], Tensor], op: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    with pytest.raises(NotSupported, match=f"the host must read a number to run {op}"):
        check_replayable(on_gpu(lambda: loss_of(run(x))))


# --- on a GPU ---------------------------------------------------------------------------------------------------------

MUTATING = {"conv_batchnorm", "residual_block"}


@gpu
@pytest.mark.parametrize("name", [n for n in programs.PROGRAMS if n not in MUTATING])
def test_replays_have_eagers_results_and_gradients(name: str) -> None:
    program = programs.PROGRAMS[name](torch.float64, "cuda").fresh()
    torch.manual_seed(7)
    c = tracefuse.capture(program.run)
    eager = {leaf: gradient.clone() for leaf, gradient in program.gradients().items()}
    step = c.optimize().compile(cuda_graph=True)
    rtol, atol = {"autocast": (0.1, 2e-2), "llama": (1e-3, 1e-6)}.get(name, (1e-8, 1e-10))
    for _ in range(2):
        program.fresh()
        torch.manual_seed(7)
        torch.autograd.backward(step())
        for leaf, gradient in program.gradients().items():
            torch.testing.assert_close(gradient, eager[leaf], rtol=rtol, atol=atol)
        assert program.gradients().keys() == eager.keys()


@gpu
def test_overwriting_programs_are_refused_on_the_gpu() -> None:
    program = programs.conv_batchnorm(torch.float64, "cuda")
    with torch.backends.cudnn.flags(enabled=False):
        capture = tracefuse.capture(program.run)
    with pytest.raises(NotSupported, match="overwrites its input"):
        capture.optimize().compile(cuda_graph=True)


def linear_step() -> tuple[nn.Linear, Tensor, tracefuse.Capture]:
    model, x = nn.Linear(6, 4).cuda(), torch.randn(3, 6, device="cuda", requires_grad=True)
    with tracefuse.capture() as c:
        out = torch.tanh(model(x))
        out.backward(torch.ones_like(out))
    return model, x, c


@gpu
def test_new_inputs_new_cotangents_and_updated_parameters_are_seen() -> None:
    model, _, c = linear_step()
    step = c.optimize().compile(cuda_graph=True)
    for _ in range(3):
        x, cotangent = torch.randn(3, 6, device="cuda", requires_grad=True), torch.randn(3, 4, device="cuda")
        leaves = (x, *model.parameters())
        expected = torch.autograd.grad(torch.tanh(model(x)), leaves, cotangent)
        out = step(x=x)
        torch.testing.assert_close(out, torch.tanh(model(x)))
        torch.testing.assert_close(torch.autograd.grad(out, leaves, cotangent), expected)
        with torch.no_grad():
            model.weight.mul_(-1.5)


@gpu
def test_results_and_gradients_outlive_the_next_replay() -> None:
    _, x, c = linear_step()
    step = c.optimize().compile(cuda_graph=True)
    out = step()
    (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
    kept = out.detach().clone(), gradient.clone()
    other = step(x=torch.randn(3, 6, device="cuda", requires_grad=True))
    other.sum().backward()
    torch.testing.assert_close((out.detach(), gradient), kept, rtol=0, atol=0)


@gpu
def test_a_backward_after_the_next_forward_or_a_second_one_is_refused() -> None:
    _, _, c = linear_step()
    step = c.optimize().compile(cuda_graph=True)
    first, second = step(), step()
    with pytest.raises(NotSupported, match="before the next forward"):
        first.sum().backward()
    second.sum().backward(retain_graph=True)
    with pytest.raises(NotSupported, match="call backward once"):
        second.sum().backward()


@gpu
def test_a_parameter_that_was_moved_is_refused() -> None:
    model, _, c = linear_step()
    step = c.optimize().compile(cuda_graph=True)
    step()
    model.weight.data = model.weight.data.clone()
    with pytest.raises(OptionError, match=r"weight.copy_\(...\), or compile without cuda_graph"):
        step()


@gpu
def test_a_parameter_changed_before_the_backward_is_noticed() -> None:
    model, _, c = linear_step()
    out = c.optimize().compile(cuda_graph=True)()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@gpu
def test_large_tensors_that_stay_are_held_once() -> None:
    """Neither as copies of what is given nor as copies of what is made; and the numbers are those of plain calls."""
    nbytes = 64 << 20
    x = torch.randn(nbytes // 4, device="cuda", requires_grad=True)
    cotangent = torch.randn_like(x)
    program = tracefuse.capture(lambda: (x * 2 + 1).backward(cotangent)).optimize().compile(cuda_graph=True)
    x.grad = None
    replays = program.replays([x, cotangent])
    for _ in range(3):
        state = replays.forward()
        (found,) = replays.backward(state)
        torch.testing.assert_close(state[0][0], x.detach() * 2 + 1)
        torch.testing.assert_close(found, cotangent * 2)
        del state, found
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    replays.backward(replays.forward())
    assert torch.cuda.max_memory_allocated() - before < nbytes // 2
    assert replays.held_nbytes < 2.5 * nbytes


@gpu
def test_a_loop_over_one_large_batch_is_right_whatever_the_user_holds() -> None:
    x = torch.randn(1 << 20, device="cuda", requires_grad=True)
    c = tracefuse.capture(lambda: (x.tanh() * 3).backward(torch.ones_like(x)))
    step, held = c.optimize().compile(cuda_graph=True), []
    for turn in range(10):
        with torch.no_grad():
            x.normal_()
        out = step() if turn != 7 else step(x=x.detach().clone().requires_grad_())
        (gradient,) = torch.autograd.grad(out.sum(), x) if turn != 7 else (None,)
        torch.testing.assert_close(out.detach(), x.detach().tanh() * 3)
        if gradient is not None:
            torch.testing.assert_close(gradient, 3 * (1 - x.detach().tanh().square()))
        if turn in (1, 6):
            held.append((out.detach(), out.detach().clone(), gradient, gradient.clone()))
        del out, gradient
    for out, was, gradient, gradient_was in held:
        torch.testing.assert_close((out, gradient), (was, gradient_was), rtol=0, atol=0)


@gpu
def test_dropout_draws_anew_at_each_replay_and_follows_the_seed() -> None:
    x = torch.ones(4096, device="cuda", requires_grad=True)
    c = tracefuse.capture(lambda: F.dropout(x, 0.5).sum().backward())
    state = torch.cuda.get_rng_state()
    step = c.optimize().compile(cuda_graph=True)
    step()
    torch.cuda.set_rng_state(state)
    masks = []
    for seed in (1, 1, None, 2):
        if seed is not None:
            torch.manual_seed(seed)
        masks.append(torch.autograd.grad(step(), x)[0] != 0)
    one, again, later, other = masks
    assert torch.equal(one, again)
    assert not torch.equal(again, later)
    assert not torch.equal(one, other)
    assert 0.4 < one.double().mean().item() < 0.6


@gpu
def test_capturing_leaves_the_generator_where_it_was() -> None:
    _, _, c = linear_step()
    torch.manual_seed(5)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(5)
    c.optimize().compile(cuda_graph=True)()
    torch.testing.assert_close(torch.rand(3, device="cuda"), expected)


@gpu
@pytest.mark.alone
def test_measuring_adds_a_column() -> None:
    program = programs.gpt(torch.float32, "cuda")
    timing = tracefuse.capture(program.run).optimize().measure(budget_s=1, cuda_graph=True)
    assert [p.name for p in timing.programs] == ["captured", "optimised", "CUDA graph"]
    assert timing.program("CUDA graph").difference.gradients < 1e-4
    assert timing.program("CUDA graph").peak_nbytes > timing.program("optimised").peak_nbytes / 2
    assert timing.program("CUDA graph").times_ms["step"].median < timing.program("optimised").times_ms["step"].median


@gpu
def test_another_recording_does_not_take_the_workspaces_of_matmuls() -> None:
    """In a process of its own: a matmul that writes where nothing is mapped ends the CUDA context."""
    program = """
        import torch, tracefuse
        a, b = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) for size in ((64, 32768), (32768, 64)))
        w = torch.randn(64, 50257, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        run = lambda: (a @ b @ w).float().square().mean()
        step = tracefuse.capture(lambda: run().backward()).optimize().compile(cuda_graph=True)
        w.grad = None
        step().backward()
        expected, w.grad = w.grad, None
        # What torch.compile(mode="reduce-overhead") does before and after it records.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        others = [torch.zeros(1 << 20, device="cuda") for _ in range(64)]
        step().backward()
        torch.cuda.synchronize()
        assert torch.equal(w.grad, expected)
        assert not any(tensor.any() for tensor in others)
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("fails", [False, True], ids=["recorded", "failed"])
def test_collections_pause_while_a_graph_is_recorded(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that need not exist."""
    seen = dict[str, bool]()

    class Graph:
        def instantiate(self) -> None:
            seen["made"] = True

    @contextlib.contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        seen["before"] = gc.get_threshold()[0] > 0
        yield
        seen["at the end"] = gc.get_threshold()[0] > 0

    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(graphs, "_free_workspaces", lambda: None)
    refused = pytest.raises(NotSupported, match="no room") if fails else contextlib.nullcontext()
    with refused, recording(Graph(), (0, 1), None):  # type: ignore[arg-type]
        if fails:
            raise RuntimeError("no room")
    assert gc.get_threshold()[0] > 0
    assert seen == ({"before": False} if fails else {"before": False, "at the end": False, "made": True})


@gpu
def test_garbage_waits_until_a_graph_is_recorded() -> None:
    """A graph that a collection destroyed meanwhile would break the one that is recorded, and torch's generator with it."""
    x, stream = torch.ones(8, device="cuda"), torch.cuda.Stream()

    def recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        torch.cuda.synchronize()
        with recording(graph, torch.cuda.graph_pool_handle(), stream):
            made = run()
        return graph, made

    def with_much_garbage() -> Tensor:
        assert gc.get_threshold()[0] == 0
        assert len([[] for _ in range(5_000)]) == 5_000
        return x + 2

    cycle: list[object] = [recorded(lambda: x * 2)]
    cycle.append(cycle)
    del cycle
    graph, made = recorded(with_much_garbage)
    graph.replay()
    assert made.tolist() == [3.0] * 8
    assert torch.rand(2, device="cuda").isfinite().all()
    assert gc.get_threshold()[0] > 0
