"""Pictures of what a notebook shows only with JavaScript: an explorer's view, a page of a timeline, a plotly chart."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from shutil import which
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from plotly.offline import get_plotlyjs

from tracefuse.widgets.html import page_of
from tracefuse.widgets.payload.pack import decode
from tracefuse.widgets.text import to_text

WIDTH_PX, HEIGHT_PX = 1400, 720
CHART_PX = 1000, 450
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
COLOURS = 256


@contextmanager
def drawing() -> Iterator[Artist]:
    """An artist with a Chromium of its own. Raises `SystemExit` where none is installed."""
    path = next((found for name in CHROMIUM_NAMES if (found := which(name))), None)
    if path is None:
        raise SystemExit("drawing needs Chromium: install it (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield Artist(browser)
        browser.close()


class Artist:
    """Draws with a browser, in light colours and without a network. Pictures are PNGs of at most 256 colours."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    def view(self, held: str, tab: str | None) -> tuple[bytes, str]:
        """The view of an encoded page, with `tab` open (default: the first one), and its text form."""
        shown = decode(held)
        text = to_text(shown["payloads"][0])
        return self._page(page_of(shown, "tracefuse", text), tab), text

    def page(self, srcdoc: str, tab: str | None) -> bytes:
        """The page of a frame, as its attribute holds it."""
        return self._page(unescape(srcdoc), tab)

    def chart(self, figure: dict[str, Any]) -> bytes:
        """A plotly figure as plotly's own library draws it."""
        size = {key: figure["layout"].get(key, px) for key, px in zip(("width", "height"), CHART_PX, strict=True)}
        place = "<div id=chart style='display:inline-block'></div>"
        page = self._open(f"<!doctype html><meta charset=utf-8>{place}<script>{get_plotlyjs()}</script>")
        draw = "([data, layout]) => Plotly.newPlot('chart', data, layout, { staticPlot: true }).then(() => {})"
        page.evaluate(draw, [figure["data"], figure["layout"] | size])
        return _close(page, page.locator("#chart"))

    def _page(self, html: str, tab: str | None) -> bytes:
        page = self._open(html)
        if "<script" in html:
            page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
        if tab is not None:
            page.get_by_test_id(f"tf-tab-{tab}").click()
        page.wait_for_timeout(500)  # canvases move to where they draw
        return _close(page, page.locator("#view"))

    def _open(self, html: str) -> Page:
        page = self._browser.new_page(viewport={"width": WIDTH_PX, "height": HEIGHT_PX}, color_scheme="light")
        with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as file:
            file.write(html)
            file.flush()
            page.goto(Path(file.name).as_uri())
        return page


def _close(page: Page, shown: Locator) -> bytes:
    """The picture of what is `shown`; its page is closed."""
    picture = io.BytesIO(shown.screenshot())
    page.close()
    small = io.BytesIO()
    Image.open(picture).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()
