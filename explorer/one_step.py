"""Whether a captured program is one forward and one backward, or goes on: an optimizer's step, a second forward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tracefuse.optimizers.trace import Output, Trace, origin

_Late = Sequence[tuple[Output, fx.Node]]


def computed_from_gradients(backward: Trace) -> _Late:
    """What the second half returns or writes beside gradients, and the values: none where the program is one step."""
    pairs = zip(backward.outputs, backward.returned, strict=True)
    return [(out, node) for out, node in pairs if out.kind in ("result", "mutation")]


def lines_of(late: _Late) -> str:
    """The lines, at most two, of what is computed from gradients; where no line is known, the names; "" of nothing."""
    sources = [(out, origin(node).source) for out, node in late]
    found = list(dict.fromkeys(source.text.strip() if source else out.of for out, source in sources))
    return " and ".join(found[:2])


def why_no_verdict(backward: Trace) -> str:
    """Why the times of the two halves say nothing about a backward, with the remedy; "" for a program of one step.

    What autograd computed itself is backward, also where `torch.autograd.grad` returns it.
    """
    late = lines_of([(out, node) for out, node in computed_from_gradients(backward) if not origin(node).autograd])
    return late and (
        f"No ratios and no slowest module: the backward's times are also those of {late}. Capture the step without the "
        "optimizer, or one step of the loop."
    )
