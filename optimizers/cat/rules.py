"""The rules R1 and R2, and the sweep that tries all five rules; `cat` describes them."""

from __future__ import annotations

from torch import fx

from tracefuse.optimizers.axes import Range, as_range, cat_parts, range_users
from tracefuse.optimizers.cat.forms import flatten, unstack
from tracefuse.optimizers.cat.packed_attention import CONCATENATIONS, Packing, pack_gradients
from tracefuse.optimizers.cat.pushes import push, push_before_copy
from tracefuse.optimizers.cat.readers import REDUCTIONS, reduce_parts, tell_readers
from tracefuse.optimizers.cat.runs import join_runs
from tracefuse.optimizers.cat.sums import join_padded
from tracefuse.optimizers.formulas.addends import as_sum
from tracefuse.optimizers.ops import aten, is_getitem, read_by
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import is_newly_saved, replace_under_name, replace_value
from tracefuse.optimizers.trace import call, eliminate_dead_code, human_bytes, nbytes, phase, shape_of

_CAT = aten.cat.default
Part = tuple[fx.Node, int, int]  # an operand and the part of it: operand[start:stop] along the axis of the cat


# --- R1: ranges of a concatenation ------------------------------------------------------------------------------------


def narrow_range(node: fx.Node, decide: Decide) -> bool:
    """R1 on one op. Returns whether it was replaced."""
    found = as_range(node) if _may_read_cat(node) else None
    if found is None or found.base.target is not aten.cat.default or not node.users:
        return False
    axis, _ = cat_parts(found.base)
    if axis != found.axis:
        decide(Decision(node.name, "kept", f"{found.base.name} concatenates axis {axis}, this takes axis {found.axis}"))
        return False
    parts = parts_of(found)
    refusal = _would_cost(node, found, parts) or _replace_by_parts(node, found, parts)
    if refusal:
        decide(Decision(node.name, "kept", f"a part of the cat {found.base.name}, but {refusal}"))
        return False
    names = ", ".join(operand.name for operand, _, _ in parts)
    decide(Decision(node.name, "slice of cat", f"lies in {names} of {found.base.name}"))
    return True


def _may_read_cat(node: fx.Node) -> bool:
    """Whether an op reads a concatenation, a part of several results through the op that yields them."""
    whole = node._args[0] if is_getitem(node) else node
    return any(one.target is _CAT for one in read_by(whole))  # type: ignore[arg-type]


def parts_of(found: Range) -> list[Part]:
    """What of the operands of the cat `found.base` the range covers."""
    _, operands = cat_parts(found.base)
    return [
        (operand, max(found.start, start) - start, min(found.stop, stop) - start)
        for operand, start, stop in operands
        if start < found.stop and found.start < stop
    ]


def _would_cost(node: fx.Node, found: Range, parts: list[Part]) -> str | None:
    """Why replacing the range by its parts would write or keep more memory than it saves; None if it would not."""
    if not parts:
        return "it has no elements"
    survivors = _survivors(found.base, found.axis)
    late = phase(node) == "backward" and any(is_newly_saved(operand) for operand, _, _ in parts)
    if survivors and late:
        return f"the forward would have to keep its operands as well: {survivors[0].name} still reads it"
    if len(parts) == 1:
        return None
    if survivors:
        return f"it spans {len(parts)} operands and {survivors[0].name} still reads the whole"
    written = sum(nbytes(n) for n in range_users(found.base) if len(parts_of(as_range(n))) > 1)  # type: ignore[arg-type]
    if written >= nbytes(found.base):
        return f"the smaller cats would write {human_bytes(written)}, this one {human_bytes(nbytes(found.base))}"
    return None


def _survivors(cat: fx.Node, axis: int) -> list[fx.Node]:
    """Readers that need the concatenation itself, being no range along its axis."""
    ranges = {user: as_range(user) if user.op == "call_function" else None for user in range_users(cat)}
    return [user for user, found in ranges.items() if found is None or found.base is not cat or found.axis != axis]


def _replace_by_parts(node: fx.Node, found: Range, parts: list[Part]) -> str | None:
    operand, start, stop = parts[0]
    if found.squeezes:
        return replace_under_name(node, lambda: call(node, aten.select.int, operand, found.axis, start))
    if len(parts) == 1 and stop - start == shape_of(operand)[found.axis]:
        return replace_value(node, operand)
    return replace_under_name(node, lambda: _build_parts(node, found.axis, parts))


def _build_parts(node: fx.Node, axis: int, parts: list[Part]) -> fx.Node:
    pieces = []
    for operand, start, stop in parts:
        whole = stop - start == shape_of(operand)[axis]
        pieces.append(operand if whole else call(node, aten.slice.Tensor, operand, axis, start, stop))
    return pieces[0] if len(pieces) == 1 else call(node, aten.cat.default, pieces, axis)


# --- the pass ---------------------------------------------------------------------------------------------------------


def sweep(graph: fx.Graph, decide: Decide, packing: Packing) -> bool:
    """R1 to R3 wherever they apply; where nothing is left for them, R4 and R5."""
    changed = False
    for node in _live(graph):
        changed |= narrow_range(node, decide) or (bool(node.users) and _cancel(node, decide, packing))
    for node in [n for n in graph.nodes if as_sum(n) is not None]:
        changed |= bool(node.users) and join_padded(node, decide)
    if not changed and any(node.target is _CAT for node in graph.nodes):
        for node in _live(graph):
            changed |= bool(node.users) and _take_parts(node, decide)
    return bool(eliminate_dead_code(graph)) or changed


def _live(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and n.users]


def _cancel(node: fx.Node, decide: Decide, packing: Packing) -> bool:
    """R2, or another form, of one op. Returns whether it was replaced."""
    if node.target not in CONCATENATIONS:
        return False
    if pack_gradients(node, packing, decide):
        return True
    if node.target is aten.stack.default:
        return unstack(node, decide)
    return flatten(node, decide) or join_runs(node, decide)


def _take_parts(node: fx.Node, decide: Decide) -> bool:
    """R4 or R5 on one op. Returns whether it was replaced."""
    if node.target is aten.cat.default:
        return tell_readers(node, decide)
    if node.target in REDUCTIONS:
        return reduce_parts(node, decide)
    return (node.target is aten.clone.default and push_before_copy(node, decide)) or push(node, decide)
