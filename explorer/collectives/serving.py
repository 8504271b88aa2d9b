"""What each collective is for: the parameters that are gathered by it, or whose gradients it reduces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tracefuse.recording.calls import Call, Value

NAMED = 4
"""So many parameters are named; of more, their number is said."""


class Serving:
    """Follows values through copies and views, from parameters to collectives and from those to gradients."""

    def __init__(self, parameters: Mapping[Value, str]) -> None:
        self._names: dict[Value, tuple[str, ...]] = {value: (name,) for value, name in parameters.items()}
        self._made_by: dict[Value, tuple[int, ...]] = {}
        self._calls: list[tuple[Call, list[str]]] = []
        self._parameters = parameters

    def add(self, call: Call, sent: Iterable[Value], outs: Iterable[Value]) -> None:
        """A collective: what it gives serves what it sends."""
        names = [name for one in sent for name in self._names.get(one, ())]
        self._calls.append((call, names))
        for out in outs:
            self._made_by[out] = (len(self._calls) - 1,)

    def pass_on(self, sources: Iterable[Value], outs: Iterable[Value]) -> None:
        """`outs` are copies or views of `sources`."""
        sources = list(sources)
        names = tuple(dict.fromkeys(name for one in sources for name in self._names.get(one, ())))
        made_by = tuple(dict.fromkeys(number for one in sources for number in self._made_by.get(one, ())))
        for out in outs:
            if out in self._parameters:
                continue
            if names:
                self._names[out] = names
            if made_by:
                self._made_by[out] = made_by

    def follow(self, source: Value, out: Value) -> None:
        self.pass_on([source], [out])

    def named(self, calls: list[Call], gradients: Mapping[Value, Value]) -> list[Call]:
        """The calls, of which each collective says what it serves, and is shown in that module where it has none."""
        reduced: dict[int, list[str]] = {}
        for leaf, gradient in gradients.items():
            for number in self._made_by.get(gradient, ()):
                reduced.setdefault(number, []).append(self._parameters.get(leaf, ""))
        known = {}
        for number, (call, names) in enumerate(self._calls):
            known[id(call)] = list(filter(None, dict.fromkeys([*names, *reduced.get(number, [])])))
        return [_serving(call, known[id(call)]) if id(call) in known else call for call in calls]


def _serving(call: Call, names: list[str]) -> Call:
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    origin = call.origin
    if names and not origin.module:
        origin = replace(origin, module=names[0].rpartition(".")[0])
    return replace(call, args=(*call.args[:-1], shown), origin=origin)
