"""The ``structattn`` command: parses, calls, prints. Only files of this folder print."""

from __future__ import annotations

import importlib.metadata
import logging
import sys

from structattn.cli.failures import close_output, in_one_line, open_standard_streams
from structattn.cli.parsing import parse
from structattn.cli.session import Session
from structattn.progress import inner_bars
from structattn.studies import interrupt


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name. Default: ``sys.argv``.

    Returns:
        The exit status: 0; 2 after an error, printed in one line to stderr; 1 if the reader of a pipe has left; 130 after Ctrl-C, 143 after
        SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    open_standard_streams()
    with_traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    session = Session(arguments)
    try:
        with interrupt.handled(session.ended), inner_bars():
            _run(arguments, session)
        sys.stdout.flush()
    except BrokenPipeError:
        close_output()  # the reader, such as ``head``, has seen enough
        return 1
    except KeyboardInterrupt as error:
        print(session.interrupted(), file=sys.stderr)
        return error.status if isinstance(error, interrupt.Stopped) else 130
    except Exception as error:
        line = in_one_line(error)
        if line is None or with_traceback:
            raise
        print(f"structattn: {line}", file=sys.stderr)
        close_output()  # it may be the output that cannot be written
        return 2
    return 0


def _run(arguments: list[str], session: Session) -> None:
    if arguments == ["--version"]:
        print(f"structattn {importlib.metadata.version('structattn')}")
        return
    parse(arguments).execute(session)
