"""Random small programs of the ops that kernels hold, drawn by Hypothesis, as text that runs.

    program = typed inputs x0, x1, …; lines "v3 = torch.sin(v1)", each legal for the shapes above it; two results

A drawn program prints as the Python function it is, so that a falsifying example is a reproducer that can be pasted. Shapes
are followed on the meta device while lines are drawn: nothing is computed, and nothing illegal is drawn and thrown away.

Where an op is discontinuous (`relu`'s gradient, `amax`, comparisons), two correct programs in low precision may differ by
more than rounding. Such ops, "sharp" below, are drawn only for programs that are float64 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import drawn_parts
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

MAX_NUMEL = 3000
SIZES = (1, 2, 3, 4, 5, 8, 17, 33)
SHORT = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool"}


NAMES: dict[str, Any] = {"torch": torch, "F": F, "f32": torch.float32, "bf16": torch.bfloat16}
"""What the text of a program may say."""


@dataclass(frozen=True)
class Argument:
    """An input: `order` is the order of its dimensions in memory, `below` the bound of an integer one."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    order: tuple[int, ...] = ()
    below: int = 0

    def make(self, generator: torch.Generator) -> Tensor:
        """Random values; not a leaf of autograd yet."""
        stored = [self.shape[d] for d in self.order] if self.order else list(self.shape)
        if self.dtype is torch.int64:
            made = torch.randint(self.below, stored, generator=generator)
        else:
            made = torch.randn(stored, generator=generator, dtype=torch.float64)
            made = made > 0 if self.dtype is torch.bool else made.to(self.dtype)
        return made.permute([self.order.index(d) for d in range(len(self.order))]) if self.order else made

    def __str__(self) -> str:
        notes = [f"in memory order {list(self.order)}"] * bool(self.order) + ["with gradient"] * self.requires_grad
        return f"# {self.name}: {SHORT[self.dtype]}{list(self.shape)} {', '.join(notes)}".rstrip()


@dataclass(frozen=True)
class Drawn:
    """A program: call it with its inputs, in order, and it returns its results. `dtype` is the one it starts in."""

    arguments: tuple[Argument, ...]
    lines: tuple[str, ...]
    results: tuple[str, ...]
    dtype: torch.dtype

    def inputs(self) -> list[Tensor]:
        """Fresh inputs, the same at each call."""
        generator = torch.Generator().manual_seed(len(self.lines))
        return [a.make(generator).requires_grad_(a.requires_grad) for a in self.arguments]

    @property
    def source(self) -> str:
        body = [*self.lines, f"return [{', '.join(self.results)}]"]
        head = f"def program({', '.join(a.name for a in self.arguments)}):"
        return "\n".join([*map(str, self.arguments), head, *(f"    {line}" for line in body)])

    def __call__(self, *inputs: Tensor, casts_to: torch.dtype | None = None) -> list[Tensor]:
        """Its results; `casts_to` replaces the low precisions that it casts to, for a reference that does not round."""
        names = NAMES | {name: casts_to or NAMES[name] for name in ("f32", "bf16")}
        exec(self.source, names)  # our own text, drawn below
        return names["program"](*inputs)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How Hypothesis shows an example that fails."""
        printer.text(f"\n{self.source}\n")


# --- drawing ----------------------------------------------------------------------------------------------------------


@dataclass
class Draft:
    """A program being drawn: its values so far on the meta device, the floating ones by name in `floats`."""

    draw: Callable
    dtype: torch.dtype
    arguments: list[Argument] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    floats: dict[str, Tensor] = field(default_factory=dict)

    def argument(self, shape: tuple[int, ...], dtype: torch.dtype | None = None, **options: object) -> str:
        """The name of a new input."""
        dtype = dtype or self.dtype
        wants_gradient = dtype.is_floating_point and self.draw(st.booleans())
        made = Argument(f"x{len(self.arguments)}", tuple(shape), dtype, wants_gradient, **options)  # type: ignore[arg-type]
        self.arguments.append(made)
        if dtype.is_floating_point:
            self.floats[made.name] = torch.empty(shape, dtype=dtype, device="meta")
        return made.name

    def add(self, text: str) -> None:
        """The line that assigns `text` to a new value; not where that would be large."""
        known = {a.name: torch.empty(a.shape, dtype=a.dtype, device="meta") for a in self.arguments}
        value = eval(text, NAMES, known | self.floats)
        if value.numel() <= MAX_NUMEL:
            name = f"v{len(self.lines)}"
            self.lines.append(f"{name} = {text}")
            self.floats[name] = value

    def one(self, suits: Callable[[Tensor], bool] = lambda t: True) -> str | None:
        """The name of a value that `suits`, later ones more often; None where there is none."""
        names = [n for n, t in reversed(self.floats.items()) if suits(t)]
        return self.draw(st.sampled_from(names)) if names else None

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def choice(self, options: list | tuple) -> object:
        return self.draw(st.sampled_from(options))


def broadcast(shape: torch.Size, other: torch.Size) -> bool:
    """Whether two shapes go together without a dimension of either being missing from the result's size limit."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


SMOOTH = [
    "torch.sin({x})", "{x}.cos() * 2", "torch.tanh({x})", "torch.sigmoid({x})", "F.gelu({x})", "F.silu({x})",
    "F.gelu({x}, approximate='tanh')", "F.softplus({x})", "torch.exp(-{x} * {x})", "torch.erf({x})", "-{x}", "2 - {x}",
    "torch.rsqrt({x} * {x} + 1)", "torch.log({x} * {x} + 1)", "({x} * 0.5) ** 2", "{x} * 0.5 + 1", "{x}.clone()",
    "({x} * {x} + 0.1).sqrt()", "{x} + torch.ones_like({x})", "{x}.detach() * {x}",
    "{x} + torch.arange({x}.shape[-1], dtype={x}.dtype, device={x}.device) / 7",
]  # fmt: skip
SHARP = [
    "torch.relu({x})", "{x}.abs()", "F.leaky_relu({x}, 0.1)", "{x}.clamp(-0.5, 0.7)", "torch.where({x} > 0, {x}, 0.5)",
    "{x}.masked_fill({x} > 1, 0.0)", "{x} - {x}.floor()", "({x} > 0.25).to({x}.dtype) * {x}",
    "({x} * 8).to(torch.int32).to({x}.dtype)", "torch.where(({x} > 0) & ~({x} > 1), {x}, 2 * {x})",
]  # fmt: skip
BINARY = ["{x} + {y}", "{x} * {y}.tanh()", "{x} - 2 * {y}", "{x} / ({y} * {y} + 1)", "torch.lerp({x}, {y}, 0.25)"]
SHARP_BINARY = ["torch.maximum({x}, {y})", "torch.where({x} > {y}, {x}, {y})"]


def _unary(draft: Draft, sharp: bool) -> None:
    text = draft.choice(SMOOTH + SHARP if sharp else SMOOTH)
    x = draft.one(lambda t: t.dim() > 0)
    if x:
        draft.add(text.format(x=x))  # type: ignore[attr-defined]


def _binary(draft: Draft, sharp: bool) -> None:
    x = draft.one()
    like = draft.floats[x]  # type: ignore[index]
    y = draft.one(lambda t: broadcast(t.shape, like.shape) and t.dtype == like.dtype)
    draft.add(draft.choice(BINARY + SHARP_BINARY if sharp else BINARY).format(x=x, y=y))  # type: ignore[attr-defined]


def _masked(draft: Draft, sharp: bool) -> None:
    """A mask that is data: broadcast from some of the value's trailing dimensions."""
    x = draft.one()
    shape = draft.floats[x].shape  # type: ignore[index]
    mask = draft.argument(tuple(shape[draft.integer(0, len(shape)) :]), torch.bool)
    draft.add(draft.choice(["torch.where({m}, {x}, 0.5)", "{x}.masked_fill({m}, -1.0)"]).format(m=mask, x=x))  # type: ignore[attr-defined]


def _view(draft: Draft, sharp: bool) -> None:
    x = draft.one(lambda t: t.dim() > 0)
    if x is None:
        return
    shape = list(draft.floats[x].shape)
    dim = draft.integer(0, len(shape) - 1)
    size = shape[dim]
    start = draft.integer(0, size - 1)
    factor = draft.choice([f for f in range(1, size + 1) if size % f == 0])
    texts = [
        f"{x}.permute({draft.draw(st.permutations(range(len(shape))))})",
        f"{x}.transpose({dim}, -1).contiguous()",
        f"{x}.narrow({dim}, {start}, {draft.integer(1, size - start)})",
        f"torch.ops.aten.slice({x}, {dim}, {start}, {size}, {draft.integer(1, 3)})",
        f"{x}.select({dim}, {start})",
        f"{x}.unsqueeze({dim})",
        f"{x}.reshape({[*shape[:dim], math.prod(shape[dim:])]})",
        f"{x}.unflatten({dim}, ({factor}, {size // factor}))",  # type: ignore[operator]
        f"{x}.unsqueeze({dim}).expand({[*shape[:dim], draft.integer(2, 4), *shape[dim:]]})",
        f"{x}.repeat({[1] * dim + [2] + [1] * (len(shape) - dim - 1)})",
    ]
    draft.add(draft.choice(texts))  # type: ignore[arg-type]


def _reduction(draft: Draft, sharp: bool) -> None:
    x = draft.one(lambda t: t.dim() > 0)
    if x is None:
        return
    shape = draft.floats[x].shape
    dims = sorted(draft.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    keep, dim = draft.draw(st.booleans()), dims[-1]
    width = shape[draft.integer(0, len(shape) - 1) :]
    texts = [
        f"{x}.sum({dims}, keepdim={keep})",
        f"{x}.mean({dims}, keepdim={keep})",
        f"{x} - {x}.mean({dims}, keepdim=True)",
        f"{x}.var({dims}, correction=0, keepdim={keep})",
        f"torch.logsumexp({x}, {dims}, keepdim={keep})",
        f"torch.softmax({x}, {dim})",
        f"torch.log_softmax({x}, {dim})",
        f"F.layer_norm({x}, {list(width)}, eps=0.1)",
        f"F.rms_norm({x}, {list(width)}, eps=0.1)",
        f"{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 0.1)",
        *([f"{x}.amax({dims}, keepdim={keep})"] if sharp else []),
    ]
    draft.add(draft.choice(texts))  # type: ignore[arg-type]


def _affine_norm(draft: Draft, sharp: bool) -> None:
    x = draft.one(lambda t: t.dim() > 0 and t.dtype == draft.dtype)
    if x is None:
        return
    width = tuple(draft.floats[x].shape[-1:])
    weight, bias = draft.argument(width), draft.argument(width)
    texts = [f"F.layer_norm({x}, {list(width)}, {weight}, {bias}, 0.1)", f"{x} * {weight} + {bias}"]
    draft.add(draft.choice(texts))  # type: ignore[arg-type]


def _gather(draft: Draft, sharp: bool) -> None:
    x = draft.one(lambda t: t.dim() == 2)
    if x is None:
        return
    rows, columns = draft.floats[x].shape
    count = draft.integer(1, 5)
    kind = draft.integer(0, 3)
    below, shape = ((rows, (count, 2)), (rows, (count,)), (columns, (rows, 1)), (columns, (rows,)))[kind]
    index = draft.argument(shape, torch.int64, below=below)
    texts = ("F.embedding({i}, {x})", "{x}.index_select(0, {i})", "{x}.gather(1, {i})", "F.cross_entropy({x}, {i})")
    draft.add(texts[kind].format(x=x, i=index))


def _matmul(draft: Draft, sharp: bool) -> None:
    """Where regions end: no kernel holds it."""
    x = draft.one(lambda t: t.dim() > 1 and t.dtype == draft.dtype)
    if x is not None:
        weight = draft.argument((draft.floats[x].shape[-1], draft.choice([3, 4, 8])))  # type: ignore[arg-type]
        draft.add(f"({x} @ {weight}) * 0.3")


def _cast(draft: Draft, sharp: bool) -> None:
    """In float64 programs there is nothing to cast to that would leave them as precise."""
    x = draft.one()
    if not sharp:
        own, other = ("f32", "bf16") if draft.dtype is torch.float32 else ("bf16", "f32")
        draft.add(f"{x}.to({other if draft.floats[x].dtype == draft.dtype else own})")  # type: ignore[index]


FAMILIES = [_unary, _unary, _binary, _binary, _masked, _view, _view, _reduction, _reduction]
FAMILIES += [_affine_norm, _gather, _matmul, _cast, drawn_parts.cat, drawn_parts.parts, drawn_parts.interleaved]


@st.composite
def programs(draw: Callable, dtype: torch.dtype, most_lines: int = 12) -> Drawn:
    """A program that starts in `dtype`; in one of lower precision than float64 nothing is sharp."""
    draft = Draft(draw, dtype)
    shape = draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= MAX_NUMEL))
    order = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else ()
    draft.argument(tuple(shape), order=order)
    draft.argument(tuple(size if draw(st.booleans()) else 1 for size in shape))
    for _ in range(draw(st.integers(2, most_lines))):
        draw(st.sampled_from(FAMILIES))(draft, dtype is torch.float64)
    made = [line.split(" = ")[0] for line in draft.lines]
    if not made:
        draft.add("x0 + 1")
        made = ["v0"]
    results = tuple(dict.fromkeys([made[-1], draw(st.sampled_from(made))]))
    return Drawn(tuple(draft.arguments), tuple(draft.lines), results, dtype)
