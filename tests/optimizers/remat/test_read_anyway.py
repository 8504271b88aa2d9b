"""Saved values that a kernel of the backward computes from what it reads anyway: which are, and which are read as before."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from rematerialised import leaf, saved, simple
from torch import Tensor, nn
from traces import assert_same_numbers, captured, tried

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.remat import Remat, read_anyway
from tracefuse.optimizers.remat.schedule import forget
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace, recomputes

ROWS, COLUMNS = 24, 32


def scaled(
    activation: Callable[[Tensor], Tensor], *, trained: bool = True, beside: bool = False
) -> Callable[[], Tensor]:
    """Two matmuls, and between them columns that are shifted and scaled, with `activation`; `beside` adds a stream."""
    x, first, last = leaf(ROWS, COLUMNS), leaf(COLUMNS, COLUMNS), leaf(COLUMNS, COLUMNS)
    shift, scale, bias = (leaf(COLUMNS).requires_grad_(trained) for _ in range(3))

    def fn() -> Tensor:
        y = x @ first
        z = (y - shift) * scale + bias
        return activation(z + x if beside else z) @ last

    return fn


def after_remat(fn: Callable[[], Tensor], **options: object) -> Trace:
    return Remat(**options).run(simple(fn), lambda _: None)  # type: ignore[arg-type]


def again(trace: Trace) -> set[str]:
    return {original for node in trace.ops if (original := recomputes(node))}


def reads(trace: Trace) -> list[set[str]]:
    """What each kernel of the backward reads of the forward."""
    forward = {one.name for one in trace.ops if one.meta["phase"] == "forward"}
    backward = [n for n in trace.ops if isinstance(n.target, Kernel) and n.meta["phase"] == "backward"]
    return [{a.name for a in node.all_input_nodes} & forward for node in backward]


def test_a_relu_is_computed_from_what_its_backward_reads_anyway() -> None:
    before = simple(scaled(torch.relu))
    decisions: list[str] = []
    after = Remat().run(before, lambda d: decisions.append(f"{d.value} {d.action}: {d.reason}"))
    assert {"relu"} <= again(after)
    assert "relu" in saved(after), "a matmul of the backward reads it"
    assert saved_bytes(after) <= saved_bytes(before)
    fused = final(after, run_pipeline(after, [Fuse()]))
    assert not any("relu" in names for names in reads(fused))
    assert any("relu duplicate: computed again from what its reader" in line for line in decisions)


def test_the_numbers_are_those_of_eager() -> None:
    fn = scaled(torch.relu)

    def step() -> Tensor:
        loss = (fn() ** 2).sum()
        loss.backward()
        return loss

    tried([Simplify(), Remat(), Fuse()], captured(step))


def test_it_is_read_where_its_kernel_does_not_read_what_it_is_computed_from() -> None:
    assert "relu" not in again(after_remat(scaled(torch.relu, trained=False)))


def test_it_is_read_where_as_much_would_be_read_instead() -> None:
    assert "relu" not in again(after_remat(scaled(torch.relu, beside=True)))


def test_what_takes_an_exponential_is_read() -> None:
    assert "tanh" not in again(after_remat(scaled(torch.tanh)))


def test_no_region_computes_again_what_it_reads_where_that_is_switched_off() -> None:
    assert "relu" not in again(after_remat(scaled(torch.relu), between_regions=False))


def test_it_is_taken_back_with_all_that_is_recomputed() -> None:
    before = simple(scaled(torch.relu))
    after = Remat().run(before, lambda _: None)
    assert forget(after).code == before.code


def test_a_long_stream_is_not_walked_to_its_start() -> None:
    x, weight, scale = leaf(8, 16), leaf(16, 16), leaf(16)

    def fn() -> Tensor:
        value = x @ weight
        for _ in range(3000):
            value = value + scale
        return torch.relu(value) @ weight

    after_remat(fn)


def test_a_value_that_another_one_is_computed_from_is_not_read_for_that() -> None:
    """Both are saved for matmuls, and one kernel reads both; the later one comes first there."""
    x, first, left, right = leaf(ROWS, COLUMNS), *(leaf(COLUMNS, COLUMNS) for _ in range(3))
    scale, bias, shift, offset = (leaf(COLUMNS) for _ in range(4))

    def fn() -> Tensor:
        y = x @ first
        inner = torch.relu((y - shift) * scale + bias)
        outer = torch.relu(inner * offset + shift)
        return inner @ left + outer @ right

    after = after_remat(fn)
    assert {"inner", "outer"} <= again(after)
    assert reads(final(after, run_pipeline(after, [Fuse()]))) == [{"y"}]
    copied = [recomputes(node) for node in after.ops if recomputes(node) in ("inner", "add", "mul")]
    assert len(copied) == len(set(copied)), "the second one reads the copies that the first one made"


def test_sums_that_cross_at_each_step_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path more for each step back would be a minute's work."""
    monkeypatch.setattr(read_anyway, "FARTHEST", 28)
    a, b, weight, scale = leaf(8, 16), leaf(8, 16), leaf(16, 16), leaf(16)

    def fn() -> Tensor:
        x, y = a @ weight, b @ weight
        for _ in range(40):
            x, y = x + y, x - y
        return torch.relu(x * scale) @ weight

    before, started = simple(fn), time.monotonic()
    Remat().run(before, lambda _: None)
    assert time.monotonic() - started < 10


def test_batch_norms_and_relus_of_a_net_read_no_relu_in_their_backward() -> None:
    """The product's own passes, in training mode, in float64 against eager."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, bias=False)
    ).double()
    x = torch.randn(4, 3, 12, 12, dtype=torch.float64)

    def step() -> Tensor:
        loss = net(x).square().sum()
        loss.backward()
        return loss

    capture = tracefuse.capture(step)
    after = capture.optimize().trace
    assert_same_numbers(after, capture)
    assert reads(after)
    assert not any(name.startswith("relu") for names in reads(after) for name in names), reads(after)
