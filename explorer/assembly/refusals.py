"""What a trace cannot hold, refused by name when the trace is asked for; recording it never disturbs the program."""

from __future__ import annotations

import traceback
from collections.abc import Mapping

import torch
from torch._ops import HigherOrderOperator

from tracefuse.errors import CaptureError
from tracefuse.lines.statements import gives_memory
from tracefuse.optimizers.origins import Source
from tracefuse.recording.calls import Call, Recording, Value
from tracefuse.recording.frames import is_torchs_or_ours

REMEDIES = {
    "sparse": "Keep it dense (`.to_dense()`, `nn.Embedding(sparse=False)`)",
    "nested": "Pad it (`torch.nested.to_padded_tensor`)",
    "quantized": "Use `torch.fake_quantize_per_tensor_affine`, or integers and scales as tensors of their own",
    "batched": "Use `torch.func.vmap`, or a loop over the gradients (`is_grads_batched=False`, `vectorize=False`)",
    "uninitialised": "Call the model once before the capture",
    "fake": "Leave `FakeTensorMode`; a program that is too large to run is shown with `device='meta'`",
    "opaque": "Switch that backend's layout off (`torch.backends.mkldnn.flags(enabled=False)`)",
}
"""For each kind of tensor that is not plain and dense."""


_UNANSWERED = "symm_mem::", "_c10d_functional::batch_p2p_ops", "_c10d_functional::isend", "_c10d_functional::irecv"
"""Exchanges whose operators do not say what this process receives."""


def check_supported(recording: Recording, settings: Mapping[str, str]) -> None:
    """Raises `CaptureError` with the op, the line and the remedy where the program computes with tensors that are no plain
    dense ones, or by ops that no trace can hold. `settings` are what its modules were asked for beside their work."""
    for kernel, source in recording.launches:
        raise CaptureError(
            f"the program launches the kernel {kernel} itself{where(source)}, and no operator tells what it writes. "
            "Wrap the launch in `torch.library.triton_op` or `custom_op`, or capture a smaller piece."
        )
    for update in recording.updates:
        if update.kind == "SparseAdam":
            raise CaptureError(
                f"SparseAdam{where(update.source)} works on sparse gradients, and a trace holds dense ones only. Make them "
                "dense (`nn.Embedding(sparse=False)`), and take another optimizer, such as `torch.optim.AdamW(…, fused=True)`."
            )
    for call in recording.calls:
        if isinstance(call.func, HigherOrderOperator):
            raise CaptureError(_of_higher_order(call))
        if any(isinstance(argument, torch.UntypedStorage) for argument in call.args):
            raise CaptureError(
                f"{call.func}{where(call.origin.source)} works on a storage, which may be written to by no operator. Write to "
                "the tensor (`tensor.zero_()`), or capture a smaller piece."
            )
        if call.func._schema.name.startswith(_UNANSWERED):
            raise CaptureError(
                f"{call.func}{where(call.origin.source)} talks to other processes, and does not say what it receives. Use a "
                "collective of `torch.distributed` in its place, or capture the module before it is wrapped."
            )
        _check_dense([*call.reads(), *call.out_values()], call)
    _check_dense([given for _, given, _ in recording.roots if given is not None], "a backward starts from")
    if recording.unseen and "DataParallel" in settings:
        raise CaptureError(
            f"nn.DataParallel runs copies of the model in {settings['DataParallel']}, one for each GPU, and only the thread "
            "that captures is recorded. Let the program see one GPU (`CUDA_VISIBLE_DEVICES=0`), or start a process for each "
            "(`torchrun --nproc-per-node`): Hugging Face's Trainer takes nn.DataParallel where it finds several GPUs and "
            "torchrun did not start it."
        )
    for node in recording.unseen:  # not of classes that run operators of their own, which are refused above
        raise CaptureError(
            f"the forward of {node} makes its result by no operator of this thread, and no trace can have it: another thread, "
            "NumPy or a library does. Run it on the thread that captures, register it with `torch.library.custom_op`, or "
            "capture a smaller piece."
        )


def note_unrecordable(error: BaseException, recording: Recording) -> None:
    """Tell the reader of an error that came from torch, in a program with operators that run graphs of their own, that these
    may fail where a recorder sees them."""
    higher_order = next((call for call in recording.calls if isinstance(call.func, HigherOrderOperator)), None)
    raised_in = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1:]
    if higher_order is not None and raised_in and is_torchs_or_ours(raised_in[0]):
        error.add_note(f"tracefuse: under a capture torch may fail here. {_of_higher_order(higher_order)}")


def _of_higher_order(call: Call) -> str:
    return (
        f"{call.func}{where(call.origin.source)} runs graphs or functions of its own, and a trace holds operators on tensors. "
        "Write it in plain Python (`if` for `torch.cond`, `F.scaled_dot_product_attention` with a mask for `flex_attention`), "
        "or capture a smaller piece."
    )


def _check_dense(values: list[Value], what: Call | str) -> None:
    """Raises `CaptureError` where one of the values, of an op or of what a sentence says of them, is no dense tensor."""
    kind = next((value.kind for value in values if value.kind is not None), None)
    if kind is None:
        return
    said = what if isinstance(what, str) else f"{what.func}{where(what.origin.source)}"
    if kind == "storage-made":
        raise CaptureError(
            f"{said} works on a storage, which no operator filled. Write to and copy tensors "
            "(`tensor.zero_()`, `tensor.clone()`), or capture a smaller piece."
        )
    remedy = REMEDIES.get(kind, f"Capture the program without {kind} (on one process, before it is sharded)")
    computes = "" if isinstance(what, str) else " computes with"
    raise CaptureError(
        f"{said}{computes} {kind} tensors, and a trace holds dense ones only. {remedy}, or capture a smaller piece."
    )


def check_unreplaced(recording: Recording, inputs: list[Value]) -> None:
    """Raises `CaptureError` where one of the trace's inputs was given other memory (`w.data = …`) or had its own taken: what
    it held is gone."""
    for value in inputs:
        if value in recording.replaced:
            source = recording.replaced[value] or _giving_memory(recording)
            raise CaptureError(
                "the program gives one of its inputs new data, which no operator tells of and which loses what the input held"
                f"{where(source)}. Write `with torch.no_grad(): tensor.copy_(...)` instead of "
                "`tensor.data = ...`, which `vector_to_parameters` does too, and move modules (`.to()`, `.double()`) before "
                "the capture."
            )
        if value in recording.freed:
            raise CaptureError(
                "the program gives the memory of one of its inputs back (`untyped_storage().resize_(0)`, as sharding and "
                f"offloading do){where(recording.freed[value])}, and what the input held is gone. Capture the module before "
                "it is wrapped, or a piece that leaves the memory of its inputs alone."
            )


def _giving_memory(recording: Recording) -> Source | None:
    """The last line that gives a tensor other memory, as far as its text tells: of a weight that got its own behind the update
    only the next step's forward sees it."""
    sources = (call.origin.source for call in reversed(recording.calls))
    return next((one for one in sources if one is not None and gives_memory(one.text)), None)


def where(source: Source | None) -> str:
    """ " (In[3]:4  loss = …)", or nothing."""
    return f" ({source})" if source else ""
