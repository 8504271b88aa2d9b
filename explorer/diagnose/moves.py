"""Findings about what moves between devices: gradients copied to the host, inputs moved each step, casts of the same name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from torch import fx

from tracefuse.findings.finding import Bar, Case, Finding, Fix, device
from tracefuse.lint.facts import users_of
from tracefuse.measure.op_times import Transfer
from tracefuse.optimizers.ops import behind_views, grouped, reached
from tracefuse.optimizers.trace import Trace, human_bytes, line_of, nbytes, origin, tensors, val
from tracefuse.tables.folding import work
from tracefuse.text import counted, time_text

# Bytes per second of a copy from a GPU to pageable host memory: 1.3 GB/s was measured on an H100's host, PCIe 5 allows 55.
PAGEABLE_BYTES_PER_S = 1.3e9
# Into pinned memory: 12.3 ms for 640 MiB on the same machine.
PINNED_BYTES_PER_S = 54e9
PINNED = f"modelled: pinned host memory at {PINNED_BYTES_PER_S / 1e9:.0f} GB/s"
PAGEABLE = f"modelled: pageable host memory at {PAGEABLE_BYTES_PER_S / 1e9:.1f} GB/s"

_NODE = "ToCopyBackward0"


def gradients_copied_to_the_host(case: Case) -> Iterator[Finding]:
    """A leaf on the CPU that the forward moves to the GPU: autograd moves its gradient back, each backward, and waits."""
    for node in case.trace.ops:
        if case.half[node] != "backward" or work(node) != "device copy" or val(node).device.type != "cpu":
            continue
        leaf, gpu = _gradient_of(case.trace, node), device(node.args[0])
        name = f"`{leaf}`" if leaf else "a value"
        us, worth = _cost(case, [node])
        copy = case.times.transfers.get(node.name)
        yield from case.finding(
            "cpu-leaf",
            case.severity(us) or "low",
            f"every backward copies the gradient of {name} from {gpu} to the CPU",
            _facts(case, node, leaf, copy),
            [node],
            case.trace.twins.get(node, node),
            f"create {name} on the GPU: pass device=, or make the leaf after moving it; else let the moved tensor be the leaf "
            "and copy its .grad into pinned memory",
            worth,
            kind="modelled",
            worth_us=us,
            bars=_bars(case, node, copy),
            fixes=_leaf_fixes(case, leaf, gpu) if leaf else (),
        )


def _facts(case: Case, node: fx.Node, leaf: str, copy: Transfer | None) -> tuple[tuple[str, str], ...]:
    memory = copy.memory if copy else "pageable"  # autograd asks for no other
    where = f"{device(node.args[0])} to {memory} CPU memory: the host waits for queued work, then for the copy"
    facts = [
        ("bytes", human_bytes(nbytes(node))),
        ("is", "a device move, not a dtype cast: both are called ToCopyBackward0"),
        ("from", where),
    ]
    facts += [("event", f"{time_text(copy.event_us)} on the host")] if copy else []
    facts += _moves_from(case, [leaf] if leaf else [])
    return tuple(facts)


def _leaf_fixes(case: Case, leaf: str, gpu: str) -> tuple[Fix, ...]:
    does = f"`{leaf}` on {gpu}, and its gradient too"
    return (
        Fix("on device", does, (leaf,), gained_us=lambda: _both_ways_us(case, (leaf,))),
        Fix(
            "pinned gradient",
            f"the gradient of `{leaf}` copied into pinned memory, not waited for: synchronize before it is read",
            (leaf,),
        ),
    )


def _cost(case: Case, nodes: Sequence[fx.Node], is_pinned: bool = False) -> tuple[float, float | str]:
    """Microseconds of copies, and what they are worth: the same if they were timed, else in words, modelled."""
    us = case.us(nodes)
    if case.times.is_measured and us > 0:
        return us, us
    us = 1e6 * sum(map(nbytes, nodes)) / (PINNED_BYTES_PER_S if is_pinned else PAGEABLE_BYTES_PER_S)
    return us, f"about {time_text(us)} a step ({PINNED if is_pinned else PAGEABLE})"


def _both_ways_us(case: Case, inputs: Sequence[str]) -> float:
    """The microseconds of all copies of the inputs to the GPU, and of their gradients to the host."""
    moves = [n for n in case.trace.ops if work(n) == "device copy"]
    there = [n for n in moves if case.half[n] == "forward" and set(_inputs_behind([n])).intersection(inputs)]
    back = [n for n in moves if case.half[n] == "backward" and _gradient_of(case.trace, n) in inputs]
    return sum(_cost(case, nodes, case.program.pinned.issuperset(inputs))[0] for nodes in (there, back) if nodes)


def _bars(case: Case, node: fx.Node, found: Transfer | None) -> tuple[Bar, ...]:
    """What the event of a copy to the host consists of: measured where it was profiled, else modelled from the trace alone."""
    if found is not None:
        rate = f"copy @ {nbytes(node) / found.copy_us / 1e3:.3g} GB/s"
        parts = ("wait", found.wait_us), (rate, found.copy_us), ("host", found.host_us), ("other", found.other_us)
        return tuple(Bar(label, us, case.times.provenance) for label, us in parts if us > 0)
    if case.times.is_measured:
        return ()
    earlier = itertools.takewhile(lambda one: one is not node, case.trace.ops)
    gpu = val(node.args[0]).device  # type: ignore[arg-type]
    queued = case.us([one for one in earlier if any(tensor.device == gpu for tensor in tensors(one))])
    copied = 1e6 * nbytes(node) / PAGEABLE_BYTES_PER_S
    of = f"{PAGEABLE}, the first touch of its pages included; waiting at most for all that was queued, {case.times.provenance}"
    return Bar("wait", queued, of), Bar(f"copy @ {PAGEABLE_BYTES_PER_S / 1e9:.1f} GB/s", copied, of)


def _moves_from(case: Case, inputs: Sequence[str]) -> list[tuple[str, str]]:
    """Whether the inputs, which the forward moves, lie in pinned memory: as evidence."""
    return [
        ("forward", f"moves `{name}` from {'pinned' if name in case.program.pinned else 'pageable'} memory")
        for name in inputs
    ]


def inputs_moved_each_step(case: Case) -> Iterator[Finding]:
    """Device moves of the forward: data that could have been on the device."""
    moves = [n for n in case.trace.ops if case.half[n] == "forward" and work(n) == "device copy"]
    for at, nodes in grouped(moves, line_of).items():
        moved = sum(map(nbytes, nodes))
        inputs = _inputs_behind(nodes)
        is_pinned = bool(inputs) and case.program.pinned.issuperset(inputs)
        us, worth = _cost(case, nodes, is_pinned)
        severity = case.severity(us)
        if is_pinned and _is_data(case, inputs):
            severity = severity and "low"  # a batch has to come from somewhere
        target = str(val(nodes[0]).device)
        yield from case.finding(
            "pageable-copy" if _is_data(case, inputs) and not is_pinned else "moved-each-step",
            severity,
            f"every forward moves {human_bytes(moved)} from {device(nodes[0].args[0])} to {target}",
            (("bytes", human_bytes(moved)), ("copies", str(len(nodes))), *_moves_from(case, inputs)),
            nodes,
            at,
            "keep it on the device, or load it into pinned memory and move it with non_blocking=True",
            worth,
            said="at most {}",
            kind="modelled",
            worth_us=us,
            fixes=_move_fixes(case, inputs, target) if inputs else (),
        )


def _is_data(case: Case, inputs: Sequence[str]) -> bool:
    """Whether it is a batch that is moved, which each step has to."""
    known = {entry.name: entry for entry in case.trace.inputs}
    return bool(inputs) and all(known[name].kind == "input" and not known[name].trainable for name in inputs)


def _move_fixes(case: Case, inputs: tuple[str, ...], target: str) -> tuple[Fix, ...]:
    listed = ", ".join(f"`{name}`" for name in inputs)
    there = Fix("on device", f"{listed} on {target} already", inputs, gained_us=lambda: _both_ways_us(case, inputs))
    if case.program.pinned.issuperset(inputs):
        return (there,)
    return there, Fix("pinned input", f"{listed} in pinned memory, moved with non_blocking=True", inputs)


def _inputs_behind(moves: Sequence[fx.Node]) -> tuple[str, ...]:
    """The inputs on the CPU that the ops move to a GPU, through views."""
    to_gpu = [n for n in moves if val(n).device.type == "cuda" and device(n.args[0]) == "cpu"]
    found = (behind_views(n.args[0]) for n in to_gpu)  # type: ignore[arg-type]
    return tuple(dict.fromkeys(n.name for n in found if n.op == "placeholder"))


def _gradient_of(trace: Trace, node: fx.Node) -> str:
    """The input whose gradient `node` becomes, through views and sums; "" if it becomes none or several."""
    outputs = {n: out.of for out, n in trace.output_pairs if out.kind == "gradient"}
    made = reached([node], users_of)
    found = {outputs[one] for one in made if one in outputs}
    return found.pop() if len(found) == 1 else ""


def casts_beside_moves(case: Case) -> Iterator[Finding]:
    """A backward that has both: a profile shows one name for them."""
    copies = [n for n in case.trace.ops if case.half[n] == "backward" and origin(n).autograd == _NODE]
    casts, moves = ([n for n in copies if work(n) == kind] for kind in ("cast", "device copy"))
    if not casts or not moves:
        return
    largest = max(moves, key=nbytes)
    yield from case.finding(
        "one-name-two-copies",
        "low",
        f"{counted(len(casts), 'dtype cast')} and {counted(len(moves), 'device move')} are both called {_NODE} in a profile",
        (("casts", _amount(case, casts)), ("device moves", _amount(case, moves)), ("largest move", largest.name)),
        [*moves, *casts],
        largest,
        "read them apart here, by their values: what a profile shows under that name is a cast only where no device changes",
        "nothing by itself: it says which of the two to look at",
    )


def _amount(case: Case, nodes: Sequence[fx.Node]) -> str:
    us = case.us(nodes)
    timed = f", {time_text(us)} ({case.times.provenance})" if case.times.is_measured and us else ""
    return f"{human_bytes(sum(map(nbytes, nodes)))}{timed}"
