"""Modules that run know where they are in the tree, also those that no attribute leads to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tracefuse
from tracefuse.optimizers.trace import origin


class Classifier(nn.Module):
    """It makes its loss in its forward, as models of transformers do, and keeps blocks in a list of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.hidden = [nn.Sequential(nn.Linear(4, 4), nn.ReLU())]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.CrossEntropyLoss()(self.head(self.hidden[0](x)), labels)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        return self.model(*args)


def test_a_loss_made_in_a_forward_is_not_the_root() -> None:
    model = Wrapper(Classifier())
    c = tracefuse.capture(lambda: model(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).backward())
    places = {(origin(n).module, origin(n).module_type) for n in c.trace.ops}
    assert {("model.head", "Linear"), ("model.CrossEntropyLoss", "CrossEntropyLoss")} <= places
    assert {("model.Sequential.0", "Linear"), ("model.Sequential.1", "ReLU")} <= places
    assert not any(path == "" and kind for path, kind in places)


def test_an_op_knows_whether_its_module_is_torchs_own() -> None:
    """A class of the program's may be called as one of torch's, and may be made of one."""

    class Linear(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Linear(4, 4))
    c = tracefuse.capture(lambda: model(torch.randn(2, 4)).sum().backward())
    linear = [origin(n) for n in c.trace.ops if origin(n).module_type == "Linear"]
    assert len({where.module for where in linear}) == 2
    for autograd in (False, True):
        assert {where.ran_in("Linear") for where in linear if bool(where.autograd) == autograd} == {True, False}
    assert all(where.ran_in("ReLU", "Linear") == where.is_torchs for where in linear)


def test_a_module_that_cannot_name_what_it_has_is_captured_without_names() -> None:
    class Nameless(nn.Linear):
        def named_parameters(self, *args: object, **options: object) -> object:
            raise RuntimeError("I have no names")

        named_modules = named_buffers = named_parameters

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nameless, x = Nameless(4, 4), torch.randn(2, 4)
    with tracefuse.capture() as c:
        loss = nameless(model(x)).sum()
        loss.backward()
    named = {i.source for i in c.trace.inputs if i.kind == "parameter"}
    assert {"0.weight", "0.bias", "1.weight", "1.bias"} <= named
    assert len(named) == 6
    with pytest.raises(RuntimeError, match="no names"):
        nameless.named_parameters()


def test_a_capture_leaves_no_global_hook_of_modules() -> None:
    before = bool(torch.nn.modules.module._has_any_global_hook())
    layer = torch.nn.Linear(3, 2)
    tracefuse.capture(lambda: layer(torch.ones(2, 3)).sum().backward())
    assert bool(torch.nn.modules.module._has_any_global_hook()) is before
