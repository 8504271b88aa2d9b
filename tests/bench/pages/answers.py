"""README's two tables of figures: five questions with their answers, and whole training steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cases.step_programs import STEPS

from pages.notebook_figures import Printed, of_notebook
from pages.rendering import (
    COLUMNS,
    SHORT,
    Data,
    Results,
    by_name,
    device_of,
    measured_on,
    ms,
    said,
    step_ms,
    table,
    three,
)


@dataclass(frozen=True)
class Question:
    """What people ask, the notebook that answers it, the answer in a sentence, and what was measured of it."""

    text: str
    notebook: str
    answer: str
    measured: Callable[[Results], str]

    def row(self, results: Results) -> list[str]:
        return [f"[{self.text}](notebooks/{self.notebook}.ipynb)", self.answer, self.measured(results)]


@said("cpu_leaf.py", "cpu_leaf")
def leaf(found: Data, _: str) -> str:
    times = [ms(step_ms(program)) for program in found["trials"][0]["timing"]["programs"]]
    return f"a step took {times[0]}, and takes {times[1]} with the leaf on the GPU ({device_of(found['environment'])})"


@of_notebook("03_why_is_my_backward_slow")
def slow_layer(found: Printed) -> str:
    (share,) = found.find(r"^\w+ takes most of the backward, (\d+ %)")
    before, after = (found.ms(name, "step") for name in ("captured", "optimised"))
    return f"the head takes {share} of the backward; with all passes a step takes {after} instead of {before} ({found.device})"


@said("dqkv.py", "dqkv")
def packed(found: Data, _: str) -> str:
    programs = by_name(found["cases"]["16x12x1024x64"]["complaint"]["timings"]["graphed"])
    alone, packed = (ms(step_ms(programs[name])) for name in ("alone", "packed"))
    return f"attention's backward takes {alone}, and {packed} into one buffer ({device_of(found['environment'])})"


@said("depth.py", "depth_chain")
def depth(found: Data, _: str) -> str:
    deep = [row for row in found["rows"] if row["layers"] == 128 and row["compiler"] == "tracefuse"]
    most = max(deep, key=lambda row: row["unique_kernels"])
    return (
        f"{most['layers']} layers compile in {most['total_s']:.1f} s, with {most['unique_kernels']} kernels for "
        f"{most['kernels']} calls ({device_of(found['environment'])})"
    )


@of_notebook("06_paying_for_frozen_layers")
def lora(found: Printed) -> str:
    before, after = (found.ms(name, "backward") for name in ("captured", "optimised"))
    return f"a backward takes {after} instead of {before} where only LoRA adapters are trained ({found.device})"


QUESTIONS = (
    Question(
        "Why is `ToCopyBackward0` so large in my profile?",
        "02_why_is_ToCopyBackward0_so_large",
        "A leaf tensor lies on the CPU, so each backward copies its gradient to the host.",
        leaf,
    ),
    Question(
        "Why is my backward slow, and which layer's?",
        "03_why_is_my_backward_slow",
        "The view shows the time of each module, and findings with your line and what a fix is worth.",
        slow_layer,
    ),
    Question(
        "Why are dQ, dK and dV concatenated at all?",
        "04_the_concatenation_that_should_not_exist",
        "Attention allocates three gradients. With cuDNN it can write them into one buffer, and no copy is left.",
        packed,
    ),
    Question(
        "Can a rematerialisation weight make compiling explode?",
        "05_the_weight_that_breaks_the_compiler",
        "Not here: equal layers share a kernel, at any depth and weight.",
        depth,
    ),
    Question(
        "Do I pay for layers that I froze?",
        "06_paying_for_frozen_layers",
        "The pass `freeze` drops their gradients and what the forward saved for them.",
        lora,
    ),
)


def answers(results: Results) -> str:
    return table(("question", "answer", "measured"), [question.row(results) for question in QUESTIONS])


def whole_steps(results: Results) -> str:
    """One row a program, with medians in ms; where a column has no time, the reason."""
    found = results.get("steps")
    if found is None:
        return "Not measured: no result of `steps.py` is committed."
    cases = {name: found["cases"][name] for name in STEPS if name in found["cases"]}
    sources = dict.fromkeys(measured_on(case["environment"], "steps.py") for case in cases.values())
    rows = [result_row(name, case) for name, case in cases.items()]
    return f"{table(('ms a step', *SHORT, 'limit'), rows)}\n\n({'; '.join(sources)})"


def result_row(name: str, case: Data) -> list[str]:
    if "error" in case:
        return [name, case["error"], *[""] * len(COLUMNS)]
    programs, failed = by_name(case["timing"]), case["timing"]["failed"]
    times = {column: three(step_ms(programs[column])) for column in COLUMNS if column in programs}
    cells = [times.get(column) or failed.get(column, "not measured") for column in COLUMNS]
    return [case["title"], *cells, three(case["limit"]["ms"])]


BLOCKS: dict[str, Callable[[Results], str]] = {"answers": answers, "steps": whole_steps}
"""By the name that the marker in README has."""
