"""One call of the command line, with an interruption handled where work can be saved."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from structattn.cli.session import Session
from structattn.progress import inner_bars
from structattn_lab.runs import interrupt

RESUMABLE = ("compare", "compare caches", "train", "sweep", "shrink", "uptrain", "data prepare")


def run(session: Session, at_once: Callable[[int], None] | None) -> None:
    """Runs a command.

    Args:
        session: its words.
        at_once: called with the number of a signal that comes where nothing has to be saved first; see
            ``interrupt.handled``. Default: ``interrupt.stop``.
    """
    session.resumable = RESUMABLE
    if session.words == ["--version"]:
        print(f"structattn {importlib.metadata.version('structattn')}")
        return
    with interrupt.handled(lambda _: session.ended(), at_once or interrupt.stop), inner_bars():
        from structattn_lab.cli.parsing import parse

        parse(session.words).execute(session)
