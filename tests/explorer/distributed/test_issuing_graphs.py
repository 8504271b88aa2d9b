"""A graph of `torch.compile` that starts collectives itself is shown, and nothing runs it again or saves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import gathering_graph, needs_gloo

import tracefuse
from tracefuse.errors import TracefuseError

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def graph() -> Iterator[tracefuse.CompiledGraph]:
    with gathering_graph() as found:
        yield found


RUNS: dict[str, Callable[[tracefuse.Capture, Path], object]] = {
    "replayed": lambda graph, folder: graph.replay(),
    "saved": lambda graph, folder: graph.save(folder / "g.tfz"),
    "saved with its inputs": lambda graph, folder: graph.save(folder / "g.tfz", inputs=True),
    "measured": lambda graph, folder: graph.optimize().measure(),
    "exported": lambda graph, folder: graph.optimize().export(folder / "g.py"),
    "measured as another capture of the program": lambda graph, folder: (
        graph.of(graph.program).variant(graph.optimize().config).measure()
    ),
}


@pytest.mark.parametrize("does", RUNS)
def test_it_is_refused_with_the_remedy(graph: tracefuse.CompiledGraph, does: str, tmp_path: Path) -> None:
    with pytest.raises(TracefuseError, match="Capture the step on each rank") as refused:
        RUNS[does](graph, tmp_path)
    assert "damaged" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_it_is_shown(graph: tracefuse.CompiledGraph) -> None:
    assert "all_gather_into_tensor" in graph.optimize().trace.code
    assert "neither replayed" in graph.explore().payload["blocked"]
