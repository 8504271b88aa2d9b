"""Training steps as people write them, with layouts, sizes and settings as they should be, on the device "meta".

Each is a function that returns the step; `WHY` says what stands as low all the same, and why.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from meta_kernels import Autocast
from torch import Tensor, nn

from tracefuse.demo import GPT

Step = Callable[[], object]
BF16 = torch.bfloat16
WILD: dict[str, Callable[[], Step]] = {}


def wild(make: Callable[[], Step]) -> Callable[[], Step]:
    WILD[make.__name__] = make
    return make


def trains(model: Callable[..., Tensor], *inputs: Tensor) -> Step:
    def step() -> None:
        out = model(*inputs)
        (F.mse_loss(out, torch.zeros_like(out)) if out.dim() else out).backward()

    return step


def words(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


@wild
def demo_gpt() -> Step:
    model = GPT(layers=4, width=1024, heads=16, vocab=50_304, length=1024, dropout=0.0).to(BF16)
    return trains(model, words(8, 1024), words(8, 1024))


class Block(nn.Module):
    """nanoGPT's."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.heads, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=self.dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        x = x + F.dropout(self.c_proj(y), self.dropout)
        return x + F.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))), self.dropout)


class NanoGPT(nn.Module):
    def __init__(self, vocab: int, length: int, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width, bias=False), nn.Linear(width, vocab, bias=False)
        self.wte.weight, self.dropout = self.lm_head.weight, dropout

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = F.dropout(self.wte(idx) + self.wpe(pos), self.dropout)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@wild
def nanogpt_with_dropout_under_autocast() -> Step:
    model, idx, targets = NanoGPT(50_304, 1024, 768, 12, 4, 0.1), words(12, 1024), words(12, 1024)

    def step() -> None:
        with Autocast():
            loss = model(idx, targets)
        loss.backward()

    return step


# --- transformers -----------------------------------------------------------------------------------------------------


@wild
def hf_gpt2() -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 50_304, "n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 1024}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **drops, use_cache=False)).to(BF16)
    return of_transformers(model, words(8, 1024), length=1024)


@wild
def hf_llama() -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return of_transformers(LlamaForCausalLM(config).to(BF16), words(4, 2048), length=2048)


@wild
def hf_qwen2() -> Step:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=2, num_attention_heads=16,
        num_key_value_heads=16, max_position_embeddings=2048, use_cache=False, use_sliding_window=False,
    )  # fmt: skip
    return of_transformers(Qwen2ForCausalLM(config).to(BF16), words(4, 2048), length=2048)


@wild
def hf_bert() -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=30_528, hidden_size=1024, intermediate_size=4096, num_hidden_layers=3, num_attention_heads=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return of_transformers(BertForMaskedLM(config).to(BF16), words(32, 512), length=512)


def of_transformers(model: nn.Module, text: Tensor, length: int) -> Step:
    """A step on whole sequences. Without a mask of its own transformers reads the positions back, to find packed ones."""
    mask = torch.zeros(len(text), 1, length, length, dtype=BF16)

    def step() -> None:
        model(input_ids=text, labels=text, attention_mask=mask).loss.backward()

    return step


# --- timm -------------------------------------------------------------------------------------------------------------


def of_timm(name: str, size: int, batch: int) -> Step:
    model = timm().create_model(name, num_classes=1000).to(BF16).to(memory_format=torch.channels_last)
    pictures, labels = torch.empty(batch, 3, size, size, dtype=BF16), words(batch)
    pictures = pictures.to(memory_format=torch.channels_last)

    def step() -> None:
        F.cross_entropy(model(pictures), labels).backward()

    return step


@functools.cache
def timm() -> Any:
    """The package. It imports torchvision for data and for a norm, and its models run without: where there is none, a stand-in
    is there while it is imported."""
    places = ("", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".datasets", ".models")
    names = [f"torchvision{place}" for place in places] if importlib.util.find_spec("torchvision") is None else []
    for name in names:
        sys.modules[name] = MagicMock(__spec__=None, __path__=[], FrozenBatchNorm2d=nn.BatchNorm2d)
    try:
        return importlib.import_module("timm")
    finally:
        for name in names:
            del sys.modules[name]


@wild
def timm_resnet50() -> Step:
    return of_timm("resnet50", 224, 128)


@wild
def timm_convnext() -> Step:
    return of_timm("convnext_tiny", 224, 128)


@wild
def timm_vit() -> Step:
    return of_timm("vit_small_patch16_224", 224, 128)


# --- others -----------------------------------------------------------------------------------------------------------


@wild
def vae() -> Step:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Conv2d(64, 128, 4, 2, 1), nn.SiLU(), nn.Conv2d(128, 256, 4, 2, 1), nn.SiLU()
            )
            self.moments = nn.Conv2d(256, 64, 1)
            self.decoder = nn.Sequential(
                nn.Conv2d(32, 256, 1), nn.SiLU(), nn.ConvTranspose2d(256, 128, 4, 2, 1), nn.SiLU(),
                nn.ConvTranspose2d(128, 64, 4, 2, 1),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            mean, log_variance = self.moments(self.encoder(x)).chunk(2, dim=1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
            return F.mse_loss(self.decoder(z), x) + 1e-3 * divergence

    x = torch.empty(64, 64, 64, 64, dtype=BF16).to(memory_format=torch.channels_last)
    return trains(VAE().to(BF16).to(memory_format=torch.channels_last), x)


@wild
def unet() -> Step:
    class Double(nn.Sequential):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = Double(16, 64), Double(64, 128), Double(128, 256)
            self.up_2, self.up_1 = nn.ConvTranspose2d(256, 128, 2, 2), nn.ConvTranspose2d(128, 64, 2, 2)
            self.join_2, self.join_1, self.out = Double(256, 128), Double(128, 64), nn.Conv2d(64, 16, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.first(x)
            b = self.second(F.max_pool2d(a, 2))
            c = self.third(F.max_pool2d(b, 2))
            d = self.join_2(torch.cat([self.up_2(c), b], dim=1))
            return self.out(self.join_1(torch.cat([self.up_1(d), a], dim=1)))

    x = torch.empty(16, 16, 256, 256, dtype=BF16).to(memory_format=torch.channels_last)
    return trains(UNet().to(BF16).to(memory_format=torch.channels_last), x)


@wild
def gcn() -> Step:
    class GCN(nn.Module):
        """Graph convolutions over an edge list, with the sum over neighbours as `index_add`."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

        def forward(self, x: Tensor, source: Tensor, target: Tensor, norm: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(x)
                x = x + torch.relu(torch.zeros_like(h).index_add(0, target, h[source] * norm))
            return x

    nodes, edges = 131_072, 1_048_576
    norm = torch.empty(edges, 1, dtype=BF16)
    return trains(GCN().to(BF16), torch.empty(nodes, 256, dtype=BF16), words(edges), words(edges), norm)


@wild
def dlrm() -> Step:
    class DLRM(nn.Module):
        """Embedding bags, a dense tower, and the dot products of all pairs."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.EmbeddingBag(1_000_000, 128, mode="sum", sparse=False)
            self.bottom = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 128), nn.ReLU())
            self.top = nn.Sequential(nn.Linear(32 * 32 + 128, 1024), nn.ReLU(), nn.Linear(1024, 8))

        def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
            x = self.bottom(dense)
            rows = F.embedding(ids, self.tables.weight).sum(2)
            every = torch.cat([x[:, None], rows], dim=1)
            pairs = torch.bmm(every, every.transpose(1, 2)).flatten(1)
            return self.top(torch.cat([x, pairs], dim=1))

    return trains(DLRM().to(BF16), torch.empty(8192, 16, dtype=BF16), words(8192, 31, 4))


@wild
def wav2vec() -> Step:
    class Features(nn.Module):
        """Strided convolutions over waveforms, then a transformer's layer."""

        def __init__(self) -> None:
            super().__init__()
            kernels = [(1, 512, 10, 5), (512, 512, 3, 2), (512, 512, 3, 2), (512, 512, 3, 2), (512, 512, 2, 2)]
            self.layers = nn.ModuleList(nn.Conv1d(a, b, k, s, bias=False) for a, b, k, s in kernels)
            self.norm = nn.LayerNorm(512)
            self.encoder = nn.Sequential(*(Block(512, 8, 0.0) for _ in range(2)))

        def forward(self, waves: Tensor) -> Tensor:
            x = waves[:, None]
            for layer in self.layers:
                x = F.gelu(layer(x))
            return self.encoder(self.norm(x.transpose(1, 2)))

    return trains(Features().to(BF16), torch.empty(16, 81_925, dtype=BF16))


@wild
def mixer() -> Step:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(768) for _ in range(2))
            self.over_tokens = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
            self.over_channels = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.over_channels(self.norms[1](x))

    return trains(nn.Sequential(*(Mixer() for _ in range(4))).to(BF16), torch.empty(64, 256, 768, dtype=BF16))


@wild
def lstm_language_model() -> Step:
    class LSTM(nn.Module):
        """cuDNN runs the recurrence; on no device it stands as its own loop, so one step of it is taken."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.cell = nn.Embedding(10_048, 1024), nn.Linear(2048, 4096)
            self.out = nn.Linear(1024, 10_048)

        def forward(self, tokens: Tensor, state: Tensor, memory: Tensor, targets: Tensor) -> Tensor:
            x = self.words(tokens)
            gates = self.cell(torch.cat([x, state], dim=-1))
            i, f, g, o = gates.chunk(4, dim=-1)
            memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
            return F.cross_entropy(self.out(o.sigmoid() * memory.tanh()), targets)

    state = torch.empty(8192, 1024, dtype=BF16)
    return trains(LSTM().to(BF16), words(8192), state, torch.empty_like(state), words(8192))


@wild
def two_towers() -> Step:
    class Towers(nn.Module):
        """Contrastive: pictures and texts, normalised, and the products of all pairs."""

        def __init__(self) -> None:
            super().__init__()
            towers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 512)) for _ in range(2)]
            self.pictures, self.texts = towers

        def forward(self, pictures: Tensor, texts: Tensor, own: Tensor) -> Tensor:
            a, b = F.normalize(self.pictures(pictures), dim=-1), F.normalize(self.texts(texts), dim=-1)
            logits = 100.0 * a @ b.t()
            return (F.cross_entropy(logits, own) + F.cross_entropy(logits.t(), own)) / 2

    pictures = torch.empty(8192, 1024, dtype=BF16)
    return trains(Towers().to(BF16), pictures, torch.empty_like(pictures), words(8192))


@wild
def mlp_of_float32_with_tf32() -> Step:
    layers = [layer for _ in range(4) for layer in (nn.Linear(4096, 4096), nn.ReLU(inplace=True))]
    return trains(nn.Sequential(*layers), torch.empty(8192, 4096))
