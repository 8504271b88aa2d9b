"""The view as plain text and as a still table in HTML: the same content, for terminals, closed kernels and diffs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tracefuse.findings.finding import IN_LIBRARY, Bar, bars_text, how_mended, in_brief
from tracefuse.measure.timing import MIN_ROUNDS, Estimate, shown
from tracefuse.optimizers.ops import grouped
from tracefuse.optimizers.trace import human_bytes
from tracefuse.tables.folding import OUTSIDE
from tracefuse.text import aligned, figure, time_text
from tracefuse.widgets.payload.kernels import NOT_MEASURED

HOW_TO_RETURN = "This is what the view showed last. Run the cell again for the view itself."
Row = Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows under `titles`, what is said above them and below."""

    titles: Row
    rows: Sequence[Row]
    above: str = ""
    below: tuple[str, ...] = ()


def to_text(payload: dict[str, Any]) -> str:
    """Summary, passes, times, modules, kernels, findings and notes of a payload; the code itself is `variant.forward.code`."""
    told = "\n".join(_findings(payload)), "\n".join(_notes(payload))
    sections = ["\n".join(_summary(payload)), *map(_table_text, _tables(payload)), *told]
    return "\n\n".join(section for section in sections if section)


def to_static_form(payload: dict[str, Any]) -> str:
    """The same as HTML that needs neither a kernel nor a script: what a notebook keeps of the view. All text is escaped."""
    head, *lines = _summary(payload)
    parts = [
        f'<p style="margin:0 0 4px"><b>{escape(head)}</b></p>',
        *map(_paragraph, lines),
        *map(_table_html, _tables(payload)),
        *map(_paragraph, [*_findings(payload), *_notes(payload)]),
        f'<p style="margin:8px 0 0;opacity:.75">{escape(HOW_TO_RETURN)}</p>',
    ]
    return f'<div style="font-size:13px;line-height:1.45;max-width:1100px;overflow-x:auto">{"".join(parts)}</div>'


def board_text(board: dict[str, Any]) -> str:
    """What was tried, a line for each configuration, as the view's board has it; a mark stands before the one on show."""
    rows = [("", "capture", "configuration", "step", "", "to captured", "measured", "to captured", "peak", "saved")]
    for row in board["rows"]:
        step = row["measured"]
        rows.append((
            ">" if row["is_shown"] else "",
            board["captures"][row["capture"]],
            row["name"],
            time_text(row["step_us"]),
            row["kind"] + (f" on {row['device']}" if row["device"] != board["device"] else ""),
            "" if row["ratio"] is None else figure(row["ratio"]),
            f"{figure(step['median'])} [{figure(step['low'])}, {figure(step['high'])}] ms" if step else NOT_MEASURED,
            figure(step["ratio"]) if step and step["ratio"] is not None else "",
            human_bytes(row["peak_bytes"]),
            human_bytes(row["saved_bytes"]),
        ))  # fmt: skip
    return "\n".join(filter(None, [f"board: times of {board['device']}", aligned(rows), board.get("said", "")]))


# --- what is said -----------------------------------------------------------------------------------------------------


def _summary(payload: dict[str, Any]) -> list[str]:
    found = payload["summary"]
    ops = " -> ".join(map(str, found["ops"])) + f" ops{_update_ops(payload['update'])}"
    saved = f"{' -> '.join(map(human_bytes, found['saved_bytes']))} saved for backward"
    if not any(payload["backward"]["ops"]):
        saved = "no backward"
    kernels = found["kernels"]
    launches = f" in {_count(kernels['launches'], 'launch', 'launches')}" if kernels["launches"] else ""
    beside = f"beside {payload['baseline']['call']}, which is pinned" if payload["baseline"]["is_pinned"] else ""
    lines = [
        f"tracefuse  {payload['call'] or 'give the capture a name (c = …, or -o c of the magic) to use it in Python'}",
        payload["sentence"]["said"],
        beside,
        payload["steps"]["said"] if payload["steps"] else "",
        f"{ops}, {saved}, {_count(kernels['unique'], 'Triton kernel')}{launches}",
        payload["blocked"] or "",
    ]
    return [line for line in lines if line]


def _update_ops(update: dict[str, Any] | None) -> str:
    """How many of the ops are the update's."""
    return "" if update is None else " (of which the update's {} -> {})".format(*update["ops"])


def _tables(payload: dict[str, Any]) -> list[Table]:
    notes = tuple(f"{p['name']}: {p['note']}" for p in payload["passes"] if p["note"])
    passes = Table(("pass", "", "ops", "saved", "took"), [_pass(p) for p in payload["passes"]], below=notes)
    times = _times(payload["timing"])
    return [passes, times, *_layers(payload), *_kernels(payload["kernels"]), *_unused(payload["unused"])]


def _findings(payload: dict[str, Any]) -> list[str]:
    """What makes the program slow as it ran, in the view's order: its line, that of a library, the parts of its time, the fix,
    what passes mend of it, and what replays of fixes said."""
    lines: list[str] = []
    how = payload["times"]["before"]  # said above the modules
    for one in payload["findings"]:
        parts = bars_text([Bar(**bar) for bar in one["bars"]]) if one["bars"] else ""
        severity = f"{one['severity']}{how_mended(one['is_mended'], one['mended_by'])}"
        said = f"{severity}: {one['title']} [{one['id']}]; {one['worth']}"
        tried = [f"{trial['does']}: {trial['said']}" for trial in one["trials"] if trial["said"]]
        library = [f"{label}: {line}" for label, line in one["evidence"] if label == IN_LIBRARY]
        more = filter(None, [one["source"], *library, parts, f"fix: {one['fix']}", one["mended"], *tried])
        lines += [in_brief(line, how) for line in (said, *(f"  {line}" for line in more))]
    return [*lines, *[payload["below"]] * bool(payload["below"])]


def _notes(payload: dict[str, Any]) -> list[str]:
    return [f"{note['kind']}: {note['text']}" for note in payload["notes"]]


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _pass(record: dict[str, Any]) -> Row:
    if not record["enabled"]:
        return record["name"], record["state"], "", "", ""
    if record["error"]:
        return record["name"], f"failed: {record['error']}", "", "", ""
    ops = " -> ".join(map(str, record["ops"]))
    saved = " -> ".join(map(human_bytes, record["saved_bytes"]))
    return record["name"], "on", ops, saved, f"{figure(record['seconds'] * 1e3)} ms"


def _times(timing: dict[str, Any] | None) -> Table:
    if timing is None:
        return Table((), (), f"times: {NOT_MEASURED}")
    stale = f" (of {timing['config']}, not of these passes)" if timing["stale"] else ""
    rows = [(r["label"], _time(r["baseline_ms"]), _time(r["variant_ms"]), _ratio(r)) for r in timing["rows"]]
    before = "pinned" if timing["is_pinned"] else "as captured"
    titles = ("", f"{before}, ms", "optimised, ms", f"optimised / {before.removeprefix('as ')}")
    above = f"{timing['provenance']}{stale}; median [95 % interval]"
    return Table(titles, rows, above, tuple(timing["notes"]))


def _time(time: dict[str, Any] | None) -> str:
    return Estimate(**time).text() if time else NOT_MEASURED


def _ratio(row: dict[str, Any]) -> str:
    """The ratio with its verdict. It compares within each round, and so may say otherwise than the medians of all."""
    if not row["ratio"] or not row["variant_ms"] or not row["baseline_ms"]:
        return ""
    ratio, before, after = (Estimate(**row[key]) for key in ("ratio", "baseline_ms", "variant_ms"))
    is_apart = (after.median - before.median) * {"faster": 1, "slower": -1}.get(row["verdict"], 0) > 0
    said = shown(ratio, 3) if ratio.samples >= MIN_ROUNDS else ""
    return f"{said} {row['verdict']}{' by round: the times drifted' if is_apart else ''}".lstrip()


def _layers(payload: dict[str, Any]) -> list[Table]:
    """Modules with identical ones in one line; none where the program has no modules."""
    groups = grouped(payload["layers"], lambda row: row["folded"] or row["module_type"] or OUTSIDE)
    if not set(groups) - {OUTSIDE}:
        return []
    has_update = payload["update"] is not None
    titles = ("module", "type", "forward us", "backward us", *["update us"] * has_update, "backward is mostly")
    above = f"modules: {payload['times']['after']}"
    below = (_share_of_update(payload["layers"]),) if has_update else ()
    return [Table(titles, [_layer(path, rows, has_update) for path, rows in groups.items()], above, below)]


def _share_of_update(rows: Sequence[dict[str, Any]]) -> str:
    forward, backward, update = (
        sum(row[f"{phase}_us"][1] for row in rows) for phase in ("forward", "backward", "update")
    )
    whole = forward + backward + update
    return f"the optimizer takes {update / whole:.0%} of the optimised step" if whole else ""


def _layer(path: str, rows: Sequence[dict[str, Any]], has_update: bool) -> Row:
    name = f"{path} x{len(rows)}" if len(rows) > 1 else rows[0]["path"] or path
    causes = dict.fromkeys(row["cause"] for row in rows if row["cause"])
    backward = _both(rows, "backward_us") if any(sum(row["backward_ops"]) for row in rows) else "no backward"
    update = [_both(rows, "update_us") if any(sum(row["update_ops"]) for row in rows) else ""] * has_update
    return name, rows[0]["module_type"], _both(rows, "forward_us"), backward, *update, next(iter(causes), "")


def _both(rows: Sequence[dict[str, Any]], side: str) -> str:
    return " -> ".join(_us(sum(row[side][at] for row in rows)) for at in (0, 1))


def _us(us: float) -> str:
    """A time as a figure in µs; below a nanosecond no model tells times apart."""
    return "<0.001" if 0 < us < 1e-3 else figure(us, 4)


def _kernels(kernels: Sequence[dict[str, Any]]) -> list[Table]:
    """Kernels with their times. How most of the times are known stands above the table."""
    if not kernels:
        return []
    ((most, _),) = Counter(kernel["provenance"] for kernel in kernels).most_common(1)
    rows = [
        (
            k["name"],
            str(k["calls"]),
            human_bytes(k["nbytes_read"]),
            human_bytes(k["nbytes_written"]),
            _kernel_time(k, most),
        )
        for k in kernels
    ]
    return [Table(("kernel", "launches", "reads", "writes", "time us"), rows, f"kernels: {most}")]


def _kernel_time(kernel: dict[str, Any], most: str) -> str:
    time = "" if kernel["time_us"] is None else _us(kernel["time_us"])
    return ", ".join(filter(None, [time, kernel["provenance"] * (kernel["provenance"] != most)]))


def _unused(unused: dict[str, Any]) -> list[Table]:
    """Ops alike, of one line in modules of one class, as one row."""
    groups = grouped(unused["ops"], lambda one: (one["op"], one["module_type"] or one["module"], one["source"]))
    rows = [
        (
            f"{op} x{len(ops)}" if len(ops) > 1 else op,
            where,
            line,
            _us(_sum(ops, "time_us")),
            human_bytes(_sum(ops, "nbytes")),
        )
        for (op, where, line), ops in groups.items()
    ]
    above = f"computed, never used ({unused['provenance']})"
    return [Table(("op", "module", "line", "time us", "writes"), rows, above)] if rows else []


def _sum(ops: Sequence[dict[str, Any]], of: str) -> Any:
    return sum(one[of] for one in ops)


# --- how it is written ------------------------------------------------------------------------------------------------


def _table_text(table: Table) -> str:
    rows = aligned([table.titles, *table.rows]) if table.rows else ""
    return "\n".join(part for part in (table.above, rows, *table.below) if part)


def _table_html(table: Table) -> str:
    above, below = _paragraph(table.above) if table.above else "", "".join(map(_paragraph, table.below))
    if not table.rows:
        return above + below
    head = "".join(f'<th scope="col" style="text-align:left">{escape(title)}</th>' for title in table.titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    grid = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'{above}<div style="margin:6px 0">{grid}</div>{below}'


def _cell(text: str) -> str:
    return f'<td style="text-align:left">{escape(text).replace("-&gt;", "→")}</td>'


def _paragraph(text: str) -> str:
    return f'<p style="margin:2px 0">{escape(text).replace("-&gt;", "→")}</p>'
