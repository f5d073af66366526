"""Builds the model and the optimiser of a run from its settings, in the standard parametrisation or in
muP.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from structattn import mup
from structattn.errors import ConfigError, StructAttnError
from structattn.layers.attention import Attention
from structattn.layout.text import TextLayout
from structattn.memory import physical_memory
from structattn.models.transformer import Transformer
from structattn.spec.layers import LayerSpecs
from structattn_lab.settings.training import Parametrization, TrainingConfig
from structattn_lab.tasks.base import Task

logger = logging.getLogger(__name__)
_MOST_SHAPES = 256
_MOST_LAYERS = 10_000
_FEW_EXAMPLES = 4096  # of a batch: as many are not counted


def spec_for(spec: str, parametrization: Parametrization) -> str:
    """The spec that a model is built from: under muP with its scaling of the scores, unless the spec chose
    another one.
    """
    return spec if parametrization == "standard" else str(LayerSpecs.parse(spec).with_scaling("mup"))


def empty_model(task: Task, spec: str, parametrization: Parametrization) -> nn.Module:
    """The model without its numbers, on the meta device, which takes no memory.

    Raises:
        ConfigError: the spec does not fit, or the parameters need more memory than this machine has.
    """
    layers = getattr(task.config, "num_layers", 1)
    if layers > _MOST_LAYERS:
        raise ConfigError(f"task.num_layers must be at most {_MOST_LAYERS:,}, got {layers:,}")
    try:
        with torch.device("meta"):
            model = task.build_model(spec_for(spec, parametrization))
    except StructAttnError:
        raise
    except (RuntimeError, OverflowError) as error:
        if "overflow" not in str(error).lower() and "too large" not in str(error).lower():
            raise
        raise ConfigError("the model is too large for any machine: choose a smaller width") from error
    size, memory = sum(p.numel() * p.element_size() for p in model.parameters()), physical_memory()
    if memory is not None and size > memory:
        raise ConfigError(
            f"the parameters of the model take {size / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f} "
            "GiB: choose a smaller width or fewer layers"
        )
    return model


def check_batch(task: Task, config: TrainingConfig) -> None:
    """Raises ``ConfigError`` for a batch whose examples alone need more memory than this machine has."""
    if config.batch_size <= _FEW_EXAMPLES:
        return
    one = task.batch(0, 0, 1)
    size = config.batch_size * sum(part.nbytes for part in one.values() if isinstance(part, torch.Tensor))
    memory = physical_memory()
    if memory is not None and size > memory:
        raise ConfigError(
            f"training.batch_size: {config.batch_size:,} examples take {size / 2**30:,.0f} GiB, and this machine has "
            f"{memory / 2**30:,.0f} GiB: choose a smaller batch"
        )


def build_model(task: Task, spec: str, parametrization: Parametrization) -> nn.Module:
    """The model of a task; under muP with its scaling of the scores and its initial weights.

    Raises:
        ConfigError: the spec does not fit, or a parameter has no muP role.
    """
    model = task.build_model(spec_for(spec, parametrization))
    if parametrization == "mup":
        mup.initialize(model)
    return model


def checkpoint_activations(model: nn.Module) -> None:
    """Turns on activation checkpointing in every ``Transformer`` of a model.

    Raises:
        ConfigError: there is none.
    """
    trunks = [module for module in model.modules() if isinstance(module, Transformer)]
    if not trunks:
        raise ConfigError(
            "training.activation_checkpointing needs a model with transformer blocks, which are computed again; got "
            f"{type(model).__name__}, which has none: leave it false"
        )
    for trunk in trunks:
        trunk.activation_checkpointing = True


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW groups of the standard parametrisation: decay on parameters of two or more dimensions, one
    learning rate.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay, "lr_scale": 1.0},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0, "lr_scale": 1.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; every group has ``lr_scale``, by which the learning rate of a step is multiplied."""
    if config.parametrization == "mup":
        return mup.adamw(
            model,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=config.betas,
            base_fan_in=config.base_fan_in,
        )
    groups = parameter_groups(model, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, **mup.fastest_adamw(groups))


def compiled(model: nn.Module) -> nn.Module:
    """The model, compiled for each of its input shapes; unchanged, with a warning, where nothing can be
    compiled.

    Increases dynamo's limit of shapes for the process. Compiled code needs a C++ compiler on CPU, and Triton
    on CUDA; whether they work is tried on a function of one line.
    """
    device = next(model.parameters()).device
    if any(isinstance(module, Attention) and isinstance(module.layout, TextLayout) for module in model.modules()):
        logger.warning("training is not compiled, and slower: the layout of mlr-text differs from batch to batch")
        return model
    try:
        torch.compile(_probe)(torch.zeros(2, device=device))
    except Exception as error:  # any error of a compiler: the run continues uncompiled
        logger.warning("training is not compiled, and slower: %s", str(error).strip().splitlines()[0])
        return model
    # Past its limit, 8 by default, dynamo runs new shapes uncompiled: the last sizes of a curriculum, which
    # are most of the work.
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_SHAPES)
    return torch.compile(model, dynamic=False)  # type: ignore[return-value]


def _probe(x: torch.Tensor) -> torch.Tensor:
    return x + 1
