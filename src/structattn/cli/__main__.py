"""``python -m structattn.cli``, the same as ``structattn``."""

import contextlib
import os
import sys
from typing import TextIO, cast

from structattn.cli import main
from structattn.cli.failures import Messages, open_standard_streams


def run() -> None:
    """Runs the command line and ends the process with its status; after an interruption at once, without waiting for what libraries do at exit."""
    open_standard_streams()
    sys.stderr = cast(TextIO, Messages(sys.stderr))
    status = main()
    if status > 128:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
