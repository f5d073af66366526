"""What ``torch.compile`` is told of functions, without importing it: that takes longer than importing
PyTorch, and few programs compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_traced(function: Function) -> Function:
    """A decorator: a function that ``torch.compile`` calls while it traces, and whose result it takes as a
    constant. As ``torch.compiler.assume_constant_result``, which sets the same mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Untraced:
    """A static method that ``torch.compile`` leaves to Python: ``torch.compiler.disable`` makes it, when it
    is first read.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._disabled: Callable[..., Any] | None = None

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        if self._disabled is None:
            self._disabled = torch.compiler.disable(self._function)
        return self._disabled
