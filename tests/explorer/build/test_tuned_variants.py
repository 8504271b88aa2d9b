"""Tuned block sizes in what people hold: the compiled program, its text, the view, the demo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_clock import SLOW, FakeBench
from interpreter import INTERPRETED
from kernel_programs import rand
from kernels import HOPPER_GPU

import tracefuse
from tracefuse.build import tuning
from tracefuse.build.trials import Bench
from tracefuse.cli import demo
from tracefuse.cli.command import main
from tracefuse.variant import Variant
from tracefuse.widgets.payload.program import payload

compiles = pytest.mark.skipif(INTERPRETED, reason="Triton interprets in this process")


def captured() -> tracefuse.Capture:
    x = rand(64, 700).requires_grad_()
    with tracefuse.capture() as c:
        (torch.nn.functional.gelu(x).sum(0) ** 2).sum().backward()
    return c


@pytest.fixture
def on_hopper(gpu: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBench:
    """Kernels of the CPU are compiled for a GPU, and tuned by this bench."""
    bench = FakeBench({SLOW: 0.5})
    monkeypatch.setattr(tuning, "this_gpu", lambda: HOPPER_GPU)
    monkeypatch.setattr(tuning, "is_tunable", lambda kernel: True)
    monkeypatch.setattr(tuning, "TINY_S", 0.0)
    monkeypatch.setattr(Bench, "here", lambda: bench)
    monkeypatch.setattr(Variant, "runs_triton", True)
    tuning._key.cache_clear()
    return bench


@compiles
def test_a_variant_is_compiled_again_with_tuned_blocks_and_the_next_finds_them(on_hopper: FakeBench) -> None:
    variant, said = captured().optimize(), []
    first = variant.compile()
    guessed = variant.source
    tuned_program = variant.compile(tune=True, progress=lambda fraction, text: said.append(text))
    names = [name for name, one in variant.tunings.items() if not one.is_guess]
    assert names
    assert tuned_program is not first
    assert variant.source != guessed
    assert "# blocks tuned on a GPU: 2.00 x faster than the guess" in variant.source
    assert any(text.startswith("compiling 1 of ") for text in said)
    assert f"tuning 1 of {len(on_hopper.tried)} kernels" in said
    assert variant.compile(tune=True) is variant.compile() is tuned_program
    assert captured().optimize().source == variant.source, "cached tunings are always used"


@compiles
def test_the_view_says_which_kernels_are_tuned(on_hopper: FakeBench) -> None:
    variant = captured().optimize()
    assert {k["blocks"] for k in payload(variant)["kernels"]} == {"guess"}
    variant.tune()
    shown = payload(variant)
    by_name = {k["name"]: k for k in shown["kernels"]}
    for name, one in variant.tunings.items():
        assert by_name[name]["blocks"] == ("guess" if one.is_guess else "tuned")
        assert f"# {one.note}" in by_name[name]["source"]
    count = sum(not one.is_guess for one in variant.tunings.values())
    assert f"{count} of {len(variant.kernels)} kernels run with tuned block sizes" in shown["notes"][-1]["text"]


def test_on_a_cpu_tuning_says_that_there_is_nothing_to_tune() -> None:
    variant = captured().optimize()
    for act in (variant.tune, lambda: variant.compile(tune=True), lambda: variant.measure(budget_s=0.01, tune=True)):
        with pytest.warns(UserWarning, match=r"nothing is tuned: .* on the CPU; leave out tune"):
            act()


def test_the_demo_tunes_where_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "capture_step", lambda *_: captured())
    monkeypatch.setattr(demo, "write_report", lambda *_: None)
    with pytest.warns(UserWarning, match="nothing is tuned"):
        assert main(["demo", "--tune", "--budget-s", "0.01", "--out", str(tmp_path)]) == 0
