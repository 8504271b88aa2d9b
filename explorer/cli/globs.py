"""Globs that match nothing, told while the script runs: before training goes on for hours, not when it has ended.

A net that has not run by then may still have what a glob matches, and the sentence says so.

Names are known once the first backward has ended: those of the modules that ran until then, and what the script calls its
own tensors. Values have names in a trace alone, so that only a glob with a dot, which is a module's, is judged for `save`.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tracefuse.optimizers.errors import did_you_mean
from tracefuse.recording.hooks import BackwardHook
from tracefuse.recording.memories import WeakMap
from tracefuse.recording.namespace import modules_in, owners_of_methods
from tracefuse.recording.shield import Shield, shielded


class GlobCheck:
    """Around a script: calls `tell` once with a sentence for each of `globs`, by flag ("--freeze"), that matches nothing of
    what is known where its first backward ends. `names` gives the script's variables."""

    def __init__(
        self, globs: Mapping[str, Iterable[str]], names: Callable[[], Mapping[str, Any]], tell: Callable[[str], None]
    ) -> None:
        self.shield = Shield("looking for the names that globs match")
        self._globs = {flag: [one.removeprefix("!") for one in given] for flag, given in globs.items()}
        self._names, self._tell = names, tell
        self._met: WeakMap[bool] = WeakMap()
        self._hooks = ExitStack()

    def __enter__(self) -> GlobCheck:
        if any(self._globs.values()):
            self._hooks.callback(register_module_forward_pre_hook(self._meet).remove)
            BackwardHook.enter(self)
            self._hooks.callback(BackwardHook.leave, self)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.close()

    @shielded
    def _meet(self, module: nn.Module, args: Any) -> None:
        """A module runs: names may also be told from one of which a method runs, as Lightning's `training_step`."""
        if module not in self._met:
            self._met[module] = True
            for one in owners_of_methods(sys._getframe(1)):
                if isinstance(one, nn.Module):
                    self._met[one] = True

    @shielded
    def backward_starts(self, outputs: Any, gradients: Any = ()) -> None:
        pass

    @shielded
    def backward_ended(self, inputs: Any, found: Any) -> None:
        self._hooks.close()
        variables = dict(self._names())
        modules = [
            *(one for one in variables.values() if isinstance(one, nn.Module)),
            *(one for one, _ in self._met.items()),
        ]
        parameters = {name for one in modules for name, _ in one.named_parameters()}
        parameters |= {name for name, one in variables.items() if isinstance(one, torch.Tensor)}
        paths = {path for one in modules for path, _ in one.named_modules() if path}
        inside = {id(part) for one in modules for part in one.modules() if part is not one}
        outermost = {id(one): one for one in modules if id(one) not in inside and any(True for _ in one.parameters())}
        roots = {held.name for held in modules_in(variables)} | {type(one).__name__ for one in outermost.values()}
        roots = roots if len(outermost) > 1 else set()
        for flag, globs in self._globs.items():
            is_freeze = flag == "--freeze"
            known, what = (parameters, "parameter") if is_freeze else (paths, "module")
            for glob in (one for one in globs if is_freeze or "." in one):
                # Of several outermost modules it may name one.
                short = [glob.removeprefix(f"{root}.") for root in roots if glob.startswith(f"{root}.")]
                said = [unmatched(one, known, what) for one in (glob, *short)]
                if all(said):
                    self._tell(f"{flag} {said[0]}")


def unmatched(glob: str, known: Iterable[str], what: str) -> str:
    """That `glob` matches no `what` of those `known` so far, with near names; "" where it does."""
    names = sorted(known)
    if any(fnmatchcase(called, one) for name in names for called in _called(name) for one in (glob, f"{glob}.*")):
        return ""
    near = difflib.get_close_matches(glob, names, n=5, cutoff=0.4) or names[:5]
    meant = did_you_mean(glob, names)
    remedy = (
        f"{meant[:1].upper()}{meant[1:]}Write a name or a glob, such as {', '.join(near)}." if near else "Leave it out."
    )
    return (
        f"{glob!r} matches no {what} of the modules that have run until the first backward, and may match one of a module "
        f"that runs later. {remedy}"
    )


def _called(name: str) -> tuple[str, str]:
    """What the user calls it, and a trace does."""
    return name, re.sub(r"\W+", "_", name)
