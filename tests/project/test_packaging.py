"""What is on disk is what ships, and nothing carries the machine it was written on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from import_graph import FOLDERS, package_of

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
        for folder in FOLDERS
        for p in (root / folder).rglob("*.py")
        if "node_modules" not in p.parts
    }
    assert set(setuptools["packages"]) == {package_of(PurePosixPath(folder)) for folder in folders}
    assert {folder: name for name, folder in setuptools["package-dir"].items()} == FOLDERS


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
    is_data = path.suffix == ".tfz" or path.name.endswith(("py.typed", ".schema.json")) or "static" in rest
    is_ours = room in FOLDERS and (path.suffix == ".py" or is_data)
    return PurePosixPath(*FOLDERS[room].split("."), *rest).as_posix() if is_ours else None


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
