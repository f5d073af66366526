"""One call of the command line: from its words to its exit status."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

from structattn.cli.failures import close_output, in_one_line, is_full_disk, open_standard_streams
from structattn.cli.session import Session

AtOnce = Callable[[int], None]
# Packages that replace the commands of this one declare a function of a session and of what ends the process
# after a signal.
GROUP = "structattn.commands"


def call(session: Session, at_once: AtOnce | None = None) -> int:
    """Runs a command: that of structattn-lab where it is installed, else that of this package.

    Args:
        session: its words.
        at_once: called with the number of a signal that comes where nothing has to be saved first. Default:
            an exception ends the command.

    Returns:
        The exit status: see ``structattn.cli.main``.
    """
    open_standard_streams()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        _runner()(session, at_once)
        sys.stdout.flush()
    except BrokenPipeError:
        close_output()  # the reader, such as ``head``, has seen enough
        return 1
    except KeyboardInterrupt as error:
        session.flush()
        session.ended()
        return int(getattr(error, "status", 130))  # the lab's knows the signal
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


def _runner() -> Callable[[Session, AtOnce | None], None]:
    for point in entry_points(group=GROUP):
        runner: Callable[[Session, AtOnce | None], None] = point.load()
        return runner
    from structattn.cli.commands import run

    return run
