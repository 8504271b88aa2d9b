"""The records of a profiler as columns: one numpy array for each field, so that a million records are a few of them.

`Events` is a sequence of `tracefuse.timeline.events.Event`, which it makes only where one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np

from tracefuse.timeline.events import Event, is_cuda_call_name, is_range_of, mark_of

NUMBERS = (
    "device",
    "resource",
    "start_ns",
    "duration_ns",
    "correlation",
    "operator",
    "sequence",
    "forward_thread",
    "nbytes",
)
"""The fields of `Event` that are columns of 64-bit integers."""


class Events(Sequence[Event]):
    """Records by start, and of those that start together the longest first. `name` and `category` index `names` and
    `categories`; times are whole nanoseconds."""

    def __init__(
        self,
        names: tuple[str, ...],
        categories: tuple[str, ...],
        name: np.ndarray,
        category: np.ndarray,
        on_gpu: np.ndarray,
        numbers: Mapping[str, np.ndarray],
    ) -> None:
        self.names, self.categories = names, categories
        order = np.lexsort((-numbers["duration_ns"], numbers["start_ns"]))
        if (order[1:] > order[:-1]).all():
            order = slice(None)
        self.name, self.category, self.on_gpu = name[order], category[order], on_gpu[order]
        self.device, self.resource, self.start_ns, self.duration_ns, self.correlation = (
            numbers[field][order] for field in NUMBERS[:5]
        )
        self.operator, self.sequence, self.forward_thread, self.nbytes = (
            numbers[field][order] for field in NUMBERS[5:]
        )

    @classmethod
    def of(cls, events: Iterable[Event]) -> Events:
        """The same records as columns."""
        if isinstance(events, Events):
            return events
        events = list(events)
        names = {name: at for at, name in enumerate(dict.fromkeys(e.name for e in events))}
        categories = {name: at for at, name in enumerate(dict.fromkeys(e.category for e in events))}
        return cls(
            tuple(names),
            tuple(categories),
            np.array([names[e.name] for e in events], np.uint32),
            np.array([categories[e.category] for e in events], np.uint16),
            np.array([e.on_gpu for e in events], bool),
            {field: np.array([getattr(e, field) for e in events], np.int64) for field in NUMBERS},
        )

    # --- as a sequence ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.start_ns)

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice | np.ndarray) -> Events: ...
    def __getitem__(self, at: int | slice | np.ndarray) -> Event | Events:
        if isinstance(at, slice | np.ndarray):
            numbers = {field: getattr(self, field)[at] for field in NUMBERS}
            return Events(self.names, self.categories, self.name[at], self.category[at], self.on_gpu[at], numbers)
        return Event(
            self.names[self.name[at]],
            bool(self.on_gpu[at]),
            *(int(getattr(self, field)[at]) for field in NUMBERS[:6]),
            self.categories[self.category[at]],
            *(int(getattr(self, field)[at]) for field in NUMBERS[6:]),
        )

    def __iter__(self) -> Iterator[Event]:
        return map(self.__getitem__, range(len(self)))

    # --- what is true of each -----------------------------------------------------------------------------------------

    def name_at(self, row: int) -> str:
        return self.names[self.name[row]]

    def named(self, is_one: Callable[[str], object]) -> np.ndarray:
        """Whether `is_one` holds of the name of each record; it is asked once for each name."""
        return np.fromiter((bool(is_one(name)) for name in self.names), bool, len(self.names))[self.name]

    def in_category(self, is_one: Callable[[str], object]) -> np.ndarray:
        """The same of the categories."""
        found = (bool(is_one(name)) for name in self.categories)
        return np.fromiter(found, bool, len(self.categories))[self.category]

    @cached_property
    def end_ns(self) -> np.ndarray:
        return self.start_ns + self.duration_ns

    @cached_property
    def is_marked(self) -> np.ndarray:
        return self.named(mark_of) & ~self.on_gpu

    @cached_property
    def is_range(self) -> np.ndarray:
        return self.in_category(is_range_of) | self.is_marked

    @cached_property
    def is_cuda_call(self) -> np.ndarray:
        return self.named(is_cuda_call_name) & ~self.on_gpu

    @cached_property
    def is_work(self) -> np.ndarray:
        """What a GPU did: kernels, copies and fills."""
        return self.on_gpu & ~self.is_range

    def within(self, window: tuple[int, int]) -> np.ndarray:
        """The rows of what is in the window, or touches it (ns)."""
        return np.flatnonzero((self.end_ns >= window[0]) & (self.start_ns <= window[1]))
