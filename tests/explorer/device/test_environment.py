"""What a notebook with kept outputs says of the machine that it ran on."""

from __future__ import annotations

import re

import torch

import tracefuse
from tracefuse.device.environment import allows_tf32


def test_machine_names_the_device_the_versions_and_the_date() -> None:
    device, *versions, python, date = tracefuse.machine().split(", ")
    assert (
        device == torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else re.fullmatch(r"CPU \(\d+ cores\)", device)
    )
    assert f"torch {torch.__version__}" in versions
    assert python.startswith("Python 3.")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)


def test_whether_tf32_is_allowed_is_asked_in_the_form_that_the_program_set() -> None:
    """torch raises where `fp32_precision` was set and `allow_tf32` is asked."""

    class Newer:
        fp32_precision = "tf32"

        @property
        def allow_tf32(self) -> bool:
            raise RuntimeError("mix of the legacy and new APIs")

    newer = Newer()
    assert allows_tf32(newer)
    newer.fp32_precision = "ieee"
    assert not allows_tf32(newer)
    assert allows_tf32(torch.backends.cudnn) == torch.backends.cudnn.allow_tf32
