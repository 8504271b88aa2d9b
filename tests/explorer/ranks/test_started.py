"""For which module a collective was started whose own operator belongs to none, on records as two H200s wrote them."""

from __future__ import annotations

import numpy as np
import pytest

from tracefuse.ranks.started import Fsdp, before
from tracefuse.timeline.columns import Events
from tracefuse.timeline.events import Event

ENGINE = "autograd::engine::evaluate_function: "


def host(name: str, start_ns: int, duration_ns: int, category: str = "cpu_op", thread: int = 7) -> Event:
    return Event(name, False, 0, thread, start_ns, duration_ns, 0, 0, category)


FSDP = [
    host("FSDP::pre_backward (blocks.1)", 0, 100, "user_annotation"),
    host("FSDP::backward_prefetch for blocks.0", 10, 60, "user_annotation"),
    host("FSDP::all_gather (blocks.0)", 20, 40, "user_annotation"),
    host("cuLaunchKernelEx", 30, 5, "cuda_driver"),
    host("FSDP::root_post_backward_callback", 200, 100, "user_annotation"),
    host("FSDP::post_backward_reduce (blocks.0)", 210, 50, "user_annotation"),
    host("cuLaunchKernelEx", 220, 5, "cuda_driver"),
    host("FSDP::pre_forward (blocks.2)", 400, 100, "user_annotation"),
    host("cuLaunchKernelEx", 420, 5, "cuda_driver"),
    host("cuLaunchKernelEx", 430, 5, "cuda_driver", thread=8),
]


@pytest.mark.parametrize(
    ("at", "module", "is_backward"),
    [(3, "blocks.0", True), (6, "blocks.0", True), (8, "blocks.2", False), (9, "", False)],
)
def test_fsdp_says_the_module_and_the_phase(at: int, module: str, is_backward: bool) -> None:
    ranges = Fsdp.of(Events.of(FSDP))
    assert (ranges.module(at), ranges.is_backward(at)) == (module, is_backward)


def test_a_bucket_is_of_the_module_whose_backward_completed_it() -> None:
    events = Events.of(
        [
            host("aten::linear", 0, 10),
            host(ENGINE + "AddmmBackward0", 100, 10),
            host(ENGINE + "torch::autograd::AccumulateGrad", 120, 20),
            host("cuLaunchKernelEx", 125, 5, "cuda_driver"),
            host(ENGINE + "ReluBackward0", 200, 10),
        ]
    )
    rows, modules = np.array([0, 1, 2, 4]), ["Net.first", "Net.last", "", "Net"]
    assert before(events, rows, modules, 3) == "Net.last"
    assert before(events, rows[:1], modules[:1], 3) == "", "an operator of the forward says nothing"
