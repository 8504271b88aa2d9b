"""Which module costs what: a row per `nn.Module` with its own ops in the forward, the backward and, where there is one, the
update, before and after.

    print(variant.layers())

    module       type       forward µs  backward µs  ratio  FLOPs  share  saved    backward by kind, captured → optimised
    h.*.attn ×2  Attention  2.1 → 1.9   5.2 → 4.4    2.3    2      38 %   1.5 MiB  pointwise 55 %, matmul 45 % → matmul 71 %
    …
    in all                  …
    h.*.mlp ×2 takes most of the backward, 52 %: …

A row counts the ops that ran while the module was the innermost one, and those of the backward that autograd ran for them;
children have rows of their own. Numbered modules that are alike (`tracefuse.tables.folding`) are one line of the table, with
what they take together. Times are those of `OpTimes`, which says whether they are measured or modelled. Ratios are backward
over forward: of the times, and of the FLOPs, which is what to expect where matmuls take the time (2 where both operands have a
gradient). Which module is out of line is told by the captured program: a fused kernel is booked on one module, whoever's work
it does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from tracefuse.execution.one_step import why_no_verdict
from tracefuse.measure.op_times import OpTimes, how_to_measure
from tracefuse.optimizers.costs.cost import flops
from tracefuse.optimizers.facts import once_per_trace
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.liveness import known_saved_values
from tracefuse.optimizers.ops import does_work, grouped
from tracefuse.optimizers.trace import Trace, human_bytes, origin, phase
from tracefuse.tables.folding import OUTSIDE, folded_paths, kind
from tracefuse.tables.halves import halves
from tracefuse.text import aligned, figure

Pair = tuple[float, float]
Flops = tuple[int, int]
IN_ALL = "in all"
SHOWN = 0.05  # The least share of a module's backward that is named.
MOST_RATIO = 100  # From where on a ratio has no meaning.
OUT_OF_LINE = 1.5  # Times the ratio of its FLOPs, from where on a module's ratio is not what its matmuls take.


@dataclass(frozen=True)
class Layer:
    """One module's own part of the step, or what is in none, whose path and type are empty.

    Pairs are `(as captured, with the passes)`, times in microseconds. `backward_kinds` part the backward's time by
    `tracefuse.tables.folding.KINDS`, `cause` is the largest part with the passes: "matmul 71 %", or "" without a backward.
    `flops` (forward, backward) are those of its matmuls, as captured and with the passes. `folded` is the path with `*`
    for the numbers that tell the module from those like it, `count` how many modules the row stands for. `update_ops` and
    `update_us` are of what an optimizer does, which mostly runs in no module.
    """

    path: str
    module_type: str
    forward_ops: tuple[int, int]
    backward_ops: tuple[int, int]
    forward_us: Pair
    backward_us: Pair
    saved_bytes: tuple[int, int]
    cause: str
    backward_kinds: tuple[dict[str, float], dict[str, float]] = ({}, {})
    flops: tuple[Flops, Flops] = ((0, 0), (0, 0))
    folded: str = ""
    count: int = 1
    update_ops: tuple[int, int] = (0, 0)
    update_us: Pair = (0.0, 0.0)

    @property
    def name(self) -> str:
        """The path; of the outermost module, which has none, its class."""
        return self.path or self.module_type or OUTSIDE

    @property
    def ratio(self) -> float | None:
        """Backward over forward with the passes; None without a module, whose ops have nothing to do with each other, and
        where the forward takes next to no time: a kernel of another module does its work."""
        found = self.backward_us[1] / self.forward_us[1] if self.forward_us[1] else MOST_RATIO
        return found if (self.path or self.module_type) and found < MOST_RATIO else None

    @property
    def expected_ratio(self) -> float | None:
        """FLOPs of the backward over those of the forward with the passes; None where the forward has no matmul."""
        forward, backward = self.flops[1]
        return backward / forward if forward else None

    @property
    def captured_ratios(self) -> Pair | None:
        """`ratio` and `expected_ratio` as captured, where no kernel does the work of several modules; None if either is."""
        (forward, backward), forward_us = self.flops[0], self.forward_us[0]
        return (self.backward_us[0] / forward_us, backward / forward) if forward and forward_us else None

    @property
    def step_us(self) -> Pair:
        """Forward, backward and update together."""
        parts = zip(self.forward_us, self.backward_us, self.update_us, strict=True)
        before, after = map(sum, parts)
        return before, after

    @property
    def excess_us(self) -> float:
        """What the captured backward takes beyond its forward times the ratio of the FLOPs; 0 where that is not known."""
        ratios = self.captured_ratios
        return 0.0 if ratios is None else max(0.0, self.backward_us[0] - ratios[1] * self.forward_us[0])


class Layers(list[Layer]):
    """One row per module, in the order of the forward. Prints as a table that folds identical layers.

    `no_verdict` says why there is none: the program is more than one forward and one backward. "" where it is one of each.
    """

    def __init__(self, rows: Iterable[Layer], provenance: str, no_verdict: str = "") -> None:
        super().__init__(rows)
        self.provenance, self.no_verdict = provenance, no_verdict

    @property
    def folded(self) -> list[Layer]:
        """Modules that are alike as one row with their sums, its `path` with `*` for their numbers."""
        groups = grouped(self, lambda row: row.folded or row.name)
        return [_together(name, group) for name, group in groups.items()]

    def worst(self) -> Layer | None:
        """The folded row that takes most of the backward; None where nothing takes time there, and with `no_verdict`."""
        if self.no_verdict:
            return None
        most = max(self.folded, key=lambda row: row.backward_us[1], default=None)
        return most if most and most.backward_us[1] else None

    def out_of_line(self) -> Layer | None:
        """The folded row with the most `excess_us`, whose captured ratio is 1.5 times that of its FLOPs or more; None where
        there is none, the excess is less than a twentieth of the captured backward, and with `no_verdict`."""
        if self.no_verdict:
            return None
        total = sum(row.backward_us[0] for row in self)
        odd = [row for row in self.folded if _is_out_of_line(row)]
        most = max(odd, key=lambda row: row.excess_us, default=None)
        return most if most and most.excess_us > total / 20 else None

    def __str__(self) -> str:
        everything = _together(IN_ALL, self)
        unit, us = ("ms", 1e3) if max(everything.step_us) >= 1e3 else ("µs", 1)
        update = (f"update {unit}",) * any(everything.update_ops)
        title = ("module", "type", f"forward {unit}", f"backward {unit}", *update, "ratio", "FLOPs", "share", "saved")
        is_changed = any(row.backward_kinds[0] != row.backward_kinds[1] for row in self)
        kinds = "backward by kind, captured → optimised" if is_changed else "backward by kind"
        rows = [_line(row, everything, us, not self.no_verdict) for row in (*self.folded, everything)]
        table = aligned([(*title, kinds), *rows])
        said = [*self._sentences(everything), how_to_measure(self.provenance)]
        return "\n".join([self.provenance, table, *filter(None, said)])

    def _sentences(self, everything: Layer) -> list[str]:
        if not any(everything.backward_ops):
            return ["no backward in this program"]
        if self.no_verdict:
            return [self.no_verdict]
        worst, odd = self.worst(), self.out_of_line()
        found = []
        if worst:
            share = _percent(worst.backward_us[1], everything.backward_us[1])
            found.append(f"{_label(worst)} takes most of the backward, {share}: {_parts_text(worst.backward_kinds[1])}")
        if odd and odd.captured_ratios:
            ratio, expected = odd.captured_ratios
            takes = f"its backward takes {ratio:.2g} times its forward, its matmuls {expected:.2g} times"
            found.append(f"{_label(odd)} is out of line as captured: {takes}: {_parts_text(odd.backward_kinds[0])}")
        if everything.update_us[1]:
            found.append(
                f"the optimizer takes {_percent(everything.update_us[1], everything.step_us[1])} of the optimised step"
            )
        return found


def _is_out_of_line(row: Layer) -> bool:
    ratio, expected = row.captured_ratios or (0.0, 0.0)
    return expected > 0 and ratio >= OUT_OF_LINE * expected


def layers(before: Trace, after: Trace, times: tuple[OpTimes, OpTimes]) -> Layers:
    """The rows of one capture `before` and `after` its passes, by the times of each."""
    parts = _parts(before, times[0]), _parts(after, times[1])
    places = dict.fromkeys([*parts[0], *parts[1]])
    folds = folded_paths(before)
    if _has_kernels(before):  # Of a pinned configuration: no times by module to judge by.
        parts = {place: replace(part, flops=Counter()) for place, part in parts[0].items()}, parts[1]
    rows = [
        _layer(path, folds.get(path, path), parts[0].get((path, is_in), _Part()), parts[1].get((path, is_in), _Part()))
        for path, is_in in places
    ]
    has_update = any(phase(node) == "update" for node in before.ops)
    return Layers(rows, times[1].provenance, why_no_verdict(before.halves()[1], has_update))


@once_per_trace
def _has_kernels(trace: Trace) -> bool:
    return any(isinstance(node.target, Kernel) for node in trace.ops)


@dataclass
class _Part:
    """One module in one trace."""

    module_type: str = ""
    ops: Counter[str] = field(default_factory=Counter)
    us: Counter[str] = field(default_factory=Counter)
    backward_kinds: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    saved: int = 0


_Place = tuple[str, bool]
"""A module's path, and whether there is one: that of the outermost module is empty too."""


def _place(node: fx.Node) -> _Place:
    where = origin(node)
    return where.module, bool(where.module or where.module_type)


def _parts(trace: Trace, times: OpTimes) -> Mapping[_Place, _Part]:
    """The modules of a trace, by the last times that were asked for."""
    known = trace._cache.get(_parts)
    if known is None or known[0] is not times:
        known = trace._cache[_parts] = times, _found_parts(trace, times)
    return known[1]


def _found_parts(trace: Trace, times: OpTimes) -> Mapping[_Place, _Part]:
    parts: dict[_Place, _Part] = defaultdict(_Part)
    half_of = halves(trace)
    for node in filter(does_work, trace.ops):
        half, where = half_of[node], origin(node)
        part = parts[where.module, bool(where.module or where.module_type)]
        part.module_type = part.module_type or where.module_type
        part.ops[half] += 1
        us = times.us.get(node.name, 0.0)
        part.us[half] += us
        if count := flops(node):
            part.flops[half] += count
        if half == "backward" and us:
            part.backward_kinds[kind(node)] += us
    nodes = {node.name: node for node in trace.graph.nodes}
    for saved in known_saved_values(trace):
        parts[_place(nodes[saved.name])].saved += saved.nbytes
    return parts


def _layer(path: str, folded: str, old: _Part, new: _Part) -> Layer:
    return Layer(
        path,
        new.module_type or old.module_type,
        (old.ops["forward"], new.ops["forward"]),
        (old.ops["backward"], new.ops["backward"]),
        (old.us["forward"], new.us["forward"]),
        (old.us["backward"], new.us["backward"]),
        (old.saved, new.saved),
        _parts_text(new.backward_kinds, most=1),
        (dict(old.backward_kinds), dict(new.backward_kinds)),
        ((old.flops["forward"], old.flops["backward"]), (new.flops["forward"], new.flops["backward"])),
        folded,
        update_ops=(old.ops["update"], new.ops["update"]),
        update_us=(old.us["update"], new.us["update"]),
    )


def _together(name: str, rows: Sequence[Layer]) -> Layer:
    """One row with the sums of several."""
    if len(rows) == 1 and name != IN_ALL:
        return rows[0]
    kinds = Counter[str](), Counter[str]()
    for row in rows:
        for total, parts in zip(kinds, row.backward_kinds, strict=True):
            total.update(parts)
    types = ", ".join(dict.fromkeys(row.module_type for row in rows)) if name != IN_ALL else ""
    pairs = ("forward_ops", "backward_ops", "update_ops", "forward_us", "backward_us", "update_us", "saved_bytes")
    sums: dict[str, Any] = {of: tuple(sum(getattr(row, of)[at] for row in rows) for at in (0, 1)) for of in pairs}
    sums["flops"] = tuple(tuple(sum(row.flops[at][half] for row in rows) for half in (0, 1)) for at in (0, 1))
    parts = (dict(kinds[0]), dict(kinds[1]))
    return Layer(name, types, **sums, cause=_parts_text(kinds[1], most=1), backward_kinds=parts, count=len(rows))


# --- as a table -------------------------------------------------------------------------------------------------------


def _line(row: Layer, everything: Layer, unit_us: float, has_ratios: bool) -> tuple[str, ...]:
    update = (_pair(row.update_us, unit_us) if any(row.update_ops) else "",) * any(everything.update_ops)
    return (
        _label(row),
        row.module_type,
        _pair(row.forward_us, unit_us),
        _pair(row.backward_us, unit_us) if any(row.backward_ops) else "–",
        *update,
        ("—" if row.ratio is None else f"{row.ratio:.2g}") if has_ratios and row.backward_us[1] else "",
        f"{row.expected_ratio:.2g}" if row.expected_ratio and has_ratios else "",
        _percent(row.step_us[1], everything.step_us[1]),
        human_bytes(row.saved_bytes[1]) if any(row.saved_bytes) else "",
        " → ".join(dict.fromkeys(filter(None, map(_parts_text, row.backward_kinds)))),
    )


def _label(row: Layer) -> str:
    return f"{row.name} ×{row.count}" if row.count > 1 and row.path != IN_ALL else row.name


def _parts_text(kinds: Mapping[str, float], most: int = 3) -> str:
    """`pointwise 55 %, matmul 40 %`: the largest parts, those below a twentieth left out."""
    total = sum(kinds.values())
    parts = sorted(kinds.items(), key=lambda pair: -pair[1])[:most]
    return ", ".join(f"{name} {_percent(us, total)}" for name, us in parts if us >= SHOWN * total)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}".replace("%", " %") if whole else ""


def _pair(us: Pair, unit_us: float) -> str:
    old, new = (figure(number / unit_us) for number in us)
    return new if old == new else f"{old} → {new}"
