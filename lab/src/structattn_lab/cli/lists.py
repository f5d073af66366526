"""The commands that print what there is."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from structattn.cli.session import Session
from structattn_lab.cli.train import TaskName


@dataclass(frozen=True)
class PresetsCommand:
    """List the presets of every task, with the time that each takes on this machine."""

    def execute(self, session: Session) -> None:
        from structattn_lab.cli import listings

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
        from structattn_lab.cli import listings

        print(listings.settings(self.task, self.preset))
