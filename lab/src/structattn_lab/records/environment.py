"""The origin of a result: when, with which command, on which machine, with which versions."""

from __future__ import annotations

import datetime
from typing import Any

from structattn.machine import hardware, versions


def origin(command: str) -> dict[str, Any]:
    """The fields of ``ResultRecord`` of a record that is made now."""
    created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"created": created, "command": command, "versions": versions(), "hardware": hardware()}
