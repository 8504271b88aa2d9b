"""The view as plain text: the same content as aligned tables, for terminals, closed kernels and diffs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracefuse.optimizers.trace import human_bytes
from tracefuse.timing import aligned
from tracefuse.widgets.payload_kernels import NOT_MEASURED


def to_text(payload: dict[str, Any]) -> str:
    """Summary, passes, times, kernels and notes of a payload; the code itself is `variant.forward.code`."""
    sections = [
        _summary(payload),
        _table(("pass", "", "ops", "saved", "took"), [_pass(p) for p in payload["passes"]]),
        _times(payload["timing"], payload["kernels"] and not payload["runs_triton"]),
        _kernels(payload["kernels"]),
        "\n".join(f"{note['kind']}: {note['text']}" for note in payload["notes"]),
    ]
    return "\n\n".join(section for section in sections if section)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return aligned([titles, *rows])


def _summary(payload: dict[str, Any]) -> str:
    found = payload["summary"]
    before, after = found["ops"]
    saved = " -> ".join(map(human_bytes, found["saved_bytes"]))
    kernels = found["kernels"]
    return (
        f"tracefuse  {payload['call'] or 'run it with -o c to use it in Python'}\n"
        f"{before} -> {after} ops, {saved} saved for backward, "
        f"{_count(kernels['unique'], 'Triton kernel')}"
        + (f" in {_count(kernels['launches'], 'launch', 'launches')}" if kernels["launches"] else "")
        + (f"\n{payload['blocked']}" if payload["blocked"] else "")
    )


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _pass(record: dict[str, Any]) -> tuple[str, ...]:
    if not record["enabled"]:
        return record["name"], record["state"], "", "", ""
    if record["error"]:
        return record["name"], f"failed: {record['error']}", "", "", ""
    ops = " -> ".join(map(str, record["ops"]))
    saved = " -> ".join(map(human_bytes, record["saved_bytes"]))
    return record["name"], "on", ops, saved, f"{record['seconds'] * 1e3:.3g} ms"


def _times(timing: dict[str, Any] | None, is_without_kernels: bool) -> str:
    if timing is None:
        return f"times: {NOT_MEASURED}"
    stale = f" (of {timing['config']}, not of these passes)" if timing["stale"] else ""
    rows = [(r["label"], _time(r["baseline_ms"]), _time(r["variant_ms"]), _ratio(r)) for r in timing["rows"]]
    titles = ("", "as captured, ms", "optimised, ms", "optimised / captured")
    lines = [f"{timing['provenance']}{stale}; median [95 % interval]", _table(titles, rows), *timing["notes"]]
    return "\n".join([*lines, "Triton kernels did not run: CPU"] if is_without_kernels else lines)


def _time(time: dict[str, float] | None) -> str:
    return f"{time['median']:.4g} [{time['low']:.4g}, {time['high']:.4g}]" if time else NOT_MEASURED


def _ratio(row: dict[str, Any]) -> str:
    ratio = row["ratio"]
    return f"{ratio['median']:.3g} [{ratio['low']:.3g}, {ratio['high']:.3g}] {row['verdict']}"


def _kernels(kernels: Sequence[dict[str, Any]]) -> str:
    if not kernels:
        return ""
    rows = [
        (k["name"], str(k["calls"]), human_bytes(k["nbytes_read"]), human_bytes(k["nbytes_written"]), _kernel_time(k))
        for k in kernels
    ]
    return _table(("kernel", "launches", "reads", "writes", "time"), rows)


def _kernel_time(kernel: dict[str, Any]) -> str:
    time_us = kernel["time_us"]
    return kernel["provenance"] if time_us is None else f"{time_us:.4g} us, {kernel['provenance']}"
