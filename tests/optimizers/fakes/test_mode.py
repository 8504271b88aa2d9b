"""A trace's mode under several threads: what one of them runs says nothing of the tensors that another one looks at."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tracefuse.optimizers.fakes.made import fake_tensor
from tracefuse.optimizers.fakes.mode import FakeMode

CPU = torch.device("cpu")
TIMES, THREADS = 300, 4


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_threads_run_operators_and_ask_for_devices_at_once() -> None:
    mode, failed = FakeMode(), list[BaseException]()
    shared = fake_tensor(mode, (4, 5), (5, 1), torch.float32, CPU)

    def work(at: int) -> None:
        try:
            for turn in range(TIMES):
                with mode:
                    made = torch.empty(at + 1, turn % 7 + 1)
                found = shared.unsqueeze(0).expand(made.shape[0], 4, 5).sum(turn % 3)
                assert found.device == shared.device == made.device == CPU
            assert _get_current_dispatch_mode_stack() == _get_current_function_mode_stack() == []
        except BaseException as error:  # a thread has nobody else to tell
            failed.append(error)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert mode.enter_stack == []


def test_a_mode_is_entered_within_itself_and_within_another() -> None:
    mode, other = FakeMode(), FakeMode()
    with mode, other, mode:
        assert torch.empty(2).fake_mode is mode  # type: ignore[attr-defined]
        with other:
            assert torch.empty(2).fake_mode is other  # type: ignore[attr-defined]
    assert type(torch.empty(2)) is torch.Tensor
