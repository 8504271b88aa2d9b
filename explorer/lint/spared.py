"""What kernels for several ops at once would spare of the time that the ops take, by the bytes that go through memory.

mul, gelu, add       6 GiB moved in 2 ms          one kernel reads 2 GiB and writes 1 GiB: it spares 1 ms
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from tracefuse.findings.finding import Case, Fix
from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.costs.cost import bytes_moved, bytes_written, is_allocation, op_class, touched_bytes
from tracefuse.optimizers.decompose.norms import comes_apart, read_again
from tracefuse.optimizers.facts import once_per_trace, storage_id
from tracefuse.optimizers.fuse.regions import form_regions
from tracefuse.optimizers.kernels.fusible import refusal
from tracefuse.optimizers.ops import behind_views, does_work, producer, read_by, readers
from tracefuse.optimizers.trace import Trace, tensors, val
from tracefuse.tables.folding import work


def one_by_one(case: Case) -> list[fx.Node]:
    """The pointwise ops and reductions that run as kernels of their own, cuDNN's norms that passes take apart among them."""
    return [n for n in _small(case.trace) if n not in case.not_on_a_gpu]


@once_per_trace
def _small(trace: Trace) -> list[fx.Node]:
    found = [n for n in trace.ops if does_work(n) and (op_class(n) in ("pointwise", "reduction") or comes_apart(n))]
    return [n for n in found if not is_allocation(n) and work(n) != "device copy"]


_known: WeakKeyDictionary[Trace, tuple[OpTimes, float]] = WeakKeyDictionary()
"""By trace what its ops of these times take beyond kernels: several detectors ask for it."""


def spared_by_kernels(case: Case) -> float:
    """The microseconds that the ops take beyond kernels for them, each of which is a region as `fuse` begins with. A norm that
    `decompose` takes apart first is whole in its region."""
    known = _known.get(case.trace)
    if known is None or known[0] is not case.times:
        _known[case.trace] = known = case.times, _spared_by_regions(case)
    return known[1]


def _spared_by_regions(case: Case) -> float:
    wanted = set(one_by_one(case))
    if not _are_any_joined(wanted):
        return 0
    fusible = set(filter(_is_fusible, case.trace.graph.nodes))
    regions = [[n for n in region if n in wanted] for region in form_regions(case.trace.graph, fusible)]
    return sum(spared_in_one_kernel(case, region) for region in regions if len(region) > 1)


def _is_fusible(node: fx.Node) -> bool:
    return refusal(node) is None or comes_apart(producer(node))


def _are_any_joined(ops: set[fx.Node]) -> bool:
    """Whether ops that kernels can hold lead from any of `ops` to another one: no region has two that are not joined so."""

    is_fusible = cache(_is_fusible)

    def leads_to_another(start: fx.Node) -> bool:
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            for one in (*read_by(node), *node.users):
                if one in seen or not is_fusible(one):
                    continue
                if one in ops:
                    return True
                seen.add(one)
                stack.append(one)
        return False

    return any(is_fusible(node) and leads_to_another(node) for node in ops)


def spared_in_one_kernel(case: Case, nodes: Sequence[fx.Node]) -> float:
    """The microseconds that ops take beyond one kernel for all of them, which reads once what they read of others and writes
    once what others read. A norm may need sums first, by a kernel of their own, for which its images are read once more."""
    own, read = set(nodes), dict[int, int]()
    for tensor in (t for n in nodes for a in n.all_input_nodes if _made_by(a) not in own for t in tensors(a)):
        read[storage_id(tensor)] = max(read.get(storage_id(tensor), 0), touched_bytes(tensor))
    shown = [n for n in nodes if any(r.op == "output" or producer(r) not in own for r in readers(n))]
    again = sum(touched_bytes(val(image)) for n in nodes if comes_apart(n) for image in read_again(n))
    least, moved = sum(read.values()) + sum(map(bytes_written, shown)) + again, sum(map(bytes_moved, nodes))
    return case.us(nodes) * max(0.0, 1 - least / moved) if moved else 0.0


def _made_by(operand: fx.Node) -> fx.Node:
    return producer(behind_views(operand))


def with_kernels(case: Case, changes: Mapping[str, Any], besides_us: float = 0.0) -> tuple[Fix, ...]:
    """What passes gain by kernels for all ops, those that the finding is about among them, and `besides_us` in another way."""
    changes = for_kernels(case, changes)
    does = f"with {', '.join(changes)}, and so kernels for all ops"
    return (Fix("passes", does, changes=changes, gained_us=lambda: spared_by_kernels(case) + besides_us),)


def for_kernels(case: Case, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` of passes that make kernels for all ops: with `decompose` where there are norms, which `fuse` leaves whole."""
    return {"decompose": True, **changes} if any(map(comes_apart, case.trace.ops)) else dict(changes)
