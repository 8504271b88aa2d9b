"""Gradients that nobody needs are found with what they cost, and wanted ones are not."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from findings import EveryGradient, EveryOutput, case, found
from torch import Tensor, nn

import tracefuse
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.findings.finding import Finding
from tracefuse.measure.op_times import OpTimes
from tracefuse.optimizers.ops import is_getitem
from tracefuse.optimizers.trace import origin

NAMES = (
    "gradient-without-optimizer",
    "gradient-of-data",
    "gradient-dropped",
    "frozen-weight-gradient",
    "gradient-unread",
)


def gradient_findings(capture: tracefuse.Capture, trace: Any = None) -> list[str]:
    return [one.id for one in diagnose(case(capture, trace)) if one.id in NAMES]


def two_layers(width: int = 256) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False))


# --- what no optimizer takes ------------------------------------------------------------------------------------------


def test_parameters_that_no_optimizer_takes() -> None:
    model, x = two_layers(), torch.randn(32, 256)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    assert c.optimizers == {"optimizer": {"_1_weight"}}
    assert gradient_findings(c) == ["gradient-without-optimizer"]
    (finding,) = found("gradient-without-optimizer", case(c))
    assert finding.title == "every backward computes the gradient of `0.weight`, which no optimizer updates"
    assert finding.evidence[0] == ("optimizers found", "`optimizer`: 1 of the 2 parameters with a gradient")
    assert finding.evidence[1] == ("only for that", "2 ops, 0 B saved by the forward")
    assert "loss = model(x)" in finding.source
    assert finding.severity == "high"
    assert finding.changes == {"freeze": ["0.weight"]}
    assert gradient_findings(c, c.optimize(**finding.changes, fuse=False).trace) == []
    optimizer.step()


@pytest.mark.parametrize("held", [(), (0, 1)])
def test_nothing_is_said_where_all_or_none_of_the_parameters_are_in_an_optimizer(held: tuple[int, ...]) -> None:
    model, x = two_layers(), torch.randn(32, 256)
    taken = [p for i in held for p in model[i].parameters()] or [nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(taken, lr=0.1)
    with tracefuse.capture() as c:
        model(x).square().mean().backward()
    assert gradient_findings(c) == []
    optimizer.step()


class Adversaries:
    """Nets and optimizers that no variable holds: two of one class step."""

    def __init__(self) -> None:
        self.nets = {"generator": nn.Linear(4, 8), "critic": nn.Linear(8, 1)}
        self.steps = [torch.optim.SGD(net.parameters(), 0.1, fused=True) for net in self.nets.values()]

    def fit(self, batches: list[Tensor]) -> None:
        for real in batches:
            self.step(self.nets["generator"], self.nets["critic"], *self.steps, real)

    def step(self, generator: nn.Module, critic: nn.Module, first: Any, second: Any, real: Tensor) -> None:
        fake = generator(torch.randn(8, 4))
        second.zero_grad()
        (critic(real) - critic(fake.detach())).square().mean().backward()
        second.step()
        first.zero_grad()
        critic(fake).mean().backward()
        first.step()


def test_two_optimizers_of_one_class_are_two() -> None:
    adversaries = Adversaries()
    with tracefuse.capture_step(n=3) as c:
        adversaries.fit([torch.randn(8, 8) for _ in range(5)])
    assert sorted(c.optimizers) == ["SGD", "SGD 2"]
    assert sum(map(len, c.optimizers.values())) == 4
    assert "gradient-without-optimizer" not in gradient_findings(c)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_was_computed_and_then_made_a_leaf_was_not_computed_for_nothing(is_leaf: bool) -> None:
    """As what a penalty on gradients is of: torch begins a graph there."""
    critic, real, fake = nn.Linear(8, 1), torch.randn(16, 8), torch.randn(16, 8)

    def step() -> None:
        between = 0.3 * real + 0.7 * fake
        if is_leaf:
            between.requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            (critic(fake).mean() + slope.norm(2, 1).mean()).backward()
        else:
            critic(fake).mean().backward()

    ids = [one.id for one in diagnose(case(tracefuse.capture(step)))]
    assert ("never-used" in ids) != is_leaf


@dataclass
class Trainer:
    optimizer: torch.optim.Optimizer


@pytest.mark.parametrize("keep", [Trainer, lambda one: [one], lambda one: {"rest": one}])
def test_optimizers_in_objects_lists_and_dicts_are_in_sight(keep: Any) -> None:
    model, x = two_layers(), torch.randn(32, 256)
    last = torch.optim.SGD(model[1].parameters(), lr=0.1)
    kept = keep(torch.optim.SGD(model[0].parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ConstantLR(last)
    with tracefuse.capture() as c:
        model(x).square().mean().backward()
    assert list(c.optimizers.values()) == [{"_1_weight"}, {"_0_weight"}]
    assert gradient_findings(c) == []
    assert kept
    assert scheduler.optimizer is last


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_gradient_of_data_beside_those_of_parameters() -> None:
    model, x = two_layers(), torch.randn(32, 256, requires_grad=True)
    with tracefuse.capture() as c:
        model(x).square().mean().backward()
    (finding,) = found("gradient-of-data", case(c))
    assert "the gradient of `x`, which is no parameter" in finding.title
    assert finding.severity == "medium"  # a fifth of the step, but who knows what `x.grad` is for
    assert finding.changes == {"freeze": ["x"]}
    assert gradient_findings(c, c.optimize(**finding.changes, fuse=False).trace) == []


def test_a_program_of_leaves_only_is_about_their_gradients() -> None:
    x = torch.randn(32, 256, requires_grad=True)
    assert gradient_findings(tracefuse.capture(lambda: x.square().sum().backward())) == []


# --- computed and dropped ---------------------------------------------------------------------------------------------


def test_a_backward_that_computes_the_gradient_of_a_frozen_weight() -> None:
    first, weight, x = nn.Linear(256, 256), torch.randn(256, 256), torch.randn(32, 256)
    with tracefuse.capture() as c:
        EveryGradient.apply(first(x), weight).square().mean().backward()
    assert [(one.op, one.origin.autograd) for one in c.dropped] == [("aten.mm.default", "EveryGradientBackward")]
    assert gradient_findings(c) == ["gradient-dropped"]
    (finding,) = found("gradient-dropped", case(c))
    assert ("written", "256 KiB") in finding.evidence
    assert ("by", "EveryGradientBackward") in finding.evidence
    assert "x @ weight.t()" in finding.source
    assert "of their sum (modelled: roofline" in finding.worth


def test_a_gradient_that_was_asked_for_and_let_go() -> None:
    a, b = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
    with tracefuse.capture() as c:
        to_a = torch.autograd.grad((a @ b).sum(), [a, b])[0]
    assert to_a is not None
    assert gradient_findings(c) == ["gradient-dropped"]


def test_a_gradient_that_a_variable_holds_or_python_reads_is_not_dropped() -> None:
    model, x, norms = two_layers(), torch.randn(32, 256), []
    model[0].weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    model[1].weight.register_hook(lambda gradient: norms.append(gradient.abs().max().item()))
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        both = torch.autograd.grad(loss, list(model.parameters()))
    assert len(both) == len(norms) == 2
    assert c.dropped == ()


def test_of_a_program_that_is_rewritten_nothing_is_said() -> None:
    weight, norms = nn.Parameter(torch.randn(64, 64)), []
    weight.register_hook(lambda gradient: norms.append(gradient.norm()))
    with tracefuse.capture() as c:
        grid = torch.ones(8, 64)
        grid[:, 0].mul_(2)
        (grid @ weight).sum().backward()
    assert len(norms) == 1
    assert c.dropped == ()


def test_an_op_that_computes_a_frozen_parameters_gradient_beside_what_is_read() -> None:
    first, frozen = nn.Conv2d(8, 8, 3), nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    x = torch.randn(2, 8, 16, 16)
    with tracefuse.capture() as c:
        EveryOutput.apply(first(x), frozen).square().mean().backward()
    assert gradient_findings(c) == ["frozen-weight-gradient"]
    (finding,) = found("frozen-weight-gradient", case(c))
    assert finding.title == "the backward computes 2.25 KiB that nothing reads, in 1 op"
    assert ("of", "1 frozen parameter: frozen") in finding.evidence
    assert gradient_findings(c, c.optimize(fuse=False).trace) == []


def test_a_gradient_is_worth_no_part_of_what_lays_out_the_operands() -> None:
    """A gradient of NCHW is copied for a convolution of channels_last, whichever gradients that is to compute."""
    first, frozen = nn.Conv2d(8, 8, 3), nn.Parameter(torch.randn(8, 8, 3, 3), requires_grad=False)
    x = torch.randn(2, 8, 16, 16)
    with tracefuse.capture() as c:
        EveryOutput.apply(first(x), frozen).square().mean().backward()
    (op,) = [n for n in c.trace.ops if origin(n).autograd == "EveryOutputBackward" and not is_getitem(n)]
    times = OpTimes({op.name: 1800.0, "elsewhere": 4200.0}, "measured on a test")
    alike, otherwise = (
        found("frozen-weight-gradient", replace(case(c), times=replace(times, laid_out_us=laid_out_us)))[0]
        for laid_out_us in ({}, {op.name: 600.0})
    )
    assert alike.kind == otherwise.kind == "predicted"
    assert alike.worth_us is not None
    assert alike.worth_us > 0
    assert otherwise.worth_us == pytest.approx(alike.worth_us * 1200 / 1800)


def test_what_becomes_the_memory_of_a_parameter_is_used() -> None:
    """An average of weights as contrastive learning writes it: no operator reads what `.data` is given."""
    follows, leads, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(8, 64)

    def step() -> None:
        with torch.no_grad():
            for slow, fast in zip(follows.parameters(), leads.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            keys = follows(x)
        torch.sin(x)  # used by nobody
        (leads(x) * keys).sum().backward()

    capture = tracefuse.capture(step)
    assert [one.op for one in capture.dropped] == ["aten.sin.default"]


# --- sums over steps --------------------------------------------------------------------------------------------------


class Trained:
    """A linear layer and its optimizer, and a sum of losses that is kept in one of several ways."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.tot = nn.Linear(8, 8), torch.randn(4, 8), torch.zeros(())
        self.mean, self.bias, self.shown = torch.randn(8), nn.Parameter(torch.zeros(8)), torch.zeros(4, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def summed(self) -> None:
        loss = self.loss()
        self.tot = self.tot + loss

    def added_in_place(self) -> None:
        loss = self.loss()
        self.tot += 0.5 * loss

    def with_the_sum_behind(self) -> None:
        loss = self.loss()
        self.tot = loss + self.tot

    def over_several_lines(self) -> None:
        loss = self.loss()
        self.tot = (  # as a formatter breaks what is long
            self.tot
            + loss
        )  # fmt: skip

    def with_a_mean(self) -> None:
        self.loss()
        self.shown = self.model(self.x) * 2
        self.shown = self.shown + self.mean

    def with_a_bias(self) -> None:
        self.loss()
        self.shown = self.model(self.x)
        self.shown = self.bias + self.shown

    def from_data(self) -> None:
        self.loss()
        self.shown = self.x
        self.shown = self.shown + self.model(self.x)

    def detached(self) -> None:
        loss = self.loss()
        self.tot = self.tot + loss.detach()

    def as_numbers(self) -> None:
        self.tot += self.loss().item()

    def trained_on(self) -> None:
        self.optimizer.zero_grad()
        state = self.x
        for _ in range(2):
            state = state + self.model(state)
        state.square().mean().backward()


def unrecorded_branch(one: Trained) -> None:
    """A target whose forward adds to its input, and whose graph nobody keeps."""
    one.optimizer.zero_grad()
    state = one.x
    state = state + one.model(state)
    wanted = state.detach()
    del state
    (one.model(one.x) - wanted).square().mean().backward()


def growing(
    way: Callable[[Trained], None], before: int, one: Trained | None = None
) -> tuple[tracefuse.Capture, list[Finding]]:
    one = one or Trained()
    for _ in range(before):
        way(one)
    capture = tracefuse.capture(lambda: way(one))
    return capture, [found for found in capture.findings() if found.id == "growing-graph"]


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize(
    ("way", "instead"),
    [
        (Trained.summed, "`self.tot = self.tot + loss.detach()`"),
        (Trained.added_in_place, "`self.tot += (0.5 * loss).detach()`"),
        (Trained.over_several_lines, "`self.tot = self.tot + loss.detach()`"),
        (Trained.with_the_sum_behind, "`self.tot = self.tot + loss.detach()`"),
    ],
)
def test_a_sum_of_losses_with_their_graphs_grows(way: Callable[[Trained], None], instead: str, before: int) -> None:
    capture, (finding,) = growing(way, before)
    lines, begin = inspect.getsourcelines(way)
    at = int(re.match(r"test_gradient_findings\.py:(\d+)  ", finding.source)[1])  # type: ignore[index]
    assert begin + 2 <= at < begin + len(lines)  # behind the line of the loss
    assert finding.fix == f"{instead}; `.item()` in place of `.detach()` makes the host wait for the GPU"
    assert all(instead in said and "keeps the graph of every step" in said for said in capture.unrecorded)


@pytest.mark.parametrize(
    "way",
    [
        Trained.detached,
        Trained.as_numbers,
        Trained.trained_on,
        Trained.with_a_mean,
        Trained.with_a_bias,
        Trained.from_data,
        unrecorded_branch,
    ],
)
def test_sums_without_graphs_and_sums_that_are_trained_on_do_not_grow(way: Callable[[Trained], None]) -> None:
    assert not growing(way, 2)[1]


def loop_that_keeps(kept: str, capture: Any) -> list[Finding]:
    """What is found of four steps, each of two backwards, that put into one of these lists."""
    losses, outputs, numbers, detached, of_a_step = (list[Any]() for _ in range(5))
    model, x = nn.Linear(8, 1), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture() as c:
        for _ in range(4):
            optimizer.zero_grad()
            of_a_step.clear()
            for _ in range(2):
                out = model(x)
                loss = out.square().mean()
                loss.backward()
                if kept == "losses":
                    losses.append(loss)
                if kept == "outputs":
                    outputs.append(out * 2)
                if kept == "numbers":
                    numbers.append(loss.item())
                if kept == "detached":
                    detached.append(loss.detach())
                if kept == "of a step":
                    of_a_step.append(loss)
            optimizer.step()
    return [found for found in c.findings() if found.id == "growing-graph"]


A_CELL, A_STEP = tracefuse.capture, functools.partial(tracefuse.capture_step, n=3)


@pytest.mark.parametrize("capture", [A_CELL, A_STEP])
def test_a_list_of_losses_with_their_graphs_grows(capture: Any) -> None:
    (finding,) = loop_that_keeps("losses", capture)
    assert finding.title == "a list over steps keeps the graph of every step"
    assert re.fullmatch(r"test_gradient_findings\.py:\d+  losses\.append\(loss\)", finding.source)
    assert finding.code == "losses.append(loss.detach())"


class Trainer:
    """A loop that keeps its losses in a list of its own."""

    def __init__(self, way: str) -> None:
        self.way, self.losses = way, list[Tensor]()
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self) -> None:
        for _ in range(5):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(3, 4)).square().mean()
            loss.backward()
            if self.way == "appended":
                self.losses.append(loss)
            elif self.way == "added":
                self.losses += [loss]
            elif self.way == "numbers":
                self.losses += [loss.detach()]
            self.optimizer.step()


@pytest.mark.parametrize("way", ["appended", "added", "numbers"])
def test_a_list_that_is_an_attribute_grows_too(way: str) -> None:
    trainer = Trainer(way)
    with tracefuse.capture_step(n=3) as c:
        trainer.train()
    found = [one for one in c.findings() if one.id == "growing-graph"]
    assert [one.code for one in found] == ["self.losses.append(loss.detach())"] * (way != "numbers")
    assert all("self.losses" in one.source for one in found)


def test_a_list_of_outputs_with_their_graphs_grows() -> None:
    (finding,) = loop_that_keeps("outputs", A_STEP)
    assert finding.code == "outputs.append((out * 2).detach())"


@pytest.mark.parametrize("capture", [A_CELL, A_STEP])
@pytest.mark.parametrize("kept", ["numbers", "detached", "of a step"])
def test_lists_without_graphs_and_those_of_one_step_do_not_grow(kept: str, capture: Any) -> None:
    assert not loop_that_keeps(kept, capture)


@pytest.mark.parametrize("count", [1, 3])
def test_a_list_of_the_losses_of_several_optimizers_grows_over_steps_alone(count: int) -> None:
    """As of a generator and a discriminator: a step has an update of each."""
    nets, losses = [nn.Linear(4, 1), nn.Linear(4, 2)], list[Tensor]()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with tracefuse.capture() as c:
        for _ in range(count):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(torch.ones(3, 4)).square().mean()
                loss.backward()
                losses.append(loss)
                optimizer.step()
    assert any(found.id == "growing-graph" for found in c.findings()) == (count > 1)


def test_a_list_may_hold_what_autograd_says_nothing_of() -> None:
    """A view made without gradients, of what was written to with them."""
    weight, held = nn.Parameter(torch.ones(4)), list[Tensor]()
    with tracefuse.capture() as c:
        total = torch.zeros(3, 4)
        with torch.no_grad():
            held.append(total[0])
        (total.mul_(weight).sum() + weight.sum()).backward()
    assert all(found.id != "growing-graph" for found in c.findings())


@pytest.mark.parametrize("kind", [Trained.summed, Trained.detached])
def test_the_step_of_a_graph_that_nobody_differentiates_compiles_with_and_without_its_remedy(kind: Any) -> None:
    one = Trained()
    growing(kind, 2, one)[0].optimize().compile()
