"""What pointwise ops take longer that read a tensor as it lies, in place of a copy of it that lies as they do.

    value.contiguous() * torch.sigmoid(gate)      the copy reads strided, and the product does not, nor its gradients
    value * torch.sigmoid(gate)                   the product reads strided, and so does one of its gradients

ATen's kernels load vectors only where all operands lie alike (`tracefuse.optimizers.costs.strided`), so that a copy may well
be worth what it costs. A CPU's do so within rows, and lose nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tracefuse.findings.finding import Case
from tracefuse.lint.facts import evaluated
from tracefuse.optimizers.costs.cost import bytes_moved, op_class, packet_name
from tracefuse.optimizers.costs.strided import kernel_bytes
from tracefuse.optimizers.ops import is_view
from tracefuse.optimizers.trace import is_on_gpu, val
from tracefuse.text import counted, share_text, time_text

_OTHER_KERNELS = {"cat", "stack", "tril", "triu", "roll", "flip"}
"""Pointwise in what they cost, and no kernels of TensorIterator's."""


@dataclass(frozen=True)
class Without:
    """A step without some copies: `copies_us` are what these take, `lost_us` what the `readers` take longer then."""

    copies_us: float
    lost_us: float
    readers: tuple[fx.Node, ...]

    @property
    def us(self) -> float:
        return self.copies_us - self.lost_us

    def is_nothing(self, case: Case) -> bool:
        """Whether the readers lose about what the copies take."""
        return self.lost_us > 0 and case.severity(self.us) is None and case.severity(self.copies_us) is not None

    def evidence(self, case: Case) -> tuple[tuple[str, str], ...]:
        if not self.lost_us > 0:
            return ()
        return (
            ("read strided instead", f"{counted(len(self.readers), 'op')}, {time_text(self.lost_us)} more (modelled)"),
        )

    def worth(self, case: Case) -> dict[str, Any]:
        """The worth of leaving the copies out, as `Case.finding` takes it."""
        if not self.lost_us > 0:
            return {"worth": self.us}
        kind = "predicted" if case.times.is_measured else case.times.kind
        won = time_text(self.us)
        if self.is_nothing(case):
            won = f"about nothing: {time_text(self.copies_us)} of copies, less {time_text(self.lost_us)} that readers lose,"
        share = share_text(max(0.0, self.us), case.step_us)
        how = case.times.provenance if kind == case.times.kind else f"{kind}: {case.times.provenance}"
        worth = (
            f"{won} of {time_text(case.step_us)} a step, {share} ({how}, less what its readers lose that read strided)"
        )
        us = max(0.0, self.us)
        return {
            "worth": worth,
            "kind": kind,
            "worth_us": us,
            "worth_share": us / case.step_us if case.step_us else None,
        }


def without(case: Case, instead: Mapping[fx.Node, torch.Tensor]) -> Without:
    """What is gained and lost where the readers of each copy read what is in its place."""
    copies_us = case.us(list(instead))
    if case.times.is_measured and not is_on_gpu(case.trace):
        return Without(copies_us, 0.0, ())
    longer = _longer(case, instead)
    lost_us = sum(longer.values())
    if lost_us > 0 and case.times.kind == "modelled":  # a roofline knows no strides: the copies read strided too
        lost_us = max(0.0, lost_us - sum(_beyond_roofline(case, copy, value) for copy, value in instead.items()))
    return Without(copies_us, lost_us, tuple(node for node, us in longer.items() if us > 0))


def _longer(case: Case, instead: Mapping[fx.Node, torch.Tensor]) -> dict[fx.Node, float]:
    """The microseconds that each pointwise op takes more; what lies otherwise then is followed to its readers."""
    changed: dict[fx.Node, Any] = dict(instead)
    found: dict[fx.Node, float] = {}
    for node in case.trace.ops:
        known = {a: changed[a] for a in node.all_input_nodes if a in changed}
        if not known or node in instead or not (is_view(node) or _iterates(node)):
            continue
        value = evaluated(node, known)
        if value is None:
            continue
        if not is_view(node):
            more = kernel_bytes(_operands(node, known), value) - kernel_bytes(_operands(node, {}), val(node))
            found[node] = _us_a_byte(case, node) * more
        if not isinstance(value, torch.Tensor) or value.stride() != val(node).stride():
            changed[node] = value
    return found


def _iterates(node: fx.Node) -> bool:
    """Whether a kernel of TensorIterator's computes the op's one result."""
    is_pointwise = op_class(node) == "pointwise" and packet_name(node) not in _OTHER_KERNELS
    return is_pointwise and isinstance(val(node), torch.Tensor)


def _operands(node: fx.Node, known: Mapping[fx.Node, Any]) -> Sequence[torch.Tensor]:
    """The tensors that the op's kernel reads: a number that lies on the CPU is handed to it."""
    read = [known[a] if a in known else val(a) for a in node.all_input_nodes]
    of_kernel = val(node).device
    return [t for t in read if isinstance(t, torch.Tensor) and (t.dim() or t.device == of_kernel)]


def _us_a_byte(case: Case, node: fx.Node) -> float:
    """What the op takes, over the bytes that it is as slow as: a roofline's are those that it touches."""
    nbytes = bytes_moved(node) if case.times.kind == "modelled" else kernel_bytes(_operands(node, {}), val(node))
    return case.us([node]) / nbytes if nbytes else 0.0


def _beyond_roofline(case: Case, copy: fx.Node, value: torch.Tensor) -> float:
    """What a copy takes beyond the bytes that it touches."""
    return _us_a_byte(case, copy) * (kernel_bytes([value], val(copy)) - bytes_moved(copy))
