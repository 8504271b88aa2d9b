"""Encoders of `transformers`: masked words, classes of sentences and of words, answers; and models of documents."""

from __future__ import annotations

from typing import Any

import torch

from people_programs.language import BATCH, LENGTH, SIZES, VOCABULARY, pretrained, tokens
from people_programs.made import Made, Program, add, trained


def masked(name: str, kind: str, **config: Any) -> None:
    """A program: words behind a mask; a third of the second sentence is padding."""

    def make() -> Made:
        ids, mask = tokens(), torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[1, -LENGTH // 3 :] = 0
        labels = torch.where(torch.rand(BATCH, LENGTH) < 0.5, ids, -100)
        return trained(pretrained(kind, **config), input_ids=ids, attention_mask=mask, labels=labels)

    add(name, Program("encoder", make, "transformers"))


def classifies(name: str, kind: str, **config: Any) -> None:
    """A program: a class for each sentence."""

    def make() -> Made:
        labels = torch.randint(3, (BATCH,))
        return trained(pretrained(kind, num_labels=3, **config), input_ids=tokens(), labels=labels)

    add(name, Program("encoder", make, "transformers"))


masked("roberta", "RobertaForMaskedLM", **SIZES)
masked("deberta", "DebertaForMaskedLM", pos_att_type=["p2c", "c2p"], relative_attention=True, **SIZES)
masked("deberta v2", "DebertaV2ForMaskedLM", pos_att_type=["p2c", "c2p"], relative_attention=True, **SIZES)
masked("electra", "ElectraForMaskedLM", embedding_size=16, **SIZES)
masked("albert", "AlbertForMaskedLM", embedding_size=16, **SIZES)
masked("distilbert", "DistilBertForMaskedLM", vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=2, n_heads=4)
masked("mobilebert", "MobileBertForMaskedLM", embedding_size=16, intra_bottleneck_size=32, **SIZES)
masked("squeezebert", "SqueezeBertForMaskedLM", embedding_size=32, **SIZES)
masked("mpnet", "MPNetForMaskedLM", **SIZES)
masked("convbert", "ConvBertForMaskedLM", embedding_size=16, conv_kernel_size=3, **SIZES)
masked("roformer", "RoFormerForMaskedLM", embedding_size=16, **SIZES)
masked("rembert", "RemBertForMaskedLM", input_embedding_size=16, output_embedding_size=16, **SIZES)
masked("esm", "EsmForMaskedLM", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary", **SIZES)
masked("modernbert", "ModernBertForMaskedLM", local_attention=6, pad_token_id=0, **SIZES)
classifies(
    "nystromformer", "NystromformerForSequenceClassification", num_landmarks=4, segment_means_seq_len=LENGTH, **SIZES
)
masked("ibert", "IBertForMaskedLM", quant_mode=False, **SIZES)
masked("longformer", "LongformerForMaskedLM", attention_window=4, pad_token_id=1, **SIZES)
masked("big bird", "BigBirdForMaskedLM", attention_type="original_full", **SIZES)
masked("flaubert", "FlaubertWithLMHeadModel", n_words=VOCABULARY, emb_dim=32, n_layers=2, n_heads=4)
classifies("fnet", "FNetForSequenceClassification", **SIZES)
classifies(
    "canine",
    "CanineForSequenceClassification",
    num_hash_buckets=64,
    downsampling_rate=4,
    local_transformer_stride=4,
    **SIZES,
)
classifies(
    "funnel",
    "FunnelForSequenceClassification",
    vocab_size=VOCABULARY,
    block_sizes=[1, 1],
    d_model=32,
    n_head=4,
    d_head=8,
    d_inner=64,
)
classifies("data2vec of text", "Data2VecTextForSequenceClassification", **SIZES)
classifies(
    "gpt2 that classifies",
    "GPT2ForSequenceClassification",
    vocab_size=VOCABULARY,
    n_embd=32,
    n_layer=2,
    n_head=4,
    pad_token_id=0,
)


def _answers() -> Made:
    where = [torch.randint(LENGTH, (BATCH,)) for _ in range(2)]
    model = pretrained("BertForQuestionAnswering", **SIZES)
    return trained(model, input_ids=tokens(), start_positions=where[0], end_positions=where[1])


def _document(kind: str, **config: Any) -> Any:
    def make() -> Made:
        corners = torch.randint(50, (BATCH, LENGTH, 2))
        boxes = torch.cat([corners, corners + 10], -1)
        labels = torch.randint(3, (BATCH, LENGTH))
        model = pretrained(kind, num_labels=3, max_2d_position_embeddings=64, **SIZES | config)
        return trained(model, input_ids=tokens(), bbox=boxes, labels=labels)

    return make


def _next_sentence() -> Made:
    ids, labels = tokens(), torch.randint(2, (BATCH,))
    return trained(pretrained("BertForPreTraining", **SIZES), input_ids=ids, labels=ids, next_sentence_label=labels)


def _perceiver() -> Made:
    small = {"num_latents": 6, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 2}
    heads = {"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "qk_channels": 32, "v_channels": 32}
    model = pretrained(
        "PerceiverForSequenceClassification",
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        num_labels=3,
        **small,
        **heads,
    )
    return trained(model, inputs=tokens(), labels=torch.randint(3, (BATCH,)))


for name, make in {
    "bert that answers": _answers,
    "bert before training": _next_sentence,
    "layoutlm": _document("LayoutLMForTokenClassification"),
    "lilt": _document("LiltForTokenClassification", channel_shrink_ratio=2, hidden_size=48),
    "perceiver": _perceiver,
}.items():
    add(name, Program("encoder", make, "transformers"))
