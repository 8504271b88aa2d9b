"""Ranges and frames whose names are causes of idle time, as torch, Lightning and people write them, and others."""

from __future__ import annotations

import pytest

from tracefuse.timeline.named import CHECKPOINT, LOADER, LOGGING, cause_of_frame, cause_of_range

RANGES = {
    "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__": LOADER,
    "enumerate(DataPipe)#ShufflerIterDataPipe": LOADER,
    "[pl][profile][_TrainingEpochLoop].train_dataloader_next": LOADER,
    "## data_load ##": LOADER,
    "get_batch": LOADER,
    "load next batch": LOADER,
    "save_checkpoint": CHECKPOINT,
    "[pl][profile][Callback]ModelCheckpoint{'monitor': None}.on_train_batch_end": CHECKPOINT,
    "save model": CHECKPOINT,
    "[pl][profile][Callback]TQDMProgressBar.on_train_batch_end": LOGGING,
    "log_metrics": LOGGING,
    "wandb.log": LOGGING,
    "ProfilerStep#3": "",
    "Optimizer.step#AdamW.step": "",
    "[pl][profile]run_training_batch": "",
    "[pl][profile][Strategy]SingleDeviceStrategy.backward": "",
    "activation_checkpoint block 3": "",
    "CheckpointFunction": "",
    "log_softmax": "",
    "logits": "",
    "next_batch_norm": "",
    "download": "",
}
FRAMES = {
    "torch/utils/data/dataloader.py(733): __next__": LOADER,
    "/usr/lib/python3/dist-packages/torch/serialization.py(944): save": CHECKPOINT,
    "torch/distributed/checkpoint/state_dict_saver.py(66): save": CHECKPOINT,
    "transformers/modeling_utils.py(2500): save_pretrained": CHECKPOINT,
    "logging/__init__.py(1500): info": LOGGING,
    "wandb/sdk/wandb_run.py(450): log": LOGGING,
    "<built-in function print>": LOGGING,
    "torch/utils/data/dataloader.py(255): __init__": "",
    "torch/serialization.py(1250): load": "",
    "torch/utils/checkpoint.py(200): checkpoint": "",
    "logging/__init__.py(2081): getLogger": "",
    "train.py(12): save": "",
}


@pytest.mark.parametrize(("name", "cause"), RANGES.items())
def test_a_range_is_a_cause_by_its_name(name: str, cause: str) -> None:
    assert cause_of_range(name) == cause


@pytest.mark.parametrize(("name", "cause"), FRAMES.items())
def test_a_frame_is_a_cause_by_its_file_and_function(name: str, cause: str) -> None:
    assert cause_of_frame(name) == cause
