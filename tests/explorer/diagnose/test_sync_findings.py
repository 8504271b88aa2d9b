"""Each line that reads what a GPU computes is one finding, with how it reads and how often."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import cuda_traces
import fake_library
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from findings import case, found, known
from read_tensors import READS
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.trace import fake_mode
from tracefuse.recording import frames
from tracefuse.recording.host_reads import COPY, HostRead, Stop


@pytest.mark.parametrize("how", READS)
def test_every_read_is_a_finding_with_its_line(how: str) -> None:
    def step(value: Tensor) -> Tensor:
        READS[how]()
        return value * 2

    (finding,) = found("host-sync", case(tracefuse.capture(step, torch.ones(3))))
    assert finding.title == f"{how} would make the host wait once a step on a GPU"
    assert ("reads", how) in finding.evidence
    assert "read_tensors.py:" in finding.source
    assert "lambda:" in finding.source
    assert (finding.severity, finding.worth) == ("low", "nothing on a CPU; on a GPU the host would wait")


def test_reads_are_grouped_by_line() -> None:
    def step(x: Tensor) -> Tensor:
        for _ in range(3):
            if x.sum().item() > -1e9: x = x * 2  # fmt: skip  # noqa: E701
        return x

    (finding,) = found("host-sync", case(tracefuse.capture(step, torch.ones(3))))
    assert finding.title == "`.item()` would make the host wait 3 times a step on a GPU"
    assert finding.evidence == (("reads", "`.item()` ×3"), ("bytes", "12 B"))
    assert "x.sum().item()" in finding.source


def test_printing_a_tensor_is_one_read(capsys: pytest.CaptureFixture[str]) -> None:
    def step(x: Tensor) -> Tensor:
        print(x.sum(), x)
        return x * 2

    (finding,) = found("host-sync", case(tracefuse.capture(step, torch.ones(3))))
    assert capsys.readouterr().out == "tensor(3.) tensor([1., 1., 1.])\n"
    assert finding.title == "`print(t)` would make the host wait 2 times a step on a GPU"
    assert "print(x.sum(), x)" in finding.source


def test_a_mask_is_read_in_the_backward_too() -> None:
    x = torch.randn(8, requires_grad=True)
    (finding,) = found("host-sync", case(tracefuse.capture(lambda: x[x > 0].sum().backward())))
    assert ("in the backward", "1") in finding.evidence
    assert "where or masked_fill" in finding.fix


def test_what_lies_on_the_cpu_of_a_program_on_a_gpu_stops_nobody() -> None:
    capture = tracefuse.capture(lambda x: x * x.sum().item(), torch.ones(3))
    on_gpu = case(capture, cuda_traces.on_cuda(capture.trace))
    assert not found("host-sync", on_gpu)
    (stop,) = on_gpu.program.stops
    there = Stop(replace(stop.read, device=torch.device("cuda:0")), stop.source)
    (finding,) = found("host-sync", known(on_gpu, stops=(there,)))
    assert finding.title == "`.item()` makes the host wait once a step"
    assert finding.severity == "medium"


def test_a_step_of_an_optimizer_reads_nothing() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracefuse.capture() as c:
        F.mse_loss(model(torch.ones(2, 3)), torch.ones(2, 3)).backward()
        optimizer.step()
    assert c.guards
    assert c.stops == ()


def test_a_gradient_that_autograd_copies_to_the_cpu_is_no_read_of_the_program() -> None:
    capture = tracefuse.capture(lambda: torch.ones(3, requires_grad=True).sum().backward())
    of = replace(case(capture), trace=cuda_traces.on_cuda(capture.trace))
    copy = HostRead("copy", COPY, torch.device("cuda:0"), 12)
    assert not found("host-sync", known(of, stops=(Stop(copy, None, in_backward=True),)))
    assert found("host-sync", known(of, stops=(Stop(copy, None),)))


def test_casts_and_device_moves_of_a_backward_are_told_apart() -> None:
    leaf, weight = torch.randn(256, requires_grad=True), torch.randn(256, requires_grad=True)
    capture = tracefuse.capture(lambda: (leaf.double() * weight.double()).sum().backward())
    name = "one-name-two-copies"
    trace = cuda_traces.on_cuda(capture.trace)
    assert not found(name, case(capture, trace))
    (gradient,) = [n for n, o in zip(trace.returned, trace.outputs, strict=True) if o.of == "leaf"]
    with fake_mode(trace.graph):
        gradient.meta["val"] = torch.empty(256, device="cpu")
    (finding,) = found(name, case(capture, trace))
    assert finding.title == "1 dtype cast and 1 device move are both called ToCopyBackward0 in a profile"
    assert finding.evidence == (("casts", "1 KiB"), ("device moves", "1 KiB"), ("largest move", "grad_leaf"))
    assert finding.severity == "low"


def test_what_another_thread_reads_is_not_the_programs() -> None:
    def step(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: (x.sum().item(), repr(x), x.tolist())).result()[0] == 3.0
        return x * 2

    assert tracefuse.capture(step, torch.ones(3)).stops == ()


def test_the_checks_of_distributions_are_told_with_the_option_that_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # libraries switch it off
    logits = torch.randn(8, 3)

    def step() -> Tensor:
        of = torch.distributions.Categorical(logits=logits)
        likely = of.log_prob(torch.zeros(8)).exp()
        return likely * of.logits.sum().item()

    checks = found("host-sync", case(tracefuse.capture(step)))
    assert [one.title.partition(" would")[0] for one in checks] == [
        "`validate_args` of `torch.distributions`",
        "`validate_args` of `torch.distributions`",
        "`.item()`",
    ]
    assert "set_default_validate_args(False)" in checks[0].fix

    def followed() -> Tensor:
        of = torch.distributions.Categorical(logits=logits, validate_args=False)
        return of.log_prob(torch.zeros(8)).exp()

    assert not found("host-sync", case(tracefuse.capture(followed)))


def made(step: Callable[[], object]) -> list[str]:
    return [f"{one.title}: {one.fix}" for one in found("constant-from-host", case(tracefuse.capture(step)))]


def test_lines_of_a_library_that_one_line_calls_are_one_finding(monkeypatch: Any) -> None:
    monkeypatch.setattr(frames, "_INSTALLED", (*frames._INSTALLED, fake_library.__file__))
    frames.is_installed.cache_clear()
    x = torch.randn(4)
    (one,) = found("constant-from-host", case(tracefuse.capture(lambda: fake_library.shifted(x) * 2)))
    assert one.title.endswith("makes a tensor of Python's numbers 2 times a step")
    lines = [dict(one.evidence)[label] for label in ("in the library", "and at")]
    assert all("fake_library.py:" in line for line in lines)
    assert lines[0] not in lines[1]


def test_an_index_of_pythons_is_no_constant_to_be_registered() -> None:
    x, rows = torch.randn(8, 4), np.array([1, 5])
    written = torch.zeros(8, 4)

    def step() -> Tensor:
        written[rows] = x[rows]
        written[rows] = 0.0
        return x[[1, 2]] * 2

    for one in (said := made(step)):
        assert one.startswith("a list or a NumPy array as an index makes a tensor of it")
        assert "torch.as_tensor(index" in one
        assert "register_buffer" not in one
    assert [re.search(r"(once|\d+ times) a step", one)[0] for one in said] == [
        "2 times a step",
        "once a step",
        "once a step",
    ]
    index = torch.as_tensor(rows)
    assert not made(lambda: x[index] * 2)


def test_a_tensor_that_the_line_itself_makes_is_a_constant_also_as_an_index() -> None:
    x = torch.randn(8, 4)
    (one,) = made(lambda: x[torch.tensor([1, 2])] * 2)
    assert one.startswith("`torch.tensor(…)` makes a tensor of Python's numbers once a step")


def test_what_lies_in_numpys_memory_is_copied_from_nowhere() -> None:
    batch = np.ones((4, 3), np.float32)
    assert not made(lambda: torch.from_numpy(batch) * 2)
    assert len(made(lambda: torch.tensor(batch.tolist()) * 2)) == 1


def test_a_read_before_an_index_is_told_beside_it() -> None:
    x, z = torch.randn(4, requires_grad=True), torch.randn(2)

    def step() -> None:
        chosen = torch.tensor([0, 1])
        z.tolist()
        (x[chosen] * x[[2, 3]]).sum().backward()

    kinds = [stop.read.kind for stop in tracefuse.capture(step).stops]
    assert kinds == ["constant", "number", "index"]


def how(step: Callable[[], object]) -> list[str]:
    """How each line reads, in order."""
    return [one.title.partition(" would")[0] for one in found("host-sync", case(tracefuse.capture(step)))]


def test_the_classes_of_one_hot_are_checked_on_a_cpu_alone() -> None:
    """The line is read as Python runs it: what else it reads is told, also where the call stands in several lines."""
    t, n, s, w = torch.randint(10, (8,)), 10, torch.tensor(2.0), torch.randn(10, 3)
    assert how(lambda: (F.one_hot(t, 10).float() @ w) * s.item()) == ["`.item()`"]
    # fmt: off
    assert not how(lambda: F.one_hot(
        t.view(abs(-8)).view(max(8, 2)),
        num_classes=max(n, 1),
    ) * 2)
    # fmt: on
    assert how(lambda: F.one_hot(t, -1) * 2) == ["`one_hot` without `num_classes`"]
    assert how(lambda: F.one_hot(t) * 2) == ["`one_hot` without `num_classes`"]
    assert how(lambda: F.one_hot(t, num_classes=-1) * 2) == ["`one_hot` without `num_classes`"]


def test_an_index_is_told_from_a_tensor_by_what_the_line_does_and_not_by_its_text() -> None:
    x, pair = torch.randn(8, 4), torch.zeros(2)

    def to_tensor(given: Tensor) -> Tensor:
        return given

    def kinds(step: Callable[[], object]) -> list[str]:
        return [stop.read.kind for stop in tracefuse.capture(step).stops]

    assert kinds(lambda: to_tensor(x)[[1, 2]] * 2) == ["index"]
    assert kinds(lambda: x[torch.tensor([0, 1])][[0, 1]] * 2) == ["constant", "index"]
    assert kinds(lambda: x[[0, 1]][torch.tensor([0, 1])] * 2) == ["index", "constant"]

    def written() -> Tensor:
        pair[[0, 1]] = torch.tensor([1.0, 2.0])
        pair[[0]] = 3.0
        pair[0] = 4.0
        return pair * 2

    assert kinds(written) == ["constant", "index", "index"]


@pytest.mark.gpu
def test_a_constant_that_is_made_on_the_cpu_and_moved_in_its_line_is_named() -> None:
    x, kept = torch.randn(8, 3, device="cuda"), torch.ones(3, device="cuda")

    def step() -> Tensor:
        mean = torch.tensor([0.1, 0.2, 0.3]).to("cuda")
        on_cpu = torch.tensor([0.1, 0.2, 0.3]).sum()
        return (x - mean) * kept + on_cpu

    (said,) = made(step)
    assert said.startswith("`torch.tensor(…)` makes a tensor of Python's numbers once a step")
    assert not made((x - kept).square)


def test_places_that_a_loop_reads_have_a_remedy_of_their_own_that_gives_the_same_rows() -> None:
    data, starts, length = torch.randn(40), torch.tensor([3, 9, 30]), 5

    def rows() -> Tensor:
        return torch.stack([data[i : i + length] for i in starts])

    (finding,) = found("host-sync", case(tracefuse.capture(lambda: rows() * 2)))
    assert finding.title.startswith("a tensor as an index or a size would make the host wait 6 times")
    (code,) = re.findall(r"`(data\[.*?\])`", finding.fix)
    assert torch.equal(eval(code, {"torch": torch, "data": data, "i": starts, "length": length}), rows())


def test_a_line_that_reads_in_several_ways_names_them_all() -> None:
    def step(x: Tensor) -> Tensor:
        return x * (x.sum().item() if x.isfinite().all() else 1.0)

    (finding,) = found("host-sync", case(tracefuse.capture(step, torch.ones(3))))
    assert finding.title == "`bool(t)`, `if t` and `.item()` would make the host wait 2 times a step on a GPU"


def test_a_condition_that_is_read_without_an_if_is_told_to_be_a_tensor_too() -> None:
    (finding,) = found("host-sync", case(tracefuse.capture(lambda x: x * bool(x.all()), torch.ones(3))))
    assert "torch.where" in finding.fix


@pytest.mark.parametrize("fused", [False, True])
def test_what_a_scaler_reads_has_the_remedy_that_spares_it(fused: bool) -> None:
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    reads = found("host-sync", case(c))
    assert [one.source.partition("  ")[2] for one in reads] == ["scaler.step(optimizer)"] * (not fused)
    assert all(one.fix.startswith("a `GradScaler` reads here whether gradients are finite: make") for one in reads)


@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.Adafactor])
def test_what_an_optimizer_reads_by_itself_is_no_scalers(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters())
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
    (read,) = (one for one in c.findings() if one.id == "host-sync")
    assert read.source.partition("  ")[2] == "optimizer.step()"
    assert read.fix.startswith("the optimizer reads it in its step: ")


def test_what_a_librarys_loop_reads_beside_an_update_is_no_scalers_and_named_where_it_is_read() -> None:
    accelerate = pytest.importorskip("accelerate")
    file = os.path.join(os.path.dirname(accelerate.__file__), "of_a_test.py")
    library: dict[str, Any] = {}
    lines = ("def train(step):", "    for _ in range(4):", "        loss = step()", "        float(loss)")
    text = "\n".join((*lines, "        loss.isnan().item()"))
    exec(compile(text, file, "exec"), library)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with tracefuse.capture_step(n=3) as c:
        library["train"](step)
    reads = found("host-sync", case(c))
    assert [dict(one.evidence)["in the library"] for one in reads] == ["of_a_test.py:4  ", "of_a_test.py:5  "]
    assert all(one.source.endswith('library["train"](step)') and "Scaler" not in one.fix for one in reads)
    assert all("`logging_nan_inf_filter=False`" in one.fix for one in reads)


@pytest.mark.parametrize(("call", "advice"), [("masked", "attention_mask=None"), ("scaled", "a number of Python's")])
def test_what_a_library_reads_is_not_the_users_to_rewrite(monkeypatch: Any, call: str, advice: str) -> None:
    monkeypatch.setattr(frames, "_INSTALLED", (*frames._INSTALLED, fake_library.__file__))
    frames.is_installed.cache_clear()
    x, operand = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool) if call == "masked" else torch.tensor(2.0)
    (finding,) = found("host-sync", case(tracefuse.capture(lambda: getattr(fake_library, call)(x, operand) * 2)))
    assert "fake_library.py" in dict(finding.evidence)["in the library"]
    assert finding.fix.startswith("a library reads it there, in a line that is not yours: ")
    assert advice in finding.fix
    assert "keep it a tensor" not in finding.fix
