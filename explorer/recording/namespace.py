"""Whose names a captured program can see: a block's frame, a function's globals, closure and arguments; and what those make of
outermost modules, where a program has several.

    0.weight                            one model, whose paths need no name
    G.net.0.weight, D.net.0.weight      two models
    0.weight, criterion                 a model, and a loss beside it
    encoder.0, head.0                   parts of one module that is never called itself

Such a root is called as the user's variable, attribute or item (`G`, `self.G`, `nets["G"]` as `nets.G`) if no other root has
that name, and else by its class, with a number where that is another root's too. Of several roots the only one with
parameters is the model and needs no name. One of torch's losses never is the model.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter, UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from types import CodeType, FrameType, GetSetDescriptorType, ModuleType
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

import torch
from torch import nn
from torch.utils._pytree import MappingKey, tree_flatten_with_path

from tracefuse.lines.bound import place_of, taken, through_numpy
from tracefuse.optimizers.origins import Source
from tracefuse.recording.frames import is_torchs_or_ours, owns_a_loop, source_of
from tracefuse.recording.memories import WeakMap

T = TypeVar("T")
V = TypeVar("V")
"""What a recorder knows a tensor as."""

_OWN_REFERENCES = 3
"""To a frame's dict of variables while only this module looks at it: the frame's, ours, and the argument that counts them."""

_LOSSES = "torch.nn.modules.loss"
_OF_CELLS = ("In", "Out")
"""Where IPython keeps what cells were and gave."""
_FARTHEST = 2
"""Over so many attributes and items a variable leads to a module, at most."""
_MOST = 2000
"""Things in the variables of a function, at most, that are looked at for a name: the program waits meanwhile."""

_FEW = 100
"""Entries of a container that is looked into, at most: longer ones are data."""


def visible_from(frame: FrameType) -> dict[str, Any]:
    """The globals and locals of a running frame, in a dict that keeps nothing alive once it is dropped."""
    return {**frame.f_globals, **locals_of(frame)}


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A function's frame keeps the dict that it makes of its variables until it ends, and with it what they held, on CPython
    before 3.13. So that dict is emptied, unless somebody holds it too, by `locals()`; it is made anew when next asked for."""
    made = frame.f_locals
    found = dict(made)
    is_snapshot = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_snapshot and sys.getrefcount(made) <= _OWN_REFERENCES:
        made.clear()
    return found


def owners_of_methods(start: FrameType) -> Iterator[Any]:
    """What the methods that are running are of, from the innermost one on."""
    frame: FrameType | None = start
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            yield locals_of(frame).get("self")
        frame = frame.f_back


def name_of(thing: Any, names: Mapping[str, Any]) -> str | None:
    """The first of `names` that is `thing`, those with a leading underscore aside; None if there is none."""
    return next((name for name, value in names.items() if value is thing and not name.startswith("_")), None)


def namespace_of(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """The names that `fn` can see: globals it mentions, its closure, its arguments."""
    function = inspect.unwrap(getattr(fn, "__func__", fn))
    code = getattr(function, "__code__", None)
    names: dict[str, Any] = {}
    if code is not None:
        names |= {name: function.__globals__[name] for name in code.co_names if name in function.__globals__}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            names |= _cell_contents(name, cell)
    try:
        names |= inspect.signature(fn).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # builtins have no signature: their arguments stay nameless
        names |= kwargs
    return names


def named_arguments(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call in its order, also those in lists and dicts, each with the name of its parameter, or its key.
    What goes to `*args`, or to a function without a signature, has no name."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    has_name = (one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)
    names = (one.name if named else "" for one, named in zip(parameters, has_name, strict=True))
    for name, given in (*zip(chain(names, repeat("")), args, strict=False), *kwargs.items()):
        for path, one in tree_flatten_with_path(given)[0]:
            if is_a(one, torch.Tensor):
                keys = [str(key.key) for key in path if isinstance(key, MappingKey)]
                yield (keys[-1] if keys else name), one


def is_a(thing: object, kinds: type[T] | tuple[type[T], ...]) -> TypeGuard[T]:
    """Whether a thing of the user's is of one of these classes. `isinstance` asks the thing itself too, whose `__class__` may
    be computed, and raise."""
    return issubclass(type(thing), kinds)


def _cell_contents(name: str, cell: Any) -> dict[str, Any]:
    try:
        return {name: cell.cell_contents}
    except ValueError:  # not assigned yet
        return {}


def contents_of(container: Any) -> list[tuple[Any, Any]]:
    """What a dict holds by key, and a list or tuple by place; nothing of a long one. None of the user's code runs: a subclass
    may do anything where it is asked for its length or its items."""
    kind: Any = next(one for one in (dict, list, tuple) if issubclass(type(container), one))
    if kind.__len__(container) > _FEW:
        return []
    return list(dict.items(container)) if kind is dict else list(enumerate(kind.__iter__(container)))


def attributes_of(thing: Any) -> list[tuple[str, Any]]:
    """An object's own attributes. None of the user's code runs: a class may compute its `__dict__`, and raise, or keep there
    what is no name."""
    held = next((vars(kind)["__dict__"] for kind in type(thing).__mro__ if "__dict__" in vars(kind)), None)
    found = held.__get__(thing) if type(held) is GetSetDescriptorType else {}
    return [(key, one) for key, one in list(dict.items(found)) if type(key) is str]


class Variable(NamedTuple):
    """A thing that a function's variable `of` is or, as its item number `at`, has: `name` is the variable, or the key of an
    item of a dict; "" of another item."""

    name: str
    thing: Any
    of: str
    at: int = 0


class Bound(NamedTuple):
    """A variable of a running function that held a tensor: whether the function was given that, and where it binds it."""

    code: CodeType
    name: str
    is_given: bool
    place: tuple[int, ...]


class Bindings(Generic[V]):
    """The variables of the running functions that held a program's tensors, where a block's own frame does not show them: a
    loop in a method, a batch that a line has replaced. Tensors are known weakly, or as values, and no frame is kept."""

    def __init__(self) -> None:
        self._read: WeakMap[tuple[Bound, ...]] = WeakMap()
        self._running: set[CodeType] = set()
        self._calling: set[CodeType] = set()
        self._seen: dict[CodeType, int] = {}
        self.held: dict[V, str] = {}
        """The first variable that held each value where a backward started."""
        self.remade: dict[V, Source] = {}
        """The line that made one by NumPy of what its variable held before."""
        self.places: dict[V, tuple[int, ...]] = {}
        """Where the functions bind what they held there: comparing such places tells what they bind first."""

    def note_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """These tensors come from outside, and an operator is about to read them for the first time. Once a backward has
        run nothing is noted: what is read then belongs to the update, or a variable holds it when the next backward starts."""
        if self._running:
            return
        found: dict[int, list[Bound]] = {id(tensor): [] for tensor in tensors}
        for outer, frame in _numbered(user_frames()) if found else ():
            given, variables = _given(frame), [one for one in _variables(frame) if id(one.thing) in found]
            places = self._places(frame, outer, variables)
            for one in variables:
                is_given = id(one.thing) in given or one.of in taken(frame.f_code)
                place = places.get(id(one.thing), ())
                found[id(one.thing)].append(Bound(frame.f_code, one.name, is_given, place))
        for tensor in tensors:
            self._read[tensor] = tuple(found[id(tensor)])

    def note_call(self) -> None:
        """A model is called: the functions that run now own the step, too, though they may return before its backward, as one
        does that returns the loss."""
        if self._running:
            return
        outside: list[CodeType] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code is nn.Module._call_impl.__code__:
                outside.clear()  # what ran so far ran inside of the model
            elif _has_names(frame.f_code.co_filename):
                outside.append(frame.f_code)
            frame = frame.f_back
        self._calling.update(outside)

    def note_backward(self, value_of: Callable[[torch.Tensor], V | None]) -> None:
        """A backward starts: the functions that run now own the step, and those that made its batch have returned."""
        for outer, frame in _numbered(user_frames()):
            self._running.add(frame.f_code)
            values = [(value_of(one.thing), one) for one in _variables(frame) if is_a(one.thing, torch.Tensor)]
            places = self._places(frame, outer, [one for value, one in values if value is not None])
            for value, one in values:
                if value is None:
                    continue
                if one.name:
                    self.held.setdefault(value, one.name)
                if one.name == one.of and (line := through_numpy(frame.f_code).get(one.of)):
                    self.remade.setdefault(value, source_of(frame, line))
                place = places.get(id(one.thing))
                if place and (value not in self.places or place[0] < self.places[value][0]):  # a loop's before others'
                    self.places[value] = place

    def _places(self, frame: FrameType, outer: int, variables: Sequence[Variable]) -> dict[int, tuple[int, ...]]:
        """By its `id`, where the function first binds each thing. What an inner function binds comes before what an outer one
        does: this one has `outer` ones around it."""
        found: dict[int, tuple[int, ...]] = {}
        seen = self._seen.setdefault(frame.f_code, len(self._seen))
        for one in variables:
            place = _place(frame, one.of)
            if place is not None:
                whole = (place[0], -outer, seen, place[1], one.at)
                found[id(one.thing)] = min(whole, found.get(id(one.thing), whole))
        return found

    def name_of(self, value: V, tensor: torch.Tensor) -> str:
        """The variable that holds the tensor where a backward starts, or held it when it was first read, in a function that
        was still running then, or that was given it and called the model; "" where there is none."""
        return self.held.get(value) or next((one.name for one in self._owned(tensor) if one.name), "")

    def place_of(self, value: V, tensor: torch.Tensor) -> tuple[int, ...]:
        """Where the program binds that variable, or the batch that the tensor is in; () where there is none."""
        places = [one.place for one in self._owned(tensor) if one.place]
        return self.places.get(value) or min(places, key=lambda place: place[0], default=())

    def _owned(self, tensor: torch.Tensor) -> Iterator[Bound]:
        read = self._read.get(tensor) or ()
        owned = (one for one in read if one.code in self._running)
        return chain(owned, (one for one in read if one.is_given and one.code in self._calling))


def user_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _has_names(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _has_names(file: str) -> bool:
    """Whether the variables of functions in that file may name what the program reads."""
    return owns_a_loop(file) or not is_torchs_or_ours(file)


def _numbered(frames: Iterator[FrameType]) -> Iterator[tuple[int, FrameType]]:
    """Each frame, from the innermost one on, and how many are around it."""
    found = list(frames)
    return zip(reversed(range(len(found))), found, strict=True)


def _place(frame: FrameType, name: str) -> tuple[int, int] | None:
    """Where the code of a frame binds a variable. A module's names have an order themselves, which cells share."""
    place = place_of(frame.f_code, frame.f_lasti, name)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED or (place is not None and place.kind < 2):
        return place
    return 2, next((at for at, one in enumerate(frame.f_locals) if one == name), 0)


def _given(frame: FrameType) -> set[int]:
    """The `id` of each thing that the frame's function was given, by itself or in a list, a tuple or a dict."""
    code, variables = frame.f_code, locals_of(frame)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    things = [variables[name] for name in names if name in variables]
    held = [one for thing in things for _, one in _items_of(thing)]
    return set(map(id, things + held))


def _variables(frame: FrameType) -> list[Variable]:
    """The variables of a frame, and what its dicts hold by name, as a batch does, and its lists and tuples without one."""
    named = locals_of(frame).items()
    found = [Variable(name, thing, name) for name, thing in named if name.isidentifier() and name[:1] != "_"]
    held = ((one.name, at, key, item) for one in found for at, (key, item) in enumerate(_items_of(one.thing)))
    return found + [
        Variable(key if isinstance(key, str) and key.isidentifier() else "", item, name, at)
        for name, at, key, item in held
    ]


def _items_of(thing: Any) -> list[tuple[Any, Any]]:
    """What a batch holds: a list, a tuple, a dict, or a `UserDict`, as a tokenizer gives."""
    if is_a(thing, UserDict):
        thing = next((one for key, one in attributes_of(thing) if key == "data"), None)
    return contents_of(thing) if is_a(thing, (dict, list, tuple)) else []


# --- outermost modules ------------------------------------------------------------------------------------------------


class Path(NamedTuple):
    """Where a module is: the number of its root, and the dotted path there."""

    root: int
    path: str


class Name(NamedTuple):
    """What a root is called, empty for the one that needs no name, and where it is within what is called so."""

    name: str = ""
    within: str = ""

    def of(self, path: str) -> str:
        return ".".join(filter(None, (*self, path)))


@dataclass(frozen=True, eq=False)
class Root:
    """A module that ran in no other one, or whose parameters have a name. `has_parameters`: some that no root before it has;
    `called`: its names in the functions that ran when it was met, the best one first."""

    module: weakref.ref[nn.Module]
    kind: str
    is_loss: bool
    has_parameters: bool
    called: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, has_parameters: bool, called: tuple[str, ...]) -> Root:
        kind = type(module)
        return cls(weakref.ref(module), kind.__name__, kind.__module__ == _LOSSES, has_parameters, called)

    def is_gone_like(self, module: nn.Module) -> bool:
        """Whether this was what `module` is, as a loss that is made anew for each call."""
        return self.module() is None and not self.has_parameters and self.kind == type(module).__name__


class Held(NamedTuple):
    """A thing that variables lead to, such as a module: over how many things, and what it is called."""

    far: int
    name: str
    module: Any


def modules_in(variables: Mapping[str, Any]) -> Iterator[Held]:
    """The modules in variables, and then, of `_MOST` things, those in their attributes and items, and in items of these."""
    named = [(n, thing) for n, thing in variables.items() if n.isidentifier() and n[:1] != "_" and n not in _OF_CELLS]
    inside = chain.from_iterable(_inside(name, thing) for name, thing in named)
    found = chain((Held(0, name, thing) for name, thing in named), islice(inside, _MOST))
    return (one for one in found if is_a(one.module, nn.Module))


def _inside(name: str, thing: Any, far: int = 0) -> Iterator[Held]:
    inside: Iterable[tuple[str, Any]] = ()
    if is_a(thing, (list, tuple, dict)) and far < _FARTHEST:
        inside = [(f"{name}.{key}", one) for key, one in contents_of(thing) if _is_word(key)]
    elif not far and not is_a(thing, (type, ModuleType, torch.Tensor)):
        inside = [(key, one) for key, one in attributes_of(thing) if key[:1] != "_"]
    for path, one in inside:
        yield Held(far + 1, path, one)
        yield from _inside(path, one, far + 1)


def _is_word(key: Any) -> bool:
    return type(key) is int or (type(key) is str and key.isidentifier())


def names_now(module: nn.Module) -> tuple[str, ...]:
    """What the functions that run call the module."""
    return _names_in((held for frame in user_frames() for held in modules_in(locals_of(frame))), module)


def _names_in(found: Iterable[Held], module: nn.Module | None) -> tuple[str, ...]:
    names = sorted((one for one in found if one.module is module), key=lambda one: one.far)
    return tuple(dict.fromkeys(one.name for one in names))


def listed(names: Callable[..., Iterable[tuple[str, Any]]], **given: Any) -> list[tuple[str, Any]]:
    """What a module names; nothing where its own method raises, which the program itself may never call."""
    with suppress(Exception):
        return list(names(**given))
    return []


def named(
    roots: Sequence[Root],
    ran: Collection[int],
    read: Collection[int],
    paths: Iterable[Path],
    variables: Mapping[str, Any],
) -> dict[int, Name]:
    """By number, what the roots of one program are called: those that `ran`, and those of whose tensors some are `read`.
    `paths` are all that is known in any root, `variables` those that the program sees when it is over."""
    used = sorted({*ran, *read})
    if len(used) < 2 and not any(roots[at].is_loss for at in used):
        return dict.fromkeys(used, Name())
    held = list(modules_in(variables))
    tops, within = _parts_of_one({at: roots[at] for at in used}, held)
    each = list(dict.fromkeys(tops.values()))
    called = {top: tuple(dict.fromkeys((*_names_in(held, top.module()), *top.called))) for top in each}
    called = _like_siblings(called)
    model = _model(each, {tops[at] for at in ran})
    taken = {path.split(".")[0] for at, path in paths if at in tops and tops[at] is model}
    names = _distinct(called, model, taken)
    return {at: Name(names.get(top, ""), within.get(at, "")) for at, top in tops.items()}


def _like_siblings(called: Mapping[Root, tuple[str, ...]]) -> dict[Root, tuple[str, ...]]:
    """Of a module in a container whose other modules are called as its items alone, the item comes first: a variable that
    names it too is what a loop over the container left, mostly."""
    alone = {names[0].rpartition(".")[0] for names in called.values() if names} - {""}
    return {
        root: tuple(sorted(names, key=lambda name: name.rpartition(".")[0] not in alone))
        for root, names in called.items()
    }


def _parts_of_one(used: Mapping[int, Root], held: Iterable[Held]) -> tuple[dict[int, Root], dict[int, str]]:
    """What each root is a part of, by itself mostly, and its path there: modules that never ran may hold several."""
    tops, within = dict(used), dict[int, str]()
    own = {id(root.module()): at for at, root in used.items()}
    containers = {id(one.module): one.module for one in held if id(one.module) not in own}
    inside = [(module, dict(listed(module.named_modules))) for module in containers.values()]
    for container, modules in sorted(inside, key=lambda pair: -len(pair[1])):
        parts = {own[id(one)]: path for path, one in modules.items() if id(one) in own}
        parts = {at: path for at, path in parts.items() if at not in within}
        if len(parts) > 1:
            top = Root.of(container, any(used[at].has_parameters for at in parts), ())
            tops |= dict.fromkeys(parts, top)
            within |= parts
    return tops, within


def _model(tops: Sequence[Root], ran: Collection[Root]) -> Root | None:
    """The one that needs no name: the only one that has parameters and ran, or the only one of all."""
    trained = [top for top in tops if top.has_parameters]
    found = [top for top in trained if top in ran] or trained or [top for top in tops if not top.is_loss]
    return found[0] if len(found) == 1 and (trained or len(tops) == 1) else None


def _distinct(called: Mapping[Root, Sequence[str]], model: Root | None, taken: set[str]) -> dict[Root, str]:
    """A name for each root but the `model`, and none that is `taken`."""
    of_several = {
        name for name, many in Counter(name for names in called.values() for name in names).items() if many > 1
    }
    found, by_class = dict[Root, str](), dict[str, list[Root]]()
    for root in (one for one in called if one is not model):
        name = next((one for one in called[root] if one not in of_several | taken), "")
        if name:
            found[root] = name
        else:
            by_class.setdefault(root.kind, []).append(root)
    taken = {*taken, *found.values()}
    for kind, alike in by_class.items():
        free = (name for number in count(1) if (name := f"{kind}_{number}") not in taken)
        found |= {root: kind if len(alike) == 1 and kind not in taken else next(free) for root in alike}
    return found
