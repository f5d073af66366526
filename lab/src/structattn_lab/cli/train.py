"""The commands that train models of a task: compare, train, sweep."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

import tyro

from structattn.cli.session import Session
from structattn.errors import ConfigError
from structattn_lab.cli.output import print_metrics, print_results, require_extra
from structattn_lab.cli.values import Count, Counts, OptionalCount, OptionalSeed, Positives, as_options, naming
from structattn_lab.tasks.registry import TASKS

T = TypeVar("T")
# The names are those of the registry, which imports no task for them.
TaskName = Annotated[str, tyro.conf.arg(metavar="TASK", help=f"One of {', '.join(TASKS)}.")]
_TaskName = Annotated[
    str | None, tyro.conf.arg(metavar="TASK", help=f"One of {', '.join(TASKS)}; unless --config names it.")
]


@dataclass(frozen=True, kw_only=True)
class TaskCommand:
    # The options that a file may give as well, and their values where neither it nor the command line does.
    in_file: ClassVar[dict[str, Any]] = {"preset": "default"}
    _file: ClassVar[Any] = None  # of --config, once it is read
    _tasks: ClassVar[Any] = None  # what makes the tasks, once the recipe is known

    task: tyro.conf.Positional[_TaskName] = None
    preset: str | None = None
    """Named settings of the task (see `structattn presets`). Default: default."""
    config: Path | None = None
    """A file of settings, YAML or TOML, with the names of --set, such as the config.yaml of a run.
    Options of the command line override it.
    """
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as section.field=value, such as training.steps=500; may be repeated."""
    out: Path | None = None
    """Output folder. Default: a new one in runs/, with the date in its name."""
    resume: bool = False
    """Continue what --out already holds."""
    data: Path | None = None
    """Your data file or folder, for tasks that take one (`structattn settings TASK` says what)."""
    time: str | None = None
    """The time column, for a task that reads a table."""
    target: str | None = None
    """The column to predict, for a task that reads a table: several with commas, all with '*'."""

    def execute(self, session: Session) -> None:
        """Runs the command, with what --config says and the command line does not."""
        self.fill()
        self.run(session)

    def run(self, session: Session) -> None:
        """Runs the command, whose options are complete."""
        raise NotImplementedError

    def fill(self) -> None:
        """Takes from --config, or else from the defaults, what the command line does not say."""
        file = None
        if self.config is not None:
            from structattn_lab.settings.config_file import ConfigFile

            file = ConfigFile.read(self.config)
        from_file = {**file.options(self.in_file, type(self)), "task": file.task} if file else {}
        for name, default in {**self.in_file, "task": None}.items():
            if getattr(self, name) in (None, ()):
                object.__setattr__(self, name, from_file.get(name, default))
        if self.task is None:
            raise ConfigError(f"expected TASK, one of {', '.join(TASKS)}, or --config with a file that names it")
        if from_file and from_file["task"] not in (None, self.task):
            raise ConfigError(
                f"{self.config} is of the task {from_file['task']}, not of {self.task}: leave one of the two out"
            )
        object.__setattr__(self, "_file", file)

    def recipe(self) -> Any:
        """The preset's recipe with the settings of --config and then those of the command line."""
        from structattn_lab.settings.overrides import apply_overrides, with_changes
        from structattn_lab.tasks.registry import factory_of, presets_of, recipe_for, task_class, usable_tasks

        presets_of(known(self.task))  # first: an error of its name is none of --preset
        with naming("--preset"):
            recipe = recipe_for(known(self.task), known(self.preset))
        if self._file is not None:
            with self._file.reading():
                recipe = with_changes(recipe, self._file.changes(without=self.in_file))
        overrides = list(self.set)
        object.__setattr__(self, "_tasks", factory_of(known(self.task)))
        options = self._tasks.kind.data_options
        for name, value in (("data", self.data), ("time", self.time), ("target", self.target)):
            if value is None:
                continue
            if name not in options:
                tasks = ", ".join(task for task in usable_tasks() if name in task_class(task).data_options)
                raise ConfigError(f"--{name} belongs to {tasks}, not to {self.task}")
            setting = f"task.{options[name].setting}"
            if setting in self._names_set():
                raise ConfigError(f"--{name} and --set {setting} give the same setting: leave one of the two out")
            overrides.append(f"{setting}={value}")
        return apply_overrides(recipe, tuple(overrides))

    def _names_set(self) -> list[str]:
        """The settings that --set gives, in full."""
        from structattn_lab.settings.overrides import Change

        return [Change.parse(text).name for text in self.set]

    def recipe_of_runs(self) -> Any:
        """The same for a command that uses only the settings of single runs."""
        recipe = self.recipe()
        file = self._file
        sources = [(f"--set {name}", name) for name in self._names_set()]
        sources += [(f"{file.path}: {name}", name) for name in file.values if name not in self.in_file] if file else []
        for written, name in sources:
            if name.partition(".")[0] not in ("task", "training"):
                instead = f"give --{name}" if name == "attention" else "leave it out"
                raise ConfigError(f"{written} belongs to structattn compare: {instead}")
        return recipe


def known(value: T | None) -> T:
    """An option that is filled in, by the command line, a file or a default."""
    assert value is not None
    return value


def _check_no_launcher(command: str) -> None:
    if _num_processes() > 1:
        raise ConfigError(
            f"the processes of a launcher train one model together (structattn train); {command} trains several models "
            "with --jobs"
        )


def _runner(address: str, jobs: int | None) -> Any:
    """What trains many models: a Ray cluster, or processes of this machine."""
    if address:
        if address not in ("auto", "local") and not re.fullmatch(r"(ray://)?[^\s/]+:\d{1,5}", address):
            raise ConfigError(f"--ray-address: expected auto, local, HOST:PORT or ray://HOST:PORT, got {address!r}")
        from structattn_lab.runner.ray import RayRunner

        return RayRunner(address, jobs)
    from structattn_lab.runner.local import LocalRunner

    return LocalRunner(jobs)


def _num_processes() -> int:
    """The number that torchrun or accelerate launch started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, kw_only=True)
class CompareCommand(TaskCommand):
    """Train attention variants on one task and write a table, figures and a report.

    Examples:
      structattn compare nearest-neighbor --preset demo
      structattn compare forecast --attention standard "mlr:8|4|2|2" --seeds 3 --out runs/mine
      structattn compare forecast --data my.csv --time date --target y
    """

    attention: tuple[str, ...] = ()
    """Specs to compare, each in quotes (see `structattn specs`). Default: the preset's."""
    seeds: OptionalCount = None
    """Runs per variant. Default: the preset's."""
    widths: Counts = ()
    """Widths of the models (task.embed_dim), each with all variants. Default: the preset's."""
    budgets: Positives = ()
    """Training compute of the runs in forward FLOPs, such as 1e12 4e12 16e12; three or more give scaling
    laws. Default: the preset's.
    """
    jobs: Count = 1
    """Models trained at the same time, each in its own process; for small models as many as there are
    cores.
    """
    ray_address: str = ""
    """Train through Ray on this cluster: auto, HOST:PORT, ray://HOST:PORT or local; --out must be on a file
    system that its machines share.
    """

    def run(self, session: Session) -> None:
        require_extra()
        from structattn_lab.compare.comparison import compare
        from structattn_lab.compare.pages import text

        _check_no_launcher("compare")
        options = {"attention": self.attention, "seeds": self.seeds, "widths": self.widths, "budgets": self.budgets}
        options = {name: value for name, value in options.items() if value not in (None, ())}
        recipe = self.recipe()
        for name in options:
            if name in self._names_set():
                raise ConfigError(f"--{name} and --set {name} give the same setting: leave one of the two out")
        with as_options(**{name: f"--{name}" for name in options}):
            recipe = replace(recipe, **options)
        self._check_effect(recipe, options)
        if self.ray_address and self.jobs != 1:
            raise ConfigError("--jobs is only for this machine: on a Ray cluster its cores and GPUs decide")
        length = " or ".join(f"{budget:g} FLOPs" for budget in recipe.budgets) or f"{recipe.training.steps:,} steps"
        done = compare(
            self._tasks,
            recipe,
            self.out,
            preset=known(self.preset),
            command=session.line,
            resume=self.resume,
            on_open=partial(session.began, takes=f"{recipe.num_runs:,} runs of {length}"),
            runner=_runner(self.ray_address, None if self.ray_address else self.jobs),
        )
        print_results(text(done.record, self._tasks.report), done)

    def _check_effect(self, recipe: Any, options: dict[str, Any]) -> None:
        """Raises ``ConfigError`` for a setting that budgets or learning rates replace, unless the command
        line or the file that gives it gives them as well and goes before it.
        """
        file = self._file
        given = [(f"--set {name}", name, ()) for name in self._names_set()]
        if file:
            before = (*options, *self._names_set(), *file.values)
            given += [(f"{file.path}: {name}", name, before) for name in file.values]
        for written, name, known_before in given:
            axis = recipe.lost(name)
            if axis and axis not in known_before:
                raise ConfigError(
                    f"{written} would be lost, since {axis} set it: leave it out, or give --set '{axis}=()' too"
                )


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TaskCommand):
    """Train one attention variant; the folder can be evaluated and resumed.

    Example:
      structattn train text --attention "mlr:8|8|8|8" --out runs/text
    """

    in_file: ClassVar[dict[str, Any]] = {**TaskCommand.in_file, "attention": "standard", "seed": 0}

    attention: str | None = None
    """The spec to train (see `structattn specs`). Default: standard."""
    seed: OptionalSeed = None
    """Seed of weights, data order and dropout. Default: 0."""

    def run(self, session: Session) -> None:
        require_extra()
        from structattn_lab.old_formats import run_record, todays_spec
        from structattn_lab.runs.folders import Owner, finished_in, opened
        from structattn_lab.settings.training import WITHOUT_EFFECT
        from structattn_lab.training.build import empty_model
        from structattn_lab.training.finished import is_finished
        from structattn_lab.training.loop import train

        if _num_processes() > 1 and self.out is None:
            raise ConfigError("the processes of a launcher share one folder: give --out")
        recipe = self.recipe_of_runs()
        attention, seed = todays_spec(known(self.attention)), known(self.seed)
        task = self._tasks(recipe.task)
        settings = {
            "attention": attention,
            "seed": seed,
            **task.identity(asdict(recipe.task)),
            "training": asdict(recipe.training),
        }
        free = tuple(f"training.{name}" for name in WITHOUT_EFFECT)
        owner = Owner(command="train", task=task.name, settings=settings, free=free, recorded=run_record)
        empty_model(task, attention, recipe.training.parametrization)  # a size that fits no machine is named first
        folder, finished = finished_in(
            self.out, owner, resume=self.resume, read=lambda done: done if is_finished(done) else None
        )
        with (
            nullcontext(finished)
            if finished
            else opened(folder, owner, resume=self.resume, on_open=session.opened) as out
        ):
            result = train(
                task,
                attention,
                recipe.training,
                seed=seed,
                run_dir=out,
                preset=known(self.preset),
                resume=self.resume,
                on_steps=None if finished else lambda _: session.began(out, f"{recipe.training.steps:,} steps"),
            )
            # Every process of a launcher evaluates, since each may hold a part of the model, or of the text,
            # and one speaks for all.
            metrics = result.evaluate("test")
        if os.environ.get("RANK", "0") == "0":
            print_metrics(metrics)
            print(f"run      {out}")


@dataclass(frozen=True, kw_only=True)
class SweepCommand(TaskCommand):
    """Hyperparameter sweep of a task: many runs, the best by validation score, and the command line that
    trains it again.

    Example:
      structattn sweep forecast --param training.learning_rate=log:1e-4:1e-2 --trials 20
    """

    in_file: ClassVar[dict[str, Any]] = {
        **TaskCommand.in_file,
        "param": (),
        "trials": 20,
        "attention": "standard",
        "seed": 0,
        "scheduler": "asha",
        "grace_period": None,
    }

    param: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A parameter to vary, in quotes: NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or
    NAME=choice:A,B,..., where NAME is a setting, such as training.learning_rate, or attention; may be
    repeated."""
    trials: OptionalCount = None
    """Number of runs, including those of an interrupted sweep. Default: 20."""
    attention: str | None = None
    """The spec to train, unless it is a parameter. Default: standard."""
    seed: OptionalSeed = None
    """Seed of the runs and of the proposed values. Default: 0."""
    scheduler: Literal["asha", "none"] | None = None
    """asha, the default: stop trials that are not among the best quarter at their step; none: run every trial
    to its end.
    """
    grace_period: OptionalCount = None
    """Steps that every trial gets. Default: a sixteenth of the longest run, and at least
    training.eval_every.
    """
    jobs: OptionalCount = None
    """Trials at the same time, each in its own process. Default: one for each GPU, or for each core without
    GPUs.
    """
    ray_address: str = ""
    """Train through Ray on this cluster: auto, HOST:PORT, ray://HOST:PORT or local; --out must be on a file
    system that its machines share.
    """

    def run(self, session: Session) -> None:
        require_extra()
        from structattn_lab.report.sweep import report
        from structattn_lab.report.writer import text
        from structattn_lab.sweep.plan import SweepPlan
        from structattn_lab.sweep.space import RunSettings
        from structattn_lab.sweep.sweep import sweep

        _check_no_launcher("sweep")
        recipe = self.recipe_of_runs()
        data_options = {"--data": self.data and self.data.absolute(), "--time": self.time, "--target": self.target}
        plan = SweepPlan(
            task_name=known(self.task),
            settings=RunSettings(task=recipe.task, training=recipe.training),
            params=self.param,
            trials=known(self.trials),
            attention=known(self.attention),
            seed=known(self.seed),
            scheduler=cast(Any, self.scheduler),  # a wrong word is named by the plan
            grace_period=self.grace_period,
            preset=known(self.preset),
            changes=(*(self._file.texts(without=self.in_file) if self._file else ()), *self.set),
            given=tuple(
                word for option, value in data_options.items() if value is not None for word in (option, str(value))
            ),
        )
        done = sweep(
            plan,
            self.out,
            runner=_runner(self.ray_address, self.jobs),
            command=session.line,
            resume=self.resume,
            on_open=partial(session.began, takes=f"{plan.num_trials:,} trials of at most {plan.longest:,} steps"),
        )
        best = done.record.best
        assert best is not None  # else the sweep raised an error
        print_results(f"{text(report(done.record))}\n\n{best.command}", done)
