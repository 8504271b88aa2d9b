"""Recorded steps of DDP and FSDP2 on described machines, in one process: gloo alone, and a fake group of four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import fake_ranks, gathering_graph, needs_gloo, sharded
from torch import nn

import tracefuse
from tracefuse.cli.command import main
from tracefuse.errors import MeasureError
from tracefuse.measure.overlapped import Overlap
from tracefuse.optimizers.overlap.schedule import Schedule

pytestmark = needs_gloo

WIDTH = 64
NBYTES = 4 * (WIDTH * WIDTH + WIDTH)
"""Of the parameters of a block."""


@pytest.fixture(params=["ddp", "fsdp"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "fsdp":
        with fake_ranks(4):
            yield "fsdp"
        return
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield "ddp"
    dist.destroy_process_group()


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])


def wrapped(kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(blocks(), bucket_cap_mb=1.5 * NBYTES / 2**20)
    return sharded(blocks())


def captured(kind: str) -> tracefuse.step_capture.StepCapture:
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            optimizer.step()
    return c


def check_ddp(found: Schedule) -> None:
    assert {one.role for one in found.collectives} == {"reduction"}
    assert sum(one.nbytes for one in found.collectives) == 3 * NBYTES
    assert all(one.ready <= one.starts <= one.waits for one in found.collectives)
    assert [len(one.parts) for one in found.collectives] == [4, 2]


def check_fsdp(found: Schedule) -> None:
    gathers = [one for one in found.collectives if one.role == "gather"]
    assert [one.phase for one in gathers].count("forward") == 3
    assert {one.nbytes for one in gathers} == {NBYTES}, "the whole parameters of a block, not the shard"
    assert {one.ready for one in gathers} == {0}, "shards are there from the beginning"
    reductions = [one for one in found.collectives if one.role == "reduction"]
    assert [one.kind for one in reductions] == ["reduce_scatter"] * 3
    assert all(one.needed > max(r.starts for r in reductions) for one in reductions), "the update needs them"
    assert [one.serves for one in gathers[:3]] == [f"{at}.0.weight, {at}.0.bias" for at in range(3)]


def test_a_recorded_step_is_modelled_and_saved_with_its_collectives(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = captured(kind)
    found = c.optimize().baseline.overlap("8xH100,nvlink")
    (check_ddp if kind == "ddp" else check_fsdp)(found.schedule)
    recorded = found.steps[0]
    assert recorded.step_us == pytest.approx(recorded.computing_us + recorded.exposed_us)
    assert found.best.step_us < recorded.step_us
    said = str(found)
    assert "modelled for it, not measured" in said
    assert "roofline of the H100 SXM datasheet" in said
    assert ("prefetch=1" in said) == (kind == "fsdp")

    c.save(tmp_path / "rank0.tfz")
    flags = ["--bucket-mb", "100"] if kind == "ddp" else ["--prefetch", "1", "--second-group", "--reshard", "off"]
    assert main(["overlap", str(tmp_path / "rank0.tfz"), "--mesh", "8xH100,nvlink", *flags]) == 0
    printed = capsys.readouterr().out
    assert "as recorded" in printed
    chosen = "bucket_mb=100.0" if kind == "ddp" else "prefetch=1, second_group=True, reshard=False"
    assert chosen in printed


@pytest.mark.parametrize("kind", ["ddp"], indirect=True)
def test_the_times_of_this_machine_can_be_taken(kind: str) -> None:
    variant = captured(kind).optimize().baseline
    found = variant.overlap("4xhere,pcie4", bucket_mb=25.0)
    assert isinstance(found, Overlap)
    assert found.schedule.how == variant.op_times.provenance
    assert [str(one.options) for one in found.steps] == ["as recorded", "bucket_mb=25.0"]


@pytest.mark.parametrize("kind", ["ddp"], indirect=True)
def test_a_frontier_of_reductions_tries_another_bucket_beside_the_options_that_are_there(kind: str) -> None:
    c = captured(kind)

    def tried(variant: tracefuse.Variant) -> list[dict[str, object] | None]:
        points = variant.frontier("8xH100,nvlink", budgets=(None,)).points
        return [None if one.config.overlap is None else dict(one.config.overlap) for one in points]

    assert tried(c.optimize()) == [None, {}, {"bucket_mb": 25.0}]
    own = {"bucket_mb": 50.0, "second_group": True}
    assert tried(c.optimize(overlap=own)) == [own, {"bucket_mb": 25.0, "second_group": True}]


def test_a_graph_that_starts_its_collectives_itself_is_refused_with_another_remedy() -> None:
    with gathering_graph() as graph:
        for run in (graph.optimize().overlap, graph.optimize().frontier):
            with pytest.raises(MeasureError, match=r"starts the collectives of this step itself.*capture_step"):
                run("8xH100,nvlink")


def test_a_step_that_exchanges_nothing_is_refused_with_the_remedy() -> None:
    x = torch.randn(4, requires_grad=True)
    with tracefuse.capture() as c:
        x.sin().sum().backward()
    with pytest.raises(MeasureError, match="torchrun"):
        c.optimize().baseline.overlap("8xH100,nvlink")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--mesh says which machine"),
        (["--mesh", "8xH100,nvlink", "--reshard", "maybe"], "neither on nor off"),
    ],
)
def test_the_command_says_what_it_lacks(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", "none.tfz", *flags]) == 2
    assert said in capsys.readouterr().err


def test_the_help_of_the_command_names_its_file_and_the_unit_of_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["overlap", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "session file (.tfz)" in said
    assert "Chrome trace" not in said
    assert "MIB mebibytes" in said
    assert "N gathers before" in said
    assert "Gb/s a GPU" in said
    assert "Times are printed in" in said
