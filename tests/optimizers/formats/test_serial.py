"""A trace as JSON and back is the same program: types, strides, shared memory, lines, and what every pass makes of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import programs
import pytest
import torch
from attention_traces import attention_trace
from cuda_traces import on_cuda
from isomorphism import assert_isomorphic

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.errors import SessionError
from tracefuse.optimizers.facts import storages
from tracefuse.optimizers.formats.serial import trace_from, trace_record
from tracefuse.optimizers.formats.serial_arguments import check_arguments
from tracefuse.optimizers.origins import Source
from tracefuse.optimizers.passes import final, run_pipeline
from tracefuse.optimizers.trace import Trace, origin, phase, set_origin


def through_json(trace: Trace) -> Trace:
    return trace_from(json.loads(json.dumps(trace_record(trace), allow_nan=False)), torch.__version__)


def assert_same(back: Trace, trace: Trace) -> None:
    assert back.code == trace.code
    assert (back.inputs, back.outputs) == (trace.inputs, trace.outputs)
    assert_isomorphic(back, trace)
    pairs = list(zip(back.graph.nodes, trace.graph.nodes, strict=True))
    assert [(origin(a), phase(a)) for a, _ in pairs] == [(origin(b), phase(b)) for _, b in pairs]
    assert memory(back) == memory(trace)


def memory(trace: Trace) -> list[list[tuple[int, int]]]:
    """For every value the storages that it lies in, numbered as they are met, with their bytes."""
    numbers: dict[int, int] = {}
    return [
        [(numbers.setdefault(one, len(numbers)), size) for one, size in storages(node).items()]
        for node in trace.graph.nodes
    ]


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_every_program_comes_back(name: str) -> None:
    trace = tracefuse.capture(programs.PROGRAMS[name](torch.bfloat16).fresh().run).trace
    back = through_json(trace)
    assert_same(back, trace)
    passes = Config().passes()
    assert final(back, run_pipeline(back, passes)).code == final(trace, run_pipeline(trace, passes)).code


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize("name", ["gpt", "packed_attention"])
def test_a_trace_of_a_gpu_is_read_where_there_is_none(name: str) -> None:
    trace = on_cuda(tracefuse.capture(programs.PROGRAMS[name](torch.bfloat16).fresh().run).trace)
    back = through_json(trace)
    assert_same(back, trace)
    assert all(p.meta["val"].device == torch.device("cuda:0") for p in back.placeholders)
    passes = Config().passes()
    assert final(back, run_pipeline(back, passes)).code == final(trace, run_pipeline(trace, passes)).code


def test_numbers_that_json_lacks_come_back() -> None:
    x = torch.randn(4, requires_grad=True)

    def run() -> torch.Tensor:
        loss = x.nan_to_num(nan=float("inf")).clamp(max=float("inf")).masked_fill(x > 0, float("-inf")).exp().sum()
        loss.backward()
        return loss

    trace = tracefuse.capture(run).trace
    assert "float('-inf')" in trace.code
    assert_same(through_json(trace), trace)


def test_lazy_conjugates_and_negatives_come_back() -> None:
    """Without their bits `simplify` takes a conjugate view for its operand."""
    x = torch.randn(4, 4, dtype=torch.complex64, requires_grad=True)

    def step() -> None:
        loss = (x * x.conj()).real.sum() + (x.conj().imag * 2).sum()
        loss.backward()

    trace = tracefuse.capture(step).trace
    back = through_json(trace)
    assert_same(back, trace)
    bits = [
        [(v.is_conj(), v.is_neg()) for v in (n.meta["val"] for n in t.graph.nodes if n.op != "output")]
        for t in (back, trace)
    ]
    assert bits[0] == bits[1]
    assert {(True, False), (False, True)} <= set(bits[0])
    passes = Config().passes()
    assert final(back, run_pipeline(back, passes)).code == final(trace, run_pipeline(trace, passes)).code


def test_a_line_with_spaces_that_do_not_print_is_saved() -> None:
    trace = tracefuse.capture(lambda: torch.ones(3).exp()).trace
    where = replace(origin(trace.ops[-1]), source=Source("a.py", 1, "f", "x.exp()  # \u00a0\u3000\u200b", ""))
    set_origin(trace.ops[-1], where)
    back = origin(through_json(trace).ops[-1]).source
    assert back is not None
    assert back.text == "x.exp()  #    "


def test_what_a_trace_cannot_hold_on_disk_is_said() -> None:
    trace = tracefuse.capture(programs.rope(torch.float32).fresh().run).optimize().trace
    with pytest.raises(SessionError, match=r"is no operator of PyTorch: capture the program without it"):
        trace_record(trace)


# --- records that no trace has ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    x = torch.randn(2, 3, requires_grad=True)

    def run() -> torch.Tensor:
        first, second = x.t().split(2)
        loss = torch.cat([first * 2.0, second]).sum()
        loss.backward()
        return loss

    return json.loads(json.dumps(trace_record(tracefuse.capture(run).trace)))


def node(data: dict[str, Any], op: str) -> dict[str, Any]:
    return next(one for one in data["nodes"] if one["op"] == op)


Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "no such operator": (lambda d: node(d, "aten.cat.default").update(op="aten.cta.default"), "was written with torch 9.9"),
    "an operator of dunder names": (lambda d: node(d, "aten.cat.default").update(op="aten.__class__.mro"), "not known here"),
    "an attribute of torch.ops": (lambda d: node(d, "aten.cat.default").update(op="load_library.x.y"), "not known here"),
    "one that writes": (lambda d: node(d, "aten.mul.Tensor").update(op="aten.mul_.Tensor"), "no trace has"),
    "one that makes a file": (lambda d: node(d, "aten.mul.Tensor").update(op="aten.from_file.default"), "no trace has"),
    "an argument too many": (lambda d: node(d, "aten.mul.Tensor")["args"].append(3), "takes other arguments"),
    "an argument too few": (lambda d: node(d, "aten.mul.Tensor")["args"].pop(), "has no other"),
    "an argument of another type": (lambda d: node(d, "aten.mul.Tensor")["args"].__setitem__(0, "x"), "cannot be 'x'"),
    "a cycle": (lambda d: node(d, "aten.mul.Tensor")["args"].__setitem__(0, {"value": d["nodes"][-1]["name"]}), "no op"),
    "a name twice": (lambda d: d["nodes"][1].update(name=d["nodes"][0]["name"]), "no fresh name"),
    "a keyword": (lambda d: d["nodes"][1].update(name="import"), "no fresh name"),
    "a dunder name": (lambda d: d["nodes"][1].update(name="__import__"), "no fresh name"),
    "a statement for a name": (lambda d: d["nodes"][1].update(name="x = 1"), "no fresh name"),
    "two lines": (lambda d: d["sources"][0].update(text="x\nimport os"), "no single printable line"),
    "a value beyond its storage": (lambda d: d["types"][0].update(offset=1000), "beyond its storage"),
    "a negative size": (lambda d: d["types"][0].update(shape=[-1, 3]), "no size"),
    "a huge size": (lambda d: d["types"][0].update(shape=[1 << 62, 3]), "no size"),
    "too many dimensions": (lambda d: d["types"][0].update(shape=[1] * 99, stride=[1] * 99), "no shape"),
    "a huge storage": (lambda d: d.update(storages=[1 << 60] * len(d["storages"])), "no size"),
    "a huge number": (lambda d: node(d, "aten.mul.Tensor")["args"].__setitem__(1, 10**4000), "64 bits"),
    "a device that nobody has": (lambda d: d["types"][0].update(device="disk:0"), "none of the devices"),
    "a type that torch has as something else": (lambda d: d["types"][0].update(dtype="load"), "has no dtype 'load'"),
    "no such item": (lambda d: node(d, "getitem")["args"].__setitem__(1, 7), "no item 7"),
    "a part that is missing": (lambda d: d.pop("tensors"), "trace has"),
    "a part too many": (lambda d: d.update(code="import os"), "trace has"),
    "a class of its own": (lambda d: d["inputs"][0].update(kind="os.system"), "not one of input"),
    "lists in lists": (lambda d: node(d, "aten.sum.default").update(args=[[[[[[[[[[[[]]]]]]]]]]]]), "8 deep"),
    "a forward op after the backward": (lambda d: d["nodes"][-1].update(phase="forward"), "is no program"),
    "an input that is none": (lambda d: d["inputs"].append(d["inputs"][0]), "is no program"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_that_no_trace_has_is_refused(good: dict[str, Any], damage: str) -> None:
    trace_from(good, "9.9")
    data = copy.deepcopy(good)
    damaging, message = DAMAGES[damage]
    damaging(data)
    with pytest.raises(SessionError, match=message) as caught:
        trace_from(data, "9.9")
    assert "`c.save(path)`" in str(caught.value) or "Open it with that version" in str(caught.value)


@pytest.mark.parametrize("kind", ["efficient", "cudnn", "flash"])
def test_attention_without_a_bias_is_taken(kind: str) -> None:
    """Torch gives its backward nothing where the schema wants a tensor."""
    (attention,) = [node for node in attention_trace(kind).ops if "attention" in str(node.target)]
    assert None in attention.args or kind == "flash"
    check_arguments(attention.target, attention.args, attention.kwargs, "attention")
