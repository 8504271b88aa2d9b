"""A compiled training step beside eager: the same weights, state and buffers after ten steps, also resumed.

All in float64, where the two may differ by rounding alone.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forks import run_python
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

import tracefuse
from tracefuse.errors import ExportError, MeasureError
from tracefuse.tables.summary import remarks
from tracefuse.training.graphed import unused_pieces
from tracefuse.variant import Variant

NEAR = 1e-10
CAPTURED = 4  # Steps that run while the third is captured.

Batch = tuple[Tensor, Tensor]


class Training:
    """A small model with a batch norm, and a step as people write it."""

    def __init__(
        self,
        make: Callable[[Any], torch.optim.Optimizer],
        schedule: Callable[[Any], Any] | None = None,
        clip: bool = True,
        scaled: bool = False,
        micro: int = 1,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)
        self.model = nn.Sequential(*layers).double().to(device)
        self.opt = make(self.model.parameters())
        self.schedule = schedule(self.opt) if schedule else None
        self.scaler = torch.amp.GradScaler(device, init_scale=8.0, growth_interval=3, enabled=scaled)
        self.clip, self.micro = clip, micro

    def step(self, batches: list[Batch]) -> None:
        self.opt.zero_grad()
        for x, y in batches:
            loss = F.mse_loss(self.model(x), y) / self.micro
            self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        if self.clip:
            clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.opt)
        self.scaler.update()

    def scheduled(self) -> None:
        if self.schedule is not None:
            self.schedule.step()

    def run(self, data: list[list[Batch]]) -> None:
        for batches in data:
            self.step(batches)
            self.scheduled()

    def checkpoint(self) -> list[Any]:
        return copy.deepcopy([one.state_dict() for one in (self.model, self.opt)])

    def resume(self, checkpoint: list[Any]) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self.model.load_state_dict(checkpoint[0])
        self.opt.load_state_dict(checkpoint[1])

    def left(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict())
        for at, entries in enumerate(self.opt.state.values()):
            found |= {f"{key} of {at}": one for key, one in entries.items() if isinstance(one, Tensor)}
        return found | {f"scaler {k}": torch.as_tensor(v) for k, v in self.scaler.state_dict().items()}


def data_of(steps: int, micro: int = 1, device: str = "cpu") -> list[list[Batch]]:
    made = torch.Generator().manual_seed(7)

    def tensor(columns: int) -> Tensor:
        return torch.randn(5, columns, dtype=torch.float64, generator=made).to(device)

    return [[(tensor(4), tensor(3)) for _ in range(micro)] for _ in range(steps)]


def optimised(training: Training, data: list[list[Batch]], n: int = 3) -> Variant:
    """The third of the steps on `data`, captured, with all passes."""
    opt, scaler = training.opt, training.scaler  # noqa: F841  (names for the capture)
    with tracefuse.capture_step(n=n) as c:
        training.run(data)
    assert c.update is not None, c.program.uncut
    return c.optimize()


def assert_alike(ours: Training, eager: Training) -> None:
    mine, theirs = ours.left(), eager.left()
    assert mine.keys() == theirs.keys()
    far = {key: float((mine[key].double() - theirs[key].double()).abs().max()) for key in mine}
    assert max(far.values()) < NEAR, far


def of(kind: Any, **options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: kind(parameters, **({"lr": 0.01} | options))


def cosine(opt: Any) -> Any:
    return lr_scheduler.CosineAnnealingLR(opt, 20)


def each_step(opt: Any) -> Any:
    return lr_scheduler.LambdaLR(opt, lambda at: 0.8**at)


optim = torch.optim
FUSED = of(optim.AdamW, fused=True)
TRAININGS: dict[str, dict[str, Any]] = {
    "adamw": {"make": FUSED},
    "adamw, scheduled": {"make": FUSED, "schedule": cosine},
    "adamw, two groups": {
        "make": lambda p: optim.AdamW([{"params": (own := list(p))[:2], "lr": 0.1}, {"params": own[2:]}], fused=True),
        "schedule": each_step,
    },
    "adamw, tensor lr": {"make": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True), "schedule": each_step},
    "adam, amsgrad": {"make": of(optim.Adam, fused=True, amsgrad=True, weight_decay=0.1), "schedule": cosine},
    "sgd, momentum, fused": {"make": of(optim.SGD, fused=True, momentum=0.9), "schedule": each_step},
    "sgd, momentum, lists": {"make": of(optim.SGD, foreach=True, momentum=0.9)},
    "sgd, not clipped": {"make": of(optim.SGD), "clip": False},
    "scaled": {"make": FUSED, "scaled": True, "schedule": cosine},
    "accumulated": {"make": FUSED, "micro": 2, "schedule": cosine},
}


@pytest.fixture(params=TRAININGS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return TRAININGS[request.param]


def flat(batches: list[Batch]) -> list[Tensor]:
    return [tensor for batch in batches for tensor in batch]


def test_ten_steps_leave_what_eager_leaves_also_resumed_in_the_middle(options: dict[str, Any]) -> None:
    eager, ours = Training(**options), Training(**options)
    data = data_of(CAPTURED + 10, ours.micro)
    step = optimised(ours, data[:CAPTURED]).compile()
    eager.run(data[:CAPTURED])
    assert_alike(ours, eager)
    for at, batches in enumerate(data[CAPTURED:]):
        if at == 5:
            for one in (eager, ours):
                one.resume(one.checkpoint())
        before = [parameter.grad for parameter in ours.model.parameters()]
        step(*flat(batches))
        ours.scheduled()
        assert all(a is b.grad for a, b in zip(before, ours.model.parameters(), strict=True))
        eager.run([batches])
        assert_alike(ours, eager)


@pytest.fixture(scope="module")
def adamw() -> tuple[Training, Variant]:
    ours = Training(FUSED, cosine)
    return ours, optimised(ours, data_of(CAPTURED))


def test_gradients_stay_as_they_are(adamw: tuple[Training, Variant]) -> None:
    ours, variant = adamw
    ((x, y),) = data_of(1)[0]
    step = variant.compile()
    before = [parameter.grad.clone() for parameter in ours.model.parameters()]
    step(x, y)
    assert all(torch.equal(a, p.grad) for a, p in zip(before, ours.model.parameters(), strict=True))
    ours.opt.zero_grad()
    step(x, y)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_the_results_are_those_of_the_capture(adamw: tuple[Training, Variant]) -> None:
    ours, variant = adamw
    ((x, y),) = data_of(1)[0]
    step = variant.compile()
    expected = F.mse_loss(copy.deepcopy(ours.model)(x), y)
    torch.testing.assert_close(step(x, y), expected.detach())
    assert len(step.results) == 1


def test_data_goes_by_name_too(adamw: tuple[Training, Variant]) -> None:
    ours, variant = adamw
    ((x, y),) = data_of(1)[0]
    step = variant.compile()
    assert variant.compile() is step
    before = ours.checkpoint()
    first = step(x, y)
    ours.resume(before)
    assert torch.equal(first, step(**dict(zip(step.inputs, (x, y), strict=True))))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.zeros(4, 4, dtype=torch.float64), 2), r"float64\[4, 4\] on cpu, and the step takes .*\[5, 4\]"),
        ((torch.zeros(5, 4), 2), r"float32\[5, 4\] on cpu, and the step takes torch.float64"),
        ((1, 2, 3), "got 3 by position: pass no more"),
        ((3.0, 2), r"is float, and the step takes .* on cpu"),
    ],
)
def test_other_data_is_refused_before_anything_is_written(adamw: Any, given: Any, said: str) -> None:
    ours, variant = adamw
    before = ours.checkpoint()
    with pytest.raises(ValueError, match=said):
        variant.compile()(*given)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), ours.model.state_dict().values(), strict=True))


def test_data_that_is_left_out_beside_other_data_is_refused_before_anything_is_written(
    adamw: tuple[Training, Variant],
) -> None:
    ours, variant = adamw
    ((x, _),) = data_of(1)[0]
    before = ours.checkpoint()
    step = variant.with_config(cat=False).compile()
    with pytest.raises(ValueError, match=rf"^the step takes {', '.join(step.inputs)}: pass {step.inputs[1]} too$"):
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), ours.model.state_dict().values(), strict=True))


def test_what_a_call_is_told_ends_no_program_that_takes_warnings_for_errors(adamw: tuple[Training, Variant]) -> None:
    ours, variant = adamw
    before = ours.checkpoint()
    step = variant.with_config(pad=False, simplify=False).compile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    ours.resume(before)


def test_a_call_without_data_runs_on_the_captured_one_and_says_so_once(adamw: tuple[Training, Variant]) -> None:
    ours, variant = adamw
    before = ours.checkpoint()
    step = variant.with_config(cat=False, pad=False).compile()
    with pytest.warns(
        UserWarning, match=r"^the step takes \w+, \w+, and was called without data: it runs again"
    ) as told:
        found = step()
    assert [one.filename for one in told] == [__file__]
    ours.resume(before)
    (batch,) = data_of(CAPTURED)[2]
    with warnings.catch_warnings(record=True) as more:
        warnings.simplefilter("always")
        assert torch.equal(step(*batch), found)
        step()
    assert not [one for one in more if "called without" in str(one.message)]
    ours.resume(before)


def test_data_of_another_name_is_refused_by_that_name(adamw: Any) -> None:
    _, variant = adamw
    ((x, y),) = data_of(1)[0]
    step = variant.compile()
    with pytest.raises(
        ValueError, match=rf"the step takes {', '.join(step.inputs)}, and nothing called targets: pass no more"
    ):
        step(x, targets=y)


def test_data_that_is_passed_by_position_and_by_name_is_refused(adamw: tuple[Training, Variant]) -> None:
    _, variant = adamw
    ((x, y),) = data_of(1)[0]
    step = variant.compile()
    name = step.inputs[0]
    with pytest.raises(ValueError, match=f"^{name} by position and by name: pass it once$"):
        step(x, y, **{name: x})


def test_frozen_parameters_and_their_state_stay_as_they_are() -> None:
    ours, data = Training(FUSED, cosine), data_of(CAPTURED + 3)
    step = optimised(ours, data[:CAPTURED]).with_config(freeze=["0.*"]).compile()
    eager = Training(FUSED, cosine)
    eager.run(data[:CAPTURED])
    for parameter in eager.model[0].parameters():
        parameter.requires_grad_(False)
    for batches in data[CAPTURED:]:
        step(*flat(batches))
        ours.scheduled()
        eager.run([batches])
    assert_alike(ours, eager)


def test_the_norm_that_clipping_returned_is_a_result_too() -> None:
    ours, twin, data = Training(FUSED), Training(FUSED), data_of(CAPTURED + 1)
    twin.run(data[:CAPTURED])
    with tracefuse.capture_step(n=3) as c:
        for ((x, y),) in data[:CAPTURED]:
            ours.opt.zero_grad()
            loss = F.mse_loss(ours.model(x), y)
            loss.backward()
            norm = clip_grad_norm_(ours.model.parameters(), 0.1)
            ours.opt.step()
    step = c.optimize().compile()
    assert step.inputs == ("x", "y")
    assert step.results == ("loss", "norm")
    ((x, y),) = data[CAPTURED]
    found = step(y=y, x=x)
    loss = F.mse_loss(twin.model(x), y)
    twin.opt.zero_grad()
    loss.backward()
    norm = clip_grad_norm_(twin.model.parameters(), 0.1)
    torch.testing.assert_close(found, (loss.detach(), norm))


def test_without_its_optimizer_a_step_says_so() -> None:
    ours = Training(FUSED)
    variant = optimised(ours, data_of(CAPTURED))
    step = variant.compile()
    del ours.opt, ours.scaler
    gc.collect()
    with pytest.raises(
        ExportError, match="is gone, and the step reads its state and learning rate: keep it in a variable"
    ):
        step(*flat(data_of(1)[0]))


def test_a_session_has_no_optimizer(adamw: tuple[Training, Variant], tmp_path: Path) -> None:
    capture: Any = adamw[1].capture
    loaded = tracefuse.load(capture.save(tmp_path / "step.tfz", inputs=True))
    with pytest.raises(ExportError, match="the session has no optimizer"):
        loaded.optimize().compile()


def test_an_option_that_is_another_one_is_refused() -> None:
    ours = Training(FUSED)
    step = optimised(ours, data_of(CAPTURED)).compile()
    ours.opt.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(
        ValueError,
        match=r"\.param_groups\[0\]\['weight_decay'\] is 0.5, and .* with 0.01: set it back, .*capture it again",
    ):
        step(*flat(data_of(1)[0]))


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(training: Training, n: int = 3) -> str:
    with pytest.raises(ExportError) as found:
        optimised(training, data_of(CAPTURED), n).compile()
    return str(found.value)


def test_a_count_of_steps_that_is_a_number_is_refused() -> None:
    assert "`capturable=True`" in refusal(Training(of(optim.RAdam)))
    assert "self.scaler.step(self.opt)" in refusal(Training(of(optim.RAdam)))


def test_so_it_is_where_only_one_step_was_seen() -> None:
    ours, data = Training(of(optim.RAdam, foreach=True)), data_of(4)
    ours.run(data[:3])
    with tracefuse.capture() as c:
        ours.step(data[3])
    assert not c.varying
    with pytest.raises(ExportError, match=r"the host reads 4.0 of a tensor in .*scaler.step.*`capturable=True`"):
        c.optimize().compile()


def test_a_learning_rate_that_is_a_number_and_changes_is_refused_with_both_values() -> None:
    class Mine(optim.SGD):
        """What an optimizer of one's own computes of its rate nobody knows."""

    said = refusal(Training(of(Mine, momentum=0.9), each_step))
    assert said.startswith("alpha of aten.add_.Tensor")
    assert "-0.0064, then -0.005120" in said.replace("-0.006400000000000001", "-0.0064")
    assert "`fused=True`" in said


def test_momenta_of_a_schedule_are_refused() -> None:
    said = refusal(Training(FUSED, lambda opt: lr_scheduler.OneCycleLR(opt, 0.1, total_steps=20)))
    assert said.startswith("beta1 of aten._fused_adamw_.default")


def test_a_first_step_is_refused() -> None:
    assert "first of its optimizer" in refusal(Training(FUSED), n=1)


def test_a_cell_with_a_first_step_is_called_so_until_it_is_run_once_more() -> None:
    ours, data, said = Training(FUSED), data_of(2), []
    for batch in data:
        with tracefuse.capture() as c:
            ours.step(batch)
        said.append([one for one in remarks(c.optimize()) if "first of its optimizer" in one])
    ((first,), later) = said
    assert first.startswith("It is not compiled: the captured step is the first")
    assert "Run the cell once more" in first
    assert later == []


def test_a_loop_that_changes_a_number_of_its_own_is_refused() -> None:
    ours, data = Training(FUSED), data_of(CAPTURED)
    with tracefuse.capture_step(n=3) as c:
        for at, ((x, y),) in enumerate(data):
            ours.opt.zero_grad()
            (F.mse_loss(ours.model(x), y) * (0.5 + at)).backward()
            ours.opt.step()
    with pytest.raises(ExportError, match=r"2\.5, then 3\.5: .*compute it with tensors, from a count"):
        c.optimize().compile()


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"step_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw, scheduled", "scaled", "accumulated", "sgd, momentum, lists"])
def test_the_exported_step_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    options = TRAININGS[name]
    eager, ours = Training(**options), Training(**options)
    data = data_of(CAPTURED + 6, ours.micro)
    path = optimised(ours, data[:CAPTURED]).export(tmp_path / "step.py")
    text = path.read_text()
    assert "tracefuse" not in text.split('"""')[2].replace("tracefuse_", "")
    others = {f"scaler_{key}": getattr(ours.scaler, key) for key in ("_scale", "_growth_tracker") if name == "scaled"}
    step = imported(path).bind(ours.model, ours.opt, others)
    eager.run(data[:CAPTURED])
    for at, batches in enumerate(data[CAPTURED:]):
        if at == 3:
            for one in (eager, ours):
                one.resume(one.checkpoint())
        step(*flat(batches))
        ours.scheduled()
        eager.run([batches])
        assert_alike(ours, eager)


def test_the_file_checks_itself(adamw: tuple[Training, Variant], tmp_path: Path) -> None:
    path = adamw[1].export(tmp_path / "step.py")
    found = run_python([str(path)])
    assert found.returncode == 0, found.stdout + found.stderr
    step = imported(path)
    checked = step.outputs("optimised", step.example_inputs())
    assert "updated exp_avg of 0.weight" in checked
    assert f"{len(checked)} of {len(checked)} values are near" in found.stdout
    assert [line.split()[0] for line in found.stdout.splitlines() if "ms forward + backward + update (" in line] == [
        "captured",
        "optimised",
    ]
    assert "BAD" not in found.stdout
    wrong = path.read_text().replace("_fused_adamw_.tensor_lr", "_fused_adam_.tensor_lr")
    path.write_text(wrong)
    found = run_python([str(path)])
    assert found.returncode == 1
    assert "BAD  updated 0.weight" in found.stdout


def test_an_update_by_itself_is_timed_as_one_and_in_place(adamw: tuple[Training, Variant]) -> None:
    update = adamw[1].update
    assert update is not None
    before = adamw[0].checkpoint()
    timing = update.measure(budget_s=0.2)
    assert [set(one.times_ms) for one in timing.programs] == [{"update", "step"}] * 2
    assert timing.program("optimised").difference is not None
    assert timing.program("optimised").difference.updated == 0
    with pytest.raises(MeasureError, match="an update by itself is timed without a CUDA graph: measure the whole step"):
        update.measure(cuda_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), adamw[0].model.state_dict().values(), strict=True))


def test_a_model_that_lacks_a_parameter_is_told(adamw: tuple[Training, Variant], tmp_path: Path) -> None:
    ours, variant = adamw
    module = imported(variant.export(tmp_path / "step.py"))
    with pytest.raises(ValueError, match=r"3\.weight is not in the model or the optimizer"):
        module.bind(ours.model[:3], ours.opt)
    with pytest.raises(ValueError, match="has 1 optimizers, got 2"):
        module.bind(ours.model, [ours.opt, ours.opt])


# --- on a GPU ---------------------------------------------------------------------------------------------------------


GPU = {name: TRAININGS[name] for name in ("adamw, scheduled", "adamw, two groups", "scaled", "accumulated")} | {
    "capturable": {"make": of(optim.AdamW, capturable=True)},
    "capturable, tensor lr": {
        "make": lambda p: optim.Adam(p, lr=torch.tensor(0.01, device="cuda"), capturable=True),
        "schedule": each_step,
    },
    "sgd, momentum, fused": TRAININGS["sgd, momentum, fused"],
    "adamw as it is by default": {"make": of(optim.AdamW), "schedule": each_step},
    "adamw, one by one": {"make": of(optim.AdamW, foreach=False), "schedule": each_step},
    "sgd as it is by default": {"make": of(optim.SGD, momentum=0.9), "schedule": each_step},
}


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["plain", "one graph"])
@pytest.mark.parametrize("name", GPU)
def test_on_a_gpu_it_leaves_what_eager_leaves(name: str, cuda_graph: bool) -> None:
    """A learning rate is float32 there, as fused optimizers read one from a GPU: weights differ by its rounding.

    A capturable optimizer takes `1 - beta2 ** t` in float32, of a power that ATen rounds otherwise than our kernels, by
    k units of 2**-24, near 1. The step, at most about lr = 0.01, goes with the root of the correction, and so is off by
    k 2**-25 / (1 - 0.999**t) of it. Over the ten steps from t = 5 on the quotients sum up to 1174 / 2**25 k, and weights are
    apart by 3.5e-7 k. `powf` errs by a few units, and k = 4 is asked for. That the base is rounded as ATen rounds it, which is
    worth 1.3e-5 of the correction, is checked in `test_expressions`.
    """
    eager, ours = (Training(**GPU[name], device="cuda") for _ in range(2))
    data = data_of(CAPTURED + 10, ours.micro, "cuda")
    variant = optimised(ours, data[:CAPTURED])
    eager.run(data[:CAPTURED])
    kept = ours.checkpoint()
    step = variant.compile(cuda_graph=cuda_graph)
    assert all(torch.equal(a, b) for a, b in zip(kept[0].values(), ours.model.state_dict().values(), strict=True))
    for at, batches in enumerate(data[CAPTURED:]):
        if at == 5:
            for one in (eager, ours):
                one.resume(one.checkpoint())
        step(*flat(batches))
        ours.scheduled()
        eager.run([batches])
    mine, theirs = ours.left(), eager.left()
    for key in mine:
        absolute = 4 * 3.5e-7 if name.startswith("capturable") else 1e-9
        torch.testing.assert_close(
            mine[key].cpu().double(), theirs[key].cpu().double(), rtol=1e-6, atol=absolute, msg=key
        )


@pytest.mark.gpu
def test_on_a_gpu_memory_that_a_graph_cannot_use_is_told() -> None:
    """A tensor in a block of 1 GiB, as state lies where activations were. No smaller block has room for one so large."""
    ours = Training(**GPU["adamw, two groups"], device="cuda")
    data = data_of(CAPTURED + 2, ours.micro, "cuda")
    step = optimised(ours, data[:CAPTURED]).compile(cuda_graph=True)
    gc.collect()
    torch.cuda.empty_cache()
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del block
    piece = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
    with pytest.warns(
        UserWarning, match="lie unused between weights and optimizer state.*expandable_segments:True"
    ) as told:
        step(*flat(data[CAPTURED]))
    assert {Path(one.filename) for one in told} == {Path(__file__)}
    del piece
    torch.cuda.empty_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(*flat(data[CAPTURED + 1]))


@pytest.mark.parametrize(("pieces", "held", "is_told"), [(1.6, 6.9, True), (0.2, 0.3, False), (1.0, 20.0, False)])
def test_unused_memory_is_told_where_it_is_much(pieces: float, held: float, is_told: bool) -> None:
    counted = {"inactive_split_bytes.all.current": pieces, "reserved_bytes.all.current": held}
    said = unused_pieces({name: int(gib * 2**30) for name, gib in counted.items()})
    assert bool(said) == is_told
    assert ("1.6 GiB of the GPU's memory" in said and "6.9 GiB are held" in said) == is_told
