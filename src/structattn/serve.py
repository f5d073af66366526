"""``python -m structattn.serve MODEL``: transformers' own server, for models that are saved with structured
attention.

The server finds the class of a model by its name in the module ``transformers``, and has no hook for classes
of other packages. This starts it in a process where our classes are registered and have their names there.
Nothing of the server is changed. See ``docs/serving.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from structattn.errors import MissingDependencyError, StructAttnError
from structattn.extras import install_command

_LIBRARIES = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")  # what transformers' server imports


def server() -> Callable[..., None]:
    """The command ``serve`` of transformers, with its signature, from which its options are read.

    Raises:
        MissingDependencyError: libraries of the server are not installed, or this version of transformers has
            no such command.
    """
    if missing := [name for name in _LIBRARIES if find_spec(name) is None]:
        raise MissingDependencyError(
            f"structattn.serve starts the server of transformers, which needs {', '.join(missing)}: "
            f"{install_command('serve')}"
        )
    import transformers

    # Registers our classes. It comes before the server is imported: transformers replaces its own module
    # while more of it is loaded, and the server would look names up in the old one.
    import structattn.integrations.transformers  # noqa: F401

    try:
        from transformers.cli.serve import Serve
    except ImportError as error:
        raise MissingDependencyError(
            "structattn.serve starts transformers.cli.serve.Serve, which transformers 5.17 to 5.24 have, and "
            f"transformers {transformers.__version__} has not ({error}): {install_command('serve')}"
        ) from error

    return Serve


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until the process is told to end.

    Args:
        arguments: of the command line; ``None``: those of the process.
    """
    try:
        command = server()
        import typer

        app = typer.Typer(add_completion=False)
        app.command()(command)
        app(args=arguments, prog_name="python -m structattn.serve")
    except StructAttnError as error:
        sys.exit(f"structattn.serve: {error}")


if __name__ == "__main__":
    main()
