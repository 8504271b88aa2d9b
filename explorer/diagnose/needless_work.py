"""Findings about work that a program could avoid: casts of weights, concatenations, unfused ops, unaligned matmuls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import fx

from tracefuse.diagnose.retype import only_dtype
from tracefuse.findings.finding import Case, Finding, Fix, dtype
from tracefuse.lint.facts import parameters_of, parts_of
from tracefuse.lint.spared import for_kernels, one_by_one, spared_by_kernels, with_kernels
from tracefuse.measure.op_times import roofline_of
from tracefuse.optimizers.costs.alignment import ALIGNED_BYTES, dims_of, unaligned
from tracefuse.optimizers.costs.cost import bytes_moved, packet_name
from tracefuse.optimizers.ops import behind_views, grouped, is_view
from tracefuse.optimizers.pad import readers_of, take_losing, worth
from tracefuse.optimizers.trace import human_bytes, is_on_gpu, line_of, nbytes, origin, tensor_type, val
from tracefuse.recording.operators import LOADER
from tracefuse.tables.folding import JOINS, folded_paths, name_of, work
from tracefuse.text import counted

CROSS_ENTROPIES = ("_log_softmax", "cross_entropy_loss", "linear_cross_entropy")
"""What a loss over classes begins with."""


def casts_of_weights(case: Case) -> Iterator[Finding]:
    """Parameters that are cast in every forward, and their gradients back."""
    parameters = parameters_of(case.trace)
    casts = [n for n in case.trace.ops if work(n) == "cast"]
    forward = [n for n in casts if behind_views(n.args[0]) in parameters]  # type: ignore[arg-type]
    if not forward:
        return
    gradients = {node for out, node in case.trace.output_pairs if out.kind == "gradient"}
    backward = [n for n in casts if case.half[n] == "backward" and n in gradients]
    us = case.us([*forward, *backward])
    cast = dict.fromkeys(behind_views(n.args[0]) for n in forward)  # type: ignore[arg-type]
    held = tuple(node.name for node in cast if only_dtype(node) != val(node).dtype)
    yield from case.finding(
        "weights-cast-each-step",
        case.severity(us),
        f"every forward casts {_parameters(len(cast))} from {dtype(forward[0].args[0])} to {dtype(forward[0])}",
        (
            ("moved", human_bytes(sum(map(bytes_moved, [*forward, *backward])))),
            ("casts", f"{len(forward)} in the forward, {len(backward)} of gradients"),
        ),
        [*forward, *backward],
        _moving_most(forward),
        f"keep the model in {dtype(forward[0])} with a master copy in the optimizer, or cast once for several forwards",
        us,
        fixes=(Fix("as cast", f"{_parameters(len(held))} held as {dtype(forward[0])}", held),) if held else (),
    )


def _parameters(count: int) -> str:
    return f"{count} parameter{'s' * (count > 1)}"


def concatenations(case: Case) -> Iterator[Finding]:
    """Concatenations, in the backward most of all: one buffer that the parts are written into makes them vanish. How a
    `DataLoader` makes a batch is none of the program's."""
    cats = [n for n in case.trace.ops if packet_name(n) in JOINS and origin(n).module != LOADER[0]]
    empty = [n for n in cats if any(val(part).numel() == 0 for part in parts_of(n))]
    if empty:
        yield from case.finding(
            "cat-of-nothing",
            "low",
            f"{_count(empty)} {human_bytes(sum(map(nbytes, empty)))} to append an empty tensor",
            (("bytes", human_bytes(sum(map(nbytes, empty)))),),
            empty,
            empty[0],
            "leave the empty part out; `simplify` does",
            case.us(empty),
            {"simplify": True, "cat": True},
            fixes=_without(empty),
        )
    for half in ("backward", "forward"):
        nodes = [n for n in cats if case.half[n] == half and n not in empty]
        us = case.us(nodes)
        if not nodes:
            continue
        yield from case.finding(
            f"cat-in-{half}",
            case.severity(us) and "low",  # most have to be, and a pass does without: a remark, and no error
            f"{_count(nodes)} {human_bytes(sum(map(nbytes, nodes)))} in the {half}",
            (("moved", human_bytes(sum(map(bytes_moved, nodes)))), ("the largest", max(nodes, key=nbytes).name)),
            nodes,
            _moving_most(nodes),
            "let the producers write into one buffer: `cat` with `fuse` does",
            us,
            {"cat": True, "fuse": True},
            fixes=with_kernels(case, {"cat": True, "fuse": True}),
        )


def _without(cats: Sequence[fx.Node]) -> tuple[Fix, ...]:
    """The program that reads the one part that is not empty, where each of these concatenations has one."""
    if any(sum(val(part).numel() > 0 for part in parts_of(n)) != 1 for n in cats):
        return ()
    return (Fix("left out", f"{_count(cats).partition(' copi')[0]} left out", tuple(n.name for n in cats)),)


def _count(cats: Sequence[fx.Node]) -> str:
    return "1 concatenation copies" if len(cats) == 1 else f"{len(cats)} concatenations copy"


def unfused_pointwise(case: Case) -> Iterator[Finding]:
    """Pointwise ops and reductions that run one by one: each reads and writes what the next one reads again."""
    nodes, us = one_by_one(case), spared_by_kernels(case)
    if len(nodes) > 1 and case.us(nodes) > 0:
        folds = folded_paths(case.trace)
        module, share = _largest_part(case, nodes, lambda n: name_of(n, folds))
        at, _ = _largest_part(case, nodes, line_of)
        changes = for_kernels(case, {"fuse": True})
        yield from case.finding(
            "unfused-pointwise",
            case.severity(us) and "low",  # every eager program has some: a remark, and no error
            f"{len(nodes)} pointwise ops and reductions run as kernels of their own",
            (
                ("moved", human_bytes(sum(map(bytes_moved, nodes)))),
                ("in the backward", str(sum(case.half[n] == "backward" for n in nodes))),
                ("most of it in", f"{module} ({share:.0%})".replace("%", " %")),
            ),
            sorted(nodes, key=lambda n: -case.us([n])),
            at,
            f"compute each run of them in one kernel: {' with '.join(f'`{name}`' for name in changes)} does",
            us,
            changes,
        )


def unaligned_matmuls(case: Case) -> Iterator[Finding]:
    """Matmuls over a dimension whose rows are no multiple of 16 bytes: tensor cores are fed by slow kernels. In float32
    without TF32, which needs none, a remark: the same shapes are slow as soon as it is switched on."""
    tf32 = case.program.environment.get("tf32") == "True"
    nodes = [n for n in case.trace.ops if n not in case.not_on_a_gpu and _is_matmul(n) and odd_width(n)]
    on_cores = [n for n in nodes if _on_tensor_cores(n, tf32)]
    yield from _beside_tensor_cores(case, [n for n in nodes if n not in on_cores])
    for (width, wide), group in grouped(on_cores, odd_width).items():
        (us, is_padded), multiple = _spared_by_padding(case, group), ALIGNED_BYTES // val(group[0]).element_size()
        severity, whole_us = case.severity(us), case.us(group)
        told = _told(group, width, wide)
        yield from case.finding(
            "unaligned-matmul",
            severity or (case.severity(whole_us) and "low"),  # the model may know no reason why these are slow
            f"{counted(len(group), 'matmul')} over a dimension of {width:,}, which is no multiple of {multiple}",
            (("dimension", f"{width:,}"), ("padded", f"{wide:,}"), ("dtype", dtype(group[0]))),
            group,
            group[0],
            f"pad it to {wide:,}: `pad` does, with copies in each step; without any, pad it in the model ({told})"
            if is_padded
            else f"pad it in the model, since the copies that `pad` would make take longer than they spare ({told})",
            us if severity else f"part of {case.worth(whole_us)}",
            {"pad": True} if is_padded else None,
            kind=case.times.kind,
            worth_us=us,
            worth_share=(us if severity else whole_us) / case.step_us,
        )


def _beside_tensor_cores(case: Case, matmuls: Sequence[fx.Node]) -> Iterator[Finding]:
    for (width, wide), group in grouped(matmuls, odd_width).items():
        us = case.us(group)
        yield from case.finding(
            "unaligned-matmul",
            case.severity(us) and "low",
            f"{counted(len(group), 'matmul')} over an unaligned dimension of {width:,}",
            (("dimension", f"{width:,}"), ("padded", f"{wide:,}"), ("dtype", f"{dtype(group[0])}, without TF32")),
            group,
            group[0],
            f"pad it in the model before TF32 or half precision is switched on ({_told(group, width, wide)})",
            "nothing without TF32",
        )


def _told(matmuls: Sequence[fx.Node], width: int, wide: int) -> str:
    """What the dimension is: the classes of a loss, which may be more than there are targets of, or rows of a value."""
    if any(is_of_classes(node, width) for node in matmuls):
        return f"a vocabulary: set vocab_size={wide}; the added classes are never targets"
    tensors = (
        one for node in matmuls for one in (node, *node.all_input_nodes) if isinstance(one.meta["val"], torch.Tensor)
    )
    rows = next((one for one in tensors if val(one).ndim and val(one).shape[-1] == width), matmuls[0])
    return f"it is that of `{rows.name}`, {tensor_type(val(rows))}: {wide:,} wide"


def is_of_classes(matmul: fx.Node, width: int) -> bool:
    """Whether a cross entropy is taken over `width` results of the matmul, which views and casts may stand before."""
    values = [matmul]
    for value in values:
        for user in value.users:
            if packet_name(user) in CROSS_ENTROPIES:
                return width in val(value).shape
            if is_view(user) or work(user) == "cast":
                values.append(user)
    return False


def _spared_by_padding(case: Case, matmuls: Sequence[fx.Node]) -> tuple[float, bool]:
    """The microseconds that matmuls take beyond padded ones, with copies for those that `pad` finds worth that; whether there
    is any of these."""
    peaks, gaining = roofline_of(case.trace), {n: wide for n in matmuls if (wide := unaligned(n))}
    take_losing(gaining, lambda one: one.after_s < one.before_s, peaks)
    readers = readers_of(gaining)
    found = {n: worth(n, wide, readers, peaks) for n in matmuls if (wide := unaligned(n))}
    after_s = {n: one.after_s if n in gaining else one.padded_s for n, one in found.items()}
    us = {n: case.us([n]) - 1e6 * after_s[n] for n in found}
    if not (case.times.is_measured and is_on_gpu(case.trace)):  # times of another clock than the model's
        us = {n: case.us([n]) * (1 - after_s[n] / one.before_s) for n, one in found.items()}
    return sum(max(0.0, one) for one in us.values()), bool(gaining)


def _is_matmul(node: fx.Node) -> bool:
    value = node.meta["val"]
    if work(node) != "matmul" or not isinstance(value, torch.Tensor):  # a head with its loss in chunks pads by itself
        return False
    return value.element_size() == 2 or value.dtype is torch.float32


def _on_tensor_cores(node: fx.Node, tf32: bool) -> bool:
    """Whether tensor cores can do this matmul: of half precision, or of float32 where that may be rounded to TF32."""
    return bool(val(node).element_size() == 2 or tf32)


def odd_width(node: fx.Node) -> tuple[int, int] | None:
    """The largest dimension along unaligned rows of a matmul, and what it would be padded to."""
    wide = unaligned(node)
    if wide is None:
        return None
    return max((a, b) for a, b in zip(dims_of(node), wide, strict=True) if a != b)


def _moving_most(nodes: Sequence[fx.Node]) -> str:
    """The line whose ops read and write most, whatever they were measured to take."""
    of_lines = grouped(nodes, line_of)
    return max(of_lines, key=lambda line: sum(map(bytes_moved, of_lines[line])))


def _largest_part(case: Case, nodes: Sequence[fx.Node], of: Callable[[fx.Node], str]) -> tuple[str, float]:
    """The part of the ops that takes longest, and its share of their time."""
    us = {part: case.us(group) for part, group in grouped(nodes, of).items()}
    part = max(us, key=us.__getitem__)
    return part, us[part] / sum(us.values())
