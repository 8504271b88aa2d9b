"""Two scripts with four mistakes each: `tracefuse SCRIPT` names all eight at their lines, and none where they are mended."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "trust"))
from mended_scripts import MISTAKES, findings, left, missed, written


@pytest.mark.parametrize("script", MISTAKES)
def test_each_mistake_is_named_at_its_line_and_none_once_it_is_mended(script: str, tmp_path: Path) -> None:
    found, mended = (findings(path, ["--small"]) for path in written(script, tmp_path))
    assert missed(script, found) == []
    assert left(script, mended) == []
