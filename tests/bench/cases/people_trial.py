"""One program of `people.py`, from eager to the backend: what held, as a `Row`. Runs in a process of its own.

eager       three times from the same seed: does it repeat itself bit by bit, and if not, how far apart are the runs?
capture     the program runs as without a recorder
replay      of the captured trace beside that run
passes      all of them, compiled, beside the replay
export      the file in a fresh process, on the captured inputs and on its own
backend     the same program under `torch.compile(backend="tracefuse")`, beside eager
"""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy
import torch
from models import ROUNDINGS, TOLERANCE, Nearness, coarsest, differences, names, nearness
from people_programs import PROGRAMS, Made
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tracefuse
import tracefuse.optimizers
from tracefuse.errors import ExportError, TracefuseError
from tracefuse.execution.export import rounds_as
from tracefuse.optimizers.trace import Output
from tracefuse.optimizers.verify import VerifyError
from tracefuse.recorded import RecordedCapture

sys.path.append(str(Path(__file__).parents[2] / "samples"))
from replayed import compiled_outputs, is_same

EXACT, ROUNDED, REFUSED, WRONG, CRASHED, NOT_RUN = "exact", "within rounding", "refused", "wrong", "crashed", "not run"
VERDICTS = (EXACT, ROUNDED, REFUSED, WRONG, CRASHED, NOT_RUN)
RAISED, DYNAMO, AS_AOT, NONE = "raised", "torch.compile raises", "as aot_eager", "nothing to compile"
BACKEND_VERDICTS = (EXACT, ROUNDED, AS_AOT, DYNAMO, NONE, RAISED, WRONG, "")
DTYPE = torch.float64
EXPORTED_S = 90
RUNS = 3
"""Of eager, before it counts as repeating itself."""
MORE_RUNS = 8
"""Of eager where a run under the recorder differs by a rounding: sums in no fixed order come out alike most of the time."""
ROUNDING = torch.finfo(DTYPE).eps
"""By which a run under the recorder may differ though those of eager repeat themselves; the row says so, and is not exact."""
OURS = {Path(room.__file__).parent for room in (tracefuse, tracefuse.optimizers)}
SAID = "aot_eager: "
EXPORTED_ONCE = Path(__file__).with_name("exported_once.py")

Seen = dict[str, Tensor]
"""What a run left, by what it is: results, gradients, contents of parameters, buffers and leaves."""


@dataclass
class Row:
    """What became of one program. `at` is the last stage that was begun, `difference` and `moved` are those of `models.py`."""

    program: str
    kind: str
    device: str
    verdict: str = ""
    reason: str = ""
    at: str = "start"
    eager: str = ""
    replay: str = ""
    forward_ops: int = 0
    backward_ops: int = 0
    ops_after: int = 0
    kernels: int = 0
    difference: float | None = None
    moved: float | None = None
    exported: str = ""
    backend: str = ""
    backend_reason: str = ""
    graphs: int = 0
    seconds: float = 0.0


class Wrong(Exception):
    """Numbers, or a gradient that is not there."""


def try_program(name: str, device: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Tells its row at each stage, so that what kills the process is known; nothing that goes wrong in it raises."""
    row, began = Row(name, PROGRAMS[name].kind, device), time.perf_counter()

    def at(stage: str) -> None:
        row.at, row.seconds = stage, time.perf_counter() - began
        tell(asdict(row))

    torch.set_num_threads(1)
    torch.set_default_dtype(DTYPE)
    at("eager")
    try:
        eager, allowed = _eager(row)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"needs {error.name}"
        row.verdict, row.reason = NOT_RUN, missing or _text(error)
        return at("eager")
    near: Nearness | None = None
    try:
        near = _captured(row, eager, allowed, at)
        exactly = near.difference == 0 and row.replay == "bit for bit" and not row.eager.endswith("rounding")
        row.verdict = EXACT if exactly else ROUNDED
    except TracefuseError as error:
        # A trace that is not well-formed is a defect of a pass, whatever it says.
        row.verdict, row.reason = CRASHED if isinstance(error, VerifyError) else REFUSED, _text(error)
    except Wrong as error:
        row.verdict, row.reason = WRONG, str(error)
    except Exception as error:
        traceback.print_exc()
        row.verdict, row.reason = CRASHED, _text(error)
    failed_at = row.at
    at("backend")
    _backend(row, eager, near)
    at(failed_at if row.verdict in (REFUSED, WRONG, CRASHED) else "end")


# --- eager ------------------------------------------------------------------------------------------------------------


def _eager(row: Row) -> tuple[Seen, float]:
    """What a run leaves, and by how much another one may differ: not at all where the runs leave the same bits."""
    first = _kept(_run(row))
    return first, _spread(row, first, RUNS - 1)


def _spread(row: Row, first: Seen, runs: int) -> float:
    """By how much a run may differ from `first`, by what further ones of eager do; says in `row` whether they do."""
    others = [_kept(_run(row)) for _ in range(runs)]
    different = [label for label in first for other in others if not is_same(first[label], other[label])]
    row.eager = f"{different[0]} differs" if different else "repeats itself"
    gaps = [_held(other, first, math.inf, "eager") for other in others]
    return max(TOLERANCE[DTYPE], ROUNDINGS * max(gaps)) if different else 0.0


class _Idle(TorchDispatchMode):
    """Runs each operator as it comes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _leaves_in_a_mode(row: Row, recorded: Seen) -> bool:
    """Whether torch itself leaves what a recorded run left where any mode is on: it adds gradients up otherwise then."""
    with _Idle():
        left = _kept(_run(row))
    return all(is_same(left[label], recorded[label]) for label in recorded)


def _run(row: Row, wrap: Callable[[Any], Any] = lambda one: one) -> Seen:
    made = _made(row)
    return _seen(made, made.run(*map(wrap, made.compiled)))


def _made(row: Row) -> Made:
    _seed(0)
    with torch.device(row.device):
        made = PROGRAMS[row.program].make()
    for module in made.all_modules():
        module.to(row.device).double()  # what a model's code makes in float32, too
    _seed(1)
    return made


def _seed(seed: int) -> None:
    for one in (random.seed, numpy.random.seed, torch.manual_seed):
        one(seed)


def _seen(made: Made, returned: Any) -> Seen:
    found = {f"result {at}": t for at, t in enumerate(_tensors(returned))}
    for name, tensor in made.tensors():
        found[f"value of {name}"] = tensor
        if tensor.is_leaf and tensor.grad is not None:
            found[f"gradient of {name}"] = tensor.grad
    return found


def _kept(seen: Seen) -> Seen:
    return {label: tensor.detach().clone() for label, tensor in seen.items()}


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


# --- capture, replay, passes, export ----------------------------------------------------------------------------------


def _captured(row: Row, eager: Seen, allowed: float, at: Callable[[str], None]) -> Nearness:
    """All that is done with a capture. Raises `Wrong`, and whatever is raised on the way."""
    at("capture")
    made = _made(row)
    before, first = _kept(_seen(made, None)), {id(tensor): name for name, tensor in made.tensors()}
    with RecordedCapture(lambda: _namespace(made)) as capture:
        capture.returned = returned = made.run(*made.compiled)
    seen = _kept(_seen(made, returned))
    gap = _held(seen, eager, math.inf, "recording changes the run")
    if allowed == 0.0 and 0.0 < gap <= TOLERANCE[DTYPE]:
        spread = _spread(row, eager, MORE_RUNS)
        allowed = spread or (gap if _leaves_in_a_mode(row, seen) else ROUNDING)
        row.eager += ", recorded within rounding" * (not spread)
    _held(seen, eager, allowed, "recording changes the run")
    forward, backward = capture.trace.split()
    row.forward_ops, row.backward_ops = forward.op_count, backward.op_count

    at("replay")
    first |= {id(tensor): name for name, tensor in made.tensors()}
    expected = list(capture.replay())
    _complete(capture, made, before, first)
    tolerance = TOLERANCE[coarsest(capture.trace)]
    replayed = _as_seen(capture, expected, returned, before, first)
    most = max(tolerance, allowed) if allowed else 0.0
    worst = _held(replayed, {label: seen[label] for label in replayed}, most, "replay")
    row.replay = f"within rounding: {worst:.1e}" if worst else "bit for bit"
    expected = expected[: len(capture.trace.outputs)]

    at("passes")
    variant = capture.optimize()
    row.ops_after, row.kernels = variant.trace.op_count, len(variant.kernels)
    at("compile")
    if _seeds_in_between(capture):
        # A compiled program draws on where this one seeds its generator again: its own, without passes, says what is right.
        expected = compiled_outputs(variant.baseline)
    near = _passes(row, capture, variant, expected)

    at("export")
    row.exported = _exported(variant, expected, near)
    return near


def _seeds_in_between(capture: tracefuse.Capture) -> bool:
    """Whether its draws are of generators with several seeds; each state begins with the seed."""
    return len({(len(state), state[:8].numpy().tobytes()) for state in capture.rng_states}) > 1


def _namespace(made: Made) -> Mapping[str, Any]:
    """The variables that a cell with the block would see: what its function closes over, and the models."""
    cells = zip(made.run.__code__.co_freevars, made.run.__closure__ or (), strict=True)
    models = {f"model{at or ''}": one for at, one in enumerate(made.compiled)}
    return models | {name: cell.cell_contents for name, cell in cells}


def _complete(capture: tracefuse.Capture, made: Made, before: Seen, first: Mapping[int, str]) -> None:
    """Raises `Wrong` where the trace lacks a gradient or a write that the run left. `first` has also the tensors from
    before: a module may put another one in the place of its buffer."""
    live = {name: first.get(id(t)) for name, t in _live_inputs(capture).items()}
    has = {(out.kind, live[out.of]) for out in _outputs(capture) if out.kind in ("gradient", "mutation")}
    for name, tensor in made.tensors():
        if tensor.is_leaf and tensor.grad is not None and ("gradient", name) not in has:
            raise Wrong(f"the gradient of {name} is missing in the trace")
        was = before[f"value of {name}"]
        # A module that casts its own weights at its first forward gives them other data, which is no write.
        if tensor.dtype == was.dtype and not is_same(tensor, was) and ("mutation", name) not in has:
            raise Wrong(f"the trace lacks that {name} is written to")


def _outputs(capture: tracefuse.Capture) -> list[Output]:
    """Those of the joint program, then those of the update."""
    return [*capture.trace.outputs, *(() if capture.update is None else capture.update.outputs)]


def _live_inputs(capture: tracefuse.Capture) -> dict[str, Tensor]:
    """The program's own tensors by the name of the input that they are, of the update too."""
    parts = [part for part in (capture.program, capture.program.update) if part is not None]
    return {i.name: t for part in parts for i, t in zip(part.trace.inputs, part.live_inputs, strict=True)}


def _as_seen(
    capture: tracefuse.Capture, outputs: list[Tensor], returned: Any, before: Seen, of: Mapping[int, str]
) -> Seen:
    """The trace's outputs by what they are of the run; what the run returned is the result or the gradient that is next to
    it, a gradient is all of it, or what the run adds to the one that was there before."""
    live = {name: id(t) for name, t in _live_inputs(capture).items()}
    found, results, gradients = {}, [], []
    for out, tensor in zip(_outputs(capture), outputs, strict=False):  # the update's are no part of what runs compiled
        if out.kind == "result":
            results.append(tensor)
            continue
        if out.kind == "gradient":
            gradients.append(tensor)
        if out.kind == "gradient" and capture.update is not None:
            continue  # the update clips it, or drops it
        if live[out.of] in of and not (out.kind == "gradient" and _live(capture, out.of).grad is None):
            label = f"{'gradient' if out.kind == 'gradient' else 'value'} of {of[live[out.of]]}"
            found[label] = tensor
            if out.kind == "gradient" and label in before and not is_same(tensor, _live(capture, out.of).grad):
                found[label] = before[label] + tensor
    for at, tensor in enumerate(_tensors(returned)):
        alike = [one for one in (*results, *gradients) if (one.shape, one.dtype) == (tensor.shape, tensor.dtype)]
        if not alike:
            raise Wrong(f"result {at} is missing in the trace")
        found[f"result {at}"] = min(alike, key=lambda one: differences(["it"], [one], [tensor.detach()])[0])
    return found


def _live(capture: tracefuse.Capture, name: str) -> Tensor:
    return _live_inputs(capture)[name]


def _passes(row: Row, capture: tracefuse.Capture, variant: tracefuse.Variant, expected: list[Tensor]) -> Nearness:
    """How near the optimised program is: the compiled one, or, where none is compiled, its trace. Raises then, too."""
    try:
        found = compiled_outputs(variant)
    except ExportError:
        found = list(tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states))
        _near(row, capture, variant, expected, found)
        raise
    return _near(row, capture, variant, expected, found)


def _near(
    row: Row, capture: tracefuse.Capture, variant: tracefuse.Variant, expected: list[Tensor], found: list[Tensor]
) -> Nearness:
    outputs = dict(zip(names(variant.trace), found, strict=True))
    near = nearness(capture, outputs, expected, rounds_as(capture.trace))
    row.difference, row.moved = near.difference, near.moved
    if near.problem:
        raise Wrong(f"all passes: {near.problem}")
    return near


def _exported(variant: tracefuse.Variant, expected: list[Tensor], near: Nearness) -> str:
    """Raises `Wrong` where the file, in a fresh process, does not give on the captured inputs what the replay gave, or is not
    content with itself."""
    capture = variant.capture
    with tempfile.TemporaryDirectory() as folder:
        path = variant.export(Path(folder) / "step.py")
        variant.compile().restarts(capture.rng_states)()
        states = [torch.get_rng_state(), torch.cuda.get_rng_state() if capture.device.type == "cuda" else None]
        given = [[_as_data(t) for t in tensors] for tensors in (capture.example_inputs, expected)]
        torch.save((*given, names(capture.trace), near.allowed, states), Path(folder) / "tensors.pt")
        command = [sys.executable, str(EXPORTED_ONCE), str(path), str(Path(folder) / "tensors.pt")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=EXPORTED_S)
    said = done.stdout.strip().splitlines()
    if done.returncode != 0:
        bad = [line for line in said if line.startswith("BAD")] or done.stderr.strip().splitlines()[-3:]
        raise Wrong(f"exported file: {'; '.join(bad)[:600] or f'status {done.returncode}'}")
    return said[-1]


def _as_data(tensor: Tensor) -> Tensor:
    return tensor.detach() if type(tensor) is Tensor else tensor.detach().as_subclass(Tensor)


# --- the backend ------------------------------------------------------------------------------------------------------


def _backend(row: Row, eager: Seen, near: Nearness | None) -> None:
    """Sets `backend`; what only `torch.compile` itself cannot do counts as its own."""
    if not _made(row).compiled:
        row.backend = NONE
        return
    tolerance, gradients = (near.tolerance, near.gradients) if near is not None else (TOLERANCE[torch.float32], {})
    allowed = {f"gradient of {source}": most for source, most in gradients.items()}
    with _warned() as said:
        try:
            seen = _kept(_run(row, _compiled("tracefuse")))
        except Exception as error:
            traceback.print_exc()
            row.backend, row.backend_reason = RAISED, _text(error)
            seen = None
    ours = [re.sub(r"/\S*/site-packages/", "", text) for text in said if "tracefuse" in text]
    if seen is not None:
        row.backend, row.backend_reason = _judged(seen, eager, tolerance, allowed)
        row.backend_reason = "; ".join(filter(None, [row.backend_reason, *ours]))[:900]
    if row.backend in (RAISED, WRONG):
        _beside_aot(row, seen, tolerance, allowed)


def _compiled(backend: str) -> Callable[[Any], Any]:
    torch._dynamo.reset()
    return lambda one: torch.compile(one, backend=backend)


def _judged(seen: Seen, expected: Seen, tolerance: float, allowed: Mapping[str, float]) -> tuple[str, str]:
    try:
        worst = _held(seen, expected, tolerance, "backend", allowed)
    except Wrong as error:
        return WRONG, str(error)
    return (ROUNDED, "") if worst else (EXACT, "")


def _beside_aot(row: Row, seen: Seen | None, tolerance: float, allowed: Mapping[str, float]) -> None:
    """Whether autograd's own backend raises or differs from eager alike, as where it draws other numbers."""
    if seen is None:
        if said := _raised_alone(row):
            row.backend, row.backend_reason = DYNAMO, said
        return
    try:
        others = _kept(_run(row, _compiled("aot_eager")))
    except Exception:
        return  # ours is wrong and did not raise: it stays so
    if _judged(seen, others, tolerance, allowed)[0] != WRONG:
        row.backend = AS_AOT


def _raised_alone(row: Row) -> str:
    """What `aot_eager` raises in a fresh process, "" where it runs: in this one all raises after an assertion on a GPU."""
    asked = f"from cases.people_trial import say_of_aot; say_of_aot({row.program!r}, {row.device!r})"
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=EXPORTED_S, env=around)
    return done.stdout.rpartition(SAID)[2].strip()


def say_of_aot(name: str, device: str) -> None:
    """Print what the program raises under `aot_eager`, or nothing, behind `SAID`."""
    torch.set_num_threads(1)
    torch.set_default_dtype(DTYPE)
    try:
        _run(Row(name, PROGRAMS[name].kind, device), _compiled("aot_eager"))
        said = ""
    except Exception as error:
        said = _text(error)
    sys.stdout.write(f"{SAID}{said}\n")


@contextmanager
def _warned() -> Iterator[list[str]]:
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += dict.fromkeys(str(one.message) for one in caught)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _held(
    found: Seen, expected: Seen, tolerance: float, what: str, allowed: Mapping[str, float] = MappingProxyType({})
) -> float:
    """The largest relative difference; 0.0 bit for bit. Raises `Wrong` beyond the tolerance, or what is `allowed` of a label
    where that is more, and where something is missing."""
    if missing := sorted(found.keys() ^ expected.keys()):
        where = "it alone has" if missing[0] in found else "it lacks"
        raise Wrong(f"{what}: {where} {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    labels = [label for label in expected if not is_same(found[label], expected[label])]
    for label in labels:
        mine, theirs = ((t.dtype, tuple(t.shape)) for t in (found[label], expected[label]))
        if mine != theirs:
            raise Wrong(f"{what}: {label} is {mine} instead of {theirs}")
    gaps = differences(list(expected), [found[label] for label in expected], list(expected.values()))
    worst = max(gaps, default=0.0)
    for label, gap in zip(expected, gaps, strict=True):
        if not gap <= max(tolerance, allowed.get(label, 0.0)):
            raise Wrong(f"{what}: {label} differs by {gap:.1e}")
    return worst or (sys.float_info.min if labels else 0.0)


def _text(error: BaseException) -> str:
    """What it says, and, but for a refusal, where in tracefuse it was raised."""
    inner = getattr(error, "inner_exception", None) or error.__cause__ or error
    frames = [f for f in traceback.extract_tb(inner.__traceback__) if OURS & {*Path(f.filename).parents}]
    is_refusal = isinstance(error, TracefuseError) and not isinstance(error, VerifyError)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames and not is_refusal else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:600]}{where}"
