"""The benchmarks run from end to end, small and on the CPU, so that they do when a GPU is there."""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from forks import run_python as run_alone

from tracefuse.measure.timing import MIN_ROUNDS

BENCH = Path(__file__).parents[1] / "bench"

pytestmark = pytest.mark.slow

# A script that runs another one in a process of its own need not import torch there once more.
run_python = partial(run_alone, with_its_own=True)


def run(name: str, tmp_path: Path, *flags: str) -> tuple[dict, str]:
    """The JSON that a small run writes, and what it prints."""
    arguments = [str(BENCH / name), "--small", "--device", "cpu", "--out", "out.json", *flags]
    done = run_python(arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    environments = (
        [case["environment"] for case in found["cases"].values()] if name == "steps.py" else [found["environment"]]
    )
    assert all(machine["device"].startswith("CPU") for machine in environments)
    return found, done.stdout


def test_steps(tmp_path: Path) -> None:
    chosen = ("--case", "rope_float32", "--case", "gpt_lora")
    found, printed = run("steps.py", tmp_path, "--budget", "0.3", "--check", *chosen)
    rope, lora = found["cases"].values()
    assert [p["name"] for p in rope["timing"]["programs"]] == ["tracefuse", "eager", "copy"]
    assert [p["name"] for p in lora["timing"]["programs"]] == ["tracefuse", "eager", "all trained"]
    assert (rope["limit"]["what"], lora["limit"]["what"]) == ("copy", "roofline")
    assert lora["static"]["tracefuse"]["saved_nbytes"] < lora["static"]["all trained"]["saved_nbytes"]
    assert lora["first_run_s"]["tracefuse"] > 0
    assert "failed: nothing" in printed

    again, _ = run("steps.py", tmp_path, "--budget", "0.3", "--case", "rope_float32")
    assert again["cases"]["gpt_lora"] == lora, "what is not measured again stays"
    assert again["cases"]["rope_float32"] != rope


def test_steps_says_what_is_wrong(tmp_path: Path) -> None:
    command = [
        str(BENCH / "steps.py"),
        "--small",
        "--device",
        "cpu",
        "--case",
        "stack",
        "--limit",
        "0.1",
    ]
    done = run_python([*command, "--check"], cwd=tmp_path)
    assert done.returncode == 1
    assert "failed: stack: not finished in 0.1 s" in done.stdout


def test_kernels(tmp_path: Path) -> None:
    chosen = ["rope_bfloat16_64", "dqkv_large", "layer_norm", "dropout_residual", "cross_entropy"]
    flags = [flag for name in chosen for flag in ("--case", name)]
    found, printed = run("kernels.py", tmp_path, "--budget", "0.2", *flags)
    assert list(found["cases"]) == chosen
    for name, case in found["cases"].items():
        assert [row["phase"] for row in case["rows"]] == ["forward", "backward"][: 1 if name == "dqkv_large" else 2]
    forward, backward = found["cases"]["layer_norm"]["rows"]
    assert (forward["must"], forward["aim"], forward["of_compile"]) == (None, None, None)
    for row in (forward, backward):
        assert row["max_abs_difference"]["tracefuse"] < 1.5 * row["max_abs_difference"]["eager"] + 0.01
    assert found["cases"]["dropout_residual"]["rows"][0]["max_abs_difference"] == {}
    assert found["tune"] is False
    assert set(found["cases"]["layer_norm"]["blocks"].values()) == {"blocks guessed"}
    assert "below what must be: none" in printed


def test_aa(tmp_path: Path) -> None:
    found, printed = run("trust/aa.py", tmp_path, "--budget", "0.3", "--runs", "2", "--planted", "1", "--more", "1")
    assert [len(found[name]) for name in ("equal", "planted")] == [2, 1]
    assert found["no_difference"] + found["too_few"] <= 2
    assert found["planted_share"] > 0
    assert found["planted"][0]["step"]["ratio"]["median"] > 0
    assert "A/A: a difference seen in" in printed


def test_forecasts(tmp_path: Path) -> None:
    found, printed = run("trust/forecasts.py", tmp_path, "--budget", "0.2", "--case", "stack")
    assert {row["case"] for row in found["rows"]} == {"stack"}
    for row in found["rows"]:
        assert row["error"] == pytest.approx(row["predicted"] / row["measured"] - 1)
        assert row["is_right"] is None or row["rounds"] >= MIN_ROUNDS
    many = sum(row["rounds"] >= MIN_ROUNDS for row in found["rows"])
    assert (f"of {many} toggles" in printed) == (many > 0)
    assert ("are not judged" in printed) == (many < len(found["rows"]))


def test_fixes(tmp_path: Path) -> None:
    steps = ("layers_checkpointed", "norm_in_float32", "a_decoder_by_hand", "a_leaf_left_on_the_cpu")
    found, printed = run("trust/fixes.py", tmp_path, "--budget", "0.2", "--check", "--only", *steps)
    rows = {(row["program"], row["finding"]): row for row in found["rows"]}
    assert {("layers_checkpointed", "checkpoint-not-needed"), ("norm_in_float32", "norm-in-float32")} <= rows.keys()
    assert ("a_decoder_by_hand", "logits-in-float32") in rows
    assert "a_leaf_left_on_the_cpu" not in {program for program, _ in rows}, "it is about a GPU"
    for row in rows.values():
        median, low, high = row["measured_ms"]
        assert low <= median <= high
        assert row["ratio"] == pytest.approx(row["predicted_ms"] / median)
        assert row["rounds"] >= MIN_ROUNDS
    assert " within a factor of 1.5: " in printed
    assert " cannot be told" in printed


def test_fusions(tmp_path: Path) -> None:
    flags = ("--budget", "0.2", "--check", "--only", "mish")
    found, printed = run("fusions/fusions.py", tmp_path, *flags, "--only", "pool", "--seconds", "0")
    (first,) = found["programs"]
    assert "are left: call it again" in printed
    again, printed = run("fusions/fusions.py", tmp_path, *flags, "--only", "pool", "--processes", "2")
    assert "held against float64 after" in printed
    assert again["programs"][first] == found["programs"][first], "what was measured before stays"
    assert len(again["programs"]) == 2
    assert "all are there" in printed
    assert "eager / ours: geometric mean" in printed
    assert "does not hold: nothing" in printed
    for row in again["programs"].values():
        assert set(row["columns"]) == {"eager", "ours"}
        assert max(row["off"].values()) < 1e-4


def test_fusions_of_whole_nets(tmp_path: Path) -> None:
    found, printed = run("fusions/fusions.py", tmp_path, "--part", "nets", "--budget", "0.2", "--only", "mixer")
    assert list(found["programs"]) == ["tiny mixer"]
    assert "does not hold: nothing" in printed


def test_fusions_of_models_that_people_train(tmp_path: Path) -> None:
    flags = ("--part", "models", "--budget", "0.2", "--check", "--only", "LoRA")
    found, printed = run("fusions/fusions.py", tmp_path, *flags)
    (row,) = found["programs"].values()
    assert row["is_bf16"]
    assert set(row["columns"]) == {"eager", "ours"}
    assert "does not hold: nothing" in printed


def test_there_are_enough_fusion_programs_of_every_kind() -> None:
    sys.path.append(str(BENCH / "fusions"))
    from chains import PROGRAMS, TEXTS
    from nets import NETS
    from trained import TRAINED

    assert len(TRAINED) == 8
    assert len(PROGRAMS) == len(TEXTS.strip().splitlines()) >= 100
    assert len(NETS) == 10
    kinds = Counter(program.kind for program in PROGRAMS.values())
    assert set(kinds) == {"conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d", "linear"}
    assert min(kinds.values()) >= 14


def test_fusion_programs_have_the_sizes_that_their_texts_say() -> None:
    """In full, where nothing is computed."""
    sys.path.append(str(BENCH / "fusions"))
    from chains import PROGRAMS

    for program in PROGRAMS.values():
        with torch.device("meta"):
            model = program.made()
        (_, _, _, out, *_), *_ = program.words
        assert model.head.weight.numel() > 0
        assert int(out) in model.head.weight.shape[:2]


def test_peers(tmp_path: Path) -> None:
    found, printed = run("trust/peers.py", tmp_path, "--budget", "0.3", "--peer", "eager")
    (timing,) = found["timings"].values()
    assert [p["name"] for p in timing["programs"]] == ["eager of the model", "eager", "captured"]
    assert found["failed"] == {}
    assert "peer / of the model" in printed


def test_dqkv(tmp_path: Path) -> None:
    found, printed = run("dqkv.py", tmp_path, "--budget", "0.2")
    (case,) = found["cases"].values()
    programs = {p["name"]: p for p in case["complaint"]["timings"]["called"]["programs"]}
    assert list(programs) == ["alone", "eager cpu", "packed", "packed, summed"]
    assert programs["packed, summed"]["difference"]["results"] < 0.1
    assert case["complaint"]["must"] == {}
    assert [p["name"] for p in case["layer"]["timing"]["programs"]] == ["eager", "tracefuse"]
    assert "failed: nothing" in printed


def test_optimizer_step(tmp_path: Path) -> None:
    found, printed = run("optimizer_step.py", tmp_path, "--budget", "0.2")
    programs = [p["name"] for p in found["timings"]["called"]["programs"]]
    assert programs == ["ours", "ours, .grad", "torch", "fused AdamW", "clip", "copy"]
    assert len(found["kernels"]) == 3
    assert "failed: nothing" in printed


def test_train_step(tmp_path: Path) -> None:
    columns = "tracefuse", "eager, fused"
    found, printed = run("train_step.py", tmp_path, "--budget", "0.2", "--check", *(f"--column={c}" for c in columns))
    assert [p["name"] for p in found["timing"]["programs"]] == [*columns]
    assert found["failed"] == {}
    assert list(found["peaks"]) == [*columns]
    assert all(peak["peak_nbytes"] is None and peak["first_run_s"] > 0 for peak in found["peaks"].values())
    assert found["greatest_distance_of_losses"]["tracefuse"] < 1e-4
    assert len(set(map(len, found["losses"].values()))) == 1
    assert "in 12 steps" in printed


@pytest.mark.parametrize("program", ["lora", "resnet"])
def test_train_step_of_other_programs(program: str, tmp_path: Path) -> None:
    if program == "lora":
        pytest.importorskip("peft")
    found, _ = run(
        "train_step.py", tmp_path, "--budget", "0.2", "--program", program, "--part", "times", "--column=tracefuse"
    )
    assert [p["name"] for p in found["timing"]["programs"]] == ["tracefuse"]
    assert found["failed"] == {}


def test_depth(tmp_path: Path) -> None:
    found, printed = run("depth.py", tmp_path, "--deepest", "2")
    rows = found["rows"]
    assert [(r["layers"], r["when"]) for r in rows if r["program"] == "gpt"] == [
        (1, "cold"),
        (2, "cold"),
        (2, "warm"),
    ]
    kernels = {(r["layers"], r["weight"]): r["kernels"] for r in rows if r["program"] == "chain"}
    assert kernels[1, 1.0] < kernels[2, 1.0] < kernels[2, 0.0], "weight 0 recomputes"
    assert all(r["seconds"]["build"] > 0 and r["unique_kernels"] <= r["kernels"] for r in rows)
    assert "built for sm_90, not run" in printed


def test_toggle(tmp_path: Path) -> None:
    found, printed = run("overhead/toggle.py", tmp_path, "--limit", "3600", "--check")
    (model,) = found["models"]
    assert min(model["toggle_s"].values()) > 0
    assert all(name in printed for name in model["toggle_s"])
    assert model["toggle_ops"]["fuse off"] > model["toggle_ops"]["remat off"], "kernels are fewer than what they hold"
    assert all(model["least_s"][name] <= model["toggle_s"][name] for name in model["toggle_s"])


@pytest.mark.parametrize(("flags", "status"), [(("--check",), 1), ((), 0)])
def test_toggle_fails_above_its_limit_if_asked(flags: tuple[str, ...], status: int) -> None:
    command = [
        str(BENCH / "overhead" / "toggle.py"),
        "--small",
        "--sessions",
        "1",
        "--limit",
        "1e-9",
        *flags,
    ]
    done = run_python(command)
    assert done.returncode == status, done.stdout + done.stderr
    assert "(limit: 1e-09 s)" in done.stdout


@pytest.mark.parametrize("flags", [("--kernel", "jupyter"), ("--kernel", "inprocess", "--dropout", "0.1")])
def test_gpt(tmp_path: Path, flags: tuple[str, ...]) -> None:
    found, printed = run("gpt.py", tmp_path, "--budget", "0.5", *flags)
    assert [p["name"] for p in found["timing"]["programs"]] == ["eager", "tracefuse"]
    # Both round to bfloat16, perhaps in different places; a wrong gradient differs by its own size.
    assert found["gradients"]["tracefuse from eager"]["max_relative_norm"] < 0.1
    assert found["gradients"]["tracefuse from eager"]["parameters"] == 28
    assert {True, False} == {row["is_triton"] for row in found["kernels"]["rows"]}
    assert "measured on CPU" in printed


def test_gpt_step(tmp_path: Path) -> None:
    found, printed = run("gpt_step.py", tmp_path, "--budget", "0.5", "--peer", "eager")
    assert list(found["programs"]) == ["bf16", "tf32"]
    for program in found["programs"].values():
        assert [p["name"] for p in program["timing"]["programs"]] == ["captured", "optimised", "eager"]
        assert program["kernels"] > 0
    assert "tf32, vocabulary 211" in printed


def test_convolutions(tmp_path: Path) -> None:
    found, printed = run("fusions/convolutions.py", tmp_path)
    times = found["ms"]["2x4x8x8 by 4x4x3x3 bfloat16"]
    assert list(times) == [
        f"{o}, {c}" for o in ("channel by channel", "channels-last") for c in ("heuristics", "search")
    ]
    for phases in times.values():
        assert list(phases) == ["forward", "gradient of the input", "gradient of the weight"]
        assert all(ms > 0 for ms in phases.values())
    assert f"of {len(found['ms'])}" in printed


def test_launch(tmp_path: Path) -> None:
    found, printed = run("launch.py", tmp_path, "--budget", "0.3")
    assert list(found["host_us"]) == ["one launch", "1 layer", "10 layers"]
    assert list(found["host_us"]["1 layer"]) == ["eager", "tracefuse"]
    median, low, high = found["host_us"]["10 layers"]["eager"]["step"]
    assert 0 < low <= median <= high
    assert "µs of the host" in printed


def test_remat(tmp_path: Path) -> None:
    found, printed = run("remat.py", tmp_path, "--plain", "--budget", "0.5")
    assert [row["name"] for row in found["rows"]] == ["eager", "no remat", "weight 1", "weight 0.5", "weight 0"]
    _, plain, *weights = found["rows"]
    assert plain["saved_nbytes"] > weights[0]["saved_nbytes"] >= weights[-1]["saved_nbytes"]
    assert all(row["worst_gradient"] < 0.02 for row in weights)
    assert "measured on CPU" in printed


def test_cut(tmp_path: Path) -> None:
    found, printed = run("overhead/cut.py", tmp_path)
    assert [p["budget"] for p in found["points"][:11]] == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    assert [row["options"] for row in found["rows"]] == [
        "no budget",
        "half",
        "half, peak watched",
        "a tenth, peak watched",
    ]
    for more, less in pairwise(found["points"][:11]):
        assert less["saved_bytes"] <= more["saved_bytes"]
        assert less["peak_bytes"] <= more["peak_bytes"]
        assert less["recompute_seconds"] >= more["recompute_seconds"]
    assert "static peak" in printed


def test_view(tmp_path: Path) -> None:
    found, printed = run("overhead/view.py", tmp_path, "--budget", "0.3", "--html", "view.html")
    assert {"open", "measure", "measure each pass", "fuse off", "fuse on", "save the page"} <= found["seconds"].keys()
    assert {"simplify", "fuse"} <= found["passes"].keys()
    assert found["page_nbytes"] == (tmp_path / "view.html").stat().st_size
    assert "profiled ops add up to" in printed


def test_cpu_leaf(tmp_path: Path) -> None:
    found, printed = run("cpu_leaf.py", tmp_path, "--check")
    assert found["failed"] == []
    assert [label for label, _, _ in found["static"]["bars"]] == ["wait", "copy @ 1.3 GB/s"]
    assert "moved = input_ts.cuda()" in found["static"]["source"]
    assert "64 KiB" in printed


def test_memory(tmp_path: Path) -> None:
    found, printed = run("trust/memory.py", tmp_path, "--check", "--only", "gpt fp32", "gpt fp32 AdamW", "resnet50")
    rows = {(row["case"], row["program"]): row["ratio"] for row in found["rows"]}
    assert [program for case, program in rows if case == "resnet50"] == ["captured", "optimised", "eager step"]
    assert ("gpt fp32 AdamW", "captured") not in rows
    assert all(abs(ratio - 1) < 0.05 for ratio in rows.values())
    assert "7 of 7" in printed


def test_models(tmp_path: Path) -> None:
    found, printed = run("models.py", tmp_path)
    rows = {row["model"]: row for row in found["models"]}
    assert {name: row["replay"] for name, row in rows.items()} == {"gpt2": "bit for bit", "detector": "bit for bit"}
    assert rows["gpt2"]["exported"] == "runs"
    assert rows["gpt2"]["kernels"] > 0
    assert rows["detector"]["exported"].startswith("not checked: the size of index")
    assert "102 + 93" in printed


def test_people(tmp_path: Path) -> None:
    found, printed = run("trust/people.py", tmp_path, "--jobs", "2", "--check")
    rows = {row["program"]: row for row in found["programs"]}
    assert set(rows) == {"focal", "clipping by value"}
    for row in rows.values():
        assert (row["eager"], row["replay"], row["exported"]) == ("repeats itself", "bit for bit", "equal")
        assert row["verdict"] in ("exact", "within rounding")
        assert row["backend"] == "exact"
    assert "refused 0.0%" in printed

    again, printed = run("trust/people.py", tmp_path, "--limit-seconds", "0.01", "--only", "focal")
    assert again["programs"] == found["programs"], "what is there is not run again"
    again, printed = run("trust/people.py", tmp_path, "--limit-seconds", "0.01", "--only", "focal", "--again")
    verdicts = {row["program"]: row["verdict"] for row in again["programs"]}
    assert verdicts == {"focal": "crashed", "clipping by value": rows["clipping by value"]["verdict"]}
    assert "more than 0.01 s, at " in printed


BESIDE_AOT = """
from cases import people_trial
from cases.people_trial import Row, _beside_aot

def raises(*given):
    raise RuntimeError("device-side assert triggered")

people_trial._run = raises
for name in ("focal", "gradient penalty"):
    row = Row(name, "", "cpu", backend="raised")
    _beside_aot(row, None, 1e-9, {})
    print(row.backend, row.backend_reason)
"""


def test_people_is_not_misled_by_an_assertion_on_a_gpu() -> None:
    """What raises under our backend alone counts as ours, though nothing runs in that process any more."""
    done = run_python(["-c", BESIDE_AOT], cwd=BENCH)
    assert done.returncode == 0, done.stderr
    ours, torchs = done.stdout.strip().splitlines()
    assert ours.strip() == "raised"
    assert torchs.startswith("torch.compile raises RuntimeError: torch.compile with aot_autograd")


def test_recorder(tmp_path: Path) -> None:
    found, printed = run("overhead/recorder.py", tmp_path, "--budget", "0.2")
    (cost,) = found["costs"].values()
    assert cost["peak_ratio"] == pytest.approx(1, rel=0.2)
    assert cost["rounds"] >= 5
    assert min(cost["plain_s"], cost["floor_s"], cost["recorded_s"]) > 0
    assert cost["recorded_ops"] > cost["ops"] > 50
    assert list(found["view_s"]) == ["run and record", "trace", "passes", "payload", "in all"]
    assert "until the view" in printed


def runner(*flags: str) -> tuple[int, str]:
    done = run_python([str(BENCH / "run.py"), *flags])
    return done.returncode, done.stdout + done.stderr


def test_the_runner_lists_benchmarks_by_the_first_line_of_their_docstring() -> None:
    status, printed = runner()
    assert status == 0
    assert "steps Whole training steps: eager, torch.compile in three modes" in " ".join(printed.split())
    listed = {line.split()[0] for line in printed.splitlines()}
    assert {"steps", "kernels", "memory", "aa"} < listed


def test_the_runner_writes_results_by_machine_and_sums_up(tmp_path: Path) -> None:
    flags = ("--small", "--device", "cpu", "--results", str(tmp_path))
    status, printed = runner("launch", *flags, "--", "--budget", "0.2")
    assert status == 0, printed
    assert json.loads((tmp_path / "launch_cpu.json").read_text())["benchmark"] == "launch"
    assert "launch     passed" in printed

    status, printed = runner("toggle", "launch", *flags, "--limit", "0.5")
    assert status == 1
    assert printed.count("not finished in 0.5 s") == 2
    assert not (tmp_path / "toggle_cpu.json").exists()

    status, printed = runner("toggle", *flags, "--", "--limit", "1e-9", "--sessions", "1")
    assert status == 1
    assert "failed with status 1" in printed


def test_capture_step(tmp_path: Path) -> None:
    found, printed = run("overhead/capture_step.py", tmp_path, "--budget", "0.2")
    assert found["hook_us"] < 1e6 * found["step_s"]
    assert len(found["ratio"]) == len(found["noise"]) == 3
    assert "inside capture_step, left alone" in printed


def test_timeline_file(tmp_path: Path) -> None:
    found, printed = run("overhead/timeline_file.py", tmp_path)
    assert [one["job"] for one in found["jobs"]][-1] == "every launch late"
    assert all(
        one["unknown_share"] == 0 and one["linked"]["launched"] == one["linked"]["records"] for one in found["jobs"]
    )
    assert {"data-loading", "synchronous-checkpoint", "host-sync"} <= set(found["jobs"][0]["findings"])
    assert "events" in printed


def test_loops(tmp_path: Path) -> None:
    found, printed = run("trust/loops.py", tmp_path, "--budget", "0.2", "--check", "--only", "GAN", "PPO")
    gan, ppo = found["rows"]
    assert (gan["captured"], ppo["captured"], gan["steps"], ppo["steps"]) == (3, 3, 5, 5)
    assert [row["unharmed"] for row in found["rows"]] == [True, True]
    assert gan["differing"] == ppo["differing"] == 0
    assert ppo["update_ops"] > 0
    assert "does not hold: nothing" in printed


def test_the_runner_knows_no_other_names() -> None:
    status, printed = runner("nothing")
    assert status == 2
    assert "there is no benchmark 'nothing'" in printed


def test_the_runner_knows_every_script() -> None:
    sys.path.append(str(BENCH))
    from run import BENCHES, ELSEWHERE

    scripts = {
        str(path.relative_to(BENCH)) for path in BENCH.rglob("*.py") if '__name__ == "__main__"' in path.read_text()
    }
    assert scripts == {bench.script for bench in BENCHES.values()} | ELSEWHERE.keys()
    checked = {bench.script for bench in BENCHES.values() if bench.check}
    assert checked == {one.script for one in BENCHES.values() if '"--check"' in (BENCH / one.script).read_text()}


def test_lengths(tmp_path: Path) -> None:
    found, printed = run("overhead/lengths.py", tmp_path)
    one, all_ = found["rows"]
    assert (one["lengths"], one["compiled"], all_["lengths"]) == (1, 1, 6)
    assert 3 <= all_["compiled"] <= 6
    assert one["is_equal"]
    assert all_["is_equal"]
    assert "times what one takes" in printed


def test_pipeline(tmp_path: Path) -> None:
    found, printed = run("overhead/pipeline.py", tmp_path)
    assert [one["family"] for one in found["families"]] == ["LSTM", "GPT"]
    for one in found["families"]:
        small, large = one["sizes"]
        assert 1.7 < large["ops"] / small["ops"] < 2.3
        assert {"assembly", "passes", "verify", "lowering", "payload", "simplify", "fuse"} <= one["growth"].keys()
        assert large["kernels"] < large["launches"], "what repeats has kernels in common"
    for goal in found["goals"]:
        stages, clicks = goal["stages_s"], goal["clicks_s"].values()
        assert stages["slowest click"] == max(parts["passes"] + parts["numbers"] for parts in clicks)
        assert all(parts["rest"] > 0 for parts in clicks)
        assert stages["slowest foreseen click"] == max(parts["foreseen"] for parts in clicks)
        assert all(name in printed for name in goal["clicks_s"])
    assert "growth" in printed


def test_many_ranks(tmp_path: Path) -> None:
    found, printed = run("overhead/many_ranks.py", tmp_path)
    (job,) = found["jobs"]
    assert len(job["read_in_full"]) == 4
    assert job["late"] == [1, "copy: copy_ in Net_0.Block_1 (forward, at net.py:21)"]
    assert "of 2 only the collectives" in job["text"]
    assert "of a processor" in printed


def test_overlap_gain(tmp_path: Path) -> None:
    found, printed = run("trust/overlap_gain.py", tmp_path)
    assert found["ranks"] == 4
    assert [one["same"] for one in found["rows"]] == [True] * 9
    assert found["alone_ms"] < min(one["ms"] for one in found["rows"])
    assert "without an exchange" in printed


def test_embeddings(tmp_path: Path) -> None:
    found, _ = run("fusions/embeddings.py", tmp_path, "--budget", "0.2")
    assert list(found["rows"]) == ["tied", "untied"]
    for row in found["rows"].values():
        assert row["is_same_again"]
        assert list(row["ms"]) == ["ATen", "ours", "cast"]
        assert row["timing"]["programs"][1]["difference"]["results"] < 1e-5


def test_linear_cross_entropy(tmp_path: Path) -> None:
    found, printed = run("losses/linear_cross_entropy.py", tmp_path, "--budget", "0.2")
    assert list(found["rows"]) == ["eager", "torch.compile", "ours", "ours, whole logits"]
    assert found["decision"].startswith("chunk ")
    assert all(p["difference"]["results"] < 1e-3 for p in found["timing"]["programs"][1:])
    assert "failed: nothing" in printed
