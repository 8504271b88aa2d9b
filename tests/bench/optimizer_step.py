"""Clipping and the optimizer on all of GPT-124M's parameters: ours, torch's fused AdamW, a copy of the same bytes.

    python tests/bench/optimizer_step.py --out optimizer_step.json

The parameters are float32, 148 tensors with 124 million elements. Timed, once as Python calls them and once as CUDA graphs:

    ours            clip_grad_norm_ and AdamW as the pass `optimizer_step` makes them: must take at most 1.05 ms on an H200
    ours, .grad     the same, where the clipped gradients are kept for a reader, which writes 4 bytes more for each element
    torch           clip_grad_norm_ and AdamW(fused=True)
    fused AdamW     alone
    clip            alone
    copy            as many bytes read and written as `ours` needs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.build.modules import load, resources
from tracefuse.device.dropout import support
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.optimizers.kernels.launch import HEADER
from tracefuse.optimizers.kernels.lists import ListKernel
from tracefuse.optimizers.kernels.tables import table_support
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.lowering.layouts import GUESS, Tuning
from tracefuse.optimizers.optimizer_step import OptimizerStep
from tracefuse.optimizers.passes import run_pipeline
from tracefuse.optimizers.trace import Trace

MUST_MS = 1.05
NORM = 1.0


def gpt_shapes(layers: int, width: int, vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """The shapes of a GPT's parameters; its head is its embedding."""
    block = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,),
             (width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]  # fmt: skip
    return [(vocabulary, width), (length, width), *block * layers, (width,), (width,)]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--tune", action="store_true", help="time other block sizes too")
    arguments = made.parse_args()
    device, on_gpu = arguments.device, arguments.device == "cuda"
    shapes = gpt_shapes(1, 64, 512, 32) if arguments.small else gpt_shapes(12, 768, 50304, 1024)
    weights = [nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1, fused=True, capturable=on_gpu)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    calls, kernels = programs(weights, optimizer, arguments.tune)
    timings = {"called": measured(calls, device, arguments.budget)}
    if on_gpu:
        timings["graphed"] = measured({n: in_graph(call) for n, call in calls.items()}, device, arguments.budget)
    for how, timing in timings.items():
        print(f"\n{len(shapes)} tensors, {how}\n{timing}", flush=True)
    taken = {p.name: p.times_ms["step"].median for p in timings.get("graphed", timings["called"]).programs}
    must = {f"ours takes at most {MUST_MS} ms": taken["ours"] <= MUST_MS} if on_gpu and not arguments.small else {}
    print(f"failed: {'; '.join(what for what, good in must.items() if not good) or 'nothing'}")
    record = {
        "benchmark": "optimizer_step", "environment": environment(device), "tensors": len(shapes),
        "elements": sum(w.numel() for w in weights), "kernels": kernels, "must": must,
        "timings": {how: timing.to_json() for how, timing in timings.items()},
    }  # fmt: skip
    write(arguments.out, record)


def programs(
    weights: list[nn.Parameter], optimizer: torch.optim.Optimizer, tune: bool
) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """What is timed, by name, and what the kernels of `ours` take on an H100 or H200."""

    def clip() -> None:
        nn.utils.clip_grad_norm_(weights, NORM)

    def both() -> None:
        clip()
        optimizer.step()

    kept, inputs = update_of(both, weights, keeps_gradients=True)
    freed, _ = update_of(both, weights, keeps_gradients=False)
    moved = 4 * sum(w.nbytes for w in weights)  # read by the copy: half of the norm's 4 bytes and the update's 28
    source, target = (torch.empty(moved, dtype=torch.uint8, device=weights[0].device) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "ours": compiled(freed, inputs), "ours, .grad": compiled(kept, inputs), "torch": both,
        "fused AdamW": optimizer.step, "clip": clip, "copy": lambda: target.copy_(source),
    }  # fmt: skip
    if tune:
        for block, warps in ((-1, 0), (0, 1), (1, 0), (1, 1), (2, 1), (-1, -1)):
            tuning = Tuning(block, warps)
            calls[f"ours, block {block:+d}, warps {warps:+d}"] = compiled(freed, inputs, tuning)
    return calls, [f"{k.name}: {_resources(k)}" for k in _kernels(freed)]


def _resources(kernel: ListKernel) -> str:
    found = resources(kernel)
    return f"{found.registers} registers, {found.spills} bytes spilled, {found.num_warps} warps"


def update_of(
    run: Callable[[], None], weights: list[nn.Parameter], keeps_gradients: bool
) -> tuple[Trace, list[Tensor]]:
    """The optimised trace of an update, and the tensors that it works on."""
    with tracefuse.capture() as c:
        run()
    trace = c.program.trace.copy()
    for node in trace.ops:
        node.meta["phase"] = "update"
    places, inputs = {w.grad.data_ptr() for w in weights if w.grad is not None}, c.program.live_inputs
    gradients = {i.name for i, t in zip(trace.inputs, inputs, strict=True) if t.data_ptr() in places}
    pairs = [
        (out, node)
        for out, node in zip(trace.outputs, trace.returned, strict=True)
        if out.kind != "gradient" and (keeps_gradients or out.of not in gradients)
    ]
    (step,) = run_pipeline(replace(trace.with_outputs(pairs), name="update"), [OptimizerStep(on_cpu=True)])
    print(step)
    return step.after, [t.detach() for t in inputs]


def _kernels(trace: Trace) -> list[ListKernel]:
    return list(dict.fromkeys(n.target for n in trace.ops if isinstance(n.target, ListKernel)))


def compiled(trace: Trace, inputs: list[Tensor], tuning: Tuning = GUESS) -> Callable[[], Any]:
    """The trace as a function that is called on `inputs`, whose new values it writes over the old ones on a GPU."""
    text = "\n\n".join([*(kernel_source(kernel, tuning) for kernel in _kernels(trace)), trace.code])
    module = load("\n\n".join(filter(None, [HEADER, table_support(text), support(text), text])))
    step = getattr(module, trace.name)

    def run() -> Any:
        with torch.no_grad():
            return step(*inputs)

    return run


def measured(calls: dict[str, Callable[[], Any]], device: str, budget_s: float) -> Any:
    replays = {name: Replays(lambda call=call: (_nothing(call),), compared=False) for name, call in calls.items()}  # type: ignore[misc]
    return measure(replays, device=device, budget_s=budget_s)


def _nothing(call: Callable[[], Any]) -> tuple[()]:
    call()
    return ()


def in_graph(call: Callable[[], Any]) -> Callable[[], Any]:
    """`call` as a replay of a CUDA graph."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph.replay


if __name__ == "__main__":
    main()
