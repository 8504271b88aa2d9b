"""A session file holds a capture and what was measured of it, and opens as data on any machine."""

from __future__ import annotations

import ast
import json
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import programs
import pytest
import torch
from cuda_traces import on_cuda
from isomorphism import assert_isomorphic
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import ROPE_LEAF
from tracefuse.errors import SessionError
from tracefuse.optimizers.cat.packed_attention import Packing
from tracefuse.optimizers.fuse import Fuse
from tracefuse.optimizers.lowering.layouts import Tuning
from tracefuse.profiling.lanes import run_lanes
from tracefuse.session.files import MOST_EXPANSION
from tracefuse.timeline.measurements import Build
from tracefuse.timeline.replayed import Timeline
from tracefuse.widgets.html import to_html
from tracefuse.widgets.payload.program import notes
from tracefuse.widgets.view.explorer import Explorer

NO_INPUTS = r"a\.tfz was saved without its input tensors.*`c\.save\(path, inputs=True\)` where it ran"


@pytest.fixture(scope="module")
def capture() -> tracefuse.Capture:
    """A GPT's step, measured: times, beside a pinned variant too, a timeline, and what each pass is worth."""
    torch.manual_seed(7)
    made = tracefuse.capture(programs.gpt(torch.float32).fresh().run)
    full, other = made.optimize(), made.optimize(remat=0.0, freeze=["h.*.mlp.*"], memory_budget="64B")
    Explorer(full, budget_s=0.1).measure()
    other.measure(budget_s=0.05, against=full)
    full.ablate(budget_s=0.2)
    assert all(vars(made.measurements)[name] for name in ("timings", "timelines", "ablations", "peaks"))
    return made


@pytest.fixture(scope="module")
def path(capture: tracefuse.Capture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture.save(tmp_path_factory.mktemp("session") / "a.tfz")


@pytest.fixture(scope="module")
def loaded(path: Path) -> tracefuse.Capture:
    return tracefuse.load(path)


# --- what comes back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_makes_the_same_round_trip(name: str, tmp_path: Path) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float64).fresh().run)
    loaded = tracefuse.load(capture.save(tmp_path / "a.tfz", inputs=True))
    assert_isomorphic(loaded.trace, capture.trace)
    assert loaded.trace.code == capture.trace.code
    assert repr(loaded.guards) == repr(capture.guards)
    for mine, theirs in zip(loaded.replay(), capture.replay(), strict=True):
        assert mine.stride() == theirs.stride()
        # Not bit for bit: an input that began in the middle of its memory is now aligned, and matmuls add in another order.
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lists": lambda of: torch.optim.SGD(of, 0.1, momentum=0.9),
    "counted": lambda of: torch.optim.AdamW(of, 1e-3),
    "counted, not followed": lambda of: torch.optim.ASGD(of, 1e-3),
    "of a class of its own": lambda of: type("AdamW", (torch.optim.AdamW,), {})(of, 1e-3),
    "a rate of its own": lambda of: torch.optim.Adam(of, torch.tensor(1e-3), fused=True),
}


@pytest.mark.parametrize("inputs", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_optimizers_do_is_told_of_a_file_as_where_it_was_captured(name: str, inputs: bool, tmp_path: Path) -> None:
    """What a GPU would launch of the update among it, and saved again as well."""
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    optimizer, x = OPTIMIZERS[name](model.parameters()), torch.randn(16, 32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def guards(of: tracefuse.Capture) -> list[str]:
        return [one["text"] for one in notes(of.optimize()) if one["kind"] == "guard"]

    step()
    capture = tracefuse.capture(step)
    loaded = tracefuse.load(capture.save(tmp_path / "a.tfz", inputs=inputs))
    again = tracefuse.load(loaded.save(tmp_path / "b.tfz", inputs=inputs))
    assert "launch" in str(capture.optimize().findings())
    for one in (loaded, again):
        assert str(one.optimize().findings()) == str(capture.optimize().findings())
        assert guards(one) == guards(capture)


def test_variants_are_made_again_with_what_was_measured_of_them(
    capture: tracefuse.Capture, loaded: tracefuse.Capture
) -> None:
    assert loaded.measurements == replace(capture.measurements, timelines=loaded.measurements.timelines)
    for config in (Config(), Config.off(), Config.of(cat=False, remat=0.0)):
        mine, theirs = loaded.variant(config), capture.variant(config)
        assert (mine.forward.code, mine.backward.code) == (theirs.forward.code, theirs.backward.code)
        assert [kernel.key for kernel in mine.kernels] == [kernel.key for kernel in theirs.kernels]
    assert str(loaded.optimize().timing) == str(capture.optimize().timing)
    assert str(loaded.optimize().layers()) == str(capture.optimize().layers())
    assert str(loaded.optimize().findings()) == str(capture.optimize().findings())
    assert loaded.optimize().to_dot() == capture.optimize().to_dot()
    assert str(loaded.frozen_costs()) == str(capture.frozen_costs())
    assert loaded.environment == capture.environment


def test_a_timeline_comes_back_number_for_number(capture: tracefuse.Capture, loaded: tracefuse.Capture) -> None:
    ((pair, theirs),) = capture.measurements.timelines.items()
    mine = loaded.measurements.timelines[pair]
    assert mine is loaded.optimize().timeline()
    assert mine.provenance == theirs.provenance
    for one, other in zip(mine.programs, theirs.programs, strict=True):
        columns = [name for name in vars(other) if hasattr(getattr(other, name), "dtype")]
        assert len(columns) == 6
        for name in columns:
            assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "delay_us")
            assert getattr(one, name).dtype == getattr(other, name).dtype
        rest = [name for name in vars(other) if name not in columns]
        assert [getattr(one, name) for name in rest] == [getattr(other, name) for name in rest]


def test_a_timeline_of_a_gpu_comes_back_with_its_idle_time(capture: tracefuse.Capture, tmp_path: Path) -> None:
    run = tracefuse.load_timeline(Path(__file__).parents[2] / "timelines" / "item_in_loop.json.gz", window="window")
    theirs = run_lanes(run).program
    assert "idle" in {lane.kind for lane in theirs.lanes}
    other = tracefuse.load(capture.save(tmp_path / "a.tfz"))
    other.measurements.timelines = {(Config(), None): Timeline("measured on NVIDIA H200", (theirs, theirs))}
    (found,) = tracefuse.load(other.save(tmp_path / "a.tfz")).measurements.timelines.values()
    mine = found.programs[0]
    assert (mine.lanes, mine.names, mine.values, mine.op_us) == (
        theirs.lanes,
        theirs.names,
        theirs.values,
        theirs.op_us,
    )
    for name in ("start_us", "duration_us", "name", "value", "lane", "delay_us"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name), equal_nan=name == "delay_us")


def test_saving_what_was_loaded_writes_the_same_file(path: Path, loaded: tracefuse.Capture, tmp_path: Path) -> None:
    again = loaded.save(tmp_path / "again.tfz")
    with zipfile.ZipFile(path) as one, zipfile.ZipFile(again) as other:
        assert one.namelist() == other.namelist()
        assert [one.read(name) for name in one.namelist()] == [other.read(name) for name in other.namelist()]


def test_the_view_shows_the_times_of_the_file(capture: tracefuse.Capture, loaded: tracefuse.Capture) -> None:
    explorer = loaded.explore()
    shown, timing = explorer.payload, capture.optimize().timing
    assert shown["timing"]["provenance"] == timing.device
    assert shown["timing"]["stale"] is False
    assert shown["timing"]["rows"][0]["variant_ms"]["median"] == timing.program("optimised").times_ms["forward"].median
    explorer.show_times_of("here")  # without a GPU the view opens with what a GPU would take
    assert explorer.payload["times"]["after"].startswith("measured on CPU")
    assert explorer.timeline["programs"][1]["count"] > 0
    assert all((one["delta_ms"] is not None) == one["enabled"] for one in shown["passes"])
    explorer.configure({"cat": False})
    assert explorer.payload["timing"]["stale"] is True
    assert "timing" in json.dumps(explorer.payload)


def test_the_view_says_why_it_cannot_measure(loaded: tracefuse.Capture) -> None:
    explorer = Explorer(loaded.optimize(), budget_s=0.05)
    assert explorer.payload["blocked"].startswith("a.tfz was saved without its input tensors")
    explorer.measure()
    assert explorer.status["error"]["message"] == explorer.payload["blocked"]
    assert "saved without its input tensors" in to_html(loaded.optimize())


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.replay(),
        lambda c: c.example_inputs,
        lambda c: c.live_inputs,
        lambda c: c.rng_states,
        lambda c: c.optimize().measure(),
        lambda c: c.optimize().compile(),
        lambda c: c.optimize().source,
        lambda c: c.optimize().ablate(),
        lambda c: c.optimize(cat=False).timeline(),
    ],
)  # fmt: skip
def test_what_needs_the_inputs_says_so(loaded: tracefuse.Capture, ask: Callable[[tracefuse.Capture], object]) -> None:
    with pytest.raises(SessionError, match=NO_INPUTS):
        ask(loaded)


def test_a_loaded_capture_records_nothing_more(loaded: tracefuse.Capture) -> None:
    with pytest.raises(TypeError, match="'LoadedCapture' object does not support the context manager protocol"), loaded:
        pass


def test_with_inputs_it_is_measured_and_trained_where_it_is_opened(capture: tracefuse.Capture, tmp_path: Path) -> None:
    loaded = tracefuse.load(capture.save(tmp_path / "a.tfz", inputs=True))
    timing = loaded.optimize(cat=False).measure(budget_s=0.05)
    assert timing.program("optimised").difference.results == pytest.approx(0, abs=1e-4)
    loaded.optimize().compile()().backward()
    trained = [t.grad for i, t in zip(loaded.trace.inputs, loaded.live_inputs, strict=True) if i.trainable]
    assert trained
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in trained)


def test_views_and_empty_inputs_come_back(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    view, row, nothing = base.t()[1:4], torch.randn(1, 3).expand(4, 3), torch.randn(0, 3)
    flags = torch.tensor([[True, False, True]])

    def run() -> torch.Tensor:
        return (torch.cat([view.t(), row, nothing]) * flags).sin()

    capture = tracefuse.capture(run)
    loaded = tracefuse.load(capture.save(tmp_path / "a.tfz", inputs=True))
    assert len(loaded.example_inputs) == 4
    for mine, theirs in zip(loaded.example_inputs, capture.example_inputs, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_a_session_of_a_gpu_opens_on_a_laptop(tmp_path: Path) -> None:
    """With the programs that its GPU's facts make, its block sizes and its reasons for what could not run."""
    x = torch.randn(64, 64, requires_grad=True)
    capture = tracefuse.capture(lambda: torch.native_dropout(x.sin(), 0.3, True)[0].sin().sum().backward())
    elsewhere = tracefuse.load(capture.save(tmp_path / "cpu.tfz"))
    elsewhere._trace, captured = on_cuda(capture.trace), elsewhere._saved
    elsewhere._saved = replace(
        captured,
        cat=replace(captured.cat, packing=Packing((), "an old GPU")),
        fuse=Fuse(132 * 2048),
        environment={**captured.environment, "device": "NVIDIA H200"},
    )
    variant = elsewhere.optimize()
    first, second = variant.kernels
    built = Build({first.name: Tuning(1, 0, "tuned there")}, {second.name: "too much shared memory"})
    elsewhere.measurements.builds[Config()] = built

    loaded = tracefuse.load(elsewhere.save(tmp_path / "a.tfz"))
    assert loaded.device == torch.device("cuda:0")
    assert loaded.machine == elsewhere.machine
    mine = loaded.optimize()
    assert mine.forward.code == variant.forward.code
    assert "draw_dropout" in mine.forward.code, "the machine's way of drawing dropout is lost"
    assert Build(mine.tunings, mine.fallbacks) == built
    assert mine.runs_triton
    assert loaded.explore().payload["environment"]["device"] == "NVIDIA H200"
    with pytest.raises(SessionError, match="saved without its input tensors"):
        mine.measure()
    with_inputs = tracefuse.load(capture.save(tmp_path / "b.tfz", inputs=True))
    with_inputs._trace = loaded.trace
    with_inputs._saved = replace(loaded._saved, data=with_inputs._saved.data)
    with pytest.raises(SessionError, match="captured on NVIDIA H200, and torch sees no CUDA GPU here: open it where"):
        with_inputs.optimize().measure()


# --- passes of the user's own -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leave:
    """Leaves the trace as it is."""

    name: ClassVar[str] = "leave"
    level: int = 1

    def run(self, trace: Any, decide: Any) -> Any:
        return trace


@pytest.fixture
def registered() -> Iterator[None]:
    tracefuse.register(Leave)
    yield
    if "leave" in Config().names:
        tracefuse.unregister("leave")


def test_a_pass_of_ones_own_is_named_and_found_again(registered: None, tmp_path: Path) -> None:
    capture = tracefuse.capture(programs.rope(torch.float32).fresh().run)
    capture.optimize(leave={"level": 3}).measure(budget_s=0.02)
    capture.optimize(leave=False).measure(budget_s=0.02)
    path = capture.save(tmp_path / "a.tfz")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = tracefuse.load(path)
    assert loaded.optimize(leave={"level": 3}).timing == capture.optimize(leave={"level": 3}).timing

    tracefuse.unregister("leave")
    with pytest.warns(UserWarning, match="the pass 'leave' is left out.*register it, then load the file again"):
        without = tracefuse.load(path)
    assert [config.as_code() for config, _ in without.measurements.timings] == ["c.optimize()"]
    assert len(without.left_out) == 1


def test_the_file_that_comes_along_has_the_reference_case_as_a_gpu_measured_it() -> None:
    """A step whose leaf lies on the CPU. Notebook 02 writes it anew on a GPU, should this version not read it."""
    captured = tracefuse.load(ROPE_LEAF).variant(Config.off())
    first = captured.findings()[0]
    assert first.title == "every backward copies the gradient of `input_ts` from cuda:0 to the CPU"
    assert dict(first.evidence)["bytes"] == "640 MiB"
    assert all(bar.provenance.startswith("measured on NVIDIA") for bar in first.bars)
    tried = [captured.capture.measurements.trials[captured.config, first.key, at] for at in range(len(first.trials))]
    assert [one.verdict for one in tried] == ["faster", "faster"]


# --- files that cannot be written or read -----------------------------------------------------------------------------


def test_a_file_is_replaced_only_when_all_of_it_is_written(
    capture: tracefuse.Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tfz"
    path.write_text("as it was")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SessionError, match=r"No space left on device\): name a file in a folder that exists"):
        capture.save(path)
    assert path.read_text() == "as it was"
    assert [one.name for one in tmp_path.iterdir()] == ["a.tfz"]
    with pytest.raises(SessionError, match="cannot be written"):
        capture.save(tmp_path / "nowhere" / "a.tfz")


Edit = Callable[[dict[str, bytes]], object]


def edited(path: Path, to: Path, edit: Edit, arrays: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    edit(members)
    with zipfile.ZipFile(to, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data, arrays if name.startswith("arrays") else zipfile.ZIP_DEFLATED)
    return to


def changing(member: str, change: Callable[[Any], object]) -> Edit:
    def edit(members: dict[str, bytes]) -> None:
        data = json.loads(members[member])
        change(data)
        members[member] = json.dumps(data).encode()

    return edit


def set_text(member: str, text: str) -> Edit:
    return lambda members: members.update({member: text.encode()})


def test_a_file_of_the_first_version_is_read_without_the_second_profile(path: Path, tmp_path: Path) -> None:
    def date_back(measured: Any) -> None:
        measured["profiles"] = [
            {"config": measured["ablations"][0]["config"], "profile": {"device": "measured on a GPU"}}
        ]
        for row in measured["timings"]:
            row["timing"]["work"] = None

    def edit(members: dict[str, bytes]) -> None:
        changing("session.json", lambda head: head.update(version=1))(members)
        changing("measured.json", date_back)(members)

    old, new = tracefuse.load(edited(path, tmp_path / "a.tfz", edit)), tracefuse.load(path)
    assert old.measurements == replace(new.measurements, timelines=old.measurements.timelines)


def test_a_pass_that_a_file_does_not_know_was_off(path: Path, tmp_path: Path) -> None:
    def forget(measured: Any) -> None:
        for entry in measured["timings"]:
            del entry["config"]["decompose"]

    older = tracefuse.load(edited(path, tmp_path / "a.tfz", changing("measured.json", forget)))
    assert {config.decompose for config, _ in older.measurements.timings} == {False}


WRONG: dict[str, tuple[Edit, str]] = {
    "a newer version": (changing("session.json", lambda d: d.update(version=6)), "as version 6 of sessions.*open it with"),
    "another kind of file": (changing("session.json", lambda d: d.update(format="pickle")), "is no session"),
    "a list for a head": (set_text("session.json", "[]"), "is no session"),
    "no JSON": (set_text("trace.json", "{"), "trace.json is no JSON"),
    "lists without end": (set_text("trace.json", "[" * 200_000), "without end"),
    "a number without end": (set_text("trace.json", "9" * 100_000), "is no JSON"),
    "a key twice": (set_text("capture.json", '{"a": 1, "a": 2}'), "a key twice"),
    "not a number": (set_text("measured.json", '{"timings": NaN}'), "NaN is no number"),
    "a part that is missing": (lambda m: m.pop("trace.json"), "has not the parts"),
    "a path out of the file": (lambda m: m.update({"../../x.py": b"import os"}), "has not the parts"),
    "an absolute path": (lambda m: m.update({"/etc/x": b""}), "has not the parts"),
    "an array that nobody counts": (lambda m: m.update({"arrays/77": b""}), "has not the parts"),
    "a bomb": (lambda m: m.update({"trace.json": b" " * (20 << 20)}), "more than the"),
    "a time in words": (changing("measured.json", lambda d: d["timings"][0]["timing"].update(rounds="x")), "not a whole"),
    "an option less": (changing("measured.json", lambda d: d["timings"][0]["config"].pop("save")), "config has"),
    "an unknown option": (changing("measured.json", lambda d: d["timings"][0]["config"].update(x=1)), "config has"),
    "a weight beyond 1": (changing("measured.json", lambda d: d["timings"][0]["config"].update(remat=7.5)), "configuration"),
    "a column too short": (
        changing("measured.json", lambda d: d["timelines"][0]["timeline"]["programs"][0]["lane"].update(at=0)), "bytes, not"),
    "an event of no lane": (
        changing("measured.json", lambda d: d["timelines"][0]["timeline"]["programs"][0].update(lanes=[])), "no such name"),
    "a docstring's end in two lines": (
        changing("capture.json", lambda d: d["environment"].update(device='x"""\nimport os')), "no single printable line"),
    "a machine of another kind": (changing("capture.json", lambda d: d["fuse"].update(code="x")), "which no Fuse has"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_file_that_is_no_session_is_refused(path: Path, tmp_path: Path, wrong: str) -> None:
    edit, message = WRONG[wrong]
    with pytest.raises(SessionError, match=message):
        tracefuse.load(edited(path, tmp_path / "a.tfz", edit))


def test_files_of_other_kinds_are_refused(path: Path, tmp_path: Path) -> None:
    for data in (b"", b"PK", os.urandom(1000), path.read_bytes()[:-100]):
        (tmp_path / "b.tfz").write_bytes(data)
        with pytest.raises(SessionError, match="is no whole zip file"):
            tracefuse.load(tmp_path / "b.tfz")
    with pytest.raises(SessionError, match=r"there is no file .*c\.tfz: name one"):
        tracefuse.load(tmp_path / "c.tfz")
    with pytest.raises(SessionError, match="cannot be read"):
        tracefuse.load(tmp_path)


def test_an_array_that_unpacks_to_more_is_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match="packed in a way that no session is"):
        tracefuse.load(edited(path, tmp_path / "a.tfz", lambda m: None, arrays=zipfile.ZIP_DEFLATED))


def test_parts_that_lie_in_one_another_are_refused(path: Path, tmp_path: Path) -> None:
    """Entries of the directory that all point at the same bytes unpack to more than there is."""
    data = bytearray(edited(path, tmp_path / "a.tfz", lambda m: None).read_bytes())
    size = len(data)
    entry = data.index(b"PK\x01\x02" + data[data.index(b"PK\x01\x02") + 4 :][:24])
    while entry >= 0:
        data[entry + 20 : entry + 28] = struct.pack("<II", size, size)
        entry = data.find(b"PK\x01\x02", entry + 4)
    (tmp_path / "a.tfz").write_bytes(data)
    with pytest.raises(SessionError, match="lie in one another"):
        tracefuse.load(tmp_path / "a.tfz")


def test_a_trace_of_many_layers_packs_less_than_a_bomb(tmp_path: Path) -> None:
    capture = tracefuse.capture(programs.residual_chain(torch.float32, layers=96).fresh().run)
    with zipfile.ZipFile(capture.save(tmp_path / "a.tfz")) as archive:
        info = archive.getinfo("trace.json")
        assert info.file_size < info.compress_size * MOST_EXPANSION / 2


def test_what_a_docstring_holds_cannot_end_it(tmp_path: Path) -> None:
    capture = tracefuse.capture(programs.rope(torch.float32).fresh().run)
    capture.environment["device"] = 'a "GPU"""; raise SystemExit; """\\'
    statement = ast.parse(capture.optimize().source).body[0]
    assert isinstance(statement, ast.Expr)
    assert capture.environment["device"] in ast.literal_eval(statement.value)


def test_a_file_that_no_command_would_open_is_not_written(capture: tracefuse.Capture, tmp_path: Path) -> None:
    with pytest.raises(SessionError, match=r"does not end in \.tfz.*: name it .*x\.txt\.tfz"):
        capture.save(tmp_path / "x.txt")
    assert not list(tmp_path.iterdir())


def test_a_loaded_capture_says_its_file_and_its_ops(capture: tracefuse.Capture, tmp_path: Path) -> None:
    path = capture.save(tmp_path / "a.tfz")
    assert repr(tracefuse.load(path)) == f"<tracefuse.load({str(path)!r}): {capture.counts}>"


def test_an_operator_on_several_dtypes_is_saved_as_it_ran(tmp_path: Path) -> None:
    """torch's fake kernel of a group norm's backward under autocast names another dtype than its real one."""
    norm, image = torch.nn.GroupNorm(2, 4), torch.randn(2, 4, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    with tracefuse.capture() as c, torch.autocast("cpu", torch.bfloat16):
        norm(image).float().square().mean().backward()
    again = tracefuse.load(c.save(tmp_path / "norm.tfz", inputs=True))
    assert again.program.trace.code == c.program.trace.code
