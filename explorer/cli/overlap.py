"""`tracefuse overlap RANK0.tfz --mesh 8xH100,nvlink`: what a recorded step of one rank would take on a described machine."""

from __future__ import annotations

import argparse

from tracefuse.cli.flags import OVERLAP_OPTIONS, values
from tracefuse.errors import OptionError
from tracefuse.loaded import load
from tracefuse.optimizers.overlap.options import Options


def show_overlap(arguments: argparse.Namespace) -> None:
    """Print the modelled step of a session file, as recorded and with the choices. Raises `OptionError`, `MeshError`,
    `MeasureError`, and what `load` raises."""
    chosen = values(arguments, OVERLAP_OPTIONS)
    if len(arguments.files) != 1:
        raise OptionError(
            "tracefuse overlap takes one session file, such as rank0.tfz: `c.save(path)` writes it on a rank"
        )
    if chosen["mesh"] is None:
        raise OptionError("--mesh says which machine to model, such as --mesh 8xH100,nvlink")
    reshard = {None: None, "on": True, "off": False}.get(chosen["reshard"], chosen["reshard"])
    if isinstance(reshard, str):
        raise OptionError(f"--reshard {reshard} is neither on nor off")
    options = Options(chosen["bucket_mb"], chosen["prefetch"], chosen["second_group"], reshard)
    variant = load(arguments.files[0]).optimize()
    print(variant.baseline.overlap(chosen["mesh"], **({} if options.is_as_recorded else vars(options))), flush=True)
