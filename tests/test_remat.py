"""What is saved, what is recomputed, when, and why."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import time

import programs
import pytest
import torch
from rematerialised import leaf, program, remat, saved, simple
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import captured, ops, tried

from tracefuse.demo import GPT, batch
from tracefuse.optimizers.crossing import Forward, is_free
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.remat import Choice, Remat, choose
from tracefuse.optimizers.schedule import recomputes
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Input, Output, Trace, call, is_random, is_view, op_name, producer
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten
F = torch.nn.functional

# Bytes and nothing else: the saved bytes are then the least possible.
BYTES = Remat(producer_input_weight=1, distance_base=1, unmaterialised_factor=1, reduction_ratio=math.inf)


# --- laws -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "default": Remat(),
    "torch's": Remat(producer_input_weight=1),
    "free inputs": Remat(producer_input_weight=0),
    "bytes": BYTES,
    "short chains": Remat(producer_input_weight=0, longest_chain=2),
    "recompute everything": Remat(recompute=("*",)),
    "save everything": Remat(save=("*",)),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_numbers_types_input_and_second_run(name: str, options: str) -> None:
    result = tried(OPTIONS[options], program(name))
    again = [n for n in result.after.ops if recomputes(n)]
    assert not any(is_random(n) and "attention" not in op_name(producer(n)) for n in again), "drawn again"
    assert not any(is_view(result.after.node(s)) for s in saved(result.after)), "a view was saved"
    decided = {d.value: d.nbytes for d in result.decisions if d.action == "save"}
    assert sum(decided.values()) == saved_bytes(result.after), "the decisions are not what is saved"


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_never_saves_more_than_without_it_where_bytes_alone_count(name: str) -> None:
    before = program(name).trace
    assert saved_bytes(BYTES.run(before, lambda _: None)) <= saved_bytes(before)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_last_application_counts(name: str) -> None:
    trace = program(name).trace
    through_another = remat(remat(trace, producer_input_weight=0)[0])[0]
    assert saved(through_another) == saved(remat(trace)[0])
    assert ops(through_another, "backward") == ops(remat(trace)[0], "backward")


def test_a_trace_without_a_backward_stays_as_it_is() -> None:
    trace = captured(lambda x: x.sin().cos(), torch.ones(3)).trace
    after, decisions = remat(trace)
    assert (after.code, decisions) == (trace.code, [])


def test_a_fused_trace_stays_as_it_is() -> None:
    fused = Fuse().run(remat(program("gpt").trace)[0], lambda _: None)
    after, decisions = remat(fused, producer_input_weight=0)
    assert after.code == fused.code
    assert [(d.action, "before fuse" in d.reason) for d in decisions] == [("leave", True)]


# --- the minimum, by enumeration --------------------------------------------------------------------------------------


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
        grads.append(call(read, aten.exp.default, read, name=f"g{i}"))
        grads[-1].meta["phase"] = "backward"
    graph.output((values[-1], *grads))
    outputs = (Output("result", "y"), *(Output("gradient", "x0") for _ in grads))
    trace = Trace(graph, tuple(Input(n.name, "input", n.name, True) for n in inputs), outputs)
    verify(trace)
    return trace


def _random_op(choice: random.Random, values: list[fx.Node], name: str) -> list[fx.Node]:
    a, b = choice.choice(values), choice.choice(values)
    kind = choice.choice(["tanh", "cat", "view", "heavy", "random", "several", "tanh", "cat"])
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
    targets = {"heavy": (aten.cumsum.default, a, 0), "random": (aten.bernoulli.p, a, 0.5)}
    return [call(a, *targets.get(kind, (aten.tanh.default, a)), name=name)]


def least_weight(forward: Forward, choice: Choice) -> float:
    """By trying every set of saved values."""
    savable = [n for n in forward.nodes if n.op != "placeholder" and choice.weights[n] < math.inf]
    sets = itertools.chain.from_iterable(itertools.combinations(savable, k) for k in range(len(savable) + 1))
    return min(math.fsum(choice.weights[n] for n in kept) for kept in sets if _suffices(forward, choice, set(kept)))


def _suffices(forward: Forward, choice: Choice, kept: set[fx.Node]) -> bool:
    stack = [n for n in forward.read if n not in kept and n.op != "placeholder"]
    while stack:
        node = stack.pop()
        if node in choice.banned:
            return False
        stack += [a for a in node.all_input_nodes if a not in kept and a.op != "placeholder"]
    return True


@pytest.mark.parametrize("options", [Remat(), Remat(1), Remat(0), BYTES], ids=["half", "one", "zero", "bytes"])
@pytest.mark.parametrize("seed", range(40))
def test_no_other_choice_weighs_less(seed: int, options: Remat) -> None:
    forward = Forward(random_trace(seed))
    choice = choose(forward, options)
    assert _suffices(forward, choice, set(choice.kept))
    weight = math.fsum(choice.weights[n] for n in choice.kept)
    assert weight == pytest.approx(least_weight(forward, choice), rel=1e-6)


# --- what it chooses --------------------------------------------------------------------------------------------------


def test_a_pointwise_result_between_two_matmuls_is_recomputed_from_the_first() -> None:
    x, w, v = leaf(8, 8), leaf(8, 32), leaf(32, 8)
    trace = simple(lambda: F.gelu(x @ w) @ v)
    after, _ = remat(trace)
    assert (saved(trace), saved(after)) == ({"mm", "gelu"}, {"mm"})
    assert [recomputes(n) for n in after.ops if recomputes(n) and not is_view(n)] == ["gelu"]


@functools.cache
def chain() -> Trace:
    return Simplify().run(program("residual_chain").trace, lambda _: None)


def test_residual_chain_at_weight_0_keeps_matmuls_and_recomputes_the_sums() -> None:
    half, free = remat(chain())[0], remat(chain(), producer_input_weight=0)[0]
    assert all(name.startswith("mm") for name in saved(free))
    assert not any(name.startswith("mm") for name in saved(half) - {"mm_11"})
    sums = [n for n in free.ops if recomputes(n) and n.target is aten.add.Tensor]
    assert len(sums) == 12
    assert not any(recomputes(n) and n.target is aten.mm.default for n in free.ops)


def test_a_bound_on_chains_cuts_the_long_sum() -> None:
    def longest(trace: Trace) -> int:
        depth: dict[fx.Node, int] = {}
        for node in (n for n in trace.ops if recomputes(n)):
            depth[node] = max((depth.get(a, 0) for a in node.all_input_nodes), default=0) + (not is_free(node))
        return max(depth.values())

    assert longest(remat(chain(), producer_input_weight=0)[0]) == 12
    assert longest(remat(chain(), producer_input_weight=0, longest_chain=4)[0]) == 4


def test_distance_draws_the_cut_to_the_backward() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    trace = simple(lambda: (x @ w).exp().exp().tanh())
    flat = remat(trace, unmaterialised_factor=1, distance_base=1)[0]
    steep = remat(trace, unmaterialised_factor=1, distance_base=10, distance_cap=9)[0]
    capped = remat(trace, unmaterialised_factor=1, distance_base=10, distance_cap=1)[0]
    assert (saved(flat), saved(steep), saved(capped)) == ({"mm"}, {"exp"}, {"mm"})


def test_a_small_result_is_kept_unless_the_ratio_says_otherwise() -> None:
    x, w = leaf(64, 8), leaf(8, 64)

    def fn() -> Tensor:
        y = x @ w
        return y * y.logsumexp(1, keepdim=True).exp()

    trace = simple(fn)
    assert saved(remat(trace)[0]) == {"y", "logsumexp"}
    assert saved(remat(trace, reduction_ratio=math.inf)[0]) == {"y"}


def test_layer_norm_statistics_come_with_the_norm_that_is_recomputed() -> None:
    after, decisions = remat(Simplify().run(program("gpt").trace, lambda _: None))
    assert not any("norm" in name for name in saved(after))
    assert [d.reason for d in decisions if d.value == "native_layer_norm_1"] == ["comes with native_layer_norm"]


def test_views_are_taken_again_and_their_base_is_saved() -> None:
    x, w = leaf(4, 6), leaf(6, 9)

    def fn() -> Tensor:
        a, b, c = (x @ w).split(3, dim=1)
        return a * b * c

    trace = simple(fn)
    after, _ = remat(trace)
    assert saved(after) == {"mm"}
    assert saved_bytes(after) == 4 * 9 * 8
    assert any(is_view(n) and recomputes(n) for n in after.ops)


def test_inputs_cost_nothing() -> None:
    x = leaf(5, 5)
    after, decisions = remat(simple(lambda: x.sin().exp()))
    assert saved_bytes(after) == 0
    assert {d.action for d in decisions} == {"recompute"}


def test_what_the_forward_overwrites_is_not_read_again() -> None:
    x, state = leaf(5), torch.ones(5, dtype=torch.float64)

    def step() -> Tensor:
        scale = state.exp()
        state.add_(1)
        loss = (x * scale).sum()
        loss.backward()
        return loss

    result = tried(Remat(), captured(step))
    assert saved(result.after) == {"scale"}
    assert "which the forward overwrites" in result.reasons("save")[0]


# --- how fast ---------------------------------------------------------------------------------------------------------


def seconds(trace: Trace, options: Remat) -> float:
    """Of this process alone: other tests share the machine."""
    start = time.process_time()
    options.run(trace, lambda _: None)
    return time.process_time() - start


def test_time_of_a_12_layer_gpt(capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT(layers=12, width=16, heads=2, vocab=31, length=8)
    tokens = batch(31, 1, 8)
    trace = captured(lambda: model(*tokens).backward()).trace
    taken = min(seconds(trace, Remat()) for _ in range(2))
    with capsys.disabled():
        print(f"\nremat: 12-layer GPT, {len(trace.ops)} ops: {taken:.3f} s")
    assert taken < 3, "0.25 s on an idle core"


def test_time_of_a_128_layer_residual_chain(capsys: pytest.CaptureFixture[str]) -> None:
    trace = captured(programs.residual_chain(torch.float32, layers=128).run).trace
    taken = seconds(trace, Remat(producer_input_weight=0))
    with capsys.disabled():
        print(f"\nremat: 128-layer residual chain, {len(trace.ops)} ops: {taken:.3f} s")
    assert taken < 8, "0.6 s on an idle core"
