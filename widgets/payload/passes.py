"""The part of the wire format that says what each pass is and did: passes, their options, the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.config.pass_options import PassOption, written
from tracefuse.optimizers.passes import Decision, PassRecord
from tracefuse.optimizers.trace import Trace
from tracefuse.variant import Variant
from tracefuse.widgets.payload.facts import op_count, size
from tracefuse.widgets.payload.values import sides


def records_of(name: str, variant: Variant) -> list[PassRecord]:
    """What the pass did: to forward and backward, and to the update where there is one. Empty while it is off."""
    update = () if variant.update is None else variant.update.passes
    return [one for one in (*variant.passes, *update) if one.name == name]


def pass_record(name: str, variant: Variant) -> dict[str, Any]:
    """One row of the passes column; the numbers are null while the pass is off. They are what the pass changed in its place
    among the others: of ops in the whole step, so that the changes of all passes add up to the step's, of bytes in forward and
    backward. What its switch changes is told by `tracefuse.widgets.payload.without`."""
    config, records = variant.config, records_of(name, variant)
    record = records[0] if records else None
    sizes = [size(record.before), size(record.after)] if record else None
    ops = [sum(map(op_count, side)) for side in zip(*((one.before, one.after) for one in records), strict=True)]
    state = config.state(name)
    return {
        "name": name,
        "help": config.help(name),
        "own": name in {one.name for one in config.own},
        "enabled": state == "on",
        "state": state,
        "note": config.note(name),
        "changed": any(not one.is_unchanged for one in records),
        "ops": ops or None,
        "saved_bytes": sizes and [one.saved_bytes for one in sizes],
        "peak_bytes": sizes and [one.peak_bytes for one in sizes],
        "seconds": sum(one.seconds for one in records) if records else None,
        "options": [option_record(option, value) for option, value in config.options(name) if option.is_text],
        "error": next((one.error for one in records if one.error), None),
        "delta_ms": None,
    }


def decision_records(variant: Variant) -> dict[str, list[dict[str, Any]]]:
    """By pass what it decided, and why; of one that is off nothing."""
    names = variant.names_in_whole
    return {one: grouped(_decisions(records_of(one, variant), names)) for one in variant.config.names}


def _decisions(records: Sequence[PassRecord], names_in_whole: Mapping[str, str]) -> list[Decision]:
    """All decisions, those about the update's values under their names in the whole step."""
    early, *late = [one.decisions for one in records] or [()]
    renamed = [replace(one, value=names_in_whole.get(one.value, one.value)) for some in late for one in some]
    return [*early, *renamed]


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
    halves = zip(("forward", "backward"), before.halves(), after.halves(), strict=True)
    update = {"update": None if of_update is None else sides(*of_update)}
    return {"pass": name} | {side: sides(*both) for side, *both in halves} | update
