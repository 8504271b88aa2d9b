"""Where in the user's program an op comes from: its line, its module, and the autograd node that ran it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Line:
    """A line of a program: `file`, 1-based `line`, enclosing `function`, and the line's own `text`.

    `label` is what a person calls the file: "model.py", "In[3]".
    """

    file: str
    line: int
    function: str
    text: str
    label: str = ""

    @cached_property
    def place(self) -> str:
        """`In[3]:4`"""
        return f"{self.label or self.file}:{self.line}"

    @cached_property
    def _said(self) -> str:
        return f"{self.place}  {self.text.strip()}"

    def __str__(self) -> str:
        """`In[3]:4  loss = model(x)`"""
        return self._said


@dataclass(frozen=True)
class Source(Line):
    """The innermost line of the user's program, which may stand in an installed library such as transformers: then `called` is
    the line of the user's project that called it. That does not tell two sources apart."""

    called: Line | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Origin:
    """Where an op comes from.

    `module` is the dotted path of the innermost `nn.Module` ("h.0.attn", empty outside modules), `module_type` its class,
    `source` the user's line, `autograd` the autograd node that ran the op ("MulBackward0", empty in the forward), `seq`
    autograd's sequence number, equal for an op and its forward twin, and `rng` the index of the generator state that a
    random op drew from when it was captured. `is_torchs` says that the class is one of `torch.nn`, and not the program's.
    `root` is what `module` begins with where the program has several outermost modules; while it is recorded, a number.
    """

    module: str = ""
    module_type: str = ""
    source: Source | None = None
    autograd: str = ""
    seq: int | None = None
    rng: int | None = None
    is_torchs: bool = False
    root: str = ""

    @property
    def called(self) -> tuple[str, ...]:
        """The paths that a pattern may match: the module's with its root, and without."""
        return self.module, self.module.removeprefix(self.root).removeprefix(".") if self.root else self.module

    def ran_in(self, *types: str) -> bool:
        """Whether the module is of one of these classes of `torch.nn`: one of the program's that is called alike is not."""
        return self.is_torchs and self.module_type in types


def is_torchs(kind: object) -> bool:
    """Whether a class is one of `torch.nn`."""
    return getattr(kind, "__module__", "").startswith("torch.nn.")


NOWHERE = Origin()
