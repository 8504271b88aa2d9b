"""Models of `transformers` that see, and that see and read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from people_programs.language import BATCH, pretrained
from people_programs.made import Made, Program, add, trained

PATCHED: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def images(pixels: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.randn(BATCH, channels, pixels, pixels)


def sees(name: str, kind: str, pixels: int = 32, **config: Any) -> None:
    """A program: a class for each image."""

    def make() -> Made:
        labels = torch.randint(3, (BATCH,))
        return trained(pretrained(kind, num_labels=3, **config), pixel_values=images(pixels), labels=labels)

    add(name, Program("vision", make, "transformers"))


def takes(name: str, make: Callable[[], Made]) -> None:
    add(name, Program("vision", make, "transformers"))


sees("beit", "BeitForImageClassification", use_relative_position_bias=True, layer_scale_init_value=0.1, **PATCHED)
sees("deit", "DeiTForImageClassification", **PATCHED)
sees("dinov2 with registers", "Dinov2WithRegistersForImageClassification", num_register_tokens=2, **PATCHED)
sees(
    "swin",
    "SwinForImageClassification",
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[1, 1],
    num_heads=[2, 4],
    window_size=4,
)
sees(
    "swin v2",
    "Swinv2ForImageClassification",
    image_size=32,
    patch_size=4,
    embed_dim=16,
    depths=[2, 1],
    num_heads=[2, 4],
    window_size=4,
)
sees("convnext v2", "ConvNextV2ForImageClassification", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2)
sees("regnet", "RegNetForImageClassification", embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], groups_width=8)
sees(
    "segformer",
    "SegformerForImageClassification",
    num_encoder_blocks=2,
    hidden_sizes=[16, 32],
    depths=[1, 1],
    sr_ratios=[2, 1],
    num_attention_heads=[1, 2],
    patch_sizes=[7, 3],
    strides=[4, 2],
    mlp_ratios=[2, 2],
    decoder_hidden_size=16,
)
sees(
    "mobilevit",
    "MobileViTForImageClassification",
    image_size=32,
    hidden_sizes=[24, 32, 40],
    neck_hidden_sizes=[8, 12, 16, 20, 24, 28, 32],
    num_attention_heads=2,
)
sees("mobilenet v2", "MobileNetV2ForImageClassification", image_size=32, depth_multiplier=0.25)
sees(
    "efficientnet of transformers",
    "EfficientNetForImageClassification",
    image_size=32,
    width_coefficient=0.25,
    depth_coefficient=0.1,
    hidden_dim=320,
)
sees("poolformer", "PoolFormerForImageClassification", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1])
sees(
    "pvt v2",
    "PvtV2ForImageClassification",
    image_size=32,
    hidden_sizes=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 3, 4],
)
sees(
    "levit",
    "LevitForImageClassification",
    image_size=32,
    hidden_sizes=[16, 24, 32],
    num_attention_heads=[2, 2, 4],
    depths=[1, 1, 1],
    key_dim=[8, 8, 8],
    down_ops=[["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
    kernel_size=3,
    stride=2,
)
sees(
    "focalnet",
    "FocalNetForImageClassification",
    image_size=32,
    patch_size=4,
    embed_dim=16,
    hidden_sizes=[16, 32],
    depths=[1, 1],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
sees("bit", "BitForImageClassification", embedding_size=16, hidden_sizes=[32, 32], depths=[1, 1], num_groups=8)
sees(
    "swiftformer",
    "SwiftFormerForImageClassification",
    image_size=64,
    pixels=64,
    embed_dims=[8, 16, 24, 32],
    depths=[1, 1, 1, 1],
)
sees(
    "hiera",
    "HieraForImageClassification",
    image_size=[32, 32],
    patch_size=[7, 7],
    patch_stride=[4, 4],
    embed_dim=8,
    depths=[1, 1],
    num_heads=[1, 2],
    embed_dim_multiplier=2.0,
    num_query_pool=1,
    query_stride=[2, 2],
    masked_unit_size=[4, 4],
    masked_unit_attention=[True, False],
)
sees(
    "perceiver of images",
    "PerceiverForImageClassificationLearned",
    image_size=8,
    pixels=8,
    num_latents=6,
    d_latents=32,
    num_blocks=1,
    num_self_attends_per_block=1,
    num_self_attention_heads=4,
    num_cross_attention_heads=1,
    num_channels=3,
)


def _masked_autoencoder() -> Made:
    small = {
        "decoder_num_attention_heads": 4,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 1,
        "decoder_intermediate_size": 32,
    }
    return trained(pretrained("ViTMAEForPreTraining", **PATCHED, **small), pixel_values=images())


def _masked_image() -> Made:
    model = pretrained("ViTForMaskedImageModeling", encoder_stride=8, **PATCHED)
    return trained(model, pixel_values=images(), bool_masked_pos=torch.rand(BATCH, 16) < 0.5)


def _segments() -> Made:
    stages = {
        "num_encoder_blocks": 2,
        "hidden_sizes": [16, 32],
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "num_attention_heads": [1, 2],
    }
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
    model = pretrained("SegformerForSemanticSegmentation", num_labels=4, **stages, **more)
    return trained(model, pixel_values=images(), labels=torch.randint(4, (BATCH, 32, 32)))


def _depth() -> Made:
    model = pretrained(
        "GLPNForDepthEstimation",
        num_encoder_blocks=2,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        sr_ratios=[2, 1],
        num_attention_heads=[1, 2],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    )
    return trained(model, pixel_values=images())


def _yolos() -> Made:
    model = pretrained("YolosModel", **PATCHED | {"image_size": [32, 32]}, num_detection_tokens=5)
    return trained(model, pixel_values=images())


def _superresolution() -> Made:
    model = pretrained(
        "Swin2SRForImageSuperResolution",
        image_size=16,
        patch_size=1,
        embed_dim=16,
        depths=[1],
        num_heads=[2],
        window_size=4,
        upscale=2,
    )
    return trained(model, pixel_values=images(16))


def _video() -> Made:
    model = pretrained("VideoMAEForVideoClassification", num_labels=3, num_frames=4, tubelet_size=2, **PATCHED)
    return trained(model, pixel_values=torch.randn(BATCH, 4, 3, 32, 32), labels=torch.randint(3, (BATCH,)))


def _timesformer() -> Made:
    model = pretrained("TimesformerForVideoClassification", num_labels=3, num_frames=2, **PATCHED)
    return trained(model, pixel_values=torch.randn(BATCH, 2, 3, 32, 32), labels=torch.randint(3, (BATCH,)))


takes("masked autoencoder", _masked_autoencoder)
takes("vit behind a mask", _masked_image)
takes("segformer that segments", _segments)
takes("glpn", _depth)
takes("yolos", _yolos)
takes("swin2sr", _superresolution)
takes("video masked autoencoder", _video)
takes("timesformer", _timesformer)
