"""A kernel yields a result in the shape in which it is read, where all who read it take one and the same view of it.

    gelu = fused_gelu(x)  # f32[8, 128, 1024]                gelu = fused_gelu(x)  # f32[1024, 1024]
    rows = aten.view.default(gelu, [1024, 1024])             dw = aten.mm.default(dy, gelu)
    dw = aten.mm.default(dy, rows)

The memory is the same, and a view moves no bytes. But the host takes microseconds for each, which a step of small kernels
waits for. The view becomes the last op of the kernel, if that is launched as before.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from tracefuse.optimizers.fuse.carving import launched, obstacle_of
from tracefuse.optimizers.fuse.pieces import Piece
from tracefuse.optimizers.kernels.kernel import Kernel, kernel_of
from tracefuse.optimizers.kernels.overwriting import RESHAPING
from tracefuse.optimizers.ops import aten, frozen, is_returned, is_view
from tracefuse.optimizers.trace import Output, val


@dataclass
class AsRead:
    """Pieces whose kernels yield results as they are read.

    `kernels` are all that there are, by key; a new one is added.
    """

    kernels: dict[str, Kernel]
    _taken: set[fx.Node] = field(default_factory=set)  # what a kernel takes as it is
    _held: set[fx.Node] = field(default_factory=set)
    # What several pieces compute, one of which may yet be left to ATen; so is all of a piece that was cut.
    _shared: set[fx.Node] = field(default_factory=set)
    _known: dict[Hashable, Kernel | None] = field(default_factory=dict)

    def pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        self._taken.update(value for piece in pieces for value in piece.inputs)
        for piece in pieces:
            self._shared |= self._held.intersection(piece.nodes)
            self._held.update(piece.nodes)
        return [self._piece(piece) for piece in pieces]

    def _piece(self, piece: Piece) -> Piece:
        carved = piece.carved
        if carved is None or not isinstance(carved.kernel, Kernel):
            return piece
        inside = set(piece.nodes)
        shown = {value: views for value in piece.outputs if (views := self._views(value, inside))}
        if not shown:
            return piece
        kernel = self._kernel(carved.kernel, [shown[v][0] if v in shown else None for v in piece.outputs])
        return replace(piece, carved=replace(carved, kernel=kernel, shown=shown)) if kernel else piece

    def _views(self, value: fx.Node, inside: set[fx.Node]) -> tuple[fx.Node, ...]:
        """The views through which alone `value`, made by the ops `inside`, is read elsewhere; () where they are several ones,
        or it is read as it is."""
        if value in self._taken:
            return ()
        read = [user for user in value.users if user in self._shared or _is_read_outside(user, inside)]
        if not read or not all(map(is_view, read)):
            return ()
        view = read[0]
        is_same = view.target in RESHAPING and val(view).numel() == val(value).numel()
        if not is_same or not (val(view).is_contiguous() and val(value).is_contiguous()):
            return ()
        is_one = len(read) == 1 or len({_call(user) for user in read}) == 1
        return tuple(read) if is_one and sum(map(is_returned, read)) <= 1 else ()

    def _kernel(self, kernel: Kernel, views: Sequence[fx.Node | None]) -> Kernel | None:
        """The kernel with these views behind its results; None where it would be launched otherwise, or could not be."""
        key = kernel.key, tuple(view and (_call(view), val(view).shape, val(view).stride()) for view in views)
        if key not in self._known:
            found = _behind(kernel, views, self.kernels)
            is_alike = obstacle_of(found) is None and launched(found) == launched(kernel)
            is_alike = is_alike and found.overwriting == kernel.overwriting
            self._known[key] = found if is_alike else None
        return self._known[key]


def _is_read_outside(user: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a reader of a result is outside of the kernel, or a view that is read there."""
    if user not in inside:
        return True
    return is_view(user) and (is_returned(user) or any(_is_read_outside(one, inside) for one in user.users))


def _call(node: fx.Node) -> Hashable:
    return node.target, frozen(node.args[1:]), frozen(node.kwargs)


def _behind(kernel: Kernel, views: Sequence[fx.Node | None], kernels: dict[str, Kernel]) -> Kernel:
    body = kernel.body.copy()
    output, returned = body.graph.output_node(), list(body.returned)
    with body.graph.inserting_before(output):
        for at, view in enumerate(views):
            if view is not None:  # run as ATen's ops, the body is to yield no view: autograd refuses to write to that
                args = returned[at], list(val(view).shape)
                name = f"{returned[at].name}_as_read"
                made = body.graph.create_node("call_function", aten._unsafe_view.default, args, {}, name)
                made.meta.update(view.meta)
                returned[at] = made
    output.args = (tuple(returned),)
    return kernel_of(replace(body, outputs=tuple(Output("result", one.name) for one in returned), _cache={}), kernels)
