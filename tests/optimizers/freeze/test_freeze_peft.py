"""The law of freezing on real `peft` LoRA models, built from configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from isomorphism import assert_isomorphic
from torch import nn
from traces import TOLERANCE, captured, coarsest, demanded, ops, tried

import tracefuse
from tracefuse.optimizers.freeze import Freeze
from tracefuse.optimizers.liveness import saved_bytes
from tracefuse.optimizers.simplify import Simplify

peft = pytest.importorskip("peft", reason="peft is not installed: pip install '.[test]'")

PATTERNS = ("*", "!*.lora_*")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attention_dropout=0.0, use_cache=False,
    )  # fmt: skip
    adapters = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(LlamaForCausalLM(config), adapters)


def gpt2() -> nn.Module:
    """Tied tables, biases, dropout everywhere, and weights that lie transposed (`Conv1D`)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False)
    adapters = peft.LoraConfig(r=2, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(GPT2LMHeadModel(config), adapters)


def cell(make: Callable[[], nn.Module], everything: bool) -> tuple[Callable[[], torch.Tensor], nn.Module]:
    """The training cell of a new model as peft freezes it, or with `everything` trained."""
    torch.manual_seed(0)
    model = make().double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that every other gradient would be zero
            nn.init.normal_(parameter)
        assert parameter.requires_grad == ("lora_" in name)
        parameter.requires_grad_(everything or parameter.requires_grad)
    tokens = torch.randint(97, (2, 9))

    def run() -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    torch.manual_seed(3)
    return run, model


@pytest.mark.parametrize("make", [llama, gpt2])
def test_pruning_gives_what_peft_runs(make):
    frozen = tried(Simplify(), captured(cell(make, everything=False)[0]))
    trained = captured(cell(make, everything=True)[0])
    pruned = tried([Freeze(PATTERNS), Simplify()], trained)
    assert_isomorphic(pruned.after, frozen.after)
    assert ops(pruned.after) == ops(frozen.after)
    assert saved_bytes(pruned.after) < saved_bytes(trained.trace)

    thawed = tracefuse.capture(cell(make, everything=False)[0], train_all=True)
    assert not any(".lora_" in name for name in thawed.thawed)
    assert_isomorphic(tried([Freeze(PATTERNS), Simplify()], thawed).after, frozen.after)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_adapters_have_eagers_gradients(make):
    trained = captured(cell(make, everything=True)[0])
    after = tried([Freeze(PATTERNS), Simplify()], trained).after
    run, model = cell(make, everything=False)
    run()
    values = demanded(after, tracefuse.replay(after, trained.example_inputs, trained.rng_states))
    found = {after.input_of(of).source: v for (kind, of), v in values.items() if kind == "gradient"}
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    tolerance = TOLERANCE[coarsest(after)]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_table_says_what_each_adapter_costs():
    costs = captured(cell(llama, everything=True)[0]).frozen_costs(PATTERNS)
    adapters = [row for row in costs if row.state == "trained"]
    assert len(adapters) == 8
    assert all(".lora_" in row.name and row.ops for row in adapters)
    assert costs.together.saved_nbytes > 0
