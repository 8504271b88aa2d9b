"""Models of `transformers` that see and read, or describe what they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from people_programs.language import BATCH, DECODER, LENGTH, SIZES, VOCABULARY, pretrained, tokens
from people_programs.made import Made, trained
from people_programs.vision import PATCHED, images, takes

TEXT = SIZES | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _pairs(kind: str, **config: Any) -> Callable[[], Made]:
    """Images beside texts, contrasted with each other."""

    def make() -> Made:
        model = pretrained(kind, text_config=TEXT, vision_config=PATCHED, **config)
        return trained(model, input_ids=tokens(), pixel_values=images(), return_loss=True)

    return make


def _captions(kind: str, **config: Any) -> Callable[[], Made]:
    def make() -> Made:
        ids = tokens()
        model = pretrained(kind, text_config=TEXT | {"encoder_hidden_size": 32}, vision_config=PATCHED, **config)
        return trained(model, input_ids=ids, pixel_values=images(), labels=ids)

    return make


def _vilt() -> Made:
    model = pretrained(
        "ViltForQuestionAnswering",
        num_labels=3,
        max_image_length=16,
        type_vocab_size=2,
        modality_type_vocab_size=2,
        **SIZES | PATCHED,
    )
    return trained(model, input_ids=tokens(), pixel_values=images(), labels=torch.rand(BATCH, 3))


def _visual_bert() -> Made:
    model = pretrained("VisualBertForPreTraining", visual_embedding_dim=16, **SIZES)
    labels = torch.randint(VOCABULARY, (BATCH, LENGTH + 4))
    return trained(
        model,
        input_ids=tokens(),
        visual_embeds=torch.randn(BATCH, 4, 16),
        labels=labels,
        attention_mask=torch.ones(BATCH, LENGTH),
        visual_attention_mask=torch.ones(BATCH, 4),
    )


def _described() -> Made:
    import transformers as t

    words = t.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4)
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(t.ViTConfig(**PATCHED), words)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return trained(t.VisionEncoderDecoderModel(config).train(), pixel_values=images(), labels=tokens())


def _llava() -> Made:
    import transformers as t

    vision = t.CLIPVisionConfig(**PATCHED)
    config = t.LlavaConfig(
        vision_config=vision,
        text_config=t.LlamaConfig(**DECODER),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    ids = torch.cat([torch.full((BATCH, 16), VOCABULARY - 1), tokens().clamp_max(VOCABULARY - 2)], 1)
    return trained(t.LlavaForConditionalGeneration(config).train(), input_ids=ids, pixel_values=images(), labels=ids)


takes("clip", _pairs("CLIPModel", projection_dim=16))
takes("siglip", _pairs("SiglipModel"))
takes("chinese clip", _pairs("ChineseCLIPModel", projection_dim=16))
takes("altclip", _pairs("AltCLIPModel", projection_dim=16))
takes("blip", _captions("BlipForConditionalGeneration", projection_dim=16))
takes(
    "git",
    lambda: trained(
        pretrained("GitForCausalLM", vision_config=PATCHED, **SIZES),
        input_ids=(ids := tokens()),
        pixel_values=images(),
        labels=ids,
    ),
)
takes("vilt", _vilt)
takes("visual bert", _visual_bert)
takes("images described", _described)
takes("llava", _llava)
