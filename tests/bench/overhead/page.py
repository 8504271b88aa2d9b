"""Seconds that a person waits for the view of a 12-layer GPT: its page written and painted, each pass toggled in JupyterLab.

    python tests/bench/overhead/page.py --check

The page is timed op by op first, so that it has a timeline. A toggle lasts from the click to the frame with the new numbers,
by the page's own clock. The best of a few counts, since other programs on the machine only add. Needs Chromium, and what
`pip install '.[test]'` brings. With `--check` it ends with status 1 if one takes its limit or more.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import torch

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.widgets.view.explorer import Explorer

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tools"))
from lab import RUN_ALL, SHUT_DOWN, browsing, serving
from results import environment, parser, write

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LIMITS_S = {"write the page": 10.0, "first paint": 0.5, "toggle": 1.0}
LAYERS = 12
SIZES = {"layers": LAYERS, "width": 64, "heads": 2, "vocab": 256, "length": 32}
VIEW = "[data-testid=tf-root][data-ready='1']"
# Two frames after the view says that it is drawn, it is on the screen.
PAINTED = """() => new Promise((done) => {
    const look = () => document.querySelector("[data-testid=tf-root][data-ready='1']")
        ? requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() / 1000)))
        : requestAnimationFrame(look);
    look();
})"""
TOGGLE = """async ([name, isOff]) => {
    const frame = () => new Promise(requestAnimationFrame);
    const start = performance.now();
    document.querySelector(`[data-testid=tf-toggle-${name}]`).click();
    const root = document.querySelector("[data-testid=tf-root]");
    while (root.querySelector(`[data-testid=tf-pass-${name}]`).classList.contains("tf-off") !== isOff) await frame();
    await frame();
    await frame();
    return (performance.now() - start) / 1000;
}"""
MODEL = f"""
%load_ext tracefuse
import torch
from tracefuse.demo import GPT, batch
torch.manual_seed(0)
model, (tokens, targets) = GPT(**{SIZES}), batch(256, 2, 32)
"""
CELL = "%%tracefuse --no-measure -o c\nloss = model(tokens, targets)\nloss.backward()"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="end with status 1 beyond a limit")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        path = Path(folder) / "view.html"
        seconds = {"write the page": written(path), "first paint": first_paint(path, browser)}
        nbytes = path.stat().st_size
        for _ in range(1 if arguments.small else 3):
            for name, took in toggled(Path(tempfile.mkdtemp(dir=folder)), browser).items():
                seconds[name] = min(took, seconds.get(name, took))
    print("\n".join(f"{took:6.2f} s  {name}" for name, took in seconds.items()), f"{nbytes:,} bytes a page", sep="\n")
    write(arguments.out, {"benchmark": "page", "environment": environment("cpu"), "seconds": seconds, "nbytes": nbytes})
    late = [name for name, took in seconds.items() if took >= LIMITS_S[name.partition(":")[0]]]
    if arguments.check and late:
        raise SystemExit(f"at their limit or beyond: {', '.join(late)}")


def written(path: Path) -> float:
    """Write the page of a measured view to `path`."""
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(**SIZES), batch(256, 2, 32)
    explorer = Explorer(tracefuse.capture(lambda: model(tokens, targets).backward()).optimize(), "c", budget_s=0.1)
    explorer.measure()
    start = time.perf_counter()
    explorer.save_html(path)
    return time.perf_counter() - start


def first_paint(path: Path, browser: Browser) -> float:
    """From navigation to the second frame after the view was drawn."""
    times = []
    for _ in range(5):
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(path.as_uri())
        times.append(page.evaluate(PAINTED))
        page.close()
    return min(times)


def toggled(home: Path, browser: Browser) -> dict[str, float]:
    """Each pass off, and on again from what is kept, in a notebook of its own."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (MODEL, CELL)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    seconds = {}
    with serving(home) as lab:
        nbformat.write(notebook, lab.root / "page.ipynb")
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.set_default_timeout(60_000)
        lab.open(page, "page.ipynb")
        if problems := page.evaluate(RUN_ALL):
            raise SystemExit("\n".join(problems))
        page.wait_for_selector(VIEW)
        for name in ("simplify", "cat", "remat", "fuse"):
            for is_off in (True, False):
                seconds[f"toggle: {name} {'off' if is_off else 'on'}"] = page.evaluate(TOGGLE, [name, is_off])
                page.wait_for_selector("[data-testid=tf-root][data-busy='']")
        page.evaluate(SHUT_DOWN)
        page.close()
    return seconds


if __name__ == "__main__":
    main()
