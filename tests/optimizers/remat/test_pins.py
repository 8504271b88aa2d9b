"""Pins: a cut forced, a cut forbidden, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from rematerialised import leaf, program, remat, saved, simple

from tracefuse.optimizers.errors import PinConflict, UnknownValue
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import is_random
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.trace import phase

F = torch.nn.functional


def test_save_forces_a_cut_and_recompute_forbids_one() -> None:
    x, w, v = leaf(8, 8), leaf(8, 32), leaf(32, 8)
    trace = simple(lambda: F.gelu(x @ w) @ v)
    assert saved(remat(trace, save=("gelu",))[0]) == {"mm", "gelu"}
    after, decisions = remat(trace, recompute=("mm", "gelu"))
    assert saved(after) == set()
    assert 'pinned by recompute="mm"' in next(d.reason for d in decisions if d.value == "mm")


def test_a_module_is_a_pin_for_all_values_below_it() -> None:
    trace = program("gpt").trace
    after, _ = remat(trace, recompute=("h.0",))
    kept = {n.name: n for n in trace.ops if n.name in saved(after)}
    inside = [n for n in kept.values() if n.meta["custom"]["tracefuse"].module.startswith("h.0.")]
    assert inside
    assert all(is_random(n) for n in inside), "only dropout's draws are kept"
    assert saved_bytes(after) < saved_bytes(remat(trace)[0])


def test_a_name_beats_a_glob() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    trace = simple(lambda: (x @ w).tanh().sin())
    assert "tanh" in saved(remat(trace, recompute=("*",), save=("tanh",))[0])


def test_a_view_pins_its_base() -> None:
    x, w = leaf(4, 6), leaf(6, 4)
    trace = simple(lambda: (x @ w).t().sin().exp())
    assert "mm" in saved(remat(trace, save=("t",))[0])


def test_unknown_and_impossible_pins_say_what_to_do() -> None:
    trace = program("gpt").trace
    draws = next(n.name for n in trace.ops if is_random(n) and "attention" not in n.name)
    backward = next(n.name for n in trace.ops if phase(n) == "backward")
    with pytest.raises(UnknownValue, match=r"matches no forward value.*for example"):
        remat(trace, save=("no_such_value",))
    with pytest.raises(UnknownValue, match="backward values cannot be pinned"):
        remat(trace, save=(backward,))
    with pytest.raises(PinConflict, match=r"draws from a random generator.*Drop the pin"):
        remat(trace, recompute=(draws,))
    with pytest.raises(PinConflict, match="is an input"):
        remat(trace, recompute=(trace.placeholders[0].name,))
    with pytest.raises(PinConflict, match="pinned twice"):
        remat(trace, save=("gelu*",), recompute=("gelu*",))


def test_the_remedy_of_a_refused_pin_names_another_value_and_works_when_followed() -> None:
    x, w = leaf(3, 4), leaf(6, 4)
    trace = simple(lambda: torch.tanh(x @ w.t()))
    for refused in ("t", trace.placeholders[0].name):
        with pytest.raises(PinConflict, match=r"is an input.*pin what is computed from it: mm\."):
            remat(trace, recompute=(refused,))
    assert "mm" not in saved(remat(trace, recompute=("mm", "tanh"))[0])


def test_a_refused_pin_of_which_nothing_can_be_computed_is_to_be_dropped() -> None:
    x, chance = leaf(3, 4), torch.rand(3, 4)
    trace = simple(lambda: torch.bernoulli(chance) * x)
    (drawn,) = [n for n in trace.ops if is_random(n)]
    with pytest.raises(PinConflict, match=r"there anyway\. Drop the pin\.$"):
        remat(trace, recompute=(drawn.all_input_nodes[0].name,))


@pytest.mark.parametrize(
    "bad",
    [{"producer_input_weight": -1}, {"distance_base": 0}, {"longest_chain": 0}, {"unmaterialised_factor": math.nan}],
)
def test_refuses_options_that_are_no_factors(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pass"):
        Remat(**bad)  # type: ignore[arg-type]
