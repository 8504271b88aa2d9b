"""Heads and losses in chunks: the numbers of eager, whatever lies between, and what is left alone with its reason."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
import torch
import torch.nn.functional as F
from padded import TAKES_ALL, ChunkAll
from torch import Tensor, nn
from traces import Tried, tried

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.optimizers.costs.cost import flops
from tracefuse.optimizers.trace import Trace, origin, phase, tensors, val

COUNT, WIDTH, CLASSES = 12, 8, 61
CHUNK = "linear_cross_entropy"
f64, f32, bf16, f16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


class Head(nn.Module):
    """An embedding, a layer and a head over 61 words; it may be tied, with a bias, frozen."""

    def __init__(self, dtype: torch.dtype = f64, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.to(dtype)
        self.tokens = torch.randint(CLASSES, (3, COUNT // 3))
        self.targets = torch.randint(CLASSES, (3, COUNT // 3))

    def rows(self) -> Tensor:
        return self.layer(self.words(self.tokens)).tanh()

    def logits(self) -> Tensor:
        return self.head(self.rows())


def mean(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().view(-1, CLASSES), model.targets.view(-1))


def total(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().view(-1, CLASSES), model.targets.view(-1), reduction="sum") / 7


def ignored(model: Head) -> Tensor:
    targets = model.targets.clone()
    targets[0], targets[1, 2:] = -100, -100
    return F.cross_entropy(model.logits().view(-1, CLASSES), targets.view(-1))


def another_index(model: Head) -> Tensor:
    targets = model.targets.clone()
    targets[:, ::2] = 3
    return F.cross_entropy(model.logits().flatten(0, 1), targets.flatten(), ignore_index=3)


def upcast(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().float().view(-1, CLASSES), model.targets.view(-1))


def shifted_labels(model: Head) -> Tensor:
    targets = F.pad(model.targets, (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(model.logits().view(-1, CLASSES), targets.view(-1))


def by_matmul(model: Head) -> Tensor:
    """A weight that lies as [width, classes]."""
    return F.cross_entropy(model.rows().view(-1, WIDTH) @ model.layer.weight.exp().repeat(1, 4), model.targets.view(-1))


def log_probabilities(model: Head) -> Tensor:
    return F.nll_loss(F.log_softmax(model.logits(), -1).view(-1, CLASSES), model.targets.view(-1))


def of_part(model: Head) -> Tensor:
    """The loss's cotangent follows from the loss itself."""
    return mean(model).exp() + model.layer.weight.square().sum()


def accumulated(model: Head) -> Tensor:
    return mean(model) / 4


def of_itself(model: Head) -> Tensor:
    """A loss that is scaled by what it is."""
    loss = mean(model)
    return loss * loss.detach()


class Squared(torch.autograd.Function):
    """Multiplies its cotangent by itself."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return cotangent * cotangent


def squared(model: Head) -> Tensor:
    return 3 * Squared.apply(mean(model))  # type: ignore[no-any-return, no-untyped-call]


def autocast(model: Head) -> Tensor:
    with torch.autocast("cpu", bf16):
        return mean(model)


def scaled_half(model: Head) -> Tensor:
    with torch.autocast("cpu", f16):
        loss = mean(model)
    return torch.amp.GradScaler("cpu", init_scale=2.0**10).scale(loss)


def two_heads(model: Head) -> Tensor:
    """As where several tokens are predicted: one weight, two losses."""
    later = F.cross_entropy(model.head(model.rows().sin()).view(-1, CLASSES), model.targets.flip(0).view(-1))
    return mean(model) + 0.3 * later


def shifted(model: Head) -> Tensor:
    """As transformers did until 4.45: the last token of each text predicts nothing."""
    logits = model.logits().float()
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), model.targets[..., 1:].contiguous().view(-1))


def shifted_as_it_lies(model: Head) -> Tensor:
    return F.cross_entropy(model.logits()[:, :-1].reshape(-1, CLASSES), model.targets[:, 1:].reshape(-1))


def of_every_second_token(model: Head) -> Tensor:
    return F.cross_entropy(model.logits()[1:, ::2].flatten(0, 1), model.targets[1:, ::2].flatten())


def of_last_token(model: Head) -> Tensor:
    return F.cross_entropy(model.logits()[:, -1], model.targets[:, 0])


def per_item(model: Head) -> Tensor:
    """As transformers does now under its Trainer."""
    targets = F.pad(model.targets, (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(
        model.logits().float().view(-1, CLASSES), targets.view(-1), ignore_index=-100, reduction="sum"
    )
    return loss / torch.tensor(9)


def smoothed(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().view(-1, CLASSES), model.targets.view(-1), label_smoothing=0.1)


def smoothed_of_some(model: Head) -> Tensor:
    """The first of them with a word to ignore that is a class."""
    targets = model.targets.clone()
    targets[:, ::2] = 3
    logits = model.logits()[:, :-1].float().reshape(-1, CLASSES)
    targets = targets[:, 1:].reshape(-1)
    return F.cross_entropy(logits, targets, ignore_index=3, label_smoothing=0.3)


def smoothed_total(model: Head) -> Tensor:
    targets = model.targets.clone()
    targets[0, 1:] = -100
    logits = model.logits().view(-1, CLASSES)
    return F.cross_entropy(logits, targets.view(-1), reduction="sum", label_smoothing=1.0) / 3


def capped(model: Head) -> Tensor:
    """As Gemma does."""
    logits = model.logits() / 1.5
    logits = torch.tanh(logits)
    return F.cross_entropy((logits * 1.5).float().view(-1, CLASSES), model.targets.view(-1))


def capped_by_sigmoid(model: Head) -> Tensor:
    logits = 4 * torch.sigmoid((model.logits().float() + 5) / 1.5) - 1
    return F.cross_entropy(logits[:, 1:].reshape(-1, CLASSES), model.targets[:, 1:].reshape(-1), label_smoothing=0.2)


def scaled(model: Head) -> Tensor:
    """As Cohere and Granite do."""
    return F.cross_entropy((model.logits() * 0.0625).view(-1, CLASSES) / -2, model.targets.view(-1))


def captured(model: Head, loss: Callable[[Head], Tensor]) -> tracefuse.Capture:
    def run() -> Tensor:
        found = loss(model)
        found.backward()
        return found

    return tracefuse.capture(run)


def chunked(model: Head, loss: Callable[[Head], Tensor], **more: bool) -> Tried:
    options = {"simplify": True, "freeze": True, "cat": True, CHUNK: True} | more
    return tried(Config.off().changed(**options).passes(TAKES_ALL), captured(model, loss))


def has_logits(trace: Trace) -> bool:
    """Whether there is a value as large as all logits."""
    return any(t.numel() >= COUNT * CLASSES for node in trace.ops for t in tensors(node))


LOSSES = [mean, total, ignored, another_index, upcast, shifted_labels, log_probabilities, accumulated, of_itself,
          squared, autocast, scaled_half, shifted, shifted_as_it_lies, of_every_second_token, of_last_token, per_item,
          smoothed, smoothed_of_some, smoothed_total, capped, capped_by_sigmoid, scaled]  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_loss_in_chunks_is_eagers(loss: Callable[[Head], Tensor], bias: bool) -> None:
    found = chunked(Head(f32 if loss is scaled_half else f64, bias=bias), loss)
    assert found.ops.count(CHUNK) == 1
    assert not has_logits(found.after)
    assert tried(ChunkAll(), found.captured).ops.count(CHUNK) == 1, "as it was captured, too"


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("loss", [mean, upcast], ids=lambda loss: loss.__name__)
def test_types_are_those_of_eager(loss: Callable[[Head], Tensor], dtype: torch.dtype) -> None:
    assert chunked(Head(dtype, bias=True), loss).ops.count(CHUNK) == 1


def test_what_it_takes_is_the_layers() -> None:
    """Three matmuls, and one loss."""
    found = chunked(Head(), mean)
    (product,) = [n for n in found.captured.trace.ops if flops(n) and val(n).shape == (COUNT, CLASSES)]
    (made,) = [node for node in found.after.ops if CHUNK in str(node.target)]
    assert origin(made) == origin(product)
    assert (origin(made).module_type, phase(made)) == ("Linear", "forward")


def test_a_tied_heads_gradient_is_added_to_the_embeddings() -> None:
    found = chunked(Head(tied=True), mean)
    assert {"linear_cross_entropy", "embedding_dense_backward", "add"} <= set(found.ops)


def test_a_weight_of_other_strides() -> None:
    model = Head()
    model.head.weight = nn.Parameter(torch.randn(WIDTH, CLASSES, dtype=f64).t())
    assert chunked(model, mean).ops.count(CHUNK) == 1


def test_a_weight_that_is_multiplied_as_it_lies() -> None:
    model, weight = Head(), torch.randn(WIDTH, CLASSES, dtype=f64, requires_grad=True)
    found = chunked(model, lambda m: F.cross_entropy(m.rows().view(-1, WIDTH) @ weight, m.targets.view(-1)))
    assert found.ops.count(CHUNK) == 1
    assert not has_logits(found.after)


def wanted(trace: Trace) -> list[bool]:
    (node,) = [n for n in trace.ops if CHUNK in str(n.target)]
    return [bool(node.kwargs[f"{of}_wanted"]) for of in ("input", "weight", "bias")]


def test_a_frozen_heads_gradient_is_not_computed() -> None:
    model = Head(bias=True)
    model.head.requires_grad_(False)
    assert wanted(chunked(model, mean).after) == [True, False, False]


def test_freeze_drops_the_gradient_of_the_head_it_names() -> None:
    found = captured(Head(bias=True), mean).variant(
        Config.off().changed(simplify=True, freeze=("head.weight",), linear_cross_entropy=True)
    )
    found.capture._machine = TAKES_ALL
    assert wanted(found.trace) == [True, False, True]


def test_a_head_alone_needs_no_gradient_of_its_input() -> None:
    model = Head(bias=True)
    model.words.requires_grad_(False)
    model.layer.requires_grad_(False)
    assert wanted(chunked(model, mean).after) == [False, True, True]


def test_a_loss_without_a_backward_keeps_nothing() -> None:
    model = Head()

    def run() -> Tensor:
        with torch.no_grad():
            return mean(model)

    found = tried(ChunkAll(), tracefuse.capture(run))
    assert wanted(found.after) == [False, False, False]
    assert not has_logits(found.after)


def test_several_losses_of_one_head() -> None:
    found = chunked(Head(), two_heads)
    assert found.ops.count(CHUNK) == 2
    assert not has_logits(found.after)


def test_a_cotangent_of_something_else_multiplies_all_the_same() -> None:
    assert chunked(Head(), of_part).ops.count(CHUNK) == 1


@pytest.mark.parametrize("loss", [total, smoothed_total], ids=lambda loss: loss.__name__)
def test_a_sum_of_rows_that_are_all_ignored(loss: Callable[[Head], Tensor]) -> None:
    model = Head(bias=True)
    model.targets.fill_(-100)
    found = tried([ChunkAll()], captured(model, loss))
    assert found.ops.count(CHUNK) == 1


@pytest.mark.parametrize("loss", [mean, shifted, smoothed, capped], ids=lambda loss: loss.__name__)
def test_a_mean_of_rows_that_are_all_ignored(loss: Callable[[Head], Tensor]) -> None:
    """It is 0 / 0."""
    model = Head(bias=True)
    model.targets.fill_(-100)
    capture = captured(model, loss)
    after = ChunkAll().run(capture.trace, lambda _: None)
    assert any(CHUNK in str(node.target) for node in after.ops)
    torch.testing.assert_close(tracefuse.replay(after, capture.example_inputs), capture.replay(), equal_nan=True)


@pytest.mark.parametrize("loss", [shifted, smoothed_of_some, capped_by_sigmoid], ids=lambda loss: loss.__name__)
def test_with_the_other_passes(loss: Callable[[Head], Tensor]) -> None:
    model = Head(tied=True, bias=True)
    found = chunked(model, loss, decompose=True, fuse=True)
    assert found.ops.count(CHUNK) == 1
    model.head.requires_grad_(False)
    assert wanted(chunked(model, loss).after) == [True, False, False]


# --- what is left alone -----------------------------------------------------------------------------------------------


def read_by_accuracy(model: Head) -> Tensor:
    logits = model.logits().view(-1, CLASSES)
    accuracy = (logits.argmax(1) == model.targets.view(-1)).double().mean()
    return F.cross_entropy(logits, model.targets.view(-1)) * accuracy


def each_row(model: Head) -> Tensor:
    losses = F.cross_entropy(model.logits().view(-1, CLASSES), model.targets.view(-1), reduction="none")
    return (losses * losses.detach().sigmoid()).mean()


def weighed(model: Head) -> Tensor:
    weight = torch.linspace(0.5, 1, CLASSES, dtype=f64)
    return F.cross_entropy(model.logits().view(-1, CLASSES), model.targets.view(-1), weight=weight)


def weighed_smoothly(model: Head) -> Tensor:
    """Like the smoothing of labels, but its weights add up to more than 1."""
    p = F.log_softmax(model.logits().view(-1, CLASSES), 1)
    return F.nll_loss(p, model.targets.view(-1)) - 0.1 * p.sum(1).mean()


def capped_twice(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().tanh().sigmoid().view(-1, CLASSES), model.targets.view(-1))


def normalised(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().exp().view(-1, CLASSES), model.targets.view(-1))


def with_a_learned_scale(model: Head) -> Tensor:
    return F.cross_entropy((model.logits() * model.layer.bias[0]).view(-1, CLASSES), model.targets.view(-1))


def of_some_classes(model: Head) -> Tensor:
    return F.cross_entropy(model.logits()[..., :60].reshape(-1, 60), model.targets.view(-1) % 60)


def read_between(model: Head) -> Tensor:
    logits = (model.logits() / 3).tanh()
    return F.cross_entropy(logits.view(-1, CLASSES), model.targets.view(-1)) * logits.mean()


def of_images(model: Head) -> Tensor:
    return F.cross_entropy(model.logits().view(3, -1, CLASSES).permute(0, 2, 1)[..., None], model.targets[..., None])


def regularised(model: Head) -> Tensor:
    logits = model.logits().view(-1, CLASSES)
    return F.cross_entropy(logits, model.targets.view(-1)) + 1e-3 * logits.logsumexp(1).square().mean()


REFUSED = {
    read_by_accuracy: "the logits are read by",
    each_row: "a loss for each row",
    weighed: "it weighs the classes",
    weighed_smoothly: "the log-probabilities are read by",
    capped_twice: "is the second activation behind its linear layer",
    normalised: "its logits come from aten.exp.default",
    with_a_learned_scale: "changes the logits by what is no finite number",
    of_some_classes: "takes a part of the classes",
    read_between: "the logits are read by mean too",
    of_images: "a loss over images",
    regularised: "the logits are read by",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_is_left_alone_says_why(loss: Callable[[Head], Tensor]) -> None:
    found = tried([ChunkAll()], captured(Head(), loss))
    assert CHUNK not in found.ops
    (reason,) = found.reasons("leave")
    assert REFUSED[loss] in reason
    assert ": " in reason, "a remedy"


def test_logits_that_are_returned_stay() -> None:
    model = Head()

    def run() -> tuple[Tensor, Tensor]:
        logits = model.logits()
        loss = F.cross_entropy(logits.view(-1, CLASSES), model.targets.view(-1))
        loss.backward()
        return loss, logits

    found = tried([ChunkAll()], tracefuse.capture(run))
    (reason,) = found.reasons("leave")
    assert reason.startswith("the logits are returned: return the loss alone")


def test_halves_whose_scale_nobody_knows_stay() -> None:
    def loss(model: Head) -> Tensor:
        with torch.autocast("cpu", f16):
            return mean(model)

    found = tried([ChunkAll()], captured(Head(f32), loss))
    (reason,) = found.reasons("leave")
    assert "float16" in reason
    assert "scaler.scale(loss)" in reason


# --- whole models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [total, shifted, capped_by_sigmoid], ids=lambda loss: loss.__name__)
def test_an_exported_step_computes_in_chunks(loss: Callable[[Head], Tensor], tmp_path: Path) -> None:
    model = Head(f32, tied=True)
    capture = captured(model, loss)
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    capture._machine = TAKES_ALL
    path = capture.optimize().export(tmp_path / "step.py")
    text = path.read_text()
    assert "def linear_cross_entropy(" in text
    assert "tracefuse" not in text.split("# --- the optimised program")[1]
    spec = importlib.util.spec_from_file_location("step_in_chunks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.check()
    model.zero_grad()
    parameters = dict(model.named_parameters())
    given = dict(zip(capture.variant(Config.off()).compile().inputs, capture.live_inputs, strict=False))
    found = module.run(*(parameters.get(row[1], given[row[0]]) for row in module.INPUTS))
    (found[0] if isinstance(found, tuple) else found).backward()
    torch.testing.assert_close({n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_compiled_step_scales_by_the_cotangent_that_it_is_given(name: str) -> None:
    program = programs.PROGRAMS[name](f32)
    torch.manual_seed(1)
    capture = tracefuse.capture(program.run)
    capture._machine = TAKES_ALL
    variant = capture.optimize(remat=None)
    assert any(CHUNK in str(node.target) for node in variant.trace.ops)
    step = variant.compile()
    gradients = []
    for factor in (1.0, 3.0):
        program.fresh()
        torch.manual_seed(2)
        loss = step()
        ((loss[0] if isinstance(loss, tuple) else loss) * factor).backward()
        gradients.append(program.gradients())
    for of, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][of], 3 * gradient, rtol=1e-4, atol=1e-6)


def test_the_backend_computes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tracefuse.variant import Variants

    monkeypatch.setattr(Variants, "machine", TAKES_ALL)
    model = Head(f32, tied=True)
    compiled = torch.compile(mean, backend="tracefuse")
    loss = compiled(model)
    (loss * 2).backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = mean(model)
    (expected * 2).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    (graph,) = tracefuse.compiled(model)
    assert any(CHUNK in str(node.target) for node in graph.variant(graph.config).trace.ops)
