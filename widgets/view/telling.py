"""What a view is told of a variant that a switch made, and when: its numbers at once, the whole payload once nobody clicks.

A switch is answered by its numbers, then by what is on show: see `tracefuse.widgets.view.late`. What nothing shows is made
once nothing was asked for a while, or as soon as a tab, a selected value or a line of Python needs it. The next switch
supersedes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import traitlets

from tracefuse.variant import Variant
from tracefuse.widgets.payload.program import Rest
from tracefuse.widgets.view.answering import sentence
from tracefuse.widgets.view.boarding import Boarding
from tracefuse.widgets.view.ending import published
from tracefuse.widgets.view.late import PARTS, late_parts, late_tabs

FORESEEN = {"passes", "sentence"}
"""The fields of a payload that say what switches change."""


@dataclass
class Unsettled:
    """A payload of which the view has `fields`, and lacks `parts`, which `rest` makes, the last one first."""

    fields: dict[str, Any]
    rest: Rest
    parts: list[str]


class Settled(traitlets.Dict):
    """A trait that is whole whenever it is read."""

    def get(self, obj: Any, cls: Any = None) -> Any:
        obj.settle()
        return super().get(obj, cls)


class Telling(Boarding):
    """A view whose trait `payload` follows its numbers; the trait `anew` has the fields of it that became known since it was
    sent."""

    payload = Settled().tag(sync=True)
    anew = traitlets.Dict().tag(sync=True)
    _is_told = False
    _unsettled: Unsettled | None = None

    tab: Any
    selected: Any

    def held(self, variant: Variant) -> dict[str, Any]:
        """The payload of any variant of the capture, beside the baseline and with what was measured here."""
        return self.measured.payload(variant, self.baseline, self.name)

    def _tell_numbers(self, variant: Variant) -> None:
        """Let the view show the numbers of another variant of the capture, and then what is on show of it, before its payload
        is made; where that fails, they are taken back."""
        late = late_parts(self.tab, self.selected)
        with self._or_taken_back():
            numbers, rest = self.measured.in_two(variant, self.baseline, self.name)
            self.send({"type": "numbers", "numbers": numbers | {"late": late_tabs(PARTS)}})
            published()  # before the rest keeps the thread that sends them waiting
            shown = rest(PARTS - late)
        if shown:
            self.send({"type": "numbers", "numbers": shown | {"late": late_tabs(late)}})
        # From the end: of the field `memory` the part "values" has less than "saved".
        self._unsettled = Unsettled(numbers | shown, rest, sorted(late))

    def settle(self, is_stale: Callable[[], bool] = lambda: False) -> None:
        """Make what the view lacks of what is on show, part by part, until that is stale."""
        while (lacking := self._unsettled) is not None and not is_stale():
            with self._lock:
                if lacking is not self._unsettled or is_stale():
                    continue
                if lacking.parts:
                    with self._or_taken_back():
                        lacking.fields |= lacking.rest({lacking.parts[-1]})
                    lacking.parts.pop()
                else:
                    self._tell_payload(lacking.fields)

    def _settle_unasked(self, is_stale: Callable[[], bool] = lambda: False) -> None:
        """Do it where something is lacking, while nothing is timed; the view shows what it raises."""
        if self._unsettled is None:
            return
        try:
            with self._between_rounds():
                self.settle(is_stale)
        except Exception as problem:
            self._tell(error={"panel": "passes", "at": "", "message": sentence(problem)})

    @traitlets.observe("tab", "selected")
    def _settle_for(self, _: Any) -> None:
        """Do it at once for whoever looks at what is lacking."""
        if (lacking := self._unsettled) is not None and not late_parts(self.tab, self.selected).issuperset(
            lacking.parts
        ):
            self._settle_unasked()

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        """As ipywidgets (8.1) does it: of all traits, those that are settled, since reading one of them changes another."""
        if key is None:
            self.settle()
        return super().get_state(key, drop_defaults)

    def _tell_payload(self, payload: dict[str, Any]) -> None:
        """Let the view show this one, and the still form say it; where it is the one that there is, numbers go back to it."""
        had_numbers, self._unsettled = self._unsettled is not None, None
        if payload != self.payload:
            self.anew = {}  # which is of the one before
            self.payload = payload
        elif had_numbers:
            self._take_back()
        self._update_still()

    @contextmanager
    def _or_taken_back(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._unsettled = None
            self._take_back()
            raise

    def _take_back(self) -> None:
        self.send({"type": "numbers", "numbers": None})

    def _tell_changed(self, shown: Variant) -> None:
        """Let the payload say what is known by now of what is on show. The view hears of the numbers that are others, which
        are few: a payload as a whole keeps the kernel and the browser busy while somebody may click."""
        numbers, _ = self.measured.in_two(shown, self.baseline, self.name)
        changed = {name: one for name, one in numbers.items() if one != self.payload.get(name)}
        if not changed.keys() <= FORESEEN:  # the clock is another one, as with another target
            self.anew = {}
            self.payload = self.held(shown)
        elif changed:
            self._is_told = True
            try:
                self.payload = self.payload | changed
            finally:
                self._is_told = False
            self.anew = self.anew | changed

    def notify_change(self, change: Any) -> None:
        """As ipywidgets (8.1) does it, which sends the trait, but for a payload of which the view is told otherwise."""
        if self._is_told and change["name"] == "payload":
            traitlets.HasTraits.notify_change(self, change)
        else:
            super().notify_change(change)

    def _update_still(self) -> None:
        """Let the still form say what is shown now."""
        raise NotImplementedError
