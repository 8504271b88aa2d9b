"""Generated launchers reach the GPU through text that stands once above the kernels of a file.

`kernel[(programs,)](*tensors, ...)` is Triton's public launch. At each call it looks up type and alignment of every argument,
builds a key of that as text, describes the launch to hooks that nobody set, and asks the driver whether each pointer is
one of the GPU's. In a generated file types, sizes and constants never change. What may change is

    the GPU that the tensors are on         machine code is loaded once per GPU
    whether 16 divides each address         if it does, the machine code reads 16 bytes at a time
    the stream, and the current GPU         a launch must go to the tensors' GPU and to this thread's stream of it
    hooks                                   a profiler may be switched on at any time

so `launcher` binds what never changes once, the sizes that a kernel takes as arguments among it, keeps the machine code by the
first two and asks for the others. It goes the public way the first time, whenever a hook is set, under the interpreter (which
compiles nothing, so that there is nothing to keep), and on versions of Triton that it does not know.

Private names: `CompiledKernel.run(x, y, z, stream, function, packed_metadata, launch_metadata, enter_hook, exit_hook,
*arguments)`, which takes by position addresses for tensors, integers, and constants, an integer that is 1 among them;
`HookChain.calls`. Seen on triton 3.6, 3.7.1 and 3.9. On 3.6 `CompiledKernel.run.launch`, the function in C which that ends in,
with four more arguments for what our kernels do not have: cooperative grids, dependent launches and scratch memory.
`torch._C._cuda_getCurrentRawStream` and `torch._C._cuda_getDevice`, seen on torch 2.11, 2.13 and 2.15, and
`torch._C._dynamo.guards._empty_strided_cuda(shape, stride, dtype)`, which allocates on the current GPU without the dispatcher,
seen on torch 2.11 and 2.13; where they are missing, their public twins serve.
"""

from __future__ import annotations

from collections.abc import Mapping

LINE_LENGTH = 110

LAUNCH = '''_knobs = triton.knobs.runtime
_is_known = triton.__version__.startswith(("3.6.", "3.7.", "3.8.", "3.9.")) and torch.version.hip is None
_is_flat = triton.__version__.startswith("3.6.")


def _public_stream(device):
    return torch.cuda.current_stream(device).cuda_stream


_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)
_current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_is_quick = hasattr(_guards, "_empty_strided_cuda")


def empty(shape, stride, dtype, like):
    """`torch.empty_strided` on the device of `like`, at less cost to the host; `shape` and `stride` are tuples."""
    device = like.get_device()
    if _is_quick and 0 <= device == _current_device():
        return _guards._empty_strided_cuda(shape, stride, dtype)
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _call_of(machine_code):
    """What to call for a launch, the function on the GPU, and what stands between that and the addresses."""
    run, function = machine_code.run, machine_code.function
    of_hooks = (machine_code.packed_metadata, None, None, None)
    if _is_flat and not (run.global_scratch_size or run.profile_scratch_size):
        return run.launch, function, (run.launch_cooperative_grid, run.launch_pdl, None, None, *of_hooks)
    return run, function, of_hooks


def launcher(kernel, num_warps, numbers=(), **blocks):
    """A function of `programs` and `*tensors`, which is
    `kernel[(programs,)](*tensors, *numbers, **blocks, num_warps=num_warps)` on the GPU of the first tensor, at less cost to
    the host.

    The machine code of an earlier launch serves again where the same addresses are multiples of 16.
    """
    calls = {}  # By GPU where all addresses are, as torch's memory begins at multiples of 512; else by GPU and which are.
    constants = (*numbers, *blocks.values())

    def launch(programs, *tensors):
        device = tensors[0].get_device()
        if 0 <= device != _current_device():
            with torch.cuda.device(device):
                return launch(programs, *tensors)
        key = device
        addresses = [at for t in tensors if t.get_device() == device and not (at := t.data_ptr()) & 15]
        if len(addresses) < len(tensors):
            # Triton refuses by name a tensor that lies elsewhere; as an address it could not.
            addresses = [t.data_ptr() for t in tensors if t.get_device() == device]
            key = (device, *[at % 16 == 0 for at in addresses])
        found = calls.get(key)
        before, after = _knobs.launch_enter_hook, _knobs.launch_exit_hook
        if found is None or getattr(before, "calls", before) or getattr(after, "calls", after):
            # Triton 3.9 warns where fused multiply-adds are not asked for, and later versions leave them out.
            made = kernel[(programs,)](*tensors, *numbers, **blocks, num_warps=num_warps, enable_fp_fusion=True)
            if _is_known and made is not None and len(addresses) == len(tensors):
                calls[key] = _call_of(made)
            return
        call, function, between = found
        call(programs, 1, 1, _stream(device), function, *between, *addresses, *constants)

    return launch
'''

HEADER = f"import torch\nimport triton\nimport triton.language as tl\n\n{LAUNCH}"
"""What the text of a kernel needs above it."""


def bound_launch(function: str, num_warps: int, blocks: Mapping[str, int], numbers: tuple[int, ...] = ()) -> list[str]:
    """Lines that define `launch_FUNCTION(programs, *tensors)` behind the jitted `function`, which takes `numbers` between its
    pointers and its blocks."""
    start, constants = f"launch_{function} = launcher(", [f"{name}={size}" for name, size in blocks.items()]
    passed = [f"numbers={numbers}"] if numbers else []
    arguments = ", ".join([function, f"num_warps={num_warps}", *passed, *constants])
    whole = f"{start}{arguments})"
    return [whole] if len(whole) <= LINE_LENGTH else [start, f"    {arguments}", ")"]
