"""Static peaks of training steps beside measured ones: the captured program, the optimised one, and the eager step itself.

    python tests/bench/trust/memory.py --out memory.json --check

A row is one program of one case, in MB, inputs and parameters included.

    static      the peak read off the trace; of an eager step, as eager frees
    (`tracefuse.optimizers.costs.eager_memory`): modelled
    workspaces  what it rises by with what each operator was measured to take for itself (cuDNN's workspaces, copies)
    measured    by torch's allocator: one replay of the program, or one call of the step that was captured

Gradients are None before each step. The optimised program on a CPU is that without `fuse`, whose kernels run on a GPU only;
the one with AdamW is not replayed, since it is more than a forward and a backward. With `--check` it ends with status 1 where
static and workspaces are not within 5 % of what was measured.
"""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.costs.eager_memory import eager_lifetimes
from tracefuse.optimizers.liveness import lifetimes, peak_bytes
from tracefuse.tables.allocator import added_peak, workspaces
from tracefuse.tables.memory import input_bytes, peak_with, replay_peak
from tracefuse.text import aligned
from tracefuse.timeline.replayed import stepwise_replay
from tracefuse.variant import Variant

sys.path.append(str(Path(__file__).parents[1]))
from cases.gpt import SIZES, SMALL
from cases.resnet import resnet
from results import environment, parser, write

AGREE = 0.05


class Case(NamedTuple):
    """A training step to call, and the parameters whose gradients it fills. `replays`: whether its capture can be replayed."""

    step: Callable[[], Any]
    model: nn.Module
    replays: bool = True


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", choices=sorted(CASES), help="cases (default: all)")
    options.add_argument("--check", action="store_true", help="status 1 where the peaks are apart")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.only or CASES:
        torch.manual_seed(0)
        rows += [{"case": name, **row} for row in measured(CASES[name](arguments), arguments.device)]
        release(arguments.device)
    print(table(rows))
    wrong = [f"{row['case']}, {row['program']}" for row in rows if abs(row["ratio"] - 1) > AGREE]
    print(f"\nwithin {AGREE:.0%} of what was measured: {len(rows) - len(wrong)} of {len(rows)}")
    write(arguments.out, {"benchmark": "memory", "environment": environment(arguments.device), "rows": rows})
    if wrong and arguments.check:
        sys.exit(f"apart by more than {AGREE:.0%}: {'; '.join(wrong)}")


def measured(case: Case, device: str) -> list[dict[str, Any]]:
    """The rows of one case."""
    eager = step_peak(case, device)
    captured = tracefuse.capture(case.step)
    case.model.zero_grad()
    baseline = captured.optimize(
        simplify=False, freeze=None, cat=False, decompose=False, channels_last=False, pad=False, remat=None, fuse=False
    )
    rows, taken = [], {}
    if case.replays:
        optimised = captured.optimize() if device == "cuda" else captured.optimize(fuse=False)
        rows = [replayed("captured", baseline, device), replayed("optimised", optimised, device)]
        taken = workspaces(stepwise_replay(baseline), device)
    lives = eager_lifetimes(baseline.trace)
    static, risen = peak_with({}, baseline.trace, lives), peak_with(taken, baseline.trace, lives)
    return [*rows, row("eager step", static, risen - static, eager + input_bytes(baseline.trace, device))]


def step_peak(case: Case, device: str) -> int:
    """What the user's own step adds at its peak; it runs once before, so that libraries have what they keep."""
    case.step()
    case.model.zero_grad()
    found = added_peak(case.step, device)
    case.model.zero_grad()
    return found


def replayed(name: str, variant: Variant, device: str) -> dict[str, Any]:
    trace = variant.trace
    static = peak_bytes(trace)
    risen = peak_with(workspaces(stepwise_replay(variant), device), trace, lifetimes(trace))
    return row(name, static, risen - static, replay_peak(variant) + input_bytes(trace, device))


def row(program: str, static: int, taken: int, counted: int) -> dict[str, Any]:
    ratio = (static + taken) / counted
    return {
        "program": program,
        "static_nbytes": static,
        "workspace_nbytes": taken,
        "measured_nbytes": counted,
        "ratio": ratio,
        "static_ratio": static / counted,
    }


def table(rows: list[dict[str, Any]]) -> str:
    def mb(count: int) -> str:
        return f"{count / 1e6:.1f}"

    title = ("case", "program", "static MB", "workspaces", "measured", "static / measured", "with workspaces")
    cells = [
        (
            one["case"], one["program"], mb(one["static_nbytes"]), mb(one["workspace_nbytes"]), mb(one["measured_nbytes"]),
            f"{one['static_ratio']:.3f}", f"{one['ratio']:.3f}",
        )
        for one in rows
    ]  # fmt: skip
    return aligned([title, *cells])


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# --- cases ------------------------------------------------------------------------------------------------------------


def gpt(dtype: torch.dtype, arguments: Namespace, optimizer: bool = False) -> Case:
    sizes = SMALL if arguments.small else SIZES
    shape = {k: sizes[k] for k in ("layers", "width", "heads", "vocab", "length")}
    model = GPT(**shape, dropout=0.1).to(arguments.device, dtype)
    tokens, targets = batch(sizes["vocab"], sizes["batch"], sizes["length"], arguments.device)
    update = torch.optim.AdamW(model.parameters()).step if optimizer else nothing

    def step() -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        update()
        return loss

    return Case(step, model, replays=not optimizer)


def nothing() -> None:
    """No optimizer."""


def llama(arguments: Namespace, lora: bool = False) -> Case:
    """Hugging Face's model from a configuration, nothing downloaded; the step keeps its output, logits included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 4}
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16}
    config = LlamaConfig(**(small if arguments.small else large), vocab_size=997 if arguments.small else 32000)
    model = LlamaForCausalLM(config).to(arguments.device, torch.float32 if arguments.small else torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    shape = (4, 128) if arguments.small else (8, 1024)
    tokens = torch.randint(0, config.vocab_size, shape, device=arguments.device)

    def step() -> Tensor:
        out = model(input_ids=tokens, labels=tokens)
        out.loss.backward()
        return out.loss

    return Case(step, model)


def image_step(arguments: Namespace) -> Case:
    model = (resnet((1, 1, 1, 1), width=16, classes=10) if arguments.small else resnet()).to(arguments.device)
    count, size, classes = (8, 64, 10) if arguments.small else (64, 224, 1000)
    images = torch.randn(count, 3, size, size, device=arguments.device)
    labels = torch.randint(0, classes, (count,), device=arguments.device)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        return loss

    return Case(step, model)


CASES: dict[str, Callable[[Namespace], Case]] = {
    "gpt bf16": lambda arguments: gpt(torch.bfloat16, arguments),
    "gpt fp32": lambda arguments: gpt(torch.float32, arguments),
    "gpt fp32 AdamW": lambda arguments: gpt(torch.float32, arguments, optimizer=True),
    "llama": llama,
    "llama LoRA": lambda arguments: llama(arguments, lora=True),
    "resnet50": image_step,
}


if __name__ == "__main__":
    main()
