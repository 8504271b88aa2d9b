"""A session that was measured on a GPU opens in a process that sees none: the same programs, the GPU's times."""

from __future__ import annotations

import json
import os
from pathlib import Path

import programs
import pytest
import torch
from forks import run_python

import tracefuse

OPEN = """
import json, sys, torch, tracefuse
assert not torch.cuda.is_available()
c = tracefuse.load(sys.argv[1])
v = c.optimize()
said = ""
try:
    c.optimize(cat=False).measure(budget_s=0.05)
except tracefuse.TracefuseError as error:
    said = str(error)
print(json.dumps({
    "device": c.device.type, "code": v.forward.code + v.backward.code, "timing": str(v.timing), "said": said,
    "timeline": v.timeline().provenance, "kernels": [k.key for k in v.kernels], "layers": str(v.layers()),
    "findings": str(v.findings()), "tunings": sorted(v.tunings), "dot": len(v.to_dot()),
}))
"""


@pytest.mark.parametrize("inputs", [False, True], ids=["without inputs", "with inputs"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_session_opens_where_there_is_no_gpu(device: str, inputs: bool, tmp_path: Path) -> None:
    torch.manual_seed(7)
    capture = tracefuse.capture(programs.gpt(torch.float32, device).fresh().run)
    variant = capture.optimize()
    variant.measure(budget_s=0.2)
    timeline = variant.timeline()
    path = capture.save(tmp_path / "run.tfz", inputs=inputs)

    found = opened_without_a_gpu(path)
    assert found["device"] == device
    assert found["code"] == variant.forward.code + variant.backward.code
    assert found["kernels"] == [kernel.key for kernel in variant.kernels]
    assert found["timing"] == str(variant.timing)
    assert found["timeline"] == timeline.provenance
    assert found["tunings"] == sorted(variant.tunings)
    if not inputs:
        assert "saved without its input tensors" in found["said"]
    elif device == "cuda":
        assert "torch sees no CUDA GPU here" in found["said"]
        again = tracefuse.load(path)
        assert all(map(torch.equal, again.example_inputs, capture.example_inputs))
        for mine, theirs in zip(again.replay(), capture.replay(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        difference = again.optimize().measure(budget_s=0.2).program("optimised").difference
        assert max(difference.results, difference.gradients) < 1e-2


def opened_without_a_gpu(path: Path) -> dict:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = run_python(["-c", OPEN, str(path)], env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
