"""What is saved, what is recomputed, when, and why."""

from __future__ import annotations

import functools
import itertools
import math
import sys

import programs
import pytest
import torch
from rematerialised import leaf, program, remat, saved, simple
from torch import Tensor, fx
from traces import captured, ops, tried

from tracefuse.demo import GPT, batch
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.kernels import fusible
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.merge_matmuls import MergeMatmuls
from tracefuse.optimizers.ops import does_work, is_random, is_view, op_name, producer
from tracefuse.optimizers.remat import Remat
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.simplify import Simplify
from tracefuse.optimizers.trace import Trace, phase, recomputes

aten = torch.ops.aten
F = torch.nn.functional

# Bytes and nothing else: the saved bytes are then the least possible.
BYTES = Remat(producer_input_weight=1, distance_base=1, unmaterialised_factor=1, reduction_ratio=math.inf)


# --- laws -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "default": Remat(),
    "torch's": Remat(producer_input_weight=1),
    "free inputs": Remat(producer_input_weight=0),
    "written again": Remat(recompute_materialized=True),
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


@pytest.mark.parametrize("options", ["default", "torch's", "free inputs", "written again", "bytes", "short chains"])
@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_never_saves_more_than_without_it(name: str, options: str) -> None:
    before = program(name).trace
    assert saved_bytes(OPTIONS[options].run(before, lambda _: None)) <= saved_bytes(before)


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_last_application_counts(name: str) -> None:
    trace = program(name).trace
    through_another = remat(remat(trace, producer_input_weight=0)[0])[0]
    assert saved(through_another) == saved(remat(trace)[0])
    assert ops(through_another, "backward") == ops(remat(trace)[0], "backward")


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_order_in_which_a_trace_was_edited_decides_nothing(name: str) -> None:
    edited = Simplify().run(program(name).trace, lambda _: None)
    (one, decisions), (other, of_copy) = remat(edited), remat(edited.copy())
    assert (one.code, decisions) == (other.code, of_copy)


def test_another_choice_asks_nothing_of_the_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = program("gpt").trace.copy()
    remat(trace)

    def found_again(*_: object) -> None:
        raise AssertionError("the facts of the forward are the same for all options")

    monkeypatch.setattr(Forward, "__init__", found_again)
    assert saved(remat(trace, producer_input_weight=0)[0])


def test_a_trace_without_a_backward_stays_as_it_is() -> None:
    trace = captured(lambda x: x.sin().cos(), torch.ones(3)).trace
    after, decisions = remat(trace)
    assert (after.code, decisions) == (trace.code, [])


def test_a_fused_trace_stays_as_it_is() -> None:
    fused = Fuse().run(remat(program("gpt").trace)[0], lambda _: None)
    after, decisions = remat(fused, producer_input_weight=0)
    assert after.code == fused.code
    assert [(d.action, "before fuse" in d.reason) for d in decisions] == [("leave", True)]


# --- what it chooses --------------------------------------------------------------------------------------------------


def test_what_a_fused_op_reads_is_recomputed_in_its_kernel() -> None:
    x, w = leaf(8, 8), leaf(8, 32)
    trace = simple(lambda: (x @ w).sigmoid() * (x @ w))
    after, _ = remat(trace)
    assert (saved(trace), saved(after)) == ({"mm", "sigmoid"}, {"mm"})
    assert [recomputes(n) for n in after.ops if recomputes(n)] == ["sigmoid"]


def test_what_a_matmul_would_read_from_memory_is_not_written_there_again() -> None:
    x, w, v = leaf(8, 8), leaf(8, 32), leaf(32, 8)
    trace = simple(lambda: F.gelu(x @ w).view(8, 32) @ v)
    kept, decisions = remat(trace)
    (reader,) = [
        n.name for n in trace.ops if trace.node("gelu") in n.args[0].all_input_nodes and phase(n) == "backward"
    ]
    assert saved(kept) == {"mm", "gelu"}
    reasons = {d.value: d.reason for d in decisions}
    assert reasons["gelu"] == f"{reader} would read it from memory: recomputing it would write it again"
    for asked in ({"recompute_materialized": True}, {"producer_input_weight": 0}, {"recompute": ("gelu",)}):
        after, _ = remat(trace, **asked)
        assert saved(after) == {"mm"}, asked
        assert [recomputes(n) for n in after.ops if recomputes(n) and not is_view(n)] == ["gelu"], asked


def test_a_value_returned_as_a_gradient_is_not_written_again() -> None:
    x, w = leaf(8, 8), leaf(8, 8)
    trace = simple(lambda: (x @ w).exp() + 1).copy()
    value = next(n for n in trace.ops if n.target is aten.exp.default)
    (first, _), *rest = [p for p in zip(trace.outputs, trace.returned, strict=True) if p[0].kind == "gradient"]
    direct = trace.with_outputs([(first, value), *rest])
    reasons = {d.value: d.reason for d in remat(direct)[1]}
    assert reasons[value.name] == "the caller would read it from memory: recomputing it would write it again"


def test_an_op_that_is_not_fused_costs_a_kernel_of_its_own() -> None:
    x, w = leaf(8, 8), leaf(8, 32)
    short = simple(lambda: (x @ w).cos().roll(1, 0).sin())
    after, decisions = remat(short, reduction_ratio=math.inf)
    assert saved(after) == {"mm", "roll"}
    reasons = {d.value: d.reason for d in decisions}
    kept, instead = "2 KiB, weighed as 1.1 KiB by the pass's factors", "as a kernel of its own"
    assert reasons["roll"] == f"{kept}: to run aten.roll.default again moves 4 KiB, {instead}"
    moved = "4.5 KiB moved, modelled as 1.38 ns by the H100 SXM datasheet"
    why = f"aten.mm.default is neither pointwise nor a reduction, and so not run again ({moved})"
    assert reasons["mm"] == f'{why}; recompute="mm" would do so'
    far = remat(short, producer_input_weight=100)[0]
    assert saved(far) == {"mm"}, "a price is no ban"


@pytest.mark.parametrize("classes", [100, 20_000])
def test_a_row_reduction_is_computed_again_in_the_kernel_that_reads_it(classes: int) -> None:
    x, w = leaf(2, 3), torch.randn(3, classes, dtype=torch.float64)
    assert saved(remat(simple(lambda: (x @ w).log_softmax(1).sin()))[0]) == {"mm"}


@functools.cache
def chain() -> Trace:
    return Simplify().run(program("residual_chain").trace, lambda _: None)


def test_residual_chain_at_weight_0_keeps_matmuls_and_recomputes_the_sums() -> None:
    half, free = remat(chain())[0], remat(chain(), producer_input_weight=0)[0]
    assert all(name.startswith("mm") for name in saved(free))
    assert not any(name.startswith("mm") for name in saved(half) - {"mm_11"})
    sums = [n for n in free.ops if recomputes(n) and phase(n) == "backward" and n.target is aten.add.Tensor]
    assert len(sums) == 12
    assert not any(recomputes(n) and n.target is aten.mm.default for n in free.ops)


def test_where_the_factors_would_keep_more_than_the_program_bytes_alone_decide() -> None:
    """An adapter's product and the layer's lie in memory anyway, and their sum is what the backward needs."""
    x, w, a, b = leaf(8, 16), leaf(16, 32), leaf(16, 2), leaf(2, 32)
    trace = simple(lambda: torch.nn.functional.silu(x @ w + (x @ a) @ b * 0.5) * 3)
    after, decisions = remat(trace)
    assert [d.value for d in decisions if d.action == "overrule"] == ["factors"]
    assert saved(after) == {"add", "mm_1"}
    by_factors = remat(trace, save=("mm_1",))[0]  # a pin, and so no more than what the factors say
    assert saved(by_factors) == {"mm", "mm_1", "mm_2"}


def test_a_bound_on_chains_cuts_the_long_sum() -> None:
    def longest(trace: Trace) -> int:
        depth: dict[fx.Node, int] = {}
        for node in (n for n in trace.ops if recomputes(n)):
            depth[node] = max((depth.get(a, 0) for a in node.all_input_nodes), default=0) + does_work(node)
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
        return y * y.sum(1, keepdim=True).exp()

    trace = simple(fn)
    assert saved(remat(trace)[0]) == {"y", "exp"}
    assert saved(remat(trace, reduction_ratio=math.inf)[0]) == {"y"}


def test_layer_norm_statistics_come_with_the_norm_that_is_recomputed() -> None:
    trace = Simplify().run(program("gpt").trace, lambda _: None)
    after, decisions = remat(trace, recompute_materialized=True)
    assert not any("norm" in name for name in saved(after))
    assert [d.reason for d in decisions if d.value == "native_layer_norm_1"] == ["comes with native_layer_norm"]
    assert not any("norm" in (recomputes(n) or "") for n in remat(trace)[0].ops), "a matmul reads the norm's result"


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


# --- how much work ----------------------------------------------------------------------------------------------------


def calls(trace: Trace, options: Remat) -> int:
    """Of Python and C functions, which no other program on the machine can add to; `tests/bench/cut.py` has the seconds."""
    count = itertools.count()
    sys.setprofile(lambda frame, event, arg: next(count) if event in ("call", "c_call") else None)
    try:
        options.run(trace, lambda _: None)
    finally:
        sys.setprofile(None)
    return next(count)


@pytest.mark.parametrize("weight", [1, 0])
def test_twice_the_layers_take_little_more_than_twice_the_work(weight: int) -> None:
    traces = [captured(programs.residual_chain(torch.float32, layers=layers).run).trace for layers in (16, 32, 64)]
    few, more, most = (calls(trace, Remat(producer_input_weight=weight)) for trace in traces)
    assert most - more < 2.5 * (more - few)


def test_the_work_of_a_gpt_follows_its_layers() -> None:
    def work(layers: int) -> int:
        model, tokens = GPT(layers=layers, width=16, heads=2, vocab=31, length=8), batch(31, 1, 8)
        return calls(captured(lambda: model(*tokens).backward()).trace, Remat())

    few, more, most = map(work, (2, 4, 8))
    assert most - more < 2.5 * (more - few)


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.5}, {"producer_input_weight": 0.0}])
def test_a_graph_without_ops_or_inputs_stays_as_it_is(options: dict[str, float]) -> None:
    graph = fx.Graph()
    graph.output(())
    after, decisions = remat(Trace(graph, (), ()), **options)
    assert after.op_count == 0
    assert [d.action for d in decisions] in ([], ["meet"])


def test_a_trace_that_is_left_as_it_was_is_the_same_trace():
    """So that what follows from it is known already."""
    x = leaf(4, 4)
    given, decisions = captured(lambda: (x @ x).sum().backward()).trace, []
    assert Remat().run(given, decisions.append) is given
    assert [(d.value, d.action) for d in decisions] == []
    assert Remat().run(given.copy(), lambda _: None).code == given.code


def test_what_joins_many_parts_is_looked_at_once_however_many_ops_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parts, looked = 2 * fusible.MOST_JOINED, []
    is_beside = fusible._is_stored_beside
    monkeypatch.setattr(fusible, "_is_stored_beside", lambda *given: looked.append(given) or is_beside(*given))

    def step(x: Tensor, weight: Tensor) -> Tensor:
        loss = sum(((x * (1 + at)).sin() @ weight).square().sum() for at in range(parts))
        loss.backward()
        return loss

    inputs = torch.randn(2, 4), torch.randn(4, 4, requires_grad=True)
    trace = MergeMatmuls().run(captured(step, *inputs).trace, lambda _: None)  # the backward joins the forward's values
    looked.clear()
    Remat().run(trace, lambda _: None)
    assert 0 < len(looked) <= 8 * parts, len(looked)
