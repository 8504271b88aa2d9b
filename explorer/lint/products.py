"""Findings about matmuls: chains in the wrong order, many where one would do, and those that stand for something cheaper."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from tracefuse.findings.finding import Case, Finding
from tracefuse.lint.facts import behind, longest_chain, ran_in_place, with_backward
from tracefuse.measure.launches import HOST_US, MEASURED
from tracefuse.optimizers.costs.alignment import MATMULS, dims_of, factors
from tracefuse.optimizers.costs.cost import bytes_moved, flops, packet_name
from tracefuse.optimizers.ops import behind_views, grouped, is_getitem, is_view, producer, readers
from tracefuse.optimizers.trace import human_bytes, line_of, origin, val
from tracefuse.tables.folding import work
from tracefuse.text import counted, time_text

FEWEST = 4
"""Matmuls of one line from which on one for all of them is worth a word: queries, keys and values are three."""
SAVED = 2.0
"""How many times the FLOPs of the better order a chain has to take: two square layers take less, however long the batch is."""
SMALL_US = 20.0


def _matmuls(case: Case) -> list[fx.Node]:
    return [n for n in case.own_ops if n.target in MATMULS]


# --- the order of a chain ---------------------------------------------------------------------------------------------


def chains_in_the_wrong_order(case: Case) -> Iterator[Finding]:
    """`(A @ B) @ C` where `A @ (B @ C)` takes a fraction of the arithmetic, or the other way round."""
    pairs = [(inner, outer, least) for outer in _matmuls(case) if (found := _pair(outer)) for inner, least in [found]]
    for at, group in grouped(pairs, lambda pair: line_of(pair[1])).items():
        ops = [n for inner, outer, _ in group for n in (inner, outer)]
        takes, least = sum(map(flops, ops)), sum(pair[2] for pair in group)
        us = case.us(with_backward(case, ops)) * (1 - least / takes)
        inner, outer, _ = group[0]
        yield from case.finding(
            "matmul-chain-order",
            case.severity(us),
            f"a chain of matmuls takes {takes / 1e9:.3g} GFLOP, and {least / 1e9:.3g} in the other order",
            (
                ("as it is", f"{_shapes(inner)}, then {_shapes(outer)}"),
                ("chains", str(len(group))),
                ("between them", human_bytes(sum(bytes_moved(pair[0]) for pair in group))),
            ),
            ops,
            at,
            "set the parentheses otherwise, `A @ (B @ C)`; `torch.linalg.multi_dot` finds the best order of matrices",
            us,
        )


def _pair(outer: fx.Node) -> tuple[fx.Node, int] | None:
    """The matmul that makes a factor of `outer` and nothing else, and the FLOPs of the two in the other order."""
    for at, factor in enumerate(factors(outer)):
        inner = _product_behind(factor)
        if inner is None or inner.target not in MATMULS or flops(inner) == 0:
            continue
        if len([r for r in readers(inner) if r.op == "output" or _is_forward(r)]) != 1:
            continue
        batch = max(val(outer).numel() // (val(outer).shape[-2] * val(outer).shape[-1]), 1)
        a, k, b = dims_of(inner)
        m, n, p = dims_of(outer)
        if at == 0:  # (X Y) Z with X[a, k], Y[k, b], Z[b, p]
            if (m, n) != (a, b):
                continue
            other = 2 * batch * (k * b * p + a * k * p)
        else:  # X (Y Z) with X[m, n], Y[n = a, k], Z[k, b]
            if (n, p) != (a, b):
                continue
            other = 2 * batch * (m * n * k + m * k * b)
        if flops(inner) + flops(outer) >= SAVED * other:
            return inner, other
    return None


def _product_behind(factor: fx.Node) -> fx.Node | None:
    """The matmul whose result, in its own rows and columns, is the factor."""
    node = factor
    while is_view(node):
        inner = node.args[0]
        if not isinstance(inner, fx.Node):
            return None
        node = inner
    return node if packet_name(node) in ("mm", "bmm") else None


def _is_forward(node: fx.Node) -> bool:

    return not origin(node).autograd


def _shapes(node: fx.Node) -> str:
    return " @ ".join(str(list(val(one).shape)) for one in factors(node))


# --- one matmul for many ----------------------------------------------------------------------------------------------


def matmuls_of_one_input(case: Case) -> Iterator[Finding]:
    """Heads, experts or branches that multiply one input by matrices of their own, each in a matmul of its own."""
    for at, ops in _lines_of_matmuls(case).items():
        left = grouped(ops, lambda n: _place(factors(n)[0]))
        groups = [group for group in left.values() if len({_memory(factors(n)[1]) for n in group}) >= FEWEST]
        many = [n for group in groups for n in group]
        if not many:
            continue
        read_again = [n for group in groups for n in group[1:]]
        us, launches = _saved_us(case, groups), HOST_US * len(with_backward(case, read_again))
        yield from case.finding(
            "heads-apart",
            case.severity(us) or (case.severity(launches, case.step_us + launches) and "low"),
            f"{len(groups[0])} matmuls multiply one input, by a matrix each",
            (
                ("each", _shapes(many[0])),
                ("matmuls", str(len(many))),
                ("launching takes", f"{time_text(launches)} more: {MEASURED}"),
            ),
            many,
            at,
            "one `nn.Linear` as wide as all of them, and `.unflatten(-1, (heads, -1))` behind it",
            us,
            said=f"{{}}, and the host's {time_text(launches)} (modelled) where the GPU waits for it",
        )


def _saved_us(case: Case, groups: Sequence[Sequence[fx.Node]]) -> float:
    """What the matmuls take beyond one that reads the input once, forward and backward."""
    saved = 0.0
    for group in groups:
        ops = with_backward(case, group)
        again = sum(val(factors(n)[0]).numel() * val(factors(n)[0]).element_size() for n in group[1:])
        moved = sum(map(bytes_moved, group)) or 1
        saved += case.us([n for n in ops if work(n) == "matmul"]) * again / moved
        # The gradients of the input are summed up, one after the other.
        saved += case.us([n for n in ops if packet_name(n) == "add"])
    return saved


def stacks_of_small_matmuls(case: Case) -> Iterator[Finding]:
    """Small matmuls of one shape that need nothing of each other, one after the other."""
    for at, ops in _lines_of_matmuls(case).items():
        distinct = [{_memory(factors(n)[at]) for n in ops} for at in (0, 1)]
        small = case.us(ops) / len(ops) <= SMALL_US
        if not any(
            node.op == "placeholder" for one in distinct for node, _ in one
        ):  # products of heads, of no matrices held
            continue
        if min(map(len, distinct)) < FEWEST or not small or len(ops) < FEWEST * longest_chain(case.trace, ops):
            continue
        every = [n for n in with_backward(case, ops) if work(n) == "matmul"]
        launches = HOST_US * (len(every) - 3)
        waited = launches - case.us(every)
        yield from case.finding(
            "stack-of-matmuls",
            case.severity(waited, case.step_us + waited),
            f"{len(ops)} small matmuls of one shape run one after the other",
            (
                ("each", f"{_shapes(ops[0])}, {time_text(case.us(ops) / len(ops))} ({case.times.kind})"),
                ("launching takes", f"{time_text(launches)}: {MEASURED}"),
            ),
            ops,
            at,
            "hold the matrices as one parameter `[n, …]` and call `torch.bmm` or `torch.baddbmm` once; `torch.vmap` over "
            "`torch.func.stack_module_state` does it to modules",
            f"at most {time_text(waited)} a step, if the GPU waits for the host (modelled)",
            kind="modelled",
        )


def _place(factor: fx.Node) -> tuple[fx.Node, int]:
    """The value that a factor shows, and from where on."""
    return behind_views(factor), val(factor).storage_offset()


def _memory(factor: fx.Node) -> tuple[fx.Node, int]:
    """The same with one value for all that a memory comes to hold: an optimizer that runs a closure again and again changes
    its parameters between, and they are no stack."""
    node = behind_views(factor)
    while ran_in_place(node) and isinstance(node.args[0], fx.Node):
        node = behind_views(node.args[0])
    return node, val(factor).storage_offset()


def _lines_of_matmuls(case: Case) -> dict[str, list[fx.Node]]:
    """Matmuls of parameters or batches by their line, where there are enough of one shape."""
    groups = grouped(_matmuls(case), lambda n: (line_of(n), n.target, dims_of(n)))
    return {at: ops for (at, *_), ops in groups.items() if len(ops) >= FEWEST and at}


# --- what stands for something cheaper --------------------------------------------------------------------------------


def products_with_one_hot(case: Case) -> Iterator[Finding]:
    """A matmul with rows of zeros and a one, which picks rows."""
    ops = [n for n in _matmuls(case) if any(_is_one_hot(factor) for factor in factors(n))]
    for at, group in grouped(ops, line_of).items():
        hot = [behind(f, _CONVERSIONS) for n in group for f in factors(n) if _is_one_hot(f)]
        us = case.us(with_backward(case, group)) + case.us(hot)
        yield from case.finding(
            "one-hot-matmul",
            case.severity(us),
            f"a matmul by one-hot rows picks rows of {list(val(factors(group[0])[1]).shape)}",
            (("matmuls", str(len(group))), ("one-hot", str(list(val(hot[0]).shape)))),
            group,
            at,
            "`F.embedding(indices, weight)`, or `weight[indices]`, reads the rows alone",
            us,
        )


_CONVERSIONS = ("_to_copy", "clone", "view", "_unsafe_view")


def _is_one_hot(factor: fx.Node) -> bool:
    node = behind(factor, _CONVERSIONS)
    if packet_name(node) in ("scatter", "eq") and "one_hot" in line_of(node):
        return True
    return packet_name(node) == "scatter" and node.args[-1] == 1 and packet_name(behind(node.args[0])) in _ZEROS  # type: ignore[arg-type]


_ZEROS = {"zeros", "zeros_like", "new_zeros", "full"}


def inverses(case: Case) -> Iterator[Finding]:
    """An inverse that is only multiplied with."""
    ops = [n for n in case.own_ops if packet_name(n) in ("linalg_inv_ex", "inverse") and _is_multiplied(n)]
    for at, group in grouped(ops, line_of).items():
        yield from case.finding(
            "inverse-then-matmul",
            "medium",
            f"{counted(len(group), 'inverse')} {'is' if len(group) == 1 else 'are'} computed only to be multiplied with",
            (("of", str(list(val(group[0].args[0]).shape))),),  # type: ignore[arg-type]
            group,
            at,
            "`torch.linalg.solve(A, b)`: less work, and fewer digits lost",
            "not modelled: a solve factorises once, an inverse solves for every column",
        )


def _is_multiplied(node: fx.Node) -> bool:
    values = [user for user in node.users if is_getitem(user) and user.args[1] == 0] or [node]
    read = [producer(r) for value in values for r in readers(value) if r.op != "output" and _is_forward(r)]
    return bool(read) and all(work(r) == "matmul" for r in read)
