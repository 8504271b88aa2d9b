"""Loops that no compiled step follows: each is refused with its line and a remedy, which holds where it is followed."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from whole_step_loops import NEAR, Adversaries, AveragedByHand, Closure, Counted, Groups, Loop, captured, check, data_of

import tracefuse
from tracefuse.errors import CaptureError, ExportError


class Cycled(Groups):
    options: dict[str, Any] = {}  # noqa: RUF012

    def optimizer(self) -> optim.Optimizer:
        return Loop.optimizer(self)

    def more(self) -> None:
        self.schedule = lr_scheduler.OneCycleLR(self.opt, 0.1, total_steps=30, **self.options)


class CycledRates(Cycled):
    options = {"cycle_momentum": False}  # noqa: RUF012


class Plain(Loop):
    make: Any = optim.RAdam

    def optimizer(self) -> optim.Optimizer:
        return self.make(self.model.parameters(), lr=0.01)


class Mine(optim.Adagrad):
    """An optimizer of one's own, of which nobody knows what it computes of a count."""


class Subclass(Plain):
    make = Mine


class FusedSubclass(Loop):
    def optimizer(self) -> optim.Optimizer:
        return Mine(self.model.parameters(), lr=0.01, fused=True)


class Adafactor(Plain):
    make = optim.Adafactor


class Warmed(AveragedByHand):
    """An average whose weight the host counts: `Counted` has it in tensors."""

    steps = 0

    def between(self) -> None:
        self.steps += 1

    @torch.no_grad()
    def after(self) -> None:
        weight = min(0.9, (1 + self.steps) / (10 + self.steps))
        for mine, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            mine.lerp_(new, 1 - weight)


class EverySecond(AveragedByHand):
    """An average that is moved every second time; the loop without it is the remedy."""

    steps = 0

    def after(self) -> None:
        self.steps += 1
        if self.steps % 2 == 0:
            super().after()


class EveryFifth(EverySecond):
    """The next step is the same by chance."""

    def after(self) -> None:
        self.steps += 1
        if self.steps % 5 == 0:
            AveragedByHand.after(self)


class ByChance(Loop):
    """A number that is the same in the next step."""

    steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        return super().loss(x, y) * (2.0 if self.steps % 6 == 0 else 1.0)


class Validated(Loop):
    """Now and then a validation, which changes nothing, and a log of single numbers."""

    steps = 0

    def more(self) -> None:
        self.seen, self.total = torch.randn(7, 4, dtype=torch.float64), torch.zeros(()).double()

    def between(self) -> None:
        self.steps += 1
        if self.steps % 5 == 0:
            self.model.eval()
            with torch.no_grad():
                self.total += F.relu_(self.model(self.seen)).mean()
            self.model.train()


class Advantages(Loop):
    """Actor and critic: what the critic says is read, as a number."""

    def value(self, said: Tensor) -> float | Tensor:
        return said.item()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        said = self.model(x)
        return (said * (y - self.value(said.mean()))).mean()


class DetachedAdvantages(Advantages):
    def value(self, said: Tensor) -> float | Tensor:
        return said.detach()


class Scaled(Advantages):
    """The critic's number is part of another one."""

    def value(self, said: Tensor) -> float | Tensor:
        return said.item() / 2


class DetachedScaled(Advantages):
    def value(self, said: Tensor) -> float | Tensor:
        return said.detach() / 2


class CheckpointedNorm(Loop):
    """The backward runs the batch norm once more, which moves its averages once more."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(checkpoint(self.model, x, use_reentrant=False), y)


class NormBeforeCheckpoint(Loop):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(checkpoint(self.model[2:], self.model[:2](x), use_reentrant=False), y)


class Phases(Loop):
    """A complex parameter, which optimizers update by views of it as real numbers; kept as real ones it holds."""

    is_real = False

    def prepare(self) -> None:
        turned = torch.randn(4, dtype=torch.complex128)
        self.phases = nn.ParameterList([torch.view_as_real(turned).clone() if self.is_real else turned])

    def optimizer(self) -> optim.Optimizer:
        return optim.Adam([*self.model.parameters(), *self.phases], lr=0.01)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        turned = torch.view_as_complex(self.phases[0]) if self.is_real else self.phases[0]
        return F.mse_loss(self.model((x * turned).abs()), y)


class RealPhases(Phases):
    is_real = True


class InTurn(Loop):
    """Two heads, each of which is trained every second time."""

    steps = 0

    def prepare(self) -> None:
        self.heads = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW([*self.model.parameters(), *self.heads.parameters()], lr=0.01, fused=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        head = self.heads[self.steps % 2]
        self.steps += 1
        return F.mse_loss(head(self.model(x)), y)


class Together(InTurn):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.mse_loss(head(self.model(x)), y) for head in self.heads)  # type: ignore[return-value]


class Rollouts(Loop):
    """PPO: three epochs on what one rollout gave."""

    steps = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.steps % 3 == 0:
            with torch.no_grad():
                self.old = self.model(2 * x)
        self.steps += 1
        return (torch.exp(self.model(x) - self.old) * y).clamp(0.8, 1.2).mean()


class Unfreezing(Loop):
    """A layer is trained from the fourth step on."""

    steps = 0

    def prepare(self) -> None:
        self.model[0].requires_grad_(False)
        self.model[1].requires_grad_(False)

    def after(self) -> None:
        self.steps += 1
        if self.steps == 3:
            self.model.requires_grad_(True)


class Unfrozen(Unfreezing):
    n = 5


class Annealed(Loop):
    """A weight of the loss and an optimizer's `step` in one line."""

    make: Any = functools.partial(optim.AdamW, fused=True)
    weight = 0.5

    def optimizer(self) -> optim.Optimizer:
        return self.make(self.model.parameters(), lr=0.01)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.weight *= 0.9
        _ = self.zero(), (self.weight * self.loss(x, y)).backward(), self.opt.step()


class AnnealedSlowly(Annealed):
    make: Any = optim.SGD


REFUSED = {
    Annealed: (r"^other of aten.mul.Tensor .*: 0.36\d*, then 0.32\d*: .* step: compute it with tensors, .*in a line", None),
    AnnealedSlowly: (r"^other of aten.mul.Tensor .*step to step: compute it with tensors, .*a tensor of it in a line", None),
    Unfreezing: (r"^later steps train 0.weight and 2 more parameters, which step 3 does not, .*_step\(n=5\)`", Unfrozen),
    Cycled: (r"^beta1 of aten._fused_adamw_.*keep betas of AdamW as captured .*`cycle_momentum=False`", CycledRates),
    Plain: (r"make RAdam on a GPU with `capturable=True` .*, or take another optimizer, such as .*AdamW", Loop),
    Subclass: (r"^the host reads 3.0 of a tensor .*: make Mine with `fused=True`\.$", FusedSubclass),
    Adafactor: (r"step to step: take another optimizer, such as `torch.optim.AdamW\(…, fused=True\)`", Loop),
    Warmed: (r"^weight of aten.lerp_.Scalar .*: compute it with tensors, from a count that the step raises", Counted),
    EverySecond: (r"the step after step 3 ran other ops: \d+ ops more .*leave what only some steps run out of the loop", Loop),
    Advantages: (r": leave out the `.item\(\)`, .* it \(.*:\d+  return said.item\(\)\), .*`t.detach\(\)`", DetachedAdvantages),
    Scaled: (r"; where it is made of what the host reads of a tensor in .*:\d+  return said.item\(\) / 2, ", DetachedScaled),
    CheckpointedNorm: (r"^the backward runs .*\(self.model, x.* 1.num_batches.* outside of it\.$", NormBeforeCheckpoint),
    Phases: (r"^the update writes to views of its tensors .*complex, .*\(`torch.view_as_complex`\); .*\.$", RealPhases),
    InTurn: (r"reads other parameters than this one .*head\(self.model\(x\)\).*compile one that runs all", Together),
    Rollouts: (r"ran other ops: [^:]*, in .*:\d+  self.old = self.model\(2 \* x\)\. .* capture one that is repeated", None),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_loop_that_no_compiled_step_follows_is_refused_and_its_remedy_holds(kind: type[Loop]) -> None:
    said, remedied = REFUSED[kind]
    with pytest.raises(ExportError, match=said):
        captured(loop := kind(), data_of(loop.n + 1)).compile()
    if remedied is not None:
        check(remedied)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            EveryFifth,
            r"a step after step 3 writes .* by aten\.\w*lerp_.*leave what only some steps run out of the loop",
        ),
        (ByChance, r"other of aten\.mul\.Tensor .*: 1\.0, then 2\.0: a compiled step cannot follow"),
    ],
)
def test_what_is_the_same_in_the_next_step_by_chance_is_refused_by_a_later_one(kind: type[Loop], said: str) -> None:
    captured(loop := kind(), data_of(loop.n + 1)).compile()  # nobody saw a later one
    with pytest.raises(ExportError, match=said):
        captured(kind(), data_of(6)).compile()


def test_a_later_step_may_validate_and_log() -> None:
    class Alone(Validated):
        def left(self) -> dict[str, Tensor]:
            return {key: one for key, one in super().left().items() if key not in ("seen", "total")}

    check(Alone, further=3)


def test_what_a_step_logs_of_its_activations_behind_the_update_is_of_each_step_alike() -> None:
    """A step that is only followed is known by what it computed too."""

    class Hooked(Loop):
        seen: Any = None

        def more(self) -> None:
            self.log: list[float] = []
            self.model[2].register_forward_hook(lambda _, __, out: setattr(self, "seen", out.detach()))

        def after(self) -> None:
            self.log.append((self.seen.abs() > 0.9).double().mean().item())

        def left(self) -> dict[str, Tensor]:
            return {key: one for key, one in super().left().items() if key != "seen"}

    check(Hooked, further=3)


def test_an_epoch_between_two_rollouts_is_a_step_on_what_the_rollout_gave() -> None:
    ours, eager, data = Rollouts(), Rollouts(), data_of(6)
    ours.n = 5
    step = captured(ours, data).compile()
    for batch in data:
        eager.step(*batch)
    (x, y), old = data[0], torch.randn(5, 3, dtype=torch.float64)
    eager.old, eager.steps = old, 1
    assert step.inputs == ("x", "loop_old", "y")  # as the function calls them that calls the model, and has returned
    for _ in range(10):
        eager.step(x, y)
        eager.steps = 1
        step(x, old, y)
    far = [
        float((mine - eager.left()[key]).abs().max()) for key, mine in ours.left().items() if key.startswith("model")
    ]
    assert max(far) < NEAR


class Dependent(Adversaries):
    """The generator learns from what the judge has become."""

    def judge_step(self, x: Tensor, y: Tensor) -> None:
        self.other.zero_grad()
        self.judged(self.model(x), y).backward()
        self.other.step()

    def model_step(self, x: Tensor) -> None:
        self.opt.zero_grad()
        F.softplus(-self.judge(self.model(x))).mean().backward(inputs=list(self.model.parameters()))
        self.opt.step()

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.judge_step(x, y)
        self.model_step(x)


def test_two_updates_of_which_the_second_reads_the_first_are_one_step_or_one_each() -> None:
    ours, whole, eager, data = Dependent(), Dependent(), Dependent(), data_of(14)
    step = captured(whole, data[:4]).compile()
    for x, y in data[4:]:
        step(x=x, y=y)
    for batch in data[:3]:
        ours.step(*batch)
    for batch in data[:4]:
        eager.step(*batch)
    x, y = data[3]
    with tracefuse.capture() as of_judge:
        ours.judge_step(x, y)
    with tracefuse.capture() as of_model:
        ours.model_step(x)
    first, second = of_judge.optimize().compile(), of_model.optimize().compile()
    for x, y in data[4:]:
        first(x=x, y=y)
        second(x)
        eager.step(x, y)
    for one in (ours, whole):
        far = {key: float((mine - eager.left()[key]).abs().max()) for key, mine in one.left().items()}
        assert max(far.values()) < NEAR, far


class Searched(Closure):
    def optimizer(self) -> optim.Optimizer:
        return optim.LBFGS(self.model.parameters(), max_iter=2)


def test_lbfgs_is_refused_and_the_loss_that_its_closure_asks_for_compiles() -> None:
    ours, eager, (x, y) = Searched(), Searched(), data_of(1)[0]
    said = r"LBFGS \(.*evaluates the loss as often as it likes.*or capture one forward and its backward by themselves"
    with pytest.raises(ExportError, match=said):
        captured(Searched(), data_of(4)).compile()
    with tracefuse.capture() as c:
        ours.loss(x, y).backward()
    program = c.optimize().compile()
    eager.loss(x, y).backward()

    def closure() -> Tensor:
        ours.zero()
        loss = program()
        loss.backward()
        return loss

    for _ in range(3):
        ours.opt.step(closure)
        eager.step(x, y)
    far = {key: float((mine - eager.left()[key]).abs().max()) for key, mine in ours.left().items()}
    assert max(far.values()) < NEAR, far


class Looked(Loop):
    """An embedding with sparse gradients, which SparseAdam updates."""

    sparse = True

    def prepare(self) -> None:
        self.table = nn.Embedding(10, 4, sparse=self.sparse).double()

    def more(self) -> None:
        of_dense = {"fused": True} if not self.sparse else {}
        kind: Any = optim.SparseAdam if self.sparse else optim.AdamW
        self.other = kind(self.table.parameters(), lr=0.01, **of_dense)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(self.table((3 * x[:, 0]).abs().long().clamp(max=9))), y)

    def zero(self) -> None:
        self.opt.zero_grad()
        self.other.zero_grad()

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        self.loss(x, y).backward()
        self.opt.step()
        self.other.step()


class LookedDense(Looked):
    sparse = False


def test_sparse_adam_is_refused_by_name_and_a_dense_embedding_holds() -> None:
    said = r"SparseAdam \(.*self.other.step\(\)\) works on sparse gradients.*`nn.Embedding\(sparse=False\)`.*AdamW"
    with pytest.raises(CaptureError, match=said):
        captured(Looked(), data_of(4)).compile()
    check(LookedDense)


def test_a_slice_that_a_module_takes_is_told_to_come_from_a_loader() -> None:
    data = torch.randn(40, 3)
    optimizers = []

    class Sliced(nn.Linear):
        def forward(self, given: Any) -> Tensor:
            return super().forward(given if isinstance(given, Tensor) else data[given : given + 8])

    model = Sliced(3, 2)

    def train(batches: Any) -> tracefuse.Capture:
        optimizers.append(optimizer := optim.SGD(model.parameters(), lr=0.1, fused=True))
        with tracefuse.capture_step(n=3) as c:
            for batch in batches:
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        return c

    with pytest.raises(ExportError, match=r"start of aten.slice.Tensor .*`torch.utils.data.DataLoader`"):
        train(range(0, 40, 8)).optimize().compile()
    step = train(torch.utils.data.DataLoader(data, batch_size=8)).optimize().compile()
    with torch.no_grad():
        expected = model(data[8:16]).square().mean()
    torch.testing.assert_close(step(data[8:16]), expected)


class Momenta(Plain):
    """A schedule that cycles the momentum of an optimizer beside its rate."""

    def more(self) -> None:
        self.schedule = lr_scheduler.OneCycleLR(self.opt, 0.1, total_steps=30)

    def between(self) -> None:
        self.schedule.step()


class OfSgd(Momenta):
    def optimizer(self) -> optim.Optimizer:
        return optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)


class OfAdamW(Momenta):
    make = optim.AdamW


class OfFusedAdamW(Momenta):
    make = functools.partial(optim.AdamW, fused=True)


class OfAdamWWithout(OfAdamW):
    def more(self) -> None:
        self.schedule = lr_scheduler.OneCycleLR(self.opt, 0.1, total_steps=30, cycle_momentum=False)


class OfAdamWDecayed(OfAdamW):
    """One whose first number, of rate and decay, varies with the rate."""

    make = functools.partial(optim.AdamW, weight_decay=0.3)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (OfSgd, r"^momentum of SGD is another in a later step \(.*opt.step\(\)\): 0.9\d+, then 0.9\d+: of what"),
        (
            OfAdamW,
            r"^beta1 \(`betas`\) of AdamW is another in a later step \(.*opt.step\(\)\): 0.9\d+, then 0.9\d+: of what",
        ),
        (OfAdamWDecayed, r"^beta1 \(`betas`\) of AdamW is another in a later step"),
    ],
)
def test_a_momentum_that_a_schedule_cycles_is_told_by_its_name(kind: type[Loop], said: str) -> None:
    with pytest.raises(ExportError, match=said):
        captured(kind(), data_of(4)).compile()


@pytest.mark.parametrize(
    ("kind", "option"), [(OfSgd, "momentum of SGD"), (OfAdamW, "betas of AdamW"), (OfFusedAdamW, "betas of AdamW")]
)
def test_of_momenta_that_a_schedule_cycles_the_remedy_is_the_schedules(kind: type[Loop], option: str) -> None:
    said = rf"keep {option} as captured \(a schedule such as `OneCycleLR` does with `cycle_momentum=False`; rates may change"
    with pytest.raises(ExportError, match=said):
        captured(kind(), data_of(4)).compile()


def test_the_rates_of_a_schedule_that_cycles_no_momenta_are_followed() -> None:
    check(OfAdamWWithout)


class Decayed(Plain):
    """Schedules the decay in each step, as DINO does, and the rate with it."""

    make = optim.AdamW
    is_decay = True

    def between(self) -> None:
        (group,) = self.opt.param_groups
        group["lr"] *= 0.9
        group["weight_decay"] += 0.01 * self.is_decay


class DecayedAlone(Decayed):
    def between(self) -> None:
        self.opt.param_groups[0]["weight_decay"] += 0.01


class DecayedFused(Decayed):
    make = functools.partial(optim.AdamW, fused=True)


class Kept(Decayed):
    is_decay = False


@pytest.mark.parametrize("kind", [Decayed, DecayedAlone, DecayedFused])
def test_a_decay_that_a_schedule_sets_is_to_be_kept(kind: type[Loop]) -> None:
    variant = captured(loop := kind(), data_of(4))
    with pytest.raises(ExportError, match=r"keep weight_decay of AdamW as captured \("):
        variant.compile()
    assert loop.opt.param_groups


def test_a_decay_that_is_kept_is_compiled_beside_a_rate_that_changes() -> None:
    check(Kept)


class Unused(Loop):
    """Has a parameter that no step gives a gradient, and that got one before."""

    options: dict[str, Any] = {"set_to_none": False}  # noqa: RUF012

    def optimizer(self) -> optim.Optimizer:
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.unused.sum().backward()
        return optim.SGD([*self.model.parameters(), self.unused], lr=0.01, weight_decay=0.3, momentum=0.9)

    def zero(self) -> None:
        self.opt.zero_grad(**self.options)


class UnusedWithout(Unused):
    options = {}  # noqa: RUF012


class UnusedModule(Unused):
    """One of a module, which an optimizer on a CPU updates as any other."""

    def optimizer(self) -> optim.Optimizer:
        self.other = nn.Linear(2, 2).double()
        self.other(torch.ones(2, dtype=torch.float64)).sum().backward()
        return optim.SGD([*self.model.parameters(), *self.other.parameters()], lr=0.01, weight_decay=0.3)


class UnusedLeftOut(Unused):
    def optimizer(self) -> optim.Optimizer:
        super().optimizer()
        return optim.SGD(self.model.parameters(), lr=0.01, weight_decay=0.3, momentum=0.9)


@pytest.mark.parametrize("kind", [Unused, UnusedModule])
def test_an_old_gradient_that_is_zero_is_refused_with_what_holds(kind: type[Loop]) -> None:
    with pytest.raises(ExportError, match=r"a parameter that the step gives no gradient.*Set gradients to None \("):
        captured(kind(), data_of(4)).compile()


@pytest.mark.parametrize("kind", [UnusedWithout, UnusedLeftOut])
def test_what_is_said_of_an_old_gradient_holds(kind: type[Loop]) -> None:
    check(kind)


class FusedAdagrad(Loop):
    def optimizer(self) -> optim.Optimizer:
        return optim.Adagrad(self.model.parameters(), lr=0.01, fused=True)

    def more(self) -> None:
        self.schedule = lr_scheduler.ExponentialLR(self.opt, 0.9)

    def between(self) -> None:
        self.schedule.step()


def test_of_a_rate_that_only_a_fused_operator_takes_as_a_number_the_remedy_is_another_operator() -> None:
    with pytest.raises(ExportError, match=r"make Adagrad without `fused=True`\.$"):
        captured(FusedAdagrad(), data_of(4)).compile()
    still = FusedAdagrad()
    still.between = lambda: None  # type: ignore[method-assign]
    step = captured(still, data_of(4)).compile()
    still.schedule.step()
    with pytest.raises(
        ValueError, match=r"for a rate that changes make Adagrad without `fused=True`, and capture it again"
    ):
        step(*data_of(1)[0])


class Queued(Loop):
    """A queue that a pointer of Python's goes round."""

    def prepare(self) -> None:
        self.queue, self.at = torch.zeros(20, 4, dtype=torch.float64), 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y) + (self.model(self.queue.clone()) ** 2).mean()
        with torch.no_grad():
            self.queue[self.at : self.at + 5] = x
        self.at = (self.at + 5) % 20
        return loss


class QueuedBehind(Queued):
    """The same behind the update, as MoCo does it."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.keys = x
        return Loop.loss(self, x, y) + (self.model(self.queue.clone()) ** 2).mean()

    @torch.no_grad()
    def after(self) -> None:
        self.queue[self.at : self.at + 5] = self.keys.tanh()
        self.at = (self.at + 5) % 20


class QueuedByTensor(Loop):
    """The remedy that a queue is refused with."""

    def prepare(self) -> None:
        self.queue, self.at = torch.zeros(20, 4, dtype=torch.float64), torch.zeros((), dtype=torch.int64)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y) + (self.model(self.queue.clone()) ** 2).mean()
        with torch.no_grad():
            self.queue.index_copy_(0, (self.at + torch.arange(5)) % 20, x)
            self.at.add_(5)
        return loss


@pytest.mark.parametrize("kind", [Queued, QueuedBehind])
def test_a_place_that_is_written_to_is_no_batch(kind: type[Loop]) -> None:
    with pytest.raises(
        ExportError, match=r"start of aten.slice.Tensor .*: write there by a tensor of positions, from a"
    ):
        captured(kind(), data_of(4)).compile()


def test_a_queue_that_a_tensor_goes_round_is_followed() -> None:
    check(QueuedByTensor)


class InPlace(Loop):
    """Prepares its batch in place."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.sub_(x.mean(0))
        return super().loss(x, y)


class Anew(Loop):
    """The remedy that it is refused with."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x - x.mean(0)
        return super().loss(x, y)


def test_data_that_a_step_writes_to_is_refused_or_told() -> None:
    said = r"the step writes to x \(.*x\.sub_\(x\.mean\(0\)\)\), of which each step reads another tensor"
    with pytest.raises(ExportError, match=said):
        captured(InPlace(), data_of(4)).compile()
    check(Anew)
    ours, (first, second) = InPlace(), data_of(2)
    ours.step(*first)
    with tracefuse.capture() as c:
        ours.step(*second)
    with pytest.warns(UserWarning, match=r"^the step writes to x, and goes on with the captured tensor at each call"):
        c.optimize().compile()


class Signed(optim.Optimizer):
    """An optimizer of one's own, as Lion is."""

    def __init__(self, params: Any, lr: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad.sign() * group["lr"])


class SignedByNumber(Loop):
    rate: Any = 0.01

    def optimizer(self) -> optim.Optimizer:
        return Signed(self.model.parameters(), self.rate)

    def more(self) -> None:
        self.schedule = lr_scheduler.CosineAnnealingLR(self.opt, 30)

    def between(self) -> None:
        self.schedule.step()


class SignedByTensor(SignedByNumber):
    """The remedy that it is refused with."""

    def optimizer(self) -> optim.Optimizer:
        return Signed(self.model.parameters(), torch.tensor(0.01, dtype=torch.float64))


def test_of_a_rate_of_ones_own_optimizer_the_remedy_is_a_tensor() -> None:
    with pytest.raises(ExportError, match=r"sub_\(one.grad.sign\(\) .*: compute .*`lr=torch.tensor\(0.01, dtype=…\)`"):
        captured(SignedByNumber(), data_of(4)).compile()
    check(SignedByTensor)


class Lion(optim.Optimizer):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.add_(one.grad.sign(), alpha=-group["lr"])


class ScaledByAlpha(SignedByNumber):
    """A tensor is read as a number there: in place of `alpha=` a product holds, as `SignedByTensor` has it."""

    def optimizer(self) -> optim.Optimizer:
        return Lion(self.model.parameters(), {"lr": torch.tensor(0.01, dtype=torch.float64)})


def test_of_a_rate_that_is_given_as_alpha_the_remedy_is_a_product() -> None:
    loop = ScaledByAlpha()
    with pytest.raises(ExportError, match=r"^alpha of aten.add_.Tensor .*, by a product in place of `alpha=`\.$"):
        captured(loop, data_of(4)).compile()
    check(SignedByTensor)


class ByFunction(Loop):
    """Gradients by `torch.func.grad`, which calls no `backward`."""

    def prepare(self) -> None:
        self.model = nn.Linear(4, 3).double()  # type: ignore[assignment]

    def gradients(self, x: Tensor, y: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        def loss(given: dict[str, Tensor]) -> Tensor:
            return F.mse_loss(torch.func.functional_call(self.model, given, (x,)), y)

        return torch.func.grad(loss)({name: one.detach() for name, one in weights.items()})

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        weights = dict(self.model.named_parameters())
        found = self.gradients(x, y, weights)
        for name, one in weights.items():
            one.grad = found[name]
        self.opt.step()


class ByFunctionCopied(ByFunction):
    def gradients(self, x: Tensor, y: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one.clone() for name, one in super().gradients(x, y, weights).items()}


class ByAutograd(ByFunction):
    def gradients(self, x: Tensor, y: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = F.mse_loss(self.model(x), y)
        return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def test_gradients_by_a_function_are_told_as_such_and_the_remedies_hold() -> None:
    loop = ByFunction()
    with pytest.raises(
        ExportError, match=r"^`torch.func.grad` starts a backward by itself \(.*torch.func.grad\(loss\)"
    ):
        captured(loop, data_of(4)).compile()
    check(ByFunctionCopied)
    check(ByAutograd)


class Sharpness(Loop):
    """SAM: the gradients of weights that were moved along their gradients."""

    both: Any = None

    def prepare(self) -> None:
        self.model = nn.Linear(4, 3).double()  # type: ignore[assignment]

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        loss = self.both or self.loss
        self.zero()
        loss(x, y).backward()
        moves = [0.05 * one.grad for one in self.model.parameters() if one.grad is not None]
        with torch.no_grad():
            for one, move in zip(self.model.parameters(), moves, strict=True):
                one.add_(move)
        self.zero()
        loss(x, y).backward()
        with torch.no_grad():
            for one, move in zip(self.model.parameters(), moves, strict=True):
                one.sub_(move)
        self.opt.step()


def test_a_step_that_moves_weights_between_two_forwards_is_told_as_such_and_the_remedy_holds() -> None:
    refused, eager, ours, data = Sharpness(), Sharpness(), Sharpness(), data_of(4)
    with pytest.raises(
        ExportError, match=r"^the step writes to weights between two forwards \(.*one.add_\(move\)\), as SAM"
    ):
        captured(refused, data).compile()
    x, y = data[0]
    with tracefuse.capture() as c:
        loss = ours.loss(x, y)
        loss.backward()
    ours.both = c.optimize().compile()
    for batch in data:
        eager.step(*batch)
        ours.step(*batch)
    mine, theirs = ours.left(), eager.left()
    assert max(float((mine[key] - theirs[key]).abs().max()) for key in theirs) < NEAR


class Seldom(Sharpness):
    """A head that is updated in every second step, with what the backwards of both have added up."""

    steps = 0

    def more(self) -> None:
        super().more()
        self.head = nn.Linear(3, 3).double()
        self.slow = optim.SGD(self.head.parameters(), lr=0.01)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.model(x)), y)

    def step(self, x: Tensor, y: Tensor) -> None:  # type: ignore[override]
        self.zero()
        loss = self.both or self.loss
        loss(x, y).backward()
        self.opt.step()
        self.steps += 1
        if self.steps % 2 == 0:
            self.slow.step()
            self.slow.zero_grad()


def test_an_optimizer_that_steps_in_some_iterations_only_is_named_and_the_remedy_holds() -> None:
    refused, eager, ours, data = Seldom(), Seldom(), Seldom(), data_of(12)
    said = r"^`loop.slow` steps in some iterations only, 1 time for 2 of `loop.opt` \(.*slow.step\(\)\), .*one forward and its"
    with pytest.raises(ExportError, match=said):
        captured(refused, data).compile()
    x, y = data[0]
    with tracefuse.capture() as c:
        loss = ours.loss(x, y)
        loss.backward()
    ours.opt.zero_grad()
    ours.slow.zero_grad()
    ours.both = c.optimize().compile()
    for batch in data:
        eager.step(*batch)
        ours.step(*batch)
    mine, theirs = ours.left(), eager.left()
    assert max(float((mine[key] - theirs[key]).abs().max()) for key in theirs) < NEAR


class Forced(Loop):
    """Teacher forcing: Python takes what the next one reads, and loops over places."""

    def prepare(self) -> None:
        self.chance = random.Random(1)
        self.net = nn.Linear(1, 1).double()

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.net.parameters(), lr=0.01, fused=True)

    def choose(self, right: Tensor, said: Tensor) -> Tensor:
        return right.clone() if self.chance.random() < 0.5 else said

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, total = x[:, :1], torch.zeros(()).double()
        for at in range(3):
            said = self.net(one)
            total = total + F.mse_loss(said, y[:, at : at + 1])
            one = self.choose(y[:, at : at + 1], said)
        return total


class ForcedByTensors(Forced):
    def choose(self, right: Tensor, said: Tensor) -> Tensor:
        return torch.where(torch.rand(()) < 2.0, right, said)


class Packed(Loop):
    lengths = ((3, 1), (3, 2), (2, 2), (3, 2), (3, 3), (2, 1))
    steps = 0

    def prepare(self) -> None:
        self.net = nn.RNN(4, 3, batch_first=True).double()

    def optimizer(self) -> optim.Optimizer:
        return optim.AdamW(self.net.parameters(), lr=0.01, fused=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        lengths = self.lengths[self.steps % 6]
        packed = nn.utils.rnn.pack_padded_sequence(x[:2, None].expand(2, 3, 4), lengths, True)
        said, _ = nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], True)
        return said.square().mean()


def test_a_branch_of_pythons_is_told_as_such_and_no_place_in_it() -> None:
    loop = Forced()
    with pytest.raises(
        ExportError, match=r"ran other ops: .*take one by `torch.where\(torch.rand\(\(\)\) < p, a, b\)`"
    ):
        captured(loop, data_of(6)).compile()
    check(ForcedByTensors)


def test_lengths_of_packed_sequences_are_told_as_such() -> None:
    loop = Packed()
    with pytest.raises(
        ExportError, match=r"the lengths of a packed sequence are other ones in each step: run the net on"
    ):
        captured(loop, data_of(6)).compile()


class Mixed(Loop):
    """A number that Python draws, and a loss that is logged, which have nothing to do with each other."""

    def prepare(self) -> None:
        self.chance = random.Random(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        part = self.chance.random()
        loss = super().loss(part * x, y)
        self.logged = loss.item()
        return loss


def test_what_is_only_logged_is_no_reason_for_another_number() -> None:
    loop = Mixed()
    with pytest.raises(ExportError, match=r"^other of aten.mul.Tensor .*, which the step then takes\.$"):
        captured(loop, data_of(4)).compile()


def test_of_two_optimizers_of_one_model_the_one_that_is_gone_is_named() -> None:
    model, x = nn.Linear(4, 3), torch.randn(5, 4)
    kept = {"optimizer": optim.SGD(model.parameters(), lr=0.1)}

    def fit() -> None:
        inner = optim.Adam(model.parameters(), lr=0.1, fused=True)
        for _ in range(4):
            inner.zero_grad()
            model(x).square().mean().backward()
            inner.step()

    with tracefuse.capture_step(n=3) as c:
        fit()
    variant = c.optimize()
    with pytest.raises(ExportError, match=r"^the optimizer Adam is gone"):
        variant.compile()
    assert kept
