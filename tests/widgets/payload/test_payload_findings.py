"""Findings as the view has them: parts of a time, what can be tried, and what a replay said, in every form."""

from __future__ import annotations

import functools
import html
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from cuda_traces import with_leaf_on_the_cpu
from findings import kind_said

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.diagnose.fixes import NO_GPU
from tracefuse.errors import FixError
from tracefuse.measure.launches import HOST_US
from tracefuse.text import time_text
from tracefuse.widgets.html import to_html
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_static_form, to_text
from tracefuse.widgets.view.answering import IDLE
from tracefuse.widgets.view.explorer import Explorer

CASTS = "weights-cast-each-step"
COPIED = "cpu-leaf"


@cache
def autocast() -> tracefuse.Capture:
    return tracefuse.capture(programs.autocast_step())


def cpu_leaf() -> tracefuse.Capture:
    """A capture whose trace is that of a GPU, with the leaf on the CPU."""
    input_ts, freqs = torch.randn(6, 2, 3, 16, requires_grad=True), torch.randn(6, 1, 1, 16, dtype=torch.float64)
    with tracefuse.capture() as c:
        out = programs.apply_rope(input_ts.double(), freqs).sum()
        out.backward()
    return tracefuse.Capture(functools.partial(replace, c.program, trace=with_leaf_on_the_cpu(c.trace, "input_ts")))


def record(shown: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = [one for one in shown["findings"] if one["id"] == name]
    return one


@pytest.fixture
def explorer() -> Explorer:
    return Explorer(autocast().variant(Config.off()), budget_s=0.1)


def ask(explorer: Explorer, finding: str, choice: int = 0) -> None:
    explorer._on_message(explorer, {"type": "try", "finding": finding, "choice": choice}, [])


def test_bars_and_trials_of_a_cpu_leaf_are_shown_and_in_the_text() -> None:
    shown = json.loads(json.dumps(payload(cpu_leaf().variant(Config.off())), allow_nan=False))
    one = record(shown, COPIED)
    assert [bar["label"] for bar in one["bars"]] == ["wait", "copy @ 1.3 GB/s"]
    assert len(one["trials"]) == 2
    assert [trial["said"] for trial in one["trials"]] == ["", ""]
    assert "fixes" not in one
    for text in (to_text(shown), to_static_form(shown)):
        assert "copy @ 1.3 GB/s" in text
        assert "input_ts.double()" in text
        assert "modelled: pageable host memory" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is shown where there is no GPU")
def test_without_the_gpu_trials_say_what_they_need() -> None:
    shown = payload(cpu_leaf().variant(Config.off()))
    assert {trial["blocked"] for one in shown["findings"] for trial in one["trials"]} == {NO_GPU}


def test_an_id_stays_while_times_change() -> None:
    findings = autocast().variant(Config.off()).findings()
    assert len({one.key for one in findings}) == len(findings)
    assert findings[0].key == replace(findings[0], worth="now measured", severity="low").key


def test_the_view_tries_a_fix_and_keeps_what_it_said(explorer: Explorer) -> None:
    one = record(explorer.payload, CASTS)
    assert one["trials"][0]["said"] == ""
    ask(explorer, one["key"])
    assert explorer.status == IDLE
    trial = record(explorer.payload, CASTS)["trials"][0]
    assert "measured on CPU" in trial["said"]
    assert "ms a step" in trial["said"]
    assert trial["verdict"] in trial["said"]
    assert trial["said"] in str(explorer)
    (held,) = [text for text in to_html(explorer.variant, "c", explorer.held).split("<script") if 'id="held"' in text]
    first = decode(held.split(">", 1)[1].split("</script>")[0])["payloads"][0]
    assert record(first, CASTS)["trials"] == [trial]
    explorer.configure({"simplify": True})
    assert record(explorer.payload, CASTS)["trials"][0]["said"] == "", "of another configuration"
    explorer.configure({"simplify": False})
    assert record(explorer.payload, CASTS)["trials"] == [trial]


def test_a_session_file_keeps_what_was_tried(explorer: Explorer, tmp_path: Path) -> None:
    explorer.try_fix(record(explorer.payload, CASTS)["key"])
    (said,) = record(explorer.payload, CASTS)["trials"]
    for inputs in (False, True):
        loaded = tracefuse.load(explorer.variant.capture.save(tmp_path / f"{inputs}.tfz", inputs=inputs))
        shown = Explorer(loaded.variant(Config.off())).payload
        assert record(shown, CASTS)["trials"] == [said]
        assert (shown["blocked"] is None) == inputs
    trial = loaded.variant(Config.off()).try_fix(loaded.variant(Config.off()).findings()[0], budget_s=0.1)
    assert trial.difference.gradients == 0


def test_the_finding_of_a_session_file_without_inputs_is_that_of_the_trace(tmp_path: Path) -> None:
    loaded = tracefuse.load(cpu_leaf().save(tmp_path / "a.tfz"))
    one = record(payload(loaded.variant(Config.off())), COPIED)
    assert "`input_ts`" in one["title"]
    assert len(one["bars"]) == 2
    assert dict(one["evidence"])["forward"] == "moves `input_ts` from pageable memory"


def test_what_python_tries_is_shown_too(explorer: Explorer) -> None:
    explorer.try_fix(record(explorer.payload, CASTS)["key"])
    assert record(explorer.payload, CASTS)["trials"][0]["said"]


def test_a_finding_that_is_gone_is_answered_where_it_was_asked(explorer: Explorer) -> None:
    ask(explorer, "nothing", 3)
    error = explorer.status["error"]
    assert (error["panel"], error["at"]) == ("findings", "nothing 3")
    assert "gone" in error["message"]
    with pytest.raises(FixError, match="gone"):
        Measured().fix(explorer.variant, None, record(explorer.payload, CASTS)["key"], 7)


def test_passes_that_are_on_are_not_offered() -> None:
    capture = tracefuse.capture(programs.rope_full(torch.float32).run)
    plain, fused = (payload(capture.variant(config)) for config in (Config.off(), Config.of(fuse=False)))
    assert len(record(plain, "unfused-pointwise")["trials"]) == 1
    assert record(plain, "cat-of-nothing")["trials"][0]["does"] == "1 concatenation left out"
    assert record(fused, "cat-of-nothing") == record(fused, "cat-of-nothing") | {
        "is_mended": True,
        "mended": "mended by `simplify` in this configuration",
        "mended_by": ("simplify",),
        "trials": [],
    }  # fmt: skip


class Masked(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(torch.ones(x.shape[-1], x.shape[-1]).tril() == 0, 0.0)


def test_what_a_pass_mends_is_still_shown_and_says_by_which() -> None:
    model, x = torch.nn.Sequential(*(Masked() for _ in range(6))), torch.randn(256, 256, requires_grad=True)
    capture = tracefuse.capture(lambda: model(x).sum().backward())
    shown = {on: record(payload(capture.optimize(simplify=on)), "computed-again") for on in (True, False)}
    assert (shown[True]["is_mended"], shown[False]["is_mended"]) == (True, False)
    assert shown[True]["mended"].startswith("mended by `simplify`")
    assert shown[True]["title"] == shown[False]["title"]


def test_of_a_pass_that_is_on_the_view_says_why_it_left_something() -> None:
    x, w = (torch.randn(n, 1024, dtype=torch.bfloat16, requires_grad=True) for n in (128, 1003))
    v = tracefuse.capture(lambda: (x @ w.t()).sum().backward()).optimize()
    one = record(payload(v), "unaligned-matmul")
    assert "`pad` is on; left: " in one["mended"]
    assert (one["changes"], one["trials"]) == (None, [])
    assert one["mended"] in {finding.mended for finding in v.findings()}


_TIME = re.compile(r"\d[\d.,]*(?:e-?\d+)? (?:ns|µs|ms|s)\b")
_KIND = re.compile(r"\b(measured|predicted|modelled)\b")


def test_every_time_of_a_finding_says_how_it_is_known(measured_steps: list[dict[str, Any]]) -> None:
    for shown in measured_steps:
        for one in shown["findings"]:
            said = [text for _, text in one["evidence"]] + [one["worth"], one["mended"]]
            unmarked = [text for text in said if _TIME.search(text) and not _KIND.search(text)]
            assert unmarked == []
            assert one["kind"] == kind_said(one["worth"])
            assert bool(one["kind"]) or not _TIME.search(one["worth"])


def test_what_is_modelled_beside_a_measured_step_names_both_kinds() -> None:
    x, seen = torch.randn(512, 64), torch.randn(512, 64, requires_grad=True)

    def step() -> None:
        out = x * seen
        out.softmax(-1).sqrt()
        out.sum().backward()

    variant = tracefuse.capture(step).optimize()
    modelled = variant.op_times
    measured = replace(modelled, provenance="measured on a test")
    (one,) = (one for one in variant.baseline.findings(captured=measured) if one.id == "never-used")
    assert one.kind == "modelled"
    assert one.worth.endswith("; the step: measured on a test)")
    (one,) = (one for one in variant.baseline.findings(captured=modelled) if one.id == "never-used")
    assert "; the step: " not in one.worth


@pytest.fixture(scope="module")
def measured_steps() -> list[dict[str, Any]]:
    """A program with findings of several kinds, modelled, then measured on the CPU that it ran on."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    x, seen = torch.randn(512, 64), torch.randn(512, 64, requires_grad=True)

    def step() -> None:
        out = model(x * seen)
        out.softmax(-1).sqrt()
        torch.cat([out, out]).sigmoid().sum().backward()

    explorer = tracefuse.capture(step).optimize().explore()
    explorer.budget_s = 0.1
    shown = [explorer.payload]
    explorer.measure()
    explorer.show_times_of("here")
    return [*shown, explorer.payload]


def test_the_text_tells_which_lines_of_a_library_a_line_of_the_project_called() -> None:
    """Without them all findings of a model from a library are told at the one line that calls it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
    tokens = torch.zeros(2, 32, dtype=torch.long)
    with tracefuse.capture() as c:
        model(input_ids=tokens, labels=tokens).loss.backward()
    shown = payload(c.variant(Config.off()))
    evidence = [dict(one["evidence"]) for one in shown["findings"]]
    inside = [one["in the library"] for one in evidence if "in the library" in one]
    assert any("modeling_gpt2.py:" in line for line in inside)
    for line in inside:
        assert f"  in the library: {line}\n" in to_text(shown)
        assert html.escape(f"in the library: {line}") in to_static_form(shown)


def test_small_findings_are_sent_beside_their_count() -> None:
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    variant = tracefuse.capture(lambda: model(*data).backward()).optimize()
    shown = payload(variant)
    assert [one["key"] for one in shown["small"]] == [one.key for one in variant.findings().below]
    assert bool(shown["small"]) == bool(shown["below"])


def test_where_launches_bind_the_worth_of_an_action_is_in_launches() -> None:
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    shown = payload(tracefuse.capture(lambda: model(*data).backward()).variant(Config.off()))
    assert shown["clock"]["launches"] is not None
    count = 0
    actions = shown["sentence"]["actions"]
    assert "cuda graph" in [one["key"] for one in actions]
    for action in (one for one in actions if one["key"] != "cuda graph"):
        (finding,) = [one for one in shown["findings"] if one["key"] == action["key"]]
        if finding["values"] and finding["kind"]:
            spared, whole = len(finding["values"]), shown["clock"]["launches"][0]
            amount = f"{time_text(HOST_US * spared)} of {time_text(HOST_US * whole)}"
            assert finding["launches"] == spared
            assert action["worth"] == f"spares up to {amount}: {spared} of {whole} launches"
            count += 1
    assert count


def test_whose_times_a_model_has_is_said_once_of_all_findings() -> None:
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    v = tracefuse.capture(lambda: model(*data).backward()).optimize()
    assert len(v.findings()) > 1
    assert str(v.findings()).count("not of the CPU that it ran on") == 1
    told = to_text(payload(v)).partition("kernels: ")[2].partition("\n\n")[2]
    assert "a step, " in told
    assert "not of the CPU that it ran on" not in told


def test_what_passes_mend_is_told_so_beside_its_severity() -> None:
    """A grave finding that is mended stands below a lesser one that is not."""
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    v = tracefuse.capture(lambda: model(*data).backward()).optimize()
    mended = [one for one in v.findings() if one.is_mended]
    assert mended
    for text in (str(v.findings()), to_text(payload(v))):
        assert all(f"{one.severity}, mended: {one.title}" in text for one in mended)
