"""Runs convolutions by searched algorithms; its text below the mark is copied into exported files that call it.

`torch.backends.cudnn.benchmark` lets cuDNN time its algorithms where a convolution first runs. torch keeps one for each
convolution of a process by shapes, strides, dtype, alignment of the addresses, and what was allowed: TF32, and whether it must
be `deterministic`. So that a guess is not found which eager PyTorch has left there, the search is among the deterministic
ones; and the same bits come out each time. A convolution that a CUDA graph records first, as
of an address of other alignment, is guessed: a search waits for the GPU, which a recording does not allow.

Private names: `torch._C._set_cudnn_benchmark` and its like, which `torch.backends.cudnn` sets its flags with. Those raise once
torch's own test tools are imported (`disable_global_flags`), and `flags()` sets all of them, TF32 among them, in one of two
ways that exclude each other. Seen on torch 2.11, 2.13 and 2.14.

Source: `aten/src/ATen/native/cudnn/Conv_v8.cpp` (`CacheKeyFused`, `run_single_conv`), read in torch 2.11 and 2.13.
"""

import threading

import torch

# --- copied into exported files whose convolutions have their algorithms searched ---
_searching = threading.Lock()  # The flags are a process's; autograd calls backwards from threads of its own.


def searched_convolution(*arguments):
    """A convolution by the fastest deterministic algorithm that cuDNN has."""
    return with_search(torch.ops.aten.convolution.default, arguments)


def searched_convolution_backward(*arguments):
    """The gradients of a convolution by the fastest deterministic algorithms that cuDNN has."""
    return with_search(torch.ops.aten.convolution_backward.default, arguments)


def with_search(operator, arguments):
    """Call `operator` while cuDNN searches; as it is where the process searches anyway."""
    with _searching:
        if torch._C._get_cudnn_benchmark():
            return operator(*arguments)
        is_deterministic = torch._C._get_cudnn_deterministic()
        is_recording = arguments[0].is_cuda and torch.cuda.is_current_stream_capturing()
        try:
            torch._C._set_cudnn_benchmark(not is_recording)
            torch._C._set_cudnn_deterministic(True)
            return operator(*arguments)
        finally:
            torch._C._set_cudnn_benchmark(False)
            torch._C._set_cudnn_deterministic(is_deterministic)
