"""The old form of specs of baseline models, ``peer:NAME``, which is ``baseline:NAME`` today."""

from __future__ import annotations

import re
from typing import Any

_OLD, _NEW = "peer:", "baseline:"
_OLD_SPEC = re.compile(rf"{_OLD}(DLinear|NHITS|PatchTST|iTransformer)\b")  # no other models had the old form


def todays_spec(spec: str) -> str:
    """A spec in the form of today."""
    return _NEW + spec.removeprefix(_OLD) if spec.startswith(_OLD) else spec


def old_spec(spec: str) -> str:
    """A spec as versions before today's form wrote it."""
    return _OLD + spec.removeprefix(_NEW) if spec.startswith(_NEW) else spec


def with_todays_specs(data: Any) -> Any:
    """Plain data, such as a record or settings, with all specs in the form of today."""
    if isinstance(data, str):
        return todays_spec(data) if _OLD_SPEC.match(data) else data  # it may be the name of a column
    if isinstance(data, dict):
        return {with_todays_specs(name): with_todays_specs(value) for name, value in data.items()}
    if isinstance(data, list):
        return [with_todays_specs(value) for value in data]
    return data
