"""The record of a finished run, ``run.json``, and of its scores on the test split, ``scores.json``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from structattn_lab.old_formats import with_short_progress
from structattn_lab.records.common import FORMAT_VERSION, Json, read_versioned


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: optimizer steps that were run.
        best_step: that of the lowest validation score.
        history: one entry per validation: step, compute (forward FLOPs of all training examples so far),
            train_loss (mean since the last one), validation_<metric>.
        speeds: one entry per validation, of the training since the last one: step, seconds,
            tokens_per_second, mfu and hfu, peak_memory_bytes so far. They differ from one run to the next,
            unlike ``history``.
        seconds: training and validation, over all sessions of a resumed run.
        peak_memory_bytes: of the last session.
        compute: forward FLOPs of all training examples.
    """

    step: int
    best_step: int
    history: tuple[dict[str, float], ...]
    speeds: tuple[dict[str, float], ...]
    seconds: float
    peak_memory_bytes: int
    compute: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all processes trained on, per second of training."""
        return self._mean_speed("tokens_per_second")

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: those of the training steps, relative to the machine's matrix products in
        the same time.
        """
        return self._mean_speed("mfu")

    def _mean_speed(self, name: str) -> float:
        seconds = sum(entry["seconds"] for entry in self.speeds)
        return sum(entry[name] * entry["seconds"] for entry in self.speeds) / seconds if seconds else 0.0

    def final_validation_score(self, metric: str, patience: int | None) -> float:
        """The validation score of the final weights: the best ones under early stopping, else the last;
        infinite if it is not finite."""
        entries = [e for e in self.history if patience is None or e["step"] == self.best_step]
        score = entries[-1][f"validation_{metric}"] if entries else math.inf
        return float(score) if math.isfinite(score) else math.inf


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A finished run: ``run.json``, written once, after the weights.

    Attributes:
        task, spec, seed: of the run.
        data: SHA-256 of the data that the task read; empty for generated data, ``None`` in the first runs,
            which did not record it.
        config, task_config: settings of the training and of the task.
        record: data that a trained model needs in addition to settings and weights (see ``Task.record``).
        progress: what the run did; ``None`` in a record of version 0.1.0, which has it in the last
            checkpoint.
        model_sha256: of ``model.safetensors``.
    """

    format_version: int = FORMAT_VERSION
    task: str
    data: str | None = None
    spec: str
    seed: int
    config: Json
    task_config: Json
    record: Json = field(default_factory=dict)
    progress: Progress | None = None
    model_sha256: str


@dataclass(frozen=True, kw_only=True)
class ScoreRecord:
    """The scores of a finished run on the test split: ``scores.json``, written once.

    Attributes:
        model_sha256: of the weights that were scored.
        metrics: by name.
        details: data for the figures of the task (see ``Task.details``); empty but for the first seed.
    """

    model_sha256: str
    metrics: dict[str, float]
    details: Json


def read_run(data: dict[str, Any], where: str) -> RunRecord:
    """The record of a run from the data of any version.

    Raises:
        CheckpointError, ConfigError: see ``read_versioned``.
    """
    return read_versioned(RunRecord, with_short_progress(data, without_state), where)


def without_state(progress: dict[str, Any]) -> dict[str, Any]:
    """The progress of a run from a checkpoint, without fields that only matter during the run."""
    return {entry.name: progress[entry.name] for entry in fields(Progress) if entry.name in progress}
