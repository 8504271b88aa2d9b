"""ATen's dropout numbers: Philox against its published vectors, the index algebra against ATen's loops, the comparison."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuda_traces import drawn_by_aten, mask_by_aten, philox
from torch import Tensor

from tracefuse.optimizers.facts import is_dense
from tracefuse.optimizers.formulas.philox import (
    BLOCK,
    dropout_mask,
    increment,
    keep_below,
    launched_threads,
    philox4x32,
    scale_of,
    vector_size,
    word_of,
)
from tracefuse.optimizers.lowering.indexing import variable

f64, f32, f16, bf16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
ALL = 0xFFFFFFFF

# Random123's `kat_vectors`, philox 4x32 10: counter, key, result.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ALL] * 4, [ALL] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_yields_the_published_words(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox4x32([torch.tensor([c]) for c in counter], [torch.tensor(k) for k in key])
    assert [int(w) for w in words] == expected
    assert list(philox(counter, key)) == expected, "the tests' own"


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
@pytest.mark.parametrize("numel", [8, 248, 256, 512, 1024, 2048, 5000, 40 * 512 + 8])
def test_every_element_has_the_word_that_atens_loop_gives_it(numel: int, vector: int) -> None:
    threads = launched_threads(numel, 2 * BLOCK)
    found = dict(drawn_by_aten(numel, threads, vector))
    assert found == {e: word_of(e, threads, vector) for e in range(numel)}


@pytest.mark.parametrize("numel", [1, 7, 255, 257, 1023, 5001])
def test_odd_sizes_go_by_row_major_order(numel: int) -> None:
    threads = launched_threads(numel, 2 * BLOCK)
    assert dict(drawn_by_aten(numel, threads, 1)) == {e: word_of(e, threads, 1) for e in range(numel)}


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_the_same_algebra_writes_the_text_of_kernels(vector: int) -> None:
    numel, threads = 5000, 512
    texts = [index.text for index in word_of(variable("place", numel, frozenset()), threads, vector)]
    for place in (0, 1, 7, 511, 512, 2047, 2048, 4999):
        assert tuple(eval(text, {"place": place}) for text in texts) == word_of(place, threads, vector)


def test_where_one_step_is_enough_nothing_is_divided_by_it() -> None:
    thread, block, lane = word_of(variable("place", 1024, frozenset()), 1024, 4)
    assert (thread.text, block.text, lane.text) == ("place // 4", "0", "place % 4")


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("numel", [8, 512, 2048, 2056, 40 * 512])
def test_the_generator_moves_by_the_words_that_a_thread_draws(numel: int, vector: int) -> None:
    """With 2 or 8 neighbours ATen may draw more than it says; the next op's words then overlap, as they do in eager."""
    threads = launched_threads(numel, 2 * BLOCK)
    drawn = 4 * (1 + max(block for _, (_, block, _) in drawn_by_aten(numel, threads, vector)))
    assert drawn == increment(numel, threads)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.3, 0.5, 0.999, 1 - 2.0**-24])
@pytest.mark.parametrize("dtype", [f32, f64])
def test_the_comparison_is_curands_uniform(p: float, dtype: torch.dtype) -> None:
    below = keep_below(p, dtype)
    near = [w for w in range(below - 300, below + 300) if 0 <= w <= ALL]
    words = np.array([*near, 0, 1, 127, 128, ALL - 128, ALL - 127, ALL], dtype=np.uint32)
    uniform = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    keep = np.float64(1.0 - p) if dtype is f64 else np.float32(1.0 - p)
    assert ((uniform < keep) == (words < below)).all()


def test_probability_zero_drops_the_words_whose_uniform_rounds_to_one() -> None:
    assert keep_below(0.0, f32) == 2**32 - 128


def test_the_scale_is_rounded_as_atens() -> None:
    keep = np.float32(1.0 - 0.1)
    assert scale_of(0.1, bf16) == float(np.float32(1.0 / np.float64(keep)))
    assert scale_of(0.1, f64) == 1.0 / 0.9


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(64, dtype=f64), 2),
        (torch.empty(64, dtype=f32), 4),
        (torch.empty(64, dtype=bf16), 8),
        (torch.empty(12, dtype=f16), 4),
        (torch.empty(66, dtype=bf16), 2),
        (torch.empty(65, dtype=f32), 1),
        (torch.empty(65, dtype=f32)[1:], 1),
        (torch.empty(66, dtype=f32)[2:], 2),
        (torch.empty(4, 6, dtype=f32).t(), 4),
        (torch.empty(8, 8, dtype=f32)[:, :4], 1),
        (torch.empty(8, dtype=f32).expand(4, 8), 1),
        (torch.empty(4, 1, 8, dtype=f32).as_strided((4, 1, 8), (8, 99, 1)), 4),
    ],
)
def test_neighbours_that_a_thread_takes_at_once(tensor: Tensor, expected: int) -> None:
    assert vector_size(tensor) == expected


def test_dense_is_what_keeps_its_strides_in_empty_like() -> None:
    shapes = [torch.empty(3, 4), torch.empty(3, 4).t(), torch.empty(2, 3, 4).permute(1, 2, 0), torch.empty(6, 4)[::2]]
    shapes += [torch.empty(1, 5), torch.empty(3).expand(2, 3), torch.empty(()), torch.empty(4, 4)[1:3]]
    for tensor in shapes:
        assert is_dense(tuple(tensor.shape), tensor.stride()) == (torch.empty_like(tensor).stride() == tensor.stride())


@pytest.mark.parametrize("dtype", [f64, f32, bf16])
@pytest.mark.parametrize(
    "x",
    [
        torch.empty(6, 100),
        torch.empty(7, 33),
        torch.empty(8, 72).t(),
        torch.empty(7, 33).t(),
        torch.empty(16, 64)[:, ::2],
        torch.empty(3, 1000),
        torch.empty(1),
    ],
    ids=lambda x: f"{list(x.shape)}{list(x.stride())}",
)
@pytest.mark.parametrize("state", [(0, 0), (1234567890123, 8), (2**63 - 5, 2**40)])
def test_the_mask_is_atens(x: Tensor, dtype: torch.dtype, state: tuple[int, int]) -> None:
    """Bit for bit what ATen's loop writes, which follows memory where it can and row-major order where not."""
    x = torch.empty(0, dtype=dtype).set_(torch.empty(4096, dtype=dtype).untyped_storage(), 0, x.shape, x.stride())
    threads, vector, like = launched_threads(x.numel(), 2 * BLOCK), vector_size(x), torch.empty_like(x)
    found = dropout_mask(
        torch.tensor(state), list(x.shape), list(like.stride()), threads, vector, keep_below(0.3, dtype)
    )
    keep = 0.7 if dtype is f64 else float(np.float32(1 - 0.3))
    expected = mask_by_aten(x.numel(), threads, vector, keep, state)
    expected = expected.as_strided(x.shape, like.stride()) if vector > 1 else expected.view(x.shape)
    assert torch.equal(found, expected)
    assert found.stride() == like.stride()


def test_a_seed_of_64_bits_is_the_same_bits_signed() -> None:
    state = torch.tensor([-3, 4])
    found = dropout_mask(state, [40], [1], 256, 4, 2**31)
    assert torch.equal(found, mask_by_aten(40, 256, 4, 0.5, (2**64 - 3, 4)))
