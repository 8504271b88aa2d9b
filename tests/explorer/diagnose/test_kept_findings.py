"""Saved tensors that cost more to keep than to recompute are found with what the pass makes of them."""

from __future__ import annotations

import torch
from findings import case, found
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.optimizers.trace import human_bytes, line_of, nbytes, phase

NAME = "saved-not-recomputed"


class Chain(nn.Module):
    """Four pointwise ops, each of which eager saves an operand or a result for."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.sin().exp() * x.cos()).tanh()


def chain() -> tracefuse.Capture:
    x = torch.randn(64, 1024, requires_grad=True)
    model = Chain()
    return tracefuse.capture(lambda: model(x).square().sum().backward())


def test_a_chain_of_pointwise_ops_saves_what_its_input_gives() -> None:
    capture = chain()
    (finding,) = found(NAME, case(capture))
    after = capture.optimize(simplify=False, cat=False, decompose=False, freeze=None, fuse=False).trace
    before, kept = saved_bytes(capture.trace), saved_bytes(after)
    assert kept < before
    assert finding.title.startswith(f"the forward saves {human_bytes(before - kept)} that the backward")
    assert finding.evidence[0] == ("saved", f"{human_bytes(before)}, {human_bytes(kept)} without")
    assert f"{human_bytes(peak_bytes(capture.trace) - peak_bytes(after))} of a static peak" in finding.worth
    assert "modelled" in finding.worth
    assert "x.sin().exp() * x.cos()" in finding.source
    assert finding.severity == "low"
    assert finding.changes == {"remat": 1.0, "fuse": True}
    assert not found(NAME, case(capture, after))


def test_what_only_matmuls_read_is_not_cheaper_to_recompute() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
    assert not found(NAME, case(tracefuse.capture(lambda: model(x).sum().backward())))


def test_a_forward_alone_saves_nothing() -> None:
    assert not found(NAME, case(tracefuse.capture(lambda x: x.sin().exp().cos(), torch.randn(64, 64))))


def test_kernels_alone_do_not_make_it_go_away() -> None:
    capture = chain()
    (finding,) = found(NAME, case(capture, capture.optimize(remat=None).trace))
    assert finding.changes == {"remat": 1.0, "fuse": True}
    assert not found(NAME, case(capture, capture.optimize().trace))


def test_averages_of_an_optimizer_are_no_saved_tensors() -> None:
    """A backward behind the update is no program that ends in one: the averages decay before that backward."""
    torch.manual_seed(0)
    judges, makes, real = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(4, 64)
    optimizer = torch.optim.Adam(judges.parameters(), foreach=False)

    def step() -> None:
        for one in (judges, makes):
            one.zero_grad()
        fake = makes(real)
        (judges(real) - judges(fake.detach())).mean().backward()
        optimizer.step()
        judges(fake).mean().backward()

    step()
    of = case(tracefuse.capture(step))
    averages = [n for n in of.trace.ops if "step()" in line_of(n) and phase(n) == "forward"]
    assert sum(map(nbytes, averages)) > saved_bytes(of.trace) / 2, "no average is in the forward any more"
    assert not any("step()" in one.source for one in found(NAME, of))


def test_a_net_of_two_networks_saves_what_its_layers_do() -> None:
    torch.manual_seed(0)
    judges, makes, real = nn.Linear(1024, 1), Chain(), torch.randn(64, 1024, requires_grad=True)
    optimizer = torch.optim.Adam(judges.parameters(), foreach=False)

    def step() -> None:
        fake = makes(real)
        judges(fake.detach()).mean().backward()
        optimizer.step()
        judges(fake).mean().backward()

    step()
    (finding,) = found(NAME, case(tracefuse.capture(step)))
    assert "x.sin().exp() * x.cos()" in finding.source
