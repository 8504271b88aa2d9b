"""A walk over a graph that lets images lie channels-last behind the convolutions that gain by it.

    chosen convolution      copies of its images are inserted where they lie otherwise; its results lie channels-last
    an op behind it         is typed anew with the strides that it is given; where it cannot take them, or would draw other
                            random numbers, it reads a copy that lies as before
    what is returned        is a copy that lies as before, under the name of before

So the order spreads as far as ops allow it, each op yielding what torch yields for such operands, and ends in copies at the
borders. The gradient of a weight is copied at once: it is small, and what reads it has the weight's strides.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from tracefuse.optimizers.costs.convolutions import image_arguments, is_backward, is_convolution
from tracefuse.optimizers.costs.cost import op_class, packet_name
from tracefuse.optimizers.facts import is_dense, lies_channels_last
from tracefuse.optimizers.kernels.fusible import is_constant
from tracefuse.optimizers.lowering.expressions import POINTWISE
from tracefuse.optimizers.ops import (
    arguments,
    aten,
    behind_views,
    is_getitem,
    is_mutable,
    is_of_ranks,
    is_random,
    is_view,
    set_argument,
)
from tracefuse.optimizers.rewrite import evaluate, layouts
from tracefuse.optimizers.trace import call, fake_mode, phase, val

WEIGHT = 1
"""The place of the weight's gradient among the results of a backward."""


_FOLLOWING = {
    "clone", "_to_copy", "cat", "constant_pad_nd",
    "mm", "bmm", "addmm", "baddbmm",
    "convolution", "convolution_backward", "searched_convolution", "searched_convolution_backward",
    "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward",
    "upsample_nearest2d", "upsample_nearest2d_backward", "upsample_bilinear2d", "upsample_bilinear2d_backward",
    "cudnn_batch_norm", "cudnn_batch_norm_backward", "native_batch_norm", "native_batch_norm_backward",
    "_batch_norm_with_update_functional", "batch_norm_backward",
}  # fmt: skip
"""Of the ops that are neither pointwise nor reductions, those whose fake tensors tell the strides that their kernels yield."""
_BY_ADDRESS = {"as_strided", "_reshape_alias"}
"""Views whose arguments are places in memory, which has to lie as it did: autograd writes into slices by them."""
_UNTOLD = {"native_group_norm", "native_group_norm_backward"}
"""Reductions whose fake tensors do not: seen on a CPU, torch 2.13."""


class NotRestored(Exception):
    """A value cannot be copied into the strides that it had."""


class Placing:
    """The walk over one graph, which it edits: `chosen` convolutions are to lie channels-last, `kept` ones as they lay.

    `borders` are the copies of images that it inserted. Raises `NotRestored` where the graph is to be thrown away.
    """

    def __init__(self, graph: fx.Graph, chosen: Collection[fx.Node], kept: Collection[fx.Node]) -> None:
        self._graph, self._chosen, self._kept = graph, chosen, kept
        self._was: dict[fx.Node, Any] = {}
        self._lasting: dict[fx.Node, fx.Node] = {}
        self._restored: dict[tuple[fx.Node, bool], fx.Node] = {}
        self._returned: dict[fx.Node, fx.Node] = {}
        output = graph.output_node()
        self._is_returned = {behind_views(node) for node in output.all_input_nodes}
        self.borders: list[fx.Node] = []
        for node in [n for n in graph.nodes if n.op == "call_function"]:
            self._place(node)
        for node in output.all_input_nodes:
            if node in self._was and layouts(self._was[node]) != layouts(val(node)):
                self._returned[node] = copy = self._as_before(node, node)
                self._take_name(copy, node)
        if self._returned:  # all at once: there are as many as the program has parameters
            output.args = fx.node.map_arg(output.args, lambda node: self._returned.get(node, node))

    def _place(self, node: fx.Node) -> None:
        moved = [operand for operand in node.all_input_nodes if operand in self._was]
        may_last = is_convolution(node) and node not in self._kept
        if may_last and (node in self._chosen or any(lies_channels_last(val(operand)) for operand in moved)):
            self._place_convolution(node)
        elif moved and is_getitem(node) and is_backward(moved[0]) and node.args[1] == WEIGHT:
            self._restore_gradient(node)
        elif moved:
            self._follow(node, moved)

    def _place_convolution(self, node: fx.Node) -> None:
        args = arguments(node)
        for name in image_arguments(node):
            set_argument(node, name, self._channels_last(args[name], node))
        if args["weight"].op == "call_function":  # a parameter is copied by cuDNN, in a launch less
            set_argument(node, "weight", self._channels_last(args["weight"], node, is_border=False))
        self._retype(node, _convolved(self._graph, node))

    def _restore_gradient(self, part: fx.Node) -> None:
        """Let the readers of a weight's gradient read a copy that lies as before."""
        old, new = val(part), evaluate(self._graph, part.target, part.args, part.kwargs, {})
        self._retype(part, new)
        if layouts(new) != layouts(old):
            readers = [user for user in part.users if user.op != "output"]
            is_returned = len(readers) < len(part.users)
            count = len(self.borders)
            copy = self._as_before(part, part)
            del self.borders[count:]  # cuDNN would make it otherwise
            for reader in readers:
                reader.replace_input_with(part, copy)
            if is_returned:
                self._returned[part] = copy
            self._was[copy] = self._was.pop(part)  # views of it lie in other memory
            self._take_name(copy, part)

    def _follow(self, node: fx.Node, moved: list[fx.Node]) -> None:
        """Type an op anew whose operands `moved`, or let it read them as they were: then it yields what it yielded."""
        value = None if node in self._kept else self._foretold(node, moved)
        if value is None:
            whole = packet_name(node) in _BY_ADDRESS
            for operand in moved:
                node.replace_input_with(operand, self._as_before(operand, node, whole))
            if not (is_view(node) or is_getitem(node)):
                return
            value = evaluate(self._graph, node.target, node.args, node.kwargs, {})
        self._retype(node, value)

    def _foretold(self, node: fx.Node, moved: list[fx.Node]) -> Any:
        """What the op yields of its operands as they lie now, all images alike; None where they have to lie as before."""
        if not (is_getitem(node) or _follows(node)):
            return None
        try:
            before = evaluate(self._graph, node.target, node.args, node.kwargs, self._was)
        except (RuntimeError, ValueError):
            return None
        if layouts(before) != layouts(val(node)):
            return None
        args, kwargs = node.args, node.kwargs
        if not is_view(node) and any(_is_image(val(a)) and lies_channels_last(val(a)) for a in moved):
            for image in [a for a in node.all_input_nodes if _is_image(val(a))]:
                node.replace_input_with(image, self._channels_last(image, node))
        try:
            return evaluate(self._graph, node.target, node.args, node.kwargs, {})
        except (RuntimeError, ValueError):  # a view that such strides do not have
            node.args, node.kwargs = args, kwargs
            return None

    def _retype(self, node: fx.Node, value: Any) -> None:
        old = val(node)
        if layouts(value) != layouts(old) or is_view(node) or is_getitem(node):
            self._was[node] = old
            node.meta["val"] = value

    @staticmethod
    def _take_name(copy: fx.Node, node: fx.Node) -> None:
        copy.name, node.name = node.name, copy.name

    # --- copies -------------------------------------------------------------------------------------------------------

    def _channels_last(self, image: fx.Node, node: fx.Node, is_border: bool = True) -> fx.Node:
        """The image, or a copy of it for `node`, that lies channels-last; a weight is no border, cuDNN would copy it too."""
        if lies_channels_last(val(image)):
            return image
        if not _may_read(node, self._lasting.get(image)):
            with self._graph.inserting_before(node):
                layout, name = torch.channels_last, f"{image.name}_channels_last"
                copy = call(node, aten.clone.default, image, memory_format=layout, name=name)
            self._lasting[image] = copy
            if is_border and not is_constant(image):
                self.borders.append(copy)
        return self._lasting[image]

    def _as_before(self, node: fx.Node, reader: fx.Node, whole: bool = False) -> fx.Node:
        """A copy of a value, for `reader`, that lies as the value did; a view is of a copy where that alone lies so, or where
        the `whole` memory has to lie as it did."""
        if node not in self._was:
            return node
        known = (node, whole)
        if not _may_read(reader, self._restored.get(known)):
            # What is returned is copied where it is computed, so that no output comes from another phase.
            like, at = (node, node.next) if behind_views(node) in self._is_returned else (reader, reader)
            at = node.next if reader is node else at
            with self._graph.inserting_before(at):
                self._restored[known] = self._made_as_before(node, like, whole)
        return self._restored[known]

    def _made_as_before(self, node: fx.Node, like: fx.Node, whole: bool) -> fx.Node:
        was = self._was[node]
        is_tensor, is_shown = isinstance(was, torch.Tensor), is_view(node)
        if is_tensor and layouts(was) == layouts(val(node)) and not (whole and is_shown):
            return node
        if node.target is aten._to_copy.default and _is_narrower(node.args[0], node):
            return call(like, node.target, self._source(node, like, whole), **node.kwargs)
        if is_tensor and is_dense(was.shape, was.stride()) and not (whole and is_shown):
            return self._copied(node, was, like)
        if is_shown or is_getitem(node):
            return call(like, node.target, self._source(node, like, whole), *node.args[1:], **node.kwargs)
        raise NotRestored(f"{node.name} does not lie in one block")

    def _source(self, node: fx.Node, like: fx.Node, whole: bool) -> fx.Node:
        """What the first operand of an op is a copy of, made beside what is made of it."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return self._made_as_before(source, like, whole) if source in self._was else source

    def _copied(self, node: fx.Node, was: torch.Tensor, like: fx.Node) -> fx.Node:
        """A copy of a value in the strides of `was`."""
        order = sorted(range(was.dim()), key=lambda dim: (-was.stride(dim), dim))
        name = (
            f"{node.name}_{'channels_last' if like is node else 'as_before'}"  # it may come to swap names with the node
        )
        turned = node if was.is_contiguous() else call(like, aten.permute.default, node, order)
        copy = call(like, aten.clone.default, turned, memory_format=torch.contiguous_format, name=name)
        self.borders.append(copy)
        if turned is not node:
            copy = call(like, aten.permute.default, copy, [order.index(dim) for dim in range(was.dim())])
        if val(copy).stride() == was.stride():
            return copy
        return call(
            like, aten.as_strided.default, copy, list(was.shape), list(was.stride())
        )  # dimensions of one element


def _may_read(reader: fx.Node, copy: fx.Node | None) -> bool:
    """Whether there is a copy, and an op may read it: one of the forward reads none of the backward."""
    return copy is not None and (phase(copy) != "backward" or phase(reader) == "backward")


def _convolved(graph: fx.Graph, node: fx.Node) -> Any:
    """What a convolution of channels-last images yields: on a GPU channels-last results, also where this torch has no cuDNN
    whose choice its fake tensors could tell, as where a file is opened on another machine."""
    value = evaluate(graph, node.target, node.args, node.kwargs, {})
    if torch.backends.cudnn.is_available():
        return value

    def lasting(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or one.dim() != 4 or one.device.type != "cuda" or lies_channels_last(one):
            return one
        with fake_mode(graph):
            return torch.empty_like(one, memory_format=torch.channels_last)

    return tuple(map(lasting, value)) if isinstance(value, (tuple, list)) else lasting(value)


def _is_narrower(source: Any, node: fx.Node) -> bool:
    """Whether a cast reads fewer bytes than it yields: then what it reads is what to copy."""
    return isinstance(source, fx.Node) and val(source).element_size() < val(node).element_size()


def _is_image(value: Any) -> bool:
    """Whether a value is of images that lie in one of the two orders, which are not the same."""
    if (
        not isinstance(value, torch.Tensor)
        or value.dim() != 4
        or 1 in (value.shape[1], value.shape[2] * value.shape[3])
    ):
        return False
    return value.is_contiguous() or lies_channels_last(value)


def _takes_channels_apart(node: fx.Node) -> bool:
    """Whether a view of images has no dimension of all their channels: the groups of a norm lie scattered then."""
    if node.target not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        return False
    source, result = val(node.args[0]), val(node)  # type: ignore[arg-type]
    return _is_image(source) and tuple(source.shape[:2]) != tuple(result.shape[:2])


def _follows(node: fx.Node) -> bool:
    """Whether an op may read operands in another order, and is known to yield what its fake tensors say."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_random(node) or is_mutable(node) or is_of_ranks(node):
        return False
    name = packet_name(node)
    if is_view(node):
        return name not in _BY_ADDRESS and not _takes_channels_apart(node)
    if name in _FOLLOWING or node.target in POINTWISE or torch.Tag.pointwise in node.target.tags:
        return True
    return op_class(node) == "reduction" and name not in _UNTOLD
