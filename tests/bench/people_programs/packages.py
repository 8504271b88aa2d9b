"""Adapters of `peft` on a small Llama, and image models of `timm`."""

from __future__ import annotations

from typing import Any

import torch

from people_programs.language import BATCH, DECODER, pretrained, tokens
from people_programs.made import Made, Program, add, trained

PROJECTIONS = ["q_proj", "v_proj", "down_proj"]


def adapted(name: str, kind: str, **config: Any) -> None:
    """A program: the model frozen, an adapter trained."""

    def make() -> Made:
        import peft

        ids, task = tokens(), peft.TaskType.CAUSAL_LM
        with torch.device(
            "cpu"
        ):  # where some adapters have the generator that they draw from; the trial moves the model
            model = pretrained("LlamaForCausalLM", **DECODER | {"num_key_value_heads": 4})
            adapter = peft.get_peft_model(model, getattr(peft, kind)(task_type=task, **config))
        return trained(adapter.train(), input_ids=ids, labels=ids)

    add(name, Program("adapter", make, "peft"))


adapted("lora with dropout everywhere", "LoraConfig", r=4, lora_dropout=0.1, target_modules="all-linear")
adapted("dora", "LoraConfig", r=4, use_dora=True, target_modules=PROJECTIONS)
adapted(
    "rank-stabilised lora with biases", "LoraConfig", r=4, use_rslora=True, bias="lora_only", target_modules=PROJECTIONS
)
adapted("lora of embeddings", "LoraConfig", r=4, target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])
adapted("ia3", "IA3Config", target_modules=PROJECTIONS, feedforward_modules=["down_proj"])
adapted("adalora", "AdaLoraConfig", init_r=4, target_r=2, tinit=1, tfinal=2, total_step=10, target_modules=PROJECTIONS)
adapted("vera", "VeraConfig", r=4, target_modules=["q_proj", "o_proj"])
adapted("oft", "OFTConfig", oft_block_size=8, r=0, target_modules=PROJECTIONS)
adapted("loha", "LoHaConfig", r=4, target_modules=PROJECTIONS)
adapted("lokr", "LoKrConfig", r=4, target_modules=PROJECTIONS)
adapted("fourier ft", "FourierFTConfig", n_frequency=16, target_modules=["q_proj"])
adapted("householder", "HRAConfig", r=4, target_modules=["q_proj"])
adapted("layer norms alone", "LNTuningConfig", target_modules=["input_layernorm", "norm"])
adapted("vector bank", "VBLoRAConfig", r=4, num_vectors=16, vector_length=8, topk=2, target_modules=["q_proj"])
adapted("random lora", "RandLoraConfig", r=4, target_modules=["q_proj"])
adapted("prefix tuning", "PrefixTuningConfig", num_virtual_tokens=4)
adapted("prompt tuning", "PromptTuningConfig", num_virtual_tokens=4)
adapted("p-tuning", "PromptEncoderConfig", num_virtual_tokens=4, encoder_hidden_size=16)


def pictured(model: str, pixels: int = 64, **options: Any) -> None:
    """A program: classes of images."""

    def make() -> Made:
        import timm

        made = timm.create_model(model, num_classes=10, **options).train()
        return trained(made, torch.randn(BATCH, 3, pixels, pixels))

    add(f"{model} of timm", Program("timm", make, "timm"))


NARROW = {"depth": 2, "embed_dim": 32}

pictured("regnetx_002")
pictured("mobilenetv3_small_050")
pictured("ghostnet_050")
pictured("dla46_c")
pictured("skresnet18")
pictured("eca_resnext26ts")
pictured("mobilevitv2_050")
pictured("edgenext_xx_small")
pictured("coatnet_pico_rw_224", img_size=64)
pictured("deit3_small_patch16_224", img_size=64, num_heads=4, **NARROW)
pictured("beit_base_patch16_224", img_size=64, num_heads=4, **NARROW)
pictured("eva02_tiny_patch14_224", pixels=56, img_size=56, num_heads=4, **NARROW)
pictured("cait_xxs24_224", img_size=64, num_heads=4, **NARROW)
pictured("xcit_nano_12_p16_224", cls_attn_layers=1, **NARROW)
