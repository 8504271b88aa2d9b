"""The figures of many ranks: opening their files, naming causes, and the model of a step beside what was measured."""

from __future__ import annotations

from collections.abc import Callable

from pages.rendering import Data, Results, ms, said, table


@said("many_ranks.py", "many_ranks")
def opened(found: Data, source: str) -> str:
    """What opening the files of a job takes."""
    jobs = [
        f"{one['job']}: {sum(one['cpu_s'].values()):.0f} s of one processor and {one['peak_mib'] / 1024:.1f} GiB, at a "
        f"load of {one['load'][1]:.0f}"
        for one in found["jobs"]
    ]
    return f"Opening generated files, to the last finding and the page. {'; '.join(jobs)} ({source})."


@said("injected_causes.py", "injected_causes")
def causes(found: Data, source: str) -> str:
    """How many injected causes are named."""
    named = sum(one["named"] for one in (*found["causes"], *found["gloo"]))
    off = sum(not one["exact"] for one in found["causes"])
    return (
        f"Of {len(found['causes'])} causes injected into generated jobs of four ranks and {len(found['gloo'])} into gloo "
        f"processes {named} are named with rank, module and line; in {off} a transfer or a skew is off by more than 0.3 ms "
        f"and 2 %; {len(found['clean'])} findings of medium or more in clean jobs ({source})."
    )


@said("overlap_model.py", "overlap_model")
def overlap(found: Data, source: str) -> str:
    """Predicted and measured steps."""
    titles = ("a step of four gloo ranks", "predicted", "measured", "without an exchange", "error")
    rows = [
        (
            f"{one['program']}, `{one['choice']}`",
            *(ms(one[f"{key}_ms"]) for key in ("predicted", "measured", "alone")),
            f"{100 * one['error']:+.0f} %",
        )
        for one in found["rows"]
    ]
    load = " to ".join(f"{one:.0f}" for one in found["load"])
    errors = f"{100 * found['median_error']:.0f} %, with matrices {100 * found['median_error_with_matrices']:.0f} %"
    return f"{table(titles, rows)}\nMedian error {errors}, on two cores at a load of {load} ({source})."


BLOCKS: dict[str, Callable[[Results], str]] = {"opened": opened, "causes": causes, "overlap": overlap}
