"""Timelines on the wire, and what a view keeps of them."""

from __future__ import annotations

import base64
import json
from functools import cache
from typing import Any

import numpy as np
import programs
import pytest
import torch
from ipywidgets.widgets.widget import _remove_buffers

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.timeline.replayed import Timeline, timeline
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import HERE
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.payload.timeline import timeline_record
from tracefuse.widgets.view.explorer import Explorer

COLUMNS = {"start_us": "<f8", "duration_us": "<f4", "name": "<u4", "value": "<u4", "delay_us": "<f4", "lane": "<u2"}
EVENT_NBYTES = 26


@cache
def variant() -> Variant:
    return tracefuse.capture(programs.PROGRAMS["rope"](torch.float32).run).optimize()


@cache
def measured() -> Timeline:
    return timeline(variant())


def decoded(record: dict[str, Any], events: bytes) -> dict[str, np.ndarray]:
    """The columns as a reader that knows only the format finds them."""
    found, at = {}, 0
    for name, kind in COLUMNS.items():
        found[name] = np.frombuffer(events, kind, record["count"], at)
        at += found[name].nbytes
    assert at == len(events)
    return found


@pytest.mark.parametrize("as_base64", [False, True])
def test_the_columns_can_be_read_back(as_base64: bool) -> None:
    for program, record in zip(measured().programs, timeline_record(measured(), as_base64)["programs"], strict=True):
        events = base64.b64decode(record["events"]) if as_base64 else record["events"]
        assert len(events) == record["count"] * EVENT_NBYTES
        for name, column in decoded(record, events).items():
            assert np.array_equal(column, getattr(program, name), equal_nan=True)


def test_a_record_for_a_page_is_json() -> None:
    record = timeline_record(measured(), as_base64=True)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["provenance"].startswith("measured on CPU")
    assert record["programs"][0]["lanes"] == [{"name": "CPU", "kind": "cpu"}]
    assert [one["config"] for one in record["programs"]] == [Config.off().as_code(), "c.optimize()"]


def test_a_widget_sends_the_events_as_binary() -> None:
    _, paths, buffers = _remove_buffers({"timeline": timeline_record(measured())})
    assert paths == [["timeline", "programs", 0, "events"], ["timeline", "programs", 1, "events"]]
    assert all(len(buffer) % EVENT_NBYTES == 0 and len(buffer) > 0 for buffer in buffers)


def kinds(kept: Measured, shown: Variant, baseline: Variant | None = None) -> list[str]:
    return [one.kind for one in kept.clocks.clock(shown, baseline).times]


def test_times_are_kept_by_configuration() -> None:
    kept, v = Measured(), variant()
    assert (kinds(kept, v), kept.work(v)) == (["modelled"] * 2, None)
    kept.profile(v)
    kept.clocks.choose(HERE, v)
    before, after = kept.clocks.clock(v).times
    assert before.us.keys() <= {node.name for node in v.capture.trace.ops}
    assert after.us.keys() <= {node.name for node in v.trace.ops}
    assert kinds(kept, v) == ["measured"] * 2


def test_a_modelled_time_never_stands_beside_a_measured_one() -> None:
    """It would look like a change: what was not measured is predicted from what was."""
    kept, v = Measured(), variant()
    kept.profile(v)
    kept.clocks.choose(HERE, v)
    other = v.with_config(cat=False)
    assert kinds(kept, other) == ["measured", "predicted"]
    assert kinds(kept, other, baseline=v) == ["measured", "predicted"]
    kept.profile(other, v)
    assert kinds(kept, other, baseline=v) == kinds(kept, other) == ["measured"] * 2


def test_a_pass_that_changes_nothing_changes_no_time() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    v = tracefuse.capture(lambda: (x.sin() * x.cos()).sum().backward()).optimize()
    kept = Measured()
    kept.profile(v)
    kept.clocks.choose(HERE, v)
    assert kept.clocks.clock(v.with_config(cat=False)).times == kept.clocks.clock(v).times
    assert kinds(kept, v.with_config(fuse=False, decompose=False)) == ["measured", "predicted"]


def test_measuring_shows_a_timeline_and_the_choice_of_this_device() -> None:
    explorer = Explorer(variant(), budget_s=0.01)
    assert explorer.timeline is None
    explorer.measure()
    assert explorer.status["error"] is None
    assert [one["label"] for one in explorer.timeline["programs"]] == ["captured", "optimised"]
    assert all(text.startswith("modelled") for text in explorer.payload["times"].values())
    explorer.show_times_of(HERE)
    assert all(text.startswith("measured on CPU") for text in explorer.payload["times"].values())
    explorer.configure({"cat": False})
    assert explorer.payload["times"]["after"].startswith("predicted for CPU")
    explorer.configure({"cat": True})
    assert all(text.startswith("measured") for text in explorer.payload["times"].values())
