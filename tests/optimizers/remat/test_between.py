"""Rematerialisation between regions: what is computed again where it is read, what is written, and that fuse keeps it so."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
import torch
from rematerialised import leaf, program, remat, saved
from torch import Tensor, fx
from traces import Tried, captured, ops, tried

from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.fuse.remaking import is_for_reader
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.long_sum import LongSum
from tracefuse.optimizers.liveness import live_bytes, peak_bytes
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.between import _cut, _cut_of_tree, _is_tree, needs_of, weigh
from tracefuse.optimizers.remat.borders import Borders
from tracefuse.optimizers.remat.schedule import forget
from tracefuse.optimizers.remat.tradeoffs import static_cost
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace, phase, recomputes

aten = torch.ops.aten
f64 = torch.float64

FREE: dict[str, Any] = {"producer_input_weight": 0.0}
UNBOUND: dict[str, Any] = FREE | {"between_chain": None}


@functools.cache
def chain(layers: int) -> Trace:
    trace = captured(programs.residual_chain(f64, layers=layers).run).trace
    return Simplify().run(trace, lambda _: None)


def copies(trace: Trace) -> list[fx.Node]:
    return [node for node in trace.ops if is_for_reader(node)]


def kernels(trace: Trace) -> list[Kernel]:
    return [n.target for n in trace.ops if isinstance(n.target, Kernel)]


def fused(trace: Trace, **options: object) -> Trace:
    return final(trace, run_pipeline(trace, [Remat(**options), Fuse()]))  # type: ignore[arg-type]


def forward_only(fn, *inputs: Tensor, **options: object) -> Tried:  # type: ignore[no-untyped-def]
    return tried(Remat(**options), captured(lambda: fn(*inputs)))  # type: ignore[arg-type]


# --- the residual chain -----------------------------------------------------------------------------------------------


def test_at_weight_0_every_region_sums_the_stream_anew() -> None:
    """2N regions of 1, 2, ..., 2N adds: 2N^2 + N in place of 2N, with the tanhs 2N^2 + 3N in place of 4N."""
    layers = 6
    forward, _ = remat(chain(layers), **UNBOUND)[0].split()
    assert ops(forward).count("tanh") == 2 * layers
    assert ops(forward).count("add") == 2 * layers**2 + layers


def test_no_sum_is_written_and_each_region_is_one_kernel() -> None:
    forward, _ = fused(chain(6), **UNBOUND).split()
    calls = [n for n in forward.ops if isinstance(n.target, Kernel)]
    assert len(calls) == 12, "one for each half layer but the first, whose tanh is alone, and one for the loss"
    assert sorted(len(c.args) for c in calls) == list(range(2, 14))
    assert "add" not in ops(forward)
    assert all(recomputes(a) is None for c in calls for a in c.all_input_nodes)


@pytest.mark.parametrize("weight", [1.0, 0.5])
def test_the_chain_stays_as_it_is_at_other_weights(weight: float) -> None:
    on, off = (remat(chain(6), producer_input_weight=weight, between_regions=b)[0] for b in (True, False))
    assert on.code == off.code


def test_the_forward_holds_one_tensor_less_and_the_backward_no_more() -> None:
    on, off = (fused(chain(6), **UNBOUND, between_regions=between).split() for between in (True, False))
    one = 10 * 10 * 8
    assert peak_bytes(on[0]) == peak_bytes(off[0]) - one
    assert peak_bytes(on[1]) <= peak_bytes(off[1])
    assert saved(fused(chain(6), **UNBOUND)) == saved(fused(chain(6), **FREE, between_regions=False))


def test_a_chain_ends_after_so_many_ops_and_the_next_begins_there() -> None:
    def longest(trace: Trace) -> int:
        depth: dict[fx.Node, int] = {}
        for node in copies(trace):
            depth[node] = 1 + max((depth.get(a, 0) for a in node.all_input_nodes), default=0)
        return max(depth.values())

    after, decisions = remat(chain(12), **FREE, between_chain=4)
    assert longest(after) == 4
    ends = [d for d in decisions if d.action == "write" and "it ends a chain of 4 ops" in d.reason]
    assert len(ends) == 24 // 5
    assert longest(remat(chain(12), **UNBOUND)[0]) == 23


def test_ops_are_linear_in_depth_and_unique_kernels_constant() -> None:
    few, many = (static_cost(fused(chain(layers), **FREE)) for layers in (24, 48))
    assert few.unique_kernels == many.unique_kernels
    assert many.ops < 2.2 * few.ops


def test_without_a_bound_all_long_sums_share_one_kernel() -> None:
    few, many = (kernels(fused(chain(layers), **UNBOUND)) for layers in (12, 20))
    assert set(few) == set(many)
    assert len({k for k in few if isinstance(k, LongSum)}) == 1


def test_weight_zero_trades_memory_for_bytes_that_kernels_move() -> None:
    full, half, free = (static_cost(fused(chain(6), producer_input_weight=weight)) for weight in (1.0, 0.5, 0.0))
    assert full == half
    assert free.forward_peak_nbytes < full.forward_peak_nbytes
    assert free.kernel_nbytes > full.kernel_nbytes


# --- the choice -------------------------------------------------------------------------------------------------------


def rows(value: Tensor) -> Tensor:
    return torch.softmax(value, -1) * 2


def columns(value: Tensor) -> Tensor:
    return torch.softmax(value.t(), -1)


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two regions, since their rows differ; what the second reads of the first is made of `x`, which it reads too."""
    wide = x.double()
    return rows(wide), columns(wide) + x.t()


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_what_a_region_has_at_hand_costs_nothing(weight: float) -> None:
    result = forward_only(narrow, torch.randn(8, 4), producer_input_weight=weight)
    (copy,) = copies(result.after)
    assert copy.target is aten._to_copy.default
    assert recomputes(copy) == "wide"
    assert "wide" in {d.value for d in result.decisions if d.action == "duplicate"}


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    total = x.sin() + y
    return rows(total), columns(total)


@pytest.mark.parametrize(("weight", "count"), [(1.0, 0), (0.5, 0), (0.49, 2), (0.0, 2)])
def test_two_inputs_weigh_as_much_as_their_sum_at_one_half(weight: float, count: int) -> None:
    result = forward_only(two, leaf(8, 4).detach(), leaf(8, 4).detach(), producer_input_weight=weight)
    assert len(copies(result.after)) == count
    assert len(result.reasons("write" if not count else "duplicate")) == 1


def test_off_it_copies_nothing() -> None:
    assert not copies(forward_only(two, leaf(8, 4), leaf(8, 4), **FREE, between_regions=False).after)


def test_what_is_read_from_memory_anyway_is_not_computed_again() -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        total = x + y
        return total @ total.t(), rows(total), columns(total)

    assert not copies(forward_only(fn, leaf(8, 4).detach(), leaf(8, 4).detach(), **FREE).after)


def test_reductions_and_random_numbers_are_never_copied() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.nn.functional.dropout(rows(x), 0.5)
        return columns(total), rows(total + 1)

    after = forward_only(fn, leaf(8, 4).detach(), **FREE).after
    assert not {n.target for n in copies(after)} & {aten.native_dropout.default, aten._softmax.default}


def test_terms_that_could_be_freed_are_added_up_as_they_come() -> None:
    """The gradient of a weight that all layers share: to add it up at the end would hold one matrix for each layer."""
    on, off = (remat(chain(6), **FREE, between_regions=between)[0] for between in (True, False))
    assert not [n for n in copies(on) if phase(n) == "backward"]
    assert max(live_bytes(on.split()[1])) == max(live_bytes(off.split()[1]))


def test_a_view_of_what_is_copied_is_taken_again() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sin() * 2
        return rows(total), rows(total.t()[1:])

    result = forward_only(fn, leaf(8, 4).detach(), **FREE)
    assert copies(result.after)


@pytest.mark.parametrize("name", ["gpt", "llama", "autocast", "qkv_backward", "summed_chain"])
@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_the_tree_cut_is_the_minimum_cut(name: str, weight: float) -> None:
    borders = Borders(program(name).trace)
    for region, reading in borders.reading.items():
        wanted = [value for value in reading if not borders.is_stored(value)]
        needs = needs_of(borders, wanted)
        weights = {n: weigh(borders, n, region, weight) for n in needs}
        if wanted and _is_tree(wanted, needs):
            assert _cut_of_tree(wanted, needs, weights) == _cut(wanted, needs, weights)


# --- taking it back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_forget_takes_every_copy_back(name: str) -> None:
    trace = program(name).trace
    back = forget(remat(trace, **UNBOUND)[0])
    assert not any(recomputes(n) or is_for_reader(n) for n in back.ops)
    assert sorted(ops(back)) == sorted(ops(trace))


def test_the_last_options_count() -> None:
    free = remat(chain(6), **FREE)[0]
    assert remat(free)[0].code == remat(chain(6))[0].code
    assert remat(remat(chain(6))[0], **FREE)[0].code == free.code


def test_a_second_run_of_simplify_and_remat_changes_nothing() -> None:
    tried([Simplify(), Remat(**FREE)], program("residual_chain"))  # type: ignore[arg-type]


def test_a_bound_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="pass 1 or more, or None"):
        Remat(between_chain=0)
