"""README's pictures of the explorer, one of them moving, are drawn by today's view from a page of `view.py --html`.

python tests/bench/pages/pictures.py view.html notebooks/images
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from shutil import which

from apng import animated
from playwright.sync_api import Page, sync_playwright

from tracefuse.widgets.html import page
from tracefuse.widgets.payload.pack import decode

# File, width, colours, tab.
PICTURES = [
    ("explorer_light.png", 1300, "light", "trace"),
    ("explorer_dark.png", 1300, "dark", "timeline"),
    ("explorer_light_narrow.png", 700, "light", "layers"),
    ("explorer_dark_narrow.png", 700, "dark", "trace"),
]
MODULE = "head"
# File, size, tab, then what is clicked in turn and how many ms each state stands: a page holds what is one switch away.
SWITCHING = "explorer_switching.png"
SWITCHING_SIZE, SWITCHING_TAB = {"width": 1100, "height": 620}, "trace"
SWITCHES = [("", 2500), ("fuse", 2500), ("fuse", 1500), ("remat", 2500), ("remat", 1500)]


def main(saved: Path, folder: Path) -> None:
    """Draw each of `PICTURES` into `folder`, the slowest module unfolded and its forward op selected."""
    (held,) = re.findall(r'<script id="held" type="text/plain">(.*?)</script>', saved.read_text(), re.DOTALL)
    found = decode(held)
    anew = Path(tempfile.mkdtemp()) / "view.html"
    anew.write_text(page(found["payloads"], "tracefuse", found["timeline"]))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=which("chromium"), args=["--no-sandbox", "--disable-gpu"])
        for name, width, scheme, tab in PICTURES:
            opened = browser.new_page(viewport={"width": width, "height": 720}, color_scheme=scheme)  # type: ignore[arg-type]
            opened.goto(anew.as_uri())
            select(opened)
            opened.get_by_test_id(f"tf-tab-{tab}").click()
            opened.wait_for_timeout(500)  # canvases move to where they draw
            opened.screenshot(path=folder / name, full_page=True)
        opened = browser.new_page(viewport=SWITCHING_SIZE, color_scheme="light")  # type: ignore[arg-type]
        opened.goto(anew.as_uri())
        (folder / SWITCHING).write_bytes(switching(opened))
        browser.close()


def switching(opened: Page) -> bytes:
    """An animation: passes switched off and on again, the view as it is after each."""
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    opened.get_by_test_id(f"tf-tab-{SWITCHING_TAB}").click()
    frames = []
    for name, ms in SWITCHES:
        if name:
            opened.get_by_test_id(f"tf-toggle-{name}").click()
        opened.wait_for_timeout(500)
        frames.append((opened.screenshot(), ms))
    return animated(frames)


def select(opened: Page) -> None:
    opened.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    opened.locator("[data-testid=tf-tree] [role=row]", has_text=MODULE).first.click()
    opened.keyboard.press("ArrowRight")
    opened.keyboard.press("ArrowDown")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
