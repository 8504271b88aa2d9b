"""A compiled variant between the conventions of AOTAutograd.

    forward     primals -> results and mutations, None where the graph returns None; then what is kept for the backward
    backward    what was kept, tangents -> a gradient per primal, or None

Both take one list, which they empty. What fails in them is done without: a half by its trace, op by op, a kernel by its ATen
ops, each with one warning. An op that fails by itself too is the program's own error, which leaves as it is in eager.

`watching` makes a write in place to a result an error where the backward reads that result, as it is in eager. AOTAutograd
hands out a result that is a view of what the forward computed as a tensor with a version counter of its own (`_unsafe_view`),
and so autograd, which compares the counters of what was saved, notices no write to it. A result without a gradient has no
place in autograd's graph: the results beside it have.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, Literal

import torch

from tracefuse.build.kernels import NONE_WITH_NUMBERS, WithNumbers, preload
from tracefuse.build.modules import load
from tracefuse.device.packed_attention import share_graphs
from tracefuse.dynamo.joint import RESULT, Joint
from tracefuse.errors import ReplayError
from tracefuse.execution.export import functions_source, kernel_texts
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.replay import replay
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.trace import Output, Trace, val
from tracefuse.recording.frames import tell_user


class Halves:
    """The optimised program of what AOTAutograd knows as `joint`.

    `results` and `gradients` say where what AOTAutograd wants stands among the outputs of the module's functions, `saved`
    which of the forward's outputs the backward reads, the last ones, and `read_again` which of its inputs. `read_results` are
    the numbers of the results that lie in memory that the backward reads. `views` are the places of the results that a view
    makes: autograd lets nobody write to a view that comes out of a function with several results, and AOTAutograd, which tells
    of the views that a user is to see by itself, expects a tensor of its own in each place. So `repeated` are the places of
    results that an earlier place has too, as a value and what was detached from it are one to the passes: a tensor in both
    would have no gradient. Kernels that are `with_numbers` take some of their sizes, and share their machine code.
    """

    def __init__(
        self, joint: Joint, variant: Optimised, with_numbers: Mapping[str, WithNumbers] = NONE_WITH_NUMBERS
    ) -> None:
        self.joint, self.constants, self.objects = joint, joint.constants, joint.objects
        self.variant = variant
        self.variant.build(with_numbers=with_numbers)
        built = [kernel for kernel in self.variant.kernels if kernel.name not in self.variant.fallbacks]
        taking = {kernel.name: with_numbers[kernel.name].source for kernel in built if kernel.name in with_numbers}
        self.module = load(functions_source(self.variant, kernel_texts(self.variant) | taking))
        share_graphs(self.module)
        preload(self.module, built, self.variant.tunings, with_numbers)
        for kernel in built:
            _try_first(self.module, kernel)
        self._by_op: set[str] = set()
        forward, backward = self.variant.forward, self.variant.backward
        primals = [entry.name for entry in forward.inputs]
        self.results = _positions(joint.results, forward.outputs)
        self.gradients = _positions(joint.gradients, backward.outputs)
        self.saved = [at for at, out in enumerate(forward.outputs) if out.kind == "saved"]
        self.read_again = [primals.index(entry.name) for entry in backward.inputs if entry.name in primals]

        returned = [None if result is None else forward.returned[result] for result in self.results]
        self.views = [at for at, node in enumerate(returned) if node is not None and is_view(node)]
        self.repeated = [at for at, node in enumerate(returned) if node is not None and node in returned[:at]]
        kept = {storage for at in self.saved for storage in storages(forward.returned[at])}
        self.read_results = tuple(
            int(out.of.removeprefix(RESULT))
            for out, node in forward.output_pairs
            if out.kind == "result" and out.of.startswith(RESULT) and kept & storages(node).keys()
        )

    def at_another_size(self, variant: Optimised, module: Any) -> Halves:
        """The same halves of a program that differs in its numbers alone: `module` has its functions."""
        other = copy.copy(self)
        other.variant, other.module, other._by_op = variant, module, set()
        return other

    def forward(self, boxed: list[Any]) -> list[Any]:
        boxed.extend(self.constants)
        return self._forward(boxed)

    def _forward(self, boxed: list[Any]) -> list[Any]:
        outputs = self._run("forward", boxed)
        again = [boxed[at] for at in self.read_again]
        boxed.clear()
        results = self.apart(self.among(outputs, self.results), {*self.views, *self.repeated})
        return [*results, *(outputs[at] for at in self.saved), *again]

    def backward(self, boxed: list[Any]) -> list[Any]:
        return self.among(self._run("backward", boxed), self.gradients)

    def _run(self, half: Literal["forward", "backward"], given: list[Any]) -> Sequence[Any]:
        """What the generated half returns; op by op from the first time on that it fails."""
        generated = getattr(self.module, half)
        if half in self._by_op:
            return _op_by_op(getattr(self.variant, half), given)
        try:
            return generated(*given) if half == "forward" else generated(given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # The backward empties its list before anything else and frees what was in it as it goes. Nothing else holds that,
            # so the rest is made of what it had in hand.
            trace = getattr(self.variant, half)
            in_hand = {} if given or half == "forward" else _locals_of(generated, error)
            outputs = _op_by_op(trace, given or [in_hand.get(entry.name) for entry in trace.inputs], in_hand)
            self._by_op.add(half)
            tell_user(
                f"the {half} of a graph of this model runs op by op, as the generated one failed: {shown(error)}."
            )
            return outputs

    def primals(self) -> list[torch.Tensor]:
        """Fake tensors like those that AOTAutograd hands to the forward."""
        placeholders = self.variant.forward.placeholders
        return [val(p) for p in placeholders[: len(placeholders) - len(self.constants)]]

    def kept_values(self) -> list[torch.Tensor]:
        """Fake tensors like those that the forward hands to the backward."""
        front = self.variant.forward
        return [
            *(val(front.returned[at]) for at in self.saved),
            *(val(front.placeholders[at]) for at in self.read_again),
        ]

    @staticmethod
    def apart(results: list[Any], places: Iterable[int]) -> list[Any]:
        """The same results, of which those in `places` are tensors of their own in the same memory."""
        for at in places:
            results[at] = torch.ops.aten._unsafe_view.default(results[at], results[at].shape)
        return results

    @staticmethod
    def among(values: Sequence[Any], positions: Sequence[int | None]) -> list[Any]:
        return [None if at is None else values[at] for at in positions]


def _try_first(module: ModuleType, kernel: Kernel) -> None:
    """Let the generated module take a kernel's ATen ops if its first launch fails, and its launcher if it does not."""
    launch = getattr(module, kernel.name)
    if getattr(launch, "is_first", False):  # another program of the same text, which has not run yet
        return

    def tried(*tensors: torch.Tensor, **over: torch.Tensor) -> Any:
        chosen: Callable[..., Any] = launch
        try:
            made = launch(*tensors, **over)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            chosen, made = kernel, kernel(*tensors)
            tell_user(f"the kernel {kernel.name} of this model runs as ATen ops, as its launch failed: {shown(error)}.")
        setattr(module, kernel.name, chosen)
        return made

    tried.is_first = True  # type: ignore[attr-defined]
    setattr(module, kernel.name, tried)


def shown(error: BaseException) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"


def _locals_of(function: FunctionType, error: BaseException) -> Mapping[str, Any]:
    """The variables that the call of `function` had when `error` left it."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((dict(frame.f_locals) for frame in frames if frame.f_code is function.__code__), {})


def _op_by_op(trace: Trace, inputs: Sequence[Any], known: Mapping[str, Any] | None = None) -> Sequence[Any]:
    """The outputs of `trace`, of which the values that are `known` by name are not made again. Raises what an op raises."""
    try:
        return replay(trace, inputs, known=known)
    except ReplayError as error:
        raise (error.__cause__ or error) from None


def _positions(wanted: Sequence[Output | None], outputs: Sequence[Output]) -> list[int | None]:
    """Where each of `wanted` stands among `outputs`; None for what nobody wants, and for gradients that a pass dropped."""
    at = {out: position for position, out in enumerate(outputs)}
    return [None if out is None else at.get(out) for out in wanted]


def watching(run: Callable[..., Sequence[Any]], numbers: Sequence[int]) -> Callable[..., Sequence[Any]]:
    """`run`, whose results with these `numbers` raise `RuntimeError` in the backward if they were written in place."""

    def called(*arguments: Any) -> Sequence[Any]:
        results = run(*arguments)
        made_by = {one.grad_fn for one in results if isinstance(one, torch.Tensor)} - {None}
        if made_by:
            for number in numbers:
                _watch(results[number], made_by)
        return results

    return torch.compiler.disable(called, reason="do not trace what autograd is told of")


def _watch(result: torch.Tensor, made_by: set[Any]) -> None:
    counter = result.detach()
    counter.data = counter.new_empty(0)  # still counts the writes to `result`, and keeps its memory no longer
    before, shape = counter._version, list(result.shape)

    def check(_: Any) -> None:
        if counter._version != before:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a result "
                f"{shape} of a compiled graph, which its backward reads; write after the backward, or to a copy"
            )

    for node in {result.grad_fn} if result.grad_fn is not None else made_by:
        node.register_prehook(check)
