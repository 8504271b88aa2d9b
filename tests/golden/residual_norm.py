import torch
import triton
import triton.language as tl

_knobs = triton.knobs.runtime
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


# fused_add_native_layer_norm_75e4b5: 2 ATen ops; reads 24 MiB, writes 24.03 MiB, each element counted once.
# x: bf16[8192, 768], 12 MiB
# residual: bf16[8192, 768], 12 MiB
# weight: bf16[768], 1.5 KiB
# bias: bf16[768], 1.5 KiB
# -> add: bf16[8192, 768], 12 MiB
# -> normed: bf16[8192, 768], 12 MiB
# -> mean: bf16[8192, 1], 16 KiB
# -> rstd: bf16[8192, 1], 16 KiB
@triton.jit
def fused_add_native_layer_norm_75e4b5_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, add_ptr, normed_ptr, mean_ptr, rstd_ptr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    col = tl.arange(0, COLS)[None, :]
    col_mask = col < 768
    x = tl.load(x_ptr + (row * 768 + col), mask=col_mask, other=0).to(tl.float32)
    residual = tl.load(residual_ptr + (row * 768 + col), mask=col_mask, other=0).to(tl.float32)

    # aten.add.Tensor
    add = x + residual

    # aten.native_layer_norm.default
    total = tl.sum(tl.where(col_mask, add, 0), axis=1, keep_dims=True)
    mean = total / 768
    centred = add - mean
    squares = centred * centred
    total_1 = tl.sum(tl.where(col_mask, squares, 0), axis=1, keep_dims=True)
    rstd = 1.0 / tl.sqrt(total_1 / 768 + 1e-05)

    weight = tl.load(weight_ptr + col, mask=col_mask, other=0).to(tl.float32)
    bias = tl.load(bias_ptr + col, mask=col_mask, other=0).to(tl.float32)

    # aten.native_layer_norm.default
    normed = (add - mean) * rstd * weight + bias

    tl.store(add_ptr + (row * 768 + col), add, mask=col_mask)
    tl.store(normed_ptr + (row * 768 + col), normed, mask=col_mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


def fused_add_native_layer_norm_75e4b5_reference(x, residual, weight, bias):
    add = torch.ops.aten.add.Tensor(x, residual)
    native_layer_norm = torch.ops.aten.native_layer_norm.default(add, [768], weight, bias, 1e-05)
    normed = native_layer_norm[0]
    mean = native_layer_norm[1]
    rstd = native_layer_norm[2]
    return add, normed, mean, rstd


launch_fused_add_native_layer_norm_75e4b5_kernel = launcher(
    fused_add_native_layer_norm_75e4b5_kernel, num_warps=4, ROWS=2, COLS=1024
)


def fused_add_native_layer_norm_75e4b5(x, residual, weight, bias):
    if not x.is_cuda and isinstance(fused_add_native_layer_norm_75e4b5_kernel, triton.JITFunction):
        return fused_add_native_layer_norm_75e4b5_reference(x, residual, weight, bias)
    if not x.is_contiguous():
        x = torch.empty_strided(x.shape, (768, 1), dtype=x.dtype, device=x.device).copy_(x)
    if not residual.is_contiguous():
        residual = torch.empty_strided(residual.shape, (768, 1), dtype=residual.dtype, device=residual.device).copy_(residual)
    if not weight.is_contiguous():
        weight = torch.empty_strided(weight.shape, (1,), dtype=weight.dtype, device=weight.device).copy_(weight)
    if not bias.is_contiguous():
        bias = torch.empty_strided(bias.shape, (1,), dtype=bias.dtype, device=bias.device).copy_(bias)
    add = empty((8192, 768), (768, 1), torch.bfloat16, x)
    normed = empty((8192, 768), (768, 1), torch.bfloat16, x)
    mean = empty((8192, 1), (1, 1), torch.bfloat16, x)
    rstd = empty((8192, 1), (1, 1), torch.bfloat16, x)
    launch_fused_add_native_layer_norm_75e4b5_kernel(4096, x, residual, weight, bias, add, normed, mean, rstd)
    return add, normed, mean, rstd
