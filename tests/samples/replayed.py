"""What the tests of the recorder's breadth share: a program captured, and its replay held against what the run itself gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

import tracefuse


def is_same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit, all NaNs being one."""
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    a, b = plain(a), plain(b)
    return bool(((a == b) | ((a != a) & (b != b))).all())


def plain(t: Tensor) -> Tensor:
    """The numbers as an ordinary dense tensor."""
    t = t.detach()
    t = t.dequantize() if t.is_quantized else t
    return t.to_dense() if t.layout is not torch.strided else t.resolve_conj().resolve_neg()


def replayed(
    run: Callable[[], Any], written: Iterable[Tensor] = (), trained: Iterable[Tensor] = ()
) -> tracefuse.Capture:
    """The capture of `run()`, whose replay gives bit by bit what it returned, the gradients of the leaves `trained` and
    the new contents of the tensors `written`, none of which was left out."""
    seen: list[Any] = []
    capture = tracefuse.capture(lambda: seen.append(run()) or seen[0])
    update = capture.program.update
    programs = [capture.program] if update is None else [capture.program, update]
    live = {
        i.name: tensor for one in programs for i, tensor in zip(one.trace.inputs, one.live_inputs, strict=True)
    } | dict(zip((i.name for i in capture.trace.inputs), capture.live_inputs, strict=True))
    leaves = {i.source: i.name for i in capture.trace.inputs if i.kind != "cotangent"}
    handed = {i.name: leaves[i.source] for one in programs for i in one.trace.inputs if i.kind == "gradient"}
    signature = [out for one in programs for out in one.trace.outputs]
    clipped = {handed[out.of] for out in signature if out.of in handed}
    results = [t for t in tree_flatten(seen[0])[0] if isinstance(t, Tensor)]
    found: dict[str, list[int]] = {"gradient": [], "mutation": []}
    outputs = list(zip(signature, capture.replay(), strict=True))
    for out, value in outputs:
        if out.kind != "result" and not (out.kind == "gradient" and out.of in clipped):
            leaf = out.of if out.kind == "gradient" else handed.get(out.of)
            now = live[out.of] if leaf is None else live[leaf].grad
            assert now is not None
            assert is_same(value, now), f"{out.kind} of {out.of}: {value} instead of {now}"
            found[out.kind].append(id(live[out.of]))
    replays = [value for out, value in outputs if out.kind == "result"]
    assert len(replays) >= len(results), "a result is missing"
    for value, now in zip(replays, results, strict=False):
        assert is_same(value, now), f"{value} instead of {now}"
    assert set(found["gradient"]) >= set(map(id, trained)), "a gradient is missing"
    assert set(found["mutation"]) >= set(map(id, written)), "a mutation is missing"
    return capture


def compiled_outputs(variant: tracefuse.Variant) -> list[Tensor]:
    """The outputs of the variant's trace, in its order, computed by its compiled program on the captured inputs."""
    program, examples = variant.compile(), variant.capture.example_inputs
    module, count = program.module, len(program.inputs)
    inputs, cotangents = [t.detach() for t in examples[:count]], [t.detach() for t in examples[count:]]
    program.restarts(variant.capture.rng_states)()
    with torch.no_grad():
        outputs = module.forward(*inputs)
        kept = outputs[len(module.RESULTS) + len(module.MUTATED) :]
        behind = module.backward([*kept, *(inputs[at] for at in module.READ_AGAIN), *cotangents])
    found = {("result", of): value for of, value in zip(module.RESULTS, outputs, strict=False)}
    found |= {("mutation", of): outputs[at] for of, at in module.MUTATED.items()}
    of_gradients = (module.INPUTS[at][0] for at in module.GRADIENTS)
    found |= {("result", of): value for of, value in zip(module.LATE, behind, strict=False)}
    found |= {("gradient", of): value for of, value in zip(of_gradients, behind[len(module.LATE) :], strict=True)}
    return [found[out.kind, out.of] for out in variant.trace.outputs]
