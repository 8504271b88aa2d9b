"""Random draws that a program repeats by restoring the generator's state: the numbers are one value, drawn once.

`torch.utils.checkpoint` restores the state before it recomputes a block, so that dropout draws the same mask; the restoring
itself is no operator and leaves no trace. What it leaves is two draws from equal states. Here the second becomes a reader of
the first, so that replay, passes and exported code need to know nothing of generators.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.functional import Built
from tracefuse.optimizers.ops import arguments, frozen, is_getitem, is_mutable, is_random
from tracefuse.optimizers.rewrite import refresh_views
from tracefuse.optimizers.trace import origin, tensors, val
from tracefuse.recording.operators import default_generator, device_of

aten = torch.ops.aten

_UNINITIALISED = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}
_ORDERS = {aten.randperm.default, aten.randperm.generator}

_STATES = {"dropout_seed", "dropout_state", "philox_seed", "rng_state"}
"""What backwards of attention and cuDNN's recurrent nets are given in place of drawing."""


def draws(node: fx.Node) -> bool:
    """Whether running the op moves a generator: attention without dropout, dropout in evaluation mode, empty results and the
    order of a single element do not, although their operators are marked as random."""
    if is_getitem(node) or node.op != "call_function" or not is_random(node) or origin(node).rng is None:
        return False
    given = arguments(node)
    if given.keys() & _STATES:
        return False
    drops = given.get("dropout_p", given.get("dropout", 1.0)) != 0 and given.get("train", True) is not False
    return drops and any(t.numel() > _is_ordered_on_cpu(node, t) for t in tensors(node))


def _is_ordered_on_cpu(node: fx.Node, drawn: torch.Tensor) -> bool:
    """Whether the CPU draws but one number less than it yields, as it does of a random order."""
    return node.target in _ORDERS and drawn.device.type == "cpu"


def is_in_engine(node: fx.Node) -> bool:
    """Whether autograd's engine ran the op."""
    recorded = (node.meta.get("custom") or {}).get("recorded")
    return recorded is not None and recorded.in_engine


def repeated(ops: Iterable[fx.Node], states: Sequence[torch.Tensor]) -> list[tuple[fx.Node, fx.Node]]:
    """(earlier, later) pairs of draws from equal generator states of one device."""
    first: dict[Hashable, fx.Node] = {}
    pairs = [(first.setdefault(_state(n, states), n), n) for n in ops if draws(n)]
    return [(earlier, later) for earlier, later in pairs if earlier is not later]


def merge_repeated(built: Built, states: Sequence[torch.Tensor]) -> None:
    """Let the readers of a repeated draw read the first one: same operator, same state, operands computed alike, or, of a
    dropout, laid out alike."""
    if not repeated(built.graph.nodes, states):
        return
    first: dict[Hashable, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in list(built.graph.nodes):
        if node in same:
            continue
        key = _computation(node, same, states)
        same[node] = node if key is None else first.setdefault(key, node)
        if same[node] is not node and draws(node) and not _is_late(same[node], node):
            same |= _replace(built, node, same[node])
        elif same[node] is node and (mask := _mask(node, states)) is not None:
            drawn = first.setdefault(mask, node)
            if drawn is not node and not _is_late(drawn, node) and any(item.args[1] == 1 for item in drawn.users):
                _replace(built, node, drawn)
    refresh_views(built.graph)  # items and views of the later draw lie in the memory of the first one now


@contextmanager
def undisturbed(inputs: Iterable[torch.Tensor]) -> Iterator[None]:
    """Leave the generators of the CPU, of the inputs' GPUs and of the current one as they are found: replays set them back to
    what was captured, which the user's own draws must not notice."""
    with torch.random.fork_rng(_gpus(inputs)):
        yield


def undisturbed_gpu(inputs: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    """`undisturbed` where there is a GPU to draw on. What is timed on a CPU, which others may interrupt and draw, leaves the
    generator there as it is found stretch by stretch: see `tracefuse.measure.alone`."""
    inputs = list(inputs)
    return undisturbed(inputs) if _gpus(inputs) else nullcontext()


def _gpus(inputs: Iterable[torch.Tensor]) -> list[int]:
    found = {t.device.index for t in inputs if t.is_cuda}
    if torch.cuda.is_initialized():  # a program may draw there although its inputs lie on the CPU
        found.add(torch.cuda.current_device())
    return sorted(found)


def draw_from(state: torch.Tensor, op: Any, args: Any, kwargs: Any) -> Any:
    """What the random `op` draws from `state`; the generator is left as it was."""
    generator = default_generator(device_of(args, kwargs))
    before = generator.get_state()
    generator.set_state(state)
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(before)


def _is_late(first: fx.Node, node: fx.Node) -> bool:
    """Whether a forward op would read what autograd's engine drew."""
    return is_in_engine(first) and not is_in_engine(node)


def _replace(built: Built, node: fx.Node, by: fx.Node) -> dict[fx.Node, fx.Node]:
    """Let the readers of `node` read `by`. Returns the earlier value of each that is computed otherwise now."""
    alike = _drop_by_mask(built, node, by) if node.target is aten.native_dropout.default else {}
    node.replace_all_uses_with(by)
    built.rename(node, by)
    built.graph.erase_node(node)
    return alike


def _drop_by_mask(built: Built, node: fx.Node, by: fx.Node) -> dict[fx.Node, fx.Node]:
    """Let the results of a repeated `native_dropout` be products with the mask that the first one drew: a checkpoint computes
    them again, and they need not be kept. Returns the first one's result for each."""
    alike: dict[fx.Node, fx.Node] = {}
    # The first of each: those of an earlier repetition (a checkpoint in a checkpoint) stand where that was, in the backward.
    items = {item.args[1]: item for item in reversed(by.users) if is_getitem(item)}
    x, p = node.args[:2]
    for item in list(node.users):
        if item.args[1] == 1 and 1 in items:
            item.replace_all_uses_with(items[1])
            built.rename(item, items[1])
        elif item.args[1] == 0 and 1 in items:
            item.target = aten.native_dropout_backward.default
            item.args = (x, items[1], 0.0 if p == 1 else 1 / (1 - p))  # type: ignore[operator]
            alike[item] = items.get(0, item)
    return alike


def _mask(node: fx.Node, states: Sequence[torch.Tensor]) -> Hashable | None:
    """A key equal for dropouts that draw the same mask, whatever the numbers that they drop: reversible layers compute these
    again from their results, rounded otherwise."""
    if node.target is not aten.native_dropout.default or not draws(node):
        return None
    x, *how = node.args
    given = val(x)  # type: ignore[arg-type]
    layout = (tuple(given.shape), given.stride(), given.storage_offset(), given.dtype)
    return "mask", _state(node, states), layout, frozen(how)


def _computation(node: fx.Node, same: dict[fx.Node, fx.Node], states: Sequence[torch.Tensor]) -> Hashable | None:
    """A key equal for ops that yield the same numbers; None for those that nothing else does."""
    if node.op != "call_function" or is_mutable(node) or (is_random(node) and origin(node).rng is None):
        return None
    if node.target in _UNINITIALISED:
        made = val(node)
        return "uninitialised", tuple(made.shape), tuple(made.stride()), made.dtype, str(made.device)
    state = _state(node, states) if draws(node) else None
    return state, node.target, frozen(node.args, same.__getitem__), frozen(node.kwargs, same.__getitem__)


def _state(node: fx.Node, states: Sequence[torch.Tensor]) -> Hashable:
    """The generator state that the op drew from, and whose it is."""
    index = origin(node).rng
    assert index is not None
    return str(tensors(node)[0].device), states[index].numpy().tobytes()
