"""Ops that are alike become one kernel, which is looked for once: the work grows with layers that differ, not with depth."""

from __future__ import annotations

from typing import Any

import programs
import pytest
import torch
from torch import fx

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers import facts
from tracefuse.optimizers.fuse import carving
from tracefuse.optimizers.fuse.alike import form_of
from tracefuse.optimizers.fuse.carving import Carver
from tracefuse.optimizers.fuse.pieces import Piece
from tracefuse.optimizers.fuse.regions import form_regions
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.trace import Trace


def unfused(layers: int) -> Trace:
    model, data = GPT(layers=layers, width=32, heads=2, length=8), batch(64, 1, 8)
    return tracefuse.capture(lambda: model(*data).backward()).optimize().passes["fuse"].before


def pieces_of(trace: Trace, is_kept: bool = True) -> list[Piece]:
    """What the regions of a trace are carved into, with what is known of others kept or not."""
    fusible = {node for node in trace.graph.nodes if refusal(node) is None}
    carver = Carver({node: at for at, node in enumerate(trace.graph.nodes)}, fusible, lambda decision: None)
    pieces: list[Piece] = []
    for region in form_regions(trace.graph, fusible):
        if not is_kept:
            carver.found.clear()
        pieces += carver.carve(region)
    return pieces


def said(piece: Piece) -> tuple[Any, ...]:
    carved = piece.carved and (piece.carved.kernel.key, piece.carved.inputs, piece.carved.outputs)
    return piece.nodes, piece.outputs, carved, piece.reason


def test_the_kernels_looked_for_grow_with_layers_that_differ_and_not_with_depth(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    make = carving.make_kernel

    def counted(*arguments: Any) -> Any:
        made.append("kernel")
        return make(*arguments)

    # A table of kinds that is full is emptied, and ops that are alike have other numbers from there on.
    facts._kinds.clear()
    facts._types.clear()
    shallow, deep = unfused(4), unfused(12)
    monkeypatch.setattr(carving, "make_kernel", counted)
    few, in_few = pieces_of(shallow), len(made)
    more, in_more = pieces_of(deep), len(made) - in_few
    assert len(more) > 2 * len(few)
    assert in_more == in_few


@pytest.mark.parametrize("name", ["gpt", "conv_batchnorm", "unet", "rope"])
def test_what_is_known_of_alike_ops_is_what_is_so(name: str) -> None:
    """In the nets with norms, kernels read two views of one memory by views of their own, which no form tells of."""
    trace = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).optimize().passes["fuse"].before
    assert list(map(said, pieces_of(trace))) == list(map(said, pieces_of(trace, is_kept=False)))


def ops_of(run: Any) -> list[fx.Node]:
    return tracefuse.capture(run).trace.ops


def form_keys(*groups: list[fx.Node]) -> list[Any]:
    found = [form_of(group, (), group[-1:]) for group in groups]
    return [one.key for one in found if one]


def test_a_form_says_how_ops_are_wired_and_what_is_read_of_them() -> None:
    x, y = torch.ones(4), torch.ones(4)

    def run() -> list[torch.Tensor]:
        one, other = x.sin(), y.sin()
        return [one + one, other + other, x.sin() + y.sin()]

    sin, sin_1, add, add_1, sin_2, sin_3, add_2 = ops_of(run)
    first, second = form_keys([sin, add], [sin_1, add_1])
    assert first == second
    assert first not in form_keys([sin_2, sin_3, add_2], [sin_3, add_2], [add])
    whole, also_first = form_of([sin, add], (), [add]), form_of([sin, add], (), [sin, add])
    assert whole
    assert also_first
    assert whole.key != also_first.key
    assert whole.number == {sin: 0, add: 1, sin.args[0]: 2}
