"""Casts that autocast makes and no kernel holds: those of parameters by one launch, those of gradients by their matmul.

Under autocast each weight is cast by itself where it is used; here one launch casts all.

    w1 = aten._to_copy.default(weight_1, dtype=bf16)          casts = each_to_copy_3c1a90([weight_1, weight_2, …])
    … mm(x, w1) …                                             w1, w2, … = casts[0]
    w2 = aten._to_copy.default(weight_2, dtype=bf16)

One of a layer's weights is too little work for a whole GPU. What the backward reads is alive from its cast to the end of the
forward, so that to make it earlier takes no more memory at the peak; of all others together (biases, which no backward reads)
at most `AHEAD` bytes are made earlier than they are needed.

On a GPU alone, for casts that no other kernel holds.

The update's kernel could write the casts of the next step, at a third of the bytes that this one moves. But a step would have
to know that nobody wrote to the weights in between, and neither `weight.data.clamp_(…)` nor a kernel, ours among them, counts
up the `_version` of a parameter.

A weight's gradient comes from a matmul of bfloat16, and its cast to float32 alone reads it. Tensor cores sum in float32, so
that the matmul can hand over what it has:

    mm = aten.mm.default(dy, x)                               mm = aten.mm.dtype(dy, x, torch.float32)
    grad = aten._to_copy.default(mm, dtype=f32)               … grad …

That is a launch and the bytes of the cast less, and a gradient that was rounded once less. On a GPU alone: torch has the
operator on no CPU. A matmul over unaligned rows stays, whose cast is not what takes its time, and so does one of float16,
which torch may be told to sum in float16.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from tracefuse.optimizers.costs.alignment import unaligned
from tracefuse.optimizers.facts import devices, is_dense
from tracefuse.optimizers.kernels.lists import Piece, list_kernel
from tracefuse.optimizers.lowering.literals import COMPUTE_TYPE
from tracefuse.optimizers.ops import aten, grouped, is_view
from tracefuse.optimizers.passes import Decide, Decision
from tracefuse.optimizers.rewrite import views_of
from tracefuse.optimizers.trace import (
    SHORT_DTYPE,
    Trace,
    call,
    human_bytes,
    is_read_late,
    nbytes,
    origin,
    phase,
    set_origin,
    val,
)

_OF_CASTS = {"dtype", "layout", "device", "memory_format"}
AHEAD = 16 << 20
"""Bytes of casts that no backward reads and that may be made with the first of them."""


def cast_together(trace: Trace, decide: Decide) -> set[str]:
    """Put one kernel over lists in place of casts of parameters from one type to another; the names of what it casts. Edits
    the graph of `trace`. Each kernel is told to `decide`."""
    parameters = {p for entry, p in trace.input_pairs if entry.kind == "parameter"}
    casts = [node for node in trace.ops if _is_cast_of(node, parameters)]
    groups = grouped(casts, lambda node: (val(node.args[0]).dtype, val(node).dtype, val(node).device))
    done: set[str] = set()
    for group in groups.values():
        kept = {node for node in group if any(is_read_late(one) for one in views_of(node))}
        others = [node for node in group if node not in kept]
        if sum(map(nbytes, others)) > AHEAD:
            group = [node for node in group if node in kept]
        if len(group) > 1:
            decide(_put_together(trace.graph, group))
            done |= {part.name for part in group}
    return done


def _is_cast_of(node: fx.Node, parameters: set[fx.Node]) -> bool:
    """Whether a cast of a parameter in the forward is one of floats in a block of memory of a GPU, which it leaves as it
    lies."""
    is_cast = node.target is aten._to_copy.default and node.kwargs.keys() <= {"dtype", "memory_format"}
    if not is_cast or node.args[0] not in parameters or phase(node) != "forward":
        return False
    given, made = val(node.args[0]), val(node)
    is_float = (
        given.is_floating_point() and made.is_floating_point() and {given.dtype, made.dtype} <= COMPUTE_TYPE.keys()
    )
    is_block = given.dim() > 0 and given.stride() == made.stride() and is_dense(tuple(given.shape), given.stride())
    is_here = {device.type for one in (node, node.args[0]) for device in devices(one)} == {"cuda"}
    return is_float and is_block and is_here and given.layout is torch.strided and given.numel() > 0


def _put_together(graph: fx.Graph, casts: Sequence[fx.Node]) -> Decision:
    first = casts[0]
    parameters = [cast.args[0] for cast in casts]
    piece = Piece((first,), (first.args[0],), (first,))  # type: ignore[arg-type]
    kernel = list_kernel(piece, (False,), (None,), {first.args[0]: "param"})  # type: ignore[dict-item]
    with graph.inserting_before(first):
        made = graph.create_node("call_function", kernel, (parameters,), {}, "casts")
        made.meta = {"val": ([val(cast) for cast in casts],), "phase": phase(first)}
        set_origin(made, origin(first))
        listed = graph.create_node("call_function", operator.getitem, (made, 0))
        listed.meta = {"val": val(made)[0], "phase": phase(first)}
        parts = [graph.create_node("call_function", operator.getitem, (listed, at)) for at in range(len(casts))]
    for cast, part in zip(casts, parts, strict=True):
        part.meta = dict(cast.meta)
        cast.replace_all_uses_with(part)
        graph.erase_node(cast)
        part.name = cast.name
    moved = sum(nbytes(one) for one in (*casts, *parameters))  # type: ignore[misc]
    dtype = SHORT_DTYPE[val(first).dtype]
    said = f"{len(casts)} parameters are cast to {dtype} in one launch of {kernel.name}; it moves {human_bytes(moved)}"
    return Decision(made.name, "merge", said, moved)


def cast_by_matmuls(trace: Trace, decide: Decide) -> set[str]:
    """Let each matmul of bfloat16 that a cast to float32 alone reads yield float32 itself; the names of what is gone, or is
    another value now. Edits the graph of `trace`. Each is told to `decide`."""
    done = set[str]()
    for cast in trace.ops:
        path = _from_matmul(cast)
        if path:
            said = f"the matmul{f' {path[0].name}' * (len(path) > 1)} yields float32 itself, as it sums in it"
            decide(Decision(cast.name, "fuse", f"{said}; no bf16 is stored and read", 2 * nbytes(path[0])))
            done |= {cast.name, path[0].name}
            _yield_float32(trace.graph, path, cast)
    return done


def _from_matmul(cast: fx.Node) -> list[fx.Node]:
    """The matmul of bfloat16 on a GPU, and the views of all of it, that this cast to float32 alone reads; [] where there is
    none in its half of the program, and where the cast would lie otherwise."""
    is_cast = cast.target is aten._to_copy.default and cast.kwargs.keys() <= _OF_CASTS
    if not is_cast or val(cast).dtype is not torch.float32:
        return []
    path: list[fx.Node] = [cast.args[0]]  # type: ignore[list-item]
    while path[0].op == "call_function" and is_view(path[0]):
        path.insert(0, path[0].args[0])  # type: ignore[arg-type]
    if path[0].target is not aten.mm.default or unaligned(path[0]) is not None:
        return []
    matmul, made = val(path[0]), val(path[-1])
    is_alone = all(len(one.users) == 1 and phase(one) == phase(cast) for one in path)
    is_whole = all(val(one).dtype is torch.bfloat16 and val(one).numel() == matmul.numel() for one in path)
    is_as_it_lies = made.is_cuda and (made.device, made.stride()) == (val(cast).device, val(cast).stride())
    return path if is_alone and is_whole and is_as_it_lies else []


def _yield_float32(graph: fx.Graph, path: Sequence[fx.Node], cast: fx.Node) -> None:
    """Compute what the `path` from a matmul to its cast does in float32 from the first."""
    matmul, *views = path
    with graph.inserting_before(matmul):
        made = [call(matmul, aten.mm.dtype, *matmul.args, torch.float32)]
    for view in views:
        with graph.inserting_before(view):
            made.append(call(view, view.target, made[-1], *view.args[1:], **view.kwargs))  # type: ignore[arg-type]
    cast.replace_all_uses_with(made[-1])
    for old in (cast, *reversed(path)):
        graph.erase_node(old)
    for new, name in zip(made, [*(one.name for one in path[:-1]), cast.name], strict=True):
        new.name = name
