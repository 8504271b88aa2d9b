"""What is saved, what is recomputed, when, and why."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
import time
from collections.abc import Callable

import programs
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traces import captured, ops, tried

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.crossing import Forward, is_free
from tracefuse.optimizers.errors import PinConflict, UnknownValue
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes, saved_values
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.remat import Choice, Remat, choose
from tracefuse.optimizers.schedule import forget, just_in_time, recomputes
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Input, Output, Trace, call, is_random, is_view, op_name, phase, producer
from tracefuse.optimizers.verify import verify

aten = torch.ops.aten
F = torch.nn.functional

# Bytes and nothing else: the saved bytes are then the least possible.
BYTES = Remat(producer_input_weight=1, distance_base=1, unmaterialised_factor=1, reduction_ratio=math.inf)


@functools.cache
def program(name: str) -> tracefuse.Capture:
    return captured(programs.PROGRAMS[name](torch.float64).run)


def remat(trace: Trace, **options: object) -> tuple[Trace, list[Decision]]:
    decisions: list[Decision] = []
    after = Remat(**options).run(trace, decisions.append)  # type: ignore[arg-type]
    verify(after)
    return after, decisions


def saved(trace: Trace) -> set[str]:
    return {s.name for s in saved_values(trace)}


def simple(fn: Callable[[], Tensor]) -> Trace:
    """The trace of `fn().sum().backward()`, simplified, so that the backward reads values and not their copies."""

    def step() -> Tensor:
        loss = fn().sum()
        loss.backward()
        return loss

    return Simplify().run(captured(step).trace, lambda _: None)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


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


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_forget_takes_every_copy_back(name: str) -> None:
    trace = program(name).trace
    back = forget(remat(trace, producer_input_weight=0)[0])
    verify(back)
    assert not any(recomputes(n) for n in back.ops)
    assert saved_bytes(back) == saved_bytes(trace)
    assert sorted(ops(back)) == sorted(ops(trace))


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


# --- pins -------------------------------------------------------------------------------------------------------------


def test_save_forces_a_cut_and_recompute_forbids_one() -> None:
    x, w, v = leaf(8, 8), leaf(8, 32), leaf(32, 8)
    trace = simple(lambda: F.gelu(x @ w) @ v)
    assert saved(remat(trace, save=("gelu",))[0]) == {"mm", "gelu"}
    after, decisions = remat(trace, recompute=("mm",))
    assert saved(after) == set()
    assert 'pinned by recompute="mm"' in next(d.reason for d in decisions if d.value == "mm")


def test_a_module_is_a_pin_for_all_values_below_it() -> None:
    trace = program("gpt").trace
    after, _ = remat(trace, recompute=("h.0",))
    kept = {n.name: n for n in trace.ops if n.name in saved(after)}
    inside = [n for n in kept.values() if n.meta["custom"]["tracefuse"].module.startswith("h.0.")]
    assert inside
    assert all(is_random(n) for n in inside), "only dropout's draws are kept"
    assert saved_bytes(after) < saved_bytes(remat(trace)[0])


def test_a_name_beats_a_glob() -> None:
    x, w = leaf(4, 4), leaf(4, 4)
    trace = simple(lambda: (x @ w).tanh().sin())
    assert "tanh" in saved(remat(trace, recompute=("*",), save=("tanh",))[0])


def test_a_view_pins_its_base() -> None:
    x, w = leaf(4, 6), leaf(6, 4)
    trace = simple(lambda: (x @ w).t().sin().exp())
    assert "mm" in saved(remat(trace, save=("t",))[0])


def test_unknown_and_impossible_pins_say_what_to_do() -> None:
    trace = program("gpt").trace
    draws = next(n.name for n in trace.ops if is_random(n) and "attention" not in n.name)
    backward = next(n.name for n in trace.ops if phase(n) == "backward")
    with pytest.raises(UnknownValue, match=r"matches no forward value.*for example"):
        remat(trace, save=("no_such_value",))
    with pytest.raises(UnknownValue, match="Backward values cannot be pinned"):
        remat(trace, save=(backward,))
    with pytest.raises(PinConflict, match=r"draws from a random generator.*Drop the pin"):
        remat(trace, recompute=(draws,))
    with pytest.raises(PinConflict, match="is an input"):
        remat(trace, recompute=(trace.placeholders[0].name,))
    with pytest.raises(PinConflict, match="pinned twice"):
        remat(trace, save=("gelu*",), recompute=("gelu*",))


@pytest.mark.parametrize(
    "bad",
    [{"producer_input_weight": -1}, {"distance_base": 0}, {"longest_chain": 0}, {"unmaterialised_factor": math.nan}],
)
def test_refuses_options_that_are_no_factors(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="pass"):
        Remat(**bad)  # type: ignore[arg-type]


# --- when -------------------------------------------------------------------------------------------------------------


def test_recomputed_just_before_the_first_reader() -> None:
    after = remat(program("gpt").trace, producer_input_weight=0)[0]
    position = {n: i for i, n in enumerate(after.graph.nodes)}
    for node in (n for n in after.ops if recomputes(n)):
        first = min(node.users, key=position.__getitem__)
        between = list(after.graph.nodes)[position[node] + 1 : position[first]]
        assert all(recomputes(n) for n in between), f"{node.name} is recomputed too early"


def test_moving_keeps_the_order_of_everything_else() -> None:
    trace = program("gpt").trace.copy()
    movable = {n for n in trace.ops if is_view(n) and phase(n) == "backward"}
    fixed = [n for n in trace.graph.nodes if n not in movable]
    just_in_time(trace.graph, movable)
    verify(trace)
    assert [n for n in trace.graph.nodes if n not in movable] == fixed


def test_recomputing_late_lowers_the_peak_of_a_deep_stack() -> None:
    w = [leaf(64, 64) for _ in range(8)]

    def fn() -> Tensor:
        x = w[0]
        for weight in w:
            x = F.gelu(x @ weight)
        return x

    trace = simple(fn)
    assert peak_bytes(remat(trace)[0]) < peak_bytes(trace)


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
