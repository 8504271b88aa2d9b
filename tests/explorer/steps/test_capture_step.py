"""One step of a run, wherever its loop lives: which operators are its own, that it replays, and that the run is left alone."""

from __future__ import annotations

import copy
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.errors import CaptureError, OptionError
from tracefuse.steps import watch
from tracefuse.steps.stream import StepOp
from tracefuse.steps.varying import difference

optimizer_module = sys.modules["torch.optim.optimizer"]


class Loop:
    """A loop as people write it: accumulation, clipping, a scheduler, an average of the weights, zeroed gradients, logging."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, accumulate: int = 2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.data, self.labels = torch.randn(32, 4), torch.randint(0, 2, (32,))
        self.accumulate, self.losses, self.weights = accumulate, [], []
        self.at: Callable[[int], None] = lambda step: None

    def train(self, steps: int) -> Loop:
        for step in range(1, steps + 1):
            self.at(step)
            self.step()
        return self

    def step(self) -> None:
        for _ in range(self.accumulate):
            rows = torch.randint(0, 32, (8,))
            loss = nn.functional.cross_entropy(self.model(self.data[rows]), self.labels[rows]) / self.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            for average, weight in zip(self.ema.parameters(), self.model.parameters(), strict=True):
                average.mul_(0.9).add_(weight, alpha=0.1)
        self.losses.append(loss.item())
        self.weights.append([weight.detach().clone() for weight in self.model.parameters()])


def funcs(capture: tracefuse.Capture) -> list[str]:
    return [str(call.func).removeprefix("aten.") for call in capture.run.recorder.recording.calls]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert _get_current_dispatch_mode_stack() == []
    assert not modules._global_forward_pre_hooks
    assert not optimizer_module._global_optimizer_post_hooks


@pytest.mark.parametrize("n", [2, 3])
def test_it_is_that_step_with_all_its_micro_batches(n: int) -> None:
    plain, loop = Loop().train(5), Loop()
    with tracefuse.capture_step(n=n) as c:
        loop.train(5)
    assert loop.losses == plain.losses
    assert all(map(same, loop.weights, plain.weights))
    ran = funcs(c)
    assert ran[0] == "randint.low"
    assert ran.count("nll_loss_forward.default") == ran.count("nll_loss_backward.default") == 2
    assert ran[-9:] == ["_local_scalar_dense.default"] + ["detach.default", "clone.default"] * 4
    assert ran[-17:-9] == ["mul_.Tensor", "add_.Tensor"] * 4  # the average of the weights


def test_the_inputs_are_those_at_its_start_and_a_replay_gives_its_end() -> None:
    loop = Loop()
    with tracefuse.capture_step(n=3) as c:
        loop.train(5)
    names = [name for name, _ in loop.model.named_parameters()]
    weights = {i.name: i.source for i in c.trace.inputs if i.source in names}
    began = {i.source: t for i, t in zip(c.trace.inputs, c.example_inputs, strict=True)}
    assert same([began[name] for name in names], loop.weights[1])
    assert c.program.uncut == ""
    ended = zip((*c.trace.outputs, *c.update.outputs), c.replay(), strict=True)
    new = {weights[o.of]: t for o, t in ended if o.of in weights and o.kind == "mutation"}
    assert same([new[name] for name in names], loop.weights[2])


def test_the_last_step_agrees_with_what_it_left() -> None:
    loop = Loop()
    with tracefuse.capture_step(n=3) as c:
        loop.train(3)
    found = c.check()
    assert found is not None
    assert found.compared > 10
    assert found.differing == 0


@pytest.mark.parametrize("way", ["a block", "a step"])
@pytest.mark.parametrize("writes", [False, True])
def test_a_step_of_a_loop_in_a_function_is_held_against_what_it_left(way: str, writes: bool) -> None:
    """What the optimizer wrote is overwritten by the next step, and the loss is gone: numbers of both are kept."""

    def train() -> None:
        torch.manual_seed(0)
        model = nn.Linear(40, 20)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step() -> float:
            loss = model(torch.randn(8, 40)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        for _ in range(6):
            step()
            if writes:
                model.weight.detach().numpy()[:] += 1  # which no operator does

    with tracefuse.capture() if way == "a block" else tracefuse.capture_step(n=3) as c:
        train()
    found = c.check()
    assert found is not None
    assert found.compared == found.outputs == found.sampled + 1
    assert found.differing == writes, str(found)
    assert not writes or "weight" in found.worst


def test_other_steps_run_without_a_mode_or_a_hook() -> None:
    seen = {}

    def look(step: int) -> None:
        seen[step] = len(_get_current_dispatch_mode_stack()), len(modules._global_forward_pre_hooks)

    loop = Loop()
    loop.at = look
    with tracefuse.capture_step(n=3):
        loop.train(10)
    assert [seen[step] for step in (1, 8, 9, 10)] == [(0, 0)] * 4
    assert seen[2] == (1, 1)  # what ends step 2 reads what it computed


TAILS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "step's alone": lambda out, y: out.abs().mean(),
    "joined": lambda out, y: (out - y).abs().mean(),
    "data first": lambda out, y: (y.argmax(1) == out.argmax(1)).double().mean(),
    "prepared": lambda out, y: (y.abs() / y.abs().sum() * out).sum(),
}


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("way", TAILS)
def test_what_joins_a_steps_results_with_data_behind_the_update_shifts_no_step(way: str, n: int, steps: int) -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 3), torch.randn(steps, 2, 4)
    optimizer, log, targets = torch.optim.SGD(model.parameters(), lr=0.1), [], torch.randn(2, 3)
    with tracefuse.capture_step(n=n) as c:
        for x in data:
            optimizer.zero_grad()
            out = model(x)
            (out - targets).square().mean().backward()
            seen = out.detach()
            optimizer.step()
            log.append(TAILS[way](seen, targets))
    assert c.steps.captured == n
    (given,) = (one for i, one in zip(c.trace.inputs, c.example_inputs, strict=True) if i.name == "x")
    assert torch.equal(given, data[n - 1])
    assert funcs(c)[0] == "t.default"
    assert all(not step.difference.more and not step.difference.fewer for step in c.steps.steps[n:])


def test_a_buffer_that_is_replaced_behind_the_update_shifts_no_step() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
    optimizer, norm = torch.optim.SGD(model.parameters(), lr=0.1), model[1]
    with tracefuse.capture_step(n=3) as c:
        for x in torch.randn(5, 3, 4):
            model(x).square().mean().backward()
            optimizer.step()
            norm.running_mean = norm.running_mean * 0.5
    assert c.steps.captured == 3
    assert funcs(c)[-1] == "mul.Tensor"


def test_what_a_step_says_of_itself() -> None:
    with tracefuse.capture_step(n=3) as c:
        Loop().train(8)
    steps = c.steps
    assert (len(steps), steps.captured, steps.optimizers) == (8, 3, ("AdamW",))
    assert [step.ops for step in steps] == [None, None, *[steps.steps[2].ops] * 4, None, None]
    assert all(step.seconds > 0 for step in list(steps)[1:])
    assert (steps.steps[3].difference.more, steps.steps[3].difference.fewer) == ((), ())
    told = {(one.op, one.argument) for one in c.varying}
    assert ("aten.addcdiv_.default", "value") in told  # the learning rate over a bias correction
    assert all("self.optimizer.step()" in one.source.text for one in c.varying)
    head, *rows = str(c.varying).splitlines()
    assert head.split() == ["argument", "operator", "values", "here", "next", "line"]
    assert len(rows) <= 11
    assert any(row.startswith("value ") and "aten.addcdiv_.default" in row for row in rows)
    assert sum(int(row.split()[2]) for row in rows if not row.startswith("and ")) <= len(c.varying)
    assert "one step × 8, step 3 shown (AdamW)" in str(steps)
    assert str(steps).endswith(
        "\nSteps 4 to 6 were compared with it: what others run beside that, as under `if i % 10 == 0:`, is not known."
    )


@pytest.mark.parametrize(("steps", "said"), [(1, ""), (3, "Step 2 was compared"), (4, "Step 4 was compared")])
def test_it_says_which_steps_were_compared(steps: int, said: str) -> None:
    with tracefuse.capture_step(n=min(steps, 3)) as c:
        Loop().train(steps)
    assert ("\n" + said in str(c.steps)) if said else "compared" not in str(c.steps)


def test_a_fused_optimizer_varies_in_its_learning_rate_alone() -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["fused"] = True
    loop.optimizer.param_groups[0]["foreach"] = False
    with tracefuse.capture_step(n=2) as c:
        loop.train(4)
    assert {(one.op, one.argument) for one in c.varying} == {("aten._fused_adamw_.default", "lr")}
    (lr,) = c.varying
    assert (lr.here, lr.there) == (pytest.approx(0.05), pytest.approx(0.1 / 3))


def test_the_first_step_begins_with_the_model() -> None:
    with tracefuse.capture_step(n=1) as c:
        loop = Loop()
        loop.train(3)
    assert funcs(c)[0] == "t.default"
    assert c.steps.captured == 1
    assert "nn.Linear" not in c.trace.code  # making the model is no part of it
    assert "randn" not in c.trace.code


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_operator_of_a_step_has_its_twin(n: int) -> None:
    model, rows = nn.Embedding(4, 3), torch.tensor([1, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture_step(n=n) as c:
        for _ in range(3):
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert funcs(c)[0] == "embedding.default"
    (backward,) = (x for x in c.run.recorder.recording.calls if "embedding_dense_backward" in str(x.func))
    assert backward.origin.module_type == "Embedding"


# --- what people's loops do -------------------------------------------------------------------------------------------


def gan(steps: int, critics: int = 1) -> list[float]:
    torch.manual_seed(0)
    g, d = nn.Linear(3, 4), nn.Linear(4, 1)
    of_g, of_d = torch.optim.Adam(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        for _ in range(critics):
            of_d.zero_grad()
            loss = d(g(torch.randn(2, 3)).detach()).mean() - d(torch.randn(2, 4)).mean()
            loss.backward()
            of_d.step()
        of_g.zero_grad()
        loss = -d(g(torch.randn(2, 3))).mean()
        loss.backward()
        of_g.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("critics", "updates"), [(1, ("SGD", "Adam")), (3, ("SGD",) * 3 + ("Adam",))])
def test_a_step_of_several_optimizers_is_what_repeats(critics: int, updates: tuple[str, ...]) -> None:
    plain = gan(7, critics)
    with tracefuse.capture_step(n=3) as c:
        assert gan(7, critics) == plain
    assert c.steps.optimizers == updates
    assert len(c.steps) == 7
    ran = funcs(c)
    assert ran.count("addmm.default") == 3 * critics + 2
    assert c.steps.captured == 3


@pytest.mark.parametrize("way", ["a block", "a step"])
def test_an_update_without_a_backward_belongs_to_the_step_before_it(way: str) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture() if way == "a block" else tracefuse.capture_step(n=3) as c:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
            optimizer.step()
    assert (len(c.steps), c.steps.captured, c.steps.optimizers) == (5, 3, ("SGD", "SGD"))
    assert funcs(c).count("addmm.default") == 1
    assert len(c.run.recorder.recording.updates) == 2


def test_updates_of_gradients_that_no_backward_made_are_steps() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture_step(n=2) as c:
        for _ in range(4):
            with torch.no_grad():
                model.weight.grad = model(torch.ones(2, 4)).mean() * model.weight
            optimizer.step()
    assert (len(c.steps), c.steps.captured) == (4, 2)


def test_a_batch_that_is_fetched_ahead_is_the_next_steps_input() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1), torch.randn(10, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ahead = data[0] * 2
    with tracefuse.capture_step(n=3) as c:
        for i in range(1, 6):
            batch, ahead = ahead, data[i] * 2
            (ahead > 0).sum()
            model(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert funcs(c)[:4] == ["select.int", "mul.Tensor", "gt.Scalar", "sum.default"]
    assert funcs(c).count("select.int") == 1
    assert c.steps.steps[3].ops == c.steps.steps[2].ops


def test_a_scaler_is_a_part_of_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            with torch.autocast("cpu"):
                loss = model(torch.randn(2, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    ran = funcs(c)
    assert ran[0] == "randn.default"
    assert ran[-1] == "_amp_update_scale_.default"
    assert ran.count("_amp_update_scale_.default") == 1
    assert c.varying == ()


def test_swa_utils_are_a_part_of_the_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(5):
            model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    ran = funcs(c)
    assert ran[0] == "randn.default"
    assert ran[-1] == "add_.Tensor"  # n_averaged
    assert c.steps.steps[3].ops == c.steps.steps[2].ops


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "way", ["around a step", "across steps", "autocast and checkpoint", "default device", "no grad"]
)
def test_modes_that_are_entered_between_stay_where_they_are(way: str) -> None:
    def train(steps: int) -> list[float]:
        torch.manual_seed(0)
        model, losses = nn.Linear(4, 4), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        open_mode = Seen().__enter__() if way == "across steps" else None
        for step in range(6):
            with ExitStack() as stack:
                if way == "around a step":
                    stack.enter_context(Seen())
                if way == "autocast and checkpoint":
                    stack.enter_context(torch.autocast("cpu"))
                if way == "default device":
                    stack.enter_context(torch.device("cpu"))
                x = torch.randn(2, 4)
                out = checkpoint(model, x, use_reentrant=False) if "checkpoint" in way else model(x)
                loss = out.square().mean()
                loss.backward()
            with torch.no_grad() if way == "no grad" else ExitStack():
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if open_mode is not None and step in (1, 2, 3):
                open_mode.__exit__(None, None, None)
                assert open_mode not in _get_current_dispatch_mode_stack()
                open_mode = Seen().__enter__()
        if open_mode is not None:
            open_mode.__exit__(None, None, None)
        return losses

    plain = train(6)
    with tracefuse.capture_step(n=3) as c:
        assert train(6) == plain
    assert funcs(c)[0] == "randn.default"
    assert funcs(c).count("addmm.default") == 1
    assert c.steps.steps[3].ops == c.steps.steps[2].ops


def test_a_closure_runs_the_step_inside_the_optimizers() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).mean()
        loss.backward()
        return loss

    with tracefuse.capture_step(n=3) as c:
        for _ in range(5):
            optimizer.step(closure)
    assert funcs(c)[0] == "ones.default"
    assert c.steps.steps[3].ops == c.steps.steps[2].ops


def test_an_optimizer_that_calls_another_makes_one_update() -> None:
    class Lookahead(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups[0]["params"], lr=0.1)
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()

    model = nn.Linear(4, 1)
    optimizer = Lookahead(torch.optim.Adam(model.parameters()))
    with tracefuse.capture_step(n=2) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    assert (len(c.steps), c.steps.optimizers) == (4, ("Lookahead",))


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_of_optimizers_that_each_round_makes_anew_it_is_said_that_no_step_repeats() -> None:
    """First-order MAML: the inner optimizer, and what it trains, are new ones in each round."""
    model, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)

    def adapt() -> None:
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            fast(x).square().mean().backward()
            inner.step()
        for mine, found in zip(model.parameters(), fast.parameters(), strict=True):
            mine.grad = found.grad
        outer.step()

    with tracefuse.capture_step(n=3) as c:
        for _ in range(6):
            adapt()
    said = r"updates of this run never repeat.*\(7 of SGD stepped\), as the inner ones of MAML. Capture one forward and"
    with pytest.raises(CaptureError, match=said):
        _ = c.trace
    assert re.match(r"one step \(\d+ updates: \d+ of SGD\)", str(c.steps))
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    assert c.optimize().compile()() == loss


def test_a_run_that_ends_too_early_says_how_far_it_came() -> None:
    with tracefuse.capture_step(n=3) as c:
        Loop().train(2)
        assert repr(c) == "<tracefuse.Capture: nothing yet>"
    assert "after 2 whole steps, before step 3 was over" in repr(c)
    with pytest.raises(CaptureError, match=r"after 2 whole steps, before step 3 was over.*capture_step\(n=1\)"):
        _ = c.trace
    assert (c.steps.captured, c.steps.headline, c.varying) == (None, "one step × 2", ())


def test_a_run_without_an_optimizer_is_told_what_to_do() -> None:
    with tracefuse.capture_step() as c:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    with pytest.raises(CaptureError, match=r"no optimizer of torch's.*tracefuse.capture\(\)"):
        _ = c.trace


def test_a_loop_on_another_thread_is_told_where_to_enter() -> None:
    with tracefuse.capture_step() as c:
        thread = threading.Thread(target=Loop().train, args=(5,))
        thread.start()
        thread.join()
    assert c.steps is None
    with pytest.raises(CaptureError, match=r"steps on another thread: enter `tracefuse.capture_step\(\)` there"):
        _ = c.trace


def test_optimizers_that_step_inside_the_backward_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    with tracefuse.capture_step(n=2) as c:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(CaptureError, match="steps inside the backward"):
        _ = c.trace


@pytest.mark.parametrize("n", [0, -1, 1.5, "3"])
def test_steps_are_counted_from_one(n: Any) -> None:
    with pytest.raises(OptionError, match="counted from 1"):
        tracefuse.capture_step(n=n)


def test_an_error_of_the_run_is_its_own_and_a_step_before_it_is_kept() -> None:
    loop = Loop()

    def stop(step: int) -> None:
        if step == 5:
            raise KeyError("mine")

    loop.at = stop
    with pytest.raises(KeyError, match="mine"), tracefuse.capture_step(n=3) as c:
        loop.train(9)
    assert c.trace.op_count


def test_it_is_entered_once() -> None:
    with tracefuse.capture_step(n=1) as c:
        Loop().train(2)
    with pytest.raises(CaptureError, match="already run"):
        c.__enter__()


@pytest.mark.parametrize("place", ["held_by", "StepRecorder.noted_calls", "StepRecorder", "Between"])
def test_whatever_fails_in_us_the_run_goes_on(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("ours")

    plain, loop = Loop().train(6), Loop()
    monkeypatch.setattr(f"tracefuse.steps.watch.{place}", fail)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with tracefuse.capture_step(n=3) as c:
            loop.train(6)
    assert loop.losses == plain.losses
    assert all(map(same, loop.weights, plain.weights))
    assert ["your program goes on without it" in str(one.message) for one in told] == [True]
    with pytest.raises(CaptureError, match="ours"):
        _ = c.trace


@pytest.mark.filterwarnings("ignore:comparing steps stopped")
def test_steps_that_cannot_be_compared_leave_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "difference", lambda *steps: 1 / 0)
    with tracefuse.capture_step(n=2) as c:
        losses = Loop().train(4).losses
    assert losses == Loop().train(4).losses
    assert len(c.replay()) > 10
    assert "steps could not be compared: ZeroDivisionError" in str(c.steps)
    assert c.steps.steps[2].difference is None


class Prickly:
    """Something that an operator is given and that cannot be compared, as a process group."""

    def __ne__(self, other: object) -> bool:
        raise NotImplementedError("__ne__")


def test_only_plain_values_are_compared() -> None:
    add = torch.ops.aten.add.Tensor
    array = torch.ones(3).numpy()
    one = [StepOp(add, (Prickly(), array, 1.0, float("nan"), torch.float32), {"alpha": 2}, None)]
    other = [StepOp(add, (Prickly(), array + 1, 2.0, float("nan"), torch.float64), {"alpha": 3}, None)]
    assert [varying.here for varying in difference(one, other).varying] == [1.0, torch.float32, 2]


@pytest.mark.parametrize("read", [False, True], ids=["left", "read again"])
@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("moved", [torch.Tensor.double, torch.Tensor.clone], ids=["elsewhere", "alike"])
def test_a_loop_that_moves_its_module_when_it_ends_leaves_the_step_as_it_was(
    moved: Callable[[Tensor], Tensor], steps: int, read: bool
) -> None:
    """As Lightning's `fit` does, which takes the module from the GPU: here to another dtype."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), fused=True)

    def fit() -> None:
        for x in torch.randn(steps, 5, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for parameter in model.parameters():
            parameter.data = moved(parameter.data)

    with tracefuse.capture_step(n=3) as c:
        fit()
        if read:
            _ = [p.detach().clone() for p in model.parameters()]
    assert all(one.dtype is torch.float32 for one in c.example_inputs if one.is_floating_point())
    assert not [node for node in c.trace.ops if "_to_copy" in str(node.target)]
    c.check()
    c.optimize().measure(budget_s=0.1)


class Behind:
    """Training whose loop gives weights other data behind each update."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(0)
        self.way = way
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.slow = [p.detach().clone() for p in self.model.parameters()]

    def run(self, batches: list[Tensor]) -> None:
        for x in batches:
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            with torch.no_grad():
                self.changed()

    def changed(self) -> None:
        pairs = list(zip(self.slow, self.model.parameters(), strict=True))
        if self.way == "clamped":
            for _, p in pairs:
                p.data = p.data.clamp(-0.1, 0.1)
        elif self.way == "looked ahead":
            for slow, p in pairs:
                slow.add_(p.data - slow, alpha=0.5)
                p.data = slow.clone()
        elif self.way == "moved and averaged":
            for slow, p in pairs:
                p.data = p.data.clone()
                slow.mul_(0.9).add_(p.detach(), alpha=0.1)
        else:
            own = [p.data for _, p in pairs]
            for slow, p in pairs:
                p.data = slow
            torch.stack([p.norm() for _, p in pairs]).sum()
            for data, (slow, p) in zip(own, pairs, strict=True):
                p.data = data
                slow.mul_(0.9).add_(p.detach(), alpha=0.1)
                p.mul_(0.5)


@pytest.mark.parametrize("steps", [3, 5])
@pytest.mark.parametrize("way", ["clamped", "looked ahead", "moved and averaged", "swapped"])
def test_weights_with_other_data_behind_the_update_are_a_part_of_the_step_or_refused(way: str, steps: int) -> None:
    batches = list(torch.randn(steps + 2, 5, 4, dtype=torch.float64))
    eager, ours = Behind(way), Behind(way)
    eager.run(batches)
    with tracefuse.capture_step(n=3) as c:
        ours.run(batches[:steps])
    step, refused = None, ""
    try:
        step = c.optimize().check().compile()
    except CaptureError as error:
        refused = str(error)
    if step is None:
        assert re.search(r"gives one of its inputs new data.*test_capture_step\.py:\d+  \w+\.data = ", refused)
        return
    for x in batches[steps:]:
        step(x)
    for mine, theirs in zip(
        (*ours.model.parameters(), *ours.slow), (*eager.model.parameters(), *eager.slow), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
