"""How the processes of a launcher divide a step: each copy of the model takes a part of the batch, its
processes a part of every sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.errors import ConfigError
from structattn.layers.block import TransformerBlock
from structattn.parallel.agreement import agreed_lengths
from structattn.parallel.processes import Processes
from structattn_lab.settings.training import WITHOUT_EFFECT, TrainingConfig
from structattn_lab.tasks.base import Task


@dataclass(frozen=True, kw_only=True)
class BatchDivision:
    """What this process has of every batch.

    Attributes:
        num_parts: parts of a batch: the number of processes over those that divide a sequence.
        part: of this process; neighbors in rank have the same one.
        context: the processes with the same part, which divide its sequences; ``None`` where every process
            has whole ones.
    """

    num_parts: int
    part: int
    context: DeviceMesh | None = None

    @property
    def loss_factor(self) -> int:
        """By which the loss of this process is multiplied. DDP and FSDP take the mean of all gradients: the
        mean over the parts of the batch is wanted, and of each part the sum over the processes that divide
        its sequences."""
        return 1 if self.context is None else self.context.size()


def division_of(
    config: TrainingConfig, index: int, count: int, device: torch.device, timeout: timedelta
) -> BatchDivision:
    """The division of a run; all processes call it together.

    Args:
        config: of the run.
        index, count: of this process, and how many there are.
        device: of this process.
        timeout: of the collectives of the processes that divide sequences.

    Raises:
        ConfigError: the numbers do not divide.
    """
    size = config.context_parallel
    if count % size:
        raise ConfigError(
            f"training.context_parallel={size} divides every sequence among {size} processes, got {count} in all: "
            f"start a multiple of {size}, such as torchrun --nproc-per-node {size} -m structattn train ..."
        )
    num_parts = count // size
    if config.batch_size % num_parts:
        shares = f" / training.context_parallel = {count} / {size}" if size > 1 else ""
        raise ConfigError(
            f"training.batch_size must divide by the number of processes{shares}: got {config.batch_size} and "
            f"{num_parts}"
        )
    if size == 1:
        return BatchDivision(num_parts=num_parts, part=index)
    group, _ = torch.distributed.new_subgroups(group_size=size, timeout=timeout)
    return BatchDivision(num_parts=num_parts, part=index // size, context=DeviceMesh.from_group(group, device.type))


def check_same(identity: dict[str, Any], config: TrainingConfig, count: int, device: torch.device) -> None:
    """Compares the settings of all processes, which call it together: those that differ would wait for each
    other, or train a model of neither.

    Args:
        identity: of the run.
        config: of the run, for the settings that its identity leaves out.
        count: of the processes.
        device: of this one.

    Raises:
        ConfigError: in every process; it names the first setting that differs.
    """
    settings = {name: getattr(config, name) for name in WITHOUT_EFFECT}
    sections = {"training": identity["config"] | settings, "task": identity["task_config"]}
    call = {name: value for name, value in identity.items() if name not in ("config", "task_config")}
    call |= {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    everyone = Processes(DeviceMesh(device.type, list(range(count))))
    agreed_lengths(everyone, device, 0, call, None, rule="the processes of a launcher must have the same settings")


def check_divisible(task: Task, model: nn.Module) -> None:
    """Raises ``ConfigError`` unless processes can divide the sequences of a model."""
    if not task.divides_sequences:
        raise task.undivided()
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            module.check_shard()
