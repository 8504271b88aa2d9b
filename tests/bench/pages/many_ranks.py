"""The figures of many ranks: opening their files, naming causes, and the model of a step beside what was measured."""

from __future__ import annotations

from collections.abc import Callable

from pages.rendering import Data, Results, measured_on, ms, said, table


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


@said("overlap_gain.py", "overlap_gain")
def gain(found: Data, source: str) -> str:
    """What a step gains whose collectives start early for real."""
    titles = ("a step of four gloo ranks", "measured", "of it waiting for others", "loss and gradients")
    rows = [
        (
            f"{one['program']}, " + (f"`{one['choice']}`" if "=" in one["choice"] else one["choice"]),
            ms(one["ms"]),
            ms(one["ms"] - found["alone_ms"]),
            "bit for bit" if one["same"] else "others",
        )
        for one in found["rows"]
    ]
    return f"{table(titles, rows)}\nWithout an exchange {ms(found['alone_ms'])}, at a load of {found['load']:.0f} ({source})."


def overlap(results: Results) -> str:
    """Predicted and measured steps of processes on a CPU."""
    found = modelled(results, is_gpu=False)
    if found is None:
        return MISSING
    load = " to ".join(f"{one:.0f}" for one in found["load"])
    errors = f"{100 * found['median_error']:.0f} %, with matrices {100 * found['median_error_with_matrices']:.0f} %"
    source = measured_on(found["environment"], "overlap_model.py")
    text = f"Median error {errors}, on two cores at a load of {load}{kept(found)} ({source})."
    return f"{steps('four gloo ranks', found)}\n{text}"


def overlap_gpu(results: Results) -> str:
    """Predicted and measured steps on GPUs."""
    found = modelled(results, is_gpu=True)
    if found is None:
        return MISSING
    links = "; ".join(
        f"{kinds}: {one['us_a_call']:.0f} µs and {one['gb_per_s']:.0f} GB/s" for kinds, one in found["links"].items()
    )
    error = f"{100 * found['median_error_with_matrices']:.0f} %"
    source = measured_on(found["environment"], "overlap_model.py --device cuda")
    return (
        f"{steps('two GPUs by NCCL', found)}\nMedian error {error}{kept(found)}. Links as fitted: {links} ({source})."
    )


MISSING = "Not measured: no result of `overlap_model.py` is committed."


def modelled(results: Results, is_gpu: bool) -> Data | None:
    all_ = results.on_each_machine("overlap_model")
    return next((one for one in all_ if one["environment"]["device"].startswith("CPU") != is_gpu), None)


def kept(found: Data) -> str:
    """What computing keeps of its speed beside an exchange."""
    if "beside" not in found:
        return ""
    return f"; products that go on beside an all-reduce keep {100 * found['beside']:.0f} % of their speed"


def steps(ranks: str, found: Data) -> str:
    titles = (f"a step of {ranks}", "predicted", "measured", "without an exchange", "error")
    rows = [
        (
            f"{one['program']}, `{one['choice']}`",
            *(ms(one[f"{key}_ms"]) for key in ("predicted", "measured", "alone")),
            f"{100 * one['error']:+.0f} %",
        )
        for one in found["rows"]
    ]
    return table(titles, rows)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "opened": opened,
    "causes": causes,
    "gain": gain,
    "overlap": overlap,
    "overlap_gpu": overlap_gpu,
}
