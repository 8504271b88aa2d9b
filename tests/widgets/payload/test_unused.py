"""What the program computed and nothing used: in the payload and in the text, and in no sum."""

from __future__ import annotations

import torch
from torch import nn

import tracefuse
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_static_form, to_text


def _captured(probes: int) -> tracefuse.Capture:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with tracefuse.capture() as c:
        loss = model(x).sum()
        for _ in range(probes):
            x.exp()
        loss.backward()
    return c


def test_each_op_is_there_with_its_place_time_and_bytes() -> None:
    found = payload(_captured(2).optimize())["unused"]
    one, other = found["ops"]
    assert one == other
    assert (one["op"], one["phase"], one["nbytes"]) == ("aten.exp.default", "forward", 128)
    assert one["source"].endswith("  x.exp()")
    assert one["time_us"] > 0
    assert found["provenance"].startswith("modelled")


def test_the_text_says_it_once_for_ops_alike() -> None:
    shown = payload(_captured(2).optimize())
    text = to_text(shown)
    assert "computed, never used (modelled" in text
    (line,) = [line for line in text.splitlines() if line.startswith("aten.exp.default x2")]
    assert line.endswith("256 B")
    assert "aten.exp.default x2" in to_static_form(shown)


def test_it_is_in_no_sum() -> None:
    with_probe, without = (payload(_captured(probes).optimize(fuse=False)) for probes in (1, 0))
    assert with_probe["summary"] == without["summary"]
    assert [row["forward_us"] for row in with_probe["layers"]] == [row["forward_us"] for row in without["layers"]]
    assert "never used" not in to_text(without)
