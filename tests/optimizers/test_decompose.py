"""decompose: cross-entropy becomes ops that fuse, with eager's numbers, and log-probabilities are neither stored nor saved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from traces import Tried, captured, demanded, ops, tried

import tracefuse
from tracefuse.optimizers.decompose import BECOMES, Decompose
from tracefuse.optimizers.decompose.losses import Rows, known_row, rewrite_loss
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import saved_values
from tracefuse.optimizers.rewrite import mark_overwritten
from tracefuse.optimizers.trace import Output, phase, tensor_type

aten = torch.ops.aten
f64, bf16 = torch.float64, torch.bfloat16
ROWS, CLASSES = 12, 37
COMPOSITES = {str(op).split(".")[1] for op in BECOMES}


def logits(dtype: torch.dtype = f64, scale: float = 3.0) -> Tensor:
    x = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1), dtype=f64)
    return (x * scale).to(dtype).requires_grad_()


IGNORED = (-100, 5, CLASSES + 3)


def _drawn_targets(ignored: int) -> Tensor:
    t = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(2))
    return t.index_fill(0, torch.tensor([2, 7]), ignored)


_TARGETS = {ignored: _drawn_targets(ignored) for ignored in IGNORED}


def targets(ignored: int = -100) -> Tensor:
    """Two rows are ignored, whose target may be no class. An input of what is traced: nothing is computed here."""
    return _TARGETS[ignored]


def trained(loss: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Tensor]:
    """A cell that computes a loss of what a matmul yields, and differentiates it."""

    def run() -> Tensor:
        found = loss(x @ torch.eye(CLASSES, dtype=x.dtype))
        (found * torch.arange(1, found.numel() + 1, dtype=found.dtype).view(found.shape)).sum().backward()
        return found

    return run


def decomposed(loss: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Tried:
    """The pass tried on a training cell; every law is checked, the numbers among them."""
    result = tried(Decompose(), captured(trained(loss, logits() if x is None else x)))
    assert all(value.isfinite().all() for value in result.captured.replay())
    return result


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduction", "smoothing", "ignored"), [*product(("mean", "sum", "none"), (0.0, 0.1), IGNORED)]
)
def test_cross_entropy(reduction: str, smoothing: float, ignored: int) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    result = decomposed(lambda y: F.cross_entropy(y, targets(ignored), **options))
    assert not COMPOSITES & set(result.ops)
    assert len(result.reasons("decompose")) == (5 if smoothing else 4)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: F.log_softmax(y, -1).square().mean(),
        lambda y: F.nll_loss(F.log_softmax(y, 1) * 2, targets()),
        lambda y: F.nll_loss(y, targets(), reduction="sum"),
        lambda y: F.cross_entropy(y.view(3, 4, CLASSES).flatten(0, 1), targets()) + F.log_softmax(y, 1).amax(),
        lambda y: F.kl_div(F.log_softmax(y, -1), F.softmax(y.detach() * 2, -1), reduction="batchmean"),
    ],
    ids=["log-softmax", "something between", "no log-softmax", "two", "kl"],
)
def test_its_parts_alone(loss: Callable[[Tensor], Tensor]) -> None:
    assert not COMPOSITES & set(decomposed(loss).ops)


def test_ignored_rows_get_exactly_no_gradient_and_do_not_count() -> None:
    x = logits()
    result = tried(Decompose(), captured(lambda: _backward(F.cross_entropy(x, targets()))))
    found = demanded(result.after, tracefuse.replay(result.after, result.captured.example_inputs))
    (gradient,) = [value for (kind, _), value in found.items() if kind == "gradient"]
    assert torch.equal(gradient.abs().amax(1) == 0, targets() == -100)
    kept = targets() != -100
    torch.testing.assert_close(found["result", "loss"], F.cross_entropy(x[kept], targets()[kept]).detach())


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


def test_a_batch_of_ignored_rows_has_no_mean_and_no_gradient() -> None:
    x, nothing = logits(), torch.full((ROWS,), -100)
    capture = captured(lambda: _backward(F.cross_entropy(x, nothing)))
    result = Decompose().run(capture.trace, lambda decision: None)
    loss, gradient = tracefuse.replay(result, capture.example_inputs)
    assert loss.isnan()
    assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [bf16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_halves_are_computed_in_f32(dtype: torch.dtype, smoothing: float) -> None:
    """Against float64, the gradient is about as good as eager's and has its type."""
    x = logits(dtype)
    exact = x.detach().double().requires_grad_()
    F.cross_entropy(exact, targets(), label_smoothing=smoothing).backward()
    result = tried(Decompose(), captured(lambda: _backward(F.cross_entropy(x, targets(), label_smoothing=smoothing))))
    loss, gradient = tracefuse.replay(result.after, result.captured.example_inputs)
    eager_loss, eager_gradient = result.captured.replay()
    assert (loss.dtype, gradient.dtype) == (dtype, dtype)
    error, eager_error = (torch.dist(g.double(), exact.grad) for g in (gradient, eager_gradient))  # type: ignore[arg-type]
    assert error <= eager_error * 2 + torch.finfo(torch.float32).eps * exact.grad.norm()  # type: ignore[union-attr]
    torch.testing.assert_close(loss, eager_loss, rtol=2e-2, atol=0)


def autocast_on_a_gpu(y: Tensor, smoothing: float, ignored: int) -> Tensor:
    """What cross-entropy is under autocast to a half on a GPU: log-probabilities are a half, and `nll_loss` casts them."""
    logp, chosen = F.log_softmax(y, 1), targets(ignored)
    nll = F.nll_loss(logp.float(), chosen, ignore_index=ignored)
    spread = -logp.sum(1).masked_fill(chosen == ignored, 0.0)
    return nll * (1 - smoothing) + spread.sum() * (smoothing / CLASSES) if smoothing else nll


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
@pytest.mark.parametrize(("smoothing", "ignored"), [*product((0.0, 0.1), IGNORED)])
def test_the_row_sum_of_a_gradient_that_is_cast_is_known(dtype: torch.dtype, smoothing: float, ignored: int) -> None:
    x = logits(dtype)
    result = tried(Decompose(), captured(lambda: _backward(autocast_on_a_gpu(x, smoothing, ignored))))
    assert "sum" not in [
        op for op, node in zip(ops(result.after), result.after.ops, strict=True) if phase(node) == "backward"
    ]
    loss, gradient = tracefuse.replay(result.after, result.captured.example_inputs)
    eager_loss, eager_gradient = result.captured.replay()
    torch.testing.assert_close(loss, eager_loss, rtol=2 * torch.finfo(dtype).eps, atol=0)
    # An ulp of the probability, which the backward computes again, and one of the gradient.
    ulps = 2 * torch.finfo(dtype).eps * eager_gradient.abs().amax(1, keepdim=True)
    assert bool(((gradient - eager_gradient).abs() <= ulps).all())


@pytest.mark.parametrize("dtype", [bf16, torch.float16, f64], ids=str)
def test_what_a_row_holds_adds_up_to_its_sum_to_the_bit(dtype: torch.dtype) -> None:
    """Each element is rounded as ATen rounds it: a sum of the rounded elements in float64 is that of the known row."""
    x = logits(dtype)
    capture = captured(lambda: _backward(autocast_on_a_gpu(x, 0.1, 5)))
    (gradient,) = [n.args[0] for n in capture.trace.ops if n.target is aten._log_softmax_backward_data.default]
    assert isinstance(gradient, fx.Node)
    new, rows = capture.trace.copy(), Rows()
    mark_overwritten(new)
    for node in [n for n in new.ops if n.target is aten.nll_loss_backward.default]:
        assert rewrite_loss(node, rows) is None
    grad = new.node(gradient.name)
    row = known_row(grad, rows)
    assert row is not None
    assert row.rest is not None
    assert row.picked is not None
    shown = new.with_outputs([(Output("result", n.name), n) for n in (grad, row.rest, row.picked)])
    found, rest, picked = (one.double() for one in tracefuse.replay(shown, capture.example_inputs))
    is_picked = (torch.arange(CLASSES) == targets(5)[:, None]) & (targets(5) != 5)[:, None]
    assert torch.equal(found, torch.where(is_picked, picked, rest.expand_as(found)))
    assert torch.equal(picked[targets(5) == 5], rest[targets(5) == 5])


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [f64, torch.float32, bf16], ids=str)
def test_a_row_with_an_infinite_logit_is_as_in_eager(dtype: torch.dtype, smoothing: float, reduction: str) -> None:
    """The row has no probabilities, whether +inf is its target or another class; without -inf's class it has."""
    x = logits(dtype).detach()
    x[0, 3], x[1, targets()[1]], x[2, 4], x[3, 5] = float("inf"), float("inf"), float("inf"), float("-inf")
    x[4], x[5, 1] = float("-inf"), float("nan")
    x.requires_grad_()
    options = {"label_smoothing": smoothing, "reduction": reduction}
    capture = captured(lambda: _backward(F.cross_entropy(x, targets(), **options).sum()))
    result = Decompose().run(capture.trace, lambda decision: None)
    found, wanted = tracefuse.replay(result, capture.example_inputs), capture.replay()
    assert not COMPOSITES & set(ops(result))
    assert wanted[1][:2].isnan().all()
    assert wanted[1][6:].isfinite().all()
    tolerance = {f64: 1e-9, torch.float32: 1e-5, bf16: 2e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


# --- what it is for ---------------------------------------------------------------------------------------------------


def cell(dtype: torch.dtype, smoothing: float = 0.0) -> Callable[[], Tensor]:
    """A head of many classes over few features, so that logits are what memory goes to."""
    x = torch.randn(64, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(1000, 16, dtype=dtype, requires_grad=True)
    t = torch.randint(1000, (64,))

    def run() -> Tensor:
        with torch.autocast("cpu", dtype=bf16, enabled=dtype is torch.float32):
            loss = F.cross_entropy(x @ w.t(), t, label_smoothing=smoothing)
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    ("dtype", "saved"), [(f64, ["f64[64, 1000]", "f64[64, 1]"]), (torch.float32, ["bf16[64, 1000]", "f32[64, 1]"])]
)
def test_the_forward_saves_the_logits_and_one_number_per_row(
    dtype: torch.dtype, saved: list[str], smoothing: float
) -> None:
    """The logits are in memory already: a matmul wrote them; under autocast as bf16."""
    variant = captured(cell(dtype, smoothing)).optimize().check()
    kept = [value for value in saved_values(variant.trace) if value.nbytes > 64]
    types = [tensor_type(variant.trace.node(value.name).meta["val"]) for value in kept]
    assert [t for t in types if t.endswith(("64, 1000]", "64, 1]"))] == saved


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [f64, torch.float32])
def test_each_half_reads_the_logits_once(dtype: torch.dtype, smoothing: float) -> None:
    trace = captured(cell(dtype, smoothing)).optimize().check().trace
    kernels = [n for n in trace.ops if isinstance(n.target, Kernel) and n.target.nbytes_read > 64 * 1000]
    matrix = 64 * 1000 * (8 if dtype is f64 else 2)
    slack = 64 * 40 + 1000  # targets, row sums, scalars
    forward, backward = kernels
    assert (phase(forward), phase(backward)) == ("forward", "backward")
    assert forward.target.nbytes_read < matrix + slack
    assert forward.target.nbytes_written < slack
    assert backward.target.nbytes_read < matrix + slack
    assert backward.target.nbytes_written == matrix


def test_the_gradient_of_smoothed_labels_needs_no_row_sum() -> None:
    """Their row sums are known, so the backward is pointwise: rows of any length fit."""
    smoothed = ops(decomposed(lambda y: F.cross_entropy(y, targets(), label_smoothing=0.1)).after, "backward")
    assert "sum" not in smoothed
    unknown = ops(decomposed(lambda y: F.log_softmax(y, -1).square().mean()).after, "backward")
    assert "sum" in unknown


def test_the_sum_of_smoothed_labels_waits_for_no_other_sum() -> None:
    """On a row too long for registers, a sum of x - logsumexp(x) would read the row a second time."""
    result = decomposed(lambda y: F.cross_entropy(y, targets(), label_smoothing=0.1))
    sums = [n for n in result.after.ops if n.target in (aten.sum.dim_IntList, aten.logsumexp.default)]
    assert len(sums) == 2
    assert len({n.args[0] for n in sums}) == 1


@pytest.mark.parametrize("shape", [(ROWS, CLASSES), (3, 4, CLASSES)])
def test_log_probabilities_that_are_kept_anyway_are_read_not_computed_again(shape: tuple[int, ...]) -> None:
    """A loss with class weights stays with ATen, which reads them in the backward, here also through a view."""
    weight = torch.ones(CLASSES, dtype=f64)

    def loss(y: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(y.view(shape), -1).view(ROWS, CLASSES), targets(), weight=weight)

    result = decomposed(loss)
    assert ops(result.after, "backward").count("sub") == 1


def test_values_that_replace_others_keep_their_names_and_new_ones_are_plainly_called() -> None:
    x = logits()

    def step() -> Tensor:
        found = F.cross_entropy(x * 2, targets(), label_smoothing=0.1)
        found.backward()
        return found

    result = tried(Decompose(), captured(step))
    before, after = result.captured.trace, result.after
    assert [n.name for n in after.returned] == [n.name for n in before.returned]
    assert {d.value for d in result.decisions} <= {n.name for n in before.ops}
    new = {n.name for n in after.ops} - {n.name for n in before.ops}
    assert {"logsumexp", "picked", "where"} <= new
    assert not any(part in name for name in new for part in ("default", "tensor", "scalar", "dim"))


# --- what it leaves ---------------------------------------------------------------------------------------------------

LEFT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "class weights": (lambda y: F.cross_entropy(y, targets(), weight=torch.ones(CLASSES, dtype=f64)), "weighs"),
    "images": (lambda y: F.cross_entropy(y.t()[None], targets()[None]), "4 dimensions"),
    "another dimension": (lambda y: F.log_softmax(y, 0).square().mean(), "another dimension"),
    "one row": (lambda y: F.nll_loss(y[0], targets()[0]), "1 dimensions"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_it_leaves_has_a_reason(name: str) -> None:
    loss, reason = LEFT[name]
    result = decomposed(loss)
    assert COMPOSITES & {op.replace("nll_loss2d", "nll_loss") for op in result.ops}
    assert any(reason in found for found in result.reasons("leave"))


def test_a_trace_without_losses_is_left_alone() -> None:
    result = tried(Decompose(), captured(lambda x: x.softmax(-1).sum(), torch.randn(3, 4)))
    assert result.after.code == result.captured.trace.code
    assert result.decisions == ()


# --- extrema ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_gradient_of_an_extremum_is_a_comparison(dim: int, keepdim: bool) -> None:
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(4), dtype=f64).requires_grad_()

    def step() -> Tensor:
        loss = ((x * 2).max(dim, keepdim).values.sin() + (x * 3).min(dim, keepdim).values).sum()
        loss.backward()
        return loss

    result = tried(Decompose(), tracefuse.capture(step))
    assert "scatter" not in result.ops
    assert result.reasons("decompose") == ["it becomes a comparison of places"] * 2


def test_a_scatter_to_other_places_stays() -> None:
    x, place = torch.randn(4, 5, dtype=f64), torch.tensor([[1], [0], [4], [2]])
    result = tried(Decompose(), captured(lambda x: torch.zeros_like(x).scatter(1, place, x[:, :1]), x))
    assert "scatter" in result.ops


# --- places -----------------------------------------------------------------------------------------------------------


def embedded(places: Callable[[], Tensor], padding: int | None = None, dtype: torch.dtype = f64) -> Tried:
    """A training cell that embeds places in 9 rows, and whose gradient has a -0."""
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(6), dtype=f64).to(dtype).requires_grad_()

    def step() -> Tensor:
        rows = F.embedding(places(), weight, padding_idx=padding)
        loss = (rows.sin() * torch.arange(-2, 3, dtype=dtype)).sum()
        loss.backward()
        return loss

    return tried(Decompose(), tracefuse.capture(step))


@pytest.mark.parametrize("dtype", [f64, bf16], ids=str)
@pytest.mark.parametrize(
    ("places", "padding"),
    [
        (lambda: torch.arange(9), None),
        (lambda: torch.arange(9)[None], None),
        (lambda: torch.arange(9)[:, None], None),
    ],
    ids=["as they are", "a batch of one", "a column"],
)
def test_the_gradient_of_rows_in_turn_is_a_copy(
    places: Callable[[], Tensor], padding: int | None, dtype: torch.dtype
) -> None:
    result = embedded(places, padding, dtype)
    assert "embedding_dense_backward" not in result.ops
    assert result.reasons("decompose") == ["it becomes the gradients themselves, one for each row"]
    found = tracefuse.replay(result.after, result.captured.example_inputs)
    for one, other in zip(found, result.captured.replay(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one.signbit(), other.signbit())


@pytest.mark.parametrize(
    ("places", "padding"),
    [
        (lambda: torch.arange(9).expand(2, 9), None),
        (lambda: torch.arange(9), 3),
        (lambda: torch.arange(6), None),
        (lambda: torch.arange(9).view(3, 3).t(), None),
        (lambda: torch.arange(9)[-1:].expand(9), None),
        (lambda: torch.arange(9)[2], None),
        (lambda: torch.tensor([0, 1, 2]), None),
    ],
    ids=[
        "each twice",
        "the padding among them",
        "fewer rows",
        "in another order",
        "one nine times",
        "one alone",
        "data",
    ],
)
def test_the_gradient_of_other_places_stays(places: Callable[[], Tensor], padding: int | None) -> None:
    assert "embedding_dense_backward" in embedded(places, padding).ops


# --- norms ------------------------------------------------------------------------------------------------------------


def _reserving(x: Tensor, grad: Tensor, averages: Tensor) -> tuple[Tensor, ...]:
    """A batch norm and its backward as a GPU with cuDNN records them: the forward hands on a `reserve`."""
    weight, bias = torch.linspace(0.5, 1.5, 6, dtype=x.dtype), torch.linspace(-1.0, 1.0, 6, dtype=x.dtype)
    forward = aten._batch_norm_with_update_functional(x, weight, bias, averages, averages + 1, 0.1, 1e-5)
    y, mean, rstd, reserve, new_mean, new_var = forward
    own = aten.threshold_backward(grad, y, 0)
    grads = aten.batch_norm_backward(own, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3, reserve)
    return y.relu(), new_mean, new_var, *grads


def _images() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, grad = (torch.randn(4, 6, 5, 7, generator=generator, dtype=f64) for _ in range(2))
    return x, grad, torch.linspace(0.0, 1.0, 6, dtype=f64)


def test_a_batch_norm_that_hands_on_a_reserve_goes_with_its_backward() -> None:
    result = tried(Decompose(), captured(_reserving, *_images()))
    assert not [op for op in result.ops if "norm" in op]
    assert len(result.reasons("decompose")) == 2


def test_where_its_reserve_is_read_elsewhere_the_forward_stays() -> None:
    def fn(x: Tensor, averages: Tensor) -> tuple[Tensor, Tensor]:
        y, _, _, reserve, *_ = aten._batch_norm_with_update_functional(
            x, averages, averages, averages, averages, 0.1, 1e-5
        )
        return y.relu(), reserve

    x, _, averages = _images()
    result = tried(Decompose(), captured(fn, x, averages))
    assert "what only cuDNN understands" in result.reasons("leave")[0]


@pytest.mark.parametrize("dtype", [f64, bf16], ids=["f64", "bf16"])
def test_the_backward_alone_takes_the_statistics_that_it_is_given(dtype: torch.dtype) -> None:
    def fn(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, ...]:
        return aten.native_batch_norm_backward(
            g * 2, x, None, None, None, mean, rstd, True, 1e-5, [True, False, False]
        )[0]

    x, grad, _ = _images()
    mean, rstd = x.mean((0, 2, 3)), x.var((0, 2, 3)).rsqrt()
    result = tried(Decompose(), captured(fn, grad.to(dtype), x.to(dtype), mean.to(dtype), rstd.to(dtype)))
    assert "native_batch_norm_backward" not in result.ops
    assert result.ops.count("sum") == 2
