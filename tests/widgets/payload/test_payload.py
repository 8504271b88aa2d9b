"""The wire format and its text form, from real variants."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import programs
import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.config import PASSES, Config
from tracefuse.demo import GPT, batch
from tracefuse.measure.side_by_side import CPU_NOTE
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.optimizers.liveness import KINDS, saved_bytes
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.remat.saved import REASONS
from tracefuse.variant import Variant
from tracefuse.widgets.payload.facts import memory
from tracefuse.widgets.payload.passes import grouped
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text

STEP_MS = {"captured": 9.0, "optimised": 6.0}


@cache
def captured(name: str) -> tracefuse.Capture:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


def variant(name: str = "gpt", **options: object) -> Variant:
    return captured(name).variant(Config.of(**options))


def timing() -> Timing:
    one = estimate([1.0])
    made = (
        ProgramTiming(n, {"step": estimate([ms] * 9)}, {"step": estimate([ms / 9] * 9)}, 20.0)
        for n, ms in STEP_MS.items()
    )
    return Timing("measured on CPU", tuple(made), 9, 1, f"coverage {one.coverage}")


# --- payload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_has_a_payload_that_is_json(name: str) -> None:
    again = json.loads(json.dumps(payload(variant(name)), allow_nan=False))
    assert again["version"] == 2
    assert [p["name"] for p in again["passes"]] == list(PASSES)
    assert all(p["error"] is None for p in again["passes"])


def test_its_lines_are_the_printed_code() -> None:
    v = variant()
    for half, trace in (("forward", v.forward), ("backward", v.backward)):
        lines = [line for line in payload(v)[half]["lines"] if line["diff"] != "-"]
        bare = [text.split("  # ")[0].strip() for text in trace.code.splitlines() if not text.strip().startswith("#")]
        shown = [line["code"].strip() for line in lines if line["kind"] not in ("group", "input")]
        assert shown == bare


def test_every_name_that_can_be_clicked_is_described() -> None:
    shown = payload(variant())
    defined = {line["value"] for half in ("forward", "backward") for line in shown[half]["lines"] if line["value"]}
    assert defined <= shown["values"].keys()
    for value in shown["values"].values():
        assert {*value["reads"], *value["uses"], *value["twins"]} <= shown["values"].keys()


def test_twins_are_mutual_and_of_the_other_half() -> None:
    found = payload(variant(**dict.fromkeys(PASSES, False)))["values"]
    pairs = [(name, twin) for name, value in found.items() for twin in value["twins"]]
    assert len(pairs) > 20
    for name, twin in pairs:
        assert name in found[twin]["twins"]
        assert found[name]["phase"] != found[twin]["phase"]


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_is_off_says_so_and_has_no_numbers(name: str) -> None:
    shown = payload(variant(**{name: False}))
    record = {p["name"]: p for p in shown["passes"]}[name]
    assert not record["enabled"]
    assert (record["ops"], record["saved_bytes"], record["seconds"]) == (None, None, None)
    assert shown["decisions"][name] == []


def test_a_pass_that_needs_another_one_is_off_and_says_so_everywhere() -> None:
    shown = payload(variant(fuse=False))
    record = {p["name"]: p for p in shown["passes"]}["decompose"]
    assert (record["enabled"], record["state"], record["ops"]) == (False, "off: needs fuse", None)
    assert re.search(r"^decompose +off: needs fuse$", to_text(shown), re.MULTILINE)
    assert "failed" not in to_text(shown)
    assert re.search(r"^remat: without fuse, what it recomputes runs as ops of its own", to_text(shown), re.MULTILINE)


@pytest.mark.parametrize("options", [{}, {"fuse": False}, {"cat": False, "remat": 0.0}, {"freeze": None}])
def test_the_steps_are_those_of_the_passes_that_are_on(options: dict) -> None:
    v = variant(**options)
    assert [p["name"] for p in payload(v)["passes"] if p["enabled"]] == [step.name for step in v.passes]


def test_a_pass_says_what_it_does() -> None:
    found = {p["name"]: p["help"] for p in payload(variant())["passes"]}
    assert found == PASSES
    assert not [text for text in found.values() if "switch" in text]


def test_numbers_are_those_of_the_traces() -> None:
    v = variant()
    shown = payload(v)
    assert shown["summary"]["saved_bytes"] == [saved_bytes(captured("gpt").trace), saved_bytes(v.trace)]
    assert shown["summary"]["kernels"]["unique"] == len(v.kernels) == len(shown["kernels"])
    assert shown["summary"]["kernels"]["launches"] == sum(k["calls"] for k in shown["kernels"])
    assert shown["summary"]["ops"][1] == shown["forward"]["ops"][1] + shown["backward"]["ops"][1]
    assert "@triton.jit" in shown["kernels"][0]["source"]


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_what_each_value_keeps_adds_up_to_what_the_backward_is_kept(name: str) -> None:
    variant = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).optimize()
    found = payload(variant)
    kept = sum(value["saved_bytes"] for value in found["values"].values() if not value["removed"])
    assert kept == found["summary"]["saved_bytes"][1]


def test_what_is_alive_at_the_peak_adds_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    v = variant()
    shown = payload(v)["memory"]
    monkeypatch.setattr("tracefuse.widgets.payload.facts.MAX_ALIVE", 10**6)
    for half, trace in (("before", v.capture.trace), ("after", v.trace)):
        found = memory.__wrapped__(trace)
        sizes = [nbytes for _, nbytes in found["alive"]]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(sizes) == found["peak"] == found["live"][found["ops"].index(found["at"])]
        assert shown[half]["alive"] == found["alive"][:16]


def test_the_kernels_of_an_update_by_lists_are_no_more_launches_than_the_step_has() -> None:
    """A CPU makes it tensor by tensor; a GPU would make 12 lists of 40 parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    shown = payload(c.optimize())
    assert sum(k["calls"] for k in shown["kernels"]) > 40
    assert 0 < shown["summary"]["kernels"]["launches"] < shown["clock"]["launches"][1]


def test_without_passes_nothing_is_marked() -> None:
    shown = payload(variant(**dict.fromkeys(PASSES, False)))
    assert {line["diff"] for half in ("forward", "backward") for line in shown[half]["lines"]} == {" "}
    assert shown["summary"]["kernels"] == {"unique": 0, "launches": 0}
    off = "simplify=False, freeze=None, merge_matmuls=False, cat=False, linear_cross_entropy=False, decompose=False"
    assert (
        shown["call"]
        == f"c.optimize({off}, channels_last=False, pad=False, remat=None, optimizer_step=False, fuse=False)"
    )


def test_guards_are_notes() -> None:
    (note,) = payload(variant("data_dependent_branch"))["notes"]
    assert note["kind"] == "guard"
    assert "if y.mean().item() > 1.0" in note["text"]


def test_a_value_that_a_line_reads_again_and_again_is_one_note() -> None:
    x = torch.ones(3, requires_grad=True)

    def step() -> None:
        total = sum(x.detach().sum().item() for _ in range(4))
        (x * total).sum().backward()

    (note,) = payload(tracefuse.capture(step).optimize())["notes"]
    assert note["kind"] == "guard"
    assert note["text"].startswith("4 times: The program read 3.0 from a tensor")


def test_a_value_that_a_library_reads_is_told_with_the_line_of_the_users(tmp_path: Path) -> None:
    data = np.memmap(tmp_path / "data.bin", np.uint16, "w+", shape=(8,))
    x, at = torch.ones(3, requires_grad=True), torch.tensor([2, 3])

    def step() -> None:
        first = [data[i : i + 2] for i in at]
        (x * float(first[0].sum())).sum().backward()

    (note,) = payload(tracefuse.capture(step).optimize())["notes"]
    assert "test_payload.py:" in note["text"]
    assert "first = [data[i : i + 2] for i in at]" in note["text"]


def test_what_an_optimizer_reads_is_said_to_be_its_count_of_steps() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        with tracefuse.capture() as c:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    (note,) = payload(c.optimize())["notes"]
    assert note["text"].startswith(
        "2 times: 2.0 is the step count of the optimizer (optimizer.step()), read by the host."
    )
    assert note["text"].endswith("A compiled step counts by itself.")
    assert "holds for this value only" not in note["text"]


def notes_of(shown: dict) -> list[str]:
    assert all(note["kind"] == "note" for note in shown["notes"])
    texts = [note["text"] for note in shown["notes"]]
    assert all(f"note: {text}" in to_text(shown).splitlines() for text in texts)
    return texts


def test_a_budget_that_is_missed_is_a_note() -> None:
    (missed,) = notes_of(payload(variant(memory_budget=0.0, fuse=False, remat_options={"stop_at_lowest_peak": False})))
    assert re.match(r"memory_budget: .* saved, .* more than the budget of 0 B, as little as there can be: ", missed)
    assert re.search(r"; pass memory_budget=\d+ or more, or drop what holds them\.$", missed)


def test_a_budget_at_which_recomputing_stops_is_a_note() -> None:
    (stopped,) = notes_of(payload(variant(memory_budget=0.0, fuse=False)))
    assert "would raise the static peak" in stopped
    assert stopped.endswith("stop_at_lowest_peak=False would do so.")


def test_a_budget_that_is_met_is_none() -> None:
    assert notes_of(payload(variant(memory_budget=0.9))) == notes_of(payload(variant())) == []


def test_options_of_a_pass_that_is_off_are_a_note() -> None:
    (one,) = notes_of(payload(variant(remat=None, memory_budget=0.4)))
    assert one == "memory_budget has no effect while remat is off: switch it on, or leave them out."
    (two,) = notes_of(payload(variant(remat=None, save="*", remat_options={"longest_chain": 8})))
    assert two.startswith("save, remat_options have no effect while remat is off")


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_time_is_never_without_where_it_comes_from() -> None:
    shown = payload(variant())
    assert shown["timing"] is None
    rows = [*shown["kernels"], *shown["aten"]]
    assert {(row["kind"], row["provenance"]) for row in rows} == {("modelled", shown["times"]["after"])}
    assert shown["clock"]["provenance"] == [shown["times"]["before"], shown["times"]["after"]]


def test_the_ratio_is_that_of_the_medians_and_says_what_it_means() -> None:
    v = variant()
    shown = payload(v, (timing(), v.config))["timing"]
    (row,) = shown["rows"]
    assert (row["baseline_ms"]["median"], row["variant_ms"]["median"]) == (9.0, 6.0)
    assert [row["ratio"][name] for name in ("median", "low", "high")] == [pytest.approx(2 / 3)] * 3
    assert row["ratio"]["samples"] == 9
    assert row["verdict"] == "faster"
    assert shown["notes"] == ["9 rounds of 1 replay, interleaved; stopped: coverage 0.0"]
    assert (shown["provenance"], shown["stale"]) == ("measured on CPU", False)


def test_times_of_another_configuration_are_stale() -> None:
    v = variant(cat=False)
    shown = payload(v, (timing(), Config()))["timing"]
    assert (shown["stale"], shown["config"]) == (True, "c.optimize()")


# --- what cannot be measured -----------------------------------------------------------------------------------------


def stepped() -> tracefuse.Capture:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 4)
    with tracefuse.capture() as c:
        model(x).sum().backward()
        optimizer.step()
        after = model(x)
    assert after.requires_grad
    return c


def test_a_cell_that_goes_on_after_its_step_says_up_front_that_it_cannot_be_measured() -> None:
    shown = payload(stepped().optimize())
    assert shown["blocked"].startswith("the program goes on (")
    assert shown["blocked"].endswith(
        "after = model(x)) with what the optimizer changed. Capture one forward, its backward and its update "
        "by themselves (`with tracefuse.capture():`)."
    )
    assert shown["blocked"] in to_text(shown)


def test_a_cell_that_differentiates_gradients_is_not_told_to_move_its_loss() -> None:
    x, weight = (torch.ones(3, requires_grad=True) for _ in range(2))
    with tracefuse.capture() as c:
        (force,) = torch.autograd.grad((x * weight).sin().sum(), x, create_graph=True)
        squares = force.square().sum()
        squares.backward()
    assert payload(c.optimize())["blocked"].startswith("squares is computed from gradients (a gradient penalty")


def test_a_pass_that_failed_blocks_measuring_with_its_message() -> None:
    blocked = payload(variant(freeze=["nope"]))["blocked"]
    assert blocked.startswith("freeze: ")
    assert "nope" in blocked


def test_a_single_step_is_not_blocked() -> None:
    assert payload(variant())["blocked"] is None


def test_without_a_name_there_is_no_call_to_copy() -> None:
    shown = payload(variant(), name=None)
    assert shown["call"] == ""
    assert "give the capture a name (c = …, or -o c of the magic)" in to_text(shown)
    assert payload(variant(cat=False), name="mine")["call"] == "mine.optimize(cat=False)"


# --- decisions --------------------------------------------------------------------------------------------------------


def test_equal_decisions_are_one_with_all_their_values() -> None:
    made = [
        Decision("a", "save", "it is small", 8),
        Decision("b", "recompute", "free"),
        Decision("c", "save", "it is small", 4),
    ]
    assert grouped(made) == [
        {"action": "save", "reason": "it is small", "nbytes": 12, "values": ["a", "c"]},
        {"action": "recompute", "reason": "free", "nbytes": 0, "values": ["b"]},
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def test_the_text_has_what_the_view_has() -> None:
    v = variant()
    text = to_text(payload(v, (timing(), v.config)))
    for name in PASSES:
        assert f"\n{name} " in text
    assert "measured on CPU; median [95 % interval]" in text
    assert "0.667 [0.667, 0.667] faster" in text
    assert "Triton kernel" not in text.partition("median [95 % interval]")[2].partition("\n\n")[0]
    noted = to_text(payload(v, (replace(timing(), notes=(CPU_NOTE,)), v.config)))
    assert [line for line in noted.splitlines() if line not in text.splitlines()] == [CPU_NOTE]
    assert v.kernels[0].name in text
    assert "kernels: modelled: roofline of the H100" in text


@pytest.mark.parametrize(
    ("samples", "time", "ratio"),
    [
        ([2.0], "2 (one sample)", "too few rounds to say (1 of 8)"),
        ([2.0, 2.0], "2 (2 samples)", "too few rounds to say (2 of 8)"),
        ([2.0, 2.0, 3.0], "2 [2, 3] (75%, 3 samples)", "too few rounds to say (3 of 8)"),
        ([2.0] * 8, "2 [2, 2]", "2 [2, 2] slower"),
    ],
)
def test_an_interval_says_of_how_few_samples_it_is(samples: list[float], time: str, ratio: str) -> None:
    times = {"step": estimate(samples)}
    programs = tuple(ProgramTiming(name, times, times, 20.0) for name in STEP_MS)
    v = variant()
    measured = Timing("measured on CPU", programs, len(samples), 1, "test")
    shown = payload(v, (measured, v.config))
    (row,) = (line for line in to_text(shown).splitlines() if line.startswith("step "))
    assert re.split("  +", row) == ["step", time, time, ratio]
    assert {row["variant_ms"]["samples"] for row in shown["timing"]["rows"]} == {len(samples)}


def test_the_text_says_that_times_are_stale_or_missing() -> None:
    assert "times: not measured" in to_text(payload(variant()))
    assert "of c.optimize(), not of these passes" in to_text(payload(variant(cat=False), (timing(), Config())))


@pytest.mark.parametrize("name", ["gpt", "conv_batchnorm", "rope"])
def test_storages_add_up_to_what_is_alive(name: str) -> None:
    for found in (payload(variant(name))["memory"][side] for side in ("before", "after")):
        rows = zip(*[iter(found["storages"])] * 4, strict=True)
        storages = [(start, end, count) for start, end, count, purpose in rows if 0 < purpose < len(KINDS)]
        assert len(storages) * 4 == len(found["storages"])
        alive = [sum(n for start, end, n in storages if start <= at <= end) for at in range(len(found["ops"]))]
        assert [found["inputs"] + count for count in alive] == found["live"]


def test_what_is_saved_is_told_by_reason_by_module_and_by_value() -> None:
    v = variant(memory_budget=0.5)
    shown = payload(v)["memory"]
    totals = [saved_bytes(captured("gpt").trace), saved_bytes(v.trace)]
    for groups in (shown["reasons"], shown["modules"]):
        assert [sum(group[at] for group in groups) for at in (1, 2)] == totals
    assert all(sentence == REASONS[reason] for reason, _, _, sentence in shown["reasons"])
    assert set(shown["why"].values()) <= {reason for reason, *_ in shown["reasons"]}
    assert shown["why"].keys() <= payload(v)["values"].keys()


def test_the_kinds_of_work_of_each_layer_are_in_the_payload() -> None:
    for row in payload(variant())["layers"]:
        for kinds, us in zip(row["backward_kinds"], row["backward_us"], strict=True):
            assert sum(kinds.values()) == pytest.approx(us, rel=1e-3)


def test_the_text_says_how_many_ops_are_the_updates() -> None:
    """As the view does, whose numbers are of the whole step."""
    layer = torch.nn.Linear(4, 4)
    optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), torch.randn(2, 4)

    def step() -> torch.Tensor:
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    shown = payload(tracefuse.capture(step).optimize())
    text = to_text(shown)
    counts = [one["ops"] for one in (shown["summary"], shown["update"])]
    (before, after), (update_before, update_after) = counts
    assert f"{before} -> {after} ops (of which the update's {update_before} -> {update_after})" in text
    assert "update's" not in to_text(payload(variant()))


def test_a_forward_alone_says_that_it_has_no_backward() -> None:
    text = to_text(payload(tracefuse.capture(torch.nn.Linear(4, 4), torch.ones(2, 4)).optimize()))
    assert "no backward" in text
    assert "0 -> 0" not in text
    assert "saved for backward" not in text


# --- taken along ------------------------------------------------------------------------------------------------------


def test_the_code_that_is_taken_along_runs_as_it_stands() -> None:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=1, width=32, heads=2, vocab=61, length=16, dropout=0.0), batch(61, 2, 12)
    c = tracefuse.capture(lambda: model(tokens, targets).backward())
    model.zero_grad()
    usage = payload(c.optimize(remat=0.0), name="mine")["usage"]
    assert len(usage.splitlines()) == 3
    known = {"mine": c}
    exec(usage, known)
    ours = {name: one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    loss = model(tokens, targets)
    loss.backward()
    torch.testing.assert_close(known["result"], loss)
    for name, one in model.named_parameters():
        torch.testing.assert_close(ours[name], one.grad)
    assert payload(c.optimize(), name=None)["usage"] == ""


def test_of_a_whole_step_it_updates_the_model() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append((model := torch.nn.Linear(4, 4), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
    x = torch.randn(8, 4)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            step(*models[0])
    for _ in range(4):
        step(*models[1])
    usage = payload(c.optimize(), name="c")["usage"]
    assert len(usage.splitlines()) == 2
    exec(usage, {"c": c})
    step(*models[1])
    for ours, theirs in zip(models[0][0].parameters(), models[1][0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
