"""Models of which torch.compile compiles nothing and says nothing, since it looks for code of the user's within a wrapper.

`torch.compile(DistributedDataParallel(model))` and `torch.compile(fully_shard(model))` run the wrapper in Python, and compile
the forwards that it calls as far as they are not torch's own: of a `nn.Sequential` of torch's layers nothing is left, and the
backend is never called. So it is told when torch registers such a model as a part of what `torch.compile` returns. Of
`DistributedDataParallel(model).compile()`, and of a compiled function that calls such a model, it is told when Dynamo first
looks at a function under the wrapper's forward. Under the forward of a `fully_shard(model)` Dynamo looks at nothing, so that
`fully_shard(model).compile()` is silent.

Private names, seen on torch 2.11, 2.13 and 2.15: `torch._dynamo.eval_frame.OptimizedModule` and its argument `dynamo_ctx`,
`torch._dynamo.trace_rules.check`, `_torchdynamo_orig_backend` (`_torchdynamo_orig_callable`) of a callback, the argument
`compiler_fn` of `torch._dynamo.convert_frame._compile`, and `compile_wrapper`, which is what a function becomes that
torch.compile compiles. `torch._dynamo.utils.register_hook_for_recompile_user_context` registers what that `_compile` calls
for each function that Dynamo looks at; unlike a callback of `torch._dynamo.on_compile_start`, it outlives
`torch._dynamo.reset()`.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn
from torch._dynamo import convert_frame, trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import register_hook_for_recompile_user_context
from torch.nn.modules.module import register_module_module_registration_hook

from tracefuse.recording.frames import is_torchs_or_ours, tell_user
from tracefuse.recording.memories import WeakMap

_WRAPPERS = {
    "DistributedDataParallel": 'DistributedDataParallel(torch.compile(model, backend="tracefuse"))',
    "FSDPModule": 'fully_shard(torch.compile(model, backend="tracefuse"))',
}
_told: WeakMap[bool] = WeakMap()
_INNER = ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable")


def why_left_to_python(model: nn.Module) -> str:
    """Why torch.compile leaves all of a model to Python, and the order that works; "" where it does not."""
    model = getattr(model, "_orig_mod", model)
    wrapper = next((kind.__name__ for kind in type(model).__mro__ if kind.__name__ in _WRAPPERS), None)
    if wrapper is None or not all(_is_skipped(one) for one in model.modules()):
        return ""
    name = wrapper.replace("FSDPModule", "fully_shard")
    return (
        f"nothing of this model is compiled: torch.compile looks for code of yours within {name}, and leaves torch's own "
        f"(nn.Sequential, nn.Linear) to Python. Compile the model before it is wrapped: {_WRAPPERS[wrapper]}."
    )


def watch() -> None:
    """Tell, from now on, at the call of `torch.compile(model, backend="tracefuse")` that compiles nothing, and where Dynamo
    looks at functions under the forward of such a model."""
    register_module_module_registration_hook(_registered)
    register_hook_for_recompile_user_context(_compiling)


def _registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if name != "_orig_mod" or not isinstance(module, OptimizedModule) or submodule is None:
        return
    making = _running(OptimizedModule.__init__.__code__)
    context = None if making is None else making.f_locals.get("dynamo_ctx")
    if _backend_of(getattr(context, "callback", None)) == "tracefuse":
        _tell(submodule)


def _compiling() -> str:
    """What torch's metrics are to note of the function that Dynamo looks at: nothing."""
    frame = _running(convert_frame._compile.__code__)
    if frame is None or _backend_of(frame.f_locals.get("compiler_fn")) != "tracefuse":
        return ""
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        running = frame.f_locals.get("self") if is_torchs_or_ours(frame.f_code.co_filename) else None
        if isinstance(running, nn.Module):
            _tell(running)
        frame = frame.f_back
    return ""


def _tell(model: nn.Module) -> None:
    """Once for a model."""
    if model not in _told and (why := why_left_to_python(model)):
        _told[model] = True
        tell_user(why)


def _running(code: types.CodeType) -> types.FrameType | None:
    """The innermost running frame of `code`."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _backend_of(callback: Any) -> str:
    """The name of the backend that a callback of Dynamo's compiles with."""
    while inner := next((getattr(callback, name) for name in _INNER if hasattr(callback, name)), None):
        callback = inner
    return getattr(callback, "compiler_name", "")


def _is_skipped(module: nn.Module) -> bool:
    """Whether torch.compile passes over a module's forward, as over torch's own."""
    forward = module.forward
    return isinstance(forward, types.MethodType) and bool(trace_rules.check(forward))
