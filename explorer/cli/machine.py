"""`tracefuse cache` and `tracefuse peaks`: what is kept on this machine's disk, and what its devices do at best."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from tracefuse.build import cache
from tracefuse.build.cache_folders import KINDS, chosen_directory, trouble, version_name
from tracefuse.cli.command import Stages
from tracefuse.cli.flags import CACHE_OPTIONS, PEAKS_OPTIONS, values
from tracefuse.errors import BuildError, NotSupported, OptionError
from tracefuse.measure.peaks import peaks_of
from tracefuse.optimizers.trace import human_bytes
from tracefuse.text import aligned


def show_cache(arguments: argparse.Namespace) -> None:
    """Print where the disk cache is and what each version takes; with `--clear`, remove all of it.

    Raises `BuildError` where nothing can be kept: programs run there too, from a temporary folder.
    """
    chosen, clears = chosen_directory(), values(arguments, CACHE_OPTIONS)["clear"]
    print(f"{chosen}   (TRACEFUSE_CACHE names another place)", flush=True)
    if clears:
        print(f"removed {human_bytes(cache.clear(chosen))}", flush=True)
    if problem := trouble(chosen):
        raise BuildError(problem)
    if not clears:
        print(_kept(chosen))


def _kept(chosen: Path) -> str:
    limit = cache.size_limit()
    if not chosen.exists():
        return "nothing is kept yet: the folder does not exist"
    found = cache.entries(chosen)
    taken, grace = human_bytes(sum(one.nbytes for one in found)), f"{cache.GRACE_S / 60:.0f} minutes"
    bound = f"TRACEFUSE_CACHE_SIZE sets the bound; what the last {grace} used may pass it"
    total = f"{taken} of at most {human_bytes(limit)}   ({bound})"
    return f"{total}\n\n{_versions_table(found)}" if found else total


def _versions_table(found: Sequence[cache.Entry]) -> str:
    rows: list[tuple[str, ...]] = [("version", *KINDS, "size", "")]
    for name in sorted({one.version for one in found}):
        mine = [one for one in found if one.version == name]
        counts = (str(sum(one.kind == kind for one in mine)) for kind in KINDS)
        size = human_bytes(sum(one.nbytes for one in mine))
        rows.append((name, *counts, size, "in use" if name == version_name() else ""))
    return aligned(rows)


def show_peaks(arguments: argparse.Namespace) -> None:
    """Print the measured peaks of a device, which are measured first where they are not known, or with `--again`."""
    chosen = values(arguments, PEAKS_OPTIONS)
    device = chosen["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    print(peaks_of(known_device(device), again=chosen["again"], progress=Stages(total=1).progress))


def known_device(name: str, cuda_graph: bool = False) -> str:
    """`name` of `--device`. Raises `OptionError` for what is no device, `NotSupported` for one that is not here."""
    if name not in ("cpu", "cuda"):
        raise OptionError(f"--device {name} is unknown: choose cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise NotSupported("torch sees no CUDA GPU on this machine: leave --device out to run on the CPU")
    if cuda_graph and name == "cpu":
        raise NotSupported(
            "--cuda-graph needs a CUDA GPU: add --device cuda where there is one, or leave --cuda-graph out"
        )
    return name
