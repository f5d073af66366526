"""What a compiled program knows of a cache or a layer: a tensor with its number, under which operators find
it, and no more.

``torch.compile`` makes a program for what it has read of Python's objects, and another one where any of that
is different. So code that it traces reads two things of a cache: a tensor that holds its number, of which
only the shape counts, and how many tokens there are, which is an int of any value from the second program on.
What is kept, the position in each block and the C++ code are looked up by an operator, whenever the program
runs. The number of a cache that is gone is never used again.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structattn.checks import is_exporting
from structattn.errors import CacheError

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def is_traced() -> bool:
    """Whether ``torch.compile`` traces this code, for a program that runs in this process."""
    return torch.compiler.is_dynamo_compiling() and not is_exporting()


def new_number(thing: object) -> Tensor | None:
    """A number for an object of this process, int64 (1,) on the CPU; the object is not kept alive.

    ``None`` in code that ``torch.compile`` traces: a cache that is made there is filled there too, and
    ``give_numbers`` comes later.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    number = next(_numbers)
    _objects[number] = thing
    with torch.inference_mode(False):
        return torch.tensor([number], device="cpu")


def numbered(number: Tensor) -> Any:
    """The object with a number.

    Raises:
        CacheError: it is gone.
    """
    if (thing := _objects.get(int(number))) is None:
        raise CacheError(
            "a compiled program was given a cache or a layer that is gone: call the compiled function again"
        )
    return thing


@dataclass(slots=True, eq=False)
class Count:
    """How many tokens a cache holds, as far as calls have ended: a compiled call that breaks off leaves it as
    it was.
    """

    tokens: int = 0


class NumberedLayer(torch.nn.Module):
    """A layer that compiled programs give to the operators of its cache; a copy has another number.

    Attributes:
        number: see ``new_number``; it is no buffer and is not saved.
    """

    number: Tensor | None

    def set_number(self) -> None:
        """Gives the layer its number, once when it is made."""
        self.number = new_number(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_number()
