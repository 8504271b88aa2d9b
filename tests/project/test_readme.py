"""Every measured figure of README, of RESULTS.md and of the notebooks' text is one that a committed result gives."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import readme
from pages import answers, figures
from pages.figures import steps
from pages.rendering import Results
from readme import PAGES, README, RESULTS
from results import RESULTS as FOLDER


@pytest.fixture
def text() -> str:
    return RESULTS.path.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_the_committed_results_say(page: readme.Page) -> None:
    found = page.path.read_text()
    assert list(page.problems(found, Results())) == []
    assert page.rendered(found, Results()) == found, "rendering again changes nothing"


def test_every_number_that_is_no_measurement_is_on_a_page() -> None:
    assert readme.unused_settings() == []


def test_a_number_that_was_changed_by_hand_is_found(text: str) -> None:
    changed = text.replace(" s at weight 1 ", "1 s at weight 1 ")
    assert changed != text
    assert list(RESULTS.problems(changed, Results())) == [
        "the block 'depth' is not what the results say: run tests/bench/readme.py"
    ]


def test_a_result_that_says_something_else_is_found(text: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "results")
    result = json.loads((folder / "memory_h200.json").read_text())
    result["rows"][0]["ratio"] = 1.3
    (folder / "memory_h200.json").write_text(json.dumps(result))
    (wrong,) = RESULTS.problems(text, Results(folder))
    assert wrong.startswith("the block 'memory'")
    assert "within 30.0 %" in RESULTS.rendered(text, Results(folder))


def test_a_notebook_that_printed_something_else_is_found(text: str, root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("images"))
    notebook = folder / "06_paying_for_frozen_layers.ipynb"
    notebook.write_text(re.sub(r"(frozen +backward +)[\d.]+", r"\g<1>12.34", notebook.read_text()))
    (wrong,) = RESULTS.problems(text, Results(notebooks=folder))
    assert wrong.startswith("the block 'lora'")
    assert "to 12.3 ms" in RESULTS.rendered(text, Results(notebooks=folder))


def test_blocks_that_are_missing_or_unknown_are_found(text: str) -> None:
    changed = text.replace("<!-- figures: equal -->", "<!-- figures: same -->")
    assert list(RESULTS.problems(changed, Results()))[:2] == [
        "tests/bench/RESULTS.md has a block 'same' that nothing renders",
        "tests/bench/RESULTS.md has no block 'equal'",
    ]


@pytest.mark.parametrize(
    "figure",
    [
        "takes 3.5 ms", "takes 12 µs", "in 2 s", "is 3x faster", "40 % less", "1,024 MiB", "at 3.02 TB/s", "1.5 GB",
        "2 × less", "687 TFLOP/s", "twelve layers, three times faster", "in 20 seconds", "two-times slower",
    ],
)  # fmt: skip
def test_a_figure_that_nothing_renders_is_found(figure: str) -> None:
    assert len(list(readme.measured(f"A step {figure} on this machine."))) == 1


@pytest.mark.parametrize(
    "text",
    ["8 by 1024 tokens", "torch 2.11 to 2.15", "`[4096, 10, 32, 128]`", "12 layers, 768 wide", "H200", "f32[2, 3]"],
)
def test_sizes_versions_and_names_are_no_figures(text: str) -> None:
    assert list(readme.measured(text)) == []


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    for name, block in figures.BLOCKS.items():
        assert block(Results(tmp_path, tmp_path)).startswith("Not measured: no result of `"), name
    _, *rows = answers.answers(Results(tmp_path, tmp_path)).splitlines()[1:]
    assert len(rows) == 5
    assert all("| Not measured: no result of `" in row for row in rows)
    assert answers.whole_steps(Results(tmp_path)).startswith("Not measured: no result of `")


def test_steps_show_reasons_where_there_is_no_time(tmp_path: Path) -> None:
    number = {"median": 2.0, "low": 1.9, "high": 2.1}
    timing = {
        "programs": [
            {"name": name, "times_ms": {"step": number}, "ratios": {"step": number}} for name in ("tracefuse", "eager")
        ],
        "failed": {"torch.compile max-autotune": "not finished in 60 s"},
    }
    machine = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-02 03:04 UTC"}
    case = {
        "title": "chain", "timing": timing, "static": {"tracefuse": {}}, "limit": {"ms": 0.5, "what": "copy"},
        "first_run_s": {"tracefuse": 1.5}, "environment": machine,
    }  # fmt: skip
    cases = {"chain": case, "stack": {"error": "ended with status 1", "environment": machine}}
    (tmp_path / "steps_h200.json").write_text(json.dumps({"cases": cases}))
    lines = steps(Results(tmp_path)).splitlines()
    row = next(line for line in lines if line.startswith("| chain"))
    assert row == (
        "| chain | 2.00<br>1.90 to 2.10 | not measured | not measured | not finished in 60 s | **2.00** | not measured "
        "| 0.500 (copy) |"
    )
    assert any(line.startswith("| stack | ended with status 1") for line in lines)
    source = "(H200, torch 2.11.0, triton 3.6.0, 2026-01-02, `steps.py`; not run yet: `rope_float32`, "
    assert any(line.startswith(source) and "`gpt_bf16`" in line for line in lines)
    assert lines[-1] == "| chain |  |  | not finished in 60 s | 1.5 |"
    assert all(line.count("|") == lines[0].count("|") for line in lines if line.startswith(("| chain | 2", "| stack")))


NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_text_of_a_notebook_leaves_figures_to_its_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert text
    assert list(readme.measured(text)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_are_there(root: Path, page: readme.Page) -> None:
    text = page.path.read_text()
    named = [
        root / name for name in re.findall(r"`((?:tests|optimizers|explorer|widgets|notebooks)/[\w/]+\.\w+)`", text)
    ]
    linked = [page.path.parent / name for name in re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text) if ":" not in name]
    assert linked
    assert [str(path) for path in (*named, *linked) if not path.exists()] == []


def rooms() -> list[tuple[str, str]]:
    """The folders of README's Architecture, each with its row."""
    return re.findall(r"^\| `((?:optimizers|explorer|widgets)/[\w/]*)` \|(.*)$", README.path.read_text(), re.MULTILINE)


def test_the_architecture_has_a_row_for_every_package(root: Path) -> None:
    packages = {
        path.parent for name in ("optimizers", "explorer", "widgets") for path in root.glob(f"{name}/**/__init__.py")
    }
    assert {root / room for room, _ in rooms()} == packages | {root / "widgets" / "js"}


@pytest.mark.parametrize(("room", "row"), rooms(), ids=lambda text: text[:30].strip())
def test_a_row_names_files_of_its_folder(root: Path, room: str, row: str) -> None:
    assert [name for name in re.findall(r"`([\w/]+\.(?:py|js))`", row) if not (root / room / name).exists()] == []
