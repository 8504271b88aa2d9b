"""Runs attention's backward into one buffer; its text below the mark is copied into exported files that call it.

cuDNN's Python frontend (`pip install nvidia-cudnn-frontend`, `import cudnn`) describes the backward as a graph of one op whose
results have the strides of ranges of the buffer; `aten`'s own call of cuDNN can only allocate three tensors. A graph is built
once per thread, GPU, layout and scale, since building one is slow, and then takes addresses. What torch's forward
saves is what cuDNN asks for, whichever kernel wrote it: the natural logarithm of each row's sum of exponentials, in float32.

Where the frontend is missing or refuses, ATen's backward runs and its gradients are copied: the same numbers, for the time
of a copy, and one warning that says why.

Public API of the frontend, read in 1.9, 1.14 and 1.32: `create_handle`, `set_stream`, `pygraph(...)` with `tensor`,
`sdpa_backward`, `validate`, `build_operation_graph`, `create_execution_plans`, `check_support`, `build_plans`,
`get_workspace_size`, `execute`; `cudnnGraphNotSupportedError`.
"""

import threading
import warnings

import torch

# --- copied into exported files that pack gradients of attention ---
_packing = (
    threading.local()
)  # Plans and handles are built anew in each thread: cuDNN does not promise that they can be shared.
_told = set()
UIDS = tuple(range(1, 10))


def packed_scaled_dot_product_attention_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, *, kind, is_causal, scale, size, stride,
    offsets, query_stride, key_stride, value_stride,
):  # fmt: skip
    """The gradients of query, key and value, side by side in one new tensor of `size` and `stride`."""
    packed = torch.empty_strided(size, stride, dtype=query.dtype, device=query.device)
    strides = (query_stride, key_stride, value_stride)
    layouts = zip((query, key, value), strides, offsets, strict=True)
    parts = [packed.as_strided(t.shape, steps, offset) for t, steps, offset in layouts]
    tensors = (query, key, value, out, grad_out, logsumexp)
    reason = why_copied(kind) or write_packed(tensors, parts, is_causal, scale)
    if reason is None:
        return packed
    if kind != "cpu" and reason not in _told:
        _told.add(reason)
        warnings.warn(f"gradients of attention are copied into one tensor: {reason}", stacklevel=2)
    seeds = (philox_seed, philox_offset)
    for part, gradient in zip(parts, attention_backward(kind, tensors, seeds, is_causal, scale), strict=True):
        part.copy_(gradient)
    return packed


def attention_backward(kind, tensors, seeds, is_causal, scale):
    """(dq, dk, dv) of ATen's operator that `kind` names."""
    query, key, value, out, grad_out, logsumexp = tensors
    forward = (grad_out, query, key, value)
    if kind == "cpu":
        name, arguments = "flash_attention_for_cpu", (*forward, out, logsumexp, 0.0, is_causal)
    elif kind == "efficient":
        wanted = (True, True, True, False)
        name, arguments = "efficient_attention", (*forward, None, out, logsumexp, *seeds, 0.0, wanted, is_causal)
    else:
        lengths = (None, None, query.shape[-2], key.shape[-2], 0.0, is_causal)
        seeded = (*seeds, None, *lengths) if kind == "cudnn" else (*lengths, *seeds)
        name, arguments = f"{kind}_attention", (*forward, out, logsumexp, *seeded)
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward").default
    return operator(*arguments, scale=scale)[:3]


def why_copied(kind):
    """Why cuDNN's frontend is of no use here, ending with what to do about it; None if it may be tried."""
    if kind == "cpu":
        return "on a CPU no attention writes into one tensor: use a GPU"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for: torch.use_deterministic_algorithms(False) if they need not be"
    return why_no_frontend()


def why_no_frontend():
    """Why cuDNN's frontend cannot be imported, ending with the remedy; None if it can. Looked up once per thread."""
    if not hasattr(_packing, "no_frontend"):
        _packing.graphs, _packing.handles = {}, {}
        try:
            import cudnn

            # Something else may be called cudnn.
            has_it = all(hasattr(cudnn, name) for name in ("pygraph", "create_handle", "cudnnGraphNotSupportedError"))
            _packing.no_frontend = None if has_it else "`cudnn` is no frontend: pip install -U nvidia-cudnn-frontend"
        except ModuleNotFoundError as error:
            missing = (
                "cuDNN's frontend is" if error.name == "cudnn" else f"{error.name}, which cuDNN's frontend needs, is"
            )
            _packing.no_frontend = f"{missing} not installed: pip install nvidia-cudnn-frontend"
        except (ImportError, OSError, RuntimeError) as error:
            _packing.no_frontend = f"cuDNN's frontend does not load ({error}): pip install -U nvidia-cudnn-frontend"
    return _packing.no_frontend


def write_packed(tensors, parts, is_causal, scale):
    """Let cuDNN compute the gradients into `parts`, on the current stream. Returns None, or why it cannot."""
    device = tensors[0].device
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return write_packed(tensors, parts, is_causal, scale)
    buffers = [*map(readable_rows, tensors[:5]), unpadded(tensors[5], tensors[0].shape[-2]), *parts]
    if any(t.data_ptr() % 16 for t in buffers):
        return "a tensor of attention does not begin at a multiple of 16 bytes: make it contiguous"
    layouts = [(t.shape, t.stride(), t.dtype) for t in buffers]
    key = (device.index, is_causal, scale, *layouts)
    found = _packing.graphs.get(key)
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return "a CUDA graph is being recorded before attention has run once: run it once before"
        found = _packing.graphs[key] = packing_graph(device, layouts, is_causal, scale)
    if isinstance(found, str):
        return found
    graph, nbytes = found
    workspace = torch.empty(nbytes, dtype=torch.uint8, device=device)
    graph.execute(dict(zip(UIDS, buffers, strict=True)), workspace, handle=packing_handle(device))
    return None


def readable_rows(tensor):
    """`tensor` with its rows in one piece and no element shared, as cuDNN reads it; the gradient of a sum is expanded."""
    steps = tensor.stride()
    if steps[-1] == 1 and 0 not in steps:
        return tensor
    is_expanded = any(step == 0 and size > 1 for size, step in zip(tensor.shape, steps, strict=True))
    return tensor.contiguous() if is_expanded or steps[-1] != 1 else tensor


def unpadded(stats, length):
    """What the forward saved of each row, `[B, H, T, 1]` in one piece: a kernel may have padded its length."""
    if stats.shape[2:] == (length, 1) and stats.is_contiguous():
        return stats
    return stats.reshape(*stats.shape[:2], -1)[:, :, :length, None].contiguous()


def packing_handle(device):
    """This thread's cuDNN handle of `device`, the current GPU, set to the current stream."""
    import cudnn

    stream = torch.cuda.current_stream(device).cuda_stream
    handle, last = _packing.handles.get(device.index) or (cudnn.create_handle(), None)
    if stream != last:  # asks the driver several times
        cudnn.set_stream(handle=handle, stream=stream)
        _packing.handles[device.index] = handle, stream
    return handle


def packing_graph(device, layouts, is_causal, scale):
    """(cuDNN's graph, bytes of its workspace) for tensors of `layouts`, or why there is none. Slow: once per layout."""
    import cudnn

    dtype = layouts[0][2]
    if dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN packs bfloat16 and float16, not {dtype}: run it in one of them"
    try:
        graph = described_graph(packing_handle(device), layouts, is_causal, scale)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
    except (cudnn.cudnnGraphNotSupportedError, ImportError, RuntimeError, ValueError) as error:
        return f"cuDNN refuses it ({error}): a newer nvidia-cudnn-frontend or cuDNN may not"
    return graph, graph.get_workspace_size()


def described_graph(handle, layouts, is_causal, scale):
    """cuDNN's graph of one op that takes tensors 1 to 6 and writes 7 to 9, in the order of `layouts`."""
    import cudnn

    f32 = cudnn.data_type.FLOAT
    io = cudnn.data_type.BFLOAT16 if layouts[0][2] is torch.bfloat16 else cudnn.data_type.HALF
    head_dim = layouts[0][0][-1]
    shapes = [(list(shape), list(stride)) for shape, stride, _ in layouts]
    graph = cudnn.pygraph(io_data_type=io, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    inputs = {
        name: graph.tensor(name=name, dim=dim, stride=stride, data_type=f32 if name == "stats" else io).set_uid(uid)
        for uid, name, (dim, stride) in zip(UIDS, ("q", "k", "v", "o", "dO", "stats"), shapes, strict=False)
    }
    scale = head_dim**-0.5 if scale is None else scale
    gradients = graph.sdpa_backward(**inputs, attn_scale=scale, use_causal_mask=is_causal)
    for uid, gradient, (dim, stride) in zip(UIDS[6:], gradients, shapes[6:], strict=True):
        gradient.set_uid(uid).set_output(True).set_dim(dim).set_stride(stride).set_data_type(io)
    return graph
