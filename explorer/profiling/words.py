"""What is said of each cause of idle time: the finding's id, its title, and what to do."""

from __future__ import annotations

from typing import NamedTuple

from tracefuse.findings.kinds import KINDS
from tracefuse.timeline.causes import HOST, IDLE
from tracefuse.timeline.host_calls import ALLOCATION, LOADING, SLOW_LAUNCH, SYNCHRONIZATION
from tracefuse.timeline.named import CHECKPOINT, LOADER, LOGGING

UNUSED = "find-unused-parameters"


class Words(NamedTuple):
    """What is said of a cause: the finding's id, its title after "the GPU is idle", and what to do."""

    id: str
    title: str
    fix: str


WORDS = {
    LOADER: Words(
        "data-loading",
        "while the host makes or awaits the next batch",
        "load ahead in worker processes (num_workers, prefetch_factor, persistent_workers=True), pin their memory "
        "(pin_memory=True), and do what is the same in every epoch once, before",
    ),
    CHECKPOINT: Words(
        "synchronous-checkpoint",
        "while a checkpoint is saved",
        "copy the state to pinned memory and write it beside training (torch.distributed.checkpoint.async_save, or a thread "
        "that saves a copy), and save less often",
    ),
    LOGGING: Words(
        "synchronous-logging",
        "while the host logs",
        "log every many steps instead of each, and hand the values to a thread that writes them",
    ),
    SYNCHRONIZATION: Words(
        "host-sync",
        "after the host waited for it",
        "keep it a tensor (torch.where instead of if), read it once every many steps, or copy it with non_blocking=True "
        "and read it a step later",
    ),
    ALLOCATION: Words(
        "driver-allocation",
        "while the host allocates or frees its memory",
        "leave out torch.cuda.empty_cache(), and let shapes repeat, so that the caching allocator has what is asked for",
    ),
    LOADING: Words(
        "kernel-loading",
        "while the host loads kernels",
        "run the same step once before: a kernel's first use loads it",
    ),
    SLOW_LAUNCH: Words(
        "slow-launch-calls",
        "while a launch call takes unusually long",
        "run the same step once before: the first launch of a kernel loads it",
    ),
    IDLE: Words(
        "host-idle",
        "while no operator runs on the host",
        "do what Python does there before or beside the step: load data in workers and ahead (num_workers, pin_memory, "
        "prefetch), log less often",
    ),
    HOST: Words(
        "launch-bound",
        "because launches come later than it needs them",
        "launch fewer and larger kernels: tracefuse's `fuse`, torch.compile, larger batches; or replay CUDA graphs",
    ),
}
PAGEABLE_WORDS = Words(
    "pageable-copy", "", "keep the data on the GPU, or copy from and to pinned memory with non_blocking=True"
)

LOOKED_FOR = tuple(KINDS[one].says for one in (*(words.id for words in (*WORDS.values(), PAGEABLE_WORDS)), UNUSED))
"""What a run is examined for, in the words of a list."""
