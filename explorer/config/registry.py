"""Passes of the user's own: `register` makes one a toggle beside the built-in ones.

    own pass = frozen dataclass with a `name`, options as fields, and `run(trace, decide) -> Trace`
    place    = the built-in pass before which it runs; "" is after the last

What is registered holds for this process. A configuration keeps the classes that it was made with, so that what was
computed for it stays true when a cell is run again and replaces one.
"""

from __future__ import annotations

import dataclasses
import inspect
import keyword
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

from tracefuse.config.guarded import Guarded
from tracefuse.config.names import PASS_OF, PASSES
from tracefuse.config.pass_options import PassOption, options_of, read_all
from tracefuse.errors import OptionError, RegistrationError
from tracefuse.optimizers.errors import did_you_mean
from tracefuse.optimizers.passes import Pass

BUILT_IN = tuple(PASSES)
RESERVED = (*PASSES, *PASS_OF, "own")
DEFAULT_PLACE = "remat"

PassClass = TypeVar("PassClass", bound=type)


@dataclass(frozen=True)
class Own:
    """One pass of the user's own in a configuration: its class, its place, and what is `chosen` of it (None: off)."""

    pass_class: type
    place: str
    chosen: Pass | None

    @property
    def name(self) -> str:
        return self.pass_class.name

    @property
    def help(self) -> str:
        """The first line of the class's docstring, as a toggle's sentence."""
        written = self.pass_class.__doc__ or ""
        is_generated = written.startswith(f"{self.pass_class.__name__}(")
        first = "" if is_generated else inspect.cleandoc(written).partition("\n")[0]
        return first.rstrip(".") or f"a pass of your own, the class {self.pass_class.__name__}"

    @property
    def options(self) -> dict[str, PassOption]:
        return options_of(self.pass_class)

    @property
    def given(self) -> Any:
        """What `optimize` takes for it: False, True, or the options that differ from the defaults."""
        return self.chosen is not None and (dict(self.values) or True)

    @property
    def values(self) -> tuple[tuple[str, Any], ...]:
        """`(name, value)` of the options that differ from their defaults; none while it is off."""
        chosen = [] if self.chosen is None else [(name, getattr(self.chosen, name)) for name in self.options]
        return read_all(chosen, self.options, self.name)

    def guarded(self) -> Pass | None:
        """What the pipeline runs."""
        return None if self.chosen is None else Guarded(self.chosen)

    def changed(self, value: Any) -> Own:
        """This pass switched on or off, or on with options: a mapping or an instance. Raises `OptionError`."""
        if value is None or value is False:
            return replace(self, chosen=None)
        if isinstance(value, self.pass_class):
            return replace(self, chosen=value)
        if is_instance(value):
            remedy = f"make it anew, or pass {self.name}={{'option': value}}"
            raise OptionError(f"{self.name}={value!r} is of another class than the one registered now: {remedy}")
        options = () if value is True else read_all(value, self.options, self.name)
        try:
            return replace(self, chosen=self.pass_class(**dict(options)))
        except (TypeError, ValueError) as error:
            raise OptionError(f"{self.name}: {error}") from error


def is_instance(value: Any) -> bool:
    """Whether `value` is a pass with its options, and no switch, no mapping and no class."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


_registered: dict[str, Own] = {}


def registered() -> tuple[Own, ...]:
    """The passes of the user's own, all on, in the order in which they were registered."""
    return tuple(_registered.values())


def renewed(own: tuple[Own, ...]) -> tuple[Own, ...]:
    """`own` as of now: replaced classes with the same options as far as they have them; what is new since then is off."""
    before = {one.name: one for one in own}
    return tuple(_renewed(before.get(one.name), one) for one in registered())


def _renewed(before: Own | None, now: Own) -> Own:
    if before is None:
        return replace(now, chosen=None)
    if before.pass_class is now.pass_class and before.place == now.place:
        return before
    given = before.given
    if not isinstance(given, dict):
        return now.changed(given)
    try:
        return now.changed({name: value for name, value in given.items() if name in now.options})
    except OptionError:  # a new type or a new rule for the option: its default is what the new class promises
        return now


def in_order(own: tuple[Own, ...]) -> Iterator[str]:
    """The names of all passes in the order in which they run."""
    for place in (*BUILT_IN, ""):
        yield from (one.name for one in own if one.place == place)
        if place:
            yield place


@overload
def register(pass_class: PassClass) -> PassClass: ...
@overload
def register(*, before: str | None = None, after: str | None = None) -> Callable[[PassClass], PassClass]: ...
def register(pass_class: Any = None, /, *, before: str | None = None, after: str | None = None) -> Any:
    """Make a pass of your own a toggle: `tracefuse.register(MyPass)`, or as a decorator, with or without a place.

    This one computes squares by a product, and says so:

        from dataclasses import dataclass
        from typing import ClassVar
        import tracefuse, torch
        from tracefuse.optimizers.passes import Decision
        from tracefuse.optimizers.rewrite import replace_by_call

        @tracefuse.register(before="remat")
        @dataclass(frozen=True)
        class SquareByProduct:
            "Computes x ** 2 as x * x."
            name: ClassVar[str] = "square_by_product"
            def run(self, trace, decide):
                new = trace.copy()
                for node in new.ops:
                    if node.target is torch.ops.aten.pow.Tensor_Scalar and node.args[1] == 2:
                        reason = replace_by_call(node, torch.ops.aten.mul.Tensor, node.args[0], node.args[0])
                        decide(Decision(node.name, "leave" if reason else "replace", reason or "a product is the same"))
                return new

    It is then on in `c.optimize()` and in new views, off by `c.optimize(square_by_product=False)`, `--no-pass
    square_by_product` or its switch. Fields of the dataclass are its options: `c.optimize(my_pass={"level": 3})`. It runs
    right before `remat`, or `before` or `after` a built-in pass. Registering a name again replaces the pass.

    What it returns is verified like any pass's; an error, an edited input or a broken trace is shown in its row, and the
    passes after it go on without it. `optimizers/rewrite.py` has what edits a trace safely.

    Returns the class. Raises `RegistrationError` for what cannot be a pass.
    """
    if pass_class is None:
        return lambda decorated: register_at(decorated, _place(before, after))
    if before is not None or after is not None:
        raise RegistrationError("a place goes with the decorator: write @tracefuse.register(before='fuse')")
    return register_at(pass_class, DEFAULT_PLACE)


def register_at(pass_class: PassClass, place: str) -> PassClass:
    """`register` with the name of the pass before which it runs; "" is after the last."""
    if (problem := _problem(pass_class)) is not None:
        raise RegistrationError(problem)
    try:
        options_of(pass_class)
        own = Own(pass_class, place, None).changed(True)
        hash(own.chosen)
    except (OptionError, NameError, TypeError) as error:
        raise RegistrationError(
            f"{pass_class.__name__}: {error}. Give every field a type and a frozen default"
        ) from error
    _registered[own.name] = own
    return pass_class


def unregister(name: str) -> None:
    """Take the pass called `name` away again; what was computed with it stays. Raises `RegistrationError` if there is none."""
    if name not in _registered:
        remedy = f"{did_you_mean(name, _registered)}choose from those that are ({', '.join(_registered) or 'none is'})"
        raise RegistrationError(f"no pass {name!r} is registered: {remedy}")
    del _registered[name]


def _place(before: str | None, after: str | None) -> str:
    if before is not None and after is not None:
        raise RegistrationError("a pass has one place: give before or after, not both")
    anchor = before or after or DEFAULT_PLACE
    if anchor not in BUILT_IN:
        remedy = f"{did_you_mean(anchor, BUILT_IN)}choose from {', '.join(BUILT_IN)}"
        raise RegistrationError(f"there is no built-in pass {anchor!r}: {remedy}")
    return anchor if after is None else (*BUILT_IN, "")[BUILT_IN.index(anchor) + 1]


def _problem(found: Any) -> str | None:
    """Why `found` can be no pass, with the remedy."""
    if not isinstance(found, type):
        return (
            f"{found!r} is no class: register the class itself, a frozen dataclass with a name and run(trace, decide)"
        )
    parameters = found.__dict__.get("__dataclass_params__")
    if parameters is None or not (parameters.frozen and parameters.eq):
        return f"{found.__name__} is no frozen dataclass: write @dataclass(frozen=True) above it, below @tracefuse.register"
    name = getattr(found, "name", None)
    if not isinstance(name, str) or any(f.name == "name" for f in dataclasses.fields(found)):
        return f'{found.__name__} has no name of its own: write `name: ClassVar[str] = "my_pass"` in it'
    if not name.isidentifier() or keyword.iskeyword(name):
        return f"the name {name!r} is no Python identifier: choose one like my_pass, since options are called by it"
    if name in RESERVED:
        return f"the name {name!r} is taken by tracefuse: choose another one"
    return _run_problem(found)


def _run_problem(found: type) -> str | None:
    run = getattr(found, "run", None)
    takes = list(inspect.signature(run).parameters) if inspect.isfunction(run) else []
    if len(takes) != 3:
        return f"{found.__name__} has no method run(self, trace, decide): write one that returns a trace"
    return None
