"""Gradients as the backward's matmuls make them: where autocast casts a half for `.grad`, the update casts it as it reads it.

    dw = mm(dy_t, x)                     bf16         dw = mm(dy_t, x)                            bf16, handed over
    grad = dw.float()                    bf16 read, float32 written
    update(grad, …)                      float32 read twice: norm, parameters       update: dw.float() in registers, twice

A compiled step leaves nothing in `.grad`, so that nobody else sees the float32 copy, and a cast to a wider type is exact. It
is left where it is when an op of the backward reads it too, when a kernel makes it with what it casts (the sum over rows for a
bias), when two parameters have one half for their gradient, and where the update writes its gradient back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import fx

from tracefuse.assembly.program import CapturedProgram, Inputs
from tracefuse.optimizers.facts import devices, is_dense
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.ops import arguments, behind_views
from tracefuse.optimizers.trace import HALVES, Trace, call, fake_mode, phase, val
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten


def with_half_gradients(program: CapturedProgram) -> CapturedProgram:
    """`program`, whose update casts the gradients that it is given as halves; itself where there are none."""
    update = program.update
    if update is None:
        return program
    given = {entry.name: placeholder for entry, placeholder in update.trace.input_pairs if entry.kind == "gradient"}
    left = {out.of for out in update.trace.outputs if out.kind != "result"}
    trace = program.trace.copy()
    casts = {
        node.name: node
        for node in dict.fromkeys(trace.returned)
        if (reader := given.get(node.name)) is not None and node.name not in left and _is_cast(node, reader, trace)
    }
    readers = Counter(cast.all_input_nodes[0] for cast in casts.values())
    casts = {name: cast for name, cast in casts.items() if readers[cast.all_input_nodes[0]] == 1}
    if not casts:
        return program
    halves = {name: cast.all_input_nodes[0] for name, cast in casts.items()}
    new = replace(update, trace=_casting(update.trace, halves), read_inputs=_reading(update, halves))
    for name, cast in casts.items():
        cast.replace_all_uses_with(halves[name])
        trace.graph.erase_node(cast)
        halves[name].name = name
    verify(trace)
    verify(new.trace)
    return replace(program, trace=trace, update=new)


def _is_cast(node: fx.Node, given: fx.Node, trace: Trace) -> bool:
    """Whether `node`, which the update reads as `given`, is a half cast to a wider type for that alone, in a launch of its
    own."""
    if node.target is not aten._to_copy.default or phase(node) != "backward" or trace.returned.count(node) > 1:
        return False
    (half,) = node.all_input_nodes
    is_alone = all(user.op == "output" for user in node.users) and half not in trace.returned
    is_widening = val(half).dtype in HALVES and val(node).dtype is torch.float32
    shape, stride = tuple(val(half).shape), val(half).stride()
    is_alike = is_dense(shape, stride) and stride == val(node).stride() == val(given).stride()
    is_here = devices(half) == devices(node) and not arguments(node)["non_blocking"]
    made = behind_views(half)
    return (
        is_alone and is_widening and is_alike and is_here and made.op == "call_function" and refusal(made) is not None
    )


def _casting(update: Trace, halves: Mapping[str, fx.Node]) -> Trace:
    """`update` with a cast of each gradient that is given as one of `halves`."""
    new = update.copy()
    first = new.ops[0]
    for placeholder in new.placeholders:
        half = halves.get(placeholder.name)
        if half is None:
            continue
        readers = list(placeholder.users)
        wide, like = val(placeholder), val(half)
        with fake_mode(new.graph):
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        placeholder.meta = placeholder.meta | {"val": made}
        if not readers:
            continue
        with new.graph.inserting_before(first):
            cast = call(first, aten._to_copy.default, placeholder, dtype=wide.dtype, name=f"{placeholder.name}_wide")
        placeholder.replace_all_uses_with(cast, delete_user_cb=lambda user, cast=cast: user is not cast)
        cast.meta["val"] = wide
    return new


def _reading(update: CapturedProgram, halves: Mapping[str, fx.Node]) -> Callable[[], Inputs]:
    """What reads the inputs of `update`, of which these are halves: a cast of a half and back is exact."""
    dtypes = [val(halves[entry.name]).dtype if entry.name in halves else None for entry in update.trace.inputs]

    def read() -> Inputs:
        inputs = update.read_inputs()
        examples = (one if dtype is None else one.to(dtype) for one, dtype in zip(inputs.examples, dtypes, strict=True))
        live = (one if dtype is None else one.to(dtype) for one, dtype in zip(inputs.live, dtypes, strict=True))
        return Inputs(tuple(examples), tuple(live), inputs.rng_states)

    return read
