"""Tuning: which block sizes are tried, which is chosen, what is remembered, and that none changes the numbers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_clock import SLOW, WIDE, FakeBench
from interpreter import interpreted
from kernel_programs import SHAPED, rand
from kernels import HOPPER_GPU, check_kernel, kernel_of, kernel_of_types
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.build import cache, tuning
from tracefuse.build.kernels import jitted_text
from tracefuse.build.tuning import CANDIDATES, candidates, choose, is_tunable, tune, tuned
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.long_sum import long_sum
from tracefuse.optimizers.kernels.text import kernel_source, launches
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning

aten = torch.ops.aten
bf16, f32, i64 = torch.bfloat16, torch.float32, torch.int64


def gelu(rows: int = 8192, scale: int = 2) -> Kernel:
    """A pointwise kernel of a GPU: it has all the candidates."""
    return kernel_of_types(lambda x: torch.nn.functional.gelu(x) * scale, ((rows, 3072), bf16), device="cuda")


# --- choosing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "best"),
    [
        ([1.0], 0),
        ([1.0, 0.99], 0),
        ([1.02, 1.0], 1),
        ([1.0, 0.97, 0.96, 0.97], 2),
        ([1.0, 0.9, 0.9], 1),
        ([1.0, 2.0, 1.5], 0),
    ],
)
def test_the_guess_stays_unless_another_is_faster_by_two_percent(times: list[float], best: int) -> None:
    assert choose(times) == best


def test_the_guess_is_tried_first_and_equal_texts_once() -> None:
    assert candidates(gelu()) == list(CANDIDATES)
    assert CANDIDATES[0] == GUESS
    one_program = kernel_of(SHAPED["odd"][0], rand(3, 5, 7))[0]
    assert candidates(one_program) == [GUESS, Tuning(1, 1)]  # its block is the tensor: only warps differ
    for fn, shapes in SHAPED.values():
        kernel = kernel_of(fn, *(rand(*shape) for shape in shapes))[0]
        texts = {kernel_source(kernel, one) for one in CANDIDATES}
        assert len(candidates(kernel)) == len(texts)


@pytest.mark.parametrize(
    "name", ["rotary", "read along rows", "layer norm", "sums in the middle", "softmax of long rows"]
)
def test_a_tuning_changes_the_sizes_in_the_text_and_nothing_else(name: str) -> None:
    """Where no block comes to hold all there is, which needs no mask and no loop."""
    fn, shapes = SHAPED[name]
    kernel = kernel_of(fn, *(rand(*shape) for shape in shapes))[0]
    texts = [kernel_source(kernel, one) for one in candidates(kernel)]
    assert len(texts) > 2
    assert len({re.sub(r"\b\d+\b", "N", text) for text in texts}) == 1


def test_the_machine_code_of_a_pointwise_kernel_is_of_one_text() -> None:
    kernel = gelu()
    assert len({jitted_text(f"{HEADER}\n\n{kernel_source(kernel, one)}") for one in CANDIDATES}) == 1
    assert {tuple(one.blocks.values()) for t in CANDIDATES for one in launches(kernel, t)} == {
        (512,),
        (1024,),
        (2048,),
        (4096,),
    }


def test_a_note_stands_above_the_kernel_and_changes_nothing_else() -> None:
    kernel, note = gelu(), "blocks tuned on an H100: 1.08 x faster than the guess"
    noted, plain = kernel_source(kernel, Tuning(1, 1, note)), kernel_source(kernel, Tuning(1, 1))
    assert noted.splitlines()[1] == f"# {note}"
    assert noted.replace(f"# {note}\n", "") == plain


def test_only_kernels_of_a_gpu_that_have_blocks_are_tuned() -> None:
    assert is_tunable(gelu())
    assert not is_tunable(kernel_of(lambda x: x * 2, rand(3))[0])
    with FakeTensorMode():
        add = fx.Graph().placeholder("add")
        add.meta["val"] = torch.empty(4096, 4096, device="cuda")
    assert not is_tunable(long_sum(add))


# --- remembering ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU for which everything compiles at once, and an empty cache, whose folder this is."""
    monkeypatch.setenv("TRACEFUSE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuning, "this_gpu", lambda: HOPPER_GPU)
    monkeypatch.setattr(tuning, "build_all", lambda asked, report: {})
    tuning._key.cache_clear()
    return tmp_path


def test_the_fastest_is_chosen_and_found_again_without_trials(hopper: Path) -> None:
    kernel, bench = gelu(), FakeBench({WIDE: 0.8, SLOW: 3.0})
    chosen = {kernel.name: Tuning(1, 1, "blocks tuned on a GPU: 1.25 x faster than the guess")}
    assert tuned([kernel]) == {}
    assert tune([kernel], bench=bench) == chosen
    assert bench.tried == [(kernel, list(CANDIDATES))]
    assert bench.is_closed
    assert tuned([kernel]) == chosen
    unused = FakeBench({})
    assert tune([kernel, kernel], bench=unused) == chosen
    assert unused.tried == []


def test_a_guess_that_stays_is_remembered_too(hopper: Path) -> None:
    kernel = gelu()
    (found,) = tune([kernel], bench=FakeBench({WIDE: 0.99})).values()
    assert found == Tuning(note="blocks tuned on a GPU: the guess is within 2% of the fastest of 8")
    assert tuned([kernel]) == {kernel.name: found}


def test_another_text_for_the_guess_is_tuned_anew(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gelu()
    tune([kernel], bench=FakeBench({WIDE: 0.8}))
    tuning._key.cache_clear()
    monkeypatch.setattr(tuning, "kernel_source", lambda *given: kernel_source(*given) + "# another generator")
    assert tuned([kernel]) == {}


def test_another_list_of_candidates_is_tuned_anew(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gelu()
    tune([kernel], bench=FakeBench({WIDE: 0.8}))
    tuning._key.cache_clear()
    monkeypatch.setattr(tuning, "CANDIDATES", CANDIDATES[:-1])
    assert tuned([kernel]) == {}


def test_a_damaged_fact_is_found_again(hopper: Path) -> None:
    kernel, bench = gelu(), FakeBench({WIDE: 0.8})
    chosen = tune([kernel], bench=bench)
    (fact,) = [path for path in hopper.rglob("*.json") if '"tuning ' in path.read_text()]
    fact.write_text(fact.read_text()[:-20])
    with pytest.warns(UserWarning, match="is damaged"):
        assert tune([kernel], bench=bench) == chosen
    assert len(bench.tried) == 2


@pytest.mark.parametrize(
    "value", [[1, 1], {"block": 1}, {"block": "1", "warps": 1, "speedup": 1.0, "tried": 8, "gpu": ""}]
)
def test_a_fact_of_another_form_is_found_again(value: Any, hopper: Path) -> None:
    kernel = gelu()
    cache.write_json(tuning._key(kernel), value)
    assert tuned([kernel]) == {}


def test_large_kernels_are_tried_first_and_tiny_ones_not_at_all(hopper: Path) -> None:
    """At 1 TB/s 20 MB take 20 us; 1024 rows of bf16 in and out are 12.6 MB."""
    bench, said = FakeBench({}), []
    tune([gelu(4096), gelu(1024), gelu(16384)], lambda fraction, text: said.append((fraction, text)), bench=bench)
    assert [kernel for kernel, _ in bench.tried] == [gelu(16384), gelu(4096)]
    assert said == [(0.0, "tuning 1 of 2 kernels"), (0.5, "tuning 2 of 2 kernels"), (1.0, "tuned")]


def test_a_budget_leaves_the_smaller_kernels_for_the_next_time(hopper: Path) -> None:
    large, small = gelu(8192), gelu(4096)
    found = tune([small, large], budget_s=5, bench=FakeBench({WIDE: 0.8}))
    assert found[small.name] == Tuning(note="blocks guessed: other kernels' trials took 5 s; tune again")
    assert not found[large.name].is_guess
    assert not tune([small, large], budget_s=5, bench=FakeBench({WIDE: 0.8}))[small.name].is_guess


def test_tensors_that_do_not_fit_leave_the_guess_with_the_reason(hopper: Path) -> None:
    kernel, bench = gelu(), FakeBench({}, torch.OutOfMemoryError("out of memory"))
    (found,) = tune([kernel], bench=bench).values()
    assert found.is_guess
    assert "more memory than is free on the GPU; free some and tune again" in found.note
    assert tuned([kernel]) == {}
    assert bench.is_closed


def test_what_cannot_be_built_is_not_tried(hopper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, bench = gelu(scale=3), gelu(scale=5), FakeBench({})
    monkeypatch.setattr(
        tuning, "build_all", lambda asked, report: {(one, WIDE): "too large", (other, GUESS): "refused"}
    )
    assert tune([one, other], bench=bench).keys() == {one.name}
    assert bench.tried == [(one, [c for c in CANDIDATES if c != WIDE])]


def test_without_a_gpu_nothing_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "this_gpu", lambda: None)
    assert tune([gelu()]) == tuned([gelu()]) == {}


# --- numbers ----------------------------------------------------------------------------------------------------------

SHAPED_TOO = {"log_softmax of a long, odd row": (lambda x: torch.log_softmax(x, -1), [(2, 16501)])}
LAYOUTS = (
    *("odd", "broadcast costly, in the middle", "read along rows", "segments", "softmax", "layer norm", "long row"),
    *("sum of columns and what follows", "sums in the middle", "sum of everything", "columns of whole rows"),
    *("sums of segments", "log_softmax of a long, odd row"),
)


@interpreted
@pytest.mark.parametrize("extreme", [Tuning(2, 1), Tuning(-3, -1)], ids=["large", "small"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_tuning_changes_the_numbers(name: str, extreme: Tuning) -> None:
    fn, shapes = (SHAPED | SHAPED_TOO)[name]
    check_kernel(*kernel_of(fn, *(rand(*shape) for shape in shapes)), tuning=extreme)
