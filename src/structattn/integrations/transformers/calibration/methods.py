"""The ways in which a cache is made smaller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from structattn.checks import check_choice, describe
from structattn.errors import ConfigError

# Heads keep some far tokens; windows; fewer bits; or fewer dimensions.
Method = Literal["tokens", "heads", "bits", "levels"]


def checked_methods(methods: Sequence[Method]) -> set[Method]:
    """A set of methods.

    Raises:
        ConfigError: they are none, or others.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise ConfigError(
            f"methods must be a tuple of some of {', '.join(get_args(Method))}, such as ('tokens', 'bits'), got "
            f"{describe(methods)}"
        )
    for method in methods:
        check_choice("methods", method, get_args(Method))
    return set(methods)
