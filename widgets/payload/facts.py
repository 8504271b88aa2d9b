"""What the view says of one trace alone, computed once per trace.

A trace is never edited once it is shown, so what is known of it holds as long as it lives: after a switch, the captured
trace and those of all steps before that pass are the same ones as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tracefuse.assembly.unshown import Dropped
from tracefuse.optimizers import liveness
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, flops
from tracefuse.optimizers.facts import once_per_trace, once_per_type
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import does_work, op_name, producer, read_by
from tracefuse.optimizers.trace import Trace, nbytes, origin, phase, recomputes, tensor_type
from tracefuse.tables.folding import name_of
from tracefuse.tables.memory import input_bytes
from tracefuse.variant import Variant

# More twins or readers of one value than anybody follows by hand.
MAX_NAMES = 64
# Beyond these, single storages are small beside the peak.
MAX_ALIVE = 16


lifetimes = once_per_trace(liveness.lifetimes)
live_bytes = once_per_trace(lambda trace: liveness.live_bytes(trace, lifetimes(trace)))
gpu_input_bytes = once_per_trace(functools.partial(input_bytes, device="cuda"))


op_count = once_per_trace(lambda trace: trace.op_count)


class Size(NamedTuple):
    """Operators that do work, bytes kept for the backward, and the static peak."""

    ops: int
    saved_bytes: int
    peak_bytes: int


@once_per_trace
def size(trace: Trace) -> Size:
    """The three numbers of a trace that every pass is judged by."""
    saved = sum(one.nbytes for one in liveness.known_saved_values(trace))
    return Size(op_count(trace), saved, max(live_bytes(trace), default=0))


def step_size(variant: Variant) -> Size:
    """The same of the whole step: bytes as it is run, with an update that writes in place, and the ops that are shown, which
    have no copies into what is updated."""
    return size(variant.whole_in_place)._replace(ops=op_count(variant.whole))


@once_per_trace
def roots(trace: Trace) -> frozenset[str]:
    """What the modules of the ops begin with, where the program has several outermost ones."""
    return frozenset({origin(node).root for node in trace.ops} - {""})


@once_per_trace
def memory(trace: Trace) -> dict[str, Any]:
    """Bytes alive while each op runs, by the static rules of `tracefuse.optimizers.liveness`; the peak, the op it is at, and
    the largest storages that are alive there, as `[name, bytes]`; of all storages, how long they live and what for."""
    live = live_bytes(trace)
    peak = max(live, default=0)
    names = [node.name for node in trace.ops]
    at = live.index(peak) if live else -1
    alive = sorted(_alive_at_peak(trace), key=lambda one: -one.nbytes)
    largest = [[one.name, one.nbytes] for one in alive[:MAX_ALIVE]]
    return {
        "ops": names,
        "live": live,
        "peak": peak,
        "at": names[at] if live else "",
        "alive": largest,
        "inputs": sum(life.nbytes for life in lifetimes(trace) if life.kind == "input"),
        "again": [at for at, node in enumerate(trace.ops) if _computes_again(node)],
        "storages": _storages(lifetimes(trace), peak),
    }


def at_peak(
    traces: tuple[Trace, Trace], whys: tuple[Mapping[str, str], Mapping[str, str]], folds: Mapping[str, str]
) -> dict[str, Any]:
    """What is alive in the op with the most bytes, before and after: by purpose; and of what is saved by module, alike ones as
    one, and reason, with the number of storages after and the largest one's value. `whys` are the reasons by value."""
    purposes: dict[str, list[int]] = {}
    saved: dict[tuple[str, str], list[int]] = {}
    largest: dict[tuple[str, str], tuple[int, str]] = {}
    for side, (trace, why) in enumerate(zip(traces, whys, strict=True)):
        nodes = {node.name: node for node in trace.graph.nodes}
        for life in _alive_at_peak(trace):
            purposes.setdefault(life.kind, [0, 0])[side] += life.nbytes
            if life.kind == "saved":
                read = next((name for name in life.aliases if name in why), life.aliases[0])
                place = name_of(nodes[read], folds), why.get(read, "gradient")
                sums = saved.setdefault(place, [0, 0, 0])
                sums[side] += life.nbytes
                sums[2] += side
                largest[place] = max(largest.get(place, (-1, "")), (life.nbytes, life.name), key=lambda one: one[0])
    return {
        "purposes": [[kind, *purposes[kind]] for kind in liveness.KINDS if kind in purposes],
        "saved": [[*place, *sums, largest[place][1]] for place, sums in saved.items()],
        "at": [memory(trace)["at"] for trace in traces],
    }


def _alive_at_peak(trace: Trace) -> list[liveness.Lifetime]:
    live = live_bytes(trace)
    at = live.index(max(live)) if live else -1
    return [one for one in lifetimes(trace) if one.start <= at <= one.end]


@once_per_trace
def held_throughout(trace: Trace) -> int:
    """Bytes of inputs and parameters, and of what an optimizer keeps: alive in every op."""
    return sum(life.nbytes for life in lifetimes(trace) if life.is_input)


@once_per_trace
def update_peak(trace: Trace) -> int:
    """The peak within the update alone, which no choice of what the backward recomputes changes; 0 without an update."""
    live = memory(trace)["live"]
    return max((count for node, count in zip(trace.ops, live, strict=True) if phase(node) == "update"), default=0)


@once_per_trace
def least_peak(trace: Trace) -> int:
    """Bytes that no choice of what to recompute gets the peak of forward and backward below: inputs and parameters, which are
    alive throughout, beside all gradients and results, which are alive at the end, or beside what the largest matmul,
    convolution or attention reads and writes. All else may become another kernel, by that choice."""
    ops = [[node, *read_by(node)] for node in filter(does_work, trace.ops) if flops(node)]
    groups = [[node.name for node in nodes] for nodes in (trace.returned, *ops)]
    memories: dict[str, dict[int, int]] = {name: {} for names in groups for name in names}
    for at, life in enumerate(lifetimes(trace)):
        for name in () if life.is_input else memories.keys() & life.aliases:
            memories[name][at] = life.nbytes

    def together(names: Iterable[str]) -> int:
        return sum({at: count for name in names for at, count in memories[name].items()}.values())

    return held_throughout(trace) + max(map(together, groups))


def _computes_again(node: fx.Node) -> bool:
    """Whether an op, or a kernel with one of its ops, computes what the forward computed already."""
    if isinstance(node.target, Kernel):
        return any(recomputes(inner) and does_work(inner) for inner in node.target.body.ops)
    return does_work(node) and recomputes(node) is not None


def _storages(known: list[liveness.Lifetime], peak: int) -> list[int]:
    """`start, end, bytes, kind` of each storage but the inputs, one after another; the kind is an index into `KINDS`. Those
    that are small beside the peak and alike in the rest are one."""
    sums: dict[tuple[int, int, int], int] = {}
    found: list[int] = []
    for life in known:
        where = life.start, life.end, liveness.KINDS.index(life.kind)
        if life.kind == "input":
            continue
        if life.nbytes * 1000 < peak:
            sums[where] = sums.get(where, 0) + life.nbytes
        else:
            found += [life.start, life.end, life.nbytes, where[2]]
    for (start, end, number), count in sums.items():
        found += [start, end, count, number]
    return found


@once_per_trace
def values(trace: Trace) -> dict[str, dict[str, Any]]:
    """What there is to say of each value of a trace, by name and without its times; inputs first."""
    around = _Around(trace)
    return {node.name: _value(node, around) for node in (*trace.placeholders, *trace.ops)}


class _Around:
    """What a value's record says of its place in the trace: its twins, who shares its memory, whose gradient it is."""

    def __init__(self, trace: Trace) -> None:
        self.twins = _twins(trace)
        self.kernels = {node: node.target.name for node in trace.ops if isinstance(node.target, Kernel)}
        self.saved = {s.name: s.nbytes for s in liveness.known_saved_values(trace)}
        self.aliases = {name: life.aliases for life in lifetimes(trace) for name in life.aliases}
        self.of = {node.name: out.of for out, node in trace.output_pairs if out.kind == "gradient"}
        self.of |= {i.name: i.source for i in trace.inputs if i.kind == "parameter"}


def _value(node: fx.Node, around: _Around) -> dict[str, Any]:
    where, name, half = origin(node), node.name, phase(node)
    source, aliases = where.source, around.aliases.get(name, ())
    text, stride = _type_and_stride(node)
    return {  # Of every value: keys alone make a dictionary at once, which another one's between them do not.
        "op": op_name(node),
        "type": text,
        "stride": stride,
        "nbytes": nbytes(node),
        "phase": half,
        "module": where.module,
        "module_type": where.module_type,
        "source": str(source or ""),
        "reads": [n.name for n in read_by(node)][:MAX_NAMES],
        "uses": [n.name for n in node.users if n.op == "call_function"][:MAX_NAMES],
        "twins": around.twins.get(half, _NO_TWINS).get(where.seq, _NO_NAMES),
        "saved_bytes": around.saved.get(name, 0),
        "storage": [one for one in aliases[: MAX_NAMES + 1] if one != name][:MAX_NAMES]
        if len(aliases) > 1
        else _NO_NAMES,
        "kernel": around.kernels.get(producer(node), ""),
        "of": around.of.get(name, ""),
    }


_NO_NAMES: list[str] = []
_NO_TWINS: dict[int | None, list[str]] = {}


@once_per_type
def _type_and_stride(value: Any) -> tuple[str, list[int] | None]:
    return tensor_type(value), list(value.stride()) if isinstance(value, torch.Tensor) else None


def _twins(trace: Trace) -> dict[str, dict[int | None, list[str]]]:
    """By an op's phase the names of its twins in the other one, by autograd's sequence number, which they share."""
    forward, backward = dict[int | None, list[str]](), dict[int | None, list[str]]()
    twins_in = {"forward": backward, "backward": forward}
    of = {"forward": forward, "backward": backward}
    for node in trace.ops:
        seq = origin(node).seq
        if seq is not None and (found := of.get(phase(node))) is not None:
            names = found.setdefault(seq, [])
            if len(names) < MAX_NAMES:
                names.append(node.name)
    return twins_in


# --- what was computed and never used ---------------------------------------------------------------------------------

PROVENANCE = f"modelled: roofline of the {H100_SXM_DATASHEET.source}"


def unused_record(dropped: Sequence[Dropped]) -> dict[str, Any]:
    """Those ops in the order of the program, and whose times they have."""
    return {"provenance": PROVENANCE, "ops": [_op_record(one) for one in dropped]}


def _op_record(one: Dropped) -> dict[str, Any]:
    where = one.origin
    return {
        "op": one.op,
        "module": where.module,
        "module_type": where.module_type,
        "source": str(where.source or ""),
        "phase": "backward" if where.autograd else "forward",
        "nbytes": one.nbytes,
        "time_us": float(f"{one.modelled_us:.4g}"),
    }
