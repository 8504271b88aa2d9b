"""What a notebook with kept outputs says of the machine that it ran on."""

from __future__ import annotations

import re

import torch

import tracefuse


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
