"""The figures of the pipeline: what passes and the payload take of a processor, how that grows, and what a click takes until
its numbers are there, of a processor and in JupyterLab."""

from __future__ import annotations

from collections.abc import Callable

from pages.rendering import Data, Results, said, table

STAGES = {"assembly": "trace", "passes": "passes", "payload": "payload"}


@said("pipeline.py", "pipeline")
def pipeline(found: Data, source: str) -> str:
    """Seconds of each program's trace, passes and first payload, the growth of a family's, and the clicks of a GPT."""
    rows = [
        _row(size, one["growth"] if size is one["sizes"][-1] else None)
        for one in found["families"]
        for size in one["sizes"]
    ]
    rows += [_row(one, None) for one in found["goals"]]
    clicks = "until every click is foreseen", "clicks foreseen", "clicks at once: passes and numbers"
    titles = ("seconds of a processor", "ops", *STAGES.values(), "passes, growth an op", *clicks)
    low, high = found["load"]
    missed = f" Missed: {'; '.join(found['missed'])}." if found["missed"] else ""
    return f"{table(titles, rows)}\n\nAt a load of {low:.0f} to {high:.0f} ({source}).{missed}"


def _row(one: Data, growth: Data | None) -> list[str]:
    seconds, unit = one["stages_s"], "steps" if one["family"] == "LSTM" else "layers"
    grown = "" if growth is None else f"{growth['passes']:.2f}"
    clicks = one.get("clicks_s", {}).values()
    foreseen = f"{seconds['every switch']:.2f}" if "every switch" in seconds else ""
    shown = foreseen, _range([c["foreseen"] for c in clicks]), _range([c["passes"] + c["numbers"] for c in clicks])
    times = [f"{seconds[stage]:.2f}" for stage in STAGES]
    return [f"{one['family']}, {one['size']} {unit}", f"{one['ops']:,}", *times, grown, *shown]


def _range(seconds: list[float]) -> str:
    return f"{min(seconds):.2f} to {max(seconds):.2f}" if seconds else ""


@said("clicks.py", "clicks")
def clicks(found: Data, source: str) -> str:
    """Milliseconds of each first click in JupyterLab, so long behind the view, and of the one that follows it."""
    names = list(found["rows"][0]["clicks"])
    rows = [
        [f"{one['layers']} layers, {one['behind_s']:g} s", *(_two(one["clicks"][name]) for name in names)]
        for one in found["rows"]
    ]
    low, high = found["load"]
    ending = f"At a load of {low:.0f} to {high:.0f} ({source})."
    missed = f" Missed: {'; '.join(found['missed'])}." if found["missed"] else ""
    return f"{table(('ms of the clock, behind the view', *names), rows)}\n\n{ending}{missed}"


def _two(click: Data) -> str:
    return f"{click['first_ms']:.0f} ({click['second_ms']:.0f})"


BLOCKS: dict[str, Callable[[Results], str]] = {"pipeline": pipeline, "clicks": clicks}
