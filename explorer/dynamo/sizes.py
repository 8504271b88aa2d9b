"""A graph of `torch.compile` whose sizes vary, as one program for each set of sizes that it is called with.

Dynamo makes symbols of what varies: another batch, another length, a number. A trace says which sizes it has, and kernels are
chosen by them, so that a graph with symbols is kept as it came, and specialised when it is called:

    graph(s, x: [2, s], f, …)     called with [2, 33]: x: [2, 33], s is 33 wherever it is read, and f.item() what f is

Where three of these programs differ in one size alone, they tell of others, which takes a moment instead of a second:
`tracefuse.dynamo.other_sizes`. On a GPU the kernels of all sizes share machine code: `tracefuse.build.across_sizes`.

A Python float of a module, such as a scale, is a tensor `f` of the CPU that dynamo made, whose number varies for all that is
known, and an integer that is no size, such as how far a text has come, is a symbol. A call of known sizes and numbers costs
a look at them. Of a graph, `MOST_SIZES` programs are traced, for at most `MOST_NUMBERS` different numbers; other calls run as
they came, op by op.

Threads may call a graph: one of them at a time makes a program, as dynamo compiles one frame at a time, since tracing changes
what all threads see.

Private: `_dynamo_source` of a placeholder, seen on torch 2.11, 2.13 and 2.15; `compile_lock` of `torch._dynamo.convert_frame`,
seen on torch 2.13 and 2.14.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import TorchDynamoException
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_symbols

from tracefuse.dynamo.differentiable import Places
from tracefuse.dynamo.halves import Halves
from tracefuse.dynamo.other_sizes import OtherSizes, Traced
from tracefuse.errors import OptionError
from tracefuse.optimizers.gc_pause import uncollected
from tracefuse.optimizers.passes import OUT_OF_MEMORY
from tracefuse.recording.frames import tell_user

MANY_SIZES = 16
"""From so many sizes on a warning says what they cost."""
MOST_SIZES = 128
"""Programs of one graph that are kept."""
MOST_RESIZED = 1024
"""Programs that are kept of sizes that were not traced: machine code is theirs together."""
MOST_NUMBERS = 4
"""Different numbers beside sizes that they are compiled for: one that changes in each call would be compiled for ever."""

Run = Callable[..., Sequence[Any]]
Compile = Callable[[fx.GraphModule, Sequence[Any], bool], tuple[Run, tuple[Halves, Places] | None]]
"""Makes what runs a graph on tensors like these, and the halves that it runs where other sizes may be told by them; with True
it may take its time, as once for a model."""
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def has_symbols(value: Any) -> bool:
    """Whether a value of dynamo's graph is a number that varies, or a tensor with such a size."""
    if isinstance(value, torch.Tensor):
        is_strided = value.layout is torch.strided
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if is_strided else tuple(value.shape)
        return any(isinstance(size, SYMBOLS) for size in sizes)
    return isinstance(value, SYMBOLS)


def varying_sizes(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the graph's inputs that are tensors with sizes that vary, or integers that do; () where there are none,
    nor where there are nested tensors, nor in the backward of compiled autograd, which takes lists."""
    if any(isinstance(one, (list, tuple)) or getattr(one, "is_nested", False) for one in examples):
        return ()
    found = _as_dynamo_sees(module, examples)
    if any(isinstance(one, (torch.SymFloat, torch.SymBool)) for one in found):
        return ()
    return tuple(at for at, one in enumerate(found) if has_symbols(one))


def counts(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the graph's inputs that are integers which no tensor's size tells, such as how far a text has come."""
    found = _as_dynamo_sees(module, examples)
    told = set().union(*(free_symbols(one) for one in found if isinstance(one, torch.Tensor)))
    return tuple(at for at, one in enumerate(found) if isinstance(one, torch.SymInt) and not free_symbols(one) <= told)


def _as_dynamo_sees(module: fx.GraphModule, examples: Sequence[Any]) -> list[Any]:
    """What the graph's inputs are, with symbols where they vary."""
    values = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    return [one if has_symbols(one) else example for one, example in zip(values, examples, strict=True)]


def floats(module: fx.GraphModule, examples: Sequence[Any]) -> tuple[int, ...]:
    """The positions of the graph's inputs that are Python floats in a tensor, or as those are: of one float on the CPU, which
    `item` alone reads."""
    placeholders = module.graph.find_nodes(op="placeholder")
    read = (node.users and all(map(_is_item, node.users)) for node in placeholders)
    return tuple(at for at, is_read in enumerate(read) if is_read and _is_float(examples[at]))


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _is_float(example: Any) -> bool:
    is_number = isinstance(example, torch.Tensor) and (example.dim(), example.device.type) == (0, "cpu")
    return is_number and example.is_floating_point()


@dataclass
class BySize:
    """The graph `module`, whose inputs at `positions` vary, as a function: `compile` makes a program of it for the sizes that
    it is called with, and for its `floats` and `counts`."""

    module: fx.GraphModule
    positions: tuple[int, ...]
    floats: tuple[int, ...]
    counts: tuple[int, ...]
    compile: Compile
    refuse: Callable[[Exception, Sequence[Any]], None]
    others: OtherSizes | None = None
    seconds: float = 0.0
    known: dict[Hashable, Run] = field(default_factory=dict)
    resized: dict[Hashable, Run] = field(default_factory=dict)
    numbers: set[tuple[str, ...]] = field(default_factory=set)

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        numbers = self._numbers(arguments)
        key = numbers, _key([arguments[at] for at in self.positions])
        run = self._found(key)
        if run is None:
            with compile_lock:  # another thread may have made it meanwhile
                run = self._found(key) or self._resized(key, numbers, arguments) or self._made(key, numbers, arguments)
        return run(*arguments)

    def _found(self, key: Hashable) -> Run | None:
        return self.known.get(key) or self.resized.get(key)

    def _numbers(self, arguments: Sequence[Any]) -> tuple[str, ...]:
        """The numbers that are no sizes. -0.0 is another one than 0.0, and NaN is itself."""
        return (
            *(arguments[at].item().hex() for at in self.floats),
            *(str(arguments[at]) for at in self.counts),
        )

    def _resized(self, key: Hashable, numbers: tuple[str, ...], arguments: Sequence[Any]) -> Run | None:
        """What the programs at other sizes tell of this one; None where they do not."""
        if self.others is None or not self.others.lines or (kind := self._kind(numbers, arguments)) is None:
            return None
        if len(self.resized) >= MOST_RESIZED:
            self.resized.clear()
        with uncollected(), torch.random.fork_rng(_gpus(arguments)):
            found = self.others.program(kind, arguments, self._tensors(arguments))
        if found is None:
            return None
        run = self.resized[key] = _with_numbers(found[0], self._left_out(arguments), found[1])
        return run

    def _kind(self, numbers: tuple[str, ...], arguments: Sequence[Any]) -> Hashable | None:
        """What a program is made for beside sizes; None where tensors share memory, of which a program knows too much."""
        given = [arguments[at] for at in self.positions if isinstance(arguments[at], torch.Tensor)]
        if any(one.layout is not torch.strided for one in given):
            return None
        memories = {one.untyped_storage()._cdata for one in given}
        return numbers if len(memories) == len(given) else None

    def _left_out(self, arguments: Sequence[Any]) -> set[int]:
        """The positions of numbers, which programs do not take."""
        return {at for at in self.positions if not isinstance(arguments[at], torch.Tensor)} | set(self.floats)

    def _tensors(self, arguments: Sequence[Any]) -> list[Any]:
        left_out = self._left_out(arguments)
        return [one for at, one in enumerate(arguments) if at not in left_out]

    def _made(self, key: Hashable, numbers: tuple[str, ...], arguments: Sequence[Any]) -> Run:
        if len(self.known) >= MOST_SIZES:
            return self.module.forward
        if numbers not in self.numbers and len(self.numbers) >= MOST_NUMBERS:
            tell_user(VARIES)  # which says it once
            return self.module.forward
        self.numbers.add(numbers)
        start = time.perf_counter()
        with uncollected(), torch.random.fork_rng(_gpus(arguments)):
            run = self.known[key] = self._compiled_or_not(arguments)
        self.seconds += time.perf_counter() - start
        if len(self.known) in (MANY_SIZES, MOST_SIZES):
            tell_user(self._many())
        return run

    def _compiled_or_not(self, arguments: Sequence[Any]) -> Run:
        """What runs the graph: op by op where it cannot be compiled for these sizes, which `refuse` tells."""
        try:
            return self._compiled(arguments)
        except (*OUT_OF_MEMORY, OptionError, TorchDynamoException):
            raise
        except Exception as reason:
            self.refuse(reason, arguments)
            return self.module.forward

    def _compiled(self, arguments: Sequence[Any]) -> Run:
        graph, returned = specialised(self.module, arguments, self.positions, self.floats)
        tensors = self._tensors(arguments)
        run, made = self.compile(graph, tensors, not self.known)
        kind = self._kind(self._numbers(arguments), arguments)
        if self.others is not None and made is not None and kind is not None:
            self.others.note(Traced(self.others.symbols.sizes(arguments), kind, returned, *made))
        return _with_numbers(run, self._left_out(arguments), returned)

    def _many(self) -> str:
        text = f"a graph of this model was compiled for {len(self.known)} sizes, which took {self.seconds:.1f} s"
        if len(self.known) < MOST_SIZES:
            return f"{text}: pad its inputs to fewer sizes, such as multiples of 64, if more are to come."
        return f"{text}; other ones run op by op: pad its inputs to fewer sizes, such as multiples of 64."


VARIES = (
    "a graph of this model runs op by op for some calls, without tracefuse: a Python number that it reads is another one in "
    "each call. Make it a tensor (`register_buffer`, `torch.tensor(step)`)."
)


def _key(given: Sequence[Any]) -> Hashable:
    """What a program is compiled for: numbers, sizes and strides, and which of the tensors share memory, how far apart."""
    shapes: list[Any] = []
    memories: dict[int, tuple[int, int]] = {}
    for one in given:
        if isinstance(one, torch.Tensor):
            if one.layout is not torch.strided:
                shapes.append((one.shape, None))
                continue
            number, start = memories.setdefault(one.untyped_storage()._cdata, (len(memories), one.storage_offset()))
            shapes.append((one.shape, one.stride(), number, one.storage_offset() - start))
        else:
            shapes.append((type(one), one))
    return tuple(shapes)


def _gpus(arguments: Sequence[Any]) -> list[int]:
    return sorted({one.get_device() for one in arguments if isinstance(one, torch.Tensor) and one.is_cuda})


# --- one set of sizes -------------------------------------------------------------------------------------------------


def specialised(
    module: fx.GraphModule, arguments: Sequence[Any], positions: Sequence[int], floats: Sequence[int]
) -> tuple[fx.GraphModule, dict[int, Any]]:
    """The graph that has the numbers among its arguments instead of taking them, and which of its results are numbers: by
    position, left out of what it returns."""
    graph, new = fx.Graph(), dict[fx.Node, Any]()
    placeholders = module.graph.find_nodes(op="placeholder")
    new |= {placeholders[at]: arguments[at] for at in positions if not isinstance(arguments[at], torch.Tensor)}
    for at in floats:
        number = arguments[at].item()
        new |= {placeholders[at]: number} | dict.fromkeys(placeholders[at].users, number)
    for node in module.graph.nodes:
        if node not in new and node.op != "output":
            new[node] = graph.node_copy(node, new.__getitem__)
            if hasattr(node, "_dynamo_source"):
                new[node]._dynamo_source = node._dynamo_source
    results = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
    known = {user: new[placeholders[at]] for at in floats for user in placeholders[at].users}
    returned = _numbers_among(module, results, arguments, known)
    left = [one for at, one in enumerate(results) if at not in returned]
    graph.output(fx.node.map_arg(tuple(left), new.__getitem__))
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or not _is_number(node))
    made = fx.GraphModule(module, graph)
    made.meta.update(module.meta)
    return made, returned


def _is_number(node: fx.Node) -> bool:
    """Whether a node of dynamo's graph yields a number."""
    return isinstance(node.meta.get("example_value"), (int, float, *SYMBOLS))


def _numbers_among(
    module: fx.GraphModule, results: Sequence[Any], arguments: Sequence[Any], known: Mapping[fx.Node, Any]
) -> dict[int, Any]:
    """The results that are numbers, by position, where some nodes' values are `known`."""
    found = {at: one for at, one in enumerate(results) if not isinstance(one, fx.Node) and one is not None}
    wanted = {at: one for at, one in enumerate(results) if isinstance(one, fx.Node) and _is_number(one)}
    if wanted:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in arguments]
        with mode:
            values = fx.Interpreter(module).run(*fakes, initial_env=dict(known))
        found |= {at: values[at] for at in wanted}
    return found


def _with_numbers(run: Run, left_out: Collection[int], returned: Mapping[int, Any]) -> Run:
    """`run`, which takes no numbers and returns none, as a function that does."""

    def called(*arguments: Any) -> Sequence[Any]:
        tensors = [one for at, one in enumerate(arguments) if at not in left_out] if left_out else arguments
        found = run(*tensors)
        if not returned:
            return found
        results = list(found)
        for at, number in sorted(returned.items()):
            results.insert(at, number)
        return results

    return called
