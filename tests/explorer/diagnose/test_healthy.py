"""Of a program that is written as it should be, findings are remarks: what kernels would gain, never that something is wrong.

Severity is the share of the step. It is judged at the sizes of real runs, as captured and as on a GPU that is set up well.
"""

from __future__ import annotations

from dataclasses import replace

import cuda_traces
import pytest
from findings import HOPPER, KEPT, UNFUSED, known
from healthy_programs import HEALTHY, captured

from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Case
from tracefuse.measure.op_times import modelled

CAT = "cat-in-backward"

# transformers casts logits for its loss, and writes its norm in single ops of float32: only its authors can change that.
OF_TRANSFORMERS = {"logits-in-float32": "low", "norm-in-float32": "low"}
# What every op as a kernel of its own costs an eager program, and the gradients of a split in pieces.
REMARKS = {
    "mlp": {UNFUSED: "low"},
    "gpt": {UNFUSED: "low", CAT: "low"},
    "resnet": {UNFUSED: "low"},
    "llama": {UNFUSED: "low", KEPT: "low"} | OF_TRANSFORMERS,
    "lora": {UNFUSED: "low", KEPT: "low"} | OF_TRANSFORMERS,
    "autoencoder": {UNFUSED: "low"},
    "recurrent": {UNFUSED: "low", CAT: "low"},
    "diffusion": {UNFUSED: "low", CAT: "low"},
    "recommender": {UNFUSED: "low", KEPT: "low"},
    "optimizer_step": {"update-share": "low"},
}


def test_there_are_ten() -> None:
    assert list(HEALTHY) == list(REMARKS)
    assert len(REMARKS) == 10


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_program_has_remarks_and_none_of_them_high(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured(HEALTHY[name], monkeypatch)
    here = Case(capture.program, capture.trace, modelled(capture.trace), capture.update)
    update = capture.update and cuda_traces.on_cuda(capture.update)
    there = replace(known(here, environment=HOPPER), trace=cuda_traces.on_cuda(capture.trace), update=update)
    for case in (here, there):
        assert {one.id: one.severity for one in diagnose(case)} == REMARKS[name]


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet"])
def test_what_the_passes_leave_of_it_is_healthy_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured(HEALTHY[name], monkeypatch)
    left = {one.id: one.severity for one in capture.optimize().findings()}
    assert left.keys() <= REMARKS[name].keys()
    assert "high" not in left.values()
