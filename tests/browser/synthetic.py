"""A payload as large as one likes, without torch: a transformer's forward and backward as the wire format has them."""

from __future__ import annotations

from typing import Any

# The forward ops of one layer by the module that they are in, each with what it reads, by distance.
_LAYER = {
    "norm_1": ["native_layer_norm"],
    "attn.qkv": ["addmm"],
    "attn": ["mul", "sin", "mul", "add", "mul", "neg", "mul", "add", "bmm", "div", "add", "softmax", "bmm", "clone"],
    "attn.proj": ["addmm", "bernoulli", "div", "mul"],
    "norm_2": ["add", "native_layer_norm"],
    "mlp.up": ["addmm"],
    "mlp": ["gelu", "mul", "tanh", "add", "mul", "sigmoid"],
    "mlp.down": ["addmm", "bernoulli", "div", "mul", "add"],
}
_OPS = [(module, op) for module, ops in _LAYER.items() for op in ops]
_TYPES = {"": "Model", "norm_1": "LayerNorm", "norm_2": "LayerNorm", "attn": "SelfAttention", "mlp": "MLP"}
OPS_PER_LAYER = 3 * len(_OPS)
_SIZES = [1, 1]


def payload(layers: int, fused: bool = True) -> dict[str, Any]:
    """`layers` equal ones, each op of the forward with two of the backward; `fused` names a kernel for the pointwise ones."""
    values = _forward(layers, fused)
    values |= _backward(values)
    for name, value in values.items():
        for read in value["reads"]:
            values[read]["uses"].append(name)
            if value["phase"] != values[read]["phase"]:
                values[read]["saved_bytes"] = values[read]["nbytes"]
    ops = list(values)
    memory = {
        "ops": ops,
        "live": [1024] * len(ops),
        "peak": 1024,
        "at": ops[0],
        "alive": [],
        "inputs": 1024,
        "again": [],
        "storages": [],
    }
    kernels = sorted({value["kernel"] for value in values.values() if value["kernel"]})
    return {
        "version": 2, "config": _config(fused), "call": "c.optimize()", "usage": "", "blocked": None, "runs_triton": False,
        "passes": [_pass(fused)], "values": values, "layers": [], "decisions": {"fuse": []}, "findings": [],
        "below": "", "small": [],
        "timing": None, "notes": [], "steps": None, "update": None, "unused": {"provenance": "modelled", "ops": []},
        "summary": {
            "ops": [len(ops), len(ops)], "saved_bytes": _SIZES, "peak_bytes": _SIZES, "beside_budget": 0, "least_peak": 1,
            "measured_peak_bytes": None,
            "difference": None, "kernels": {"unique": len(kernels), "launches": len(ops)},
        },
        "forward": _half(values, "forward"), "backward": _half(values, "backward"),
        "times": {"before": "modelled: synthetic", "after": "modelled: synthetic"},
        "clock": {
            "device": "synthetic", "kinds": ["modelled", "modelled"], "step_us": [100.0, 90.0], "predicted": [],
            "provenance": ["modelled: synthetic", "modelled: synthetic"], "chosen": "synthetic", "replays": {},
            "choices": [["synthetic", "synthetic"]], "forecasts": 0, "error": None,
            "launches": None, "takes_us": [100.0, 90.0],
        },
        "sentence": {"said": "A synthetic step.", "lead": "A synthetic step.", "head": "A synthetic step.",
            "actions": []}, "looked_for": [],
        "slowest": None, "kernels": [_kernel(name) for name in kernels], "aten": [],
        "memory": {"before": memory, "after": memory, "reasons": [], "modules": [], "why": {}},
        "baseline": {"is_pinned": False, "call": "the trace as captured", "config": _config(fused)}, "environment": {},
    }  # fmt: skip


def _forward(layers: int, fused: bool) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    residual = last = ""
    for layer in range(layers):
        residual = last
        for at, (module, op) in enumerate(_OPS):
            name = f"h{layer}_{at}_{op}"
            reads = [last] if last else []
            if op == "add" and residual and residual != last:
                reads.append(residual)
            kernel = f"fused_{op}" if fused and op in ("gelu", "softmax", "mul") else ""
            values[name] = _value(op, "forward", f"h.{layer}.{module}", reads, kernel, 1.0 + at)
            last = name
    return values


def _backward(forward: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    values: dict[str, dict[str, Any]] = {}
    last = ""
    for name, value in reversed(forward.items()):
        reads = ([last] if last else []) + [name]
        grad, weight = f"grad_{name}", f"wgrad_{name}"
        op = name.split("_", 2)[2]
        for made, source in ((grad, reads), (weight, [*reads, grad])):
            values[made] = _value(f"{op}_backward", "backward", value["module"], source, "", 2.0)
            values[made]["twins"].append(name)
            value["twins"].append(made)
        last = grad
    return values


def _value(op: str, phase: str, module: str, reads: list[str], kernel: str, us: float) -> dict[str, Any]:
    kind = _TYPES.get(module.split(".", 2)[-1], "Linear")
    return {
        "op": kernel or f"aten.{op}.default", "type": "f32[8, 128]", "stride": [128, 1], "nbytes": 4096, "phase": phase,
        "module": module, "module_type": kind, "source": f"gpt.py:7  x = {op}(x)", "reads": reads, "uses": [], "twins": [],
        "saved_bytes": 0, "removed": False, "storage": [], "kernel": kernel, "of": "", "time_us": [us, us], "lines": [],
    }  # fmt: skip


def _half(values: dict[str, dict[str, Any]], phase: str) -> dict[str, Any]:
    ops = [name for name, value in values.items() if value["phase"] == phase]
    lines = [
        {"code": f"    {name} = {values[name]['op']}({', '.join(values[name]['reads'])})", "comment": "# f32[8, 128]  4 KiB",
         "value": name, "kind": "op", "diff": " "}
        for name in ops
    ]  # fmt: skip
    return {"lines": lines, "ops": [len(ops), len(ops)], "added": 0, "removed": 0}


def _kernel(name: str) -> dict[str, Any]:
    return {
        "name": name, "said": name, "part": "", "replaces": None, "kind": "", "tflop_per_s": None, "least_us": None,
        "calls": 1, "ops": [], "nbytes_read": 4096, "nbytes_written": 4096, "time_us": None,
        "provenance": "not measured", "blocks": "guess", "source": f"def {name}(): ...", "gb_per_s": None,
        "peak_share": None, "peak_source": "", "bound": "", "resources": None,
    }  # fmt: skip


def _config(fused: bool) -> dict[str, Any]:
    return {
        "simplify": False, "freeze": None, "merge_matmuls": False, "cat": False, "linear_cross_entropy": False,
        "decompose": False, "channels_last": False, "pad": False,
        "remat": None, "logits_memory": 2**29, "optimizer_step": False,
        "memory_budget": None, "peak_budget": None, "remat_options": {}, "save": [], "recompute": [], "fuse": fused,
    }  # fmt: skip


def _pass(fused: bool) -> dict[str, Any]:
    return {
        "name": "fuse", "help": "", "own": False, "enabled": fused, "state": "on" if fused else "off", "ops": _SIZES,
        "changed": fused, "saved_bytes": _SIZES, "peak_bytes": _SIZES, "seconds": 0.0, "options": [],
        "note": "", "error": None, "delta_ms": None, "delta_us": None, "without": None, "needs": "", "suggests": [],
    }  # fmt: skip
