"""The findings about attention whose scores and probabilities go through memory: one value for each query and each key.

Attention in single ops is recognised in the captured trace (`tracefuse.diagnose.attention_forms`). What it costs is
read off the trace
that is shown, where kernels may stand for some of the ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from tracefuse.diagnose.attention_forms import Attention, attentions
from tracefuse.findings.finding import Case, Finding, dtype
from tracefuse.optimizers.costs.cost import bytes_moved
from tracefuse.optimizers.liveness import saved_values
from tracefuse.optimizers.ops import does_work, grouped, is_getitem, producer
from tracefuse.optimizers.trace import Trace, human_bytes, line_of, nbytes, origin, phase, val
from tracefuse.tables.folding import work
from tracefuse.text import counted

_FUSED_OFF = "fused attention"
"""What `tracefuse.device.environment` says of fused attention kernels where they are switched off."""


def attention_in_single_ops(case: Case) -> Iterator[Finding]:
    """Attention written by hand, and attention that torch runs as its math backend."""
    known = {node.name: node for node in case.trace.ops}
    left = [one for one in attentions(case.program.trace) if {one.scores.product.name, one.mixed.name} <= known.keys()]
    for group in grouped(left, lambda one: (line_of(one.softmax), one.call, one.is_math_backend)).values():
        matrices = _matrices(known[one.scores.product.name] for one in group)
        us = case.us([n for n in case.trace.ops if work(n) != "matmul" and _moved(n, matrices)])
        first = group[0]
        shown = known[first.scores.product.name]
        what = "run by the math backend" if first.is_math_backend else "written by hand"
        yield from case.finding(
            "attention-math-backend" if first.is_math_backend else "attention-by-hand",
            case.severity(us),
            f"{counted(len(group), 'attention')} {what}: the scores go through memory",
            (
                ("scores", f"{dtype(shown)} {list(val(first.softmax).shape)}, {human_bytes(nbytes(shown))} each"),
                ("moved", _halves(case.trace, matrices)),
                ("kept for the backward", human_bytes(_kept(case.trace, matrices))),
            ),
            [n for n in case.trace.ops if n in matrices],
            first.softmax,
            _why_math(case, first) if first.is_math_backend else _remedy(first),
            us,
            said="at most {}: what the ops between the matmuls take",
        )


def _remedy(one: Attention) -> str:
    fix = f"`{one.call}` computes the same in one kernel that keeps the scores on chip"
    masks = one.scores.masks
    if masks and not any(mask.is_causal for mask in masks):
        fix += "; `is_causal=True` instead of a mask that is the lower triangle"
    if one.dropout_p:
        fix += "; `dropout_p=0.0` outside of training"
    source = origin(one.softmax).source
    if source is not None and "/transformers/models/" in source.file:
        fix += '; in transformers: `attn_implementation="sdpa"`'
    return fix


def _why_math(case: Case, one: Attention) -> str:
    """Who chose the math backend, as far as the capture knows."""
    if case.program.environment.get(_FUSED_OFF) == "off":
        return "`torch.backends.cuda.enable_*_sdp`, or `sdpa_kernel`, had switched all fused kernels off: leave one on"
    value = val(one.softmax)
    if value.dtype == torch.float64:
        return "torch chose it, since no fused kernel takes float64: float32 or bfloat16, where they are enough"
    return (
        "within `sdpa_kernel(SDPBackend.MATH)` you chose it: leave a fused one in; else torch did, since no fused kernel "
        "takes these inputs: `torch.backends.cuda.can_use_efficient_attention(…, debug=True)` says why"
    )


# --- what goes through memory -----------------------------------------------------------------------------------------


def _matrices(products: Iterable[fx.Node]) -> set[fx.Node]:
    """The values with an element for each query and key that the scores are made into, in both halves: what is as large and is
    connected to them through ops other than matmuls."""
    found: set[fx.Node] = set()
    left = [(node, val(node).numel()) for node in products]
    while left:
        node, count = left.pop()
        if node in found or not isinstance(val(node), torch.Tensor) or val(node).numel() != count:
            continue
        found.add(node)
        sources = [] if work(node) == "matmul" else producer(node).all_input_nodes
        readers = [u for u in node.users if u.op == "call_function" and work(u) != "matmul"]
        parts = [part for u in readers if not isinstance(val(u), torch.Tensor) for part in u.users]
        left += [(other, count) for other in (*sources, *readers, *parts)]
    return found


def _moved(op: fx.Node, matrices: set[fx.Node]) -> int:
    """Bytes of the matrices that an op reads and writes."""
    if not does_work(op):
        return 0
    read = sum(nbytes(a) for a in op.all_input_nodes if a in matrices)
    written = sum(nbytes(one) for one in (op, *filter(is_getitem, op.users)) if one in matrices)
    return min(read + written, bytes_moved(op))


def _halves(trace: Trace, matrices: set[fx.Node]) -> str:
    moved = {half: sum(_moved(n, matrices) for n in ops) for half, ops in grouped(trace.ops, phase).items()}
    return ", ".join(f"{human_bytes(count)} in the {half}" for half, count in moved.items() if count)


def _kept(trace: Trace, matrices: set[fx.Node]) -> int:
    names_of = {node.name for node in matrices}
    return sum(saved.nbytes for saved in saved_values(trace) if saved.name in names_of)
