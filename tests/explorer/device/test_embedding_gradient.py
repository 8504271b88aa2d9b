"""The kernels that add gradients of an embedding to a total, and the operator around them, against float64.

`test_numbers_under_the_interpreter` in `test_triton` runs this file with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from interpreter import INTERPRETED, interpreted
from torch import Tensor

from tracefuse.device import embedding_gradient_runtime as runtime
from tracefuse.device.embedding_gradient import TEXT
from tracefuse.optimizers.decompose.embeddings import ADD_EMBEDDING_GRADIENT
from tracefuse.optimizers.fakes.made import fake_tensor

f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS = {f64: 1e-14, f32: 2e-6, bf16: 2.0**-7, f16: 2.0**-10}
"""Of a sum's largest magnitude: Triton's interpreter truncates to bfloat16 where a GPU rounds."""


# --- places -----------------------------------------------------------------------------------------------------------

ROWS = 61


def drawn(count: int, rows: int = ROWS) -> Tensor:
    return torch.randint(rows, (count,))


def few_words(count: int, rows: int = ROWS) -> Tensor:
    """As of text: one word in two is one of three."""
    return torch.where(torch.rand(count) < 0.5, torch.randint(3, (count,)) * 20, drawn(count, rows))


def all_equal(count: int, rows: int = ROWS) -> Tensor:
    return torch.full((count,), 17)


def in_turn(count: int, rows: int = ROWS) -> Tensor:
    return torch.arange(count) % rows


def whole_chunks(count: int, rows: int = ROWS) -> Tensor:
    """Runs that begin and end where chunks do."""
    return torch.arange(count) // runtime.FEWEST_PLACES % rows


def last_row(count: int, rows: int = ROWS) -> Tensor:
    return torch.full((count,), rows - 1)


PLACES = [drawn, few_words, all_equal, in_turn, whole_chunks, last_row]


def expected(total: Tensor, gradient: Tensor, indices: Tensor, padding_idx: int) -> tuple[Tensor, Tensor]:
    """The result in float64, and the sums of magnitudes that its rounding is one of."""
    wide, rows = gradient.reshape(-1, total.shape[1]).double(), indices.reshape(-1).long()
    wide = wide * (rows != padding_idx)[:, None]
    return tuple(t.double().clone().index_add_(0, rows, g) for t, g in ((total, wide), (total.abs(), wide.abs())))  # type: ignore[return-value]


def check(found: Tensor, total: Tensor, gradient: Tensor, indices: Tensor, padding_idx: int = -1) -> None:
    wanted, magnitude = expected(total, gradient, indices, padding_idx)
    error = (found.double() - wanted).abs()
    assert (error <= EPS[total.dtype] * (magnitude + 1e-3 * (total.dtype is bf16))).all(), error.max()


def added(total: Tensor, gradient: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
    """By the kernels, in place of a copy that stands between rows of NaNs."""
    memory = torch.full((total.shape[0] + 2, total.shape[1]), float("nan"), dtype=total.dtype, device=total.device)
    inside = memory[1:-1].copy_(total)
    runtime.add_sorted_rows(inside, gradient, *runtime.sorted_places(indices, total.shape[0]), padding_idx)
    assert memory[0].isnan().all()
    assert memory[-1].isnan().all()
    return inside


@pytest.fixture
def _poisoned() -> Any:
    """What is allocated is NaN, so that a piece that nobody wrote is seen in the sums."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- the kernels ------------------------------------------------------------------------------------------------------


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("places", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 131, 640])
def test_the_kernels(places: Any, count: int) -> None:
    torch.manual_seed(count)
    total, gradient, indices = torch.randn(ROWS, 24), torch.randn(count, 24), places(count)
    check(added(total, gradient, indices), total, gradient, indices)


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("dtype", [f64, f32, bf16, f16], ids=str)
@pytest.mark.parametrize("width", [1, 3, 130, 300])
def test_types_and_widths(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    total, gradient = torch.randn(ROWS, width).to(dtype), torch.randn(83, width).to(dtype)
    for indices in (few_words(83), all_equal(83)):
        check(added(total, gradient, indices), total, gradient, indices)


@interpreted
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("padding_idx", [0, 17, 20, ROWS - 1])
@pytest.mark.parametrize("places", [few_words, all_equal, whole_chunks], ids=lambda f: f.__name__)
def test_padding_takes_no_gradient(places: Any, padding_idx: int) -> None:
    torch.manual_seed(padding_idx)
    total, gradient, indices = torch.randn(ROWS, 8), torch.randn(100, 8), places(100)
    gradient[indices == padding_idx] = float("nan")
    found = added(total, gradient, indices, padding_idx)
    check(found, total, gradient.nan_to_num(), indices, padding_idx)
    assert torch.equal(found[padding_idx], total[padding_idx])


@interpreted
@pytest.mark.parametrize("places", [32, 128])
def test_more_places_than_chunks_of_the_least_size_hold(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MOST_CHUNKS", 700 // places)
    torch.manual_seed(places)
    total, gradient = torch.randn(ROWS, 8), torch.randn(700, 8)
    for indices in (few_words(700), all_equal(700)):
        check(added(total, gradient, indices), total, gradient, indices)


@interpreted
def test_a_run_of_more_pieces_than_a_tile() -> None:
    total, gradient = torch.randn(ROWS, 4), torch.randn(16 * 70 + 5, 4)
    indices = all_equal(len(gradient))
    check(added(total, gradient, indices), total, gradient, indices)


@interpreted
@pytest.mark.parametrize("rows", [2**15, 2**16, 2**16 + 1])
def test_rows_that_16_bits_name_and_rows_that_they_do_not(rows: int) -> None:
    total, gradient = torch.zeros(rows, 1), torch.randn(40, 1)
    indices = torch.cat([torch.tensor([0, rows - 1, 2**15 - 1, rows - 1, 2**15 % rows]), torch.randint(rows, (35,))])
    keys, _, _ = runtime.sorted_places(indices, rows)
    assert keys.dtype is (torch.int16 if rows <= 2**16 else torch.int32)
    check(added(total, gradient, indices), total, gradient, indices)


@interpreted
def test_strided_and_expanded_gradients() -> None:
    total, indices = torch.randn(ROWS, 6), few_words(50)
    turned, expanded = torch.randn(6, 50).t(), torch.randn(6).expand(50, 6)
    for gradient in (turned, expanded, torch.randn(50, 12)[:, ::2], torch.ones(()).expand(50, 6)):
        check(added(total, gradient, indices), total, gradient, indices)


@interpreted
def test_places_that_are_no_rows_write_nothing() -> None:
    total, gradient = torch.randn(ROWS, 6), torch.randn(5, 6)
    indices = torch.tensor([3, -1, ROWS, 2**14, 3])
    check(added(total, gradient, indices), total, gradient[[0, 4]], indices[[0, 4]])


# --- the operator -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("shape", [(40,), (5, 8), (2, 5, 4), (0,), (3, 0)])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_the_operator(dtype: torch.dtype, shape: tuple[int, ...], index_dtype: torch.dtype) -> None:
    total, gradient = torch.randn(ROWS, 7).to(dtype), torch.randn(*shape, 7).to(dtype)
    indices, before = torch.randint(ROWS, shape, dtype=index_dtype), total.clone()
    found = ADD_EMBEDDING_GRADIENT(total, gradient, indices, 4)
    check(found, total, gradient, indices, 4)
    assert torch.equal(total, before)
    assert found.data_ptr() != total.data_ptr()


def test_it_writes_over_what_it_is_told() -> None:
    total, gradient, indices = torch.randn(ROWS, 7), torch.randn(40, 7), drawn(40)
    wanted = runtime.add_embedding_gradient(total, gradient, indices, -1)
    turned = total.t().contiguous().t()
    assert torch.equal(runtime.add_embedding_gradient(turned, gradient, indices, -1, over=turned), wanted)
    assert torch.equal(turned, total)
    found = runtime.add_embedding_gradient(total, gradient, indices, -1, over=total)
    assert torch.equal(found, wanted)
    assert found.data_ptr() == total.data_ptr()


@pytest.mark.parametrize("is_turned", [False, True])
def test_its_type_is_true(is_turned: bool) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    total = torch.randn(7, ROWS).t() if is_turned else torch.randn(ROWS, 7)
    given, mode = (total, torch.randn(4, 7), drawn(4)), FakeTensorMode()
    fakes = [fake_tensor(mode, t.shape, t.stride(), t.dtype, t.device) for t in given]
    with mode:
        promised = ADD_EMBEDDING_GRADIENT(*fakes, -1)
    found = ADD_EMBEDDING_GRADIENT(*given, -1)
    assert (found.shape, found.stride(), found.dtype) == (promised.shape, promised.stride(), promised.dtype)


def test_the_text_for_files_stands_alone() -> None:
    space: dict[str, Any] = {}
    exec(f"import torch\nimport triton\nimport triton.language as tl\n{TEXT.runtime.replace('@triton.jit', '')}", space)
    total, gradient, indices = torch.randn(ROWS, 7), torch.randn(40, 7), drawn(40)
    found = inspect.unwrap(space["add_embedding_gradient"])(total, gradient, indices, -1)
    check(found, total, gradient, indices)


# --- on Hopper --------------------------------------------------------------------------------------------------------


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers and bytes of stack, which spills take, as ptxas reports them."""
    import triton

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


@pytest.mark.skipif(INTERPRETED, reason="an interpreted function is not compiled")
@pytest.mark.parametrize("key", ["i16", "i32"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_they_compile_for_hopper_and_load_whole_vectors(dtype: str, key: str, tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide, lowest = "fp64" if dtype == "fp64" else "fp32", -(2**15) if key == "i16" else 0
    pointers = {"total_ptr": dtype, "gradient_ptr": dtype, "keys_ptr": key, "order_ptr": "i64", "pieces_ptr": wide}
    common = {"LOWEST": lowest, "PLACES": 16}
    for function, constants, warps in (
        (runtime.add_runs_kernel, common | {"column_stride": 1, "BLOCK": 256}, 1),
        (runtime.add_pieces_kernel, common | {"TILE": 32, "BLOCK": 128}, 4),
    ):
        types = {
            name: "constexpr" if name in constants else f"*{pointers[name]}" if name in pointers else "i32"
            for name in function.arg_names
        }
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, (name, kind) in enumerate(types.items())
            if kind != "constexpr" and name != "padding_idx"
        }
        source = ASTSource(function, types, constants, aligned)
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        assert "ld.global.v4.b32" in built.asm["ptx"] or "ld.global.v2.b64" in built.asm["ptx"]
        used = resources(built.asm["cubin"], tmp_path)
        assert used["STACK"] == used["LOCAL"] == 0
        assert used["REG"] <= 128


def on_gpu(count: int, rows: int, width: int, dtype: torch.dtype, places: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.randn(rows, width, device="cuda"), torch.randn(count, width, device="cuda")
    return made[0].to(dtype), made[1].to(dtype), places(count, rows).cuda()


@pytest.mark.gpu
@pytest.mark.usefixtures("_poisoned")
@pytest.mark.parametrize("places", PLACES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("count", "rows", "width", "dtype"),
    [(8192, 50304, 768, f32), (8192, 50257, 769, bf16), (5000, 100, 33, f16), (3000, 70001, 65, f64),
     (100_003, 32000, 256, f32)],
)  # fmt: skip
def test_on_a_gpu(places: Any, count: int, rows: int, width: int, dtype: torch.dtype) -> None:
    total, gradient, indices = on_gpu(count, rows, width, dtype, places)
    before = total.clone()
    found = ADD_EMBEDDING_GRADIENT(total, gradient, indices, 5)
    check(found, total, gradient, indices, 5)
    assert torch.equal(total, before)
    over = runtime.add_embedding_gradient(total, gradient, indices, 5, over=total)
    assert torch.equal(over, found), "other bits in another run"
    assert over.data_ptr() == total.data_ptr()


@pytest.mark.gpu
def test_on_a_gpu_in_a_graph() -> None:
    total, gradient, indices = on_gpu(8192, 50304, 768, f32, few_words)
    wanted, into = ADD_EMBEDDING_GRADIENT(total, gradient, indices, -1), torch.empty_like(total)

    def run() -> None:
        into.copy_(total)
        runtime.add_embedding_gradient(into, gradient, indices, -1, over=into)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        into.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(into, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("padding_idx", [-1, 1])
@pytest.mark.parametrize(
    ("count", "rows", "width"), [(1, 1, 1), (40, 1, 1), (1, 70000, 1), (40, 70000, 3), (40, 2, 17)]
)
def test_on_a_gpu_sizes_of_one(count: int, rows: int, width: int, padding_idx: int) -> None:
    """Triton makes constants of arguments that are 1."""
    total, gradient, indices = on_gpu(count, rows, width, f32, drawn)
    check(ADD_EMBEDDING_GRADIENT(total, gradient, indices, padding_idx), total, gradient, indices, padding_idx)
    turned = gradient.t().contiguous().t()
    found = ADD_EMBEDDING_GRADIENT(total, turned, indices.int(), padding_idx)
    assert torch.equal(found, ADD_EMBEDDING_GRADIENT(total, gradient, indices, padding_idx))
