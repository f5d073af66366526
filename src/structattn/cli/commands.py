"""The table of commands: each is a dataclass of its options, with a method that runs it."""

from __future__ import annotations

import importlib.util
from typing import Protocol

from structattn.extras import install_command

if importlib.util.find_spec("tyro") is None:  # the library itself needs torch alone
    raise SystemExit(f"structattn: the command line needs the extra 'train': {install_command('train')}")

from structattn.cli.analysis import BenchCommand, FitCommand, MupCheckCommand, MupRolesCommand, PlanCommand
from structattn.cli.data import DataInfoCommand, DataPrepareCommand
from structattn.cli.lists import (
    BuildNativeCommand,
    InfoCommand,
    MeasureCostsCommand,
    PresetsCommand,
    SettingsCommand,
    SpecsCommand,
    StructuresCommand,
)
from structattn.cli.runs import EvaluateCommand, GenerateCommand
from structattn.cli.session import Session
from structattn.cli.train import CompareCommand, SweepCommand, TrainCommand
from structattn.cli.uptrain import UptrainCommand


class Command(Protocol):
    """A dataclass of options, with a method that runs it."""

    def execute(self, session: Session) -> None: ...


# Every command by the words that name it, in the order of the help.
COMMANDS: dict[str, type[Command]] = {
    "compare": CompareCommand,
    "train": TrainCommand,
    "sweep": SweepCommand,
    "uptrain": UptrainCommand,
    "evaluate": EvaluateCommand,
    "generate": GenerateCommand,
    "fit": FitCommand,
    "mup check": MupCheckCommand,
    "mup roles": MupRolesCommand,
    "data prepare": DataPrepareCommand,
    "data info": DataInfoCommand,
    "plan": PlanCommand,
    "bench": BenchCommand,
    "build-native": BuildNativeCommand,
    "measure-costs": MeasureCostsCommand,
    "info": InfoCommand,
    "specs": SpecsCommand,
    "structures": StructuresCommand,
    "presets": PresetsCommand,
    "settings": SettingsCommand,
}
