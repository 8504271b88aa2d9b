"""What can be chosen about the collectives of a step: another schedule of the same exchange.

    bucket_mb      gradients are reduced in calls of at least so many MiB, each as soon as its last gradient is there
    prefetch       gathers start so many gathers before computing waits for them; 0: right where they are waited for
    second_group   gathers have a process group of their own, so that none waits in line behind a reduction
    reshard        parameters are freed behind the forward and gathered again in the backward, or kept

What is None stays as the program was recorded. With any choice computing waits for gathers and reductions where it needs them,
as a program does whose collectives have a stream of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from tracefuse.optimizers.errors import MeshError
from tracefuse.optimizers.overlap.schedule import Collective, Part, Schedule


@dataclass(frozen=True)
class Options:
    """The choices above. Raises `MeshError` for sizes and depths that are none."""

    bucket_mb: float | None = field(
        default=None,
        metadata={"help": "reduce gradients in calls of at least so many MiB, each as soon as its last is there"},
    )
    prefetch: int | None = field(default=None, metadata={"help": "start a gather so many gathers before it is needed"})
    second_group: bool = field(default=False, metadata={"help": "let gathers have a process group of their own"})
    reshard: bool | None = field(
        default=None,
        metadata={"help": "true: free gathered parameters behind the forward and gather them again; false: keep them"},
    )

    def __post_init__(self) -> None:
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise MeshError(f"bucket_mb={self.bucket_mb} is no size: give MiB above 0, such as 25")
        if self.prefetch is not None and self.prefetch < 0:
            raise MeshError(f"prefetch={self.prefetch} is no depth: give 0 or more gathers")

    @property
    def is_as_recorded(self) -> bool:
        return self == Options()

    def __str__(self) -> str:
        if self.is_as_recorded:
            return "as recorded"
        default = vars(Options())
        return ", ".join(f"{name}={value}" for name, value in vars(self).items() if value is not default[name])


def chosen(schedule: Schedule, options: Options) -> Schedule:
    """The schedule with the options applied."""
    if options.is_as_recorded:
        return schedule
    found = [_late(one) for one in schedule.collectives]
    if options.reshard is not None:
        found = sorted(_resharded(found, schedule, options.reshard), key=lambda one: one.starts)
    if options.bucket_mb is not None:
        found = list(_bucketed(found, options.bucket_mb * 2**20))
    if options.prefetch is not None:
        found = list(_prefetched(found, options.prefetch))
    return replace(schedule, collectives=tuple(sorted(found, key=lambda one: (one.starts, one.waits))))


def _late(one: Collective) -> Collective:
    """Computing waits for it where it has to."""
    return one if one.role == "other" else replace(one, waits=max(one.needed, one.starts))


# --- gathers ----------------------------------------------------------------------------------------------------------


def _prefetched(all_: Sequence[Collective], depth: int) -> Iterator[Collective]:
    gathers = [one for one in all_ if one.role == "gather"]
    yield from (one for one in all_ if one.role != "gather")
    for at, one in enumerate(gathers):
        starts = one.waits if depth == 0 else gathers[at - depth].waits if at >= depth else 0
        yield replace(one, starts=min(starts, one.waits))


def _resharded(all_: Sequence[Collective], schedule: Schedule, reshard: bool) -> Iterator[Collective]:
    """The gathers of the backward left out, or put in where there is none."""
    forward = {one.serves for one in all_ if one.role == "gather" and one.phase == "forward"}
    again = {one.serves: one for one in all_ if one.role == "gather" and one.phase != "forward"}
    for one in all_:
        second = again.get(one.serves)
        if one.role != "gather" or one.serves not in forward:
            yield one
        elif one.phase != "forward":
            if reshard:
                yield one
        elif not reshard:
            yield replace(one, read_at=(*one.read_at, *(second.read_at if second else ())))
        else:
            yield from [one] if second else _twice(one, schedule.backward_from)


def _twice(one: Collective, backward_from: int) -> Iterator[Collective]:
    """A gather, and a second one in the backward, where what it gave is read there."""
    then = tuple(place for place in one.read_at if place >= backward_from)
    yield replace(one, read_at=tuple(place for place in one.read_at if place < backward_from))
    if then:
        at = dict.fromkeys(("starts", "waits", "needed"), then[0])
        yield replace(one, name=f"{one.name}_again", phase="backward", read_at=then, **at)


# --- reductions -------------------------------------------------------------------------------------------------------


def _bucketed(all_: Iterable[Collective], most_nbytes: float) -> Iterator[Collective]:
    """All-reduces are taken apart into their gradients, and these put into buckets in the order in which they are there;
    reduce-scatters, which are laid out by the module, are joined whole."""
    pools: dict[tuple[str, str], list[tuple[Part, Collective]]] = defaultdict(list)
    for one in all_:
        if one.role != "reduction":
            yield one
        elif one.kind == "all_reduce":
            pools[one.kind, one.group] += [(part, one) for part in one.parts]
        else:
            pools[one.kind, one.group].append((Part(one.nbytes, one.starts), one))
    for pool in pools.values():
        bucket: list[tuple[Part, Collective]] = []
        for part in sorted(pool, key=lambda pair: pair[0].ready):
            bucket.append(part)
            if sum(one.nbytes for one, _ in bucket) >= most_nbytes:
                yield _bucket(bucket)
                bucket = []
        if bucket:
            yield _bucket(bucket)


def _bucket(pairs: Sequence[tuple[Part, Collective]]) -> Collective:
    first, starts = pairs[0][1], max(part.ready for part, _ in pairs)
    waits = max(starts, min(one.waits for _, one in pairs))
    return replace(
        first,
        name=f"bucket of {len(pairs)} from {first.name}" if len(pairs) > 1 else first.name,
        nbytes=sum(part.nbytes for part, _ in pairs),
        serves=", ".join(dict.fromkeys(one.serves for _, one in pairs)),
        parts=tuple(part for part, _ in pairs),
        starts=starts,
        waits=waits,
        needed=waits,
        read_at=tuple(sorted({place for _, one in pairs for place in one.read_at})),
    )
