"""Reasons of remat: a decision for each value that it keeps or recomputes, with numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from tracefuse.optimizers.costs.cost import Peaks, bytes_moved, roofline_seconds
from tracefuse.optimizers.facts import stored_bytes
from tracefuse.optimizers.ops import behind_views, does_work, op_name, producer
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.remat.forward import Forward, is_several
from tracefuse.optimizers.trace import human_bytes, origin

if TYPE_CHECKING:
    from tracefuse.optimizers.remat.choice import Choice

_FROM = "less than what it could be recomputed from"


def explain(forward: Forward, choice: Choice, peaks: Peaks) -> list[Decision]:
    """One decision for each value that is saved, and for each that the backward reads and recomputes."""
    wanted = {behind_views(n) for n in forward.read} | choice.kept
    told: set[fx.Node] = set()
    decisions = _overruled(forward, choice)
    for node in forward.nodes:
        if node in choice.kept:
            decisions.append(Decision(node.name, "save", _why_kept(node, choice, peaks), stored_bytes(node)))
        elif node in wanted and node in choice.again:
            why = _why_again(node, choice, told, peaks)
            decisions.append(Decision(node.name, "recompute", why, stored_bytes(node)))
        elif node in forward.checkpointed and not is_several(node) and node not in choice.again:
            decisions.append(Decision(node.name, "drop", _checkpointed(forward, node), stored_bytes(node)))
    return decisions


def _overruled(forward: Forward, choice: Choice) -> list[Decision]:
    """What is said where bytes alone decided."""
    if choice.weighed is None:
        return []
    by_factors, as_it_is = human_bytes(choice.weighed), human_bytes(forward.saved)
    reason = (
        f"by them the forward would keep {by_factors}, as it is {as_it_is}: so bytes alone decide in the whole program"
    )
    return [Decision("factors", "overrule", reason)]


def _checkpointed(forward: Forward, node: fx.Node) -> str:
    """Only the reentrant kind leaves its name in the trace: the other runs the block inside the node that asks for it."""
    again = forward.checkpointed[node]
    if origin(again).autograd == "CheckpointFunctionBackward":
        return f"recomputed by torch.utils.checkpoint, as {again.name}: never saved"
    return f"recomputed by the backward that was given, as {again.name} (torch.utils.checkpoint does that): never saved"


def _why_kept(node: fx.Node, choice: Choice, peaks: Peaks) -> str:
    op = producer(node)
    ban = choice.banned.get(op) or choice.banned.get(node)
    if ban == "heavy":
        why = f"{op_name(op)} is neither pointwise nor a reduction, and so not run again ({_cost([op], peaks)})"
        return f'{why}; recompute="{node.name}" would do so'
    if ban:
        return ban
    return _weighed(node, choice) if choice.rate is None else _bought(node, choice, peaks)


def _weighed(node: fx.Node, choice: Choice) -> str:
    op = producer(node)
    price = choice.prices[op]
    instead = f"to run {op_name(op)} again moves {human_bytes(price)}, as a kernel of its own" if price else _FROM
    if choice.weighed is not None:
        return f"{human_bytes(stored_bytes(node))}: {instead}"
    weighed = f"weighed as {human_bytes(choice.weights[node])} by the pass's factors"
    return f"{human_bytes(stored_bytes(node))}, {weighed}: {instead}"


def _bought(node: fx.Node, choice: Choice, peaks: Peaks) -> str:
    """Why a memory budget keeps a value: what it costs to run its op again, beside what the budget pays for its bytes."""
    op, size = producer(node), stored_bytes(node)
    if choice.prices[op] < size:
        return f"{human_bytes(size)}: {_FROM}"
    worth = f"at this budget {human_bytes(size)} are worth {_time(size / choice.rate)}"  # type: ignore[operator]
    return f"to run {op_name(op)} again is too slow ({_cost([op], peaks)}): {worth}"


def _why_again(node: fx.Node, choice: Choice, told: set[fx.Node], peaks: Peaks) -> str:
    """Each recomputed op is charged to the first value that needs it, so that the costs of all decisions add up."""
    ops, sources = _behind(node, choice, told)
    pin = choice.pins.get(node)
    asked = f'pinned by recompute="{pin.glob}": ' if pin is not None else ""
    if not ops:
        return f"{asked}comes with {', '.join(s.name for s in sources)}"
    names = ", ".join(s.name for s in sources[:3]) + (f" and {len(sources) - 3} more" if len(sources) > 3 else "")
    return f"{asked}{len(ops)} op{'s' * (len(ops) > 1)} again from {names or 'no value'}: {_cost(ops, peaks)}"


def _cost(ops: list[fx.Node], peaks: Peaks) -> str:
    moved, seconds = sum(map(bytes_moved, ops)), sum(roofline_seconds(op, peaks) for op in ops)
    return f"{human_bytes(moved)} moved, modelled as {_time(seconds)} by the {peaks.source}"


def _time(seconds: float) -> str:
    if seconds < 1e-9:
        return "less than 1 ns"
    return f"{seconds * 1e6:.3g} us" if seconds >= 1e-6 else f"{seconds * 1e9:.3g} ns"


def _behind(node: fx.Node, choice: Choice, told: set[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """(recomputed ops behind `node` not yet told of, the values that they start from)."""
    ops: list[fx.Node] = []
    sources: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in choice.again or (current in told and current is not node):
            sources[current] = None
        elif current not in told:
            told.add(current)
            ops += [current] if does_work(current) else []
            stack += current.all_input_nodes
    return ops, list(sources)
