"""What the host reads within a step on a line that also updates: only what the update is made for is refused."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_
from whole_step_loops import Loop, captured, check, data_of

import tracefuse
from tracefuse.errors import ExportError


class OneLine(Loop):
    """A loop that somebody else owns: to us all of it is one line."""

    def prepare(self) -> None:
        self.log: list[float] = []
        self.total = torch.zeros((), dtype=torch.float64)

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.held = [self.loss(x, y)]
        self.held[0].backward()


class Logged(OneLine):
    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero(); self.backward(x, y); self.total.add_(self.held[0].detach()); norm = clip_grad_norm_(self.model.parameters(), 0.1); self.opt.step(); self.log += [self.held[0].item(), self.total.item(), norm.item()]  # fmt: skip # noqa: E501, E702


class CountedInPython(OneLine):
    def more(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero(); self.backward(x, y); self.count.add_(1); self.opt.step() if self.count.item() < 100 else None  # fmt: skip # noqa: E702


class ScaledSlowly(OneLine):
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)

    def more(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.scaler.scale(self.loss(x, y)).backward()
        self.scaler.step(self.opt)
        self.scaler.update()


def test_a_loss_a_norm_and_an_average_that_are_logged_are_no_part_of_the_update() -> None:
    check(Logged)


@pytest.mark.parametrize(("kind", "value"), [(CountedInPython, "3"), (ScaledSlowly, "0.0")])
def test_a_count_and_whether_gradients_are_finite_are(kind: type[Loop], value: str) -> None:
    with pytest.raises(ExportError, match=rf"^the host reads {value} of a tensor in .*, a count of steps or whether"):
        captured(kind(), data_of(4)).compile()


class Grown(Loop):
    """A log of losses that keeps the graph of each; nothing differentiates it."""

    total: Tensor | float = 0.0

    def left(self) -> dict[str, Tensor]:
        """A compiled step returns its loss, and logs none."""
        return {name: one for name, one in super().left().items() if name != "total"}

    def step(self, *data: Tensor) -> None:
        self.zero()
        loss = self.loss(*data)
        self.total = self.total + loss
        loss.backward()
        self.opt.step()


class Averaged(Grown):
    def step(self, *data: Tensor) -> None:
        self.zero()
        loss = self.loss(*data)
        loss.backward()
        self.opt.step()
        self.total = 0.9 * self.total + 0.1 * loss


@pytest.mark.parametrize("kind", [Grown, Averaged])
def test_a_log_that_keeps_graphs_is_no_part_of_the_step(kind: type[Loop]) -> None:
    check(kind)


def test_a_backward_through_the_steps_before_is_told_where_to_cut() -> None:
    def train(is_cut: bool) -> tuple[tracefuse.Capture, optim.Optimizer]:
        model, total = nn.Linear(4, 3), torch.zeros(())
        opt = optim.SGD(model.parameters(), 0.1, fused=True)
        with tracefuse.capture_step(n=3) as c:
            for _ in range(4):
                loss = model(torch.ones(5, 4)).square().mean()
                if is_cut:
                    total = total.detach() + loss
                else:
                    total = total + loss
                opt.zero_grad()
                total.backward(retain_graph=True)
                opt.step()
        return c, opt

    c, _ = train(is_cut=False)
    with pytest.raises(
        ExportError, match=r"`total` goes on with its own graph .*total = total \+.*write `total.detach\(\)`"
    ):
        c.optimize().compile()
    c, opt = train(is_cut=True)
    assert opt.param_groups
    step = c.optimize().compile()
    assert step.inputs == ("total",)
    opt.param_groups[0]["lr"] = 0.0
    assert step(torch.tensor(7.0)) - step(torch.tensor(2.0)) == pytest.approx(5.0)


class Guarded(Loop):
    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        loss = self.loss(x, y)
        loss.backward()
        if torch.isfinite(loss):
            self.opt.step()


class Compared(Loop):
    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        loss = self.loss(x, y)
        if loss.item() > 1e9:
            loss = loss * 0.5
        loss.backward()
        self.opt.step()


@pytest.mark.parametrize(
    ("kind", "line"), [(Guarded, r"if torch\.isfinite\(loss\):"), (Compared, r"if loss\.item\(\) > 1e9:")]
)
def test_what_the_program_decides_by_tensors_is_told_and_holds_where_the_answer_is_the_same(
    kind: type[Loop], line: str
) -> None:
    with pytest.warns(
        UserWarning, match=rf"^the program decides by what it reads of tensors in .*{line}, and a compiled"
    ):
        check(kind)


def test_of_what_is_logged_nothing_is_told(recwarn: pytest.WarningsRecorder) -> None:
    check(Logged)
    assert not [one for one in recwarn if "decides" in str(one.message)]


class Noised(Loop):
    """Draws from a generator of its own."""

    def prepare(self) -> None:
        self.own = torch.Generator().manual_seed(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + 0.1 * torch.randn(x.shape, generator=self.own, dtype=x.dtype), y)


def test_of_a_generator_of_the_programs_own_a_compiled_step_tells() -> None:
    ours = Noised()
    with pytest.warns(UserWarning, match=r"^A generator of the program's own draws \(.*torch\.randn\(x\.shape"):
        captured(ours, data_of(4)).compile()


# --- what is told of a step -------------------------------------------------------------------------------------------


class Decides(Loop):
    """It looks at its loss, and would leave a step out."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        if loss > 1e6:
            self.model.requires_grad_(False)
        return loss


class Smooths(Loop):
    def more(self) -> None:
        self.smooth = torch.zeros((), dtype=torch.float64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.smooth = 0.9 * self.smooth + 0.1 * loss.detach()
        return loss


class OfItsOwnDraws(Loop):
    def more(self) -> None:
        self.drawing = torch.Generator().manual_seed(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + 0.1 * torch.rand(x.shape, generator=self.drawing, dtype=x.dtype), y)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Decides, r"decides by what it reads of tensors in .*if loss > 1e6"),
        (Smooths, r"makes a number anew from that of the step before"),
        (OfItsOwnDraws, r"A generator of the program's own draws"),
    ],
)
def test_a_file_tells_when_it_is_bound_what_compiling_tells(kind: type[Loop], said: str, tmp_path: Path) -> None:
    loop = kind()
    variant = captured(loop, data_of(5))
    with pytest.warns(UserWarning, match=said) as compiling:
        variant.compile()
    bind = runpy.run_path(str(variant.export(tmp_path / "step.py")))["bind"]
    with pytest.warns(UserWarning, match=said) as binding:
        bind(loop.model, loop.opt)
    assert [str(one.message) for one in binding] == [str(one.message) for one in compiling]
    assert {one.filename for one in (*binding, *compiling)} == {__file__}
