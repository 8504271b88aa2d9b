"""The board of a view: every configuration that was tried, of one capture or of several, to go back to and to compare.

A configuration is tried by showing it, by measuring it, or in a sweep, which runs the passes of many in a thread. What each
came to is kept with what was measured, and so in session files.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import traitlets

from tracefuse.config.configuration import Config
from tracefuse.errors import OptionError
from tracefuse.measure.frontier import resharded
from tracefuse.text import counted
from tracefuse.variant import Variant, Variants
from tracefuse.widgets.payload.board import Stand, board_record, comparison_record, entry_of, outcome, said
from tracefuse.widgets.payload.clock import Clock
from tracefuse.widgets.payload.measured import Measured
from tracefuse.widgets.view.answering import Answering
from tracefuse.widgets.view.tasks import Task

MOST_SWEPT = 256
REDRAWN_S = 0.5
"""How often the board is drawn while a sweep adds to it."""


def swept(
    config: Config,
    weights: Sequence[Any] = (),
    budgets: Sequence[Any] = (),
    passes: Sequence[str] = (),
    reshards: Sequence[bool | None] = (),
) -> list[Config]:
    """`config` with every weight and memory budget of `remat`, with and without each of `passes`, and with gathered parameters
    as recorded (None), freed behind the forward, or kept, each configuration once; what is not given stays as it is.
    Where `reshards` are given, they say what becomes of `overlap`, which is not switched then. Raises `OptionError` for what
    is no option, and for more than `MOST_SWEPT`."""
    remat = [{"remat": weight} for weight in weights] or [{}]
    saved = [{"memory_budget": budget} for budget in budgets] or [{}]
    gathered = [{"overlap": resharded(config, one)} for one in reshards] or [{}]
    unknown = [name for name in passes if name not in config.names]
    if unknown:
        raise OptionError(f"there is no pass {unknown[0]!r}: choose from {', '.join(config.names)}")
    switches = [[{}, {name: not config.is_on(name)}] for name in passes if not (reshards and name == "overlap")]
    count = len(remat) * len(saved) * len(gathered) * 2 ** len(switches)
    if count > MOST_SWEPT:
        raise OptionError(
            f"these are {count} configurations, and a sweep takes at most {MOST_SWEPT}: choose fewer passes"
        )
    made = (
        config.changed(**{name: value for part in parts for name, value in part.items()})
        for parts in itertools.product(remat, saved, *switches, gathered)
    )
    return list(dict.fromkeys(made))


class Boarding(Answering):
    """The trait `board` is what was tried, as `BoardState` in `js/types.d.ts` has it."""

    board = traitlets.Dict().tag(sync=True)

    variant: Variant
    baseline: Variant | None
    measured: Measured
    name: str | None

    def _begin_board(self, others: Iterable[tuple[str, Variant]]) -> None:
        """Called before the widget is made: the shown capture and `others`, each by what it is called."""
        mine = Stand(self.name or "this capture", self.variant.capture, self.measured)
        self.stands = [mine, *(Stand(label, one.capture, Measured.of(one)) for label, one in others)]
        self._outcome = ""
        self._compared: tuple[tuple[int, Variant], tuple[int, Variant]] | None = None
        self._names = [self.name, *(None for _ in self.stands[1:])]
        for stand, variant in zip(self.stands, [self.variant, *(one for _, one in others)], strict=True):
            self._note(stand, variant.baseline)
            for config, pinned in stand.capture.measurements.timings:
                if pinned is None:
                    self._note(stand, variant.under(config))
            self._note(stand, variant)

    @property
    def _shown_at(self) -> int:
        """The place of the capture on show."""
        return next(at for at, one in enumerate(self.stands) if one.capture is self.variant.capture)

    def _follow_capture(self) -> None:
        """Show times and names of the capture on show, which may be another one than before."""
        stand = self.stands[self._shown_at]
        if stand.measured is self.measured:
            return
        stand.measured.clocks.chosen = self.measured.clocks.chosen
        self.measured, self.name, self.baseline = stand.measured, self._names[self._shown_at], None

    def _note(self, stand: Stand, variant: Variant, clock: Clock | None = None, config: Config | None = None) -> None:
        """Put a configuration on the board, by default the variant's own, with the time of its first trial."""
        config, clock = config or variant.config, clock or stand.clock()
        before = stand.tried.get(config)
        entry = entry_of(variant, clock, before.tried_at if before else time.time())
        stand.tried[config] = stand.capture.measurements.board[config] = entry

    def _board(self) -> dict[str, Any]:
        """The board as it is now, the shown configuration noted on it."""
        at = self._shown_at
        clock = self.measured.clocks.clock(self.variant, self.baseline)
        self._note(self.stands[at], self.variant, clock)
        record = board_record(self.stands, at, self.variant, clock)
        return record | {
            "said": self._outcome,
            "comparison": None if self._compared is None else comparison_record(self._compared, self.stands),
        }

    # --- what the board is asked for ----------------------------------------------------------------------------------

    def sweep(
        self,
        weights: Sequence[Any] = (),
        budgets: Sequence[Any] = (),
        passes: Sequence[str] = (),
        reshards: Sequence[bool | None] = (),
    ) -> None:
        """Try the shown configuration with every weight and memory budget of `remat`, with and without each of `passes`, and
        with gathered parameters as recorded (None), freed behind the forward (True) or kept (False): their times are predicted
        or modelled, as the view's are. An error is shown in the view."""
        configs = functools.partial(swept, self.variant.config, weights, budgets, passes, reshards)
        self._run("board", lambda task: self._sweep(task, configs()))

    def compare(self, one: Variant, other: Variant) -> None:
        """Show on the board what tells two variants apart, of captures that are on it, by module and by pass."""
        places = {id(stand.capture): at for at, stand in enumerate(self.stands)}
        if not {id(one.capture), id(other.capture)} <= places.keys():
            raise OptionError("both have to be of captures on this board: tracefuse.board(a, b) opens one with both")
        self._compared = (places[id(one.capture)], one.check()), (places[id(other.capture)], other.check())
        with self._lock:
            self.board = self._board()

    def _sweep(self, task: Task, configs: Sequence[Config]) -> None:
        stand, clock = self.stands[self._shown_at], self.measured.clocks.clock(self.variant, self.baseline)
        failed: dict[str, str] = {}
        drawn_s = time.monotonic()
        for count, config in enumerate(configs):
            if task.is_cancelled():
                break
            self._progress(count / len(configs), f"{count + 1} of {len(configs)}: {said(config)}")
            variant = stand.capture.made(config) or stand.capture.aside().variant(config)
            problem = next((f"{one.name}: {one.error}" for one in variant.passes if one.error), None)
            if problem is not None:
                failed[said(config)] = problem
                continue
            self._note(stand, variant, clock)
            if time.monotonic() - drawn_s > REDRAWN_S:
                self._redraw()
                drawn_s = time.monotonic()
        self._note(stand, self.variant, clock)
        tried, before = stand.tried, self.variant.config
        self._outcome = outcome(tried[before], {one: tried[one] for one in configs if one != before and one in tried})
        self._redraw()
        if failed:
            name, problem = next(iter(failed.items()))
            raise OptionError(
                f"{counted(len(failed), 'configuration')} of {len(configs)} could not be made, such as “{name}”: {problem}"
            )

    def _redraw(self) -> None:
        with self._lock:
            self.board = self._board()

    def _at(self, given: Mapping[str, Any]) -> Variant:
        """The variant that a message names by its capture's place and its configuration."""
        capture: Variants = self.stands[given["capture"]].capture
        return capture.variant(Config().changed(**given["config"]))

    def _answer_board(self, message: Mapping[str, Any]) -> bool:
        """Whether the message was for the board, which answers it."""
        kind = message.get("type")
        if kind == "sweep":
            asked = {name: message[name] for name in ("weights", "budgets", "passes", "reshards") if name in message}
            self._start("board", lambda task: self._sweep(task, swept(self.variant.config, **asked)))
        elif kind == "compare":
            pair = message["pair"]
            self._start("board", lambda _: self.compare(*map(self._at, pair)))
        elif kind == "return":
            self._answer("passes", lambda: self._show(self._at(message)))
        else:
            return False
        return True

    def _show(self, variant: Variant | None = None) -> None:
        """Show another variant of a capture on the board (default: the same, with what is known by now); its payload may
        follow."""
        raise NotImplementedError
