"""The fast reader of trace files gives what the patient one gives, and exact times."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import CAUSES, MadeJob, write_trace

from tracefuse.profiling import kineto, typed_records
from tracefuse.profiling.kineto import Records, recorded_in
from tracefuse.profiling.trace_file import nanoseconds
from tracefuse.profiling.typed_records import NO_TIME, elements, times_ns, with_escapes

FILES = sorted((Path(__file__).parents[2] / "timelines").glob("*.json.gz"))


def patiently(path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    with monkeypatch.context() as patched:
        patched.setattr(kineto, "elements", lambda data: None)
        return recorded_in(path)


def check_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, patient = recorded_in(path), patiently(path, monkeypatch)
    assert list(fast.events) == list(patient.events)
    assert list(fast.frames) == list(patient.frames)
    assert (fast.forward_of == patient.forward_of).all()
    assert (fast.threads, fast.devices, fast.numbered) == (patient.threads, patient.devices, patient.numbered)
    assert fast.account == patient.account


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_recorded_files_are_read_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(path, monkeypatch)


def test_a_made_job_is_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_same(write_trace(MadeJob(steps=11, causes=list(CAUSES)), tmp_path / "made.json"), monkeypatch)


def test_records_that_fit_no_type_do_not_spoil_their_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a thousand has arguments that are a list, a name that is a number, or a byte that is no UTF-8."""
    job = MadeJob(steps=3)
    odd = [
        '{"ph": "X", "name": 7, "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 5, "dur": 2}',
        '{"ph": "X", "name": "list", "cat": "cpu_op", "pid": 1.5, "tid": 1, "ts": "6", "dur": "2", "args": [1]}',
        '{"ph": "X", "name": "text", "cat": "kernel", "pid": 1, "tid": 1, "ts": 7, "dur": 2, "args": {"stream": "7"}}',
        '{"ph": "X", "name": "torn", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1e400, "dur": 2}',
        '{"ph": "B", "name": "begun", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 8.5}',
        '{"ph": "E", "pid": 1, "tid": 1, "ts": 9.25}',
    ]
    job.events[10:10] = odd
    path = write_trace(job, tmp_path / "odd.json")
    path.write_bytes(path.read_bytes().replace(b'"list"', b'"li\xffst"'))
    check_same(path, monkeypatch)
    names = {event.name for event in recorded_in(path).events}
    assert {"7", "li�st", "text", "begun"} <= names
    assert "torn" not in names


def test_chunks_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(MadeJob(steps=3), tmp_path / "made.json")
    whole = recorded_in(path)
    monkeypatch.setattr(typed_records, "CHUNK", 7)
    assert list(recorded_in(path).events) == list(whole.events)


# --- times ------------------------------------------------------------------------------------------------------------


def read(texts: list[str]) -> list[int]:
    return times_ns([msgspec.Raw(text.encode()) for text in texts]).tolist()


@given(st.lists(st.integers(0, 2**61), min_size=1, max_size=20))
def test_whole_nanoseconds_are_exact(numbers: list[int]) -> None:
    assert read([f"{ns // 1000}.{ns % 1000:03d}" for ns in numbers]) == numbers


@given(
    st.lists(
        st.one_of(
            st.decimals(-(10**18), 10**18, allow_nan=False).map(str),
            st.floats(allow_nan=False, allow_infinity=False).map(json.dumps),
            st.integers(-(10**30), 10**30).map(str),
            st.sampled_from(['"12.5"', "null", "true", "5.0", "0", "[]", "1e400", '"soon"']),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_any_number_is_as_the_patient_reader_has_it(texts: list[str]) -> None:
    expected = []
    for text in texts:
        try:
            ns = nanoseconds(json.loads(text, parse_float=Decimal))
        except ValueError:
            return  # no JSON: it comes this far in no file
        expected.append(NO_TIME if ns is None or abs(ns) > 1 << 61 else ns)
    assert read(texts) == expected


def test_no_times_are_none() -> None:
    assert times_ns([]).dtype == np.int64


# --- control characters -----------------------------------------------------------------------------------------------

TEXTS = st.text(st.sampled_from('ab\\"\n\t\x01,{}[]: '), max_size=12)


def unescaped(value: Any) -> bytes:
    """JSON in whose strings control characters stand as they are."""
    text = json.dumps(value)
    for code in range(0x20):
        text = text.replace(f"\\u{code:04x}", chr(code))
    return text.replace("\\n", "\n").replace("\\t", "\t").encode()


@given(st.lists(st.dictionaries(TEXTS, TEXTS, max_size=3), max_size=4), st.integers(3, 40))
def test_control_characters_in_strings_are_escaped_and_no_others(value: list[dict[str, str]], piece: int) -> None:
    data = unescaped(value).replace(b"\\\n", b"\\\\n").replace(b"\\\t", b"\\\\t")
    try:
        expected = json.loads(data, strict=False)
    except ValueError:
        return  # the replacements above met an escaped backslash
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(typed_records, "PIECE", piece)
        assert json.loads(with_escapes(data)) == expected


def test_what_needs_no_escape_is_the_same_object() -> None:
    data = b'{\n "a": "b"\n}'
    assert with_escapes(data) is data


def test_what_msgspec_does_not_read_is_left_to_the_patient_reader() -> None:
    assert elements(b'{"traceEvents": [{"ts": NaN}]}') is None
    assert elements(b'{"traceEvents": [1], "traceEvents": [2]}') is None
    assert elements(b'[{"ph": "X"},') is None
    found = elements(b'{"a": 1, "traceEvents": [{"name": "two\nlines"}]}')
    assert found is not None
    assert (found[0], len(found[1])) == ({"a": 1}, 1)
