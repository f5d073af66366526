"""The table of commands: each is a dataclass of its options, with a method that runs it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import tyro

from structattn.cli import commands as library
from structattn.cli.session import Session
from structattn_lab.cli import completion
from structattn_lab.cli.analysis import BenchCommand, FitCommand, MupCheckCommand, MupRolesCommand, PlanCommand
from structattn_lab.cli.caches import CompareCachesCommand
from structattn_lab.cli.data import DataInfoCommand, DataPrepareCommand
from structattn_lab.cli.lists import PresetsCommand, SettingsCommand
from structattn_lab.cli.runs import EvaluateCommand, ForecastCommand, GenerateCommand, MergeCommand
from structattn_lab.cli.shrink import ShrinkCommand
from structattn_lab.cli.train import CompareCommand, SweepCommand, TrainCommand
from structattn_lab.cli.uptrain import UptrainCommand


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """Print a script with which a shell completes commands, options, tasks, presets and settings.

    Write it to a file that the shell reads: ~/.local/share/bash-completion/completions/structattn,
    _structattn in a folder of zsh's fpath, or ~/.config/fish/completions/structattn.fish. It holds all words,
    so that completing takes no time; write it again after an update.

    Example:
      structattn completion bash
    """

    shell: tyro.conf.Positional[Annotated[Literal["bash", "zsh", "fish"], tyro.conf.arg(metavar="SHELL")]]
    """bash, zsh or fish."""

    def execute(self, session: Session) -> None:
        print(completion.script(self.shell, COMMANDS))


class ParsedCommand(Protocol):
    """A dataclass of options, with a method that runs it."""

    def execute(self, session: Session) -> None: ...


def _of_library(name: str, command: library.Command) -> type[ParsedCommand]:
    """A command of structattn itself, which has no options."""
    space = {"__doc__": command.about, "execute": lambda self, session: command.run()}
    return dataclasses.make_dataclass(f"{name}-command", [], namespace=space, frozen=True)


# Every command by the words that name it, in the order of the help.
COMMANDS: dict[str, type[ParsedCommand]] = {
    "compare": CompareCommand,
    "compare caches": CompareCachesCommand,
    "merge": MergeCommand,
    "train": TrainCommand,
    "sweep": SweepCommand,
    "shrink": ShrinkCommand,
    "uptrain": UptrainCommand,
    "evaluate": EvaluateCommand,
    "forecast": ForecastCommand,
    "generate": GenerateCommand,
    "fit": FitCommand,
    "mup check": MupCheckCommand,
    "mup roles": MupRolesCommand,
    "data prepare": DataPrepareCommand,
    "data info": DataInfoCommand,
    "plan": PlanCommand,
    "bench": BenchCommand,
    **{name: _of_library(name, command) for name, command in library.COMMANDS.items()},
    "presets": PresetsCommand,
    "settings": SettingsCommand,
    "completion": CompletionCommand,
}
