"""The table of commands: each is a dataclass of its options, with a method that runs it."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("tyro") is None:  # the library itself needs torch alone
    raise SystemExit("structattn: the command line needs the extra 'train': pip install 'structattn[train]'")

from structattn.cli.analysis import Bench, Fit, MupCheck, MupRoles, Plan
from structattn.cli.data import DataInfo, Prepare
from structattn.cli.lists import Info, Presets, Settings, Specs, Structures
from structattn.cli.runs import Evaluate, Generate
from structattn.cli.train import Compare, Sweep, Train

Command = (
    Compare
    | Train
    | Sweep
    | Evaluate
    | Generate
    | Fit
    | Bench
    | MupCheck
    | MupRoles
    | Prepare
    | DataInfo
    | Plan
    | Info
    | Specs
    | Structures
    | Presets
    | Settings
)

# Every command by the words that name it, in the order of the help.
COMMANDS: dict[str, type[Command]] = {
    "compare": Compare,
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "generate": Generate,
    "fit": Fit,
    "mup check": MupCheck,
    "mup roles": MupRoles,
    "data prepare": Prepare,
    "data info": DataInfo,
    "plan": Plan,
    "bench": Bench,
    "info": Info,
    "specs": Specs,
    "structures": Structures,
    "presets": Presets,
    "settings": Settings,
}
