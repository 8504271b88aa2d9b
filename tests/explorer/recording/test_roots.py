"""Outermost modules have names of their own where a program has several, and a loss is none that takes the model's row."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.trace import origin
from tracefuse.recording.namespace import modules_in
from tracefuse.widgets.payload.program import payload


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Discriminator(Generator):
    pass


class Both(nn.Module):
    """It is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.G, self.D = Generator(), Discriminator()


def x() -> Tensor:
    return torch.ones(3, 4)


def paths(c: tracefuse.Capture) -> set[tuple[str, str]]:
    return {(origin(n).module, origin(n).module_type) for n in c.trace.ops} - {("", "")}


def weights(c: tracefuse.Capture) -> list[str]:
    return [one.source for one in c.trace.inputs if one.source.endswith("weight")]


def gan() -> tracefuse.Capture:
    G, D, bce = Generator(), Discriminator(), nn.BCEWithLogitsLoss()
    with tracefuse.capture() as c:
        bce(D(G(x())), torch.ones(3, 4)).backward()
    return c


def test_two_models_have_rows_of_their_own_everywhere(tmp_path: Path) -> None:
    c = gan()
    wanted = {("G.net.0", "Linear"), ("G.net.1", "ReLU"), ("D.net.0", "Linear"), ("D.net.1", "ReLU")}
    assert paths(c) == wanted | {("bce", "BCEWithLogitsLoss")}
    assert weights(c) == ["G.net.0.weight", "D.net.0.weight"]
    c.save(tmp_path / "run.tfz")
    for v in (c.optimize(), tracefuse.load(tmp_path / "run.tfz").optimize()):
        assert {(row.path, row.module_type) for row in v.layers()} >= wanted
        assert "G.net.1" in str(v.layers())
        assert "D.net.1" in str(v.memory())
        found = payload(v)
        assert {row["path"] for row in found["layers"]} >= {path for path, _ in wanted}
        assert {one["module"] for one in found["values"].values()} >= {path for path, _ in wanted}
        said = [text for one in (*v.findings(), *v.findings().below) for text in (one.title, str(one.evidence))]
        assert not any(" net." in text for text in said)


@pytest.mark.parametrize(
    ("glob", "frozen"),
    [
        ("net.*", ["G.net.0.weight", "D.net.0.weight"]),
        ("G.net.*", ["G.net.0.weight"]),
        ("D.*", ["D.net.0.weight"]),
        ("D_net_0_weight", ["D.net.0.weight"]),
    ],
)
def test_a_pattern_names_one_root_or_none(glob: str, frozen: list[str]) -> None:
    trace = gan().optimize(freeze=[glob]).trace
    assert [i.source for i in trace.inputs if i.source.endswith("weight") and not i.trainable] == frozen


def test_a_pin_names_one_root_or_none() -> None:
    c = gan()
    assert [c.optimize(recompute=[one]).trace.op_count for one in ("net.1", "*.net.1")] == [
        c.optimize(recompute=["G.net.1", "D.net.1"]).trace.op_count
    ] * 2


def test_a_loss_stands_beside_the_model() -> None:
    model, criterion = Generator(), nn.MSELoss()
    with tracefuse.capture() as c:
        criterion(model(x()), x()).backward()
    assert paths(c) == {("net.0", "Linear"), ("net.1", "ReLU"), ("criterion", "MSELoss")}
    assert weights(c) == ["net.0.weight"]


def test_losses_that_are_made_for_each_call_share_a_row() -> None:
    model = Generator()
    with tracefuse.capture() as c:
        for _ in range(2):
            nn.MSELoss()(model(x()), x()).backward()
    assert paths(c) == {("net.0", "Linear"), ("net.1", "ReLU"), ("MSELoss", "MSELoss")}


def test_a_loss_of_a_function_is_not_its_root() -> None:
    weight, criterion = torch.ones(4, 4, requires_grad=True), nn.MSELoss()
    with tracefuse.capture() as c:
        criterion(x() @ weight, x()).backward()
    assert paths(c) == {("criterion", "MSELoss")}


def called(model: nn.Module) -> Tensor:
    return model(x()).sum()


def backward_through(one: type[nn.Module], other: type[nn.Module]) -> None:
    (called(one()) + called(other())).backward()


def test_roots_that_no_variable_tells_apart_have_their_class_and_a_number() -> None:
    c = tracefuse.capture(backward_through, Generator, Discriminator)
    assert weights(c) == ["Generator.net.0.weight", "Discriminator.net.0.weight"]
    c = tracefuse.capture(backward_through, Generator, Generator)
    assert weights(c) == ["Generator_1.net.0.weight", "Generator_2.net.0.weight"]


def test_items_and_attributes_are_names() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.G, self.experts = Generator(), {"left": Generator(), "right": Generator()}

        def step(self) -> None:
            sum(called(net) for net in (self.G, *self.experts.values())).backward()  # type: ignore[union-attr]

    trainer = Trainer()
    with tracefuse.capture() as c:
        trainer.step()
    assert weights(c) == ["G.net.0.weight", "experts.left.net.0.weight", "experts.right.net.0.weight"]
    nets = [Generator(), Generator()]
    with tracefuse.capture() as c:
        sum(net(x()).sum() for net in nets).backward()
    assert weights(c) == ["nets.0.net.0.weight", "nets.1.net.0.weight"]


def test_what_a_loop_over_a_dict_left_is_no_name_for_one_of_its_modules() -> None:
    nets = {"A": Generator(), "B": Generator()}
    for net in nets.values():
        net.train()
    with tracefuse.capture() as c:
        (nets["A"](x()) - nets["B"](x())).sum().backward()
    assert weights(c) == ["nets.A.net.0.weight", "nets.B.net.0.weight"]
    del net
    first, second = nets.values()
    with tracefuse.capture() as c:
        (first(x()) - second(x())).sum().backward()
    assert weights(c) == ["first.net.0.weight", "second.net.0.weight"]


def test_the_view_is_told_what_stands_beside_the_model() -> None:
    model, bce = Generator(), nn.BCEWithLogitsLoss()
    with tracefuse.capture() as c:
        bce(model(x()), torch.ones(3, 4)).backward()
    assert payload(c.optimize())["roots"] == ["bce"]


def test_parts_of_one_module_have_their_paths_in_it() -> None:
    both = Both()
    with tracefuse.capture() as c:
        both.D(both.G(x())).sum().backward()
    assert weights(c) == ["G.net.0.weight", "D.net.0.weight"]
    assert all(origin(n).root == "" for n in c.trace.ops)


def test_one_model_called_twice_is_one() -> None:
    model = Generator()
    with tracefuse.capture() as c:
        (model(x()) - model(2 * x())).sum().backward()
    assert paths(c) == {("net.0", "Linear"), ("net.1", "ReLU")}


def test_an_average_of_weights_is_no_second_model() -> None:
    model, average = Generator(), Generator()
    with tracefuse.capture() as c:
        model(x()).sum().backward()
        with torch.no_grad():
            average.net[0].weight.lerp_(model.net[0].weight, 0.1)  # type: ignore[arg-type]
    assert paths(c) == {("net.0", "Linear"), ("net.1", "ReLU")}
    assert weights(c) == ["net.0.weight", "average.net.0.weight"]


def test_an_exported_step_finds_the_tensors_of_two_models(tmp_path: Path) -> None:
    G, D = Generator(), Discriminator()
    optimizer = torch.optim.SGD([*G.parameters(), *D.parameters()], lr=0.1, fused=True)

    def train() -> Any:
        optimizer.zero_grad()
        loss = (D(G(x())) - D(x())).square().sum()
        loss.backward()
        optimizer.step()

    with tracefuse.capture_step(n=2) as c:
        for _ in range(3):
            train()
    path = c.optimize().export(tmp_path / "step.py")
    spec = importlib.util.spec_from_file_location("a_step_of_two", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.MODELS == ("G", "D")
    with pytest.raises(ValueError, match=r"D\.net\.0\.weight is not in the model .*: pass \[G, D\] as the model"):
        module.bind(G, optimizer)
    step = module.bind([G, D], optimizer)
    before = [p.detach().clone() for one in (G, D) for p in one.parameters()]
    step()
    ours = [p.detach().clone() for one in (G, D) for p in one.parameters()]
    with torch.no_grad():
        for p, old in zip((*G.parameters(), *D.parameters()), before, strict=True):
            p.copy_(old)
    train()
    for p, mine in zip((*G.parameters(), *D.parameters()), ours, strict=True):
        torch.testing.assert_close(p.detach(), mine)


class Computed:
    """Its attributes are asked for by nobody but itself."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("nothing is bound")


class Shy:
    def __getattribute__(self, name: str) -> Any:
        raise ValueError(name)


class Open(dict[Any, Any]):
    """Its items are its attributes, and some have no name."""

    def __init__(self) -> None:
        super().__init__({1: nn.Linear(2, 2), "tone": nn.Linear(2, 2)})
        self.__dict__ = self


@pytest.mark.parametrize("kind", [Computed, Shy, Open])
def test_objects_beside_modules_are_not_asked(kind: type[Any]) -> None:
    odd, G, D = kind(), Generator(), Discriminator()
    with tracefuse.capture() as c:
        D(G(x())).sum().backward()
    assert weights(c) == ["G.net.0.weight", "D.net.0.weight"]
    assert type(odd) is kind


def test_a_large_namespace_is_not_searched_to_its_end() -> None:
    data = {f"data_{at}": [[0] * 99] * 99 for at in range(10_000)}
    model, head = Generator(), Discriminator()
    began = time.perf_counter()
    found = list(modules_in({"first": [head], **data, "model": model, "last": {"head": head}}))
    assert [(one.name, one.module) for one in found] == [("model", model), ("first.0", head)]
    assert time.perf_counter() - began < 5  # to its end it takes minutes
