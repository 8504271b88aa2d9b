"""Copies of forward ops: made, placed before their first reader, and taken back."""

from __future__ import annotations

import programs
import pytest
import torch
from rematerialised import leaf, program, remat, simple
from torch import Tensor
from traces import ops

from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.remat.schedule import forget, just_in_time
from tracefuse.optimizers.trace import phase, recomputes
from tracefuse.optimizers.verify import verify

F = torch.nn.functional


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_forget_takes_every_copy_back(name: str) -> None:
    trace = program(name).trace
    back = forget(remat(trace, producer_input_weight=0)[0])
    verify(back)
    assert not any(recomputes(n) for n in back.ops)
    assert saved_bytes(back) == saved_bytes(trace)
    assert sorted(ops(back)) == sorted(ops(trace))


def test_recomputed_just_before_the_first_reader() -> None:
    after = remat(program("gpt").trace, producer_input_weight=0)[0]
    position = {n: i for i, n in enumerate(after.graph.nodes)}
    for node in (n for n in after.ops if recomputes(n)):
        first = min(node.users, key=position.__getitem__)
        between = list(after.graph.nodes)[position[node] + 1 : position[first]]
        assert all(recomputes(n) for n in between), f"{node.name} is recomputed too early"


def test_moving_keeps_the_order_of_everything_else() -> None:
    trace = program("gpt").trace.copy()
    movable = {n for n in trace.ops if is_view(n) and phase(n) == "backward"}
    fixed = [n for n in trace.graph.nodes if n not in movable]
    just_in_time(movable)
    verify(trace)
    assert [n for n in trace.graph.nodes if n not in movable] == fixed


def test_recomputing_late_lowers_the_peak_of_a_deep_stack() -> None:
    w = [leaf(64, 64) for _ in range(8)]

    def fn() -> Tensor:
        x = w[0]
        for weight in w:
            x = F.gelu(x @ weight)
        return x

    trace = simple(fn)
    assert peak_bytes(remat(trace, recompute_materialized=True)[0]) < peak_bytes(trace)
