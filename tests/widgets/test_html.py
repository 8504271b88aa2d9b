"""The static page: complete, inert, and the JavaScript in it is the one that the sources build."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch

import tracefuse
from tracefuse.config import PASSES, Config
from tracefuse.config.names import OFF_BY_DEFAULT
from tracefuse.widgets import html
from tracefuse.widgets.html import configurations, page, to_html, write_html
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.payload.program import payload

NASTY = "<img src=x onerror=alert(1)>"


@cache
def captured() -> tracefuse.Capture:
    model = torch.nn.Linear(4, 4)
    model.register_parameter(NASTY, torch.nn.Parameter(torch.ones(4)))
    x = torch.randn(2, 4)
    with tracefuse.capture() as c:
        text = "</script><!-- <script>"; loss = (model(x) * getattr(model, NASTY)).square().sum()  # fmt: skip  # noqa: E702
        loss.backward()
    assert text
    return c


@cache
def written() -> str:
    return to_html(captured().optimize())


def held(text: str) -> dict:
    (found,) = re.findall(r'<script id="held" type="text/plain">(.*?)</script>', text, re.DOTALL)
    return decode(found)


def payloads(text: str) -> list[dict]:
    return held(text)["payloads"]


def test_it_asks_for_nothing_from_anywhere() -> None:
    assert not re.findall(
        r"""(?:src|href)\s*=|@import|url\(|https?://""",
        re.sub(r'<script id="held".*?</script>', "", written(), flags=re.DOTALL),
    )


def test_no_string_of_the_session_is_markup() -> None:
    text = written()
    assert NASTY in json.dumps(payloads(text))
    assert "</script><!-- <script>" in json.dumps(payloads(text))
    assert text.lower().count("<script") == text.lower().count("</script") == 3
    assert "<!--" not in text
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "<img" not in outside


def test_a_timeline_travels_along() -> None:
    timeline = {"provenance": "measured", "programs": [{"label": "a", "count": 1, "events": "AAAA"}]}
    assert held(page([payload(captured().optimize())], "a", timeline))["timeline"] == timeline
    assert held(written())["timeline"] is None


def test_a_title_is_escaped() -> None:
    assert "<title>&lt;b&gt;</title>" in page([payload(captured().optimize())], "<b>")


@pytest.mark.parametrize("shown", [Config(), Config.off(), Config.of(remat=0, freeze=["a"])])
def test_every_single_switch_leads_somewhere(shown: Config) -> None:
    found = configurations(shown)
    assert shown not in found
    assert len(set(found)) == len(found)
    assert {Config(), Config.off()} - {shown} <= set(found)
    for name in PASSES:
        off, now = getattr(Config.off(), name), getattr(shown, name)
        default = True if name in OFF_BY_DEFAULT else getattr(Config(), name)
        neighbour = shown.changed(**{name: default if now == off else off})
        assert neighbour in found


def test_the_page_holds_those_configurations() -> None:
    held = [json.dumps(p["config"]) for p in payloads(written())]
    wanted = [Config(), *configurations(Config())]
    assert held[: len(wanted)] == [json.dumps(payload(captured().variant(c))["config"]) for c in wanted]


def test_it_holds_combinations_of_what_changes_something_as_far_as_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 8, requires_grad=True)
    variant = tracefuse.capture(lambda: (x.sin().exp() @ x).tanh().sum().backward()).optimize()
    changing = {one.name for one in variant.passes if not one.is_unchanged}
    assert {"remat", "fuse"} <= changing
    text = to_html(variant)
    configs = [p["config"] for p in payloads(text)]
    assert any(config["remat"] is None and not config["fuse"] and config["simplify"] for config in configs)
    assert len(text) < html.MOST_BYTES
    monkeypatch.setattr(html, "MOST_BYTES", len(text) - 500)  # what passes took is told, and differs
    fewer = [p["config"] for p in payloads(to_html(variant))]
    assert 1 < len(fewer) < len(configs)
    assert fewer == configs[: len(fewer)]


def test_it_holds_what_was_tried() -> None:
    explorer = captured().explore()
    explorer.configure({"remat": 0.0, "pad": False})
    explorer.configure({"remat": 0.5, "pad": True})
    held = [p["config"] for p in payloads(to_html(explorer.variant, board=explorer.board))]
    assert [config["remat"] for config in held if not config["pad"] and config["cat"]].count(0.0) == 1


def test_times_beside_a_pinned_variant_are_not_shown_as_beside_the_captured_program() -> None:
    variant = captured().variant(Config.of(fuse=False))
    variant.measure(budget_s=0.05)
    assert payloads(to_html(variant))[0]["timing"]["stale"] is False
    variant.measure(budget_s=0.05, against=captured().variant(Config.of(fuse=False, cat=False)))
    assert payloads(to_html(variant))[0]["timing"] is None


def test_it_is_written_as_utf_8(tmp_path: Path) -> None:
    target = write_html(captured().optimize(), tmp_path / "view.html", name="größe")
    assert target.read_bytes().decode("utf-8").startswith("<!doctype html>")
    assert "größe.optimize()" in target.read_text(encoding="utf-8")


# --- the bundle -------------------------------------------------------------------------------------------------------


def test_the_bundle_is_small(root: Path) -> None:
    assert (root / "widgets/static/widget.js").stat().st_size < 112_000


def test_the_bundle_is_what_the_sources_build(root: Path) -> None:
    sources = root / "widgets/js"
    if shutil.which("node") is None or not (sources / "node_modules/esbuild").exists():
        pytest.skip("needs node and `npm ci` in widgets/js")
    done = subprocess.run(["node", "build.mjs", "--check"], check=False, cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_sources_type_check(root: Path) -> None:
    tsc = root / "widgets/js/node_modules/.bin/tsc"
    if shutil.which("node") is None or not tsc.exists():
        pytest.skip("needs node and `npm ci` in widgets/js")
    done = subprocess.run(
        [str(tsc), "--project", "."], check=False, cwd=root / "widgets/js", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_the_pure_modules_do_what_their_tests_say(root: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs node")
    done = subprocess.run(["node", "--test"], check=False, cwd=root / "widgets/js", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
