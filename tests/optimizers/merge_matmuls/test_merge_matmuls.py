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
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
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
    assert all("would be kept for it" in d.reason for d in bounded.decisions)


def test_a_product_that_is_returned_has_memory_of_its_own() -> None:
    w, x = leaf(6, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)

    def step() -> tuple[Tensor, ...]:
        found = tuple(one @ w for one in x)
        sum(one.square().sum() for one in found).backward()
        return found

    capture = tracefuse.capture(step)
    record = record_of(capture)
    assert [d.action for d in record.decisions] == ["merge"], "the gradient alone"


def twice(w: Tensor, x: Tensor) -> Tensor:
    products = [one @ w for one in x]
    added = products[0] + products[0]
    for one in products[1:]:
        added = added + one
    inner = products[3].tanh() @ w + products[4].tanh() @ w
    return added + (inner + inner)


def as_other_bits(w: Tensor, x: Tensor) -> Tensor:
    total = (x[0] @ w).view(torch.int64)
    for one in x[1:]:
        total = total + (one @ w).view(torch.int64)
    return total.double() * w.sum()


@pytest.mark.parametrize("of", [twice, as_other_bits])
def test_what_is_added_twice_or_read_as_other_bits_is_counted_as_it_is(of: Callable[..., Tensor]) -> None:
    w, x = leaf(6, 6), torch.randn(STEPS, 4, 6, dtype=torch.float64)
    record_of(captured(lambda: of(w, x)))


def test_gradients_that_several_uses_of_a_network_share_are_counted_each() -> None:
    """A discriminator of what is real and of what was made, detached too."""
    torch.manual_seed(0)
    judge, maker = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double(), nn.Linear(6, 6).double()
    x = torch.randn(4, 6, dtype=torch.float64)

    def step() -> Tensor:
        made = maker(x)
        loss = sum(judge(one).square().mean() for one in (x, made, made.detach(), x.tanh(), made.sin()))
        loss.backward()
        return loss

    record_of(tracefuse.capture(step))


def conditioned(w: Tensor, x: Tensor, large: Tensor) -> Tensor:
    """Large values wait for small ones, which multiply by a matrix."""
    return torch.stack([(torch.tanh(one @ w).sum() * torch.sin(of)).sum() for one, of in zip(x, large, strict=True)])


def of_corners(w: Tensor, x: Tensor, large: Tensor) -> Tensor:
    """A row of each large value is multiplied."""
    return torch.stack([torch.sin(of)[:4, :6] @ w for of in large])


@pytest.mark.parametrize("of", [conditioned, of_corners])
def test_no_large_values_wait_for_small_products(of: Callable[..., Tensor]) -> None:
    w, x, large = leaf(6, 8), torch.randn(STEPS, 4, 6).double(), torch.randn(STEPS, 400, 400).double()
    capture = captured(lambda: of(w, x, large))
    (record,) = run_pipeline(capture.trace, [MergeMatmuls(most_nbytes=2**20)])
    assert any("would be kept for it" in d.reason for d in record.decisions)
    assert peak_bytes(record.after) < peak_bytes(record.before) + 2**20


def test_the_forward_keeps_no_whole_product_for_a_part() -> None:
    layer, x = nn.Linear(6, 8).double(), torch.randn(STEPS, 2, 3, 6, dtype=torch.float64)

    def run() -> Tensor:
        found = [layer(one) for one in x]
        return torch.stack([F.gelu(found[0]), *found[1:]])

    capture = captured(run)
    record = record_of(capture)
    assert saved_bytes(record.after) <= saved_bytes(record.before)


def test_parts_keep_the_names_that_the_program_gave_them() -> None:
    w, u, x = leaf(6, 8), leaf(8, 8), torch.randn(STEPS, 4, 6, dtype=torch.float64)

    def run() -> Tensor:
        state = torch.zeros(4, 8, dtype=torch.float64)
        for now in x:
            gates = now @ w
            state = torch.tanh(gates + state @ u)
        return state

    names = {node.name for node in record_of(captured(run)).after.ops}
    assert {"gates", f"gates_{STEPS - 1}"} <= names


def test_what_a_kernel_computes_and_takes_apart_or_joins_stays_in_it() -> None:
    x = torch.randn(8, 4, 6).double()

    def launches(of: Callable[[Tensor], Tensor]) -> int:
        after = captured(lambda: of(leaf(8, 4, 6) * x)).optimize().forward
        return sum(isinstance(node.target, Kernel) for node in after.ops)

    assert launches(lambda y: sum(one.tanh() for one in y.sigmoid().unbind(0))) == 1
    assert launches(lambda y: torch.cat([torch.tanh(y * at) for at in range(40)])) == 1


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
