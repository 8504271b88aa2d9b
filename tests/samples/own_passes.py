"""What the tests of the user's own passes share: classes made of a `run`, two such functions, and a program to try them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import tracefuse
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.rewrite import replace_by_call
from tracefuse.optimizers.trace import eliminate_dead_code

aten = torch.ops.aten


def made(run: Callable[..., Any], name: str = "mine", **members: Any) -> type:
    """A frozen dataclass with that `run`; members that have a type are its options."""
    annotations = {"name": ClassVar[str], **{key: type(value) for key, value in members.items()}}
    return dataclass(frozen=True)(
        type("Mine", (), {"name": name, "run": run, "__annotations__": annotations, **members})
    )


def halved(self: Any, trace: Any, decide: Any) -> Any:
    """x * 2 as x + x, up to `most` times."""
    new = trace.copy()
    found = [n for n in new.ops if n.target is aten.mul.Tensor and n.args[1] == 2]
    for node in found[: getattr(self, "most", 9)]:
        replace_by_call(node, aten.add.Tensor, node.args[0], node.args[0])
        decide(Decision(node.name, "replace", "a sum"))
    eliminate_dead_code(new.graph)
    return new


def capture() -> tracefuse.Capture:
    x = torch.linspace(0.1, 1.0, 6, dtype=torch.float64, requires_grad=True)

    def step() -> torch.Tensor:
        loss = ((x.sin() * 2).exp() * 2).sum()
        loss.backward()
        return loss

    return tracefuse.capture(step)


def nothing(self: Any, trace: Any, decide: Any) -> Any:
    return trace.copy()
