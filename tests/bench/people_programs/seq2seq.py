"""Encoders with decoders: those of `transformers`, and those that tutorials write with recurrent layers."""

from __future__ import annotations

import math
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


class PackedTwice(nn.Module):
    """The same of one layer each, with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(40, 16), nn.LSTM(16, 24), nn.LSTM(24, 24)
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(24, 3)

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        states, _ = self.first(nn.utils.rnn.pack_padded_sequence(self.embed(words), lengths, enforce_sorted=False))
        states, (last, _) = self.second(states._replace(data=self.dropout(states.data)))
        padded, _ = nn.utils.rnn.pad_packed_sequence(states)
        return F.cross_entropy(self.out(last[-1] + padded.mean(0)), labels)


@program("sequences")
def packed_lstm_of_two_nets() -> Made:
    lengths = torch.tensor([9, 4, 7, 2], device="cpu")
    return trained(PackedTwice(), torch.randint(40, (9, 4)), lengths, torch.randint(3, (4,)))


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


class Heard(nn.Module):
    """Speech to letters by CTC: a convolution, recurrent layers in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(8, 16, 3, 2, 1), nn.LayerNorm(16)
        self.nets = nn.ModuleList([nn.GRU(n, 12, bidirectional=True, batch_first=True) for n in (16, 24)])
        self.out = nn.Linear(24, 7)

    def forward(self, x: Tensor, letters: Tensor, heard: Tensor, spelled: Tensor) -> Tensor:
        hidden = F.gelu(self.norm(self.convolution(x).transpose(1, 2)))
        for net in self.nets:
            hidden, _ = net(F.dropout(hidden, 0.1, self.training))
        chances = self.out(hidden).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, letters, heard, spelled, zero_infinity=True)


@program("sequences")
def letters_by_ctc() -> Made:
    heard, spelled = (torch.tensor(one, device="cpu") for one in ([20, 18, 15], [5, 4, 3]))
    return trained(Heard(), torch.randn(3, 8, 40), torch.randint(1, 7, (3, 5)), heard, spelled)


class Placed(nn.Module):
    """Positions counted over what is no padding, and distances in buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out, self.bias = (
            nn.Embedding(20, 16), nn.Linear(16, 48), nn.Linear(16, 20), nn.Embedding(8, 2),
        )  # fmt: skip
        self.register_buffer("table", torch.randn(14, 16))

    def forward(self, words: Tensor) -> Tensor:
        kept = words.ne(1).int()
        places = (kept.cumsum(1).type_as(kept) * kept).long() + 1
        x = self.embed(words) * 4 + self.table.index_select(0, places.view(-1)).view(*words.shape, -1)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        at = torch.arange(words.shape[1], device=words.device)
        apart = (at[None] - at[:, None]).abs()
        far = 4 + (apart.clamp(min=1).double().log() / math.log(3)).long().clamp(max=3)
        bias = self.bias(torch.where(apart < 4, apart, far)).permute(2, 0, 1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.out(seen).flatten(0, 1), words.flatten(), ignore_index=1)


@program("sequences")
def words_placed_by_a_mask() -> Made:
    words = torch.randint(20, (3, 9))
    words[0, 7:] = 1
    return trained(Placed(), words)
