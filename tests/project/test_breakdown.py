"""The breakdown of a step's GPU time: every GPU record in one row, by operator, shapes and phase."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from cases.breakdown import BACKWARD, Row, rows_of, table, totals


def record(category: str, name: str, start: float, us: float = 1.0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": us, "args": arguments}


def matmul(ident: int, operator: str, shapes: list[list[int]], start: float, us: float) -> list[dict[str, Any]]:
    """An operator, its launch, and the kernel, which runs long after both."""
    types = ["c10::BFloat16"] * len(shapes)
    return [
        record("cpu_op", operator, start, **{"External id": ident, "Input Dims": shapes, "Input type": types}),
        record("cuda_runtime", "cudaLaunchKernel", start, correlation=ident),
        record("kernel", "nvjet_tst", start + 500, us, **{"External id": ident, "correlation": ident}),
    ]


EVENTS = [
    *matmul(1, "aten::mm", [[8, 4], [4, 2]], 10, 3.0),
    *matmul(2, "aten::mm", [[8, 4], [4, 2]], 20, 4.0),
    *matmul(3, "aten::addmm", [[2], [8, 4], [4, 2]], 30, 5.0),
    record("cuda_driver", "cuLaunchKernel", 40, correlation=4),
    record("kernel", "ours_kernel", 600, 2.0, correlation=4),
    record("user_annotation", BACKWARD, 100, 50),
    record("cpu_op", "aten::_flash_attention_backward", 110, **{"External id": 5}),
    record("cuda_runtime", "cudaLaunchKernel", 112, correlation=5),
    record("kernel", "flash_bwd", 700, 6.0, **{"External id": 5, "correlation": 5}),
    record("cuda_driver", "cuLaunchKernel", 114, correlation=6),
    record("kernel", "triton_poi_fused_add", 710, 1.0, correlation=6),
    record("cpu_op", "aten::copy_", 120, **{"External id": 7}),
    record("kernel", "cudnn_generated_sdpa_bprop", 715, 1.0, correlation=8),
    record("gpu_memcpy", "Memcpy DtoD", 720, 0.5, **{"External id": 7, "correlation": 99}),
]


def test_kernels_are_told_by_operator_shapes_and_phase():
    rows = rows_of(EVENTS, lambda kernel: kernel.startswith("ours_"))
    assert rows == [
        Row("forward", "matmul", "mm 8x4 @ 4x2 BFloat16", 2, 7.0),
        Row("backward", "attention", "_flash_attention_backward", 1, 6.0),
        Row("forward", "matmul", "addmm 8x4 @ 4x2 BFloat16", 1, 5.0),
        Row("forward", "fused", "ours_kernel", 1, 2.0),
        Row("backward", "fused", "triton_poi_fused_add", 1, 1.0),
        Row("backward", "attention", "cudnn_generated_sdpa_bprop", 1, 1.0),
        Row("backward", "rest", "aten::copy_: Memcpy DtoD", 1, 0.5),
    ]


def test_groups_add_up_to_all_gpu_records():
    sums = totals(rows_of(EVENTS, lambda _: False))
    all_us = sum(e["dur"] for e in EVENTS if e["cat"] in ("kernel", "gpu_memcpy"))
    assert sum(us for groups in sums.values() for us in groups.values()) == pytest.approx(all_us)
    assert sums["forward"]["rest"] == 2.0, "a kernel that is nobody's"


def test_the_table_has_a_column_per_program():
    text = table({"tracefuse": rows_of(EVENTS, lambda _: False), "other": []})
    matmuls = next(line for line in text.splitlines() if line.split()[:2] == ["forward", "matmul"])
    assert matmuls.split()[2:] == ["12", "0"]
