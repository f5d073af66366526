"""Wrong values by what an argument is, and the check that each of them raises an error of structattn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from structattn.errors import StructAttnError

Entry = tuple[Callable[..., Any], Mapping[str, Any], Mapping[str, Sequence[Any]]]


class Thing:
    """An object that no argument expects."""


NAN = math.nan
THING = Thing()
COUNT = (-1, 1.5, True, "3", [1], NAN, THING)  # an int of at least 0
SIZE = (0, *COUNT, 2**62)
NUMBER = (NAN, math.inf, "1", True, [1.0], 10**400, THING)
FLAG = ("yes", 1, 1.0, [True], THING)
NAME = ("nope", 3, ["variance"], True, THING)
INTS = ((), (0,), (4, -1), (4, 1.5), (True,), "44", 4, (2**62,), THING)
TEXT = (None, 3, "", "nope", ["x"], THING)
TENSOR = (None, 3, "x", [[1.0]], THING)


def faults(name: str, entry: Entry) -> list[str]:
    """The wrong values that are accepted, or that raise an error of another package.

    Args:
        entry: what is called, arguments that are right, and wrong values of each argument.
    """
    call, right, wrong = entry
    call(**right)
    found = []
    for argument, values in wrong.items():
        for value in values:
            said = f"{name}({argument}={value!r:.60})"
            try:
                call(**{**right, argument: value})
            except StructAttnError:
                continue
            except Exception as error:
                found.append(f"{said}: {type(error).__name__}: {error!s:.100}")
            else:
                found.append(f"{said}: accepted")
    return found


def count(table: Mapping[str, Entry]) -> int:
    """The wrong calls of a table."""
    return sum(len(values) for _, _, wrong in table.values() for values in wrong.values())
