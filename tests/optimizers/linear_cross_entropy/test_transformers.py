"""Heads and losses of transformers' models, as people train them, in chunks: the numbers of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from padded import TAKES_ALL
from torch import Tensor
from traces import Tried, tried

import tracefuse
from tracefuse.config.configuration import Config

CHUNK = "linear_cross_entropy"
CLASSES, ROWS = 61, 21
SMALL = {"vocab_size": CLASSES, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = SMALL | {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip
MODELS = {
    "Llama": LLAMA,
    "GPT2": SMALL | {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "Gemma2": LLAMA | {"final_logit_softcapping": 3.0},
    "Cohere": LLAMA | {"logit_scale": 0.0625},
    "Granite": LLAMA | {"logits_scaling": 8.0},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    transformers: Any = pytest.importorskip("transformers")
    name: str = request.param
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    torch.manual_seed(0)
    made: torch.nn.Module = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**MODELS[name]))
    made.loss_type = "ForCausalLM"  # of GPT-2, transformers warns that it has none, and Dynamo breaks its graph there
    return made


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens = torch.randint(3, CLASSES, (3, ROWS // 3))
    labels = tokens.clone()
    labels[0, :3], labels[2] = -100, -100
    return {"input_ids": tokens, "labels": labels}


def its_own(model: torch.nn.Module) -> Tensor:
    return model(**batch()).loss  # type: ignore[no-any-return]


def per_item(model: torch.nn.Module) -> Tensor:
    """As the Trainer asks for it."""
    return model(**batch(), num_items_in_batch=torch.tensor(9)).loss  # type: ignore[no-any-return]


def smoothed(model: torch.nn.Module) -> Tensor:
    """A loss of one's own on the model's logits, which are shifted as in transformers until 4.45."""
    given = batch()
    logits = model(input_ids=given["input_ids"]).logits.float()
    logits, labels = logits[..., :-1, :].contiguous(), given["labels"][..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=0.1)


def autocast(model: torch.nn.Module) -> Tensor:
    """The weights stay float32."""
    with torch.autocast("cpu", torch.bfloat16):
        return its_own(model)


def frozen(model: torch.nn.Module) -> Tensor:
    model.get_output_embeddings().requires_grad_(False)  # type: ignore[operator]
    return its_own(model)


def chunked(model: torch.nn.Module, loss: Callable[[torch.nn.Module], Tensor]) -> Tried:
    def run() -> Tensor:
        found = loss(model)
        found.backward()
        return found

    options = {"simplify": True, "freeze": True, "cat": True, CHUNK: True}
    return tried(Config.off().changed(**options).passes(TAKES_ALL), tracefuse.capture(run))


@pytest.mark.parametrize("loss", [its_own, per_item, smoothed, autocast, frozen], ids=lambda loss: loss.__name__)
def test_a_models_loss_in_chunks_is_eagers(model: torch.nn.Module, loss: Callable[[torch.nn.Module], Tensor]) -> None:
    found = chunked(model if loss is autocast else model.double(), loss)
    assert found.reasons("chunk"), found.reasons("leave")
    (node,) = [n for n in found.after.ops if CHUNK in str(n.target)]
    assert node.kwargs["weight_wanted"] is (loss is not frozen)
    assert not any(
        tensor.numel() >= ROWS // 3 * (ROWS // 3 - 1) * CLASSES
        for op in found.after.ops
        if isinstance(tensor := op.meta["val"], Tensor)
    ), "no value is as large as the logits"


def test_a_compiled_model_returns_its_loss_alone(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy that the pass names where the logits are returned beside the loss."""
    from tracefuse.variant import Variants

    monkeypatch.setattr(Variants, "machine", TAKES_ALL)
    torch.compiler.reset()  # numbers that differ from the model before it, as of its norms, become symbols
    compiled = torch.compile(lambda **given: model(**given).loss, backend="tracefuse")
    loss = compiled(**batch())
    (loss * 2).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    expected = its_own(model)
    (expected * 2).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)
    (graph,) = tracefuse.compiled(model)
    assert any(CHUNK in str(node.target) for node in graph.variant(graph.config).trace.ops)
