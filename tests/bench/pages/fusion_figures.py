"""The figures of fusion programs, and of what the view predicts and findings promise: how fast, how often not, how far off."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from statistics import median

from trust.fix_rows import can_be_told, is_within, judged

from pages.rendering import Data, Results, said, table, three
from tracefuse.measure.timing import MIN_ROUNDS

MODEL_COLUMNS = {
    "eager": "eager", "`torch.compile`": "torch.compile", "`reduce-overhead`": "reduce-overhead", "tracefuse": "ours",
    "CUDA graph": "ours, graph",
}  # fmt: skip
"""Titles, and what `fusions.py` calls the columns."""
ALIKE = 1.02
"""A time that is longer by less counts as equal."""
MUCH = 1.5
"""Times as fast that is worth a name."""


@said("fusions.py", "fusions")
def fusions(found: Data, source: str) -> str:
    """The other columns' times over ours, of steps that wait for each other and of steps in a row, and by name the programs
    that are slower than eager."""
    rows = found["programs"]
    alone, in_a_row = ({name: _times(row, of) for name, row in rows.items()} for of in ("least_ms", "row_ms"))
    in_a_row = {name: times for name, times in in_a_row.items() if times}
    days = sorted({row["date"].partition(" ")[0] for row in rows.values()})
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    timed = "All" if len(in_a_row) == len(rows) else f"{len(in_a_row)} of them"
    return (
        f"{len(rows)} fusion programs were run, forward and backward, in float32 with TF32, under "
        f'`torch.compile(backend="tracefuse")`, {when}. Where each step waits for the one before it, '
        f"{_means(alone)}. {timed} were timed as a loop runs them too, five steps in a row: there "
        f"{_means(in_a_row)} ({source})."
    )


def _times(row: Data, of: str) -> dict[str, float]:
    return {column: one[of] for column, one in row["columns"].items() if of in one}


def _means(times: dict[str, dict[str, float]]) -> str:
    eager = _over_ours(times, "eager")
    slow = [f"`{name}` ({1 / ratio:.2f} times eager's time)" for name, ratio in eager.items() if ratio * ALIKE < 1]
    than = f"Slower than eager by more than 2 %: {', '.join(slow) or 'none'}"
    return f"{_mean('eager', times)}; {_mean('torch.compile', times)}. {than}"


def _over_ours(times: dict[str, dict[str, float]], column: str) -> dict[str, float]:
    return {name: row[column] / row["ours"] for name, row in times.items() if column in row and "ours" in row}


def _geometric(ratios: Collection[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _mean(column: str, times: dict[str, dict[str, float]]) -> str:
    ratios = list(_over_ours(times, column).values())
    mean = _geometric(ratios)
    slower = sum(ratio * ALIKE < 1 for ratio in ratios)
    return f"{column} takes {mean:.2f} times as long in the geometric mean, and is faster in {slower} of {len(ratios)}"


@said("fusions.py", "fusion_models")
def trained(found: Data, source: str) -> str:
    """The ms of a step of each model, in a row with the best of the others over our best, and what plain columns add."""
    titles = (
        "ms a step, forward and backward",
        *MODEL_COLUMNS,
        "best other / our best",
        "peak, GB: `torch.compile`, tracefuse",
        "held as a graph, GB: `reduce-overhead`, tracefuse",
    )
    lines = []
    for name, row in found["programs"].items():
        ms = {column: one["least_ms"] for column, one in row["columns"].items() if "least_ms" in one}
        ours = min(time for column, time in ms.items() if column.startswith("ours"))
        others = min(time for column, time in ms.items() if not column.startswith("ours"))
        peaks = _gigabytes(row, "added_nbytes", "torch.compile", "ours")
        held = _gigabytes(row, "held_nbytes", "reduce-overhead", "ours, graph")
        times = [three(ms[column]) if column in ms else "failed" for column in MODEL_COLUMNS.values()]
        lines.append((name, *times, f"{others / ours:.2f}", peaks, held))
    days = sorted({row["date"].partition(" ")[0] for row in found["programs"].values()})
    return f"{table(titles, lines)}\n\nMeasured on {', '.join(days)} ({source})."


def _gigabytes(row: Data, of: str, *columns: str) -> str:
    """What each of `columns` adds to memory: in processes of their own where all were measured so, else beside the others."""
    found = [row["columns"][column] for column in columns]
    is_alone = all("alone" in one for one in found)
    return ", ".join(f"{(one['alone'] if is_alone else one)[of] / 1e9:.2f}" for one in found)


@said("convolutions.py", "convolutions")
def convolutions(found: Data, source: str) -> str:
    """What channels-last and cuDNN's search save convolutions, and by name those that the search makes much faster."""
    guessed, last, sought = (
        {name: sum(one[column].values()) for name, one in found["ms"].items()}
        for column in ("channel by channel, heuristics", "channels-last, heuristics", "channel by channel, search")
    )
    gains = {name: guessed[name] / ms for name, ms in sought.items()}
    most = sorted((name for name in gains if gains[name] > MUCH), key=gains.__getitem__, reverse=True)
    named = ", ".join(f"`{name}` ({gains[name]:.1f} times)" for name in most) or "none"
    in_last, in_search = _geometric([guessed[name] / ms for name, ms in last.items()]), _geometric(gains.values())
    return (
        f"{len(gains)} convolutions were timed alone, with both gradients. In channels-last order they are {in_last:.2f} "
        f"times as fast in the geometric mean, and with the algorithms that cuDNN's search finds {in_search:.2f} times; more "
        f"than {MUCH} times as fast with these are {named} ({source})."
    )


@said("forecasts.py", "forecasts")
def forecasts(found: Data, source: str) -> str:
    """How far predictions of toggles are off."""
    rows = [row for row in found["rows"] if row["rounds"] >= MIN_ROUNDS]
    signs = [row["is_right"] for row in rows if row["is_right"] is not None]
    cases, off = {row["case"] for row in rows}, median(abs(row["error"]) for row in rows)
    return (
        f"After {len(rows)} switches of {len(cases)} programs the step that the view predicted was off by {off:.1%} in the "
        f"median; where a switch changes it by more than 3 %, the sign was right in {sum(signs)} of {len(signs)}; of "
        f"{len(found['rows']) - len(rows)} others there were too few rounds ({source})."
    )


@said("fixes.py", "fixes")
def fixes(found: Data, source: str) -> str:
    """What findings say that fixes are worth, beside what replays measured, a row a fix."""
    rows = [row for row in found["rows"] if not row["error"]]
    wrong = [f"`{row['program']}`: {row['error'].splitlines()[0]}" for row in found["rows"] if row["error"]]
    told = [row for row in found["rows"] if can_be_told(row)]
    titles = ("step", "finding", "fix", "predicted ms", "measured ms [95 % interval]", "predicted / measured")
    lines = [
        f"{len(rows)} fixes were tried on {len({row['program'] for row in rows})} steps; {sum(map(is_within, told))} of "
        f"{len(told)} gained what was predicted to a factor of 1.5, of {len(found['rows']) - len(told)} the rounds cannot "
        f"tell ({source}). Not tried: {'; '.join(wrong) or 'none'}.",
        "",
        table(titles, [_tried(row) for row in rows]),
    ]
    return "\n".join(lines)


def _tried(row: Data) -> tuple[str, ...]:
    median_ms, low, high = row["measured_ms"]
    said_of = f"`{row['program']}`", f"`{row['finding']}`", row["fix"]
    return (
        *said_of,
        f"{row['predicted_ms']:.3g}",
        f"{median_ms:.3g} [{low:.3g}, {high:.3g}]",
        f"{row['ratio'] or 0:.2f}" if can_be_told(row) else judged(row),
    )


@said("mended_scripts.py", "mended_scripts")
def mended_scripts(found: Data, source: str) -> str:
    """What is found in two scripts with planted mistakes, and what following it brings."""
    rows = found["rows"]
    titles = ("script", "mistakes named", "mended", "trained on in a second as written", "mended", "times")
    lines = [
        f"Two training scripts of 200 lines with four mistakes each ({source}):",
        "",
        table(titles, [_mended(row) for row in rows]),
    ]
    return "\n".join(lines)


def _mended(row: Data) -> tuple[str, ...]:
    count = row["mistakes"]
    named, mended = (f"{count - len(row[told])} of {count}" for told in ("missed", "left"))
    before, after = (f"{median(rates):,.0f}" for rates in row["rates"].values())
    return f"`{row['script']}.py`", named, mended, before, after, f"{row['gain']:.2f}"


BLOCKS: dict[str, Callable[[Results], str]] = {
    "fusions": fusions,
    "convolutions": convolutions,
    "forecasts": forecasts,
    "trained": trained,
    "fixes": fixes,
    "mended_scripts": mended_scripts,
}
