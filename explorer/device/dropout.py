"""Dropout on the GPU: drawing its states from torch's generator, and whether this torch draws as our kernels do.

All the states that a program draws in a row are drawn at once, as rows of one table that is copied from pinned memory: one
copy however many dropouts there are, and nothing waits for the GPU. (Filling a state where it lies takes two launches per
dropout, and copying it from pageable memory waits for all work before it.) The generator is left where ATen's own dropouts
would have left it.

A kernel's constants are those of the GPU whose threads were asked for. Run on another one it draws masks that are as random
and the same in forward and backward, but not those that ATen would draw there.
"""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch

from tracefuse.optimizers.formulas import philox
from tracefuse.optimizers.lowering.masks import PHILOX_WORD
from tracefuse.optimizers.lowering.random_ops import MASK


def draw_dropout(increments, *, device):
    """i64[2], seed and offset, for each dropout of a row that moves the generator's offset by `increments`."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    generator = torch.cuda.default_generators[index]
    seed, offset, states = generator.initial_seed(), generator.get_offset(), []
    seed -= (seed >> 63) << 64  # the same 64 bits, signed
    for increment in increments:
        states.append((seed, offset))
        offset += increment
    generator.set_offset(offset)
    return torch.tensor(states, pin_memory=True).to(device, non_blocking=True).unbind(0)


_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
_IMPLEMENTATION.impl(
    "draw_dropout", lambda increments, *, device: list(draw_dropout(increments, device=device)),
    "CompositeExplicitAutograd",
)  # fmt: skip


_FUNCTIONS = (philox.word_of, philox.philox4x32, philox.dropout_mask, philox.apply_dropout, draw_dropout)
SUPPORT = {f.__name__: inspect.getsource(f).rstrip() for f in _FUNCTIONS} | {"philox_word": PHILOX_WORD.rstrip()}
"""The functions that generated text may call, by name."""


def support(text: str) -> str:
    """The definitions of those functions that `text` calls, and of those that they call; empty where it calls none."""
    needed: dict[str, None] = {}
    waiting = [re.sub(r"#.*", "", text)]  # comments quote the user's lines
    while waiting:
        called = set(re.findall(r"(?<![\w.])(\w+)\(", waiting.pop())) & SUPPORT.keys() - needed.keys()
        needed |= dict.fromkeys(called)
        waiting += [SUPPORT[name] for name in called]
    return "\n\n\n".join(SUPPORT[name] for name in SUPPORT if name in needed)


# --- what this machine's ATen does ------------------------------------------------------------------------------------


def device_threads(device: torch.device) -> int:
    """Threads that ATen's dropout runs at once on `device`, at most."""
    properties = torch.cuda.get_device_properties(device)
    blocks = properties.multi_processor_count * (properties.max_threads_per_multi_processor // philox.BLOCK)
    return blocks * philox.BLOCK


def masks_of(x: torch.Tensor, p: float, most_threads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ATen's mask, ours) of one dropout of `x`, a tensor on a GPU, both from the generator's present state.

    Raises `RuntimeError` where the two leave the generator in different places.
    """
    generator = torch.cuda.default_generators[x.device.index]
    before = generator.get_state()
    _, theirs = torch.ops.aten.native_dropout(x, p, True)
    after = generator.get_offset()
    generator.set_state(before)
    threads = philox.launched_threads(x.numel(), most_threads)
    (state,) = draw_dropout([philox.increment(x.numel(), threads)], device=x.device)
    if generator.get_offset() != after:
        raise RuntimeError(f"ATen moved the generator to {after}, draw_dropout to {generator.get_offset()}")
    size, stride = list(x.shape), list(theirs.stride())
    return theirs, MASK(state, size, stride, threads, philox.vector_size(x), philox.keep_below(p, x.dtype))


@functools.cache
def probe(device: torch.device) -> str | None:
    """What differs between the dropout masks that this torch draws on `device` and our kernels'; None where nothing does. The
    generator is left as it was.

    Tries every type with every number of neighbours that a thread may take, in one step and in several.
    """
    most, generator = device_threads(device), torch.cuda.default_generators[device.index]
    before = generator.get_state()
    try:
        for dtype in philox.DTYPES:
            for numel in (1, 1000, 1001, 1002, 1004, 9 * most, 9 * most + 1):
                x = torch.empty(numel, dtype=dtype, device=device)
                theirs, ours = masks_of(x, 0.3, most)
                if not torch.equal(theirs, ours):
                    return f"torch {torch.__version__} draws other dropout masks than our kernels, {numel} of {dtype}"
    except RuntimeError as error:
        return f"dropout could not be compared with ATen's: {error}"
    finally:
        generator.set_state(before)
    return None


def fuse_options() -> dict[str, Any]:
    """What `Fuse` must know to draw dropout in kernels, found out once per process; nothing where no GPU is in use yet."""
    if not torch.cuda.is_initialized():
        return {}
    device = torch.device("cuda", torch.cuda.current_device())
    reason = probe(device)
    return {"dropout_refusal": reason} if reason else {"dropout_threads": device_threads(device)}
