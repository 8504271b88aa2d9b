"""The choice of `overlap` in a model that trains under `fully_shard`, by FSDP2's own switches.

Torch starts the collectives of `fully_shard` in hooks, which are no operators of a graph. FSDP2 says when each starts, and
what is kept for the backward, and it can be told. Sums and their order stay as they are, so all numbers do.

Private: `FSDPModule._set_unshard_async_op`, seen on torch 2.13. On a CPU there are no streams, and without it a gather that
starts ahead is waited for at once.
"""

from __future__ import annotations

from torch import nn

from tracefuse.errors import OptionError


def gather_ahead(model: nn.Module, prefetch: int | None = 1, reshard: bool | None = None) -> None:
    """Let a model of `fully_shard` gather parameters so many sharded modules ahead of where they are needed (`prefetch`; 0: as
    FSDP2 does by itself), and free them behind the forward (`reshard=True`) or keep them for the backward (False). What is
    None stays as it is. The options are those of `overlap`, and all ranks have to choose the same.

    Modules are taken to run in the order of `model.modules()`; in another order parameters are gathered early for nothing.
    Raises `OptionError` for a model that is not sharded itself, and for what is no depth.
    """
    from torch.distributed.fsdp import FSDPModule

    root = getattr(model, "_orig_mod", model)
    if not isinstance(root, FSDPModule):
        raise OptionError(
            f"{type(root).__name__} is not sharded itself: call `fully_shard(model)` on it, behind its layers, and then "
            "`tracefuse.gather_ahead(model)`"
        )
    if prefetch is not None and prefetch < 0:
        raise OptionError(f"prefetch={prefetch} is no depth: give 0 or more sharded modules")
    if reshard is not None:
        root.set_reshard_after_forward(reshard)
    if prefetch is None:
        return
    modules = [one for one in root.modules() if isinstance(one, FSDPModule)]
    for at, module in enumerate(modules):
        module.set_modules_to_forward_prefetch(modules[at + 1 : at + 1 + prefetch])
        before = modules[1:at] if at else modules[1:]  # the root's backward comes first
        module.set_modules_to_backward_prefetch(before[::-1][:prefetch])
        if _is_on_cpu(module):
            module._set_unshard_async_op(prefetch > 0)


def _is_on_cpu(module: nn.Module) -> bool:
    """Whether the ranks of a sharded module compute on CPUs; one whose parameters only lie there has a mesh of GPUs."""
    meshes = (getattr(one, "device_mesh", None) for one in module.parameters())
    return any(mesh is not None and mesh.device_type == "cpu" for mesh in meshes)
