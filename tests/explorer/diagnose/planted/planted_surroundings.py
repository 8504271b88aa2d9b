"""Mistakes around the model: what the host reads, what moves between devices, and modes that slow."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from planting import Step, planted, trains
from torch import Tensor, nn

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def logged(log: Callable[[Tensor], object]) -> Step:
    model, x = Net(), torch.randn(256, 64)

    def step() -> None:
        loss = model(x).square().mean()
        loss.backward()
        log(loss)

    return step


@planted("host-sync", "read it once every many steps", device="cpu")
def loss_read_in_each_step(mistake: bool) -> Step:
    losses: list[object] = []

    def log(loss: Tensor) -> None:
        losses.append(loss.item() if mistake else loss.detach())  # mistake

    return logged(log)


@planted("host-sync", "read it once every many steps", device="cpu")
def loss_printed_in_each_step(mistake: bool) -> Step:
    def log(loss: Tensor) -> None:
        if mistake:
            print(f"loss {loss}")  # mistake

    return logged(log)


@planted("host-sync", "torch.where", device="cpu")
def rows_picked_by_nonzero(mistake: bool) -> Step:
    class Picks(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            keep = x[:, 0] > 0
            if mistake:
                return h[keep.nonzero()[:, 0]]  # mistake
            return torch.where(keep[:, None], h, 0.0)

    return trains(Picks(), torch.randn(256, 64))


@planted("host-sync", "masked_fill", device="cpu")
def rows_picked_by_a_mask(mistake: bool) -> Step:
    class Picks(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            keep = x[:, 0] > 0
            if mistake:
                return h[keep]  # mistake
            return h.masked_fill(~keep[:, None], 0.0)

    return trains(Picks(), torch.randn(256, 64))


@planted("host-sync", "torch.where instead of if", device="cpu")
def a_branch_on_a_value(mistake: bool) -> Step:
    class Clips(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if not mistake:
                return h * torch.where(h.abs().max() > 100, 0.5, 1.0)
            if h.abs().max() > 100:  # mistake
                h = h * 0.5
            return h

    return trains(Clips(), torch.randn(256, 64))


# --- devices ----------------------------------------------------------------------------------------------------------


@planted("pageable-copy", "pinned memory", moves=True)
def a_batch_from_pageable_memory(mistake: bool) -> Step:
    model, batch = nn.Linear(1024, 1024).to(BF16), torch.empty(4096, 1024)

    def step() -> None:
        x = batch.to("meta", BF16)  # mistake
        model(x).float().square().mean().backward()

    return step


@planted("cpu-leaf", "on the GPU", moves=True)
def a_leaf_left_on_the_cpu(mistake: bool) -> Step:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.empty(4096, 1024, dtype=torch.float32 if mistake else BF16))
            self.read = nn.Linear(1024, 1024).to(BF16)

        def forward(self, x: Tensor) -> Tensor:
            prompt = self.prompt
            if mistake:
                prompt = prompt.to("meta", BF16)  # mistake
            return self.read(x + prompt)

    return trains(Prompted(), torch.empty(8, 4096, 1024, dtype=BF16))


@planted("moved-each-step", "keep it on the device", moves=True)
def a_table_left_on_the_cpu(mistake: bool) -> Step:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.Linear(1024, 1024).to(BF16)
            self.register_buffer("table", torch.empty(4096, 1024, dtype=torch.float32 if mistake else BF16))

        def forward(self, x: Tensor) -> Tensor:
            table = self.table
            if mistake:
                table = table.to("meta", BF16)  # mistake
            return self.read(x + table)

    return trains(Model(), torch.empty(8, 4096, 1024, dtype=BF16))


# --- modes ------------------------------------------------------------------------------------------------------------


@planted("anomaly-mode", "set_detect_anomaly(False)", device="cpu")
def anomaly_mode(mistake: bool) -> Step:
    if mistake:
        torch.autograd.set_detect_anomaly(True)  # mistake
    return logged(lambda loss: None)


@planted("deterministic-mode", "use_deterministic_algorithms(False)", device="cpu")
def deterministic_mode(mistake: bool) -> Step:
    if mistake:
        torch.use_deterministic_algorithms(True)  # mistake
    return logged(lambda loss: None)


@planted("launch-blocking", "unset CUDA_LAUNCH_BLOCKING", device="cpu")
def launches_that_block(mistake: bool) -> Step:
    if mistake:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # mistake
    return logged(lambda loss: None)


@planted("cudnn-benchmark-off", "cudnn.benchmark = True", environment={"cudnn benchmark": "off"})
def algorithms_that_cudnn_guesses(mistake: bool) -> Step:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Conv2d(64, 64, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.turn(x))  # mistake

    model = Pictures().to(BF16).to(memory_format=torch.channels_last)
    return trains(model, torch.empty(64, 64, 56, 56, dtype=BF16).to(memory_format=torch.channels_last))


# --- distributed ------------------------------------------------------------------------------------------------------


@planted("find-unused-parameters", "without `find_unused_parameters=True`", device="cpu")
def every_parameter_is_looked_for(mistake: bool) -> Step:
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=mistake)  # mistake
    x = torch.randn(256, 64)

    def step() -> None:
        with model.no_sync():  # all but the last of the micro-batches: a trace holds no collectives
            model(x).square().mean().backward()

    return step
