"""train_all: the trace has every gradient, and the cell notices nothing of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from traces import demanded

import tracefuse
from tracefuse.errors import CaptureError
from tracefuse.recording.shield import Shield
from tracefuse.recording.thaw import Thaw


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    made[0].requires_grad_(False)
    return made


def batch() -> Tensor:
    return torch.randn(5, 4, dtype=torch.float64)


def gradients(capture: tracefuse.Capture) -> dict[str, Tensor]:
    """By the user's name, as replayed."""
    values = demanded(capture.trace, capture.replay())
    return {capture.trace.input_of(of).source: v for (kind, of), v in values.items() if kind == "gradient"}


def all_trained(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Eager's gradients of a copy in which everything is trained."""
    trained = copy.deepcopy(net)
    trained.requires_grad_(True)
    trained.zero_grad()
    trained(x).square().sum().backward()
    return {name: p.grad for name, p in trained.named_parameters()}


def test_frozen_parameters_have_gradients_in_the_trace_only():
    net, x = model(), batch()
    with tracefuse.capture(train_all=True) as c:
        net(x).square().sum().backward()
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    assert [p.grad is None for p in net.parameters()] == [True, True, False, False]
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-12, atol=1e-12)
    assert sorted(c.thawed) == ["0.bias", "0.weight"]


def test_without_it_nothing_is_thawed():
    net, x = model(), batch()
    c = tracefuse.capture(lambda: net(x).square().sum().backward())
    assert sorted(gradients(c)) == ["2.bias", "2.weight"]
    assert c.thawed == ()


def test_what_is_trained_has_the_very_gradient():
    net, x = model(), batch()
    plain = copy.deepcopy(net)
    tracefuse.capture(lambda: net(x).square().sum().backward(), train_all=True)
    plain(x).square().sum().backward()
    for mine, other in zip(net[2].parameters(), plain[2].parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_a_function_gets_its_own_keyword_arguments():
    net, x = model(), batch()

    def step(x: Tensor, scale: float) -> Tensor:
        loss = (net(x) * scale).square().sum()
        loss.backward()
        return loss

    c = tracefuse.capture(step, x, scale=1.0, train_all=True)
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-12, atol=1e-12)


def test_several_backwards_add_up():
    net, x = model(), batch()

    def cell() -> None:
        for half in x.split([2, 3]):
            net(half).square().sum().backward()

    c = tracefuse.capture(cell, train_all=True)
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-12, atol=1e-12)
    assert net[0].weight.grad is None


def test_an_optimizer_in_the_cell_leaves_frozen_parameters_alone():
    net, x = model(), batch()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with tracefuse.capture(train_all=True):
        net(x).square().sum().backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
    assert {n for n, p in net.named_parameters() if not torch.equal(p, before[n])} == {"2.weight", "2.bias"}
    trained = [p.grad for p in net[2].parameters()]
    torch.testing.assert_close(norm, torch.stack([g.norm() for g in trained]).norm())


def test_an_old_gradient_of_a_frozen_parameter_is_given_back():
    net, x = model(), batch()
    old = net[0].weight.grad = torch.ones_like(net[0].weight)
    c = tracefuse.capture(lambda: net(x).square().sum().backward(), train_all=True)
    assert net[0].weight.grad is old
    assert torch.equal(old, torch.ones_like(old))
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-12, atol=1e-12)


def test_parameters_used_outside_their_module_and_bare_ones():
    net, x = model(), batch()
    bare = nn.Parameter(torch.randn(3, 3, dtype=torch.float64), requires_grad=False)
    with tracefuse.capture(train_all=True) as c:
        loss = (F.linear(x, net[0].weight, net[0].bias).tanh() @ net[2].weight.t() @ bare).sum()
        loss.backward()
    assert set(gradients(c)) == {"0.weight", "0.bias", "2.weight", "bare"}
    assert not bare.requires_grad
    assert bare.grad is None


def test_a_module_that_no_name_leads_to_is_met_when_it_runs():
    x, holder = batch(), [model()]
    with tracefuse.capture(train_all=True) as c:
        holder[0](x).square().sum().backward()
    assert set(gradients(c)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_what_the_cell_freezes_itself_is_thawed_too():
    net, x = model(), batch()
    with tracefuse.capture(train_all=True) as c:
        net.requires_grad_(False)
        net[2].requires_grad_(True)
        net(x).square().sum().backward()
    assert set(gradients(c)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]


# What `--train-all` says of cells that do not leave frozen parameters alone.


def test_what_a_cell_unfreezes_and_trains_itself_is_lost():
    net, x = model(), batch()
    before = net[0].weight.detach().clone()
    with tracefuse.capture(train_all=True):
        net.requires_grad_(True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(net[0].weight, before)
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]


def test_a_gradient_that_a_cell_clears_comes_back():
    net, x = model(), batch()
    old = net[0].weight.grad = torch.ones_like(net[0].weight)
    with tracefuse.capture(train_all=True):
        net.zero_grad()
        net(x).square().sum().backward()
    assert net[0].weight.grad is old


@pytest.mark.parametrize(
    ("touch", "message"),
    [(lambda p: p.mul_(2), "in-place operation"), (lambda p: p.numpy(), "requires grad")],
    ids=["a write in place", "numpy"],
)
def test_frozen_parameters_are_no_data_while_they_are_thawed(touch, message):
    net = model()
    with pytest.raises(RuntimeError, match=message), tracefuse.capture(train_all=True):
        touch(net[0].weight)
    touch(net[0].weight)


def test_all_is_restored_after_an_error():
    net, x, c = model(), batch(), tracefuse.capture(train_all=True)

    def cell() -> None:
        with c:
            net(x).square().sum().backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cell()
    assert [p.requires_grad for p in net.parameters()] == [False, False, True, True]
    assert net[0].weight.grad is None
    with pytest.raises(CaptureError, match="nothing was captured"):
        _ = c.trace


def test_hooks_are_gone_afterwards():
    net, x = model(), batch()
    tracefuse.capture(lambda: net(x).square().sum().backward(), train_all=True)
    net[0].requires_grad_(True)
    net(x).square().sum().backward()
    assert net[0].weight.grad is not None


def test_no_grad_blocks_integers_and_plain_tensors_stay_as_they_are():
    net, teacher, x = model(), model(), batch()
    quantised = nn.Parameter(torch.arange(4), requires_grad=False)
    with torch.inference_mode():
        made_in_inference = nn.Parameter(torch.ones(3), requires_grad=False)
    with tracefuse.capture(train_all=True) as c:
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(net(x) * quantised[3], target).backward()
    trainable = [t for i, t in zip(c.trace.inputs, c.live_inputs, strict=False) if i.trainable]
    assert {id(t) for t in trainable} == {id(p) for p in net.parameters()}
    assert made_in_inference.requires_grad is False


def test_a_loss_that_is_all_frozen_can_be_captured():
    net, x = model().requires_grad_(False), batch()
    c = tracefuse.capture(lambda: net(x).square().sum().backward(), train_all=True)
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-12, atol=1e-12)


def test_a_tied_parameter_is_thawed_once():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    net[1].weight = net[0].weight
    net.requires_grad_(False)
    x = batch()
    with Thaw({"net": net, "again": net, "w": net[0].weight}, Shield("the test")) as thaw:
        net(x).square().sum().backward()
        assert [id(p) for p in thaw.parameters] == [id(net[0].weight)]
        found = thaw.gradient_of(net[0].weight)
    torch.testing.assert_close(found, all_trained(net, x)["0.weight"], rtol=1e-12, atol=1e-12)
    assert not net[0].weight.requires_grad


def test_unfreezing_is_a_what_if():
    net, x = model(), batch()
    c = tracefuse.capture(lambda: net(x).square().sum().backward(), train_all=True)
    as_written = c.optimize(freeze=c.thawed)
    assert {i.source for i in as_written.trace.inputs if i.trainable} == {"2.weight", "2.bias"}
    what_if = c.optimize(freeze=["*", "!0.bias"])
    assert {i.source for i in what_if.trace.inputs if i.trainable} == {"0.bias"}
    assert "0.bias" in str(c.frozen_costs(["*"]))


@pytest.mark.gpu
def test_on_a_gpu_the_engines_thread_is_seen():
    net, x = model().cuda(), batch().cuda()

    def cell() -> None:
        for half in x.split([2, 3]):
            net(half).square().sum().backward()

    c = tracefuse.capture(cell, train_all=True)
    assert net[0].weight.grad is None
    torch.testing.assert_close(gradients(c), all_trained(net, x), rtol=1e-10, atol=1e-10)
