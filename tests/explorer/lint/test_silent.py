"""What looks like a mistake and is none: the linter is silent where another way would compute something else, or cost more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from findings import case
from planting import on_a_gpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tracefuse
from tracefuse.device.target import priced_for
from tracefuse.diagnose.diagnose import diagnose
from tracefuse.lint import facts

META, BF16 = torch.device("meta"), torch.bfloat16


def ids(step: Callable[[], object]) -> set[str]:
    with tracefuse.capture() as c:
        step()
    return {one.id for one in diagnose(on_a_gpu(c))}


def large(*shape: int, grad: bool = True, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META, requires_grad=grad)


def loss(x: Tensor) -> None:
    x.float().square().mean().backward()


# --- copies -----------------------------------------------------------------------------------------------------------


KEPT: list[Tensor] = []


def copied_before_a_write() -> None:
    x = large(2048, 2048)
    h = x * 2
    kept = h.clone()
    kept[:, 0] = 0
    loss(h + kept)


def copied_for_a_view() -> None:
    x = large(8, 1024, 1024)
    loss((x * 2).transpose(1, 2).contiguous().view(8, -1).exp())


def copied_for_a_norm() -> None:
    x, norm = large(8, 1024, 1024), nn.LayerNorm(1024, device=META, dtype=BF16)
    loss(norm((x * 2).transpose(1, 2).contiguous()))


def copied_to_be_returned() -> None:
    x = large(1024, 1024)
    KEPT.append((x * 2).detach().clone())
    loss(x * 2)


def copied_for_a_matmul_of_no_unit_stride() -> None:
    x, w = large(16, 1024, 64, 8), large(64, 64)
    loss((x * 2)[..., 0].contiguous() @ w)


@pytest.mark.parametrize(
    "step",
    [
        copied_before_a_write,
        copied_for_a_view,
        copied_for_a_norm,
        copied_to_be_returned,
        copied_for_a_matmul_of_no_unit_stride,
    ],
)
def test_a_copy_that_is_needed(step: Callable[[], None]) -> None:
    assert "needless-copy" not in ids(step)


def tiled() -> None:
    """Two of a kind: no broadcasting makes them of one."""
    x, table = large(64, 1024), large(32, 1024)
    loss(x + table.repeat(2, 1))


def repeated_for_a_write() -> None:
    x = large(1, 1024).detach().repeat(4096, 1)
    x.mul_(2)
    loss(x * large(4096, 1024))


@pytest.mark.parametrize("step", [tiled, repeated_for_a_write])
def test_a_repeat_that_is_needed(step: Callable[[], None]) -> None:
    assert "repeat-not-expand" not in ids(step)


# --- dtypes -----------------------------------------------------------------------------------------------------------


def test_a_sum_in_float32_is_no_round_trip() -> None:
    x, w = large(4096, 4096), large(4096, 4096)
    assert "cast-round-trip" not in ids(lambda: loss(((x @ w).float().sum(-1, keepdim=True)).to(BF16) * x))


@pytest.mark.parametrize(("ops", "severity", "fix"), [(1, "high", "leave both casts out"), (3, "low", "`fuse`")])
def test_the_casts_around_a_chain_are_kept(ops: int, severity: str, fix: str) -> None:
    x = large(4096, 4096)

    def step() -> None:
        h = (x * 2).float()
        for _ in range(ops):
            h = torch.sigmoid(h)
        loss(h.to(BF16) * x)

    with tracefuse.capture() as c:
        step()
    (one,) = [one for one in diagnose(on_a_gpu(c)) if one.id == "cast-round-trip"]
    assert one.severity == severity
    assert fix in one.fix


def test_a_program_of_float64_is_meant_to_be() -> None:
    model = nn.Linear(1024, 1024, device=META, dtype=torch.float64)
    assert "float64-leak" not in ids(lambda: model(large(1024, 1024, dtype=torch.float64)).sum().backward())


# --- again ------------------------------------------------------------------------------------------------------------


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(1024, 1024, device=META, dtype=BF16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize(("gpu", "fits"), [("H100", True), ("L4", False)])
def test_a_checkpoint_is_needed_where_the_step_fits_into_no_memory_else(gpu: str, fits: bool) -> None:
    layers, x = [Feed() for _ in range(10)], large(512, 1024, 1024)

    def step() -> None:
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False)
        loss(h)

    with priced_for(gpu):
        assert ("checkpoint-not-needed" in ids(step)) == fits


def test_micro_batches_have_graphs_of_their_own() -> None:
    layer, x = Feed(), large(8, 1024, 1024, grad=False)

    def step() -> None:
        for _ in range(2):
            loss(layer(x))

    assert "second-backward" not in ids(step)


def test_values_that_differ_have_numbers_of_their_own() -> None:
    x = torch.randn(8, requires_grad=True)

    def step() -> None:
        a = x * 2
        b = x * 2
        c = x * 3
        dropped = F.dropout(a) + F.dropout(a)
        (a + b + c + dropped).sum().backward()

    with tracefuse.capture() as c:
        step()
    numbers = facts.Numbering(c.trace, c.program)
    products = [numbers.of[n] for n in c.trace.ops if n.name in ("a", "b", "c")]
    assert len(products) == 3
    assert products[0] == products[1] != products[2]
    drawn = [numbers.of[n] for n in c.trace.ops if "bernoulli" in n.name]
    assert len(set(drawn)) == len(drawn) == 2


class Sloped(nn.Module):
    def __init__(self, slope: Tensor) -> None:
        super().__init__()
        self.register_buffer("slope", slope)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.slope.exp().tril()


@pytest.mark.parametrize(("factors", "is_told"), [([1, 1, 1, 1], True), ([1, 2, 3, 4], False)])
def test_buffers_of_one_name_are_equal_where_they_hold_the_same_numbers(factors: list[int], is_told: bool) -> None:
    slope, x = torch.randn(64, 64), torch.randn(8, 64, requires_grad=True)
    model = nn.Sequential(*(Sloped(slope * factor) for factor in factors))
    with tracefuse.capture() as c:
        model(x).sum().backward()
    assert ("computed-again" in {one.id for one in c.findings()}) == is_told


def test_without_tensors_no_buffers_are_known_to_be_equal(tmp_path: Path) -> None:
    model, x = nn.Sequential(*(Sloped(torch.ones(64, 64)) for _ in range(4))), torch.randn(8, 64, requires_grad=True)
    with tracefuse.capture() as c:
        model(x).sum().backward()
    found = [tracefuse.load(c.save(tmp_path / f"{kept}.tfz", inputs=kept)).findings() for kept in (False, True)]
    assert ["computed-again" in {one.id for one in of} for of in found] == [False, True]


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_discriminator_of_a_detached_value_gives_other_gradients(is_detached: bool) -> None:
    makes, judges, z = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(32, 64)
    with tracefuse.capture() as c:
        fake = makes(z)
        (judges(fake.detach() if is_detached else fake).mean() - judges(fake).square().mean()).backward()
    assert ("computed-again" in {one.id for one in c.findings()}) != is_detached


def summed(trunk: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward(retain_graph=True)
    losses[1].backward()


def apart(trunk: nn.Module, losses: list[Tensor]) -> None:
    """Each loss has its gradients, and their norms are what weighs them."""
    losses[0].backward(retain_graph=True)
    first = [p.grad for p in trunk.parameters()]
    trunk.zero_grad()
    losses[1].backward()
    for p, one in zip(trunk.parameters(), first, strict=True):
        p.grad = one / one.norm() + p.grad / p.grad.norm()


def one_of_them_scaled(trunk: nn.Module, losses: list[Tensor]) -> None:
    losses[0].backward(retain_graph=True)
    for p in trunk.parameters():
        p.grad = p.grad / p.grad.norm()
    losses[1].backward()


@pytest.mark.parametrize(("backwards", "is_told"), [(summed, True), (apart, False), (one_of_them_scaled, False)])
def test_only_backwards_whose_gradients_are_summed_are_one(
    backwards: Callable[[nn.Module, list[Tensor]], None], is_told: bool
) -> None:
    trunk, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(32, 64)
    with tracefuse.capture() as c:
        h = trunk(x)
        backwards(trunk, [h.square().mean(), h.abs().mean()])
    assert ("second-backward" in {one.id for one in c.findings()}) == is_told


# --- products and loops -----------------------------------------------------------------------------------------------


def test_queries_keys_and_values_are_three_matmuls_and_no_heads_apart() -> None:
    x, weights = large(8, 1024, 1024), [large(1024, 1024) for _ in range(3)]

    def step() -> None:
        q, k, v = (x @ w for w in weights)
        loss(q * k + v)

    assert "heads-apart" not in ids(step)


def test_a_recurrence_is_no_loop_over_samples() -> None:
    x, w = large(64, 32, 64), large(64, 64)

    def step() -> None:
        state = x[0]
        for given in x.unbind():
            state = torch.tanh(given + state @ w)
        loss(state)

    assert ids(step) & {"per-sample-loop", "stack-of-matmuls"} == set()


def test_a_dense_block_reads_each_concatenation() -> None:
    x, layers = large(4096, 64), [nn.Linear(64 * (1 + at), 64, device=META, dtype=BF16) for at in range(6)]

    def step() -> None:
        h = x
        for layer in layers:
            h = torch.cat([h, layer(h)], dim=1)
        loss(h)

    assert "cat-in-loop" not in ids(step)


# --- lines ------------------------------------------------------------------------------------------------------------


def test_zeros_that_each_round_writes_into_are_not_computed_again() -> None:
    """Rows of a one-hot by hand: the zeros cannot be shared, and the numbers of the rows can."""
    model, x, y = nn.Linear(32, 1000), torch.randn(8, 64, 32), torch.randint(0, 1000, (8, 64))

    def step() -> None:
        total = torch.zeros(())
        for t in range(8):
            rows = torch.zeros(64, 1000)
            rows[torch.arange(64), y[t]] = 1.0
            total = total - (model(x[t]).log_softmax(-1) * rows).sum()
        total.backward()

    of = case(tracefuse.capture(step))
    again = [name for one in diagnose(of) if one.id == "computed-again" for name in one.values]
    assert not any("zeros" in str(n.target) for n in of.trace.ops if n.name in again)


def test_a_clone_on_the_line_of_an_einsum_is_not_the_einsums() -> None:
    queue, queries = torch.randn(128, 4096), torch.randn(32, 128, requires_grad=True)

    def cloned() -> None:
        torch.einsum("nc,ck->nk", [queries, queue.clone().detach()]).square().mean().backward()

    def permuted() -> None:
        torch.einsum("kcn,mck->nm", [queries.expand(64, 32, 128), queue.view(256, 32, 64)]).square().mean().backward()

    told = [
        "einsum-copies" in {one.id for one in diagnose(case(tracefuse.capture(step)))} for step in (cloned, permuted)
    ]
    assert told == [False, True]


def test_products_of_attention_heads_are_no_stack_of_matrices() -> None:
    """Heads in a loop: their weights are a finding, and no matrix is held for their scores."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of = nn.Linear(32, 24, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.of(x).chunk(3, -1)
            scores = q @ k.mT
            return scores.softmax(-1) @ v

    heads, x = nn.ModuleList(Head() for _ in range(8)), torch.randn(4, 16, 32)
    step = lambda: torch.cat([head(x) for head in heads], -1).square().mean().backward()  # noqa: E731
    told = {one.id for one in diagnose(case(tracefuse.capture(step)))}
    assert {"attention-by-hand", "heads-apart"} <= told
    assert "stack-of-matmuls" not in told


class Waves(nn.Module):
    """A recurrent net whose head reads each step, or a linear layer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.cell, self.head, self.steps = nn.GRUCell(4, 16), nn.Linear(16, 4), steps

    def forward(self, x: Tensor) -> Tensor:
        state, out = torch.zeros(len(x), 16), []
        for t in range(self.steps):
            state = self.cell(x[:, t], state)
            out.append(self.head(state))
        return torch.stack(out, 1)


@pytest.mark.parametrize("steps", [0, 4])
def test_a_closure_that_runs_again_is_no_stack_of_matmuls(steps: int) -> None:
    """LBFGS computes with its parameters as they come to be: one matrix in all evaluations."""
    torch.manual_seed(0)
    model, x = (Waves(steps) if steps else nn.Linear(4, 4)), torch.randn(20, max(steps, 1), 4)
    optimizer, y = torch.optim.LBFGS(model.parameters(), max_iter=5), torch.randn_like(x)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    with tracefuse.capture() as c:
        optimizer.step(closure)  # type: ignore[arg-type]
    of = case(c)
    assert sum(n.target is torch.ops.aten.addmm.default for n in of.own_ops) >= 5 * max(steps, 1)
    assert not {"stack-of-matmuls", "heads-apart"} & {one.id for one in diagnose(of)}


def test_zeros_that_are_written_into_are_no_constant() -> None:
    """`one_hot` makes zeros in every step, and writes ones into them."""
    model, x, y = nn.Linear(32, 1000), torch.randn(64, 32), torch.randint(0, 1000, (64,))

    def by_hand() -> Tensor:
        rows = torch.zeros(64, 1000) + 0.1
        return -(model(x).log_softmax(-1) * rows).sum()

    def scattered() -> Tensor:
        rows = torch.zeros(64, 1000)
        rows.scatter_(1, y[:, None], 1.0)
        return -(model(x).log_softmax(-1) * rows).sum()

    def one_hot() -> Tensor:
        return -(model(x).log_softmax(-1) * F.one_hot(y, 1000).float()).sum()

    def told(loss: Callable[[], Tensor]) -> bool:
        return "constant-each-step" in {one.id for one in diagnose(case(tracefuse.capture(lambda: loss().backward())))}

    assert [told(loss) for loss in (by_hand, scattered, one_hot)] == [True, False, False]


def test_a_finding_in_a_library_is_at_the_line_that_called_it() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, use_cache=False))
    text = torch.zeros(2, 32, dtype=torch.long)

    def step() -> None:
        model(input_ids=text, labels=text).loss.backward()  # the project's

    with tracefuse.capture() as c:
        step()
    found = c.findings()
    assert {one.id for one in found} >= {"unfused-pointwise"}
    inside = [one for one in found if "in the library" in dict(one.evidence)]
    assert inside
    assert all(one.source.endswith("# the project's") for one in inside)
    assert all("site-packages" not in one.source for one in found)


def by_the_function() -> nn.Module:
    class Normed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.instance_norm(x)

    return Normed()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    "norm", [lambda: nn.InstanceNorm2d(6), lambda: nn.InstanceNorm2d(6, affine=True), by_the_function]
)
def test_an_instance_norm_is_no_batch_norm_of_one_sample(norm: Callable[[], nn.Module], samples: int) -> None:
    """ATen computes it as a batch norm of one sample, whose channels are all samples'."""
    model, x = nn.Sequential(nn.Conv2d(3, 6, 3), norm()), torch.randn(samples, 3, 32, 32)
    found = {one.id: one for one in diagnose(case(tracefuse.capture(lambda: model(x).square().mean().backward())))}
    assert "batch-norm-few-samples" not in found
    assert "instance norm behind" in found["bias-before-batch-norm"].title
    assert "before an instance norm" in found["bias-before-batch-norm"].fix
