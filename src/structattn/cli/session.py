"""One call of the command line: the folder it writes to, and how to continue after an interruption."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from structattn.extensions import shell_prefix


class Session:
    """What is known of a call of the command line while it runs.

    Args:
        arguments: without the program's name.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._folder: Path | None = None

    @property
    def line(self) -> str:
        """The command line, for a shell."""
        return shell_prefix() + shlex.join(["structattn", *self._arguments])

    def writes_to(self, folder: Path, takes: str = "") -> None:
        """Says where the results of a command will be, and what it takes."""
        print(f"structattn: writing to {folder}{takes and f' ({takes})'}", file=sys.stderr, flush=True)

    def began(self, folder: Path, takes: str = "") -> None:
        """Says where the results will be, of a command that can be resumed; once, and of the processes of a launcher by the first."""
        if self._folder is None and os.environ.get("RANK", "0") == "0":
            self._folder = folder
            self.writes_to(folder, takes)

    def ended(self, number: int) -> None:
        """Says the same from another thread, just before the process ends: what is in the buffers of this one stays there."""
        os.write(2, f"\n{self.interrupted()}\n".encode())

    def interrupted(self) -> str:
        """What is said after an interruption: the command line that continues, where there is one."""
        if self._folder is None:
            return "structattn: interrupted"
        words = [*self._arguments]
        if not any(word == "--out" or word.startswith("--out=") for word in words):
            words += ["--out", str(self._folder)]
        if "--resume" not in words:
            words.append("--resume")
        launched = "the same launcher and " if "WORLD_SIZE" in os.environ else ""
        return f"structattn: interrupted; continue with: {launched}{shell_prefix()}{shlex.join(['structattn', *words])}"
