"""A printed trace is Python that runs and reads well."""

from __future__ import annotations

import io
import tokenize

import programs
import pytest
import torch

import tracefuse
from tracefuse.optimizers.errors import NotSupported
from tracefuse.optimizers.render import literal


def run_text(code: str, name: str, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    namespace: dict = {"torch": torch}
    exec(code, namespace)
    with torch.no_grad():
        return namespace[name](*inputs)


def without_comments(code: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return tokenize.untokenize((t.type, t.string) for t in tokens if t.type != tokenize.COMMENT)


@pytest.mark.parametrize("name", [n for n in programs.PROGRAMS if n not in ("gpt", "autocast", "two_backwards")])
def test_the_text_computes_what_replay_computes(name):
    c = tracefuse.capture(programs.PROGRAMS[name](torch.float64).run)
    expected = c.replay()
    for code in (c.trace.code, without_comments(c.trace.code)):
        found = run_text(code, "step", c.example_inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_halves_run_one_after_the_other():
    c = tracefuse.capture(programs.rope(torch.float64).run)
    forward, backward = c.trace.split()
    *inputs, cotangent = c.example_inputs
    loss, *saved = run_text(forward.code, "forward", inputs)
    (gradient,) = run_text(backward.code, "backward", (*saved, cotangent))
    assert torch.equal(loss, c.replay()[0])
    assert torch.equal(gradient, c.replay()[1])


def test_types_bytes_lines_and_deaths_are_shown():
    x, total_line = torch.ones(3, 2), "total = doubled.sum()  # noqa: F841"
    with tracefuse.capture() as c:
        doubled = x * 2
        total = doubled.sum()  # noqa: F841
    assert c.forward.code == (
        "def forward(x):\n"
        "    # x: f32[3, 2]  24 B  input\n"
        "\n"
        f"    # {__file__.rpartition('/')[2]}:{_line_of('doubled = x * 2')}  doubled = x * 2\n"
        f"{'    doubled = torch.ops.aten.mul.Tensor(x, 2)':88}  # f32[3, 2]  24 B\n"
        "\n"
        f"    # {__file__.rpartition('/')[2]}:{_line_of(total_line)}  total = doubled.sum()  # noqa: F841\n"
        f"{'    total = torch.ops.aten.sum.default(doubled)':88}  # f32[]  4 B\n"
        "    return (doubled, total)\n"
    )


def _line_of(text: str) -> int:
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if line.strip() == text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("-inf"), "float('-inf')"),
        (torch.device("cuda", 1), "torch.device('cuda:1')"),
        ([1, (2,), None], "[1, (2,), None]"),
        (torch.bfloat16, "torch.bfloat16"),
        (slice(None, 3), "slice(None, 3, None)"),
        ({"a": torch.strided}, "{'a': torch.strided}"),
    ],
)
def test_literals(value, text):
    assert literal(value) == text


def test_what_has_no_text_is_refused_by_name():
    with pytest.raises(NotSupported, match="Generator"):
        literal(torch.Generator())
