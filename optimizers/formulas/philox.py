"""Philox in ATen's CUDA dropout: which random word decides over which element, as index algebra.

ATen draws by Philox4x32-10: a function of a key (the generator's seed) and a 128-bit counter that yields four 32-bit words,
so that any element's number can be computed by itself, at any time. curand lays the counter out as

    counter = (offset // 4 + block,  thread)     64 bits each; offset is the generator's, block counts a thread's own draws
    word    = philox(counter, seed)[lane]        lane is 0, 1, 2 or 3

and dropout keeps an element where `word * 2**-32 + 2**-33`, rounded to f32, is below 1 - p. That grows with the word, so
that it is one comparison of integers: `word < keep_below`.

Dropout's kernel runs `threads` threads in steps. In every step a thread takes `vector` neighbours in memory, and four words
at a time are drawn for them; of two neighbours it wastes the other two words. Where the elements cannot be taken so
(`vector` 1) a thread takes four of them, `threads` apart in row-major order:

    vector    element e is number                      thread                block                             lane
    2, 4, 8   e in memory                              e // vector % threads e // (vector * threads) * k + j   e % 4
    1         e in row-major order                     e % threads           e // (4 * threads)                e // threads % 4
              k = blocks a step takes = max(vector // 4, 1);  j = e % vector // 4

Source: `aten/src/ATen/native/cuda/Dropout.cu` of torch's main branch, whose kernels for 2, 4 and 8 neighbours are in 2.15's
library; J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, for Philox; curand's manual for the
counter's layout. Nobody promises that other versions draw so: `tracefuse.device.dropout.probe` asks the one at hand.
"""

from __future__ import annotations

import bisect
import math
import struct

import torch

from tracefuse.optimizers.facts import is_dense

BLOCK = 256
"""Threads per block of ATen's kernel."""

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What ATen's kernel takes."""

WIDEST_LOAD = 16
"""Bytes that one thread of it loads at once, at most."""


# --- the launch that ATen would make ----------------------------------------------------------------------------------


def launched_threads(numel: int, most_threads: int) -> int:
    """Threads of ATen's launch over `numel` elements, where the GPU runs `most_threads` at once."""
    return min(most_threads, -(-numel // BLOCK) * BLOCK)


def increment(numel: int, threads: int) -> int:
    """By how much a dropout of `numel` elements moves the generator's offset."""
    return ((numel - 1) // (threads * 4) + 1) * 4


def vector_size(tensor: torch.Tensor) -> int:
    """Neighbours in memory that a thread takes at once: 8, 4 or 2, or 1 where it goes by row-major order.

    Looks at type, strides and offset only; a tensor's memory is taken to start as torch's allocator lays it, aligned.
    """
    if not is_dense(tuple(tensor.shape), tensor.stride()):
        return 1
    size = WIDEST_LOAD // tensor.element_size()
    while size > 1 and (tensor.storage_offset() % size or tensor.numel() % size):
        size //= 2
    return size


# --- the comparison ---------------------------------------------------------------------------------------------------


def keep_below(p: float, dtype: torch.dtype) -> int:
    """The words below this one are kept by a dropout of probability `p`; f64 alone compares in f64."""
    keep = 1.0 - p if dtype is torch.float64 else _f32(1.0 - p)
    return bisect.bisect_left(range(2**32), True, key=lambda word: uniform(word) >= keep)


def uniform(word: int) -> float:
    """curand's f32 in (0, 1] for a 32-bit word. What it rounds is exact in f64, so that it rounds twice as curand does."""
    return _f32(_f32(word) * 2.0**-32 + 2.0**-33)


def scale_of(p: float, dtype: torch.dtype) -> float:
    """What ATen multiplies the kept elements by: 1 / (1 - p), in f32 for all but f64."""
    return 1.0 / (1.0 - p) if dtype is torch.float64 else _f32(1.0 / _f32(1.0 - p))


def _f32(number: float) -> float:
    return struct.unpack("f", struct.pack("f", number))[0]


# --- the ops in torch, on any device; exported files copy these functions ----------------------------------------------


def word_of(place, threads: int, vector: int):
    """(thread, block, lane) of the word for the element at `place`; of an int, a tensor of them, or an `Index`."""
    if vector == 1:
        return place % threads, place // (4 * threads), place // threads % 4
    blocks = max(vector // 4, 1)
    return place // vector % threads, place // (vector * threads) * blocks + place % vector // 4, place % vector % 4


def philox4x32(counter, key):
    """The four words of Philox4x32-10 for four counter words and two key words, tensors of int64 in [0, 2**32)."""
    (a, b, c, d), (low, high), word = counter, key, 0xFFFFFFFF
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57  # 64 bits: what overflows into the sign is shifted back and masked
        a, b, c, d = two >> 32 & word ^ b ^ low, two & word, one >> 32 & word ^ d ^ high, one & word
        low, high = low + 0x9E3779B9 & word, high + 0xBB67AE85 & word
    return a, b, c, d


def dropout_mask(state, size, stride, threads, vector, keep_below):
    """Which elements of a tensor of `size` and `stride` ATen's dropout keeps from `state`: i64[2], seed and offset."""
    thread, block, lane = word_of(torch.arange(math.prod(size), device=state.device), threads, vector)
    word, counter = 0xFFFFFFFF, (state[1] >> 2) + block
    drawn = philox4x32(
        (counter & word, counter >> 32 & word, thread, 0 * thread), (state[0] & word, state[0] >> 32 & word)
    )
    keep = torch.stack(drawn).gather(0, lane[None])[0] < keep_below
    if vector > 1:
        return keep.as_strided(size, stride)
    return torch.empty_strided(size, stride, dtype=torch.bool, device=state.device).copy_(keep.view(size))


def apply_dropout(x, mask, scale):
    """`x * mask * scale`, rounded once as ATen rounds it: halves are multiplied in f32."""
    wide = x if x.dtype is torch.float64 else x.float()
    return (wide * mask * scale).to(x.dtype)
