"""Ranks × time as a page that needs no kernel, no network and no JavaScript: a row a rank, its findings and its text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from string import Template
from typing import TYPE_CHECKING

import numpy as np

from tracefuse.optimizers.trace import human_bytes
from tracefuse.text import time_text
from tracefuse.widgets.html import Page

if TYPE_CHECKING:
    from tracefuse.ranks.rank import Rank
    from tracefuse.ranks.ranks import Ranks

_WIDTH, _ROW, _LEFT = 1200, 26, 60
_BINS = 1140
"""Columns of a rank's row, a pixel each where the picture is as wide as it is drawn."""

_SHOWN = 40

_COLOURS = {"computing": "#0072b2", "transfer": "#009e73", "waiting": "#d55e00"}

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>tracefuse: ranks</title>
<style>
:root { color-scheme: light dark; background: light-dark(#f4f5f7, #0f1114); color: light-dark(#1b1f26, #e4e7ec); }
body { margin: 0 auto; padding: 16px clamp(8px, 2vw, 32px); max-width: 1400px; font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 20px; margin: 8px 0; }
h2 { font-size: 16px; margin: 24px 0 8px; }
p { margin: 4px 0 8px; }
svg { width: 100%; height: auto; background: light-dark(#fff, #181b20); border-radius: 4px; }
svg text { fill: currentColor; font: 12px system-ui, sans-serif; }
pre { font-size: 12px; }
.findings { white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
.side { display: flex; flex-wrap: wrap; gap: 0 48px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: 2px 10px; white-space: nowrap; }
th { font-weight: 600; border-bottom: 1px solid light-dark(#c9ced6, #3a404a); }
.left { text-align: left; }
td:first-child, th:first-child { padding-left: 0; }
i { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.4em 0 0; border-radius: 2px; }
span { margin-right: 1.2em; }
meter { width: 120px; height: 12px; vertical-align: middle; }
summary { cursor: pointer; margin: 24px 0 8px; font-weight: 600; }
</style>
</head>
<body>
<div id="view">
<h1>Ranks × time</h1>
<p>$legend</p>
$picture
<h2>Findings</h2>
<pre class="findings">$findings</pre>
<h2>Ranks × modules: what each computed</h2>
$heat
<div class="side">
<div>
<h2>Communication that nothing hides, by module</h2>
$exposed
</div>
<div>
<h2>Memory by rank, at most</h2>
$memory
</div>
</div>
</div>
<details>
<summary>All of it as text</summary>
<pre class="wide">$text</pre>
</details>
</body>
</html>
""")


class RanksPage(Page):
    """What `Ranks.explore()` gives."""

    shown: Ranks

    def to_html(self) -> str:
        legend = "".join(f'<span><i style="background:{colour}"></i>{name}</span>' for name, colour in _COLOURS.items())
        return _PAGE.substitute(
            legend=legend,
            picture=_picture(self.shown),
            findings=escape(str(self.shown.findings())),
            heat=_heat(self.shown),
            exposed=_exposed(self.shown),
            memory=_memory(self.shown),
            text=escape(str(self.shown)),
        )


def _picture(ranks: Ranks) -> str:
    windows = {n: ranks.clocks[n].aligned(np.array(rank.window)).tolist() for n, rank in ranks.ranks.items()}
    start, end = min(one for one, _ in windows.values()), max(one for _, one in windows.values())
    height = _ROW * len(ranks.ranks) + 24
    rows = list(_ticks(end - start, height))
    for at, (number, rank) in enumerate(ranks.ranks.items()):
        top = at * _ROW + 4
        rows.append(f'<text x="4" y="{top + 14}">rank {number}</text>')
        for colour, stretches in _stretches(ranks, number, rank):
            rows += _bars(stretches, start, end, top, colour)
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="ranks by time">{"".join(rows)}</svg>'


def _ticks(ns: int, height: int) -> Iterator[str]:
    """A line and a time at each quarter of the picture."""
    for quarter in range(5):
        x = _LEFT + quarter * (_WIDTH - _LEFT) / 4
        anchor = {0: "start", 4: "end"}.get(quarter, "middle")
        said = escape(time_text(quarter * ns / 4e3)) if quarter else "0"
        yield f'<path d="M{x:.0f} 0V{height - 20}" stroke="currentColor" opacity="0.2"/>'
        yield f'<text x="{x:.0f}" y="{height - 6}" text-anchor="{anchor}">{said}</text>'


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
    heat = [(module, row) for module, row in ranks.heat().items() if module][:_SHOWN]
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
        lines.append(f'<tr><td class="left">{escape(module)}</td>{cells}</tr>')
    said = f'<tr><th class="left">module</th>{head}</tr>'
    return f'<div class="wide"><table>{said}{"".join(lines)}</table></div>'


def _exposed(ranks: Ranks) -> str:
    """A row for each kind of collective and module, the largest first: what computing waits for in each phase."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for (kind, module, phase), ns in ranks.exposed_by_module().items():
        if ns:
            rows.setdefault((module, kind), {})[phase] = ns
    if not rows:
        return "<p>All transfer is hidden behind computing.</p>"
    phases = [one for one in ("forward", "backward", "") if any(one in row for row in rows.values())]
    head = "".join(f"<th>{one or 'phase not known'}</th>" for one in phases)
    lines = [f'<tr><th class="left">module</th><th class="left">collective</th>{head}</tr>']
    for (module, kind), row in sorted(rows.items(), key=lambda one: -sum(one[1].values()))[:_SHOWN]:
        cells = "".join(f"<td>{escape(time_text(row[one] / 1e3)) if one in row else ''}</td>" for one in phases)
        lines.append(
            f'<tr><td class="left">{escape(module or "not known")}</td><td class="left">{kind}</td>{cells}</tr>'
        )
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _memory(ranks: Ranks) -> str:
    peaks = [(number, device, peak) for number, one in ranks.ranks.items() for device, peak in one.memory.items()]
    if not peaks:
        return "<p>No allocation was recorded: <code>profile(profile_memory=True)</code> does.</p>"
    most = max(max(peak) for *_, peak in peaks)
    lines = [
        '<tr><th class="left">rank</th><th class="left">device</th><th colspan="2">allocated</th><th>held</th></tr>'
    ]
    for number, device, peak in peaks:
        held = human_bytes(peak.reserved) if peak.reserved else "-"
        bar = f'<meter max="{most}" value="{peak.allocated}" aria-label="of the most that any rank held"></meter>'
        said = f'<td class="left">{number}</td><td class="left">{escape(device)}</td>'
        lines.append(f"<tr>{said}<td>{human_bytes(peak.allocated)}</td><td>{bar}</td><td>{held}</td></tr>")
    return f"<table>{''.join(lines)}</table>"
