"""One call of the command line: its words, the folder it writes to, and how to continue after an
interruption.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # this file is imported before Ctrl-C is handled: each import counts
    from collections.abc import Sequence
    from pathlib import Path


class Session:
    """What is known of a call of the command line while it runs.

    Args:
        arguments: without the program's name. Default: ``sys.argv``.

    Attributes:
        words: the arguments that say what to do.
        with_traceback: whether an error is shown with its traceback.
        resumable: commands that have ``--resume``. The others are run again, which takes as long as before.
    """

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        self._arguments = list(sys.argv[1:] if arguments is None else arguments)
        self.words = [word for word in self._arguments if word != "--traceback"]
        self.with_traceback = self.words != self._arguments
        self.resumable: tuple[str, ...] = ()
        self._folder: Path | None = None
        self._said = False

    @property
    def line(self) -> str:
        """The command line, for a shell."""
        return _prefix() + shlex.join(["structattn", *self.words])

    def writes_to(self, folder: Path, takes: str = "") -> None:
        """Says where the results of a command will be, and what it takes."""
        print(f"structattn: writing to {folder}{takes and f' ({takes})'}", file=sys.stderr, flush=True)

    def opened(self, folder: Path) -> None:
        """Keeps the folder of a command that can be resumed: from now on the line that continues names it."""
        self._folder = folder

    def began(self, folder: Path, takes: str = "") -> None:
        """Keeps the folder, and says where the results will be; once, and of the processes of a launcher by
        the first.
        """
        if not self._said and os.environ.get("RANK", "0") == "0":
            self._said = True
            self.opened(folder)
            self.writes_to(folder, takes)

    def ended(self) -> None:
        """Says what ``interrupted`` returns, from any thread; of the processes of a launcher the first."""
        if os.environ.get("RANK", "0") == "0":
            below_a_bar = "\n" if os.isatty(2) else ""
            with contextlib.suppress(OSError):
                os.write(2, os.fsencode(f"{below_a_bar}{self.interrupted()}\n"))

    def leave(self, number: int) -> None:
        """Ends this process after a signal, wherever it is: what is on disk is complete, and what is not is
        made again.
        """
        try:
            self.flush()
            self.ended()
        finally:
            os._exit(128 + number)

    def flush(self) -> None:
        """Writes what is in the buffers, as far as that is possible."""
        for stream in (sys.stdout, sys.stderr):
            # It may be full, closed, none, or in use where a signal came.
            with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
                stream.flush()

    def interrupted(self) -> str:
        """What is said after an interruption."""
        return f"structattn: interrupted; {self.continuation()}"

    def continuation(self) -> str:
        """How to go on: the command line that continues, or the same one where there is none."""
        words = [*self._arguments]
        if " ".join(words[:1]) not in self.resumable and " ".join(words[:2]) not in self.resumable:
            how = "run it again with"
        else:
            how = "continue with"
            if self._folder is not None:
                if not any(word == "--out" or word.startswith("--out=") for word in words):
                    words += ["--out", str(self._folder)]
                if "--resume" not in words:
                    words.append("--resume")
        launched = "the same launcher and " if "WORLD_SIZE" in os.environ else ""
        return f"{how}: {launched}{_prefix()}{shlex.join(['structattn', *words])}"


def _prefix() -> str:
    """The variable that names modules of other packages (see ``structattn.extensions``), as a command line
    sets it.
    """
    found = os.environ.get("STRUCTATTN_IMPORT")
    return f"STRUCTATTN_IMPORT={shlex.quote(found)} " if found else ""
