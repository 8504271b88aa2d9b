"""What ranges and frames of Python say by their names of why the host launches nothing: it loads, saves, or logs.

A range is what `record_function` or NVTX named: DataLoader's `enumerate(DataLoader)#…__next__`, Lightning's
`[pl][profile]…`, one of the user's own. A frame is `torch/serialization.py(943): save`, where Python stacks were recorded.
Names as torch 2.11 to 2.15, Lightning 2.5, wandb and tensorboard have them.
"""

from __future__ import annotations

import re

LOADER, CHECKPOINT, LOGGING = "data loading", "checkpoint", "logging"

_NOT_A_CHECKPOINT = re.compile(r"(?i)activation|recompute|CheckpointFunction|gradient.?checkpoint")

_RANGES = (
    (LOADER, re.compile(r"enumerate\(Data(Loader|Pipe)\)|DataLoaderIter|(?i:"
                        r"dataloader_next|\bdata[ _.-]?load|\b(load|fetch|get|next)[ _.-]?(next[ _.-]?)?(batch|data)\b"
                        r"|\bbatch[ _.-]?load)")),
    (CHECKPOINT, re.compile(r"(?i)checkpoint|\bckpt\b|\bsave[ _.-](model|state|weights)|save_pretrained|torch\.save")),
    (LOGGING, re.compile(r"(?i)\blog(s|ging|ger|_metrics|_dict)?\b|\[Callback\].*(Logger|ProgressBar)|wandb|tensorboard"
                         r"|SummaryWriter|mlflow|\bprint\b")),
)  # fmt: skip

_FRAMES = (
    (LOADER, re.compile(r"(^|/)torch/utils/data/dataloader\.py\(\d+\): (__next__|_next_data)$")),
    (CHECKPOINT, re.compile(r"(^|/)torch/serialization\.py\(\d+\): save$|(^|/)torch/distributed/checkpoint/.*: save$"
                            r"|(^|/)safetensors/torch\.py\(\d+\): (save_file|save)$|: save_pretrained$")),
    (LOGGING, re.compile(r"(^|/)logging/__init__\.py\(\d+\): (debug|info|warning|error|critical|exception|log|_log|handle)$"
                         r"|(^|/)(wandb/|torch/utils/tensorboard/|tensorboardX?/|mlflow/|tqdm/)"
                         r"|^<built-in (method|function) print>")),
)  # fmt: skip


def cause_of_range(name: str) -> str:
    """The cause of idle time that a range is by its name; "" for any other."""
    return _cause(_RANGES, name)


def cause_of_frame(name: str) -> str:
    """The same of a frame of Python."""
    return _cause(_FRAMES, name)


def _cause(rules: tuple[tuple[str, re.Pattern[str]], ...], name: str) -> str:
    found = next((cause for cause, names in rules if names.search(name)), "")
    return "" if found == CHECKPOINT and _NOT_A_CHECKPOINT.search(name) else found
