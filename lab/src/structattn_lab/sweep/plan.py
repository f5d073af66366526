"""The plan of a sweep, and the record of every trial on disk, which determines the remaining work after an
interruption.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from structattn.checks import MAX_SEED, check_choice, check_int
from structattn.errors import CheckpointError, ConfigError
from structattn.extensions import shell_prefix
from structattn.files import write_atomic
from structattn_lab.old_formats import todays_spec
from structattn_lab.records.common import read_file, to_json
from structattn_lab.records.sweep import Parameter, Trial, Value
from structattn_lab.runner.job import Job
from structattn_lab.settings.overrides import Change, apply_overrides
from structattn_lab.settings.recipe import MOST_RUNS
from structattn_lab.sweep.halving import REDUCTION
from structattn_lab.sweep.space import ATTENTION, RunSettings, parse_parameters
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.registry import factory_of

OVER = ("finished", "stopped", "diverged", "failed")  # the status of a trial that is not continued
Values = dict[str, Value]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The parameters and settings of a hyperparameter sweep.

    Args:
        task_name: see ``tasks.registry.TASKS``.
        settings: of every run, but for the parameters.
        params: what is varied, as texts (see ``sweep_space``).
        trials: the number of runs, over all sessions. Where all parameters are choices that have no more
            combinations, each of these is run once.
        attention: of every run, unless it is a parameter.
        seed: of every run and of the search.
        scheduler: ``"asha"``: a trial whose validation score is not among the best quarter at its step stops
            early (asynchronous successive halving); ``"none"``: every trial runs to its end.
        grace_period: steps that every trial gets under ASHA; later comparisons are at 4, 16 ... times as
            many. Default: a sixteenth of the longest run, and at least ``training.eval_every``, since scores
            come from validations.
        preset, changes, given: what else the command line of ``structattn train`` needs to repeat a run: the
            preset, the ``--set`` texts, and further options with their values.

    Raises:
        ConfigError: fewer than one trial, a parameter that is malformed, unknown, or also in ``changes``, a
            grace period that is out of range.

    Source: Li et al. 2020 (ASHA); Bergstra et al. 2011 (TPE, Optuna's search).
    """

    task_name: str
    settings: RunSettings
    params: tuple[str, ...]
    trials: int
    attention: str = "standard"
    seed: int = 0
    scheduler: Literal["asha", "none"] = "asha"
    grace_period: int | None = None
    preset: str = "default"
    changes: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    parameters: tuple[Parameter, ...] = field(init=False)
    tasks: TaskFactory = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        check_int("trials", self.trials, minimum=1, maximum=MOST_RUNS)
        check_choice("scheduler", self.scheduler, ("asha", "none"))
        object.__setattr__(self, "attention", todays_spec(self.attention))
        object.__setattr__(self, "tasks", factory_of(self.task_name))
        check_spec = self.tasks.kind.check_spec
        object.__setattr__(self, "parameters", parse_parameters(self.params, self.settings, check_spec))
        swept = {parameter.name for parameter in self.parameters}
        if ATTENTION not in swept:
            check_spec(self.attention)
        fixed = {Change.parse(change).name for change in self.changes}
        if self.attention != "standard":
            fixed.add(ATTENTION)
        if both := swept & fixed:
            raise ConfigError(f"{sorted(both)[0]} is swept and set: leave one of the two out")
        if self.grace_period is not None and not 1 <= self.grace_period <= self.longest:
            raise ConfigError(
                f"the grace period lies between 1 and the steps of the longest run, {self.longest}, got "
                f"{self.grace_period}"
            )

    @property
    def longest(self) -> int:
        """Steps of the longest run."""
        for parameter in self.parameters:
            if parameter.name == "training.steps":
                return int(parameter.high or max(map(int, parameter.choices)))
        return self.settings.training.steps

    @property
    def grace(self) -> int:
        """Steps that every trial gets."""
        every = self.settings.training.eval_every
        return self.grace_period or min(self.longest, max(every, self.longest // REDUCTION**2))

    @property
    def combinations(self) -> list[Values]:
        """All of them, where there are no more than trials; else none."""
        if math.prod(len(parameter.choices) or math.inf for parameter in self.parameters) > self.trials:
            return []
        choices = itertools.product(*(parameter.choices for parameter in self.parameters))
        return [{p.name: value for p, value in zip(self.parameters, values, strict=True)} for values in choices]

    @property
    def num_trials(self) -> int:
        """How many there are at the end."""
        return len(self.combinations) or self.trials

    def job(self, folder: Path, values: Values) -> Job:
        """The run of a trial in a folder; raises ``ConfigError`` if its values do not fit together."""
        changes = [p.setting(values[p.name]) for p in self.parameters if p.name != ATTENTION]
        settings = apply_overrides(self.settings, tuple(changes))
        return Job(
            tasks=self.tasks,
            task=settings.task,
            spec=str(values.get(ATTENTION, self.attention)),
            training=settings.training,
            seed=self.seed,
            folder=folder,
        )

    def command(self, values: Values) -> str:
        """The command line that trains a trial's model again, for a shell."""
        words = ["structattn", "train", self.task_name, "--preset", self.preset, *self.given]
        changes = [p.setting(values[p.name]) for p in self.parameters if p.name != ATTENTION]
        words += [word for change in (*self.changes, *changes) for word in ("--set", change)]
        words += ["--attention", str(values.get(ATTENTION, self.attention)), "--seed", str(self.seed)]
        return shell_prefix() + shlex.join(words)

    def identity(self) -> dict[str, Any]:
        """The settings that must be equal when a sweep is resumed; the number of trials may grow."""
        plain = {
            "task": self.task_name,
            "settings": asdict(self.settings),
            "parameters": [asdict(parameter) for parameter in self.parameters],
            "attention": self.attention,
            "seed": self.seed,
            "scheduler": self.scheduler,
            "grace_period": self.grace,
        }
        return json.loads(json.dumps(plain))


class Journal:
    """The record of a sweep: ``trial.json`` in the folder of each run holds its status.

    Every file is written atomically, by the process that started the sweep.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _read(self, path: Path) -> Trial:
        try:
            return read_file(Trial, path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; start the sweep again in another folder") from error

    def run_folder(self, number: int) -> Path:
        """The folder of a trial's run."""
        return self.folder / "runs" / f"trial-{number:04d}"

    def _path(self, number: int) -> Path:
        return self.run_folder(number) / "trial.json"

    def trials(self) -> tuple[Trial, ...]:
        """Every trial, in the order in which they were begun."""
        trials_read = [self._read(path) for path in self.folder.glob("runs/trial-*/trial.json")]
        return tuple(sorted(trials_read, key=lambda trial: trial.number))

    def begin(self, number: int, params: Values) -> Trial:
        """Starts a trial, or continues it with its record; returns its record."""
        path = self._path(number)
        begun = self._read(path) if path.exists() else Trial(number=number, params=params)
        trial = replace(begun, status="running", message="")
        write_atomic(path, to_json(trial))
        return trial

    def update(self, number: int, *, entry: tuple[int, float | None] | None = None, **changes: Any) -> None:
        """Writes changes of a trial; ``entry`` is a new pair of the history, unless its step is already
        there.
        """
        trial = self._read(self._path(number))
        if entry is not None and (not trial.history or entry[0] > trial.history[-1][0]):
            changes["history"] = (*trial.history, entry)
        write_atomic(self._path(number), to_json(replace(trial, **changes)))
