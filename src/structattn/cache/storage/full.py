"""Numbers in the dtype of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from structattn.cache.storage.page import Page, writable

_ALL = slice(None)


class FullPage(Page):
    """A page that keeps every number as the model made it; see ``Page``.

    Attributes:
        buffers: one tensor, (B, heads, dim, slots).

    Cost: reading gives views and copies nothing; itemsize bytes per number.
    """

    def __init__(self, numbers: Tensor) -> None:
        with torch.inference_mode(False):  # else it could not be written to outside of that mode
            self._page = numbers
            self._flat = numbers.flatten(0, 1)  # the same memory
        batch, heads, dim, slots = self._page.shape
        self._shape = batch, heads, dim, slots

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], like: Tensor) -> Self:
        with torch.inference_mode(False):  # as in `__init__`
            return cls(like.new_zeros(shape))

    @classmethod
    def of(cls, numbers: Tensor) -> Self:
        return cls(writable(numbers))

    @staticmethod
    def nbytes_of(shape: tuple[int, int, int, int], dtype: torch.dtype) -> int:
        batch, heads, dim, slots = shape
        return batch * heads * dim * slots * dtype.itemsize

    # A copy gets separate memory, also where tensors would be sent to another process as shared memory. The
    # flat view is made again: copied, it would share no memory with the page.

    def __getstate__(self) -> dict[str, Any]:
        return {"numbers": self._page.clone()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(writable(state["numbers"]))  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.of(self._page.clone())

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._page.device

    @property
    def nbytes(self) -> int:
        return self._page.numel() * self._page.element_size()

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return (self._page,)

    def numbers(self, slot: int, size: int, dtype: torch.dtype) -> Tensor:
        # A compiled step has one program for all sizes.
        is_whole = not torch.compiler.is_compiling() and size == self._shape[3]
        x = self._flat if is_whole else self._flat.narrow(2, slot, size)
        return x if x.dtype == dtype else x.to(dtype)

    def rows(self, rows: slice, slot: int, size: int) -> Tensor:
        x = self._page if rows == _ALL else self._page[rows]  # every step asks for all rows
        return x if size == self._shape[3] else x.narrow(3, slot, size)

    def write(self, x: Tensor, rows: slice, slot: int) -> None:
        self.rows(rows, slot, x.shape[2]).copy_(x.transpose(2, 3))

    def write_each(self, x: Tensor, rows: Tensor, slots: Tensor) -> None:
        self._page[rows, :, :, slots] = x

    @staticmethod
    def write_token(places: Sequence[tuple[Page, int]], numbers: Sequence[Tensor]) -> None:
        cells = [page._flat.select(2, slot) for page, slot in places]  # type: ignore[attr-defined]
        torch._foreach_copy_(cells, list(numbers))

    def kept(self, rows: slice, slot: int, size: int) -> Callable[[], object]:
        cells = self.rows(rows, slot, size)
        return partial(cells.copy_, cells.clone())

    def kept_each(self, rows: Tensor, slots: Tensor) -> Callable[[], object]:
        index = (rows, slice(None), slice(None), slots)
        return partial(self._page.__setitem__, index, self._page[index])  # tensors in an index: a copy

    def selected(self, rows: Tensor) -> Self:
        with torch.inference_mode(False):  # as in `__init__`
            return self.__class__(self._page.index_select(0, rows.to(self._page.device)))
