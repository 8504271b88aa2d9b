"""Which captured programs are one step, to be compiled, measured and exported, and why others are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracefuse.draws import repeated
from tracefuse.errors import ExportError
from tracefuse.optimizers.trace import Output, Trace

if TYPE_CHECKING:
    from tracefuse.variant import Variant


def check_one_step(variant: Variant) -> None:
    """Raises `ExportError` with the reason and the remedy where `variant` is not one forward and one backward."""
    backward = variant.backward
    late = [out.of for out in _computed_late(backward)]
    if is_second_order(backward):
        raise ExportError(
            f"{', '.join(late)} {'is' if len(late) == 1 else 'are'} computed from gradients (a gradient penalty, MAML, forces "
            "by `create_graph`): such a program is shown and replayed, and neither compiled, measured nor exported. For that, "
            "capture a part of it that is one forward and one backward."
        )
    if late:
        raise ExportError(
            f"{', '.join(late)} depends on gradients (an optimizer step, a second forward, or autograd.grad): a step is one "
            "forward and one backward. Capture only those."
        )
    roots = _roots(backward)
    if len(set(roots)) != len(roots):
        raise ExportError(
            "two backwards start from the same result (`retain_graph=True`). Add what they start from, and call `.backward()` "
            "once on the sum."
        )
    if backward.outputs and not roots:
        raise ExportError(
            "a gradient that was given to `backward()` is computed from the program's own values or is used elsewhere too, "
            "so that gradients are no function of it. Reduce to a loss and call `.backward()` on that."
        )
    for earlier, later in repeated(variant.trace.ops, variant.capture.rng_states):
        raise ExportError(
            f"{earlier.name} and {later.name} draw from the same generator state, which was restored in between, and are not "
            "the same numbers. Draw the numbers once, keep them in a variable and use them twice."
        )


def is_second_order(backward: Trace) -> bool:
    """Whether a backward starts from what is computed from gradients, and nothing is written that is: no optimizer's step."""
    late = _computed_late(backward)
    return any(out.of in _roots(backward) for out in late) and all(out.kind == "result" for out in late)


def _computed_late(backward: Trace) -> list[Output]:
    return [out for out in backward.outputs if out.kind in ("result", "mutation")]


def _roots(backward: Trace) -> list[str]:
    return [i.source for i in backward.inputs if i.kind == "cotangent"]
