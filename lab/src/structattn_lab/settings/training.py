"""The settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from structattn.checks import check_choice, check_field_types, check_int, check_number, check_type
from structattn.errors import ConfigError
from structattn_lab.settings.schedule import Schedule
from structattn_lab.settings.trackers import TENSORBOARD, check_tracker

# Settings that may differ when a run is resumed: no result depends on them.
WITHOUT_EFFECT = ("process_timeout", "context_parallel", "tracker")
Parametrization = Literal["standard", "mup"]
_LONGEST_TIMEOUT_S = 1e9  # the largest timeout of torch.distributed


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How one model is trained, the same for every method of a comparison.

    Args:
        steps: optimiser steps (at most, when ``patience`` is set).
        batch_size: examples per step over all processes.
        micro_batch_size: most examples that a process computes at once; the gradients of a step are
            accumulated over as many passes as needed, and are the same up to rounding. Default ``None``: all
            at once.
        learning_rate: peak AdamW learning rate.
        schedule: the learning rate over the steps: ``"constant"`` after the warm-up, ``"cosine"`` to zero
            after it, ``"wsd"`` (warm-up, stable, decay: linearly to zero over the last quarter), or
            ``"one-cycle"`` (up and down again).
        warmup_steps: linear warm-up of all but ``one-cycle``.
        weight_decay: decoupled weight decay on parameters of two or more dimensions.
        betas: AdamW's decay rates of the moments.
        gradient_clip: largest global gradient norm; ``None``: gradients are not clipped.
        eval_every: steps between validations (and points of the validation score in the tracker).
        patience: validations without a better score before training stops; ``None`` always runs all steps.
            When set, the weights of the best validation are the result.
        checkpoint_every: steps between checkpoints; the last step always writes one.
        precision: of the computation: ``"no"`` (float32) or ``"bf16"`` autocast.
        parametrization: initial weights and learning rates of parameters: ``"standard"``: one learning rate
            for all parameters; or ``"mup"``: initial weights, scaling of scores and learning rates by role
            (``structattn.mup``), so that a rate found on a small model holds for a wide one.
        base_fan_in: under muP, the width for which ``learning_rate`` was chosen. Default 768.
        activation_checkpointing: compute blocks again in place of keeping them: keep only the input of every
            transformer block and compute the block again in the backward pass: the same gradients, with less
            memory and about a third more time. Default ``False``.
        compile: train compiled code (``torch.compile``): slower to start, then faster. Default ``False``.
        process_timeout: seconds that the processes of a launcher wait for one that does not answer: then an
            error names it, and all end. It may differ when a run is resumed. Default: 300.
        context_parallel: processes of a launcher that divide every sequence: they train the language models
            of the tasks text and recall on sequences that are too long for one. Their number divides that of
            all processes; the rest divides the batch. It may differ when a run is resumed. Default: 1.
        tracker: of losses, scores and speed: ``"tensorboard"`` writes into the folder of the run; ``"none"``;
            or another that accelerate knows, such as ``"wandb"``, ``"mlflow"`` or ``"aim"``, which is
            installed. It may differ when a run is resumed. Default: tensorboard.

    Raises:
        ConfigError: a value is out of its range.
        MissingDependencyError: the tracker is not installed.
    """

    steps: int
    batch_size: int
    learning_rate: float
    micro_batch_size: int | None = None
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float | None = 1.0
    eval_every: int = 100
    patience: int | None = None
    checkpoint_every: int = 200
    precision: Literal["no", "bf16"] = "no"
    parametrization: Parametrization = "standard"
    base_fan_in: int = 768
    activation_checkpointing: bool = False
    compile: bool = False
    process_timeout: float = 300.0
    context_parallel: int = 1
    tracker: str = TENSORBOARD

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "checkpoint_every", "base_fan_in", "context_parallel"):
            check_int(f"training.{name}", getattr(self, name), minimum=1)
        for name in ("micro_batch_size", "patience"):
            if getattr(self, name) is not None:
                check_int(f"training.{name}", getattr(self, name), minimum=1)
        check_number("training.learning_rate", self.learning_rate, above=0)
        check_number("training.process_timeout", self.process_timeout, minimum=1, maximum=_LONGEST_TIMEOUT_S)
        check_number("training.weight_decay", self.weight_decay, minimum=0)
        if self.gradient_clip is not None:
            check_number("training.gradient_clip", self.gradient_clip, above=0)
        check_type("training.betas", self.betas, (tuple, list), "two numbers, such as 0.9,0.95")
        if len(self.betas) != 2:
            raise ConfigError(f"training.betas must be two numbers, such as 0.9,0.95, got {self.betas}")
        for beta in self.betas:
            check_number("training.betas", beta, minimum=0, below=1)
        check_int("training.warmup_steps", self.warmup_steps, minimum=0)
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                f"training.warmup_steps must lie in [0, steps) = [0, {self.steps}), got {self.warmup_steps}"
            )
        check_choice("training.schedule", self.schedule, get_args(Schedule))
        check_choice("training.precision", self.precision, ("no", "bf16"))
        check_choice("training.parametrization", self.parametrization, get_args(Parametrization))
        check_field_types(self, "training.")
        check_tracker(self.tracker)

    def replaced(self, **values: Any) -> TrainingConfig:
        """A copy with other values; where only ``steps`` changes, the warm-up keeps at most its share of
        them.
        """
        if "steps" in values and "warmup_steps" not in values:
            share = self.warmup_steps * max(1, values["steps"]) // self.steps
            values["warmup_steps"] = min(self.warmup_steps, share)
        return replace(self, **values)
