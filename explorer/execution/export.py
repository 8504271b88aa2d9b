"""Export: a variant as one Python file that needs torch, triton and the standard library.

kernels             Triton source, launcher and ATen reference of each, once
forward, backward   the optimised halves
captured_*          the halves as they were captured: what the file checks itself against
Step, run           the autograd.Function and the callable around it
example_inputs      tensors of the captured shapes; floats of the captured range, integers that were captured
python FILE         checks results and gradients against the captured program and times both

Random ops draw fresh numbers at each run, also where the program seeded its generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tracefuse.device import embedding_gradient, linear_cross_entropy, near_runtime, packed_attention, searched
from tracefuse.device.copied import below_mark
from tracefuse.device.dropout import support
from tracefuse.errors import ExportError
from tracefuse.execution.drawn import MAX_INTEGERS, behind_places, drawn_row
from tracefuse.execution.one_step import check_one_step
from tracefuse.execution.optimised import Optimised
from tracefuse.execution.own_operators import IMPORT_TORCH, on_copies, register_lines
from tracefuse.execution.spelling import CAST_ALL, casts_together, spelled, spelled_over
from tracefuse.optimizers.facts import devices, storages
from tracefuse.optimizers.kernels.launch import LAUNCH
from tracefuse.optimizers.kernels.tables import table_support
from tracefuse.optimizers.kernels.text import kernel_source
from tracefuse.optimizers.liveness import reused
from tracefuse.optimizers.lowering.layouts import GUESS
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.render import INDENT, body_lines, head_lines, literal
from tracefuse.optimizers.trace import Trace, human_bytes, nbytes, phase, tensor_type, tensors, val
from tracefuse.recording.calls import Guard

_RUNTIME_FILE = (Path(__file__).parent / "exported_runtime.py").read_text()
_NEAR = below_mark(Path(near_runtime.__file__))
_RUNTIME = f"{_NEAR}\n\n\n{_RUNTIME_FILE.split('# --- copied into every exported file ---')[1].lstrip()}"
_MAIN = 'if __name__ == "__main__":\n    main()\n'
_BOXED = "boxed"
MAX_GUARDS = 20  # Lines of a file's head that say which path was taken.


def python_file(path: Path) -> Path:
    """`path`, or `ExportError` if it is no `.py` file in a directory that exists."""
    if path.is_dir():
        raise ExportError(f"{path} is a directory: name a file in it, such as {path / 'step.py'}")
    if path.suffix != ".py":
        raise ExportError(f"{path} does not end in .py: name a Python file, such as {path.with_suffix('.py')}")
    if not path.parent.is_dir():
        raise ExportError(f"there is no directory {path.parent}: create it, or name another one")
    return path


@dataclass(frozen=True)
class Further:
    """What a file of a whole step has beside forward and backward: `about` at its top, the `kernels` and the `function` of the
    update, which stands with the halves, its `captured` twin, `tables`, the text of what runs it, and what this imports."""

    about: tuple[str, ...]
    kernels: tuple[str, ...]
    function: str
    captured: str
    tables: str
    runtime: str
    imports: tuple[str, ...] = ()


def module_source(variant: Optimised, further: Further | None = None) -> str:
    """The file's text. Raises `ExportError` for what is more than one differentiable step."""
    forward, backward = variant.forward, variant.backward
    captured_forward, captured_backward = variant.program.forward, variant.program.backward
    check_one_step(variant)
    twins = on_copies(variant.program.trace)
    sections = [
        _header(variant, further),
        *(text for _, text in twins.values()),
        *_functions(variant, True, further),
        _rule("the program as it was captured"),
        rendered(captured_forward).replace("def forward(", "def captured_forward(", 1),
        render_boxed(captured_backward, "captured_backward"),
        further.captured if further else "",
        _rule("its signature"),
        _tables(variant, forward, backward, captured_backward),
        further.tables if further else "",
        _rule("running it"),
        *([_RUNTIME.removesuffix(_MAIN), further.runtime] if further else [_RUNTIME]),
    ]
    source = "\n\n".join(s.strip("\n") for s in sections if s) + "\n"
    for call, (name, _) in twins.items():
        source = source.replace(f"{call}(", f"{name}(")
    return source


def functions_source(variant: Optimised, texts: Mapping[str, str] | None = None) -> str:
    """A module of the optimised `forward` and `backward` (boxed) alone, with what they call, at the least cost to the host.
    The backward may be run again on what the forward has kept. `texts` are those of its kernels (default:
    `kernel_texts`)."""
    imports = "import math\n\nimport torch" + (
        "\nimport triton\nimport triton.language as tl" if _needs_triton(variant) else ""
    )
    return "\n\n".join(s.strip("\n") for s in [imports, *_functions(variant, False, texts=texts)] if s) + "\n"


def _needs_triton(variant: Optimised) -> bool:
    halves = rendered(variant.forward) + rendered(variant.backward)
    return bool(variant.kernels) or any(
        one.TEXT.is_called(halves) for one in (linear_cross_entropy, embedding_gradient)
    )


def kernel_texts(variant: Optimised) -> dict[str, str]:
    """The text of each kernel by its name."""
    return {
        kernel.name: kernel_source(kernel, variant.tunings.get(kernel.name, GUESS), variant.fallbacks.get(kernel.name))
        for kernel in variant.kernels
    }


def _functions(
    variant: Optimised,
    is_backward_once: bool,
    further: Further | None = None,
    texts: Mapping[str, str] | None = None,
) -> list[str]:
    """The kernels and the optimised halves, and the update."""
    texts = kernel_texts(variant) if texts is None else texts
    kernels = [*texts.values(), *(further.kernels if further else ())]
    optimised = _halves(variant, is_backward_once)
    casts = CAST_ALL if any("= cast_all(" in half for half in optimised) else ""
    optimised += [further.function] if further else []
    return [
        *([_rule("kernels"), LAUNCH] if kernels else []),
        table_support("\n".join(kernels)),
        support("\n".join([*kernels, *optimised])),
        *(
            one.TEXT.support("\n".join(optimised))
            for one in (packed_attention, linear_cross_entropy, embedding_gradient, searched)
        ),
        casts,
        *kernels,
        _rule("the optimised program"),
        *optimised,
    ]


def halves_source(variant: Optimised) -> str:
    """The part of `functions_source` that a program's sizes are in, but for its kernels: `forward` and `backward`."""
    return "\n\n".join(_halves(variant, False))


def _halves(variant: Optimised, is_backward_once: bool) -> list[str]:
    forward, backward = variant.forward, variant.backward
    over = {node.name: operand.name for node, operand in _overwritten(variant, is_backward_once).items()}
    return [
        rendered(forward, spelled_over(casts_together(forward), over)),
        render_boxed(backward, "backward", spelled_over(casts_together(backward), over)),
    ]


def _overwritten(variant: Optimised, is_backward_once: bool) -> dict[torch.fx.Node, torch.fx.Node]:
    """By kernel, the operand that its result is written over; what the forward keeps only where the backward runs once."""
    return {
        kernel: operand
        for kernel, operand in reused(variant.trace).items()
        if is_backward_once or phase(kernel) == phase(operand)
    }


def render_boxed(trace: Trace, name: str, written: Callable[[torch.fx.Node], str] = spelled) -> str:
    """`trace` as a function that takes its inputs in one list and empties it, so that each can be freed after its last use."""
    lines = [f"def {name}({_BOXED}):"]
    if trace.inputs:
        lines.append(f"{INDENT}({', '.join(i.name for i in trace.inputs)},) = {_BOXED}")
        lines.append(f"{INDENT}{_BOXED}.clear()")
        lines += [
            f"{INDENT}# {i.name}: {tensor_type(val(p))}  {human_bytes(nbytes(p))}  {i.kind}"
            for i, p in trace.input_pairs
        ]
    return "\n".join([*lines, *_checked_lines(trace, written)]) + "\n"


def rendered(trace: Trace, written: Callable[[torch.fx.Node], str] = spelled) -> str:
    return "\n".join([*head_lines(trace), *_checked_lines(trace, written)]) + "\n"


def _checked_lines(trace: Trace, written: Callable[[torch.fx.Node], str]) -> Iterator[str]:
    """The body of `trace`; behind each value whose size depends on the data, a check that it is the captured one."""
    sized = {node.name: tensors(node) for node in trace.ops if _has_size_of_data(node)}
    for text, name in body_lines(trace, written):
        yield text
        shapes = tuple(tuple(tensor.shape) for tensor in sized.get(name or "", ()))
        if shapes:
            yield f"{INDENT}expect_sizes({name}, {shapes!r}, {name!r})"


def _has_size_of_data(node: torch.fx.Node) -> bool:
    """`nonzero`, `unique`, `x[mask]`; not `x[numbers]`, whose operator is the same."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in node.target.tags:
        return False
    masks = (torch.bool, torch.uint8)
    return node.target is not torch.ops.aten.index.Tensor or any(
        val(n).dtype in masks for n in node.all_input_nodes[1:]
    )


def _header(variant: Optimised, further: Further | None = None) -> str:
    environment = _in_docstring(", ".join(f"{k} {v}" for k, v in variant.program.environment.items()))
    has_kernels = _needs_triton(variant) or bool(further and further.kernels)
    needs, what = (
        "torch and triton" if has_kernels else "torch",
        "Whole training step" if further else "Forward and backward",
    )
    lines = [
        f'"""{what} of a captured program, written by tracefuse {version("tracefuse")}. Needs only {needs}.',
        "",
        *map(_in_docstring, further.about if further else ()),
        f"Captured with {environment}.",
        f"Passes: {_in_docstring(variant.call)}",
        "",
        *_path_taken(variant.program.guards if further else [g for g in variant.program.guards if not g.in_update]),
        "`python` this file to check it against the program as it was captured and to time both. Import it for `run`, a",
        'differentiable function of the inputs listed in INPUTS, or for the bare `forward` and `backward`.\n"""',
        "",
        *(
            f"import {name}"
            for name in sorted({"math", "statistics", "sys", "time", *(further.imports if further else ())})
        ),
        "",
        IMPORT_TORCH,
    ]
    if has_kernels:
        lines += ["import triton", "import triton.language as tl"]
    return "\n".join([*lines, *register_lines(variant.program.trace)])


def _path_taken(guards: Sequence[Guard]) -> list[str]:
    """What inputs must give for the file to hold: the Python values that the captured program read from its tensors."""
    if not guards:
        return []
    places = [f"  {g.source}" if g.source else "" for g in guards]
    lines = [f"  {g.value!r}{place}" for g, place in zip(guards, places, strict=True)]
    more = [f"  and {len(lines) - MAX_GUARDS} more"] if len(lines) > MAX_GUARDS else []
    text = "It takes the path that the captured run took, which read these values from its tensors; others may want another:"
    return [text, *map(_in_docstring, lines[:MAX_GUARDS]), *more, ""]


def _in_docstring(text: str) -> str:
    """`text` as it may stand in a docstring, which it cannot end: globs and a loaded session's environment are anybody's."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _rule(title: str) -> str:
    return f"# --- {title} ".ljust(120, "-")


def _tables(variant: Optimised, forward: Trace, backward: Trace, captured_backward: Trace) -> str:
    results = [out.of for out in forward.outputs if out.kind == "result"]
    late = [out.of for out in backward.outputs if out.kind == "result"]
    names = [i.name for i in forward.inputs]
    mutations = {out.of: k for k, out in enumerate(forward.outputs) if out.kind == "mutation"}
    captured = variant.program.forward
    rows = [f"    {_input_row(i.name, i.source, p)}," for i, p in forward.input_pairs]
    places = behind_places(variant.program.trace)
    examples = zip(names, variant.program.example_inputs, strict=False)  # behind the inputs come the cotangents
    drawn = [f"    {drawn_row(t, name in places)}," for name, t in examples]
    cotangents = [i for i in backward.inputs if i.kind == "cotangent"]
    seeds = variant.program.example_inputs[len(names) :]
    return "\n".join(
        [
            "# name, what the captured program called it, shape, stride, dtype",
            "INPUTS = [",
            *rows,
            "]",
            "# what example_inputs draws from: the captured mean, standard deviation, least and greatest, of complex tensors",
            f"# of both parts; of integers the captured ones, or how more than {MAX_INTEGERS} are drawn and of which values",
            "DRAWN = [",
            *drawn,
            "]",
            f"RESULTS = {results!r}",
            f"WATCHED = {_watched(forward)!r}  # results that share memory with what backward reads, not its count of writes",
            f"LATE = {late!r}  # results that backward returns before the gradients, of which it computes them",
            f"MUTATED = {mutations!r}  # input -> position of its new value in what forward returns",
            f"CAPTURED_MUTATED = { {o.of: k for k, o in enumerate(captured.outputs) if o.kind == 'mutation'}!r}",
            f"ROOTS = {[results.index(i.source) for i in cotangents]!r}  # the results that have a cotangent",
            f"COTANGENTS = {[_layout(p) for p in backward.placeholders if p.name in {i.name for i in cotangents}]}",
            f"SEEDS = {literal([_constant(t) for t in seeds])}  # what the cotangents were, None: not one number",
            f"READ_AGAIN = {[names.index(i.name) for i in backward.inputs if i.name in names]!r}  # inputs of backward too",
            f"CAPTURED_READ_AGAIN = {[names.index(i.name) for i in captured_backward.inputs if i.name in names]!r}",
            f"GRADIENTS = {_gradients(backward, names)!r}  # the inputs whose gradients are returned",
            f"CAPTURED_GRADIENTS = {_gradients(captured_backward, names)!r}",
            f"COARSEST = {_coarsest(variant.program.trace)}  # the floating dtype that rounds most",
            f"ROUNDS_AS = {rounds_as(variant.program.trace)}  # what ATen computes some ops in, whatever their dtype",
            f"SIZED_BY_DATA = {[n.name for n in variant.program.trace.ops if _has_size_of_data(n)]!r}",
            f"HAS_KERNELS = {_needs_triton(variant)}",
            f'DEVICE = "{_device(variant)}"',
            f"ON_CPU = {_on_cpu(variant, len(names))!r}  # inputs that lie there although DEVICE is another",
        ]
    )


def _watched(forward: Trace) -> list[int]:
    """The positions of results in memory that the forward keeps under another count of writes: that of a matmul of three
    dimensions, which ATen hands out as if it were no view of the matmul of two."""
    kept = {
        (memory, _counted_with(node))
        for out, node in forward.output_pairs
        if out.kind == "saved"
        for memory in storages(node)
    }
    results = [node for out, node in forward.output_pairs if out.kind == "result"]
    return [
        at
        for at, node in enumerate(results)
        if any(memory in storages(node) and one is not _counted_with(node) for memory, one in kept)
    ]


def _counted_with(node: torch.fx.Node) -> torch.fx.Node:
    """The value whose count of writes autograd has for the node: what it is a view of, back to one that ATen counts anew."""
    while is_view(node) and node.target is not torch.ops.aten._unsafe_view.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _gradients(backward: Trace, names: Sequence[str]) -> list[int]:
    return [names.index(out.of) for out in backward.outputs if out.kind == "gradient"]


_IN_SIXTHS = {
    torch.ops.aten.hardswish.default,
    torch.ops.aten.hardswish_backward.default,
    torch.ops.aten.hardsigmoid.default,
    torch.ops.aten.hardsigmoid_backward.default,
}
"""Operators whose ATen kernels for CUDA hold 1/6 or 1/3 as float32 does, in float64 too; seen on torch 2.11."""


def rounds_as(trace: Trace) -> torch.dtype:
    """The dtype that no rounding of ATen's is finer than: float64 but for ops that compute in another one than theirs."""
    in_sixths = any(node.target in _IN_SIXTHS and devices(node)[0].type == "cuda" for node in trace.ops)
    return torch.float32 if in_sixths else torch.float64


def _coarsest(trace: Trace) -> torch.dtype:
    dtypes = {tensor.dtype for node in trace.graph.nodes for tensor in tensors(node) if tensor.is_floating_point()}
    return max({*dtypes, rounds_as(trace)}, key=lambda dtype: torch.finfo(dtype).eps)


def _input_row(name: str, source: str, placeholder: torch.fx.Node) -> str:
    value = val(placeholder)
    return f"({name!r}, {source!r}, {tuple(value.shape)!r}, {tuple(value.stride())!r}, {value.dtype})"


def _layout(placeholder: torch.fx.Node) -> Any:
    return tuple(val(placeholder).shape), tuple(val(placeholder).stride())


def _constant(tensor: torch.Tensor) -> float | complex | None:
    """The one number that all elements are; None if they differ or there are none."""
    is_constant = tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())
    return tensor.flatten()[0].item() if is_constant else None


def _on_cpu(variant: Optimised, count: int) -> list[int]:
    """The positions of inputs on the CPU among those of a program of a GPU: lengths, or a leaf that was left there."""
    device, inputs = _device(variant), variant.program.example_inputs[:count]
    return [at for at, tensor in enumerate(inputs) if tensor.device.type != device]


def _device(variant: Optimised) -> str:
    inputs = variant.program.example_inputs
    return next((t.device.type for t in inputs if t.device.type != "cpu"), "cpu")
