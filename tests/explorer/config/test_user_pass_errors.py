"""What cannot be a pass of the user's own is refused; what such a pass does wrong is said in its row, and harms nobody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import programs
import pytest
import torch
from own_passes import aten, capture, made, nothing

import tracefuse
from tracefuse.config import registry
from tracefuse.config.configuration import OPTIONS, Config
from tracefuse.config.names import OFF_BY_DEFAULT
from tracefuse.errors import PassError, RegistrationError
from tracefuse.optimizers.errors import PassDefect, UnknownValue
from tracefuse.optimizers.passes import Decision
from tracefuse.widgets.payload.program import payload


@pytest.fixture(autouse=True)
def _nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


# --- what cannot be a pass --------------------------------------------------------------------------------------------


class Plain:
    name = "plain"
    run = nothing


@dataclass
class Thawed:
    name: ClassVar[str] = "thawed"
    run = nothing


@dataclass(frozen=True)
class Required:
    level: int
    name: ClassVar[str] = "required"
    run = nothing


@dataclass(frozen=True)
class Listed:
    levels: Any = ()
    name: ClassVar[str] = "listed"
    run = nothing

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", [])


@dataclass(frozen=True)
class NamedByField:
    name: str = "field"
    run = nothing


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (made(nothing, "cat"), "'cat' is taken by tracefuse: choose another"),
        (made(nothing, "save"), "'save' is taken"),
        (made(nothing, "my pass"), "is no Python identifier: choose one like my_pass"),
        (made(nothing, "class"), "is no Python identifier"),
        (made(lambda self, trace: trace), "no method run"),
        (made(None), "no method run"),
        (made(nothing, ""), "is no Python identifier"),
        (made(nothing, None), "has no name of its own"),
        (Plain, "is no frozen dataclass: write @dataclass"),
        (Thawed, "is no frozen dataclass: write @dataclass"),
        (Required, "level has no default: give it one"),
        (Listed, "unhashable type: 'list'.*frozen default"),
        (NamedByField, "has no name of its own: write `name: ClassVar"),
        (made(nothing)(), "is no class: register the class itself"),
    ],
)
def test_what_can_be_no_pass_is_refused_with_the_remedy(wrong: Any, message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        tracefuse.register(wrong)
    assert registry.registered() == ()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"before": "cat", "after": "cat"}, "not both"),
        ({"before": "fuze"}, "did you mean fuse. choose from simplify, freeze"),
    ],
)
def test_a_place_that_is_none_is_refused(place: dict[str, str], message: str) -> None:
    with pytest.raises(RegistrationError, match=message):
        tracefuse.register(**place)(made(nothing))


def test_no_name_is_free_that_an_option_has() -> None:
    assert set(OPTIONS) | {"own"} == set(registry.RESERVED)
    assert list(registry.BUILT_IN) == list(Config().names)


# --- what a pass can do wrong -----------------------------------------------------------------------------------------


def edits_its_input(self: Any, trace: Any, decide: Any) -> Any:
    node = trace.ops[0]
    node.args = (node.args[0], *node.args[1:])[:1]
    trace.ops[-1].name = "renamed"
    return trace.copy()


def returns_what_it_edited(self: Any, trace: Any, decide: Any) -> Any:
    trace.ops[-1].meta["val"] = trace.ops[-1].meta["val"].clone()
    return trace


def forward_after_backward(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    new.ops[0].meta["phase"] = "backward"
    return new


def untyped(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    with new.graph.inserting_before(new.ops[-1]):
        new.graph.call_function(aten.neg.default, (new.ops[0],))
    return new


def python_function(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    new.ops[0].target = torch.sin
    return new


def double_precision(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    node = new.returned[0]
    node.meta["val"] = node.meta["val"].float()
    return new


def drops_the_result(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    return new.with_outputs([p for p in zip(new.outputs, new.returned, strict=True) if p[0].kind != "result"])


def raises(self: Any, trace: Any, decide: Any) -> Any:
    decide(Decision("x", "look", "before it went wrong"))
    return trace.copy().node("nowhere")


def turns_results_around(self: Any, trace: Any, decide: Any) -> Any:
    new = trace.copy()
    return new.with_outputs(list(zip(new.outputs, new.returned, strict=True))[::-1])


def tells_a_text(self: Any, trace: Any, decide: Any) -> Any:
    decide("done")
    return trace.copy()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (turns_results_around, "it returns results in another order, or twice"),
        (tells_a_text, "it told 'done': tell Decision(value, action, reason)"),
        (edits_its_input, "it edited the trace that it was given: edit trace.copy() and return that"),
        (returns_what_it_edited, "it edited the trace that it was given"),
        (forward_after_backward, "it returned a broken trace: "),
        (untyped, "has no FakeTensor in meta['val']"),
        (python_function, "which is no ATen operator: call overloads of torch.ops.aten"),
        (double_precision, "was f64[] with strides () on cpu and is f32[]"),
        (drops_the_result, "is gone: only gradients may be dropped"),
        (raises, "KeyError: 'nowhere' (line "),
        (lambda self, trace, decide: None, "run returned NoneType, no Trace: return the copy that it edited"),
    ],
)
def test_what_goes_wrong_is_said_in_its_row_and_harms_nobody(run: Callable[..., Any], message: str) -> None:
    tracefuse.register(after="simplify")(made(run))
    c = capture()
    before = c.trace.code
    shown = payload(c.variant(Config.of(fuse=False)))
    (row,) = [p for p in shown["passes"] if p["error"]]
    assert row["name"] == "mine"
    assert message in row["error"]
    assert row["error"].endswith("Mend Mine.run and register Mine again, or switch mine off")
    assert c.trace.code == before
    assert c.variant(Config.of(fuse=False)).trace.code == c.optimize(fuse=False, mine=False).trace.code
    with pytest.raises(PassError, match="mine: ") as caught:
        c.optimize(fuse=False)
    assert isinstance(caught.value.__cause__, PassDefect)
    assert str(caught.value).endswith('or switch mine off; tracefuse.unregister("mine") takes it away')


def raises_on_purpose(self: Any, trace: Any, decide: Any) -> Any:
    raise UnknownValue("there is no h.9: name another module.")


def test_a_pass_that_fails_can_be_unregistered() -> None:
    tracefuse.register(made(raises_on_purpose))
    c = capture()
    with pytest.raises(PassError, match=r'mine: there is no h.9: name another module; tracefuse.unregister\("mine"\)'):
        c.optimize(fuse=False)
    tracefuse.unregister("mine")
    steps = [step.name for step in c.optimize(fuse=False).passes]
    assert steps == [
        "simplify",
        "freeze",
        "merge_matmuls",
        "cat",
        "linear_cross_entropy",
        "channels_last",
        "pad",
        "remat",
        "optimizer_step",
    ]


@pytest.mark.parametrize("name", ["gpt", "rope", "conv_batchnorm"])
@pytest.mark.parametrize("place", [*registry.BUILT_IN, None])
def test_a_pass_that_does_nothing_changes_nothing_anywhere(name: str, place: str | None) -> None:
    program = tracefuse.capture(programs.PROGRAMS[name](torch.float64).run)
    plain = program.optimize().trace.code
    tracefuse.register(**({"before": place} if place else {"after": "fuse"}))(made(nothing))
    variant = program.optimize()
    assert variant.trace.code == plain
    assert len(variant.passes) == len(set(registry.BUILT_IN) - set(OFF_BY_DEFAULT)) + 1


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_memory_that_is_short_leaves_a_pass_of_ones_own_too(error: type[Exception]) -> None:
    def run(self: Any, trace: Any, decide: Any) -> Any:
        raise error("injected")

    tracefuse.register(made(run))
    with pytest.raises(error, match="injected"):
        capture().optimize()
