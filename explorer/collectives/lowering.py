"""From a recording with collectives to one without: each becomes an operator that knows what it received.

before   t.mul_out(grad, 0.5, out=bucket[0:4]) ... c10d.allreduce_([bucket]) ... gradient.copy_(bucket[0:4])
after    part = grad * 0.5 ... (sum,) = all_reduce([part, ...], [received]) ... gradient = sum[0:4]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tracefuse.collectives.pieces import Piece, Pieces, contiguous
from tracefuse.collectives.scope import FSDP, group_of, memories_of, peer_of, read_afterwards
from tracefuse.collectives.serving import Serving
from tracefuse.distributed import schemas
from tracefuse.distributed.operators import WAIT, exchange
from tracefuse.errors import CaptureError
from tracefuse.recording.calls import Call, Recording, Value, bound, is_written, values_in
from tracefuse.recording.operators import facts_of

aten = torch.ops.aten

_FILLS = {"copy_", "zero_", "fill_"}
_BLANK = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_COPIES = {aten.detach.default, aten.cat.default, aten._to_copy.default, aten.clone.default}


@dataclass(frozen=True)
class Lowered:
    """A recording without collectives. `named` gives the (kind, name) of its new inputs, `now` what stands for a value of the
    old recording, and `unshown` counts, by the operator's name, what exchanges nothing that is read here."""

    recording: Recording
    named: Mapping[Value, tuple[str, str]]
    now: Callable[[Value], Value]
    unshown: Mapping[str, int]


def lowered(
    recording: Recording,
    parameters: Mapping[Value, str],
    gradients: Mapping[Value, Value],
    lent: Collection[Value] = (),
) -> Lowered:
    """`recording` without collectives. `parameters` are the names of the inputs that are parameters, or parts of such,
    `gradients` what the program left of inputs, and `lent` what it wrote in memory that is none of its user's."""
    return _Lowering(recording, parameters, gradients, lent).run()


class _Lowering:
    def __init__(
        self,
        recording: Recording,
        parameters: Mapping[Value, str],
        gradients: Mapping[Value, Value],
        lent: Collection[Value],
    ) -> None:
        self._old, self._parameters, self._gradients = recording, parameters, gradients
        self._calls: list[Call] = []
        self._of_engine: set[Value] = set()
        count = 1 + max((v.index for call in recording.calls for v in (*call.reads(), *call.out_values())), default=0)
        self._pieces = Pieces(self._emit, count)
        self._scope = memories_of(recording, parameters, lent)
        self._externals = {v: t for v, t in recording.externals.items() if v.memory not in self._scope}
        self._views: dict[Value, tuple[Call, Value]] = {}
        self._cached: dict[Value, tuple[Value, tuple[Any, ...]]] = {}
        self._waits: dict[int, list[tuple[Call, list[tuple[Value, Value]]]]] = {}
        self._named: dict[Value, tuple[str, str]] = {}
        self._serving = Serving(parameters)
        self._unshown: dict[str, int] = {}

    def run(self) -> Lowered:
        old, starts = self._old, []
        for value in old.externals:
            if value.memory in self._scope and value in self._parameters:
                self._externals[value] = old.externals[value]
                self._pieces.put(value, value, old.calls[0])
        updates = {update.start for update in old.updates}
        for position, call in enumerate(old.calls):
            for started, waited in self._waits.pop(position, ()):
                self._wait(waited, replace(call, in_optimizer=False, in_engine=call.in_engine or started.in_engine))
            if position in updates:  # gradients are what the backward left, however the optimizer reads them
                for gradient in old.gradients.values():
                    if gradient.memory in self._scope and self._is_written(gradient):
                        self._now(gradient, call)
            starts.append(len(self._calls))
            self._add(call)
        starts.append(len(self._calls))
        left = {*self._gradients, *self._gradients.values()}
        now = {value: self._final(value) for value in read_afterwards(old) | left}
        return Lowered(self._recording(now, starts), self._named, lambda v: now.get(v) or self._final(v), self._unshown)

    def _emit(self, call: Call) -> None:
        made = [*call.out_values(), *call.writes()]
        (self._of_engine.update if call.in_engine else self._of_engine.difference_update)(made)
        self._calls.append(call)

    # --- one call ---

    def _add(self, call: Call) -> None:
        if schemas.kind_of_exchange(call.func) is not None and facts_of(call.func).exchanges:
            self._exchange(call)
        elif facts_of(call.func).exchanges:
            if schemas.is_unknown(call.func, call.out_values()):
                raise CaptureError(
                    f"{call.func} ({call.origin.source}) exchanges tensors with other processes in a way that tracefuse does "
                    "not know: what it hands out would be missing in the trace. Capture a part of the program without it."
                )
            if not schemas.is_wait(call.func) and not call.out_values():
                name = " ".join(filter(None, (schemas.name_of(call.func).strip("_"), peer_of(call))))
                self._unshown[name] = self._unshown.get(name, 0) + 1
        elif call.func.namespace == FSDP:
            self._of_fsdp(call)
        elif written := call.writes():
            self._write(call, written)
        else:
            self._compute(call)

    def _exchange(self, call: Call) -> None:
        kind = schemas.kind_of_exchange(call.func)
        into = schemas.received(call.func, call.args, call.kwargs, call.outs)
        found = call.received
        if found is None or len(found.tensors) != len(into):
            return  # nobody read it
        sent = schemas.sent(call.func, call.args, call.kwargs)
        operands = [] if kind == "receive" else [part for one in sent for part in self._parts(one, call)]
        group, reduction = group_of(call)
        waits = schemas.waits_at_once(call.func, call.args, call.kwargs)
        answers, outs = [], []
        for value, tensor in zip(into, found.tensors, strict=True):
            answers.append(self._pieces.fresh(value, value.shape, tuple(tensor.stride())))
            outs.append(self._pieces.fresh(value, value.shape, tuple(tensor.stride())))
            self._externals[answers[-1]] = tensor
            self._named[answers[-1]] = ("received", f"received by {kind} {len(self._named)}")
        args = (operands, answers, reduction, group.name, list(group.ranks), waits, "")
        new = Call(exchange(kind), args, {}, outs, call.origin, call.in_engine, call.in_optimizer)  # type: ignore[arg-type]
        self._emit(new)
        self._serving.add(new, operands, outs)
        for value, out in zip(into, outs, strict=True):
            self._place(value, out, call)
        if not waits and found.read_at is not None:
            self._waits.setdefault(found.read_at, []).append((call, list(zip(into, outs, strict=True))))

    def _wait(self, waited: list[tuple[Value, Value]], like: Call) -> None:
        ends = [self._pieces.fresh(out, out.shape, out.stride) for _, out in waited]
        self._emit(Call(WAIT, ([out for _, out in waited],), {}, ends, like.origin, like.in_engine))
        for (value, out), end in zip(waited, ends, strict=True):
            self._serving.follow(out, end)
            if [one.value for one in self._pieces.within(value.memory, value.extent)] == [out]:
                self._place(value, end, like)

    def _of_fsdp(self, call: Call) -> None:
        name, given = call.func.__name__.partition(".")[0], schemas.given(call.func, call.args, call.kwargs)
        if name == "all_gather_copy_in":
            at = call.out_values()[0]
            parts = [self._now(one, call) for one in given["all_gather_inputs"]]
            func, args, into = aten.cat.default, (parts, 0), [at]
        elif name == "split_with_sizes_copy":
            source = self._now(given["all_gather_output"], call)
            func, into = aten.split_with_sizes_copy.default, list(given["out"])
            args = (source, given["all_gather_input_split_sizes"], given["dim"])
        elif name in ("chunk_cat", "chunk_cat_mixed_dtype"):
            tensors = [self._now(one, call) for one in given["tensors"]]
            if len({one.dtype for one in tensors}) > 1:
                tensors = [self._in_dtype(one, given["out"].dtype, call) for one in tensors]
            func, args, into = aten._chunk_cat.default, (tensors, given["dim"], given["num_chunks"]), [given["out"]]
        else:
            self._write(replace(call, func=aten.copy_.default), [given["tensor"]])
            return
        made = [self._pieces.fresh(one, one.shape, one.stride) for one in into]
        outs = made if name == "split_with_sizes_copy" else made[0]
        self._emit(replace(call, func=func, args=args, kwargs={}, outs=outs))  # type: ignore[arg-type]
        self._serving.pass_on(values_in(args), made)
        for value, new in zip(into, made, strict=True):
            self._place(value, self._cast(new, values_in(args)[0], call), call)

    def _cast(self, made: Value, source: Value, call: Call) -> Value:
        """What FSDP's operators copy into a buffer of another dtype, as that buffer holds it."""
        dtype, made.dtype = made.dtype, source.dtype
        return self._in_dtype(made, dtype, call)

    def _in_dtype(self, value: Value, dtype: torch.dtype, call: Call) -> Value:
        if value.dtype == dtype:
            return value
        cast = self._pieces.fresh(value, value.shape, value.stride)
        cast.dtype = dtype
        self._emit(replace(call, func=aten._to_copy.default, args=(value,), kwargs={"dtype": dtype}, outs=cast))
        self._serving.follow(value, cast)
        return cast

    def _write(self, call: Call, written: list[Value]) -> None:
        """An op that writes to its arguments goes on doing so, on the values that lie there now."""
        mine = [value for value in written if value.memory in self._scope]
        fills = {
            value
            for argument, one in bound(call.func, call.args, call.kwargs)
            if is_written(argument) and (argument.is_out or call.func.overloadpacket.__name__ in _FILLS)
            for value in values_in(one)
        }
        homes: dict[Value, Value] = {}
        for value in mine:
            if value in fills and value.stride == contiguous(value.shape) and value not in self._parameters:
                homes[value] = self._pieces.fresh(value, value.shape)
                options = {"dtype": value.dtype, "device": value.device}
                blank = (list(value.shape), list(value.stride))
                self._emit(
                    replace(call, func=aten.empty_strided.default, args=blank, kwargs=options, outs=homes[value])
                )
            else:
                homes[value] = self._now(value, call)
        for value in mine:  # what is left of other pieces is read before it is written
            self._place(value, homes[value], call)
            if homes[value].base not in self._externals:
                self._pieces.part(homes[value])
        self._emit(self._substituted(call, homes))
        sources = [self._now(one, call) for one in call.reads() if one not in written]
        self._serving.pass_on(sources, [homes.get(value, value) for value in written])

    def _compute(self, call: Call) -> None:
        outs = [value for value in call.out_values() if value.memory in self._scope]
        sources = {one.memory: one for one in reversed(call.reads())}
        if outs and all(one.memory in sources for one in outs):
            for out in outs:
                if out is not sources[out.memory]:
                    self._views[out] = call, sources[out.memory]
                    if self._is_written(sources[out.memory]):
                        self._now(out, call)
            return
        self._emit(self._substituted(call, {}))
        if facts_of(call.func).is_view or call.func in _COPIES:
            self._serving.pass_on(self._calls[-1].reads(), call.out_values())
        for out in outs:
            blank = call.func.overloadpacket.__name__ in _BLANK
            self._cached[out] = out, (self._pieces.put(out, out, call, blank),)

    def _substituted(self, call: Call, homes: Mapping[Value, Value]) -> Call:
        def substitute(tree: Any) -> Any:
            if isinstance(tree, Value):
                return homes.get(tree) or self._now(tree, call)
            if isinstance(tree, (list, tuple)):
                return type(tree)([substitute(one) for one in tree])
            return {key: substitute(one) for key, one in tree.items()} if isinstance(tree, dict) else tree

        outs = call.outs if call.outs is None else _mapped(call.outs, homes)
        return replace(call, args=substitute(call.args), kwargs=substitute(call.kwargs), outs=outs)

    # --- what lies where ---

    def _place(self, at: Value, value: Value, like: Call) -> None:
        self._cached[at] = value, (self._pieces.put(at, value, like),)

    def _is_written(self, value: Value) -> bool:
        return bool(self._pieces.within(value.memory, value.extent))

    def _now(self, value: Value, like: Call) -> Value:
        """What stands for a value of the old recording where `like` reads it."""
        if value.memory not in self._scope:
            return value
        pieces = self._pieces.within(value.memory, value.extent)
        known = self._cached.get(value)
        if known is not None and known[1] == tuple(pieces):
            return known[0]
        if any(
            piece.value in self._of_engine for piece in pieces
        ):  # a view of what the backward left is the backward's
            like = replace(like, in_engine=True, in_optimizer=False)
        if value in self._views:
            found = self._view_again(value, like)
        elif not pieces and value in self._old.externals:
            self._externals[value] = self._old.externals[value]
            pieces, found = [self._pieces.put(value, value, like)], value
        else:
            if value in self._old.externals and not self._pieces.is_covered(value, pieces):
                pieces = self._padded(value, like)
            found = self._pieces.read(value, pieces, like)
            self._serving.pass_on([one.value for one in pieces], [found])
        self._cached[value] = found, tuple(pieces)
        return found

    def _padded(self, value: Value, like: Call) -> list[Piece]:
        """The pieces of an input of which a parameter is one part, as where shards are padded to the same size."""
        whole = self._pieces.fresh(value, value.shape, value.stride)
        self._externals[whole] = self._old.externals[value]
        self._named[whole] = "buffer", f"padding {len(self._named)}"
        self._pieces.fill(value, whole, like)
        return self._pieces.within(value.memory, value.extent)

    def _view_again(self, value: Value, like: Call) -> Value:
        made_by, source = self._views[value]
        base = self._now(source, like)
        at = like if like.in_engine != made_by.in_engine else made_by
        shift = base.offset - source.offset
        outs = {
            one: self._pieces.view_of(base, one.shape, one.stride, one.offset + shift) for one in made_by.out_values()
        }
        args = _mapped(made_by.args, {source: base})
        if made_by.func is aten.as_strided.default and len(args) > 3:
            args = (*args[:3], args[3] + shift)
        self._emit(
            replace(
                made_by,
                args=args,
                outs=_mapped(made_by.outs, outs),
                origin=at.origin,
                in_engine=at.in_engine,
                in_optimizer=like.in_optimizer,
            )
        )
        self._serving.pass_on([base], list(outs.values()))
        return outs[value]

    def _parts(self, value: Value, call: Call) -> list[Value]:
        """The values that a collective sends of one buffer: each that was written there."""
        pieces: list[Piece] = self._pieces.within(value.memory, value.extent) if value.memory in self._scope else []
        if len(pieces) > 1 and self._pieces.is_tiled(value, pieces):
            return [one.value for one in pieces]
        return [self._now(value, call)]

    # --- the whole ---

    def _final(self, value: Value) -> Value:
        if value.memory not in self._scope:
            return value
        if not self._is_written(value) and value not in self._old.externals:
            return value
        return self._now(value, self._old.calls[-1])

    def _recording(self, now: Mapping[Value, Value], starts: list[int]) -> Recording:
        def of(value: Any) -> Any:
            return now.get(value, value)

        old = self._old
        gradients = {of(leaf): of(value) for leaf, value in old.gradients.items()}
        left = {of(leaf): of(value) for leaf, value in self._gradients.items()}
        self._calls[:] = self._serving.named(self._calls, left | gradients)
        updates = [
            replace(
                one,
                start=starts[one.start],
                stop=starts[one.stop],
                state={of(value): (key, owner and of(owner)) for value, (key, owner) in one.state.items()},
            )
            for one in old.updates
        ]
        return replace(
            old,
            calls=self._calls,
            externals=self._externals,
            snapshots={v: t for v, t in old.snapshots.items() if v in self._externals},
            roots=[(of(root), given and of(given), tensor) for root, given, tensor in old.roots],
            held={of(value) for value in old.held},
            taken={of(value): of(leaf) for value, leaf in old.taken.items()},
            gradients=gradients,
            updates=updates,
        )


def _mapped(tree: Any, to: Mapping[Value, Value]) -> Any:
    if isinstance(tree, Value):
        return to.get(tree, tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([_mapped(one, to) for one in tree])
    return tree
