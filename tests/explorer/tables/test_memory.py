"""The memory of a step as numbers and as tables: what adds up, what is measured beside it, what is said."""

from __future__ import annotations

import functools
from pathlib import Path

import programs
import pytest
import torch
from torch import nn

import tracefuse
from tracefuse.config.configuration import Config
from tracefuse.demo import GPT, batch
from tracefuse.optimizers.liveness import peak_bytes, saved_bytes
from tracefuse.tables.allocator import added_peak
from tracefuse.tables.memory import CPU_KERNELS, input_bytes, replay_peak, workspace_bytes
from tracefuse.widgets.payload.program import notes

KIB = 1024


@functools.cache
def gpt() -> tracefuse.Capture:
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(layers=3, width=32, heads=2, vocab=61, length=16, dropout=0.1), batch(61, 2, 12)
    return tracefuse.capture(lambda: model(tokens, targets).backward())


def test_kinds_add_up_to_what_is_alive() -> None:
    found = gpt().optimize().memory()
    for curve in (found.before, found.after):
        assert [sum(column) for column in zip(*curve.by_kind.values(), strict=True)] == list(curve.live)
        assert sum(one.nbytes for one in curve.alive) == curve.peak
        assert curve.live[curve.ops.index(curve.at)] == curve.peak


def test_the_peaks_are_those_of_the_traces() -> None:
    v = gpt().optimize()
    found = v.memory()
    assert (found.before.peak, found.after.peak) == (peak_bytes(gpt().trace), peak_bytes(v.trace))
    assert found.measured is None


@pytest.mark.parametrize("options", [{}, {"memory_budget": 0.3}, {"fuse": False}])
def test_groups_add_up_to_what_is_saved(options: dict) -> None:
    v = gpt().optimize(**options)
    found = v.memory()
    saved = (saved_bytes(gpt().trace), saved_bytes(v.trace))
    for groups in (found.by_reason, found.by_module):
        assert tuple(sum(group.nbytes[at] for group in groups) for at in (0, 1)) == saved
    (attention,) = [group for group in found.by_module if group.name == "h.*.attn"]
    assert attention.count.before % 3 == 0, "three layers are one group"


def test_the_largest_at_the_peak_say_what_they_are() -> None:
    x = torch.ones(16, 16, requires_grad=True)

    def step() -> None:
        big = x.expand(4, 16, 16).exp()
        big.sum().backward()

    found = tracefuse.capture(step).variant(Config.off()).memory()
    assert (found.before.alive[0].nbytes, found.before.alive[0].type) == (4 * KIB, "f32[4, 16, 16]")
    big = next(one for one in found.before.alive if one.name == "big")
    assert big.kind == "saved"
    assert "big = x.expand" in big.source


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_a_replay_needs_on_the_cpu_what_the_trace_says(name: str) -> None:
    capture = tracefuse.capture(programs.PROGRAMS[name](torch.float64).run)
    for v in (capture.variant(Config.off()), capture.optimize(fuse=False)):
        try:
            v.check_exportable()
        except tracefuse.ExportError:
            continue
        counted = replay_peak(v) + input_bytes(v.trace, "cpu")
        assert peak_bytes(v.trace) + workspace_bytes(v) == pytest.approx(counted, rel=0.05, abs=512)


def test_measured_peaks_stand_beside_the_static_ones() -> None:
    found = gpt().optimize(fuse=False).memory(measure=True)
    assert found.measured is not None
    assert found.measured.device.startswith("measured on CPU")
    assert found.measured.peak.before == pytest.approx(found.before.peak, rel=0.05)
    text = str(found)
    assert "measured peak" in text
    assert CPU_KERNELS not in text
    assert CPU_KERNELS in str(gpt().optimize().memory(measure=True))


def test_the_text_says_static_and_every_reason_in_a_sentence() -> None:
    text = str(gpt().optimize().memory())
    assert text.startswith("static: ")
    assert "\npeak memory: the most bytes alive at once, inputs and parameters included\n" in text
    assert "measured" not in text
    assert "Operand of a matmul" in text
    assert "h.*.attn" in text


def test_a_forward_alone_saves_nothing() -> None:
    assert "nothing is saved for a backward" in str(
        tracefuse.capture(nn.Linear(4, 4), torch.ones(2, 4)).optimize().memory()
    )


def test_the_allocator_counts_what_is_alive_at_once() -> None:
    def run() -> torch.Tensor:
        first = torch.empty(1024, dtype=torch.uint8)
        del first
        second = torch.empty(4096, dtype=torch.uint8)
        return second[:1]

    assert added_peak(run, "cpu") == 4096
    with pytest.raises(ValueError, match="pass cpu or cuda"):
        added_peak(run, "meta")


def test_of_a_session_file_the_peak_as_eager_frees_is_not_known(tmp_path: Path) -> None:
    gpt().save(tmp_path / "run.tfz")
    found, here = tracefuse.load(tmp_path / "run.tfz").optimize().memory(), gpt().optimize().memory()
    assert (found.eager_peak, found.after.live) == (None, here.after.live)
    assert here.eager_peak is not None
    assert "as eager frees" not in str(found)
    assert "as eager frees" in str(here)


# --- a budget that is missed ------------------------------------------------------------------------------------------


def test_a_budget_that_cannot_be_met_is_said_where_the_variant_and_its_memory_are_printed() -> None:
    missed = gpt().optimize(memory_budget="1 kB")
    (note,) = missed.memory().notes
    assert "more than the budget of 1000 B" in note
    assert note in str(missed.memory())
    assert note in repr(missed)


def test_of_a_budget_that_is_met_nothing_is_said() -> None:
    met = gpt().optimize(memory_budget="2 GB")
    assert met.memory().notes == ()
    assert repr(met).endswith("kernels>")


# --- several backwards ------------------------------------------------------------------------------------------------


def accumulate(micro_batches: int) -> tracefuse.Capture:
    model, x = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(micro_batches, 4, 8)

    def step() -> None:
        for part in x:
            model(part).square().mean().backward()

    return tracefuse.capture(step)


def test_a_step_that_accumulates_gradients_says_whose_order_its_peaks_are() -> None:
    capture = accumulate(3)
    found = capture.optimize().memory()
    (note,) = found.notes
    assert note == capture.program.order
    assert "model(part)" in note
    assert "runs all forwards first" in note
    assert "one micro-batch" in note
    assert found.eager_peak is None
    assert note in str(found)
    assert "as eager frees" not in str(found)
    assert note in [one["text"] for one in notes(capture.optimize())]


def test_its_session_file_says_so_too(tmp_path: Path) -> None:
    capture = accumulate(2)
    loaded = tracefuse.load(capture.save(tmp_path / "c.tfz"))
    assert loaded.optimize().memory().notes == (capture.program.order,)


def test_one_micro_batch_is_in_the_order_of_the_program() -> None:
    capture = accumulate(1)
    found = capture.optimize().memory()
    assert (capture.program.backwards, capture.program.order, found.notes) == (1, "", ())
    assert found.eager_peak is not None


def test_an_optimizer_that_decays_weights_is_no_second_forward() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1, foreach=False)

    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    capture = tracefuse.capture(step)
    assert (capture.program.backwards, capture.program.order) == (1, "")


def test_backwards_of_one_forward_are_in_order_but_free_otherwise() -> None:
    x = torch.randn(8, requires_grad=True)

    def step() -> None:
        y = x.exp()
        first, second = y.sum(), y.square().sum()
        first.backward(retain_graph=True)
        second.backward()
        print(y.detach().mean())  # a forward op after a backward, which no backward reads

    capture = tracefuse.capture(step)
    found = capture.optimize().memory()
    assert (capture.program.backwards, capture.program.order, found.notes, found.eager_peak) == (2, "", (), None)
