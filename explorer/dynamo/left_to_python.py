"""Models of which torch.compile compiles nothing and says nothing, since it looks for code of the user's within a wrapper.

`torch.compile(DistributedDataParallel(model))` and `torch.compile(fully_shard(model))` run the wrapper in Python, and compile
the forwards that it calls as far as they are not torch's own: of a `nn.Sequential` of torch's layers nothing is left, and the
backend is never called. So it is told when torch registers such a model as a part of what `torch.compile` returns.

Private names, seen on torch 2.11 and 2.13: `torch._dynamo.eval_frame.OptimizedModule` and its argument `dynamo_ctx`,
`torch._dynamo.trace_rules.check`, and `_torchdynamo_orig_backend` (`_torchdynamo_orig_callable`) of a callback.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn
from torch._dynamo import trace_rules
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.modules.module import register_module_module_registration_hook

from tracefuse.recording.frames import tell_user

_WRAPPERS = {
    "DistributedDataParallel": 'DistributedDataParallel(torch.compile(model, backend="tracefuse"))',
    "FSDPModule": 'fully_shard(torch.compile(model, backend="tracefuse"))',
}
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
    """Tell, from now on, at the call of `torch.compile(model, backend="tracefuse")` that compiles nothing."""
    register_module_module_registration_hook(_registered)


def _registered(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    if name != "_orig_mod" or not isinstance(module, OptimizedModule) or submodule is None:
        return
    if _backend_of(sys._getframe(1)) == "tracefuse" and (why := why_left_to_python(submodule)):
        tell_user(why)


def _backend_of(frame: types.FrameType | None) -> str:
    """The name of the backend that the `OptimizedModule` is being made for."""
    while frame is not None and frame.f_code is not OptimizedModule.__init__.__code__:
        frame = frame.f_back
    found: Any = None if frame is None else getattr(frame.f_locals.get("dynamo_ctx"), "callback", None)
    while inner := next((getattr(found, name) for name in _INNER if hasattr(found, name)), None):
        found = inner
    return getattr(found, "compiler_name", "")


def _is_skipped(module: nn.Module) -> bool:
    """Whether torch.compile passes over a module's forward, as over torch's own."""
    forward = module.forward
    return isinstance(forward, types.MethodType) and bool(trace_rules.check(forward))
