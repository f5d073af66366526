"""The exceptions and warnings of structattn.

Every mistake that a user can make raises one of these, with what was expected, what came and what to do.
``assert`` is kept for our own invariants.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


class StructAttnError(Exception):
    """Base of every error that structattn raises on purpose."""


class ConfigError(StructAttnError, ValueError):
    """A setting has a value that cannot work, or names something that does not exist."""


class NotRegisteredError(ConfigError):
    """A name, such as that of a form of specs or of a task, that nothing in this process defines, or whose
    package cannot be imported.

    Args:
        message: for who wrote the name.
        reason: for who reads it in a file: what is not registered, and what to do. Default: the message.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class ShapeError(StructAttnError, ValueError):
    """A tensor has the wrong shape, dtype or device for the place where it was given."""


class BackendUnavailableError(StructAttnError, RuntimeError):
    """A backend was asked for by name and cannot run here; the message says why."""


class DerivativeError(StructAttnError, RuntimeError):
    """A derivative was asked for that the path which runs a call cannot give; the message names one that
    can.
    """


class DataError(StructAttnError, ValueError):
    """A data file is missing, unreadable, or holds values that the task cannot use."""


class CheckpointError(StructAttnError, RuntimeError):
    """A checkpoint is missing, truncated, changed since it was written, or belongs to other settings."""


class CacheError(StructAttnError, RuntimeError):
    """A key/value cache no longer holds what is asked of it, or is asked for what it cannot do."""


class GenerationError(StructAttnError, RuntimeError):
    """A language model gives logits from which no token can be chosen."""


class CalibrationError(StructAttnError, RuntimeError):
    """The activations of a model hold NaN or infinity, from which nothing can be learned; the message says
    where.
    """


class TrainingDivergedError(StructAttnError, RuntimeError):
    """The training loss stopped being a finite number."""


class TrainingFailedError(StructAttnError, RuntimeError):
    """Runs that were trained elsewhere did not end; the message names the first one."""


class CommunicationError(StructAttnError, RuntimeError):
    """Another process of a sharded computation has ended, or no longer answers."""


class MissingDependencyError(StructAttnError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


class StructAttnWarning(UserWarning):
    """Base of structattn's warnings."""


def in_words(error: BaseException) -> str:
    """An error of another library in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}".removesuffix(": ")


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint that names the closest known name and lists them all, for an error message.

    Args:
        name: what the user wrote.
        known: the names that would have been accepted.

    Returns:
        ``"did you mean 'x'? Known: 'x', 'y'"``, or only the list when nothing is close.
    """
    import difflib  # these two would be most of what `import structattn` takes
    import re

    names, wanted = sorted(known), name.lower()
    has_word = [n for n in names if wanted in re.split(r"[-. ]", n.lower())]  # btt: bilinear-btt
    by_lower = {n.lower(): n for n in names}
    near = [by_lower[n] for n in difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.5)]
    close = [by_lower[wanted]] if wanted in by_lower else has_word or near
    listing = "known: " + ", ".join(repr(n) for n in names)
    return f"did you mean {close[0]!r}? {listing[0].upper()}{listing[1:]}" if close else listing
