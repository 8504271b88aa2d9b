"""What runs convolutions by searched algorithms: cuDNN's flags while it does, its numbers, and its speed on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tracefuse.device import searched_runtime as runtime
from tracefuse.device.clocks import clock_of
from tracefuse.device.searched import TEXT

cudnn = torch.backends.cudnn
aten = torch.ops.aten
PLAIN = ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "plain": PLAIN,
    "strided": ([2, 1, 2], [0, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    "dilated": ([1, 1, 1], [1, 2, 1], [1, 2, 1], False, [0, 0, 0], 1),
    "transposed": ([2, 2, 2], [1, 1, 1], [1, 1, 1], True, [1, 0, 1], 1),
    "grouped": ([1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 2),
}


def let(benchmark: bool, deterministic: bool) -> None:
    """Set the flags, which torch's own test tools let nobody set by name."""
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)


@pytest.fixture(autouse=True)
def _flags_as_they_were() -> Iterator[None]:
    before = cudnn.benchmark, cudnn.deterministic
    yield
    let(*before)


def made(name: str, device: str, dtype: torch.dtype, sizes: tuple[int, ...] = (2, 6, 7, 9, 5)) -> tuple[Any, ...]:
    """Arguments of a convolution of volumes: odd sizes, and so odd strides."""
    options = OPTIONS[name]
    channels, groups = sizes[1], options[5]
    weight = (channels, 4, 3, 3, 3) if options[3] else (4, channels // groups, 3, 3, 3)
    x, w = (torch.randn(s, device=device, dtype=torch.float64).to(dtype) for s in (sizes, weight))
    return x, w, None, *options


def of_gradients(arguments: tuple[Any, ...], mask: tuple[bool, bool, bool] = (True, True, False)) -> tuple[Any, ...]:
    y = aten.convolution.default(*arguments)
    return torch.randn_like(y), arguments[0], arguments[1], None, *arguments[3:], list(mask)


@pytest.mark.parametrize("name", OPTIONS)
def test_results_and_types_are_atens(name: str) -> None:
    arguments = made(name, "cpu", torch.float32)
    back = of_gradients(arguments)
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    for searched, plain, given in (
        (torch.ops.tracefuse.searched_convolution, aten.convolution, arguments),
        (torch.ops.tracefuse.searched_convolution_backward, aten.convolution_backward, back),
    ):
        found, wanted = searched.default(*given), plain.default(*given)
        with mode:
            fakes = [mode.from_tensor(one) if isinstance(one, Tensor) else one for one in given]
            promised = searched.default(*fakes)
        for one, other, fake in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (found, wanted, promised)), strict=True
        ):
            assert (one is None) == (other is None) == (fake is None)
            if one is not None:
                assert torch.equal(one, other)
                assert (one.shape, one.stride(), one.dtype) == (fake.shape, fake.stride(), fake.dtype)


def seen_flags(seen: list[tuple[bool, bool]], fails: bool = False) -> Callable[..., Tensor]:
    def operator(x: Tensor) -> Tensor:
        seen.append((cudnn.benchmark, cudnn.deterministic))
        if fails:
            raise RuntimeError("out of memory")
        return x

    return operator


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_flags_hold_for_the_call_alone(fails: bool, deterministic: bool) -> None:
    let(False, deterministic)
    seen: list[tuple[bool, bool]] = []
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            runtime.with_search(seen_flags(seen, fails=True), (torch.ones(1),))
    else:
        runtime.with_search(seen_flags(seen), (torch.ones(1),))
    assert seen == [(True, True)]
    assert (cudnn.benchmark, cudnn.deterministic) == (False, deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_process_that_searches_anyway_is_left_alone(deterministic: bool) -> None:
    let(True, deterministic)
    seen: list[tuple[bool, bool]] = []
    runtime.with_search(seen_flags(seen), (torch.ones(1),))
    assert seen == [(True, deterministic)]


def test_it_searches_where_the_flags_may_not_be_set_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported `torch.testing._internal.common_utils`."""
    there = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(there, "__allow_nonbracketed_mutation_flag", False)
    with pytest.raises(RuntimeError, match="not allowed to set"):
        cudnn.benchmark = True
    let(False, False)
    seen: list[tuple[bool, bool]] = []
    runtime.with_search(seen_flags(seen), (torch.ones(1),))
    assert seen == [(True, True)]
    assert (cudnn.benchmark, cudnn.deterministic) == (False, False)


def test_threads_leave_the_flags_as_they_were() -> None:
    let(False, False)
    seen: list[tuple[bool, bool]] = []

    def many() -> None:
        for _ in range(500):
            runtime.with_search(seen_flags(seen), (torch.ones(1),))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert set(seen) == {(True, True)}
    assert (cudnn.benchmark, cudnn.deterministic) == (False, False)


def test_the_text_for_files_stands_alone() -> None:
    space: dict[str, Any] = {}
    exec(f"import torch\n{TEXT.runtime}", space)
    arguments = made("plain", "cpu", torch.float32)
    assert torch.equal(space[TEXT.name](*arguments), aten.convolution.default(*arguments))
    assert TEXT.is_called(f"y = {TEXT.name}(x)")
    assert TEXT.is_called("y = searched_convolution_backward(x)")
    assert not TEXT.is_called("y = torch.convolution(x)")


# --- on a GPU ---------------------------------------------------------------------------------------------------------

OFF = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Of the largest element; without TF32."""


@pytest.mark.gpu
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", OFF, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_on_a_gpu_numbers_are_those_of_float64(name: str, dtype: torch.dtype, order: torch.memory_format) -> None:
    torch.manual_seed(0)
    with cudnn.flags(enabled=True, allow_tf32=False):
        x, w, *rest = made(name, "cuda", dtype, (3, 6, 9, 11, 7))
        x, w = x.contiguous(memory_format=order), w.contiguous(memory_format=order)
        arguments = (x, w, *rest)
        back = of_gradients(arguments)
        found = [runtime.searched_convolution(*arguments), *runtime.searched_convolution_backward(*back)[:2]]
        again = [runtime.searched_convolution(*arguments), *runtime.searched_convolution_backward(*back)[:2]]
        eager = [aten.convolution.default(*arguments), *aten.convolution_backward.default(*back)[:2]]
    wide = [[one.double().cpu() if isinstance(one, Tensor) else one for one in given] for given in (arguments, back)]
    wanted = [aten.convolution.default(*wide[0]), *aten.convolution_backward.default(*wide[1])[:2]]
    for one, same, other, true in zip(found, again, eager, wanted, strict=True):
        assert torch.equal(one, same), "other bits in another run"
        assert one.stride() == other.stride()
        off = (one.double().cpu() - true).abs().max() / true.abs().max()
        assert off <= OFF[dtype], off


@pytest.mark.gpu
def test_on_a_gpu_what_eager_has_guessed_is_not_kept() -> None:
    """A gradient of a weight for which cuDNN's guess takes more than ten times as long as what its search finds (H200)."""
    clock = clock_of("cuda")
    x, w = torch.randn(16, 16, 16, 32, 32, device="cuda"), torch.randn(16, 32, 4, 4, 4, device="cuda")
    arguments = (x, w, None, [2, 2, 2], [1, 1, 1], [1, 1, 1], True, [0, 0, 0], 1)
    back = of_gradients(arguments, (False, True, False))

    def least_ms(call: Callable[..., Any]) -> float:
        call(*back)
        found = []
        for _ in range(5):
            start = clock.mark()
            call(*back)
            end = clock.mark()
            clock.wait()
            found.append(clock.between_ms(start, end))
        return min(found)

    with cudnn.flags(enabled=True, allow_tf32=True):
        guessed = least_ms(aten.convolution_backward.default)
        searched = least_ms(runtime.searched_convolution_backward)
    if guessed < 2:
        pytest.skip(f"cuDNN guesses a good algorithm here: {guessed:.3g} ms")
    assert searched < guessed / 2, (guessed, searched)


@pytest.mark.gpu
@pytest.mark.parametrize("is_warm", [True, False])
def test_on_a_gpu_in_a_graph(is_warm: bool) -> None:
    arguments = made("plain", "cuda", torch.float32, (2, 6, 8 + is_warm, 9, 10))
    if is_warm:
        runtime.searched_convolution(*arguments)
    aten.convolution.default(*arguments)  # makes cuDNN's handle, which a recording cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = runtime.searched_convolution(*arguments)
    arguments[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(found, runtime.searched_convolution(*arguments), rtol=1e-3, atol=1e-3)
