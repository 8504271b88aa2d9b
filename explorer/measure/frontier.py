"""Time against memory of one rank's step on a described machine: what `overlap` does with gathered parameters, and how much
`remat` saves for the backward.

Each configuration is run: its passes make the trace of the step, whose peak is counted and whose collectives are modelled on
the machine's links. So a choice that holds more for one pass, and less for the other, is seen as what it comes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tracefuse.config.configuration import Config, read_option
from tracefuse.errors import MeasureError, OptionError
from tracefuse.measure.overlapped import check_recorded, link_text, on_mesh, unbeaten
from tracefuse.measure.rounds import Progress
from tracefuse.measure.switched import Switched
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.ops import is_recorded
from tracefuse.optimizers.overlap.collectives import gathers_parameters, reduces_gradients
from tracefuse.optimizers.overlap.links import Mesh
from tracefuse.optimizers.trace import Trace, human_bytes
from tracefuse.text import aligned, counted, share_text, time_text

BUDGETS: tuple[Any, ...] = (None, 0.75, 0.5, 0.25, 0.1)
"""What the forward may save for the backward, as shares of what it would."""

MOVED = {"prefetch": 1, "second_group": True}
"""The options of `overlap` with which gathers are hidden, whether parameters are freed behind the forward or kept."""


@dataclass(frozen=True)
class Point:
    """A configuration, its step on the machine in µs, for how many of these computing waits for other ranks, and the most
    bytes that one rank holds at once: parameters, optimizer state, what is gathered and saved. `call` is the code that makes
    it of a capture called `c`."""

    config: Config
    step_us: float
    exposed_us: float
    peak_nbytes: int
    saved_nbytes: int

    @property
    def call(self) -> str:
        return self.config.as_code()


@dataclass(frozen=True, repr=False)
class Frontier:
    """What was tried on `machine`: `points`, the shown configuration first where it could be made, and what could not:
    `failed`, by its call, with the error. Print it.

    `ranks` is how many processes share the parameters of the recording: a described machine of more of them would hold smaller
    shards than `peak_nbytes` counts.
    """

    machine: Mesh
    how: str
    ranks: int
    points: tuple[Point, ...]
    failed: tuple[tuple[str, str], ...] = ()

    @property
    def best(self) -> tuple[Point, ...]:
        """The points that no other one beats in both time and memory, from the fastest on."""
        return unbeaten(self.points, lambda point: (point.step_us, point.peak_nbytes))

    def within(self, memory: int | str) -> Point:
        """The fastest step of which a rank holds no more than so many bytes, such as "40GiB". Raises `MeasureError` where none
        was found, and `OptionError` for what is no size."""
        nbytes = bytes_of(memory)
        if not self.points:
            call, error = self.failed[0]
            raise MeasureError(
                f"none of the configurations could be made, such as {call}: {error}: leave that option out"
            )
        found = next((one for one in self.best if one.peak_nbytes <= nbytes), None)
        if found is None:
            least = self.best[-1]
            raise MeasureError(
                f"no configuration that was tried holds {human_bytes(nbytes)} or less a rank: the least is "
                f"{human_bytes(least.peak_nbytes)}, of {least.call}. Try smaller shares of what is saved "
                "(budgets=[0.05, 0.0]), share the parameters among more ranks, or take a smaller batch"
            )
        return found

    def __str__(self) -> str:
        best = {id(one) for one in self.best}
        rows = [("step", "exposed", "peak a rank", "saved", "", "")]
        for one in sorted(self.points, key=lambda point: (point.step_us, point.peak_nbytes)):
            exposed = f"{time_text(one.exposed_us)} ({share_text(one.exposed_us, one.step_us)})"
            memory = human_bytes(one.peak_nbytes), human_bytes(one.saved_nbytes)
            rows.append((time_text(one.step_us), exposed, *memory, "*" if id(one) in best else "", one.call))
        parts = [
            f"a step of one rank on {self.machine.text}: {self.how}\n{link_text(self.machine)}\n"
            "peak: static, read off each trace; tensors are as large as they were recorded, on "
            f"{counted(self.ranks, 'rank')}\n"
            "*: no other one is both faster and smaller; `reshard` is what `fully_shard` calls reshard_after_forward",
            aligned(rows),
        ]
        if self.failed:
            parts.append("not made:\n" + "\n".join(f"{call}: {error}" for call, error in self.failed))
        return "\n\n".join(parts)

    __repr__ = __str__


def bytes_of(memory: Any, said: str = "") -> int:
    """The bytes of a size, which is a number of them or a text such as "40GiB". Raises `OptionError` for what is no size;
    `said` is how it was written, where that was not in Python."""
    try:
        found = read_option("peak_budget", memory)
    except OptionError:
        found = None
    if found is None:
        said = said or f"memory={memory!r}"
        raise OptionError(f"{said} is no size: give the bytes that a rank may hold, such as 40GiB")
    return found


def frontier(
    shown: Switched,
    aside: Callable[[], Callable[[Config], Switched]],
    machine: Mesh,
    budgets: Sequence[Any] = BUDGETS,
    overlaps: Iterable[Any] | None = None,
    progress: Progress | None = None,
) -> Frontier:
    """`shown` as it is, and with every choice. A call of `aside` gives what makes the variants of one budget: these share the
    passes that they have in common, and nothing keeps them once their points are known. Raises `OptionError`, and
    `MeasureError` where the step has no collectives that can be modelled."""
    trace = shown.program.whole
    ranks = ranks_of(trace)
    tried = configurations(shown.config, choices(shown.config, trace) if overlaps is None else overlaps, budgets)
    points, failed, count = [], [], sum(map(len, tried))
    for configs in tried:
        made = aside()
        for config in configs:
            if progress is not None:
                progress((len(points) + len(failed)) / count, config.as_code())
            variant = made(config)
            if error := next((f"{one.name}: {one.error}" for one in variant.passes if one.error), ""):
                failed.append((config.as_code(), error))
            else:
                points.append(point(variant, machine))
    if progress is not None:
        progress(1.0, f"tried {counted(count, 'configuration')}")
    how = on_mesh(trace, machine, shown.program.tf32).provenance
    return Frontier(machine, how, ranks, tuple(points), tuple(failed))


def point(variant: Switched, machine: Mesh) -> Point:
    """What a configuration comes to, with an update that writes in place."""
    trace, in_place = variant.whole, variant.whole_in_place
    times = on_mesh(trace, machine, variant.program.tf32)
    exposed_us = sum(times.us.get(node.name, 0.0) for node in trace.ops if is_recorded(node))
    return Point(variant.config, times.step_us, exposed_us, peak_bytes(in_place), saved_bytes(in_place))


def ranks_of(trace: Trace) -> int:
    """How many processes share the parameters of a step, or reduce its gradients. Raises `MeasureError` where it exchanges
    nothing."""
    check_recorded(trace)
    found = [node for node in trace.ops if is_recorded(node)]
    own = [node for node in found if gathers_parameters(node) or reduces_gradients(node)]
    return max(len(node.args[4]) for node in own or found)  # type: ignore[arg-type]


def choices(config: Config, trace: Trace) -> tuple[Any, ...]:
    """What `overlap` is worth trying with on a step beside the choice of `config`, whose options stay: its collectives moved,
    with gathered parameters as recorded, freed behind the forward, and kept."""
    found = [node for node in trace.ops if is_recorded(node)]
    own = None if config.overlap is None else dict(config.overlap)
    if any(map(gathers_parameters, found)):
        return tuple(resharded(config, one) for one in (None, True, False))
    return (own, own or True, (own or {}) | {"bucket_mb": 25.0}) if any(map(reduces_gradients, found)) else (own,)


def resharded(config: Config, reshard: bool | None) -> Any:
    """The option `overlap` of a configuration with gathered parameters freed behind the forward (True), kept (False) or as
    recorded (None). Its other options stay; where parameters are freed or kept, those of `MOVED` come to them."""
    own = dict(config.overlap or ())
    if reshard is not None:
        return MOVED | own | {"reshard": reshard}
    own.pop("reshard", None)
    return None if config.overlap is None else own or True


def configurations(config: Config, overlaps: Iterable[Any], budgets: Sequence[Any]) -> list[list[Config]]:
    """`config`, and it with every choice of `overlap` and of what is saved, each once: itself, then a list for each budget.
    Raises `OptionError`."""
    tried, found, before = list(overlaps), [[config]], {config}
    for budget in dict.fromkeys(budgets):
        made = dict.fromkeys(config.changed(overlap=overlap, **_budget(config, budget)) for overlap in tried)
        found.append([one for one in made if one not in before])
        before |= made.keys()
    return found


def _budget(config: Config, budget: Any) -> dict[str, Any]:
    """Options of `remat`, which a budget switches on."""
    return {"memory_budget": budget} | ({} if budget is None or config.is_on("remat") else {"remat": True})
