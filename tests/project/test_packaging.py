"""What is on disk is what ships, imports only point down, and nothing carries the machine it was written on."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOMS = {"explorer": "tracefuse", "optimizers": "tracefuse.optimizers", "widgets": "tracefuse.widgets"}

# The front doors open the room above them when somebody knocks, never when they are imported.
LAZY_IMPORTS_OF_WIDGETS = {
    ("explorer/__init__.py", "load_ipython_extension"),
    ("explorer/__init__.py", "unload_ipython_extension"),
    ("explorer/cli/command.py", "write_report"),
    ("explorer/cli/file.py", "open_view"),
    ("explorer/cli/file.py", "TYPE_CHECKING"),
    ("explorer/variant.py", "explore"),
    ("explorer/variant.py", "TYPE_CHECKING"),
    ("explorer/captures.py", "TYPE_CHECKING"),
    ("explorer/profiling/timeline.py", "explore"),
    ("explorer/profiling/timeline.py", "TYPE_CHECKING"),
}

# Written in pieces, so that this file does not find itself.
_FOLDERS = "|".join(["wo" + "rk", "ro" + "ot", "op" + "t", "ho" + "me", "tm" + "p/[a-z]"])
_HOSTS = "|".join(["python" + "hosted", "py" + r"pi\.", r"(?<!torch)\.lib" + r"rary\b"])
MACHINE = re.compile(rf"(?<![\w.])/({_FOLDERS})/|{_HOSTS}")


def committed(root: Path) -> list[Path]:
    """The files of the repository: those git knows, and those it would take."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted(path for line in listed.splitlines() if (path := root / line).is_file())


def run(*module: str, cwd: Path | None = None) -> str:
    """What `python -m …` prints; fails the test with everything that it printed if it does not end with 0."""
    done = subprocess.run([sys.executable, "-m", *module], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())


# --- what ships -------------------------------------------------------------------------------------------------------


def test_every_folder_with_python_in_it_is_a_package(root: Path, project: dict) -> None:
    setuptools = project["tool"]["setuptools"]
    folders = {
        p.parent.relative_to(root).as_posix()
        for room in ROOMS
        for p in (root / room).rglob("*.py")
        if "node_modules" not in p.parts
    }
    assert set(setuptools["packages"]) == {package_of(PurePosixPath(folder)) for folder in folders}
    assert {folder: name for name, folder in setuptools["package-dir"].items()} == ROOMS


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in a wheel built from a clean copy: a `build` folder left in the tree would ship deleted modules."""
    root, copy = Path(__file__).parents[2], tmp_path_factory.mktemp("wheel")
    for path in committed(root):
        target = copy / "tree" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    run("pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(copy), str(copy / "tree"))
    return set(zipfile.ZipFile(next(copy.glob("*.whl"))).namelist())


def test_the_wheel_holds_the_files_of_the_tree(root: Path, wheel: set[str]) -> None:
    expected = {shipped_name(path.relative_to(root)) for path in committed(root)} - {None}
    assert {name for name in wheel if ".dist-info/" not in name} == expected


def shipped_name(path: Path) -> str | None:
    """The name in the wheel of a file of the tree, None for one that stays behind."""
    room, *rest = path.parts
    is_data = path.suffix == ".tfz" or path.name == "py.typed" or "static" in rest
    is_ours = room in ROOMS and (path.suffix == ".py" or is_data)
    return PurePosixPath(*ROOMS[room].split("."), *rest).as_posix() if is_ours else None


def test_the_wheel_says_how_it_is_started_and_under_which_licence(wheel: set[str]) -> None:
    metadata = {PurePosixPath(name).name for name in wheel if ".dist-info/" in name}
    assert {"METADATA", "entry_points.txt", "LICENSE"} <= metadata


def test_the_changelog_has_the_version_that_ships(root: Path, project: dict) -> None:
    text = (root / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert versions[0] == "Unreleased"
    assert versions[1] == project["project"]["version"]
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


# --- imports only point down ------------------------------------------------------------------------------------------


def modules(root: Path) -> list[Path]:
    found = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return [path for path in found if "node_modules" not in path.parts]


def package_of(folder: PurePosixPath) -> str:
    """The name that the modules of a folder are imported below."""
    room, *rest = folder.parts
    return ".".join([ROOMS[room], *rest])


def module_name(root: Path, path: Path) -> str:
    package = package_of(PurePosixPath(path.parent.relative_to(root).as_posix()))
    return package if path.name == "__init__.py" else f"{package}.{path.stem}"


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(imported name, where) for every import, `from a import b` as `a` and `a.b`; where is the enclosing function,
    "TYPE_CHECKING" or ""."""
    pending: list[tuple[ast.AST, str]] = [(tree, "")]
    while pending:
        node, function = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = function or node.name
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            function = "TYPE_CHECKING"
        if isinstance(node, ast.Import):
            yield from ((alias.name, function) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield str(node.module), function
            yield from ((f"{node.module}.{alias.name}", function) for alias in node.names)
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith(("import_module", "__import__"))
            and node.args
        ):
            yield str(getattr(node.args[0], "value", "")), function
        pending += [(child, function) for child in ast.iter_child_nodes(node)]


def wrong_imports(root: Path) -> Iterator[str]:
    known = {module_name(root, path) for path in modules(root)}
    of_explorer = {n for n in known if not n.startswith(("tracefuse.optimizers", "tracefuse.widgets"))}
    for path in modules(root):
        where = path.relative_to(root).as_posix()
        room = where.partition("/")[0]
        for name, function in imports(ast.parse(path.read_text())):
            is_widgets = name == "tracefuse.widgets" or name.startswith("tracefuse.widgets.")
            if name.split(".")[0] in ROOMS:
                yield f"{where}: {name} is a folder's name"
            if room == "optimizers" and (name in of_explorer or is_widgets):
                yield f"{where}: {name} is above optimizers"
            if room == "explorer" and is_widgets and (where, function) not in LAZY_IMPORTS_OF_WIDGETS:
                yield f"{where}: {name} is above explorer"


def test_imports_only_point_down(root: Path) -> None:
    assert list(wrong_imports(root)) == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("optimizers/a.py", "import tracefuse", "above optimizers"),
        ("optimizers/a.py", "from tracefuse.measure.rounds import measure", "above optimizers"),
        ("optimizers/a.py", "from tracefuse import measure", "above optimizers"),
        ("optimizers/a.py", "def f():\n    import tracefuse.widgets.html", "above optimizers"),
        ("explorer/a.py", "def f():\n    from tracefuse.widgets import html", "above explorer"),
        ("explorer/a.py", "import importlib\nimportlib.import_module('tracefuse.widgets')", "above explorer"),
        ("explorer/a.py", "if TYPE_CHECKING:\n    from tracefuse.widgets import html", "above explorer"),
        ("widgets/a.py", "from optimizers.trace import Trace", "folder's name"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path: Path, file: str, text: str, wrong: str) -> None:
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    (tmp_path / "explorer" / "measure.py").touch()
    (tmp_path / file).write_text(text)
    assert any(wrong in line for line in wrong_imports(tmp_path))


def test_importing_tracefuse_imports_no_widgets() -> None:
    program = (
        "import sys, tracefuse, tracefuse.cli; print([m for m in sys.modules if m.startswith('tracefuse.widgets')])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_optimizers_read_no_clock_and_touch_no_gpu(root: Path) -> None:
    for path in sorted((root / "optimizers").rglob("*.py")):
        tree = ast.parse(path.read_text())
        assert "time" not in {name for name, _ in imports(tree)}, path.name
        used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not {name for name in used if name.startswith("torch.cuda.")}, path.name


# --- what is committed ------------------------------------------------------------------------------------------------


def test_no_file_carries_a_path_of_this_machine(root: Path) -> None:
    text_files = [p for p in committed(root) if p.suffix not in {".png", ".woff2", ".gif"}]
    found = [
        f"{path.relative_to(root)}:{number}"
        for path in text_files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE.search(line)
    ]
    assert found == []


def test_ruff_finds_nothing(root: Path) -> None:
    run("ruff", "check", ".", cwd=root)
    run("ruff", "format", "--check", ".", cwd=root)


def test_ci_runs_the_command_of_the_readme(root: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", (root / "README.md").read_text(), re.S)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert ["tracefuse demo" in c for c in commands] == [True, False]
    assert commands[1] in (root / ".ci" / "run").read_text()
