"""`torch.compile(model, backend="tracefuse")` never raises where eager runs: it does without what fails, and says so once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fake_graphs import FakeGraphs
from kernels import kernel_of
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

import tracefuse.backend
from tracefuse.backend import tracefuse as backend
from tracefuse.dynamo import graphed_halves, halves
from tracefuse.errors import CaptureError
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.variant import Variant


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A batch norm, whose statistics the forward overwrites, between matmuls and what fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x)))) + x


def trained(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Results, gradients and buffers of two steps and an evaluation."""
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        out = run(torch.randn(5, 6, dtype=torch.float64))
        out.square().mean().backward()
        found.append(out.detach())
    with torch.no_grad():
        found.append(run(torch.randn(5, 6, dtype=torch.float64)))
    return [*found, *(p.grad for p in model.parameters()), *model.buffers()]


def said_while_it_trains_as_eager(build: Callable[[], nn.Module] = Net, **given: Any) -> list[str]:
    """What was warned of while a compiled model gave eager's numbers."""
    torch.manual_seed(0)
    eager = build().double()
    model = copy.deepcopy(eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = trained(model, torch.compile(model, backend=backend, **given))
    torch.testing.assert_close(ours, trained(eager, eager))
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def broken(*_: object, **__: object) -> Any:
    raise ValueError("injected")


# --- while it compiles ------------------------------------------------------------------------------------------------

PASSES = ("Simplify", "Freeze", "Decompose", "Remat", "Fuse")


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(f"tracefuse.optimizers.{name.lower()}", fromlist=[name])
    monkeypatch.setattr(getattr(module, name), "run", broken)
    said = said_while_it_trains_as_eager()
    assert all(f"runs op by op, without tracefuse: {name.lower()}: ValueError: injected" in one for one in said)
    assert said


STAGES: dict[str, tuple[object, str]] = {
    "the names of dynamo's graph": (tracefuse.backend, "inputs_of"),
    "the trace": (tracefuse.backend, "joint_trace"),
    "the capture": (tracefuse.backend, "CompiledGraph"),
    "the kernels": (Variant, "build"),
    "the text": (halves, "functions_source"),
    "the module": (halves, "load"),
    "the machine code": (halves, "preload"),
    "the halves as graphs": (tracefuse.backend, "as_graphs"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*STAGES[stage], broken)
    said = said_while_it_trains_as_eager()
    assert said
    assert all("ValueError: injected" in one and "defect of tracefuse" in one for one in said), said
    assert all(__file__ in one for one in said), "the line that raised"


@pytest.mark.parametrize("raised", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("stage", ["the names of dynamo's graph", "the trace", "the machine code"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_running_out_of_memory_leaves_and_is_no_defect(
    stage: str, raised: type[Exception], is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object, **__: object) -> Any:
        raise raised("injected")

    monkeypatch.setattr(*STAGES[stage], out_of_memory)
    run = torch.compile(Net(), backend=backend)
    with torch.set_grad_enabled(is_trained), pytest.raises((raised, BackendCompilerFailed), match="injected"):
        run(torch.randn(5, 6))


def kernels_of(module: ModuleType) -> list[str]:
    return [name for name in vars(module) if name.startswith("fused_") and f"{name}_reference" in vars(module)]


SAYING: dict[str, tuple[Callable[[ModuleType], list[str]], dict[str, Any]]] = {
    "a glob that no graph has": (lambda _: [], {"options": {"freeze": ["nope.*"]}}),
    "a forward that fails": (lambda _: ["forward"], {}),
    "a backward that fails": (lambda _: ["backward"], {}),
    "kernels that fail": (kernels_of, {}),
    "no CUDA graph": (lambda _: [], {"mode": "reduce-overhead"}),
}


@pytest.mark.parametrize("name", SAYING)
def test_a_filter_that_makes_errors_of_warnings_ends_no_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, given = SAYING[name]
    load = halves.load

    def spoilt(source: str) -> ModuleType:
        module = load(source)
        for one in chosen(module):
            monkeypatch.setattr(module, one, broken)
        return module

    monkeypatch.setattr(halves, "load", spoilt)
    assert any("this model" in one for one in said_while_it_trains_as_eager(**given))
    torch._dynamo.reset()
    model, x = Net(), torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*this model")
        torch.compile(model, backend=backend, **given)(x).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("stage", ["the names of dynamo's graph", "the trace"])
def test_a_filter_that_makes_errors_of_warnings_ends_no_run(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*STAGES[stage], broken)
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs op by op")
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))


def test_the_view_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracefuse.backend, "joint_trace", broken)
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="runs op by op"):
        torch.compile(model, backend=backend)(torch.ones(2, 3)).sum().backward()
    with pytest.raises(CaptureError, match="ValueError: injected"):
        tracefuse.explore(model)


# --- while it runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    """The modules that are generated from now on."""
    made, load = [], halves.load

    def loading(source: str) -> ModuleType:
        made.append(load(source))
        return made[-1]

    monkeypatch.setattr(halves, "load", loading)
    return made


@pytest.mark.parametrize("dynamic", [False, True])
def test_autograds_own_compiling_that_fails(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that vary are compiled for while the model runs."""
    monkeypatch.setattr(tracefuse.backend, "aot_autograd", lambda **_: broken)
    said = said_while_it_trains_as_eager(dynamic=dynamic)
    assert said
    assert all("op by op" in one and "injected" in one for one in said)


@pytest.mark.parametrize(
    "wrap", [lambda net: net, lambda net: nn.Sequential(net, nn.ReLU())], ids=["alone", "in a net"]
)
def test_nested_tensors_run_op_by_op(wrap: Callable[[nn.Module], nn.Module]) -> None:
    linear, sequences = nn.Linear(8, 8), [torch.randn(length, 8) for length in (3, 5)]
    model = wrap(linear)

    def trained(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        given = torch.nested.nested_tensor(sequences, layout=torch.jagged)
        loss = torch.nested.to_padded_tensor(run(given), 0.0).square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    with pytest.warns(UserWarning, match="nested tensors, whose lengths are data: pad them"):
        ours = trained(torch.compile(model, backend=backend))
    torch.testing.assert_close(ours, trained(model), rtol=0, atol=0)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_half_that_fails_runs_op_by_op(
    half: str, generated: list[ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = halves.load

    def spoilt(source: str) -> ModuleType:
        module = load(source)
        monkeypatch.setattr(module, half, broken)  # equal texts share a module
        return module

    monkeypatch.setattr(halves, "load", spoilt)
    said = said_while_it_trains_as_eager()
    assert len(generated) == 2, "of training and of evaluation"
    assert [one.partition(":")[0] for one in said] == [
        f"the {half} of a graph of this model runs op by op, as the generated one failed"
    ] * (2 if half == "forward" else 1)


@pytest.mark.parametrize("at", range(4))
def test_a_backward_that_fails_on_the_way_goes_on_from_there(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has emptied the list that it was given, and freed some of what was in it."""
    load = halves.load

    def spoilt(source: str) -> ModuleType:
        head, found, body = source.partition("def backward(")
        lines = body.splitlines(keepends=True)
        ops = [number for number, line in enumerate(lines) if line.startswith("    ") and " = " in line][1:]
        if ops:
            lines.insert(ops[at * (len(ops) - 1) // 3], '    raise ValueError("injected")\n')
        return load("".join([head, found, *lines]))

    monkeypatch.setattr(halves, "load", spoilt)
    said = said_while_it_trains_as_eager(Net)
    assert [one.partition(":")[0] for one in said] == [
        "the backward of a graph of this model runs op by op, as the generated one failed"
    ]


def test_a_kernel_that_fails_runs_as_its_ops(generated: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    load, spoilt = halves.load, list[str]()

    def spoiling(source: str) -> ModuleType:
        module = load(source)
        for name in (names := kernels_of(module)):
            monkeypatch.setattr(module, name, broken)
        spoilt.extend(names)
        return module

    monkeypatch.setattr(halves, "load", spoiling)
    said = said_while_it_trains_as_eager()
    assert len(said) == len(spoilt) > 1
    assert all(f"the kernel {name} of this model runs as ATen ops" in "".join(said) for name in spoilt)
    kernels = [value for module in generated for name, value in vars(module).items() if name in spoilt]
    assert all(isinstance(one, Kernel) for one in kernels), "from then on"


def test_a_kernel_that_works_costs_nothing_more(generated: list[ModuleType]) -> None:
    assert said_while_it_trains_as_eager() == []
    names = [(m, name) for m in generated for name in vars(m) if f"{name}_reference" in vars(m)]
    assert names
    assert {vars(module)[name].__name__ for module, name in names} == {name for _, name in names}


def test_nor_does_one_that_two_programs_share() -> None:
    """A module is known by its text: one that another program has loaded, and did not run, is loaded again."""
    module, kernel = ModuleType("shared"), kernel_of(torch.sin, torch.ones(3))[0]

    def launch(x: Tensor) -> Tensor:
        return x.sin()

    setattr(module, kernel.name, launch)
    for _ in range(2):
        halves._try_first(module, kernel)
    vars(module)[kernel.name](torch.ones(3))
    assert vars(module)[kernel.name] is launch


def test_the_programs_own_error_leaves_as_in_eager() -> None:
    table = nn.Embedding(3, 4)
    run = torch.compile(table, backend=backend)
    run(torch.tensor([0, 1])).sum().backward()
    wrong = torch.tensor([0, 7])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(IndexError, match="index out of range"):
            run(wrong)
    assert not [one for one in said if "this model" in str(one.message)]


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_running_out_of_memory_leaves(half: str, generated: list[ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    run = torch.compile(nn.Linear(3, 3), backend=backend)
    run(torch.ones(2, 3)).sum().backward()

    def out_of_memory(*_: Tensor) -> Any:
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(generated[0], half, out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        run(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("method", ["__init__", "forward", "backward"])
def test_a_cuda_graph_that_fails(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_halves, "check_replayable", lambda trace, overwrites: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphed_halves, "Graphs", type("Broken", (FakeGraphs,), {method: broken}))
    said = said_while_it_trains_as_eager(mode="reduce-overhead")
    assert said
    assert all("runs without CUDA graphs: ValueError: injected" in one for one in said)


# --- globs of several graphs ------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(x))


@pytest.mark.parametrize(
    "options", [{"recompute": ["first"]}, {"recompute": ["second"]}, {"save": ["second"], "recompute": ["first"]}]
)
def test_a_glob_holds_for_the_graph_that_has_it(options: dict[str, Any]) -> None:
    assert said_while_it_trains_as_eager(Broken, options=options) == []


@pytest.mark.parametrize("frozen", ["first", "second"])
def test_what_one_of_several_graphs_freezes(frozen: str) -> None:
    model = Broken()
    run = torch.compile(model, backend=backend, options={"freeze": [f"{frozen}.*"]})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(torch.randn(5, 6)).sum().backward()
        with torch.no_grad():
            run(torch.randn(5, 6))
    assert not [one for one in said if "this model" in str(one.message)]
    assert {name for name, p in model.named_parameters() if p.grad is None} == {f"{frozen}.weight", f"{frozen}.bias"}


def test_a_glob_that_no_graph_has_is_told_once() -> None:
    options = {"freeze": ["first.bias", "frist.*"], "save": ["second"], "recompute": ["nothing"]}
    model = Broken()
    run = torch.compile(model, backend=backend, options=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            run(torch.randn(5, 6)).sum().backward()
    said = [str(one.message).removeprefix("no graph of this model has it: ") for one in caught]
    assert [one.split(" ")[0] for one in said] == ["'frist.*'", '"nothing"']
    assert model.first.bias.grad is None


@pytest.mark.parametrize("is_evaluated_first", [True, False])
def test_a_glob_that_no_graph_has_is_told_where_one_evaluates(is_evaluated_first: bool) -> None:
    """An evaluation freezes and saves nothing, and so its graph finds no glob."""
    model, x = Broken(), torch.randn(5, 6)
    run = torch.compile(model, backend=backend, options={"freeze": ["frist.*"], "recompute": ["nothing"]})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if is_evaluated_first:
            with torch.no_grad():
                run(x)
        out = run(x)
        with torch.no_grad():
            run(x)
        out.sum().backward()
    assert sum("no graph of this model has it" in str(one.message) for one in said) == 2


def test_a_glob_that_only_an_evaluation_meets_is_not_told() -> None:
    """A teacher's graph under no_grad has its parameters, though there is nothing to freeze in it."""
    teacher, pupil, x = nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6), torch.randn(5, 6)
    both = nn.ModuleDict({"teacher": teacher, "pupil": pupil})

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = both["teacher"](x)
        torch._dynamo.graph_break()
        return (both["pupil"](x) - wanted).square().mean()

    run = torch.compile(step, backend=backend, options={"freeze": ["*teacher*", "*nobody*"]})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(x).backward()
    told = [str(one.message) for one in said if "no graph of this model has it" in str(one.message)]
    assert len(told) == 1
    assert "nobody" in told[0]
