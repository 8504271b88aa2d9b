"""Models that people train, from their configurations: captured, replayed, optimised, exported. Nothing is downloaded.

    python tests/bench/models.py --out models.json                    all; float64 on a CPU and of timm, else float32
    python tests/bench/models.py --model llama --model resnet50       some

For each a training step: whether the replay of what was captured is eager's, bit for bit; how far results and gradients are
from it with all passes on, over the largest element of each; whether the exported file checks itself in a process of its
own. Models of packages that are not installed are left out, and the table says so.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from results import environment, parser, write
from torch import Tensor, nn

import tracefuse
from tracefuse.compare import max_abs_difference
from tracefuse.errors import ExportError, TracefuseError
from tracefuse.optimizers.trace import Trace, tensors
from tracefuse.timing import aligned

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2}
NOISE = 1e-5
VOCABULARY, LENGTH, BATCH, PIXELS = 97, 12, 2, 64

Built = tuple[nn.Module, dict[str, Any]]
"""A model, and what it is called with."""


@dataclass
class Row:
    """One model. `difference` is the largest |Δ| of a result or gradient over that output's largest element."""

    model: str
    parameters: int = 0
    forward_ops: int = 0
    backward_ops: int = 0
    ops_after: int = 0
    kernels: int = 0
    capture_s: float = 0.0
    replay: str = ""
    difference: float | None = None
    exported: str = ""
    problem: str = ""


# --- the models -------------------------------------------------------------------------------------------------------


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
    "mlp-mixer": timm("mixer_s32_224", 224, num_blocks=2),
    "detector": detector,
}
PACKAGES = {"resnet50": "timm", "convnext": "timm", "efficientnet": "timm", "swin": "timm", "vit of timm": "timm"}
PACKAGES |= {"mlp-mixer": "timm", "detector": "torch", "llama with LoRA": "peft"}

NOT_IN_FLOAT64 = {"mixtral"}
"""Those whose operators take no float64."""


# --- one model --------------------------------------------------------------------------------------------------------


def try_model(name: str, device: str, dtype: torch.dtype) -> Row:
    row, package = Row(name), PACKAGES.get(name, "transformers")
    if name in NOT_IN_FLOAT64:
        dtype = torch.float32
    elif package == "timm":  # with statistics of so few pixels as here, float32 leaves few digits
        dtype = torch.float64
    if importlib.util.find_spec(package) is None:
        row.problem = f"{package} is not installed"
        return row
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = model.to(device, dtype).train()
    placed = {key: t.to(device, dtype if t.is_floating_point() else t.dtype) for key, t in inputs.items()}
    row.parameters = sum(p.numel() for p in model.parameters())
    try:
        _fill(row, model, placed)
    except TracefuseError as error:
        row.problem = f"{type(error).__name__}: {error}"
    return row


def _fill(row: Row, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    began = time.perf_counter()
    with tracefuse.capture() as capture:
        out = model(**inputs)
        loss = out if isinstance(out, Tensor) else out.loss
        loss.backward()
    forward, backward = capture.trace.split()
    row.capture_s = time.perf_counter() - began
    row.forward_ops, row.backward_ops = forward.op_count, backward.op_count

    expected = _expected(capture, loss)
    replayed = capture.replay()
    unequal = [
        out.of
        for out, value in zip(capture.trace.outputs, replayed, strict=True)
        if not _same(value, expected[out.kind, out.of])
    ]
    row.replay = "bit for bit" if not unequal else f"{len(unequal)} outputs differ, {unequal[0]}"

    variant = capture.optimize()
    row.ops_after, row.kernels = variant.trace.op_count, len(variant.kernels)
    outputs = tracefuse.replay(variant.trace, capture.example_inputs, capture.rng_states)
    # Of a gradient that is zero but for rounding, as of a key's bias, the size is that of the largest one.
    floor = NOISE * max(map(largest, expected.values()))
    found = (
        (out.of, value, expected[out.kind, out.of]) for out, value in zip(variant.trace.outputs, outputs, strict=True)
    )
    row.difference = max(max_abs_difference(of, a, b.detach()) / max(largest(b), floor) for of, a, b in found)
    if not row.difference <= TOLERANCE[coarsest(capture.trace)]:
        row.problem = f"differs by {row.difference:.1e} with all passes on"
    row.exported = _export(variant)


def _expected(capture: tracefuse.Capture, loss: Tensor) -> dict[tuple[str, str], Tensor]:
    """What eager left in the program's own tensors."""
    live = {entry.name: t for entry, t in zip(capture.trace.inputs, capture.live_inputs, strict=True)}
    found: dict[tuple[str, str], Any] = {}
    for out in capture.trace.outputs:
        if out.kind == "result":
            found[out.kind, out.of] = loss.detach()
        else:
            found[out.kind, out.of] = live[out.of].grad if out.kind == "gradient" else live[out.of]
    return found


def _same(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def largest(tensor: Tensor) -> float:
    return tensor.detach().double().abs().max().item() if tensor.numel() else 0.0


def coarsest(trace: Trace) -> torch.dtype:
    """The floating dtype of the trace that rounds most: many models of `transformers` compute norms in float32."""
    dtypes = {t.dtype for node in trace.graph.nodes for t in tensors(node) if t.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _export(variant: tracefuse.Variant) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = variant.export(Path(folder) / "step.py")
        except ExportError as error:
            return f"refused: {error}"
        done = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, check=False, cwd=folder, timeout=300
        )
    if done.returncode == 0:
        return "runs"
    said = [line for line in done.stdout.splitlines() if line.startswith("BAD")] + done.stderr.strip().splitlines()[-3:]
    return f"{'' if done.stderr.startswith('not checked') else 'failed: '}{'; '.join(said)}"


# --- all of them ------------------------------------------------------------------------------------------------------


def table(rows: list[Row]) -> str:
    title = (
        "model",
        "parameters",
        "ops forward + backward",
        "with all passes",
        "kernels",
        "replay",
        "max |Δ| / max",
        "exported",
    )
    cells = [
        (r.model, f"{r.parameters:,}", f"{r.forward_ops} + {r.backward_ops}", str(r.ops_after), str(r.kernels), r.replay,
         "" if r.difference is None else f"{r.difference:.1e}", r.exported[:60] or r.problem[:80])
        for r in rows
    ]  # fmt: skip
    return aligned([title, *cells])


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--model", action="append", choices=MODELS, help="one of them (may be repeated; default: all)")
    given.add_argument("--check", action="store_true", help="fail where one of them is not right")
    options = given.parse_args()
    dtype = torch.float64 if options.device == "cpu" else torch.float32
    names = options.model or (["gpt2", "detector"] if options.small else list(MODELS))
    rows = []
    for name in names:
        rows.append(try_model(name, options.device, dtype))
        print(f"{name}: {rows[-1].problem or rows[-1].replay}, {rows[-1].exported}", flush=True)
    print(table(rows))
    write(
        options.out,
        {"environment": environment(options.device), "dtype": str(dtype), "models": [asdict(r) for r in rows]},
    )
    wrong = [r.model for r in rows if r.problem or r.replay != "bit for bit" or r.exported != "runs"]
    if options.check and wrong:
        raise SystemExit(f"not right: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
