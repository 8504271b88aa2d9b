"""Replay: run a trace op by op with ATen. The oracle of every test, and slow on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tracefuse.assembly.draws import draw_from
from tracefuse.assembly.functional import WRITTEN
from tracefuse.assembly.program import CapturedProgram
from tracefuse.device import embedding_gradient, linear_cross_entropy, searched  # noqa: F401 (say what operators do)
from tracefuse.device.environment import as_it_ran
from tracefuse.errors import ReplayError
from tracefuse.optimizers.trace import Trace, origin, val

aten = torch.ops.aten


def replay(
    trace: Trace,
    inputs: Sequence[torch.Tensor],
    rng_states: Sequence[torch.Tensor] = (),
    known: Mapping[str, Any] | None = None,
) -> tuple[torch.Tensor, ...]:
    """The outputs of `trace` on `inputs`, in the order of `trace.outputs`.

    A random op draws from the state that `rng_states` holds for it (as captured), else from the default generator.
    Values are freed after their last reader. Where some are `known` by name, only what is still wanted is made, and inputs
    that nothing of it reads may be anything. Raises `ReplayError` naming the op and the user's line where an op raises.
    """
    if len(inputs) != len(trace.inputs):
        raise ReplayError(
            f"the trace takes {len(trace.inputs)} inputs, got {len(inputs)}: {[i.name for i in trace.inputs]}"
        )
    values: dict[fx.Node, Any] = dict(zip(trace.placeholders, inputs, strict=True))
    left = {n: len(n.users) for n in trace.graph.nodes}
    ops = trace.ops
    if known:
        values |= {node: known[node.name] for node in ops if node.name in known}
        ops = _still_wanted(trace, values)
    with torch.no_grad():
        for node in ops:
            values[node] = _run(node, values, rng_states)
            for read in node.all_input_nodes:
                left[read] -= 1
                if left[read] == 0:
                    del values[read]
    return tuple(values[node] for node in trace.returned)


def _still_wanted(trace: Trace, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The ops that the outputs want and that are not among `values`."""
    wanted = set(trace.returned)
    ops = []
    for node in reversed(trace.ops):
        if node in wanted and node not in values:
            ops.append(node)
            wanted.update(node.all_input_nodes)
    return ops[::-1]


def replayed(program: CapturedProgram) -> tuple[torch.Tensor, ...]:
    """The outputs of a captured program on its own inputs, with the flags that it ran under."""
    with as_it_ran(program.environment):
        return replay(program.trace, program.example_inputs, program.rng_states)


def _run(node: fx.Node, values: dict[fx.Node, Any], rng_states: Sequence[torch.Tensor]) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    state = origin(node).rng
    written = (node.meta.get("custom") or {}).get(WRITTEN)
    try:
        if written is not None and node.target is written.twin and _is_as_recorded(node, args[0]):
            return written.again(args[0], args[1:], kwargs)
        if node.target is aten.mkldnn_rnn_layer.default:
            with torch.enable_grad():  # without, it keeps what its backward reads to itself
                return node.target(*map(_detached, args), **kwargs)
        if state is None or not rng_states:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        return draw_from(rng_states[state], node.target, args, kwargs)
    except Exception as error:
        source = origin(node).source
        where = f" ({source})" if source else ""
        raise ReplayError(f"{node.format_node()}{where} raised: {error}") from error


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_as_recorded(node: fx.Node, first: torch.Tensor) -> bool:
    """Whether an op yields what its first argument, which it wrote to when it ran, is: no pass has changed that."""
    return (first.shape, first.dtype) == (val(node).shape, val(node).dtype)
