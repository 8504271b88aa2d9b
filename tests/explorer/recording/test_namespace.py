"""Names are looked up in the frames of user programs, and what they stood for is as free as before."""

from __future__ import annotations

import gc
import sys
import weakref

import torch

import tracefuse
from tracefuse.recording.namespace import visible_from


def test_a_function_may_free_what_its_captured_block_made() -> None:
    x = torch.randn(4)
    with tracefuse.capture() as c:
        hidden = x * 2
        total = hidden.sum()
    made = weakref.ref(hidden)
    del hidden
    assert made() is None, "looking at the function's variables kept it"
    assert (c.check().differing, total.shape) == (0, ())


def test_so_may_one_whose_frozen_parameters_are_looked_for() -> None:
    frozen, x = torch.nn.Linear(4, 4).requires_grad_(False), torch.randn(4)
    with tracefuse.capture(train_all=True) as c:
        frozen(x).sum().backward()
    module, thawed = weakref.ref(frozen), c.thawed
    del frozen, c
    gc.collect()  # a trace has cycles
    assert thawed
    assert module() is None


def test_variables_are_seen_as_they_are_and_the_functions_own_dict_is_left_alone() -> None:
    first, mine = 1, locals()
    assert visible_from(sys._getframe())["first"] == 1
    assert mine["first"] == 1
    second = 2
    seen = visible_from(sys._getframe())
    assert (seen["first"], seen["second"]) == (first, second)
    assert "visible_from" in seen, "globals too"


def test_a_modules_variables_stay() -> None:
    names: dict[str, object] = {"sys": sys, "visible_from": visible_from}
    exec("value = 3\nseen = visible_from(sys._getframe())", names)
    assert names["value"] == 3
    assert names["seen"]["value"] == 3  # type: ignore[index]


class NotLoaded(dict[str, object]):
    """A dict that reads its items from elsewhere."""

    def _fail(self, *args: object) -> None:
        raise RuntimeError("not loaded")

    items = __len__ = __iter__ = keys = _fail  # type: ignore[assignment]


def test_a_dict_of_the_programs_own_class_is_asked_for_nothing() -> None:
    held, weight = NotLoaded(x=torch.randn(4)), torch.randn(4, requires_grad=True)

    def loss() -> torch.Tensor:
        batch = held
        return (dict.__getitem__(batch, "x") * weight * torch.ones(4)).sum()  # type: ignore[operator]

    with tracefuse.capture() as c:
        loss().backward()
    assert c.check().differing == 0


class Lazy:
    """A setting that is read before it is there, as lazily configured ones are."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("not configured")


def test_what_raises_where_it_is_asked_what_it_is_is_no_variable_of_the_program() -> None:
    setting, held, model = Lazy(), [Lazy()], torch.nn.Linear(4, 3)
    opt = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def train(steps: int) -> None:
        own = Lazy()
        for _ in range(steps):
            opt.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            opt.step()
        del own

    with tracefuse.capture() as c:
        train(1)
    assert c.update is not None
    with tracefuse.capture_step(n=2) as c:
        train(3)
    before = model.weight.detach().clone()
    c.optimize().compile()()
    torch.testing.assert_close(before - model.weight.detach(), torch.full((3, 4), 0.2))
    assert tracefuse.capture(lambda: train(1), train_all=True).update is not None
    del setting, held
