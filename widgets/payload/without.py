"""The part of the wire format that says what a switch changes: the step without one pass, beside the step that is shown. Pure.

A pass in its place among the others may look like a cost: `decompose` writes one op as several, which `fuse` makes one kernel
of. What its switch changes is the difference of two steps with all passes behind it, by the clock of the headline. The other
step is known once its passes have run, which takes a while: until then it is null, and the view tells what the pass changed
in its place, and says so.
"""

from __future__ import annotations

from typing import Any

from tracefuse.config.configuration import Config
from tracefuse.optimizers.remat.tradeoffs import WEIGHTS
from tracefuse.variant import Variant
from tracefuse.widgets.payload.clock import Clock, kind_beside
from tracefuse.widgets.payload.facts import step_size
from tracefuse.widgets.payload.levers import suggested
from tracefuse.widgets.payload.passes import records_of


def foreseen(variant: Variant) -> list[Config]:
    """The configurations whose steps the numbers beside the switches are differences to: each one switch away."""
    changing = [name for name in variant.config.names if _changes(name, variant)]
    freeze = suggested(variant)
    return [variant.config.switched(name) for name in changing] + [
        variant.config.changed(freeze=p) for p in [freeze] if p
    ]


def reweighed(config: Config) -> list[Config]:
    """The configurations that the choice of `remat`'s input weight (js/passes/options.js) leads to from `config`, the least
    first; none while `remat` is off."""
    return [config.changed(remat=weight) for weight in sorted(WEIGHTS) if config.remat not in (None, weight)]


def without_record(name: str, variant: Variant, clock: Clock) -> dict[str, Any] | None:
    """The whole step without the pass called `name`, all others kept, in the numbers of the headline; None of a pass that
    changes nothing, until the passes have run for it, and where one of the two times alone is modelled."""
    config = variant.config.switched(name)
    other = variant.capture.made(config) if _changes(name, variant) else None
    if other is None:
        return None
    times = clock.of(other.whole)
    kind = kind_beside(times.kind, clock.times[1].kind)
    if not kind:
        return None
    return step_size(other)._asdict() | {
        "step_us": clock.takes_us(other.whole),
        "kind": kind,
    }


def _changes(name: str, variant: Variant) -> bool:
    return any(not one.is_unchanged for one in records_of(name, variant))
