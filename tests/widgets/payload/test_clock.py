"""One clock: whose times the view shows, that a switch does not change that, and that all panels show the same sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import programs
import pytest
import torch

import tracefuse
from tracefuse.errors import OptionError
from tracefuse.measure import side_by_side
from tracefuse.measure.timing import ProgramTiming, Timing, estimate
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.timeline.measurements import Measurements
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import DEFAULT, HERE, Clocks
from tracefuse.widgets.view.explorer import Explorer

STEP_MS = {"captured": 8.0, "pinned": 9.0, "optimised": 5.0}
TOGGLES: list[dict[str, Any]] = [{"fuse": False}, {"fuse": True}, {"remat": None}, {"remat": 0.5}, {"simplify": False}]


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> Explorer:
    def timed(variant: Any, replays: Any, *_: Any, **__: Any) -> Timing:
        names = [name for name in replays if name in STEP_MS]
        made = [ProgramTiming(name, one := {"step": estimate([STEP_MS[name]] * 8)}, one, 1.0) for name in names]
        return Timing("measured on CPU", tuple(made), 8, 1, "test")

    monkeypatch.setattr(side_by_side, "timed", timed)
    torch.manual_seed(0)
    return Explorer(tracefuse.capture(programs.PROGRAMS["gpt"](torch.float32).run).optimize(), budget_s=0.01)


def clock(explorer: Explorer) -> dict[str, Any]:
    return explorer.payload["clock"]


def sums(payload: dict[str, Any]) -> list[float]:
    """The shown step by the header, the tree's values, the modules and the kernels."""
    values = sum(value["time_us"][1] or 0 for value in payload["values"].values())
    layers = sum(sum(row[f"{phase}_us"][1] for phase in ("forward", "backward", "update")) for row in payload["layers"])
    kernels = sum(row["time_us"] * row["calls"] for row in (*payload["kernels"], *payload["aten"]))
    return [payload["clock"]["step_us"][1], values, layers, kernels]


def check_sums(payload: dict[str, Any]) -> None:
    header, *panels = sums(payload)
    assert panels == pytest.approx([header] * 3, rel=1e-9)
    before, after = payload["clock"]["takes_us"]
    deltas = [one["delta_us"] for one in payload["passes"] if one["delta_us"] is not None]
    assert sum(deltas) == pytest.approx(after - before, abs=1e-9 * before)


def test_every_panel_sums_to_the_step_in_every_state(explorer: Explorer) -> None:
    for act in (lambda: None, explorer.measure, lambda: explorer.show_times_of(HERE)):
        act()
        for changes in TOGGLES:
            check_sums(explorer.payload)
            explorer.configure(changes)
        check_sums(explorer.payload)


def test_no_switch_and_no_measurement_changes_the_device(explorer: Explorer) -> None:
    for choice, device in ((DEFAULT, "H100 SXM"), ("H200", "H200")):
        explorer.show_times_of(choice)
        for changes in TOGGLES:
            explorer.configure(changes)
            assert (clock(explorer)["device"], clock(explorer)["kinds"]) == (device, ["modelled"] * 2)
            explorer.measure()
            assert (clock(explorer)["device"], clock(explorer)["kinds"]) == (device, ["modelled"] * 2)
    explorer.show_times_of(HERE)
    for changes in [{"cat": False}, *TOGGLES]:
        explorer.configure(changes)
        assert clock(explorer)["device"].startswith("CPU")
        assert set(clock(explorer)["kinds"]) <= {"measured", "predicted"}


def test_what_is_shown_is_made_for_the_gpu_that_its_times_are_of(explorer: Explorer) -> None:
    """As what its switches lead to is: else the difference of the two says what the other GPU changes, too."""
    explorer.measure()
    explorer.pin()
    before = explorer.variant
    for gpu in ("A100", "L4"):
        explorer.show_times_of(gpu)
        for one in (explorer.variant, explorer.baseline):
            assert one is not before
            assert one is before.under(before.config)
    explorer.show_times_of(HERE)
    assert explorer.variant is explorer.baseline is before


def test_a_faster_memory_shortens_the_step(explorer: Explorer) -> None:
    found = {}
    for gpu in TARGETS:
        explorer.show_times_of(gpu)
        found[gpu] = clock(explorer)["step_us"][1]
    assert found["B200"] < found["H200"] < found["H100"] < found["A100"] < found["L4"]


def test_what_was_measured_is_the_measured_step_and_a_switch_predicts(explorer: Explorer) -> None:
    explorer.measure()
    explorer.show_times_of(HERE)
    assert clock(explorer)["kinds"] == ["measured", "measured"]
    assert clock(explorer)["step_us"] == pytest.approx([8000, 5000])
    explorer.configure({"remat": None})
    assert clock(explorer)["kinds"] == ["measured", "predicted"]
    assert clock(explorer)["step_us"][0] == pytest.approx(8000)
    assert 0 < len(clock(explorer)["predicted"]) < len(explorer.payload["memory"]["after"]["ops"])
    explorer.configure({"remat": 0.5})
    assert clock(explorer)["step_us"] == pytest.approx([8000, 5000])


def test_a_step_that_was_timed_as_a_whole_is_measured_and_its_parts_are_not(explorer: Explorer) -> None:
    explorer.measured.known.timelines.clear()
    explorer.variant.measure(budget_s=0.01)
    explorer.show()
    explorer.show_times_of(HERE)
    assert clock(explorer)["step_us"] == pytest.approx([8000, 5000])
    assert clock(explorer)["kinds"] == ["measured", "measured"]
    ops = {name for name, value in explorer.payload["values"].items() if value["time_us"][1]}
    assert set(clock(explorer)["predicted"]) == ops
    assert {one["kind"] for one in (*explorer.payload["kernels"], *explorer.payload["aten"])} == {"predicted"}
    check_sums(explorer.payload)


def test_a_profile_that_was_cancelled_leaves_the_timed_step(explorer: Explorer) -> None:
    explorer.measure()
    explorer.show_times_of(HERE)
    explorer.configure({"remat": None})
    explorer.variant.measure(budget_s=0.01)
    explorer.show()
    assert clock(explorer)["step_us"] == pytest.approx([8000, 5000])
    assert clock(explorer)["kinds"] == ["measured", "measured"]
    assert clock(explorer)["predicted"]
    check_sums(explorer.payload)


def test_the_profile_of_an_update_in_place_gives_the_times_of_its_trace() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracefuse.capture() as c:
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    explorer = Explorer(c.optimize(), budget_s=0.05)
    explorer.measure()
    assert explorer.status["error"] is None
    explorer.show_times_of(HERE)
    assert (clock(explorer)["kinds"], clock(explorer)["predicted"]) == (["measured", "measured"], [])
    check_sums(explorer.payload)


def test_a_prediction_is_kept_beside_what_was_measured_later(explorer: Explorer) -> None:
    explorer.measure()
    explorer.show_times_of(HERE)
    assert (clock(explorer)["forecasts"], clock(explorer)["error"]) == (0, None)
    explorer.configure({"remat": None})
    predicted = clock(explorer)["step_us"][1]
    explorer.measure()
    assert clock(explorer)["kinds"] == ["measured", "measured"]
    assert (clock(explorer)["forecasts"], clock(explorer)["error"]) == (1, pytest.approx(abs(predicted / 5000 - 1)))
    explorer.measure()
    assert clock(explorer)["forecasts"] == 1, "what was measured before was not predicted"


def test_the_cpu_is_a_choice_only_once_it_was_measured(explorer: Explorer) -> None:
    assert HERE not in dict(clock(explorer)["choices"])
    with pytest.raises(OptionError, match="choose from"):
        explorer.show_times_of(HERE)
    explorer.measure()
    assert dict(clock(explorer)["choices"])[HERE] == "this CPU"


def test_a_gpu_is_called_the_same_before_and_after_it_was_measured(
    explorer: Explorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Variant, "runs_triton", True)
    variant, gpu = explorer.variant, "NVIDIA H200"
    monkeypatch.setitem(variant.program.environment, "device", gpu)
    clocks = Clocks(Measurements())
    before = clocks.clock(variant)
    assert (before.chosen, before.device, before.times[1].kind) == (HERE, "H200", "modelled")
    times = ProgramTiming("captured", one := {"step": estimate([8.0] * 8)}, one, 1.0)
    timing = Timing(f"measured on {gpu}", (times, replace(times, name="optimised")), 8, 1, "test")
    clocks.known.note_timing((variant.config, None), timing)
    after = clocks.clock(variant)
    assert (after.chosen, after.device, after.times[1].kind) == (HERE, "H200", "measured")
    toggled = clocks.clock(variant.with_config(remat=None))
    assert (toggled.device, [one.kind for one in toggled.times]) == ("H200", ["measured", "predicted"])


def test_the_default_is_what_everything_is_priced_for(explorer: Explorer) -> None:
    assert dict(clock(explorer)["choices"])[DEFAULT] == "H100 SXM, an example"
    tracefuse.target("L4")
    try:
        explorer.show()
        assert (clock(explorer)["device"], dict(clock(explorer)["choices"])[DEFAULT]) == ("L4", "L4")
    finally:
        tracefuse.target("here")


def test_findings_are_of_the_same_device(explorer: Explorer) -> None:
    explorer.configure({"fuse": False})
    for gpu, source in (("H200", "H200 datasheet"), ("L4", "L4 datasheet")):
        explorer.show_times_of(gpu)
        worths = [one["worth"] for one in explorer.payload["findings"] if "a step, " in one["worth"]]
        assert worths
        assert all(source in worth for worth in worths)
