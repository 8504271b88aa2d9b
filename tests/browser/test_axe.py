"""What axe, the accessibility checker, says of every panel, in light and in dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.variant import Variant
from tracefuse.widgets.html import write_html
from tracefuse.widgets.payload.program import payload

pytestmark = pytest.mark.browser

# Those that keep people out; "moderate" and "minor" are about pages, and this is a part of one.
SERIOUS = ("serious", "critical")
BARS = [("wait", 3.4e3), ("copy @ 1.3 GB/s", 5e5), ("host", 2e4), ("other", 1e3)]
SAID = [("faster", "536 → 8.9 ms"), ("slower", "1 → 2 ms"), ("no difference seen", "1 → 1 ms"), ("", "")]
# One with everything that a finding can have.
FINDING = {
    "key": "0", "id": "a", "severity": "high", "title": "copies", "evidence": [("bytes", "640 MiB")], "values": [],
    "source": "a.py:1  x", "fix": "do not", "code": "", "worth": "500 ms",
    "changes": {"cat": True}, "mended": "", "is_mended": False, "mended_by": [],
    "bars": [{"label": label, "us": us, "provenance": "measured on a test"} for label, us in BARS],
    "trials": [{"does": "on the GPU", "blocked": "", "verdict": verdict, "said": said} for verdict, said in SAID],
}  # fmt: skip
RUN = """async () => {
    const { violations } = await axe.run("[data-testid=tf-root]");
    const facts = ({ html, failureSummary }) => `${html} ${failureSummary}`;
    return violations.map(({ id, impact, nodes }) => [impact, id, nodes.slice(0, 3).map(facts)]);
}"""


@pytest.fixture(scope="module")
def axe(root: Path) -> str:
    script = root / "widgets/js/node_modules/axe-core/axe.min.js"
    if not script.exists():
        pytest.skip("needs `npm ci` in widgets/js")
    return script.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=2, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    with tracefuse.capture() as c:
        loss = model(tokens, targets)
        loss.backward()
    variant = c.optimize(freeze=["h.0.mlp.*"], save=["h.1.attn"])
    variant.measure(budget_s=0.5)

    def shown(one: Variant) -> dict[str, Any]:
        found = payload(one, (variant.timing, one.config)) if variant.timing else payload(one)
        return found | {"findings": [*found["findings"], FINDING]}

    return write_html(variant, tmp_path_factory.mktemp("axe") / "view.html", payload_of=shown)


@pytest.fixture(scope="module", params=[("light", 1300), ("dark", 1300), ("light", 700)], ids=str)
def page(browser: Browser, written: Path, axe: str, request: pytest.FixtureRequest) -> Iterator[Page]:
    scheme, width = request.param
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(written.as_uri())
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    opened.evaluate(axe)
    yield opened
    opened.close()


def test_no_panel_keeps_anybody_out(page: Page) -> None:
    found = {}
    for tab in page.get_by_role("tab").all():
        tab.click()
        line = page.locator(".tf-tab-body [data-value], .tf-tab-body [role=row]").first
        if line.count():
            line.click()
        found[str(tab.text_content())] = [one for one in page.evaluate(RUN) if one[0] in SERIOUS]
    assert len(found) > 3
    assert {tab: problems for tab, problems in found.items() if problems} == {}
