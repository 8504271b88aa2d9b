"""Which module costs what: a row per `nn.Module` with its own ops in the forward and in the backward, before and after.

    print(variant.layers())

    module       type       forward µs  backward µs  ratio  share  saved     backward is mostly
    h.*.attn ×2  Attention  2.1 → 1.9   5.2 → 4.4    2.3    38 %   1.5 MiB   matmul 71 %
    …
    in all                  …

A row counts the ops that ran while the module was the innermost one, and those of the backward that autograd ran for them;
children have rows of their own. Modules at paths that differ in their indices only are one line of the table, with what
they take together. Times are those of `OpTimes`, and it says whether they are measured or modelled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from tracefuse.op_times import OpTimes
from tracefuse.optimizers.cost import flops, op_class, packet_name
from tracefuse.optimizers.kernel import Kernel
from tracefuse.optimizers.liveness import saved_values
from tracefuse.optimizers.ops import does_work, producer
from tracefuse.optimizers.trace import Trace, human_bytes, origin, phase, val
from tracefuse.summary import folded
from tracefuse.timing import aligned

Pair = tuple[float, float]
OUTSIDE, IN_ALL = "(no module)", "in all"


@dataclass(frozen=True)
class Layer:
    """One module's own part of the step, or what is in none, whose path and type are empty.

    Pairs are `(as captured, with the passes)`, times in microseconds. `cause` is what most of the backward's time goes to as
    it is with the passes: "matmul 71 %", or "" without a backward.
    """

    path: str
    module_type: str
    forward_ops: tuple[int, int]
    backward_ops: tuple[int, int]
    forward_us: Pair
    backward_us: Pair
    saved_bytes: tuple[int, int]
    cause: str

    @property
    def name(self) -> str:
        """The path; of the outermost module, and of what is in none, a word in brackets."""
        return self.path or ("(model)" if self.module_type else OUTSIDE)

    @property
    def ratio(self) -> float | None:
        """Backward over forward with the passes; None where the forward takes no time."""
        return self.backward_us[1] / self.forward_us[1] if self.forward_us[1] else None


class Layers(list[Layer]):
    """One row per module, in the order of the forward. Prints as a table that folds identical layers."""

    def __init__(self, rows: Iterable[Layer], provenance: str) -> None:
        super().__init__(rows)
        self.provenance = provenance

    def __str__(self) -> str:
        groups: dict[str, list[Layer]] = defaultdict(list)
        for row in self:
            groups[folded(row.name)].append(row)
        all_us = sum(row.forward_us[1] + row.backward_us[1] for row in self)
        rows = [_line(name, group, all_us) for name, group in groups.items()]
        title = ("module", "type", "forward µs", "backward µs", "ratio", "share", "saved", "backward is mostly")
        return "\n".join([self.provenance, aligned([title, *rows, _line(IN_ALL, self, all_us)])])


def layers(before: Trace, after: Trace, times: tuple[OpTimes, OpTimes]) -> Layers:
    """The rows of one capture `before` and `after` its passes, by the times of each."""
    parts = _parts(before, times[0]), _parts(after, times[1])
    places = dict.fromkeys([*parts[0], *parts[1]])
    rows = [_layer(place[0], parts[0].get(place, _Part()), parts[1].get(place, _Part())) for place in places]
    return Layers(rows, times[1].provenance)


@dataclass
class _Part:
    """One module in one trace."""

    module_type: str = ""
    ops: Counter[str] = field(default_factory=Counter)
    us: Counter[str] = field(default_factory=Counter)
    backward_kinds: Counter[str] = field(default_factory=Counter)
    saved: int = 0


_Place = tuple[str, bool]
"""A module's path, and whether there is one: that of the outermost module is empty too."""


def _place(node: fx.Node) -> _Place:
    where = origin(node)
    return where.module, bool(where.module or where.module_type)


def _parts(trace: Trace, times: OpTimes) -> dict[_Place, _Part]:
    parts: dict[_Place, _Part] = defaultdict(_Part)
    for node in filter(does_work, trace.ops):
        half = phase(node)
        part = parts[_place(node)]
        part.module_type = part.module_type or origin(node).module_type
        part.ops[half] += 1
        us = times.us.get(node.name, 0.0)
        part.us[half] += us
        if half == "backward":
            part.backward_kinds[work(node)] += us
    nodes = {node.name: node for node in trace.graph.nodes}
    for saved in saved_values(trace):
        parts[_place(nodes[saved.name])].saved += saved.nbytes
    return parts


def _layer(path: str, old: _Part, new: _Part) -> Layer:
    return Layer(
        path,
        new.module_type or old.module_type,
        (old.ops["forward"], new.ops["forward"]),
        (old.ops["backward"], new.ops["backward"]),
        (old.us["forward"], new.us["forward"]),
        (old.us["backward"], new.us["backward"]),
        (old.saved, new.saved),
        _mostly(new.backward_kinds),
    )


def _mostly(kinds: Counter[str]) -> str:
    total = sum(kinds.values())
    if not total:
        return ""
    ((kind, us),) = kinds.most_common(1)
    return f"{kind} {us / total:.0%}".replace("%", " %")


def work(node: fx.Node) -> str:
    """What an op does, in a word: "matmul", "attention", "concatenation", "device copy", "cast", "pointwise", "fused", …"""
    if isinstance(producer(node).target, Kernel):
        return "fused"
    name = packet_name(node)
    if "attention" in name:
        return "attention"
    if "convolution" in name:
        return "convolution"
    if flops(node):
        return "matmul"
    if name in ("cat", "stack"):
        return "concatenation"
    if name == "_to_copy":
        return _conversion(node)
    if name in ("clone", "copy"):
        return "copy"
    found = op_class(node)
    return name if found == "heavy" else found


def _conversion(node: fx.Node) -> str:
    """`_to_copy` is two things that autograd calls by one name."""
    source, target = val(node.args[0]), val(node)  # type: ignore[arg-type]
    if source.device != target.device:
        return "device copy"
    return "cast" if source.dtype != target.dtype else "copy"


# --- as a table -------------------------------------------------------------------------------------------------------


def _line(name: str, group: Sequence[Layer], all_us: float) -> tuple[str, ...]:
    forward, backward = (_sums(group, of) for of in ("forward_us", "backward_us"))
    saved = _sums(group, "saved_bytes")
    types = dict.fromkeys(row.module_type for row in group) if name != IN_ALL else ()
    return (
        _label(name, group),
        ", ".join(types),
        _pair(forward),
        _pair(backward),
        f"{backward[1] / forward[1]:.2g}" if forward[1] else "",
        f"{(forward[1] + backward[1]) / all_us:.0%}".replace("%", " %") if all_us else "",
        human_bytes(saved[1]),
        max(group, key=lambda row: row.backward_us[1]).cause if name != IN_ALL else "",
    )


def _label(name: str, group: Sequence[Layer]) -> str:
    if name == IN_ALL:
        return name
    return f"{name} ×{len(group)}" if len(group) > 1 else group[0].name


def _sums(group: Sequence[Layer], name: str) -> Pair:
    return sum(getattr(row, name)[0] for row in group), sum(getattr(row, name)[1] for row in group)


def _pair(us: Pair) -> str:
    old, new = (f"{number:.3g}" for number in us)
    return new if old == new else f"{old} → {new}"
