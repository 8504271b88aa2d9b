"""Healthy programs in the wild: nothing of medium or more, and a reason for each low finding that is no mere remark."""

from __future__ import annotations

import importlib.util

import meta_kernels
import planting
import pytest
import torch
from wild_programs import WILD

import tracefuse
from tracefuse.diagnose.diagnose import diagnose

REMARKS = {"unfused-pointwise", "saved-not-recomputed", "cat-in-backward", "cat-in-forward"}
"""What every eager program has, and passes do away with."""

LOGITS_OF_AUTOCAST = "autocast runs the loss in float32, and casts the logits for it: no line asks for that"
WHY = {
    "nanogpt_with_dropout_under_autocast": {
        "logits-in-float32": LOGITS_OF_AUTOCAST,
        "weights-cast-each-step": "autocast casts weights once a step: a little at this batch, and its way of working",
    },
    "hf_gpt2": {"logits-in-float32": "transformers casts logits for its loss; only another loss function changes that"},
    "hf_llama": {
        "logits-in-float32": "transformers casts logits for its loss; only another loss function changes that",
        "norm-in-float32": "transformers' LlamaRMSNorm is written in single ops of float32",
    },
    "hf_qwen2": {
        "logits-in-float32": "transformers casts logits for its loss; only another loss function changes that",
        "norm-in-float32": "transformers' Qwen2RMSNorm is written in single ops of float32",
    },
}
"""What stands as low beside the remarks, and why it is right to say it."""


def test_there_are_twenty_with_the_ten_others() -> None:
    from healthy_programs import HEALTHY

    assert len(WILD) >= 17
    assert len(WILD.keys() | HEALTHY.keys()) >= 20
    assert {name for name in WILD if name.startswith("hf_")} == {"hf_gpt2", "hf_llama", "hf_qwen2", "hf_bert"}
    assert len([name for name in WILD if name.startswith("timm_")]) == 3


@pytest.mark.parametrize("name", WILD)
def test_a_program_in_the_wild_that_is_well_has_no_finding_of_medium_or_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith(("hf_", "timm_")):
        package = "transformers" if name.startswith("hf_") else "timm"
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    meta_kernels.install(monkeypatch)
    with torch.device("meta"):
        step = WILD[name]()
        with tracefuse.capture() as c:
            step()
    found = diagnose(planting.on_a_gpu(c))
    assert [str(one) for one in found if one.severity != "low"] == []
    assert {one.id for one in found} - REMARKS == WHY.get(name, {}).keys()
