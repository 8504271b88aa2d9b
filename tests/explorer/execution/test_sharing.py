"""What a recording shares with its caller: right numbers whatever moves, is held or is freed, and no copy without need.

On a CPU the recordings are stand-ins (`fake_graphs`), on a GPU they are CUDA's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from fake_graphs import FakeGraphs
from torch import Tensor

from tracefuse.execution import sharing
from tracefuse.execution.graphs import GAINS, LEARNT_AT, Graphs, Recordable

gpu = pytest.mark.gpu
ROWS = 8
LEARNT = LEARNT_AT + 1  # calls, after which nothing more is found out


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sharing, "LEAST", 1)
    return request.param


def forward(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """y = x * weight and z = x + weight are handed out, tanh(x) is kept."""
    return x * weight, x + weight, x.tanh()


def backward(boxed: list[Tensor]) -> list[Tensor]:
    """Gradients of the weight and of x, by the cotangents of both."""
    tanh, weight, x, of_y, of_z = boxed
    boxed.clear()
    return [of_y * x + of_z, of_y * weight + of_z + tanh]


def expected(weight: Tensor, x: Tensor, of_y: Tensor, of_z: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    return list(forward(weight, x)[:2]), backward([x.tanh(), weight, x, of_y, of_z])


class Counted:
    """Graphs of `forward` and `backward`, and how often they were recorded."""

    def __init__(
        self,
        device: str,
        given: Sequence[Tensor],
        functions: tuple[Callable, Callable | None] = (forward, backward),
        read_again: Sequence[int] = (0, 1),
        handed_out: int = 2,
        cotangents: Sequence[Tensor] | None = None,
    ) -> None:
        module, recorded = SimpleNamespace(forward=functions[0], backward=functions[1]), []
        kind = FakeGraphs if device == "cpu" else Graphs

        class Counting(kind):  # type: ignore[misc, valid-type]
            def _record(self) -> None:
                recorded.append(1)
                super()._record()

        ones = (lambda outputs: [torch.ones_like(t) for t in outputs[:handed_out]]) if functions[1] else None
        self.recorded = recorded
        step = Recordable(module, handed_out, read_again, ones)  # type: ignore[arg-type]
        self.graphs = Counting(step, given, frozenset({0}), cotangents)

    @torch.no_grad()
    def run(self, given: Sequence[Tensor], cotangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        results = self.graphs.forward(given)
        return results, self.graphs.backward(cotangents)


def draw(device: str, count: int = 1) -> list[Tensor]:
    return [torch.randn(ROWS, 16, dtype=torch.float64, device=device) for _ in range(count)]


def same(found: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Tensor]]) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def places(found: Sequence[Sequence[Tensor]]) -> list[int]:
    return [t.data_ptr() for half in found for t in half]


def test_what_stays_is_read_where_it_lies_and_what_dies_is_not_copied(device: str) -> None:
    tensors = draw(device, 4)
    counted = Counted(device, tensors[:2])
    for _ in range(LEARNT + 2):
        for t in tensors:  # the same addresses, new numbers
            t.copy_(draw(device)[0])
        found = counted.run(tensors[:2], tensors[2:])
        same(found, expected(*tensors))
        last = places(found)
        del found
    graphs = counted.graphs
    assert len(counted.recorded) == 2
    assert all(graphs.inputs.is_in_place(at) and graphs.cotangents.is_in_place(at) for at in (0, 1))
    assert not graphs.inputs.pairs(tensors[:2])
    found = counted.run(tensors[:2], tensors[2:])
    assert places(found) == last == [t.data_ptr() for half in (graphs.results, graphs.gradients) for t in half.made]


def test_where_all_is_known_nothing_is_copied_from_the_start(device: str) -> None:
    tensors = draw(device, 4)
    counted = Counted(device, tensors[:2], cotangents=tensors[2:])
    for _ in range(LEARNT):
        tensors[1].mul_(-1.5)
        found = counted.run(tensors[:2], tensors[2:])
        same(found, expected(*tensors))
        assert places(found) == places((counted.graphs.results.made, counted.graphs.gradients.made))
        del found
    assert len(counted.recorded) == 1


def test_an_input_that_moves_is_copied_for_good(device: str) -> None:
    weight, x, of_y, of_z = draw(device, 4)
    counted = Counted(device, (weight, x), cotangents=(of_y, of_z))
    others = draw(device, 5)
    for one in (x, x, *others, x, x, x, x):
        same(counted.run((weight, one), (of_y, of_z)), expected(weight, one, of_y, of_z))
    assert len(counted.recorded) == 2
    assert not counted.graphs.inputs.is_in_place(1)


def test_a_cotangent_that_moves_is_copied_for_good(device: str) -> None:
    weight, x, of_y, of_z = draw(device, 4)
    counted = Counted(device, (weight, x), cotangents=(of_y, of_z))
    others = draw(device, 5)
    for one in (of_y, of_y, *others, of_y):
        same(counted.run((weight, x), (one, of_z)), expected(weight, x, one, of_z))
    assert len(counted.recorded) == 2
    assert [counted.graphs.cotangents.is_in_place(at) for at in (0, 1)] == [False, True]


def test_inputs_that_are_made_for_each_call_are_copied(device: str) -> None:
    (weight,) = draw(device)
    counted = Counted(device, (weight, *draw(device)))
    for _ in range(LEARNT + 3):
        x, of_y, of_z = draw(device, 3)
        same(counted.run((weight, x), (of_y, of_z)), expected(weight, x, of_y, of_z))
        del x, of_y, of_z
    assert not counted.graphs.inputs.is_in_place(1)
    assert not any(counted.graphs.cotangents.is_in_place(at) for at in (0, 1))


def test_an_input_that_stayed_and_was_freed_is_not_read(device: str) -> None:
    weight, x, of_y, of_z = draw(device, 4)
    counted = Counted(device, (weight, x))
    for _ in range(LEARNT):
        counted.run((weight, x), (of_y, of_z))
    assert counted.graphs.inputs.is_in_place(1)
    del x
    others = draw(device, 3)
    for one in others:
        same(counted.run((weight, one), (of_y, of_z)), expected(weight, one, of_y, of_z))


def test_other_tensors_in_the_same_memory_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches, of which the second is made where the first was freed, lie there by chance."""
    monkeypatch.setattr(sharing, "LEAST", 1)
    memory, given = bytearray(64), sharing.Given()
    for _ in range(3):
        batch = torch.frombuffer(memory, dtype=torch.float64)
        given.note([batch])
        del batch
    assert not given.is_worth_recording()
    batch = torch.frombuffer(memory, dtype=torch.float64)
    given.note([batch])
    given.note([batch])
    assert given.is_worth_recording()


def test_after_some_mistakes_nothing_is_shared(device: str) -> None:
    count = GAINS + 4
    inputs, (of_y,) = draw(device, count), draw(device)

    def summed(*given: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack(given).sum(0),)

    def reading(boxed: list[Tensor]) -> list[Tensor]:
        twice = boxed.pop() * 2
        return [twice * at for at in range(count)]

    counted = Counted(device, inputs, (summed, reading), (), handed_out=1, cotangents=(of_y,))
    for at in range(1, count):  # one after another lies elsewhere; the first is a parameter
        inputs[at] = inputs[at].clone()
        same(counted.run(inputs, (of_y,)), [list(summed(*inputs)), reading([of_y])])
    assert len(counted.recorded) == 1 + GAINS + 1
    assert not any(counted.graphs.inputs.is_in_place(at) for at in range(1, count))


@pytest.mark.parametrize("from_call", [0, 1, LEARNT])
def test_what_is_held_stays_as_it_is(device: str, from_call: int) -> None:
    tensors = draw(device, 4)
    counted, kept = Counted(device, tensors[:2]), []
    for call in range(LEARNT + 5):
        tensors[1].copy_(draw(device)[0])
        found = counted.run(tensors[:2], tensors[2:])
        if call >= from_call:
            kept.append((found, expected(*tensors)))
        del found
    for found, wanted in kept:
        same(found, wanted)
    assert len(counted.recorded) <= 1 + GAINS


def test_what_is_held_until_the_next_result_is_there_is_copied(device: str) -> None:
    """As `out = model(x)` does in a loop, and gradients that are set to None behind the forward."""
    tensors = draw(device, 4)
    counted, results, gradients = Counted(device, tensors[:2], cotangents=tensors[2:]), None, None
    for _ in range(LEARNT + 3):
        tensors[1].copy_(draw(device)[0])
        before = None if results is None else [t.clone() for t in results]
        now = counted.graphs.forward(tensors[:2])
        if before is not None:
            same([results], [before])
        results, gradients = now, None
        gradients = counted.graphs.backward(tensors[2:])
        same((results, gradients), expected(*tensors))
    assert len(counted.recorded) == 2


def test_a_storage_that_is_held_without_a_tensor_counts(device: str) -> None:
    tensors = draw(device, 4)
    counted = Counted(device, tensors[:2], cotangents=tensors[2:])
    memory = counted.run(tensors[:2], tensors[2:])[0][0].untyped_storage()
    numbers = memory.cpu().tolist()
    tensors[1].add_(1)
    counted.run(tensors[:2], tensors[2:])
    assert memory.cpu().tolist() == numbers


def test_a_result_that_is_the_next_input(device: str) -> None:
    weight, x, of_y, of_z = draw(device, 4)
    counted, theirs = Counted(device, (weight, x), cotangents=(of_y, of_z)), x.clone()
    for _ in range(LEARNT + 3):
        (x, _), _ = counted.run((weight, x), (of_y, of_z))
        theirs = theirs * weight
        same([[x]], [[theirs]])


def test_results_that_lie_in_an_input_or_in_what_the_backward_reads(device: str) -> None:
    def aliasing(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        y = x * weight
        return x[1:], y, y.t(), x.t()

    def reading(boxed: list[Tensor]) -> list[Tensor]:
        y, x, weight, _, of_y = boxed
        boxed.clear()
        return [of_y, y * of_y.t(), x.t() + weight]

    tensors = draw(device, 2)
    tensors = [*tensors, tensors[0][1:].clone(), torch.randn_like(tensors[0])]
    counted = Counted(device, tensors[:2], (aliasing, reading), (0,), cotangents=tensors[2:])
    for _ in range(LEARNT + 1):
        weight, x, _, of_y = tensors
        x.copy_(draw(device)[0])
        (part, y), (first, second, third) = counted.run(tensors[:2], tensors[2:])
        x_before, of_y_before = x.clone(), of_y.clone()
        same([[part, y, first]], [[x[1:], x * weight, of_y]])
        same([[second, third]], [[(x * weight).t() * of_y.t(), x + weight]])
        for mine in (part, y, first, second):
            mine.fill_(7)
        same([[x, of_y]], [[x_before, of_y_before]])
    assert not counted.graphs.inputs.is_in_place(1)  # nobody holds x for the backward, which reads it transposed


def test_two_results_in_one_memory_share_it_when_they_are_handed_out(device: str) -> None:
    def packed(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        both = torch.cat([x * weight, x + weight])
        return both[:ROWS], both[ROWS:]

    weight, x = draw(device, 2)
    counted = Counted(device, (weight, x), (packed, None), cotangents=())
    for _ in range(3):
        found = counted.graphs.forward((weight, x))
        same([found], [[x * weight, x + weight]])
        held = found[1]  # one of them is enough for both to stay
        numbers = held.clone()
        del found
        x.add_(1)
        later = counted.graphs.forward((weight, x))
        same([[held], later], [[numbers], [x * weight, x + weight]])
        del later, held


def test_gradients_that_are_one_tensor_are_handed_out_as_two(device: str) -> None:
    """Each becomes the gradient of a parameter, which is scaled in place; slices of one memory need no copies for that."""

    def summed(weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (weight + x,)

    def reading(boxed: list[Tensor]) -> list[Tensor]:
        (of_y,) = boxed
        boxed.clear()
        same, both = of_y * 2, torch.cat([of_y, of_y * 3])
        return [same, same, both[:ROWS], both[ROWS:]]

    weight, x, of_y = draw(device, 3)
    counted = Counted(device, (weight, x), (summed, reading), (), handed_out=1, cotangents=(of_y,))
    for _ in range(3):
        _, gradients = counted.run((weight, x), (of_y,))
        for at, gradient in enumerate(gradients):
            gradient.mul_(at + 2)
        same([gradients], [[of_y * 4, of_y * 6, of_y * 4, of_y * 15]])
        made = counted.graphs.gradients.made
        in_place = [mine.data_ptr() == own.data_ptr() for mine, own in zip(gradients, made, strict=True)]
        assert in_place == [False, False, True, True]
        del gradients, gradient


def test_an_input_that_autograd_kept_elsewhere_is_read_there(device: str) -> None:
    """As hooks on saved tensors do, so that the input itself may be written to before the backward."""
    weight, x, of_y, of_z = draw(device, 4)
    counted = Counted(device, (weight, x), cotangents=(of_y, of_z))
    for turn in range(4):
        x.copy_(draw(device)[0])
        wanted, kept = expected(weight, x, of_y, of_z), x.t().contiguous().t() if turn % 2 else x.clone()
        results = counted.graphs.forward((weight, x))
        same([results], [wanted[0]])
        x.zero_()
        same([counted.graphs.backward((of_y, of_z), {0: weight, 1: kept})], [wanted[1]])
        del results
    assert len(counted.recorded) == 1


def test_a_plain_backward_hands_out_what_it_makes_twice_as_two(device: str) -> None:
    def reading(boxed: list[Tensor]) -> list[Tensor]:
        of_y = boxed.pop()
        twice = of_y * 2
        return [twice, twice.view(-1)]

    weight, x, of_y = draw(device, 3)
    counted = Counted(
        device, (weight, x), (lambda weight, x: (weight + x,), reading), (), handed_out=1, cotangents=(of_y,)
    )
    other = of_y.clone()
    _, (first, second) = counted.run((weight, x), (other,))
    first.mul_(3)
    same([[first, second]], [[other * 6, (other * 2).view(-1)]])


def test_negative_views_are_copied(device: str) -> None:
    """Kernels read memory as it is."""
    weight, x, of_y, of_z = draw(device, 4)
    negative = torch._neg_view(x)
    counted = Counted(device, (weight, negative), cotangents=(of_y, of_z))
    assert not counted.graphs.inputs.is_in_place(1)
    for _ in range(3):
        same(counted.run((weight, negative), (of_y, of_z)), expected(weight, -x, of_y, of_z))


def test_a_recording_that_fails_is_made_at_the_next_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(device, 4)
    counted = Counted(device, tensors[:2])
    recorder, calls = counted.graphs.recorder, []
    record = recorder.record

    def failing(*given: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("of the backward")
        return record(*given)

    monkeypatch.setattr(recorder, "record", failing)
    failed = 0
    for _ in range(LEARNT + 2):
        try:
            same(counted.run(tensors[:2], tensors[2:]), expected(*tensors))
        except torch.OutOfMemoryError:
            failed += 1
    assert (failed, len(calls)) == (1, 4)


def test_a_result_whose_memory_is_freed_is_copied(device: str) -> None:
    """`resize_(0)` frees the graph's own memory, which it must not write to again."""
    tensors = draw(device, 4)
    counted = Counted(device, tensors[:2], cotangents=tensors[2:])
    for turn in range(4):
        results, gradients = counted.run(tensors[:2], tensors[2:])
        same([results, gradients], expected(*tensors))
        if turn == 1:
            results[0].untyped_storage().resize_(0)
        del results, gradients
    assert len(counted.recorded) == 2


def test_it_is_not_recorded_again_and_again(device: str) -> None:
    """Whatever moves or is held, in turn and by chance."""
    weight, *xs = draw(device, 4)
    cotangents, kept = draw(device, 4), []
    counted = Counted(device, (weight, xs[0]))
    turns = torch.randint(0, 5, (40, 4), generator=torch.Generator().manual_seed(0)).tolist()
    for which, of_y, of_z, holds in turns:
        x, asked = xs[which % 3], (cotangents[of_y % 4], cotangents[of_z % 4])
        found = counted.run((weight, x), asked)
        same(found, expected(weight, x, *asked))
        if holds == 0:
            kept.append((found, expected(weight, x, *asked)))
        del found
    for found, wanted in kept:
        same(found, wanted)
    assert len(counted.recorded) <= 1 + GAINS + GAINS + 1


def test_small_tensors_are_copied(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw(device, 4)
    monkeypatch.setattr(sharing, "LEAST", 8 * tensors[0].numel() + 1)
    counted = Counted(device, tensors[:2], cotangents=tensors[2:])
    for _ in range(LEARNT):
        same(counted.run(tensors[:2], tensors[2:]), expected(*tensors))
    assert len(counted.recorded) == 1
    assert [at for at in (0, 1) if counted.graphs.inputs.is_in_place(at)] == [0]


def test_expanded_and_strided_tensors(device: str) -> None:
    (weight,) = draw(device)
    x, of_y, of_z = draw(device)[0][:1].expand(ROWS, 16), draw(device)[0][:1].expand(ROWS, 16), draw(device)[0]
    for at_once in (None, (of_y, of_z)):
        counted = Counted(device, (weight, x), cotangents=at_once)
        for call in range(LEARNT + 2):
            one = x if call % 4 else draw(device)[0][:1].expand(ROWS, 16)
            same(counted.run((weight, one), (of_y, of_z)), expected(weight, one, of_y, of_z))


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_not_held_is_freed(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's tensors are not kept alive by having been read in place."""
    monkeypatch.setattr(sharing, "LEAST", 1)
    x = torch.randn(4)
    given, memory = sharing.Given(at_once=at_once), sharing.StorageWeakRef(x.untyped_storage())
    given.start([x])
    for _ in range(2):
        given.note([x])
    given.renew()
    assert given.is_in_place(0)
    del x
    assert memory.expired()
