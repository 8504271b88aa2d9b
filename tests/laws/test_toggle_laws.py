"""Laws of toggling: whatever was switched before, a configuration's trace is the one that its passes make from scratch."""

from __future__ import annotations

import functools
from typing import Any

import programs
import pytest
import torch
from drawn_programs import Drawn
from drawn_programs import programs as programs_of
from drawn_trials import differentiated, trying
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_passes import halved, made

import tracefuse
from tracefuse.config import registry
from tracefuse.config.configuration import Config
from tracefuse.optimizers.fuse import carving
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.passes import PassRecord, final, run_pipeline
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.view.explorer import Explorer

VALUES: dict[str, tuple[Any, ...]] = {
    "simplify": (True, False),
    "freeze": (None, (), ("*weight",), ("no such parameter",)),
    "merge_matmuls": (True, False),
    "cat": (True, False),
    "linear_cross_entropy": (True, False),
    "logits_memory": (2**20, 2**29),
    "decompose": (True, False),
    "channels_last": (True, False),
    "pad": (True, False),
    "remat": (None, 0.0, 0.5, 1.0),
    "memory_budget": (None, 0.5, 0.0),
    "recompute": ((), ("*",)),
    "remat_options": ({}, {"longest_chain": 2}, {"distance_base": 1.0}),
    "optimizer_step": (True, False),
    "fuse": (True, False),
    "overlap": (None, True, {"bucket_mb": 1.0}, {"prefetch": 1}),
    "mine": (True, False, {"most": 1}),
}
TOGGLES = st.sampled_from([(name, value) for name, values in VALUES.items() for value in values])
NAMES = ("rope", "gpt")


@pytest.fixture(autouse=True)
def _a_pass_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    tracefuse.register(_mine())


@functools.cache
def _mine() -> type:
    return made(halved, most=9)


@functools.cache
def captured(name: str, number: int = 0) -> tracefuse.Capture:
    """The captures of one program, each with what it has computed so far."""
    torch.manual_seed(0)
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run)


def from_scratch(capture: tracefuse.Capture, config: Config) -> str:
    return final(capture.trace, run_pipeline(capture.trace, config.passes(), on_error="record")).code


def alone(capture: tracefuse.Capture, config: Config) -> list[PassRecord]:
    """The record of each pass on a trace of its own, about which nothing is known."""
    found: list[PassRecord] = []
    trace = capture.trace
    for one in config.passes():
        given, unknown = trace.copy(), {"value_facts", "op_facts"}
        for node in given.graph.nodes:
            node.meta = {key: value for key, value in node.meta.items() if key not in unknown}
        carving._known.clear()
        found += run_pipeline(given, [one], on_error="record")
        trace = found[-1].after
    return found


def told(step: PassRecord) -> tuple[Any, ...]:
    kernels = {node.target.key: node.target for node in step.after.ops if isinstance(node.target, Kernel)}
    sources = [(kernel.name, kernel.source, kernel.nbytes) for kernel in kernels.values()]
    return step.name, step.after.code, sources, step.decisions, step.error


def shown(found: dict[str, Any]) -> dict[str, Any]:
    """A payload without what a clock said, and without the steps beside the shown one that are known by chance."""
    passes = [{**row, "seconds": None, "without": None} for row in found["passes"]]
    return {**found, "passes": passes}


law = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@law
@pytest.mark.parametrize("name", NAMES)
@given(toggles=st.lists(TOGGLES, min_size=1, max_size=5))
def test_the_order_of_toggles_does_not_matter(name: str, toggles: list[tuple[str, Any]]) -> None:
    capture = captured(name)
    before = capture.trace.code
    variant = capture.variant(Config())
    for option, value in toggles:
        variant = variant.with_config(**{option: value})
        assert variant.trace is not None, "computed on the way, as a view does"
    at_once = Config.of(**dict(toggles))
    assert variant.config == at_once
    assert variant is capture.variant(at_once)
    assert variant.trace.code == from_scratch(capture, at_once)
    assert capture.trace.code == before


@law
@pytest.mark.parametrize("name", NAMES)
@given(toggles=st.lists(TOGGLES, min_size=1, max_size=3))
def test_what_is_shared_is_what_is_computed_alone(name: str, toggles: list[tuple[str, Any]]) -> None:
    """The text, the kernels and the decisions of every pass, those that other variants ran among them, beside passes that know
    nothing from before: no facts about ops and values, and no kernel that was looked at."""
    capture = captured(name)
    for option, value in toggles:
        variant = capture.variant(Config.of(**{option: value}))
        assert [told(step) for step in variant.passes] == [told(step) for step in alone(capture, variant.config)]


def test_so_it_is_in_drawn_programs() -> None:
    @trying(12)
    @given(programs_of(torch.float32), TOGGLES)
    def every_program(drawn: Drawn, toggle: tuple[str, Any]) -> None:
        capture, _ = differentiated(drawn).capture()
        for config in (Config(), Config.of(**dict([toggle]))):
            variant = capture.variant(config)
            assert [told(step) for step in variant.passes] == [told(step) for step in alone(capture, config)]

    every_program()


@law
@pytest.mark.parametrize("name", NAMES)
@given(toggles=st.lists(TOGGLES, min_size=1, max_size=4))
def test_a_view_shows_what_a_new_one_would(name: str, toggles: list[tuple[str, Any]]) -> None:
    explorer, taken = Explorer(captured(name).variant(Config())), dict[str, Any]()
    for option, value in toggles:
        explorer._on_message(explorer, {"type": "configure", "changes": {option: value}}, [])
        fails = any(one.error for one in explorer.variant.with_config(**{option: value}).passes)
        assert (explorer.status["error"] is not None) == fails  # what a pass fails with is refused
        taken |= {} if fails else {option: value}
    fresh = captured(name, 1).variant(Config.of(**taken))
    fresh.capture._variants.clear()
    fresh.capture.known_records.clear()
    assert shown(explorer.payload) == shown(payload(fresh, name=None))
    known = {row["name"]: row["without"] for row in explorer.payload["passes"] if row["without"] is not None}
    for one in known:
        assert fresh.capture.variant(fresh.config.switched(one)).whole is not None, (
            "computed, so that it is known there too"
        )
    assert known.items() <= {row["name"]: row["without"] for row in payload(fresh, name=None)["passes"]}.items()


@pytest.mark.parametrize("option", VALUES)
def test_there_and_back_is_the_same_variant(option: str) -> None:
    """Each option by itself, from the default through all its values and back."""
    first = captured("rope").variant(Config())
    default = first.config.switch(option) if option == "mine" else getattr(Config(), option)
    variant = first
    for value in VALUES[option]:
        variant = variant.with_config(**{option: value})
        assert variant.trace.code == from_scratch(variant.capture, variant.config)
    assert variant.with_config(**{option: default}) is first


@pytest.mark.parametrize("option", ["simplify", "cat", "remat"])
def test_a_toggle_runs_the_passes_behind_it_alone_and_the_way_back_none(option: str) -> None:
    """A step is kept for each trace that a pass was given: behind one that changed nothing there is nothing to run."""
    capture = captured("gpt", 2)
    first, known = capture.variant(Config()), capture.known_records
    names = [step.name for step in first.passes]
    (was,) = (step for step in first.passes if step.name == option)
    before = set(known)
    off = first.with_config(**{option: None if option == "remat" else False})
    assert (off.trace is first.trace) == (was.after is was.before)
    behind = [] if was.after is was.before else names[names.index(option) + 1 :]
    assert [one.name for trace, one in known if (trace, one) not in before] == behind
    count = len(known)
    assert off.with_config(**{option: getattr(Config(), option)}).trace is first.trace
    assert len(known) == count
