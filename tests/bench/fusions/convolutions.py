"""Convolutions of the fusion programs and nets in both orders of memory: the forward and both gradients, each alone.

    python tests/bench/fusions/convolutions.py --out convolutions.json

Those of programs are in float32 with TF32, those of nets in bfloat16, as autocast runs them. Each is timed channel by channel
and channels-last, with the algorithm that cuDNN's heuristics choose and with the fastest that its search finds
(`torch.backends.cudnn.benchmark`). cuDNN keeps what it chose for a process, so that each of the four has one of its own. A
time is the least of `ROUNDS`. The model that the pass `channels_last` decides by follows these times.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from chains import PROGRAMS
from nets import NETS
from results import environment, parser, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tracefuse.device.clocks import clock_of
from tracefuse.text import aligned

ROUNDS = 5
ORDERS = ("channel by channel", "channels-last")
CHOICES = ("heuristics", "search")
PHASES = ("forward", "gradient of the input", "gradient of the weight")
aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution:
    """What a call of `aten.convolution` without a bias is of: shapes, dtype, and all other arguments."""

    images: tuple[int, ...]
    weight: tuple[int, ...]
    dtype: torch.dtype
    options: tuple[Any, ...]

    def __str__(self) -> str:
        (stride, *_), transposed, groups = self.options[0], self.options[3], self.options[5]
        sizes = f"{'x'.join(map(str, self.images))} by {'x'.join(map(str, self.weight))}"
        more = [f"stride {stride}"] * (stride > 1) + ["transposed"] * transposed + [f"{groups} groups"] * (groups > 1)
        return ", ".join([f"{sizes} {str(self.dtype).removeprefix('torch.')}", *more])


class _Seen(TorchDispatchMode):
    """The convolutions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Convolution, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.convolution.default:
            images, weight, _, *options = args
            given = tuple(tuple(one) if isinstance(one, list) else one for one in options)
            self.found[Convolution(tuple(images.shape), tuple(weight.shape), images.dtype, given)] = None
        return func(*args, **(kwargs or {}))


def convolutions(small: bool) -> list[Convolution]:
    """Those of all programs and nets, each once."""
    programs = [(p.made, p.shape(small), torch.float32) for name, p in PROGRAMS.items() if name.startswith("conv")]
    nets = [(n.made, n.small if small else n.shape, torch.bfloat16) for n in NETS.values() if n.autocast]
    with _Seen() as seen, torch.device("meta"), torch.no_grad():
        for made, shape, dtype in [*programs, *nets]:
            made(small).to(dtype)(torch.empty(shape, dtype=dtype))
    return [one for one in seen.found if len(one.images) > 3]


def calls(one: Convolution, order: str, device: str) -> list[Callable[[], Any]]:
    """The forward and the two gradients, on images and weights in this order."""
    last = torch.channels_last if len(one.images) == 4 else torch.channels_last_3d
    to = {"memory_format": torch.contiguous_format if order == ORDERS[0] else last}
    images, weight = (torch.randn(s, device=device).to(one.dtype).contiguous(**to) for s in (one.images, one.weight))
    cotangent = torch.randn_like(aten.convolution(images, weight, None, *one.options))

    def gradient(mask: list[bool]) -> Callable[[], Sequence[Tensor]]:
        return lambda: aten.convolution_backward(cotangent, images, weight, None, *one.options, mask)

    def forward() -> Tensor:
        return aten.convolution(images, weight, None, *one.options)

    return [forward, gradient([True, False, False]), gradient([False, True, False])]


def timed(found: Iterable[Convolution], order: str, choice: str, device: str) -> dict[str, list[float]]:
    """By convolution the ms of its phases. For a process of its own."""
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = choice == "search"
    clock, ms = clock_of(device), dict[str, list[float]]()
    for one in found:
        ms[str(one)] = [_least(call, clock) for call in calls(one, order, device)]
        if device == "cuda":
            torch.cuda.empty_cache()
    return ms


def _least(call: Callable[[], Any], clock: Any) -> float:
    call()
    clock.wait()
    found = []
    for _ in range(ROUNDS):
        start = clock.mark()
        call()
        end = clock.mark()
        clock.wait()
        found.append(clock.between_ms(start, end))
    return min(found)


def main() -> None:
    arguments = parser(__doc__).parse_args()
    found = convolutions(arguments.small)
    assert len(set(map(str, found))) == len(found), "two convolutions are told by one name"
    record: dict[str, Any] = {"benchmark": "convolutions", "environment": environment(arguments.device), "ms": {}}
    for order, choice in itertools.product(ORDERS, CHOICES):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            times = pool.submit(timed, found, order, choice, arguments.device).result()
        for name, ms in times.items():
            record["ms"].setdefault(name, {})[f"{order}, {choice}"] = dict(zip(PHASES, ms, strict=True))
        write(arguments.out, record, is_quiet=True)
        print(f"{order}, {choice}: {sum(map(sum, times.values())):.4g} ms in all", flush=True)
    print(summary(record["ms"]))


def summary(ms: dict[str, dict[str, dict[str, float]]]) -> str:
    """Each convolution's ms in the four, then how much faster channels-last and the search are on the whole."""
    columns = [f"{order}, {choice}" for order, choice in itertools.product(ORDERS, CHOICES)]
    total = {name: {column: sum(rows[column].values()) for column in columns} for name, rows in ms.items()}
    table = [("", *columns), *((name, *(f"{one[c]:.4g}" for c in columns)) for name, one in total.items())]
    lines = [aligned(table), ""]
    for slow, fast in ((columns[0], columns[2]), (columns[0], columns[1]), (columns[2], columns[3])):
        mean = math.exp(sum(math.log(one[slow] / one[fast]) for one in total.values()) / len(total))
        lines.append(f"{slow} / {fast}: geometric mean {mean:.3f} of {len(total)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
