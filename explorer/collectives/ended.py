"""A run whose collectives have become operators: its recording, and who is who in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from tracefuse.collectives.lowering import Lowered, lowered
from tracefuse.collectives.scope import has_collectives
from tracefuse.recording.calls import Recording, Value
from tracefuse.recording.memories import is_there
from tracefuse.recording.roles import Roles
from tracefuse.recording.run import Ended
from tracefuse.text import counted

T = TypeVar("T")


def without_collectives(recording: Recording, ended: Ended) -> tuple[Recording, Ended, tuple[str, ...]]:
    """`recording` and what is known of its end, with an operator for each collective, and what of the exchange between
    processes no trace shows. What collectives gave are inputs. Raises `CaptureError` where a program reads a memory that
    collectives write in other parts than it was written."""
    if not has_collectives(recording) and not ended.is_sharded:
        return recording, ended, ()
    sources = ended.roles.sources
    parameters = {value: name for value, (kind, name) in sources.items() if kind == "parameter" and name}
    made = lowered(recording, parameters, ended.roles.gradients, _lent(recording, ended))
    now = made.now
    values = [
        value for value in recording.externals if value not in recording.snapshots
    ]  # as `read_from_outside` has them
    read = [left for value, left in zip(values, ended.read, strict=True) if value in made.recording.externals]
    known = replace(
        ended,
        roles=_roles(ended.roles, made),
        left=_keyed(ended.left, made),
        read=read,
        alive=frozenset(map(now, ended.alive)),
    )
    return made.recording, known, tuple(_sentence(name, count) for name, count in made.unshown.items())


def _lent(recording: Recording, ended: Ended) -> set[Value]:
    """What the program wrote in memory that FSDP lends it: one process has nothing to gather, and copies its parameters there.
    That memory has no name, and is given back, or shown under another layout."""
    if not ended.is_sharded:
        return set()
    layouts = Counter(value.memory for value in recording.externals)
    nameless = {value for value, (_, name) in ended.roles.sources.items() if not name}
    found = set()
    for value in (one for call in recording.calls for one in call.writes()):
        own = recording.externals.get(value)
        is_shown = layouts[value.memory] > (own is not None)
        is_users = value.base in recording.externals and value not in nameless
        if not is_users and (is_shown or (own is not None and not is_there(own))):
            found.add(value)
    return found


def _roles(roles: Roles, made: Lowered) -> Roles:
    externals, now = made.recording.externals, made.now
    return replace(
        roles,
        sources={v: one for v, one in roles.sources.items() if v in externals} | dict(made.named),
        results=_keyed(roles.results, made),
        gradients={now(leaf): now(value) for leaf, value in roles.gradients.items()},
        replaced={now(buffer): now(value) for buffer, value in roles.replaced.items()},
        kept=_keyed(roles.kept, made),
        bound=_keyed(roles.bound, made),
    )


def _keyed(known: Mapping[Value, T], made: Lowered) -> dict[Value, T]:
    """The same by the values of now, without those of memory that was only lent."""
    externals = made.recording.externals
    made_here: Iterable[Value] = (value for call in made.recording.calls for value in call.out_values())
    there = {*externals, *made_here}
    pairs = ((made.now(value), one) for value, one in known.items())
    return {value: one for value, one in pairs if value in there or value.memory is None}


def _sentence(name: str, count: int) -> str:
    word, _, peer = name.partition(" ")
    what = " ".join(filter(None, (counted(count, word), peer or "of this process with others")))
    return f"{what}: it gives no number, and is no part of the trace."
