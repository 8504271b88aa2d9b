"""Settings that slow are found where they matter, and nowhere else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import cuda_traces
import pytest
import torch
from findings import HOPPER, case, found, known
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import tracefuse
from tracefuse.diagnose import modes as mode_findings
from tracefuse.diagnose.host import FEWEST
from tracefuse.findings.finding import Case
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.peaks import DevicePeaks
from tracefuse.measure.timing import Estimate
from tracefuse.optimizers.costs.datasheets import TARGETS
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import line_of, phase


def on_hopper(capture: tracefuse.Capture, **settings: str) -> Case:
    """The program as if it had been captured on a GPU, under other settings than the best."""
    environment = HOPPER | {name.replace("_", " "): value for name, value in settings.items()}
    there = known(case(capture, cuda_traces.on_cuda(capture.trace)), environment=environment)
    return replace(there, update=capture.update and cuda_traces.on_cuda(capture.update))


def modes(of: Case) -> list[str]:
    """The ids of the findings about modes, in the order of the detector."""
    return [one.id for one in mode_findings.modes_that_slow(of)]


def test_modes_that_were_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), profile(activities=[ProfilerActivity.CPU]):
        capture = tracefuse.capture(lambda: x.exp().sum().backward())
    assert modes(case(capture)) == ["launch-blocking", "anomaly-mode", "profiler-on"]
    assert not modes(known(case(capture), environment={}))


def convolution() -> tracefuse.Capture:
    model, x = nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8)
    return tracefuse.capture(lambda: model(x).sum().backward())


@pytest.mark.parametrize(
    ("setting", "name", "severity"),
    [("cudnn", "cudnn-off", "medium"), ("cudnn_benchmark", "cudnn-benchmark-off", "low")],
)
def test_cudnn_matters_where_there_are_convolutions(setting: str, name: str, severity: str) -> None:
    capture = convolution()
    assert not modes(on_hopper(capture))
    (finding,) = found(name, on_hopper(capture, **{setting: "off"}))
    assert finding.severity == severity
    assert ("convolutions", "2") in finding.evidence
    assert "model(x)" in finding.source
    assert not modes(on_hopper(matmuls(), **{setting: "off"}))
    assert not modes(known(case(capture), environment={setting.replace("_", " "): "off"}))


def measured_in(times: dict[str, float]) -> Case:
    """Two convolutions on a GPU, the backward of one of which takes so much longer than it needs as `times` say."""
    first, second, x = nn.Conv3d(3, 24, 3), nn.Conv3d(24, 24, 3), torch.randn(2, 3, 12, 24, 24)
    of = on_hopper(
        tracefuse.capture(lambda: second(first(x)).sum().backward()), cudnn_benchmark="off", device="NVIDIA H200"
    )
    us = {node.name: 5.0 for node in of.trace.ops if does_work(node)}
    for name, one in times.items():
        us[name] = one
    return replace(of, times=OpTimes(us, "measured on a GPU"))


def test_a_convolution_that_takes_far_longer_than_it_needs_has_a_bad_algorithm() -> None:
    names = [n.name for n in measured_in({}).trace.ops if n.target is torch.ops.aten.convolution_backward.default]
    (fair,) = found("cudnn-benchmark-off", measured_in({}))
    assert (fair.severity, fair.worth_us) == ("low", None)
    (slow,) = found("cudnn-benchmark-off", measured_in({names[0]: 9000.0}))
    assert slow.title == "cuDNN guessed a slow algorithm for 1 of 4 convolutions"
    assert (slow.severity, slow.worth_us, slow.kind) == ("high", 4500.0, "predicted")
    assert slow.values == (names[0],)
    assert "before the first step" in slow.fix


def test_nothing_is_said_of_algorithms_where_nothing_was_measured_or_channels_are_apart() -> None:
    (name,) = (n.name for n in convolution().trace.ops if n.target is torch.ops.aten.convolution_backward.default)
    of = on_hopper(convolution(), cudnn_benchmark="off")
    (finding,) = found("cudnn-benchmark-off", replace(of, times=OpTimes({name: 9000.0}, "modelled")))
    assert finding.worth_us is None
    apart, x = nn.Conv2d(8, 8, 7, groups=8), torch.randn(2, 8, 16, 16)
    depthwise = on_hopper(
        tracefuse.capture(lambda: apart(x).sum().backward()), cudnn_benchmark="off", device="NVIDIA H200"
    )
    us = {node.name: 9000.0 for node in depthwise.trace.ops if does_work(node)}
    (finding,) = found("cudnn-benchmark-off", replace(depthwise, times=OpTimes(us, "measured on a GPU")))
    assert finding.worth_us is None


def test_nothing_is_said_of_algorithms_on_a_gpu_that_is_not_known_nor_where_cudnn_ran_none() -> None:
    (name, *_) = [n.name for n in measured_in({}).trace.ops if n.target is torch.ops.aten.convolution_backward.default]
    slow = measured_in({name: 9000.0})
    elsewhere = known(slow, environment={**slow.program.environment, "device": "NVIDIA Sole"})
    (finding,) = found("cudnn-benchmark-off", elsewhere)
    assert finding.worth_us is None
    off = known(slow, environment={**slow.program.environment, "cudnn": "off"})
    assert not found("cudnn-benchmark-off", off)


# --- TF32 -------------------------------------------------------------------------------------------------------------


def matmuls(dtype: torch.dtype = torch.float32) -> tracefuse.Capture:
    x, w = torch.randn(256, 256, dtype=dtype), torch.randn(256, 256, dtype=dtype, requires_grad=True)
    return tracefuse.capture(lambda: (x @ w).sum().backward())


NAME = "tf32-off"


@pytest.fixture(autouse=True)
def no_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU whose peaks this machine's cache may have."""
    monkeypatch.setattr(mode_findings, "known_peaks", lambda device: None)


def test_rates_are_those_of_the_gpu_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {name: Estimate(rate, rate, rate, 0.95, 3) for name, rate in (("fp32", 50e12), ("tf32", 400e12))}
    peaks = DevicePeaks("measured on a test", Estimate(3e12, 3e12, 3e12, 0.95, 3), rates)
    monkeypatch.setattr(mode_findings, "known_peaks", lambda device: peaks)
    (finding,) = found(NAME, on_hopper(matmuls()))
    assert ("rates", "50 and 400 TFLOP/s, measured peaks of a test") in finding.evidence


def test_matmuls_of_float32_without_tensor_cores() -> None:
    (finding,) = found(NAME, on_hopper(matmuls()))
    assert finding.title == "2 matmuls of float32 run without tensor cores: TF32 is off"
    assert finding.severity == "medium"
    # 2 * 2 * 256**3 operations at 67 TFLOP/s are 1.002 µs. At 494.7 the bytes decide, at 3.35 TB/s 0.391 µs: three matrices of
    # 256 KiB in the forward, two in the backward, where the gradient of the sum is one number.
    assert finding.worth.startswith("at most 0.61 µs of ")
    assert finding.worth.endswith("(modelled)")
    assert "(x @ w)" in finding.source


def test_what_was_measured_of_them_is_the_most_they_are_worth() -> None:
    of = on_hopper(matmuls())
    (finding,) = found(NAME, of)
    times = OpTimes(dict.fromkeys(finding.values, 50.0), "measured on a test")
    (measured,) = found(NAME, replace(of, times=times))
    assert measured.worth == "at most 60.9 µs of 100 µs a step, 61 % (predicted: measured on a test, rates modelled)"


def modelled_on(gpu: str) -> str:
    return f"modelled: roofline of the {TARGETS[gpu].source}, not of the CPU that it ran on"


def timed(of: Case, provenance: str) -> Case:
    return replace(of, times=replace(of.times, provenance=provenance))


def test_on_a_cpu_they_are_those_of_the_gpu_that_the_step_is_modelled_for() -> None:
    """The same figures as where that GPU ran it."""
    of = case(matmuls())
    (finding,), (there,) = found(NAME, of), found(NAME, on_hopper(matmuls()))
    assert finding.title == "2 matmuls of float32 would run without tensor cores: TF32 is off"
    assert finding.worth_us == there.worth_us
    assert finding.worth.startswith("at most 0.61 µs of ")
    assert finding.worth.endswith("(modelled)")
    assert finding.code == 'torch.set_float32_matmul_precision("high")'
    assert 'torch.autocast("cuda", torch.bfloat16)' in finding.fix
    (on_a100,) = found(NAME, timed(of, modelled_on("A100")))
    assert ("rates", "20 and 156 TFLOP/s, A100 SXM 80 GB datasheet") in on_a100.evidence


def headed(width: int, columns: int, to_loss: Callable[[Tensor], Tensor]) -> Case:
    """Two layers and a head of so many columns."""
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    model.add_module("head", nn.Linear(width, columns, bias=False))
    x = torch.randn(4096, width)
    return case(tracefuse.capture(lambda: to_loss(model(x)).backward()))


def test_the_module_that_does_a_large_part_of_them_is_named_and_what_its_rows_ask_for() -> None:
    targets = torch.randint(1001, (4096,))
    (of_words,) = found(NAME, headed(256, 1001, lambda logits: nn.functional.cross_entropy(logits, targets)))
    said = "would run without tensor cores: TF32 is off"
    assert re.fullmatch(rf"`head` and \d more matmuls of float32 {said}", of_words.title)
    assert "are enough, and vocab_size=1024; or bfloat16" in of_words.fix
    (of_numbers,) = found(NAME, headed(256, 1001, Tensor.sum))
    assert "are enough, and 1,001 padded to 1,024; or bfloat16" in of_numbers.fix
    (aligned,) = found(NAME, headed(256, 256, Tensor.sum))
    assert re.fullmatch(rf"\d matmuls of float32 {said}", aligned.title)
    assert "are enough; or bfloat16" in aligned.fix


def test_the_setting_is_remembered_where_no_gpu_is() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert case(matmuls()).program.tf32 == (precision == "high")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda: on_hopper(matmuls(), tf32="True"), id="TF32 is on"),
        pytest.param(lambda: on_hopper(matmuls(), capability="7.5"), id="the GPU has none for float32"),
        pytest.param(lambda: on_hopper(matmuls(torch.bfloat16)), id="bfloat16"),
        pytest.param(lambda: case(matmuls(torch.bfloat16)), id="bfloat16 on a CPU"),
        pytest.param(lambda: known(case(matmuls()), environment={"tf32": "True"}), id="TF32 is on, on a CPU"),
        pytest.param(lambda: timed(case(matmuls()), "measured on a CPU"), id="what a CPU took"),
        pytest.param(lambda: timed(case(matmuls()), modelled_on("RTX 4090")), id="a GPU without any for float32"),
    ],
)
def test_matmuls_that_no_setting_slows(of) -> None:
    assert not found(NAME, of())


# --- loops of small kernels -------------------------------------------------------------------------------------------


def step_of_an_optimizer(layers: int, width: int = 16, **options: bool) -> tracefuse.Capture:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options), torch.randn(4, width)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with tracefuse.capture() as c:
        model(x).sum().backward()
        optimizer.step()
    return c


def test_an_optimizer_that_loops_over_its_parameters() -> None:
    capture = step_of_an_optimizer(10, foreach=False)
    (finding,) = found("loop-of-small-kernels", on_hopper(capture))
    assert finding.title.startswith("one line launches 60 kernels, of ")
    assert finding.severity == "high"
    assert "optimizer.step()" in finding.source
    assert "fused=True" in finding.fix
    assert ("launching takes", "522 µs: the host's 8.7 µs per op was measured on an H200's") in finding.evidence
    assert not found("loop-of-small-kernels", case(capture))


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda: step_of_an_optimizer(10, foreach=True), id="foreach"),
        pytest.param(lambda: step_of_an_optimizer(FEWEST // 6 - 1, foreach=False), id="few parameters"),
    ],
)
def test_optimizers_that_do_not_loop(of) -> None:
    assert not found("loop-of-small-kernels", on_hopper(of()))


def test_kernels_that_take_longer_than_their_launch_are_no_finding() -> None:
    of = on_hopper(step_of_an_optimizer(10, foreach=False))
    assert of.update is not None
    slow = OpTimes({n.name: 20.0 for n in of.trace.ops}, "measured on a test")
    of_update = {n.name: 20.0 for n in of.update.ops}
    assert not found("loop-of-small-kernels", replace(of, times=slow, update_us=of_update))


class Cell(nn.Module):
    """A recurrent network as one writes it: a line of small ops, again and again."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.turn, self.rounds = nn.Parameter(torch.randn(width, width)), rounds

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(self.rounds):
            h = torch.tanh(x[:, t] @ self.turn + h)  # a round
        return h


class Apart(nn.Module):
    """Rounds that need nothing of each other."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, t].sin() for t in range(x.shape[1])]).mean()  # a round


def step_of(model: nn.Module, rounds: int, width: int = 16) -> tracefuse.Capture:
    x = torch.randn(2, rounds, width, requires_grad=True)
    return tracefuse.capture(lambda: model(x).sum().backward())


@pytest.mark.parametrize("of", [case, on_hopper])
def test_a_loop_over_the_steps_of_a_sequence(of) -> None:
    """On the CPU too, where it is what a GPU would wait for."""
    capture = step_of(Cell(16, 2 * FEWEST), 2 * FEWEST)
    (finding,) = found("loop-of-small-kernels", of(capture))
    assert finding.title.startswith(f"a loop launches {6 * FEWEST} kernels in the forward and ")
    assert finding.source.endswith("# a round")
    assert "each round needs the one before" in finding.fix
    backward = [n for n in capture.trace.ops if does_work(n) and phase(n) == "backward" and "# a round" in line_of(n)]
    assert finding.title.split(" in the backward")[0].endswith(f" and {len(backward)}")
    assert {n.name for n in backward} < set(finding.values)


@pytest.mark.parametrize("name", ["RNN", "LSTM", "GRU"])
def test_a_loop_in_a_class_that_is_called_as_one_of_torchs(name: str) -> None:
    model = type(name, (Cell,), {})(16, 2 * FEWEST)
    (finding,) = found("loop-of-small-kernels", on_hopper(step_of(model, 2 * FEWEST)))
    assert finding.severity == "high"
    assert finding.source.endswith("# a round")


class Apiece(Cell):
    """The same on three lines, in a module that runs once a round."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__(width, rounds)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(self.rounds):
            given = x[:, t] * 2
            h = h + given
            h = torch.tanh(self.mix(h) * h)  # most
        return h


def test_the_lines_of_a_loop_are_one_finding() -> None:
    (finding,) = found("loop-of-small-kernels", case(step_of(Apiece(16, FEWEST), FEWEST)))
    assert finding.title.startswith(f"a loop launches {5 * FEWEST} kernels in the forward and ")
    assert finding.source.endswith("# most")
    (also,) = (text for label, text in finding.evidence if label == "also")
    assert also.count("test_mode_findings.py:") == 2


def test_rounds_that_need_nothing_of_each_other_want_another_remedy() -> None:
    (finding,) = found("loop-of-small-kernels", case(step_of(Apart(), 2 * FEWEST)))
    assert "no round needs another" in finding.fix


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(lambda: step_of(Cell(16, FEWEST - 1), FEWEST - 1), id="few rounds"),
        pytest.param(
            lambda: step_of(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(FEWEST))), 2, 8),
            id="layers, each a module of its own",
        ),
    ],
)
def test_what_is_no_loop_in_the_forward(of) -> None:
    assert not found("loop-of-small-kernels", case(of()))


def test_a_loop_of_large_kernels_is_no_finding() -> None:
    of = case(step_of(Cell(16, FEWEST), FEWEST))
    assert found("loop-of-small-kernels", of)
    slow = OpTimes({n.name: 20.0 for n in of.trace.ops}, "measured on a test")
    gpu = replace(of, trace=cuda_traces.on_cuda(of.trace), times=slow)
    assert not found("loop-of-small-kernels", gpu)
