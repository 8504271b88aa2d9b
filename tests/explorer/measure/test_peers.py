"""Peers: other ways to run the captured step, beside it in the same rounds, each warmed up, none able to stop the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tracefuse
from tracefuse.cli.flags import DEMO_OPTIONS, MAGIC_OPTIONS
from tracefuse.demo import GPT, batch
from tracefuse.errors import Cancelled, OptionError
from tracefuse.execution.program import Replays
from tracefuse.measure.peer_names import PEERS
from tracefuse.measure.peers import Peers, check_names, forward_function, stand_in
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.variant import Variant

SMALL = {"layers": 1, "width": 32, "heads": 2, "vocab": 61, "length": 16}


def made(dropout: float = 0.0) -> tuple[Variant, Callable[[], Any]]:
    torch.manual_seed(0)
    model, data = GPT(**SMALL, dropout=dropout), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(*data).backward()).optimize(), lambda: model(*data)


@pytest.fixture(scope="module")
def variant() -> Variant:
    return made()[0]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, dict[str, Any]]]:
    """What torch.compile was asked for; it hands back what it is given, at once."""
    asked: list[tuple[str | None, dict[str, Any]]] = []

    def compile(function: Callable[..., Any], mode: str | None = None, **given: Any) -> Callable[..., Any]:
        asked.append((mode, given))
        if mode == "max-autotune":
            raise RuntimeError("\nno template fits\nlong story")
        return function

    monkeypatch.setattr(torch, "compile", compile)
    return asked


def test_peers_are_timed_in_the_same_rounds_and_their_numbers_compared(variant: Variant, compiled) -> None:
    timing = variant.measure(budget_s=0.3, peers=("eager", "torch.compile", "reduce-overhead"))
    names = ["captured", "optimised", "eager", "torch.compile", "torch.compile reduce-overhead"]
    assert [p.name for p in timing.programs] == names
    assert compiled == [(None, {"fullgraph": True, "dynamic": False}), ("reduce-overhead", compiled[0][1])]
    assert {p.times_ms["step"].samples for p in timing.programs} == {timing.rounds}
    for name in names[2:]:
        difference = timing.program(name).difference
        assert max(difference.results, difference.gradients) < 1e-5
    assert any(note.startswith("torch.compile: of this program") for note in timing.notes)
    assert [row.program for row in timing.rows if row.label == "step"] == names[1:]


def test_one_that_does_not_compile_is_a_row_with_its_reason(variant: Variant, compiled) -> None:
    timing = variant.measure(budget_s=0.2, peers=["max-autotune", "eager"])
    assert timing.failed == {"torch.compile max-autotune": "RuntimeError: no template fits"}
    assert [p.name for p in timing.programs] == ["captured", "optimised", "eager"]
    assert "torch.compile max-autotune did not run: RuntimeError: no template fits" in str(timing)
    assert timing.to_json()["failed"] == timing.failed


def test_the_first_run_is_the_one_that_compiled_and_torchs_graphs_have_no_peak_that_the_allocator_knows() -> None:
    names = ("captured", "torch.compile", "torch.compile reduce-overhead")
    one = {"step": estimate([1.0] * 8)}
    programs = tuple(ProgramTiming(name, one, one, cold_ms=1.0, peak_nbytes=100) for name in names)
    timing = Timing("measured on a device", programs, rounds=8, inner=1, stopped="budget of 1 s", notes=("before",))
    told = Peers(first_ms={"torch.compile": 7500.0}, failed={"eager": "no"}, notes=("after",)).told(timing)
    assert [(p.cold_ms, p.peak_nbytes) for p in told.programs] == [(1.0, 100), (7500.0, 100), (1.0, None)]
    assert (told.failed, told.notes) == ({"eager": "no"}, ("before", "after"))


def test_what_draws_other_numbers_is_not_compared_and_says_so(compiled) -> None:
    variant, _ = made(dropout=0.1)
    timing = variant.measure(budget_s=0.2, peers=("eager", "torch.compile"))
    assert timing.program("eager").difference.gradients < 1e-5, "the same masks, from the same generator's state"
    assert timing.program("torch.compile").difference is None
    assert "torch.compile: draws other random numbers, so that differences are not compared" in timing.notes


def test_ones_own_callables_run_forward_and_are_differentiated() -> None:
    variant, step = made()
    fixed = Replays(lambda: ((torch.ones(1),),), compared=False)
    timing = variant.measure(budget_s=0.2, peers={"mine": step, "fixed": fixed, "broken": lambda: 1 / 0})
    assert set(timing.program("mine").times_ms) == {"forward", "backward", "step"}
    assert set(timing.program("fixed").times_ms) == {"forward", "step"}
    assert timing.failed == {"broken": "ZeroDivisionError: division by zero"}
    assert "mine, fixed: results and gradients are not compared" in timing.notes


def test_the_forward_is_a_function_of_the_inputs_that_saves_nothing(variant: Variant) -> None:
    function = forward_function(variant.baseline)
    (loss,) = function(*variant.capture.example_inputs[: len(variant.baseline.forward.inputs)])
    expected = variant.baseline.compile()()
    assert torch.equal(loss, expected.detach())


class Step(torch.autograd.Function):
    """A step whose gradient is passed through, which its forward does not tell."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_gradient_that_the_forward_does_not_tell_is_a_reason() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    variant = tracefuse.capture(lambda: (Step.apply(x) * 3 + y).sum().backward()).optimize()
    timing = variant.measure(budget_s=0.2, peers=["eager"])
    assert "autograd finds no gradient of" in timing.failed["eager"]


@pytest.mark.parametrize("asked", ["fast", ["torch.compile fast"], {"captured": lambda: None}, {"mine": 3}])
def test_what_is_no_peer_is_refused_before_anything_is_compiled(variant: Variant, asked, compiled) -> None:
    with pytest.raises(OptionError, match=r"no peer|cannot be called"):
        variant.measure(peers=asked)
    assert compiled == []


def test_a_name_may_be_short_and_is_meant_once() -> None:
    assert check_names("eager") == ["eager"]
    assert check_names(["max-autotune", "torch.compile max-autotune"]) == ["torch.compile max-autotune"]
    assert all(check_names([name]) == [name] for name in PEERS)


def test_a_cancel_comes_before_the_next_one_is_compiled(variant: Variant, compiled) -> None:
    texts: list[str] = []

    def is_cancelled() -> bool:
        return any("torch.compile" in text for text in texts)

    with pytest.raises(Cancelled):
        variant.measure(
            peers=["torch.compile", "eager"], progress=lambda _, text: texts.append(text), is_cancelled=is_cancelled
        )
    assert "warming up eager" not in texts


def test_it_leaves_the_generator_as_it_was(compiled) -> None:
    variant, _ = made(dropout=0.1)
    state = torch.get_rng_state()
    variant.measure(budget_s=0.1, peers=["eager", "torch.compile"])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_magic_and_the_command_line_have_one_option() -> None:
    (option,) = [o for o in MAGIC_OPTIONS if o.name == "peer"]
    assert option in DEMO_OPTIONS
    assert option.kind == "list"


@pytest.mark.slow
def test_inductor_on_the_captured_forward_gives_the_captured_gradients(variant: Variant) -> None:
    program = stand_in(variant, "torch.compile")
    timing = variant.measure(budget_s=0.5, peers={"compiled": program})
    assert timing.failed == {}
    assert timing.program("compiled").difference.gradients < 1e-4
