"""Findings about how layers are put together: batch norm, biases, losses, and what DistributedDataParallel is asked for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import fx

from tracefuse.assembly.unshown import UNUSED_PARAMETERS
from tracefuse.findings.finding import Case, Finding, Severity
from tracefuse.lint.facts import convolutions_of, line_saying, with_backward
from tracefuse.lint.spared import with_kernels
from tracefuse.optimizers.costs.cost import bytes_moved, packet_name
from tracefuse.optimizers.ops import arguments, behind_views, grouped, is_getitem, is_view, producer, readers
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin, val
from tracefuse.tables.folding import work
from tracefuse.text import counted

FEWEST_VALUES = 32
"""Values of a channel from which on their mean and variance say something of the data."""
FEWEST_SAMPLES = 4
_BATCH_NORMS = {
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_with_update",
    "_batch_norm_with_update_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
}  # fmt: skip


def batch_norms_of_few(case: Case) -> Iterator[Finding]:
    """Batch norms that take their statistics from a handful of values: one finding for all, at the one of the fewest."""
    norms = [n for n in case.own_ops if packet_name(n) in _BATCH_NORMS and _is_training(n) and not _is_of_instances(n)]
    few = [n for n in norms if _per_channel(n) <= FEWEST_VALUES or _samples(n) < FEWEST_SAMPLES]
    if not few:
        return
    least, lines = min(few, key=_per_channel), len(set(map(line_of, few)))
    severity: Severity = "medium" if _per_channel(least) <= FEWEST_VALUES else "low"
    yield from case.finding(
        "batch-norm-few-samples",
        severity,
        f"batch norm takes its statistics of {counted(_samples(least), 'sample')}: {_per_channel(least)} values a channel",
        (
            ("batch norms", f"{len(few)} of {len(norms)}" + (f", in {lines} lines" if lines > 1 else "")),
            ("input", str(list(val(least.args[0]).shape))),  # type: ignore[arg-type]
        ),
        few,
        least,
        "`nn.GroupNorm`, or `nn.LayerNorm`, which know no batch; over several GPUs "
        "`nn.SyncBatchNorm.convert_sync_batchnorm(model)`",
        "not a time: noise in training, and another result in `eval()`",
    )


def _is_training(node: fx.Node) -> bool:
    given = arguments(producer(node))
    return bool(given.get("training", given.get("train", True)))


def _is_of_instances(node: fx.Node) -> bool:
    """Whether it is what an instance norm calls, with all samples as channels of one, and their statistics left apart."""
    given = arguments(producer(node))
    folded, running = given["input"], given.get("running_mean")
    is_asked = origin(node).is_torchs and "InstanceNorm" in origin(node).module_type
    return is_asked or (running is None and is_view(folded) and val(folded).shape[0] == 1)


def _samples(node: fx.Node) -> int:
    return int(val(node.args[0]).shape[0])  # type: ignore[arg-type]


def _per_channel(node: fx.Node) -> int:
    source = val(node.args[0])  # type: ignore[arg-type]
    return int(source.numel() // source.shape[1])


def biases_before_batch_norm(case: Case) -> Iterator[Finding]:
    """A bias that batch norm, or instance norm, subtracts again."""
    ops = [n for n in case.own_ops if work(n) == "convolution" and n.args[2] is not None and _goes_into_batch_norm(n)]
    for at, group in grouped(ops, line_of).items():
        # On a GPU the bias is an op of its own, as is its gradient's sum.
        late = [n for n in with_backward(case, group) if n not in group and work(n) == "convolution"]
        moved = sum(3 * nbytes(n) for n in group) if late else sum(2 * nbytes(n) for n in group)
        norm = "instance norm" if all(_is_of_instances(r) for n in group for r in _read_by(n)) else "batch norm"
        spared = (
            "which has a bias of its own" if norm == "batch norm" else "which adds one of its own where `affine=True`"
        )
        us = moved / max(sum(map(bytes_moved, group)), 1) * case.us(group)
        yield from case.finding(
            "bias-before-batch-norm",
            case.severity(us) and "low",
            f"the bias of {convolutions_of(group)} is subtracted by the {norm} behind",
            (("moved", human_bytes(moved)),),
            group,
            at,
            f"`nn.Conv2d(…, bias=False)` before {'an' if norm[0] == 'i' else 'a'} {norm}, {spared}",
            us,
            said="at most {}",
        )


def _read_by(node: fx.Node) -> list[fx.Node]:
    return [r for r in readers(node) if r.op != "output" and "backward" not in packet_name(r)]


def _goes_into_batch_norm(node: fx.Node) -> bool:
    read = _read_by(node)
    return bool(read) and all(packet_name(r) in _BATCH_NORMS and _is_training(r) for r in read)


# --- losses -----------------------------------------------------------------------------------------------------------


def losses_by_hand(case: Case) -> Iterator[Finding]:
    """A logarithm of a softmax or a sigmoid, which one op computes in fewer passes and without overflow."""
    pairs = [(n, said) for n in case.own_ops if (said := _loss(n))]
    for (at, (name, why, remedy)), group in grouped(pairs, lambda pair: (line_of(pair[0]), pair[1])).items():
        ops = [n for n, _ in group]
        inner = [producer(behind_views(n.args[0])) for n in ops]  # type: ignore[arg-type]
        us = case.us(with_backward(case, [*ops, *inner])) / 2
        yield from case.finding(
            "log-of-softmax",
            case.severity(us),
            f"the logarithm of a {name} is computed in two ops, {why}",
            (("moved", human_bytes(sum(map(bytes_moved, [*ops, *inner])))),),
            [*inner, *ops],
            at,
            remedy,
            us,
            {"fuse": True},
            fixes=with_kernels(case, {"fuse": True}),
        )


def _loss(node: fx.Node) -> tuple[str, str, str] | None:
    """Of which function `node` computes the logarithm, what that loses, as the end of a sentence, and the remedy."""
    if packet_name(node) not in ("log", "binary_cross_entropy"):
        return None
    source = behind_views(node.args[0])  # type: ignore[arg-type]
    bounds = []
    while packet_name(source) in ("add", "clamp", "clamp_min") and not is_getitem(source):
        bounds.append(packet_name(source))
        source = behind_views(source.args[0])  # type: ignore[arg-type]
    name = {"_softmax": "softmax", "sigmoid": "sigmoid"}.get(packet_name(source))
    if name is None:
        return None
    remedy = _REMEDY_OF_LOSSES[name]
    if name == "softmax" and val(source).dim() > 2 and source.args[1] in (-1, val(source).dim() - 1):
        remedy = remedy.replace("(logits, targets)", "(logits.flatten(0, -2), targets.flatten())")
    if bounds:
        change = "an added number changes" if "add" in bounds else "a clamp cuts off, its gradient with it"
        return name, f"and {change} what one op computes exactly", remedy
    if packet_name(node) == "log":
        return name, f"and is minus infinity where the {name} rounds to 0", remedy
    return name, f"and gives no gradient where the {name} rounds to 0 or 1", remedy


_REMEDY_OF_LOSSES = {
    "softmax": "`F.cross_entropy(logits, targets)`, or `F.log_softmax`",
    "sigmoid": "`F.binary_cross_entropy_with_logits(logits, targets)`, or `F.logsigmoid`",
}


# --- distributed ------------------------------------------------------------------------------------------------------

UNUSED = "find_unused_parameters"


def searches_for_unused(case: Case) -> Iterator[Finding]:
    """DistributedDataParallel that walks through the graph in every step to find parameters without a gradient."""
    known: Mapping[str, str] = case.program.environment
    if known.get(UNUSED) != "on":
        return
    of = {out.of for out in case.trace.outputs if out.kind == "gradient"}
    parameters = [entry for entry in case.trace.inputs if entry.kind == "parameter" and entry.trainable]
    without = [entry.source for entry in parameters if entry.name not in of]
    unused = known.get(UNUSED_PARAMETERS, "")
    without = [*dict.fromkeys([*without, *(one.partition(": ")[0] for one in unused.split("; ") if one)])]
    yield from case.finding(
        "find-unused-parameters",
        "low" if without else "medium",
        "DistributedDataParallel looks for unused parameters in every step"
        + (
            f", and {counted(len(without), 'parameter')} had none"
            if without
            else ", and every parameter has a gradient"
        ),
        (("parameters", str(len(parameters))), ("without a gradient", ", ".join(without[:3]) or "none")),
        (),
        line_saying(case, re.compile(rf"{UNUSED}\s*=")),
        f"{'freeze or leave out those, then ' if without else ''}`DistributedDataParallel(model)` without "
        "`find_unused_parameters=True`; where branches differ from step to step, `static_graph=True` if they do not after all",
        "not modelled: a walk over the autograd graph before each backward, and no overlap of what it waits for",
    )
