"""The imports of `widgets/js`: a panel knows the parts that it is made of, the shell knows the panels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from posixpath import join, normpath

import pytest

PARTS = ["parts/"]

# What the modules of a folder may import besides those of their own folder: a folder as `name/`, or one module.
MAY_IMPORT = {
    "": ["shell/"],
    "shell": [
        "board/",
        "code/",
        "graph/",
        "kernels/",
        "layers/",
        "memory/",
        *PARTS,
        "passes/",
        "tables/",
        "timeline/",
        "trace/",
        "verdict/",
    ],
    "tables": ["kernels/facts.js", *PARTS, "passes/decisions.js", "passes/pins.js"],
    "board": PARTS,
    "code": [*PARTS, "passes/decisions.js"],
    "graph": PARTS,
    "kernels": PARTS,
    "layers": PARTS,
    "memory": PARTS,
    "passes": PARTS,
    "timeline": PARTS,
    "trace": PARTS,
    "verdict": PARTS,
    "parts": [],
    "testing": [],
}
MOST_FILES = 16

# `import … from "./x.js"`, `import "./x.js"`, `export … from "./x.js"`, and `import("./x.js")`, in JSDoc as well.
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["'](\.{1,2}/[^"']+)["']""")


def imports(sources: Path) -> dict[str, set[str]]:
    """Per module, what it imports, types counted: both as paths below `sources`."""
    paths = [path for path in sources.rglob("*.js") if "node_modules" not in path.parts]
    return {path.relative_to(sources).as_posix(): set(imported(sources, path)) for path in paths}


def imported(sources: Path, path: Path) -> Iterator[str]:
    folder = path.parent.relative_to(sources).as_posix()
    return (normpath(join(folder, name)) for name in IMPORT.findall(path.read_text()))


def folder_of(module: str) -> str:
    return module.rpartition("/")[0]


def wrong_imports(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{one} imports {other}" for one in sorted(graph) for other in sorted(graph[one]) if not is_allowed(one, other)
    ]


def is_allowed(one: str, other: str) -> bool:
    shelf = [*MAY_IMPORT[folder_of(one)], *(["testing/"] if one.endswith(".test.js") else [])]
    return folder_of(one) == folder_of(other) or any(
        other == name or (name.endswith("/") and other.startswith(name)) for name in shelf
    )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle of imports, the first one again at its end; [] if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


@pytest.fixture(scope="module")
def sources(root: Path) -> Path:
    return root / "widgets/js"


def test_a_panel_imports_parts_and_only_the_shell_imports_panels(sources: Path) -> None:
    graph = imports(sources)
    assert {folder_of(one) for one in graph} == set(MAY_IMPORT)
    assert wrong_imports(graph) == []


def test_every_permission_is_used(sources: Path) -> None:
    used = {(folder_of(one), other) for one, others in imports(sources).items() for other in others}
    allowed = [(folder, name) for folder, names in MAY_IMPORT.items() for name in names]
    assert [one for one in allowed if not any(one[0] == of and name.startswith(one[1]) for of, name in used)] == []


def test_no_module_imports_itself_by_way_of_others(sources: Path) -> None:
    assert circle(imports(sources)) == []


def test_what_is_imported_is_there(sources: Path) -> None:
    assert [name for names in imports(sources).values() for name in names if not (sources / name).is_file()] == []


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_can_be_overlooked_and_its_modules_say_what_they_are(sources: Path, folder: str) -> None:
    files = [path for path in (sources / folder).iterdir() if path.is_file()]
    assert len(files) <= MOST_FILES
    modules = [path for path in files if path.suffix == ".js" and not path.name.endswith(".test.js")]
    assert [path.name for path in modules if not re.match(r"// [A-Z]", path.read_text())] == []
    assert [path.name for path in files if path.suffix == ".css" and not path.read_text().startswith("/* ")] == []


@pytest.mark.parametrize(
    ("module", "text", "wrong"),
    [
        ("graph/lines.js", 'import { chip } from "../passes/panel.js";', "graph/lines.js imports passes/panel.js"),
        ("parts/dom.js", '/** @typedef {import("../trace/rows.js").Row} Row */', "parts/dom.js imports trace/rows.js"),
        ("code/line.js", 'export * from "../shell/keys.js";', "code/line.js imports shell/keys.js"),
        ("trace/row.js", 'import { program } from "../testing/program.js";', "trace/row.js imports testing/program.js"),
        ("main.js", 'import "./tables/details.js";', "main.js imports tables/details.js"),
        (
            "tables/details.js",
            "import {\n  passes,\n} from '../passes/panel.js';",
            "tables/details.js imports passes/panel.js",
        ),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, module: str, text: str, wrong: str) -> None:
    (tmp_path / module).parent.mkdir(exist_ok=True)
    (tmp_path / module).write_text(text)
    assert wrong_imports(imports(tmp_path)) == [wrong]


def test_a_circle_is_found_in_types_too(tmp_path: Path) -> None:
    (tmp_path / "one.js").write_text('import { other } from "./other.js";')
    (tmp_path / "other.js").write_text('/** @typedef {import("./one.js").One} One */')
    assert set(circle(imports(tmp_path))) == {"one.js", "other.js"}
