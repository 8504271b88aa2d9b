"""Kernels whose sizes are arguments: which numbers may be some, and what runs has the numbers of its size."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import interpreted
from kernels import kernel_of, kernel_of_types, poisoned
from torch import Tensor

from tracefuse.build.across_sizes import AcrossSizes
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import jitted_source
from tracefuse.optimizers.sizes.arguments import Written, written

f32 = torch.float32


def numbers_of(*lines: str) -> tuple[int, ...]:
    """Of a jitted function with these lines, those that may be arguments."""
    text = "\n".join(
        ["@triton.jit", "def k_kernel(x_ptr, y_ptr, COLS: tl.constexpr):", *(f"    {one}" for one in lines)]
    )
    return written(text, "k").numbers


INDEX = "index = tl.program_id(0) * COLS + tl.arange(0, COLS)"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mask = index < 200", (200,)),
        ("at = index // 12 * 768 + index % 13", (12, 768, 13)),
        ("at = (index % 12).to(tl.int64) * 768", (12, 768)),
        ("at = tl.minimum(index, COLS) + 7", (7,)),
        ("for start in range(0, 300, COLS): at = start + 5", (300, 5)),
        ("for step in tl.range(0, 9, num_stages=3): at = step * 4", (9, 4)),
        ("if tl.program_id(0) < 8: at = index", (8,)),
        ("mean = tl.sum(x) / 300", (300,)),
        ("mean = tl.sum(x) / 300.0", (300,)),
    ],
)
def test_what_may_be_an_argument(line: str, expected: tuple[int, ...]) -> None:
    assert numbers_of(INDEX, line) == expected


@pytest.mark.parametrize(
    "line",
    [
        "at = tl.arange(0, 64)",  # shapes
        "sums = tl.zeros((16, 32), tl.float32)",
        "for step in tl.static_range(0, 9): pass",
        "x = tl.load(x_ptr + index) * 3",  # values, of any dtype
        "x = tl.load(x_ptr + index) < 3",
        "x = tl.where(index == index, 5, 0)",
        "x = index - 3.5",
        "x = (index & 7) + (index << 3)",
        "x = index < -100",
        "x = index.to(tl.int8) + 3",
        "at = COLS * 12",  # a constant, which shapes may need
        "at = index < 2147483648",  # more than 31 bits
        "scaled = x * 300.0 + 300.0 / x",
        "scaled = x / 300.5 + x / 1e-05",
        "mean = tl.sum(x) / 16777216",  # not every such number is one of float32
        "y = tl.load(x_ptr + index, mask=index == index, other=3)",
    ],
)
def test_what_stays_in_the_text(line: str) -> None:
    assert numbers_of(INDEX, line) == ()


def test_a_name_that_is_once_no_index_is_none() -> None:
    assert numbers_of(INDEX, "at = index", "at = tl.load(x_ptr + index)", "y = at + 3") == ()
    assert numbers_of(INDEX, "at = index", "at = at + 4", "y = at + 3") == (4, 3)


def text_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = f32) -> Written:
    kernel = kernel_of_types(function, *((shape, dtype) for shape in shapes))
    return written(jitted_source(kernel), kernel.name)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def test_sizes_of_one_kernel_have_one_skeleton_until_blocks_or_masks_differ() -> None:
    texts = [text_of(softmax, (8, size)) for size in (65, 70, 100, 127)]
    assert len({one.skeleton for one in texts}) == 1
    assert [one.names.keys() for one in texts[:2]] != [texts[0].names.keys()] * 2
    assert text_of(softmax, (8, 128)).skeleton != texts[0].skeleton  # no mask
    assert text_of(softmax, (8, 65), dtype=torch.bfloat16).skeleton != texts[0].skeleton


def test_a_number_that_aligns_keeps_its_factor_and_others_are_not_specialised() -> None:
    text = text_of(softmax, (8, 100))
    at = tuple(range(len(text.numbers)))
    assert (text.numbers, text.factors(at), text.passed(at)) == ((100, 100, 100), (4, 4, 4), (25, 25, 25))
    assert "n0 * 4" in text.taking(at).text
    assert text_of(softmax, (8, 96)).factors(at) == (1, 1, 1)  # Triton finds out that 16 divides it
    sums = text_of(lambda x: x.sum(0), (1000, 8192))
    (rows,) = [place for place, number in enumerate(sums.numbers) if number == 1000]
    assert sums.passed([rows]) == (1000,)
    assert "@triton.jit(do_not_specialize=['n0'])" in sums.taking([rows]).text


def test_a_segment_is_handed_what_it_takes() -> None:
    text = text_of(lambda x, y: torch.cat([x, y], 1).sum(0), (1000, 512), (1000, 512))
    varying = tuple(place for place, number in enumerate(text.numbers) if number != 512)
    taken = text.taking(varying)
    own = [name for name in taken.places if "segment" not in name and name != "kernel_finish"]
    segments = [name for name in taken.places if "segment" in name]
    assert len(segments) == 2
    handed = {place for name in segments for place in taken.places[name]}
    assert handed
    assert handed < set(taken.places[own[0]])  # and where the segments begin
    compile(taken.text, "text", "exec")


# --- numbers ----------------------------------------------------------------------------------------------------------


def causal(x: Tensor) -> Tensor:
    at = torch.arange(x.shape[-1])
    return torch.where(at[:, None] >= at, x, -1e9)


def of_sizes(*shape: int | str) -> Callable[[int], tuple[int, ...]]:
    return lambda size: tuple(size if one == "n" else one for one in shape)  # type: ignore[misc]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Callable[[int], tuple[int, ...]], ...]]] = {
    "pointwise": (lambda x, y: F.gelu(x) * y, (of_sizes(3, "n", 24), of_sizes(24))),
    "softmax": (softmax, (of_sizes(5, "n"),)),
    "softmax, strided": (lambda x: torch.softmax(x.transpose(1, 2), -1), (of_sizes(2, "n", 12),)),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), (of_sizes(2, "n", 24),)),
    "layer norm over n": (lambda x: F.layer_norm(x, x.shape[-1:]), (of_sizes(6, "n"),)),
    "sums down columns": (lambda x: x.sum((0, 1)), (of_sizes(4, "n", 40),)),
    "many sums down columns": (lambda x: (x * 2).sum(0), (of_sizes("n", 640),)),
    "means down columns": (lambda x: x.mean(0), (of_sizes("n", 12),)),
    "variances": (lambda x: x.var(0), (of_sizes("n", 12),)),
    "long rows": (lambda x: torch.softmax(x.flatten(1), -1), (of_sizes(2, "n", 300),)),
    "gradients of a mean": (lambda x: x.sum() / (6.0 * x.numel()), (of_sizes("n", 12),)),
    "sums of all": (lambda x: (x * x).sum(), (of_sizes("n", 12),)),
    "transposed": (lambda x, y: x.transpose(0, 1).contiguous() + y, (of_sizes(7, "n"), of_sizes("n", 7))),
    "cat": (lambda x, y: torch.cat([x, y * 2], 1), (of_sizes(3, "n"), of_sizes(3, 8))),
    "sums of a cat": (lambda x, y: torch.cat([x, y], 1).sum(0), (of_sizes("n", 64), of_sizes("n", 64))),
    "embedding": (lambda x: F.embedding(torch.arange(len(x)), x), (of_sizes("n", 24),)),
    "logsumexp": (lambda x: x.logsumexp(-1), (of_sizes("n", 20),)),
    "causal": (causal, (of_sizes(2, "n", "n"),)),
    "cumulative": (lambda x: x.cumsum(-1), (of_sizes(4, "n"),)),
}
LARGE = (37, 41, 64, 100, 129, 63, 48, 77, 90, 110, 96, 128, 103, 115, 71, 82, 121, 54, 66, 52)
SMALL = (2, 3, 15, 16, 17, 31)
MOST_TEXTS = 10
"""Of functions, with numbers in them or without, for all large sizes."""


@interpreted
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_of_any_size_has_the_numbers_of_eager(name: str) -> None:
    function, shapes = PROGRAMS[name]
    across, served, made = AcrossSizes(), 0, list[int]()
    for size in (*LARGE, *SMALL):
        torch.manual_seed(size)
        inputs = [torch.randn(shape(size), dtype=torch.float64) for shape in shapes]
        kernel, given = kernel_of(function, *inputs)
        run = across.launchers([kernel], {})[kernel.name]
        served += kernel.name in across.with_numbers([kernel], {})
        with poisoned():
            found = run(*given)
        torch.testing.assert_close(found, function(*inputs), rtol=1e-9, atol=1e-11)
        made.append(sum(map(len, across.texts.values())) + sum(map(len, across.versions.values())))
    assert served >= len(LARGE) // 2
    assert made[len(LARGE) - 1] <= MOST_TEXTS


# --- machine code -----------------------------------------------------------------------------------------------------


def launched(across: AcrossSizes, kernels: list[Kernel]) -> list[Any]:
    return [one.launches for one in across.with_numbers(kernels, {}).values()]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
def test_a_width_stays_in_the_text() -> None:
    """Two kernels of one graph that differ in it alone, at two sizes."""
    across = AcrossSizes()
    kernels = [[kernel_of_types(softmax, ((rows, width), f32)) for width in (100, 200)] for rows in (65, 70)]
    assert across.with_numbers(kernels[0], {}) == {}
    wide = [kernel_of_types(lambda x: x.sum(0), ((rows, 640), f32)) for rows in (1000, 1001, 1500)]
    across = AcrossSizes()
    assert launched(across, wide[:1]) == []
    ((first, *_),) = launched(across, wide[1:2])
    assert first.numbers == (1001,)
