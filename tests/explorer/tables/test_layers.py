"""The table of modules: what is counted where, how identical layers fold, and what the backward is said to be made of."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from functools import cache

import programs
import pytest
import torch
from cuda_traces import on_cuda
from torch import nn
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import origin, phase
from tracefuse.tables.folding import KINDS, OUTSIDE, kind, work
from tracefuse.tables.layers import Layer, Layers, layers
from tracefuse.variant import Variant
from tracefuse.widgets.payload.program import payload


@cache
def gpt() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=3, width=32, heads=2, vocab=61, length=16), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(tokens, targets).backward())


def captured(name: str) -> Variant:
    return tracefuse.capture(programs.PROGRAMS[name](torch.float32).run).variant(Config.off())


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_the_rows_add_up_to_the_trace(name: str) -> None:
    v = captured(name)
    rows, ops = v.layers(), [n for n in v.trace.ops if does_work(n)]
    for half, field in (("forward", "forward_ops"), ("backward", "backward_ops")):
        assert sum(getattr(row, field)[1] for row in rows) == sum(phase(n) == half for n in ops)
    assert sum(row.saved_bytes[1] for row in rows) == saved_bytes(v.trace)
    us = sum(row.forward_us[1] + row.backward_us[1] for row in rows)
    assert us == pytest.approx(sum(v.op_times.us.values()))


def steps_of(count: int, checkpointed: bool = False) -> tracefuse.Capture:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(6, 8)

    def train() -> None:
        for _ in range(count):
            out = checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
            loss = out.square().mean()
            loss.backward()
            with torch.no_grad():  # by hand, so that nothing tells one step from the next
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            model.zero_grad()

    return tracefuse.capture(train)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_forwards_of_later_steps_are_forward(checkpointed: bool) -> None:
    """Although all that comes after an optimizer step is in the second half of the trace."""

    def ops(count: int, passes: Config) -> dict[str, tuple[int, int]]:
        rows = steps_of(count, checkpointed).variant(passes).layers()
        return {
            row.path: (row.forward_ops[0], row.backward_ops[0]) for row in rows if row.module_type in {"Linear", "GELU"}
        }

    one, three = ops(1, Config.off()), ops(3, Config.off())
    assert len(one) == 3
    assert three == {path: (3 * forward, 3 * backward) for path, (forward, backward) in one.items()}
    assert ops(3, Config(remat=1.0)) == three


def test_before_and_after_are_those_of_both_traces() -> None:
    v = gpt().optimize()
    plain = {row.path: row for row in v.baseline.layers()}
    for row in v.layers():
        if row.path in plain:
            assert (row.forward_ops[0], row.backward_us[0]) == (
                plain[row.path].forward_ops[1],
                plain[row.path].backward_us[1],
            )
    assert sum(row.backward_ops[1] for row in v.layers()) < sum(row.backward_ops[0] for row in v.layers())


def test_identical_layers_are_one_line_and_nothing_is_lost() -> None:
    lines = str(gpt().variant(Config.off()).layers()).splitlines()
    (attention,) = [line for line in lines if line.startswith("h.*.attn ")]
    assert "×3" in attention
    assert "SelfAttention" in attention
    assert "attention 47 %" in attention
    assert lines[0].startswith("modelled: ")
    (total,) = [line for line in lines if line.startswith("in all ")]
    assert "100 %" in total


def test_what_is_outside_of_the_model_is_not_the_models_own() -> None:
    class Model(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).exp()

    model, x = Model(nn.Linear(8, 8)), torch.randn(4, 8)
    rows = tracefuse.capture(lambda: model(x).tanh().sum().backward()).variant(Config.off()).layers()
    ops = {row.name: (row.module_type, row.forward_ops[1], row.backward_ops[1]) for row in rows}
    assert ops == {"0": ("Linear", 1, 2), "Model": ("Model", 1, 1), "(no module)": ("", 2, 1)}
    names = [line.split("  ")[0] for line in str(rows).splitlines()[2:6]]
    assert names == ["0", "Model", "(no module)", "in all"]


def test_the_heaviest_backward_is_that_of_the_widest_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4096), nn.Linear(4096, 1))
    x = torch.randn(32, 64)
    rows = tracefuse.capture(lambda: model(x).sum().backward()).variant(Config.off()).layers()
    heaviest = max(rows, key=lambda row: row.backward_us[1])
    assert (heaviest.path, heaviest.module_type) == ("1", "Linear")
    assert heaviest.cause.startswith("matmul")
    assert heaviest.ratio is not None
    assert heaviest.ratio > 1


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (lambda x: torch.cat([x, x]), "concatenation"),
        (lambda x: x.double(), "cast"),
        (lambda x: x.to("meta"), "device copy"),
        (lambda x: x.clone(), "copy"),
        (lambda x: x @ x, "matmul"),
        (lambda x: x.exp(), "pointwise"),
        (lambda x: x.sum(), "reduction"),
        (lambda x: x.sort().values, "sort"),
        (lambda x: nn.functional.conv1d(x[None], x[:, :, None]), "convolution"),
    ],
)  # fmt: skip
def test_what_an_op_does_in_a_word(program: object, word: str) -> None:
    ops = tracefuse.capture(program, torch.randn(8, 8)).trace.ops  # type: ignore[call-overload]
    assert word in {work(node) for node in ops if does_work(node)}


@pytest.mark.parametrize("name", ["gpt", "llama", "conv_batchnorm"])
def test_the_kinds_add_up_to_the_backward(name: str) -> None:
    for row in captured(name).layers():
        assert set(row.backward_kinds[1]) <= set(KINDS)
        assert sum(row.backward_kinds[1].values()) == pytest.approx(row.backward_us[1])


@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        (lambda a, b: a @ b, ((8, 16), (16, 8)), "matmul"),
        (lambda a, b: a @ b.t(), ((8, 16), (8, 16)), "matmul"),
        (lambda a, b: a @ b, ((8, 16), (16, 7)), "matmul layout"),
        (lambda a, b: a.transpose(0, 1).reshape(8, -1) @ b, ((4, 8, 4), (16, 8)), "matmul layout"),
        (lambda a, b: torch.addmm(torch.zeros(7), a, b), ((8, 16), (16, 7)), "matmul layout"),
        (lambda a: nn.functional.layer_norm(a, [8]), ((4, 8),), "normalization"),
        (lambda a: a.sort().values, ((4, 8),), "other"),
    ],
)  # fmt: skip
def test_what_the_time_of_an_op_counts_as(program: object, args: tuple, expected: str) -> None:
    trace = tracefuse.capture(program, *(torch.randn(*shape) for shape in args)).trace  # type: ignore[call-overload]
    assert expected in {kind(node) for node in on_cuda(trace).ops if does_work(node)}


def test_a_cpu_multiplies_rows_wherever_they_start() -> None:
    trace = tracefuse.capture(lambda a, b: a @ b, torch.randn(8, 16), torch.randn(16, 7)).trace
    assert {kind(node) for node in trace.ops} == {"matmul"}


def test_a_copy_for_a_matmul_alone_is_its_layout() -> None:
    def kinds(program: object) -> list[str]:
        trace = tracefuse.capture(program, torch.randn(4, 8, 4), torch.randn(16, 8)).trace  # type: ignore[call-overload]
        return [kind(node) for node in trace.ops if does_work(node)]

    assert kinds(lambda a, b: a.transpose(0, 1).reshape(8, 16) @ b) == ["matmul layout", "matmul"]
    assert kinds(lambda a, b: (c := a.transpose(0, 1).reshape(8, 16)) @ b + c.sum())[:2] == ["copy", "matmul"]


def layer(path: str, forward_us: float, backward_us: float, flops: tuple[int, int] = (0, 0), folded: str = "") -> Layer:
    parts = {"pointwise": backward_us} if backward_us else {}
    pairs = (forward_us, forward_us), (backward_us, backward_us)
    return Layer(path, "M", (1, 1), (1, 1), *pairs, (0, 0), "", (parts, parts), (flops, flops), folded)


def test_what_fuse_books_on_a_module_is_not_held_against_it() -> None:
    """The kernel of GELU's backward and the sum for a bias is one of the linear layer's."""
    capture = gpt()
    plain, fused = capture.variant(Config.off()).layers(), capture.optimize().layers()
    assert any("fused" in row.backward_kinds[1] and row.flops[1][0] for row in fused)
    assert (plain.out_of_line(), fused.out_of_line()) == (None, None)
    assert "out of line" not in str(fused)


def test_where_a_forward_follows_the_optimizer_there_is_no_ratio_and_no_verdict() -> None:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return model(x)

    v = tracefuse.capture(train).optimize()
    rows = v.layers()
    assert (rows.worst(), rows.out_of_line()) == (None, None)
    _, title, *lines, said, _ = str(rows).splitlines()
    assert said.startswith("No ratios and no slowest module: ")
    assert "optimizer.step()" in said
    assert said.endswith("Capture one step.")
    at = title.index("ratio"), title.index("share")
    assert {line[slice(*at)].strip(" ratioFLOPs") for line in lines} == {""}
    assert payload(v)["no_verdict"] == said


def test_a_gradient_penalty_is_told_another_remedy() -> None:
    model, x = nn.Linear(64, 1), torch.randn(32, 64, requires_grad=True)

    def penalised() -> None:
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().mean().backward()

    said = tracefuse.capture(penalised).optimize().layers().no_verdict
    assert said.endswith("Capture a part that is one forward and one backward.")


def test_gradients_that_are_asked_for_are_a_backward_with_a_verdict() -> None:
    model, x = nn.Linear(64, 64), torch.randn(32, 64)
    c = tracefuse.capture(lambda: torch.autograd.grad(model(x).square().mean(), list(model.parameters())))
    assert c.optimize().layers().worst() is not None


def test_accumulated_gradients_are_one_step_with_a_verdict() -> None:
    model, xs = nn.Linear(64, 64), torch.randn(2, 32, 64)
    v = tracefuse.capture(lambda: [model(x).square().mean().backward() for x in xs]).optimize()
    assert v.layers().worst() is not None
    assert payload(v)["no_verdict"] == ""


def test_beside_a_pinned_configuration_with_kernels_nothing_is_out_of_line() -> None:
    fused = gpt().optimize()
    times = fused.op_times, fused.op_times
    assert all(row.flops[0] == (0, 0) for row in layers(fused.trace, fused.trace, times))
    assert any(row.flops[1] != (0, 0) for row in layers(fused.trace, fused.trace, times))


def test_the_worst_and_the_one_that_is_out_of_line() -> None:
    rows = [
        layer("head", 10, 30, (1, 2)),
        layer("h.0", 3, 12, (1, 2), "h.*"),
        layer("h.1", 3, 12, (1, 2), "h.*"),
        layer("norm", 1, 9),
    ]
    found = Layers(rows, "modelled: by hand")
    worst, odd = found.worst(), found.out_of_line()
    assert worst is not None
    assert odd is not None
    assert (worst.name, worst.ratio, worst.expected_ratio, worst.excess_us) == ("head", 3, 2, 10)
    assert (odd.name, odd.count, odd.ratio, odd.excess_us) == ("h.*", 2, 4, 12)
    text = str(found)
    assert "head takes most of the backward, 48 %: pointwise 100 %" in text
    assert "h.* ×2 is out of line as captured: its backward takes 4 times its forward, its matmuls 2 times" in text
    fused = replace(layer("head", 10, 80, (1, 2)), backward_us=(21.0, 80.0))
    assert Layers([fused], "modelled: by hand").out_of_line() is None
    in_line = Layers([layer("head", 10, 21, (1, 2))], "modelled: by hand")
    assert in_line.out_of_line() is None


@pytest.mark.parametrize(("us", "unit", "cells"), [(90, "µs", ["30", "60"]), (1500, "ms", ["0.5", "1"])])
def test_long_steps_are_told_in_milliseconds(us: float, unit: str, cells: list[str]) -> None:
    _, title, line, *_ = str(Layers([layer("head", us / 3, us * 2 / 3)], "modelled: by hand")).splitlines()
    assert re.split("  +", title)[2:4] == [f"forward {unit}", f"backward {unit}"]
    assert re.split("  +", line)[2:4] == cells
    assert title.endswith("backward by kind")


def test_a_forward_alone_has_no_backward() -> None:
    rows = tracefuse.capture(nn.Linear(4, 4), torch.ones(2, 4)).optimize().layers()
    assert (rows.worst(), rows.out_of_line()) == (None, None)
    text = str(rows)
    assert "no backward in this program" in text.splitlines()
    assert "0 → 0" not in text


def test_modelled_times_of_a_program_on_a_cpu_say_that_they_are_not_its() -> None:
    assert "not of the CPU that it ran on" in captured("gpt").layers().provenance


def test_gradients_of_later_micro_batches_are_added_in_the_module_that_they_come_from() -> None:
    torch.manual_seed(0)
    conv = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    model = nn.Sequential(OrderedDict(conv=conv, head=nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5))))
    xs, ys = torch.randn(4, 2, 3, 8, 8), torch.randint(5, (4, 2))

    def step() -> None:
        for x, y in zip(xs, ys, strict=True):
            (nn.functional.cross_entropy(model(x), y) / 4).backward()

    variant = tracefuse.capture(step).optimize()
    rows = {row.name: row for row in variant.layers()}
    for name in ("conv.0", "conv.2", "head.1"):
        adding = [n for n in variant.program.backward.ops if origin(n).autograd == "AccumulateGrad"]
        assert sum(origin(n).module == name for n in adding) == 3 * 2, "a weight and a bias in each later micro-batch"
        assert rows[name].backward_us[1] > 0
        assert rows[name].ratio is not None
    outside = rows[OUTSIDE]
    assert sum(outside.backward_us) < 0.05 * sum(sum(row.backward_us) for row in rows.values())
    assert outside.ratio is None


def test_a_ratio_without_a_meaning_is_a_dash() -> None:
    one = Layer("h", "Block", (1, 1), (1, 1), (1.0, 0.001), (2.0, 2.0), (0, 0), "")
    assert one.ratio is None
    outside = replace(one, path="", module_type="", forward_us=(1.0, 1.0))
    assert outside.ratio is None
    assert replace(one, forward_us=(1.0, 1.0)).ratio == 2
    title, *lines = str(Layers([one, outside], "")).splitlines()[1:3]
    assert lines[0][title.index("ratio")] == "—"
