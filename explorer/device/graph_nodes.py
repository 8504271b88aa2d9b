"""Memsets of a few bytes in a CUDA graph become kernels, since a GPU waits longer around a memset than around a kernel.

cuBLAS and cuDNN set a counter of four bytes to zero before some of their kernels: in a step of a GPT some six times a layer.
As nodes of a graph, memsets cost mostly the waits before and behind them.

Speaks to the CUDA driver by its C interface, whose functions keep their names and their parameters.
Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__GRAPH.html
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
LOSSY_QUERY = 910  # CUDA_ERROR_LOSSY_QUERY: an edge is of a kind that this interface does not tell.
MOST_WORDS = 32
"""Words of four bytes that one warp sets."""

# Thread i sets word i.
FILL = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(.param .u64 words, .param .u32 value, .param .u32 count)
{
    .reg .pred %is_beyond;
    .reg .b32 %thread, %count, %value;
    .reg .b64 %offset, %address;

    ld.param.u32 %count, [count];
    mov.u32 %thread, %tid.x;
    setp.ge.u32 %is_beyond, %thread, %count;
    @%is_beyond bra END;
    ld.param.u64 %address, [words];
    ld.param.u32 %value, [value];
    cvta.to.global.u64 %address, %address;
    mul.wide.u32 %offset, %thread, 4;
    add.s64 %address, %address, %offset;
    st.global.u32 [%address], %value;
END:
    ret;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS"""

    _fields_ = (
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("element_size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS"""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_nbytes", c_uint),
        ("parameters", ctypes.POINTER(c_void_p)),
        ("extra", ctypes.POINTER(c_void_p)),
    )


class _Refused(RuntimeError):
    """The driver did not do what it was asked; `status` is its CUresult."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} returned {status}")
        self.status = status


def replace_memsets(graph: int) -> int:
    """Let kernels do what the small memsets of a graph do that is not instantiated yet; `graph` is its `cudaGraph_t`.

    Returns how many there were. A memset whose edges are not plain stays; so do all where the driver's library has another
    name than on Linux.
    """
    if _driver() is None:
        return 0
    found = [(node, memset) for node in _nodes(graph) if (memset := _small_memset(node)) is not None]
    return sum(_replace(graph, node, memset) for node, memset in found)


def _nodes(graph: int) -> list[int | None]:
    return _listed("cuGraphGetNodes", graph)


def _small_memset(node: int | None) -> _Memset | None:
    """What a memset sets, if the node is one of at most `MOST_WORDS` words in a row."""
    kind = c_int()
    _call("cuGraphNodeGetType", c_void_p(node), byref(kind))
    if kind.value != MEMSET:
        return None
    memset = _Memset()
    _call("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
    nbytes = memset.width * memset.element_size
    is_small = memset.height == 1 and nbytes <= 4 * MOST_WORDS and nbytes % 4 == 0 and memset.address % 4 == 0
    return memset if is_small else None


def _replace(graph: int, node: int | None, memset: _Memset) -> bool:
    try:
        before = _listed("cuGraphNodeGetDependencies", node)
        behind = _listed("cuGraphNodeGetDependentNodes", node)
    except _Refused as refused:
        if refused.status == LOSSY_QUERY:
            return False
        raise
    words = memset.width * memset.element_size // 4
    given = c_uint64(memset.address), c_uint(_word(memset)), c_uint(words)
    parameters = (c_void_p * len(given))(*(ctypes.cast(ctypes.pointer(one), c_void_p) for one in given))
    kernel = _Kernel(_fill(), (1, 1, 1), (MOST_WORDS, 1, 1), 0, parameters, None)
    new = c_void_p()
    _call("cuGraphAddKernelNode", byref(new), c_void_p(graph), _array(before), c_size_t(len(before)), byref(kernel))
    if behind:
        starts = _array([new.value] * len(behind))
        _call("cuGraphAddDependencies", c_void_p(graph), starts, _array(behind), c_size_t(len(behind)))
    _call("cuGraphDestroyNode", c_void_p(node))
    return True


def _word(memset: _Memset) -> int:
    """The value of one element, repeated until it fills four bytes."""
    return int.from_bytes(
        memset.value.to_bytes(4, "little")[: memset.element_size] * (4 // memset.element_size), "little"
    )


def _listed(name: str, of: int | None) -> list[int | None]:
    """What a function of the driver lists: it is asked for their number first, and takes no array that has no place."""
    count = c_size_t()
    _call(name, c_void_p(of), None, byref(count))
    if not count.value:
        return []
    nodes = (c_void_p * count.value)()
    _call(name, c_void_p(of), nodes, byref(count))
    return list(nodes)


def _array(nodes: Sequence[int | None]) -> Any:
    return (c_void_p * len(nodes))(*nodes) if nodes else None


def _fill() -> int | None:
    """The kernel in the current context."""
    context = c_void_p()
    _call("cuCtxGetCurrent", byref(context))
    return _loaded(context.value)


@functools.cache
def _loaded(context: int | None) -> int | None:
    module, function = c_void_p(), c_void_p()
    _call("cuModuleLoadData", byref(module), c_char_p(FILL))
    _call("cuModuleGetFunction", byref(function), module, c_char_p(b"fill"))
    return function.value


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _function(name: str) -> Callable[..., int]:
    return getattr(_driver(), name)


def _call(name: str, *arguments: Any) -> None:
    status = _function(name)(*arguments)
    if status:
        raise _Refused(name, status)
