"""Findings about what moves between devices: gradients copied to the host, inputs moved each step, values read back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import fx

from tracefuse.findings import Case, Finding, device, grouped, line, names, time_text
from tracefuse.optimizers.trace import Trace, human_bytes, nbytes, origin, phase, val
from tracefuse.record import Guard
from tracefuse.work import work

# Bytes per second of a copy from a GPU to pageable host memory: 1.3 GB/s was measured on an H100's host, PCIe 5 allows 55.
PAGEABLE_BYTES_PER_S = 1.3e9
PAGEABLE = f"modelled: pageable host memory at {PAGEABLE_BYTES_PER_S / 1e9:.1f} GB/s"


def gradients_copied_to_the_host(case: Case) -> Iterator[Finding]:
    """A leaf on the CPU that the forward moves to the GPU: autograd moves its gradient back, each backward, and waits."""
    for node in case.trace.ops:
        if phase(node) != "backward" or work(node) != "device copy" or val(node).device.type != "cpu":
            continue
        leaf = _gradient_of(case.trace, node)
        name = f"`{leaf}`" if leaf else "a value"
        is_timed = case.times.provenance.startswith("measured") and case.us([node]) > 0
        us = case.us([node]) if is_timed else 1e6 * nbytes(node) / PAGEABLE_BYTES_PER_S
        yield Finding(
            "gradient copied to the host",
            case.severity(us) or "low",
            f"every backward copies the gradient of {name} from {device(node.args[0])} to the CPU",
            (
                ("bytes", human_bytes(nbytes(node))),
                ("is", "a device move, not a dtype cast: both are called ToCopyBackward0"),
                ("into", "pageable memory: the host waits for all queued work, then for the copy"),
            ),
            (node.name,),
            line(_forward_twin(case.trace, node) or node),
            f"create {name} on the GPU: pass device=, or make the leaf after moving it",
            case.worth(us) if is_timed else f"about {time_text(us)} a step ({PAGEABLE})",
        )


def inputs_moved_each_step(case: Case) -> Iterator[Finding]:
    """Device moves of the forward: data that could have been on the device."""
    moves = [n for n in case.trace.ops if phase(n) == "forward" and work(n) == "device copy"]
    for at, nodes in grouped(moves, line).items():
        moved = sum(map(nbytes, nodes))
        us = 1e6 * moved / PAGEABLE_BYTES_PER_S
        severity = case.severity(us)
        if severity is not None:
            yield Finding(
                "moved between devices each step",
                severity,
                f"every forward moves {human_bytes(moved)} from {device(nodes[0].args[0])} to {val(nodes[0]).device}",
                (("bytes", human_bytes(moved)), ("copies", str(len(nodes)))),
                names(nodes),
                at,
                "keep it on the device, or load it into pinned memory and move it with non_blocking=True",
                f"up to {time_text(us)} a step ({PAGEABLE})",
            )


def waits_for_the_gpu(case: Case) -> Iterator[Finding]:
    """Python values that were read from tensors: each stops the host until the GPU has caught up."""
    groups: dict[str, list[Guard]] = defaultdict(list)
    for guard in case.guards:
        groups[f"{guard.source.label}:{guard.source.line}  {guard.source.text}" if guard.source else guard.op].append(
            guard
        )
    on_gpu = _is_on_gpu(case.trace)
    for at, guards in groups.items():
        yield Finding(
            "waits for the GPU",
            "medium" if on_gpu else "low",
            f"the program reads {len(guards)} value{'s' * (len(guards) > 1)} back to Python ({guards[0].op})",
            (("values", ", ".join(repr(guard.value) for guard in guards[:4])),),
            (),
            at,
            "keep it a tensor (torch.where instead of if), or read it once every many steps",
            "the host's idle time until the GPU has caught up: see the timeline"
            if on_gpu
            else "nothing on a CPU; on a GPU, a stop",
        )


def _is_on_gpu(trace: Trace) -> bool:
    return any(isinstance(v := val(node), torch.Tensor) and v.device.type == "cuda" for node in trace.ops)


def _forward_twin(trace: Trace, node: fx.Node) -> fx.Node | None:
    seq = origin(node).seq
    return next((n for n in trace.ops if phase(n) == "forward" and seq is not None and origin(n).seq == seq), None)


def _gradient_of(trace: Trace, node: fx.Node) -> str:
    """The input whose gradient `node` becomes, through views and sums; "" if it becomes none or several."""
    seen, front, found = set(), [node], set()
    outputs = {n: out.of for n, out in zip(trace.returned, trace.outputs, strict=True) if out.kind == "gradient"}
    while front:
        one = front.pop()
        if one in outputs:
            found.add(outputs[one])
        for user in one.users:
            if user.op == "call_function" and user not in seen:
                seen.add(user)
                front.append(user)
    return found.pop() if len(found) == 1 else ""
