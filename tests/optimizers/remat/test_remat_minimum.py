"""The chosen cut against every other one, by enumeration, on small random traces."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Iterable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.choice import Choice, choose
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.trace import Input, Output, Trace, call
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten

BYTES = Remat(producer_input_weight=1, distance_base=1, unmaterialised_factor=1, reduction_ratio=math.inf)


def random_trace(seed: int) -> Trace:
    """A small joint trace: pointwise, heavy, random and multi-output ops, views, concatenations of growing size."""
    choice = random.Random(seed)
    graph, mode = fx.Graph(), FakeTensorMode()
    values = [graph.placeholder(f"x{i}") for i in range(2)]
    for value in values:
        value.meta = {"val": mode.from_tensor(torch.zeros(choice.choice([4, 8, 64])))}
    inputs = list(values)
    for i in range(choice.randint(3, 8)):
        values += _random_op(choice, values, f"v{i}")
    grads = []
    for i in range(choice.randint(1, 3)):
        read = choice.choice(values[2:])
        targets = {"heavy": (aten.cumprod.default, read, 0), "fused": (aten.exp.default, read)}
        grads.append(call(read, *targets[choice.choice(["heavy", "fused", "fused"])], name=f"g{i}"))
        grads[-1].meta["phase"] = "backward"
    graph.output((values[-1], *grads))
    outputs = (Output("result", "y"), *(Output("gradient", "x0") for _ in grads))
    trace = Trace(graph, tuple(Input(n.name, "input", n.name, True) for n in inputs), outputs)
    verify(trace)
    return trace


def _random_op(choice: random.Random, values: list[fx.Node], name: str) -> list[fx.Node]:
    a, b = choice.choice(values), choice.choice(values)
    kind = choice.choice(["tanh", "cat", "view", "heavy", "random", "several", "tanh", "cat", "alone", "alone"])
    if kind == "several":
        both = call(a, aten.aminmax.default, a, name=name)
        return [call(both, operator.getitem, both, i, name=f"{name}_{i}") for i in range(2)]
    if kind == "cat" and a.meta["val"].dim() and b.meta["val"].dim():
        return [call(a, aten.cat.default, [a, b], name=name)]
    if kind == "view":
        return (
            [call(a, aten.unsqueeze.default, a, 0, name=name)]
            if a.meta["val"].dim() == 0
            else [call(a, aten.view.default, a, [-1], name=name)]
        )
    targets = {
        "heavy": (aten.cumprod.default, a, 0),
        "random": (aten.bernoulli.p, a, 0.5),
        "alone": (aten.repeat.default, a, [choice.choice([1, 16])]),
    }
    return [call(a, *targets.get(kind, (aten.tanh.default, a)), name=name)]


def cost(choice: Choice, kept: Iterable[fx.Node], again: Iterable[fx.Node]) -> float:
    return math.fsum(choice.weights[n] for n in kept) + math.fsum(choice.prices[n] for n in again)


def least_cost(forward: Forward, choice: Choice) -> float:
    """By trying every set of saved values."""
    savable = [n for n in forward.nodes if n.op != "placeholder" and choice.weights[n] < math.inf]
    sets = itertools.chain.from_iterable(itertools.combinations(savable, k) for k in range(len(savable) + 1))
    tried = ((kept, _recomputed(forward, choice, set(kept))) for kept in sets)
    return min(cost(choice, kept, again) for kept, again in tried if again is not None)


def _recomputed(forward: Forward, choice: Choice, kept: set[fx.Node]) -> set[fx.Node] | None:
    """What the backward has to compute itself if `kept` is saved; None if it cannot."""
    again: set[fx.Node] = set()
    stack = [n for n in forward.read if n not in kept and n.op != "placeholder"]
    while stack:
        node = stack.pop()
        if node in choice.banned:
            return None
        again.add(node)
        stack += [a for a in node.all_input_nodes if a not in kept and a.op != "placeholder"]
    return again


@pytest.mark.parametrize("options", [Remat(), Remat(1), Remat(0), BYTES], ids=["half", "one", "zero", "bytes"])
@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_costs_less(seed: int, options: Remat) -> None:
    forward = Forward(random_trace(seed))
    choice = choose(forward, options)
    assert choice.again == _recomputed(forward, choice, set(choice.kept))
    assert cost(choice, choice.kept, choice.again) == pytest.approx(least_cost(forward, choice), rel=1e-6)
