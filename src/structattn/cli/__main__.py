"""The command ``structattn``, also as ``python -m structattn``."""

from __future__ import annotations

import signal

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_noted = 0


def _note(number: int, frame: object) -> None:
    global _noted
    _noted = _noted or number


def run() -> None:
    """Runs the command line and ends the process with its status; after an interruption at once, without
    waiting for what libraries do at exit.

    The first lines handle Ctrl-C and SIGTERM, before imports that take seconds: one that is broken off by an
    exception leaves modules half imported, and some abort the process.
    """
    for number in _SIGNALS:
        signal.signal(number, _note)
    from structattn.cli.session import Session  # it needs little

    session = Session()
    for number in _SIGNALS:
        signal.signal(number, lambda number, frame: session.leave(number))
    if _noted:
        session.leave(_noted)

    import atexit
    import os
    import sys
    from typing import TextIO, cast

    from structattn.cli.call import call
    from structattn.cli.failures import Messages, open_standard_streams

    # Python takes our handlers away at the very end: registered first, this runs last.
    atexit.register(lambda: [signal.signal(number, signal.SIG_IGN) for number in _SIGNALS])
    open_standard_streams()
    sys.stderr = cast(TextIO, Messages(sys.stderr))
    status = call(session, session.leave)
    for number in _SIGNALS:  # all is done
        signal.signal(number, lambda number, frame: os._exit(status))
    if status > 128:
        session.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
