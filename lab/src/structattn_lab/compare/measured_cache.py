"""A cache that ``structattn compare caches`` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class UnavailableError(Exception):
    """A cache that this machine or model cannot have; the message says why."""


@dataclass(frozen=True)
class Prepared:
    """What is given to ``evaluate_cache``: a model, what makes an empty cache of it, and a press."""

    model: Any
    new_cache: Callable[[], Any]
    press: Callable[[Any], Any] | None = None


@dataclass(frozen=True, kw_only=True)
class MeasuredCache:
    """A cache to measure.

    Attributes:
        name, about: what it is called in tables, and what it is.
        prepare: makes of a freshly loaded model what is measured; raises ``UnavailableError``.
        kept: of all numbers of the context, the share that the method needs; ``None``: all that is allocated.
    """

    name: str
    about: str
    prepare: Callable[[Any], Prepared]
    kept: float | None = None
