"""One machine code for many sizes: how many are compiled, what they take, what a launch finds, and what was timed."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernels import kernel_of_types
from triton import knobs

from tracefuse.build import across_sizes, cache
from tracefuse.build import kernels as building
from tracefuse.build.across_sizes import AcrossSizes
from tracefuse.build.kernels import WithNumbers, build, preload
from tracefuse.build.modules import HOPPER, _ptxas_report, kept_in, load, machine_code
from tracefuse.build.worker import warm
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import jitted_source

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets in this process")
LENGTHS = tuple(range(64, 257, 8)) + tuple(range(65, 257, 8))


def softmax_of(length: int, dtype: torch.dtype = torch.float32) -> Kernel:
    """Along a dimension that varies, which is a number of rows as well."""
    return kernel_of_types(lambda x: torch.softmax(x, -1), ((2, length, length), dtype))


def norm_of(length: int) -> Kernel:
    return kernel_of_types(lambda x: F.layer_norm(x, (768,)), ((3, length, 768), torch.float32))


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what is compiled from now on."""
    found: list[str] = []
    compile_them = building._compile

    def noted(missing: Sequence[Any], *rest: Any) -> Any:
        found.extend(one.key for one in missing)
        return compile_them(missing, *rest)

    monkeypatch.setattr(building, "_compile", noted)
    return found


@pytest.mark.parametrize(("kernel_at", "most"), [(softmax_of, 12), (norm_of, 4)])
def test_many_lengths_take_few_compilations(gpu: Path, tasks: list[str], kernel_at: Any, most: int) -> None:
    across = AcrossSizes()
    for length in LENGTHS:
        kernel = kernel_at(length)
        assert callable(across.launchers([kernel], {})[kernel.name])
        if length == LENGTHS[0]:
            assert len(tasks) == 1
    assert len(set(tasks)) == len(tasks) <= most < len(LENGTHS)


def launch_path(one: WithNumbers, module: ModuleType) -> list[bool]:
    """Takes the launches of a kernel up to the launch: one item per look into the disk cache, whether it was found there."""
    looks: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: looks.append(cache_hit)
    try:
        for of in one.launches:
            tensors = [torch.empty(8, dtype=dtype) for dtype in of.pointers]
            getattr(module, one.names[of.function]).warmup(
                *tensors, *of.numbers, **of.blocks, grid=(1,), num_warps=of.num_warps, enable_fp_fusion=True
            )
    finally:
        knobs.compilation.listener = None
    return looks


def taking(across: AcrossSizes, length: int) -> tuple[Kernel, WithNumbers]:
    kernel = softmax_of(length)
    return kernel, across.with_numbers([kernel], {})[kernel.name]


def test_after_preload_a_launch_of_any_size_of_that_kind_looks_nowhere(gpu: Path) -> None:
    across = AcrossSizes()
    across.with_numbers([softmax_of(65)], {})
    kernel, one = taking(across, 67)
    build([kernel], with_numbers={kernel.name: one})
    module = ModuleType("launches")
    jitted = load(one.jitted)
    vars(module).update({own: getattr(jitted, name) for own, name in one.names.items()})
    preload(module, [kernel], with_numbers={kernel.name: one})
    assert launch_path(one, jitted) == []
    _, other = taking(across, 71)
    assert (other.jitted, other.launches[0].numbers) == (one.jitted, (142, 71, 71, 71))
    assert launch_path(other, jitted) == []
    assert not gpu.exists()


class Passed(ast.NodeTransformer):
    """Puts the numbers that a launch hands over in their places, and multiplies what is a product of numbers."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.numbers[node.id]) if node.id in self.numbers else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        sides = node.left, node.right
        if isinstance(node.op, ast.Mult) and all(isinstance(one, ast.Constant) for one in sides):
            return ast.Constant(node.left.value * node.right.value)  # type: ignore[attr-defined]
        return node


def body_of(text: str, name: str, numbers: Sequence[int] = ()) -> list[str]:
    """The statements of a function that is handed `numbers`."""
    functions = [one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef)]
    (function,) = (one for one in functions if one.name == name)
    taken = [one.arg for one in function.args.args if re.fullmatch(r"n\d+", one.arg)]
    passed = Passed(dict(zip(taken, numbers, strict=True)))
    return [ast.unparse(passed.visit(one)) for one in function.body]


def test_what_runs_has_the_numbers_of_its_own_text_whatever_divides_them() -> None:
    across, compared = AcrossSizes(), 0
    for length in range(65, 129):
        kernel = softmax_of(length)
        for one in across.with_numbers([kernel], {}).values():
            (of,) = one.launches
            assert body_of(one.jitted, one.names[of.function], of.numbers) == body_of(
                jitted_source(kernel), of.function
            )
            compared += 1
    assert compared > 56  # the others are the first with their skeletons


@pytest.mark.parametrize(("first", "length"), [(70, 100), (80, 112), (70, 127)])
def test_numbers_cost_few_registers_and_no_wide_loads(gpu: Path, first: int, length: int) -> None:
    across = AcrossSizes()
    across.with_numbers([softmax_of(first)], {})
    kernel, one = taking(across, length)
    (of,), (literal,) = one.launches, machine_code(kernel)
    with kept_in(cache.machine_code_directory()):
        function = getattr(load(one.jitted), one.names[of.function])
        made = warm(function, tuple(map(str, of.pointers)), of.blocks, of.num_warps, of.numbers)
    (registers, spills), (most, _) = (_ptxas_report(code.asm["ptx"], HOPPER) for code in (made, literal))
    assert spills == 0
    assert registers <= most + 8
    assert made.asm["ptx"].count(".v4.") == literal.asm["ptx"].count(".v4.")


def test_a_kernel_that_cannot_run_is_its_ops_at_other_sizes_too(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_sizes, "build", lambda kernels, **_: {one.name: "no" for one in kernels})
    across = AcrossSizes()
    for length in (65, 67):
        kernel = softmax_of(length)
        assert across.launchers([kernel], {}) == {kernel.name: kernel}


def test_what_was_timed_at_the_first_size_decides_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other, another = softmax_of(65), softmax_of(128), norm_of(65)
    pair = TimedKernel(first.key, 2.0, 1.0, "a GPU")
    monkeypatch.setattr(across_sizes, "judge", lambda kernels, *_: [pair] if first in kernels else [])
    across = AcrossSizes()
    assert list(across.noting([first], {}, None, 1.0)) == [pair]
    assert across.told([other, another, softmax_of(65, torch.bfloat16)], {}, None, 1.0) == (
        TimedKernel(other.key, 2.0, 1.0, "a GPU, at another size"),
    )
