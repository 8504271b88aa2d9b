"""Findings about the surroundings: modes that slow everything down, and tensor cores that a setting leaves idle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tracefuse.device.target import chosen, float32_rates
from tracefuse.diagnose.needless_work import is_of_classes, odd_width
from tracefuse.findings.finding import Case, Finding, Severity
from tracefuse.lint.facts import line_saying
from tracefuse.measure.peaks import known_peaks
from tracefuse.optimizers.costs.cost import Peaks, flops, roofline_seconds
from tracefuse.optimizers.costs.datasheets import TARGETS, datasheet_of
from tracefuse.optimizers.ops import arguments, does_work, grouped
from tracefuse.optimizers.trace import HALVES, is_on_gpu, line_of, origin, val
from tracefuse.tables.folding import work
from tracefuse.text import counted, share_text, time_text

_FLAGS = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel: unset CUDA_LAUNCH_BLOCKING and restart the kernel",
    "anomaly mode": "autograd checks every gradient and keeps tracebacks: torch.autograd.set_detect_anomaly(False)",
    "deterministic algorithms": "some ops take slower kernels: torch.use_deterministic_algorithms(False) if you can",
    "profiler": "every op is timed and noted: leave the profiler out, or on for a few steps (torch.profiler.schedule)",
}
# For programs with convolutions on a GPU: the value that slows, how gravely, and what to do.
_CUDNN: dict[str, tuple[str, Severity, str]] = {
    "cudnn": ("off", "medium", "convolutions take ATen's slower kernels: torch.backends.cudnn.enabled = True"),
    "cudnn benchmark": (
        "off",
        "low",
        "cuDNN guesses the algorithm of each convolution; where shapes stay: torch.backends.cudnn.benchmark = True before the "
        "first step (a process keeps what was guessed); a compiled step searches those of volumes by itself",
    ),
}
SLOW, FASTER = 40, 2
"""How often a convolution takes what its bytes and arithmetic do at best, so that cuDNN has guessed badly: on an H200 all such
dense ones of `tests/bench/fusions/convolutions.py` have an algorithm that is at least so many times as fast."""
SHORT_US = 200.0
"""Of what takes less, launches are a large part."""
AMPERE = 8
LARGE = 1 / 4
"""The share of the arithmetic of matmuls from where on the module that does it is named."""
_TF32 = 'torch.set_float32_matmul_precision("high")'
_AUTOCAST = 'with torch.autocast("cuda", torch.bfloat16):'


def modes_that_slow(case: Case) -> Iterator[Finding]:
    """What was switched on, or off, when the program ran."""
    known = case.program.environment
    for name, remedy in _FLAGS.items():
        if known.get(name) == "on":
            yield from _mode(case, name, "on", "medium", remedy, [], line_saying(case, _SAID[name]))
    convolutions = (
        [n for n in case.trace.ops if does_work(n) and work(n) == "convolution"] if is_on_gpu(case.trace) else []
    )
    for name, (value, severity, remedy) in _CUDNN.items():
        if name == "cudnn benchmark" and known.get("cudnn") == "off":
            continue  # it guesses nothing
        if convolutions and known.get(name) == value:
            peaks = _ran_with(case) if name == "cudnn benchmark" and case.times.is_measured else None
            if peaks is not None and (slow := _guessed_badly(case, convolutions, peaks)):
                yield from _guessed(case, slow, len(convolutions), remedy, peaks)
                continue
            yield from _mode(case, name, value, severity, remedy, convolutions, line_of(convolutions[0]))


def _guessed_badly(case: Case, convolutions: Sequence[fx.Node], peaks: Peaks) -> list[fx.Node]:
    """The convolutions that were measured to take far longer than they need by the rates of the GPU that ran them: of
    those that tensor cores run, since others have no fast algorithm."""
    dense = [n for n in convolutions if _has_tensor_cores(n, case) and n.name not in case.times.predicted]
    long = [node for node in dense if case.us([node]) > SHORT_US]
    return [node for node in long if case.us([node]) > SLOW * 1e6 * roofline_seconds(node, peaks)]


def _has_tensor_cores(convolution: fx.Node, case: Case) -> bool:
    """Whether it mixes all channels in a dtype of tensor cores."""
    x = val(arguments(convolution)["input"])
    is_fast = x.dtype in HALVES or (x.dtype is torch.float32 and case.program.convolutions["tf32"])
    return is_fast and arguments(convolution)["groups"] == 1


def _ran_with(case: Case) -> Peaks | None:
    """The rates of the GPU on which the program ran: as measured there, else by its datasheet; None without either."""
    device, tf32 = case.program.environment.get("device", ""), case.program.convolutions["tf32"]
    found = known_peaks("cuda")
    if found is not None and device == torch.cuda.get_device_name():
        return found.roofline(case.program.tf32, tf32)
    return datasheet_of(device, case.program.tf32, tf32)


def _guessed(case: Case, slow: Sequence[fx.Node], count: int, remedy: str, peaks: Peaks) -> Iterator[Finding]:
    us, slowest = case.us(slow), max(slow, key=lambda node: case.us([node]))
    times = case.us([slowest]) / (1e6 * roofline_seconds(slowest, peaks))
    spared = us * (1 - 1 / FASTER)
    yield from case.finding(
        _IDS["cudnn benchmark"],
        case.severity(spared) or "low",
        f"cuDNN guessed a slow algorithm for {len(slow)} of {counted(count, 'convolution')}",
        (
            ("they take", case.timed(slow)),
            ("the slowest", f"{times:.0f} times what its bytes and arithmetic take at best"),
        ),
        slow,
        slowest,
        remedy,
        f"about {time_text(spared)} of the step's {time_text(case.step_us)}, {share_text(spared, case.step_us)} "
        f"({case.beside_step(f'predicted: its search finds algorithms {FASTER} times as fast and more for such ones')})",
        kind="predicted",
        worth_us=spared,
        worth_share=spared / case.step_us if case.step_us else None,
    )


_SAID = {
    "CUDA_LAUNCH_BLOCKING": re.compile(r"CUDA_LAUNCH_BLOCKING"),
    "anomaly mode": re.compile(r"detect_anomaly\(|AnomalyMode\("),
    "deterministic algorithms": re.compile(r"use_deterministic_algorithms\("),
    "profiler": re.compile(r"\bprofile\("),
}
"""How the line is found that switches a mode on: no operator knows it."""
_IDS = {
    "CUDA_LAUNCH_BLOCKING": "launch-blocking",
    "anomaly mode": "anomaly-mode",
    "deterministic algorithms": "deterministic-mode",
    "profiler": "profiler-on",
    "cudnn": "cudnn-off",
    "cudnn benchmark": "cudnn-benchmark-off",
}


def _mode(
    case: Case, name: str, value: str, severity: Severity, remedy: str, ops: Sequence[fx.Node], at: str
) -> Iterator[Finding]:
    yield from case.finding(
        _IDS[name],
        severity,
        f"{name} was {value} when it ran",
        ((name, value), *([("convolutions", str(len(ops)))] if ops else [])),
        ops,
        at,
        remedy,
        "not known from one run: measure without it",
    )


def matmuls_without_tf32(case: Case) -> Iterator[Finding]:
    """Matmuls of float32 whose tensor cores a setting keeps out of them: of the GPU that ran them, or of the one that a step
    on a CPU is modelled for."""
    known, ran_there = case.program.environment, is_on_gpu(case.trace)
    has_tensor_cores = int(known.get("capability", "0").partition(".")[0]) >= AMPERE
    if known.get("tf32") != "False" or not (has_tensor_cores if ran_there else case.times.kind == "modelled"):
        return
    ops = [n for n in case.trace.ops if _is_single(n) and val(n).is_cuda == ran_there]
    peaks = _rates(known.get("device")) if ran_there else _modelled_rates(case.times.provenance)
    as_fp32, as_tf32 = (1e6 * sum(roofline_seconds(n, one) for n in ops) for one in peaks)
    if not ops or as_fp32 == as_tf32:
        return
    is_measured = case.times.is_measured
    # The step may be modelled with one rate for matmuls of every dtype.
    whole = case.step_us if is_measured else case.step_us - case.us(ops) + as_fp32
    spared = (case.us(ops) if is_measured else as_fp32) * (1 - as_tf32 / as_fp32)
    slow, fast = (one.flops_rate(torch.float32) / 1e12 for one in peaks)
    source = f"predicted: {case.times.provenance}, rates modelled" if is_measured else "modelled"
    severity, largest = case.severity(spared, whole), max(ops, key=flops)
    yield from case.finding(
        "tf32-off",
        "medium" if severity == "high" else severity,  # who wants all bits of float32 has it right
        f"{_which(ops)} of float32 {'' if ran_there else 'would '}run without tensor cores: TF32 is off",
        (("TF32", "off"), ("rates", f"{slow:.0f} and {fast:.0f} TFLOP/s, {peaks[0].source}")),
        ops,
        largest,
        f"`{_TF32}`, if 10 bits of mantissa in the products are enough{_padded(largest)}; or bfloat16, faster still: "
        f"`{_AUTOCAST}`",
        f"at most {time_text(spared)} of {time_text(whole)} a step, {share_text(spared, whole)} ({source})",
        kind="predicted" if is_measured else "modelled",
        code=_TF32,
        worth_us=spared,
        worth_share=spared / whole,
    )


def _which(matmuls: Sequence[fx.Node]) -> str:
    """`219 matmuls`; `lm_head and 216 more matmuls` where one module does a large part of their arithmetic, and twice as
    much as any other, as a head does."""
    modules = grouped(matmuls, lambda node: origin(node).module)
    work_of = Counter({module: sum(map(flops, nodes)) for module, nodes in modules.items()})
    (most, much), *others = work_of.most_common(2)
    left = len(matmuls) - len(modules[most])
    is_large = bool(others) and much >= LARGE * work_of.total() and much >= 2 * others[0][1]
    if not is_large or not any(map(str.isalpha, most)):  # of a path of numbers nobody knows what it is
        return counted(len(matmuls), "matmul")
    return f"`{most}` and {left} more matmul{'s' * (left > 1)}"


def _padded(matmul: fx.Node) -> str:
    """What tensor cores ask for besides, of rows that are not aligned."""
    found = odd_width(matmul)
    if found is None:
        return ""
    width, padded = found
    return f", and vocab_size={padded}" if is_of_classes(matmul, width) else f", and {width:,} padded to {padded:,}"


def _is_single(node: fx.Node) -> bool:
    return work(node) == "matmul" and val(node).dtype == torch.float32


def _modelled_rates(provenance: str) -> tuple[Peaks, Peaks]:
    """The same of the GPU whose datasheet modelled the times, which a reader of the view may choose."""
    sheet = next((one for one in TARGETS.values() if f" {one.source}," in provenance), None)
    return float32_rates(None) if sheet is None else (sheet.peaks(tf32=False), sheet.peaks(tf32=True))


def _rates(gpu: str | None) -> tuple[Peaks, Peaks]:
    """The speeds of float32 without and with tensor cores: the chosen target's; else this machine's where they were measured,
    else those of a datasheet."""
    found = known_peaks("cuda")
    if chosen() is not None or found is None or not {"fp32", "tf32"} <= found.flops_per_s.keys():
        return float32_rates(gpu)
    return found.roofline(tf32=False), found.roofline(tf32=True)
