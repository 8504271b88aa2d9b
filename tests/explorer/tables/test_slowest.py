"""Where a step's time goes: the row of the tree that is told to be slow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracefuse
from tracefuse.optimizers.ops import does_work
from tracefuse.optimizers.trace import Trace, origin, phase
from tracefuse.tables.slowest import Slowest, place_of, slowest


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.proj(scores @ v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(), nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(5, 8), nn.Linear(8, 33)
        self.h = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.h:
            x = block(x)
        logits = self.head(x).flatten(0, 1)
        loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.int64))
        return loss


def stepped() -> Trace:
    torch.manual_seed(0)
    model, tokens = Model(), torch.randint(5, (2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
    return c.optimize().baseline.whole


STEP = stepped()


def of(**shares: int) -> Slowest:
    """What is slow where the ops of such a module, or else at a line that begins so, take so much in equal parts."""
    ops = [node for node in STEP.ops if does_work(node)]

    def places(node: torch.fx.Node) -> list[str]:
        where = origin(node)
        begins = where.source.text.split()[0] if where.source else ""
        return ["update"] if phase(node) == "update" else [begins, *where.module.split(".")]

    amounts: dict[str, float] = {}
    for part, share in shares.items():
        some = [node for node in ops if part in places(node) and node.name not in amounts]
        assert some, part
        amounts |= {node.name: share / len(some) for node in some}
    found = slowest(STEP, STEP, amounts)
    assert found is not None
    return replace(found, **{name: round(getattr(found, name), 6) for name in ("amount", "of", "line_amount")})


def test_it_is_the_module_that_most_of_the_largest_one_is_in_with_its_line() -> None:
    found = of(qkv=10, scores=30, proj=5, mlp=15, head=20)
    assert (found.label, found.amount, found.of) == ("h.*.attn ×3", 45, 80)
    assert found.paths == ("h.0.attn", "h.1.attn", "h.2.attn")
    assert found.place == "test_slowest.py:25"
    assert found.line.endswith("  scores = (q @ k.transpose(-2, -1)).softmax(-1)")
    assert found.line_amount == 30


def test_no_part_is_told_of_a_module_that_no_part_takes_most_of() -> None:
    found = of(attn=30, mlp=30, head=20)
    assert (found.label, found.amount) == ("h.* ×3", 60)


def test_nothing_is_told_that_something_beside_it_exceeds() -> None:
    """Of the blocks attention takes most, and the head takes more than that."""
    found = of(attn=22, mlp=18, head=35)
    assert (found.label, found.amount) == ("h.* ×3", 40)
    assert of(attn=10, mlp=18, head=35).label == "head"


def test_what_has_nearly_all_of_the_step_is_not_what_is_slow_in_it() -> None:
    found = of(attn=51, mlp=47, head=2)
    assert (found.label, found.amount) == ("h.*.attn ×3", 51)


def test_the_update_is_told_where_it_takes_most_and_hides_nothing_where_it_does_not() -> None:
    found = of(update=80, attn=12, mlp=8)
    assert (found.name, found.paths, found.label) == ("test_slowest.py:62  optimizer.step()", (), "test_slowest.py:62")
    assert of(update=30, attn=28, mlp=16).label == "h.*.attn ×3"


def test_a_line_of_the_model_itself_is_told_by_its_place() -> None:
    found = of(loss=50, attn=20, mlp=10)
    assert found.label == "test_slowest.py:50"
    assert found.name.startswith("test_slowest.py:50  loss = F.cross_entropy(")


def captured(step: Callable[[], Tensor]) -> Trace:
    return tracefuse.capture(lambda: step().sum().backward()).optimize().baseline.whole


def test_a_model_without_modules_inside_is_told_by_its_class() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    trace = captured(lambda: model(x))
    found = slowest(trace, trace, {node.name: 1.0 for node in trace.ops if origin(node).module_type})
    assert found is not None
    assert (found.label, found.paths) == ("Linear", ("",))


def test_a_module_whose_path_is_a_number_is_told_with_its_class() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 8)), torch.randn(4, 8)
    trace = captured(lambda: model(x))
    found = slowest(trace, trace, {node.name: 1.0 for node in trace.ops if origin(node).module == "1"})
    assert found is not None
    assert (found.label, found.paths) == ("1 (Attention)", ("1",))


def test_a_program_without_modules_is_told_by_its_line() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    trace = captured(x.exp)
    found = slowest(trace, trace, {node.name: 1.0 for node in trace.ops})
    assert found is not None
    assert (found.paths, found.place.partition(":")[0]) == ((), "test_slowest.py")


def test_nothing_is_told_where_nothing_takes_any_time() -> None:
    assert slowest(STEP, STEP, {}) is None


def place(trace: Trace, is_there: Callable[[torch.fx.Node], bool]) -> Slowest:
    """The row of the first op that `is_there`, where each op takes 1."""
    return place_of(next(filter(is_there, trace.ops)), trace, trace, {n.name: 1.0 for n in trace.ops if does_work(n)})


def test_an_op_is_in_its_module_and_those_alike_with_all_that_they_take_beside_the_update() -> None:
    head = place(STEP, lambda node: origin(node).module == "head")
    own = [n for n in STEP.ops if does_work(n) and origin(n).module == "head" and phase(n) != "update"]
    assert (head.label, head.paths, head.amount) == ("head", ("head",), len(own))
    assert head.of == sum(map(does_work, STEP.ops))
    assert head.line.endswith("  logits = self.head(x).flatten(0, 1)")
    qkv = place(STEP, lambda node: origin(node).module == "h.1.attn.qkv")
    assert qkv.label == "h.*.attn.qkv ×3"


def test_an_op_of_a_module_that_others_are_in_is_at_its_line() -> None:
    scores = place(STEP, lambda node: origin(node).module == "h.0.attn" and does_work(node))
    assert (scores.label, scores.paths) == ("test_slowest.py:25", ())
    assert (
        scores.amount == scores.line_amount == sum(does_work(n) and ":25  " in str(origin(n).source) for n in STEP.ops)
    )
