"""Rates and counts of steps: what an optimizer that is not fused computes in Python of them is computed at each call, and what
changes after the capture (rates, groups of parameters) is followed or refused."""

from __future__ import annotations

import copy
import functools
import importlib.util
import types
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from whole_step_loops import NEAR, Falling, FallingByHook, Loop, captured, check, data_of

import tracefuse
from tracefuse.errors import ExportError
from tracefuse.training.formulas import OF_KIND

OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW, amsgrad": {"amsgrad": True},
    "AdamW, no decay": {"weight_decay": 0.0},
    "Adam": {"weight_decay": 0.1},
    "Adam, decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "Adam, maximize": {"maximize": True},
    "Adamax": {},
    "Adagrad": {},
    "Adagrad, slower": {"lr_decay": 0.1},
    "SGD": {},
    "SGD, momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "RMSprop": {},
    "RMSprop, momentum": {"momentum": 0.9, "centered": True},
    "Adadelta": {},
}


def loop_of(text: str, **further: Any) -> type[Loop]:
    kind, options = text.partition(",")[0], OPTIONS[text] | further

    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            first, *others = self.model.parameters()  # two groups, of which one is scheduled apart
            groups = [{"params": [first], "lr": 0.02}, {"params": others}]
            return getattr(optim, kind)(groups, lr=0.01, **options)

        def more(self) -> None:
            factors = [lambda at: 1 / (1 + at), lambda at: 0.9**at]
            self.schedule = lr_scheduler.LambdaLR(self.opt, factors)

        def between(self) -> None:
            self.schedule.step()

    return Made


def test_every_kind_is_tried() -> None:
    assert {text.partition(",")[0] for text in OPTIONS} == set(OF_KIND)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("text", OPTIONS)
def test_ten_steps_are_eagers_with_a_rate_that_changes_in_each(text: str, foreach: bool) -> None:
    check(loop_of(text, foreach=foreach))


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (
            optim.AdamW,
            {"lr": 0.01, "weight_decay": 0.1},
        ),  # 1 - 0.01 * 0.1 is 0.999, with which exp_avg_sq is multiplied too
        (optim.SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 1.5}),  # what the momentum adds is -0.5 times a gradient
    ],
    ids=["AdamW", "SGD"],
)
def test_a_number_that_another_op_takes_for_the_state_is_the_one_of_the_weights(
    kind: Any, options: dict[str, Any], foreach: bool
) -> None:
    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            return kind(self.model.parameters(), foreach=foreach, **options)

        def between(self) -> None:
            self.opt.param_groups[0]["lr"] *= 0.9 if len(self.seen) > 4 else 1
            self.seen.append(None)

        def more(self) -> None:
            self.seen: list[None] = []

    check(Made)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
def test_the_exported_step_counts_as_well(foreach: bool, tmp_path: Path) -> None:
    kind = loop_of("AdamW", foreach=foreach)
    ours, theirs, eager, data = kind(), kind(), kind(), data_of(14)
    variant = captured(ours, data[:4])
    path = variant.export(tmp_path / "step.py")
    for batch in data[:4]:
        for loop in (theirs, eager):
            loop.step(*batch)
            loop.between()
    module = module_of(path)
    assert module.check()
    step = module.bind(theirs.model, theirs.opt)
    for batch in data[4:]:
        step(*batch)
        theirs.between()
        eager.step(*batch)
        eager.between()
    assert farthest(theirs, eager) < NEAR
    assert {float(entries["step"]) for entries in theirs.opt.state.values()} == {14.0}


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
def test_rprop_reads_its_rate_in_the_first_step_alone(foreach: bool) -> None:
    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            return optim.Rprop(self.model.parameters(), lr=0.01, foreach=foreach)

        def more(self) -> None:
            self.schedule = lr_scheduler.ExponentialLR(self.opt, 0.9)

        def between(self) -> None:
            self.schedule.step()

    check(Made)


# --- several optimizers in one line -----------------------------------------------------------------------------------


class InOneLine(Loop):
    """Two optimizers that are stepped by one line, each with a schedule of its own."""

    kinds: tuple[Any, Any] = (optim.SGD, optim.AdamW)
    rates = (0.05, 0.01)
    scheduled = 2

    def optimizer(self) -> optim.Optimizer:
        one, other = self.kinds
        matrices, others = (
            [p for p in self.model.parameters() if (p.dim() == 2) is wanted] for wanted in (True, False)
        )
        self.opts = [one(matrices, lr=self.rates[0]), other(others, lr=self.rates[1])]
        return self.opts[0]

    def more(self) -> None:
        self.other = self.opts[1]
        factors = (lambda at: 1 / (1 + at)), (lambda at: 0.9**at)
        pairs = list(zip(self.opts, factors, strict=True))
        self.schedules = [lr_scheduler.LambdaLR(opt, factor) for opt, factor in pairs[-self.scheduled :]]

    def step(self, *data: Tensor) -> None:
        for opt in self.opts:
            opt.zero_grad()
        self.loss(*data).backward()
        for opt in self.opts:
            opt.step()

    def between(self) -> None:
        for schedule in self.schedules:
            schedule.step()


def in_one_line(one: Any, other: Any, rates: tuple[float, float] = (0.05, 0.01), scheduled: int = 2) -> type[InOneLine]:
    return type("Made", (InOneLine,), {"kinds": (one, other), "rates": rates, "scheduled": scheduled})


FUSED = functools.partial(optim.Adam, fused=True)
PAIRS = {
    "SGD, AdamW": in_one_line(optim.SGD, optim.AdamW),
    "alike": in_one_line(optim.Adam, optim.Adam),
    "equal rates, one scheduled": in_one_line(optim.SGD, optim.SGD, (0.1, 0.1), 1),
    "lists": in_one_line(functools.partial(optim.RMSprop, foreach=True), functools.partial(optim.AdamW, foreach=True)),
    "fused, not fused": in_one_line(FUSED, optim.Adam),
    "Muon, AdamW": in_one_line(optim.Muon, optim.AdamW, scheduled=1),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_that_one_line_steps_are_followed(name: str) -> None:
    check(PAIRS[name])


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_that_one_line_steps_are_exported(name: str, tmp_path: Path) -> None:
    ours, theirs, eager = (PAIRS[name]() for _ in range(3))
    data = data_of(14)
    path = captured(ours, data[:4]).export(tmp_path / "step.py")
    for batch in data[:4]:
        for loop in (theirs, eager):
            loop.step(*batch)
            loop.between()
    step = module_of(path).bind(theirs.model, theirs.opts)
    for batch in data[4:]:
        step(*batch)
        theirs.between()
        eager.step(*batch)
        eager.between()
    assert farthest(theirs, eager) < NEAR


class OfOneRate(InOneLine):
    """Muon's number is that of SGD where a matrix is wider than high, and is not followed."""

    def optimizer(self) -> optim.Optimizer:
        wide, others = self.model[3].weight, [p for p in self.model.parameters() if p is not self.model[3].weight]
        self.opts = [optim.SGD(others, lr=0.1), optim.Muon([wide], lr=0.1, weight_decay=0.0)]
        return self.opts[0]

    def more(self) -> None:
        super().more()
        self.schedules = [lr_scheduler.LambdaLR(opt, lambda at: 1 / (1 + at)) for opt in self.opts]


def test_a_number_of_another_optimizer_in_the_line_is_not_followed_though_it_is_equal() -> None:
    with pytest.raises(ExportError, match=r"cannot follow a Python number .*: take another optimizer, such as [^:]*$"):
        captured(OfOneRate(), data_of(4)).compile()


def test_a_capture_is_exported_when_its_optimizers_are_gone_and_not_compiled(tmp_path: Path) -> None:
    variant = captured(PAIRS["alike"](), data_of(4))
    assert "'loop.other'" in variant.export(tmp_path / "step.py").read_text()
    with pytest.raises(
        ExportError, match=r"the optimizer loop.opt is gone, .*: keep it in a variable, and capture again"
    ):
        variant.compile()


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("kind", [optim.NAdam, optim.RAdam])
def test_only_the_optimizer_that_is_not_followed_is_to_be_replaced(kind: Any, is_fused: bool) -> None:
    with pytest.raises(ExportError) as raised:
        captured(in_one_line(functools.partial(optim.Adam, fused=is_fused), kind)(), data_of(4)).compile()
    assert f"make {kind.__name__} on a GPU" in str(raised.value)
    assert "Adam " not in str(raised.value).replace(f"{kind.__name__} ", "")


def test_steps_of_one_capture_each_read_the_rate_that_is() -> None:
    """They share the tensor that a rate is written to."""
    loop, data = loop_of("AdamW", fused=True)(), data_of(7)
    variant = captured(loop, data[:4])
    steps = variant.compile(), variant.with_config(fuse=False).compile()
    expected = copy.deepcopy(loop)
    rates = [group["lr"] for group in loop.opt.param_groups]
    for at, batch in enumerate(data[4:]):
        for one in (loop, expected):
            for group, rate in zip(one.opt.param_groups, rates, strict=True):
                group["lr"] = rate * (1.0, 0.0, 1.0)[at]
        steps[at % 2](*batch)
        expected.step(*batch)
    for mine, own in zip(loop.model.parameters(), expected.model.parameters(), strict=True):
        torch.testing.assert_close(mine, own)


# --- files and checkpoints --------------------------------------------------------------------------------------------


def test_a_step_may_be_exported_when_it_has_trained_and_holds_what_was_captured(tmp_path: Path) -> None:
    loop, data = loop_of("AdamW", foreach=True)(), data_of(8)
    variant = captured(loop, data[:4])
    before = variant.export(tmp_path / "before.py").read_text()
    step = variant.compile()
    for batch in data[4:]:
        step(*batch)
        loop.between()
    after = (
        variant.with_config(simplify=False).export(tmp_path / "after.py").read_text()
    )  # with nothing kept of the first
    drawn = [text.partition("UPDATE_DRAWN = {")[2].partition("}")[0] for text in (before, after)]
    assert drawn[0] == drawn[1]
    assert "'root'" in drawn[0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            lambda p: optim.AdamW(p, lr=0.01),
            r"the optimizer has no exp_avg of .*: before the step is bound, let it make a step",
        ),
        (
            lambda p: optim.SGD(p, lr=0.01),
            r"no \w+, with which the step was captured: pass an optimizer of the captured kind",
        ),
    ],
    ids=["no step yet", "another kind"],
)
def test_an_optimizer_that_a_file_cannot_be_bound_to_is_refused(other: Any, said: str, tmp_path: Path) -> None:
    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            return optim.AdamW(self.model.parameters(), lr=0.01)

    path = captured(loop := Made(), data_of(4)).export(tmp_path / "step.py")
    with pytest.raises(ValueError, match=said):
        module_of(path).bind(loop.model, other(loop.model.parameters()))


def module_of(path: Any) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("exported_step_of_a_count", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def farthest(one: Loop, other: Loop) -> float:
    mine, theirs = one.left(), other.left()
    return max(float((mine[key].double() - theirs[key].double()).abs().max()) for key in theirs)


def test_a_checkpoint_sets_the_count_back() -> None:
    kind = loop_of("AdamW", foreach=True)
    ours, eager, data = kind(), kind(), data_of(12)
    step = captured(ours, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
        eager.between()
    kept = [copy.deepcopy([one.state_dict() for one in (loop.model, loop.opt)]) for loop in (ours, eager)]
    for again in range(2):
        for loop, (model, opt) in zip((ours, eager), kept, strict=True):
            if again:
                loop.model.load_state_dict(model)
                loop.opt.load_state_dict(copy.deepcopy(opt))
        for batch in data[4:8]:
            step(*batch)
            eager.step(*batch)
    assert farthest(ours, eager) < NEAR
    assert {float(entries["step"]) for entries in ours.opt.state.values()} == {8.0}


def test_steps_of_the_program_s_own_may_come_between() -> None:
    kind = loop_of("Adam")
    ours, eager, data = kind(), kind(), data_of(10)
    step = captured(ours, data[:4]).compile()
    for at, batch in enumerate(data):
        eager.step(*batch)
        if at >= 4:
            ours.step(*batch) if at % 2 else step(*batch)
    assert {float(entries["step"]) for entries in ours.opt.state.values()} == {10.0}


def test_counts_that_have_parted_are_refused() -> None:
    loop, data = loop_of("AdamW")(), data_of(5)
    step = captured(loop, data[:4]).compile()
    state = loop.opt.state_dict()
    state["state"][1]["step"] = torch.tensor(9.0)
    loop.opt.load_state_dict(state)
    said = r"parameters of loop.opt.param_groups\[1\] have made 4 and 9 steps, .* capture it again"
    with pytest.raises(ValueError, match=said):
        step(*data[4])


def test_a_batch_that_is_called_as_a_number_is_stays_itself() -> None:
    """Names of numbers are the step's own, those of a second group too."""

    class Sized(Loop):
        def optimizer(self) -> optim.Optimizer:
            first, *others = self.model.parameters()
            return optim.AdamW([{"params": [first]}, {"params": others, "lr": 0.02}], lr=0.01)

        def loss(self, size: Tensor, size_1: Tensor) -> Tensor:  # type: ignore[override]
            return (self.model(size) * size_1).sum()

        def step(self, size: Tensor, size_1: Tensor) -> None:  # type: ignore[override]
            self.zero()
            self.loss(size, size_1).backward()
            self.opt.step()

    check(Sized)


class Late(Loop):
    """One parameter has made fewer steps than the others of its group: they have no one number."""

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.model.parameters(), lr=0.01)

    def zero(self) -> None:
        super().zero()
        seen = len(self.opt.state)
        self.model[0].weight.requires_grad_(bool(seen))


def test_counts_that_differ_when_it_is_captured_are_refused() -> None:
    with pytest.raises(ExportError, match="make AdamW with `fused=True`"):
        captured(Late(), data_of(4)).compile()


class Own(optim.AdamW):
    """Another optimizer, which only looks like it."""


def test_an_optimizer_of_ones_own_is_refused() -> None:
    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            return Own(self.model.parameters(), lr=0.01)

    with pytest.raises(ExportError, match="`fused=True`"):
        captured(Made(), data_of(4)).compile()


def test_a_scaler_that_asks_whether_gradients_are_finite_is_refused() -> None:
    """It steps or not by what the host reads, which is no count."""

    class Made(Loop):
        def optimizer(self) -> optim.Optimizer:
            return optim.AdamW(self.model.parameters(), lr=0.01)

        def more(self) -> None:
            self.scaler = torch.amp.GradScaler("cpu")

        def step(self, *data: Tensor) -> None:
            self.zero()
            self.scaler.scale(self.loss(*data)).backward()
            self.scaler.step(self.opt)
            self.scaler.update()

    with pytest.raises(ExportError, match=r"the host reads 0.0 of a tensor in .*scaler.step.*`fused=True`"):
        captured(loop := Made(), data_of(4)).compile()
    del loop


def trained_beside(kind: type[Loop], dtype: torch.dtype) -> tuple[Loop, Loop]:
    """A loop whose fifth step and those behind it are compiled ones, and eager's, of the same data."""
    ours, eager = kind(), kind()
    data = [[one.to(dtype) for one in batch] for batch in data_of(9)]
    step = captured(ours, data[:4]).compile()
    for at, batch in enumerate(data):
        eager.step(*batch)
        if at >= 4:
            step(*batch)
            ours.between()
        eager.between()
    return ours, eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_computed_as_aten_computes_them(dtype: torch.dtype) -> None:
    """With numbers in float32: a bias correction that is rounded to bfloat16 is off by up to 0.4 %."""

    class Made(Loop):
        def prepare(self) -> None:
            self.model = self.model.to(dtype)

        def optimizer(self) -> optim.Optimizer:
            return optim.AdamW(self.model.parameters(), lr=0.01)

    ours, eager = trained_beside(Made, dtype)
    assert farthest(ours, eager) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("text", [text for text in OPTIONS if text.startswith(("SGD", "RMSprop", "Adadelta"))])
def test_a_rate_that_aten_adds_with_is_rounded_as_aten_rounds_it(text: str, foreach: bool, dtype: torch.dtype) -> None:
    """To the parameters' type on a CPU, to the last bit; all sizes are whole vectors, behind which ATen rounds once more."""
    kind = loop_of(text, foreach=foreach)

    class Made(kind):  # type: ignore[misc, valid-type]
        def prepare(self) -> None:
            self.model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 64)).to(dtype)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return self.model(x).square().mean() * y.square().mean()

    ours, eager = trained_beside(Made, dtype)
    mine, theirs = ours.left(), eager.left()
    assert {name for name in theirs if not torch.equal(mine[name], theirs[name])} == set()


# --- rates and groups that change after the capture -------------------------------------------------------------------


def test_a_group_that_was_added_is_refused_by_number() -> None:
    loop, data = Loop(), data_of(5)
    step = captured(loop, data[:4]).compile()
    loop.opt.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    with pytest.raises(
        ValueError, match="opt has 2 parameter groups, and the step was captured with 1: capture it again"
    ):
        step(*data[4])


class Shared(Loop):
    """One tensor is the learning rate of two groups."""

    def optimizer(self) -> torch.optim.Optimizer:
        rate = torch.tensor(0.01, dtype=torch.float64)
        groups = [{"params": list(layer.parameters())} for layer in (self.model[0], self.model[3])]
        return torch.optim.AdamW(groups, lr=rate, fused=True)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1, dtype=torch.float64)], ids=["number", "tensor"])
def test_a_rate_that_groups_shared_is_not_changed_for_one_of_them(at: int, rate: float | Tensor) -> None:
    loop, data = Shared(), data_of(5)
    step = captured(loop, data[:4]).compile()
    shared, before = loop.opt.param_groups[0]["lr"], loop.left()
    before = {name: one.clone() for name, one in before.items()}
    loop.opt.param_groups[at]["lr"] = rate
    said = r"opt.param_groups\[0\] and loop.opt.param_groups\[1\] had one tensor as their lr .* capture the step again"
    with pytest.raises(ValueError, match=said):
        step(*data[4])
    assert float(shared) == 0.01
    assert all(torch.equal(one, before[name]) for name, one in loop.left().items())


def test_a_rate_that_groups_shared_and_that_changes_for_all_is_followed() -> None:
    ours, eager, data = Shared(), Shared(), data_of(7)
    step = captured(ours, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
    for at, batch in enumerate(data[4:]):
        for loop in (ours, eager):
            if at == 0:
                loop.opt.param_groups[0]["lr"].fill_(0.1)
            for group in loop.opt.param_groups if at else ():
                group["lr"] = torch.tensor(0.1 + at, dtype=torch.float64)
        step(*batch)
        eager.step(*batch)
    theirs = eager.left()
    assert max(float((one - theirs[name]).detach().abs().max()) for name, one in ours.left().items()) < NEAR


class Mine(torch.optim.SGD):
    """An optimizer of one's own: tensor by tensor it computes with the learning rate as a number."""


class Plain(Loop):
    def optimizer(self) -> torch.optim.Optimizer:
        return Mine(self.model.parameters(), lr=0.1, fused=self.fused)

    fused = False


class FusedPlain(Plain):
    fused = True


@pytest.mark.parametrize("when", ["before compiling", "after compiling"])
def test_a_rate_that_the_update_computes_with_is_refused_with_what_lets_it_change(when: str) -> None:
    loop, data = Plain(), data_of(5)
    variant = captured(loop, data[:4])
    step = variant.compile() if when == "after compiling" else None
    loop.opt.param_groups[0]["lr"] = 0.05
    said = r"\['lr'\] is 0.05, .* with 0.1: for a rate that changes make Mine with `fused=True`, and capture it again$"
    with pytest.raises(ValueError, match=said):
        (step or variant.compile())(*data[4])


def test_what_the_refusal_of_another_rate_says_lets_it_change() -> None:
    loop, eager, data = FusedPlain(), FusedPlain(), data_of(5)
    step = captured(loop, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
    for one in (loop, eager):
        one.opt.param_groups[0]["lr"] = 0.05
    step(*data[4])
    eager.step(*data[4])
    theirs = eager.left()
    assert max(float((one - theirs[name]).detach().abs().max()) for name, one in loop.left().items()) < NEAR


# --- what nobody may change without being told ------------------------------------------------------------------------


def test_counts_that_part_behind_the_binding_are_refused_at_the_call() -> None:
    loop, data = loop_of("AdamW")(), data_of(6)
    step = captured(loop, data[:4]).compile()
    step(*data[4])
    next(iter(loop.opt.state.values()))["step"].fill_(2.0)
    loop.opt.state[loop.model[3].bias]["step"].fill_(9.0)
    with pytest.raises(ValueError, match=r"have made 5 and 9 steps, .* capture it again"):
        step(*data[5])


@pytest.mark.parametrize("how", ["cleared", "made anew"])
def test_a_state_that_is_gone_is_refused(how: str) -> None:
    loop, data = Loop(), data_of(5)
    step = captured(loop, data[:4]).compile()
    if how == "cleared":
        loop.opt.state.clear()
    else:
        loop.opt.state = defaultdict(dict)
    with pytest.raises(ExportError, match=r"the optimizer loop.opt has no \w+ of 0.weight any more: load its state"):
        step(*data[4])


def step_of(loop: Loop, variant: Any, is_exported: bool, tmp_path: Path) -> Any:
    """The compiled step, or that of its file, on the loop's own model and optimizer."""
    if not is_exported:
        return variant.compile()
    return module_of(variant.export(tmp_path / "step.py")).bind(loop.model, loop.opt)


exported = pytest.mark.parametrize("is_exported", [False, True], ids=["live", "exported"])


class OfATensor(Falling):
    """Several lines of this file may have changed it, so that none is told."""

    def step(self, *data: Tensor) -> None:
        self.zero()
        self.loss(*data).backward()
        self.opt.step()
        self.after()

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64), fused=True)

    def after(self) -> None:
        for group in self.opt.param_groups:
            group["lr"].mul_(0.8)


class OfOneTensorAfterAnother(OfATensor):
    def after(self) -> None:
        for group in self.opt.param_groups:
            group["lr"] = torch.tensor(0.8 * float(group["lr"]), dtype=torch.float64)


@exported
@pytest.mark.parametrize("kind", [Falling, FallingByHook, OfATensor])
def test_a_rate_that_the_step_changed_itself_is_told_when_it_stays(
    kind: type[Falling], is_exported: bool, tmp_path: Path
) -> None:
    loop, data = kind(), data_of(8)
    step = step_of(loop, captured(loop, data[:4]), is_exported, tmp_path)
    step(x=data[4][0], y=data[4][1])
    line = "" if kind is OfATensor else r', or do what whole_step_loops.py:\d+  group\["lr"\] \*= 0.8 does,'
    said = rf"the lr of loop.opt.param_groups\[0\] changed .*Call `scheduler.step\(\)`{line} behind each call"
    with pytest.warns(UserWarning, match=said) as told:
        step(x=data[5][0], y=data[5][1])
    assert [one.filename for one in told] == [__file__]
    with warnings.catch_warnings(record=True) as more:  # as errors they would end no call
        warnings.simplefilter("always")
        step(x=data[6][0], y=data[6][1])
    assert not more


@pytest.mark.parametrize("kind", [Falling, FallingByHook, OfATensor, OfOneTensorAfterAnother])
def test_a_rate_that_the_program_goes_on_to_change_is_eagers_and_nothing_is_told(kind: type[Falling]) -> None:
    ours, eager, data = kind(), kind(), data_of(8)
    step = captured(ours, data[:4]).compile()
    for batch in data[:4]:
        eager.step(*batch)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for batch in data[4:]:
            eager.step(*batch)
            step(*batch)
            ours.lower() if kind is FallingByHook else ours.after()
    assert not told
    assert farthest(ours, eager) < NEAR


class WarmingUp(Loop):
    """Its schedule raises the rate for five steps, and then writes the same one again and again."""

    def more(self) -> None:
        self.schedule = lr_scheduler.LambdaLR(self.opt, lambda at: min(1.0, (at + 1) / 5))

    def after(self) -> None:
        self.schedule.step()


@exported
def test_a_rate_that_its_schedule_writes_again_as_it_was_is_not_told(is_exported: bool, tmp_path: Path) -> None:
    loop, data = WarmingUp(), data_of(10)
    step = step_of(loop, captured(loop, data[:4]), is_exported, tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for x, y in data[4:]:
            step(x=x, y=y)
            loop.after()
    assert loop.opt.param_groups[0]["lr"] == loop.schedule.base_lrs[0]
    assert not told


@exported
@pytest.mark.parametrize("what", ["an entry", "all entries of a parameter"])
def test_an_entry_of_the_state_that_is_replaced_is_followed(what: str, is_exported: bool, tmp_path: Path) -> None:
    ours, eager, data = Loop(), Loop(), data_of(8)
    variant = captured(ours, data[:4])
    step = step_of(ours, variant, is_exported, tmp_path)
    for batch in data[:4]:
        eager.step(*batch)
    for at, (x, y) in enumerate(data[4:]):
        for loop in (ours, eager) if at == 2 else ():
            state, weight = loop.opt.state, loop.model[0].weight
            if what == "an entry":
                state[weight]["exp_avg"] = torch.full_like(weight, 0.5)
            else:
                state[weight] = {key: one.clone() + 1 for key, one in state[weight].items()}
        step(x=x, y=y)
        eager.step(x, y)
    assert farthest(ours, eager) < NEAR


@exported
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_parameter_that_is_frozen_is_refused_until_it_is_trained_again(
    when: str, is_exported: bool, tmp_path: Path
) -> None:
    ours, eager, data = Loop(), Loop(), data_of(6)
    variant, weight = captured(ours, data[:4]), ours.model[0].weight
    if when == "before":
        weight.requires_grad_(False)
    step = step_of(ours, variant, is_exported, tmp_path)
    weight.requires_grad_(False)
    before = {name: one.clone() for name, one in ours.left().items()}
    said = r"0.weight has requires_grad=False, and had True before: .* Set it back \(`requires_grad_\(True\)`\), or capture"
    with pytest.raises(ValueError, match=said):
        step(x=data[4][0], y=data[4][1])
    assert all(torch.equal(one, before[name]) for name, one in ours.left().items())
    weight.requires_grad_(True)
    for batch in data[:4]:
        eager.step(*batch)
    for x, y in data[4:]:
        step(x=x, y=y)
        eager.step(x, y)
    assert farthest(ours, eager) < NEAR


class Frozen(Loop):
    """The last bias is not trained."""

    def prepare(self) -> None:
        self.model[3].bias.requires_grad_(False)


@exported
def test_a_parameter_that_is_trained_only_now_is_refused(is_exported: bool, tmp_path: Path) -> None:
    loop, data = Frozen(), data_of(6)
    step = step_of(loop, captured(loop, data[:4]), is_exported, tmp_path)
    step(x=data[4][0], y=data[4][1])
    loop.model[3].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"3.bias has requires_grad=True, .* a compiled step leaves it as it is"):
        step(x=data[5][0], y=data[5][1])


class Critical(Loop):
    """The loss is what a critic says, which another loop trains."""

    def prepare(self) -> None:
        self.critic = torch.nn.Linear(3, 1).double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.critic(self.model(x) - y).square().mean()

    def zero(self) -> None:
        self.opt.zero_grad()
        self.critic.zero_grad()


class CriticalFrozen(Critical):
    def step(self, *data: Tensor) -> None:
        self.critic.requires_grad_(False)
        super().step(*data)
        self.critic.requires_grad_(True)


@exported
@pytest.mark.parametrize("kind", [Critical, CriticalFrozen])
def test_a_parameter_that_the_step_does_not_update_may_be_frozen_and_trained(
    kind: type[Critical], is_exported: bool, tmp_path: Path
) -> None:
    ours, eager, data = kind(), kind(), data_of(7)
    variant = captured(ours, data[:4])
    if is_exported:
        module = module_of(variant.export(tmp_path / "step.py"))
        step = module.bind([{"critic": ours.critic}.get(name, ours.model) for name in module.MODELS], ours.opt)
    else:
        step = variant.compile()
    for batch in data[:4]:
        eager.step(*batch)
    for at, (x, y) in enumerate(data[4:]):
        ours.critic.requires_grad_(at % 2 == 0)
        step(x=x, y=y)
        eager.step(x, y)
    assert farthest(ours, eager) < NEAR


@exported
def test_what_a_program_notes_in_an_optimizers_state_lets_nothing_be_found_anew(
    is_exported: bool, tmp_path: Path
) -> None:
    loop, data = Loop(), data_of(6)
    step = step_of(loop, captured(loop, data[:4]), is_exported, tmp_path)
    loop.opt.state["calls"] = 1
    assert step.is_bound()
    loop.opt.state["calls"] += 1
    assert step.is_bound()


def test_a_parameter_that_the_passes_froze_may_be_frozen() -> None:
    loop, data = Loop(), data_of(5)
    step = captured(loop, data[:4]).with_config(freeze=["0.*"]).compile()
    loop.model[0].requires_grad_(False)
    step(*data[4])


class Decayed(Loop):
    """Weights are written before the optimizer writes to them, whose fused operator reads what came of that."""

    def optimizer(self) -> optim.Optimizer:
        return optim.SGD(self.model.parameters(), lr=0.1, fused=True)

    def more(self) -> None:
        self.schedule = lr_scheduler.ExponentialLR(self.opt, 0.8)

    def step(self, *data: Tensor) -> None:
        self.zero()
        self.loss(*data).backward()
        with torch.no_grad():
            for one in self.model.parameters():
                one.mul_(0.99)
        self.opt.step()

    def between(self) -> None:
        self.schedule.step()


def test_a_rate_of_weights_that_are_written_before_is_followed() -> None:
    check(Decayed)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("fused", [False, True])
def test_so_are_those_of_two_groups_that_are_scheduled_apart(kind: str, fused: bool) -> None:
    class Two(Decayed):
        def optimizer(self) -> optim.Optimizer:
            first, *others = self.model.parameters()
            return getattr(optim, kind)([{"params": [first]}, {"params": others}], lr=0.1, fused=fused)

        def more(self) -> None:
            self.schedule = lr_scheduler.LambdaLR(self.opt, [lambda at: 0.9**at, lambda at: 1 / (1 + at)])

    check(Two)


def test_so_they_are_behind_one_step_alone_and_other_options_are_refused() -> None:
    class Plain(Decayed):
        def optimizer(self) -> optim.Optimizer:
            return optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    ours, eager, data = Plain(), Plain(), data_of(8)
    for batch in data[:3]:
        ours.step(*batch)
        ours.between()
    with tracefuse.capture() as c:
        ours.step(*data[3])
    ours.between()
    step = c.optimize().compile()
    for batch in data[4:]:
        step(*batch)
        ours.between()
    for batch in data:
        eager.step(*batch)
        eager.between()
    assert farthest(ours, eager) < NEAR
    ours.opt.param_groups[0]["momentum"] = 0.5
    with pytest.raises(ValueError, match=r"\['momentum'\] is 0.5, and the step was captured with 0.9"):
        step(*data[0])


class Masters(Loop):
    """The optimizer's weights are copies of the model's, which nothing but the optimizer has read before the update."""

    fused = False

    def optimizer(self) -> optim.Optimizer:
        self.masters = [one.detach().clone().requires_grad_() for one in self.model.parameters()]
        return optim.AdamW(self.masters, lr=0.05, fused=self.fused)

    def more(self) -> None:
        self.schedule = lr_scheduler.ExponentialLR(self.opt, 0.9)

    def between(self) -> None:
        self.schedule.step()

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.loss(x, y).backward()
        for master, own in zip(self.masters, self.model.parameters(), strict=True):
            assert own.grad is not None
            master.grad, own.grad = own.grad.clone(), None
        self.opt.step()
        self.opt.zero_grad()
        with torch.no_grad():
            for master, own in zip(self.masters, self.model.parameters(), strict=True):
                own.copy_(master)


class MastersFused(Masters):
    fused = True


@pytest.mark.parametrize("kind", [Masters, MastersFused])
def test_options_of_weights_that_the_optimizer_is_the_first_to_read_are_followed_or_refused(kind: type[Loop]) -> None:
    check(kind)
    loop, data = kind(), data_of(5)
    step = captured(loop, data[:4]).compile()
    loop.opt.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(ValueError, match=r"\['weight_decay'\] is 0.5, and the step was captured with 0.01"):
        step(*data[4])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.Adamax, optim.Adagrad, optim.RMSprop])
def test_a_parameter_without_dimensions_is_updated_as_eager_does(kind: Any, foreach: bool) -> None:
    """A number as a tensor would widen it, as it does nothing else."""

    def made() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        model.scale = nn.Parameter(torch.tensor(0.3))
        return model, kind(model.parameters(), lr=1e-2, foreach=foreach)

    def trained(model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> None:
        loss = (model.scale.exp() * model(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    data = [torch.randn(4, 6) for _ in range(8)]
    (ours, optimizer), (theirs, other) = made(), made()
    with tracefuse.capture_step(n=3) as c:
        for x in data[:5]:
            trained(ours, optimizer, x)
    step = c.optimize().compile()
    for x in data[5:]:
        step(x)
    for x in data:
        trained(theirs, other, x)
    for mine, one in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rates", [(0.1, 0.01), (0.05, 0.05)])
@pytest.mark.parametrize("of_all", ["second", "both"])
@pytest.mark.parametrize("kinds", [(optim.SGD, optim.Adam), (optim.AdamW, optim.AdamW), (optim.SGD, optim.SGD)])
def test_two_optimizers_of_one_parameter_have_a_rate_each(
    kinds: tuple[Any, Any], of_all: str, rates: tuple[float, float]
) -> None:
    def made() -> tuple[nn.Module, optim.Optimizer, optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
        part = net if of_all == "both" else net[1]
        first = kinds[0](part.parameters(), lr=rates[0], fused=True)
        return net, first, kinds[1](net.parameters(), lr=rates[1], fused=True)

    def step(net: nn.Module, first: optim.Optimizer, second: optim.Optimizer, x: Tensor) -> None:
        first.zero_grad()
        second.zero_grad()
        net(x).square().mean().backward()
        first.step()
        second.step()

    data = torch.randn(8, 5, 4, dtype=torch.float64)
    eager, ours = made(), made()
    with tracefuse.capture_step(n=3) as c:
        for x in data[:4]:
            step(*ours, x)
    run = c.optimize().compile()
    for x in data[:4]:
        step(*eager, x)
    for x in data[4:]:
        for _, first, _ in (eager, ours):
            first.param_groups[0]["lr"] *= 0.5
        step(*eager, x)
        run(x)
    for one, other in zip(ours[0].parameters(), eager[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=NEAR, atol=NEAR)


def test_a_rate_that_a_hook_sets_before_the_step_is_that_of_its_optimizer() -> None:
    def made() -> tuple[nn.Module, optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2).double()
        opt, count = optim.SGD(net.parameters(), lr=0.1, fused=True), iter(range(1, 100))

        def warm(opt: optim.Optimizer, *_: Any) -> None:
            opt.param_groups[0]["lr"] = 0.1 / (1 + next(count))

        opt.register_step_pre_hook(warm)
        return net, opt

    net, opt = made()
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 5, 4, dtype=torch.float64):
            net(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    step = c.optimize().compile()
    opt.param_groups[0]["lr"] = 0.5
    eager = copy.deepcopy(net)
    x = torch.randn(5, 4, dtype=torch.float64)
    eager(x).square().mean().backward()
    step(x)
    for mine, its in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine, its - 0.5 * its.grad, rtol=NEAR, atol=NEAR)  # type: ignore[operator]
