"""Findings about Python's loops: a sample or a step at a time, concatenations that grow, and writes into slices."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.findings.finding import Case, Finding
from tracefuse.lint.facts import longest_chain, module_and_function, parts_of, users_of, with_backward
from tracefuse.measure.launches import HOST_US, MEASURED
from tracefuse.optimizers.costs.cost import bytes_moved, packet_name
from tracefuse.optimizers.ops import does_work, grouped, is_getitem, reached
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin, val
from tracefuse.text import counted, time_text

FEWEST = 8
"""Rounds from which on a loop over samples is worth a word."""
_AT_ONCE = "compute it of the whole batch at once; a function of one sample becomes one of a batch by `torch.vmap`"
_SELECTING = (
    "compute it of the whole batch at once, with `masked_fill` or `torch.where` in place of a selection by a boolean mask: "
    '`x.masked_fill(~mask, float("-inf")).amax(1)` instead of `x[i][mask[i]].max()` in a loop'
)
_OF_ALL_STEPS = (
    "compute it for all steps before the loop, as `x @ w` in place of `x[t] @ w`, and leave in the loop what needs the step "
    "before; `merge_matmuls` does so to small matmuls"
)
_OF_PARTS = (
    "make the whole of its parts, `torch.cat` or `torch.stack`, or `torch.where` for a mask, instead of writing into "
    "`out[…]`"
)
_OUT_OF_PLACE = (
    "leave out the in-place, `inplace=False` of a module and `relu(x)` for `relu_(x)`: what it writes to is a view of what "
    "the op before it made"
)
_CELLS = ("RNNCell", "LSTMCell", "GRUCell")
"""Modules of torch's that compute one step of a sequence, of which `torch.vmap` makes no sequence."""
GROWING = 4
"""Concatenations, each of the one before."""
MOST_SHARED = 8
"""How many times the ops of the trace rounds may reach in all: those that need each other reach the same again and again."""


@dataclass(frozen=True)
class _Loop:
    """A loop over the parts of `base`: its `ops` that need one part each, of so many, and whether other ops of it need what
    the round before made."""

    base: fx.Node
    ops: list[fx.Node]
    rounds: int
    is_recurrent: bool

    @property
    def remedy(self) -> str:
        if self.is_recurrent:
            return _OF_ALL_STEPS
        return _SELECTING if any(map(_selects, self.ops)) else _AT_ONCE


def loops_over_samples(case: Case) -> Iterator[Finding]:
    """Loops that compute the same of each sample of a batch, and of no round what another one made."""
    for at, loop in _loops(case).items():
        ops, rounds = loop.ops, loop.rounds
        every = with_backward(case, ops)
        launches = HOST_US * len(every) * (rounds - 1) / rounds
        waited = launches - case.us(every)
        yield from case.finding(
            "per-sample-loop",
            case.severity(waited, case.step_us + waited),
            f"a loop computes the same for each of {rounds} {'steps' if loop.is_recurrent else 'samples'} of "
            f"{list(val(loop.base).shape)}",
            (
                ("ops", f"{len(ops)} in the forward, {len(every) - len(ops)} in the backward"),
                ("kernels take", f"{time_text(case.us(every))} ({case.times.provenance})"),
                ("launching takes", f"{time_text(launches)}: {MEASURED}"),
            ),
            ops,
            at,
            loop.remedy,
            f"at most {time_text(waited)} a step, if the GPU waits for the host (modelled)",
            kind="modelled",
        )


def _loops(case: Case) -> dict[str, _Loop]:
    """The loops over what is taken apart along its first dimension, by the line of most of their ops."""
    found: dict[str, _Loop] = {}
    own = set(case.own_ops)
    parts = [n for n in case.trace.ops if case.half[n] == "forward" and not origin(n).autograd and _is_part(n)]
    for base, group in grouped(parts, _whole).items():
        pieces = {str(n.args[1:]): n for n in group}
        if len(pieces) < FEWEST:
            continue
        of = _rounds_of(pieces.values())
        if sum(map(int.bit_count, of.values())) > MOST_SHARED * len(case.trace.ops):
            continue
        lines: dict[str, int] = {}
        for node, rounds in of.items():
            lines[line_of(node)] = lines.get(line_of(node), 0) | rounds
        shared = {line for line, rounds in lines.items() if rounds.bit_count() == len(pieces)}
        # What depends on several rounds is no round's.
        inside = [n for n, rounds in of.items() if rounds.bit_count() == 1 and line_of(n) in shared and n in own]
        inside = [n for n in inside if not origin(n).ran_in(*_CELLS)]
        if not inside or longest_chain(case.trace, inside) >= len(pieces):
            continue
        count = Counter(map(line_of, inside))
        loop = _Loop(base, inside, len(pieces), _is_carried(of, len(pieces)))
        found.setdefault(max(count, key=count.__getitem__), loop)
    return _without_repeats(found)


def _is_carried(of: Mapping[fx.Node, int], rounds: int) -> bool:
    """Whether most rounds need what those before them made, for more than adding to it."""
    counts = {needed.bit_count() for node, needed in of.items() if packet_name(node) != "add"}
    return len(counts - {1, rounds}) > rounds // 2


def _without_repeats(found: dict[str, _Loop]) -> dict[str, _Loop]:
    """The loops without those that another one of more ops says already: a loop may take several tensors apart."""
    kept: dict[str, _Loop] = {}
    for at, one in sorted(found.items(), key=lambda pair: -len(pair[1].ops)):
        lines = set(map(line_of, one.ops))
        if not any(lines & set(map(line_of, other.ops)) for other in kept.values()):
            kept[at] = one
    return {at: one for at, one in found.items() if at in kept}


def _selects(node: fx.Node) -> bool:
    """Whether an op picks by a boolean mask, so that its result has another shape for each sample."""
    masks = (
        node.args[1] if packet_name(node) == "index" else [node.args[1]] if packet_name(node) == "masked_select" else []
    )
    return any(isinstance(mask, fx.Node) and val(mask).dtype == torch.bool for mask in masks)  # type: ignore[union-attr]


def _is_part(node: fx.Node) -> bool:
    """Whether the value is one index, or a slice, along the first dimension of another one."""
    if is_getitem(node):
        return packet_name(node) in ("unbind", "split", "split_with_sizes", "chunk") and _dim(node.args[0]) == 0  # type: ignore[arg-type]
    return packet_name(node) in ("select", "slice") and len(node.args) > 1 and node.args[1] == 0


def _dim(node: fx.Node) -> int:
    at = 1 if packet_name(node) == "unbind" else 2
    return node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)  # type: ignore[return-value]


def _whole(node: fx.Node) -> fx.Node:
    source = node.args[0]
    return source.args[0] if is_getitem(node) else source  # type: ignore[union-attr,return-value]


def _rounds_of(pieces: Collection[fx.Node]) -> dict[fx.Node, int]:
    """What the forward computes of the pieces, in the order of the trace; of each op a bit for every piece that it needs."""
    needs = {node: 1 << at for at, node in enumerate(pieces)}
    for node in sorted(reached(pieces, lambda one: (user for user in users_of(one) if not origin(user).autograd))):
        for operand in node.all_input_nodes:
            needs[node] = needs.get(node, 0) | needs.get(operand, 0)
    return {node: rounds for node, rounds in needs.items() if does_work(node)}


# --- concatenations ---------------------------------------------------------------------------------------------------


def growing_concatenations(case: Case) -> Iterator[Finding]:
    """`x = torch.cat([x, y])` in a loop: each round copies what all rounds before have made."""
    for last in [n for n in case.own_ops if packet_name(n) == "cat" and not _next_in_chain(n)]:
        chain = _chain(last)
        if len(chain) < GROWING:
            continue
        extra = chain[:-1]
        us = case.us(with_backward(case, extra))
        launches = HOST_US * len(with_backward(case, extra))
        yield from case.finding(
            "cat-in-loop",
            case.severity(us) or (case.severity(launches, case.step_us + launches) and "low"),
            f"{len(chain)} concatenations copy {human_bytes(sum(map(nbytes, chain)))} to make {human_bytes(nbytes(last))}",
            (
                ("moved", human_bytes(sum(map(bytes_moved, chain)))),
                ("launching takes", f"{time_text(launches)} more: {MEASURED}"),
            ),
            chain,
            last,
            "append to a list in the loop, and call `torch.cat` or `torch.stack` once behind it",
            us,
        )


def _next_in_chain(cat: fx.Node) -> fx.Node | None:
    """The concatenation of the same line that alone reads this one."""
    users = [user for user in cat.users if user.op == "output" or not origin(user).autograd]
    if len(users) != 1 or users[0].op == "output" or packet_name(users[0]) != "cat":
        return None
    return users[0] if line_of(users[0]) == line_of(cat) else None


def _chain(last: fx.Node) -> list[fx.Node]:
    chain = [last]
    while True:
        before = [p for p in parts_of(chain[0]) if packet_name(p) == "cat" and _next_in_chain(p) is chain[0]]
        if not before:
            return chain
        chain.insert(0, before[0])


# --- writes into slices -----------------------------------------------------------------------------------------------


def writes_into_views(case: Case) -> Iterator[Finding]:
    """Writes into slices of a tensor with a gradient, and ops in place on a view of one, whose backward copies the whole
    gradient for each: `CopySlices`."""
    late = [n for n in case.trace.ops if origin(n).autograd == "CopySlices" and does_work(n)]
    own = [n for n in case.trace.ops if not origin(n).autograd and case.half[n] == "forward"]
    forward = sorted((n for n in own if origin(n).seq is not None), key=lambda n: origin(n).seq or 0)
    wrote = {n: _write_before(n, forward) for n in late}
    for (_, _, of_whole), group in grouped(late, lambda n: (*module_and_function(wrote[n]), _is_op(wrote[n]))).items():
        us, at = case.us(group), line_of(wrote[min(group, key=lambda n: origin(wrote[n]).seq or 0)])
        count, moved = len({origin(n).seq for n in group}), human_bytes(max(map(nbytes, group)))
        done = f"{counted(count, 'op')} in place on a view" if of_whole else f"{counted(count, 'write')} into slices"
        cost = f"cost{'s' * (count == 1)} the backward {counted(len(group), 'op')}: CopySlices"
        yield from case.finding(
            "write-into-view",
            case.severity(us),
            f"{done} {cost}",
            (
                ("moved in the backward", human_bytes(sum(map(bytes_moved, group)))),
                ("each", f"copies a gradient of {moved} to clear what was written"),
            ),
            group,
            at,
            _OUT_OF_PLACE if of_whole else _OF_PARTS,
            us,
        )


def _is_op(write: fx.Node) -> bool:
    """Whether it computes what it writes from what was there, and is no assignment to a part."""
    name = packet_name(write)
    return not any(part in name for part in ("scatter", "slice", "select", "copy", "fill", "put", "as_strided"))


def _write_before(node: fx.Node, forward: Sequence[fx.Node]) -> fx.Node:
    """The write that autograd numbered right before its CopySlices."""
    before = bisect_left(forward, origin(node).seq or 0, key=lambda n: origin(n).seq or 0)
    return forward[before - 1] if before else node
