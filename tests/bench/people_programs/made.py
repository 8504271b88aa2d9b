"""What a program is to `people.py`: how it is made, what its block runs, and what of it can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Made:
    """`run(*compiled)` is the block that is captured. Under a backend it is given `compiled`, modules or functions, each
    through `torch.compile`. What is compared is what it returns, and the tensors of modules and leaves with their gradients.
    """

    run: Callable[..., Any]
    compiled: tuple[Callable[..., Any], ...] = ()
    leaves: tuple[Tensor, ...] = ()
    modules: tuple[nn.Module, ...] = ()

    def all_modules(self) -> list[nn.Module]:
        return [*(one for one in self.compiled if isinstance(one, nn.Module)), *self.modules]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of every parameter, buffer and leaf, each once."""
        seen: set[int] = set()
        found = [(f"leaf {at}", leaf) for at, leaf in enumerate(self.leaves)]
        for at, module in enumerate(self.all_modules()):
            named = (*module.named_parameters(), *module.named_buffers())
            found += [(f"{at}.{name}" if at else name, tensor) for name, tensor in named]
        for name, tensor in found:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


Make = Callable[[], Made]


@dataclass(frozen=True)
class Program:
    """A program of one kind, which needs a package beside torch."""

    kind: str
    make: Make
    needs: str = "torch"


PROGRAMS: dict[str, Program] = {}
"""By name."""


def program(kind: str, needs: str = "torch") -> Callable[[Make], Make]:
    """Takes a function into `PROGRAMS` by its own name."""

    def take(make: Make) -> Make:
        add(make.__name__.strip("_").replace("_", " "), Program(kind, make, needs))
        return make

    return take


def add(name: str, one: Program) -> None:
    """Raises `ValueError` for a name that is taken."""
    if name in PROGRAMS:
        raise ValueError(f"there are two programs {name!r}")
    PROGRAMS[name] = one


def loss_of(out: Any) -> Tensor:
    """A model's own loss; of a model that has none the mean square of all that it returns and that can be trained."""
    if (loss := getattr(out, "loss", None)) is not None:
        return loss.mean()
    tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    return sum((t.real.square().mean() for t in tensors[1:]), tensors[0].square().mean())


def trained(model: nn.Module, *inputs: Any, **named: Any) -> Made:
    """The model's loss on these inputs, and its backward."""

    def run(called: Callable[..., Any]) -> Tensor:
        loss = loss_of(called(*inputs, **named))
        loss.backward()
        return loss

    leaves = [t for t in (*inputs, *named.values()) if isinstance(t, Tensor) and t.requires_grad]
    return Made(run, (model,), tuple(leaves))
