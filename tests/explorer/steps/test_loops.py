"""Loops that frameworks own: one line captures the third step, the run is what it was, and the step replays bit for bit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from training_loops import LOOPS, Run, lightning, trainer

import tracefuse

STEPS = 5


def made(name: str) -> Run:
    try:
        return LOOPS[name]("cpu")
    except ImportError as error:
        pytest.skip(f"{name}: {error}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_one_line_captures_the_third_step_and_the_run_is_unharmed(name: str) -> None:
    plain = made(name)(STEPS)
    run = made(name)
    with tracefuse.capture_step(n=3) as c:
        watched = run(STEPS)
    assert watched.is_same(plain)
    assert (len(c.steps), c.steps.captured) == (STEPS, 3)
    assert c.trace.op_count > 20
    assert not c.steps.steps[3].difference.shapes
    more, fewer = c.steps.steps[3].difference.more, c.steps.steps[3].difference.fewer
    assert (more, fewer) == ((), ()) or name in ("PPO", "timm"), (more, fewer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_the_last_step_replays_bit_for_bit(name: str) -> None:
    run = made(name)
    with tracefuse.capture_step(n=3) as c:
        run(3)
    found = c.check()
    assert found is not None
    assert found.compared > 5
    assert found.differing == 0, str(found)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["HF Trainer, LoRA", "accelerate", "Lightning"])
def test_lines_point_into_the_users_project(name: str) -> None:
    run = made(name)
    with tracefuse.capture_step(n=2) as c:
        run(3)
    files = {call.origin.source.file for call in c.run.recorder.recording.calls if call.origin.source}
    packages = {path.partition("site-packages" + os.sep)[2].partition(os.sep)[0] for path in files} - {""}
    assert any(path.endswith("training_loops.py") for path in files)
    assert packages <= {"transformers", "peft"}
    assert not any("trainer" in os.path.basename(path) for path in files)
    sources = {entry.source for entry in c.trace.inputs if entry.kind == "parameter"}
    names = {
        "HF Trainer, LoRA": "base_model.model.lm_head.weight",
        "accelerate": "2.weight",
        "Lightning": "head.weight",
    }
    assert names[name] in sources


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "loop"), [("transformers", trainer), ("lightning", lightning)])
def test_the_callbacks_of_the_guide_capture_a_step(package: str, loop: Callable[..., Run], root: Path) -> None:
    module = pytest.importorskip(package)
    blocks = re.findall(
        r"```python\n(class CaptureStep.*?)```", (root / "notebooks" / "README.md").read_text(), re.DOTALL
    )
    (block,) = (one for one in blocks if f"({package}." in one)
    assert len(block.splitlines()) <= 13
    names = {package: module, "tracefuse": tracefuse}
    exec(block, names)
    callback = names["CaptureStep"]()
    watched = loop("cpu", (callback,))(4)
    assert watched.is_same(loop("cpu")(4))
    assert callback.capture.steps.captured == 3
    assert callback.capture.trace.op_count > 20
