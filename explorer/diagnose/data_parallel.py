"""Findings about what DistributedDataParallel reduces: zeros for parameters that got no gradient, and for frozen ones.

Its buckets have room for each parameter that was trainable when it was made, and it sends zeros for those without a gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from tracefuse.assembly.unshown import UNUSED_PARAMETERS
from tracefuse.findings.finding import Case, Finding, Severity, severity_of
from tracefuse.optimizers.costs.cost import packet_name
from tracefuse.optimizers.ops import is_getitem, is_of_ranks, is_view, producer
from tracefuse.optimizers.overlap.collectives import reduces_gradients
from tracefuse.optimizers.trace import human_bytes, nbytes, tensor_type, val
from tracefuse.text import counted, share_text

_SHOWN = 4
_PASSING_ON = {"copy", "mul", "div", "_to_copy", "clone", "detach"}
"""Through these a gradient comes from the collective that reduced it."""


def reduced_zeros(case: Case) -> Iterator[Finding]:
    """Zeros that reductions send: each part of a bucket that nothing but `zero_` wrote."""
    reductions = list(filter(reduces_gradients, case.trace.ops))
    zeros = [(node, part) for node in reductions for part in node.args[0] if packet_name(part) in ("zero", "zeros")]
    if not zeros:
        return
    unused, whole = _unused(case), sum(nbytes(part) for node in reductions for part in node.args[0])
    left = Counter(kind for _, kind in unused)
    frozen_names = _frozen(case)
    of_unused, of_frozen, frozen = [], [], []
    for node, part in zeros:
        kind = tensor_type(val(part))
        if not left[kind] and frozen_names.get(kind):
            frozen.append(frozen_names[kind].pop(0))
            of_frozen.append((node, part))
        else:
            left[kind] -= 1
            of_unused.append((node, part))
    if of_unused:
        yield from _zeros(
            case,
            "unused-parameters",
            of_unused,
            [name for name, _ in unused],
            whole,
            "parameters that get no gradient",
            "leave out what the forward does not call, or freeze it before `DistributedDataParallel(model)`: then it is not "
            "reduced, and no step looks for it",
        )
    if of_frozen:
        yield from _zeros(
            case,
            "frozen-parameters-reduced",
            of_frozen,
            frozen,
            whole,
            "parameters that were frozen after `DistributedDataParallel` was made",
            "call `requires_grad_(False)` before `DistributedDataParallel(model)`, which leaves them out of its buckets",
        )


def reductions_that_wait(case: Case) -> Iterator[Finding]:
    """Gradients that no collective reduced, although DistributedDataParallel was to: a bucket waits for all its parameters."""
    known, unused = case.program.environment, _unused(case)
    if not unused or "DistributedDataParallel" not in known or "find_unused_parameters" in known:
        return
    inputs = {entry.name: entry for entry in case.trace.inputs if entry.kind == "parameter"}
    made = [(out.of, node) for out, node in case.trace.output_pairs if out.kind == "gradient"]
    gradients = [(inputs[of].source, node) for of, node in made if of in inputs]
    alone = [(name, node) for name, node in gradients if not _is_reduced(node)]
    if not alone:
        return
    yield from case.finding(
        "unused-parameters",
        "high",
        f"{counted(len(alone), 'gradient')} of {len(gradients)} are never reduced: their buckets wait for "
        f"{counted(len(unused), 'parameter')} that get no gradient",
        (
            ("without a gradient", _listed([name for name, _ in unused])),
            ("not reduced", _listed([one for one, _ in alone])),
        ),
        [node for _, node in alone],
        alone[0][1],
        "leave out what the forward does not call, or freeze it before `DistributedDataParallel(model)`; where it differs "
        "from step to step, `find_unused_parameters=True`",
        "the ranks train apart, and the next forward raises; where only some ranks lack a gradient, the others wait for ever",
    )


def _zeros(
    case: Case,
    id_: str,
    zeros: Sequence[tuple[fx.Node, fx.Node]],
    named: Sequence[str],
    whole: int,
    what: str,
    fix: str,
) -> Iterator[Finding]:
    sent = sum(nbytes(part) for _, part in zeros)
    severity: Severity = severity_of(sent, whole) or "low"
    reductions = list(dict.fromkeys(node for node, _ in zeros))
    yield from case.finding(
        id_,
        "medium" if severity == "high" else severity,
        f"DistributedDataParallel reduces {human_bytes(sent)} of zeros, for {what}",
        (
            ("parameters", _listed(named) if named else str(len(zeros))),
            ("of", f"{human_bytes(whole)} in {counted(len(reductions), 'reduction')}"),
        ),
        [*reductions, *(part for _, part in zeros)],
        reductions[0],
        fix,
        f"{share_text(sent, whole)} of the bytes that are reduced, counted in the trace; what that takes depends on the links",
    )


def _unused(case: Case) -> list[tuple[str, str]]:
    """The trainable parameters that got no gradient, with their types."""
    said = case.program.environment.get(UNUSED_PARAMETERS, "")
    return [(name, kind) for name, _, kind in (one.partition(": ") for one in said.split("; ") if one)]


def _frozen(case: Case) -> dict[str, list[str]]:
    """The frozen parameters that the program reads, by type."""
    found: dict[str, list[str]] = {}
    for entry, node in case.trace.input_pairs:
        if entry.kind == "parameter" and not entry.trainable:
            found.setdefault(tensor_type(val(node)), []).append(entry.source)
    return found


def _is_reduced(gradient: fx.Node) -> bool:
    """Whether a gradient is what a collective gave, seen otherwise, copied or scaled."""
    above = [gradient]
    while above:
        one = above.pop()
        if is_of_ranks(producer(one)):
            return True
        if is_view(one) or is_getitem(one) or packet_name(one) in _PASSING_ON:
            above += one.all_input_nodes
    return False


def _listed(all_: Sequence[str]) -> str:
    return ", ".join(all_[:_SHOWN]) + (f" and {len(all_) - _SHOWN} more" if len(all_) > _SHOWN else "")
