"""Language models of `transformers` that predict their own tokens, tiny and of random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from people_programs.made import Made, Program, add, trained

VOCABULARY, LENGTH, BATCH = 97, 12, 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
"""What most configurations call them."""
DECODER = SIZES | {
    "num_key_value_heads": 2,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def pretrained(kind: str, **config: Any) -> nn.Module:
    """A model of `transformers` by the name of its class, of random weights."""
    import transformers

    model = getattr(transformers, kind)
    return model(model.config_class(**config)).train()


def tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def predicts(name: str, kind: str, **config: Any) -> None:
    """A program: tokens that are their own labels."""

    def make() -> Made:
        ids = tokens()
        return trained(pretrained(kind, **config), input_ids=ids, labels=ids)

    add(name, Program("language", make, "transformers"))


predicts("gemma", "GemmaForCausalLM", head_dim=8, **DECODER)
predicts("gemma2", "Gemma2ForCausalLM", head_dim=8, sliding_window=6, **DECODER)
predicts("qwen2", "Qwen2ForCausalLM", **DECODER)
predicts("qwen3", "Qwen3ForCausalLM", head_dim=8, **DECODER)
predicts("mistral", "MistralForCausalLM", sliding_window=6, **DECODER)
predicts("phi", "PhiForCausalLM", **DECODER)
predicts("bloom", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False)
predicts("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, do_layer_norm_before=True, **DECODER)
predicts("roberta", "RobertaForMaskedLM", **SIZES)
predicts("deberta v2", "DebertaV2ForMaskedLM", pos_att_type=["p2c", "c2p"], relative_attention=True, **SIZES)
