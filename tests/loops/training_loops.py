"""Training loops as people have them: whoever owns the loop, `run(steps)` trains and says what became of losses and weights.

    run = LOOPS["nanoGPT"]("cpu")
    with tracefuse.capture_step(n=3) as c:
        run(5)

All are tiny, random and seeded; nothing is downloaded. One whose library is not there raises `ImportError` when it is made.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracefuse.demo import GPT, batch


class Trained(NamedTuple):
    """What a run left: its losses, and copies of the weights."""

    losses: list[float]
    weights: list[Tensor]

    def is_same(self, other: Trained) -> bool:
        return self.losses == other.losses and all(map(torch.equal, self.weights, other.weights))


Run = Callable[[int], Trained]


def _left(losses: list[float], *models: nn.Module) -> Trained:
    return Trained(losses, [p.detach().clone() for model in models for p in model.parameters()])


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


class Tokens(torch.utils.data.Dataset):
    """Sequences of tokens, the same for each index."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(device: str, callbacks: tuple[Any, ...] = ()) -> Run:
    """transformers' Trainer, LoRA of peft on a random Llama, two micro-batches."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    _forget_accelerators()
    _seed()
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, num_key_value_heads=2, **shape))
    model = get_peft_model(llama, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    def run(steps: int) -> Trained:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                logging_steps=1,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                use_cpu=device == "cpu",
            )
            made = Trainer(model=model, args=arguments, train_dataset=Tokens(), callbacks=list(callbacks))
            with contextlib.redirect_stdout(None):
                made.train()
        return _left([one["loss"] for one in made.state.log_history if "loss" in one], model)

    return run


def accelerated(device: str) -> Run:
    """A loop with accelerate: it accumulates, clips and schedules, and fetches a batch ahead."""
    from accelerate import Accelerator

    _forget_accelerators()
    _seed()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=device == "cpu")
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    of_plain = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model, optimizer, loader, scheduler = accelerator.prepare(
        plain,
        of_plain,
        torch.utils.data.DataLoader(data, batch_size=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(of_plain, 16),
    )

    def run(steps: int) -> Trained:
        losses: list[float] = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(loss.item())
            if len(losses) == steps:
                break
        return _left(losses, model)

    return run


def _forget_accelerators() -> None:
    """accelerate keeps the device of a process's first loop, and whether it accumulates."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def timm(device: str) -> Run:
    """timm's training: its optimizer, scheduler, mixup and average of the weights."""
    import numpy
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3

    _seed()
    numpy.random.seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).to(device)
    optimizer = create_optimizer_v2(model, "lamb", lr=0.01, weight_decay=0.05)
    scheduler = CosineLRScheduler(optimizer, t_initial=16, warmup_t=2, t_in_epochs=False)
    mixup = Mixup(mixup_alpha=0.2, num_classes=4)
    average, criterion = ModelEmaV3(model, decay=0.9), SoftTargetCrossEntropy()

    def run(steps: int) -> Trained:
        losses: list[float] = []
        for step in range(steps):
            x, target = mixup(torch.randn(4, 3, 8, 8).to(device), torch.randint(0, 4, (4,)).to(device))
            loss = criterion(model(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update(model, step=step)
            scheduler.step_update(num_updates=step + 1)
            losses.append(loss.item())
        return _left(losses, model, average)

    return run


def gan(device: str) -> Run:
    """A discriminator and a generator in turn, each with an optimizer."""
    _seed()
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)).to(device)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(device)
    of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    of_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))

    def run(steps: int) -> Trained:
        losses: list[float] = []
        for _ in range(steps):
            real, noise = torch.randn(16, 8, device=device), torch.randn(16, 4, device=device)
            of_critic.zero_grad()
            made = generator(noise)
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()
            loss.backward()
            of_critic.step()
            of_generator.zero_grad()
            fooled = F.softplus(-critic(made)).mean()
            fooled.backward()
            of_generator.step()
            losses += [loss.item(), fooled.item()]
        return _left(losses, generator, critic)

    return run


def ppo(device: str) -> Run:
    """Proximal policy optimisation of a walk to zero: a rollout, then epochs of minibatches, an update each."""
    _seed()
    policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3)).to(device)
    value = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    parameters = [*policy.parameters(), *value.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=3e-3)

    @torch.no_grad()
    def rollout() -> tuple[Tensor, ...]:
        at, seen = torch.randn(16, 2, device=device), []
        for _ in range(4):
            choices = torch.distributions.Categorical(logits=policy(at))
            action = choices.sample()
            after = at + 0.1 * (action - 1)[:, None]
            seen.append((at, action, choices.log_prob(action), -after.norm(dim=1)))
            at = after
        states, actions, odds, rewards = map(torch.cat, zip(*seen, strict=True))
        advantage = rewards - value(states)[:, 0]
        return states, actions, odds, rewards, (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    def minibatches() -> Iterator[tuple[Tensor, ...]]:
        while True:
            seen = rollout()
            for _ in range(2):
                for rows in torch.randperm(64, device=device).split(32):
                    yield tuple(one[rows] for one in seen)

    def run(steps: int) -> Trained:
        losses: list[float] = []
        for _, (states, actions, odds, rewards, advantage) in zip(range(steps), minibatches(), strict=False):
            choices = torch.distributions.Categorical(logits=policy(states))
            ratio = (choices.log_prob(actions) - odds).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = -gain + 0.5 * F.mse_loss(value(states)[:, 0], rewards) - 0.01 * choices.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            losses.append(loss.item())
        return _left(losses, policy, value)

    return run


def nanogpt(device: str) -> Run:
    """Four micro-batches, a scaler, clipping and a schedule, as nanoGPT trains."""
    _seed()
    model = GPT(layers=2, width=32, heads=2, vocab=64, length=16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=device == "cuda")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    scaler, dtype = torch.amp.GradScaler(device), torch.float16 if device == "cuda" else torch.bfloat16

    def run(steps: int) -> Trained:
        losses: list[float] = []
        x, y = batch(64, 2, 16, device)
        for _ in range(steps):
            for _ in range(4):
                with torch.autocast(device, dtype):
                    loss = model(x, y) / 4
                x, y = batch(64, 2, 16, device)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            losses.append(loss.item() * 4)
        return _left(losses, model)

    return run


def lightning(device: str, callbacks: tuple[Any, ...] = ()) -> Run:
    """Lightning's `fit`, whose optimizer is given the step as a closure."""
    import logging

    import lightning as package

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _seed()

    class Model(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.head, self.losses = nn.Linear(8, 16), nn.Linear(16, 4), []

        def training_step(self, given: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = F.cross_entropy(self.head(self.encoder(given[0]).relu()), given[1])
            self.losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16),
                    "interval": "step",
                },
            }

    model = Model()
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))

    def run(steps: int) -> Trained:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            trainer = package.Trainer(
                max_steps=steps,
                accelerator="gpu" if device == "cuda" else "cpu",
                devices=1,
                default_root_dir=folder,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                accumulate_grad_batches=2,
                gradient_clip_val=1.0,
                callbacks=list(callbacks),
            )
            trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
        return _left([loss.item() for loss in model.losses], model.cpu())

    return run


LOOPS: dict[str, Callable[[str], Run]] = {
    "HF Trainer, LoRA": trainer,
    "accelerate": accelerated,
    "timm": timm,
    "GAN": gan,
    "PPO": ppo,
    "nanoGPT": nanogpt,
    "Lightning": lightning,
}
