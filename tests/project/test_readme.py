"""Every measured figure of README, and of the notebooks' text, is one that a committed result gives."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import readme
from pages.figures import BLOCKS, steps
from pages.rendering import Results
from results import RESULTS


@pytest.fixture
def text(root: Path) -> str:
    return (root / "README.md").read_text()


def test_readme_says_what_the_committed_results_say(text: str) -> None:
    assert list(readme.problems(text, Results())) == []


def test_rendering_again_changes_nothing(text: str) -> None:
    assert readme.rendered(text, Results()) == text


def test_a_number_that_was_changed_by_hand_is_found(text: str) -> None:
    changed = text.replace(" s at weight 1 ", "1 s at weight 1 ")
    assert changed != text
    assert list(readme.problems(changed, Results())) == [
        "the block 'depth' is not what the results say: run tests/bench/readme.py"
    ]


def test_a_result_that_says_something_else_is_found(text: str, tmp_path: Path) -> None:
    folder = shutil.copytree(RESULTS, tmp_path / "results")
    result = json.loads((folder / "memory_h200.json").read_text())
    result["rows"][0]["ratio"] = 1.3
    (folder / "memory_h200.json").write_text(json.dumps(result))
    (wrong,) = readme.problems(text, Results(folder))
    assert wrong.startswith("the block 'memory'")
    assert "within 30.0 %" in readme.rendered(text, Results(folder))


def test_a_notebook_that_printed_something_else_is_found(text: str, root: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(root / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns("images"))
    notebook = folder / "06_paying_for_frozen_layers.ipynb"
    notebook.write_text(re.sub(r"(frozen +backward +)[\d.]+", r"\g<1>12.34", notebook.read_text()))
    (wrong,) = readme.problems(text, Results(notebooks=folder))
    assert wrong.startswith("the block 'lora'")
    assert "to 12.3 ms" in readme.rendered(text, Results(notebooks=folder))


def test_blocks_that_are_missing_or_unknown_are_found(text: str) -> None:
    changed = text.replace("<!-- figures: equal -->", "<!-- figures: same -->")
    assert list(readme.problems(changed, Results()))[:2] == [
        "README has a block 'same' that readme_figures.py does not know",
        "README has no block 'equal'",
    ]


@pytest.mark.parametrize(
    "figure",
    [
        "takes 3.5 ms", "takes 12 µs", "in 2 s", "is 3x faster", "40 % less", "1,024 MiB", "at 3.02 TB/s", "1.5 GB",
        "2 × less", "687 TFLOP/s", "twelve layers, three times faster", "in 20 seconds", "two-times slower",
    ],
)  # fmt: skip
def test_a_figure_that_nothing_renders_is_found(figure: str) -> None:
    assert len(list(readme.figures(f"A step {figure} on this machine."))) == 1


@pytest.mark.parametrize(
    "text",
    ["8 by 1024 tokens", "torch 2.11 to 2.15", "`[4096, 10, 32, 128]`", "12 layers, 768 wide", "H200", "f32[2, 3]"],
)
def test_sizes_versions_and_names_are_no_figures(text: str) -> None:
    assert list(readme.figures(text)) == []


def test_what_was_not_measured_says_so(tmp_path: Path) -> None:
    for name, block in BLOCKS.items():
        assert block(Results(tmp_path, tmp_path)).startswith("Not measured: no result of `"), name


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
    assert list(readme.figures(text)) == []


def test_readme_names_files_that_are_there(root: Path, text: str) -> None:
    named = set(re.findall(r"`((?:tests|optimizers|explorer|widgets)/[\w/]+\.\w+)`", text))
    linked = set(re.findall(r"\]\(([^)#]+)\)", text))
    assert {"notebooks/images/explorer_light.png", "notebooks/08_take_it_home.ipynb"} < linked
    assert [name for name in sorted(named | linked) if not (root / name).exists()] == []
