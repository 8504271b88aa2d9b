"""What the committed notebooks hold: outputs of a run at full size on a GPU, readable where no widget is drawn.

    python notebooks/store.py run OUT [NAME ...]    where the GPU is: executes notebooks top to bottom, into the folder OUT
    python notebooks/store.py keep OUT              where Chromium is: draws what needs JavaScript, and stores all of OUT
    python notebooks/store.py check                 says what is wrong with the committed notebooks, if anything is

`run` needs nbclient and ipykernel, `keep` playwright, Pillow and an installed Chromium. A stored notebook holds its views and
charts as pictures, its text names no folder of the machine, its metadata holds a hash of the code whose outputs these are:
whoever edits a code cell stores the notebook anew, text cells are free. A cell with `"tracefuse": {"tab": "findings"}` in its
metadata is drawn with that tab of the view open.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

import tracefuse
from tracefuse.widgets.payload.pack import encode

FOLDER = Path(__file__).resolve().parent
HOW = "python notebooks/store.py run OUT {name} on a GPU, then python notebooks/store.py keep OUT"
CELL_TIMEOUT_S = 900
MOST_NBYTES = 4 * 2**20
"""Of all notebooks together, so that a clone stays small."""
WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
PLOTLY = "application/vnd.plotly.v1+json"
PAGE = re.compile(r'<iframe srcdoc="(.*?)"', re.DOTALL)
STILL = 'class="tf-still-'
ON_A_CPU = "The stored outputs are of a CPU"
"""What the text of a notebook says whose outputs are not of a GPU yet."""
CPU = re.compile(r"^CPU.*, torch \d.*, Python \d.*, \d{4}-\d\d-\d\d$", re.MULTILINE)
MACHINE = re.compile(r"^(?!CPU)\S.*, torch \d.*, Python \d.*, \d{4}-\d\d-\d\d$", re.MULTILINE)
PATH_OF_A_MACHINE = re.compile(
    r"(?<![\w.:/])(?:/(?:home|root|tmp|opt|usr|var|mnt|work|workspace|data|scratch)|"
    + re.escape(tempfile.gettempdir())
    + r")/\S*"
)


def paths() -> list[Path]:
    """The committed notebooks, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_hash(notebook: NotebookNode) -> str:
    """Of the code cells' sources alone, in order."""
    return hashlib.sha256(json.dumps([cell.source for cell in code_cells(notebook)]).encode()).hexdigest()


def is_stored(notebook: NotebookNode) -> bool:
    """Whether `keep` has written it; otherwise it holds no outputs."""
    return "tracefuse" in notebook.metadata or any(cell.outputs for cell in code_cells(notebook))


# --- run --------------------------------------------------------------------------------------------------------------


def execute(notebook: NotebookNode) -> NotebookNode:
    """A copy of `notebook` with the outputs of a run in an empty folder, and what each widget showed at the end.

    Raises nbclient's `CellExecutionError` where a cell raises.
    """
    made = nbformat.from_dict(json.loads(json.dumps(notebook)))
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            made,
            timeout=CELL_TIMEOUT_S,
            kernel_name="python3",
            store_widget_state=True,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
        places = {str(Path(tracefuse.__file__).parent): "tracefuse", folder: ".", str(Path.home()): "~"}
    for output in outputs_of(made):
        _scrub(output, places)
    return made


def outputs_of(notebook: NotebookNode) -> Iterator[NotebookNode]:
    for cell in code_cells(notebook):
        yield from cell.outputs


def _scrub(output: NotebookNode, places: dict[str, str]) -> None:
    """Let no text name the folders that are the keys of `places`."""
    for holder, key in [(output, "text"), *((output.get("data", {}), kind) for kind in output.get("data", {}))]:
        for place, name in places.items() if isinstance(holder.get(key), str) else ():
            holder[key] = holder[key].replace(place, name)


def views_of(notebook: NotebookNode) -> dict[str, dict[str, Any]]:
    """What each explorer of an executed notebook showed at the end, by its model, as `widgets.html.page_of` has it."""
    models = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    return {key: _view(model) for key, model in models.items() if "payload" in model["state"]}


def _view(model: dict[str, Any]) -> dict[str, Any]:
    state = model["state"]
    for buffer in model.get("buffers", ()):
        *way, last = buffer["path"]
        place: Any = state
        for step in way:
            # nbclient keeps buffers of former states, which may have had more of them.
            place = place[step] if not isinstance(place, list) or step < len(place) else {}
        place[last] = buffer["data"]
    return {"payloads": [state["payload"]], "timeline": state["timeline"]}


def with_views(executed: NotebookNode) -> NotebookNode:
    """`executed`, edited in place, with its views as short text in place of the state of its widgets."""
    executed.metadata["tracefuse"] = {"views": {key: encode(view) for key, view in views_of(executed).items()}}
    executed.metadata.pop("widgets", None)
    return executed


def run(folder: Path, names: Sequence[str]) -> None:
    """Execute the notebooks whose names begin with one of `names` (default: all) and write them to `folder`."""
    chosen = [path for path in paths() if not names or path.name.startswith(tuple(names))]
    if not chosen:
        raise SystemExit(
            f"no notebook begins with {' or '.join(names)}: there are {', '.join(p.name for p in paths())}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        nbformat.write(with_views(execute(read(path))), folder / path.name)
        print(f"executed {path.name}", flush=True)


# --- keep -------------------------------------------------------------------------------------------------------------


def keep(folder: Path) -> None:
    """Store the outputs of `run(folder)` in the committed notebooks, views and charts as pictures.

    Leaves those whose code has changed since that run as they are, and raises `SystemExit` with their names at the end.
    """
    from draw import drawing

    changed = []
    with drawing() as artist:
        for path in sorted(folder.glob("*.ipynb")):
            stored = store(read(FOLDER / path.name), read(path), artist)
            if stored is None:
                changed.append(path.stem)
                continue
            nbformat.write(stored, FOLDER / path.name)
            print(f"stored {path.name}", flush=True)
    if changed:
        raise SystemExit(f"not stored, since the code is not what ran: {HOW.format(name=' '.join(changed))}")


def store(committed: NotebookNode, executed: NotebookNode, artist: Any) -> NotebookNode | None:
    """`committed` with the outputs of `executed`, drawn by `artist` (a `draw.Artist`); None where the code differs."""
    if code_hash(committed) != code_hash(executed):
        return None
    views = executed.metadata.tracefuse.views
    stored = nbformat.from_dict(json.loads(json.dumps(committed)))
    for cell, ran in zip(code_cells(stored), code_cells(executed), strict=True):
        tab = cell.metadata.get("tracefuse", {}).get("tab")
        cell.execution_count = ran.execution_count
        cell.outputs = [_drawn(one, views, tab, artist) for one in ran.outputs if not _is_still(one)]
    stored.metadata["tracefuse"] = {"code_sha256": code_hash(stored)}
    return stored


def _is_still(output: NotebookNode) -> bool:
    """Whether the output is the still form of a view, which the view's picture takes the place of."""
    return STILL in output.get("data", {}).get("text/html", "")


def _drawn(output: NotebookNode, views: dict[str, str], tab: str | None, artist: Any) -> NotebookNode:
    """The output without what only JavaScript shows; a chart keeps its data beside its picture."""
    data = output.get("data", {})
    if WIDGET in data:
        model = data[WIDGET]["model_id"]
        if model not in views:
            raise SystemExit(
                "a widget other than tracefuse's view is shown: nothing here draws it; show a chart or text"
            )
        png, text = artist.view(views[model], tab)
        output.data = {"text/plain": text}
    elif PLOTLY in data:
        png = artist.chart(data[PLOTLY])
        output.data = {PLOTLY: data[PLOTLY], "text/plain": data.get("text/plain", "a chart")}
    elif found := PAGE.search(data.get("text/html", "")):
        png = artist.page(found[1], tab)
        output.data = {"text/plain": data["text/plain"]}
    else:
        return output
    output.metadata = {}
    output.data["image/png"] = base64.b64encode(png).decode()
    return output


# --- check ------------------------------------------------------------------------------------------------------------


def problems(notebook: NotebookNode, name: str) -> list[str]:
    """What is wrong with the stored outputs of the notebook called `name`, a sentence each."""
    if not is_stored(notebook):
        return [f"it holds no outputs: {HOW.format(name=name)}"]
    found = []
    if notebook.metadata.get("tracefuse", {}).get("code_sha256") != code_hash(notebook):
        found.append(f"its outputs are not those of its code: {HOW.format(name=name)}")
    cells = code_cells(notebook)
    says_cpu = any(ON_A_CPU in cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    if not any((CPU if says_cpu else MACHINE).search(output.get("text", "")) for output in cells[0].outputs):
        where = "a CPU, as its text says" if says_cpu else "a GPU"
        found.append(f"its first code cell does not print {where}, the versions and the date (tracefuse.machine())")
    for number, cell in enumerate(cells, 1):
        if shows_something(cell.source) and not cell.outputs:
            found.append(f"code cell {number} shows something, but no output of it is stored")
        found += [f"code cell {number}: {problem}" for output in cell.outputs for problem in _output_problems(output)]
    if "widgets" in notebook.metadata:
        found.append("it holds the state of widgets, which nothing can bring back to life")
    return found


def shows_something(source: str) -> bool:
    """Whether a code cell prints, is a magic with a view, or ends with an expression whose value is displayed."""
    if source.startswith("%%"):
        return True
    lines = [line for line in source.splitlines() if not line.startswith(("%", "!"))]
    tree = ast.parse("\n".join(lines))
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if any(isinstance(called, ast.Name) and called.id in ("print", "display") for called in calls):
        return True
    is_silent = source.rstrip().endswith(";") or not tree.body or not isinstance(tree.body[-1], ast.Expr)
    return not is_silent and not isinstance(tree.body[-1].value, ast.Call)  # a call's value may be None


def _output_problems(output: NotebookNode) -> Iterator[str]:
    if output.output_type == "error":
        yield f"it raised {output.ename}: {output.evalue}"
    if output.get("name") == "stderr":
        yield f"it wrote to stderr: {output.text[:200]}"
    data = output.get("data", {})
    if WIDGET in data or _is_still(output):
        yield "a widget is stored, which shows nothing without its kernel"
    if PLOTLY in data and "image/png" not in data:
        yield "a chart is stored without a picture of it"
    for text in (output.get("text", ""), *data.values()):
        if isinstance(text, str) and (path := PATH_OF_A_MACHINE.search(text)):
            yield f"it names {path[0]}, a path of the machine that ran it"


def check() -> list[str]:
    """All that is wrong with the committed notebooks; empty if nothing is."""
    found = [f"{path.name}: {problem}" for path in paths() for problem in problems(read(path), path.stem)]
    taken = sum(path.stat().st_size for path in paths())
    if taken > MOST_NBYTES:
        found.append(
            f"the notebooks take {taken:,} bytes, more than {MOST_NBYTES:,}: show fewer views or smaller charts"
        )
    return found


def main(words: Sequence[str] | None = None) -> int:
    """The command line; 1 if `check` finds something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "keep"):
        commands.add_parser(name).add_argument("folder", type=Path, metavar="OUT")
    commands.choices["run"].add_argument("names", nargs="*", metavar="NAME", help="how the notebooks' names begin")
    commands.add_parser("check")
    arguments = parser.parse_args(words)
    if arguments.command == "run":
        run(arguments.folder, arguments.names)
    elif arguments.command == "keep":
        keep(arguments.folder)
    else:
        found = check()
        print(
            "\n".join(found)
            or "every notebook holds the outputs of its code, of a run on a GPU or on the CPU that its text names"
        )
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
