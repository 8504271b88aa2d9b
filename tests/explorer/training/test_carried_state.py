"""A state that each step makes for the next one: no other data is taken for it, and where the step returns it, it goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tracefuse


class Loop:
    """A recurrent net of as many features in as out: its state, its data and its target have one shape."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.RNN(4, 4).double()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, fused=True)

    def start(self) -> Any:
        return torch.zeros(1, 3, 4, dtype=torch.float64)

    def behind(self, h: Any) -> Any:
        return h.detach()

    def train(self, hx: Any, data: Iterable[tuple[Tensor, Tensor]], c: Any = None) -> Any:
        for x, y in data:
            out, h = self.net(x, hx)
            loss = F.mse_loss(out, y)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            hx = self.behind(h)
            if c is not None:
                c.returned = loss, hx
        return hx


class Long(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(4, 4).double()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, fused=True)

    def start(self) -> Any:
        return tuple(torch.zeros(1, 3, 4, dtype=torch.float64) for _ in range(2))

    def behind(self, h: Any) -> Any:
        return tuple(one.detach() for one in h)


def data_of(steps: int) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(1, 3, 4, dtype=torch.float64, generator=made) for _ in range(2)) for _ in range(steps)]  # type: ignore[misc]


@pytest.mark.parametrize("steps", [3, 4], ids=["the last step", "a step before others"])
@pytest.mark.parametrize(("kind", "states"), [(Loop, ("hx",)), (Long, ("hx", "hx_1"))])
def test_data_is_not_taken_for_a_state_that_steps_carry(kind: type[Loop], states: tuple[str, ...], steps: int) -> None:
    ours, data = kind(), data_of(9)
    with torch.backends.mkldnn.flags(enabled=False), tracefuse.capture_step(n=3) as c:
        state = ours.train(ours.start(), data[:steps], c)
    eager = copy.deepcopy(ours.net.state_dict())
    step = c.optimize().compile()
    assert (step.inputs, len(step.results)) == (("x", *states, "y"), 1 + len(states))
    x, y = data[steps]
    with pytest.raises(
        ValueError, match=rf"takes x, hx, .*y, of which each step makes {', '.join(states)} for the next"
    ):
        step(x, y)
    assert all(torch.equal(one, eager[name]) for name, one in ours.net.state_dict().items())
    twin = kind()
    twin.net.load_state_dict(eager)
    expected = twin.train(state, data[steps:])
    for x, y in data[steps:]:
        held = state if isinstance(state, tuple) else (state,)
        _, *state = step(x, *held, y=y)
        state = tuple(state) if len(state) > 1 else state[0]
    torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.net.state_dict(), twin.net.state_dict(), rtol=0, atol=1e-12)


def test_a_state_that_is_left_out_is_refused_with_what_returns_it() -> None:
    ours, data = Loop(), data_of(5)
    with tracefuse.capture_step(n=3) as c:
        ours.train(ours.start(), data[:4])
    step = c.optimize().compile()
    for given in ({"x": data[4][0]}, {"x": data[4][0], "y": data[4][1]}):
        with pytest.raises(
            ValueError, match=r"pass hx.* too. Of hx each step makes the next: return it .*`c.returned = "
        ):
            step(**given)


def test_a_state_that_is_returned_as_it_was_read_is_told_of() -> None:
    ours, data = Loop(), data_of(5)
    hx = ours.start()
    with tracefuse.capture_step(n=3) as c:
        for batch in data[:4]:
            before, hx = hx, ours.train(hx, [batch])
            c.returned = before
    with pytest.warns(UserWarning, match="returns before as it was given it, and the next one reads another"):
        c.optimize().compile()


@pytest.mark.parametrize("steps", [3, 4], ids=["the last step", "a step before others"])
def test_a_state_that_a_step_returns_is_called_as_the_one_that_it_takes(steps: int) -> None:
    ours = Long()
    hx = ours.start()
    with torch.backends.mkldnn.flags(enabled=False), tracefuse.capture_step(n=3) as c:
        for x, y in data_of(steps):
            out, h = ours.net(x, hx)
            loss = F.mse_loss(out, y)
            loss.backward()
            ours.opt.step()
            ours.opt.zero_grad()
            hx = ours.behind(h)
            c.returned = loss, hx
    step = c.optimize().compile()
    assert (step.inputs, step.results) == (("x", "hx", "hx_1", "y"), ("loss", "hx", "hx_1"))


def test_the_parts_of_what_is_returned_are_called_as_the_variable_that_has_them() -> None:
    x, net = torch.ones(2, 3), nn.Linear(3, 3)
    with tracefuse.capture() as c:
        pair = net(x), net(x).tanh()
        loss = sum(one.sum() for one in pair)
        c.returned = loss, pair, {"more": [net(x).relu()]}
    assert [out.of for out in c.trace.outputs if out.kind == "result"] == ["loss", "pair", "pair_1", "more_0"]
