"""Every notebook runs from its first cell to its last on a CPU, and is committed with the outputs of its code on a GPU."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import forks
import nbformat
import pytest
import store
import torch
from jupyter_client.provisioning import local_provisioner
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

NOTEBOOKS = store.paths()
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
HEAD = ["import torch, tracefuse", "GPU = torch.cuda.is_available()", "print(tracefuse.machine())"]
MACHINE = "NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, tracefuse 0.1.0, Python 3.12.3, 2026-01-31\n"


def test_they_are_numbered_from_one() -> None:
    numbers = [path.name[:3] for path in NOTEBOOKS]
    assert numbers[0] == "01_"
    assert len(set(numbers)) == len(numbers)


@each_notebook
def test_it_is_valid_and_says_first_where_it_runs(path: Path) -> None:
    notebook = store.read(path)
    nbformat.validate(notebook)
    lines = [line.partition("#")[0].rstrip() for line in store.code_cells(notebook)[0].source.splitlines()]
    assert [line for line in lines if line in HEAD] == HEAD


@each_notebook
def test_it_holds_the_outputs_of_its_code(path: Path) -> None:
    assert store.problems(store.read(path), path.stem) == []


def test_all_together_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) <= store.MOST_NBYTES


PROGRESS = "tracefuse: compiling a graph of this model: "
"""What a machine says that is busy enough to take seconds for it."""


SHORTER = {
    r"(?<=--budget )[\d.]+": "0.3",
    r"(?<=budget_s=)[^,)]+": "0.3",
    r"(?<=else \[)1, 4, 16(?=\])": "1, 4",  # layers to compile, four times
}
"""What a reader waits for and no assertion here reads, as a pattern, and what stands there in a test."""


@pytest.fixture
def forked_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, and programs that cells run, are forks of one process that has imported torch, which has no GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(local_provisioner, "launch_kernel", forks.start_kernel)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_kernels")
@each_notebook
def test_it_runs(path: Path) -> None:
    before = path.read_bytes()
    notebook = store.execute(shortened(store.read(path)))
    outputs = list(store.outputs_of(notebook))
    said = "".join(output.text for output in outputs if output.get("name") == "stderr").splitlines()
    assert [line for line in said if not line.startswith(PROGRESS)] == []
    pages = [output for output in outputs if store.PAGE.search(output.get("data", {}).get("text/html", ""))]
    assert store.views_of(notebook) or pages, "a notebook shows at least one view"
    assert path.read_bytes() == before


def shortened(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    for cell in store.code_cells(notebook):
        for pattern, short in SHORTER.items():
            cell.source = re.sub(pattern, short, cell.source)
    return notebook


def test_what_is_shortened_is_still_there() -> None:
    sources = [cell.source for path in NOTEBOOKS for cell in store.code_cells(store.read(path))]
    for pattern in SHORTER:
        assert any(re.search(pattern, source) for source in sources), pattern


# --- storing ----------------------------------------------------------------------------------------------------------


class Pencil:
    """An artist that writes what it was asked to draw."""

    def view(self, held: str, tab: str | None) -> tuple[bytes, str]:
        return f"view {held} {tab}".encode(), "the view as text"

    def chart(self, figure: dict[str, Any]) -> bytes:
        return f"chart {figure['data']}".encode()

    def page(self, srcdoc: str, tab: str | None) -> bytes:
        return f"page {srcdoc}".encode()


def committed() -> nbformat.NotebookNode:
    sources = ["\n".join(HEAD), "%%tracefuse -o c\nloss.backward()", "chart", "x = 1"]
    cells = [new_code_cell(source) for source in sources]
    cells[1].metadata["tracefuse"] = {"tab": "findings"}
    return new_notebook(cells=[new_markdown_cell("# Title"), *cells])


def executed() -> nbformat.NotebookNode:
    ran = committed()
    cells = store.code_cells(ran)
    cells[0].outputs = [new_output("stream", name="stdout", text=MACHINE)]
    cells[1].outputs = [
        new_output("display_data", {store.WIDGET: {"model_id": "m"}, "text/plain": "Explorer()"}),
        new_output("display_data", {"text/html": f"<div {store.STILL}m'>the same once more</div>"}),
    ]
    figure = {"data": [1, 2], "layout": {}}
    cells[2].outputs = [
        new_output("execute_result", {store.PLOTLY: figure, "text/html": "<script>", "text/plain": "Figure"})
    ]
    for number, cell in enumerate(cells, 1):
        cell.execution_count = number
    ran.metadata["tracefuse"] = {"views": {"m": "held"}}
    return ran


def stored() -> nbformat.NotebookNode:
    made = store.store(committed(), executed(), Pencil())
    assert made is not None
    return made


def test_pictures_take_the_place_of_what_needs_javascript() -> None:
    _, view, chart, silent = store.code_cells(stored())
    (output,) = view.outputs
    assert base64.b64decode(output.data["image/png"]) == b"view held findings"
    assert set(output.data) == {"image/png", "text/plain"}
    (output,) = chart.outputs
    assert base64.b64decode(output.data["image/png"]) == b"chart [1, 2]"
    assert set(output.data) == {store.PLOTLY, "image/png", "text/plain"}
    assert silent.outputs == []


def test_what_is_stored_is_sound_and_valid() -> None:
    made = stored()
    nbformat.validate(made)
    assert store.problems(made, "some") == []


def test_text_may_be_edited_and_code_not() -> None:
    made = stored()
    made.cells[0].source = "# Another title"
    assert store.problems(made, "some") == []
    store.code_cells(made)[3].source = "x = 2"
    (problem,) = store.problems(made, "some")
    assert "python notebooks/store.py run OUT some" in problem


def test_the_outputs_of_other_code_are_not_stored() -> None:
    other = committed()
    store.code_cells(other)[3].source = "x = 2"
    assert store.store(other, executed(), Pencil()) is None


def test_a_widget_that_nothing_draws_is_refused() -> None:
    ran = executed()
    ran.metadata["tracefuse"] = {"views": {}}
    with pytest.raises(SystemExit, match="other than tracefuse's view"):
        store.store(committed(), ran, Pencil())


BAD_OUTPUTS = {
    "does not print a GPU": (0, [new_output("stream", text=MACHINE.replace("NVIDIA H200", "CPU (2 cores)"))]),
    "no output of it is stored": (1, []),
    "raised ValueError: no": (2, [new_output("error", ename="ValueError", evalue="no", traceback=[])]),
    "wrote to stderr": (2, [new_output("stream", name="stderr", text="a warning")]),
    "nothing without its kernel": (1, [new_output("display_data", {store.WIDGET: {"model_id": "m"}})]),
    "without a picture": (2, [new_output("display_data", {store.PLOTLY: {"data": [], "layout": {}}})]),
    "a path of the machine": (2, [new_output("stream", text=f"written: {gettempdir()}/tmpab12/step.py")]),
}


@pytest.mark.parametrize("told", BAD_OUTPUTS)
def test_what_must_not_be_stored_is_found(told: str) -> None:
    at, outputs = BAD_OUTPUTS[told]
    made = stored()
    store.code_cells(made)[at].outputs = outputs
    (problem,) = store.problems(made, "some")
    assert told in problem


def test_outputs_of_a_cpu_are_held_where_the_text_says_so() -> None:
    made = stored()
    store.code_cells(made)[0].outputs = [new_output("stream", text=MACHINE.replace("NVIDIA H200", "CPU (2 cores)"))]
    made.cells[0].source = f"# Title\n\n{store.ON_A_CPU} at a small size."
    assert store.problems(made, "some") == []
    store.code_cells(made)[0].outputs = [new_output("stream", text=MACHINE)]
    (problem,) = store.problems(made, "some")
    assert "does not print a CPU, as its text says" in problem


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        ("print(1)", True), ("for x in y:\n    print(x)", True), ("%%tracefuse\nf(x)", True), ("v.trace", True),
        ("f(x)", False), ("v.trace;", False), ("%load_ext tracefuse", False), ("x = f()", False), ("", False),
    ],
)  # fmt: skip
def test_which_cells_show_something(source: str, shows: bool) -> None:
    assert store.shows_something(source) is shows


def test_running_names_no_folder_and_keeps_what_views_show() -> None:
    cells = [
        "import os; print(os.getcwd(), os.path.expanduser('~/x'))",
        "import torch, tracefuse\nx = torch.ones(3, requires_grad=True)\n"
        "c = tracefuse.capture(lambda: (x * 2).sum().backward())\nc.explore()",
    ]
    notebook = store.execute(new_notebook(cells=[new_code_cell(source) for source in cells]))
    printed, shown = store.code_cells(notebook)
    assert printed.outputs[0].text == ". ~/x\n"
    model = shown.outputs[0].data[store.WIDGET]["model_id"]
    (payload,) = store.views_of(notebook)[model]["payloads"]
    assert "mul" in payload["values"]


def test_a_cell_that_raises_stops_the_run() -> None:
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        store.execute(new_notebook(cells=[new_code_cell("1 / 0")]))
