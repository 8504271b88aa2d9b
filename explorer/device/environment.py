"""What a program ran on and under which settings, as its capture remembers it.

Private to torch, seen on 2.11, 2.13 and 2.15: `torch._C._get_mkldnn_enabled`.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch


def environment() -> dict[str, str]:
    """Versions, device and flags that decide what a program runs."""
    found = {"torch": torch.__version__, "python": platform.python_version(), "device": "CPU"}
    found["tf32"] = str(allows_tf32(torch.backends.cuda.matmul))  # also without a GPU, for one that is modelled
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        found["conv tf32"] = str(allows_tf32(torch.backends.cudnn))
        found["capability"] = "{}.{}".format(*torch.cuda.get_device_capability())
        found["cudnn"] = "on" if torch.backends.cudnn.enabled else "off"
        found["cudnn benchmark"] = "on" if torch.backends.cudnn.benchmark else "off"
    slowing = {
        "CUDA_LAUNCH_BLOCKING": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "profiler": torch.autograd._profiler_enabled(),
    }
    attention = torch.backends.cuda
    if not (attention.flash_sdp_enabled() or attention.mem_efficient_sdp_enabled() or attention.cudnn_sdp_enabled()):
        found["fused attention"] = "off"
    if not torch._C._get_mkldnn_enabled():
        found["mkldnn"] = "off"
    return found | {name: "on" for name, is_on in slowing.items() if is_on}


def allows_tf32(backend: Any) -> bool:
    """Whether matmuls (`torch.backends.cuda.matmul`) or convolutions (`torch.backends.cudnn`) of float32 may run in TF32.

    torch raises where a program set `fp32_precision`, the newer form, and the older one is asked.
    """
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return backend.fp32_precision == "tf32"


def as_it_ran(found: Mapping[str, str]) -> AbstractContextManager[None]:
    """The flag that decides which kernels run on a CPU as it was where `environment` found it."""
    return torch.backends.mkldnn.flags(enabled=False) if found.get("mkldnn") == "off" else nullcontext()


def machine() -> str:
    """One line for the head of a notebook whose outputs are kept: the GPU or CPU, the versions and today's date."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({os.cpu_count()} cores)"
    installed = [name for name in ("triton", "tracefuse") if find_spec(name)]
    versions = [f"torch {torch.__version__}", *(f"{name} {version(name)}" for name in installed)]
    return ", ".join([device, *versions, f"Python {platform.python_version()}", f"{datetime.now(UTC):%Y-%m-%d}"])


def matmuls_cast() -> bool:
    """Whether matmuls of bfloat16 can yield float32 on the GPU that is in use; False where none is yet.

    `aten.mm.dtype` refuses GPUs older than 8.0, and some of AMD's libraries; seen on torch 2.11 and 2.13.
    """
    return torch.cuda.is_initialized() and torch.version.hip is None and torch.cuda.get_device_capability() >= (8, 0)
