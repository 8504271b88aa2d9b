"""Small memsets of CUDA graphs as kernels: which are replaced, that the order stays, and what a replay on a GPU then does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tracefuse.device import graph_nodes
from tracefuse.device.graph_nodes import LOSSY_QUERY, replace_memsets

KERNEL, MEMSET = 0, 2
INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE


@dataclass
class Driver:
    """A stand-in for the CUDA driver: the nodes of one graph by number, with their edges."""

    kinds: dict[int, int] = field(default_factory=dict)
    memsets: dict[int, dict[str, int]] = field(default_factory=dict)
    edges: set[tuple[int, int]] = field(default_factory=set)
    odd: set[int] = field(default_factory=set)
    """Nodes with an edge that is not plain."""
    filled: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """The address, value and number of words that a new kernel is given."""

    def memset(self, node: int, **values: int) -> None:
        self.kinds[node] = MEMSET
        plain = {"address": 4096, "pitch": 0, "value": 0, "element_size": 1, "width": 4, "height": 1}
        self.memsets[node] = plain | values

    def cuCtxGetCurrent(self, out: Any) -> int:
        out._obj.value = 1
        return 0

    def cuModuleLoadData(self, out: Any, text: Any) -> int:
        assert b"entry fill" in text.value
        return 0

    def cuModuleGetFunction(self, out: Any, module: Any, name: Any) -> int:
        out._obj.value = 77
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        return self._list(list(self.kinds), nodes, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, memset: Any) -> int:
        for name, value in self.memsets[node.value].items():
            setattr(memset._obj, name, value)
        return 0

    def cuGraphNodeGetDependencies(self, node: Any, nodes: Any, count: Any) -> int:
        return self._list([a for a, b in self.edges if b == node.value], nodes, count, node.value)

    def cuGraphNodeGetDependentNodes(self, node: Any, nodes: Any, count: Any) -> int:
        return self._list([b for a, b in self.edges if a == node.value], nodes, count, node.value)

    def _list(self, found: list[int], nodes: Any, count: Any, of: int | None = None) -> int:
        if of in self.odd:
            return LOSSY_QUERY
        if nodes is not None and not count._obj.value:
            return INVALID_VALUE
        count._obj.value = len(found)
        if nodes is not None:
            nodes[:] = found
        return 0

    def cuGraphAddKernelNode(self, out: Any, graph: Any, before: Any, count: Any, kernel: Any) -> int:
        assert (before is None) == (count.value == 0)
        new = out._obj.value = max(self.kinds) + 1
        self.kinds[new] = KERNEL
        self.edges |= {(before[at], new) for at in range(count.value)}
        made = kernel._obj
        assert made.function == 77
        assert [*made.grid, *made.block] == [1, 1, 1, graph_nodes.MOST_WORDS, 1, 1]
        kinds = ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint
        given = (ctypes.cast(made.parameters[at], ctypes.POINTER(kind))[0] for at, kind in enumerate(kinds))
        self.filled[new] = tuple(given)  # type: ignore[assignment]
        return 0

    def cuGraphAddDependencies(self, graph: Any, before: Any, behind: Any, count: Any) -> int:
        self.edges |= {(before[at], behind[at]) for at in range(count.value)}
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(graph_nodes, "_driver", lambda: made)
    graph_nodes._loaded.cache_clear()
    yield made
    graph_nodes._loaded.cache_clear()


def test_a_kernel_stands_between_what_the_memset_stood_between(driver: Driver) -> None:
    driver.kinds = {1: KERNEL, 2: KERNEL}
    driver.memset(3, address=512)
    driver.kinds[4] = KERNEL
    driver.edges = {(1, 3), (2, 3), (3, 4), (1, 2)}
    assert replace_memsets(9) == 1
    assert driver.kinds == {1: KERNEL, 2: KERNEL, 4: KERNEL, 5: KERNEL}
    assert driver.edges == {(1, 5), (2, 5), (5, 4), (1, 2)}
    assert driver.filled == {5: (512, 0, 1)}


@pytest.mark.parametrize(
    ("value", "element_size", "word"), [(0xAB, 1, 0xABABABAB), (0x1234, 2, 0x12341234), (0xDEADBEEF, 4, 0xDEADBEEF)]
)
def test_a_word_holds_the_value_as_often_as_it_fits(driver: Driver, value: int, element_size: int, word: int) -> None:
    driver.memset(1, value=value, element_size=element_size, width=8 // element_size)
    assert replace_memsets(9) == 1
    assert driver.filled == {2: (4096, word, 2)}


@pytest.mark.parametrize(
    "values", [{"width": 4 * graph_nodes.MOST_WORDS + 4}, {"height": 2}, {"width": 6}, {"address": 4098}], ids=str
)
def test_what_one_warp_cannot_set_stays_a_memset(driver: Driver, values: dict[str, int]) -> None:
    driver.memset(1, **values)
    assert replace_memsets(9) == 0
    assert driver.kinds == {1: MEMSET}


def test_a_memset_with_an_edge_that_is_not_plain_stays(driver: Driver) -> None:
    driver.memset(1)
    driver.odd = {1}
    assert replace_memsets(9) == 0
    assert driver.kinds == {1: MEMSET}


def test_without_the_driver_s_library_the_graph_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_nodes, "_driver", lambda: None)
    assert replace_memsets(9) == 0


def test_what_else_the_driver_refuses_is_an_error_with_its_name(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.memset(1)
    monkeypatch.setattr(driver, "cuGraphAddKernelNode", lambda *_: 1)
    with pytest.raises(RuntimeError, match="cuGraphAddKernelNode returned 1"):
        replace_memsets(9)


@pytest.mark.gpu
def test_a_replay_sets_what_the_memsets_did_in_their_place() -> None:
    """Between a kernel that writes the words first and one that reads them."""
    library = ctypes.CDLL("libcuda.so.1")
    words = torch.full((64,), 5, dtype=torch.int32, device="cuda")
    read = torch.zeros_like(words)
    large = torch.full((4096,), 5, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        words.fill_(7)
        address = words.data_ptr()
        for name, at, value, count in (("D32", 0, 3, 1), ("D8", 16, 0xAB, 8), ("D16", 32, 0x1234, 4)):
            function = getattr(library, f"cuMemset{name}Async")
            where = ctypes.c_uint64(address + 4 * at)
            typed = {"D32": ctypes.c_uint, "D16": ctypes.c_ushort, "D8": ctypes.c_ubyte}[name](value)
            assert function(where, typed, ctypes.c_size_t(count), stream) == 0
        assert library.cuMemsetD32Async(ctypes.c_uint64(large.data_ptr()), 1, ctypes.c_size_t(4096), stream) == 0
        read.copy_(words * 1)
    assert replace_memsets(graph.raw_cuda_graph()) == 3
    graph.instantiate()
    for _ in range(2):
        read.zero_()
        large.fill_(5)
        graph.replay()
        expected = torch.full((64,), 7, dtype=torch.int32)
        expected[0] = 3
        expected[16:18] = torch.tensor(0xABABABAB - (1 << 32))
        expected[32:34] = 0x12341234
        assert torch.equal(read.cpu(), expected)
        assert bool((large == 1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "alone"])
def test_a_graph_may_begin_and_end_with_a_memset(is_last: bool) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    words = torch.full((4,), 5, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert library.cuMemsetD32Async(ctypes.c_uint64(words.data_ptr()), 3, ctypes.c_size_t(2), stream) == 0
        if not is_last:
            words.mul_(2)
    assert replace_memsets(graph.raw_cuda_graph()) == 1
    graph.instantiate()
    graph.replay()
    assert words.tolist() == ([3, 3, 5, 5] if is_last else [6, 6, 10, 10])
