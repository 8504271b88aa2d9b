"""The measured figures of `RESULTS.md`, one function a block: each says what the committed results say.

A block whose result is missing says so; so does a row of a table. Where a result is there for several machines, that of the
first of `rendering.MACHINES` counts. Every block names the machine, the versions, the day and the script.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import starmap

from cases.step_programs import STEPS

from pages import fusion_figures, many_ranks, pipeline
from pages.models_table import is_right
from pages.notebook_figures import lora, slow_layer
from pages.rendering import COLUMNS, SHORT, Data, Results, by_name, measured_on, mega, ms, said, step_ms, table, three

# --- whole steps ------------------------------------------------------------------------------------------------------


def steps(results: Results) -> str:
    """One row a program: ms, and the interval of the ratio over tracefuse's; then a row for each further variant of ours."""
    found = results.get("steps")
    if found is None:
        return "Not measured: no result of `steps.py` is committed."
    rows = [row for name in STEPS if name in found["cases"] for row in step_rows(name, found["cases"][name])]
    missing = [name for name in STEPS if name not in found["cases"]]
    machines = Counter(measured_on(c["environment"], "steps.py") for c in found["cases"].values())
    compiling = [compile_row(case) for case in found["cases"].values() if "error" not in case]
    return "\n\n".join([
        table(("ms a step, forward and backward; over tracefuse's", *SHORT, "limit"), rows),
        f"({'; '.join(machines)}{'; not run yet: ' if missing else ''}{', '.join(f'`{name}`' for name in missing)})",
        table(("seconds until the first step is done", *SHORT[1:5]), compiling),
    ])  # fmt: skip


def step_rows(name: str, case: Data) -> list[list[str]]:
    if "error" in case:
        return [[name, case["error"], *[""] * len(COLUMNS)]]
    programs = by_name(case["timing"])
    cells = [step_cell(column, programs.get(column), case["timing"]["failed"].get(column)) for column in COLUMNS]
    rows = [[case["title"], *cells, f"{three(case['limit']['ms'])} ({case['limit']['what']})"]]
    for variant in list(case["static"])[1:]:
        shown = [step_cell(c, programs.get(variant), None) if c == "tracefuse" else "" for c in COLUMNS]
        rows.append([f"… {variant}", *shown, ""])
    return rows


def step_cell(column: str, program: Data | None, reason: str | None) -> str:
    """ "17.8<br>0.61 to 0.62": ms, and the 99 % interval of the ratio over tracefuse's."""
    if program is None:
        return reason or "not measured"
    ratio, time = program["ratios"]["step"], three(step_ms(program))
    if program["name"] == "tracefuse":
        return f"**{time}**"
    return f"{time}<br>{ratio['low']:.2f} to {ratio['high']:.2f}"


def compile_row(case: Data) -> list[str]:
    """Seconds of the first run; of what was given up, why."""
    failed, seconds = case["timing"]["failed"], case["first_run_s"]
    cells = [f"{seconds[c]:.1f}" if c in seconds and c not in failed else failed.get(c, "") for c in COLUMNS[1:5]]
    return [case["title"], *cells]


# --- kernels ----------------------------------------------------------------------------------------------------------

KERNELS = {
    "rope_float32_128": "rotary embedding `[4096, 10, 32, 128]`, fp32",
    "rope_bfloat16_128": "the same in bf16",
    "rope_bfloat16_64": "the same, 64 of 128 rotated",
    "dqkv_large": "dQ, dK, dV `[32, 16, 2048, 64]` concatenated, summed, viewed",
    "layer_norm": "layer norm, 2048 wide",
    "rms_norm_by_hand": "RMS norm as LLaMA writes it",
    "softmax": "softmax",
    "bias_gelu": "bias + GELU",
    "swiglu": "SwiGLU",
    "dropout_residual": "dropout + residual",
    "cross_entropy": "cross-entropy over 50,257 classes",
}


@said("kernels.py", "kernels")
def kernels(found: Data, source: str) -> str:
    rows = []
    for name, title in KERNELS.items():
        by_phase = {row["phase"]: kernel_cell(row) for row in found["cases"].get(name, {"rows": []})["rows"]}
        rows.append([title, by_phase.get("forward", "not measured"), by_phase.get("backward", "")])
    return f"{table(('', 'forward', 'backward'), rows)}\n\n({source})"


def kernel_cell(row: Data) -> str:
    of_compile = "" if row["of_compile"] is None else f", {row['of_compile']:.2f}"
    return f"{row['percent_of_copy']:.0f} %{of_compile}, {row['of_eager']:.2f}"


# --- the five answers -------------------------------------------------------------------------------------------------


@said("cpu_leaf.py", "cpu_leaf")
def leaf(found: Data, source: str) -> str:
    parts = {label.split(" @")[0]: (label, us / 1e3) for label, us, _ in found["measured"]["bars"]}
    (_, wait_ms), (copy, copy_ms), (_, host_ms) = (parts[name] for name in ("wait", "copy", "host"))
    gains = [" → ".join(ms(step_ms(p)) for p in trial["timing"]["programs"]) for trial in found["trials"]]
    return (
        f"Of the {ms(found['event_us'] / 1e3)} that the host spends in ToCopyBackward0 of a 640 MiB leaf, {ms(wait_ms)} are "
        f"waiting for queued work, {ms(copy_ms)} the {copy.replace('@', 'at')}, {ms(host_ms)} the host. *Try fix*: "
        f"{gains[0]} a step with the leaf on the GPU, {gains[1]} with its gradient copied into pinned memory ({source})."
    )


@said("dqkv.py", "dqkv")
def packed(found: Data, source: str) -> str:
    def sentence(case: Data, shape: str) -> str:
        programs = by_name(case["complaint"]["timings"]["graphed"])
        alone, mine, eager = (step_ms(programs[name]) for name in ("alone", "packed", "eager cudnn"))
        share = case["complaint"]["of_alone"]["packed"]
        summed = ", ".join(f"{name} {ms(step_ms(programs[of]))}" for name, of in SUMMED.items())
        beside = f"with the bias's sum {summed}, eager {ms(eager)}"
        return f"at `{shape}` {ms(alone)} alone, {ms(mine)} packed ({share:.3f} of it); {beside}"

    shapes = {name: f"[{name.replace('x', ', ')}]" for name in found["cases"]}
    cases = "; ".join(sentence(case, shapes[name]) for name, case in found["cases"].items())
    return f"Attention's backward in bf16, as CUDA graphs: {cases} ({source})."


SUMMED = {"tracefuse": "packed, summed", "`torch.compile`": "torch.compile"}


def depth(results: Results) -> str:
    chain, gpt = results.get("depth_chain"), results.get("depth_gpt")
    if chain is None or gpt is None:
        return "Not measured: no result of `depth.py` is committed."
    mine = {r["weight"]: r for r in chain["rows"] if r["layers"] == 128 and r["compiler"] == "tracefuse"}
    weights = " and ".join(
        f"{r['total_s']:.1f} s at weight {weight:g} ({r['unique_kernels']} unique kernels for {r['kernels']} calls)"
        for weight, r in mine.items()
    )
    (deep,) = (r for r in gpt["rows"] if r["layers"] == 12 and r["when"] == "cold" and r["compiler"] == "tracefuse")
    peers = [
        next(r["total_s"] for r in d["rows"] if r["compiler"] == "torch.compile" and r["layers"] == n)
        for d, n in ((chain, 128), (gpt, 12))
    ]
    return (
        f"From cold caches a residual chain of 128 layers compiles in {weights}, `torch.compile` takes {peers[0]:.1f} s; "
        f"a 12-layer GPT in {deep['total_s']:.1f} s with {deep['unique_kernels']} kernels for {deep['kernels']} calls, "
        f"`torch.compile` {peers[1]:.1f} s ({measured_on(chain['environment'], 'depth.py')})."
    )


# --- memory, trust, the view ------------------------------------------------------------------------------------------

BUDGETS = {100: 100, 70: 75, 50: 50, 30: 25, 10: 10}
"""Ours beside the nearest budget of torch.compile's that was measured, in percent."""


@said("remat.py", "remat")
def budgets(found: Data, source: str) -> str:
    rows = {row["name"]: row for row in found["rows"]}
    lines = []
    for mine, other in BUDGETS.items():
        row, peer = rows[f"weight 1, {mine}%"], rows.get(f"torch.compile, {other}%")
        time = ms(row["step_ms"]["median"])
        beside = (
            "not measured"
            if peer is None
            else f"{other} %: {mega(peer['peak_nbytes'])}, {ms(peer['step_ms']['median'])}"
        )
        lines.append([f"{mine} %", mega(row["saved_nbytes"]), mega(row["peak_nbytes"]), time, beside])
    eager = rows["eager"]
    titles = ("of what the forward saves", "saved, MB", "peak, MB", "tracefuse", "`torch.compile`'s budget: peak, time")
    after = f"Eager: {mega(eager['peak_nbytes'])} MB, {ms(eager['step_ms']['median'])}. Static over measured peak"
    agreement = found["verdicts"]["static over measured peak"].split(" (")[0]
    return f"{table(titles, lines)}\n\n{after}: {agreement} ({source})."


@said("memory.py", "memory")
def memory(found: Data, source: str) -> str:
    worst = max(abs(row["ratio"] - 1) for row in found["rows"])
    cases = ", ".join(dict.fromkeys(row["case"] for row in found["rows"]))
    return (
        f"Static peaks of {len(found['rows'])} programs ({cases}; captured, optimised, as eager frees) are within "
        f"{100 * worst:.1f} % of the allocator's ({source})."
    )


@said("aa.py", "aa")
def equal(found: Data, source: str) -> str:
    seen = sum(
        any(c[phase]["verdict"] in ("faster", "slower") for phase in PHASES if phase in c) for c in found["equal"]
    )
    few = sum(c["step"]["verdict"].startswith("too few") for c in found["equal"])
    slower = sum(c["step"]["verdict"] == "slower" for c in found["planted"])
    return (
        f"A GPT's step compared with itself {len(found['equal'])} times, {found['budget_s']:g} s each: a difference seen "
        f"{seen} times, too few rounds to say {few} times; with {100 * found['planted_share']:.1f} % more work it was called "
        f"slower in {slower} of {len(found['planted'])} ({source})."
    )


PHASES = ("forward", "backward", "step")


@said("view.py", "view")
def view(found: Data, source: str) -> str:
    seconds = found["seconds"]
    toggles = [s for name, s in seconds.items() if name.endswith((" off", " on"))]
    static, measured = found["summary"]["peak_bytes"], found["summary"]["measured_peak_bytes"]
    peaks = " and ".join(f"{a / 1e9:.3f} and {b / 1e9:.3f} GB" for a, b in zip(static, measured, strict=True))
    return (
        f"The view of that GPT opens in {seconds['open']:.1f} s, a toggle takes {min(toggles):.2f} to {max(toggles):.2f} s "
        f"until the new view is sent, its page has {found['page_nbytes'] / 1e6:.2f} MB; static and measured peaks are, "
        f"captured and with the passes, {peaks} ({source})."
    )


def recording(results: Results) -> str:
    machines = [
        f"{'; '.join(starmap(recording_of, found['costs'].items()))} "
        f"({found['layers']} layers, {measured_on(found['environment'], 'recorder.py')})"
        for found in results.on_each_machine("recorder")
    ]
    if not machines:
        return "Not measured: no result of `recorder.py` is committed."
    return (
        f"Recording a GPT's step takes {'; '.join(machines)}. A dispatch mode in Python that does nothing takes the time in "
        "brackets."
    )


def recording_of(title: str, cost: Data) -> str:
    times = f"{cost['ratio'][0]:.2f} × the step's time [{cost['floor_ratio'][0]:.2f}]"
    return f"{times} and {cost['peak_ratio']:.3f} × its peak memory where it is {title}"


@said("first_view.py", "first_view")
def first_view(found: Data, source: str) -> str:
    legs = [f"{name} {seconds:.0f} s" for name, seconds in found["seconds"].items()]
    return (
        f"From a machine with Python alone to the first explorer in JupyterLab {sum(found['seconds'].values()):.0f} s passed: "
        f"{', '.join(legs)} ({source})."
    )


@said("train.py", "train")
def train(found: Data, source: str) -> str:
    """How far losses are from eager's, and one step."""
    sizes, far, programs = found["sizes"], found["greatest_distance_of_losses"], by_name(found["timing"])
    distances = [f"{name} {distance:.2f}" for name, distance in far.items()]
    times = [f"{name} {ms(step_ms(program))}" for name, program in programs.items()]
    return (
        f"A GPT of {sizes['layers']} layers, {sizes['width']} wide, float32 weights under bfloat16 autocast, over "
        f"{sizes['steps']} steps of AdamW: the loss is never further from eager's than {', '.join(distances)}. "
        f"A step with its optimizer: {', '.join(times)} ({source})."
    )


@said("optimizer_step.py", "optimizer_step")
def update(found: Data, source: str) -> str:
    """Clipping and the optimizer alone."""
    programs = by_name(found["timings"]["graphed"])
    shown = {"ours": "tracefuse", "torch": "PyTorch", "fused AdamW": "AdamW alone", "clip": "clipping alone"}
    times = [f"{title} {ms(step_ms(programs[name]))}" for name, title in shown.items()]
    return (
        f"Clipping by the global norm and `AdamW(fused=True)` on {found['tensors']} float32 tensors with "
        f"{found['elements'] / 1e6:.0f} million numbers, as CUDA graphs: {', '.join(times)} ({source})."
    )


@said("train_step.py", "train_step_times", on_each=True)
def whole_step(found: Data, source: str) -> str:
    """One training step with its update."""
    sizes, timing = found["sizes"], found["timing"]
    times = [f"{name} {ms(step_ms(program))}" for name, program in by_name(timing).items()]
    return (
        f"A step with clipping and AdamW of a GPT of {sizes['layers']} layers, {sizes['width']} wide, with "
        f"{sizes['vocab']:,} tokens, float32 weights under bfloat16 autocast, {sizes['batch']} by {sizes['length']}: "
        f"{', '.join(times)} ({source})."
    )


@said("train_step.py", "train_step_lora_times", on_each=True)
def lora_step(found: Data, source: str) -> str:
    return _other_step(found, source)


@said("train_step.py", "train_step_resnet_times", on_each=True)
def resnet_step(found: Data, source: str) -> str:
    return _other_step(found, source)


def _other_step(found: Data, source: str) -> str:
    """One training step of another program, and what became of the columns that failed."""
    times = [f"{name} {ms(step_ms(program))}" for name, program in by_name(found["timing"]).items()]
    failed = [f"; {name}: {reason}" for name, reason in found["failed"].items()]
    return f"A step with clipping and AdamW of {found['title']}: {', '.join(times)}{''.join(failed)} ({source})."


def gibi(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


@said("train_step.py", "train_step_peaks")
def whole_step_memory(found: Data, source: str) -> str:
    """What the process of each column holds at most."""
    held = [f"{name} {_held(one)}, {_held(one['expandable'])}" for name, one in found["peaks"].items()]
    return (
        "In a process of its own, weights, optimizer state and pools of memory included, the GPT's step holds at most, with "
        f"PyTorch's allocator as it is and with `expandable_segments:True`: {'; '.join(held)} ({source})."
    )


def _held(found: Data) -> str:
    return found.get("error") or gibi(found["reserved_nbytes"])


@said("loops.py", "loops", on_each=True)
def loops(found: Data, source: str) -> str:
    """What one step of people's training loops is, captured in the middle of a run."""
    rows = found["rows"]
    names = ", ".join(row["loop"] for row in rows)
    unharmed = sum(row["unharmed"] for row in rows)
    exact = sum(row["repeats"] and not row["differing"] for row in rows)
    rest = [row["loop"] for row in rows if not row["repeats"]]
    within = f"; eager does not repeat itself in {', '.join(rest)}" if rest else ""
    return (
        f"Training loops with one line around them ({names}): the third step of each was captured; {unharmed} of {len(rows)} "
        f"runs had the losses of a run without it, and {exact} of {len(rows)} captured steps replay bit for bit{within} "
        f"({source})."
    )


@said("train_step.py", "train_step_curves", on_each=True)
def curves(found: Data, source: str) -> str:
    """How far the losses of many steps are from eager's."""
    far = [f"{name} {distance:.2g}" for name, distance in found["greatest_distance_of_losses"].items()]
    return (
        f"Over {found['sizes']['steps']} steps, resumed from a checkpoint halfway, the loss is never further from eager's "
        f"than: {', '.join(far)} ({source})."
    )


@said("models.py", "models")
def models(found: Data, source: str) -> str:
    rows = [row for row in found["models"] if row["replay"]]
    tried, dtypes = ({row[name] for row in rows} for name in ("model", "dtype"))
    exact = sum(row["replay"] == "bit for bit" for row in rows)
    wrong = [f"{row['model']} in {row['dtype']}" for row in rows if not is_right(row)]
    not_run = [row["model"] for row in found["models"] if row["model"] not in tried]
    exported = sum(row["exported"] == "runs" for row in rows)
    rest = f"; with something left: {', '.join(wrong)}" if wrong else ""
    rest += f"; not run: {', '.join(dict.fromkeys(not_run))}" if not_run else ""
    return (
        f"Training steps of {len(tried)} models in {' and '.join(sorted(dtypes))}, {len(rows)} in all: {exact} replay bit for "
        f"bit; with all passes {len(rows) - len(wrong)} are as near to eager as rounding of their inputs explains; {exported} "
        f"exported files check themselves in a fresh process{rest} ({source}; each of them: `tests/bench/results/models.md`)."
    )


BLOCKS: dict[str, Callable[[Results], str]] = {
    "leaf": leaf, "slow_layer": slow_layer, "packed": packed, "depth": depth, "lora": lora, "steps": steps,
    "kernels": kernels, "budgets": budgets, "memory": memory, "equal": equal, "view": view, "recording": recording,
    "models": models, "train": train, "first_view": first_view, "update": update, "whole_step": whole_step, "curves": curves,
    "whole_step_memory": whole_step_memory, "lora_step": lora_step, "resnet_step": resnet_step, "loops": loops,
    **fusion_figures.BLOCKS, **many_ranks.BLOCKS, **pipeline.BLOCKS,
}  # fmt: skip
"""By the name that the marker in `RESULTS.md` has."""
