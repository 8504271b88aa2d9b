"""Every name of ours that a guide calls by its full path is there."""

from __future__ import annotations

import pkgutil
import re
from pathlib import Path

import pytest

GUIDES = ["README.md", "notebooks/README.md", "CHANGELOG.md"]
NAME = re.compile(r"(?<![\w./-])tracefuse(?:\.[A-Za-z_]\w*)+(?![\w/])")


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
    return False


def test_a_name_that_is_gone_is_found() -> None:
    assert names_in("of `tracefuse.gaps.CAUSES`, and `tracefuse.capture()`") == [
        "tracefuse.capture",
        "tracefuse.gaps.CAUSES",
    ]
    assert is_missing("tracefuse.gaps.CAUSES")
    assert not is_missing("tracefuse.timeline.causes.CAUSES")
