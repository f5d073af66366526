"""The commands of this package, which need no other: argparse reads their words."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass

from structattn.cli.session import Session
from structattn.errors import ConfigError, nearest_name
from structattn.extras import install_lab


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command without options.

    Attributes:
        about: what it does, in a sentence.
        run: does it, and prints.
    """

    about: str
    run: Callable[[], None]


def _info() -> None:
    from structattn.cli import listings

    print(listings.info())


def _specs() -> None:
    from structattn.cli import listings

    print(listings.specs())


def _structures() -> None:
    from structattn.cli import listings

    print(listings.structures())


def _build_native() -> None:
    from structattn.ops.native import library

    print("compiling for this machine, unless that was done: half a minute", flush=True)
    print(f"built {library.build_native()}; backend='auto' uses it on this machine")


def _measure_costs() -> None:
    from structattn.ops import costs

    path = costs.measure_costs()
    print(f"wrote {path}; backend='auto' and 'blocked' decide by it on this machine. Remove it to undo that")


COMMANDS = {
    "build-native": Command(
        about="Build the C++ code that makes attention with levels faster on a CPU, once on each machine "
        "(half a minute).",
        run=_build_native,
    ),
    "measure-costs": Command(
        about="Measure what small operations cost on this machine, and store it: attention without the C++ code "
        "then decides by it (four seconds).",
        run=_measure_costs,
    ),
    "info": Command(about="List versions, devices, and which backends can run here (and why not).", run=_info),
    "specs": Command(about="List the text forms of attention variants, with parameters and cost.", run=_specs),
    "structures": Command(
        about="List the text forms of structured matrices, with parameters and cost.", run=_structures
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; {self.prog} --help shows what it takes")


def run(session: Session, at_once: object = None) -> None:
    """Runs the command that the words of a session describe; without words it prints the help.

    Raises:
        ConfigError: the words describe none.
    """
    words = session.words
    if words == ["--version"]:
        import structattn

        print(f"structattn {structattn.__version__}")
        return
    named = [word for word in words[:1] if not word.startswith("-")]
    if named and named[0] not in COMMANDS:
        raise ConfigError(
            f"unknown command {named[0]!r}: {nearest_name(named[0], COMMANDS)}. structattn-lab, which is not "
            f"installed, has the commands that train, compare and measure: {install_lab()}"
        )
    parser = _Parser(
        prog="structattn",
        description="What structattn has and can do here. Commands that train, compare and measure are in "
        f"structattn-lab: {install_lab()}",
        epilog="structattn --version prints the version. With --traceback, an error shows where it was raised.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.about, description=command.about).set_defaults(command=command)
    if not words:
        parser.print_help(sys.stdout)
        return
    chosen = parser.parse_args(words)
    if not hasattr(chosen, "command"):
        raise ConfigError(f"expected a command, got {words[0]!r}: one of {', '.join(COMMANDS)}")
    chosen.command.run()
