"""The options of the pass `remat`, checked when they are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

from tracefuse.optimizers.costs.cost import H100_SXM_DATASHEET, OpClass, Peaks

CHEAP = ("pointwise", "reduction")
RECOMPUTABLE = (*CHEAP, "heavy")


def _option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class RematOptions:
    """The options. Factors are pure numbers, at least 0; `fields(RematOptions)` has a sentence of help for every option.

    Raises `ValueError` for an option out of range, `UnknownValue` for a pin that matches nothing, `PinConflict` for pins that
    contradict each other or the value.
    """

    producer_input_weight: float = _option(
        0.5,
        "factor for values that are in memory anyway: 1 is torch's choice, 1/2 Thunder's, 0 makes them free to save",
    )
    distance_base: float = _option(
        1.1, "factor per op between a value and its first reader in the backward; 1 lets distance have no effect"
    )
    unmaterialised_factor: float = _option(2.0, "factor for values that a fused kernel would store only to save them")
    save: tuple[str, ...] = _option((), "globs over values and module paths that the forward must keep")
    recompute: tuple[str, ...] = _option((), "globs over those that the backward must compute again, at any cost")
    distance_cap: int = _option(100, "the most ops that the distance factor counts")
    reduction_ratio: float = _option(
        4.0, "without a budget, an op whose result is that many times smaller than what it reads is not run again"
    )
    longest_chain: int | None = _option(None, "the most ops recomputed one after another; unlimited if None")
    recompute_materialized: bool = _option(
        False,
        "recompute also what the backward then writes to memory for a reader outside its kernels: less memory, more time",
    )
    memory_budget: int | float | None = _option(
        None,
        "the most that the forward saves: bytes, or from 0.0 to 1.0 a fraction of what it saves when nothing is recomputed; "
        "None lets the factors decide",
    )
    peak_budget: int | None = _option(
        None,
        "the most bytes that are alive at once in the forward and the backward, inputs and parameters included, once all "
        "passes ran; None sets no bound",
    )
    recompute_classes: tuple[str, ...] | None = _option(
        None,
        "classes of ops that may be recomputed, of pointwise, reduction and heavy (matmul, attention, convolution, …); None "
        "is pointwise and reduction, and with a budget all",
    )
    budget_tilt: float = _option(
        0.05,
        "the most by which a budget prices alike values apart, so that alike layers are not all recomputed at once",
    )
    stop_at_lowest_peak: bool = _option(
        True,
        "let a budget recompute no more once that would raise the static peak, although more is then saved than it says",
    )
    between_regions: bool = _option(
        True, "compute a value again in each region that reads it, where that weighs less than to read it"
    )
    between_chain: int | None = _option(8, "the most ops computed again in a row between regions; unlimited if None")
    peaks: Peaks = field(
        default=H100_SXM_DATASHEET,
        metadata={"help": "whose roofline prices recomputing: a budget goes by it, and reasons quote it"},
    )

    then: tuple[Any, ...] = _option(
        (), "the passes that run behind this one, which a budget on the peak reckons with: the pipeline gives them"
    )

    def __post_init__(self) -> None:
        for option, problem in self._problems():
            raise ValueError(f"{option}={getattr(self, option)!r} {problem}")
        if unknown := sorted({*(self.recompute_classes or ())} - {*RECOMPUTABLE}):
            known = dict.fromkeys(get_args(OpClass), "is never recomputed") | {"view": "is always recomputed"}
            reason = f"{unknown[0]!r} {known.get(unknown[0], 'is no class')}"
            raise ValueError(f"recompute_classes: {reason}; choose from {', '.join(RECOMPUTABLE)}")

    def _problems(self) -> Iterator[tuple[str, str]]:
        for factor in ("producer_input_weight", "unmaterialised_factor", "distance_cap", "budget_tilt"):
            if not 0 <= getattr(self, factor) < math.inf:
                yield factor, "is no factor; pass a number from 0 up"
        if not self.reduction_ratio >= 0:
            yield "reduction_ratio", "is no ratio; pass a number from 0 up, or math.inf"
        if not (self.distance_base > 0 and self.distance_cap * math.log(self.distance_base) < 100):
            yield "distance_base", "is no base; pass a number like 1.1, or 1 for no effect"
        if self.longest_chain is not None and self.longest_chain < 1:
            yield "longest_chain", "forbids every recompute; pass 1 or more, or None"
        if self.memory_budget is not None and (reason := _no_budget(self.memory_budget)):
            yield "memory_budget", reason
        if self.peak_budget is not None and (isinstance(self.peak_budget, bool) or not self.peak_budget > 1):
            yield "peak_budget", "is no number of bytes; pass one, such as 2 * 2**30"
        if self.between_chain is not None and self.between_chain < 1:
            yield "between_chain", "forbids every copy; pass 1 or more, or None"

    @property
    def may_write_again(self) -> bool:
        """Whether the backward may write to memory, for a reader that is not fused, what it recomputes."""
        return self.recompute_materialized or self.producer_input_weight == 0 or self.memory_budget is not None

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes of ops that may be recomputed."""
        if self.recompute_classes is not None:
            return self.recompute_classes
        return CHEAP if self.memory_budget is None else RECOMPUTABLE


def _no_budget(budget: float) -> str | None:
    """Why `budget` is none; None if it is one."""
    if isinstance(budget, bool) or not 0 <= budget < math.inf:
        return "is no budget; pass bytes, or a fraction from 0.0 to 1.0"
    is_one_byte = budget == 1 and isinstance(budget, int)
    return "is one byte; pass 1.0 for all that is saved when nothing is recomputed" if is_one_byte else None
