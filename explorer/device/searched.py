"""Convolutions by searched algorithms: registers what the operators do, and has their text for exported files.

The operators are those of `tracefuse.optimizers.decompose.searched`; what they do is `searched_runtime`.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tracefuse.device import searched_runtime
from tracefuse.device.copied import OperatorText, below_mark
from tracefuse.optimizers.decompose.searched import BACKWARD, FORWARD

TEXT = OperatorText(FORWARD, f"import threading\n\n{below_mark(Path(searched_runtime.__file__))}", (BACKWARD,))

_IMPLEMENTATION = torch.library.Library("tracefuse", "IMPL")
for _name in (TEXT.name, *TEXT.others):
    _IMPLEMENTATION.impl(_name, getattr(searched_runtime, _name), "CompositeExplicitAutograd")
