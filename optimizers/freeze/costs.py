"""The cost of each parameter's gradient: its ops, what the forward keeps only for it, and modelled time.

    costs = frozen_costs(trace, ["*", "!*.lora_*"]);  print(costs)

    parameter            is       ops           saved for it  gradient  modelled
    h.0.mlp.down.weight  frozen   1             64 KiB        64 KiB    0.044 µs
    h.0.attn.qkv.lora_a  trained  2             16 KiB        2 KiB     0.012 µs
    h.0.norm_2.weight    frozen   0 + 1 masks   0 B           256 B     7.64e-05 µs
    …
    all 22 frozen        frozen   19 + 5 masks  208.2 KiB     386 KiB   0.448 µs
    ops, bytes and times are marginal: each parameter alone, all others as they are; rows do not add up

Each row is one parameter alone, all others as the patterns leave them: for a frozen one what training it would add to the
program, for a trained one what freezing it would spare. So rows do not add up: a value that two gradients read is spared
only when both are frozen. The last row is all frozen ones together.

The needed ops are found by walking from the demanded gradients, as `freeze` prunes; nothing is run. An op that computes
several outputs counts for what its mask can switch off (`narrowing.py`). Time is a roofline's, each op a kernel of its own:
*modelled*, before fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from tracefuse.optimizers.costs.convolutions import copied_images, is_convolution
from tracefuse.optimizers.costs.cost import (
    H100_SXM_DATASHEET,
    Peaks,
    bytes_read,
    flops,
    operand_dtype,
    packet_name,
    roofline_seconds,
)
from tracefuse.optimizers.freeze.narrowing import computed_outputs, output_nbytes, switchable_outputs, unread_outputs
from tracefuse.optimizers.freeze.prune import is_differentiable, match_inputs
from tracefuse.optimizers.liveness import saved_storages
from tracefuse.optimizers.ops import arguments, does_work, is_getitem, producer, reached
from tracefuse.optimizers.trace import Input, Trace, human_bytes, nbytes, val

State = Literal["frozen", "trained", "not captured"]


@dataclass(frozen=True)
class FrozenCost:
    """What one parameter's gradient costs, beside what the other demanded gradients cost anyway.

    `name` is the parameter's source, `state` whether it is "frozen", "trained", or was frozen when captured ("not
    captured": its gradient is not in the trace, nothing is known). `ops` are the names of the ops that are there only for
    it, in order; `narrowed` those that compute one output more for it. `saved` are (value, bytes) that the forward keeps
    only for it. `gradient_nbytes` is the gradient itself, `modelled_us` a roofline's time of the ops.
    """

    name: str
    state: State
    ops: tuple[str, ...] = ()
    narrowed: tuple[str, ...] = ()
    saved: tuple[tuple[str, int], ...] = ()
    gradient_nbytes: int = 0
    modelled_us: float = 0.0

    @property
    def saved_nbytes(self) -> int:
        return sum(count for _, count in self.saved)

    def __str__(self) -> str:
        if self.state == "not captured":
            return f"{self.name} was frozen when captured: capture with train_all=True to see what it spares"
        kept = ", ".join(f"{value} ({human_bytes(count)})" for value, count in self.saved) or "nothing"
        run = ", ".join([*self.ops, *(f"an output of {name}" for name in self.narrowed)]) or "nothing"
        needs = f"only its gradient needs {run}, and {kept} saved"
        return f"{self.name} is {self.state}: {needs}; {self.modelled_us:.3g} µs"


class FrozenCosts(list[FrozenCost]):
    """One row per parameter, the most spared bytes first; `together` is all frozen ones at once. Prints as a table."""

    def __init__(self, rows: Iterable[FrozenCost], together: FrozenCost, peaks: Peaks) -> None:
        super().__init__(rows)
        self.together = together
        self.peaks = peaks

    def __str__(self) -> str:
        title = ("parameter", "is", "ops", "saved for it", "gradient", "modelled")
        total = [self.together] if any(row.state == "frozen" for row in self) else []
        known = [_columns(row) for row in [*self, *total] if row.state != "not captured"]
        unknown = [row.name for row in self if row.state == "not captured"]
        marginal = "ops, bytes and times are marginal: each parameter alone, all others as they are; rows do not add up"
        lines = [*_aligned([title, *known]), marginal]
        lines.append(f"times: roofline of {self.peaks.source}, every op a kernel of its own")
        if unknown:
            names = f"{len(unknown)} frozen when captured ({', '.join(unknown[:3])}{', …' if len(unknown) > 3 else ''})"
            lines.append(f"{names}: capture with train_all=True to see what they spare")
        return "\n".join(lines)

    __repr__ = __str__


def _columns(row: FrozenCost) -> tuple[str, ...]:
    also = f" + {len(row.narrowed)} masks" if row.narrowed else ""
    sizes = (human_bytes(row.saved_nbytes), human_bytes(row.gradient_nbytes))
    return row.name, row.state, f"{len(row.ops)}{also}", *sizes, f"{row.modelled_us:.3g} µs"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


# --- what is needed for what ------------------------------------------------------------------------------------------


class _Needs:
    """The ops that the demanded outputs of a trace need, and what more or less there would be with other gradients."""

    def __init__(self, trace: Trace, frozen: set[str]) -> None:
        self.outputs = trace.output_pairs
        self.position = {node: i for i, node in enumerate(trace.ops)}
        self.demanded = [n for out, n in self.outputs if not (out.kind == "gradient" and out.of in frozen)]
        self.live = self.grown(self.demanded, set())
        self.saved = [(name, count, set(readers)) for name, count, readers in saved_storages(trace).values()]

    def in_order(self, ops: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(ops, key=self.position.__getitem__)

    def grown(self, roots: Iterable[fx.Node], known: set[fx.Node]) -> set[fx.Node]:
        """What `roots` need and is not `known`."""
        return set(reached(set(roots) - known, lambda n: [a for a in n.all_input_nodes if a not in known]))

    def dying(self, gradient: fx.Node) -> set[fx.Node]:
        """What only `gradient`, one of the demanded, needs."""
        if self.demanded.count(gradient) > 1:
            return set()
        kept = {n for n in self.demanded if n is not gradient}
        found: set[fx.Node] = set()
        pending = [gradient]
        while pending:
            node = pending.pop()
            unread = all(u in found or u not in self.live for u in node.users if u.op == "call_function")
            if node.op == "call_function" and node not in found and node not in kept and unread:
                found.add(node)
                pending += node.all_input_nodes
        return found


# --- rows -------------------------------------------------------------------------------------------------------------


def _cost(needs: _Needs, name: str, state: State, roots: list[fx.Node], part: set[fx.Node], peaks: Peaks) -> FrozenCost:
    """The row of `part`, what is there only for `roots`, beside the rest of what is needed."""
    rest = needs.live - part
    ops = needs.in_order(n for n in part if n in needs.position and does_work(n))
    shared = needs.in_order({producer(n) for n in part if is_getitem(n)} & rest)
    seconds = {n: _seconds(n, rest | part, peaks) for n in ops}
    more = {n: _seconds(n, rest | part, peaks) - _seconds(n, rest, peaks) for n in shared}
    narrowed = tuple(n.name for n in shared if _computed(n, rest | part) != _computed(n, rest))
    saved = tuple((value, count) for value, count, late in needs.saved if late & part and not late & rest)
    gradient_nbytes = sum(map(nbytes, dict.fromkeys(roots)))
    modelled_us = 1e6 * (sum(seconds.values()) + sum(more.values()))
    names = tuple(n.name for n in ops)
    return FrozenCost(name, state, names, narrowed, saved, gradient_nbytes, modelled_us)


def _computed(op: fx.Node, within: set[fx.Node]) -> set[int]:
    """The outputs of a multi-output op that it computes where only the values in `within` are needed."""
    read = {u.args[1] for u in op.users if is_getitem(u) and u in within}  # type: ignore[misc]
    fixed = set(range(len(val(op)))) - switchable_outputs(op)
    return read | fixed  # type: ignore[return-value]


def _seconds(op: fx.Node, within: set[fx.Node], peaks: Peaks) -> float:
    """`roofline_seconds` of the op with its mask narrowed to what is needed."""
    if not isinstance(val(op), (tuple, list)):
        return roofline_seconds(op, peaks)
    return _seconds_of(op, _computed(op, within), peaks)


def _seconds_of(op: fx.Node, computed: set[int], peaks: Peaks) -> float:
    is_copied = peaks.copies_float32 or operand_dtype(op) is not torch.float32
    copied = 2 * sum(tensor.nbytes for tensor in copied_images(op, computed)) if is_copied else 0
    moved = bytes_read(op) + sum(output_nbytes(val(op)[i]) for i in computed)
    rate = peaks.flops_rate(operand_dtype(op), is_convolution(op))
    itself = max(moved / peaks.bytes_per_s, flops(op) * _flops_share(op, computed) / rate)
    return itself + copied / peaks.bytes_per_s


def unread_seconds(op: fx.Node, peaks: Peaks) -> float:
    """What a roofline gives for those outputs of an op that nothing reads and that a mask or a flag could switch off."""
    unread = unread_outputs(op) & switchable_outputs(op)
    asked = computed_outputs(op)
    return _seconds_of(op, asked, peaks) - _seconds_of(op, asked - unread, peaks) if unread else 0.0


def _flops_share(op: fx.Node, computed: set[int]) -> float:
    """A convolution's gradients of input and weight cost the same, that of its bias next to nothing."""
    if packet_name(op) != "convolution_backward":
        return 1.0
    asked = [i for i in (0, 1) if arguments(op)["output_mask"][i]]
    return len(computed.intersection(asked)) / max(len(asked), 1)


def frozen_costs(trace: Trace, patterns: Sequence[str] = (), peaks: Peaks = H100_SXM_DATASHEET) -> FrozenCosts:
    """One `FrozenCost` per parameter or other leaf with a gradient, `patterns` frozen as `Freeze(patterns)` would.

    Raises `UnknownValue` for a pattern that matches no input that can have a gradient.
    """
    frozen = match_inputs(trace, patterns, lambda _: None)
    needs = _Needs(trace, frozen)
    gradients = {out.of: node for out, node in needs.outputs if out.kind == "gradient"}
    rows = [_row(needs, i, gradients.get(i.name), i.name in frozen, peaks) for i in _leaves(trace, gradients)]
    rows.sort(key=lambda row: (row.saved_nbytes, row.modelled_us), reverse=True)
    taken = [node for of, node in gradients.items() if of in frozen]
    name = f"all {len(taken)} frozen"
    return FrozenCosts(rows, _cost(needs, name, "frozen", taken, needs.grown(taken, needs.live), peaks), peaks)


def _leaves(trace: Trace, gradients: Mapping[str, fx.Node]) -> list[Input]:
    """Inputs with a gradient, and parameters that could have one."""
    return [
        i for i, p in trace.input_pairs if i.name in gradients or (i.kind == "parameter" and is_differentiable(p, i))
    ]


def _row(needs: _Needs, entry: Input, gradient: fx.Node | None, is_frozen: bool, peaks: Peaks) -> FrozenCost:
    if gradient is None:
        return FrozenCost(entry.source, "not captured")
    part = needs.grown([gradient], needs.live) if is_frozen else needs.dying(gradient)
    return _cost(needs, entry.source, "frozen" if is_frozen else "trained", [gradient], part, peaks)
