"""Findings about work that a program could avoid: casts of weights, concatenations, unfused ops, unaligned matmuls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from tracefuse.diagnose.retype import only_dtype
from tracefuse.findings.finding import Case, Finding, Fix, dtype, names
from tracefuse.lint.facts import parts_of
from tracefuse.optimizers.costs.alignment import ALIGNED_BYTES, dims_of, unaligned
from tracefuse.optimizers.costs.cost import bytes_moved, is_allocation, op_class
from tracefuse.optimizers.ops import behind_views, does_work
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, origin, val
from tracefuse.recording.operators import LOADER
from tracefuse.tables.folding import folded_paths, grouped, name_of, work


def casts_of_weights(case: Case) -> Iterator[Finding]:
    """Parameters that are cast in every forward, and their gradients back."""
    parameters = {
        node
        for node, entry in zip(case.trace.placeholders, case.trace.inputs, strict=True)
        if entry.kind == "parameter"
    }
    forward = [n for n in case.trace.ops if work(n) == "cast" and behind_views(n.args[0]) in parameters]
    gradients = {
        node for node, out in zip(case.trace.returned, case.trace.outputs, strict=True) if out.kind == "gradient"
    }
    backward = (
        [n for n in case.trace.ops if case.half[n] == "backward" and work(n) == "cast" and n in gradients]
        if forward
        else []
    )
    us = case.us([*forward, *backward])
    severity = case.severity(us)
    if severity is not None:
        cast = dict.fromkeys(behind_views(n.args[0]) for n in forward)  # type: ignore[arg-type]
        held = tuple(node.name for node in cast if only_dtype(node) != val(node).dtype)
        yield Finding(
            "weights-cast-each-step",
            severity,
            f"every forward casts {_parameters(len(cast))} from {dtype(forward[0].args[0])} to {dtype(forward[0])}",
            (
                ("moved", human_bytes(sum(map(bytes_moved, [*forward, *backward])))),
                ("casts", f"{len(forward)} in the forward, {len(backward)} of gradients"),
            ),
            names([*forward, *backward]),
            line_of(forward[0]),
            f"keep the model in {dtype(forward[0])} with a master copy in the optimizer, or cast once for several forwards",
            case.worth(us),
            fixes=(Fix("as cast", f"{_parameters(len(held))} held as {dtype(forward[0])}", held),) if held else (),
        )


def _parameters(count: int) -> str:
    return f"{count} parameter{'s' * (count > 1)}"


def concatenations(case: Case) -> Iterator[Finding]:
    """Concatenations, in the backward most of all: one buffer that the parts are written into makes them vanish. How a
    `DataLoader` makes a batch is none of the program's."""
    cats = [n for n in case.trace.ops if work(n) == "concatenation" and origin(n).module != LOADER[0]]
    empty = [n for n in cats if any(val(part).numel() == 0 for part in parts_of(n))]
    if empty:
        yield Finding(
            "cat-of-nothing",
            "low",
            f"{_count(empty)} {human_bytes(sum(map(nbytes, empty)))} to append an empty tensor",
            (("bytes", human_bytes(sum(map(nbytes, empty)))),),
            names(empty),
            line_of(empty[0]),
            "leave the empty part out; `cat` does",
            case.worth(case.us(empty)),
            {"cat": True},
        )
    for half in ("backward", "forward"):
        nodes = [n for n in cats if case.half[n] == half and n not in empty]
        us = case.us(nodes)
        if case.severity(us) is not None:
            copied = human_bytes(sum(map(nbytes, nodes)))
            yield Finding(
                f"cat-in-{half}",
                "low",  # most have to be, and a pass does without: a remark, and no error
                f"{_count(nodes)} {copied} in the {half}",
                (("moved", human_bytes(sum(map(bytes_moved, nodes)))), ("the largest", max(nodes, key=nbytes).name)),
                names(nodes),
                line_of(nodes[0]),
                "let the producers write into one buffer: `cat` with `fuse` does",
                case.worth(us),
                {"cat": True, "fuse": True},
            )


def _count(cats: Sequence[fx.Node]) -> str:
    return "1 concatenation copies" if len(cats) == 1 else f"{len(cats)} concatenations copy"


def unfused_pointwise(case: Case) -> Iterator[Finding]:
    """Pointwise ops and reductions that run one by one: each reads and writes what the next one reads again."""
    nodes = [
        n
        for n in case.trace.ops
        if does_work(n)
        and op_class(n) in ("pointwise", "reduction")
        and not is_allocation(n)
        and work(n) != "device copy"
    ]
    us = case.us(nodes)
    if case.severity(us) is not None and len(nodes) > 1:
        folds = folded_paths(case.trace)
        module, share = _largest_part(case, nodes, lambda n: name_of(n, folds))
        at, _ = _largest_part(case, nodes, line_of)
        yield Finding(
            "unfused-pointwise",
            "low",  # every eager program has some: a remark, and no error
            f"{len(nodes)} pointwise ops and reductions run as kernels of their own",
            (
                ("moved", human_bytes(sum(map(bytes_moved, nodes)))),
                ("in the backward", str(sum(case.half[n] == "backward" for n in nodes))),
                ("most of it in", f"{module} ({share:.0%})".replace("%", " %")),
            ),
            names(sorted(nodes, key=lambda n: -case.us([n]))),
            at,
            "compute each run of them in one kernel: `fuse` does",
            f"at most {case.worth(us)}",
            {"fuse": True},
        )


def unaligned_matmuls(case: Case) -> Iterator[Finding]:
    """Matmuls over a dimension whose rows are no multiple of 16 bytes: tensor cores are fed by slow kernels."""
    tf32 = case.program.environment.get("tf32") == "True"
    nodes = [n for n in case.trace.ops if _on_tensor_cores(n, tf32) and _odd_width(n)]
    for (width, wide), group in grouped(nodes, _odd_width).items():
        us = case.us(group)
        severity = case.severity(us)
        if severity is not None:
            multiple = ALIGNED_BYTES // val(group[0]).element_size()
            yield Finding(
                "unaligned-matmul",
                severity,
                f"{len(group)} matmuls over a dimension of {width:,}, which is no multiple of {multiple}",
                (("dimension", f"{width:,}"), ("padded", f"{wide:,}"), ("dtype", dtype(group[0]))),
                names(group),
                line_of(group[0]),
                f"pad it to {wide:,}: `pad` does, with copies in each step; without any, pad it in the model (a vocabulary: "
                f"set vocab_size={wide}; the added classes are never targets)",
                f"part of {case.worth(us)}",
                {"pad": True},
            )


def _on_tensor_cores(node: fx.Node, tf32: bool) -> bool:
    """Whether it is a matmul that tensor cores can do: of half precision, or of float32 where that may be rounded to TF32."""
    value = node.meta["val"]
    if work(node) != "matmul" or not isinstance(value, torch.Tensor):  # a head with its loss in chunks pads by itself
        return False
    return value.element_size() == 2 or (tf32 and value.dtype is torch.float32)


def _odd_width(node: fx.Node) -> tuple[int, int] | None:
    """The largest dimension along unaligned rows of a matmul, and what it would be padded to."""
    wide = unaligned(node)
    if wide is None:
        return None
    return max((a, b) for a, b in zip(dims_of(node), wide, strict=True) if a != b)


def _largest_part(case: Case, nodes: Sequence[fx.Node], of: Callable[[fx.Node], str]) -> tuple[str, float]:
    """The part of the ops that takes longest, and its share of their time."""
    us = {part: case.us(group) for part, group in grouped(nodes, of).items()}
    part = max(us, key=us.__getitem__)
    return part, us[part] / sum(us.values())
