"""Long sums: trees of adds that become one kernel each, the same one for any number of operands.

    add_1 = aten.add.Tensor(a, b)
    add_2 = aten.add.Tensor(add_1, c)            add_7 = long_sum_f32_1c0ffe(a, b, c, d, e, f, g, h)
    ...
    add_7 = aten.add.Tensor(add_6, h)

Where every layer sums the residual stream anew, or a tensor gathers gradients from every layer, a model has sums of as many
lengths as it has layers, and unrolled each is a kernel of its own. One walk finds them: an add takes over the operands of
the adds that only it reads. What bounds a sum:

    type      dense values of one dtype, shape, strides, device and phase, no factor `alpha`
    SHORTEST  fewer operands compile as fast unrolled
    WAITING   adding one by one, a program may free each operand before it makes the next, where one kernel needs them all:
              a sum is cut, its parts added up, before more than so many operands would outlive their last reader
    WORTH     an op that an ordinary kernel would compute on the way in or out writes its value and reads it again: the sum
              stays with ordinary kernels where that is more than 1 / WORTH of what it moves
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.facts import is_dense, once_per_value
from tracefuse.optimizers.kernels.fusible import is_free
from tracefuse.optimizers.kernels.long_sum import POINTEE, LongSum, long_sum
from tracefuse.optimizers.ops import aten, readers
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import human_bytes, nbytes, phase, val

_ADD = aten.add.Tensor

SHORTEST = 8
WAITING = 16
WORTH = 8


@dataclass
class _Sum:
    """What an add stands for: `(operand, the add that reads it)` in the order of addition, and the adds in between."""

    terms: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    inner: list[fx.Node] = field(default_factory=list)


def form_long_sums(graph: fx.Graph, fusible: set[fx.Node], decide: Decide) -> None:
    """Put a `LongSum` in place of each long tree of adds, under the name of its last add. Edits `graph`.

    `fusible` are the ops that a kernel may hold; ops that are gone, or are kernels now, leave it. Each sum that is formed,
    and each that is not worth it, is told to `decide`.
    """
    position = {node: at for at, node in enumerate(graph.nodes)}
    kernels: dict[Any, LongSum] = {}
    for root, found in _sums(graph, fusible).items():
        if len(found.terms) < SHORTEST:
            continue
        extra = _extra_values(root, found, fusible)
        if extra * WORTH > len(found.terms) + 1:
            decide(Decision(root.name, "unroll", _not_worth(len(found.terms), extra, root)))
            continue
        kernel = kernels.setdefault(_summed_type(root), long_sum(root))
        parts = _write(graph, root, found, kernel, position)
        fusible -= {root, *found.inner}
        decide(_decision(root, len(found.terms), parts, kernel))


def has_long_sums(graph: fx.Graph) -> bool:
    """Whether there is a tree of adds that `form_long_sums` may put something in place of, whatever is fusible."""
    return any(len(found.terms) >= SHORTEST for found in _sums(graph, set(graph.nodes)).values())


# --- finding ----------------------------------------------------------------------------------------------------------


def _sums(graph: fx.Graph, fusible: set[fx.Node]) -> dict[fx.Node, _Sum]:
    """The sums of two operands or more, by their last add."""
    sums: dict[fx.Node, _Sum] = {}
    for node in graph.nodes:
        if node.target is _ADD and node in fusible and _is_plain_add(node):
            first, second = (a if _continues(a, node, sums) else None for a in node.args)
            # Addition commutes: where one operand is a sum, the other is added to it, as ATen did.
            order = node.args if first is not None or second is None else node.args[::-1]
            sums[node] = _joined(node, order, sums)  # type: ignore[arg-type]
    return sums


def _joined(add: fx.Node, operands: Sequence[fx.Node], sums: dict[fx.Node, _Sum]) -> _Sum:
    """The sum that ends in `add`. The sum that it goes on from is taken out of `sums` and grows in place."""
    continued = [o for o in operands if _continues(o, add, sums)]
    whole, other = (sums.pop(o) if o in continued else _Sum([(o, add)]) for o in operands)
    whole.terms += other.terms
    whole.inner += [*other.inner, *continued]
    return whole


def _continues(operand: Any, add: fx.Node, sums: dict[fx.Node, _Sum]) -> bool:
    """Whether `operand` is a sum of the same phase that only `add` reads, once."""
    is_alone = operand in sums and len(operand.users) == 1 and add.args[0] is not add.args[1]
    return is_alone and phase(operand) == phase(add)


def _is_plain_add(node: fx.Node) -> bool:
    if node.kwargs.get("alpha", 1) != 1:
        return False
    types = {_summed_type(n) if isinstance(n, fx.Node) else None for n in (node, *node.args)}
    return len(types) == 1 and None not in types


@once_per_value
def _summed_type(tensor: Any) -> tuple[Any, ...] | None:
    """Dtype, shape, strides and device of a value that can be summed address by address; None for others."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in POINTEE:
        return None
    shape, stride = tuple(tensor.shape), tensor.stride()
    return (tensor.dtype, shape, stride, tensor.device) if is_dense(shape, stride) else None


# --- judging ----------------------------------------------------------------------------------------------------------


def _extra_values(root: fx.Node, found: _Sum, fusible: set[fx.Node]) -> int:
    """How many values of the sum's size are written or read only because the ops beside it are other kernels."""
    adds = {root, *found.inner}
    inward = sum(o in fusible and not is_free(o) and adds.issuperset(o.users) for o, _ in found.terms)
    fused = [user in fusible for user in readers(root)]
    return 2 * inward + (any(fused) + all(fused) if fused else 0)


def _not_worth(operands: int, extra: int, root: fx.Node) -> str:
    more, least = human_bytes(extra * nbytes(root)), human_bytes((operands + 1) * nbytes(root))
    cost = f"it would cost the ops beside it {more}, and itself moves {least}"
    return f"a sum of {operands}: as a kernel of its own {cost}"


def _decision(root: fx.Node, operands: int, parts: int, kernel: LongSum) -> Decision:
    own, alone = kernel.nbytes_for(operands + parts - 1) + (parts - 1) * nbytes(root), 3 * (operands - 1) * nbytes(root)
    cut = f", in {parts} parts so that at most {WAITING} wait for the others" if parts > 1 else ""
    moved = f"it moves {human_bytes(own)}, one by one they move {human_bytes(alone)}"
    reason = f"{operands} operands in {kernel.name}{cut}: {moved}"
    return Decision(root.name, "fuse", reason, alone - own)


# --- writing ----------------------------------------------------------------------------------------------------------


def _write(graph: fx.Graph, root: fx.Node, found: _Sum, kernel: LongSum, position: dict[fx.Node, int]) -> int:
    """Make `root` the call of the kernel, after calls for the parts that are added up before; how many calls that is."""
    *parts, last = _cut(found.terms, position)
    carried: list[fx.Node] = []
    for part in parts:
        reader = max((add for _, add in part), key=position.__getitem__)
        with graph.inserting_before(reader):
            carried = [_partial(graph, root, kernel, [*carried, *(o for o, _ in part)])]
    root.target, root.args = kernel, (*carried, *(o for o, _ in last))
    for add in sorted(found.inner, key=position.__getitem__, reverse=True):
        graph.erase_node(add)
    return len(parts) + 1


def _partial(graph: fx.Graph, root: fx.Node, kernel: LongSum, operands: Sequence[fx.Node]) -> fx.Node:
    node = graph.create_node("call_function", kernel, tuple(operands), name=f"{root.name}_part")
    tensor = val(root)
    with tensor.fake_mode:
        own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    node.meta = {**root.meta, "val": own}
    return node


def _cut(terms: Sequence[tuple[fx.Node, fx.Node]], position: dict[fx.Node, int]) -> list[list[tuple[fx.Node, fx.Node]]]:
    """The terms in groups; in each, at most `WAITING` operands would be dead before the last one is made."""
    groups: list[list[tuple[fx.Node, fx.Node]]] = [[]]
    ready, waiting, alive = 0, 0, []
    for operand, add in terms:
        ready = max(ready, position[operand])
        while alive and alive[0] < ready:
            heapq.heappop(alive)
            waiting += 1
        if waiting > WAITING:
            groups.append([])
            ready, waiting, alive = position[operand], 0, []
        groups[-1].append((operand, add))
        heapq.heappush(alive, _last_reader(operand, position))
    return groups


def _last_reader(operand: fx.Node, position: dict[fx.Node, int]) -> int:
    """Position of the last op that reads a value. The caller's own inputs live to the end."""
    if operand.op == "placeholder":
        return len(position)
    return max(position.get(user, 0) for user in operand.users)
