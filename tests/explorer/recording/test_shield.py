"""Whatever fails in the recorder, the program goes on as without it, with one warning, and the capture keeps the traceback."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import pkgutil
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse import recording, steps
from tracefuse.errors import CaptureError, SyncError
from tracefuse.recording.recorder import Recorder

# The lines of the shield itself, by what would fail in them.
SHIELD = {
    "Shield.note", "Shield.survive", "Shield.survive_all", "Shield._fail", "_let_pass",
    "Recorder.__init__", "Recorder.__enter__", "Recorder.__exit__", "Recorder.__torch_dispatch__", "Recorder._decomposed",
    "_run_conjugating",
    "Run.__init__", "Run.start", "Run.stop", "Run.note_end",
    "Shield.__init__", "ModuleStack.__init__", "UpdateHooks.__init__", "WeakMap.__init__",
    "Thaw.__init__", "Thaw.__enter__", "Thaw.__exit__",
    "Recorder.enter_stack", "Recorder.detach", "Recorder._taking", "are_notes_taken",
    "BackwardHook._run", "OptimizerHook._starts", "OptimizerHook._ended",
    "LaunchHook._wrap.<locals>.tell_and_run", "Methods._wrapped.<locals>.read", "_collect_all", "SetAside.tell_of_collection",
    "_Thawed.take", "WeakMap.__del__", "shielded.<locals>.noted",
    "assert_no_sync", "_NoSync.__init__", "_NoSync.__torch_dispatch__", "_sentence", "_raised_at", "hide_frames", "without",
    "_module", "is_recorder", "StepRecorder.__torch_dispatch__", "StepRecorder.enter_stack",
}  # fmt: skip


def functions(package: types.ModuleType) -> Iterator[types.FunctionType]:
    """Every function and method of a package."""
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for thing in vars(module).values():
            if inspect.isclass(thing) and thing.__module__ == module.__name__:
                members = (getattr(m, "fget", None) or getattr(m, "__func__", m) for m in vars(thing).values())
                yield from (m for m in map(inspect.unwrap, filter(callable, members)) if is_of(m, module))
            elif is_of(inspect.unwrap(thing) if callable(thing) else thing, module):
                yield inspect.unwrap(thing)


def is_of(thing: Any, module: types.ModuleType) -> bool:
    return inspect.isfunction(thing) and thing.__code__.co_filename == module.__file__


IN_RECORDING = {f.__qualname__: f for f in functions(recording) if f.__qualname__ not in SHIELD}
IN_STEPS = {f.__qualname__: f for f in functions(steps) if f.__qualname__ not in SHIELD}
INJECTED = IN_RECORDING | IN_STEPS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).relu())
        hidden = checkpoint(lambda h: nn.functional.dropout(h, 0.5), hidden, use_reentrant=False)
        return self.last(hidden)


def run(data: Tensor) -> tuple[list[Any], list[Tensor | None]]:
    """A step with a module, a checkpoint, a draw, views, writes, reads, storages and two backwards."""
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    buffer = torch.zeros(3, 2)
    with torch.no_grad():
        buffer[0].add_(data[0, :2])
        buffer.t_()
        data[0].mul_(2)
        data.unsqueeze(0).untyped_storage().copy_(data.untyped_storage())
    scratch = torch.empty(8)
    scratch.untyped_storage().resize_(0)
    shared = torch.empty(0).set_(torch.ones(4).untyped_storage())
    loss = net(data).square().mean() + buffer.sum() + shared.sum()
    loss.backward(retain_graph=True)
    (taken,) = torch.autograd.grad(loss, [net.last.weight])
    gc.collect(1)  # the young: a full one would visit all tests, and tells a recorder no more
    words = [loss.item(), repr(taken), taken.tolist(), bool(loss > 0)]
    optimizer.step()
    return words, [net.first.weight, *(p.grad for p in net.parameters())]


def fresh() -> Tensor:
    return torch.arange(12.0).reshape(3, 4)


def same(mine: Any, theirs: Any) -> bool:
    pairs = zip(mine[1], theirs[1], strict=True)
    return mine[0] == theirs[0] and all((a is b is None) or torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def failing(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """One function raises instead of running, or, if it undoes something, after it ran; it tells that it was called."""
    function, called = INJECTED[request.param], []
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    undoes = function.__name__ in ("leave", "_take_out", "detach", "stop", "__exit__", "undo", "_take_off")
    code, defaults = function.__code__, (function.__defaults__, function.__kwdefaults__)

    def fail(*args: Any, **kwargs: Any) -> Any:
        called.append("")
        if undoes:
            original(*args, **kwargs)
        raise RuntimeError("injected")

    function.__globals__[f"_fail_{id(called)}"] = fail
    names = code.co_freevars
    source = f"def raising(*args, **kwargs):\n    return _fail_{id(called)}(*args, **kwargs)"
    if names:
        source = (
            f"def around():\n    {'; '.join(f'{n} = None' for n in names)}\n    def raising(*args, **kwargs):\n        "
        )
        source += f"({', '.join(names)},)\n        return _fail_{id(called)}(*args, **kwargs)\n    return raising"
    space: dict[str, Any] = {}
    exec(source, space)
    function.__code__ = (space["around"]() if names else space["raising"]).__code__
    yield called
    function.__code__ = code
    function.__defaults__, function.__kwdefaults__ = defaults
    del function.__globals__[f"_fail_{id(called)}"]


@functools.cache
def expected() -> Any:
    return run(fresh())


def loop() -> tuple[list[Any], list[Tensor | None]]:
    """Some steps with two optimizers, an average of the weights and a mode that is entered between."""
    torch.manual_seed(3)
    nets = [nn.Linear(4, 4), nn.Linear(4, 2)]
    average = nets[0].weight.detach().clone()
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in nets]
    words: list[Any] = []
    for _ in range(5):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            loss = net(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
        average.mul_(0.5).add_(nets[0].weight.detach())
        words.append(loss.item())
    return words, [average, *(p for net in nets for p in net.parameters())]


@pytest.mark.parametrize("way", ["a block", "a step"])
@pytest.mark.parametrize("failing", IN_STEPS, indirect=True)
def test_a_loop_runs_as_without_the_watch_of_its_steps_that_fails(
    failing: list[str], way: str, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["failing"]
    compares = INJECTED[name].__module__.endswith((".varying", ".carried")) or name in (
        "StepOp.is_like",
        "StepOp.reads",
        "StepWatch._note_rates",
        "_rate",
    )
    alone = loop()
    failing.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with tracefuse.capture() if way == "a block" else tracefuse.capture_step(n=3) as c:
            found = loop()
    assert same(found, alone)
    ours = [w for w in told if "your program goes on without it" in str(w.message)]
    assert len(ours) == bool(failing)
    if failing and compares:
        assert c.steps.remarks == ("steps could not be compared: RuntimeError: injected",)
        assert c.trace.op_count > 10
    elif failing:
        with pytest.raises(CaptureError, match="injected"):
            c.trace  # noqa: B018


@pytest.mark.parametrize("failing", IN_RECORDING, indirect=True)
def test_a_program_runs_as_without_a_recorder_that_fails(failing: list[str], request: pytest.FixtureRequest) -> None:
    train_all = "thaw" in INJECTED[request.node.callspec.params["failing"]].__module__
    expected()
    failing.clear()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data = fresh()
        with tracefuse.capture(train_all=train_all) as c:
            found = run(data)
    assert same(found, expected())
    ours = [w for w in told if "your program goes on without it" in str(w.message)]
    assert len(ours) == bool(failing)
    if failing:
        with pytest.raises(CaptureError, match="injected"):
            c.trace  # noqa: B018
        assert "injected" in repr(c)


def test_the_functions_are_found() -> None:
    assert len(IN_RECORDING) > 100
    assert len(IN_STEPS) > 40
    assert {
        "Recorder._noted",
        "Attached.enter",
        "ModuleStack._enter",
        "roles_of",
        "Left.__init__",
    } <= INJECTED.keys()


def ops() -> int:
    with tracefuse.capture() as c:
        run(fresh())
    return len(c.run.recorder.recording.calls)


@pytest.mark.parametrize("when", ["before", "after"])
def test_each_op_may_fail_to_be_noted(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_noted" if when == "before" else "_note_results"
    note: Callable[..., Any] = getattr(Recorder, name)
    for position in range(0, ops(), 3):
        left = [position]

        def fail_at(self: Recorder, *args: Any, left: list[int] = left) -> Any:
            if left[0] == 0:
                raise KeyError("injected")
            left[0] -= 1
            return note(self, *args)

        monkeypatch.setattr(Recorder, name, fail_at)
        with pytest.warns(UserWarning, match="goes on without it") as told, tracefuse.capture() as c:
            found = run(fresh())
        assert same(found, expected())
        assert len(told) == 1
        with pytest.raises(CaptureError, match="injected"):
            c.check()


def test_what_the_program_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), tracefuse.capture():
        torch.ones(2) / (1 // 0)
    with pytest.raises(RuntimeError, match="size of tensor"), tracefuse.capture():
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError, SyncError])
def test_what_a_program_must_hear_of_is_raised(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise error("full")

    monkeypatch.setattr(Recorder, "_noted", fail)
    with pytest.raises(error, match="full"), tracefuse.capture():
        torch.ones(2)


def test_a_watch_for_reads_that_fails_lets_the_step_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr("tracefuse.recording.no_sync.read_by", fail)
    with pytest.warns(UserWarning, match="assert_no_sync stopped"), tracefuse.assert_no_sync(on_cpu=True):
        assert torch.ones(2).sum().item() == 2
