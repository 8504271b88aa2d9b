"""Eight models that people train, from their configurations in `transformers` and `peft`, each with what it is called with.

They are of the sizes that people train on one GPU: language models on tokens that are their own labels, image models on one
class an image. Nothing is downloaded. In small they have a layer or two, and no dropout, whose masks differ between columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from nets import Net
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OwnLabels(nn.Module):
    """A language model's loss on tokens that are its labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class OneClass(nn.Module):
    """An image model's loss, all images being of one class."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        labels = torch.zeros(images.shape[0], dtype=torch.long, device=images.device)
        return self.model(pixel_values=images, labels=labels).loss


def of_class(name: str, **config: Any) -> nn.Module:
    made = getattr(transformers, name)
    return made(made.config_class(**config))


def gpt(small: bool) -> nn.Module:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 32} if small else {}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0 if small else 0.1)
    model = of_class("GPT2LMHeadModel", use_cache=False, **sizes, **drops)
    model.loss_type = (
        "ForCausalLM"  # else the library warns of it at the first call, which ends the graph before the loss
    )
    return OwnLabels(model)


def bert(small: bool) -> nn.Module:
    tiny = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    drops = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0 if small else 0.1)
    return OwnLabels(of_class("BertForMaskedLM", **drops, **({"vocab_size": 32, **tiny} if small else {})))


def grouped(name: str, small: bool, vocabulary: int, **sizes: Any) -> nn.Module:
    """A model of Llama's kind: `sizes` in full are hidden size, intermediate size, layers, heads and heads of keys."""
    tiny = {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 2, "key_heads": 1, "head_dim": 8}
    of = tiny if small else sizes
    heads = {"num_attention_heads": of.pop("heads"), "num_key_value_heads": of.pop("key_heads")}
    layers = {"num_hidden_layers": of.pop("layers"), "vocab_size": 32 if small else vocabulary}
    return of_class(name, use_cache=False, tie_word_embeddings=True, **heads, **layers, **of)


def llama(small: bool, vocabulary: int = 128_256) -> nn.Module:
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "layers": 16, "heads": 32, "key_heads": 8, "head_dim": 64}
    return OwnLabels(grouped("LlamaForCausalLM", small, vocabulary, **sizes))


def qwen(small: bool) -> nn.Module:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "layers": 28, "heads": 16, "key_heads": 8, "head_dim": 128}
    return OwnLabels(grouped("Qwen3ForCausalLM", small, 151_936, **sizes))


def lora(small: bool) -> nn.Module:
    """Adapters on every projection; in full on a model of 32,000 tokens."""
    model = llama(small, 32_000)
    model.model = get_peft_model(model.model, LoraConfig(r=2 if small else 16, target_modules=PROJECTIONS))
    return model


def vit(small: bool) -> nn.Module:
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    of = {**tiny, "image_size": 16, "patch_size": 8} if small else {"num_labels": 1000}
    return OneClass(of_class("ViTForImageClassification", **of))


def resnet(small: bool) -> nn.Module:
    of = {"embedding_size": 4, "hidden_sizes": [8, 16], "depths": [1, 1]} if small else {"num_labels": 1000}
    return OneClass(of_class("ResNetForImageClassification", **of))


def convnext(small: bool) -> nn.Module:
    tiny = {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}
    base = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3], "num_labels": 1000}
    return OneClass(of_class("ConvNextForImageClassification", **(tiny if small else base)))


def tokens(
    made: Callable[[bool], nn.Module], shape: tuple[int, ...], vocabulary: int, dtype: torch.dtype | None = None
) -> Net:
    return Net(made, shape, (2, 8), autocast=dtype is None, dtype=dtype or torch.float32, vocabulary=(vocabulary, 32))


def images(made: Callable[[bool], nn.Module], count: int, channels_last: bool) -> Net:
    return Net(made, (count, 3, 224, 224), (2, 3, 16, 16), channels_last, autocast=True)


TRAINED = {
    "GPT-124M, autocast, dropout 0.1, 16 x 1024": tokens(gpt, (16, 1024), 50_257),
    "Llama of 1B, bf16, 2 x 2048": tokens(llama, (2, 2048), 128_256, torch.bfloat16),
    "the same with LoRA, 32,000 tokens, 4 x 2048": tokens(lora, (4, 2048), 32_000, torch.bfloat16),
    "BERT-base, autocast, 32 x 512": tokens(bert, (32, 512), 30_522),
    "ViT-B/16, autocast, 128": images(vit, 128, channels_last=False),
    "Qwen3 of 0.6B, bf16, 2 x 1024": tokens(qwen, (2, 1024), 151_936, torch.bfloat16),
    "ResNet-50, channels last, autocast, 256": images(resnet, 256, channels_last=True),
    "ConvNeXt-B, channels last, autocast, 64": images(convnext, 64, channels_last=True),
}
"""By name, as they are shown."""
