"""The kernel that turns a chunk of logits into their gradient, and the operator around it, against float64.

`test_numbers_under_the_interpreter` in `test_triton` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from torch import Tensor

from tracefuse.device import linear_cross_entropy_runtime as runtime
from tracefuse.device.linear_cross_entropy import TEXT
from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.linear_cross_entropy.operator import LINEAR_CROSS_ENTROPY, MOST_ROUNDINGS

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
IGNORED = -100
EPS = {f64: 1e-12, f32: 1e-6, bf16: 2.0**-7, f16: 2.0**-10}
"""Of the largest value: Triton's interpreter truncates to bfloat16 where a GPU rounds."""


# --- one chunk --------------------------------------------------------------------------------------------------------


def chunk(rows: int, classes: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits whose rows are padded with NaNs, above a row of NaNs, and their targets, one of them to ignore."""
    torch.manual_seed(rows + classes)
    memory = torch.full((rows + 1, classes + 3), float("nan"), dtype=dtype)
    logits = memory[:rows, :classes].copy_(scale * torch.randn(rows, classes))
    targets = torch.randint(classes, (rows,))
    targets[rows // 2] = IGNORED
    return logits, targets


Row = tuple[float, str, float, float, float]
"""Smoothing, activation, inner factor, shift, outer factor."""
PLAIN: Row = (0.0, "", 1.0, 0.0, 1.0)
ROWS: list[Row] = [
    (0.1, "", 1.0, 0.0, 1.0), (0.0, "", 0.0625, 0.0, 1.0), (0.0, "tanh", 1 / 3, 0.0, 3.0), (0.0, "tanh", 1e-3, 0.0, 900.0),
    (0.2, "tanh", -2.0, 0.5, 7.0), (1.0, "sigmoid", 0.5, 2.0, -5.0), (0.0, "sigmoid", 30.0, 0.0, 9.0),
]  # fmt: skip


def mapped(logits: Tensor, row: Row) -> Tensor:
    _, activation, inner, shift, outer = row
    x = inner * logits + shift
    return outer * {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "": torch.clone}[activation](x)


def expected(logits: Tensor, targets: Tensor, factor: float, row: Row = PLAIN) -> tuple[Tensor, Tensor]:
    """Losses and gradients by autograd in float64."""
    wide = logits.double().clone().requires_grad_()
    losses = torch.nn.functional.cross_entropy(
        mapped(wide, row), targets, reduction="none", ignore_index=IGNORED, label_smoothing=row[0]
    )
    losses.sum().mul(factor).backward()
    assert wide.grad is not None
    return losses.detach(), wide.grad


def by_kernel(
    logits: Tensor, targets: Tensor, factor: Tensor, losses: Tensor, is_wanted: bool, block: int, row: Row = PLAIN
) -> None:
    runtime.softmax_gradient_kernel[(logits.shape[0],)](
        logits, targets, factor, losses, logits.stride(0), logits.shape[1], IGNORED, targets.stride(0),
        is_wanted, block, *row, num_warps=4,
    )  # fmt: skip


def by_torch(
    logits: Tensor, targets: Tensor, factor: Tensor, losses: Tensor, is_wanted: bool, block: int, row: Row = PLAIN
) -> None:
    runtime.softmax_gradient_by_torch(logits, targets, factor, losses, IGNORED, is_wanted, row)


HOW = [pytest.param(by_kernel, marks=interpreted), by_torch]


def check_chunk(  # type: ignore[no-untyped-def]
    how, logits: Tensor, targets: Tensor, block: int, is_wanted: bool = True, row: Row = PLAIN
) -> None:
    wide = torch.promote_types(logits.dtype, f32)
    losses = torch.full(logits.shape[:1], float("nan"), dtype=wide)
    wanted_losses, wanted_gradient = expected(logits, targets, 0.25, row)
    before = logits.clone()
    how(logits, targets, torch.tensor(0.25, dtype=wide), losses, is_wanted, block, row)
    torch.testing.assert_close(losses.double(), wanted_losses, rtol=EPS[wide], atol=EPS[wide] * 10, equal_nan=True)
    gradient = wanted_gradient if is_wanted else before.double()
    # Where an activation is flat its slope, such as 1 - y * y, has the rounding error of 1.
    largest = 1e-2 if row is PLAIN else 0.1 * max(1.0, abs(row[2] * row[4]))
    tolerance = EPS[logits.dtype]
    torch.testing.assert_close(logits.double(), gradient, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
    assert logits._base is not None
    assert logits._base[-1].isnan().all(), "wrote beyond the rows"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=str)
@pytest.mark.parametrize(("classes", "block"), [(1, 1), (7, 8), (61, 16), (64, 64), (1000, 256)])
def test_a_chunk_of_logits(how, dtype: torch.dtype, classes: int, block: int) -> None:  # type: ignore[no-untyped-def]
    check_chunk(how, *chunk(5, classes, dtype), block)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_smoothed_labels_and_capped_logits(how, row: Row, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    check_chunk(how, *chunk(5, 61, dtype), 16, row=row)


@pytest.mark.parametrize("how", HOW)
def test_without_gradients_the_logits_stay(how) -> None:  # type: ignore[no-untyped-def]
    check_chunk(how, *chunk(4, 61, f32), 16, is_wanted=False)


@pytest.mark.parametrize("how", HOW)
def test_large_logits_and_words_that_cannot_be(how) -> None:  # type: ignore[no-untyped-def]
    logits, targets = chunk(4, 61, f32, scale=3e4)
    targets.clamp_(min=0)
    logits[0, targets[0] - 1] = float("-inf")
    logits[1, :16] = float("-inf")
    targets[1] = 20
    check_chunk(how, logits, targets, 16)


@pytest.mark.parametrize("how", HOW)
def test_a_row_that_is_not_finite_is_as_in_eager(how) -> None:  # type: ignore[no-untyped-def]
    infinity = float("inf")
    logits, targets = chunk(7, 61, f32)
    targets.clamp_(min=0)
    logits[0, targets[0] - 1], logits[1, targets[1]], logits[2] = infinity, infinity, -infinity
    logits[3, 0], logits[4, 0], logits[4, 1] = float("nan"), float("nan"), infinity
    check_chunk(how, logits, targets, 16)


@interpreted
def test_a_target_that_is_no_class_makes_its_row_nan() -> None:
    logits, targets = chunk(3, 61, f32)
    targets[:] = torch.tensor([61, 3, -7])
    losses = torch.zeros(3)
    by_kernel(logits, targets, torch.tensor(1.0), losses, True, 16)
    assert losses.isnan().tolist() == [True, False, True]
    assert logits.isnan().all(1).tolist() == [True, False, True]


# --- the operator -----------------------------------------------------------------------------------------------------


def head(dtype: torch.dtype, count: int = 23, classes: int = 61, width: int = 16) -> dict[str, Tensor]:
    torch.manual_seed(0)
    made = {"input": torch.randn(count, width), "weight": torch.randn(classes, width), "bias": torch.randn(classes)}
    targets = torch.randint(classes, (count,))
    targets[3] = IGNORED
    return {name: t.to(dtype) for name, t in made.items()} | {"target": targets}


def ran(given: dict[str, Tensor], rows: int, mean: bool = True, dtype: torch.dtype = f32) -> tuple[Tensor, ...]:
    return LINEAR_CROSS_ENTROPY(
        *given.values(), None, ignore_index=IGNORED, mean=mean, dtype=dtype, rows=rows, input_wanted=True,
        weight_wanted=True, bias_wanted=True,
    )  # fmt: skip


def reference(given: dict[str, Tensor], mean: bool = True, dtype: torch.dtype = f64) -> list[Tensor]:
    """Loss and gradients of eager, computed in `dtype`."""
    x, w, b = (given[name].to(dtype).clone().requires_grad_() for name in ("input", "weight", "bias"))
    logits = torch.nn.functional.linear(x, w, b).to(torch.promote_types(dtype, f32))
    loss = torch.nn.functional.cross_entropy(logits, given["target"], reduction="mean" if mean else "sum")
    loss.backward()
    return [loss.detach().double(), x.grad, w.grad, b.grad]  # type: ignore[list-item]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [23, 8])
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
def test_memory_that_was_never_written_is_in_no_gradient(dtype: torch.dtype, rows: int) -> None:
    """oneDNN's products in bfloat16 read past the end of a row where the processor has AMX."""
    torch.use_deterministic_algorithms(True)  # what is allocated is NaN
    try:
        found = ran(head(dtype), rows, False, torch.promote_types(dtype, f32))
    finally:
        torch.use_deterministic_algorithms(False)
    assert [one.isfinite().all().item() for one in found[:4]] == [True] * 4


@pytest.mark.parametrize("rows", [23, 24, 8, 1])
@pytest.mark.parametrize("mean", [True, False], ids=["mean", "sum"])
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
def test_it_is_as_exact_as_eager(dtype: torch.dtype, mean: bool, rows: int) -> None:
    """Against float64, on the same rounded operands: the logits are rounded as in eager, each chunk's product once more."""
    given = head(dtype)
    exact, eager = reference(given, mean), reference(given, mean, dtype)
    for found, wanted, theirs in zip(
        ran(given, rows, mean, torch.promote_types(dtype, f32)), exact, eager, strict=False
    ):
        assert error(found, wanted) <= 3 * error(theirs, wanted) + (1e-14 if dtype is f64 else 1e-9)


def test_sums_of_many_chunks_of_halves_are_as_exact_as_few() -> None:
    given = head(bf16, count=40 * 4)
    wanted = reference(given)[2]
    assert ran(given, 4)[5].dtype is f32
    assert ran(given, 4)[5].numel() == given["weight"].numel()
    assert not ran(given, 40 * 4 // MOST_ROUNDINGS)[5].numel()
    assert error(ran(given, 4)[2], wanted) <= 1.5 * error(ran(given, 40 * 4)[2], wanted)


@pytest.mark.parametrize(
    "wants", [(True, True, True), (True, False, False), (False, True, False), (False, False, False)]
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [8, 2, 64])
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_its_types_are_true(dtype: torch.dtype, rows: int, turned: bool, wants: tuple[bool, ...]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = head(dtype)
    if turned:
        given["weight"] = given["weight"].t().contiguous().t()
    options = dict(zip(("input_wanted", "weight_wanted", "bias_wanted"), wants, strict=True))
    options |= {"ignore_index": IGNORED, "mean": True, "dtype": f32, "rows": rows}
    mode = FakeTensorMode()
    fakes = [fake_tensor(mode, t.shape, t.stride(), t.dtype, t.device) for t in given.values()]
    with mode:
        promised = LINEAR_CROSS_ENTROPY(*fakes, None, **options)
    for found, fake in zip(LINEAR_CROSS_ENTROPY(*given.values(), None, **options), promised, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (fake.shape, fake.stride(), fake.dtype)


def test_the_text_for_files_stands_alone() -> None:
    space: dict[str, object] = {}
    exec(f"import torch\nimport triton\nimport triton.language as tl\n{TEXT.runtime.replace('@triton.jit', '')}", space)
    given = head(f32)
    kernel = inspect.unwrap(space["linear_cross_entropy"])  # type: ignore[arg-type]
    found = kernel(
        *given.values(), None, ignore_index=IGNORED, mean=True, dtype=f32, rows=8, input_wanted=True, weight_wanted=True,
        bias_wanted=False,
    )  # fmt: skip
    torch.testing.assert_close(found[:3], ran(given, 8)[:3])


# --- on Hopper --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="an interpreted function is not compiled")
@pytest.mark.parametrize("row", [PLAIN, *ROWS[3:6]], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_it_compiles_for_hopper_and_loads_whole_vectors(dtype: str, row: Row) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide = "fp64" if dtype == "fp64" else "fp32"
    signature = {
        "logits_ptr": f"*{dtype}", "target_ptr": "*i64", "factor_ptr": f"*{wide}", "loss_ptr": f"*{wide}",
        "row_stride": "i64", "classes": "i32", "ignore_index": "i32", "target_stride": "i32",
    }  # fmt: skip
    function = runtime.softmax_gradient_kernel
    aligned = {(at,): [["tt.divisibility", 16]] for at in (0, 1, 4)}
    names = ("IS_WANTED", "BLOCK", "SMOOTHING", "ACTIVATION", "INNER", "SHIFT", "OUTER")
    constants = dict(zip(names, (True, runtime.MOST_COLUMNS, *row), strict=True))
    source = ASTSource(function, signature | dict.fromkeys(names, "constexpr"), constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 16})
    assert "ld.global.v4.b32" in built.asm["ptx"] or "ld.global.v2.b64" in built.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("classes", "dtype"), [(50257, bf16), (131072, bf16), (262144, f16), (32000, f32), (1000, f64)]
)
def test_on_a_gpu_it_is_as_exact_as_eager(classes: int, dtype: torch.dtype) -> None:
    given = {name: t.cuda() for name, t in head(dtype, count=300, classes=classes, width=64).items()}
    exact, eager = reference(given), reference(given, dtype=dtype)
    for found, wanted, theirs in zip(
        ran(given, 128, True, torch.promote_types(dtype, f32)), exact, eager, strict=False
    ):
        assert error(found, wanted) <= 2 * error(theirs, wanted) + (1e-14 if dtype is f64 else 1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
def test_on_a_gpu_smoothed_labels_and_capped_logits(dtype: torch.dtype, row: Row) -> None:
    logits, targets = (t.cuda() for t in chunk(5, 50257, dtype))
    losses = torch.empty(5, dtype=torch.promote_types(dtype, f32), device="cuda")
    wanted_losses, wanted = expected(logits, targets, 0.25, row)
    runtime.softmax_gradient(logits, targets, losses.new_tensor(0.25), losses, IGNORED, True, row)
    assert error(losses, wanted_losses) < 10 * EPS[losses.dtype]
    assert error(logits, wanted) < EPS[dtype] + 10 * EPS[losses.dtype]


@pytest.mark.gpu
def test_on_a_gpu_no_more_logits_are_alive_than_a_chunk() -> None:
    given = {name: t.cuda() for name, t in head(bf16, count=4096, classes=50257, width=64).items()}
    ran(given, 512)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ran(given, 512)
    kept = 2 * (given["input"].numel() + given["weight"].numel())
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (512 * 50264 * 2 + kept) + 2**24
