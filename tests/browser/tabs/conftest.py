"""The program whose tabs are looked at, and its saved page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from traces import captured_step

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.variant import Variant
from tracefuse.widgets.html import page as html_page
from tracefuse.widgets.html import write_html
from tracefuse.widgets.payload.program import payload


@pytest.fixture(scope="module")
def variant(request: pytest.FixtureRequest) -> Variant:
    """A small GPT with all passes, and with what the test file calls `OPTIONS`."""
    torch.manual_seed(0)
    model, data = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    options: dict[str, Any] = getattr(request.module, "OPTIONS", {})
    return tracefuse.capture(lambda: model(*data).backward()).optimize(**options)


@pytest.fixture(scope="module")
def written(variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tabs") / "view.html"
    path.write_text(html_page([payload(variant, name="c")], "tabs"), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def whole_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole step of four layers, with an update and a clip of its gradients: all columns that the tables may have."""
    return write_html(captured_step(4, is_clipped=True).optimize(), tmp_path_factory.mktemp("step") / "view.html")
