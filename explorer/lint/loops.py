"""Findings about Python's loops: a sample at a time, concatenations that grow, and writes into slices."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import fx

from tracefuse.findings.finding import HOST_US, MEASURED, Case, Finding
from tracefuse.lint.facts import longest_chain, module_and_function, parts_of, users_of, with_backward
from tracefuse.optimizers.costs.cost import bytes_moved, packet_name
from tracefuse.optimizers.ops import does_work, grouped, is_getitem, reached
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin, val
from tracefuse.text import counted, time_text

FEWEST = 8
"""Rounds from which on a loop over samples is worth a word."""
GROWING = 4
"""Concatenations, each of the one before."""
MOST_SHARED = 8
"""How many times the ops of the trace rounds may reach in all: rounds that need each other reach the same again and again."""


def loops_over_samples(case: Case) -> Iterator[Finding]:
    """Loops that compute the same of each sample of a batch, and of no round what another one made."""
    for at, (base, ops, rounds) in _rounds(case).items():
        every = with_backward(case, ops)
        launches = HOST_US * len(every) * (rounds - 1) / rounds
        waited = launches - case.us(every)
        yield from case.finding(
            "per-sample-loop",
            case.severity(waited, case.step_us + waited),
            f"a loop computes the same for each of {rounds} samples of {list(val(base).shape)}",
            (
                ("ops", f"{len(ops)} in the forward, {len(every) - len(ops)} in the backward"),
                ("kernels take", f"{time_text(case.us(every))} ({case.times.provenance})"),
                ("launching takes", f"{time_text(launches)}: {MEASURED}"),
            ),
            ops,
            at,
            "compute it of the whole batch at once; a function of one sample becomes one of a batch by `torch.vmap`",
            f"at most {time_text(waited)} a step, if the GPU waits for the host (modelled)",
            kind="modelled",
        )


def _rounds(case: Case) -> dict[str, tuple[fx.Node, list[fx.Node], int]]:
    """By line: what is taken apart along its first dimension, the ops of the rounds, and how many rounds there are."""
    found: dict[str, tuple[fx.Node, list[fx.Node], int]] = {}
    parts = [n for n in case.trace.ops if case.half[n] == "forward" and not origin(n).autograd and _is_part(n)]
    for base, group in grouped(parts, _whole).items():
        pieces = {str(n.args[1:]): n for n in group}
        if len(pieces) < FEWEST:
            continue
        of = _each_reached(pieces.values(), MOST_SHARED * len(case.trace.ops))
        if of is None:
            continue
        lines = [{line_of(n) for n in one} for one in of]
        shared = set.intersection(*lines) if all(lines) else set()
        # What depends on several rounds is no round's.
        rounds = Counter(n for one in of for n in one)
        inside = [n for n, count in rounds.items() if count == 1 and line_of(n) in shared]
        if not inside or longest_chain(case.trace, inside) >= len(pieces):
            continue
        at = max(shared, key=lambda line: len([n for n in inside if line_of(n) == line]))
        found.setdefault(at, (base, inside, len(pieces)))
    return found


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


def _each_reached(nodes: Iterable[fx.Node], most: int) -> list[set[fx.Node]] | None:
    """What the forward computes of each of the values; None for more than `most` in all, as where rounds need each other."""
    found: list[set[fx.Node]] = []
    for node in nodes:
        found.append(set(_reached(node)))
        most -= len(found[-1])
        if most < 0:
            return None
    return found


def _reached(node: fx.Node) -> Iterator[fx.Node]:
    """What the forward computes of a value."""
    found = reached([node], lambda one: (user for user in users_of(one) if not origin(user).autograd))
    return (one for one in found if one is not node and does_work(one))


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
    """Writes into slices of a tensor with a gradient, whose backward copies the whole gradient for each: `CopySlices`."""
    late = [n for n in case.trace.ops if origin(n).autograd == "CopySlices" and does_work(n)]
    own = [n for n in case.trace.ops if not origin(n).autograd and case.half[n] == "forward"]
    forward = sorted((n for n in own if origin(n).seq is not None), key=lambda n: origin(n).seq or 0)
    wrote = {n: _write_before(n, forward) for n in late}
    for group in grouped(late, lambda n: module_and_function(wrote[n])).values():
        us, at = case.us(group), line_of(wrote[min(group, key=lambda n: origin(wrote[n]).seq or 0)])
        writes = {origin(n).seq for n in group}
        yield from case.finding(
            "write-into-view",
            case.severity(us),
            f"{counted(len(writes), 'write')} into slices cost{'s' * (len(writes) == 1)} the backward "
            f"{counted(len(group), 'op')}: CopySlices",
            (
                ("moved in the backward", human_bytes(sum(map(bytes_moved, group)))),
                ("each write", f"copies a gradient of {human_bytes(max(map(nbytes, group)))} to clear a slice of it"),
            ),
            group,
            at,
            "make the whole of its parts, `torch.cat` or `torch.stack`, or `torch.where` for a mask, instead of writing into "
            "`out[…]`",
            us,
        )


def _write_before(node: fx.Node, forward: Sequence[fx.Node]) -> fx.Node:
    """The write that autograd numbered right before its CopySlices."""
    before = bisect_left(forward, origin(node).seq or 0, key=lambda n: origin(n).seq or 0)
    return forward[before - 1] if before else node
