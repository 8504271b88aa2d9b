"""Ranks × time as a page that needs no kernel, no network and no JavaScript: a row a rank, its findings and its text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from tracefuse.text import time_text
from tracefuse.widgets.html import Page

if TYPE_CHECKING:
    from tracefuse.ranks.rank import Rank
    from tracefuse.ranks.ranks import Ranks

_WIDTH, _ROW, _LEFT = 1200, 26, 60
_BINS = 1140
"""Columns of a rank's row, a pixel each where the picture is as wide as it is drawn."""

_COLOURS = {"computing": "#0072b2", "transfer": "#009e73", "waiting": "#d55e00"}

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tracefuse: ranks</title>
<style>
:root { color-scheme: light dark; background: light-dark(#f4f5f7, #0f1114); color: light-dark(#1b1f26, #e4e7ec); }
body { margin: 0 auto; padding: 24px clamp(8px, 2vw, 32px); max-width: 1400px; font: 14px system-ui, sans-serif; }
svg { width: 100%; height: auto; background: light-dark(#fff, #181b20); }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
pre { overflow: auto; font-size: 12px; }
td, th { text-align: right; padding: 2px 10px; }
td:first-child, th:first-child { text-align: left; }
i { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }
</style>
</head>
<body>
<div id="view">
<h1>Ranks × time</h1>
<p>$legend</p>
$picture
<h2>Ranks × modules</h2>
$heat
</div>
<h2>Findings</h2>
<pre>$findings</pre>
<h2>Text</h2>
<pre>$text</pre>
</body>
</html>
""")


class RanksPage(Page):
    """What `Ranks.explore()` gives."""

    shown: Ranks

    def to_html(self) -> str:
        legend = "".join(f'<i style="background:{colour}"></i>{name}' for name, colour in _COLOURS.items())
        return _PAGE.substitute(
            legend=legend,
            picture=_picture(self.shown),
            findings=escape(str(self.shown.findings())),
            heat=_heat(self.shown),
            text=escape(str(self.shown)),
        )


def _picture(ranks: Ranks) -> str:
    windows = {n: ranks.clocks[n].aligned(np.array(rank.window)).tolist() for n, rank in ranks.ranks.items()}
    start, end = min(one for one, _ in windows.values()), max(one for _, one in windows.values())
    height = _ROW * len(ranks.ranks) + 24
    rows = []
    for at, (number, rank) in enumerate(ranks.ranks.items()):
        top = at * _ROW + 4
        rows.append(f'<text x="4" y="{top + 14}">rank {number}</text>')
        for colour, stretches in _stretches(ranks, number, rank):
            rows += _bars(stretches, start, end, top, colour)
    rows.append(f'<text x="{_LEFT}" y="{height - 6}">0</text>')
    rows.append(f'<text x="{_WIDTH - 80}" y="{height - 6}">{escape(time_text((end - start) / 1e3))}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="ranks by time">{"".join(rows)}</svg>'


def _stretches(ranks: Ranks, number: int, rank: Rank) -> Iterator[tuple[str, np.ndarray]]:
    """What a rank did, by colour, by the reference's clock; waiting covers computing, since both go on at once."""
    clock = ranks.clocks[number]
    spans = [rank.computing] if rank.has_gpu else rank.operators
    computing = [np.stack([one.starts, one.ends], axis=1) for one in spans if one.starts]
    rows = [(one, one.call.rows[number]) for one in ranks.splits if number in one.call.rows]
    ends = [(one, int(rank.exchanges.start_ns[row]), int(rank.exchanges.end_ns[row])) for one, row in rows]
    transfer = [(max(start, end - one.transfer_ns), end) for one, start, end in ends]
    waiting = [(start, end - one.transfer_ns) for one, start, end in ends if end - one.transfer_ns > start]
    for name, pairs in (("transfer", [transfer]), ("waiting", [waiting]), ("computing", computing)):
        found = [np.array(one, np.int64).reshape(-1, 2) for one in pairs]
        if sum(map(len, found)):
            yield name, clock.aligned(np.concatenate(found))


def _bars(stretches: np.ndarray, start: int, end: int, top: int, name: str) -> list[str]:
    """Rectangles, as opaque as the share of their time that the stretches take."""
    edges = np.linspace(start, end, _BINS + 1)
    firsts, lasts = stretches.astype(float).T
    order = np.argsort(firsts)
    firsts, lasts = firsts[order], np.maximum.accumulate(lasts[order])
    firsts[1:] = np.maximum(firsts[1:], lasts[:-1])  # of stretches that overlap, one after another
    covered = np.concatenate([[0.0], np.cumsum(np.maximum(lasts - firsts, 0))])
    times = np.stack([firsts, np.maximum(firsts, lasts)], axis=1).reshape(-1)
    reached = np.stack([covered[:-1], covered[1:]], axis=1).reshape(-1)
    shares = np.diff(np.interp(edges, times, reached)) / max((end - start) / _BINS, 1)
    tenths = np.round(np.clip(shares, 0, 1) * 10).astype(int)
    bounds = np.flatnonzero(np.diff(tenths, prepend=-1, append=-1))
    width = (_WIDTH - _LEFT) / _BINS
    y, height = (top, 11) if name == "computing" else (top + 12, 8)
    return [
        f'<rect x="{_LEFT + first * width:.1f}" y="{y}" width="{(last - first) * width:.1f}" height="{height}" '
        f'fill="{_COLOURS[name]}" opacity="{tenths[first] / 10}"><title>{name}: {tenths[first] * 10} % of '
        f"{escape(time_text((last - first) * (end - start) / _BINS / 1e3))}</title></rect>"
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
        if tenths[first]
    ]


def _heat(ranks: Ranks) -> str:
    heat = [(module, row) for module, row in ranks.heat().items() if module][:40]
    if not heat:
        return "<p>No stack was recorded (`with_stack=True`, `with_modules=True`): times have no modules.</p>"
    head = "".join(f"<th>rank {number}</th>" for number in ranks.ranks)
    lines = []
    for module, row in heat:
        least = max(min(row.values()), 1)
        cells = "".join(
            f'<td style="background:rgb(213 94 0 / {min(0.8, max(0.0, ns / least - 1)):.2f})">'
            f"{escape(time_text(ns / 1e3))}</td>"
            for ns in row.values()
        )
        lines.append(f"<tr><td>{escape(module)}</td>{cells}</tr>")
    return f"<table><tr><th>module</th>{head}</tr>{''.join(lines)}</table>"
