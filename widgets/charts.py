"""Charts for reports, as plotly figures: where each op stands under the roofline, memory over a step, what each pass is worth,
what memory costs in time, what a copy consists of.

    from tracefuse.widgets import charts
    charts.memory(v).show();  charts.roofline(v).write_html("roofline.html")
    charts.pareto(optimizers.pareto(...));  charts.ablation({"cat": estimate, ...}, "measured on …")
    charts.parts(v.findings()[0])

Every chart's title says whether its numbers are measured or modelled. They are `go.Figure`s: small, and static in a notebook.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from torch import fx

from tracefuse.findings.finding import Finding
from tracefuse.lint.facts import numel
from tracefuse.measure.op_times import OpTimes, roofline_of
from tracefuse.measure.timing import Estimate
from tracefuse.optimizers.costs.cost import Peaks, bytes_moved, flops
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import live_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.remat.tradeoffs import Point
from tracefuse.optimizers.trace import Trace, phase
from tracefuse.tables.folding import work
from tracefuse.text import time_text
from tracefuse.variant import Variant

MiB = 2**20
# Okabe and Ito's colours; kinds beyond them share grey.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
GREY = "#7f7f7f"


def roofline(variant: Variant, times: OpTimes | None = None, peaks: Peaks | None = None) -> go.Figure:
    """Each op's arithmetic intensity (FLOP per byte) and rate (FLOP/s), under the roof that `peaks` gives.

    `times` default to the variant's, `peaks` to what those are modelled by. Modelled times stand on the roof by construction;
    measured ones say how far below it an op stays. Of ops that are no matmul a FLOP is counted per element they yield, and per
    op inside a kernel.
    """
    times, peaks = times or variant.op_times, peaks or roofline_of(variant.trace)
    groups: dict[str, list[fx.Node]] = {}
    for node in filter(does_work, variant.trace.ops):
        if times.us.get(node.name, 0) > 0 and bytes_moved(node) > 0 and arithmetic(node) > 0:
            groups.setdefault(work(node), []).append(node)
    figure = _figure(f"Roofline: {times.provenance}", "FLOP per byte", "FLOP/s")
    for index, (kind, nodes) in enumerate(sorted(groups.items(), key=lambda item: -len(item[1]))):
        figure.add_scatter(
            x=[arithmetic(n) / bytes_moved(n) for n in nodes],
            y=[arithmetic(n) / (times.us[n.name] * 1e-6) for n in nodes],
            text=[f"{n.name} ({phase(n)}): {times.us[n.name]:.3g} µs" for n in nodes],
            mode="markers",
            name=kind,
            marker=_marker(index),
            hovertemplate="%{text}<br>%{x:.3g} FLOP/byte, %{y:.3g} FLOP/s<extra></extra>",
        )
    low, ridge, high = 1e-2, peaks.flops_per_s / peaks.bytes_per_s, 1e4
    figure.add_scatter(
        x=[low, ridge, high],
        y=[low * peaks.bytes_per_s, peaks.flops_per_s, peaks.flops_per_s],
        mode="lines",
        name=peaks.source,
        line={"color": GREY},
    )
    return figure.update_xaxes(type="log").update_yaxes(type="log")


def arithmetic(node: fx.Node) -> int:
    """Floating-point operations of an op: a matmul's own, else one per element it yields; of a kernel, of the ops in it."""
    if isinstance(node.target, Kernel):
        return sum(map(numel, filter(does_work, node.target.body.ops)))
    return flops(node) or numel(node)


def memory(variant: Variant) -> go.Figure:
    """Bytes alive while each op runs, as captured and with the passes; by the static rules, so *modelled*."""
    figure = _figure("Memory over a step: modelled from the trace", "share of the ops", "MiB alive")
    for index, (label, trace) in enumerate(
        (("as captured", variant.capture.trace), ("with the passes", variant.trace))
    ):
        live = [count / MiB for count in live_bytes(trace)]
        figure.add_scatter(
            x=[at / max(1, len(live) - 1) for at in range(len(live))],
            y=live,
            text=[node.name for node in trace.ops],
            mode="lines",
            line={"shape": "hv", "color": COLOURS[index], "dash": ("solid", "dot")[index]},
            name=f"{label}: peak {max(live, default=0):.4g} MiB",
            hovertemplate="%{text}: %{y:.4g} MiB<extra></extra>",
        )
        figure.add_vline(_boundary(trace), line={"color": COLOURS[index], "width": 1, "dash": "dash"})
    return figure


def _boundary(trace: Trace) -> float:
    """Where the backward begins, as a share of the ops."""
    return sum(phase(node) == "forward" for node in trace.ops) / max(1, len(trace.ops) - 1)


def ablation(deltas_ms: Mapping[str, Estimate], provenance: str) -> go.Figure:
    """What each pass alone adds to the step in ms, all others on; below zero it makes the step faster. Whiskers are 95 %."""
    figure = _figure(f"What each pass adds to the step: {provenance}", "", "ms")
    medians = [delta.median for delta in deltas_ms.values()]
    # Below the names: in the bars, whiskers would cross the figures.
    named = [
        f"{name}<br>{delta.median:{'+' if delta.median else ''}.3g} ms{' (one sample)' * (delta.samples == 1)}"
        for name, delta in deltas_ms.items()
    ]
    figure.update_xaxes(tickvals=list(deltas_ms), ticktext=named)
    return figure.add_bar(
        x=list(deltas_ms),
        y=medians,
        marker={"color": [COLOURS[0] if delta.median <= 0 else COLOURS[5] for delta in deltas_ms.values()]},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [delta.high - delta.median for delta in deltas_ms.values()],
            "arrayminus": [delta.median - delta.low for delta in deltas_ms.values()],
        },
        showlegend=False,
    )


def parts(finding: Finding) -> go.Figure:
    """The time that a finding is about, in ms, as one bar of its parts. Raises `ValueError` for a finding without parts."""
    if not finding.bars:
        raise ValueError(f"“{finding.title}” has no parts: look for a finding with `bars`")
    figure = _figure(f"{finding.title}<br>{finding.bars[0].provenance}", "ms", "")
    for index, bar in enumerate(finding.bars):
        name = f"{bar.label}: {time_text(bar.us)}"
        figure.add_bar(x=[bar.us / 1e3], y=[""], orientation="h", name=name, marker={"color": COLOURS[index]})
    below = {"orientation": "h", "traceorder": "normal", "y": -0.5, "yanchor": "top"}
    return figure.update_layout(barmode="stack", height=280, title_font_size=14, showlegend=True, legend=below)


def pareto(points: Sequence[Point]) -> go.Figure:
    """Static peak against modelled seconds of recomputation, a line for each producer input weight."""
    figure = _figure("What memory costs in time: modelled", "static peak, MiB", "recomputation, ms")
    for index, weight in enumerate(dict.fromkeys(point.weight for point in points)):
        line = [point for point in points if point.weight == weight]
        figure.add_scatter(
            x=[point.peak_bytes / MiB for point in line],
            y=[point.recompute_seconds * 1e3 for point in line],
            text=[_budget(point) for point in line],
            mode="lines+markers",
            name=f"weight {weight:g}",
            marker=_marker(index),
            hovertemplate="%{text}<br>peak %{x:.4g} MiB, %{y:.3g} ms<extra></extra>",
        )
    return figure


def _budget(point: Point) -> str:
    budget = "no budget" if point.budget is None else f"budget {point.budget:g}"
    return f"{budget}{'' if point.met else ' (not met)'}: {point.saved_bytes / MiB:.4g} MiB saved"


def _figure(title: str, x: str, y: str) -> go.Figure:
    return go.Figure(layout={"title": title, "xaxis": {"title": x}, "yaxis": {"title": y}, "template": "plotly_white"})


def _marker(index: int) -> dict[str, str]:
    known = index < len(COLOURS)
    return {"color": COLOURS[index] if known else GREY, "symbol": SYMBOLS[index] if known else "circle-open"}
