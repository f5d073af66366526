"""Triton's interpreter, made fast enough for tests on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Lets Triton's interpreter replace ``triton.language`` once per launch; by itself it looks for what to
    replace at every call of a function.

    Does nothing where the interpreter is not imported, or is another version of it.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or not hasattr(interpreter, "_patch_lang"):
        yield
        return
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: dict[frozenset[int], object] = {}

    def replace_once(function: Callable[..., object]) -> object:
        names = {id(interpreter.tl), id(interpreter.tl.core)}
        found = frozenset(map(id, function.__globals__.values())) & names
        if found not in replaced:
            replaced[found] = replace(function)
        return replaced[found]

    def launch_anew(*args: object, **options: object) -> object:
        replaced.clear()
        return launch(*args, **options)

    with (
        patch.object(interpreter, "_patch_lang", replace_once),
        patch.object(interpreter.GridExecutor, "__call__", launch_anew),
    ):
        yield
