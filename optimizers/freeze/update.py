"""Frozen parameters in the update: without a gradient an optimizer passes them by, with their state.

    before   n = _foreach_norm([ga, gb]); s = stack([n[0], n[1]]); p = _fused_adamw([a, b], [ga, gb], …);  a, b written
    after    n = _foreach_norm([ga]);     s = stack([n[0]]);       p = _fused_adamw([a], [ga], …);         a written

Lists of ops over many tensors get shorter, and so do those that a norm is taken of. What reads a frozen parameter's new value,
as an average of weights does, reads the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from tracefuse.optimizers.freeze.prune import UNFREEZE, hits
from tracefuse.optimizers.ops import is_getitem, is_mutable, is_random, op_name
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.trace import Input, Trace, nbytes, val

_OF_EACH = ("aten._foreach_", "aten._fused_")
"""Ops that compute each result from one tensor of each list."""
_CHECKS = ("aten._amp_foreach_",)
"""Ops that do, and compute something of all of them besides."""


def frozen_gradients(trace: Trace, patterns: Sequence[str]) -> set[str]:
    """Names of the gradients that the update no longer gets, by `patterns` as of `freeze`."""
    candidates = [replace(i, name=i.name.removeprefix("grad_")) for i in trace.inputs if i.kind == "gradient"]
    frozen: set[str] = set()
    for pattern in patterns:
        found = {f"grad_{name}" for name in hits(pattern.removeprefix(UNFREEZE), candidates)}
        frozen = frozen - found if pattern.startswith(UNFREEZE) else frozen | found
    return frozen & {i.name for i in trace.inputs}


def freeze_update(trace: Trace, frozen: set[str], decide: Decide) -> Trace:
    """`trace`, an update of one's own, without what it does with the gradients called `frozen`."""
    sources = {i.source for i in trace.inputs if i.name in frozen}
    gone = {i.name for i in trace.inputs if i.name in frozen or _owner(i) in sources}
    parameters = {p.name: p for p in trace.placeholders}
    pairs = trace.output_pairs
    kept = trace.with_outputs([(out, node) for out, node in pairs if out.kind != "mutation" or out.of not in gone])
    for out, node in pairs:
        if out.kind == "mutation" and out.of in gone:
            decide(Decision(node.name, "dropped", f"the new value of {out.of}, which is frozen", nbytes(node)))
            if trace.input_of(out.of).kind == "parameter":
                node.replace_all_uses_with(parameters[out.of])
    tainted = _tainted(kept.graph, {parameters[name] for name in frozen})
    for node in reversed(list(kept.graph.nodes)):
        if node.op == "call_function":
            _prune(node, tainted)
    return kept


def _owner(entry: Input) -> str:
    """The parameter that an input is, or is kept for."""
    return (
        entry.source.partition(" of ")[2]
        if entry.kind == "state"
        else entry.source
        if entry.kind == "parameter"
        else ""
    )


def _tainted(graph: fx.Graph, frozen: set[fx.Node]) -> set[fx.Node]:
    """What is computed from these gradients alone; lists that anything else is computed from lose what is."""
    tainted = set(frozen)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if is_getitem(node):
            of, places = _place(node)
            is_one = not isinstance(val(node), (tuple, list))
            if is_one and _is_over_lists(of) and any(one[places[-1]] in tainted for one in _lists(of)):
                tainted.add(node)
        elif not _is_over_lists(node):
            node.args = tuple(_without(arg, tainted) for arg in node.args)
            if any(arg in tainted for arg in node.args if isinstance(arg, fx.Node)):
                tainted.add(node)
    return tainted


def _without(arg: Any, tainted: set[fx.Node]) -> Any:
    is_list = isinstance(arg, (list, tuple)) and any(isinstance(one, fx.Node) for one in arg)
    rest = [one for one in arg if one not in tainted] if is_list else []
    return rest or arg


def _is_over_lists(node: fx.Node) -> bool:
    return op_name(node).startswith((*_OF_EACH, *_CHECKS)) and bool(_lists(node))


def _lists(node: fx.Node) -> list[Any]:
    """The lists of tensors that an op takes, all of one length."""
    return [a for a in node.args if isinstance(a, (list, tuple)) and a and isinstance(a[0], fx.Node)]


def _place(node: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
    """The op that a result is of, and where it stands there: `op[0][3]`."""
    places: tuple[int, ...] = ()
    while is_getitem(node):
        places = (node.args[1], *places)  # type: ignore[assignment]
        node = node.args[0]  # type: ignore[assignment]
    return node, places


def _prune(node: fx.Node, tainted: set[fx.Node]) -> None:
    """Erase an op that nothing reads; take from the lists of any other what nobody reads. Readers come first."""
    if not node.users and not is_mutable(node) and not is_random(node):
        node.graph.erase_node(node)
    elif not is_getitem(node) and _is_over_lists(node):
        read = _read_places(node)
        count = len(_lists(node)[0])
        if op_name(node).startswith(_CHECKS):
            read |= {at for at in range(count) if not any(one[at] in tainted for one in _lists(node))}
        if read and len(read) < count:
            _shorten(node, sorted(read), count)


def _items(node: fx.Node) -> list[fx.Node]:
    """The single tensors that are taken from what an op over lists returns."""
    found = []
    for item in node.users:
        if is_getitem(item):
            found += _items(item) if isinstance(val(item), (list, tuple)) else [item]
    return found


def _read_places(node: fx.Node) -> set[int]:
    in_lists = [item for item in _items(node) if isinstance(val(item.args[0]), (list, tuple))]  # type: ignore[arg-type]
    is_tuple = any(isinstance(one, (list, tuple)) for one in val(node))
    return {item.args[1] for item in in_lists if not is_tuple or item.args[0] is not node}  # type: ignore[misc]


def _shorten(node: fx.Node, kept: list[int], count: int) -> None:
    """Let an op over lists take and return what stands at `kept` only."""

    def shorter(one: Any) -> Any:
        is_one = isinstance(one, (list, tuple)) and len(one) == count
        return type(one)([one[at] for at in kept]) if is_one else one

    made, is_tuple = val(node), any(isinstance(one, (list, tuple)) for one in val(node))
    places = {at: place for place, at in enumerate(kept)}
    for item in _items(node):
        if not is_tuple or item.args[0] is not node:
            item.args = (item.args[0], places[item.args[1]])  # type: ignore[index]
    for part in node.users:
        if is_tuple and isinstance(val(part), (list, tuple)):
            part.meta["val"] = shorter(val(part))
    node.args = tuple(map(shorter, node.args))
    node.meta["val"] = type(made)(map(shorter, made)) if is_tuple else shorter(made)
