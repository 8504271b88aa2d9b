"""Findings about dtypes: casts back and forth, casts done again, logits in float32, and float64 that leaks in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from tracefuse.findings.finding import Case, Finding, Fix, Severity, dtype
from tracefuse.lint.facts import HALVES, is_explicit_cast, parameters_of, with_backward
from tracefuse.lint.spared import spared_in_one_kernel, with_kernels
from tracefuse.optimizers.costs.cost import bytes_moved, op_class, packet_name
from tracefuse.optimizers.ops import behind_views, grouped, is_random, producer, readers
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin, val
from tracefuse.tables.folding import work
from tracefuse.text import counted

LONGEST = 8
"""How many pointwise ops there may be between two casts that undo each other."""
_OF_NORMS = ("var_mean", "rsqrt")
_NORMS = ("norm", *_OF_NORMS)
_MEANS = ("mean", "var_mean", "var", "linalg_vector_norm")
_LOSSES = {"_log_softmax", "logsumexp", "nll_loss_forward"}


def casts_back_and_forth(case: Case) -> Iterator[Finding]:
    """A value of half precision that is cast to float32 for a few ops and back again."""
    trips = [trip for n in case.own_ops if work(n) == "cast" and (trip := _trip(n))]
    for (at, kind, is_chain), group in grouped(
        trips, lambda trip: (line_of(trip[0]), _kind(trip), _is_chain(trip))
    ).items():
        casts = [n for trip in group for n in (trip[0], trip[-1])]
        between = list(dict.fromkeys(n for trip in group for n in trip[1:-1]))
        # In half precision each op between moves half of its bytes.
        us = case.us(_both_ways(case, casts)) + case.us(with_backward(case, between)) / 2
        half = dtype(casts[-1])
        remedy, fixes = _REMEDY[kind].format(half=half), _without_casts(case, casts, between)
        if is_chain:  # each op more that rounds to half precision loses digits: the casts may be meant
            us, remedy = _spared_in_kernels(case, group), _FUSED
            fixes = with_kernels(case, {"simplify": True, "fuse": True})
        severity = _capped(case.severity(us), casts)
        if is_chain:
            severity = severity and "low"
        yield from case.finding(
            kind,
            severity,
            f"{counted(len(group), 'value')} of {half} cast to float32 and back{_FOR[kind]}",
            (
                ("between the casts", ", ".join(dict.fromkeys(packet_name(n) for n in between)) or "nothing"),
                ("moved", human_bytes(sum(map(bytes_moved, [*casts, *between])))),
                ("asked for by", "the line" if is_explicit_cast(casts[0]) else "autocast"),
            ),
            [*casts, *between],
            at,
            remedy,
            us,
            {"simplify": True, "fuse": True},
            fixes=fixes,
        )


def _without_casts(case: Case, casts: Sequence[fx.Node], between: Sequence[fx.Node]) -> tuple[Fix, ...]:
    """The program without the casts to float32, of gradients too. A norm in single ops would round otherwise then."""
    if any(packet_name(n) in _OF_NORMS for n in between) or _is_normalised(casts[0]):
        return ()
    up = [n for n in _both_ways(case, casts) if val(n).dtype == torch.float32]
    weights = parameters_of(case.trace).intersection(a for n in between for a in n.all_input_nodes)
    return (Fix("left out", f"{counted(len(up), 'cast')} left out", tuple(n.name for n in (*up, *weights))),)


def _both_ways(case: Case, casts: Sequence[fx.Node]) -> list[fx.Node]:
    """The casts and those of their gradients, without the sums of these, which autograd makes in their name."""
    return [n for n in with_backward(case, casts) if work(n) == "cast"]


def _spared_in_kernels(case: Case, group: Sequence[Sequence[fx.Node]]) -> float:
    """What the trips take beyond a kernel for each, and one for the backward of each."""
    late = [[n for n in with_backward(case, trip) if n not in trip] for trip in group]
    return sum(spared_in_one_kernel(case, ops) for ops in (*group, *late))


def _is_norm(node: fx.Node) -> bool:
    return any(norm in packet_name(node) for norm in _NORMS)


_FOR = {"cast-round-trip": "", "norm-in-float32": " around a norm", "dropout-in-float32": " around dropout"}
_REMEDY = {
    "cast-round-trip": "leave both casts out: kernels of {half} compute in float32 inside",
    "norm-in-float32": "give the norm {half}: `F.layer_norm` and `F.rms_norm` sum in float32 inside; keep its weights in the "
    "dtype of the model",
    "dropout-in-float32": "cast before dropout, or leave the cast out: `F.dropout` of {half} moves half the bytes",
}


_FUSED = (
    "keep the casts, since several ops between them round less in float32, and compute all in one kernel: the passes "
    "`simplify` and `fuse` do, as does `torch.compile` of this function"
)


def _is_chain(trip: Sequence[fx.Node]) -> bool:
    """Whether more than one op lies between the casts, none of which sums in float32 or draws by itself."""
    return _kind(trip) == "cast-round-trip" and len(trip) > 3


def _trip(down: fx.Node) -> tuple[fx.Node, ...] | None:
    """From a cast to float32 to the cast back, `down`, and the ops between them."""
    if val(down).dtype not in HALVES:
        return None
    node, found = behind_views(down.args[0]), [down]  # type: ignore[arg-type]
    for _ in range(LONGEST):
        node = producer(behind_views(node))
        if node.op != "call_function" or val_dtype(node) != torch.float32:
            return None
        found.append(node)
        if work(node) == "cast":
            return tuple(found[::-1]) if val(node.args[0]).dtype == val(down).dtype else None  # type: ignore[arg-type]
        if not (op_class(node) in ("pointwise", "random") or _is_norm(node)):
            return None
        large = [a for a in node.all_input_nodes if val_numel(a) == val_numel(node)]
        if len(large) != 1:
            return None
        node = large[0]
    return None


def val_dtype(node: fx.Node) -> torch.dtype | None:
    value = val(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.dtype if isinstance(first, torch.Tensor) else None


def val_numel(node: fx.Node) -> int:
    value = val(node)
    first = value[0] if isinstance(value, (tuple, list)) else value
    return first.numel() if isinstance(first, torch.Tensor) else 0


def _kind(trip: Sequence[fx.Node]) -> str:
    between = trip[1:-1]
    if any(is_random(n) for n in between):
        return "dropout-in-float32"
    return "norm-in-float32" if any(map(_is_norm, between)) or _is_normalised(trip[0]) else "cast-round-trip"


def _is_normalised(up: fx.Node) -> bool:
    """Whether a mean, or a mean of squares, is taken of the value too: a norm in single ops."""
    read = [producer(one) for one in readers(up) if one.op == "call_function" and not origin(one).autograd]
    of_squares = [two for one in read if packet_name(one) in ("pow", "mul", "square") for two in readers(one)]
    return any(packet_name(producer(one)) in _MEANS for one in [*read, *of_squares] if one.op == "call_function")


def _capped(severity: Severity | None, casts: Sequence[fx.Node]) -> Severity | None:
    """What autocast does is no error of the user's."""
    return severity if severity is None or any(map(is_explicit_cast, casts)) else "low"


# --- casts that are done again ----------------------------------------------------------------------------------------


def casts_done_again(case: Case) -> Iterator[Finding]:
    """A value, no parameter, that several ops cast to one dtype, each for itself: autocast keeps casts of parameters only."""
    parameters = parameters_of(case.trace)
    casts = [n for n in case.own_ops if work(n) == "cast" and behind_views(n.args[0]) not in parameters]  # type: ignore[arg-type]
    alike = grouped(casts, lambda n: (behind_views(n.args[0]), val(n).dtype, val(n).shape)).values()  # type: ignore[arg-type]
    again = [group for group in alike if len(group) > 1]
    for at, groups in grouped(again, lambda group: line_of(group[0])).items():
        more = [n for group in groups for n in group[1:]]
        spared = _both_ways(case, more)
        # Gradients are summed before they are cast then.
        us = case.us(spared) + case.us([n for n in with_backward(case, more) if n not in spared]) / 2
        first = groups[0][0]
        yield from case.finding(
            "cast-again",
            case.severity(us),
            f"{counted(len(groups), 'value')} {'is' if len(groups) == 1 else 'are'} cast to {dtype(first)} "
            f"{len(groups[0])} times each",
            (
                ("casts", str(sum(map(len, groups)))),
                ("moved", human_bytes(sum(map(bytes_moved, more)))),
                ("also at", ", ".join(dict.fromkeys(line_of(n).partition("  ")[0] for n in more)) or at),
            ),
            more,
            at,
            f"cast it once, before its readers: `x = x.to(torch.{dtype(first)})`; or one matmul for all of them",
            us,
            {"simplify": True, "fuse": True},
            fixes=(_cast_once(case, groups),),
        )


def _cast_once(case: Case, groups: Sequence[Sequence[fx.Node]]) -> Fix:
    """The program whose forward casts each value once; each gradient is cast as before."""
    of = {n: group[0] for group in groups for n in group[1:]}
    names = tuple(one.name for pair in of.items() for one in pair)
    does = f"{counted(len(of), 'cast')} of the forward left out, none of gradients"
    return Fix("computed once", does, names, gained_us=lambda: case.us(list(of)))


# --- logits -----------------------------------------------------------------------------------------------------------


def logits_in_float32(case: Case) -> Iterator[Finding]:
    """Logits that a matmul made in half precision and that are cast to float32 as a whole for the loss."""
    casts = [n for n in case.own_ops if work(n) == "cast" and _is_of_logits(n)]
    for at, group in grouped(casts, line_of).items():
        casts = _both_ways(case, group)
        read = [r for n in group for r in _forward_readers(n)]
        losses = list(dict.fromkeys([*read, *(r for n in read for r in _forward_readers(n))]))
        # In half precision the loss, and its gradient, move half of their bytes.
        us = case.us(casts) + case.us([n for n in with_backward(case, losses) if n not in casts]) / 2
        yield from case.finding(
            "logits-in-float32",
            _capped(case.severity(us), group),
            f"logits of {list(val(group[0]).shape)} are cast to float32 for the loss: {human_bytes(sum(map(nbytes, group)))}",
            (
                ("moved by the casts", human_bytes(sum(map(bytes_moved, casts)))),
                ("asked for by", "the line" if is_explicit_cast(group[0]) else "autocast"),
            ),
            group,
            at,
            _OF_LOGITS[any(map(_is_under_autocast, group))],
            us,
            {"decompose": True, "fuse": True},
            fixes=(Fix("left out", "the cast left out", tuple(n.name for n in group)),),
        )


def _forward_readers(node: fx.Node) -> list[fx.Node]:
    """The ops that read the value, through views, and are not autograd's."""
    return [producer(r) for r in readers(node) if r.op == "call_function" and not origin(r).autograd]


_OF_LOGITS = {
    False: "`F.cross_entropy` of half precision sums in float32 inside: leave `.float()` out; or take the loss of a chunk of "
    "rows at a time, so that the logits are never whole in memory",
    True: "autocast casts to float32 whatever a loss is given: take the loss of a chunk of rows at a time, so that the logits "
    "are never whole in memory; or take it of half precision, which sums in float32 inside, without `.float()` and under "
    "`with torch.autocast(device_type, enabled=False):`",
}
"""The remedy, outside of autocast and under it."""


def _is_under_autocast(cast: fx.Node) -> bool:
    """Whether the matmul behind the logits reads what autocast cast for it, or the cast itself is autocast's."""
    product = behind_views(cast.args[0])  # type: ignore[arg-type]
    read = [behind_views(one) for one in product.all_input_nodes]
    return any(work(one) == "cast" and not is_explicit_cast(one) for one in [cast, *read])


def _is_of_logits(cast: fx.Node) -> bool:
    source = behind_views(cast.args[0])  # type: ignore[arg-type]
    if val(cast).dtype != torch.float32 or val(source).dtype not in HALVES or work(source) != "matmul":
        return False
    read = [producer(user) for user in readers(cast) if user.op == "call_function"]
    return any(
        packet_name(user) in _LOSSES for one in [cast, *read] for user in readers(one) if user.op == "call_function"
    )


# --- float64 ----------------------------------------------------------------------------------------------------------


def float64_leaks(case: Case) -> Iterator[Finding]:
    """Work in float64 in a program whose parameters are not."""
    kinds = ("parameter", "input")
    given = [node for entry, node in case.trace.input_pairs if entry.kind in kinds and val(node).is_floating_point()]
    if any(val(n).dtype == torch.float64 for n in parameters_of(case.trace)) or not given:
        return
    ops = [n for n in case.trace.ops if case.half[n] != "update" and packet_name(n) and val_dtype(n) == torch.float64]
    ops = [n for n in ops if case.us([n]) > 0]
    us = case.us(ops)
    taken = set(ops)
    own = [n for n in case.own_ops if n in taken]
    if not own:
        return
    entry = own[0]
    yield from case.finding(
        "float64-leak",
        case.severity(us),
        f"{counted(len(ops), 'op')} compute{'s' * (len(ops) == 1)} in float64, though no parameter is: it enters here",
        (
            ("first", packet_name(entry)),
            ("moved", human_bytes(sum(map(bytes_moved, ops)))),
            ("from", ", ".join(dict.fromkeys(dtype(a) for a in entry.all_input_nodes if val_dtype(a))) or "a constant"),
        ),
        ops,
        entry,
        "`dtype=torch.float32` where it enters, or `.float()`: arrays of numpy are float64",
        us,
        said="half or more of {}",
    )
