"""A leaf that lies on the CPU costs a copy in each backward: what ToCopyBackward0 consists of there, and what each fix gains.

    python tests/bench/cpu_leaf.py --check --out cpu_leaf.json

The program is a rotary embedding of `[4096, 10, 32, 128]` in fp32: the step moves the leaf to the GPU, and each backward
copies 640 MiB of gradient to the host. The benchmark prints the finding from the trace alone and from a profiled replay, the
parts of the copy beside its event, the same event in the user's own step, what replays say of each fix, and the user's own
code with the leaf on the CPU, without and with a `.grad` to add to, and on the GPU.

Without a GPU the step casts where it would move, its trace is typed as a GPU's, and the benchmark prints what needs no GPU.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.diagnose.diagnose import Findings, diagnose
from tracefuse.execution.program import Replays
from tracefuse.findings.finding import Case, Finding
from tracefuse.measure.op_times import Transfer, modelled
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.trace import human_bytes
from tracefuse.timeline.events import recorded
from tracefuse.timeline.replayed import Timeline, measured_on, profiled
from tracefuse.variant import Variant

sys.path.append(str(Path(__file__).parents[1] / "samples"))
from cuda_traces import with_leaf_on_the_cpu
from programs import apply_rope

SHAPE, SMALL = (4096, 10, 32, 128), (64, 2, 4, 32)
NAME = "cpu-leaf"
OFF_BY = 0.05


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="fail unless the finding says what it must")
    arguments = options.parse_args()
    torch.manual_seed(0)
    shape = SMALL if arguments.small else SHAPE
    found = on_gpu(shape, arguments) if arguments.device == "cuda" else on_cpu(shape)
    failed = problems(found, 4 * torch.Size(shape).numel()) if arguments.check else []
    machine = environment(arguments.device)
    record = {"benchmark": "cpu_leaf", "shape": shape, "environment": machine, **found, "failed": failed}
    write(arguments.out, record)
    if arguments.check:
        print("\nfailed:", *(failed or ["nothing"]), sep="\n  ")
    if failed:
        raise SystemExit(1)


def captured(shape: tuple[int, ...], device: str) -> tuple[tracefuse.Capture, tuple[Tensor, Tensor, Tensor]]:
    """One step; and its leaf, table of angles and tangent."""
    input_ts = torch.randn(shape, requires_grad=True)
    freqs, tangent = torch.randn(shape[0], 1, 1, shape[-1], device=device), torch.randn(shape, device=device)
    with tracefuse.capture() as c:
        moved = input_ts.cuda() if device == "cuda" else input_ts.double()
        out = apply_rope(moved, freqs)
        out.backward(tangent)
    return c, (input_ts, freqs, tangent)


def on_cpu(shape: tuple[int, ...]) -> dict[str, Any]:
    """The finding of a trace whose types lie on a GPU."""
    capture, _ = captured(shape, "cpu")
    trace = with_leaf_on_the_cpu(capture.trace, "input_ts")
    finding = the_finding(diagnose(Case(capture.program, trace, modelled(trace))))
    print(f"from the trace alone\n{finding}\n\nno GPU here: nothing is replayed")
    return {"static": told(finding)}


def on_gpu(shape: tuple[int, ...], arguments: Namespace) -> dict[str, Any]:
    capture, tensors = captured(shape, "cuda")
    variant = capture.variant(Config.off())
    static = the_finding(variant.findings())
    print(f"from the trace alone\n{static}\n")
    finding, copy = measured_finding(variant)
    parts = sum(bar.us for bar in finding.bars if bar.label != "other")
    print(f"from a profiled replay\n{finding}")
    print(
        f"  without other {parts / 1e3:.1f} ms, the event {copy.event_us / 1e3:.1f} ms: {parts / copy.event_us:.1%}\n"
    )
    own_us = own_event_us(*tensors)
    print(f"ToCopyBackward0 in the user's own step: {own_us / 1e3:.1f} ms on the host (one profiled step)\n")
    # A step takes half a second, and a verdict several rounds.
    trials = [variant.try_fix(fix, budget_s=2 * arguments.budget) for fix in finding.trials]
    print(*trials, sep="\n")
    timing = eager(*tensors, arguments)
    print(f"\nthe user's own code\n{timing}")
    return {
        "static": told(static),
        "measured": told(finding),
        "event_us": copy.event_us,
        "own_event_us": own_us,
        "trials": [
            {
                "fix": one.fix.kind,
                "said": str(one),
                "difference": one.difference.gradients,
                "timing": one.timing.to_json(),
            }
            for one in trials
        ],
        "eager": timing.to_json(),
    }


def measured_finding(variant: Variant) -> tuple[Finding, Transfer]:
    """The finding with measured times, and the copy that it is about."""
    program = profiled("captured", variant)
    times = Timeline(measured_on([program]), (program,)).op_times(0)
    finding = the_finding(variant.findings(times))
    return finding, times.transfers[finding.values[0]]


def the_finding(found: Findings) -> Finding:
    return next(one for one in found if one.id == NAME)


def told(finding: Finding) -> dict[str, Any]:
    bars = [[bar.label, bar.us, bar.provenance] for bar in finding.bars]
    return {"text": str(finding), "title": finding.title, "source": finding.source, "bars": bars}


def own_event_us(leaf: Tensor, freqs: Tensor, tangent: Tensor) -> float:
    """How long autograd's ToCopyBackward0 takes on the host in the user's own step."""

    def step() -> None:
        leaf.grad = None
        apply_rope(leaf.cuda(), freqs).backward(tangent)

    own = [event for event in recorded(step) if event.name.endswith("ToCopyBackward0") and not event.on_gpu]
    return max(event.duration_ns for event in own) / 1e3


def eager(leaf: Tensor, freqs: Tensor, tangent: Tensor, arguments: Namespace) -> Timing:
    on_cpu, adding, on_gpu = leaf.detach().requires_grad_(), leaf.detach().requires_grad_(), leaf.detach().cuda()
    programs = {
        "leaf on the CPU": user_step(on_cpu, freqs, tangent, adds=False),
        "leaf on the CPU, adding to .grad": user_step(adding, freqs, tangent, adds=True),
        "leaf on the GPU": user_step(on_gpu.requires_grad_(), freqs, tangent, adds=False),
    }
    return measure(programs, device="cuda", budget_s=arguments.budget)


def user_step(leaf: Tensor, freqs: Tensor, tangent: Tensor, adds: bool) -> Replays:
    """A training step as it is written; with `adds`, nobody clears the gradient in between."""

    def forward() -> tuple[tuple[Tensor]]:
        return ((apply_rope(leaf.cuda(), freqs),),)

    def backward(state: tuple[tuple[Tensor]]) -> tuple[Tensor | None]:
        if not adds:
            leaf.grad = None
        state[0][0].backward(tangent)
        return (leaf.grad,)

    return Replays(forward, backward, compared=not adds)


def problems(found: dict[str, Any], nbytes: int) -> list[str]:
    """What of the issue's line does not hold."""
    wrong = []
    for how in ("static", "measured"):
        text = found[how]["text"] if how in found else None
        wanted = "`input_ts`", human_bytes(nbytes), "device move", "input_ts.", ".py:"
        wrong += [f"{how}: it does not say {word}" for word in wanted if text is not None and word not in text]
    if "measured" in found:
        parts = sum(us for label, us, _ in found["measured"]["bars"] if label != "other")
        if abs(parts / found["event_us"] - 1) > OFF_BY:
            wrong.append(f"the bars add up to {parts / 1e3:.1f} ms of {found['event_us'] / 1e3:.1f}")
        wrong += [one["said"] for one in found["trials"] if "(faster)" not in one["said"]]
        wrong += [one["said"] for one in found["trials"] if one["difference"] != 0]
    return wrong


if __name__ == "__main__":
    main()
