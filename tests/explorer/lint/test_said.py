"""What findings about layers and layouts say is true of the lines that they name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from findings import case, found
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.optimizers.costs.convolutions import copied_bytes
from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, packet_name
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import human_bytes, origin
from tracefuse.recording import operators
from tracefuse.recording.calls import is_in_engine
from tracefuse.recording.frames import user_source

LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log": (lambda x: torch.softmax(x, -1).log(), "softmax is computed in two ops, and is minus infinity where"),
    "clamp": (lambda x: torch.softmax(x, -1).clamp(min=1e-6).log(), "softmax is computed in two ops, and a clamp cuts"),
    "added": (lambda x: (torch.sigmoid(x) + 1e-8).log(), "sigmoid is computed in two ops, and an added number changes"),
    # ATen bounds the logarithm at -100, so that no loss is infinite.
    "bounded by ATen": (
        lambda x: F.binary_cross_entropy(torch.sigmoid(x), torch.ones_like(x)),
        "sigmoid is computed in two ops, and gives no gradient where the sigmoid rounds to 0 or 1",
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_only_a_bare_logarithm_is_said_to_be_infinite(name: str) -> None:
    loss, said = LOSSES[name]
    x = torch.randn(64, 64, requires_grad=True)
    (finding,) = found("log-of-softmax", case(tracefuse.capture(lambda: loss(x).sum().backward())))
    assert said in finding.title


def test_one_convolution_of_several_reads() -> None:
    net, x = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(2, 1, 12, 12)
    (one,) = found("not-channels-last", case(tracefuse.capture(lambda: net(x).sum().backward())))
    assert one.title == "cuDNN copies images around 1 of 2 convolutions, since they do not lie in channels_last"


def test_what_cudnn_copies_is_what_a_modelled_step_has_of_it() -> None:
    """A 1 by 1 convolution over aligned rows is a matmul, and copies nothing."""
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 3, padding=1))
    x = torch.randn(4, 8, 32, 32)
    looked_at = case(tracefuse.capture(lambda: net(x).square().sum().backward()))
    (one,) = found("not-channels-last", looked_at)
    moved = sum(2 * copied_bytes(n) for n in looked_at.trace.ops)
    assert dict(one.evidence)["moved by its copies"] == f"{human_bytes(moved)} a step"
    assert one.worth_us == pytest.approx(1e6 * moved / H100_SXM_DATASHEET.bytes_per_s)
    assert one.worth_share == pytest.approx(one.worth_us / looked_at.step_us)
    assert "2 of 3 convolutions" in one.title


def test_one_value_is_computed_again() -> None:
    x = torch.randn(256, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(64):
            y = torch.sin(y) * torch.arange(256.0)
        y.sum().backward()

    (one,) = found("computed-again", case(tracefuse.capture(step)))
    assert one.title == "1 value of `step` is computed 64 times from the same operands"


def test_what_is_constant_outside_of_any_class_is_made_before_the_loop() -> None:
    """Only a module has an `__init__`, and buffers."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.ones(256, 256).cos()

    x, module = torch.randn(256, 256, requires_grad=True), Scaled()
    for step, said in ((lambda: x * torch.ones(256, 256).cos(), "before the loop"), (lambda: module(x), "__init__")):
        (one,) = found("constant-each-step", case(tracefuse.capture(lambda step=step: step().sum().backward())))
        assert said in one.fix
        assert ("register_buffer" in one.fix) == (said == "__init__")


class GRU(nn.Module):
    """A recurrent net by hand, of the name that torch's has."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, all_of = torch.zeros(x.shape[1], 8), []
        for row in x:
            z = torch.sigmoid(self.gate(torch.cat([row, h], -1)))
            h = torch.tanh(h * z + row * (1 - z))
            all_of.append(h)
        return torch.stack(all_of), h


LOOPS = {"per-sample-loop", "loop-of-small-kernels", "stack-of-matmuls"}


def test_a_recurrent_net_that_is_called_on_two_lines_is_no_loop() -> None:
    net, x = nn.LSTM(8, 8), torch.randn(32, 4, 8)

    def step() -> None:
        once, state = net(x)
        twice, _ = net(once, state)
        twice.square().mean().backward()

    with torch.backends.mkldnn.flags(enabled=False):
        found = tracefuse.capture(step).findings()
    assert not {one.id for one in found} & {"per-sample-loop", "loop-of-small-kernels"}


@pytest.mark.parametrize(("net", "is_loop"), [(nn.GRU(8, 8), False), (GRU(), True)], ids=["torch's", "by hand"])
def test_torchs_recurrent_nets_are_no_loops_of_the_users(net: nn.Module, is_loop: bool) -> None:
    """On a GPU they are one op of cuDNN's."""
    x = torch.randn(32, 4, 8)

    def step() -> None:
        net(x)[0].square().mean().backward()

    said = {finding.id for finding in diagnose(case(tracefuse.capture(step)))}
    assert bool(said & LOOPS) == is_loop


def test_a_loop_that_takes_two_tensors_apart_is_said_once_with_masks_in_place_of_selections() -> None:
    """Hard triplets of a batch, one anchor at a time."""
    embed, x, labels = nn.Linear(16, 8), torch.randn(32, 16), torch.arange(32) % 4

    def step() -> None:
        out = embed(x)
        apart, losses = torch.cdist(out, out), []
        for i in range(len(labels)):
            farthest = apart[i][labels == labels[i]].max()
            nearest = apart[i][labels != labels[i]].min()
            losses.append(torch.relu(farthest - nearest + 0.5))
        torch.stack(losses).mean().backward()

    (finding,) = found("per-sample-loop", case(tracefuse.capture(step)))
    assert "`masked_fill` or `torch.where` in place of a selection" in finding.fix
    assert "vmap" not in finding.fix


@pytest.mark.parametrize("is_recurrent", [True, False])
def test_what_a_recurrent_net_computes_of_each_step_is_computed_before_its_loop(is_recurrent: bool) -> None:
    """A sum over the rounds is none: its rounds need each other for nothing but adding."""
    x = torch.randn(24, 4, 16)
    into, back = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)

    def step() -> None:
        state = torch.zeros(4, 32)
        for given in x:
            new = (given @ into).tanh()
            state = torch.tanh(new + state @ back) if is_recurrent else state + new
        state.square().mean().backward()

    (one,) = found("per-sample-loop", case(tracefuse.capture(step)))
    assert ("before the loop" in one.fix) == is_recurrent == ("24 steps" in one.title)
    assert ("torch.vmap" in one.fix) != is_recurrent


def test_what_a_cast_is_worth_has_no_sum_of_gradients_in_it() -> None:
    """A residual around a norm in float32: autograd sums both gradients in the name of the cast, and does so without it."""
    norm, feed, x = nn.LayerNorm(256), nn.Linear(256, 256).bfloat16(), torch.randn(512, 256, dtype=torch.bfloat16)

    def step() -> None:
        h = feed(x)
        (h + norm(h.float()).to(h.dtype)).sum().backward()

    of = case(tracefuse.capture(step))
    names = {n: packet_name(n) for n in of.trace.ops if does_work(n)}
    assert [names[n] for n in names if origin(n).autograd == "ToCopyBackward0"].count("add") == 1
    (one,) = found("norm-in-float32", of)
    casts, norms = ([n for n in names if names[n].startswith(name)] for name in ("_to_copy", "native_layer_norm"))
    assert one.worth_us == pytest.approx(of.us(casts) + of.us(norms) / 2)


class Dropped(nn.Module):
    """A layer whose forward computes 2 matmuls, a GELU and a dropout, in the ops of a CPU or in the one of a GPU."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.up, self.down, self.is_fused = nn.Linear(32, 32), nn.Linear(32, 32), is_fused

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(torch.native_dropout(h, 0.1, True)[0] if self.is_fused else F.dropout(h, 0.1))


@pytest.mark.parametrize("is_fused", [False, True], ids=["op by op", "native_dropout"])
def test_what_a_checkpoint_computes_again_behind_a_dropout_is_counted(is_fused: bool) -> None:
    layers, x = nn.ModuleList(Dropped(is_fused) for _ in range(3)), torch.randn(64, 32)
    ran: list[str] = []

    class Notes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func.name())
            return func(*args, **(kwargs or {}))

    def step(is_checkpointed: bool = True) -> None:
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False) if is_checkpointed else layer(h)
        with Notes():
            h.sum().backward()

    step(is_checkpointed=False)
    kept = Counter(ran)
    ran.clear()
    step()
    again = Counter(ran) - kept
    computing = {"addmm", "gelu", "native_dropout", "mul", "div_"}
    expected = sum(count for name, count in again.items() if name.partition("::")[2].partition(".")[0] in computing)
    (finding,) = found("checkpoint-not-needed", case(tracefuse.capture(step)))
    assert dict(finding.evidence)["computed again"].startswith(f"{expected} ops")


def test_the_share_that_checkpoints_compute_again_is_of_the_whole_forward() -> None:
    attend = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True)
    x, head = torch.randn(4, 16, 32), nn.Linear(32, 32)

    def step() -> None:
        h = checkpoint(lambda x: attend(x, x, x, need_weights=False)[0], x, use_reentrant=False)
        head(head(head(h))).sum().backward()

    (finding,) = found("checkpoint-not-needed", case(tracefuse.capture(step)))
    share = re.search(r"compute (\d+) %", finding.title)
    assert share is not None
    assert int(share[1]) < 90


@pytest.mark.parametrize("has_lines", [True, False])
def test_a_second_backward_is_told_at_its_line_on_threads_of_autograds_too(
    has_lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's backward runs on a thread that has no line of the user's."""
    trunk, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
    if not has_lines:
        monkeypatch.setattr(operators, "user_source", lambda: None if is_in_engine() else user_source())
    with tracefuse.capture() as c:
        h = trunk(x)
        h.square().mean().backward(retain_graph=True)
        h.abs().mean().backward()
    (finding,) = found("second-backward", case(c))
    assert finding.source.endswith("  h.abs().mean().backward()")


def test_batch_norms_of_few_values_on_several_lines_are_one_finding_at_that_of_the_fewest() -> None:
    first, second, pool = nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.AvgPool2d(2)

    def run(x: Tensor) -> None:
        wide = first(x)
        narrow = second(pool(wide))  # the fewest
        narrow.square().mean().backward()

    c = tracefuse.capture(lambda: run(torch.randn(2, 3, 4, 4)))
    (one,) = (one for one in diagnose(case(c)) if one.id == "batch-norm-few-samples")
    assert "8 values a channel" in one.title
    assert one.source.endswith("# the fewest")
    assert dict(one.evidence)["batch norms"] == "2 of 2, in 2 lines"
