"""What the compiler makes of one kernel, when somebody asks."""

from __future__ import annotations

from typing import Any

from tracefuse.compile import HOPPER, resources
from tracefuse.errors import OptionError
from tracefuse.optimizers.kernel import Kernel
from tracefuse.variant import Variant


def kernel_called(variant: Variant, name: str) -> Kernel:
    """The kernel called `name`. Raises `OptionError` if the variant has none."""
    kernel = next((one for one in variant.kernels if one.name == name), None)
    if kernel is None:
        raise OptionError(f"these passes make no kernel {name!r}: select one of those that are listed")
    return kernel


def inspect_kernel(variant: Variant, name: str) -> dict[str, Any]:
    """Registers, shared memory and spills of the kernel called `name`, as the wire format has them: compiled for Hopper, with
    or without a GPU. Raises `OptionError` for a kernel that the variant has not, `BuildError` where Triton refuses it."""
    found = resources(kernel_called(variant, name))
    return {
        "registers": found.registers,
        "shared_bytes": found.shared_bytes,
        "spills": found.spills,
        "target": f"sm_{HOPPER}",
    }
