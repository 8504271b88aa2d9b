"""A GPT's training step beside eager and torch.compile: forward, backward and step in the same rounds, and kernel by kernel.

    python tests/bench/gpt_step.py --out gpt_step.json
    python tests/bench/gpt_step.py --program tf32 --peer torch.compile --breakdown
    python tests/bench/gpt_step.py --program bf16 --peer reduce-overhead --no-cuda-graph

The GPT has 12 layers, 768 wide, 12 heads, a vocabulary of 50257, a batch of 8 x 1024 and no dropout. There are two programs:

    bf16    scaled_dot_product_attention in bfloat16
    tf32    attention by hand (matmul, masked_fill, softmax, dropout, matmul) in float32 on TF32 tensor cores

The step is captured once; the peers of `tracefuse.measure.peers` run beside it, ours with and without CUDA graphs. Modes of
torch.compile with CUDA graphs are timed in runs of their own, without ours. `--breakdown` tells the GPU time of ours and of
torch.compile's by kernel (`cases/breakdown.py`).
"""

from __future__ import annotations

import functools
from argparse import Namespace
from typing import Any

import torch
from cases.breakdown import breakdown, table, to_json
from cases.gpt import SIZES, SMALL, model_of
from results import environment, parser, write

import tracefuse
from tracefuse.demo import batch
from tracefuse.measure.peer_names import COMPILE, PEERS
from tracefuse.measure.peers import check_names, stand_in
from tracefuse.variant import Variant

PROGRAMS = ("bf16", "tf32")
USUAL = ("eager", COMPILE)


def captured(program: str, sizes: dict[str, int], options: Namespace) -> Variant:
    """The step of `program`, captured, with the passes that were asked for."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if program == "tf32" else "highest")
    model = model_of(program, sizes, options.device)
    data = batch(sizes["vocab"], sizes["batch"], sizes["length"], options.device)
    model(*data).backward()
    model.zero_grad()
    return tracefuse.capture(lambda: model(*data).backward()).optimize(**dict.fromkeys(options.no_pass, False))


def by_kernel(variant: Variant) -> dict[str, Any]:
    """Ours and torch.compile's step taken apart; prints the tables."""
    capture = variant.capture
    names = tuple(f"{kernel.name}_" for kernel in variant.kernels)
    ours = variant.compile().replays(capture.example_inputs, capture.rng_states)
    found = {
        "tracefuse": breakdown(ours, lambda kernel: kernel.startswith(names)),
        COMPILE: breakdown(stand_in(variant, COMPILE), lambda _: False),
    }
    print(table(found), end="\n\n", flush=True)
    return to_json(found)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--program", action="append", choices=PROGRAMS, help="which (default: both)")
    made.add_argument("--vocab", type=int, help="another vocabulary, such as 50304, which is aligned")
    made.add_argument("--peer", action="append", help=f"of {', '.join(PEERS)} (default: {', '.join(USUAL)})")
    made.add_argument("--no-pass", action="append", default=[], metavar="NAME", help="leave a pass of ours out")
    made.add_argument("--no-cuda-graph", action="store_true", help="leave out ours as CUDA graphs")
    made.add_argument("--tune", action="store_true", help="time a few block sizes of our kernels first")
    made.add_argument("--breakdown", action="store_true", help="GPU time by kernel too; needs a CUDA GPU")
    options = made.parse_args()
    if options.breakdown and options.device != "cuda":
        made.error("--breakdown reads the profile of a GPU: leave it out on a CPU")
    sizes = {**(SMALL if options.small else SIZES), **({"vocab": options.vocab} if options.vocab else {})}
    programs = {}
    for program in options.program or PROGRAMS:
        variant = captured(program, sizes, options)
        timing = variant.measure(
            functools.partial(print, flush=True) if options.device == "cuda" else None,
            options.budget,
            cuda_graph=options.device == "cuda" and not options.no_cuda_graph,
            tune=options.tune,
            peers=check_names(options.peer or USUAL),
        )
        print(f"{program}, vocabulary {sizes['vocab']}", timing, sep="\n", end="\n\n", flush=True)
        programs[program] = {"timing": timing.to_json(), "kernels": len(variant.kernels)}
        if options.breakdown:
            programs[program]["breakdown"] = by_kernel(variant)
        del variant
    record = {"benchmark": "gpt_step", "sizes": sizes, "without": options.no_pass, "programs": programs}
    write(options.out, {**record, "environment": environment(options.device)})


if __name__ == "__main__":
    main()
