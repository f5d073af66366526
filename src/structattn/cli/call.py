"""One call of the command line: from its words to its exit status."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable

from structattn.cli.failures import close_output, in_one_line, is_full_disk, open_standard_streams
from structattn.cli.parsing import parse
from structattn.cli.session import Session
from structattn.progress import inner_bars
from structattn.studies import interrupt


def call(session: Session, at_once: Callable[[int], None]) -> int:
    """Runs a command.

    Args:
        session: its words.
        at_once: called with the number of a signal that comes where nothing has to be saved first; see ``interrupt.handled``.

    Returns:
        The exit status: see ``main``.
    """
    open_standard_streams()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        with interrupt.handled(lambda _: session.ended(), at_once), inner_bars():
            _run(session)
        sys.stdout.flush()
    except BrokenPipeError:
        close_output()  # the reader, such as ``head``, has seen enough
        return 1
    except KeyboardInterrupt as error:
        session.flush()
        session.ended()
        return error.status if isinstance(error, interrupt.Stopped) else 130
    except Exception as error:
        line = in_one_line(error)
        if line is None or session.with_traceback:
            raise
        if is_full_disk(error):
            line = f"{line}. Free some space, and {session.continuation()}"
        print(f"structattn: {line}", file=sys.stderr)
        close_output()  # it may be the output that cannot be written
        return 2
    return 0


def _run(session: Session) -> None:
    if session.words == ["--version"]:
        print(f"structattn {importlib.metadata.version('structattn')}")
        return
    parse(session.words).execute(session)
