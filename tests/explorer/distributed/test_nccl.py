"""Steps of two ranks on two GPUs: captured without harm, replayed alone and together, with their passes, and compiled.

`nccl_steps.py` says what is looked at; the same on gloo shows on a CPU that these tests ask what they should.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import needs_gloo, torchrun, two_gpus

SCRIPT = Path(__file__).with_name("nccl_steps.py").read_text()

STEPS = {
    "losses and parameters as without us", "the update is a part", "check", "exchanged", "saved", "all passes",
}  # fmt: skip
REPLAYS = {"a replay gives autograd's gradients", "together"}
MOVED = {f"overlap {choice}" for choice in ({}, {"bucket_mb": 0.3}, {"prefetch": 1, "second_group": True})}
LOOKED_AT = {
    "ddp": STEPS | REPLAYS | MOVED | {"overlap modelled"},
    "ddp, gpt": STEPS | {"overlap modelled"},
    "fsdp": STEPS | REPLAYS | MOVED | {"overlap modelled"},
    "fsdp, bf16": STEPS | REPLAYS | MOVED | {"overlap modelled"},
    "fsdp, gpt": STEPS | {"overlap modelled"},
    "tensor parallel": STEPS | REPLAYS,
    "sequence parallel": STEPS | REPLAYS,
    "pipeline": {"gradients as without us", "a replay gives them"},
    "backend": {
        f"{how} {name}"
        for how in ("inside", "around", "before", "torch's layers before")
        for name in ("DDP", "fully_shard")
    },
}
MEASURED = {"ddp", "fsdp, bf16"}
"""On a GPU these are measured too."""


def found(folder: Path, backend: str, name: str) -> dict[tuple[int, str], dict[str, Any]]:
    done = torchrun(SCRIPT, 2, folder, backend, name)
    print(done.stdout[-20_000:], done.stderr[-6000:])
    lines = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    said = [(int(line[0]), json.loads(line[2:])) for line in lines]
    assert said, done.stderr[-4000:]
    return {(rank, one["about"]): one for rank, one in said}


def check(folder: Path, backend: str, name: str) -> None:
    all_ = found(folder, backend, name)
    wrong = {key: one["said"] for key, one in all_.items() if not one["holds"]}
    assert not wrong
    more = {"through"} | ({"measured"} if backend == "nccl" and name in MEASURED else set())
    assert set(all_) == {(rank, about) for rank in (0, 1) for about in LOOKED_AT[name] | more}


@pytest.mark.parametrize("name", [pytest.param(name, marks=two_gpus) for name in LOOKED_AT])
def test_two_gpus(tmp_path: Path, name: str) -> None:
    check(tmp_path, "nccl", name)


@pytest.mark.slow
@needs_gloo
@pytest.mark.parametrize("name", ["ddp, gpt", "fsdp, bf16", "backend"])
def test_two_processes_without_a_gpu(tmp_path: Path, name: str) -> None:
    check(tmp_path, "gloo", name)
