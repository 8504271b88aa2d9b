"""One sample of torch's operator database as a program: run, captured, replayed, and put through every pass.

    Operator     one `OpInfo`, or its in-place variant, on a device and a dtype
    check        what became of one of its samples: an `Outcome`
    EXACT …      the verdicts, from best to worst

A sample's program calls the operator and starts a backward from the sum of its differentiable results, each weighted by a
fixed random tangent. It runs once without a recorder and once with one, on equal inputs from one seed. The capture must give
the numbers of the first run, the replay those of the second bit by bit, and the trace after the passes those within the
operator's own tolerance.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from replayed import compiled_outputs, is_same, plain
from torch import Tensor
from torch.testing._internal.common_device_type import toleranceOverride
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map_only
from traces import assert_types_are_true

import tracefuse
from tracefuse.build.kernels import build
from tracefuse.config.configuration import Config
from tracefuse.errors import ExportError, TracefuseError
from tracefuse.optimizers.trace import Trace

EXACT = "exact"
CLOSE = "within tolerance"
UNDEFINED = "undefined in eager"
NO_PROGRAM = "no program"
LAYOUT = "other layout"
REFUSED = "refused"
WRONG = "wrong"
CRASHED = "crashed"
VERDICTS = (EXACT, CLOSE, UNDEFINED, NO_PROGRAM, LAYOUT, REFUSED, WRONG, CRASHED)

SEED = 7
UNINITIALISED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
UNSEEDED = {"torch.ops.aten._flash_attention_forward", "torch.ops.aten._efficient_attention_forward"}
"""Without dropout the seed and the offset that they return on a GPU are whatever was in memory."""

EAGER_ERRORS = 4
"""How many times what eager is off by in its dtype, against float64, a program may be off by."""
HAS_DIGITS = 0.1
"""Of the largest element: where eager is off by more, as where float64 draws other numbers, its error is no measure."""


@dataclass(frozen=True)
class Outcome:
    """What became of a sample: the capture with its replay, the trace after all passes, and why where it is not exact.

    "within tolerance" is as near as the operator's own tests ask, or about as near to float64 as eager is.
    "other layout" has the right numbers, but some value's shape, strides, dtype or memory is not what the trace says.
    "undefined in eager" is an operator whose second eager run gives other numbers, whose numbers are whatever was in memory,
    or that raises without a recorder; "no program" one that runs no ATen operator, or that returns a Python number.
    """

    replay: str
    passes: str
    reason: str = ""


@dataclass(frozen=True)
class Operator:
    """An `OpInfo` on a device and a dtype; with `in_place`, its in-place variant on a copy of the first operand."""

    info: OpInfo
    device: str
    dtype: torch.dtype
    in_place: bool = False

    @property
    def name(self) -> str:
        return self.info.formatted_name + ("_" if self.in_place else "")

    @property
    def is_differentiable(self) -> bool:
        return self.dtype in self.info.supported_backward_dtypes(torch.device(self.device).type)

    def samples(self, most: int | None = None) -> list[SampleInput]:
        """The first `most`, or all; made from one seed, the same ones in every process. Raises what the database raises."""
        torch.manual_seed(SEED)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = self.info.sample_inputs(self.device, self.dtype, requires_grad=self.is_differentiable)
            return list(itertools.islice(made, most))

    def call(self, sample: SampleInput) -> Any:
        function = self.info.inplace_variant if self.in_place else self.info.get_op()
        first = tree_map_only(Tensor, torch.clone, sample.input) if self.in_place else sample.input
        out = self.info.gradcheck_wrapper(function, first, *sample.args, **sample.kwargs)
        return sample.output_process_fn_grad(out)

    @property
    def tolerance(self) -> dict[str, float]:
        """The largest that the operator's own tests allow, at least `torch.testing`'s for the dtype."""
        rtol, atol = torch.testing._comparison.default_tolerances(self.dtype)
        for decorator in self.info.decorators:
            for one in getattr(decorator, "decorators", [decorator]):
                known = one.d.get(self.dtype) if isinstance(one, toleranceOverride) else None
                rtol, atol = (rtol, atol) if known is None else (max(rtol, known.rtol), max(atol, known.atol))
        return {"rtol": rtol, "atol": atol}


def operators(device: str, dtype: torch.dtype, in_place: bool = False) -> list[Operator]:
    """Those of the database that run in the dtype, in its order; with `in_place`, those that have an in-place variant."""
    kind = torch.device(device).type
    able = [info for info in op_db if dtype in info.supported_dtypes(kind)]
    return [Operator(info, device, dtype, in_place) for info in able if not in_place or info.inplace_variant]


@dataclass
class Run:
    """One run of a sample's program: what it returned, the gradient of each leaf, and the operands afterwards."""

    returned: list[Tensor]
    gradients: list[Tensor | None]
    operands: list[Tensor]


class Program:
    """`run()` calls the operator on `sample` and starts the backward, if there is one, from tangents that do not change."""

    def __init__(self, operator: Operator, sample: SampleInput) -> None:
        self.operator, self.sample = operator, sample
        self.operands = tensors_of((sample.input, sample.args, sample.kwargs))
        self._before = [t.detach().clone() for t in self.operands]
        self._tangents: dict[int, Tensor] = {}

    def run(self) -> list[Tensor]:
        out = distinct(tensors_of(self.operator.call(self.sample)))
        sums = [(t * self._tangent(at, t)).sum() for at, t in enumerate(out) if t.requires_grad]
        if not sums:
            return out
        loss = sum(s.real if s.is_complex() else s for s in sums)
        loss.backward()
        return [*out, loss]

    def fresh(self) -> None:
        """Operands, gradients and generators as they were before the first run."""
        for operand, before in zip(self.operands, self._before, strict=True):
            operand.grad = None
            if not is_same(operand, before):
                operand.detach().copy_(before)
        torch.manual_seed(SEED)

    def eager(self) -> Run:
        self.fresh()
        run = self.observed(self.run())
        return Run(*([None if t is None else t.detach().clone() for t in part] for part in vars(run).values()))

    @functools.cached_property
    def exact(self) -> Run | None:
        """Eager's run in float64 on the very same numbers; None where the dtype is no narrower or the operator not for it."""
        if self.operator.dtype not in WIDER:
            return None
        operator = dataclasses.replace(self.operator, dtype=WIDER[self.operator.dtype])
        program = Program(operator, self.sample.transform(widened))
        program._tangents = {at: widened(tangent) for at, tangent in self._tangents.items()}
        try:
            return program.eager()
        except (RuntimeError, TypeError, ValueError):  # what torch raises for a dtype that an operator does not take
            return None

    def observed(self, returned: list[Tensor]) -> Run:
        return Run(returned, [t.grad if t.is_leaf else None for t in self.operands], list(self.operands))

    def _tangent(self, at: int, like: Tensor) -> Tensor:
        if at not in self._tangents:
            generator = torch.Generator().manual_seed(at)
            made = torch.randn(like.shape, generator=generator, dtype=torch.float64)
            self._tangents[at] = made.to(like.device, like.dtype)
        return self._tangents[at]


WIDER = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64) | {
    torch.complex64: torch.complex128
}


def widened(value: Any) -> Any:
    """A tensor, or a dtype, in float64 where it is a narrower floating one."""
    if isinstance(value, torch.dtype):
        return WIDER.get(value, value)
    if isinstance(value, Tensor) and value.dtype in WIDER:
        return value.detach().to(WIDER[value.dtype]).requires_grad_(value.requires_grad)
    return value


def distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor once: a trace returns what a program returns twice only once."""
    return list({id(t): t for t in tensors}.values())


def tensors_of(tree: Any) -> list[Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor)]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def check(operator: Operator, sample: SampleInput) -> Outcome:
    """Never raises: what goes wrong is the outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = Program(operator, sample)
            first, second = program.eager(), program.eager()
        except Exception as error:
            return Outcome(UNDEFINED, UNDEFINED, f"eager raises {_text(error)}")
        try:
            is_defined = operator.info.name not in UNINITIALISED | UNSEEDED and _difference(first, second) is None
            return _check(program, first, is_defined)
        except TracefuseError as error:
            empty = "ran no PyTorch operator" in str(error) or "the program has no result" in str(error)
            return Outcome(NO_PROGRAM, NO_PROGRAM) if empty else Outcome(REFUSED, REFUSED, _text(error))
        except Exception as error:
            return Outcome(CRASHED, CRASHED, _text(error))


def _check(program: Program, eager: Run, is_defined: bool) -> Outcome:
    program.fresh()
    ran: list[Tensor] = []
    capture = tracefuse.capture(lambda: ran.extend(program.run()) or ran)
    recorded = program.observed(ran)
    verdict, reason = _compare(recorded, eager, program)
    if verdict != EXACT and is_defined:
        reason = f"recording changes the numbers: {reason}"
        if verdict == WRONG:
            return Outcome(WRONG, WRONG, reason)
    replayed = _outputs(capture, capture.trace, program)
    same, why = _compare(replayed, recorded, program)
    if not is_defined:
        _outputs(capture, capture.variant(Config.of()).check().trace, program)
        return Outcome(UNDEFINED, UNDEFINED, "two eager runs from one seed differ")
    if same != EXACT:
        verdict, reason = same, why
    elif untrue := _untrue(capture.trace, capture):
        verdict, reason = LAYOUT, untrue
    passes, why = _passes(program, capture, replayed)
    return Outcome(verdict, passes, "; ".join(r for r in (reason, why) if r))


def _passes(program: Program, capture: tracefuse.Capture, replayed: Run) -> tuple[str, str]:
    """The verdict on all passes, against the replay of the captured trace: of the regenerated program where it compiles,
    whose kernels run on a GPU, else of the trace."""
    variant = capture.variant(Config.of())
    if failed := next((step for step in variant.passes if step.error is not None), None):
        return CRASHED, f"passes: {failed.name}: {failed.error}"
    try:
        build(variant.kernels, jobs=1)  # by this process alone: others do the same beside it
        values = compiled_outputs(variant)
    except ExportError as error:  # a step that is none, as of a gradient given to `backward`
        return REFUSED, f"compile: {_text(error)}"
    except TracefuseError as error:
        return REFUSED, f"passes: {_text(error)}"
    except Exception as error:
        return CRASHED, f"passes: {_text(error)}"
    verdict, reason = _compare(_as_run(capture, variant.trace, values, program), replayed, program)
    if verdict in (EXACT, CLOSE) and (untrue := _untrue(variant.trace, capture)):
        return LAYOUT, f"passes: {untrue}"
    return verdict, f"passes: {reason}" if reason else ""


def _untrue(trace: Trace, capture: tracefuse.Capture) -> str | None:
    try:
        assert_types_are_true(trace, capture)
    except AssertionError as error:
        return f"not as the trace says: {_text(error)}"
    return None


def _outputs(capture: tracefuse.Capture, trace: Trace, program: Program) -> Run:
    """What a replay of `trace` computes of the program's run."""
    return _as_run(capture, trace, tracefuse.replay(trace, capture.example_inputs, capture.rng_states), program)


def _as_run(capture: tracefuse.Capture, trace: Trace, values: Sequence[Tensor], program: Program) -> Run:
    """The outputs of `trace` by what they are of the program's run; operands that it does not overwrite are what they were."""
    inputs = zip(trace.inputs, capture.live_inputs, capture.example_inputs, strict=True)
    live, example = {}, {}
    for entry, tensor, before in inputs:
        live[entry.name], example[id(tensor)] = id(tensor), before
    found: dict[str, dict[int, Tensor]] = {"gradient": {}, "mutation": {}}
    results = []
    for out, value in zip(trace.outputs, values, strict=True):
        if out.kind == "result":
            results.append(value)
        else:
            found[out.kind][live[out.of]] = value
    operands = [found["mutation"].get(id(t), example.get(id(t), t)) for t in program.operands]
    return Run(results, [found["gradient"].get(id(t)) for t in program.operands], operands)


def _compare(found: Run, expected: Run, program: Program) -> tuple[str, str]:
    difference = _difference(expected, found, is_same)
    if difference is None:
        return EXACT, ""
    tolerance = program.operator.tolerance
    far = _difference(expected, found, lambda a, b: _is_close(a, b, tolerance))
    if far is None or (program.exact is not None and _is_as_near(found, expected, program.exact, tolerance)):
        return CLOSE, difference
    return WRONG, far


def _is_as_near(found: Run, expected: Run, exact: Run, tolerance: dict[str, float]) -> bool:
    """Whether everything found is about as near to `exact` as what is expected: both round, perhaps in different places."""
    for what in ("returned", "gradients", "operands"):
        triples = zip(getattr(found, what), getattr(expected, what), getattr(exact, what), strict=True)
        for mine, theirs, true in triples:
            if mine is None or theirs is None or is_same(mine, theirs):
                continue
            if true is None or (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
                return False
            size = plain(true).abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            my_error, their_error = (_error(t, true) for t in (mine, theirs))
            allowed = EAGER_ERRORS * their_error + tolerance["rtol"] * size + tolerance["atol"]
            if their_error > HAS_DIGITS * size or my_error > allowed:
                return False
    return True


def _error(tensor: Tensor, true: Tensor) -> float:
    """The largest distance; infinite where one alone is no number."""
    tensor, true = plain(tensor).to(true.dtype), plain(true)
    same = (tensor == true) | ((tensor != tensor) & (true != true))
    return torch.where(same, 0.0, (tensor - true).abs()).nan_to_num(torch.inf).max().item()


def _difference(expected: Run, found: Run, same: Callable[[Tensor, Tensor], bool] | None = None) -> str | None:
    """The first thing that differs, or None; bit by bit unless `same` says otherwise."""
    for what in ("returned", "gradients", "operands"):
        theirs, mine = getattr(expected, what), getattr(found, what)
        if len(mine) != len(theirs):
            return f"{what}: {len(mine)} instead of {len(theirs)}"
        for at, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            if (a is None) != (b is None):
                return f"{what} {at} is {'missing' if b is None else 'one too many'}"
            if a is not None and not (same or is_same)(a, b):
                return f"{what} {at}: {_gap(a, b)}"
    return None


def _is_close(a: Tensor, b: Tensor, tolerance: dict[str, float]) -> bool:
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    return torch.allclose(plain(a), plain(b), equal_nan=True, **tolerance)


def _gap(a: Tensor, b: Tensor) -> str:
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return f"{b.dtype} {tuple(b.shape)} {b.layout} instead of {a.dtype} {tuple(a.shape)} {a.layout}"
    gap = (plain(a).to(torch.complex128) - plain(b).to(torch.complex128)).abs()
    return f"off by {gap.nan_to_num(torch.inf).max().item():.3g}"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
