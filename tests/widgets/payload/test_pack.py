"""Packing: every part once, nothing lost, and JavaScript reads the same; its tests read the fixture that is checked here."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tracefuse.widgets.payload.pack import decode, encode, pack, unpack

LINE = {"code": "y = aten.mul(x, 1.0)", "bytes": 1, "share": 1.0, "saved": True, "of": None}
VALUE = {
    "values": [LINE, dict(LINE), {**LINE, "code": "</script><!-- →\u2028"}],
    "__proto__": {"a": [], "b": {}, "c": [[], [1, 1.5, -7, 1e300, "1", False, 0]]},
    "": "",
}


@pytest.mark.parametrize("value", [VALUE, [], {}, [None], [[1, True, 1.0], [True, 1, 1.0]], {"a": (1, 2)}])
def test_nothing_is_lost(value: Any) -> None:
    # As text: 1, 1.0 and True are equal in Python and not in JSON.
    expected = json.dumps(value)
    assert json.dumps(unpack(json.loads(json.dumps(pack(value))))) == expected
    assert json.dumps(decode(encode(value))) == expected


def test_equal_parts_stand_once() -> None:
    packed = pack(VALUE)
    assert len({json.dumps(atom) for atom in packed["atoms"]}) == len(packed["atoms"])
    assert len({json.dumps(node) for node in packed["nodes"]}) == len(packed["nodes"])
    found = unpack(packed)
    assert found["values"][0] is found["values"][1]


def test_the_same_value_gives_the_same_text_which_is_inert() -> None:
    assert encode(VALUE) == encode(VALUE)
    assert set(encode(VALUE)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/=")


@pytest.mark.parametrize("value", [[object()], [b"bytes"], [{1, 2}]])
def test_what_json_lacks_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="nothing that JSON has"):
        pack(value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_json_lacks_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode([value])


def test_javascript_is_tested_on_what_python_packs(root: Any) -> None:
    path = root / "widgets/js/testing/packed.json"
    fixture = json.loads(path.read_text())
    assert fixture["value"] == VALUE, "VALUE was edited: write the fixture anew"
    assert fixture["packed"] == pack(VALUE)
    assert decode(fixture["encoded"]) == VALUE
