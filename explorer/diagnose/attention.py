"""The findings about attention whose scores and probabilities go through memory: one value for each query and each key.

Attention in single ops is recognised in the captured trace (`tracefuse.diagnose.attention_forms`). What it costs is read off
the trace that is shown, where kernels may stand for some of the ops: all that one call does not do, which are the products,
the ops between them, masks of the lower triangle, and copies and casts for the products. What the call takes instead is the
roofline's: queries, keys, values and results are moved once, and the backward computes the scores again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram
from tracefuse.diagnose.attention_code import Rewrite, rewrite
from tracefuse.diagnose.attention_forms import Attention, attentions
from tracefuse.diagnose.attention_masks import NO_SCORE, Held, Mask
from tracefuse.errors import TracefuseError
from tracefuse.findings.finding import Case, Finding, Severity, dtype
from tracefuse.lint.facts import HALVES, is_explicit_cast
from tracefuse.measure.op_times import roofline_of
from tracefuse.optimizers.costs.cost import bytes_moved, flops, touched_nbytes
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.liveness import known_saved_values
from tracefuse.optimizers.ops import behind_views, does_work, grouped, is_getitem, producer, readers
from tracefuse.optimizers.trace import Trace, human_bytes, is_on_gpu, line_of, nbytes, origin, phase, val
from tracefuse.tables.folding import work
from tracefuse.text import counted, time_text

_SPARED = ": what its ops take, less the least that the call can take"
_FUSED_OFF = "fused attention"
"""What `tracefuse.device.environment` says of fused attention kernels where they are switched off."""


def attention_in_single_ops(case: Case) -> Iterator[Finding]:
    """Attention written by hand, and attention that torch runs as its math backend."""
    for group in _alike(case):
        first, us = group.ones[0], case.us(group.gone)
        what = "run by the math backend" if first.is_math_backend else "written by hand"
        spared = max(0.0, us - sum(_called_us(case.trace, one, group.has_backward) for one in group.ones))
        severity = case.severity(spared)
        if _is_for_dropout(case, first):
            yield from _not_on_a_gpu(case, group, severity, spared)
            continue
        yield from case.finding(
            "attention-math-backend" if first.is_math_backend else "attention-by-hand",
            severity and ("low" if first.unlike else severity),  # what another computation would spare is a remark
            f"{counted(len(group.ones), 'attention')} {what}: the scores go through memory",
            (
                (
                    "scores",
                    f"{dtype(group.shown)} {list(val(first.softmax).shape)}, {human_bytes(nbytes(group.shown))} each",
                ),
                ("moved", _halves(case.trace, group.matrices)),
                ("kept for the backward", human_bytes(_kept(case.trace, group.matrices))),
                ("takes", f"{case.timed(group.gone)}, products and copies for them included"),
            ),
            [n for n in case.trace.ops if n in group.matrices],
            first.softmax,
            _why_math(case, first) if first.is_math_backend else _remedy(group),
            spared,
            # The call is taken at its least: where its ops were measured, that makes a bound.
            said=f"{'at most' if case.times.is_measured else 'about'} {{}}{_SPARED}",
            code="" if first.is_math_backend else _pasted(group),
        )


def _not_on_a_gpu(case: Case, group: Group, severity: Severity | None, spared: float) -> Iterator[Finding]:
    """A remark on what is modelled for a GPU that would run it otherwise."""
    amount = time_text(spared)
    yield from case.finding(
        "attention-math-backend",
        severity and "low",
        f"{counted(len(group.ones), 'attention')} {'runs' if len(group.ones) == 1 else 'run'} op by op on this CPU, as one "
        "kernel on a GPU",
        (("takes", f"{case.timed(group.gone)}, products and copies for them included"),),
        [n for n in case.trace.ops if n in group.matrices],
        group.ones[0].softmax,
        "nothing to mend: on a CPU torch's fused attention knows no dropout; capture on a GPU to see its kernels, or with "
        "`dropout_p=0.0` here",
        amount
        if case.times.is_measured
        else f"nothing on a GPU: the modelled step counts {amount} too much for it (modelled)",
        kind=case.times.kind,
    )


def attention_in_float32(case: Case) -> Iterator[Finding]:
    """Attention in single ops some of which run in float32 between casts, or among matmuls of half precision."""
    for group in _alike(case):
        casts = [n for n in group.gone if work(n) == "cast"]
        half = next((val(n).dtype for n in _matmuls(case.trace) if val(n).dtype in HALVES), None)
        single = [n for n in group.gone if val(n) is not None and _is_float32(n)]
        if group.ones[0].is_math_backend or half is None or not single:
            continue
        products, softmaxes = [n for n in single if work(n) == "matmul"], {one.softmax for one in group.ones}
        if not products and softmaxes.isdisjoint(single):
            continue  # a mask of float32 alone
        if not (casts or _is_most_half(case.trace, group.gone)):
            continue
        rates = roofline_of(case.trace)
        faster = 1 - min(1.0, rates.flops_rate(torch.float32) / rates.flops_rate(half))
        between = [n for n in single if n not in products and n not in casts]
        us = case.us(casts) + case.us(between) / 2 + case.us(products) * faster
        up = [n for n in casts if phase(n) == "forward" and val(n).dtype == torch.float32]
        asked = next(filter(is_explicit_cast, up), None)
        severity, name = case.severity(us), str(half).removeprefix("torch.")
        what = "products and softmax" if products else "softmax"
        yield from case.finding(
            "attention-in-float32",
            severity and ("low" if up and asked is None else severity),  # what autocast does is no error of the user's
            f"{counted(len(group.ones), 'attention')} by hand: {what} in float32, all else in {name}",
            (
                ("casts", f"{len(casts)}, which move {human_bytes(sum(map(bytes_moved, casts)))}"),
                ("in float32", f"{counted(len(single) - len(casts), 'op')}, {case.timed([*between, *products])}"),
                ("asked for by", "the line" if asked is not None else "autocast" if up else "what it is given"),
            ),
            single,
            group.ones[0].softmax if asked is None else asked,
            _remedy_of_casts(group, name),
            us,
            code=_pasted(group),
        )


def _is_float32(node: fx.Node) -> bool:
    tensors = [t for t in (val(node), *map(val, node.all_input_nodes)) if isinstance(t, torch.Tensor)]
    return any(t.dtype == torch.float32 for t in tensors)


def _matmuls(trace: Trace) -> list[fx.Node]:
    return [n for n in trace.ops if work(n) == "matmul" and isinstance(val(n), torch.Tensor)]


def _is_most_half(trace: Trace, gone: Sequence[fx.Node]) -> bool:
    """Whether most arithmetic of matmuls besides is in half precision."""
    taken = set(gone)
    besides = [n for n in _matmuls(trace) if n not in taken]
    return 2 * sum(flops(n) for n in besides if val(n).dtype in HALVES) > sum(map(flops, besides))


def _is_for_dropout(case: Case, one: Attention) -> bool:
    """Whether torch took the math backend since fused attention on a CPU knows no dropout, as it does on a GPU."""
    chosen = case.program.environment.get(_FUSED_OFF) == "off" or val(one.softmax).dtype == torch.float64
    return one.is_math_backend and bool(one.dropout_p) and not chosen and not is_on_gpu(case.trace)


def _remedy_of_casts(group: Group, half: str) -> str:
    if not group.ones[0].is_float32 and not group.ones[0].unlike:
        return f"cast nothing: {_remedy(group)}, of {half} too, where it sums in float32"
    return (
        f"cast nothing: `scaled_dot_product_attention` of queries, keys and values of {half} sums in float32 inside, and its "
        "result can be cast where float32 is wanted"
    )


def _may_be_causal(mask: Mask) -> bool:
    """Whether a mask is as high as it is wide, and says which scores count, and nothing of how much."""
    shape = val(mask.operand).shape
    return len(shape) > 1 and shape[-1] == shape[-2] > 1 and (mask.is_boolean or mask.fill <= NO_SCORE)


def _remedy(group: Group) -> str:
    one, rewrite = group.ones[0], group.rewrite
    if origin(one.softmax).ran_in("MultiheadAttention"):
        return "call `nn.MultiheadAttention` with `need_weights=False`: without the weights it computes in one kernel"
    if one.unlike:
        return (
            f"no call of `scaled_dot_product_attention` computes the same, since {one.unlike}: where that is not meant, mask "
            "the scores with minus infinity before the softmax, and the call does it in one kernel that keeps them on chip"
        )
    where = f" in place of {rewrite.lines}" if rewrite.lines else ""
    of = "" if rewrite.is_own else " of queries, keys and values as [batch, heads, tokens, width]"
    size = human_bytes(nbytes(group.shown))
    fix = f"`{rewrite.text}`{where}{of} computes the same in one kernel that keeps the scores, {size} each, on chip"
    masks = one.scores.masks
    if any(_may_be_causal(mask) for mask in masks) and not any(mask.is_causal for mask in masks):
        fix += "; `is_causal=True` instead of a mask that is the lower triangle"
    if one.differs_without_keys:
        fix += "; rows without any key differ"
    if one.dropout_p:
        fix += "; `dropout_p=0.0` outside of training"
    source = origin(one.softmax).source
    if source is not None and "/transformers/models/" in source.file:
        fix += '; in transformers: `attn_implementation="sdpa"`'
    return fix


def _pasted(group: Group) -> str:
    """The user's own statement with the call; "" where the fix is told in words alone."""
    is_module = origin(group.ones[0].softmax).ran_in("MultiheadAttention")
    return "" if is_module or group.ones[0].unlike else group.rewrite.statement


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


# --- what one call does without ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Attentions of one line that are alike, and the call that computes the same: the matrices that they make, one of them,
    and the ops that one call does without. `has_backward` says whether their gradients are computed."""

    ones: Sequence[Attention]
    rewrite: Rewrite
    matrices: Set[fx.Node]
    shown: fx.Node
    gone: Sequence[fx.Node]
    has_backward: bool


def _alike(case: Case) -> list[Group]:
    """The attentions of the captured program whose products are in the trace that is shown."""
    known = {node.name: node for node in case.trace.ops}
    found = _rewritten(case.program, case.program.trace)
    left = [pair for pair in found if {pair[0].scores.product.name, pair[0].mixed.name} <= known.keys()]
    groups = grouped(left, lambda pair: (line_of(pair[0].softmax), pair[1].text, pair[0].is_math_backend)).values()
    return [_group(case.trace, [one for one, _ in pairs], pairs[0][1], known) for pairs in groups]


@once_per_trace
def _rewritten(program: CapturedProgram, trace: Trace) -> tuple[tuple[Attention, Rewrite], ...]:
    return tuple((one, rewrite(one)) for one in attentions(trace, _held(program)))


def _group(trace: Trace, ones: Sequence[Attention], rewrite: Rewrite, known: Mapping[str, fx.Node]) -> Group:
    matrices = _matrices(known[one.scores.product.name] for one in ones)
    gone = {n for n in trace.ops if does_work(n) and (n in matrices or any(a in matrices for a in n.all_input_nodes))}
    has_backward = any(phase(n) == "backward" and work(n) == "matmul" for n in gone)
    masks = [known.get(m.operand.name) for one in ones if one.is_causal for m in one.scores.masks]
    for node in reversed(trace.ops):
        is_for_products = work(node) in ("cast", "copy") or node in masks
        if is_for_products and node.users and all(reader in gone for reader in readers(node)):
            gone.add(node)
    products = {n for n in gone if work(n) == "matmul"}
    gone |= {n for n in trace.ops if work(n) == "cast" and producer(behind_views(n.args[0])) in products}
    return Group(
        ones, rewrite, matrices, known[ones[0].scores.product.name], [n for n in trace.ops if n in gone], has_backward
    )


def _held(program: CapturedProgram) -> Held:
    """The numbers of buffers, and of tensors that are not trained, that the step does not write to."""
    trace = program.trace
    written = {out.of for out in trace.outputs if out.kind == "mutation"}
    kept = [(at, i) for at, i in enumerate(trace.inputs) if i.kind in ("buffer", "input") and not i.trainable]
    standing = {i.name: at for at, i in kept if i.name not in written}

    def held(name: str) -> torch.Tensor | None:
        try:
            return program.example_inputs[standing[name]] if name in standing else None
        except TracefuseError:  # a session file without tensors, or tensors that are gone
            return None

    return held


def _called_us(trace: Trace, one: Attention, has_backward: bool) -> float:
    """The least microseconds that one call takes, with its backward where there is one."""
    queries, keys, values = one.scores.product.args[-2], one.scores.product.args[-1], one.mixed.args[-1]
    moved = sum(map(touched_nbytes, (queries, keys, values, one.mixed)))  # type: ignore[arg-type]
    work_of = (flops(one.scores.product) + flops(one.mixed)) / (2 if one.is_causal else 1)
    peaks = roofline_of(trace)
    rate = peaks.flops_rate(val(queries).dtype)  # type: ignore[arg-type]
    # The backward reads these, the result's gradient too, and writes three gradients; it does five products for two.
    parts = [(moved, work_of), *([(2 * moved, 2.5 * work_of)] if has_backward else [])]
    return 1e6 * sum(max(count / peaks.bytes_per_s, done / rate) for count, done in parts)


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
    return sum(saved.nbytes for saved in known_saved_values(trace) if saved.name in names_of)
