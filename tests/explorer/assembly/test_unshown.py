"""What a recording does not show is said in the notes; of a program that it shows whole, nothing is."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tracefuse
from tracefuse.errors import CaptureError, ExportError
from tracefuse.widgets.payload.program import notes


def on_a_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def said(run: Callable[[], object]) -> list[str]:
    """The notes of a capture of `run`."""
    return [note["text"] for note in notes(tracefuse.capture(run).optimize(fuse=False))]


def numbers() -> Tensor:
    return torch.randn(2, 4)


@pytest.mark.parametrize("in_place", [True, False], ids=["model.compile()", "torch.compile(model)"])
def test_compiled_code_that_did_not_run(in_place: bool) -> None:
    torch._dynamo.reset()
    model = run = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    if in_place:
        model.compile(backend="aot_eager")
    else:
        run = torch.compile(model, backend="aot_eager")
    run(numbers()).sum().backward()
    (text,) = said(lambda: run(numbers()).sum().backward())
    assert text.startswith("Sequential: torch.compile's code did not run here")
    assert 'peers=["torch.compile"]' in text
    torch._dynamo.reset()


def test_a_compiled_function() -> None:
    torch._dynamo.reset()
    model = nn.Linear(4, 4)

    @torch.compile(backend="aot_eager")
    def loss_of(x: Tensor) -> Tensor:
        return model(x).sum()

    (text,) = said(lambda: loss_of(numbers()).backward())
    assert text.startswith("loss_of: torch.compile's code did not run here")


def test_a_compiled_module_inside_another() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), torch.compile(nn.GELU(), backend="aot_eager"))
    (text,) = said(lambda: model(numbers()).sum().backward())
    assert text.startswith("GELU: ")


@pytest.mark.parametrize("is_whole", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_what_a_capture_ran_as_it_is_written_is_compiled_afterwards(is_whole: bool, calls_before: int) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=is_whole)
    def twice(x: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", x, x.t()).relu() * 2

    for _ in range(calls_before):
        twice(numbers())
    assert len(compiled) == calls_before
    captured = tracefuse.capture(twice, numbers())
    assert "einsum" in captured.trace.code or "bmm" in captured.trace.code
    assert len(compiled) == calls_before
    twice(numbers())
    assert len(compiled) == 1
    torch._dynamo.reset()


def in_a_loop(main: Any) -> Any:
    """What `main` returns: in a thread of its own, since a browser's tests leave a loop running on this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, main).result()


def on_another_thread(gather: Callable[[], None], gradient: Tensor | None = None) -> Callable[[], None]:
    model = nn.Linear(4, 1)

    def step() -> None:
        x, made = numbers(), []
        on_a_thread(lambda: made.append(model(x).mean()))
        gather()
        made[0].backward(gradient)

    return step


def half_on_another_thread() -> None:
    model, x, made = nn.Linear(4, 4), numbers(), []
    on_a_thread(lambda: made.append(model(x)))
    made[0].sum().backward()


def in_a_pool_of_before() -> Callable[[], None]:
    model, pool = nn.Linear(4, 4), ThreadPoolExecutor(1)
    pool.submit(lambda: model(numbers())).result()

    def step() -> None:
        pool.submit(model, numbers()).result().square().sum().backward()

    return step


@pytest.mark.parametrize("before", [0, 3], ids=["nothing before", "captures before"])
@pytest.mark.parametrize(
    "run",
    [
        on_another_thread(lambda: None),
        on_another_thread(lambda: None, torch.ones(())),
        on_another_thread(gc.collect),
        half_on_another_thread,
        in_a_pool_of_before(),
    ],
    ids=["whole", "a gradient given", "garbage collected", "half", "a thread that was there"],
)
def test_a_forward_on_another_thread_is_refused(run: Callable[[], None], before: int) -> None:
    model = nn.Linear(4, 4)
    for _ in range(before):  # autograd numbers the ops of each thread: this one's numbers grow past the other's
        assert "forward" in tracefuse.capture(lambda: model(numbers()).tanh().sum().backward()).counts
    with pytest.raises(CaptureError, match=r"by no operator of this thread, .* another thread"):
        tracefuse.capture(run).counts  # noqa: B018
    assert "forward" in tracefuse.capture(lambda: model(numbers()).tanh().sum().backward()).counts


class InThreads(nn.DataParallel):
    """What `nn.DataParallel` does on two GPUs, on a CPU: each half of a batch in a thread of its own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        for half in x.chunk(2):
            on_a_thread(lambda half=half: made.append(self.module(half)))  # type: ignore[misc]
        return torch.cat(made)


def test_copies_of_a_model_in_threads_are_refused_with_what_to_do() -> None:
    model = InThreads(nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"nn.DataParallel .* in 2 threads, .*CUDA_VISIBLE_DEVICES=0.*torchrun"):
        tracefuse.capture(lambda: model(numbers()).sum().backward()).counts  # noqa: B018


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_so_are_those_of_data_parallel() -> None:
    model = nn.DataParallel(nn.Linear(4, 4).cuda())
    with pytest.raises(CaptureError, match=r"nn.DataParallel .* in 2 threads, .*CUDA_VISIBLE_DEVICES=0.*torchrun"):
        tracefuse.capture(lambda: model(numbers().cuda()).sum().backward()).counts  # noqa: B018


def test_a_forward_on_another_thread_is_refused_where_objects_were_set_aside() -> None:
    made = nn.Linear(4, 4)(numbers())
    gc.collect()
    gc.freeze()
    try:
        later = nn.Linear(4, 4)(numbers())
        for old in (made, later):
            assert "computed before the capture" in said(lambda old=old: old.sum().backward())[0]  # type: ignore[misc]
        with pytest.raises(CaptureError, match="by no operator of this thread"):
            tracefuse.capture(half_on_another_thread).counts  # noqa: B018
    finally:
        gc.unfreeze()


def test_what_a_capture_around_it_made_is_of_before() -> None:
    with tracefuse.capture():
        made = nn.Linear(4, 4)(numbers())
        (text,) = said(lambda: made.sum().backward())
    assert "computed before the capture" in text


def test_a_forward_before_the_capture() -> None:
    made = nn.Linear(4, 4)(numbers())
    (text,) = said(lambda: made.sum().backward())
    assert "computed before the capture" in text


def test_a_step_whose_graph_begins_before_the_capture_is_told_which_line_to_move() -> None:
    generator, critic = nn.Linear(2, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(generator.parameters(), 0.1)
    fake = generator(torch.randn(3, 2))
    with tracefuse.capture() as c:
        loss = critic(fake).mean()
        loss.backward()
        optimizer.step()
    with pytest.raises(
        ExportError, match=r"^The graph of `fake` begins before the capture: move line \d+ \(fake = gen"
    ):
        c.optimize().compile()
    with tracefuse.capture() as c:
        inside = generator(torch.randn(3, 2))
        loss = critic(inside).mean()
        loss.backward()
        optimizer.step()
    assert c.update is not None, c.program.uncut


def test_a_factor_of_before_is_named_and_not_the_variable_that_it_scales() -> None:
    """`x.detach()` there would cut the model's own graph."""
    model, log_scale = nn.Linear(4, 3), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([*model.parameters(), log_scale], 0.1, fused=True)
    scale = log_scale.exp()
    with tracefuse.capture() as c:
        x = model(torch.randn(5, 4))
        x = x * scale
        x.square().mean().backward()
        optimizer.step()
    said = r"^The graph of `scale` begins before the capture: move line \d+ \(scale = log_scale.exp\(\)\) inside"
    with pytest.raises(ExportError, match=said):
        c.optimize().compile()


def test_a_state_that_grows_over_steps_is_named_in_a_method() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.0, fused=True)

    def train() -> None:
        state = torch.zeros(3)
        for _ in range(4):
            state=state + model(torch.ones(5, 4)).mean(0)  # fmt: skip
            optimizer.zero_grad()
            state.square().mean().backward(retain_graph=True)
            optimizer.step()

    with tracefuse.capture_step(n=3) as c:
        train()
    with pytest.raises(ExportError, match=r"^`state` goes on with its own graph .*write `state.detach\(\)`"):
        c.optimize().compile()


def test_a_backward_on_another_thread() -> None:
    model = nn.Linear(4, 4)

    def step() -> Tensor:
        loss = model(numbers()).sum()
        on_a_thread(loss.backward)
        return loss

    (text,) = said(step)
    assert "A backward of this program ran on another thread" in text
    assert model.weight.grad is not None


def test_other_threads_have_backwards_of_their_own() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)

    def step() -> None:
        on_a_thread(lambda: other(numbers()).sum().backward())
        model(numbers()).sum().backward()

    assert not said(step)
    assert other.weight.grad is not None


def test_a_result_of_before_that_no_backward_goes_through() -> None:
    made = nn.Linear(4, 4)(numbers())
    assert not said(lambda: made.detach().sum() * 2)
    assert not said(lambda: made.sum() * 2)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_is_shown_whole(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = numbers().requires_grad_()
    assert not said(lambda: checkpoint(model, x, use_reentrant=use_reentrant).sum().backward())


def test_a_program_that_writes_to_what_it_reads_is_shown_whole() -> None:
    model, state = nn.Linear(4, 4), torch.zeros(2, 4)
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.GELU()))

    def step() -> None:
        state.copy_(scripted(model(numbers())))
        state.square().sum().backward()

    assert not said(step)


def test_ops_whose_result_nobody_reads_are_told() -> None:
    net, aux, x = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 512), nn.GELU(), nn.Linear(512, 8)), torch.randn(256, 8)
    with tracefuse.capture() as c:
        aux(net(x))
        held = x * 2
        loss = net(x).square().mean()
        loss.backward()
    assert [(one.op, one.origin.module) for one in c.dropped] == [
        ("aten.addmm.default", "net"), ("aten.addmm.default", "aux.0"), ("aten.gelu.default", "aux.1"),
        ("aten.addmm.default", "aux.2"),
    ]  # fmt: skip
    assert all(one.modelled_us > 0 and one.nbytes > 0 for one in c.dropped)
    assert held.numel()
    (finding,) = [f for f in c.findings() if f.id == "never-used"]
    assert "4 ops computed what nothing used" in finding.title
    assert "aux(net(x))" in str(finding)


def test_a_range_of_a_profiler_is_no_number_that_python_read() -> None:
    x = torch.randn(3, requires_grad=True)
    with tracefuse.capture() as c, torch.profiler.record_function("mine"):
        x.sin().sum().backward()
    assert c.guards == ()


@pytest.mark.parametrize("is_written", [True, False], ids=["through a view", "no write"])
def test_ops_that_nobody_reads_are_told_of_a_program_that_is_rewritten_too(is_written: bool) -> None:
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    with tracefuse.capture() as c:
        y = net(x)
        torch.relu(y).exp()
        scratch = torch.zeros(4, 8)
        scratch[0].add_(y[0])
        del scratch
        y = y.clone()
        if is_written:
            y[0].mul_(2)
        y.sum().backward()
    told = ["aten.relu.default", "aten.exp.default", "aten.zeros.default", "aten.add_.Tensor"]
    assert [one.op for one in c.dropped] == told
    assert all(one.origin.source is not None for one in c.dropped)


def test_what_a_variable_holds_beside_the_step_is_told_and_shown_when_it_is_returned() -> None:
    net, x = nn.Linear(8, 8), torch.randn(4, 8)

    def step(c: tracefuse.RecordedCapture, is_returned: bool) -> Tensor:
        y = net(x)
        loss = y.sum()
        loss.backward()
        accuracy = (y > 0).float().mean()
        if is_returned:
            c.returned = loss, accuracy
        return accuracy

    with tracefuse.capture() as c:
        accuracy = step(c, False)
    (text,) = c.unrecorded
    assert text.startswith("accuracy: 3 ops computed it beside the step (test_unshown.py:")
    with tracefuse.capture() as c:
        net(x).sum().backward()
        low, high = x.exp(), x.exp().log()
    assert c.unrecorded[0].startswith("low, high: 3 ops computed them beside the step (")
    assert c.unrecorded[0].endswith(
        "no gradient needs them, and they are no part of the trace. Return them, "
        "in a block by `c.returned = …`, to have them shown."
    )
    del low, high
    assert c.dropped == ()
    with tracefuse.capture() as c:
        accuracy = step(c, True)
    assert c.unrecorded == ()
    results = [t for out, t in zip(c.trace.outputs, c.replay(), strict=True) if out.kind == "result"]
    assert any(torch.equal(t, accuracy) for t in results)


@pytest.mark.parametrize(
    "waits", [(1, 1), (1, 3), (3, 1)], ids=["in turn", "the second is longer", "the first is longer"]
)
def test_tasks_that_record_one_another_are_told(waits: tuple[int, int]) -> None:
    async def step(turns: int) -> tracefuse.Capture:
        net = nn.Linear(3, 2)
        with tracefuse.capture() as c:
            for _ in range(turns):
                loss = net(torch.ones(1, 3)).sum()
                await asyncio.sleep(0)
            loss.backward()
        return c

    async def both() -> list[tracefuse.Capture]:
        return await asyncio.gather(*map(step, waits))

    assert all("Do not `await` inside a capture" in " ".join(c.unrecorded) for c in in_a_loop(both()))


def test_tasks_of_the_program_itself_are_a_part_of_it() -> None:
    net = nn.Linear(3, 2)

    async def rows() -> Tensor:
        await asyncio.sleep(0)
        return net(torch.ones(1, 3)).sum()

    async def step() -> tracefuse.Capture:
        with tracefuse.capture() as outer, tracefuse.capture():
            losses = await asyncio.gather(rows(), rows())
            sum(losses).backward()
        return outer

    assert in_a_loop(step()).unrecorded == ()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.net(torch.cat([x, state.detach()], -1)))


def test_a_recurrent_state_that_is_detached_is_no_graph_of_before() -> None:
    net, x, state = Recurrent(), torch.randn(3, 2), torch.zeros(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            optimizer.zero_grad()
            state = net(x, state)
            state.sum().backward()
            optimizer.step()
    assert c.unrecorded == ()
    expected = net(x, state).sum()
    torch.testing.assert_close(c.optimize().compile()(x, state), expected)
    state = net(x, state)
    with tracefuse.capture() as kept:
        (state + state.detach()).sum().backward()
    assert [text for text in kept.unrecorded if "begins before the capture" in text or "history" in text]


@pytest.mark.parametrize("is_own", [True, False])
def test_a_step_that_draws_from_a_generator_of_its_own_is_told_so(is_own: bool) -> None:
    torch.manual_seed(5)
    weight = torch.zeros(4, requires_grad=True)
    generator = torch.Generator().manual_seed(3) if is_own else None
    optimizer = torch.optim.SGD([weight], lr=0.0, fused=True)
    losses = []
    with tracefuse.capture_step(n=3) as c:
        for _ in range(4):
            drawn = torch.randn(4, generator=generator)
            loss = (weight + drawn).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    state = None if generator is None else generator.get_state()
    c.optimize().compile()()
    told = [note for note in c.unrecorded if note.startswith("A generator of the program's own draws (")]
    assert bool(told) == is_own
    if generator is not None and state is not None:
        assert torch.equal(generator.get_state(), state), (
            "what the sentence says is so: the generator was not drawn from"
        )
        assert "drawn = torch.randn(4, generator=generator)" in told[0]


def test_a_generator_of_a_loader_is_no_part_of_the_step() -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 4)), 2, shuffle=True, generator=torch.Generator().manual_seed(1))
    weight = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)
    with tracefuse.capture_step(n=3) as c:
        for (x,) in loader:
            (weight + x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not c.unrecorded


def evaluation(rounds: int, is_bound: bool = False) -> tracefuse.Capture:
    """Rounds of a loop that adds up what the host reads; the last batch may be bound to a name."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    batches = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(rounds)]

    @torch.no_grad()
    def evaluate() -> float:
        right = 0.0
        for x, y in batches:
            x = x * 2
            right += (model(x).argmax(-1) == y).sum().item()
        return right

    if not is_bound:
        return tracefuse.capture(evaluate)
    with tracefuse.capture() as c, torch.no_grad():
        right = 0.0
        for x, y in batches:
            x = x * 2
            right += (model(x).argmax(-1) == y).sum().item()
    assert x is not None
    return c


@pytest.mark.parametrize("is_bound", [False, True])
def test_what_an_evaluation_reads_is_its_result(is_bound: bool) -> None:
    capture = evaluation(1, is_bound)
    assert {"addmm", "argmax", "eq", "sum"} <= {n.target.overloadpacket.__name__ for n in capture.trace.ops}
    assert not capture.unrecorded
    capture.optimize().check()


def test_of_rounds_the_last_one_is_shown_and_the_others_are_told() -> None:
    capture = evaluation(4)
    assert [n.target.overloadpacket.__name__ for n in capture.trace.ops].count("argmax") == 1
    (text,) = capture.unrecorded
    assert text.startswith("21 ops of earlier rounds computed what the host read (")
    assert text.endswith("the trace has the last round. Capture one round to see nothing but that.")


def test_what_only_decides_is_no_result() -> None:
    x = torch.randn(4)

    def run() -> Tensor:
        return x.exp() if (x > 0).any() else x.sin()

    capture = tracefuse.capture(run)
    assert [o.kind for o in capture.trace.outputs] == ["result"]
    assert len(capture.trace.ops) == 1


def test_a_loss_that_a_step_logs_stays_as_it_was() -> None:
    model, x = nn.Linear(4, 4), numbers()

    def run() -> float:
        loss = model(x).square().mean()
        loss.backward()
        return (model(x) > 0).float().mean().item()

    capture = tracefuse.capture(run)
    assert "gt" not in {n.target.overloadpacket.__name__ for n in capture.trace.ops}


def test_what_is_computed_beside_a_number_that_is_read_stays_a_result() -> None:
    model, x = nn.Linear(4, 4), torch.randn(6, 4)
    with tracefuse.capture() as c, torch.no_grad():
        out = model(x)
        peak = out.abs().max().item()
        likely = out.softmax(-1)
    assert {"out", "likely"} <= {one.of for one in c.trace.outputs}
    assert "loss" not in {one.of for one in c.trace.outputs}
    assert peak > 0
    assert c.optimize().check()
    del likely
