"""The models of `models.py`: small ones of `transformers`, `timm` and `peft`, built from their configurations, and a detector.

Nothing is downloaded. `MODELS` makes each with what it is called with; `PACKAGES` says what must be installed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH, PIXELS = 97, 12, 2, 64

Built = tuple[nn.Module, dict[str, Any]]
"""A model, and what it is called with."""


def text(kind: str, **config: Any) -> Callable[[], Built]:
    """A language model of `transformers` on tokens that are its own labels."""

    def build() -> Built:
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
        return _transformers(kind, vocab_size=VOCABULARY, **config), {"input_ids": ids, "labels": ids}

    return build


def _transformers(kind: str, **config: Any) -> nn.Module:
    import transformers

    model = getattr(transformers, kind)
    return model(model.config_class(**config))


def vit() -> Built:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = _transformers("ViTForImageClassification", image_size=32, patch_size=8, **small)
    return model, {"pixel_values": torch.randn(BATCH, 3, 32, 32), "labels": torch.randint(2, (BATCH,))}


def whisper() -> Built:
    small = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16, "num_mel_bins": 8}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = _transformers(
        "WhisperForConditionalGeneration", vocab_size=VOCABULARY, use_cache=False, **small, **sizes, **ends
    )
    labels = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return model, {"input_features": torch.randn(BATCH, 8, 32), "labels": labels}


def lora() -> Built:
    from peft import LoraConfig, get_peft_model

    model, inputs = MODELS["llama"]()
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)), inputs


def timm(name: str, pixels: int = PIXELS, **options: Any) -> Callable[[], Built]:
    """An image model of `timm` with ten classes and a cross-entropy."""

    def build() -> Built:
        import timm as package

        model = package.create_model(name, pretrained=False, num_classes=10, **options)
        return Classified(model), {
            "images": torch.randn(BATCH, 3, pixels, pixels),
            "labels": torch.randint(10, (BATCH,)),
        }

    return build


class Classified(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(images), labels)


class Detector(nn.Module):
    """Detection as people write it: boxes per place, the likely ones kept (their number depends on the data), those that
    overlap a likelier one suppressed in a Python loop, losses over what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()
        )
        self.score, self.box = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        features = self.body(images)
        scores = self.score(features).flatten(1).sigmoid()
        boxes = self.box(features).flatten(2).transpose(1, 2)
        losses = []
        for score, box, target in zip(scores, boxes, targets, strict=True):
            likely = score > score.mean()
            score, box = score[likely], torch.cat((box[likely, :2], box[likely, 2:].exp()), -1)
            kept = self.suppressed(box.detach(), score.detach())
            losses.append(F.smooth_l1_loss(box[kept], target.expand(len(kept), 4)) - score[kept].log().mean())
        return torch.stack(losses).sum()

    def suppressed(self, boxes: Tensor, scores: Tensor) -> list[int]:
        kept: list[int] = []
        for at in scores.argsort(descending=True).tolist():
            if all((boxes[at] - boxes[other]).abs().amax() > 0.2 for other in kept):
                kept.append(at)
        return kept


def detector() -> Built:
    return Detector(), {"images": torch.randn(BATCH, 3, 32, 32), "targets": torch.rand(BATCH, 4)}


_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "use_cache": False,
}
_ENDS = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}

MODELS: dict[str, Callable[[], Built]] = {
    "llama": text("LlamaForCausalLM", num_key_value_heads=2, **_LLAMA),
    "gpt2": text("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, use_cache=False),
    "bert": text("BertForMaskedLM", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
    "t5": text(
        "T5ForConditionalGeneration", d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, use_cache=False, **_ENDS
    ),
    "vit": vit,
    "whisper": whisper,
    "mixtral": text("MixtralForCausalLM", num_key_value_heads=2, num_local_experts=4, **_LLAMA),
    "mamba": text("MambaForCausalLM", hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False),
    "llama with LoRA": lora,
    "resnet50": timm("resnet50"),
    "convnext": timm("convnext_atto"),
    "efficientnet": timm("efficientnet_b0"),
    "swin": timm("swin_tiny_patch4_window7_224", 224, embed_dim=24, depths=(1, 1, 2, 1)),
    "vit of timm": timm("vit_tiny_patch16_224", 224, depth=2),
    "mlp-mixer": timm("mixer_s32_224", 224),
    "detector": detector,
}
PACKAGES = {"resnet50": "timm", "convnext": "timm", "efficientnet": "timm", "swin": "timm", "vit of timm": "timm"}
PACKAGES |= {"mlp-mixer": "timm", "detector": "torch", "llama with LoRA": "peft"}

NOT_IN_FLOAT64 = {"mixtral"}
"""Those whose operators take no float64."""
