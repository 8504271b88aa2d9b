"""What each kernel of a program stands for: the single ops that it does the work of, and how a person calls it. Pure.

    layer_norm + gelu of h.*.mlp ×12

A pass that makes kernels keeps the names of all values that remain. So the ops that a kernel replaced are those that its
results needed in the trace before that pass, back to the values that it reads.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tracefuse.optimizers.costs.cost import flops, op_class, packet_name
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, is_getitem, op_name, producer, reached, read_by
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.passes import PassRecord
from tracefuse.optimizers.trace import Trace, origin, recomputes
from tracefuse.tables.folding import OUTSIDE, name_of

Weights = Callable[[Trace], Mapping[str, float]]
"""The weights of a trace's ops by their names, such as their modelled times: what has none has `SOME`."""
SOME = 1e-9
"""The weight of an op that is modelled to take no time, in µs."""
NAMED_OPS = 2
"""A kernel is called after at most this many kinds of its ops."""


@dataclass(frozen=True)
class Replaced:
    """The ops that one call of a kernel replaced, in the order of the program, and the trace that they stood in."""

    before: Trace
    ops: tuple[fx.Node, ...]


def replaced(steps: Iterable[PassRecord]) -> dict[str, Replaced]:
    """By the name of each kernel's call what it replaced; nothing for a call that no pass of `steps` made."""
    found: dict[str, Replaced] = {}
    for step in steps:
        found |= {} if step.after is step.before else _replaced(step.before, step.after)
    return found


@once_per_trace
def _replaced(before: Trace, after: Trace) -> Mapping[str, Replaced]:
    found: dict[str, Replaced] = {}
    old = {node.name: node for node in before.graph.nodes}
    made = [n for n in after.ops if isinstance(n.target, Kernel) and not _is_kernel(old.get(n.name))]
    for call in made:
        ops = _behind([old[name] for name in _results(call) if name in old], {n.name for n in call.all_input_nodes})
        if ops:
            found[call.name] = Replaced(before, tuple(ops))
    return found


def _is_kernel(node: fx.Node | None) -> bool:
    return node is not None and isinstance(node.target, Kernel)


def _results(call: fx.Node) -> list[str]:
    parts = [user.name for user in call.users if is_getitem(user)]
    return parts or [call.name]


def _behind(results: Sequence[fx.Node], read: set[str]) -> list[fx.Node]:
    """The ops that do work for `results` and need nothing but what is `read`."""

    def inside(nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in nodes if node.name not in read and node.op == "call_function"]

    return sorted(filter(does_work, reached(inside(results), lambda node: inside(read_by(node)))))


# --- what was captured of it ---


def captured_ops(captured: Trace, steps: Iterable[PassRecord]) -> dict[str, str]:
    """By the name of each op that `steps` made, and of each that they left, the captured op that it computes, or a part of it:
    a decomposed loss is one op, whatever it became. What computes something again is none of them."""
    found = {node.name: producer(node).name for node in captured.ops}
    for step in steps:
        if step.after is step.before:
            continue
        old = {node.name for node in step.before.graph.nodes}
        for node in _rewritten(step.before, step.after):
            if node.name in found:
                new = reached([node], functools.partial(_new_operands, (old, found)))
                found |= dict.fromkeys((one.name for one in new), found[node.name])
    return found


@once_per_trace
def _rewritten(before: Trace, after: Trace) -> Sequence[fx.Node]:
    """The ops under names that another operator had; kernels are none of them."""
    old = {node.name: node.target for node in before.graph.nodes}
    named = ((node, old.get(node.name, node.target)) for node in after.ops)
    return [node for node, was in named if was is not node.target and was != node.target and not _is_kernel(node)]


def _new_operands(known: Iterable[Container[str]], node: fx.Node) -> list[fx.Node]:
    operands = (
        n for n in node.all_input_nodes if n.op == "call_function" and not any(n.name in names for names in known)
    )
    return [one for one in operands if not recomputes(one)]


def share_of_each(calls: Collection[Replaced], captured: Mapping[str, str], weights: Weights) -> list[dict[str, float]]:
    """Of each call the captured ops that it does the work of, by name, with the share of each that it does: where a captured
    op became several, or several calls compute it, by their `weights` in the trace that they stood in."""
    of_calls = [_weights(one.ops, captured, weights(one.before)) for one in calls]
    totals: dict[Trace, defaultdict[str, float]] = {}
    for one, mine in zip(calls, of_calls, strict=True):
        if one.before not in totals:
            covered = {node for other in calls if other.before is one.before for node in other.ops}
            left = (node for node in one.before.ops if does_work(node) and node not in covered)
            totals[one.before] = _weights(left, captured, weights(one.before))
        for name, part in mine.items():
            totals[one.before][name] += part
    return [
        {name: part / totals[one.before][name] for name, part in mine.items()}
        for one, mine in zip(calls, of_calls, strict=True)
    ]


def _weights(
    nodes: Iterable[fx.Node], captured: Mapping[str, str], weights: Mapping[str, float]
) -> defaultdict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        if node.name in captured and not recomputes(node):
            sums[captured[node.name]] += weights.get(node.name) or SOME
    return sums


def lines_of(one: Replaced, weights: Weights) -> dict[str, tuple[Source | None, float]]:
    """The lines whose work a call does, by their text, each with its share of the call: the largest first."""
    known, sources, sums = weights(one.before), dict[str, Source | None](), dict[str, float]()
    for node in one.ops:
        source = origin(node).source
        text = str(source or "")
        sources[text] = source
        sums[text] = sums.get(text, 0.0) + (known.get(node.name) or SOME)
    whole = sum(sums.values())
    return {text: (sources[text], sums[text] / whole) for text in sorted(sums, key=lambda text: -sums[text])}


# --- how it is called -------------------------------------------------------------------------------------------------

_SAID = {
    "mm": "matmul", "bmm": "matmul", "addmm": "matmul + bias", "baddbmm": "matmul + bias", "mv": "matmul", "dot": "matmul",
    "_to_copy": "cast", "clone": "copy", "cat": "concatenation", "nll_loss_forward": "nll_loss", "sym_sum": "sum",
    "embedding_dense_backward": "embedding backward", "add_embedding_gradient": "embedding backward",
    "searched_convolution": "convolution", "searched_convolution_backward": "convolution backward",
    "native_dropout": "dropout", "bernoulli": "dropout",
    "_softmax_backward_data": "softmax backward", "_log_softmax_backward_data": "log_softmax backward",
}  # fmt: skip
_ARITHMETIC = frozenset({
    "add", "sub", "mul", "div", "neg", "rsub", "eq", "ne", "lt", "le", "gt", "ge", "where", "full", "full_like", "zeros",
    "zeros_like", "ones_like", "scalar_tensor", "arange", "fill", "copy", "cast", "bitwise_not", "logical_not", "masked_fill",
})  # fmt: skip


def said(node: fx.Node) -> str:
    """An op as a person says it: "layer_norm backward", "matmul", "attention", "cast"."""
    name = packet_name(node) or op_name(node).removeprefix("aten.").partition(".")[0]
    if name in _SAID:
        return _SAID[name]
    if "attention" in name:
        return "attention backward" if "backward" in name else "attention"
    plain = name.strip("_").removeprefix("native_").removeprefix("fused_")
    head, mark, _ = plain.partition("_backward")
    return f"{head} backward" if mark else plain


def kernel_said(ops: Sequence[fx.Node]) -> str:
    """What a kernel does, after the ops in it that say most: "layer_norm + gelu"; of arithmetic alone "mul + add"."""
    count = Counter(said(node) for node in ops if does_work(node))
    weight = {said(node): _weight(node) for node in ops if does_work(node)}
    ranked = sorted(count, key=lambda name: (-weight[name], -count[name]))
    telling = [name for name in ranked if weight[name] > 0] or ranked
    more = len(telling) > NAMED_OPS
    return " + ".join(telling[:NAMED_OPS]) + " + …" * more if telling else "nothing"


def _weight(node: fx.Node) -> int:
    name = said(node)
    if name in _ARITHMETIC:
        return 0
    if any(word in name for word in ("norm", "softmax", "loss", "attention", "embedding", "dropout")):
        return 4
    # Such as gelu and sigmoid; what is short is arithmetic: exp, log.
    if op_class(node) == "pointwise" and len(name) > 3:
        return 3
    return 2 if op_class(node) == "reduction" else 1


def placed(calls: Sequence[fx.Node], folds: Mapping[str, str]) -> str:
    """Where calls stand, with the number of them: "of h.*.mlp ×12", "of h.* ×24", "×3"."""
    places = list(dict.fromkeys(name_of(node, folds) for node in calls))
    common = places[0] if len(places) == 1 else _common(places)
    times = f" ×{len(calls)}" if len(calls) > 1 else ""
    return (f" of {common}" if common and common != OUTSIDE else "") + times


def _common(places: Sequence[str]) -> str:
    """The module around all of them."""
    parts = [place.split(".") for place in places]
    shared = 0
    while all(len(one) > shared and one[shared] == parts[0][shared] for one in parts):
        shared += 1
    return ".".join(parts[0][:shared])


def library_said(node: fx.Node) -> str:
    """A call of a library with what tells it from others: "matmul 8192×768 · 768×3072"."""
    name = said(node)
    if not flops(node) or "matmul" not in name:
        return name
    shapes = ["×".join(map(str, operand.meta["val"].shape)) for operand in node.all_input_nodes if _is_matrix(operand)]
    return f"{name} {' · '.join(shapes[:2])}"


def _is_matrix(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return getattr(value, "ndim", 0) >= 2
