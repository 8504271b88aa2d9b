"""A click on a switch in JupyterLab, timed in the browser: milliseconds until the view shows the new numbers.

    python tests/bench/overhead/clicks.py --check --out clicks.json

GPTs of 12 and 48 layers, narrow, so that a CPU's step takes less than the view. A fresh cell captures the step; a moment
after its view can be clicked, one switch is. What is timed starts with the click and ends with the frame that shows the
numbers of that choice, the browser's own work included: the clock is the wall's, so nothing else should run. The least moment
that is tried is none at all, before anything is foreseen, and the next one in which a person reads the first sentence.
Behind each first click a second one follows, half a second after its numbers, for which there is no limit. It needs Chromium.

With `--check` the benchmark ends with status 1 where a click behind the longest moment takes more than 0.15 s at 12 layers or
0.5 s at 48.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nbformat

from tracefuse.text import aligned

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "tools"))
from lab import RUN_ALL, SHUT_DOWN, browsing, serving
from results import environment, parser, write

if TYPE_CHECKING:
    from playwright.sync_api import Page

LAYERS = {12: (0.0, 2.0), 48: (0.0, 5.0)}
"""For each number of layers, how many seconds behind the view a switch is clicked."""
FEW_LAYERS = {2: (0.5,)}
MOST_MS = {12: 150, 48: 500}
SWITCHES = {"remat 0": 0.0, "remat off": None, "simplify off": None, "decompose off": None, "fuse off": None}
"""Those that change the program, each by its toggle, or by an input weight."""
FEW_SWITCHES = ("remat 0",)
THEN = dict.fromkeys(SWITCHES, "fuse off") | {"fuse off": "simplify off"}
"""The second click behind each."""
PATIENCE_MS = 60_000
CELL = """%%tracefuse
from tracefuse.optimizers.fuse import carving
carving._known.clear()
model.zero_grad(set_to_none=True)
model(*data).backward()
"""
SETUP = """import torch
import tracefuse
from tracefuse.demo import GPT, batch
%load_ext tracefuse
torch.manual_seed(0)
model, data = GPT(layers={layers}, width=64, heads=2, length=32), batch(256, 1, 32)
"""
CLICK = """async ([pass, weight, wait]) => {
    const find = (id) => document.querySelector(`[data-testid=${id}]`);
    // Its row waits from the click on, until the view has numbers of that choice.
    const isWaiting = () => find("tf-passes").querySelector(`[data-pass=${pass}]`).ariaBusy === "true";
    await new Promise((done) => setTimeout(done, 1000 * wait));
    const start = performance.now();
    if (weight === null) find(`tf-toggle-${pass}`).click();
    else {
        const choice = find("tf-remat-weight");
        choice.value = String(weight);
        choice.dispatchEvent(new Event("change", { bubbles: true }));
    }
    if (!isWaiting()) return null;
    while (isWaiting()) await new Promise(requestAnimationFrame);
    find("tf-root").getBoundingClientRect();  // lays out what this frame paints
    const took = performance.now() - start;
    const isOn = find(`tf-toggle-${pass}`).checked;
    return isOn === (weight !== null) ? took : null;
}"""
SECOND_S = 0.5


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--check", action="store_true", help="end with status 1 where a limit is missed")
    arguments = made.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "lab") as lab, browsing() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE_MS)
        found = []
        names = FEW_SWITCHES if arguments.small else SWITCHES
        for layers, waits in (FEW_LAYERS if arguments.small else LAYERS).items():
            for wait in waits:
                rows = {name: clicked(page, lab, layers, name, wait) for name in names}
                found.append({"layers": layers, "behind_s": wait, "clicks": rows})
                report(found[-1])
    missed = [miss for one in found if one["behind_s"] for miss in misses(one)]
    print("missed: " + ("; ".join(missed) or "nothing"))
    loads = [round(one, 1) for one in (load, os.getloadavg()[0])]
    print(f"wall time measured on {environment('cpu')['device']}, at a load of {loads[0]} to {loads[1]}")
    record = {"benchmark": "clicks", "second_s": SECOND_S, "rows": found, "missed": missed, "load": loads}
    write(arguments.out, record | {"environment": environment("cpu")})
    sys.exit(arguments.check and bool(missed))


def clicked(page: Page, lab: Any, layers: int, name: str, wait: float) -> dict[str, Any]:
    """Milliseconds of this switch in a notebook of its own, and of the next one behind it."""
    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP.format(layers=layers), CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (lab.root / "clicks.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    lab.open(page, "clicks.ipynb")
    if errors := page.evaluate(RUN_ALL):
        raise SystemExit(f"the notebook ended with {errors}")
    page.wait_for_selector("[data-testid=tf-root][data-ready='1']")
    second = THEN[name]
    first_ms, second_ms = click(page, name, wait), click(page, second, SECOND_S)
    page.evaluate(SHUT_DOWN)
    return {"first_ms": first_ms, "second": second, "second_ms": second_ms}


def click(page: Page, name: str, wait: float) -> float:
    """Milliseconds from the click, so many seconds from now, to the frame with its numbers."""
    took = page.evaluate(CLICK, [name.split()[0], SWITCHES[name], wait])
    if took is None:
        raise SystemExit(f"{name}: the view does not wait for its numbers, or shows another choice")
    return took


def misses(row: dict[str, Any]) -> list[str]:
    most = MOST_MS.get(row["layers"], float("inf"))
    clicks = row["clicks"].items()
    return [
        f"{row['layers']} layers: {n} {c['first_ms']:.0f} ms, not {most}" for n, c in clicks if c["first_ms"] > most
    ]


def report(row: dict[str, Any]) -> None:
    print(f"GPT of {row['layers']} layers, {row['behind_s']:g} s behind its view")
    heads = "click", "ms", "then", "ms"
    shown = [(n, f"{c['first_ms']:.0f}", c["second"], f"{c['second_ms']:.0f}") for n, c in row["clicks"].items()]
    print(aligned([heads, *shown]), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
