"""`overlap` on collectives that a compiled graph issues itself: the laws of every pass, and what each option does."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from cuda_traces import on_cuda
from ranks import Gathering, gathering_graph, needs_gloo

import tracefuse
from tracefuse.errors import NotSupported
from tracefuse.optimizers.liveness import peak_bytes
from tracefuse.optimizers.ops import is_wait
from tracefuse.optimizers.overlap import Overlap
from tracefuse.optimizers.overlap.collectives import gathers_parameters
from tracefuse.optimizers.overlap.issued import is_joined, is_start, order_of_collectives
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.trace import Trace, phase
from tracefuse.optimizers.verify import verify

pytestmark = needs_gloo
RANKS, WIDTH, LAYERS = 4, 32, 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"prefetch": 0},
    {"prefetch": 1},
    {"prefetch": 2, "reshard": True},
    {"bucket_mb": 25.0},
    {"bucket_mb": 2 * 4 * WIDTH * WIDTH / 2**20, "prefetch": 1},
    {"bucket_mb": 1e-6, "prefetch": 1, "reshard": True},
    {"reshard": False},
]


@pytest.fixture(scope="module")
def graph() -> Iterator[tracefuse.CompiledGraph]:
    """A step of one rank of four, of a group that exchanges nothing, whose layers gather their weights."""
    with gathering_graph(RANKS, LAYERS, WIDTH) as found:
        yield found


@pytest.fixture
def trace(graph: tracefuse.CompiledGraph) -> Trace:
    return graph.trace


def applied(trace: Trace, **options: Any) -> tuple[Trace, list[Decision]]:
    decisions: list[Decision] = []
    return Overlap(**options).run(trace, decisions.append), decisions


def order(trace: Trace, half: str) -> str:
    """Starts as "s", joined ones as "S", waits as "w", all else as "."."""
    signs = ((is_joined, "S"), (is_start, "s"), (is_wait, "w"))
    ops = (node for node in trace.ops if phase(node) == half)
    return "".join(next((sign for known, sign in signs if known(node)), ".") for node in ops)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_keeps_the_laws_of_every_pass(trace: Trace, options: dict[str, Any]) -> None:
    before = trace.code
    once, decisions = applied(trace, **options)
    verify(once)
    assert trace.code == before, "its input is untouched"
    again, _ = applied(once, **options)
    assert again.code == once.code, "it is idempotent"
    assert all(one.reason for one in decisions)
    assert (once.inputs, once.outputs) == (trace.inputs, trace.outputs)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_collective_is_waited_for_in_its_own_phase_and_none_twice(trace: Trace, options: dict[str, Any]) -> None:
    new, _ = applied(trace, **options)
    for node in filter(is_start, new.ops):
        (wait,) = node.users
        assert is_wait(wait)
        assert phase(wait) == phase(node)
    for node in filter(is_joined, new.ops):
        assert all(len(item.users) == 1 and all(map(is_wait, item.users)) for item in node.users)


def gathers_meanwhile(trace: Trace) -> list[int]:
    """How many others start while a gather is in flight, for each of them, in order."""
    place = {node: at for at, node in enumerate(trace.ops)}
    starts = [node for node in trace.ops if (is_start(node) or is_joined(node)) and gathers_parameters(node)]
    given = [list(node.users) if is_joined(node) else [node] for node in starts]
    ends = [max(place[wait] for one in ones for wait in one.users) for ones in given]
    return [sum(place[node] < place[one] < end for one in starts) for node, end in zip(starts, ends, strict=True)]


def test_a_gather_is_in_flight_for_as_many_others_as_it_is_prefetched(trace: Trace) -> None:
    assert order(trace, "forward").startswith("sw")
    for depth in (0, 1, 2):
        new, _ = applied(on_cuda(trace), prefetch=depth)
        assert gathers_meanwhile(new) == [min(depth, LAYERS - 1 - at) for at in range(LAYERS)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_two_gathers_of_cpus_are_in_flight(trace: Trace, options: dict[str, Any]) -> None:
    """Gloo sends all gathers of a group under one tag: two at once write into each other's memory."""
    new, decisions = applied(trace, **options)
    assert not any(gathers_meanwhile(new))
    on_gpus = gathers_meanwhile(applied(on_cuda(trace), **options)[0])
    assert any(on_gpus) == any(one.action == "wait" for one in decisions)


def test_gathers_that_the_program_waits_for_at_once_are_not_both_in_flight_on_cpus(trace: Trace) -> None:
    """As `a = wait(gather(a)); b = wait(gather(b)); x @ a @ b`: a wait goes down to its first reader, the next gather not."""
    both = trace.copy()
    first, second, *_ = (node for node in both.ops if is_start(node) and gathers_parameters(node))
    (wait,) = second.users
    for node in (wait, second):
        next(iter(first.users)).append(node)
    verify(both)
    assert gathers_meanwhile(both)[0] == 0
    assert gathers_meanwhile(applied(both)[0])[0] == 0
    assert gathers_meanwhile(applied(on_cuda(both))[0])[0] == 1


def test_gradients_are_waited_for_behind_the_backward(trace: Trace) -> None:
    new, decisions = applied(trace)
    assert order(new, "backward").rstrip("w.").endswith("s")
    assert order(new, "backward").count("s") == LAYERS
    assert not set(order(new, "backward").partition("w")[2]) - {"w", "."}
    assert {one.action for one in decisions} == {"start"}


def test_parameters_that_are_gathered_again_are_no_memory_of_the_backward(trace: Trace) -> None:
    kept, freed = applied(trace)[0], applied(trace, prefetch=0, reshard=True)[0]
    assert order(freed, "backward").count("s") == LAYERS + LAYERS - 1
    assert peak_bytes(freed) < peak_bytes(kept)


def test_a_rank_whose_other_passes_fail_still_moves_its_collectives(graph: tracefuse.CompiledGraph) -> None:
    """Those of other ranks, where nothing fails, move as well."""

    @tracefuse.register
    @dataclass(frozen=True)
    class Fails:
        name: ClassVar[str] = "fails"

        def run(self, trace: Trace, decide: Any) -> Trace:
            raise NotSupported("it never works")

    options, moved = {"overlap": {"prefetch": 1, "bucket_mb": 25.0}}, []
    try:
        for fails in (False, True):
            torch._dynamo.reset()
            model = Gathering(LAYERS, WIDTH)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                torch.compile(model, backend="tracefuse", options=options | {"fails": fails})(
                    torch.randn(8, WIDTH)
                ).sum().backward()
            said = [str(one.message) for one in told if "a graph of this model" in str(one.message)]
            assert [one.partition(": ")[0] for one in said] == ["a graph of this model runs with no pass but overlap"][
                :fails
            ]
            (found,) = tracefuse.compiled(model)
            moved.append(order_of_collectives(found.variant(found.config).trace))
    finally:
        tracefuse.unregister("fails")
    assert moved[0] == moved[1] != order_of_collectives(graph.trace)


def test_collectives_of_one_kind_that_change_places_are_another_order(graph: tracefuse.CompiledGraph) -> None:
    """Each gathers the weight of another layer: a rank that swaps two of them takes one weight for the other."""

    @tracefuse.register
    @dataclass(frozen=True)
    class Swaps:
        name: ClassVar[str] = "swaps"

        def run(self, trace: Trace, decide: Any) -> Trace:
            new = trace.copy()
            first, second, *_ = filter(is_start, new.graph.nodes)
            first.prepend(second)
            return new

    try:
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="collectives would start in another order than the program's"):
            torch.compile(Gathering(LAYERS, WIDTH), backend="tracefuse", options={"swaps": True})(
                torch.randn(8, WIDTH)
            ).sum().backward()
    finally:
        tracefuse.unregister("swaps")


@pytest.mark.parametrize(
    ("options", "exchanges", "is_said"),
    [({"overlap": True}, True, True), ({}, True, False), ({"overlap": True}, False, False)],
)
def test_a_rank_that_runs_a_graph_op_by_op_says_what_others_make_of_it(
    graph: tracefuse.CompiledGraph, monkeypatch: Any, options: dict[str, Any], exchanges: bool, is_said: bool
) -> None:
    def fails(*_: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr("tracefuse.backend.joint_trace", fails)
    torch._dynamo.reset()
    model = Gathering(LAYERS, WIDTH) if exchanges else torch.nn.Linear(WIDTH, WIDTH)
    with pytest.warns(UserWarning, match="runs op by op.*no space left on device") as told:
        torch.compile(model, backend="tracefuse", options=options)(torch.randn(8, WIDTH)).sum().backward()
    assert any(str(one.message).endswith("Leave `overlap` out on all ranks.") for one in told) == is_said


def test_what_one_rank_has_timed_changes_no_program(graph: tracefuse.CompiledGraph, monkeypatch: Any) -> None:
    """Ranks whose programs differ would start their collectives in another order."""
    monkeypatch.setattr(graph, "_timed", ("a kernel that is slower than ATen here",))
    assert graph.timed == ()


def test_buckets_are_as_large_as_is_asked_for(trace: Trace) -> None:
    two = 2 * 4 * WIDTH * WIDTH / 2**20
    assert order(applied(trace, bucket_mb=two)[0], "forward").count("S") == LAYERS / 2
    assert order(applied(trace, bucket_mb=two)[0], "backward").count("S") == LAYERS / 2
    assert order(applied(trace, bucket_mb=25.0)[0], "forward").count("S") == 1
    assert "S" not in order(applied(trace, bucket_mb=1e-6)[0], "backward")
