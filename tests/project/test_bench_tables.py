"""The committed pages of benchmarks say what the JSON files beside them do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from pages import models_table, op_db_table, people_table
from trust import fix_rows

from tracefuse.measure.timing import MIN_ROUNDS

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def test_the_page_of_the_models() -> None:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("models_*.json"))]
    assert (RESULTS / "models.md").read_text() == models_table.page(found), "run tests/bench/pages/models_table.py"


def test_the_page_of_programs_that_people_run() -> None:
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("people_*.json"))]
    assert found
    assert (RESULTS / "people.md").read_text() == people_table.page(found), "run tests/bench/pages/people_table.py"


def test_programs_are_counted_by_verdict() -> None:
    verdicts = ("exact", "refused", "not run", "wrong")
    rows = [{"verdict": verdict, "backend": "exact"} for verdict in verdicts]
    assert people_table.refused_share(rows) == pytest.approx(1 / 3), "of those that eager runs"
    assert people_table.summary(rows).startswith("4 programs: exact 1, refused 1, not run 1, wrong 1; refused 33.3%.")


def test_the_page_of_the_operator_database() -> None:
    found = json.loads((RESULTS / "op_db.json").read_text())
    assert (RESULTS / "op_db.md").read_text() == op_db_table.page(found["runs"]), "run tests/bench/pages/op_db_table.py"


def run(shard: str, verdicts: dict[str, int], **rest: str) -> op_db_table.Run:
    both = {"replay": verdicts, "passes": verdicts}
    rows = [
        {"operator": o, "replay": v, "passes": v, "samples": 1, "of": 3, "reason": "a | b"} for o, v in rest.items()
    ]
    return {
        "environment": {"device": "NVIDIA H200", "torch": "2.11.0+cu130"},
        "device": "cuda", "dtype": "float32", "in_place": False,
        "shards": [shard], "operators": 1, "not_begun": [], "left_out": 2,
        "counts": {"differentiable": both, "not differentiable": {"replay": {}, "passes": {}}},
        "rest": rows,
    }  # fmt: skip


def test_shards_are_one_run() -> None:
    both = op_db_table.merged(
        [run("0/2", {"exact": 2, "wrong": 1}, sin="wrong"), run("1/2", {"exact": 1, "no program": 4})]
    )
    _, _, captured, _, *rest = op_db_table.table(both).splitlines()
    assert captured == "| H200 float32 (torch 2.11), captured | 2 | 8 | 4 | 3 | 0 | 0 | 4 | 0 | 0 | 1 | 0 | 75.00% |"
    assert rest[-1] == "| `sin` | wrong | wrong | H200 float32 (torch 2.11): 1 of 3 | a \\| b |"


def test_a_shard_counts_once() -> None:
    with pytest.raises(ValueError, match="there twice"):
        op_db_table.merged([run("0/2", {}), run("0/2", {})])


def test_a_model_is_right_if_everything_is() -> None:
    row = {"problem": "", "replay": "bit for bit", "exported": "runs"}
    assert models_table.is_right(row)
    for wrong in ({"problem": "differs"}, {"replay": "1 outputs differ"}, {"exported": "failed: BAD"}):
        assert not models_table.is_right(row | wrong)


def tried(predicted_ms: float, measured_ms: float, varies_ms: float = 0.2, rounds: int = MIN_ROUNDS) -> fix_rows.Row:
    step_ms = {"as it is": [50.0, 50 - varies_ms, 50 + varies_ms]}
    found = {"predicted_ms": predicted_ms, "measured_ms": [measured_ms, measured_ms - 0.1, measured_ms + 0.1]}
    return {**found, "ratio": predicted_ms / measured_ms, "step_ms": step_ms, "rounds": rounds, "error": ""}


def test_a_fix_is_judged_by_what_the_rounds_resolve() -> None:
    assert fix_rows.LEAST_ROUNDS == MIN_ROUNDS
    assert fix_rows.judged(tried(1.0, 0.7)) == ""
    assert fix_rows.judged(tried(1.0, 0.6)) == "off"
    assert fix_rows.judged(tried(0.02, -0.19)) == "cannot be told: the step varies by ±0.2 ms"
    assert fix_rows.judged(tried(0.1, 0.1)) == "cannot be told: the step varies by ±0.2 ms", "though they agree"
    assert fix_rows.judged(tried(0.62, -0.04)) == "off", "as much was promised as the rounds resolve"
    assert fix_rows.judged(tried(0.02, 0.3)) == "off", "what was gained could be seen"
    assert fix_rows.judged(tried(0.02, -0.19, rounds=MIN_ROUNDS - 1)) == "off", "the spread of few rounds is not known"


def test_what_cannot_be_told_is_neither_within_nor_off() -> None:
    failed = {"predicted_ms": None, "measured_ms": None, "ratio": None, "error": "ValueError: no number"}
    rows = [tried(1.0, 0.9), tried(1.0, 1.1), tried(1.0, 2.0), tried(0.02, 0.01), failed]
    assert fix_rows.share_within(rows) == pytest.approx(2 / 4)
    assert fix_rows.summary(rows) == "2 of 4 within a factor of 1.5: 50%; 1 cannot be told"
    assert fix_rows.share_within([]) == 0
