"""The kernels of one graph across the sizes that it is called with: which machine code serves them.

    the first size          all numbers stand in the text, as in a graph of one size: nothing is as fast
    a text like one that    takes the numbers in which it differs from that one, and shares its jitted functions, and so their
    is known                machine code, with all that differ in those alone: `tracefuse.optimizers.sizes.arguments`
    another text            has its numbers in it, and is known from then on

So of two kernels that are one at different sizes, what does not vary, such as a model's width, stays in the text. The text
that takes numbers is a module of its own, which is loaded once for a session; each size's module has its launches.

What was timed at one size decides at the others: `noting` and `told` are `tracefuse.build.timed.judge` for the first of them
and for those behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch

from tracefuse.build.kernels import WithNumbers, build, preload, this_gpu
from tracefuse.build.modules import load, module_of, with_support
from tracefuse.build.timed import judge
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.kernels.text import jitted_source, launches, source_with_numbers
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.sizes.arguments import Taken, Written, written
from tracefuse.optimizers.trace import val


def runs_kernels(tensors: Iterable[Any]) -> bool:
    """Whether kernels over these run as machine code, or as Triton interprets them, and not as their ATen ops."""
    is_on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in tensors)
    return os.environ.get("TRITON_INTERPRET") == "1" or (is_on_gpu and this_gpu() is not None)


@dataclass(frozen=True)
class _Version:
    """Functions that take the numbers `at` some places, divided by `factors`; the others are `fixed`."""

    at: tuple[int, ...]
    fixed: tuple[int, ...]
    factors: tuple[int, ...]
    taken: Taken

    def serves(self, text: Written) -> bool:
        return _left(text, self.at) == self.fixed and text.factors(self.at) == self.factors


@dataclass
class AcrossSizes:
    """What is known of the kernels of one graph, by their skeletons."""

    texts: dict[Hashable, list[Written]] = field(default_factory=dict)
    """Those whose numbers stand in them."""
    places: dict[Hashable, list[tuple[int, ...]]] = field(default_factory=dict)
    """Those of the numbers that vary, as they were found."""
    versions: dict[Hashable, list[_Version]] = field(default_factory=dict)
    timed: dict[tuple[str, ...], TimedKernel] = field(default_factory=dict)
    is_first: bool = True
    ready: set[Hashable] = field(default_factory=set)
    """The machine code that is loaded."""

    def with_numbers(self, kernels: Iterable[Kernel], tunings: Mapping[str, Tuning]) -> dict[str, WithNumbers]:
        """Those of the kernels of one size that take numbers, by name; what is left has its numbers in its text."""
        found = {}
        for kernel in kernels:
            if type(kernel) is not Kernel:
                continue
            tuning = tunings.get(kernel.name, GUESS)
            text = written(jitted_source(kernel, tuning), kernel.name)
            if (version := self._version(text)) is not None:
                found[kernel.name] = _with_numbers(kernel, tuning, text, version)
        self.is_first = False
        return found

    def _version(self, text: Written) -> _Version | None:
        """The functions that serve a text; None where its numbers stand in it."""
        known = self.texts.setdefault(text.skeleton, [])
        if any((one.numbers, one.names) == (text.numbers, text.names) for one in known):
            return None
        if self.is_first or not known:
            known.append(text)
            return None
        versions = self.versions.setdefault(text.skeleton, [])
        fitting = [one for one in versions if one.serves(text)]
        if fitting:
            return min(fitting, key=lambda one: len(one.at))
        at = self._places(text, known)
        version = _Version(at, _left(text, at), text.factors(at), text.taking(at))
        versions.append(version)
        return version

    def _places(self, text: Written, known: Sequence[Written]) -> tuple[int, ...]:
        """Where a text differs from the known one that it is most like, or from one that takes numbers where that takes fewer:
        what varied once varies."""
        nearest = min((_differing(text, one) for one in known), key=len)
        earlier = self.places.setdefault(text.skeleton, [])
        for at, one in enumerate(earlier):
            if set(one) & set(nearest):
                nearest = earlier[at] = tuple(sorted({*one, *nearest}))
                return nearest
        earlier.append(nearest)
        return nearest

    def launchers(self, kernels: Sequence[Kernel], tunings: Mapping[str, Tuning]) -> dict[str, Callable[..., Any]]:
        """What runs the kernels of a size that was not traced, by name: their machine code is loaded. One that cannot run on
        this GPU is its ATen ops."""
        taking = self.with_numbers(kernels, tunings)
        module = ModuleType("kernels of a size that was not traced")
        exec(with_support(*(one.source for one in taking.values())), vars(module))
        new = [one for one in kernels if one.name in taking and not _loaded(taking[one.name]) <= self.ready]
        refused = build(new, tunings=tunings, with_numbers=taking)
        built = [one for one in new if one.name not in refused]
        preload(module, built, tunings, taking)
        self.ready.update(*(_loaded(taking[one.name]) for one in built))
        found = {name: getattr(module, name) for name in taking if name not in refused}
        left = [one for one in kernels if one.name not in taking]
        refused |= build(left, tunings=tunings)
        for kernel in left:
            if kernel.name not in refused:
                own = module_of(kernel, tunings.get(kernel.name, GUESS))
                preload(own, [kernel], tunings)
                found[kernel.name] = getattr(own, kernel.name)
        return found | {kernel.name: kernel for kernel in kernels if kernel.name in refused}

    # --- what was timed ---

    def noting(self, kernels: Iterable[Kernel], *rest: Any) -> tuple[TimedKernel, ...]:
        """As `judge`, of the first size, whose times are those of the others."""
        kernels = tuple(kernels)
        found = judge(kernels, *rest)
        outlines = {kernel.key: _outline(kernel) for kernel in kernels}
        self.timed |= {outlines[one.key]: one for one in found}
        return found

    def told(self, kernels: Iterable[Kernel], *_: Any) -> tuple[TimedKernel, ...]:
        """What the first size's times say of kernels that are the same but for numbers."""
        known = [(kernel, self.timed.get(_outline(kernel))) for kernel in kernels]
        return tuple(
            replace(one, key=kernel.key, on=f"{one.on}, at another size") for kernel, one in known if one is not None
        )


def _with_numbers(kernel: Kernel, tuning: Tuning, text: Written, version: _Version) -> WithNumbers:
    taken = version.taken
    passed = {own: text.passed(taken.places[name]) for own, name in text.names.items()}
    jitted = with_support(taken.text)
    module = load(jitted).__name__
    launched = tuple(replace(one, numbers=passed[one.function]) for one in launches(kernel, tuning))
    aligning = {own: text.aligns(taken.places[name]) for own, name in text.names.items()}
    source = source_with_numbers(kernel, tuning, module, passed)
    return WithNumbers(jitted, text.names, source, launched, aligning)


def _loaded(one: WithNumbers) -> set[Hashable]:
    """What is loaded for a kernel: for each launch its machine code."""
    return {
        (one.jitted, one.names[of.function], of.pointers, one.kinds(of), *of.blocks.items(), of.num_warps)
        for of in one.launches
    }


def _left(text: Written, at: Sequence[int]) -> tuple[int, ...]:
    """The numbers that are at other places."""
    taken = set(at)
    return tuple(number for place, number in enumerate(text.numbers) if place not in taken)


def _differing(one: Written, other: Written) -> tuple[int, ...]:
    pairs = zip(one.numbers, other.numbers, strict=True)
    return tuple(place for place, (a, b) in enumerate(pairs) if a != b)


def _outline(kernel: Kernel) -> tuple[str, ...]:
    """A kernel without its sizes."""
    placeholders = [str(val(node).dtype) for node in kernel.body.placeholders]
    return (*placeholders, *(f"{node.name} {node.target}" for node in kernel.body.graph.nodes))
