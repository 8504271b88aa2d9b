"""Whether a replay gives what the run gave: bit for bit, or by how much it does not; and what can no longer be compared."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.execution.agreement import Agreement
from tracefuse.widgets.payload.program import notes


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


def test_a_step_with_dropout_and_an_optimizer_is_replayed_bit_for_bit() -> None:
    model, x = layer(), torch.randn(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with tracefuse.capture() as c:
        loss = nn.functional.dropout(model(x), 0.5).square().mean()
        loss.backward()
        optimizer.step()
    found = c.check()
    assert found is not None
    assert c.update is not None
    assert (found.compared, found.differing) == (len(c.replay()), 0)
    assert str(found) == f"A replay of the trace gives the run's {found.compared} outputs bit for bit."


def written_by_numpy(x: Tensor, model: nn.Linear) -> Tensor:
    hidden = model(x)
    hidden.detach().numpy()[:] = 3
    return hidden.square().mean()


def input_written_by_numpy(x: Tensor, model: nn.Linear) -> Tensor:
    before = (x * 2).sum()
    x.numpy()[:] = 3
    return model(x).mean() + before


def written_behind_a_pointer(x: Tensor, model: nn.Linear) -> Tensor:
    import ctypes

    hidden = model(x)
    ctypes.memset(hidden.data_ptr(), 0, hidden.nbytes)
    return hidden.square().mean() + hidden.sum()


@pytest.mark.parametrize("program", [written_by_numpy, input_written_by_numpy, written_behind_a_pointer])
def test_a_write_that_no_operator_does_is_told(program) -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = program(x, model)
        loss.backward()
    found = c.check()
    assert found is not None
    assert found.differing > 0
    assert not found.is_rounding
    assert str(found).endswith("Write it as an operator, or capture a smaller piece.")
    assert str(found) in [note["text"] for note in notes(c.optimize())]


def test_measuring_checks_first_and_the_view_says_so() -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    variant = c.optimize()
    assert c.agreement is None
    assert notes(variant) == []
    variant.measure(budget_s=0.01)
    assert c.agreement == Agreement(3, 3)
    assert [note["text"] for note in notes(variant)] == [str(c.agreement)]


def test_a_table_of_times_says_that_the_trace_is_not_the_whole_program() -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = written_by_numpy(x, model)
        loss.backward()
    timing = c.optimize().measure(budget_s=0.01)
    assert str(c.agreement) in str(timing)


def test_what_was_freed_or_written_to_since_is_compared_by_the_numbers_that_were_kept() -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    model.bias.grad = None
    model.weight.grad.zero_()
    found = c.check()
    assert found is not None
    assert found == Agreement(3, 3, sampled=2)
    assert "(2 of them by a few numbers each: they were freed or written to since)" in str(found)


def test_nothing_is_compared_once_an_optimizer_has_changed_what_the_run_read() -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert c.check() == Agreement(3, 0)
    assert "was written to since" in str(c.agreement)


def uncounted(model: nn.Module, x: Tensor, how: str) -> None:
    """Writes that no version counts."""
    if how == "fused":
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    elif how == "data":
        model[0].weight.data.mul_(2)
    else:
        model.train()(x)


@pytest.mark.parametrize("how", ["fused", "data", "statistics"])
def test_nothing_is_compared_once_something_wrote_that_counts_no_version(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(16, 8)
    model.train(how != "statistics")
    captured = tracefuse.capture(lambda: model(x).square().mean().backward())
    uncounted(model, x, how)
    found = captured.check()
    assert found is not None
    assert found.compared == 0


def test_an_input_made_in_inference_mode_and_written_since_is_not_compared() -> None:
    with torch.inference_mode():
        x = torch.randn(4)
    captured = tracefuse.capture(lambda: x.exp().clone())
    with torch.inference_mode():
        x.copy_(torch.randn(4))
    found = captured.check()
    assert found is not None
    assert found.compared == 0


def test_running_statistics_are_compared_as_the_run_left_them() -> None:
    torch.manual_seed(0)
    model, x = nn.BatchNorm1d(3), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    model(x)  # writes to them again, and counts no write
    found = c.check()
    assert found is not None
    assert found.compared > 0
    assert found.differing == 0


def test_nothing_is_compared_once_a_parameter_was_given_other_memory() -> None:
    model, x = layer(), torch.randn(5, 3)
    with tracefuse.capture() as c:
        loss = model(x).square().mean()
        loss.backward()
    model.weight.data = model.weight.data * 2
    assert c.check() == Agreement(len(c.trace.outputs), 0)


def test_a_gradient_added_to_an_older_one_is_not_compared_with_the_sum() -> None:
    model, x = layer(), torch.randn(5, 3)
    model(x).sum().backward()
    with tracefuse.capture() as c:
        loss = model(x).sum()
        loss.backward()
    assert c.check() == Agreement(3, 1)


def test_nothing_large_is_kept_alive_for_it() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> Tensor:
        out = x.sin()
        out.sum().backward()
        seen.append(weakref.ref(out))
        return out

    seen: list[weakref.ref[Tensor]] = []
    c = tracefuse.capture(step)
    seen.append(weakref.ref(x.grad))
    x.grad = None
    assert [reference() for reference in seen] == [None, None]
    assert c.check() == Agreement(3, 2, sampled=2)
    assert "(2 of them by a few numbers each: they were freed or written to since; 1 more cannot" in str(c.agreement)


def test_differences_of_rounding_are_told_apart() -> None:
    found = Agreement(3, 3, 1, "the gradient w", 1e-6, 2.0)
    assert str(found).endswith("Kernels that add up in no fixed order do so.")
    assert "not in the trace" in str(replace(found, is_rounding=False))
    assert str(Agreement(3, 0)).startswith("No replay could be held against the run")


def test_an_operator_whose_runs_differ_among_themselves_hides_no_write() -> None:
    """By far more than rounding: what two replays differ by is what a run and a replay may differ by."""
    drawn = torch.Generator().manual_seed(0)

    @torch.library.custom_op("tracefuse_agreement::in_some_order", mutates_args=())
    def in_some_order(x: Tensor) -> Tensor:
        return x * (1 + 1e-2 * torch.rand(x.shape, generator=drawn, dtype=x.dtype))

    x = torch.ones(4096)
    with tracefuse.capture() as c:
        y = in_some_order(x)
        z = y + 1
    found = c.check()
    assert found is not None
    assert (found.is_rounding, found.differing) == (True, 2)
    assert 1e-3 < found.delta < 1e-1

    with tracefuse.capture() as c:
        y = in_some_order(x)
        z = y + 1
        z.numpy()[0] = 3
    found = c.check()
    assert found is not None
    assert (found.is_rounding, found.worst) == (False, "the result z")


def unset(x: Tensor, model: nn.Linear) -> tuple[Tensor, ...]:
    """Two results of memory that is not, or not all, written to, and one for which all of it is."""
    buffer, part, whole = torch.empty(64), torch.empty_like(x), x.new_empty(5, 4)
    part[:2] = x[:2]
    torch.add(model(x).detach(), 1, out=whole)
    return buffer * 2, part, whole


def test_memory_that_nothing_wrote_to_is_known_as_undefined(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = layer(), torch.randn(5, 3)
    c = tracefuse.capture(unset, x, model)
    monkeypatch.setattr(tracefuse.Capture, "replay", with_other_memory(tracefuse.Capture.replay))
    found = c.check()
    assert (found.outputs, found.compared, found.differing, found.undefined) == (3, 1, 0, 2)
    assert str(found) == (
        "A replay of the trace gives the run's 1 output bit for bit (2 undefined: memory of an `empty` that no operator wrote "
        "to)."
    )


def with_other_memory(replay: Callable[[tracefuse.Capture], tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`replay` where memory that is taken holds NaN, so that it is not by chance as it was in the run."""

    def replayed(capture: tracefuse.Capture) -> tuple[Tensor, ...]:
        torch.use_deterministic_algorithms(True)
        try:
            return replay(capture)
        finally:
            torch.use_deterministic_algorithms(False)

    return replayed


def test_what_differs_for_another_reason_beside_undefined_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(x: Tensor, model: nn.Linear) -> tuple[Tensor, ...]:
        hidden = model(x)
        hidden.detach().numpy()[:] = 3
        return hidden * 2, torch.empty(64) * 2

    c = tracefuse.capture(both, torch.randn(5, 3), layer())
    monkeypatch.setattr(tracefuse.Capture, "replay", with_other_memory(tracefuse.Capture.replay))
    found = c.check()
    assert (found.compared, found.differing, found.undefined, found.is_rounding) == (1, 1, 1, False)
    assert "1 undefined" in str(found)


def test_a_replay_runs_with_mkldnn_off_where_the_program_did() -> None:
    """What the refusal of an LSTM on a CPU asks for must not end in an alarm."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8, batch_first=True), torch.randn(4, 6, 8)
    with torch.backends.mkldnn.flags(enabled=False), tracefuse.capture() as c, torch.autocast("cpu", torch.bfloat16):
        loss = model(x)[0].float().square().mean()
        loss.backward()
    assert c.environment["mkldnn"] == "off"
    assert torch._C._get_mkldnn_enabled()
    assert str(c.check()).endswith("bit for bit.")
    assert torch._C._get_mkldnn_enabled()


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=str)
def test_a_later_step_of_an_optimizer_is_no_difference(options: dict[str, bool]) -> None:
    net, x = nn.Linear(64, 64), torch.randn(8, 64)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, **options)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with tracefuse.capture() as c:
        step()
    step()
    assert "written to since" in str(c.check())
    with tracefuse.capture() as c:
        step()
    assert "bit for bit" in str(c.check())
