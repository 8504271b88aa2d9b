"""Tensors that a step puts in the place of others, instead of writing to them.

Modules' buffers are followed, and all else is refused.
"""

from __future__ import annotations

import copy
import importlib.util
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from whole_step_loops import NEAR, Loop, captured, check, data_of, network

from tracefuse.errors import CaptureError, ExportError


class Behind(Loop):
    """A buffer that batch norm writes to, and that is replaced behind the update."""

    def after(self) -> None:
        norm: Any = self.model[1]
        norm.running_mean = norm.running_mean * 0.5


class Cloned(Loop):
    def after(self) -> None:
        norm: Any = self.model[1]
        norm.running_mean = norm.running_mean.clone()


class BeforeBackward(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, norm = super().loss(x, y), self.model[1]
        norm.running_mean = norm.running_mean * 0.5  # type: ignore[assignment, operator]
        return loss


class Centred(nn.Module):
    """An average of what comes in, made anew in each forward."""

    center: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.center = self.center * 0.9 + x.detach().mean(0) * 0.1
        return x - self.center


class InForward(Loop):
    def prepare(self) -> None:
        self.model[1] = Centred(6)


class Recurrent(Loop):
    """A state that one forward leaves to the next."""

    class Network(nn.Module):
        state: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 3).double()
            self.register_buffer("state", torch.zeros(5, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            made = self.cell(x, self.state)
            self.state = made.detach()
            return made

    def prepare(self) -> None:
        self.model = self.Network()  # type: ignore[assignment]


class Unread(Loop):
    """Read behind the update alone."""

    def prepare(self) -> None:
        self.model[3].register_buffer("average", torch.zeros(3, dtype=torch.float64))

    def after(self) -> None:
        last: Any = self.model[3]
        last.average = last.average * 0.9 + last.bias.detach() * 0.1


class TwoOfOneName(InForward):
    """Teacher and student: their buffers have the same names."""

    def more(self) -> None:
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y) + F.mse_loss(self.model(x), self.teacher(2 * x))


@pytest.mark.parametrize(
    "kind", [Behind, Cloned, BeforeBackward, InForward, Recurrent, Unread, TwoOfOneName], ids=lambda k: k.__name__
)
def test_a_buffer_that_is_replaced_is_followed(kind: type[Loop]) -> None:
    check(kind)


@pytest.mark.parametrize("is_exported", [False, True], ids=["compiled", "exported"])
def test_a_buffer_that_is_replaced_between_two_calls_is_followed(is_exported: bool, tmp_path: Path) -> None:
    ours, eager, data = InForward(), InForward(), data_of(10)
    variant = captured(ours, data[:5])
    step = bound(variant.exported, ours, tmp_path) if is_exported else variant.compile()
    for batch in data[:5]:
        eager.step(*batch)
    for at, batch in enumerate(data[5:]):
        step(*batch)
        eager.step(*batch)
        if at == 2:
            for loop in (ours, eager):
                loop.model[1].center = loop.model[1].center * 0.5  # type: ignore[assignment, operator]
    mine, theirs = ours.left(), eager.left()
    assert max(float((mine[key] - theirs[key]).abs().max()) for key in theirs) < NEAR


def bound(source: str, loop: Loop, folder: Path) -> Any:
    (folder / "step.py").write_text(source)
    spec = importlib.util.spec_from_file_location("a_step_with_buffers", folder / "step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bind(loop.model, loop.opt)


# --- weights that are moved behind the update -------------------------------------------------------------------------


class Moved(Loop):
    """Weights that are copied elsewhere after each update, and read there, before an average of buffers."""

    reads = True

    def more(self) -> None:
        self.average = copy.deepcopy(self.model)

    def after(self) -> None:
        for one in self.moved():
            one.data = one.data.clone()
        if self.reads:
            sum(one.detach().norm() for one in self.moved())
        with torch.no_grad():
            for mine, new in zip(self.average.buffers(), self.model.buffers(), strict=True):
                mine.copy_(new)

    def moved(self) -> list[Tensor]:
        return list(self.model.parameters())


class MovedUnread(Moved):
    reads = False


class MovedBuffers(Moved):
    def moved(self) -> list[Tensor]:
        return [one for one in self.model.buffers() if one.is_floating_point()]


class MovedAndWritten(Moved):
    """What is written to the copy, or to the old memory, is no part of what an update leaves."""

    def after(self) -> None:
        old = [one.data for one in self.moved()]
        super().after()
        for one in old:
            one.mul_(0.9)


@pytest.mark.parametrize("kind", [Moved, MovedUnread, MovedBuffers], ids=lambda k: k.__name__)
@pytest.mark.parametrize("further", [1, 3])
def test_what_is_written_after_a_moved_weight_was_read_is_of_the_step(kind: type[Loop], further: int) -> None:
    check(kind, further)


def test_a_write_to_memory_that_a_moved_weight_has_left_is_refused() -> None:
    with pytest.raises(CaptureError, match="gives one of its inputs new data"):
        captured(MovedAndWritten(), data_of(6)).compile()


# --- what is refused --------------------------------------------------------------------------------------------------


class AveragedInList(Loop):
    def more(self) -> None:
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def after(self) -> None:
        pairs = zip(self.average, self.model.parameters(), strict=True)
        self.average = [0.9 * mine + 0.1 * new.detach() for mine, new in pairs]


class AveragedInDict(Loop):
    def more(self) -> None:
        self.average = {name: one.clone() for name, one in self.model.state_dict().items()}

    def after(self) -> None:
        for name, new in self.model.state_dict().items():
            self.average[name] = self.average[name] * 0.9 + new * 0.1


class AveragedData(Loop):
    def more(self) -> None:
        self.average = copy.deepcopy(self.model)

    def after(self) -> None:
        for mine, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.data = mine.data * 0.9 + new.data * 0.1


class AveragedBuffers(AveragedData):
    def after(self) -> None:
        mine, new = self.average[1], self.model[1]
        mine.running_mean = mine.running_mean * 0.9 + new.running_mean * 0.1  # type: ignore[assignment, operator]


class StateReplaced(Loop):
    def after(self) -> None:
        for entries in self.opt.state.values():
            entries["exp_avg"] = entries["exp_avg"] * 0.5


class ParameterReplaced(Loop):
    def after(self) -> None:
        last: Any = self.model[3]
        last.bias = nn.Parameter(last.bias.detach() * 0.9)


class Confusion(Loop):
    """A count that the loss does not read."""

    def more(self) -> None:
        self.seen = torch.zeros(3, dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        self.seen = self.seen + F.one_hot(out.argmax(1), 3).double().sum(0)
        return F.mse_loss(out, y)


class ClonedBuffers(AveragedData):
    """Nothing reads what was there before, in a module that no step runs."""

    def after(self) -> None:
        mine, new = self.average[1], self.model[1]
        mine.running_mean = new.running_mean.clone()  # type: ignore[operator]


class Features(Loop):
    """What a forward leaves in a buffer for others to see."""

    class Layer(nn.Linear):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros(5, 3, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.seen = out.detach() * 2
            return out

    def prepare(self) -> None:
        self.model[3] = self.Layer().double()


class Factor(nn.Module):
    """Multiplies by its buffer."""

    factor: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((6,), value, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Swapped(Loop):
    """Two modules whose buffers change places, which no operator does."""

    def prepare(self) -> None:
        self.model[1], self.model[2] = Factor(0.5), nn.Sequential(nn.Tanh(), Factor(2.0))

    def after(self) -> None:
        one, other = self.model[1], self.model[2][1]  # type: ignore[index]
        one.factor, other.factor = other.factor, one.factor


class Doubled(Loop):
    """Two tensors of which the update reads one and writes the other, in turn."""

    def more(self) -> None:
        self.turns = [torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)]

    @torch.no_grad()
    def after(self) -> None:
        before, now = self.turns
        now.copy_(before).add_(self.model[0].weight.sum(1), alpha=0.1)
        self.model[0].weight.mul_(1 + 0.01 * before[:, None])
        self.turns = [now, before]


class HeldForLoss(Loop):
    """The next forward reads the buffer that this step replaces."""

    def more(self) -> None:
        self.before = [torch.ones(6, dtype=torch.float64)]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x, y) + (self.model[0](x) * self.before[-1]).mean()

    def after(self) -> None:
        norm: Any = self.model[1]
        self.before.append(norm.running_mean)
        norm.running_mean = norm.running_mean * 0.5


class HeldForUpdate(HeldForLoss):
    """And the next update."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return Loop.loss(self, x, y)

    def after(self) -> None:
        with torch.no_grad():
            self.model[0].weight.mul_(1 + 0.01 * self.before.pop()[:, None])
        super().after()


class AveragedOutOfSight(Loop):
    """A copy that no variable leads to."""

    def more(self) -> None:
        self.averages = {"slow": [copy.deepcopy(self.model)]}

    def after(self) -> None:
        mine: Any = self.averages["slow"][0][1]
        mine.running_mean = mine.running_mean * 0.9 + self.model[1].running_mean * 0.1  # type: ignore[operator]


class AveragedByFunction(AveragedInList):
    def mixed(self, mine: Tensor, new: Tensor) -> Tensor:
        return torch.lerp(mine, new.detach(), 0.1)

    def after(self) -> None:
        self.average = [self.mixed(*pair) for pair in zip(self.average, self.model.parameters(), strict=True)]


class Centre(Loop):
    """An average of what the model computes, which the loss reads."""

    def more(self) -> None:
        self.centre = torch.zeros(3, dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.model(x)
        self.centre = 0.9 * self.centre + 0.1 * out.detach().mean(0)
        return F.mse_loss(out - self.centre, y)


REFUSED = {
    AveragedInList: r"no module has.* for mine, new in pairs\]",
    AveragedInDict: r"no module has.*\* 0\.9 \+ new \* 0\.1",
    AveragedBuffers: r"no module has.*mine\.running_mean = ",
    StateReplaced: r"exp_avg of 0\.weight.*self\.opt\.step\(\)",
    ParameterReplaced: r"3\.bias.*last\.bias = nn\.Parameter\(",
    ClonedBuffers: r"buffer loop\.average\.1\.running_mean \(.*running_mean\.clone\(\)",
    Features: r"buffer 3\.seen \(.*self\.seen = out\.detach\(\) \* 2",
    Confusion: r"no module has.*self\.seen = self\.seen \+ ",
    Swapped: r"1\.factor.*one\.factor, other\.factor = other\.factor, one\.factor",
    AveragedOutOfSight: r"no module has.*mine\.running_mean = ",
    AveragedByFunction: r"no module has.*torch\.lerp\(mine, new\.detach\(\), 0\.1\)",
}
SEEN_BY_THE_NEXT = {
    Doubled: r"(in whose place|made anew).*(now\.copy_\(before\)|before\[:, None\])",
    HeldForLoss: r"(in whose place|has made).*self\.before\[-1\]\)\.mean\(\)",
    HeldForUpdate: r"(in whose place|made anew).*self\.before\.pop\(\)\[:, None\]",
    Centre: r"has made.*self\.centre = ",
}
LOST = {
    **{kind: REFUSED[kind] for kind in (AveragedInList, AveragedInDict, AveragedBuffers, Confusion, Swapped)},
    **{kind: REFUSED[kind] for kind in (AveragedOutOfSight, AveragedByFunction)},
    StateReplaced: r'exp_avg of .*entries\["exp_avg"\] = ',
    HeldForUpdate: r"in whose place.*self\.before\.pop\(\)\[:, None\]",
    Centre: r"in whose place.*self\.centre = ",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.__name__)
def test_what_else_is_replaced_is_refused_with_its_line(kind: type[Loop]) -> None:
    with pytest.raises(ExportError, match=rf"{REFUSED[kind]}.*(kept\.copy_\(new\)|p\.copy_\(…\))"):
        captured(kind(), data_of(6)).compile()


@pytest.mark.parametrize("further", [1, 3])
@pytest.mark.parametrize("kind", SEEN_BY_THE_NEXT, ids=lambda k: k.__name__)
def test_what_the_next_step_finds_elsewhere_is_refused_with_its_line(kind: type[Loop], further: int) -> None:
    with pytest.raises(ExportError, match=rf"{SEEN_BY_THE_NEXT[kind]}.*copy_\((new|other)\)"):
        captured(kind(), data_of(3 + further)).compile()


@pytest.mark.parametrize("kind", LOST, ids=lambda k: k.__name__)
def test_of_the_last_step_of_a_loop_what_python_has_given_up_is_refused(kind: type[Loop]) -> None:
    with pytest.raises(ExportError, match=rf"{LOST[kind]}.*kept\.copy_\(new\)"):
        captured(kind(), data_of(3)).compile()


class Groups(Loop):
    """A sum of losses by group, and the groups are data that the forward does not read."""

    def more(self) -> None:
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.groups = [torch.randint(0, 4, (8,)) for _ in range(8)]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.per = (loss.detach() * torch.ones(8)).double()
        return loss

    def after(self) -> None:
        self.groups.append(self.groups.pop(0))
        self.sums.index_add_(0, self.groups[0], self.per)


@pytest.mark.parametrize("further", [1, 3])
def test_data_that_the_update_alone_reads_is_refused_with_its_line(further: int) -> None:
    wanted = r"another tensor in each step.*self\.sums\.index_add_.*call it yourself behind the compiled step"
    with pytest.raises(ExportError, match=wanted):
        captured(Groups(), data_of(3 + further)).compile()


class Logged(Loop):
    """A number that is logged, and that Python makes anew."""

    def more(self) -> None:
        self.mean = torch.zeros((), dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class LoggedInPlace(Logged):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = Loop.loss(self, x, y)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss


@pytest.mark.parametrize("further", [0, 1, 3])
def test_a_number_that_is_logged_is_told_once_with_its_line_and_its_remedy_holds(further: int) -> None:
    step = captured(loop := Logged(), data_of(loop.n + further))
    with pytest.warns(UserWarning, match=r"self\.mean = 0\.9 \* self\.mean .*Write to it in place"):
        step.compile()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check(LoggedInPlace, further)
    assert not [one for one in told if "makes a number anew" in str(one.message)]


class NoiseOfNumpy(Loop):
    """Arrays that Python draws anew in each step, which the update reads."""

    def more(self) -> None:
        self.random = np.random.default_rng(0)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        for one in self.model.parameters():
            assert one.grad is not None
            one.grad.add_(torch.from_numpy(self.random.normal(size=one.shape)))
        self.opt.step()


class WarmedByPython(AveragedData):
    """An average whose weight Python counts and makes a tensor of: `Counted` has the count in tensors."""

    steps = 0

    def between(self) -> None:
        self.steps += 1

    @torch.no_grad()
    def after(self) -> None:
        weight = torch.tensor(1 / (1 + self.steps), dtype=torch.float64)
        for mine, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(new, weight)


class WarmedByBoth(WarmedByPython):
    """The rest to 1 is computed beside the forward, and the update reads both."""

    @torch.no_grad()
    def after(self) -> None:
        weight = torch.tensor(1 / (1 + self.steps), dtype=torch.float64)
        for mine, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mine.mul_(1 - weight).add_(new * weight)


@pytest.mark.parametrize("further", [0, 1, 3])
def test_what_python_makes_anew_for_the_update_is_refused(further: int) -> None:
    with pytest.raises(ExportError, match=r"(in whose place|another tensor).*self\.random\.normal.*kept\.copy_\(new\)"):
        captured(NoiseOfNumpy(), data_of(3 + further)).compile()
    for kind in (WarmedByPython, WarmedByBoth):
        step = captured(loop := kind(), data_of(loop.n + further))
        with pytest.raises(ExportError, match=r"data of torch\.tensor .*torch\.tensor\(1 / .*`count\.add_\(1\)`"):
            step.compile()


class WarmedAlike(WarmedByPython):
    """The number was the same in all steps that were seen."""

    def between(self) -> None: ...


def test_a_number_that_python_makes_a_tensor_of_is_told_where_it_did_not_change() -> None:
    step = captured(loop := WarmedAlike(), data_of(loop.n + 1))
    with pytest.warns(UserWarning, match=r"torch\.tensor\(1 / .*makes a tensor of a number.*`count\.add_\(1\)`"):
        step.compile()


@pytest.mark.parametrize("further", [0, 1, 3])
@pytest.mark.parametrize("way", ["named", "unnamed"])
def test_data_that_the_loop_changes_on_the_way_is_no_average(way: str, further: int) -> None:
    class Noised(Loop):
        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            if way == "named":
                x = x + 0.1
                return super().loss(x, y)
            self.given = x.clone() * 2 + 0.1
            return super().loss(self.given, y)

        def left(self) -> dict[str, Tensor]:
            return {key: one for key, one in super().left().items() if key != "given"}

    check(Noised, further)


class Reported(Loop):
    """Lists of what was predicted and what was to be, of batches that nobody else holds: those lines are behind the update."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.pairs = getattr(self, "pairs", [])
        batch = [x.clone(), y.clone()]
        self.zero()
        out = self.model(batch[0])
        F.mse_loss(out, batch[1]).backward()
        self.opt.step()
        self.pairs.append((out.detach(), batch[1] * 2))


class Written(Loop):
    """Constants that stand in the lines of the update."""

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        bias = self.model[3].bias
        assert isinstance(bias, nn.Parameter)
        assert bias.grad is not None
        bias.grad.mul_(torch.tensor([1, 0.5, 0.25], dtype=torch.float64))
        self.opt.step()
        with torch.no_grad():
            bias.clamp_(min=torch.tensor(-0.3, dtype=torch.float64))


@pytest.mark.parametrize("further", [0, 1, 3])
@pytest.mark.parametrize("kind", [Reported, Written], ids=lambda k: k.__name__)
def test_what_is_reported_or_written_in_a_line_is_neither(kind: type[Loop], further: int) -> None:
    with warnings.catch_warnings(record=True) as told:  # as errors they would end nothing
        warnings.simplefilter("always")
        check(kind, further)
    assert not [str(one.message) for one in told if "makes a" in str(one.message)]


def test_writing_to_what_stays_is_the_remedy() -> None:
    class InPlace(AveragedInList):
        def after(self) -> None:
            for mine, new in zip(self.average, self.model.parameters(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * new.detach())

        def left(self) -> dict[str, Tensor]:
            return super().left() | {f"average {at}": one for at, one in enumerate(self.average)}

    check(InPlace)


def test_a_buffer_that_is_made_anew_of_constants_is_what_it_was() -> None:
    class Masked(Loop):
        class Layer(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                self.register_buffer("mask", torch.arange(6, dtype=torch.float64) * 0.1)
                return super().forward(x * self.mask)  # type: ignore[operator]

        def prepare(self) -> None:
            self.model[3] = self.Layer(6, 3).double()

    check(Masked)


def test_what_is_only_logged_is_not_refused() -> None:
    """A running loss is a number, and the features of the step before add to nothing."""

    class Logged(Loop):
        def more(self) -> None:
            self.total, self.last, self.log = torch.zeros(()).double(), torch.zeros(5, 3).double(), []  # type: ignore[var-annotated]

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.model(x)
            loss = F.mse_loss(out, y)
            self.total = self.total + loss.detach()
            self.log.append((out.detach() - self.last).norm())
            self.last = out.detach()
            return loss

        def left(self) -> dict[str, Tensor]:
            return {name: one for name, one in super().left().items() if name not in ("total", "last")}

    check(Logged)


def test_a_parameter_that_is_replaced_later_is_refused_when_the_step_is_called() -> None:
    loop, data = Loop(), data_of(6)
    step = captured(loop, data[:5]).compile()
    last: Any = loop.model[3]
    last.bias = nn.Parameter(last.bias.detach().clone())
    with pytest.raises(ExportError, match=r"the module that had 3\.bias .* has another tensor there now"):
        step(*data[5])


class CalledByFunction(Loop):
    """The model is called once more behind the update, on tensors that lie in its weights for that call alone."""

    def after(self) -> None:
        weights = {name: one.detach() for name, one in self.model.named_parameters()}
        torch.func.functional_call(self.model[3], {"weight": weights["3.weight"]}, (torch.ones(6).double(),))


def test_what_lies_in_a_module_for_a_call_alone_is_no_parameter_of_it() -> None:
    check(CalledByFunction)


def test_the_step_of_a_model_that_is_gone_runs_on() -> None:
    loop, data = Loop(), data_of(6)
    step = captured(loop, data[:5]).compile()
    loop.model = network(4, 6, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* is gone")
        assert step(*data[5]).isfinite()


@pytest.mark.parametrize("calls", [0, 1])
def test_a_module_that_is_replaced_is_told_once(calls: int) -> None:
    loop, data = Loop(), data_of(6)
    step = captured(loop, data[:5]).compile()
    for _ in range(calls):
        step(*data[5])
    loop.model[3] = nn.Linear(6, 3).double()
    with pytest.warns(UserWarning, match=r"the module that had 3\.\w+ .* is gone, .* capture the step again") as told:
        losses = [step(*data[5]) for _ in range(2)]
    assert all(one.isfinite() for one in losses)
    assert len([one for one in told if " is gone" in str(one.message)]) == 1


@pytest.mark.parametrize("what", ["1.running_mean", "exp_avg of 0.weight"])
def test_a_tensor_that_was_moved_to_another_device_is_named_with_both_devices(what: str) -> None:
    loop, data = Loop(), data_of(6)
    step = captured(loop, data[:5]).compile()
    if what == "1.running_mean":
        norm: Any = loop.model[1]
        norm.running_mean = norm.running_mean.to("meta")
    else:
        loop.opt.state[loop.model[0].weight]["exp_avg"] = torch.empty(6, 4, dtype=torch.float64, device="meta")
        loop.opt.state = copy.copy(loop.opt.state)
    with pytest.raises(
        ValueError, match=rf"^{what} is on meta, and the step was captured with it on cpu: move it back"
    ):
        step(*data[5])


class Anew(torch.optim.Optimizer):
    """An optimizer that makes its state anew in each step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state["mean"] = 0.9 * state["mean"] + one.grad if state else one.grad.clone()
                one.sub_(group["lr"] * state["mean"])


class Logging(Anew):
    """One that only keeps what it has computed."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["size"] = one.norm()
                one.sub_(group["lr"] * one.grad)


class OfItsOwn(Loop):
    kind = Anew

    def optimizer(self) -> torch.optim.Optimizer:
        return self.kind(self.model.parameters())


class Logs(OfItsOwn):
    kind = Logging


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OfItsOwn, r'the step before has made anew \(.*state\["mean"\] = .*write to it \(`kept\.copy_'),
        (Logs, r"^the optimizer puts a new tensor in the place of size of .* in each step"),
    ],
)
def test_state_that_an_optimizer_makes_anew_is_not_called_its_first(kind: type[Loop], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        captured(kind(), data_of(4)).compile()


class OfTransformers(Loop):
    """Its state is kept in place, but for a number that it makes anew."""

    def optimizer(self) -> torch.optim.Optimizer:
        return pytest.importorskip("transformers.optimization").Adafactor(self.model.parameters())  # type: ignore[no-any-return]


@pytest.mark.parametrize("further", [0, 1])
def test_an_optimizer_that_makes_a_part_of_its_state_anew_is_no_first_one(further: int) -> None:
    said = r"^other of aten.mul_.Tensor \(optimization.py.*beta2t.*to step: take another optimizer, such as `torch.optim.AdamW"
    loop = OfTransformers()
    with pytest.raises(ExportError, match=said):
        captured(loop, data_of(3 + further)).compile()


# --- TorchScript ------------------------------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


def with_scripted(compiled: Callable[[nn.Module], Any]) -> type[Loop]:
    class Made(Loop):
        def prepare(self) -> None:
            self.model = nn.Sequential(compiled(Weighted().double()), nn.Linear(4, 3).double())

    return Made


COMPILED: dict[str, Callable[[nn.Module], Any]] = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, torch.randn(5, 4, dtype=torch.float64)),
}


@pytest.mark.parametrize("how", COMPILED)
def test_a_part_in_torchscript_is_trained(how: str) -> None:
    """It has no dicts of parameters and buffers."""
    check(with_scripted(COMPILED[how]))


@pytest.mark.parametrize("how", COMPILED)
def test_a_buffer_that_a_part_in_torchscript_puts_anew_is_found(how: str, tmp_path: Path) -> None:
    loop, data = with_scripted(COMPILED[how])(), data_of(6)
    variant = captured(loop, data[:4])
    path = variant.export(tmp_path / "step.py")
    for step in (variant.compile(), runpy.run_path(str(path))["bind"](loop.model, loop.opt)):
        step(*data[4])
        loop.model[0].scale = torch.rand(4, dtype=torch.float64)
        expected = loop.loss(*data[5])
        assert abs(step(*data[5]) - expected) < NEAR
