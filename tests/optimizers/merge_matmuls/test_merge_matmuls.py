"""Many small matmuls become one where that pays; numbers stay, and so does the order of what may not be moved."""

from __future__ import annotations

import random
from collections.abc import Callable

import programs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traces import assert_same_numbers, assert_types_are_true

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.merge_matmuls import MergeMatmuls
from tracefuse.optimizers.ops import aten
from tracefuse.optimizers.passes import PassRecord, final, run_pipeline
from tracefuse.optimizers.trace import Trace

MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
STEPS = 12


def captured(run: Callable[[], Tensor]) -> tracefuse.Capture:
    def step() -> Tensor:
        result = run()
        result.square().mean().backward()
        return result

    return tracefuse.capture(step)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def records_of(capture: tracefuse.Capture) -> dict[str, PassRecord]:
    return {one.name: one for one in run_pipeline(capture.trace, Config().passes())}


def record_of(capture: tracefuse.Capture) -> PassRecord:
    """Of the pass, whose numbers and types are right, and of the program behind all passes too."""
    records = records_of(capture)
    for trace in (records["merge_matmuls"].after, final(capture.trace, tuple(records.values()))):
        assert_same_numbers(trace, capture)
        assert_types_are_true(trace, capture)
    return records["merge_matmuls"]


def matmuls(trace: Trace) -> int:
    return sum(node.target in MATMULS for node in trace.ops)


class Tagger(nn.Module):
    """A cell over time, as people write it."""

    def __init__(self, cell: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell, self.head = cell(6, 8), nn.Linear(8, 3)
        self.has_two = cell is nn.LSTMCell

    def forward(self, x: Tensor) -> Tensor:
        zero, found = x.new_zeros(x.shape[0], 8), []
        state = (zero, zero) if self.has_two else zero
        for at in range(x.shape[1]):
            state = self.cell(x[:, at], state)
            found.append(self.head(state[0] if self.has_two else state))
        return torch.stack(found, 1)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_a_loop_over_steps_multiplies_only_what_it_carries(cell: type[nn.RNNCellBase]) -> None:
    torch.manual_seed(0)
    model, x = Tagger(cell).double(), torch.randn(4, STEPS, 6, dtype=torch.float64)
    record = record_of(captured(lambda: model(x)))
    assert matmuls(record.before) > 7 * STEPS
    # One a step each way, and one for all steps each: inputs, heads, their gradients, and three gradients of weights.
    assert matmuls(record.after) <= 2 * STEPS + 7


def test_inputs_that_lie_in_order_are_not_copied() -> None:
    w, u, x = leaf(6, 8), leaf(8, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)

    def run() -> Tensor:
        state = torch.zeros(4, 8, dtype=torch.float64)
        for now in x:
            state = torch.tanh(now @ w + state @ u)
        return state

    capture = captured(run)
    record = record_of(capture)
    assert [d.action for d in record.decisions] == ["merge"] * 3
    assert "joined" not in next(d.reason for d in record.decisions if "by w" in d.reason)
    after = records_of(capture)["cat"].after
    assert not any(node.target is aten.cat.default and "x" in str(node.args) for node in after.ops)


def test_steps_share_their_kernels_whatever_part_of_the_one_product_they_read() -> None:
    def kernels(steps: int) -> int:
        model, x = programs.Recurrent(6, 8, 3), torch.randn(steps, 4, 6)
        after = captured(lambda: model(x)).optimize().passes["fuse"].after
        return len({node.target.key for node in after.ops if isinstance(node.target, Kernel)})

    assert kernels(60) == kernels(40) < 10


def test_gradients_of_a_weight_that_layers_share_are_one_product() -> None:
    w, x = leaf(5, 5), torch.randn(5, 5, dtype=torch.float64)

    def run() -> Tensor:
        y = x
        for _ in range(STEPS):
            y = torch.tanh(w @ y) + y
        return y

    record = record_of(captured(run))
    assert (matmuls(record.before), matmuls(record.after)) == (3 * STEPS - 1, 2 * STEPS)
    (decision,) = record.decisions
    assert (decision.action, decision.reason.split(":")[0]) == ("merge", f"{STEPS} products are summed")


def test_products_of_a_batch_are_summed_too() -> None:
    w, x = leaf(2, 5, 5), torch.randn(2, 4, 5, dtype=torch.float64)

    def run() -> Tensor:
        y = x
        for _ in range(STEPS):
            y = torch.tanh(torch.bmm(y, w))
        return y

    record = record_of(captured(run))
    assert matmuls(record.after) == 2 * STEPS


def large() -> Tensor:
    w, x = leaf(64, 2048), torch.randn(STEPS, 4096, 64, dtype=torch.float64)
    return torch.stack([one.tanh() @ w for one in x]).sum()


def few() -> Tensor:
    w, u = leaf(5, 5), leaf(5, 5)
    return torch.tanh(torch.tanh(torch.ones_like(u) @ w) @ u) @ w


def drawn() -> Tensor:
    w, x = leaf(6, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)
    return torch.stack([F.dropout(one @ w, 0.5) for one in x])


def test_large_ones_and_few_are_left_with_their_reasons() -> None:
    record = records_of(captured(large))["merge_matmuls"]
    assert record.after is record.before
    assert all(d.action == "leave" and "one by one" in d.reason for d in record.decisions)
    assert not records_of(captured(few))["merge_matmuls"].decisions


def test_random_numbers_are_drawn_in_their_order() -> None:
    record = record_of(captured(drawn))
    left = next(d for d in record.decisions if d.action == "leave")
    assert left.reason.endswith("would be drawn later")
    assert [d.action for d in record.decisions].count("merge") == 1, "the gradient of the weight"


def test_what_is_joined_is_bounded() -> None:
    w, x = leaf(6, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)
    capture = captured(lambda: torch.stack([torch.tanh(torch.tanh(one) @ w) for one in x]))
    simple = records_of(capture)["simplify"].after
    (whole,) = run_pipeline(simple, [MergeMatmuls()])
    (bounded,) = run_pipeline(simple, [MergeMatmuls(most_nbytes=1024)])
    assert matmuls(whole.after) == 2
    assert bounded.after is simple
    assert all("may be 1 KiB" in d.reason for d in bounded.decisions)


def test_a_product_that_is_returned_has_memory_of_its_own() -> None:
    w, x = leaf(6, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)

    def step() -> tuple[Tensor, ...]:
        found = tuple(one @ w for one in x)
        sum(one.square().sum() for one in found).backward()
        return found

    capture = tracefuse.capture(step)
    record = record_of(capture)
    assert [d.action for d in record.decisions] == ["merge"], "the gradient alone"


def test_a_step_of_a_recurrent_net_needs_no_more_memory_for_it() -> None:
    """The gradients of the steps, which were added up in the end, are larger than what is joined."""
    torch.manual_seed(0)
    model, x = Tagger(nn.LSTMCell), torch.randn(4, STEPS, 6)
    capture = captured(lambda: model(x))
    merged, apart = (capture.optimize(merge_matmuls=on).passes["fuse"].after for on in (True, False))
    assert peak_bytes(merged) < peak_bytes(apart)


@pytest.mark.parametrize("seed", range(24))
def test_programs_drawn_at_random_keep_their_numbers(seed: int) -> None:
    """Chains and fans of products by few matrices, biased, transposed, cut and added, in any order."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    weights = [leaf(6, 6) for _ in range(2)]
    biases = [leaf(6) for _ in range(2)]
    x = leaf(8, 4, 6)
    plan = [tuple(draw.randrange(1 << 16) for _ in range(4)) for _ in range(28)]

    def run() -> Tensor:
        values = list(x.unbind(0))
        for kind, one, other, of in plan:
            a, b, w = values[one % len(values)], values[other % len(values)], weights[of % 2]
            made = [
                lambda a=a, w=w: a @ w,
                lambda a=a, w=w: F.linear(a, w, biases[0]),
                lambda a=a, w=w: torch.addmm(biases[1], a, w),
                lambda a=a, b=b: torch.tanh(a) + b,
                lambda a=a, w=w: (w @ a.t()).t(),
                lambda a=a, b=b, w=w: a @ w + b @ w,
                lambda a=a, b=b: torch.cat([a[:2], b[2:]]),
            ][kind % 7]()
            values.append(made)
        return torch.stack(values[8:]).tanh()

    record_of(captured(run))
