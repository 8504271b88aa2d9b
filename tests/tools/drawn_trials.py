"""How many random programs a test tries, and such a program beside itself in float64."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from drawn_programs import Drawn
from exactness import Differentiated
from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("TRACEFUSE_EXAMPLES", "0"))


def trying(examples: int) -> Callable:
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )


def differentiated(drawn: Drawn) -> Differentiated:
    return Differentiated(drawn, drawn.inputs(), exact=partial(drawn, casts_to=torch.float64))
