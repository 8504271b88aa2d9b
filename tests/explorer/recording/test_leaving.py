"""Torch, the program's parameters and Python's collector are as before, wherever entering or leaving a recorder fails."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch.nn.modules import module

import tracefuse
from tracefuse.errors import CaptureError
from tracefuse.recording.hooks import LaunchHook
from tracefuse.recording.host_reads import Methods
from tracefuse.recording.recorder import Recorder

METHODS = ("item", "__bool__", "__int__", "__float__", "__repr__", "tolist", "cpu", "__format__", "__contains__")


def torch_now() -> list[Any]:
    """What a recorder changes in torch and in the collector."""
    return [
        *(vars(torch.Tensor).get(name) for name in METHODS),
        *(vars(torch.UntypedStorage).get(name) for name in ("resize_", "copy_")),
        torch.autograd._engine_run_backward,
        len(module._global_forward_pre_hooks),
        len(module._global_forward_hooks),
        gc.collect,
        gc.get_freeze_count(),
    ]


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int, error: type[Exception]) -> None:
    """`owner.name` raises at its call number `at`."""
    original, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) == at:
            raise error("injected")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


PLACES = [
    (LaunchHook, "enter", 1),
    (LaunchHook, "_wrap", 2),
    (Methods, "_wrapped", 2),
    ("tracefuse.recording.hooks", "register_module_forward_hook", 1),
]


def place(owner: Any) -> Any:
    return __import__(owner, fromlist=["_"]) if isinstance(owner, str) else owner


@pytest.mark.parametrize(("owner", "name", "at"), PLACES)
@pytest.mark.parametrize("is_strict", [False, True])
def test_an_entry_that_fails_half_way_is_undone(
    owner: Any, name: str, at: int, is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch_now()
    fail_at(monkeypatch, place(owner), name, at, RuntimeError)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if is_strict else "ignore")
        with tracefuse.capture() as c:
            total = torch.ones(2).sum()
    assert total == 2
    assert torch_now() == before
    with pytest.raises(CaptureError, match="injected"):
        c.trace  # noqa: B018


@pytest.mark.parametrize(("owner", "name", "at"), PLACES)
def test_memory_that_runs_out_at_the_entry_leaves_nothing(
    owner: Any, name: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch_now()
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    fail_at(monkeypatch, place(owner), name, at, MemoryError)
    with pytest.raises(MemoryError, match="injected"), tracefuse.capture(train_all=True):
        frozen(torch.ones(2))
    assert torch_now() == before
    assert not frozen.weight.requires_grad


def test_what_was_half_entered_can_be_entered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_now()
    with monkeypatch.context() as patched:
        fail_at(patched, Methods, "_wrapped", 2, RuntimeError)
        with pytest.raises(RuntimeError, match="injected"):
            Methods.enter()
    Methods.enter()
    Methods.leave()
    assert torch_now() == before


def test_frozen_parameters_are_frozen_again_where_the_recorder_cannot_be_left(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, leave = torch.nn.Linear(2, 2).requires_grad_(False), Recorder.__exit__

    def failing(self: Recorder, *exc: Any) -> None:
        leave(self, *exc)
        raise MemoryError("injected")

    monkeypatch.setattr(Recorder, "__exit__", failing)
    with pytest.raises(MemoryError, match="injected"), tracefuse.capture(train_all=True) as c:
        frozen(torch.ones(2)).sum().backward()
    assert not frozen.weight.requires_grad
    assert not c.run.is_recording
