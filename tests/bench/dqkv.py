"""Attention's backward and the packing of its gradients: dq, dk, dv transposed, reshaped and concatenated, then summed.

    python tests/bench/dqkv.py --out dqkv.json

There are two programs: one calls attention's backward on saved tensors, then cat, sum, view and permute, as the complaint of
notebook 04 does; the other is a layer as people write it (Linear, split, attention, backward). Both run in bfloat16 and
causal. Of the first are timed

    alone           attention's backward, three gradients as ATen allocates them: the yardstick
    packed          and them concatenated; ours, where cuDNN writes them so: must cost at most 1.03 of it
    packed, summed  and the sum of the columns, for the bias; ours
    eager …         the same by ATen, with cuDNN's and with flash attention
    torch.compile   the same

once as Python calls them and once as CUDA graphs, which cost the host nothing and are what is judged. Differences are from
attention by hand in float64. On a CPU nothing is packed or judged.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cases.timed import differentiable, release
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.device.packed_runtime import attention_backward
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.measure.timing import Timing
from tracefuse.optimizers.cat.packed_attention import CONCATENATIONS, PACKED_BACKWARD
from tracefuse.optimizers.kernels.kernel import Kernel
from tracefuse.optimizers.ops import behind_views
from tracefuse.timeline.events import recorded
from tracefuse.variant import Variant

SHAPES = {"16x12x128x64": (16, 12, 128, 64), "16x12x1024x64": (16, 12, 1024, 64)}
SMALL = {"2x2x16x8": (2, 2, 16, 8)}
MUST = 1.03
aten = torch.ops.aten
bf16 = torch.bfloat16


def main() -> None:
    arguments = parser(__doc__).parse_args()
    cases = {}
    for name, shape in (SMALL if arguments.small else SHAPES).items():
        torch.manual_seed(0)
        cases[name] = {"complaint": complaint(shape, arguments), "layer": layer(shape, arguments)}
        release(arguments.device)
    failed = [
        f"{name}: {what}"
        for name, case in cases.items()
        for what, good in case["complaint"]["must"].items()
        if not good
    ]
    print(f"\nfailed: {'; '.join(failed) or 'nothing'}")
    machine = environment(arguments.device)
    write(arguments.out, {"benchmark": "dqkv", "must_of_alone": MUST, "environment": machine, "cases": cases})


# --- the complaint's program ------------------------------------------------------------------------------------------


def saved(kind: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """[out, logsumexp, seed, offset]: what the forward keeps for its backward."""
    if kind == "cpu":
        out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return [out, logsumexp, torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)]
    if kind == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    else:
        found = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return [found[0], found[1], found[6], found[7]]


def backward_of(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    def alone(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *kept: Tensor) -> tuple[Tensor, ...]:
        out, logsumexp, *seeds = kept
        return tuple(attention_backward(kind, (q, k, v, out, grad, logsumexp), seeds, True, None))

    return alone


def packing(alone: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The gradient of the projection's result `[B·T, 3·H·D]` and its transpose."""

    def packed(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, length, width = tensors[1].shape
        rows = [g.transpose(1, 2).reshape(batch, length, heads * width) for g in alone(*tensors)]
        flat = torch.cat(rows, -1).view(batch * length, 3 * heads * width)
        return flat, flat.permute(1, 0)

    return packed


def summing(packed: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def summed(*tensors: Tensor) -> tuple[Tensor, ...]:
        flat, turned = packed(*tensors)
        return flat.sum(0), flat, turned

    return summed


def complaint(shape: tuple[int, ...], arguments: Namespace) -> dict[str, Any]:
    device, on_gpu = arguments.device, arguments.device == "cuda"
    batch, heads, length, width = shape
    projected = torch.randn(batch, length, 3 * heads * width, dtype=bf16, device=device)
    q, k, v = (part.view(batch, length, heads, width).transpose(1, 2) for part in projected.chunk(3, -1))
    grad = torch.randn(batch, length, heads, width, dtype=bf16, device=device).transpose(1, 2)
    kind = "cudnn" if on_gpu else "cpu"
    inputs = [grad, q, k, v, *saved(kind, q, k, v)]
    alone = backward_of(kind)
    packed, summed = packing(alone), summing(packing(alone))
    ours = {"packed": optimised(packed, inputs), "packed, summed": optimised(summed, inputs)}
    calls = {
        "alone": lambda: alone(*inputs),
        f"eager {kind}": lambda: summed(*inputs),
        **{name: replayed(variant, inputs) for name, variant in ours.items()},
    }
    if on_gpu:
        flash = [grad, q, k, v, *saved("flash", q, k, v)]
        torch.compiler.reset()
        compiled = torch.compile(summed, dynamic=False)
        calls["eager flash"] = lambda: summing(packing(backward_of("flash")))(*flash)
        calls["torch.compile"] = lambda: compiled(*inputs)
    exact = Replays(lambda: (by_hand(grad, q, k, v),))
    return judged(calls, ours, exact, shape, arguments)


def by_hand(grad: Tensor, *qkv: Tensor) -> tuple[Tensor, ...]:
    """The results of `summed`, from attention written out in float64 and differentiated by autograd."""
    wide = [t.detach().double().requires_grad_() for t in qkv]
    q, k, v = wide
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
    gradients = torch.autograd.grad(scores.softmax(-1) @ v, wide, grad.double())
    return summing(packing(lambda *_: gradients))(None, *qkv)  # type: ignore[arg-type]


def optimised(function: Callable[..., Any], inputs: list[Tensor]) -> Variant:
    variant = tracefuse.capture(function, *inputs).optimize()
    variant.compile()
    return variant


def replayed(variant: Variant, inputs: list[Tensor]) -> Callable[[], Any]:
    forward = variant.compile().replays(inputs).forward
    return lambda: forward()[0]


def judged(
    calls: dict[str, Callable[[], Any]],
    ours: dict[str, Variant],
    exact: Replays,
    shape: tuple[int, ...],
    arguments: Namespace,
) -> dict[str, Any]:
    """Time, print and judge one shape."""
    on_gpu = arguments.device == "cuda"
    # One names its results, the others are yardsticks: what they compute has other parts.
    compared = {name for name in calls if name not in ("alone", "packed")}
    called = {n: Replays(lambda call=call: (call(),), compared=n in compared) for n, call in calls.items()}  # type: ignore[misc]
    timings = {"called": measure(called, device=arguments.device, reference=exact, budget_s=arguments.budget)}
    kernels = {}
    if on_gpu:
        graphed = {n: Replays(in_graph(call), compared=n in compared) for n, call in calls.items()}
        timings["graphed"] = measure(graphed, device="cuda", reference=exact, budget_s=arguments.budget)
        kernels = {n: kernels_of(call) for n, call in calls.items()}
    for how, timing in timings.items():
        print(f"\ndqkv {list(shape)} {how}, max |Δ| against float64\n{timing}", flush=True)
    for name in ours:
        print(f"kernels of {name}: {kernels.get(name, 'not profiled on a CPU')}")
    return {
        "timings": {how: timing.to_json() for how, timing in timings.items()},
        "of_alone": of_alone(timings.get("graphed", timings["called"])),
        "must": musts(timings["graphed"], ours, calls) if on_gpu else {},
        "kernels": kernels,
        "code": {name: variant.trace.code for name, variant in ours.items()},
    }


def of_alone(timing: Timing) -> dict[str, float]:
    times = {p.name: p.times_ms["step"].median for p in timing.programs}
    return {name: time / times["alone"] for name, time in times.items()}


def in_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` as a replay of a CUDA graph, which yields its results."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> Any:
        graph.replay()
        return (results,)

    return replay


def kernels_of(call: Callable[[], Any]) -> list[str]:
    """How often each kernel of a call ran, and for how long, the longest first."""
    us: dict[str, list[float]] = {}
    for event in recorded(call):
        if event.on_gpu:
            us.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return [
        f"{name} x{len(took)}: {sum(took):.1f} µs" for name, took in sorted(us.items(), key=lambda one: -sum(one[1]))
    ]


def musts(timing: Timing, ours: dict[str, Variant], calls: dict[str, Callable[[], Any]]) -> dict[str, bool]:
    """What the issue asks for, and whether it is so."""
    flat, turned = calls["packed"]()
    kept = [op.target for v in ours.values() for op in parts(v) if op.target in CONCATENATIONS]
    return {
        f"packed costs at most {MUST} of alone": of_alone(timing)["packed"] <= MUST,
        "no cat is left, in kernels or outside": not kept,
        "the view and its transpose are aliases": flat.data_ptr() == turned.data_ptr(),
        "and of attention's own result": all(
            behind_views(n).target is PACKED_BACKWARD for n in ours["packed"].trace.returned
        ),
    }


def parts(variant: Variant) -> list[torch.fx.Node]:
    """All ops, those of kernels among them."""
    bodies = [op.target.body.graph for op in variant.trace.ops if isinstance(op.target, Kernel)]
    inside = [n for body in bodies for n in body.nodes if n.op == "call_function"]
    return [*variant.trace.ops, *inside]


# --- a layer as people write it ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(width, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, width)


def layer(shape: tuple[int, ...], arguments: Namespace) -> dict[str, Any]:
    device = arguments.device
    batch, heads, length, size = shape
    module = Attention(heads, heads * size).to(device, bf16)
    x = torch.randn(batch, length, heads * size, dtype=bf16, device=device, requires_grad=True)
    leaves, cotangent = [x, *module.parameters()], torch.randn(x.shape, dtype=bf16, device=device)

    def step(x: Tensor) -> Tensor:
        y = module(x)
        y.backward(cotangent)
        return y

    variant = tracefuse.capture(step, x).optimize()
    program = variant.compile()
    programs = {
        "eager": differentiable(lambda: module(x), leaves, cotangent, True),
        "tracefuse": differentiable(program, leaves, cotangent, True),
    }
    if device == "cuda":
        torch.compiler.reset()
        compiled = torch.compile(module, dynamic=False)
        programs["torch.compile"] = differentiable(lambda: compiled(x), leaves, cotangent, True)
    wide = Attention(heads, heads * size).to(device).double()
    wide.load_state_dict({name: t.double() for name, t in module.state_dict().items()})
    x64 = x.detach().double().requires_grad_()
    exact = differentiable(lambda: wide(x64), [x64, *wide.parameters()], cotangent.double(), True)
    timing = measure(programs, device=device, reference=exact, budget_s=arguments.budget)
    print(f"\nlayer {list(shape)}, max |Δ| against float64\n{timing}", flush=True)
    return {"timing": timing.to_json(), "code": variant.trace.code, "kernels": [k.name for k in variant.kernels]}


if __name__ == "__main__":
    main()
