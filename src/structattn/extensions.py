"""What other packages add: entry points of installed ones, and modules that the environment names.

``STRUCTATTN_IMPORT=my_attention,my_task`` names modules that need no installation. They are imported, from
the current folder or the path of Python, when a name is asked for that nothing else knows. Processes that are
started from this one do the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import shlex
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from structattn.errors import NotRegisteredError, in_words, nearest_name

VARIABLE = "STRUCTATTN_IMPORT"
REMEDY = f"install the package that defines it, or name its module in {VARIABLE}"
_LONGEST = 60  # letters of a name in a message
_imported: set[str] = set()


def import_modules() -> None:
    """Imports the modules that the environment names, once.

    Raises:
        NotRegisteredError: one cannot be imported.
    """
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        if name in _imported:
            continue
        _imported.add(name)  # before: a module may read specs while it is imported
        if (here := str(Path.cwd())) not in sys.path:  # that of `structattn` is the folder of its script
            sys.path.append(here)
        try:
            importlib.import_module(name)
        except Exception as error:
            _imported.discard(name)
            raise NotRegisteredError(f"{VARIABLE}={name}: the module cannot be imported: {in_words(error)}") from error


@functools.cache
def installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """The entry points of a group, by name: one each, unless several packages give the same name to different
    objects.
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, {}).setdefault(point.value, point)  # a package may be found twice
    return {name: tuple(points.values()) for name, points in found.items()}


def the_one(what: str, points: tuple[EntryPoint, ...]) -> EntryPoint:
    """The only one of the entry points of a name; raises ``NotRegisteredError`` where there are several."""
    if len(points) > 1:
        packages = " and ".join(f"{_package(point)} ({point.value})" for point in points)
        raise NotRegisteredError(f"{what} {points[0].name!r} is declared by {packages}: uninstall one of the two")
    return points[0]


def load(what: str, points: tuple[EntryPoint, ...]) -> Any:
    """What an entry point names; its package is imported.

    Args:
        what: such as "the form", for messages.
        points: of one name.

    Raises:
        NotRegisteredError: several packages declare the name, or it cannot be imported.
    """
    point = the_one(what, points)
    try:
        return point.load()
    except Exception as error:
        raise NotRegisteredError(
            f"{what} {point.name!r} of {_package(point)} cannot be imported from {point.value}: {in_words(error)}"
        ) from error


def _package(point: EntryPoint) -> str:
    with contextlib.suppress(AttributeError):
        return f"the package {point.dist.name}"  # type: ignore[union-attr]
    return "an installed package"


def not_registered(kind: str, name: str, known: Iterable[str]) -> NotRegisteredError:
    """The error of a name that nothing defines.

    Args:
        kind: such as "form".
        name: what the user wrote, or a file says.
        known: the names that are defined.
    """
    shown = repr(name if len(name) < _LONGEST else f"{name[:_LONGEST]}...")
    reason = f"the {kind} {shown} is not registered: {REMEDY}"
    return NotRegisteredError(f"unknown {kind} {shown}: {nearest_name(name, known)}. Or {reason}", reason)


def shell_prefix() -> str:
    """What stands before a command line that is to be repeated: the modules that this one imports."""
    modules = os.environ.get(VARIABLE, "")
    return f"{VARIABLE}={shlex.quote(modules)} " if modules else ""
