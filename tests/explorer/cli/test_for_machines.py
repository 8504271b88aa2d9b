"""For machines: the report and its schema, variants that are tried, exit codes, comments that hide findings, pytest."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import torch

import tracefuse
from tracefuse.cli.command import main
from tracefuse.errors import OptionError
from tracefuse.findings.ignored import ids_ignored_on
from tracefuse.pytest_plugin import check_findings
from tracefuse.widgets.view.report import VERSION, schema

pytest_plugins = ["pytester"]

SCRIPT = """\
import torch
x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
loss = (x @ w).sin().exp().sum()
loss.backward()
if loss.item() > 1e9:{comment}
    print(loss)
"""
QUICK = ("--budget", "0.3")


def written(folder: Path, comment: str = "", text: str = SCRIPT) -> str:
    path = folder / f"step{len(comment)}.py"  # of one that is written twice Python keeps the first lines
    path.write_text(text.format(comment=comment))
    return str(path)


def report_of(folder: Path, *flags: str, comment: str = "") -> dict:
    out = folder / "report.json"
    assert main([written(folder, comment), *flags, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    jsonschema.Draft202012Validator(schema()).validate(found)
    return found


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_schema_is_one_and_knows_the_version() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["version"]["const"] == VERSION


@pytest.mark.parametrize("flags", [("--no-measure",), QUICK, ("--no-measure", "--no-fuse", "--no-pad")])
def test_a_report_is_as_its_schema_says(flags: tuple[str, ...], tmp_path: Path) -> None:
    found = report_of(tmp_path, *flags)
    assert (found["timing"] is None) == ("--no-measure" in flags)
    assert {"host-sync"} <= {one["id"] for one in found["findings"]}
    assert found["tried"] == found["ignored"] == []
    assert all(decision["reason"] for one in found["passes"] for decision in one["decisions"])


def test_a_wrong_report_is_refused(tmp_path: Path) -> None:
    found = report_of(tmp_path, "--no-measure")
    validator = jsonschema.Draft202012Validator(schema())
    wrong = [
        found | {"version": 1},
        found | {"findings": [{**found["findings"][0], "severity": "grave"}]},
        found | {"findings": [{**found["findings"][0], "id": "Host Sync"}]},
        {name: part for name, part in found.items() if name != "target"},
        found | {"tried": [{"changes": {}}]},
    ]
    assert [validator.is_valid(one) for one in wrong] == [False] * len(wrong)


def test_the_kind_of_each_number_and_the_target_are_said(tmp_path: Path) -> None:
    try:
        found = report_of(tmp_path, "--no-measure", "--target", "L4")
    finally:
        tracefuse.target("here")
    assert found["target"] == {"name": "L4", "why": "chosen"}
    kinds = {one["id"]: one["kind"] for one in found["findings"]}
    assert kinds["unfused-pointwise"] == "modelled"
    (worth,) = (one["worth"] for one in found["findings"] if one["id"] == "unfused-pointwise")
    assert "roofline of the L4 datasheet" in worth


# --- variants beside the default --------------------------------------------------------------------------------------


def test_variants_are_measured_beside_the_shown_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report_of(tmp_path, *QUICK, "--try", "remat=0,pad=off", "--try", "fuse=off")
    first, second = found["tried"]
    assert (first["changes"], second["changes"]) == ({"remat": 0.0, "pad": False}, {"fuse": False})
    assert (first["call"], second["call"]) == ("c.optimize(pad=False, remat=0.0)", "c.optimize(fuse=False)")
    for one in (first, second):
        assert one["device"].startswith("measured on CPU")
        assert one["difference_ms"]["low"] <= one["difference_ms"]["median"] <= one["difference_ms"]["high"]
        assert one["ratio"]["samples"] == one["difference_ms"]["samples"] > 0
    printed = capsys.readouterr().out
    assert "remat=0.0, pad=False: a step takes " in printed
    assert "instead of " in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [("rema=0", "did you mean remat?"), ("remat", "write NAME=VALUE"), ("remat=3", "pass a number from 0 to 1")],
)
def test_a_wrong_choice_is_refused_before_anything_runs(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text="raise SystemExit(7)")
    assert main([path, "--try", text]) == 2
    assert message in capsys.readouterr().err


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_a_finding_that_is_named_ends_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    assert main([path, "--no-measure", "--fail-on", "low"]) == 3
    assert "--fail-on low: low [host-sync]" in capsys.readouterr().err
    assert main([path, "--no-measure", "--fail-on", "high"]) == 0


def test_what_a_pass_mends_does_not_fail(tmp_path: Path) -> None:
    path = written(tmp_path, "  # tracefuse: ignore[host-sync]")
    assert main([path, "--no-measure", "--fail-on", "low"]) == 0
    assert main([path, "--no-measure", "--no-fuse", "--fail-on", "low"]) == 3


def test_a_severity_that_is_none_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([written(tmp_path), "--fail-on", "grave"])
    assert caught.value.code == 2
    assert "choose high, medium or low" in capsys.readouterr().err


def test_the_scripts_own_status_comes_first(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main([written(tmp_path, text="raise SystemExit(7)"), "--fail-on", "low"])
    assert caught.value.code == 7


# --- comments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "ids"),
    [
        ("loss.item()  # tracefuse: ignore[host-sync]", {"host-sync"}),
        ("loss.item()  # noqa: X  tracefuse: ignore[host-sync, tf32-off]", {"host-sync", "tf32-off"}),
        ("loss.item()  # tracefuse: ignore", set()),
        ("tracefuse: ignore[host-sync]", set()),
        ("loss.item()  # othertracefuse: ignore[host-sync]", set()),
    ],
)
def test_a_comment_names_what_it_hides(line: str, ids: set[str]) -> None:
    assert ids_ignored_on(line) == ids


def test_a_comment_hides_its_finding_and_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report_of(tmp_path, "--no-measure", comment="  # tracefuse: ignore[host-sync]")
    assert "host-sync" not in {one["id"] for one in found["findings"]}
    ((ignored),) = found["ignored"]
    assert ignored["id"] == "host-sync"
    assert "1 finding is hidden by comments `# tracefuse: ignore[…]`: host-sync" in capsys.readouterr().err
    other = report_of(tmp_path, "--no-measure", comment="  # tracefuse: ignore[tf32-off]")
    assert "host-sync" in {one["id"] for one in other["findings"]}
    assert other["ignored"] == []


def test_findings_print_what_is_hidden() -> None:
    def step() -> None:
        x = torch.ones(4, requires_grad=True)
        x.sum().backward()
        x.detach().sum().item()  # tracefuse: ignore[host-sync]

    findings = tracefuse.capture(step).findings()
    assert [one.id for one in findings.ignored] == ["host-sync"]
    assert repr(findings).endswith("1 finding is hidden by comments `# tracefuse: ignore[…]`: host-sync")


# --- pytest -----------------------------------------------------------------------------------------------------------


WEIGHTS = torch.randn(64, 64, requires_grad=True)


def reading_step() -> None:
    loss = (WEIGHTS @ WEIGHTS).sum()
    loss.backward()
    loss.item()


def test_findings_fail_a_test_with_their_text() -> None:
    with pytest.raises(AssertionError, match=r"of severity low or more: mend, pass allow=\[id\]") as caught:
        check_findings(reading_step, severity="low")
    assert "[host-sync]" in str(caught.value)
    allowed = ["host-sync", "unfused-pointwise"]
    assert {one.id for one in check_findings(reading_step, allow=allowed, severity="low")} <= set(allowed)
    assert check_findings(tracefuse.capture(reading_step), severity="high") is not None


def test_the_target_of_a_check_is_its_own() -> None:
    before = str(tracefuse.target())
    check_findings(reading_step, target="L4")
    assert str(tracefuse.target()) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": ["host-sink"]}, "did you mean host-sync?"),
        ({"severity": "grave"}, "choose from high, medium, low"),
        ({"target": "H1000"}, "did you mean H100?"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict, message: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_findings(reading_step, **options)
    assert message in str(caught.value)


def test_the_fixture_is_there_for_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import torch

        weights = torch.randn(64, 64, requires_grad=True)

        def step():
            loss = (weights @ weights).sum()
            loss.backward()
            loss.item()

        def test_with(assert_findings):
            assert_findings(step, severity="low")

        def test_without(assert_findings):
            assert_findings(step, allow=["host-sync", "unfused-pointwise"], severity="low")
        """
    )
    found = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    found.assert_outcomes(passed=1, failed=1)
    found.stdout.fnmatch_lines(["*AssertionError: * of severity low or more*"])
