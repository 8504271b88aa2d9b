"""Calls of operators at less cost to the host: the public function of the same name in place of `torch.ops`.

`torch.ops.aten.view.default(x, [8])` goes through a Python object that finds the operator's kernel and boxes its arguments;
`torch.Tensor.view(x, [8])` is a binding of its own. Both reach the same operator with the same arguments. Only the text of a
compiled model, which nobody reads, has the latter: what is shown and exported says which overload it calls.
"""

from __future__ import annotations

import re

QUICK = {
    "addmm.default": "torch.addmm",
    "bmm.default": "torch.bmm",
    "expand.default": "torch.Tensor.expand",
    "mm.default": "torch.mm",
    "permute.default": "torch.permute",
    "select.int": "torch.select",
    "squeeze.dim": "torch.squeeze",
    "t.default": "torch.t",
    "transpose.int": "torch.transpose",
    "unsqueeze.default": "torch.unsqueeze",
    "view.default": "torch.Tensor.view",
}
"""Overload -> a binding in C++ that takes the same arguments and does nothing else."""

_CALL = re.compile(rf"\btorch\.ops\.aten\.({'|'.join(map(re.escape, QUICK))})\(")
_CAST = re.compile(
    r"\btorch\.ops\.aten\._to_copy\.default\((?P<of>\w+), dtype=(?P<dtype>torch\.\w+)(?:, layout=torch\.strided)?"
    r"(?:, device=(?P<device>torch\.device\('[\w:]+'\)))?\)"
)


def quick(text: str) -> str:
    """`text` with the calls of the operators that have such a binding as calls of those."""
    return _CAST.sub(_cast, _CALL.sub(lambda call: f"{QUICK[call[1]]}(", text))


def _cast(call: re.Match[str]) -> str:
    target = ", ".join(filter(None, (call["device"], call["dtype"])))
    return f"torch.Tensor.to({call['of']}, {target}, copy=True)"
