"""The tables of kernels over lists, without a GPU: what its memory and its graphs do is stood in for on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefuse.optimizers.kernels.tables import TABLES


class Host(Tensor):
    """A tensor that can be pinned and copied where there is no GPU."""

    def pin_memory(self, *_: Any) -> Host:
        return self

    def to(self, *_: Any, **__: Any) -> Host:
        return self


@dataclass(frozen=True)
class OnGpu:
    """What a table asks of a tensor of a GPU."""

    address: int
    device = torch.device("cuda", 0)

    def numel(self) -> int:
        return 1024

    def data_ptr(self) -> int:
        return self.address


class Gpu:
    """The text of a file, on a GPU whose stream is being captured where `is_capturing`: what a `graph` would do is noted."""

    def __init__(self) -> None:
        self.is_capturing = False
        self.graph: list[Callable[[], Any]] = []
        names = ("int32", "int64", "repeat_interleave", "arange", "stack", "cat")
        made = {name: getattr(torch, name) for name in names}
        made["tensor"] = lambda rows, **options: torch.tensor(rows, **options).as_subclass(Host)
        made["empty"] = self._empty
        made["cuda"] = SimpleNamespace(is_current_stream_capturing=lambda: self.is_capturing)
        self.names: dict[str, Any] = {"torch": SimpleNamespace(**made), "_stream": lambda _: int(self.is_capturing)}
        exec(TABLES, self.names)

    def _empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, pin_memory: bool = False, device: Any = None
    ) -> Tensor:
        made = torch.zeros(shape, dtype=dtype)
        if device is None:
            return made
        table = made.as_subclass(Host)

        def copy_(source: Tensor, **_: Any) -> Tensor:
            self.graph.append(lambda: made.copy_(source))
            return table

        table.copy_ = copy_  # type: ignore[method-assign]
        return table

    def launched(self, kernel: object, starts: tuple[int, ...], moved: int) -> list[Tensor]:
        """The tables of a kernel's launches on lists of two tensors, those that the kernel makes `moved` in memory."""
        lists = ([(OnGpu(at), OnGpu(at + 64)), (OnGpu(at + moved), OnGpu(at + moved + 64))] for at in starts)
        return [self.names["tables_of"](kernel, 512, 2, *one)[0] for one in lists]


@pytest.mark.parametrize("starts", [(1024,), (1024, 2048)], ids=["a launch", "two launches of one kernel"])
def test_each_launch_finds_its_table_in_every_graph_that_is_captured(starts: tuple[int, ...]) -> None:
    gpu, kernel, held = Gpu(), object(), list[int]()
    for graph in range(4):
        gpu.is_capturing = False
        gpu.launched(kernel, starts, moved=256)
        gpu.is_capturing = True
        gpu.graph.clear()
        tables = gpu.launched(kernel, starts, moved=4096 * (graph + 1))
        replay(gpu)
        for table, start in zip(tables, starts, strict=True):
            assert table.tolist() == [[1024, 1024, at, at + 4096 * (graph + 1)] for at in (start, start + 64)]
        held += [table.data_ptr() for table in tables]
    assert len(set(held)) == len(held)


@pytest.mark.parametrize("is_filled_behind", [False, True], ids=["by itself", "filled once behind the recording"])
def test_a_graph_has_its_table_though_an_earlier_one_of_the_same_tensors_never_ran(is_filled_behind: bool) -> None:
    """Who records a graph may ask for the copies, which the graph then does not make."""
    gpu, kernel, copies = Gpu(), object(), list[tuple[Tensor, Tensor]]()
    gpu.launched(kernel, (1024,), moved=256)
    gpu.is_capturing = True
    for _ in range(2):
        gpu.graph.clear()
        copies.clear()
        gpu.names["copies_behind"] = copies if is_filled_behind else None
        (table,) = gpu.launched(kernel, (1024,), moved=4096)
    assert (len(gpu.graph), len(copies)) == ((0, 1) if is_filled_behind else (1, 0))
    for waiting, host in copies:
        waiting.copy_(host)
    replay(gpu)
    assert table.tolist() == [[1024, 1024, at, at + 4096] for at in (1024, 1088)]


def test_a_launch_has_its_table_though_a_graph_of_the_same_tensors_never_ran() -> None:
    gpu, kernel = Gpu(), object()
    gpu.names["_stream"] = lambda _: 0
    gpu.launched(kernel, (1024,), moved=256)
    gpu.is_capturing = True
    gpu.launched(kernel, (1024,), moved=4096)
    gpu.is_capturing = False
    (table,) = gpu.launched(kernel, (1024,), moved=4096)
    assert table.tolist() == [[1024, 1024, at, at + 4096] for at in (1024, 1088)]


def replay(gpu: Gpu) -> None:
    for run in gpu.graph:
        run()


def test_a_graph_of_what_never_ran_is_refused() -> None:
    gpu = Gpu()
    gpu.is_capturing = True
    with pytest.raises(RuntimeError, match="captured before it ran"):
        gpu.launched(object(), (1024,), moved=256)
