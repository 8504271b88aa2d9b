"""Time against memory of an FSDP2 step on a described machine: `overlap`'s reshard and `remat`'s budgets in one frontier."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import fake_ranks, needs_gloo, sharded
from torch import Tensor, nn

import tracefuse
from tracefuse.cli.command import main
from tracefuse.config import Config
from tracefuse.errors import MeasureError, OptionError
from tracefuse.loaded import LoadedCapture
from tracefuse.measure.frontier import MOVED, Frontier, Point, resharded
from tracefuse.measure.op_times import OpTimes
from tracefuse.measure.overlapped import on_mesh
from tracefuse.optimizers.liveness import lifetimes, peak_bytes
from tracefuse.optimizers.ops import is_of_ranks
from tracefuse.optimizers.overlap.links import mesh
from tracefuse.optimizers.trace import phase
from tracefuse.widgets.payload.clock import modelled_clock

pytestmark = needs_gloo

WIDTH, LAYERS, RANKS = 64, 4, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session file of one rank of four, of a group that exchanges nothing."""
    with fake_ranks(RANKS):
        model = sharded(nn.Sequential(*[Block() for _ in range(LAYERS)]))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
        with tracefuse.capture_step(n=3) as c:
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(256, WIDTH)).square().mean().backward()
                optimizer.step()
    path = tmp_path_factory.mktemp("ranks") / "rank0.tfz"
    c.save(path)
    return path


@pytest.fixture
def capture(recorded: Path) -> LoadedCapture:
    return tracefuse.load(recorded)


@pytest.fixture(scope="module")
def frontier(recorded: Path) -> Frontier:
    return tracefuse.load(recorded).optimize().frontier("4xH100,nvlink", budgets=(None, 0.5, 0.1))


def test_what_other_ranks_sent_is_no_memory_of_the_program(capture: LoadedCapture) -> None:
    trace = capture.optimize().baseline.whole
    received = {entry.name for entry in trace.inputs if entry.kind == "received"}
    assert received
    assert received.isdisjoint(name for life in lifetimes(trace) for name in life.aliases)
    answers = [node for node in trace.placeholders if node.name in received]
    assert all(is_of_ranks(user) for node in answers for user in node.users)


def test_parameters_that_are_kept_are_memory_of_the_backward(capture: LoadedCapture) -> None:
    freed, kept = (capture.optimize(overlap={"reshard": on}) for on in (True, False))
    gathered = {life.nbytes for life in lifetimes(kept.whole) if life.kind == "saved"}
    assert max(gathered) >= 4 * 4 * WIDTH * WIDTH, "a weight, as it was gathered"
    assert peak_bytes(kept.whole) > peak_bytes(freed.whole)


def test_an_update_in_place_takes_no_memory_of_its_own(capture: LoadedCapture) -> None:
    trace = capture.optimize().whole_in_place
    first = next(at for at, node in enumerate(trace.ops) if phase(node) == "update")
    assert any("_fused_adamw_" in str(node.target) for node in trace.ops[first:])
    assert max((life.nbytes for life in lifetimes(trace) if life.start >= first), default=0) <= 4
    last = sum(life.nbytes for life in lifetimes(trace) if life.end == len(trace.ops) - 1)
    parameters = sum(life.nbytes for life in lifetimes(trace) if life.name in sharded_names(capture))
    assert last == pytest.approx(4 * parameters, rel=0.01), "parameters, gradients and two moments"


def sharded_names(capture: LoadedCapture) -> set[str]:
    return {entry.name for entry in capture.trace.inputs if entry.kind == "parameter"}


def test_each_point_is_what_its_own_trace_comes_to(frontier: Frontier, capture: LoadedCapture) -> None:
    assert len(frontier.points) == 9
    assert not frontier.failed
    machine = mesh("4xH100,nvlink")
    for one in frontier.points[::3]:
        variant = capture.variant(one.config)
        found = variant.overlap("4xH100,nvlink").steps[0] if one.config.overlap is None else None
        again = eval(one.call, {"c": capture})
        assert again.config == one.config
        assert peak_bytes(again.whole_in_place) == one.peak_nbytes
        assert sum(on_mesh(again.whole, machine, tf32=False).us.values()) == pytest.approx(one.step_us)
        assert found is None or found.step_us == pytest.approx(one.step_us)
        assert found is None or found.exposed_us == pytest.approx(one.exposed_us)


def test_keeping_parameters_is_faster_and_larger_and_a_budget_computes_more_and_holds_less(frontier: Frontier) -> None:
    at = {(dict(one.config.overlap or ()).get("reshard"), one.config.memory_budget): one for one in frontier.points}
    for budget in (None, 0.5, 0.1):
        assert at[False, budget].step_us < at[True, budget].step_us < at[None, budget].step_us
        assert at[False, budget].peak_nbytes > at[True, budget].peak_nbytes
    for reshard in (None, True, False):
        whole, half, least = (at[reshard, budget] for budget in (None, 0.5, 0.1))
        assert computing(least) > computing(half) > computing(whole)
        assert least.exposed_us <= whole.exposed_us + 1e-6, "nothing is exchanged again"
        assert least.peak_nbytes < half.peak_nbytes < whole.peak_nbytes
    assert at[None, 0.1].step_us > at[None, None].step_us, "what is recomputed hides behind no collective"


def computing(one: Point) -> float:
    """For how many µs a step computes."""
    return one.step_us - one.exposed_us


def test_the_frontier_is_of_both_choices_and_answers_what_fits(frontier: Frontier) -> None:
    best = frontier.best
    assert [one.step_us for one in best] == sorted(one.step_us for one in best)
    assert {dict(one.config.overlap or ()).get("reshard") for one in best} >= {True, False}
    for one in frontier.points:
        fastest = frontier.within(one.peak_nbytes)
        fitting = [other.step_us for other in frontier.points if other.peak_nbytes <= one.peak_nbytes]
        assert fastest.step_us == min(fitting)
        assert fastest.peak_nbytes <= one.peak_nbytes
    assert frontier.within("40GiB") == best[0]
    with pytest.raises(MeasureError, match=r"the least is .* a smaller batch"):
        frontier.within(best[-1].peak_nbytes - 1)


def test_it_is_told_in_text(frontier: Frontier) -> None:
    said = str(frontier)
    assert "modelled: roofline of the H100 SXM datasheet" in said
    assert "on 4 ranks" in said
    assert sum("  *  " in line for line in said.splitlines()) == len(frontier.best)
    assert all(one.call in said for one in frontier.points)


def test_the_shown_configuration_is_the_first_and_its_own_options_stay(capture: LoadedCapture) -> None:
    shown = capture.optimize(memory_budget=0.3, overlap={"bucket_mb": 50.0, "prefetch": 2})
    found = shown.frontier("4xH100,nvlink", budgets=(None, 0.3))
    assert found.points[0].config == shown.config
    assert len({one.config for one in found.points}) == len(found.points) == 6
    options = [dict(one.config.overlap or ()) for one in found.points]
    assert all(one["bucket_mb"] == 50.0 and one["prefetch"] == 2 for one in options)
    assert {one.get("reshard") for one in options} == {None, True, False}
    alone = shown.frontier("4xH100,nvlink", budgets=())
    assert [one.config for one in alone.points] == [shown.config]
    assert alone.within("1GiB") == alone.points[0] == found.points[0]


def test_what_becomes_of_parameters_is_said_beside_the_options_that_are_there() -> None:
    assert [resharded(Config(), one) for one in (None, True)] == [None, {**MOVED, "reshard": True}]
    own = Config.of(overlap={"prefetch": 3, "reshard": True})
    assert resharded(own, None) == {"prefetch": 3}
    assert resharded(own, False) == {"prefetch": 3, "second_group": True, "reshard": False}
    assert Config().changed(overlap=resharded(Config.of(overlap={"reshard": True}), None)) == Config.of(overlap=True)


@pytest.mark.parametrize("memory", [None, False, "off", "banana", True, 0.5])
def test_what_is_no_size_is_refused(frontier: Frontier, memory: object) -> None:
    with pytest.raises(OptionError, match=r"memory=.* is no size: .* such as 40GiB"):
        frontier.within(memory)  # type: ignore[arg-type]


def test_where_nothing_could_be_made_that_is_said(capture: LoadedCapture) -> None:
    unmade = capture.variant(Config.of(save=("nosuch*",))).frontier("4xH100,nvlink", budgets=(None,))
    assert not unmade.points
    assert len(unmade.failed) == 3
    assert "not made" in str(unmade)
    with pytest.raises(MeasureError, match=r"none of the configurations .* leave that option out"):
        unmade.within("1GiB")


def test_progress_ends_where_everything_is_tried(capture: LoadedCapture) -> None:
    said: list[tuple[float, str]] = []
    capture.optimize().frontier("4xH100,nvlink", budgets=(None,), progress=lambda *one: said.append(one))
    fractions = [fraction for fraction, _ in said]
    assert fractions == sorted(fractions)
    assert said[-1] == (1.0, "tried 3 configurations")
    assert all(fraction < 1 for fraction in fractions[:-1])


@pytest.fixture
def tensor_cores() -> Iterator[None]:
    """This process lets tensor cores multiply float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tensor_cores")
def test_float32_is_multiplied_as_the_program_did_it_and_not_as_this_process_would(capture: LoadedCapture) -> None:
    variant = capture.optimize()
    trace, machine = variant.whole, mesh("4xH100,nvlink")
    assert not variant.program.tf32
    matmuls = [node.name for node in trace.ops if "mm" in str(node.target)]
    alone, several = (modelled_clock(variant, gpu=one).times[1].us for one in ("H100", "4xH100,nvlink"))
    assert [several[name] for name in matmuls] == [alone[name] for name in matmuls]
    found, fast = variant.overlap("4xH100,nvlink").steps[0], on_mesh(trace, machine, tf32=True)
    assert found.step_us == pytest.approx(on_mesh(trace, machine, tf32=False).step_us)
    assert fast.step_us < found.step_us
    assert variant.frontier("4xH100,nvlink", budgets=()).points[0].step_us == pytest.approx(found.step_us)


def test_here_follows_the_target_and_nothing_is_asked_twice(capture: LoadedCapture) -> None:
    trace, found = capture.optimize().whole, {}
    try:
        for gpu in ("H100", "A100"):
            tracefuse.target(gpu)
            found[gpu] = on_mesh(trace, mesh("4xhere,nvlink4"), tf32=False)
            assert on_mesh(trace, mesh("4xhere,nvlink4"), tf32=False) is found[gpu]
    finally:
        tracefuse.target("here")
    assert all(gpu in times.provenance for gpu, times in found.items())
    assert found["A100"].step_us > found["H100"].step_us


def test_here_is_a_roofline_of_all_configurations_alike(recorded: Path) -> None:
    """Of one of them times were measured: `overlap` takes these, and a frontier cannot."""
    capture = tracefuse.load(recorded)
    shown = capture.optimize()
    before = shown.frontier("4xhere,pcie4", budgets=(None,))
    times = {node.name: 1e3 for node in shown.whole.ops}
    capture.measurements.op_times = lambda config: OpTimes(times, "measured on a GPU")  # type: ignore[method-assign]
    assert shown.overlap("4xhere,pcie4").schedule.how == "measured on a GPU"
    after = shown.frontier("4xhere,pcie4", budgets=(None,))
    assert after.points == before.points
    assert after.how.startswith("modelled: roofline")


def test_the_command_prints_the_code_of_what_fits(
    recorded: Path, frontier: Frontier, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--mesh", "4xH100,nvlink", "--frontier", "--memory", "1GiB", "--reshard", "on"]
    assert main(["overlap", str(recorded), *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("c.optimize(overlap={'reshard': True})")
    assert main(["overlap", str(recorded), "--mesh", "4xH100,nvlink", "--memory", "1GiB"]) == 2
    assert "--frontier" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["banana", "off"])
def test_the_command_reads_the_memory_before_anything_else(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", "none.tfz", "--mesh", "4xH100,nvlink", "--frontier", "--memory", memory]) == 2
    assert f"--memory {memory} is no size" in capsys.readouterr().err


def test_on_a_terminal_the_table_has_lines_of_its_own(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["overlap", str(recorded), "--mesh", "4xH100,nvlink", "--frontier", "--reshard", "on"]) == 0
    said = capsys.readouterr().err
    assert "100% tried 6 configurations" in said
    assert said.endswith("\n")


def test_a_step_that_exchanges_nothing_has_none() -> None:
    x = torch.randn(4, requires_grad=True)
    with tracefuse.capture() as c:
        x.sin().sum().backward()
    with pytest.raises(MeasureError, match="torchrun"):
        c.optimize().frontier("8xH100,nvlink")
