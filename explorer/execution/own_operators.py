"""Operators of the user's own in an exported file: what must have registered them, functional forms of those that mutate."""

from __future__ import annotations

from collections.abc import Sequence
from keyword import iskeyword

import torch

from tracefuse.assembly.writes import made_for
from tracefuse.errors import ExportError
from tracefuse.optimizers.render import INDENT, literal
from tracefuse.optimizers.trace import Trace
from tracefuse.recording.calls import is_written

IMPORT_TORCH = "import torch"
_OF_TORCH = {"aten", "prim", "prims", "rngprims", "quantized", "mkldnn", "c10d", "_c10d_functional", "inductor"}


def with_imports(source: str, imports: Sequence[str]) -> str:
    """The file that imports these modules first. Raises `ExportError` for what is no module's name."""
    for name in imports:
        if not all(part.isidentifier() and not iskeyword(part) for part in name.split(".")):
            raise ExportError(f"imports={name!r} is no module: pass the names of modules, such as imports=['my_ops']")
    lines = "".join(f"import {name}\n" for name in imports)
    return source.replace(f"\n{IMPORT_TORCH}\n", f"\n{IMPORT_TORCH}\n{lines}", 1)


def operators_to_register(trace: Trace) -> list[str]:
    """The operators of `trace` that are none of PyTorch's own, "my_ops::twice": whoever runs it must have registered them."""
    found = (made_for(n.target) or n.target for n in trace.ops if isinstance(n.target, torch._ops.OpOverload))
    return sorted({one._schema.name for one in found if one.namespace not in _OF_TORCH})


def register_lines(trace: Trace) -> list[str]:
    """Lines that raise where an operator is not registered, before a line that calls it does."""
    return [
        line
        for namespace, _, name in (one.partition("::") for one in operators_to_register(trace))
        for line in (
            f"if not hasattr(torch.ops.{namespace}, {name!r}):",
            f"{INDENT}raise ImportError(",
            f'{INDENT * 2}"nothing has registered the operator {namespace}::{name}, which this program calls: "',
            f"{INDENT * 2}\"import the module that does before this file, or export it with imports=['that_module']\"",
            f"{INDENT})",
        )
    ]


def on_copies(trace: Trace) -> dict[str, tuple[str, str]]:
    """What the trace calls for each operator that mutates, with the name and the text of a function that stands for it."""
    found = {}
    for node in trace.ops:
        if (func := made_for(node.target)) is not None:
            name = f"on_copies_of_{func._schema.name.replace('::', '_').replace('.', '_')}"
            found[f"torch.ops.{node.target}"] = name, _on_copies(func, name)
    return found


def _on_copies(func: torch._ops.OpOverload, name: str) -> str:
    """A function that copies what `func` overwrites, runs it, and returns what it returns, then the copies."""
    arguments = func._schema.arguments
    by_position = [_parameter(a) for a in arguments if not a.kwarg_only]
    by_name = [_parameter(a) for a in arguments if a.kwarg_only]
    given = [f"{a.name}={a.name}" if a.kwarg_only else a.name for a in arguments]
    written = [a for a in arguments if is_written(a)]
    copies = [
        f"{a.name} = {f'[t.clone() for t in {a.name}]' if 'List' in str(a.type) else f'{a.name}.clone()'}"
        for a in written
    ]
    count = len(func._schema.returns)
    returned = [*(["*found"] if count > 1 else ["found"] * count), *(a.name for a in written)]
    return "\n".join(
        [
            f"def {name}({', '.join([*by_position, *(['*', *by_name] if by_name else [])])}):",
            f'{INDENT}"""The functional form of {func}, which overwrites {", ".join(a.name for a in written)}."""',
            *(f"{INDENT}{line}" for line in copies),
            f"{INDENT}{'found = ' if count else ''}torch.ops.{func}({', '.join(given)})",
            f"{INDENT}return {', '.join(returned)}",
        ]
    )


def _parameter(argument: torch.Argument) -> str:
    return f"{argument.name}={literal(argument.default_value)}" if argument.has_default_value() else argument.name
