"""Traces of a GPU without one, and ATen's dropout kernel in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace, fake_mode
from tracefuse.optimizers.verify import verify

H100_THREADS = 132 * 8 * 256
"""What an H100 runs of dropout's threads at once."""


def on_cuda(trace: Trace) -> Trace:
    """`trace` as if it had been captured on a GPU: every value's type lies on cuda:0, aliases stay aliases."""
    moved, memory = trace.copy(), {}
    mode, device = fake_mode(moved.graph), torch.device("cuda:0")

    def move(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        old = tensor.untyped_storage()
        with mode:
            new = memory.setdefault(old._cdata, torch.empty(old.nbytes(), dtype=torch.uint8, device=device))
            view = torch.empty(0, dtype=tensor.dtype, device=device)
            return view.set_(new.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    for node in moved.graph.nodes:
        value = node.meta.get("val")
        node.meta["val"] = type(value)(map(move, value)) if isinstance(value, (tuple, list)) else move(value)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    return moved


class DropoutOfGpu(nn.Module):
    """Dropout by the operator that a GPU records, which yields its mask too."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


def with_leaf_on_the_cpu(trace: Trace, source: str) -> Trace:
    """`trace` as if captured on a GPU but for its input `source`, which it casts there: the cast is a move, and so is the one
    of its gradient."""
    moved, cpu = on_cuda(trace), torch.device("cpu")
    (leaf,) = [n for n, i in zip(moved.placeholders, moved.inputs, strict=True) if i.source == source]
    (gradient,) = [n for n, o in zip(moved.returned, moved.outputs, strict=True) if o.of == leaf.name]
    with fake_mode(moved.graph):
        for node in (leaf, gradient):
            node.meta["val"] = torch.empty_like(node.meta["val"], device=cpu)
    (move,) = leaf.users
    for node, device in ((move, torch.device("cuda:0")), (gradient, cpu)):
        assert node.target is torch.ops.aten._to_copy.default
        node.kwargs = {**node.kwargs, "device": device}
    return moved


@dataclass
class FusedOnCuda:
    """A program captured on the CPU, its trace as of a GPU before and after `fuse`, and what that decided."""

    capture: tracefuse.Capture
    before: Trace
    after: Trace
    decisions: tuple[Decision, ...]

    def reason(self, value: str) -> str:
        return next(d.reason for d in self.decisions if d.value == value)


def fused_on_cuda(fn: Callable[..., Any], *inputs: Tensor, threads: int = H100_THREADS) -> FusedOnCuda:
    capture, decisions = tracefuse.capture(fn, *inputs), []
    before = on_cuda(capture.trace)
    text = before.code
    after = Fuse(threads).run(before, decisions.append)
    verify(after)
    assert before.code == text, "the input was edited"
    return FusedOnCuda(capture, before, after, tuple(decisions))


# --- ATen's kernels, read off Dropout.cu ------------------------------------------------------------------------------


def drawn_by_aten(numel: int, threads: int, vector: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(element, (thread, block, lane)) of every element, in the loops of `fused_dropout_kernel_vec` or, for `vector` 1,
    `fused_dropout_kernel`: `block` counts a thread's calls of curand."""
    for thread in range(threads):
        calls = 0
        if vector == 1:
            for first in range(thread, -(-numel // (threads * 4)) * threads * 4, threads * 4):
                for lane in range(4):
                    if first + threads * lane < numel:
                        yield first + threads * lane, (thread, calls, lane)
                calls += 1
            continue
        for first in range(thread * vector, numel, threads * vector):
            for at in range(vector):
                yield first + at, (thread, calls + at // 4, at % 4)
            calls += max(vector // 4, 1)


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's integers, as Salmon et al. write it: each round on (R0, L0, R1, L1), then a new key."""
    (r0, l0, r1, l1), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * r0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * r1, 2**32)
        r0, l0, r1, l1 = high1 ^ l0 ^ k0, low1, high0 ^ l1 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return r0, l0, r1, l1


def mask_by_aten(numel: int, threads: int, vector: int, keep: float, state: Sequence[int]) -> Tensor:
    """Which elements ATen keeps, by their number; `keep` is 1 - p in the type that it is compared in."""
    (seed, offset), mask = state, torch.zeros(numel, dtype=torch.bool)
    for element, (thread, block, lane) in drawn_by_aten(numel, threads, vector):
        counter = offset // 4 + block
        word = philox((counter % 2**32, counter >> 32, thread, 0), (seed % 2**32, seed >> 32))[lane]
        uniform = torch.tensor(float(word)).float() * 2.0**-32 + 2.0**-33
        mask[element] = bool(uniform.double() < keep)
    return mask
