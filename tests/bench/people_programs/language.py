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
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXED = DECODER | {"experts_implementation": "eager"}
"""The fast ways to run experts take no float64."""
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "use_cache": False,
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
predicts("gemma3", "Gemma3ForCausalLM", head_dim=8, sliding_window=6, **DECODER)
predicts("qwen2", "Qwen2ForCausalLM", **DECODER)
predicts("qwen3", "Qwen3ForCausalLM", head_dim=8, **DECODER)
predicts(
    "qwen3 with experts",
    "Qwen3MoeForCausalLM",
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    **MIXED,
)
predicts("mistral", "MistralForCausalLM", sliding_window=6, **DECODER)
predicts("phi", "PhiForCausalLM", **DECODER)
predicts("phi3", "Phi3ForCausalLM", **DECODER)
predicts("bloom", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False)
predicts("opt", "OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32, **DECODER)
predicts("falcon", "FalconForCausalLM", alibi=False, **DECODER)
predicts("falcon with alibi", "FalconForCausalLM", alibi=True, **DECODER)
predicts("gpt neox", "GPTNeoXForCausalLM", **DECODER)
predicts("gptj", "GPTJForCausalLM", rotary_dim=4, **GPT)
predicts(
    "gpt neo",
    "GPTNeoForCausalLM",
    attention_types=[[["global", "local"], 1]],
    window_size=6,
    num_layers=2,
    num_heads=4,
    hidden_size=32,
    max_position_embeddings=32,
    vocab_size=VOCABULARY,
    use_cache=False,
)
predicts("gpt bigcode", "GPTBigCodeForCausalLM", **GPT)
predicts("openai gpt", "OpenAIGPTLMHeadModel", **GPT)
predicts("ctrl", "CTRLLMHeadModel", dff=64, **GPT)
predicts(
    "mpt", "MptForCausalLM", vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2, max_seq_len=32, use_cache=False
)
predicts("stablelm", "StableLmForCausalLM", **DECODER)
predicts("cohere", "CohereForCausalLM", **DECODER)
predicts("cohere2", "Cohere2ForCausalLM", sliding_window=6, **DECODER)
predicts("olmo2", "Olmo2ForCausalLM", **DECODER)
predicts("olmo with experts", "OlmoeForCausalLM", num_experts=4, num_experts_per_tok=2, **MIXED)
predicts("granite with experts", "GraniteMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, **MIXED)
predicts("nemotron", "NemotronForCausalLM", head_dim=8, **DECODER)
predicts("glm", "GlmForCausalLM", head_dim=8, **DECODER)
predicts("diffllama", "DiffLlamaForCausalLM", **DECODER)
predicts("gpt oss", "GptOssForCausalLM", head_dim=8, num_local_experts=4, num_experts_per_tok=2, **MIXED)
predicts(
    "dbrx",
    "DbrxForCausalLM",
    vocab_size=VOCABULARY,
    d_model=32,
    n_heads=4,
    n_layers=2,
    max_seq_len=32,
    use_cache=False,
    attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    experts_implementation="eager",
)
predicts(
    "deepseek v3",
    "DeepseekV3ForCausalLM",
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    moe_intermediate_size=16,
    first_k_dense_replace=1,
    **LATENT,
    **MIXED | {"num_key_value_heads": 4},
)
predicts(
    "xglm",
    "XGLMForCausalLM",
    d_model=32,
    ffn_dim=64,
    num_layers=2,
    attention_heads=4,
    vocab_size=VOCABULARY,
    use_cache=False,
)
predicts("biogpt", "BioGptForCausalLM", **DECODER)
predicts(
    "mamba2",
    "Mamba2ForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    state_size=8,
    num_hidden_layers=2,
    num_heads=8,
    head_dim=8,
    n_groups=2,
    chunk_size=8,
    use_cache=False,
)
predicts(
    "falcon mamba",
    "FalconMambaForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    state_size=4,
    num_hidden_layers=1,
    use_cache=False,
)
predicts(
    "rwkv",
    "RwkvForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    attention_hidden_size=32,
    num_hidden_layers=2,
    context_length=32,
    use_cache=False,
)
predicts(
    "recurrent gemma",
    "RecurrentGemmaForCausalLM",
    head_dim=8,
    lru_width=32,
    attention_window_size=6,
    block_types=["recurrent", "attention"],
    **DECODER,
)
predicts(
    "jamba",
    "JambaForCausalLM",
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=2,
    mamba_d_state=4,
    use_mamba_kernels=False,
    **MIXED,
)
predicts(
    "bamba",
    "BambaForCausalLM",
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_head=8,
    mamba_d_state=8,
    mamba_chunk_size=8,
    **DECODER,
)
predicts(
    "xlstm",
    "xLSTMForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_heads=4,
    num_blocks=1,
    num_hidden_layers=1,
    chunk_size=8,
    use_cache=False,
)
predicts("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"], **DECODER)
predicts(
    "qwen3 next",
    "Qwen3NextForCausalLM",
    head_dim=8,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    **MIXED,
)
predicts("xlnet", "XLNetLMHeadModel", vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64)
predicts(
    "reformer",
    "ReformerModelWithLMHead",
    vocab_size=VOCABULARY,
    hidden_size=32,
    attention_head_size=8,
    num_attention_heads=4,
    feed_forward_size=64,
    attn_layers=["local", "local"],
    local_attn_chunk_length=4,
    axial_pos_shape=[4, 3],
    axial_pos_embds_dim=[16, 16],
    is_decoder=True,
    max_position_embeddings=12,
    use_cache=False,
)
predicts("modernbert decoder", "ModernBertDecoderForCausalLM", local_attention=6, **DECODER)
predicts("jetmoe", "JetMoeForCausalLM", num_local_experts=4, num_experts_per_tok=2, kv_channels=8, **MIXED)
