"""Findings about a step's update: how the optimizer computes, and what the update takes of the step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from planting import on_a_gpu
from torch import nn, optim

import tracefuse
from tracefuse.diagnose.diagnose import SAID_BY
from tracefuse.diagnose.update import optimizers_op_by_op, share_of_the_update
from tracefuse.errors import ExportError
from tracefuse.findings.finding import Finding
from tracefuse.widgets.payload.program import payload
from tracefuse.widgets.text import to_text

NOT_FUSED, SHARE = "optimizer-not-fused", "update-share"


def stepped(kind: Any = optim.AdamW, rows: int = 64, **options: Any) -> tracefuse.Capture:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer, x = kind(model.parameters(), **options), torch.randn(rows, 256)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return c


def momentum(rows: int = 64, foreach: bool = False) -> tracefuse.Capture:
    """A step of an optimizer that counts nothing: passes can do its update."""
    return stepped(optim.SGD, rows, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=foreach)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the update is told where an optimizer that is not fused says so in particular, too."""
    monkeypatch.delitem(SAID_BY, SHARE)


def found(name: str, of: Any) -> list[Finding]:
    return [one for one in of.findings() if one.id == name]


@pytest.mark.parametrize(
    ("kind", "options", "title", "fix"),
    [
        (optim.AdamW, {"foreach": False}, r"AdamW computes tensor by tensor: 1\d\d ops for 16 parameters", "fused"),
        (optim.AdamW, {"foreach": True}, r"AdamW computes list by list: \d+ ops for 16 parameters", "fused"),
    ],
    ids=["one by one", "lists"],
)
def test_an_optimizer_that_is_not_fused(kind: Any, options: Any, title: str, fix: str) -> None:
    c = stepped(kind, **options)
    (one,) = found(NOT_FUSED, c)
    assert re.match(title, one.title)
    assert one.source.endswith("optimizer.step()")
    assert one.fix.startswith(f"make {kind.__name__} with `{fix}=True`")
    assert dict(one.evidence)["share"].endswith("% of the step")
    assert set(one.values) <= {node.name for node in c.update.ops}


@pytest.mark.parametrize("on", ["optimizer_step", "fuse"])
def test_the_fix_names_the_pass_that_mends_it(on: str) -> None:
    c = momentum()
    (ran,) = found(NOT_FUSED, c)
    assert ran.changes == {"fuse": True}  # on a CPU, where `optimizer_step` leaves the update as it is
    others = {"optimizer_step": False, "fuse": False} | {on: True}
    (one,) = found(NOT_FUSED, c.optimize(**others))
    assert one.is_mended == (on == "fuse")
    assert all(f"`{name}`" in one.fix for name in one.mended_by)


def test_lists_are_promised_to_spare_no_bytes() -> None:
    (one,) = found(NOT_FUSED, stepped(optim.RMSprop, foreach=False))
    assert one.title.startswith("RMSprop computes tensor by tensor")
    assert one.fix.startswith(
        "on a GPU switch passes on: `fuse` makes one kernel of the ops on a tensor, and `optimizer_step`"
    )
    assert one.fix.endswith("`foreach=True`, the default on a GPU, spares launches, and no bytes")


@pytest.mark.parametrize("is_clipped", [False, True])
def test_one_op_for_each_parameter_is_all_that_an_update_can_be_on_a_cpu(is_clipped: bool) -> None:
    """Plain SGD with `fused=True` takes as long there, also where it reads what clipping has made of the gradients."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), torch.randn(64, 256)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if is_clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert not found(NOT_FUSED, c)
    (on_gpu,) = optimizers_op_by_op(on_a_gpu(c))
    assert "tensor by tensor" in on_gpu.title


@pytest.mark.usefixtures("both")
def test_passes_are_advised_on_a_gpu_alone() -> None:
    """On a CPU the ops that a kernel over lists stands for take longer than the optimizer's own: 1.2 to 6 times as long."""
    c = momentum()
    for name, detector, words in (
        (NOT_FUSED, optimizers_op_by_op, "switch passes on"),
        (SHARE, share_of_the_update, "switch on the pass `optimizer_step`"),
    ):
        (one,), (there,) = found(name, c), detector(on_a_gpu(c))
        assert f"or on a GPU {words}" in one.fix
        assert f"or {words}" in there.fix
        assert there.fix == one.fix.replace("on a GPU ", "")


def test_its_fix_mends_it_and_so_do_passes() -> None:
    assert not found(NOT_FUSED, stepped(fused=True))
    (one,) = found(NOT_FUSED, momentum(foreach=False).optimize())
    assert one.is_mended
    (left,) = found(NOT_FUSED, momentum(foreach=True).optimize())
    assert not left.is_mended  # on a CPU the pass leaves lists to torch


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}], ids=["one by one", "lists"])
def test_no_pass_mends_what_cannot_be_compiled(options: dict[str, Any]) -> None:
    """What RAdam makes of its count of steps is not followed: the passes act on the captured update, and on no later one."""
    c = stepped(optim.RAdam, **options)
    for of in (c, c.optimize()):
        with pytest.raises(ExportError, match="make RAdam on a GPU with `capturable=True`"):
            c.optimize().compile()
        for name in (NOT_FUSED, SHARE):
            (one,) = found(name, of)
            assert (one.is_mended, one.mended, one.mended_by, one.changes, one.trials) == (False, "", (), None, ())
            assert one.fix.startswith("make RAdam on a GPU" if name == NOT_FUSED else "accumulate gradients")
            assert one.fix.endswith("a compiled step cannot follow the count of steps that RAdam reads on the host")
    assert found(NOT_FUSED, momentum().optimize())[0].mended_by


def test_what_is_spared_is_what_is_read_and_written_again() -> None:
    """AdamW reads four tensors for each parameter and writes three: 28 bytes, and 4 for its steps."""
    (one,) = found(NOT_FUSED, stepped(foreach=False))
    parameters = 8 * 256 * 257
    assert f"of which {4 * 7 * parameters / 2**20:.2f} MiB" in dict(one.evidence)["moved"]


@pytest.mark.usefixtures("both")
def test_the_share_of_the_update() -> None:
    (one,) = found(SHARE, stepped(foreach=False))
    assert re.fullmatch(r"the update of AdamW takes a notable share of the step", one.title)
    assert one.severity == "medium"
    assert one.evidence[0][0].endswith("optimizer.step()")
    assert not found(SHARE, stepped(fused=True, rows=8192))


def test_what_an_optimizer_does_is_told_once() -> None:
    """Its ops one by one, and their share of the step, would be two findings of one line with one fix."""
    for of in (c := stepped(foreach=False), c.optimize()):
        assert found(NOT_FUSED, of)
        assert not found(SHARE, of)
    assert found(SHARE, stepped(fused=True))


def test_the_share_of_a_fused_update_is_a_remark() -> None:
    for of in (c := stepped(fused=True), c.optimize()):
        (one,) = found(SHARE, of)
        assert one.severity == "low"


@pytest.mark.usefixtures("both")
def test_shares_of_the_update_say_of_which_program_they_are() -> None:
    v = momentum(rows=1).optimize()
    (one,) = found(SHARE, v)
    assert re.search(r"of [\d.]+ .s a step, \d+ %", one.worth)
    assert re.search(r"left: part of [\d.]+ .s of [\d.]+ .s a step, \d+ %", one.mended)
    assert re.search(r"the optimizer takes \d+ ?% of the optimised step", str(v.layers()))
    assert re.search(r"the optimizer takes \d+ ?% of the optimised step", to_text(payload(v)))


@pytest.mark.usefixtures("both")
def test_what_is_left_of_the_update_is_what_its_modules_take() -> None:
    """Kernels of the update and kernels of the backward have the same names in their own traces."""
    v = momentum().optimize()
    named = {node.name for node in v.trace.ops} & {node.name for node in v.update.trace.ops}
    assert named, "nothing here would tell one from the other"
    (one,) = found(SHARE, v)
    takes = re.search(r"the optimizer takes (\d+) ?% of the optimised step", str(v.layers()))
    left = re.search(r"left: .* a step, (\d+) %", one.mended)
    assert takes is not None
    assert left is not None
    assert takes[1] == left[1]


def test_kernels_of_the_update_stand_for_ops_of_the_update() -> None:
    """As modelled, no kernel takes longer than the ops that it stands for."""
    v = stepped(foreach=False).optimize()
    own = {kernel.name for kernel in v.update.kernels} - {kernel.name for kernel in v.kernels}
    rows = [row for row in payload(v)["kernels"] if row["name"] in own]
    assert rows
    for row in rows:
        assert row["replaces"]["launches"] > row["calls"]
        assert row["replaces"]["us"] > row["time_us"] * row["calls"]


def test_a_program_without_an_update_has_neither() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with tracefuse.capture() as c:
        model(x).sum().backward()
    assert not found(NOT_FUSED, c)
    assert not found(SHARE, c)


@pytest.mark.usefixtures("both")
def test_a_pass_that_is_on_is_no_remedy() -> None:
    c = momentum(rows=1)
    (before,), (after,) = found(SHARE, c), found(SHARE, c.optimize())
    assert "switch on the pass `optimizer_step`" in before.fix
    assert after.mended.startswith("`optimizer_step` is on; left: ")
    less = "accumulate gradients over more micro-batches, or keep less state for each parameter"
    assert after.fix == f"make SGD with `fused=True`, {less}"


def test_the_update_is_at_the_optimizers_line() -> None:
    """Gradients of a teacher that nobody clears are added up, which takes longer than the student's update."""
    torch.manual_seed(0)
    teacher, student = nn.Linear(512, 512), nn.Linear(512, 512)
    optimizer, x = optim.SGD(student.parameters(), lr=0.1), torch.randn(1, 512)

    def step() -> None:
        optimizer.zero_grad()
        (student(x) - teacher(x)).square().mean().backward()
        optimizer.step()

    step()
    (one,) = found(SHARE, tracefuse.capture(step))
    assert one.source.endswith("optimizer.step()")
    assert any(label.endswith(".backward()") for label, _ in one.evidence)


def one_for_each_parameter(**options: Any) -> tracefuse.Capture:
    """Each steps in a hook of the backward, as people do to spare memory."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))), torch.randn(4, 256)
    optimizers = {one: optim.SGD([one], lr=0.1, **options) for one in model.parameters()}

    def update(one: torch.Tensor) -> None:
        optimizers[one].step()
        optimizers[one].zero_grad()

    for one in optimizers:
        one.register_post_accumulate_grad_hook(update)

    model(x).square().mean().backward()
    with tracefuse.capture() as c:
        model(x).square().mean().backward()
    return c


def test_of_an_optimizer_for_each_parameter_there_is_one_finding() -> None:
    (one,) = found(NOT_FUSED, one_for_each_parameter(momentum=0.9))
    assert re.match(r"4 optimizers of class SGD compute tensor by tensor: \d+ ops for 4 parameters$", one.title)
    assert one.fix.startswith("make SGD with `fused=True`")
    assert one.source.endswith("optimizers[one].step()")


@pytest.mark.usefixtures("both")
def test_one_op_for_each_of_their_parameters_is_all_that_they_can_be_on_a_cpu() -> None:
    c = one_for_each_parameter()
    assert not found(NOT_FUSED, c)
    assert all("fused" not in one.fix for one in found(SHARE, c))


def test_an_optimizer_of_many_small_tensors_is_named_for_what_the_host_launches() -> None:
    """Its kernels are modelled to take nothing beside a large matmul; launching them one by one is not."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))), torch.randn(4, 8)
    large = torch.randn(2048, 2048)

    def trained(**options: Any) -> tracefuse.Capture:
        optimizer = optim.AdamW(model.parameters(), **options)
        with tracefuse.capture_step(n=3) as c:
            for _ in range(4):
                optimizer.zero_grad()
                (model(x).square().mean() + (large @ large @ large).mean() * 0).backward()
                optimizer.step()
        return c

    (one,) = found(NOT_FUSED, trained(foreach=False))
    assert one.severity == "low"
    assert re.search(r"the host launches \d{3,} ops, [\d.]+ ms: the host's 8.7 µs per op", one.worth)
    assert not found(NOT_FUSED, trained(fused=True))


@pytest.mark.usefixtures("both")
def test_the_share_of_an_update_is_first_mended_by_a_fused_optimizer() -> None:
    """Also where passes are on."""
    c = stepped(foreach=False)
    for of in (c, c.optimize()):
        assert found(SHARE, of)[0].fix.startswith("make AdamW with `fused=True`, accumulate gradients over more")
    assert found(SHARE, stepped(optim.Adamax, foreach=False))[0].fix.startswith("accumulate gradients over more")
    fused = share_of_the_update(on_a_gpu(stepped(fused=True, rows=8)))
    assert all("fused=True" not in one.fix for one in fused)
