"""Fusible ops may share a generated kernel; for every other op there is a reason why it may not.

`refusal(node)` looks at one op alone. What its neighbours rule out is found when regions form (`fuse.regions`) and when the
kernel's text is written (`functions`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Set
from itertools import islice
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.costs.strided import is_by_element
from tracefuse.optimizers.facts import (
    devices,
    is_dense,
    lie_alike,
    lies_channels_last,
    once_per_kind,
    once_per_trace,
    once_per_type,
    tensors_in,
)
from tracefuse.optimizers.formulas.windows import NEAREST, WINDOW_OPS, window_refusal
from tracefuse.optimizers.lowering.composites import COMPOSITES, CONSTANTS, REDUCTIONS
from tracefuse.optimizers.lowering.expressions import POINTWISE, rule_of
from tracefuse.optimizers.lowering.gathers import GATHERS, gather_refusal
from tracefuse.optimizers.lowering.geometry import (  # fmt: skip
    MAX_ROW,
    MAX_STRIDED_ROW,
    MAX_SUMMED_ROW,
    NORM_BACKWARD,
    SCANS,
    SUMMED,
    SUMS,
    Geometry,
    are_few_and_long,
    columns_of,
    is_strided,
    operand_of,
    reduced_dims,
    rows_of,
)
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE
from tracefuse.optimizers.lowering.lowering import COPIES
from tracefuse.optimizers.lowering.placements import SCATTERS as PLACES
from tracefuse.optimizers.lowering.placements import scatter_refusal
from tracefuse.optimizers.lowering.random_ops import MASK, is_mask
from tracefuse.optimizers.lowering.views import SPLITS, VIEWS
from tracefuse.optimizers.ops import (
    arguments,
    aten,
    behind_views,
    is_getitem,
    is_view,
    once_per_operator,
    reached,
    read_by,
)
from tracefuse.optimizers.trace import HALVES, SHORT_DTYPE, Trace, nbytes, phase, shape_of, tensors, val

MATRIX = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "linear", "matmul", "einsum"}
SCATTERS = {"embedding_dense_backward", "index_put", "scatter", "scatter_add", "index_add"}

# ATen runs these as two kernels, a fill and a copy.
FILL_THEN_COPY = {aten.slice_backward.default, aten.select_backward.default, aten.constant_pad_nd.default}

LEAST_CAST = 32 << 20
"""Bytes of float32 from which on a cast is worth a kernel of its own."""

LEAST_OFFSETS = 1 << 20
"""Bytes from which on an op for which ATen computes offsets is worth a kernel of its own."""

MANY_PARTS = 8
"""From so many on the parts of a value, as those of the steps of a loop, share kernels."""

MOST_JOINED = 32
"""ATen copies so many parts and more in one launch, of which each thread has its own."""

# One number per row, which ATen computes in one pass.
PLAIN_REDUCTIONS = {
    *SUMMED, aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.amax.default, aten.amin.default,
    aten.max.default, aten.min.default,
}  # fmt: skip


def refusal(node: fx.Node) -> str | None:
    """Why `node` stays with ATen; None where a kernel can hold it."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and not _looks_around(target):
        return _op_refusal(node)
    return _own_refusal(node) or _many_parts_refusal(node)


@once_per_trace
def refusals(trace: Trace) -> Mapping[fx.Node, str | None]:
    """`refusal` of each node of a trace that nobody edits any more, in its order: several passes ask that of all ops."""
    found: dict[fx.Node, str | None] = {}
    for node in trace.graph.nodes:
        found[node] = _part_refusal(node, found.__getitem__) if node.target is operator.getitem else refusal(node)
    return found


@once_per_trace
def fusible_ops(trace: Trace) -> Set[fx.Node]:
    """The ops of a trace that nobody edits any more which kernels can hold."""
    return {node for node, reason in refusals(trace).items() if reason is None}


def _own_refusal(node: fx.Node) -> str | None:
    """`refusal`, whatever is done with the parts that it is taken apart into, or put together of."""
    if node.op != "call_function":
        return "it is no op"
    if node.target is operator.getitem:
        return _part_refusal(node, refusal)
    if not isinstance(node.target, torch._ops.OpOverload):
        return "it is a kernel already"
    if is_mask(node):
        return "every kernel that reads it computes it again from its state"
    return _op_refusal(node) or _norm_refusal(node)


def is_constant(node: fx.Node) -> bool:
    """Whether the op yields numbers that are known without its operands: cheap enough to be made again in every kernel."""
    return isinstance(node.target, torch._ops.OpOverload) and _is_constant(node.target)


@once_per_operator
def _is_constant(target: torch._ops.OpOverload) -> bool:
    return target in CONSTANTS


def is_remade(node: fx.Node) -> bool:
    """Whether every kernel that reads the value computes it itself: a constant, or the mask of a dropout."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (_is_constant(target) or target is MASK)


def is_split(node: fx.Node) -> bool:
    """Whether the op takes a value apart into views."""
    return isinstance(node.target, torch._ops.OpOverload) and _splits(node.target)


@once_per_operator
def _splits(target: torch._ops.OpOverload) -> bool:
    return target in SPLITS


def is_free(node: fx.Node) -> bool:
    """Whether the op is no work of its own: a view, the part of a multi-output op, or what readers make themselves."""
    return node.target is operator.getitem or is_view(node) or is_remade(node)


def slow_in_aten(node: fx.Node) -> str | None:
    """Why a kernel of this op alone beats ATen's, which moves no more bytes by its arguments; None where it does not."""
    if node.target in FILL_THEN_COPY:
        return "ATen fills the result first, and copies then"
    if _is_slow_gelu(node):
        # `tests/bench/gpt_step.py --breakdown` has both.
        return f"ATen's own kernel of {SHORT_DTYPE[val(node).dtype]} does not keep up with memory"
    if _is_wide_cast(node):
        # `tests/bench/fusions/embeddings.py` has such a cast alone, and with an addition, beside what memory takes.
        return f"ATen's own cast to {SHORT_DTYPE[val(node).dtype]} takes twice as long as memory"
    if nbytes(node) >= LEAST_OFFSETS and _is_by_element(node):
        # Of the models of `tests/bench/fusions/trained.py`: the logits of a head that `pad` widened, keys that heads share.
        return "ATen's own kernel computes an offset for each element, since not all lie alike"
    if turns_images(node) and nbytes(node) >= LEAST_OFFSETS:
        # ATen's copy computes two offsets for each element, and reads or writes one side word by word.
        return "ATen's own copy of images to the other order does not keep up with memory"
    if node.target in WINDOW_OPS - NEAREST:
        # Of programs with a pool, torch.compile, which gathers as we do, took 0.3 to 0.7 of eager's time on an H200.
        return "ATen's own kernel of windows does not keep up with memory"
    is_composite = node.target in REDUCTIONS and node.target not in PLAIN_REDUCTIONS
    columns = columns_of(node)
    if is_composite or (columns is not None and not columns.is_split):
        return "ATen's own kernel reads that twice, or at half the speed of memory"
    return None


@once_per_kind
def turns_images(node: fx.Node) -> bool:
    """Whether the op copies images that lie channel by channel to channels-last, or back."""
    if node.target not in COPIES or not isinstance(node.args[0], fx.Node) or is_constant(node.args[0]):
        return False
    before, after = val(node.args[0]), val(node)
    if before.dim() != 4 or not is_dense(before.shape, before.stride()) or lie_alike(before, after):
        return False
    return (lies_channels_last(before) and after.is_contiguous()) or (
        before.is_contiguous() and lies_channels_last(after)
    )


def _is_by_element(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not (node.target in POINTWISE or node.target in COPIES):
        return False
    result = val(node)
    return isinstance(result, torch.Tensor) and is_by_element([val(one) for one in node.all_input_nodes], result)


def _is_slow_gelu(node: fx.Node) -> bool:
    """Whether ATen's error function takes longer than memory, and our kernel of about half its instructions does not."""
    if node.target is aten.gelu.default and val(node).dtype is torch.float32:
        return True
    is_gelu = node.target in (aten.gelu.default, aten.gelu_backward.default) and val(node).dtype in HALVES
    return is_gelu and arguments(node)["approximate"] == "none"


def _is_wide_cast(node: fx.Node) -> bool:
    """Whether a half becomes float32 in ATen, and is too much for caches."""
    if node.target is not aten._to_copy.default or val(node).dtype is not torch.float32:
        return False
    return val(node.args[0]).dtype in HALVES and nbytes(node) >= LEAST_CAST  # type: ignore[arg-type]


@once_per_operator
def _looks_around(target: torch._ops.OpOverload) -> bool:
    """Whether more than its kind decides about an op: what reads it, or computes what it reads."""
    return target is MASK or target in NORM_BACKWARD or target in SPLITS or target is aten.cat.default


def _part_refusal(node: fx.Node, of_whole: Callable[[fx.Node], str | None]) -> str | None:
    """`refusal` of a part, given that of what it is a part of."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    if not (isinstance(source.target, torch._ops.OpOverload) and _has_parts(source.target)):
        return "it is a part of an op that stays with ATen"
    return of_whole(source) or _type_refusal(node)


@once_per_operator
def _has_parts(target: torch._ops.OpOverload) -> bool:
    return any(target in known for known in (SPLITS, COMPOSITES, WINDOW_OPS))


@once_per_kind
def _op_refusal(node: fx.Node) -> str | None:
    reason = _unknown(node.target) or _type_refusal(node) or _device_refusal(node)  # type: ignore[arg-type]
    return reason or next((found for ask in _asked(node.target) if (found := ask(node))), None)  # type: ignore[arg-type]


@once_per_operator
def _asked(target: torch._ops.OpOverload) -> tuple[Callable[[fx.Node], str | None], ...]:
    """What else may refuse an op of this operator."""
    of = (
        (_row_refusal, REDUCTIONS),
        (gather_refusal, GATHERS),
        (window_refusal, WINDOW_OPS),
        (scatter_refusal, PLACES),
    )
    return tuple(ask for ask, known in of if target in known)


@once_per_operator
def _unknown(target: torch._ops.OpOverload) -> str | None:
    if any(target in known for known in (POINTWISE, VIEWS, SPLITS, COPIES, COMPOSITES, WINDOW_OPS)):
        return None
    name = target.overloadpacket.__name__
    if name in MATRIX or "convolution" in name or "attention" in name:
        return "matmul, convolution and attention stay with ATen's library kernels"
    if name in SCATTERS:
        return "scatter writes at addresses that are data"
    draws = torch.Tag.nondeterministic_seeded in target.tags
    return "it draws random numbers" if draws else "no Triton form is known for it"


@once_per_kind
def _type_refusal(node: fx.Node) -> str | None:
    for one in (node, *read_by(node)):
        if reason := _value_refusal(one):
            return reason
    if _is_pointwise(node.target) and rule_of(node.target, val(node).dtype) is None:  # type: ignore[arg-type]
        return f"its result of {SHORT_DTYPE[val(node).dtype]} has no Triton form"
    if not is_view(node) and any(tensor.numel() == 0 for tensor in tensors(node)):
        return "it has no elements"
    return None


@once_per_type
def _value_refusal(value: Any) -> str | None:
    for tensor in tensors_in(value):
        if tensor.dtype not in COMPUTE_TYPE:
            return f"{SHORT_DTYPE.get(tensor.dtype, tensor.dtype)} has no Triton form"
        if tensor.layout is not torch.strided:
            return f"its layout is {tensor.layout}"
        if set(map(type, tensor.shape)) - {int}:
            return "its shape is symbolic"
    return None


@once_per_operator
def _is_pointwise(target: Any) -> bool:
    return target in POINTWISE


def _device_refusal(node: fx.Node) -> str | None:
    own = devices(node)
    if len(own) == 1 and all(devices(a) == own for a in read_by(node)):
        return None
    read = () if is_constant(node) else node.all_input_nodes
    found = {device for a in read if not (is_constant(a) and val(a).dim() == 0) for device in devices(a)}
    found |= {*devices(node)}
    return f"it has values on {' and '.join(sorted(map(str, found)))}" if len(found) > 1 else None


def _row_refusal(node: fx.Node) -> str | None:
    shape = shape_of(operand_of(node))
    if 0 in shape:
        return "it reduces no elements"
    if not reduced_dims(node) or torch.Size(shape).numel() == 1:
        return "it reduces a single element"
    geometry = rows_of(node) or columns_of(node)
    if node.target in SCANS and (reason := _scan_refusal(node, geometry)):
        return reason
    if geometry is None:
        if node.target in SUMMED:
            return "it reduces rows of one element"
        return f"it reduces more than {MAX_STRIDED_ROW} elements that do not lie together, by more than a sum"
    if node.target in (*PLAIN_REDUCTIONS, aten.logsumexp.default) and rows_of(node) and are_few_and_long(geometry):
        return "its rows are few and long: ATen has many programs share one"
    if node.target in PLAIN_REDUCTIONS and node.target not in SUMMED and rows_of(node) and _skips_far(node, geometry):
        return f"its rows have more than {MAX_STRIDED_ROW} elements, between which others lie"
    if node.target in SUMS and val(node).dtype is torch.bool:
        return "it sums into a boolean"
    _, n_rows, n_cols = geometry.sizes
    return "it reduces rows of one element" if (n_rows if columns_of(node) else n_cols) == 1 else None


def _scan_refusal(node: fx.Node, rows: Geometry | None) -> str | None:
    if not val(node).is_floating_point():
        return "it is a cumulative sum of integers"
    if rows is None or _skips_far(node, rows):
        return f"its cumulative sums are of more than {MAX_STRIDED_ROW} elements that do not lie together"
    too_long = rows.sizes[2] > MAX_ROW
    return f"its cumulative sums are of more than {MAX_ROW} elements, which no program holds" if too_long else None


def _many_parts_refusal(node: fx.Node) -> str | None:
    """Why a value is taken apart, or put together of parts, outside of kernels: where many parts are in memory anyway."""
    if is_split(node):
        return _split_refusal(node)
    if node.target is not aten.cat.default or len(node.args[0]) <= MOST_JOINED:  # type: ignore[arg-type]
        return None
    count = sum(_is_stored_beside(part, node) for part in dict.fromkeys(node.args[0]))  # type: ignore[arg-type]
    return (
        f"it joins {count} parts in memory, among which each element would be looked for"
        if count > MOST_JOINED
        else None
    )


def _split_refusal(node: fx.Node) -> str | None:
    whole, parts = val(node.args[0]), val(node)  # type: ignore[arg-type]
    if len(parts) < MANY_PARTS or not whole.is_contiguous() or not _are_contiguous(node):
        return None
    source = behind_views(node.args[0])  # type: ignore[arg-type]
    read = [reader for part in islice(node.users, MANY_PARTS) for reader in part.users]  # asked of each part
    if len(set(read)) < len(read) or (source.op == "call_function" and _own_refusal(source) is None):
        return None  # one kernel reads it as a whole, or need not have it in memory
    return "its parts lie together, and are many: kernels of equal ones are equal, given where each begins"


@once_per_type
def _are_contiguous(value: Any) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors_in(value))


def _is_stored_beside(part: fx.Node, joined: fx.Node) -> bool:
    """Whether the part is in memory whatever joins it: no kernel computes it, or another reader is none."""
    if _own_refusal(part) is not None:
        return True
    return any(user is not joined and _own_refusal(user) is not None for user in part.users)


def _skips_far(node: fx.Node, rows: Geometry) -> bool:
    """Whether one program would read a long row whose neighbours in memory other programs read."""
    return rows.sizes[2] > MAX_STRIDED_ROW and is_strided(node, rows)


def _norm_refusal(node: fx.Node) -> str | None:
    """Why the backward of a norm stays with ATen: where its gradients of weight or bias are read too, and its rows are too
    long for both."""
    if not _is_norm_backward(node.target) or not any(u.args[1] != 0 and u.users for u in node.users if is_getitem(u)):
        return None
    rows = rows_of(node)
    if rows is None or rows.sizes[2] <= MAX_SUMMED_ROW:
        return None
    return f"no program holds rows of more than {MAX_SUMMED_ROW} elements beside the sums of their columns"


@once_per_operator
def _is_norm_backward(target: Any) -> bool:
    return target in NORM_BACKWARD


def has_fusible_neighbour(result: fx.Node, *operands: fx.Node) -> bool:
    """Whether an op of the same phase that reads `result`, or computes one of `operands`, could share the kernel of what is
    between them."""
    near = [*_through_views(result.users, lambda n: n.users), *_through_views(operands, lambda n: n.all_input_nodes)]
    return any(refusal(n) is None and phase(n) == phase(result) for n in near)


def is_read_by_kernels_alone(result: fx.Node) -> bool:
    """Whether kernels could hold every op that reads `result`, one of them in its phase and as large as it.

    A concatenation often stays with ATen all the same.
    """
    near = _through_views(result.users, lambda n: n.users)
    is_returned = any(user.op == "output" for node in reached([result], _views_of) for user in node.users)
    whole = [n for n in near if phase(n) == phase(result) and _largest(n) >= val(result).numel()]
    return (
        bool(whole) and not is_returned and all(refusal(n) is None and n.target is not aten.cat.default for n in near)
    )


def _views_of(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if is_view(user)]


def _largest(node: fx.Node) -> int:
    """The elements of the largest value that an op reads or yields."""
    return max((t.numel() for n in (node, *node.all_input_nodes) for t in tensors(n)), default=0)


def _through_views(nodes: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> list[fx.Node]:
    """The ops among `nodes`, and those that `onward` leads to through views."""
    near = reached(nodes, lambda n: onward(n) if n.op == "call_function" and is_free(n) else ())
    return [one for one in near if one.op == "call_function" and not is_free(one)]
