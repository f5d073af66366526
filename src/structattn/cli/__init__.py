"""The command line: ``structattn``. The commands of this package are here; those of structattn-lab are found
by their entry point.

This file imports nothing, so that the command handles Ctrl-C before anything else. Only this folder prints.
"""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> int:
    """Runs a command in this process, which Ctrl-C and SIGTERM do not end.

    Args:
        arguments: without the program's name. Default: ``sys.argv``.

    Returns:
        The exit status: 0; 2 after an error, printed in one line to stderr; 1 if the reader of a pipe has
        left; 130 after Ctrl-C; with structattn-lab, 143 after SIGTERM.
    """
    from structattn.cli.call import call
    from structattn.cli.session import Session

    return call(Session(arguments))
