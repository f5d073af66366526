"""The commands that print what there is, and the one that adds to it."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from structattn.cli.session import Session
from structattn.cli.train import TaskName


@dataclass(frozen=True)
class StructuresCommand:
    """List the text forms of structured matrices, with parameters and cost."""

    def execute(self, session: Session) -> None:
        from structattn.studies import listings

        print(listings.structures())


@dataclass(frozen=True)
class InfoCommand:
    """List versions, devices, and which backends can run here (and why not)."""

    def execute(self, session: Session) -> None:
        from structattn.studies import listings

        print(listings.info())


@dataclass(frozen=True)
class BuildNativeCommand:
    """Build the C++ code that makes attention with levels faster on a CPU, once on each machine (half a minute)."""

    def execute(self, session: Session) -> None:
        from structattn.ops.native import library

        print("compiling for this machine, unless that was done: half a minute", flush=True)
        print(f"built {library.build_native()}; backend='auto' uses it on this machine")


@dataclass(frozen=True)
class MeasureCostsCommand:
    """Measure what small operations cost on this machine, and store it: attention without the C++ code then decides by it (four seconds)."""

    def execute(self, session: Session) -> None:
        from structattn.ops import costs

        path = costs.measure_costs()
        print(f"wrote {path}; backend='auto' and 'blocked' decide by it on this machine. Remove it to undo that")


@dataclass(frozen=True)
class SpecsCommand:
    """List the text forms of attention variants, with parameters and cost."""

    def execute(self, session: Session) -> None:
        from structattn.studies import listings

        print(listings.specs())


@dataclass(frozen=True)
class PresetsCommand:
    """List the presets of every task, with the time that each takes on this machine."""

    def execute(self, session: Session) -> None:
        from structattn.studies import listings

        print(listings.presets())


@dataclass(frozen=True)
class SettingsCommand:
    """List the settings that --set changes, with their values in a preset.

    Example:
      structattn settings forecast --preset demo
    """

    task: tyro.conf.Positional[TaskName]
    preset: str = "default"
    """The preset whose values are shown (see `structattn presets`)."""

    def execute(self, session: Session) -> None:
        from structattn.studies import listings

        print(listings.settings(self.task, self.preset))
