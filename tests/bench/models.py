"""Models that people train, small and from their configurations, are captured, replayed, optimised, compiled and exported.

    python tests/bench/models.py --out models.json                          all, in float64 and float32; on a GPU float32, bf16
    python tests/bench/models.py --model llama --model resnet50 --dtype float32
    python tests/bench/pages/models_table.py models_cpu.json models_h200.json     writes what was found as one page

Each model does one training step. The benchmark says whether the replay of what was captured is eager's, bit for bit; how
far results and gradients of the compiled program, all passes on, are from it, and how far those of the captured program move
if each of its inputs moves by one rounding; and whether the exported file checks itself in a process of its own. Models of
packages that are not installed are left out, and the table says so.
"""

from __future__ import annotations

import importlib.util
import operator
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from cases.model_zoo import MODELS, NOT_IN_FLOAT64, PACKAGES
from pages.models_table import is_right, table
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.errors import ExportError, TracefuseError
from tracefuse.execution.agreement import max_abs_difference
from tracefuse.optimizers.trace import Trace, tensors

sys.path.append(str(Path(__file__).parents[1] / "samples"))
from replayed import compiled_outputs

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
NOISE = 1e-5
MOVES = 3
"""How often the inputs are moved by a rounding, each time another way."""
ROUNDINGS = 4
"""How many times what that changes an optimised program may differ by: it rounds elsewhere, at each of its ops."""
EXPORTED_S = 300


@dataclass
class Row:
    """One model in one dtype. `difference` is the largest |Δ| of a result or gradient over that output's largest element,
    `moved` the same for the captured program on inputs that are moved by one rounding."""

    model: str
    dtype: str
    parameters: int = 0
    forward_ops: int = 0
    backward_ops: int = 0
    ops_after: int = 0
    kernels: int = 0
    capture_s: float = 0.0
    optimise_s: float = 0.0
    compile_s: float = 0.0
    replay: str = ""
    difference: float | None = None
    moved: float | None = None
    exported: str = ""
    problem: str = ""


# --- one model --------------------------------------------------------------------------------------------------------


def try_model(name: str, device: str, dtype: torch.dtype) -> Row:
    row, package = Row(name, str(dtype).removeprefix("torch.")), PACKAGES.get(name, "transformers")
    if dtype is torch.float64 and name in NOT_IN_FLOAT64:
        row.problem = "its operators take no float64"
        return row
    if importlib.util.find_spec(package) is None:
        row.problem = f"{package} is not installed"
        return row
    torch.manual_seed(0)
    try:
        model, inputs = MODELS[name]()
        model = model.to(device, dtype).train()
        row.parameters = sum(p.numel() for p in model.parameters())
        _fill(row, model, {key: t.to(device, dtype if t.is_floating_point() else None) for key, t in inputs.items()})
    except (TracefuseError, ValueError) as error:  # as of a compiled program whose sizes depend on the data
        row.problem = f"{type(error).__name__}: {error}"
    except Exception as error:  # of one model: the others are still to be tried
        traceback.print_exc()
        row.problem = f"crashed, {type(error).__name__}: {error}"
    return row


def _fill(row: Row, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    began = time.perf_counter()
    with tracefuse.capture() as capture:
        out = model(**inputs)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
    forward, backward = capture.trace.split()
    row.capture_s = time.perf_counter() - began
    row.forward_ops, row.backward_ops = forward.op_count, backward.op_count

    expected = _expected(capture, loss)
    unequal = [
        of for of, mine, theirs in zip(names(capture.trace), capture.replay(), expected, strict=True)
        if not _same(mine, theirs)
    ]  # fmt: skip
    row.replay = "bit for bit" if not unequal else f"{len(unequal)} outputs differ, {unequal[0]}"

    began = time.perf_counter()
    variant = capture.optimize()
    row.optimise_s = time.perf_counter() - began
    row.ops_after, row.kernels = variant.trace.op_count, len(variant.kernels)
    began = time.perf_counter()
    variant.compile()
    row.compile_s = time.perf_counter() - began
    found = dict(zip(names(variant.trace), compiled_outputs(variant), strict=True))
    near = nearness(capture, found, expected)
    row.difference, row.moved, row.problem = near.difference, near.moved, near.problem
    row.exported = _export(variant)


@dataclass(frozen=True)
class Nearness:
    """How far outputs are from what is expected: `difference` and `moved` as in a `Row`; what each may be off by, absolutely,
    and the gradients of each source relatively; of the first that is off by more, which and by how much."""

    difference: float
    moved: float
    tolerance: float
    allowed: list[float]
    gradients: dict[str, float]
    problem: str = ""


def nearness(
    capture: tracefuse.Capture,
    found: Mapping[str, Tensor],
    expected: list[Tensor],
    rounds_as: torch.dtype = torch.float64,
) -> Nearness:
    """Of outputs by their `names` beside those of the captured trace, in its order. No rounding counts as finer than that of
    `rounds_as`, in which ATen computes some ops whatever their dtype."""
    labels = names(capture.trace)
    off = differences(labels, [found[label] for label in labels], expected)
    moves = [differences(labels, _moved(capture, seed, rounds_as), expected) for seed in range(MOVES)]
    moved = [max(some) for some in zip(*moves, strict=True)]
    # No output is taken for less sensitive than most: a rounding may happen to leave it as it is.
    least = max(TOLERANCE[dtype] for dtype in (coarsest(capture.trace), rounds_as))
    tolerance = max(least, ROUNDINGS * statistics.median(moved))
    allowed = [max(tolerance, ROUNDINGS * rounding) for rounding in moved]
    problems = [
        f"{label} differs by {difference:.1e} with all passes on, by {rounding:.1e} if inputs are rounded"
        for label, difference, rounding, most in zip(labels, off, moved, allowed, strict=True)
        if not difference <= most
    ]
    sizes = map(operator.mul, allowed, _sizes(expected))
    pairs = zip(capture.trace.outputs, allowed, strict=True)
    gradients = {capture.trace.input_of(out.of).source: most for out, most in pairs if out.kind == "gradient"}
    return Nearness(max(off), max(moved), tolerance, list(sizes), gradients, problems[-1] if problems else "")


def names(trace: Trace) -> list[str]:
    """What each output is, and of what."""
    return [f"{out.kind} {out.of}" for out in trace.outputs]


def differences(labels: Iterable[str], found: Iterable[Tensor], expected: list[Tensor]) -> list[float]:
    """Of each the largest difference, over the largest element that is expected; 0.0 where there is none."""
    triples = zip(labels, found, expected, strict=True)
    gaps = [max_abs_difference(name, a, b) for name, a, b in triples]
    return [gap and gap / size for gap, size in zip(gaps, _sizes(expected), strict=True)]


def _sizes(expected: list[Tensor]) -> list[float]:
    # Of a gradient that is zero but for rounding, as of a key's bias, the size is that of the largest one.
    floor = NOISE * max(map(largest, expected))
    return [max(largest(one), floor, sys.float_info.min) for one in expected]


def _moved(capture: tracefuse.Capture, seed: int, rounds_as: torch.dtype) -> tuple[Tensor, ...]:
    """What the captured program computes of inputs that are each up or down by one rounding."""
    generator = torch.Generator().manual_seed(seed)

    def move(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        signs = torch.randint(2, tensor.shape, generator=generator).to(tensor) * 2 - 1
        eps = max(torch.finfo(dtype).eps for dtype in (tensor.dtype, rounds_as))
        return tensor.detach() * (1 + eps * signs)

    return tracefuse.replay(capture.trace, [move(t) for t in capture.example_inputs], capture.rng_states)


def _expected(capture: tracefuse.Capture, loss: Tensor) -> list[Tensor]:
    """What eager left in the program's own tensors, in the order of the trace's outputs."""
    live = {entry.name: t for entry, t in zip(capture.trace.inputs, capture.live_inputs, strict=True)}
    own: dict[str, Any] = {
        "result": lambda of: loss,
        "gradient": lambda of: live[of].grad,
        "mutation": lambda of: live[of],
    }
    return [own[out.kind](out.of).detach() for out in capture.trace.outputs]


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def largest(tensor: Tensor) -> float:
    """Its largest finite number, of a complex one its absolute value."""
    wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).abs()
    return torch.where(wide.isfinite(), wide, 0.0).max().item() if tensor.numel() else 0.0


def coarsest(trace: Trace) -> torch.dtype:
    """The floating dtype of the trace that rounds most: many models of `transformers` compute norms in float32."""
    dtypes = {t.dtype for node in trace.graph.nodes for t in tensors(node) if t.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _export(variant: tracefuse.Variant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = variant.export(Path(folder) / "step.py")
        except ExportError as error:
            return f"refused: {error}"
        command = [sys.executable, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=EXPORTED_S)
        except subprocess.TimeoutExpired:
            return f"failed: more than {EXPORTED_S} s"
    if done.returncode == 0:
        return "runs"
    said = [line for line in done.stdout.splitlines() if line.startswith("BAD")] + done.stderr.strip().splitlines()[-3:]
    return f"{'' if done.stderr.startswith('not checked') else 'failed: '}{'; '.join(said)}"


# --- all of them ------------------------------------------------------------------------------------------------------


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--model", action="append", choices=MODELS, help="one of them (may be repeated; default: all)")
    given.add_argument("--dtype", nargs="+", help="float64, float32, bfloat16, float16")
    given.add_argument("--check", action="store_true", help="fail where one of them is not right")
    options = given.parse_args()
    dtypes = options.dtype or (["float64", "float32"] if options.device == "cpu" else ["float32", "bfloat16"])
    chosen = options.model or (["gpt2", "detector"] if options.small else list(MODELS))
    rows = []
    for name in chosen:
        for dtype in dtypes:
            rows.append(row := asdict(try_model(name, options.device, getattr(torch, dtype))))
            print(f"{name} {dtype}: {row['problem'] or row['replay']}, {row['exported']}", flush=True)
    print(table(rows))
    write(options.out, {"environment": environment(options.device), "models": rows})
    wrong = [f"{row['model']} {row['dtype']}" for row in rows if not is_right(row)]
    if options.check and wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
