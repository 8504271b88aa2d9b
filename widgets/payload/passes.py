"""The part of the wire format that says what each pass is and did: passes, their options, the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.config.pass_options import PassOption, written
from tracefuse.optimizers.passes import Decision, PassRecord
from tracefuse.optimizers.trace import Trace
from tracefuse.widgets.payload.facts import size
from tracefuse.widgets.payload.values import sides


def pass_record(name: str, config: Config, records: Sequence[PassRecord]) -> dict[str, Any]:
    """One row of the passes column; the numbers are null while the pass is off."""
    record = next((one for one in records if one.name == name), None)
    sizes = [size(record.before), size(record.after)] if record else None
    state = config.state(name)
    return {
        "name": name,
        "help": config.help(name),
        "enabled": state == "on",
        "state": state,
        "note": config.note(name),
        "changed": record is not None and not record.is_unchanged,
        "ops": sizes and [one.ops for one in sizes],
        "saved_bytes": sizes and [one.saved_bytes for one in sizes],
        "peak_bytes": sizes and [one.peak_bytes for one in sizes],
        "seconds": record.seconds if record else None,
        "options": [option_record(option, value) for option, value in config.options(name) if option.is_text],
        "decisions": grouped(record.decisions) if record else [],
        "error": record.error if record else None,
        "delta_ms": None,
    }


def option_record(option: PassOption, value: Any) -> dict[str, Any]:
    """One option of a pass, as the view edits it."""
    shown = {"value": written(value), "default": written(option.default)}
    return {"name": option.name, "kind": option.kind, **shown, "help": option.help}


def config_record(config: Config) -> dict[str, Any]:
    """A configuration by its options' names, each what `configure` takes back."""
    found = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "own"}
    found["remat_options"] = _written(dict(config.remat_options))
    found["overlap"] = False if config.overlap is None else _written(dict(config.overlap))
    return found | {one.name: _written(one.given) for one in config.own}


def _written(given: Any) -> Any:
    return {name: written(value) for name, value in given.items()} if isinstance(given, dict) else given


def grouped(decisions: Iterable[Decision]) -> list[dict[str, Any]]:
    """Decisions with the same action and reason as one, in the order of their first; `nbytes` is their sum."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for one in decisions:
        new = {"action": one.action, "reason": one.reason, "nbytes": 0, "values": []}
        group = groups.setdefault((one.action, one.reason), new)
        group["nbytes"] += one.nbytes
        group["values"].append(one.value)
    return list(groups.values())


def change_record(
    name: str, records: Sequence[PassRecord], of_update: Sequence[PassRecord] = ()
) -> dict[str, Any] | None:
    """What the pass called `name` alone changed: both halves, and the update where there is one, marked against what it was
    given. None while it is off."""
    record, late = (next((one for one in some if one.name == name), None) for some in (records, of_update))
    if record is None:
        return None
    return changes_record(name, (record.before, record.after), None if late is None else (late.before, late.after))


def changes_record(name: str, pair: tuple[Trace, Trace], of_update: tuple[Trace, Trace] | None) -> dict[str, Any]:
    """What lies between two traces with one backward, and two updates, as what `name` changed."""
    before, after = pair
    halves = zip(("forward", "backward"), before.split(), after.split(), strict=True)
    update = {"update": None if of_update is None else sides(*of_update)}
    return {"pass": name} | {side: sides(*both) for side, *both in halves} | update
