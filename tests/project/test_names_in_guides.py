"""Every name and every file of ours that a guide or a docstring calls by its full path is there."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

GUIDES = ["README.md", "notebooks/README.md", "CHANGELOG.md"]
NAME = re.compile(r"(?<![\w./-])tracefuse(?:\.[A-Za-z_]\w*)+(?![\w/])")

FILE = re.compile(r"(?<![\w./-])(?:explorer|optimizers|widgets|tests)/[\w/]+\.(?:py|js)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names_in(text: str) -> list[str]:
    """The dotted names of a guide; of a changelog those of what is not released yet."""
    unreleased = re.search(r"^## \[Unreleased\]$(.*?)(?=^## \[)", text, re.DOTALL | re.MULTILINE)
    return sorted(set(NAME.findall(unreleased[1] if unreleased else text)))


@pytest.mark.parametrize("guide", GUIDES)
def test_a_name_in_a_guide_resolves(guide: str, root: Path) -> None:
    names = names_in((root / guide).read_text())
    assert names
    assert list(filter(is_missing, names)) == []


def is_missing(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ModuleNotFoundError):
        return True
    except NameError:  # the text of an exported file's end, which is there, and of which nothing can be imported
        return False
    return False


def test_a_name_that_is_gone_is_found() -> None:
    assert names_in("of `tracefuse.gaps.CAUSES`, and `tracefuse.capture()`") == [
        "tracefuse.capture",
        "tracefuse.gaps.CAUSES",
    ]
    assert is_missing("tracefuse.gaps.CAUSES")
    assert not is_missing("tracefuse.timeline.causes.CAUSES")


@pytest.mark.parametrize("folder", ["explorer", "optimizers", "widgets"])
def test_what_a_docstring_names_is_there(folder: str, root: Path) -> None:
    named = {(path, text) for path in sorted((root / folder).rglob("*.py")) for text in docstrings(path.read_text())}
    names = {(str(path.relative_to(root)), name) for path, text in named for name in NAME.findall(text)}
    files = {(str(path.relative_to(root)), file) for path, text in named for file in FILE.findall(text)}
    assert names
    assert [one for one in sorted(names) if is_missing(one[1])] == []
    assert [one for one in sorted(files) if not (root / one[1]).exists()] == []


def docstrings(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and (found := ast.get_docstring(node)):
            yield found


def test_a_file_that_is_gone_is_found() -> None:
    (text,) = docstrings('"""See `optimizers/cat_forms.py`, and `cat/forms.py` there."""')
    assert FILE.findall(text) == ["optimizers/cat_forms.py"]
