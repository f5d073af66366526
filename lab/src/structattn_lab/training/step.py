"""One optimiser step: the learning rate, this process's share of the batch, gradients in as many passes as
fit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from structattn.seeds import derive_seed
from structattn_lab.settings.schedule import learning_rate_at
from structattn_lab.tasks.base import Batch
from structattn_lab.training.run import TrainingRun


def train_step(run: TrainingRun) -> tuple[Tensor, float]:
    """One optimiser step; returns the loss, still on its device, and the learning rate."""
    step, config, accelerator = run.state.step, run.config, run.accelerator
    # Dropout is a function of (seed, step) too, so no random state is stored to resume bit for bit.
    torch.manual_seed(derive_seed("dropout", run.seed, step, accelerator.process_index))
    rate = learning_rate_at(
        step, config.schedule, peak=config.learning_rate, steps=config.steps, warmup_steps=config.warmup_steps
    )
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    batch = _own_share(run, run.task.batch(run.seed, step, config.batch_size))
    run.optimizer.zero_grad(set_to_none=True)
    loss = _backward(run, batch)
    if config.gradient_clip is not None:
        accelerator.clip_grad_norm_(run.wrapped.parameters(), config.gradient_clip)
    run.optimizer.step()
    return loss, rate


def _own_share(run: TrainingRun, batch: Batch) -> Batch:
    """This process's contiguous share of a batch, on its device."""
    index, count = run.division.part, run.division.num_parts
    share = {key: value.chunk(count)[index] if count > 1 else value for key, value in batch.items()}
    return {key: value.to(run.accelerator.device, non_blocking=True) for key, value in share.items()}


def _backward(run: TrainingRun, batch: Batch) -> Tensor:
    """Gradients of the mean loss over this process's share of a batch, in as many passes as fit; returns that
    loss.
    """
    count = len(next(iter(batch.values())))
    size = run.config.micro_batch_size or count
    losses = []
    for start in range(0, count, size):
        part = {name: value[start : start + size] for name, value in batch.items()}
        exchanges = start + size >= count  # processes exchange gradients once, in the last pass
        if run.is_sharded:
            cast(FSDPModule, run.model).set_requires_gradient_sync(exchanges)
        with nullcontext() if exchanges or run.is_sharded else run.accelerator.no_sync(run.wrapped):
            with run.accelerator.autocast():
                loss = run.loss(part)
            loss = loss * (len(next(iter(part.values()))) / count)
            run.accelerator.backward(loss)
        losses.append(loss.detach())
    return sum(losses[1:], start=losses[0])
