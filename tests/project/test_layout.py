"""The house: which package may import which, how many files a folder holds, and that no modules import in a circle."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import AT_TYPE_CHECKING, FOLDERS, circles, edges, folder_of, imports, modules

from tracefuse.config.names import PASSES

MOST_FILES = 16

GROUND = {"explorer/errors.py", "explorer/text.py"}
"""The files at the explorer's root that every package of it imports; the others there are doors."""

COMMAND = "explorer/__main__.py"
"""`python -m tracefuse`: what is at the root only because Python looks for it there."""

PURE = {
    "optimizers": {
        "optimizers/costs",
        "optimizers/fakes",
        "optimizers/formulas",
        "optimizers/fuse",
        "optimizers/lowering",
    },
    "optimizers/costs": {"optimizers"},
    "optimizers/fakes": {"optimizers"},
    "optimizers/cat": {"optimizers", "optimizers/costs", "optimizers/formulas"},
    "optimizers/channels_last": {"optimizers", "optimizers/costs", "optimizers/kernels", "optimizers/lowering"},
    "optimizers/freeze": {"optimizers", "optimizers/costs"},
    "optimizers/formulas": {"optimizers"},
    "optimizers/linear_cross_entropy": {"optimizers", "optimizers/costs"},
    "optimizers/merge_matmuls": {"optimizers", "optimizers/costs", "optimizers/formulas"},
    "optimizers/lowering": {"optimizers", "optimizers/formulas"},
    "optimizers/kernels": {"optimizers", "optimizers/costs", "optimizers/formulas", "optimizers/lowering"},
    "optimizers/decompose": {"optimizers", "optimizers/formulas", "optimizers/kernels", "optimizers/lowering"},
    "optimizers/fuse": {
        "optimizers",
        "optimizers/costs",
        "optimizers/formulas",
        "optimizers/kernels",
        "optimizers/lowering",
    },
    "optimizers/remat": {
        "optimizers",
        "optimizers/costs",
        "optimizers/fakes",
        "optimizers/formulas",
        "optimizers/fuse",
        "optimizers/kernels",
        "optimizers/lowering",
    },
    "optimizers/optimizer_step": {"optimizers", "optimizers/costs", "optimizers/kernels", "optimizers/lowering"},
    "optimizers/overlap": {"optimizers", "optimizers/costs"},
    "optimizers/sizes": {"optimizers", "optimizers/fakes", "optimizers/kernels"},
    "optimizers/formats": {"optimizers", "optimizers/fakes"},
}
"""Which packages of the optimizers one of them imports: none but these, wherever the import stands."""

FLOORS = (
    {"explorer/device", "explorer/distributed", "explorer/lines"},
    {"explorer/config", "explorer/recording"},
    {"explorer/collectives"},
    {"explorer/assembly", "explorer/build", "explorer/steps"},
    {"explorer/execution"},
    {"explorer/measure", "explorer/dynamo", "explorer/training"},
    {"explorer/timeline"},
    {"explorer/tables", "explorer/session"},
    {"explorer/findings"},
    {"explorer/lint"},
    {"explorer/diagnose"},
    {"explorer/profiling"},
    {"explorer/ranks"},
    {"explorer"},
    {"explorer/cli"},
    {"widgets/payload"},
    {"widgets"},
    {"widgets/view"},
    {"widgets/notebook"},
)
"""The explorer's and the widgets' packages from the ground up: a package imports floors below its own, and no neighbour."""

NEVER = {
    "explorer/recording": {"explorer/device"},
    "explorer/collectives": {"explorer/config", "explorer/device"},
    "explorer/assembly": {"explorer/config", "explorer/device"},
    "explorer/build": {"explorer/config", "explorer/recording"},
    "explorer/steps": {"explorer/config", "explorer/device"},
    "explorer/execution": {"explorer/config"},
    "explorer/dynamo": {"explorer/config"},
    "explorer/training": {"explorer/config"},
    "explorer/session": {"explorer/build", "explorer/execution", "explorer/dynamo"},
    "explorer/lint": {"explorer/build", "explorer/session", "explorer/dynamo"},
    "explorer/findings": {"explorer/build", "explorer/session", "explorer/dynamo"},
    "explorer/diagnose": {"explorer/build", "explorer/session", "explorer/dynamo"},
    "explorer/profiling": {"explorer/recording", "explorer/assembly", "explorer/build", "explorer/execution"},
    "explorer/ranks": {"explorer/recording", "explorer/assembly", "explorer/build", "explorer/execution"},
}
"""What a package does not import though it lies below."""

LAZY = {
    ("explorer/boards.py", "widgets/view"),
    ("explorer/__init__.py", "widgets/notebook"),
    ("explorer/cli/demo.py", "widgets"),
    ("explorer/cli/file.py", "widgets/view"),
    ("explorer/variant.py", "widgets/view"),
    ("explorer/captures.py", "widgets/view"),
    ("explorer/compiled_graphs.py", "widgets/view"),
    ("explorer/profiling/timeline.py", "widgets"),
    ("explorer/ranks/ranks.py", "widgets"),
}
"""Front doors: they open the room above them when somebody knocks, and never when they are imported."""


def packages(root: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in modules(root):
        found.setdefault(path.parent.relative_to(root).as_posix(), []).append(path)
    return found


# --- who imports whom -------------------------------------------------------------------------------------------------


def floor(package: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if package in floor)


def is_allowed(source: str, target: str) -> bool:
    """Whether the file `source` may import the file `target` when it is imported."""
    here, there = folder_of(source), folder_of(target)
    if here == there or (target in GROUND and here.startswith(("explorer", "widgets"))):
        return True
    if here.startswith("optimizers"):
        return there in PURE[here]
    if source in GROUND:
        return there == "optimizers"
    if source == COMMAND:
        return there == "explorer/cli"
    return there.startswith("optimizers") or (floor(there) < floor(here) and there not in NEVER.get(here, ()))


def wrong_imports(root: Path) -> Iterator[str]:
    for found, target in edges(root):
        here, there = folder_of(found.source), folder_of(target)
        at_import = found.within in {"", AT_TYPE_CHECKING}
        is_lazy_door = found.within != "" and (found.source, there) in LAZY
        is_below = here.startswith("explorer") and not there.startswith("widgets") and not at_import
        if not (is_allowed(found.source, target) or is_lazy_door or is_below):
            yield f"{found.source} imports {target}" + (f" in {found.within}" if found.within else "")


def test_a_package_imports_only_what_it_may(root: Path) -> None:
    assert list(wrong_imports(root)) == []


def test_every_package_has_its_floor(root: Path) -> None:
    assert set(packages(root)) == set(PURE) | set().union(*FLOORS)


def test_no_modules_import_in_a_circle(root: Path) -> None:
    graph: dict[str, set[str]] = {}
    for found, target in edges(root):
        is_lazy_door = (found.source, folder_of(target)) in LAZY
        if found.within in {"", AT_TYPE_CHECKING} and not is_lazy_door:
            graph.setdefault(found.source, set()).add(target)
    assert circles(graph) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("optimizers/a.py", "import tracefuse.errors", "optimizers/a.py imports explorer/errors.py"),
        ("optimizers/a.py", "from tracefuse.measure import rounds", "imports explorer/measure/rounds.py"),
        ("optimizers/a.py", "def f():\n    import tracefuse.widgets.html", "imports widgets/html.py in f"),
        ("optimizers/cat/a.py", "from tracefuse.optimizers.fuse import regions", "imports optimizers/fuse/regions.py"),
        ("explorer/build/a.py", "from tracefuse.measure import rounds", "imports explorer/measure/rounds.py"),
        ("explorer/build/a.py", "import tracefuse.config", "imports explorer/config/__init__.py"),
        ("explorer/measure/a.py", "def f():\n    from tracefuse.widgets import html", "imports widgets/html.py in f"),
        ("explorer/a.py", "import importlib\nimportlib.import_module('tracefuse.widgets')", "widgets/__init__.py"),
        (
            "explorer/a.py",
            "if TYPE_CHECKING:\n    from tracefuse.widgets import html",
            "imports widgets/html.py in TYPE",
        ),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, text: str, wrong: str) -> None:
    for known in (
        *(f"{package}/__init__.py" for package in (*PURE, *set().union(*FLOORS))),
        *("explorer/errors.py", "explorer/measure/rounds.py", "optimizers/fuse/regions.py", "widgets/html.py"),
    ):
        (tmp_path / known).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / known).touch()
    assert list(wrong_imports(tmp_path)) == []
    (tmp_path / file).write_text(text)
    assert [wrong in line for line in wrong_imports(tmp_path)] == [True]


def test_a_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]


def test_no_import_names_a_folder(root: Path) -> None:
    """`import widgets` would find a notebook's own folder of that name."""
    for path in modules(root):
        assert not {name.partition(".")[0] for name, _ in imports(ast.parse(path.read_text()))} & set(FOLDERS), path


def test_importing_tracefuse_imports_no_widgets() -> None:
    program = (
        "import sys, tracefuse, tracefuse.cli; print([m for m in sys.modules if m.startswith('tracefuse.widgets')])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_optimizers_read_no_clock_and_touch_no_gpu(root: Path) -> None:
    for path in sorted((root / "optimizers").rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert "time" not in {name.partition(".")[0] for name, _ in imports(tree)}, path.name
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if name.startswith("torch.cuda.")}, path.name


# --- what a newcomer sees ---------------------------------------------------------------------------------------------


def test_a_folder_holds_few_enough_files_to_be_read_as_a_list(root: Path) -> None:
    ours = [path for top in (*FOLDERS, "tests", "notebooks") for path in (root / top).rglob("*") if path.is_file()]
    sources = [
        path for path in ours if path.suffix in {".py", ".js"} and not {"node_modules", "static"} & set(path.parts)
    ]
    count = Counter(path.parent.relative_to(root).as_posix() for path in sources)
    assert {folder: number for folder, number in count.items() if number > MOST_FILES} == {}


def test_the_readme_names_each_folder_once_and_from_the_ground_up(root: Path) -> None:
    rows = re.findall(r"^\| `([^`]+/)` \|", (root / "README.md").read_text(), re.M)
    assert len(rows) > 30
    own = [name.rstrip("/") for name in rows if name.startswith(("explorer", "widgets")) and name != "widgets/js/"]
    assert own == sorted(own, key=floor)
    pure = [name.rstrip("/") for name in rows if name.startswith("optimizers/") and name != "optimizers/"]
    assert all(PURE[name] & set(pure[at:]) <= {name} for at, name in enumerate(pure))
    assert {folder: count for folder, count in Counter(rows).items() if count > 1} == {}


def test_a_package_says_what_it_knows_and_what_it_never_imports(root: Path) -> None:
    for package in packages(root):
        said = ast.get_docstring(ast.parse((root / package / "__init__.py").read_text())) or ""
        first = said.partition("\n\n")[0]
        assert first.endswith("."), package
        assert package in FOLDERS or " import" in said.removeprefix(first), package


def test_the_toggles_are_names_right_under_optimizers(root: Path) -> None:
    here = {path.stem for path in (root / "optimizers").iterdir()}
    assert set(PASSES) <= here


def test_no_module_hides_a_public_function(root: Path) -> None:
    """The first import of a submodule binds its name in the package: a function of that name would be overwritten."""
    import tracefuse

    names = {path.stem for path in (root / "explorer").iterdir()}
    assert names & set(tracefuse.__all__) == set()
