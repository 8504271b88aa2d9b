"""Encoders with decoders: those of `transformers`, and those that tutorials write with recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from people_programs.language import BATCH, LENGTH, VOCABULARY, pretrained, tokens
from people_programs.made import Made, Program, add, program, trained

ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False}
SIDES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "max_position_embeddings": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
} | ENDS
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4} | ENDS


def translates(name: str, kind: str, **config: Any) -> None:
    """A program: one sequence of tokens into another."""

    def make() -> Made:
        return trained(pretrained(kind, **config), input_ids=tokens(), labels=tokens(LENGTH - 2))

    add(name, Program("sequences", make, "transformers"))


translates("bart", "BartForConditionalGeneration", **SIDES)
translates("pegasus", "PegasusForConditionalGeneration", **SIDES)
translates("marian", "MarianMTModel", **SIDES)
translates("m2m 100", "M2M100ForConditionalGeneration", **SIDES)
translates("blenderbot small", "BlenderbotSmallForConditionalGeneration", **SIDES)
translates(
    "led",
    "LEDForConditionalGeneration",
    attention_window=4,
    max_encoder_position_embeddings=32,
    max_decoder_position_embeddings=32,
    **SIDES,
)
translates("big bird pegasus", "BigBirdPegasusForConditionalGeneration", attention_type="original_full", **SIDES)
translates("pegasus x", "PegasusXForConditionalGeneration", block_size=4, num_global_tokens=4, **SIDES)
translates(
    "prophetnet",
    "ProphetNetForConditionalGeneration",
    vocab_size=VOCABULARY,
    hidden_size=32,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    num_encoder_layers=1,
    num_decoder_layers=1,
    num_encoder_attention_heads=4,
    num_decoder_attention_heads=4,
    max_position_embeddings=32,
    ngram=2,
    **ENDS,
)
translates("mt5", "MT5ForConditionalGeneration", **T5)
translates("long t5", "LongT5ForConditionalGeneration", local_radius=3, **T5)
translates(
    "switch transformers",
    "SwitchTransformersForConditionalGeneration",
    num_experts=4,
    expert_capacity=8,
    experts_implementation="eager",
    **T5,
)


class Attentive(nn.Module):
    """Bahdanau's: a bidirectional recurrent encoder, a decoder cell that looks at it at every step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(40, 16, padding_idx=0), nn.Embedding(50, 16)
        self.encoder = getattr(nn, kind)(16, 16, batch_first=True, bidirectional=True)
        self.cell = nn.GRUCell(16 + 32, 32)
        self.score = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1, bias=False))
        self.out, self.dropout = nn.Linear(64, 50), nn.Dropout(0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, _ = self.encoder(self.dropout(self.source(source)))
        state, blank = memory.mean(1), source.eq(0)
        losses = []
        for word, following in zip(target[:, :-1].unbind(1), target[:, 1:].unbind(1), strict=True):
            asked = state.unsqueeze(1).expand_as(memory)
            scores = self.score(torch.cat([asked, memory], -1)).squeeze(-1).masked_fill(blank, -torch.inf)
            context = torch.bmm(scores.softmax(-1).unsqueeze(1), memory).squeeze(1)
            state = self.cell(torch.cat([self.target(word), context], -1), state)
            losses.append(F.cross_entropy(self.out(torch.cat([state, context], -1)), following))
        return torch.stack(losses).mean()


def _attentive(kind: str) -> Made:
    source = torch.randint(1, 40, (4, 9))
    source[2, 6:] = 0
    return trained(Attentive(kind), source, torch.randint(50, (4, 6)))


@program("sequences")
def gru_with_attention() -> Made:
    return _attentive("GRU")


@program("sequences")
def lstm_with_attention() -> Made:
    return _attentive("LSTM")


class Packed(nn.Module):
    """A classifier of sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(40, 16), nn.LSTM(16, 24, num_layers=2, dropout=0.2)
        self.out = nn.Linear(24, 3)

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, enforce_sorted=False)
        states, (last, _) = self.lstm(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(states)
        return F.cross_entropy(self.out(last[-1] + padded.mean(0)), labels)


@program("sequences")
def packed_lstm() -> Made:
    return trained(
        Packed(), torch.randint(40, (9, 4)), torch.tensor([9, 4, 7, 2], device="cpu"), torch.randint(3, (4,))
    )


@program("sequences")
def transformer_of_torch() -> Made:
    model = nn.Transformer(32, 4, 1, 1, 64, dropout=0.1, batch_first=True)
    source, target = torch.randn(BATCH, LENGTH, 32), torch.randn(BATCH, LENGTH, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    return trained(model, source, target, tgt_mask=mask, tgt_is_causal=True)


@program("sequences")
def encoder_layer_with_padding() -> Made:
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", norm_first=True, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [7]])
    return trained(model, torch.randn(BATCH, LENGTH, 32), src_key_padding_mask=padding)


@program("sequences")
def character_rnn() -> Made:
    model, text = nn.RNN(8, 16, nonlinearity="relu", batch_first=True), torch.randn(3, 10, 8)

    def run(model: nn.Module) -> Tensor:
        state, losses = None, []
        for piece in text.split(5, 1):
            out, state = model(piece, None if state is None else state.detach())
            losses.append(out.square().mean())
        loss = torch.stack(losses).sum()
        loss.backward()
        return loss

    return Made(run, (model,))
