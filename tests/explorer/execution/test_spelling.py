"""What costs the host less: the same operator on the same tensors for every row of the tables, and casts made together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import tracefuse
from tracefuse.execution import spelling
from tracefuse.execution.spelling import FUNCTIONS, METHODS, SPREAD, spelled
from tracefuse.optimizers.trace import nbytes

aten = torch.ops.aten


def case(target: object, *args: object, **kwargs: object) -> object:
    return pytest.param(target, args, kwargs, id=f"{target} {len(args)} {' '.join(kwargs)}")


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


IMAGE, WEIGHT = t(2, 3, 8, 8), t(4, 3, 3, 3)
CASES = [
    case(aten.t.default, t(3, 4)),
    case(aten.transpose.int, t(3, 4, 5), 0, -1),
    case(aten.unsqueeze.default, t(3, 4), 1),
    case(aten.squeeze.dim, t(3, 1, 4), 1),
    case(aten.squeeze.dim, t(3, 4), 1),
    case(aten.select.int, t(3, 4), 1, -2),
    case(aten.unbind.int, t(3, 4)),
    case(aten.unbind.int, t(3, 4), 1),
    case(aten.detach.default, t(3)),
    case(aten.view.default, t(3, 4), [2, -1]),
    case(aten.view.default, t(1), []),
    case(aten._unsafe_view.default, t(3, 4), [2, 6]),
    case(aten.permute.default, t(3, 4, 5), [2, 0, 1]),
    case(aten.expand.default, t(3, 1), [2, 3, 4]),
    case(aten.expand.default, t(3, 1), [3, 4], implicit=True),
    case(aten.mm.default, t(3, 4), t(4, 5)),
    case(aten.addmm.default, t(5), t(3, 4), t(4, 5)),
    case(aten.addmm.default, t(5), t(3, 4), t(4, 5), beta=2, alpha=0.5),
    case(aten.bmm.default, t(2, 3, 4), t(2, 4, 5)),
    case(aten.baddbmm.default, t(2, 3, 5), t(2, 3, 4), t(2, 4, 5), beta=0),
    case(aten.cat.default, [t(3, 4), t(2, 4)]),
    case(aten.cat.default, [t(3, 4), t(3, 2)], 1),
    case(aten.clone.default, t(3, 4).t()),
    case(aten.clone.default, t(3, 4).t(), memory_format=torch.contiguous_format),
    case(aten.embedding.default, t(7, 4), torch.tensor([[1, 0], [6, 2]])),
    case(aten.embedding.default, t(7, 4), torch.tensor([1, 0]), 1, False, False),
    case(aten.convolution.default, IMAGE, WEIGHT, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
    case(aten.convolution.default, IMAGE, t(3, 2, 3, 3), t(2), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    case(aten.add.Tensor, t(3, 4), t(4)),
    case(aten.add.Tensor, t(3, 4), 2),
    case(aten.add.Tensor, t(3, 4, dtype=torch.bfloat16), t(3, 4), alpha=-0.5),
    case(aten.sub.Tensor, t(3, 4), t(4), alpha=3),
    case(aten.mul.Tensor, t(3, 4, dtype=torch.bfloat16), 0.3),
    case(aten.div.Tensor, torch.arange(4), torch.arange(1, 5)),
    case(aten._to_copy.default, t(3, 4).t(), dtype=torch.bfloat16),
    case(aten._to_copy.default, t(3, 4).t(), dtype=torch.float32),
    case(aten._to_copy.default, t(3, 4).t(), dtype=torch.float64, memory_format=torch.contiguous_format),
    case(aten._to_copy.default, t(3, 4), memory_format=torch.preserve_format),
    case(aten._to_copy.default, t(3, 4), device=torch.device("cpu"), dtype=torch.float64),
    case(aten.exp.default, t(3)),
]


class Called(TorchDispatchMode):
    """The operators that were dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[object] = []

    def __torch_dispatch__(self, target, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.targets.append(target)
        return target(*args, **(kwargs or {}))


@pytest.mark.parametrize(("target", "args", "kwargs"), CASES)
def test_the_text_calls_the_operator(target, args, kwargs) -> None:
    graph, tensors = fx.Graph(), {}

    def placed(value: object) -> object:
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return [placed(one) for one in value]
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x_{len(tensors)}")
        tensors[node.name] = value
        return node

    node = graph.call_function(target, tuple(placed(a) for a in args), kwargs)
    names = {"torch": torch, **tensors}
    with torch.no_grad(), Called() as called:
        exec(spelled(node), names)
    found, wanted = names[node.name], target(*args, **kwargs)
    # Without autograd the two are one.
    assert called.targets == [aten.view.default if target is aten._unsafe_view.default else target]
    found, wanted = ([one] if isinstance(one, Tensor) else list(one) for one in (found, wanted))
    for mine, theirs in zip(found, wanted, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert torch.equal(mine, theirs)


def test_a_matmul_into_float32_is_torchs_own() -> None:
    """Without numbers, as torch has the operator on no CPU."""
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    node = graph.call_function(aten.mm.dtype, (left, right, torch.float32))
    names = {"torch": torch, "left": torch.empty(3, 4, dtype=torch.bfloat16, device="meta")}
    names["right"] = names["left"].t()
    with Called() as called:
        exec(spelled(node), names)
    assert called.targets == [aten.mm.dtype]
    assert (names[node.name].shape, names[node.name].dtype) == ((3, 3), torch.float32)


def test_what_is_returned_is_counted_anew() -> None:
    """A result that is a view may not be written in place where autograd goes through what was called."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    inner = graph.call_function(aten._unsafe_view.default, (x, [2, 6]))
    result = graph.call_function(aten._unsafe_view.default, (inner, [3, 4]))
    graph.output((result,))
    assert spelled(inner).endswith("x.view(2, 6)")
    assert "_unsafe_view" in spelled(result)


def test_every_row_is_tried() -> None:
    tried = {one.values[0] for one in CASES} | {aten.mm.dtype}  # type: ignore[attr-defined]
    assert {*METHODS, *SPREAD, *FUNCTIONS} <= tried


def test_the_text() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    texts = {
        "x.view(2, 6)": graph.call_function(aten.view.default, (x, [2, 6])),
        "x.to(torch.bfloat16, copy=True)": graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
        "torch.mm(x, x)": graph.call_function(aten.mm.default, (x, x)),
        "torch.ops.aten.exp.default(x)": graph.call_function(aten.exp.default, (x,)),
    }
    assert [spelled(node) for node in texts.values()] == [f"{node.name} = {text}" for text, node in texts.items()]


# --- casts together ---------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Four layers with weights of 64 KiB and biases of 512 B in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 256) if at % 2 == 0 else nn.Linear(256, 128) for at in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def captured() -> tuple[Net, Tensor, tracefuse.Capture]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 128)
    with tracefuse.capture() as c, torch.autocast("cpu", torch.bfloat16):
        model(x).backward()
    return model, x, c


@pytest.mark.parametrize(("ahead", "groups"), [(1 << 20, [8]), (3 * (64 << 10), [5, 3]), (1 << 10, [2, 2])])
def test_no_more_than_some_bytes_are_cast_ahead(monkeypatch: pytest.MonkeyPatch, ahead: int, groups: list[int]) -> None:
    monkeypatch.setattr(spelling, "AHEAD", ahead)
    forward = captured()[2].optimize(fuse=False, remat=0.0).forward
    found = list(spelling._groups(forward))
    assert [len(group) for group in found] == groups
    assert all(sum(map(nbytes, group)) <= ahead for group in found)


def test_a_file_with_casts_together_has_eagers_numbers_and_says_where_each_was_made(tmp_path: Path) -> None:
    model, x, c = captured()
    eager = [p.grad.clone() for p in model.parameters()]
    variant = c.optimize(fuse=False)
    text = variant.export(tmp_path / "step.py").read_text()
    assert text.count(" is cast above") >= 7
    assert text.count("def cast_all(") == 1
    assert "cast_all(" not in text[text.index("# --- the program as it was captured") :]
    step = variant.compile()
    model.zero_grad()
    step().backward()
    for p, gradient in zip(model.parameters(), eager, strict=True):
        assert torch.equal(p.grad, gradient)
    with torch.no_grad():  # a weight of another step is cast anew
        model.layers[0].weight.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    torch.testing.assert_close(step(), expected.detach(), rtol=1e-2, atol=1e-4)


def test_only_floats_are_cast_together() -> None:
    """To uint8 `_foreach_copy_` does not what a cast does."""
    p, q = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))

    def loss() -> None:
        whole = p.to(torch.uint8).sum() + q.to(torch.uint8).sum()
        ((p * q).sum() * whole).backward()

    assert "cast_all" not in tracefuse.capture(loss).optimize(fuse=False).source


def test_what_is_no_parameter_is_cast_where_it_is_used() -> None:
    x, y = torch.randn(2, 64, 64, requires_grad=True).unbind()
    c = tracefuse.capture(lambda: (x.bfloat16() @ y.bfloat16()).sum().backward())
    variant = c.optimize(fuse=False)
    assert not list(spelling._groups(variant.forward))
