"""Every public name says what the caller gets: in more words than its own."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import tracefuse
from tracefuse.config.pass_options import options_of
from tracefuse.passed import Passed
from tracefuse.shared import Shared
from tracefuse.widgets import charts
from tracefuse.widgets.view.explorer import Explorer

CLASSES = (tracefuse.Capture, tracefuse.Variant, Passed, Shared, tracefuse.CompiledGraph, tracefuse.Config, Explorer)
FILLING = frozenset(
    (
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "by",
        "for",
        "from",
        "in",
        "is",
        "it",
        "its",
        "not",
        "of",
        "on",
        "or",
        "that",
    )
) | {"the", "this", "to", "what", "where", "which", "with"}


def new_words(name: str, text: str) -> set[str]:
    """What the first paragraph of `text` says beyond `name`: its words but those of the name, its stems and filling."""
    own = set(re.findall(r"[a-z]+", name.lower()))
    words = re.findall(r"[a-z]{2,}", text.split("\n\n")[0].lower())
    return {w for w in words if w not in FILLING and not any(w[:4] == part[:4] for part in own)}


def members(owner: type) -> Iterator[tuple[str, str | None]]:
    """Name and docstring of each public function and property that a class of ours defines itself."""
    for name, member in vars(owner).items():
        if name.startswith("_"):
            continue
        if isinstance(member, (property, functools.cached_property)) or inspect.isroutine(member):
            yield f"{owner.__name__}.{name}", inspect.getdoc(member)


def public() -> list[tuple[str, str | None]]:
    named = [(name, inspect.getdoc(getattr(tracefuse, name))) for name in tracefuse.__all__]
    drawn = [
        (name, inspect.getdoc(one)) for name, one in vars(charts).items() if is_public_function_of(charts, name, one)
    ]
    return [*named, *(found for owner in CLASSES for found in members(owner)), *drawn]


def is_public_function_of(module: Any, name: str, one: Any) -> bool:
    return inspect.isfunction(one) and one.__module__ == module.__name__ and not name.startswith("_")


@pytest.mark.parametrize(("name", "text"), [pytest.param(name, text, id=name) for name, text in public()])
def test_a_public_name_has_a_docstring_that_says_something(name: str, text: str | None) -> None:
    assert text, f"{name} has no docstring"
    assert len(new_words(name, text)) >= 2, f"{name} only restates its name: {text!r}"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("save", "Saves it.", False),
        ("Capture.save", "Save the capture.", False),
        ("op_count", "The op count of this.", False),
        ("save", "Write a session file, without the tensors.", True),
    ],
)
def test_a_restated_name_says_nothing(name: str, text: str, says: bool) -> None:
    assert (len(new_words(name, text)) >= 2) is says


def test_every_option_of_a_pass_is_explained() -> None:
    """By a sentence beside its field, or by its name in the docstring of the pass."""
    bare = [
        f"{type(one).__name__}.{name}"
        for one in tracefuse.Config().passes()
        for name, option in options_of(type(one)).items()
        if not option.help and name not in (inspect.getdoc(type(one)) or "")
    ]
    assert bare == []
