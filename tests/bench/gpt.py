"""A GPT's training cell goes through the real magic in a real kernel, beside eager: times, kernels, gradients, toggles.

    python tests/bench/gpt.py --out gpt.json

The GPT has 12 layers, 768 wide, 12 heads, a vocabulary of 50257, a batch of 8 x 1024 and bfloat16 by default. The driver
starts an IPython kernel and sends it the cells below, the training cell under `%%tracefuse`; the last cell measures in the
kernel and writes the JSON. `--kernel inprocess` runs the same cells in an IPython shell of this process, where
jupyter_client is not installed.
"""

from __future__ import annotations

import copy
import json
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cases.gpt import SIZES, SMALL
from cases.timed import training_step, worst
from cases.toggles import table as toggle_table
from cases.toggles import toggle_seconds
from results import environment, parser, write
from torch import Tensor

from tracefuse.captures import Capture
from tracefuse.demo import GPT
from tracefuse.execution.program import Replays
from tracefuse.measure.rounds import measure
from tracefuse.tables.summary import modules_table, passes_table
from tracefuse.text import aligned
from tracefuse.variant import Variant


def cells(arguments: Namespace) -> list[str]:
    """What a user would type, with the benchmark's own lines around it."""
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    return [
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})",
        f"import time, gpt; from cases.gpt import model_and_batch; options = gpt.Namespace(**{options!r})",
        "model, tokens, targets = model_and_batch(options)",
        "%load_ext tracefuse\nmodel(tokens, targets).backward(); model.zero_grad()",
        "start = time.perf_counter()",
        "%%tracefuse -o c --no-measure\nloss = model(tokens, targets)\nloss.backward()",
        "gpt.report(c, model, tokens, targets, options, time.perf_counter() - start)",
    ]


# --- in the kernel ----------------------------------------------------------------------------------------------------


def report(captured: Capture, model: GPT, tokens: Tensor, targets: Tensor, options: Namespace, cell_s: float) -> None:
    """Measure what the cell captured, print the tables and write the JSON.

    Must run right after the cell, which took `cell_s` seconds to record, trace, optimise and show.
    """
    of_cell = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    ops = captured.trace.op_count
    toggles = toggle_seconds(captured)
    variant = captured.optimize()
    print(modules_table(captured.trace), passes_table(variant), sep="\n\n", end="\n\n")
    print(f"{ops} ops; the cell took {cell_s:.2f} s to record, trace, optimise and show")
    print(toggle_table(toggles), end="\n\n", flush=True)

    gradients = compare_gradients(variant, of_cell, exact_gradients(model, tokens, targets, options))
    print(gradient_table(gradients), end="\n\n", flush=True)
    timing = measure(
        step_programs(variant, model, tokens, targets, options), device=options.device, budget_s=options.budget
    )
    print(timing, end="\n\n", flush=True)
    kernels = kernel_times(variant)
    record = {
        "benchmark": "gpt",
        "sizes": SMALL if options.small else SIZES,
        "dtype": "bfloat16",
        "dropout": options.dropout,
        "kernel": options.kernel,
        "environment": environment(options.device),
        "ops": ops,
        "cell_s": cell_s,
        "toggle_s": toggles,
        "gradients": gradients,
        "timing": timing.to_json(),
        "kernels": kernels,
    }
    write(Path(options.out) if options.out else None, record)


def step_programs(
    variant: Variant, model: GPT, tokens: Tensor, targets: Tensor, options: Namespace
) -> dict[str, Replays]:
    """The training step under autograd: eager, optimised and, if asked for, torch.compile."""
    parameters = list(model.parameters())
    programs = {
        "eager": training_step(lambda: model(tokens, targets), parameters),
        "tracefuse": training_step(variant.compile(), parameters),
    }
    if options.torch_compile:
        compiled = torch.compile(model)
        programs["torch.compile"] = training_step(lambda: compiled(tokens, targets), parameters)
    return programs


# --- gradients --------------------------------------------------------------------------------------------------------


def exact_gradients(model: GPT, tokens: Tensor, targets: Tensor, options: Namespace) -> dict[str, Tensor] | None:
    """Gradients of the same model in float32, without TF32; None with dropout, whose masks cannot be drawn again there."""
    if options.dropout:
        return None
    exact = copy.deepcopy(model).float()
    exact.zero_grad()
    exact(tokens, targets).backward()
    return {name: p.grad for name, p in exact.named_parameters()}


def compare_gradients(
    variant: Variant, of_cell: dict[str, Tensor], exact: dict[str, Tensor] | None
) -> dict[str, dict[str, float]]:
    """For each pair the largest absolute difference, and the largest relative one (norm over norm), of any parameter."""
    optimised = replayed_gradients(variant)
    pairs = {"tracefuse from eager": (optimised, of_cell)}
    if exact is not None:
        pairs |= {"tracefuse from float32": (optimised, exact), "eager from float32": (of_cell, exact)}
    return {name: worst(mine, reference) for name, (mine, reference) in pairs.items()}


def replayed_gradients(variant: Variant) -> dict[str, Tensor]:
    """Gradients of the optimised program on the captured inputs and generator states, by the user's name."""
    captured = variant.capture
    program = variant.compile().replays(captured.example_inputs, captured.rng_states)
    found = program.backward(program.forward())
    names = [variant.trace.input_of(name).source for name in program.gradients]
    return dict(zip(names, found, strict=True))


def gradient_table(gradients: dict[str, dict[str, float]]) -> str:
    rows = [(name, f"{g['max_abs']:.3g}", f"{g['max_relative_norm']:.3g}") for name, g in gradients.items()]
    return aligned([("gradients", "max |Δ|", "worst ‖Δ‖ / ‖g‖ of a parameter"), *rows])


# --- kernels ----------------------------------------------------------------------------------------------------------


def kernel_times(variant: Variant) -> dict[str, Any]:
    """Every kernel, Triton's and ATen's, with its measured time, bytes and share of the measured peaks."""
    found = variant.kernel_times()
    print(found, end="\n\n")
    rows = [asdict(row) for row in found.rows]
    return {"provenance": found.provenance, "peaks": found.peaks, "total_us": found.total_us, "rows": rows}


# --- the driver -------------------------------------------------------------------------------------------------------


def run_in_kernel(code: list[str], timeout_s: float) -> None:
    """Run the cells in a fresh IPython kernel, echoing what they print; ends the process with a cell's error."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    try:
        for cell in code:
            reply = client.execute_interactive(cell, timeout=timeout_s, output_hook=echo)["content"]
            if reply["status"] != "ok":
                raise SystemExit("\n".join(reply.get("traceback", [json.dumps(reply)])))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def echo(message: dict[str, Any]) -> None:
    content = message["content"]
    if message["msg_type"] == "stream":
        print(content["text"], end="", flush=True)
    elif message["msg_type"] in ("display_data", "execute_result"):
        print(content["data"].get("text/plain", ""), flush=True)


def run_in_process(code: list[str]) -> None:
    """Run the cells in an IPython shell of this process."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    for cell in code:
        shell.run_cell(cell).raise_error()


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--kernel", choices=("jupyter", "inprocess"), default="jupyter")
    made.add_argument("--dropout", type=float, default=0.0)
    made.add_argument("--torch-compile", action="store_true", help="time torch.compile too; it compiles first")
    made.add_argument("--timeout", type=float, default=540.0, help="seconds per cell (default: 540)")
    arguments = made.parse_args()
    if arguments.out:
        arguments.out = arguments.out.resolve()
    if arguments.kernel == "jupyter":
        run_in_kernel(cells(arguments), arguments.timeout)
    else:
        run_in_process(cells(arguments))


if __name__ == "__main__":
    sys.exit(main())
