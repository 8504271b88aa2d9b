"""A model of when eager PyTorch frees each storage of the captured step: later than the trace, which frees it after its last
reader.

    autograd    a node of the backward releases what it read when it has run, all at once
    Python      a module's arguments live until the module returns; what a variable holds lives to the end (`HELD`)

    in place    what the program wrote in place has no memory of its own; in the trace, which is functional, it has

The first two follow from how autograd's engine and `nn.Module.__call__` hold references; what variables hold was seen when
the captured backward was over. Not modelled: variables that go out of scope before that, writes to a part of a tensor, and a
`.grad` that was there before, to which the new one is added.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from tracefuse.optimizers.liveness import Lifetime, lifetimes, live_bytes
from tracefuse.optimizers.ops import is_getitem, is_view, producer
from tracefuse.optimizers.trace import Trace, origin, phase

HELD = "held"
"""The key in `node.meta["custom"]` of a value that a variable of the program held when its backward was over."""


IN_PLACE = "in_place"
"""The same of a value that the program wrote into the memory of the op's first operand."""


def is_held(node: fx.Node) -> bool:
    return bool((node.meta.get("custom") or {}).get(HELD))


def eager_lifetimes(trace: Trace) -> list[Lifetime]:
    """`liveness.lifetimes` of a captured joint trace, without passes, as eager frees."""
    nodes = {node.name: node for node in trace.graph.nodes}
    frames = _Frames(trace)
    last = max(len(trace.ops) - 1, 0)
    found: dict[str, Lifetime] = {}
    place: dict[str, str] = {}
    for life in lifetimes(trace):
        group = [nodes[name] for name in life.aliases]
        ends = (frames.end(node, reader) for node in group for reader in node.users if reader.op == "call_function")
        end = last if any(map(is_held, group)) else max(ends, default=life.end)
        written = _overwritten(nodes[life.name])
        into = found.get(place[written.name]) if written is not None else None
        if into is None or into.nbytes != life.nbytes:
            into = life
        place |= dict.fromkeys(life.aliases, into.name)
        found[into.name] = into._replace(end=max(into.end, life.end, end))
    return list(found.values())


def _overwritten(node: fx.Node) -> fx.Node | None:
    """The value in whose memory the program wrote this one; None for what has memory of its own."""
    op = producer(node)
    if op.op != "call_function" or not (op.meta.get("custom") or {}).get(IN_PLACE) or is_view(op):
        return None
    first = op.args[0]
    if isinstance(first, (list, tuple)):
        first = first[node.args[1]] if is_getitem(node) else None  # type: ignore[index]
    return first if isinstance(first, fx.Node) else None


def eager_peak_bytes(trace: Trace) -> int:
    """The most bytes alive at any op of a captured joint trace, inputs included, as eager frees; 0 without ops."""
    return max(live_bytes(trace, eager_lifetimes(trace)), default=0)


class _Frames:
    """Until when what an op reads is held by who called it."""

    def __init__(self, trace: Trace) -> None:
        self.ops = trace.ops
        self.position = {node: at for at, node in enumerate(self.ops)}
        self.known: dict[tuple[str, int], int] = {}

    def end(self, value: fx.Node, reader: fx.Node) -> int:
        """The last op of the reader's autograd node, or of the outermost module that was given the value."""
        if phase(reader) == "backward":
            where = origin(reader)
            if where.seq is None or not where.autograd:  # between nodes, or after the backward
                return self.position[reader]
            own = (where.autograd, where.seq)
            return self._last(self.position[reader], lambda node: (origin(node).autograd, origin(node).seq) == own)
        frame = _entered(origin(value).module, origin(reader).module) if value.op == "call_function" else ""
        return self._module_end(frame, self.position[reader]) if frame else self.position[reader]

    def _module_end(self, frame: str, at: int) -> int:
        if (frame, at) not in self.known:
            end = self._last(at, lambda node: phase(node) == "forward" and _is_within(origin(node).module, frame))
            self.known.update(((frame, one), end) for one in range(at, end + 1))
        return self.known[frame, at]

    def _last(self, at: int, belongs: Callable[[fx.Node], bool]) -> int:
        while at + 1 < len(self.ops) and belongs(self.ops[at + 1]):
            at += 1
        return at


def _is_within(path: str, frame: str) -> bool:
    return path == frame or path.startswith(f"{frame}.")


def _entered(made_in: str, read_in: str) -> str:
    """The outermost module around a reader that is not around what it reads: "h.0.attn" of "h.0.ln" and "h.0.attn.proj"; ""
    where there is none."""
    parts = read_in.split(".")
    paths = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return next((path for path in paths if path and not _is_within(made_in, path)), "")
