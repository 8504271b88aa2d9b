"""torch's own operator database: one sample of every second operator, and of every second in-place variant, is captured,
replayed bit by bit and put through every pass. `tests/bench/trust/op_db.py` does so with all of them, on any device and dtype.
"""

from __future__ import annotations

import pytest
import torch
from op_samples import CLOSE, EXACT, NO_PROGRAM, REFUSED, UNDEFINED, UNINITIALISED, WRONG, Operator, check, operators

import tracefuse

SHARDS = 3

# What is not exact, and why. An operator that becomes exact fails the test until it is taken off the list.
EXCEPTIONS = {
    **dict.fromkeys(UNINITIALISED, UNDEFINED),
    **dict.fromkeys(("item", "allclose", "equal", "broadcast_shapes"), NO_PROGRAM),  # they return Python values
    **dict.fromkeys(("sparse_sampled_addmm", "sparse_mm_reduce", "to_sparse"), REFUSED),  # a trace holds dense tensors
    "chalf": UNDEFINED,  # eager cannot sum what it returns
}
# Not written for the CPU, or not differentiable in place: eager raises, which is nothing to hold a capture against.
RAISES_IN_EAGER = "jiterator_", ("acosh_", "asinh_", "atanh_", "float_power_")


def raises_in_eager(operator: Operator) -> bool:
    prefix, in_place = RAISES_IN_EAGER
    return operator.name in in_place if operator.in_place else operator.name.startswith(prefix)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [*range(SHARDS), "in place"])
def test_an_operator_is_exact_or_a_listed_exception(shard: int | str) -> None:
    in_place = shard == "in place"
    known = operators("cpu", torch.float32, in_place)
    known = [o for at, o in enumerate(known) if at % 2 == 0 or o.name in EXCEPTIONS]
    some = known if in_place else known[shard::SHARDS]
    outcomes = {o.name: check(o, sample) for o in some if not raises_in_eager(o) for sample in o.samples(1)}
    expected = {name: EXCEPTIONS.get(name, EXACT) for name in outcomes}
    assert {name: o for name, o in outcomes.items() if o.replay != expected[name]} == {}
    fine = (EXACT, CLOSE, *EXCEPTIONS.values())
    assert {name: o for name, o in outcomes.items() if o.passes not in fine} == {}


def test_a_replay_that_computes_something_else_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (sine,) = (o for o in operators("cpu", torch.float32) if o.name == "sin")
    replay = tracefuse.replay
    for factor, verdict in ((1.0, EXACT), (1.0 + 1e-7, CLOSE), (1.01, WRONG)):
        monkeypatch.setattr(tracefuse, "replay", lambda *given, f=factor: tuple(t * f for t in replay(*given)))
        assert {check(sine, sample).replay for sample in sine.samples(2)} == {verdict}
