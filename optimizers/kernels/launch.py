"""Generated launchers reach the GPU through text that stands once above the kernels of a file.

`kernel[(programs,)](*tensors, ...)` is Triton's public launch. At each call it looks up type and alignment of every argument,
builds a key of that as text, describes the launch to hooks that nobody set, and asks the driver whether each pointer is
one of the GPU's. In a generated file types, sizes and constants never change. What may change is

    the GPU that the tensors are on         machine code is loaded once per GPU
    whether 16 divides each address         if it does, the machine code reads 16 bytes at a time
    the stream, and the current GPU         a launch must go to the tensors' GPU and to this thread's stream of it
    hooks                                   a profiler may be switched on at any time

so `launch` keeps the machine code by the first two and asks for the others. It goes the public way the first time, whenever
a hook is set, under the interpreter (which compiles nothing, so that there is nothing to keep), and on versions of Triton
that it does not know.

Private names: `CompiledKernel.run(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook,
*arguments)`, which takes addresses for tensors and constants by position; `HookChain.calls`. Seen on triton 3.6, 3.7.1 and
3.9. `torch._C._cuda_getCurrentRawStream`, seen on torch 2.11, 2.13 and 2.15; where it is missing, its public twin serves.
"""

from __future__ import annotations

LAUNCH = '''_knobs = triton.knobs.runtime
_is_known = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")) and torch.version.hip is None
_machine_code = {}  # By the kernels' `id`: all are of this file, and live as long as it does.


def _public_stream(device):
    return torch.cuda.current_stream(device).cuda_stream


_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def launch(kernel, programs, *tensors, num_warps, **blocks):
    """`kernel[(programs,)](*tensors, **blocks, num_warps=num_warps)` on the GPU of the first tensor, at less cost to the host.

    The machine code of an earlier launch serves again where the same addresses are multiples of 16.
    """
    device = tensors[0].get_device()
    if device >= 0 and torch.cuda.current_device() != device:
        with torch.cuda.device(device):
            return launch(kernel, programs, *tensors, num_warps=num_warps, **blocks)
    # Triton refuses by name a tensor that lies elsewhere; as an address it could not.
    addresses = [t.data_ptr() for t in tensors if t.get_device() == device]
    constants = blocks.values()
    key = (id(kernel), device, num_warps, *constants, *[a % 16 == 0 for a in addresses])
    found = _machine_code.get(key)
    before, after = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    if found is None or getattr(before, "calls", before) or getattr(after, "calls", after):
        # Triton 3.9 warns where fused multiply-adds are not asked for, and later versions leave them out.
        found = kernel[(programs,)](*tensors, **blocks, num_warps=num_warps, enable_fp_fusion=True)
        if _is_known and len(addresses) == len(tensors):
            _machine_code[key] = found
        return
    found.run(
        programs, 1, 1, _stream(device), found.function, found.packed_metadata, None, None, None, *addresses, *constants
    )
'''

HEADER = f"import torch\nimport triton\nimport triton.language as tl\n\n{LAUNCH}"
"""What the text of a kernel needs above it."""
