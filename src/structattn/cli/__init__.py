"""The ``structattn`` command: parses, calls, prints. Only files of this folder print.

This file imports nothing, so that the command handles Ctrl-C before anything else.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line in this process, which Ctrl-C and SIGTERM do not end.

    Args:
        arguments: without the program's name. Default: ``sys.argv``.

    Returns:
        The exit status: 0; 2 after an error, printed in one line to stderr; 1 if the reader of a pipe has left; 130 after Ctrl-C, 143 after
        SIGTERM.
    """
    import sys

    from structattn.cli.call import call
    from structattn.cli.session import Session
    from structattn.studies import interrupt

    return call(Session(sys.argv[1:] if arguments is None else arguments), interrupt.stop)
