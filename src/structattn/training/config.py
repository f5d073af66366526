"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from structattn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How one model is trained, the same for every method of a comparison.

    Args:
        steps: optimiser steps (at most, when ``patience`` is set).
        batch_size: examples per step over all processes.
        micro_batch_size: most examples that a process computes at once; the gradients of a step are added up over as many passes as
            it takes, and are the same but for rounding. Default ``None``: all at once.
        learning_rate: peak AdamW learning rate.
        schedule: ``"constant"`` after the warm-up, ``"cosine"`` to zero after it, ``"wsd"`` (warm-up, stable, decay: linearly to zero
            over the last quarter), or ``"one-cycle"`` (up and down again).
        warmup_steps: linear warm-up of all but ``one-cycle``.
        weight_decay: decoupled weight decay on parameters of two or more dimensions.
        betas: AdamW's decay rates of the moments.
        gradient_clip: largest global gradient norm; ``None`` leaves gradients alone.
        eval_every: steps between validations (and TensorBoard entries of the validation score).
        patience: validations without a better score before training stops; ``None`` always runs all steps. When
            set, the weights of the best validation are the result.
        checkpoint_every: steps between checkpoints; the last step always writes one.
        precision: ``"no"`` (float32) or ``"bf16"`` autocast.
        parametrization: ``"standard"``: one learning rate for all parameters; or ``"mup"``: initial weights, scaling of scores and
            learning rates by role (``structattn.mup``), so that a rate found on a small model holds for a wide one.
        base_fan_in: under muP, the width at which ``learning_rate`` is meant. Default 768.
        activation_checkpointing: keep only the input of every transformer block and compute the block again in the backward pass: the
            same gradients, in less memory and about a third more time. Default ``False``.
        compile: train compiled code (``torch.compile``): slower to start, then faster. Default ``False``.

    Raises:
        ConfigError: a value is out of its range.
    """

    steps: int
    batch_size: int
    learning_rate: float
    micro_batch_size: int | None = None
    schedule: Literal["constant", "cosine", "wsd", "one-cycle"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float | None = 1.0
    eval_every: int = 100
    patience: int | None = None
    checkpoint_every: int = 200
    precision: Literal["no", "bf16"] = "no"
    parametrization: Literal["standard", "mup"] = "standard"
    base_fan_in: int = 768
    activation_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "checkpoint_every", "base_fan_in"):
            if getattr(self, name) < 1:
                raise ConfigError(f"training.{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise ConfigError(f"training.micro_batch_size must be at least 1 or none, got {self.micro_batch_size}")
        if not self.learning_rate > 0:
            raise ConfigError(f"training.learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                f"training.warmup_steps must lie in [0, steps) = [0, {self.steps}), got {self.warmup_steps}"
            )
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise ConfigError(f"training.gradient_clip must be positive or none, got {self.gradient_clip}")
        if self.patience is not None and self.patience < 1:
            raise ConfigError(f"training.patience must be at least 1 or none, got {self.patience}")
        if self.weight_decay < 0:
            raise ConfigError(f"training.weight_decay must not be negative, got {self.weight_decay}")
        if self.schedule not in ("constant", "cosine", "wsd", "one-cycle"):
            raise ConfigError(f"training.schedule: {self.schedule!r} is not constant, cosine, wsd or one-cycle")
        if self.precision not in ("no", "bf16"):
            raise ConfigError(f"training.precision: {self.precision!r} is not no or bf16")
        if self.parametrization not in ("standard", "mup"):
            raise ConfigError(f"training.parametrization: {self.parametrization!r} is not standard or mup")
