"""Sizes that were not traced: what three programs tell of a fourth is what is compiled for it anew, with eager's numbers."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.backend import tracefuse as backend
from tracefuse.build.across_sizes import AcrossSizes
from tracefuse.compiled_graphs import CompiledGraph
from tracefuse.demo import GPT, batch
from tracefuse.dynamo import halves, other_sizes
from tracefuse.execution.export import functions_source
from tracefuse.optimizers.fuse.timed import TimedKernel
from tracefuse.variant import Variant


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"layers": 1, "width": 24, "heads": 2, "vocab": 61, "length": 300, "dropout": 0.0, **changes})


def gradients(model: nn.Module, run: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """The result of a model, the gradients of its inputs and parameters, and its buffers."""
    model.zero_grad()
    given = [one.detach().clone().requires_grad_(one.is_floating_point()) for one in inputs]
    torch.manual_seed(3)
    result = run(*given)
    (result.square().mean() if result.dim() else result).backward()
    grads = [one.grad for one in (*given, *model.parameters())]
    return [result.detach(), *grads, *(one.clone() for one in model.buffers())]


FIRST = (37, 41, 53)
LENGTHS = (33, 34, 39, 40, 42, 45, 47, 48, 50, 57, 59, 60, 62, 63, 64, 65, 70, 71, 55, 52)


def test_programs_are_those_that_are_compiled_anew(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The traces before and after the passes, what each pass left, and the generated text."""
    model = gpt()
    told = torch.compile(model, backend=backend, dynamic=True)
    for length in (*FIRST, *LENGTHS):
        told(*batch(61, 2, length)).backward()
    assert len(traced) == len(FIRST)
    graphs = tracefuse.compiled(model)[len(FIRST) :]

    torch._dynamo.reset()
    monkeypatch.setattr(other_sizes.OtherSizes, "program", lambda *_: None)
    fresh_model = gpt()
    fresh = torch.compile(fresh_model, backend=backend, dynamic=True)
    for length in LENGTHS:
        fresh(*batch(61, 2, length)).backward()
    pairs = zip(graphs, tracefuse.compiled(fresh_model), strict=True)
    for one, other in pairs:
        mine, theirs = one.variant(one.config), other.variant(other.config)
        assert one.trace.code == other.trace.code
        assert mine.trace.code == theirs.trace.code
        assert [(r.name, r.after.code) for r in mine.passes] == [(r.name, r.after.code) for r in theirs.passes]
        assert mine.kernels == theirs.kernels
        assert functions_source(mine) == functions_source(theirs)


def test_a_gpt_has_the_numbers_of_eager(traced: list[int]) -> None:
    model = gpt(dropout=0.1).double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (*FIRST, 64, 40, 97, 34, 1, 2, 64):
        inputs = batch(61, 2, length)
        found, expected = gradients(model, compiled, *inputs), gradients(eager, eager, *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert len(traced) == len(FIRST) + 2  # 1 is another graph of dynamo's, and 2 too far from those


class Ends(nn.Module):
    """Returns a part of what it computes, whose cotangent begins where the part does in its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.project(x), x], 1).view(-1, 4)[x.shape[0] :]


class Tail(Ends):
    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)[1:]


@pytest.mark.parametrize("kind", [Ends, Tail])
def test_a_model_that_returns_a_part_is_shown_at_each_size(kind: type[nn.Module], traced: list[int]) -> None:
    model = kind().double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for rows in (5, 7, 9, 11, 8, 10, 16, 6):
        x = torch.randn(rows, 4, dtype=torch.float64)
        torch.testing.assert_close(gradients(model, compiled, x), gradients(eager, eager, x))
    graphs = tracefuse.compiled(model)
    assert len(graphs) == 8 > len(traced)
    assert len({one.trace.op_count for one in graphs}) == 1
    tracefuse.explore(model)


@pytest.fixture
def across(monkeypatch: pytest.MonkeyPatch) -> list[AcrossSizes]:
    """What is known of kernels across sizes, by graph, where programs launch their kernels, as on a GPU: here the launchers
    take their ATen ops."""
    found: list[AcrossSizes] = []

    def noted() -> AcrossSizes:
        found.append(AcrossSizes())
        return found[-1]

    monkeypatch.setattr("tracefuse.backend.runs_kernels", lambda _: True)
    monkeypatch.setattr("tracefuse.backend.AcrossSizes", noted)
    return found


def test_where_kernels_run_others_tell_of_sizes_too(traced: list[int], across: list[AcrossSizes]) -> None:
    model = gpt().double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    told = (64, 40, 97, 34, 65, 64)
    for length in (*FIRST, *told):
        inputs = batch(61, 2, length)
        found, expected = gradients(model, compiled, *inputs), gradients(eager, eager, *inputs)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert len(traced) == len(FIRST)
    (one,) = across
    kernels = {kernel.name for graph in tracefuse.compiled(model) for kernel in graph.variant(graph.config).kernels}
    made = sum(map(len, one.texts.values())) + sum(map(len, one.versions.values()))
    assert made < len(kernels) // 2


def test_kernels_are_told_as_they_are_compiled_anew(traced: list[int], across: list[AcrossSizes]) -> None:
    """Those that launchers are made of, and those of the program that somebody looks at, whose ops are asked one by one."""
    seen: list[Any] = []
    launchers = AcrossSizes.launchers

    def noted(self: AcrossSizes, kernels: Any, tunings: Any) -> Any:
        seen[:] = kernels
        return launchers(self, kernels, tunings)

    model = gpt()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AcrossSizes, "launchers", noted)
        for length in (*FIRST, 64):
            compiled(*batch(61, 2, length)).backward()
    graph = tracefuse.compiled(model)[-1]
    assert [kernel.key for kernel in seen] == [kernel.key for kernel in graph.variant(graph.config).kernels]


def test_a_program_that_draws_by_rounded_numbers_tells_of_none(
    traced: list[int], across: list[AcrossSizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As dropout in a kernel of a GPU does, of which ATen's operator stands here."""
    monkeypatch.setattr(other_sizes, "DRAW", torch.ops.aten.native_dropout.default)
    compiled = torch.compile(gpt(dropout=0.1), backend=backend, dynamic=True)
    for length in (*FIRST, 64):
        compiled(*batch(61, 2, length)).backward()
    assert len(traced) == len(FIRST) + 1
    assert sum(map(len, across[0].versions.values())) > 0


def test_what_a_program_calls_beside_its_kernels_is_taken_from_the_first(
    traced: list[int], across: list[AcrossSizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton reads jitted functions, such as those of gradients of embeddings, from a file, which a told text is not in."""
    jitted = "import triton\n\n\n@triton.jit\ndef beside(x_ptr):\n    pass\n\n\n"
    source = halves.functions_source
    for where in (halves, other_sizes):
        monkeypatch.setattr(where, "functions_source", lambda *given: jitted + source(*given))
    model = gpt().double()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (*FIRST, 64):
        inputs = batch(61, 2, length)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert len(traced) == len(FIRST)


def test_kernels_are_timed_at_the_first_size_whose_times_decide_at_the_others(
    across: list[AcrossSizes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that earlier sessions have timed at one of these sizes do not."""
    asked: list[str] = []
    forgotten: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Variant, "judge", lambda self, timed, **_: asked.append(timed.__name__) or self)
    monkeypatch.setattr(CompiledGraph, "timed", property(lambda _: (TimedKernel("a key", 2.0, 1.0, "a GPU"),)))
    monkeypatch.setattr(CompiledGraph, "know", lambda _, *given: forgotten.append(given))
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 6), nn.GELU()), backend=backend, dynamic=True)
    for rows in (67, 71, 90):
        compiled(torch.randn(rows, 8))
    assert asked == ["noting", "told", "told"]
    assert forgotten == [((), ["a key"])] * 3


def test_a_graph_that_replays_cuda_graphs_tells_of_no_size(traced: list[int], across: list[AcrossSizes]) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend=backend, dynamic=True, options={"cuda_graph": True})
        for rows in (67, 71, 90, 80, 75):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(traced) == 5
    assert across == []


def test_a_gpt_in_bf16_errs_as_eager_does(traced: list[int]) -> None:
    exact = gpt().double()
    model, eager = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for length in (*FIRST, 64, 45, 99):
        inputs = batch(61, 2, length)
        found, expected, right = (
            gradients(m, run, *inputs) for m, run in ((model, compiled), (eager, eager), (exact, exact))
        )
        for mine, theirs, one in zip(found, expected, right, strict=True):
            if one is None:
                assert mine is None
                continue
            assert mine.dtype is theirs.dtype
            errors = [(some.double() - one).abs().max().item() for some in (mine, theirs)]
            assert errors[0] <= 2 * errors[1] + 1e-3 * one.abs().max().item()
    assert len(traced) == len(FIRST)


class ByHand(nn.Module):
    """Attention over `[B, T, C]` with scores of T by T, a mean over T and a division by T in the arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 8**0.5
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ x).mean(1) + x.sum(1) / length + x[:, -3:].sum(1)


class Normed(nn.Module):
    """Writes its running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.GELU(), nn.Dropout(0.4), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Spread(nn.Module):
    """Unbiased variances over n."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x.var(0) + x.std(0) * x.sum(0)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (ByHand(), lambda n: (2, n, 8)),
        (Normed(), lambda n: (n, 8)),
        (nn.Conv1d(3, 4, 5, padding=2), lambda n: (2, 3, n)),
        (Spread(), lambda n: (n, 8)),
    ],
    ids=["attention by hand", "batch norm", "convolution", "variances"],
)
def test_models_have_the_numbers_of_eager(
    model: nn.Module, shape: Callable[[int], tuple[int, ...]], traced: list[int]
) -> None:
    model = copy.deepcopy(model).double()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for n in (67, 71, 90, 75, 64, 96, 50, 49, 67):
        x = torch.randn(shape(n), dtype=torch.float64)
        torch.testing.assert_close(gradients(model, compiled, x), gradients(eager, eager, x), rtol=1e-9, atol=1e-11)
    assert len(traced) == 3
    for one in (model, eager):
        one.eval()
    with torch.no_grad():
        for n in (67, 71, 90, 75, 64):
            x = torch.randn(shape(n), dtype=torch.float64)
            torch.testing.assert_close(compiled(x), eager(x), rtol=1e-9, atol=1e-11)
    assert len(traced) == 6


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, : min(x.shape[1], 15)].sin() * x.shape[1],
        lambda x: x.sin().view(2, -1)[:, : x.shape[1] // 2] * 2,
        lambda x: x.sin() * (x.shape[1] % 5),
        lambda x: x.sin() / x.shape[1] ** 0.5,
        lambda x: (lambda y: (y, y.t()))(x.sin()),
        lambda x: (x.sin(), x)[1].view(-1),
        lambda x: (lambda y: torch.cat([y[:, -3:], y[:, :3]]).sum(0))(x.sin()),
    ],
    ids=[
        "minimum",
        "rounding",
        "remainder",
        "root",
        "results in one memory",
        "a view of an input",
        "a gap of two slices",
    ],
)
def test_what_cannot_be_told_is_compiled_and_right(function: Callable[[Tensor], Any], traced: list[int]) -> None:
    compiled = torch.compile(function, backend=backend, dynamic=True)
    for n in (11, 13, 18, 21, 17, 12):
        x, y = (torch.linspace(0, 1, 2 * n).view(2, n).requires_grad_() for _ in range(2))
        found, expected = compiled(x), function(y)
        torch.testing.assert_close(found, expected)
        for results in (found, expected):
            ends = results if isinstance(results, tuple) else (results,)
            torch.stack([one.sum() for one in ends]).sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    assert len(traced) == 6


@pytest.mark.parametrize("known", [(1003, 1009, 1015), (1003, 1067, 1131)], ids=["one multiple", "one remainder"])
def test_what_was_rounded_to_a_multiple_is_not_told(known: tuple[int, ...], traced: list[int]) -> None:
    """Sums in bf16 over n elements that are padded with zeros, to 1024 or by 21, but for other n."""
    new = (1019, 1024, 1043, 986, 1044)
    compiled = torch.compile(torch.matmul, backend=backend, dynamic=True)
    torch.manual_seed(0)
    for n in (*known, *new):
        x, y = torch.randn(2048, n).bfloat16(), torch.randn(n, 2048).bfloat16()
        exact = x.double() @ y.double()
        errors = [(found.double() - exact).abs().max().item() for found in (compiled(x, y), x @ y)]
        assert errors[0] <= 2 * errors[1]
    assert len(traced) == len(known) + len(new)


# --- autograd around a told program ---


def told_linear(traced: list[int], model: nn.Module | None = None) -> tuple[nn.Module, Callable[..., Any]]:
    """A model, compiled, of which three sizes are traced."""
    model = model or nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)).double()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (67, 71, 90):
        compiled(torch.randn(rows, 8, dtype=torch.float64)).sum().backward()
    assert len(traced) == 3
    return model, compiled


def test_a_cotangent_with_other_strides_and_none(traced: list[int]) -> None:
    model, compiled = told_linear(traced)
    x = torch.randn(80, 8, dtype=torch.float64)
    cotangent = torch.randn(4, 80, dtype=torch.float64).t()
    found, expected = (torch.autograd.grad(run(x), list(model.parameters()), cotangent) for run in (compiled, model))
    torch.testing.assert_close(found, expected)
    assert len(traced) == 3


class Two(nn.Module):
    """Returns two results, and the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return self.a(x).sin(), None, x.shape[0], self.b(x).cos(), (x > 0).sum()


def test_results_that_nobody_differentiates(traced: list[int]) -> None:
    model = Two().double()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (67, 71, 90, 80, 75):
        x = torch.randn(rows, 8, dtype=torch.float64)
        found, expected = compiled(x), model(x)
        assert [type(one) for one in found] == [type(one) for one in expected]
        assert found[2] == rows
        assert [one.requires_grad for one in found if isinstance(one, Tensor)] == [True, True, False]
        torch.testing.assert_close((found[0], found[3], found[4]), (expected[0], expected[3], expected[4]))
        for at in (0, 3):
            grads = (
                torch.autograd.grad(run[at].sum(), list(model.parameters()), retain_graph=True, allow_unused=True)
                for run in (found, expected)
            )
            for mine, theirs in zip(*grads, strict=True):
                torch.testing.assert_close(mine, torch.zeros_like(mine) if theirs is None else theirs)
    assert len(traced) == 3


def test_twice_backward_and_twice_differentiated(traced: list[int]) -> None:
    model, compiled = told_linear(traced)
    x = torch.randn(80, 8, dtype=torch.float64)
    result = compiled(x).square().sum()
    parameters = list(model.parameters())
    first = torch.autograd.grad(result, parameters, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(result, parameters), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(result, parameters)
    grad, *_ = torch.autograd.grad(compiled(x).square().sum(), parameters, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        grad.sum().backward()
    assert len(traced) == 3


def test_what_was_saved_is_let_go_in_the_backward(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward holds what it was given no longer than it reads it."""
    compiled = told_linear(traced)[1]
    alive: list[int] = []
    backward = halves.Halves.backward

    def watched(self: Any, boxed: list[Any]) -> list[Any]:
        refs = [weakref.ref(one) for one in boxed if not isinstance(one, nn.Parameter)]
        found = backward(self, boxed)
        alive.append(sum(ref() is not None for ref in refs))
        return found

    result = compiled(torch.randn(80, 8, dtype=torch.float64)).square().sum()
    monkeypatch.setattr(halves.Halves, "backward", watched)
    gc.collect()
    result.backward()
    assert alive[0] <= 2  # the cotangent, and the input, which the caller's graph holds
    assert len(traced) == 3


def test_hooks_of_saved_tensors_and_autocast(traced: list[int]) -> None:
    model, compiled = told_linear(traced)
    x, packed = torch.randn(80, 8, dtype=torch.float64), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        compiled(x).sum().backward()
    assert packed
    single = copy.deepcopy(model).float()
    torch._dynamo.reset()
    compiled = torch.compile(single, backend=backend, dynamic=True)
    for rows in (67, 71, 90, 80):
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = (run(torch.ones(rows, 8)) for run in (compiled, single))
        assert found.dtype is expected.dtype is torch.bfloat16
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(one.sum(), list(single.parameters())) for one in (found, expected)]
        torch.testing.assert_close(*grads, rtol=2e-2, atol=2e-2)
    assert len(traced) == 6


def test_a_write_to_a_result_that_the_backward_reads_is_an_error(traced: list[int]) -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    compiled = torch.compile(lambda x, w: (x @ w).tanh(), backend=backend, dynamic=True)
    for n in (67, 71, 90, 80):
        result = compiled(torch.ones(n, 3), weight)
        with torch.no_grad():
            result.mul_(3)
        with pytest.raises(RuntimeError, match="inplace"):
            result.sum().backward()
    assert len(traced) == 3


# --- what goes wrong, and what is known of it ---


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_told_half_that_fails_runs_op_by_op(half: str, traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = told_linear(traced)
    told = halves.Halves.at_another_size

    def spoilt(self: Any, variant: Any, module: Any) -> Any:
        def broken(*_: Any) -> None:
            raise RuntimeError("injected")

        setattr(module, half, broken)
        return told(self, variant, module)

    monkeypatch.setattr(halves.Halves, "at_another_size", spoilt)
    x = torch.randn(80, 8, dtype=torch.float64)
    with pytest.warns(UserWarning, match=f"the {half} of a graph of this model runs op by op.*injected"):
        found = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), list(model.parameters())))
    assert len(traced) == 3


def test_what_torch_does_not_confirm_is_compiled(traced: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = told_linear(traced)

    def denied(*_: Any) -> None:
        raise other_sizes.NotAlike("injected")

    monkeypatch.setattr(other_sizes, "check", denied)
    x = torch.randn(80, 8, dtype=torch.float64)
    torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
    assert len(traced) == 4


def test_the_same_size_otherwise_in_memory_is_compiled(traced: list[int]) -> None:
    model, compiled = told_linear(traced)
    for x in (torch.randn(8, 80, dtype=torch.float64).t(), torch.randn(80, 16, dtype=torch.float64)[:, ::2]):
        torch.testing.assert_close(gradients(model, compiled, x), gradients(model, model, x))
    x = torch.randn(8, 80, dtype=torch.float64).t()
    torch.testing.assert_close(compiled(x), model(x))


def test_two_sizes_that_vary_are_no_line(traced: list[int]) -> None:
    model = gpt()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for size, length in ((2, 37), (3, 41), (4, 53), (5, 57)):
        inputs = batch(61, size, length)
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert len(traced) == 4


@pytest.mark.parametrize("options", [{"memory_budget": 0.5}, {"cuda_graph": True}], ids=["budget", "graphs"])
def test_programs_of_budgets_and_of_graphs_are_compiled_for_each_size(
    options: dict[str, Any], traced: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4))
    compiled = torch.compile(model, backend=backend, dynamic=True, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no CUDA graphs on a CPU
        for rows in (67, 71, 90, 80):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(traced) == 4


def test_a_told_graph_is_a_capture_like_others(traced: list[int]) -> None:
    model, compiled = told_linear(traced)
    compiled(torch.randn(80, 8, dtype=torch.float64)).sum().backward()
    graph = tracefuse.compiled(model)[-1]
    variant = graph.variant(graph.config).check()
    assert "f64[80, 6]" in variant.forward.code
    assert graph.variant(graph.config.changed(fuse=False)).kernels == ()
    assert {p.name for p in variant.measure(budget_s=0.2).programs} >= {"captured", "optimised"}


def test_integers_are_those_of_a_smaller_size_that_was_traced(traced: list[int]) -> None:
    """The graphs of sizes that were not traced hold no copies of tokens, but where all that were traced are larger."""
    model = gpt()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    before = [weakref.ref(one) for one in tokens_alive()]  # other tests have tokens too
    for length in (*FIRST, 64, 70, 33):
        compiled(*batch(61, 2, length)).backward()
    assert len(traced) == len(FIRST)
    gc.collect()
    old = {id(ref()) for ref in before}
    assert sorted({one.shape[1] for one in tokens_alive() if id(one) not in old}) == sorted((*FIRST, 33))
    known, graph = (tracefuse.compiled(model)[at] for at in (2, -2))
    for mine, theirs in zip(given(graph), given(known), strict=True):
        assert mine.shape == (2, 70)
        assert torch.equal(mine.flatten()[:106], theirs.flatten())
        assert torch.equal(mine.flatten()[106:], theirs.flatten()[: 140 - 106])


def tokens_alive() -> list[Tensor]:
    """Integers of two rows that something holds."""
    whole = [one for one in gc.get_objects() if type(one) is Tensor and one.dtype is torch.int64 and one.dim() == 2]
    return [one for one in whole if one.shape[0] == 2]


def given(graph: tracefuse.CompiledGraph) -> list[Tensor]:
    """The integers that a graph is measured on."""
    return [one for one in graph.program.read_inputs().examples if one.dtype is torch.int64]


def test_nothing_is_drawn_while_a_size_is_told(traced: list[int]) -> None:
    model, compiled = told_linear(traced, nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 4)).double())
    x = torch.randn(80, 8, dtype=torch.float64)
    torch.manual_seed(1)
    first = compiled(x)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x), first)
    torch.manual_seed(1)
    torch.testing.assert_close(model(x), first)
    assert len(traced) == 3


def test_a_float_of_the_module_is_part_of_what_a_program_is_made_for(traced: list[int]) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.factor = nn.Parameter(torch.ones(8, dtype=torch.float64)), 0.5

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sin() * self.factor

    model, compiled = told_linear(traced, Scaled())
    x = torch.randn(80, 8, dtype=torch.float64)
    torch.testing.assert_close(compiled(x), model(x))
    assert len(traced) == 3
    model.factor = 0.25  # type: ignore[assignment]
    torch.testing.assert_close(compiled(x), model(x))
    assert len(traced) > 3
