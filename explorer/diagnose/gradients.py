"""Findings about what nobody needs: gradients that no optimizer takes, of data or of frozen parameters, and unused results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from torch import fx

from tracefuse.assembly.unshown import GROWING, SHRUNK, Dropped
from tracefuse.findings.finding import Case, Finding
from tracefuse.measure.op_times import roofline_of
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, roofline_seconds
from tracefuse.optimizers.freeze.costs import frozen_costs, unread_seconds
from tracefuse.optimizers.freeze.narrowing import output_nbytes, switchable_outputs, unread_outputs
from tracefuse.optimizers.trace import Trace, human_bytes, nbytes, origin, val
from tracefuse.text import counted, share_text, time_text

_CHECKPOINT = "CheckpointFunctionBackward"
"""It runs a forward again, of which the last op is for nobody: that is no gradient."""


def gradients_no_optimizer_takes(case: Case) -> Iterator[Finding]:
    """Parameters with a gradient that none of the optimizers in sight holds, where one holds others of the program."""
    held = frozenset().union(*case.program.optimizers.values())
    unheld = [i for i in _with_gradient(case.trace) if i.kind == "parameter" and i.name not in held]
    if not held or not unheld:
        return
    optimizers = ", ".join(f"`{name}`" for name in case.program.optimizers)
    some = f"gradients of {len(unheld)} parameters" if len(unheld) > 1 else f"the gradient of `{unheld[0].source}`"
    yield from _undemanded(
        case,
        "gradient-without-optimizer",
        {i.source for i in unheld},
        f"every backward computes {some}, which no optimizer updates",
        ("optimizers found", f"{optimizers}: {len(held)} of the {len(held) + len(unheld)} parameters with a gradient"),
        "`requires_grad_(False)` before the forward, or hand them to the optimizer; `freeze` shows what that spares",
    )


def gradients_of_data(case: Case) -> Iterator[Finding]:
    """Inputs that are no parameters and get a gradient, in a program that trains parameters: where it trains none, as in an
    attack or a test of an operator, the inputs' gradients are what it is for."""
    held = frozenset().union(*case.program.optimizers.values())
    inputs = _with_gradient(case.trace)
    data = [i for i in inputs if i.kind == "input" and i.name not in held]
    if len(data) == len(inputs):
        return
    for entry in data:
        yield from _undemanded(
            case,
            "gradient-of-data",
            {entry.source},
            f"every backward computes the gradient of `{entry.source}`, which is no parameter",
            ("fills", f"`{entry.source}.grad`"),
            f"if nothing reads `{entry.source}.grad`: make it without requires_grad; where `torch.autograd.grad` asks for its "
            "gradient, too, tell the backward what it is for (`loss.backward(inputs=list(model.parameters()))`)",
        )


def _with_gradient(trace: Trace) -> list:
    of = {out.of for out in trace.outputs if out.kind == "gradient"}
    return [entry for entry in trace.inputs if entry.name in of]


def _undemanded(
    case: Case, name: str, sources: Collection[str], title: str, fact: tuple[str, str], fix: str
) -> Iterator[Finding]:
    """The finding on inputs whose gradients need not be computed, if that is worth anything."""
    cost = frozen_costs(case.trace, sorted(sources)).together
    nodes = [case.trace.node(op) for op in cost.ops]
    us = case.us(nodes)
    of = {entry.name for entry in case.trace.inputs if entry.source in sources}
    gradients = [node for out, node in case.trace.output_pairs if out.kind == "gradient" and out.of in of]
    severity = case.severity(us)
    yield from case.finding(
        name,
        "medium" if severity == "high" and name == "gradient-of-data" else severity,
        title,
        (
            fact,
            ("only for that", f"{counted(len(nodes), 'op')}, {human_bytes(cost.saved_nbytes)} saved by the forward"),
            ("gradients", human_bytes(cost.gradient_nbytes)),
        ),
        nodes,
        max(gradients, key=nbytes),
        fix,
        us,
        {"freeze": sorted(sources)},
    )


def dropped_gradients(case: Case) -> Iterator[Finding]:
    """Ops of the backward that reached nothing."""
    yield from _never_used(
        case,
        [one for one in case.program.dropped if one.origin.autograd not in ("", _CHECKPOINT)],
        "gradient-dropped",
        "of the backward computed what nothing used",
        "compute only what is used: `ctx.needs_input_grad` in a backward of your own, fewer `inputs` of autograd.grad, "
        "requires_grad_(False)",
    )


def never_used(case: Case) -> Iterator[Finding]:
    """Ops that Python ran and whose results reached nothing."""
    dropped = [one for one in case.program.dropped if not one.origin.autograd]
    are_weights = all(one.origin.ran_in("MultiheadAttention") for one in dropped)
    yield from _never_used(
        case,
        dropped,
        "never-used",
        "computed what nothing used",
        "call `nn.MultiheadAttention` with `need_weights=False`"
        if are_weights
        else "do not call what computes it, or use its result; a compiled step leaves it out",
    )


def _never_used(case: Case, dropped: Sequence[Dropped], name: str, what: str, fix: str) -> Iterator[Finding]:
    if not dropped:
        return
    us = sum(one.modelled_us for one in dropped)
    whole = us + case.step_us
    us_of: dict[str, float] = defaultdict(float)
    for one in dropped:
        us_of[one.origin.autograd or one.origin.module or one.op] += one.modelled_us
    largest = max(dropped, key=lambda one: one.modelled_us)
    yield from case.finding(
        name,
        case.severity(us, whole),
        f"{counted(len(dropped), 'op')} {what}",
        (
            ("written", human_bytes(sum(one.nbytes for one in dropped))),
            ("by", ", ".join(sorted(us_of, key=lambda n: -us_of[n])[:3])),
        ),
        (),
        str(largest.origin.source or ""),
        fix,
        f"{time_text(us)} on top of the step's {time_text(case.step_us)}, {share_text(us, whole)} of their sum "
        f"({case.beside_step(f'modelled: roofline of the {H100_SXM_DATASHEET.source}')})",
        kind="modelled",
    )


def unread_gradients(case: Case) -> Iterator[Finding]:
    """Multi-output ops of the backward, of which some outputs are computed and not read: most often a frozen parameter's."""
    backward = [n for n in case.trace.ops if case.half[n] == "backward"]
    wasteful = {n: unread for n in backward if (unread := unread_outputs(n) & switchable_outputs(n))}
    if not wasteful:
        return
    peaks = roofline_of(case.trace)
    # Of an op's own time what a roofline gives to the part; its operands are laid out for what is left, too.
    own_us = {n: case.us([n]) - case.times.laid_out_us.get(n.name, 0.0) for n in wasteful}
    us = sum(own_us[n] * unread_seconds(n, peaks) / roofline_seconds(n, peaks) for n in wasteful)
    how = f"modelled: roofline of the {peaks.source}"
    if case.times.is_measured:
        how = f"predicted: {case.times.provenance}, the part of it {how}"
    frozen = sorted({source for n in wasteful for source in _frozen_parameters(case.trace, n)})
    computed = sum(output_nbytes(val(n)[i]) for n, unread in wasteful.items() for i in unread)
    whose = ("of", f"{counted(len(frozen), 'frozen parameter')}: {', '.join(frozen[:3])}") if frozen else None
    ops = list(wasteful)
    yield from case.finding(
        "frozen-weight-gradient" if frozen else "gradient-unread",
        case.severity(us),
        f"the backward computes {human_bytes(computed)} that nothing reads, in {counted(len(ops), 'op')}",
        tuple(filter(None, (("operators", ", ".join(sorted({str(n.target) for n in ops}))), whose))),
        ops,
        case.trace.twins.get(ops[0], ops[0]),
        "`freeze` switches off what the operators can leave out",
        f"about {time_text(us)} of {time_text(case.step_us)} a step, {share_text(us, case.step_us)} ({how})",
        {"freeze": []},
        kind="predicted" if case.times.is_measured else "modelled",
        worth_us=us,
        worth_share=us / case.step_us,
    )


def _frozen_parameters(trace: Trace, node: fx.Node) -> list[str]:
    """Parameters without a gradient that the op, or its forward, reads."""
    frozen = {i.name: i.source for i in trace.inputs if i.kind == "parameter" and not i.trainable}
    read = [*node.all_input_nodes, *(trace.twins[node].all_input_nodes if node in trace.twins else ())]
    return [frozen[n.name] for n in read if n.name in frozen]


def growing_graphs(case: Case) -> Iterator[Finding]:
    """A sum or a list over steps, mostly of losses, that were not detached."""
    known = case.program.environment
    if GROWING not in known:
        return
    graph = {origin(n).seq for n in case.trace.ops if not origin(n).autograd} - {None}
    yield from case.finding(
        "growing-graph",
        "medium",
        f"a {'list' if '.append(' in known[SHRUNK] else 'sum'} over steps keeps the graph of every step",
        (("graph of a step", counted(len(graph), "node")),),
        (),
        known[GROWING],
        f"`{known[SHRUNK]}`; `.item()` in place of `.detach()` makes the host wait for the GPU",
        "memory of the host, which grows with each step; of the GPU too, where no backward frees what the step saved",
        code=known[SHRUNK],
    )
