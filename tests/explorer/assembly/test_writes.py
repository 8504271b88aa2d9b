"""In-place ops become values, whatever else shares their memory: replay gives bit by bit what the run gave."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from replayed import replayed
from torch import Tensor, nn
from traces import ops

import tracefuse
from tracefuse.assembly.writes import _meet, functional_twin
from tracefuse.errors import CaptureError
from tracefuse.optimizers.trace import val

aten = torch.ops.aten


def matrix() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("func", "twin"),
    [
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
        (aten.polygamma_.default, aten.polygamma.default),
        (aten.maximum.out, aten.maximum.default),
        (aten.sum.IntList_out, aten.sum.dim_IntList),
        (aten.rrelu_with_noise_.default, aten.rrelu_with_noise_functional.default),
        (aten._foreach_add_.List, aten._foreach_add.List),
        (aten._fused_adamw_.default, aten._fused_adamw.default),
    ],
)
def test_the_twin_of_an_op_takes_the_same_arguments(func, twin) -> None:
    assert functional_twin(func) is twin


@pytest.mark.parametrize("write", ["eq_", "lt_", "logical_not_", "pow_", "square_", "float_power_", "floor_divide_"])
def test_what_is_written_keeps_its_dtype(write: str) -> None:
    """Comparisons yield booleans; written into a tensor of doubles they are doubles."""
    buffer = matrix().double()

    def run() -> Tensor:
        fresh = buffer * 2
        for tensor in (buffer, fresh):
            getattr(tensor, write)(*([] if write in ("logical_not_", "square_") else [2]))
        return fresh

    replayed(run, written=[buffer])


def test_arguments_in_another_order_stay_what_they_are() -> None:
    replayed(lambda: matrix().abs().polygamma_(2))


def test_dropout_of_transposed_values_draws_the_mask_that_it_drew() -> None:
    """`bernoulli_` fills memory in its order, its twin makes a contiguous result."""
    x = torch.randn(4, 5, 6)
    replayed(lambda: [F.dropout(x.permute(order), 0.5) for order in ((1, 0, 2), (2, 0, 1), (0, 2, 1), (0, 1, 2))])


def test_a_transformer_layer_in_training_is_exact() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    x = torch.randn(2, 5, 8)

    def run() -> Tensor:
        loss = layer(x).pow(3).mean()
        loss.backward()
        return loss

    replayed(run, trained=layer.parameters())


def test_generators_of_the_users_own_are_drawn_from() -> None:
    generator = torch.Generator().manual_seed(3)

    def run() -> list[Tensor]:
        drawn = torch.randn(3, 4, generator=generator) + torch.rand(3, 4, generator=generator)
        return [drawn, torch.randperm(5, generator=generator), torch.empty(4).uniform_(generator=generator)]

    replayed(run)


@pytest.mark.parametrize("change", ["unsqueeze_", "t_", "squeeze_", "detach_", "transpose_"])
def test_a_tensor_that_becomes_another_view_of_itself_leaves_its_aliases_alone(change: str) -> None:
    x = matrix()

    def run() -> list[Tensor]:
        value = x * 1
        alias, row = value.detach(), value[0]
        getattr(value, change)(*{"unsqueeze_": [0], "transpose_": [0, 1]}.get(change, []))
        value.mul_(3)
        return [value + 1, alias.sum(0), row * 2]

    replayed(run)


def test_an_input_that_changes_its_shape_is_replayed_from_its_first_one() -> None:
    x = matrix()
    capture = replayed(lambda: x.unsqueeze_(0) * 2)
    assert capture.example_inputs[0].shape == (3, 4)


def test_inputs_that_share_memory_without_overlapping_are_written_one_by_one() -> None:
    flat = torch.randn(10)
    first, second = flat[:4], flat[4:]

    def run() -> Tensor:
        first.mul_(3)
        second.add_(1)
        return first * second[:4]

    capture = replayed(run, written=[first, second])
    assert ops(capture.trace) == ["mul", "add", "slice", "mul"]


def cache_and_slice() -> tuple[Callable[[], Tensor], str]:
    cache, weight = torch.zeros(2, 4, 3), matrix()[:, :3].requires_grad_()
    current = cache[:, 1]

    def run() -> Tensor:
        current.copy_(weight[:2].detach())
        return (cache * weight.sum(0)).sum()

    return run, r"copy_.* current, and cache"


def parameters_and_flat() -> tuple[Callable[[], Tensor], str]:
    layer, flat = nn.Linear(3, 2), torch.randn(8)
    layer.weight.data, layer.bias.data = flat[:6].view(2, 3), flat[6:]

    def run() -> Tensor:
        flat.mul_(0.5)
        return layer(torch.ones(4, 3)).sum()

    return run, r"mul_.* flat, and weight"


def overlapping() -> tuple[Callable[[], Tensor], str]:
    base = torch.randn(6)
    first, second = base[:4], base[2:]

    def run() -> Tensor:
        product = first * second
        first.add_(1)
        return product + second

    return run, r"add_.* first, and second"


def transposed() -> tuple[Callable[[], Tensor], str]:
    weight = nn.Parameter(torch.randn(4, 4))
    same = nn.Parameter(weight.detach().t())

    def run() -> Tensor:
        with torch.no_grad():
            weight.mul_(0.5)
        return (weight @ same).sum()

    return run, r"mul_.* weight, and same"


def row_of_a_state_dict() -> tuple[Callable[[], Tensor], str]:
    layer = nn.Linear(3, 2)
    state = layer.state_dict()

    def run() -> Tensor:
        state["bias"][0] = 0
        return layer(torch.ones(4, 3)).sum()

    return run, r"(copy|fill)_.*shape \[2\], and bias"  # torch 2.15 fills


def leaf_made_from_a_tensor() -> tuple[Callable[[], Tensor], str]:
    def run() -> Tensor:
        made = torch.ones(3) * 2
        leaf = nn.Parameter(made)
        loss = leaf.sum()
        made.add_(1)
        return loss + leaf.sum()

    return run, r"add_.*, and a tensor of shape \[3\]"


@pytest.mark.parametrize(
    "make",
    [cache_and_slice, parameters_and_flat, overlapping, transposed, row_of_a_state_dict, leaf_made_from_a_tensor],
)
def test_a_write_to_one_input_that_another_one_shows_is_refused_with_both_names(make) -> None:
    run, text = make()
    with pytest.raises(CaptureError, match=rf"(?s){text} lies in the same memory and is read .*`view = tensor"):
        _ = tracefuse.capture(run).trace


def test_inputs_that_lie_between_each_other_are_written_one_by_one() -> None:
    both = torch.randn(4, 6)
    left, right = both[:, :3], both[:, 3:]

    def run() -> Tensor:
        left[0] = 1
        return left * right

    replayed(run, written=[left])


def test_a_write_to_an_input_whose_aliases_were_read_before_is_no_concern_of_theirs() -> None:
    base = torch.randn(6)
    first = base[:4]

    def run() -> Tensor:
        total = base.sum()
        first.add_(total)
        return first * 2

    replayed(run, written=[first])


@pytest.mark.parametrize("split", [lambda x: torch.unsafe_chunk(x, 2), lambda x: x.unsafe_split_with_sizes([1, 2])])
def test_parts_that_are_views_untold_show_in_the_whole(split) -> None:
    """The schemas of these do not say that their results are views."""
    x = torch.randn(3, 4)

    def run() -> Tensor:
        whole = x * 2
        split(whole)[0].mul_(3)
        return whole + 1

    replayed(run)


def test_views_made_after_the_write_show_it_without_a_second_tracing() -> None:
    """As in two steps: the transposed weight of the second one is made after the first write."""
    layer, x = nn.Linear(3, 4), torch.randn(5, 3)

    def run() -> Tensor:
        for _ in range(2):
            layer.zero_grad()
            loss = layer(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.mul_(0.5)
        return loss

    replayed(run, written=layer.parameters(), trained=layer.parameters())


def test_a_write_through_views_and_one_beside_it_both_count() -> None:
    a, b = matrix(), matrix()

    def run() -> Tensor:
        row = a[0]
        a.mul_(2)
        b.add_(row)
        a.add_(b)
        b.sub_(1)
        return row * 1

    replayed(run, written=[a, b])


def test_results_given_in_out_are_written_there() -> None:
    x, kept = matrix(), torch.empty(4)

    def run() -> list[Tensor]:
        made = torch.empty(4, dtype=torch.float64)
        torch.sum(x, 0, out=made)
        torch.mean(x, 0, out=kept)
        return [made * 2, kept + 1]

    replayed(run, written=[kept])


@pytest.mark.parametrize(
    "make", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, affine=True, track_running_stats=True)]
)
def test_running_statistics_are_new_values(make) -> None:
    """Instance norm updates copies of its statistics first, and writes their mean."""
    norm, x = make(3), torch.randn(8, 3, 5)

    def run() -> Tensor:
        loss = norm(norm(x)).square().sum()
        loss.backward()
        return loss

    replayed(run, written=[norm.running_mean, norm.running_var], trained=norm.parameters())


def test_an_operator_that_writes_and_has_no_functional_form_is_refused_by_name() -> None:
    @torch.library.custom_op("tracefuse_tests::add_one_", mutates_args=("x",))
    def add_one_(x: Tensor | None) -> None:
        x.numpy()[...] += 1

    def run() -> Tensor:
        y = matrix() * 2
        add_one_(y)
        return y * 3

    with pytest.raises(
        CaptureError, match=r"tracefuse_tests.add_one_.*y\)\) overwrites .* Register an operator that returns"
    ):
        _ = tracefuse.capture(run).trace


def scaled_row(w: Tensor) -> None:
    w[0] *= 0.1


def renormed_rows(w: Tensor) -> None:
    for row in w:
        row.div_(row.norm())


def clamped_flat(w: Tensor) -> None:
    flat = w.view(-1)
    flat.mul_(2)
    flat.clamp_(-1, 1)


@pytest.mark.parametrize("write", [scaled_row, renormed_rows, clamped_flat])
def test_views_of_a_trained_leaf_may_be_written_without_autograd(write: Callable[[Tensor], None]) -> None:
    """torch raises where it is asked whether such a view is a leaf, or what made it."""
    torch.manual_seed(0)
    w = torch.randn(3, 3, requires_grad=True)

    def step() -> Tensor:
        with torch.no_grad():
            write(w)
        loss = (w * w).sum()
        loss.backward()
        return loss

    start = w.detach().clone()
    expected, gradient = step().detach().clone(), w.grad
    assert gradient is not None
    with torch.no_grad():
        w.copy_(start)
    w.grad = None
    c = tracefuse.capture(step)
    assert str(c.check()).endswith("bit for bit.")
    replayed = dict(zip([f"{o.kind} {o.of}" for o in c.trace.outputs], c.replay(), strict=True))
    torch.testing.assert_close(next(t for name, t in replayed.items() if name.startswith("result")), expected)
    torch.testing.assert_close(next(t for name, t in replayed.items() if name.startswith("gradient")), gradient)


def test_a_variable_that_is_such_a_view_does_not_disturb_another_capture() -> None:
    w = torch.randn(3, 3, requires_grad=True)
    with torch.no_grad():
        row = w[0]
        row.mul_(2)
    with tracefuse.capture() as c:
        loss = (w * w).sum()
        loss.backward()
    assert str(c.check()).endswith("bit for bit.")
    assert row.shape == (3,)


def masked_after_a_write() -> Tensor:
    h = torch.randn(6, 4) * WEIGHT
    h[:, 0] = 0
    return h[h[:, 1] > 0].square().sum()


def found_after_a_write() -> Tensor:
    h = WEIGHT * 2
    h[:, 0].mul_(0.5)
    return h.index_select(0, (h[:, 1] > 0).nonzero().squeeze(1)).square().sum()


def repeated_after_a_write() -> Tensor:
    h = WEIGHT * 1
    h[:, 0] = 0
    return torch.repeat_interleave(h, torch.tensor([1, 2, 0, 3, 1, 0]), 0).square().sum()


def mixture_of_experts() -> Tensor:
    x = torch.randn(6, 4)
    weights, chosen = (x @ WEIGHT.t()).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    out[:, -1] = 1
    for expert in range(6):
        row, column = torch.where(chosen == expert)
        out.index_add_(0, row, x[row] * WEIGHT[expert] * weights[row, column, None])
    return out.square().sum()


def packed_sequence() -> Tensor:
    lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True).double()
    packed = nn.utils.rnn.pack_padded_sequence(
        (torch.randn(3, 6, 4) * WEIGHT).double(), torch.tensor([6, 3, 2]), batch_first=True
    )
    return nn.utils.rnn.pad_packed_sequence(lstm(packed)[0], batch_first=True)[0].square().sum()


WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize(
    "loss_of",
    [masked_after_a_write, found_after_a_write, repeated_after_a_write, mixture_of_experts, packed_sequence],
)
def test_writes_through_views_beside_shapes_that_depend_on_numbers(loss_of: Callable[[], Tensor]) -> None:
    """Fake tensors cannot follow: the program is traced again on its inputs, drawing what it drew and nothing more."""
    counter = torch.zeros(2, 3)

    def run() -> Tensor:
        WEIGHT.grad = None
        row = counter[0]
        counter.add_(1)
        loss = loss_of() * row.sum()
        loss.backward()
        return loss

    captured = tracefuse.capture(run)
    seed, counted = torch.get_rng_state(), counter.clone()
    assert captured.check().differing == 0
    assert torch.equal(torch.get_rng_state(), seed)
    assert torch.equal(counter, counted)
    assert captured.trace.outputs[-1].of == "counter"
    assert torch.equal(captured.replay()[-1], counter)
    replayed(run, written=[counter], trained=[WEIGHT])


def test_a_diagonal_is_filled_past_autograd() -> None:
    """Such a write is one to a strided view of a detached weight: a view of a view, which torch does not make functional."""
    weight = nn.Parameter(torch.randn(3, 3))

    def run() -> Tensor:
        weight.data.fill_diagonal_(0)
        loss = (weight @ weight).sum()
        loss.backward()
        return loss

    replayed(run, written=[weight], trained=[weight])


def test_a_write_that_cannot_be_made_functional_is_refused_with_op_and_line() -> None:
    def run() -> Tensor:
        y = torch.ones(4, dtype=torch.cdouble, requires_grad=True) * 2
        y.real.mul_(3)
        loss = y.abs().sum()
        loss.backward()
        return loss

    with pytest.raises(CaptureError, match=r"first by aten\.mul_.*y\.real\.mul_\(3\)\), .* Write the") as caught:
        _ = tracefuse.capture(run).trace
    assert "torch.compile" not in str(caught.value)


def test_an_operator_of_a_users_that_mutates_gets_a_twin() -> None:
    @torch.library.custom_op("tf_test::add_to", mutates_args={"buffer", "more"})
    def add_to(buffer: Tensor, x: Tensor, more: list[Tensor], by: float = 2.0) -> Tensor:
        buffer.add_(x, alpha=by)
        for one in more:
            one.mul_(3)
        return x.exp()

    buffer, others, w = torch.zeros(3), [torch.ones(2), torch.ones(4)], torch.randn(3, requires_grad=True)

    def run() -> Tensor:
        scaled = w * 2
        grown = add_to(buffer, scaled.detach(), others)
        loss = (scaled * buffer * grown).sum() + others[1].sum()
        loss.backward()
        return loss

    c = tracefuse.capture(run)
    assert "bit for bit" in str(c.check())
    assert [o.kind for o in c.trace.outputs].count("mutation") == 3
    returned = zip(c.trace.returned, c.trace.outputs, strict=True)
    assert [tuple(val(n).shape) for n, o in returned if o.kind == "mutation"] == [(3,), (2,), (4,)]
    c.optimize().compile()


@pytest.mark.parametrize("is_traced_again", [False, True])
def test_a_sum_in_place_keeps_its_dtype(is_traced_again: bool) -> None:
    """As in AdaLoRA, whose loss of float32 gets a term of float64; a write to a view makes the program be traced again."""
    w, memory = torch.rand(3, 3, dtype=torch.float64, requires_grad=True), torch.zeros(4)

    def run() -> Tensor:
        if is_traced_again:
            row = memory[1:]
            row += w.detach().sum(0)
        loss = (w * memory.sum()).float().mean()
        loss += w.norm()
        loss.backward()
        return loss

    replayed(run, trained=[w], written=[memory] if is_traced_again else [])


# --- writes through views that are renamed ------------------------------------------------------------------------------


def lstm_by_hand(steps: int) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """Gates in place, each a part of one tensor, and every state written into one tensor."""
    torch.manual_seed(0)
    x = torch.randn(steps, 2, 3)
    trained = [torch.randn(size, 16, requires_grad=True) for size in (3, 4)]

    def run() -> Tensor:
        state, cell, states = torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(steps, 2, 4)
        for step in range(steps):
            start, forget, new, out = (x[step] @ trained[0] + state @ trained[1]).unsafe_chunk(4, 1)
            cell = forget.sigmoid_() * cell + start.sigmoid_() * new.tanh_()
            state = out.sigmoid_() * cell.tanh()
            states[step] = state
        loss = states.square().mean()
        loss.backward()
        return loss

    return run, trained


def written_by_each_view() -> Tensor:
    """Through each kind of view, of the view before it, while others of the same memory are read in between."""
    x = torch.arange(48.0).view(2, 4, 6).clone()
    first, turned = x[0], x.transpose(1, 2)
    seen = [first.sum()]
    x[:, 1:3].mul_(2)
    x.view(8, 6).t()[1].add_(1)
    seen.append(turned.sum(0))
    x.permute(2, 0, 1)[1:, 1].copy_(torch.ones(4))
    x.unsqueeze(0).squeeze(0).diagonal(0, 1, 2).fill_(7)
    for part in (*x.split(3, 2), *x.split([1, 3], 1), *x.unbind(0)):
        part.sub_(0.5)
        seen.append(first * 2)
    torch.as_strided(x, (2, 2), (24, 1), 3).neg_()
    return torch.cat([one.flatten() for one in (*seen, first, turned, x)])


@pytest.fixture
def never_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the program was traced again")

    monkeypatch.setattr("tracefuse.assembly.program.functionalize", refuse)


@pytest.mark.usefixtures("never_traced_again")
def test_writes_through_views_are_renamed() -> None:
    replayed(written_by_each_view)


@pytest.mark.usefixtures("never_traced_again")
def test_parts_that_lie_between_each_other_are_written_one_by_one() -> None:
    run, trained = lstm_by_hand(3)
    capture = replayed(run, trained=trained)
    assert "slice_scatter" not in ops(capture.trace)
    assert ops(capture.trace).count("select_scatter") == 3


@pytest.mark.parametrize("row", [0, 1])
def test_what_an_op_resized_is_written_through_its_views(row: int) -> None:
    a = torch.arange(12.0).view(3, 4)

    def step() -> Tensor:
        largest = torch.empty(0)
        torch.mul(a, 2, out=largest)
        largest[row].add_(7)
        return largest * 3

    replayed(step)


def test_a_draw_into_what_was_resized_has_as_many_numbers() -> None:
    weight = torch.ones(3, 4, requires_grad=True)

    def step() -> Tensor:
        noise = torch.empty(0).resize_(3, 4).normal_()
        loss = (weight * noise).sum()
        loss.backward()
        return loss

    replayed(step, trained=[weight])


def boxes(seed: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Two views of one memory."""
    draw = random.Random(seed)
    memory = torch.empty([draw.randint(1, 6) for _ in range(3)])

    def view() -> Tensor:
        found = memory.permute(draw.sample(range(3), 3)) if draw.random() < 0.5 else memory
        for dim in range(3):
            start = draw.randrange(found.shape[dim])
            index = slice(start, draw.randint(start + 1, found.shape[dim]), draw.choice((1, 1, 2)))
            found = found[(slice(None),) * dim + (index,)]
        found = found.select(0, 0) if draw.random() < 0.3 else found
        return found.expand(2, *found.shape) if draw.random() < 0.1 else found

    return [(tuple(v.shape), v.stride(), v.storage_offset()) for v in (view(), view())]


def test_two_boxes_meet_where_they_have_an_element_in_common() -> None:
    for seed in range(500):
        one, other = boxes(seed)
        places = [set(torch.arange(300).as_strided(*box).flatten().tolist()) for box in (one, other)]
        if max(map(min, places)) <= min(map(max, places)):  # it is asked of extents that overlap
            assert _meet(one, other) is not places[0].isdisjoint(places[1]), (one, other)
