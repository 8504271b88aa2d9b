"""Where a loss is taken in chunks by itself: by the bytes that are alive at the loss, and by the model of what it costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tracefuse.config.configuration import Config
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, flops
from tracefuse.optimizers.linear_cross_entropy import LOGITS_MEMORY, LinearCrossEntropy
from tracefuse.optimizers.linear_cross_entropy.worth import LEAST_ROWS
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.passes import Decision, run_pipeline
from tracefuse.optimizers.trace import Input, Output, Trace
from tracefuse.optimizers.verify import verify

GIB = 2**30
bf16, f32 = torch.bfloat16, torch.float32


def upcast(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers did until 4.45, of four texts."""
    classes = logits.shape[1]
    logits = logits.view(4, -1, classes).float()
    logits = logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, classes), target.view(4, -1)[..., 1:].contiguous().view(-1))


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target, label_smoothing=0.1)


def capped(logits: Tensor, target: Tensor) -> Tensor:
    """As Gemma does."""
    logits = torch.tanh(logits / 30)
    return F.cross_entropy((logits * 30).float(), target)


def head(
    count: int, width: int, classes: int, dtype: torch.dtype = bf16, frozen: bool = False,
    loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
) -> Trace:  # fmt: skip
    """A head and its loss, forward and backward, of sizes that no CPU holds: fake tensors all."""

    def step(x: Tensor, weight: Tensor, target: Tensor, grad_loss: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_(not frozen)
        logits = x @ weight.t()
        loss = loss_of(logits, target)
        gradients = torch.autograd.grad(loss, [x] if frozen else [x, weight], grad_loss)
        return loss.detach(), *gradients

    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        tensors = (
            torch.empty(count, width, dtype=dtype), torch.empty(classes, width, dtype=dtype),
            torch.empty(count, dtype=torch.int64), torch.empty((), dtype=dtype if loss_of is F.cross_entropy else f32),
        )  # fmt: skip
        graph = make_fx(step, tracing_mode="real")(*tensors).graph
    late = False
    *_, cotangent = graph.find_nodes(op="placeholder")
    for node in graph.nodes:
        late = late or cotangent in node.all_input_nodes
        if node.target is torch.ops.aten.masked_fill_.Scalar:  # smoothing overwrites what nothing else reads
            node.target, node.meta["val"] = torch.ops.aten.masked_fill.Scalar, node.meta["val"].clone()
        node.meta["phase"] = "backward" if late else "forward"
    kinds = ("input", "parameter", "input", "cotangent")
    placeholders = zip(graph.find_nodes(op="placeholder"), kinds, strict=True)
    inputs = [Input(node.name, kind, node.name) for node, kind in placeholders]
    names = [one.name for one in inputs]
    outputs = [Output("result", "loss"), *(Output("gradient", of) for of in names[: 1 if frozen else 2])]
    made = list(graph.output_node().args[0])
    graph.output_node().args = (tuple(made),)
    # The loss is detached in the end, which is an op of the forward.
    ends = [n for n in graph.nodes if n.op == "call_function" and n is made[0]]
    for node in ends:
        node.meta["phase"] = "forward"
        source = node.args[0]
        source.append(node)
    trace = Trace(graph, tuple(inputs), tuple(outputs))
    verify(trace)
    return trace


def decided(trace: Trace, **options: int) -> tuple[Trace, Decision]:
    """What the pass makes of a trace that was simplified, and its one decision."""
    (simplified,) = run_pipeline(trace, Config.off().changed(simplify=True).passes())
    (record,) = run_pipeline(simplified.after, [LinearCrossEntropy(**options)])
    (decision,) = record.decisions
    return record.after, decision


def test_the_head_of_a_large_language_model() -> None:
    """8,192 rows of 4,096, 131,072 words, bf16: 2 GiB of logits, as much of their gradient."""
    trace = head(8192, 4096, 131072)
    after, decision = decided(trace)
    assert decision.action == "chunk"
    assert decision.reason.startswith("chunks of 2,048 of 8,192 rows, 512 MiB of logits each: ")
    assert decision.nbytes == pytest.approx(4 * GIB - 2.0625 * GIB, rel=0.01)
    assert peak_bytes(after) < peak_bytes(trace) - GIB
    (node,) = [n for n in after.ops if "linear_cross_entropy" in str(n.target)]
    assert flops(node) == 3 * 2 * 8192 * 4096 * 131072
    assert node.meta["val"][4].numel() * 2 <= 0.6 * GIB


def test_a_frozen_head_keeps_only_the_gradient_of_its_input() -> None:
    trace = head(8192, 4096, 131072, frozen=True, loss_of=upcast)
    after, decision = decided(trace)
    assert decision.action == "chunk"
    assert saved_bytes(after) == 8192 * 4096 * 2
    assert saved_bytes(trace) > 4 * GIB
    weight = 131072 * 4096 * 2
    assert peak_bytes(after) < weight + 0.6 * GIB + 4 * 8192 * 4096 * 2


@pytest.mark.parametrize("loss_of", [F.cross_entropy, upcast])
def test_gpt_2(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    _, decision = decided(head(8192, 768, 50304, loss_of=loss_of))
    assert decision.action == "chunk"
    assert "chunks of 4,096 of 8,192 rows, 393 MiB" in decision.reason


def test_a_head_of_halves_that_is_unaligned_is_left_to_pad() -> None:
    """Chunks of it would be as slow as the whole, which `pad` mends."""
    _, decision = decided(head(8192, 768, 50257))
    assert decision.action == "leave"
    assert "`pad` computes them aligned (for chunks make them a multiple of 8, 50,264)" in decision.reason


@pytest.mark.parametrize("loss_of", [upcast, shifted, smoothed, capped])
def test_the_peak_of_losses_that_people_have(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    """8,192 rows of 2,304, 256,000 words, bf16, as of Gemma 2: 3.9 GiB of logits, twice as much for each cast of them."""
    trace = head(8192, 2304, 256000, loss_of=loss_of)
    after, decision = decided(trace)
    assert decision.action == "chunk"
    logits, weight, rows = (2 * size for size in (8192 * 256000, 2304 * 256000, 2304 * 8192))
    assert peak_bytes(trace) > 6 * logits
    assert peak_bytes(after) < 3 * (weight + rows) + 0.6 * GIB, (
        "the operands, kept gradients, scaled gradients, and a chunk"
    )


def test_few_rows_of_a_wide_layer_stay() -> None:
    """The gradient of the weight, which would be kept, is larger than the logits."""
    trace = head(512, 8192, 131072)
    after, decision = decided(trace)
    assert after.code == run_pipeline(trace, Config.off().changed(simplify=True).passes())[-1].after.code
    assert (decision.action, decision.reason.partition(":")[0]) == ("leave", "chunks would save no memory")


def test_where_scaling_what_was_kept_takes_long_they_stay() -> None:
    """As many rows as the layer is wide: what is saved is paid for by a pass over the kept gradients."""
    _, decision = decided(head(1536, 1024, 262144))
    assert (decision.action, decision.reason.partition(":")[0]) == ("leave", "chunks would be slower")


def test_small_programs_stay_as_they_are() -> None:
    _, decision = decided(head(192, 64, 512))
    assert (decision.action, decision.reason.partition(":")[0]) == ("leave", "chunks would save little memory")


@pytest.mark.parametrize(
    ("memory", "rows"), [(LOGITS_MEMORY, 2048), (2 * LOGITS_MEMORY, 4096), (2**20, LEAST_ROWS), (8 * GIB, 8192)]
)
def test_the_bound_on_memory_chooses_the_rows(memory: int, rows: int) -> None:
    after, decision = decided(head(8192, 768, 131072), logits_memory=memory)
    assert decision.action == "chunk"
    (node,) = [n for n in after.ops if "linear_cross_entropy" in str(n.target)]
    assert node.kwargs["rows"] == rows


def test_chunks_are_alike() -> None:
    after, _ = decided(head(9000, 768, 131072))
    (node,) = [n for n in after.ops if "linear_cross_entropy" in str(n.target)]
    assert node.kwargs["rows"] == 1920  # five of them


def test_the_options_default_is_the_passes() -> None:
    assert Config().logits_memory == LOGITS_MEMORY == LinearCrossEntropy().logits_memory
    assert LinearCrossEntropy().peaks == H100_SXM_DATASHEET
