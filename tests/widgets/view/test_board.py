"""The board of a view in Python: what is noted on it, sweeps, comparing, several captures, session files."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tracefuse
from tracefuse.config import Config
from tracefuse.demo import GPT, batch
from tracefuse.errors import OptionError
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.timeline.measurements import Entry
from tracefuse.widgets.payload.board import outcome, to_captured
from tracefuse.widgets.payload.passes import config_record
from tracefuse.widgets.text import board_text
from tracefuse.widgets.view.boarding import swept
from tracefuse.widgets.view.explorer import Explorer


def captured(size: int = 2) -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=1, width=16, heads=2, vocab=31, length=8), batch(31, size, 8)
    return tracefuse.capture(lambda: model(tokens, targets).backward())


def names(explorer: Explorer, capture: int = 0) -> list[str]:
    return [row["name"] for row in explorer.board["rows"] if row["capture"] == capture]


def shown(explorer: Explorer) -> dict[str, Any]:
    (row,) = (row for row in explorer.board["rows"] if row["is_shown"])
    return row


def send(explorer: Explorer, **message: Any) -> None:
    explorer._on_message(explorer, message, [])
    explorer.wait()


def test_what_is_shown_is_noted_once_and_in_its_order() -> None:
    explorer = captured().explore()
    assert names(explorer) == ["captured", "all passes"]
    explorer.configure({"cat": False})
    explorer.configure({"cat": True})
    assert names(explorer) == ["captured", "all passes", "without cat"]
    assert shown(explorer)["name"] == "all passes"


def test_its_figures_are_those_of_the_view() -> None:
    explorer = captured().explore()
    explorer.configure({"remat": 0.0})
    row, payload = shown(explorer), explorer.payload
    assert row["step_us"] == payload["clock"]["takes_us"][1]
    assert row["peak_bytes"] == payload["summary"]["peak_bytes"][1] == peak_bytes(explorer.variant.whole_in_place)
    assert row["ratio"] == pytest.approx(payload["clock"]["takes_us"][1] / payload["clock"]["takes_us"][0])
    explorer.show_times_of("A100 SXM 80GB" if "A100 SXM 80GB" in dict(payload["clock"]["choices"]) else "B200")
    assert shown(explorer)["step_us"] == explorer.payload["clock"]["takes_us"][1]
    assert explorer.payload["clock"]["step_us"] != payload["clock"]["step_us"]
    assert shown(explorer)["device"] == explorer.board["device"]


def test_what_was_measured_stands_with_its_interval_and_what_was_predicted() -> None:
    explorer = captured().explore()
    explorer.budget_s = 0.05
    explorer.measure()
    explorer.show_times_of("here")
    explorer.configure({"fuse": False})
    assert shown(explorer)["kind"] == "predicted"
    predicted = shown(explorer)["step_us"]
    assert shown(explorer)["measured"] is None
    explorer.measure()
    row = shown(explorer)
    assert row["kind"] == "measured"
    step = row["measured"]
    assert step["low"] <= step["median"] <= step["high"]
    assert step["where"].startswith("measured on CPU")
    assert row["step_us"] == pytest.approx(1e3 * step["median"])
    assert row["forecast_us"] is not None
    assert predicted > 0


def test_a_row_compares_like_with_like() -> None:
    explorer = captured().explore()
    explorer.budget_s = 0.05
    row = shown(explorer)
    assert (row["kind"], row["ratio_kind"]) == ("modelled", "modelled")
    explorer.measure()
    row, mine = shown(explorer), explorer.variant.timing
    assert mine is not None
    assert row["kind"] == "modelled"  # the clock of the view is a GPU's still; the step was measured on the CPU
    assert row["ratio_kind"] == "modelled"
    assert row["measured"]["ratio"] == mine.program("optimised").ratios["step"].median
    assert row["measured"]["ratio_how"].startswith("measured on CPU")
    explorer.show_times_of("here")
    row = shown(explorer)
    assert (row["ratio_kind"], row["ratio"]) == ("measured", row["measured"]["ratio"])
    explorer.configure({"fuse": False})
    row = shown(explorer)
    assert (row["kind"], row["ratio_kind"], row["measured"]) == ("predicted", "predicted", None)


@pytest.mark.parametrize(("kind", "device"), [("measured", "H200"), ("predicted", "H200"), ("modelled", "B200")])
def test_a_modelled_time_is_compared_with_no_other_and_with_no_other_device(kind: str, device: str) -> None:
    mine = Entry(0.0, 1, 1, 1, 10.0, "modelled", "H200")
    captured = Entry(0.0, 1, 1, 1, 20.0, kind, device)
    nothing = {"ratio": None, "ratio_kind": ""}
    assert to_captured(mine, captured) == nothing
    assert to_captured(mine, None) == nothing


def test_a_sweep_tries_every_combination_and_shows_none() -> None:
    capture = captured()
    explorer = capture.explore()
    before = explorer.payload["config"]
    explorer.sweep(weights=[1.0, 0.0], budgets=[None, 0.25], passes=["pad"])
    assert explorer.status["error"] is None
    assert len(names(explorer)) == 2 + 8
    assert {"weight 1", "weight 0", "without pad, weight 0, saves at most 25 %"} <= set(names(explorer))
    assert explorer.payload["config"] == before
    for row in explorer.board["rows"]:
        variant = capture.variant(Config().changed(**row["config"]))
        assert row["peak_bytes"] == peak_bytes(variant.whole_in_place)


def test_a_sweep_says_whether_anything_beats_the_configuration_on_show() -> None:
    """A budget that allows all that is saved anyway, and switching off what gains, win nothing."""
    explorer = captured().explore()
    assert explorer.board["said"] == ""
    explorer.sweep(budgets=["1TiB", "2TiB"])
    assert explorer.board["said"] == (
        "none of the 2 that were tried takes less time or memory than the one on show: keep it"
    )
    assert explorer.board["said"] in board_text(explorer.board)
    explorer.show(explorer.variant.with_config(fuse=False))
    explorer.sweep(passes=["fuse"])
    assert explorer.board["said"] == "1 of 1 tried here takes less time or memory than the one on show"


def test_where_only_budgets_lose_that_is_said() -> None:
    entry = Entry(0.0, 10, 100, 1000, 5.0, "modelled", "an H200")
    better, worse = replace(entry, step_us=4.0), replace(entry, step_us=6.0)
    found = outcome(entry, {Config.of(memory_budget=0.5): worse, Config.of(pad=False): better})
    assert found == ("none of the 1 with a budget takes less time or memory than the one on show: leave the budget out")
    assert outcome(entry, {Config.of(memory_budget=0.5): better}).startswith("1 of 1 tried here takes less")
    assert outcome(entry, {}) == ""


def test_in_plain_python_a_board_is_printed_with_all_its_captures() -> None:
    one, other = captured(), captured()
    printed = str(tracefuse.board(one, other))
    assert printed == repr(tracefuse.board(one, other))
    table = printed.partition("\n\n")[0]
    assert [line.split()[0] for line in table.splitlines()[2:] if line.startswith(">")] == [">"]
    assert sum("captured" in line.split() for line in table.splitlines()[2:]) == 2
    assert sum("all passes" in line for line in table.splitlines()) == 2
    assert all(f" {label} " in table for label in ("one", "other"))
    assert "modelled" in table
    assert " B" in table or "KiB" in table
    assert "board:" not in str(one.explore())


def test_a_sweep_that_is_cancelled_keeps_what_it_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = captured().explore()
    told: list[str] = []

    def progress(_: float, text: str) -> None:
        told.append(text)
        if len(told) == 2:
            explorer.cancel()

    monkeypatch.setattr(explorer, "_progress", progress)
    send(explorer, type="sweep", weights=[1, 0.5, 0], budgets=[None, 0.5], passes=[])
    assert told == ["1 of 6: weight 1", "2 of 6: weight 1, saves at most 50 %"]
    assert len(names(explorer)) == 4
    assert explorer.status["busy"] == ""


def test_too_large_a_sweep_is_refused() -> None:
    with pytest.raises(OptionError, match="512 configurations, and a sweep takes at most 256"):
        swept(
            Config(),
            [0.5, 0.25, 0.1, 0.0],
            [],
            [*["simplify", "freeze", "cat", "decompose", "pad", "optimizer_step", "fuse"]],
        )
    with pytest.raises(OptionError, match="no pass 'nothing'"):
        swept(Config(), passes=["nothing"])


def test_what_a_sweep_cannot_make_it_says() -> None:
    explorer = captured().explore()
    send(explorer, type="sweep", weights=[2], budgets=[], passes=[])
    assert "remat=2" in explorer.status["error"]["message"]
    assert explorer.status["error"]["panel"] == "board"


# --- several captures -------------------------------------------------------------------------------------------------


def test_captures_and_files_stand_on_one_board(tmp_path: Path) -> None:
    small, large = captured(2), captured(4)
    path = large.save(tmp_path / "large.tfz")
    explorer = tracefuse.board(small, large.optimize(fuse=False), path)
    assert explorer.tab == "board"
    assert explorer.board["captures"] == ["small", "large", "large.tfz"]
    assert names(explorer, 1) == ["captured", "without fuse"]
    assert names(explorer, 2) == ["captured", "all passes"]
    peaks = {row["capture"]: row["peak_bytes"] for row in explorer.board["rows"] if row["is_captured"]}
    assert peaks[0] < peaks[1] == peaks[2]


def test_a_row_of_another_capture_is_shown_and_left_again() -> None:
    small, large = captured(2), captured(4)
    explorer = tracefuse.board(small, large)
    mine = config_record(explorer.variant.config)
    send(explorer, type="return", capture=1, config=mine | {"cat": False})
    assert explorer.variant.capture is large
    assert explorer.board["capture"] == 1
    assert shown(explorer)["name"] == "without cat"
    send(explorer, type="configure", changes={"pad": False})
    assert explorer.variant.capture is large
    send(explorer, type="return", capture=0, config=mine)
    assert explorer.variant.capture is small
    assert explorer.payload["call"] == "small.optimize()"


def test_two_are_compared_by_module_and_by_pass() -> None:
    small, large = captured(2), captured(4)
    explorer = tracefuse.board(small, large)
    config = config_record(Config())
    send(explorer, type="compare", pair=[{"capture": 0, "config": config}, {"capture": 1, "config": config}])
    found = explorer.board["comparison"]
    assert [side["label"] for side in found["sides"]] == ["small", "large"]
    assert found["options"] == []
    assert found["modules"][0]["us"][1] > found["modules"][0]["us"][0]
    assert {"fuse", "remat"} <= {row["name"] for row in found["passes"]}
    send(
        explorer,
        type="compare",
        pair=[{"capture": 0, "config": config}, {"capture": 0, "config": config | {"fuse": False}}],
    )
    found = explorer.board["comparison"]
    assert found["options"] == [["fuse", "True", "False"]]
    assert [(side["kind"], side["measured"]) for side in found["sides"]] == [("modelled", None)] * 2
    (fuse,) = (row for row in found["passes"] if row["name"] == "fuse")
    assert fuse["states"] == ["on", "off"]
    assert fuse["delta_us"][0] < 0
    assert fuse["delta_us"][1] is None
    json.dumps(explorer.board, allow_nan=False)


def test_a_comparison_has_what_was_measured_beside_what_is_modelled() -> None:
    explorer = captured().explore()
    explorer.budget_s = 0.05
    explorer.measure()
    pair = [
        {"capture": 0, "config": config_record(config)} for config in (Config.off(), Config(), Config.of(cat=False))
    ]
    send(explorer, type="compare", pair=pair[:2])
    sides = explorer.board["comparison"]["sides"]
    assert [side["kind"] for side in sides] == ["modelled", "modelled"]
    timed = [row["measured"] for row in explorer.board["rows"][:2]]
    assert [side["measured"]["median"] for side in sides] == [one["median"] for one in timed]
    assert sides[0]["measured"]["where"].startswith("measured on CPU")
    send(explorer, type="compare", pair=pair[1:])
    assert explorer.board["comparison"]["sides"][1]["measured"] is None


def test_a_board_of_nothing_is_refused() -> None:
    with pytest.raises(OptionError, match="pass captures, variants or paths"):
        tracefuse.board()
    with pytest.raises(OptionError, match="not an object of type list"):
        tracefuse.board([captured()])  # type: ignore[arg-type]


# --- kept -------------------------------------------------------------------------------------------------------------


def test_a_session_file_keeps_the_board(tmp_path: Path) -> None:
    capture = captured()
    explorer = capture.explore()
    explorer.sweep(budgets=[0.5, 0.25])
    opened = tracefuse.load(capture.save(tmp_path / "c.tfz")).explore()
    assert names(opened) == names(explorer)
    for one, other in zip(explorer.board["rows"], opened.board["rows"], strict=True):
        assert one["tried_at"] == other["tried_at"]
        assert one["step_us"] == pytest.approx(other["step_us"])
        assert one["peak_bytes"] == other["peak_bytes"]


def test_a_file_from_before_there_was_a_board_opens(tmp_path: Path) -> None:
    path = captured().save(tmp_path / "new.tfz")
    old = tmp_path / "old.tfz"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            data = source.read(name)
            if name == "measured.json":
                data = json.dumps({k: v for k, v in json.loads(data).items() if k != "board"}).encode()
            if name == "session.json":
                data = json.dumps(json.loads(data) | {"version": 3}).encode()
            target.writestr(name, data)
    assert names(tracefuse.load(old).explore()) == ["captured", "all passes"]
