"""The part of the wire format that says what each value is: values, and the lines of code that define them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.trace import Trace
from tracefuse.widgets.payload import facts as trace_facts
from tracefuse.widgets.payload.diff import Line, diff, lines_of


def half(before: Trace, after: Trace) -> dict[str, Any]:
    """One column of code: the half `after` the passes, marked against the same half `before` them."""
    lines = diff(lines_of(before), lines_of(after))
    marks = Counter(line.mark for line in lines)
    return {
        "lines": [_line(line) for line in lines],
        "ops": [before.op_count, after.op_count],
        "added": marks["+"] + marks["~"],
        "removed": marks["-"],
    }


def _line(line: Line) -> dict[str, str]:
    return {"code": line.code, "comment": line.comment, "value": line.value, "kind": line.kind, "diff": line.mark}


def values(before: Trace, after: Trace, times: tuple[OpTimes, OpTimes]) -> dict[str, dict[str, Any]]:
    """Every value by name, those included that the passes removed; `times` are of the ops before and after."""
    old, new = trace_facts.values(before), trace_facts.values(after)
    removed = {node.name: old[node.name] for node in before.ops if node.name not in new}
    us_before, us_after = (one.us for one in times)
    return {
        name: {**record, "removed": name in removed, "time_us": [us_before.get(name), us_after.get(name)]}
        for name, record in (removed | new).items()
    }
