"""The record of a sweep, ``results.json``, and of each of its trials, ``trial.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from structattn_lab.records.common import FORMAT_VERSION, Json, ResultRecord

Value = float | int | str
Status = Literal["running", "finished", "stopped", "diverged", "failed", "crashed"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A setting that a sweep varies: over a range, or over choices.

    Attributes:
        name: of the setting, in full, or ``"attention"``.
        low, high: the range, both ends included; whole numbers for a setting of whole numbers. ``None`` with
            choices.
        log: search the logarithm.
        choices: texts, as ``--set`` takes them.
    """

    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    choices: tuple[str, ...] = ()

    @property
    def ends(self) -> tuple[int | float, int | float]:
        """The range of a parameter without choices."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high

    def setting(self, value: Value) -> str:
        """The value as ``--set`` takes it, exactly."""
        return f"{self.name}={value if isinstance(value, str) else repr(value)}"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a sweep, and what became of it.

    Attributes:
        number: from 1, in the order in which trials begin.
        params: the values of the parameters, by name.
        status: ``running``: started; after an interruption it continues from its last checkpoint.
            ``finished``. ``stopped`` early by the scheduler. ``diverged``: a loss, a weight or the score is
            not finite. ``failed``: the values do not fit together, or not to the data. ``crashed``: anything
            else, such as memory or a disk that is full; it is tried again when the sweep is resumed.
        score: of validation; only finished and stopped trials end with one.
        step: the last one that is known.
        seconds: wall-clock, over all sessions.
        message: why there is no score.
        history: pairs of step and score.
        num_params: of the model; ``None`` until the trial has finished.
    """

    format_version: int = FORMAT_VERSION
    number: int
    params: Json
    status: Status = "running"
    score: float | None = None
    step: int = 0
    seconds: float = 0.0
    message: str = ""
    history: tuple[tuple[int, float | None], ...] = ()
    num_params: int | None = None


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """What stops trials early: its name, the steps that every trial gets, and the factor between two
    looks.
    """

    name: Literal["asha"]
    grace_period: int
    reduction: int


@dataclass(frozen=True, kw_only=True)
class BestTrial:
    """The trial with the lowest validation score among those that ran to their end.

    Attributes:
        number, params, score: see ``Trial``.
        median: of the scores of all trials that ran to their end.
        test: metrics on the test split, by name.
        command: the command line that trains it again.
    """

    number: int
    params: Json
    score: float
    median: float
    test: dict[str, float]
    command: str


@dataclass(frozen=True, kw_only=True)
class SweepRecord(ResultRecord):
    """A sweep: ``results.json``, from which figures and report are drawn.

    Attributes:
        task, preset, attention, seed: of every run.
        metric, metric_label: the deciding metric, by name and in words; lower is better.
        scheduler: ``None`` where every trial runs to its end.
        parameters: what is varied.
        config: the settings that are not varied.
        trials: in the order in which they began.
        seconds: of all trials.
        best: ``None`` where no trial ran to its end.
    """

    task: str
    metric: str
    metric_label: str
    preset: str
    seed: int
    attention: str
    scheduler: Scheduler | None
    parameters: tuple[Parameter, ...]
    config: Json
    trials: tuple[Trial, ...]
    seconds: float
    best: BestTrial | None
