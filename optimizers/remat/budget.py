"""A memory budget: of the cuts that save no more bytes than it allows, the one that takes the fewest seconds.

    minimise  modelled seconds of recomputing + saved bytes / rate

A minimum cut solves that for any `rate` (bytes per second): a value's edge has the bytes of its storage, the edge from the
source `rate` times the seconds of computing it again. The smaller the rate, the less is saved, and what is recomputed at one
rate is recomputed at every smaller one. So the cuts of all rates are the corners of a convex curve of bytes over seconds,
and the one sought is the last corner within the budget: the line through a corner on either side of the budget gives
the next rate to try, until there is no corner between.

Seconds are those of the program with kernels, by a roofline (`fused_seconds` of `forecast.py`). Layers that are alike have
corners at one rate, and would all be recomputed at once; a small tilt sets them apart, in an order that halves the gaps
between those that are kept (the bits of their number reversed), since a long gap between checkpoints is what takes memory to
recompute.

Recomputing more saves bytes, but what is recomputed lives until its last reader. Once all that is kept is read by long
chains, the static peak rises again. `meet` therefore compares the cuts of other budgets too, tenth by tenth: where the one
asked for would raise the peak above a larger budget's, the next smaller one that does not is taken, or, if there is none,
the larger one of the lowest peak.

A budget on the peak is met by the cut of the fewest seconds whose program has no higher one (`meet_peak`). What the passes
behind this one do to a peak no forecast tells: kernels hold what was a temporary, and keep operands longer. So the programs
of a few cuts are made, as `outcome` makes them: those that a forecast points to, corrected by what the others came to.

Sources: Everett, "Generalized Lagrange Multiplier Method", 1963; Eisner and Severance, "Mathematical Techniques for Efficient
Record Segmentation", 1976 (the corners of a parametric minimum); van der Corput's sequence of 1935 (the tilt).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property

from torch import fx

from tracefuse.optimizers.facts import stored_bytes
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.ops import producer
from tracefuse.optimizers.passes import Decision
from tracefuse.optimizers.remat.choice import Choice, CutNetwork, bans, chain_ends, choose, weigh_bytes
from tracefuse.optimizers.remat.filling import fill
from tracefuse.optimizers.remat.forecast import Forecast, Outcomes, fused_seconds
from tracefuse.optimizers.remat.forward import Forward
from tracefuse.optimizers.remat.options import RematOptions
from tracefuse.optimizers.remat.pins import resolve_pins
from tracefuse.optimizers.trace import Trace, human_bytes, tensor_type, val

NAME, PEAK = "memory_budget", "peak_budget"
"""What decisions about a budget as a whole are about: no value."""

# The larger budgets whose cuts `meet` compares, as fractions of what is kept when nothing is recomputed.
LEVELS = tuple(tenth / 10 for tenth in range(10, -1, -1))
# A corner that leaves less of the budget than this fraction of all bytes unused is close enough.
_CLOSE = 0.002
_MOST_SOLVES = 40
# The cuts among which a budget on the peak chooses, and how many are looked at between the one found and the one before.
_STEPS = 16
_REFINED = 3


# --- layers alike ------------------------------------------------------------------------------------------------------


def tilts(forward: Forward, tilt: float) -> dict[fx.Node, float]:
    """A factor from 1 to 1 + `tilt` for each value: another one for each of the values that are alike."""
    seen: Counter[tuple[object, str]] = Counter()
    factors = {}
    for node in forward.nodes:
        kind = (node.target if node.op == "call_function" else node.op, tensor_type(val(node)))
        factors[node] = 1 + tilt * _reversed_bits(seen[kind])
        seen[kind] += 1
    return factors


def _reversed_bits(number: int) -> float:
    """0, 1/2, 1/4, 3/4, 1/8, 5/8, …: each halves the largest gap that those before it leave."""
    found, weight = 0.0, 0.5
    while number:
        found += weight * (number & 1)
        number, weight = number >> 1, weight / 2
    return found


# --- the corners ------------------------------------------------------------------------------------------------------


class Cuts:
    """The cuts of a forward that take the fewest seconds for their bytes. Solved when asked for, and kept."""

    def __init__(self, forward: Forward, options: RematOptions) -> None:
        options = replace(options, memory_budget=0.0)  # what may be recomputed is the same for every budget
        self._forward, self._options = forward, options
        self._pins = resolve_pins(forward, options.save, options.recompute)
        self._banned = bans(forward, self._pins, options)
        self._weights = {n: weigh_bytes(forward, n, self._pins.get(n)) for n in forward.nodes}
        asked = {producer(n) for n, pin in self._pins.items() if pin.action == "recompute"}
        tilt = tilts(forward, options.budget_tilt)
        seconds = {n: 0.0 if producer(n) in asked else fused_seconds(forward, n, options.peaks) for n in forward.nodes}
        self._seconds = {n: tilt[n] * seconds[n] for n in forward.nodes}
        self._network = CutNetwork(forward, self._weights)
        self._prices = self._network.array(self._seconds, self._banned)
        self._solved: dict[float, Choice] = {}

    def within(self, nbytes: float) -> Choice:
        """The cut of the fewest seconds that saves at most `nbytes`; the one that saves least, if all save more.

        It depends on nothing that was asked before: the search starts from the extremes, and finds again what it solved.
        """
        below, above = self._extremes
        nbytes = max(nbytes, below.nbytes)
        close = nbytes - _CLOSE * above.nbytes
        for _ in range(_MOST_SOLVES):
            if above.nbytes <= nbytes or below.nbytes > close:
                break
            slower = self._duration(below) - self._duration(above)
            found = self._solve((above.nbytes - below.nbytes) / slower) if slower > 0 else below
            if not below.nbytes < found.nbytes < above.nbytes:
                break
            below, above = (found, above) if found.nbytes <= nbytes else (below, found)
        corner = above if above.nbytes <= nbytes else below
        return fill(self._forward, self._network, corner, self._seconds, int(nbytes))

    @cached_property
    def _extremes(self) -> tuple[Choice, Choice]:
        """The cut that saves the fewest bytes and, of those that take the fewest seconds, the one that saves least."""
        seconds = [s for n, s in self._seconds.items() if s and n not in self._banned] or [1.0]
        total = sum(w for w in self._weights.values() if w < math.inf)
        return self._solve(1 / sum(seconds)), self._solve(2 * (total + 1) / min(seconds))

    def _duration(self, choice: Choice) -> float:
        return math.fsum(map(self._seconds.__getitem__, choice.again))

    def _solve(self, rate: float) -> Choice:
        if rate not in self._solved:
            self._solved[rate] = self._cut(rate)
        return self._solved[rate]

    def _cut(self, rate: float) -> Choice:
        network, banned, array = self._network, self._banned, rate * self._prices
        while True:
            kept, again = network.cheapest(array)
            long = chain_ends(self._forward, again, self._pins, self._options.longest_chain)
            if not long:
                break
            banned = banned | long
            array[[self._forward.index[n] for n in long]] = math.inf
        prices = dict(zip(self._forward.nodes, array.tolist(), strict=True))
        return Choice(kept, again, self._pins, self._weights, prices, banned, network.kept_bytes(kept), rate)


# --- one budget -------------------------------------------------------------------------------------------------------


class Budgeting:
    """The choices for one trace that recomputes nothing yet, by budget. What they have in common is computed once,
    and holds when the trace is edited."""

    def __init__(self, trace: Trace, forward: Forward, options: RematOptions, like: Budgeting | None = None) -> None:
        """`like` differs in nothing but the producer input weight, which counts where no budget does: its cuts serve again."""
        self._forward, self._options, self._full = forward, options, saved_bytes(trace)
        self._forecast = like._forecast if like else Forecast(trace)
        if like:
            self.cuts = like.cuts

    @cached_property
    def unlimited(self) -> Choice:
        """The choice without a budget."""
        return choose(self._forward, replace(self._options, memory_budget=None))

    @cached_property
    def cuts(self) -> Cuts:
        return Cuts(self._forward, self._options)

    def limit(self, budget: float) -> int:
        """A budget in bytes: an int, and a float above 1, are bytes; a float up to 1 is a fraction of what the trace saves."""
        return int(budget * self._full) if isinstance(budget, float) and budget <= 1 else int(budget)

    def peak(self, choice: Choice) -> int:
        """The static peak that `choice` gives, in bytes."""
        return self._forecast.peak(choice.again)

    def meet(self, budget: float | None) -> tuple[Choice, list[Decision]]:
        """The choice for `budget`, with what is to be said of how it is met."""
        if budget is None:
            return self.unlimited, []
        limit = self.limit(budget)
        if self.unlimited.nbytes <= limit:
            return self.unlimited, [Decision(NAME, "meet", f"{self._within(limit)} without it, and so changes nothing")]
        asked = self.cuts.within(limit)
        chosen = self._without_rise(asked, limit) if self._options.stop_at_lowest_peak else asked
        is_stopped = chosen.nbytes > max(limit, asked.nbytes)
        decisions = [self._stopped(chosen, asked, limit)] if is_stopped else []
        if asked.nbytes > limit and not is_stopped:
            decisions.append(self._missed(asked, limit))
        return chosen, decisions or [self._met(chosen, limit)]

    def _without_rise(self, asked: Choice, limit: int) -> Choice:
        """`asked`, or else the choice of the next smaller budget, whose peak is none above those of larger budgets; if there
        is none, the one of the lowest peak of those."""
        levels = [level * self._full for level in LEVELS]
        within = self.cuts.within
        larger = [self.unlimited, *(within(level) for level in levels if limit < level < self.unlimited.nbytes)]
        lowest = min(larger, key=lambda choice: (self.peak(choice), choice.nbytes))
        for choice in (asked, *(within(level) for level in levels if level < limit)):
            if self.peak(choice) <= self.peak(lowest):
                return choice
        return lowest

    # --- the peak -----------------------------------------------------------------------------------------------------

    def meet_peak(self, limit: int, base: Choice, outcome: Callable[[Choice], Trace]) -> tuple[Choice, list[Decision]]:
        """The choice of the fewest seconds that saves no more than `base` and whose `outcome` has a static peak of at most
        `limit` bytes, as far as it is found; with what is to be said of how that is met."""
        made = Outcomes(outcome)
        if made.peak(base) <= limit:
            said = f"the peak budget of {human_bytes(limit)} is met without it, and so changes nothing"
            return base, [Decision(PEAK, "meet", said)]
        steps = (self.cuts.within(base.nbytes * (_STEPS - at) / _STEPS) for at in range(1, _STEPS + 1))
        choices = [base, *{one.again: one for one in steps if one.nbytes < base.nbytes}.values()]
        chosen = self._lowered(choices, limit, made)
        if chosen is None:
            return made.least, [Decision(PEAK, "miss", made.why_missed(limit))]
        peak = human_bytes(made.peak(chosen))
        said = f"the peak budget of {human_bytes(limit)} is met: a static peak of {peak}, {human_bytes(chosen.nbytes)} saved"
        return chosen, [Decision(PEAK, "meet", said)]

    def beside_peak(
        self, budget: float | None, base: Choice, chosen: Choice, decisions: list[Decision]
    ) -> list[Decision]:
        """What is to be said of `budget` where a budget on the peak made `chosen` of `base`, of which `decisions` are."""
        if budget is None or chosen is base:
            return decisions
        limit = self.limit(budget)
        if chosen.nbytes <= limit:
            return [self._met(chosen, limit)]
        return [self._stopped(chosen, self.cuts.within(limit), limit, base)]

    def _lowered(self, choices: list[Choice], limit: int, made: Outcomes) -> Choice | None:
        """The first of `choices`, which save less and less, that is within `limit`, or one between it and the one before."""
        at = 0
        while made.peak(choices[at]) > limit:
            shift = made.peak(choices[at]) - self.peak(choices[at])
            left = [other for other in range(len(choices)) if not made.knows(choices[other])]
            if not left:
                return None
            likely = [other for other in left if self.peak(choices[other]) + shift <= limit]
            at = likely[0] if likely else min(left, key=lambda other: self.peak(choices[other]))
        while at > 0 and made.peak(choices[at - 1]) <= limit:
            at -= 1
        more, less = choices[at - 1], choices[at]
        for _ in range(_REFINED):
            between = self.cuts.within((more.nbytes + less.nbytes) // 2)
            if not less.nbytes < between.nbytes < more.nbytes:
                break
            more, less = (more, between) if made.peak(between) <= limit else (between, less)
        return less

    def _within(self, limit: int) -> str:
        kept = f"of {human_bytes(self._full)} kept when nothing is recomputed"
        return f"the budget of {human_bytes(limit)}, {kept}, is met"

    def _met(self, chosen: Choice, limit: int) -> Decision:
        # A budget on the peak has its own word on that, with the passes behind this one.
        peak = "" if self._options.peak_budget is not None else f", a static peak of {human_bytes(self.peak(chosen))}"
        return Decision(NAME, "meet", f"{self._within(limit)}: {human_bytes(chosen.nbytes)} saved{peak}")

    def _stopped(self, chosen: Choice, asked: Choice, limit: int, lowest: Choice | None = None) -> Decision:
        """Of `chosen`, which saves no less because `asked` has a higher peak than `lowest` (None: than `chosen` itself)."""
        peaks = f"from {human_bytes(self.peak(lowest or chosen))} to {human_bytes(self.peak(asked))}"
        over = _over(chosen.nbytes, limit)
        why = f"{over}, since to save {human_bytes(asked.nbytes)} instead would raise the static peak {peaks}"
        return Decision(NAME, "stop", f"{why}; stop_at_lowest_peak=False would do so")

    def _missed(self, asked: Choice, limit: int) -> Decision:
        held = sorted(asked.kept, key=lambda n: (-stored_bytes(n), self._forward.index[n]))
        names = "; ".join(f"{n.name} ({human_bytes(stored_bytes(n))}) {_holds(asked, n)}" for n in held[:3])
        more = f"; and {len(held) - 3} more" if len(held) > 3 else ""
        remedy = f"pass memory_budget={asked.nbytes} or more, or drop what holds them"
        return Decision(
            NAME, "miss", f"{_over(asked.nbytes, limit)}, as little as there can be: {names}{more}; {remedy}"
        )


def why_unmet(decisions: Iterable[Decision]) -> list[str]:
    """Which budgets of a pass were missed, or stopped at before they were met, each with the reason."""
    return [f"{d.value}: {d.reason}" for d in decisions if d.value in (NAME, PEAK) and d.action in ("miss", "stop")]


def _over(saved: int, limit: int) -> str:
    return f"{human_bytes(saved)} saved, {human_bytes(saved - limit)} more than the budget of {human_bytes(limit)}"


def _holds(choice: Choice, node: fx.Node) -> str:
    """Why `node` cannot go: its own ban, or that of the nearest value that it is computed from."""
    seen, waiting = {node}, [node]
    for current in waiting:
        if reason := choice.banned.get(producer(current)) or choice.banned.get(current):
            return reason if current is node else f"needs {current.name}, which {reason}"
        sources = [a for a in current.all_input_nodes if a.op != "placeholder" and a not in seen]
        seen.update(sources)
        waiting += sources
    return "is the least that the rest can be computed from"
