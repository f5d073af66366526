"""What a baseline layer keeps of the tokens while it decodes: tables of numbers, (rows, slots, width)."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from structattn.cache import PAGE_SIZE
from structattn.cache.rows import OneLayerCache
from structattn.cache.tokens import checked_padding
from structattn.checks import MAX_LENGTH, check_int, check_size
from structattn.errors import CacheError, ConfigError, ShapeError


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """One table: token p of a sequence is in slot p, or shares one.

    Args:
        width: numbers per slot.
        per: tokens that share a slot, which is there when all of them are. Default 1.
        lag: tokens that must follow them. Default 0.
        ring: slots that are written again in turn. Default ``None``: as many slots as tokens need.
        first: slots before the ring, which keep the first tokens. Default 0.
    """

    width: int
    per: int = 1
    lag: int = 0
    ring: int | None = None
    first: int = 0

    def slots(self, num_tokens: int) -> int:
        """The slots that are in use after that many tokens."""
        most = max(0, num_tokens - self.lag) // self.per
        return most if self.ring is None else min(most, self.first + self.ring)

    def slot_of(self, positions: Tensor) -> Tensor:
        """The slots of new tokens, -1 for those before the sequence, and for those that later ones of them
        write over.
        """
        slots = positions.div(self.per, rounding_mode="floor")
        if self.ring is not None:
            is_over = (slots >= self.first) & (slots <= slots[..., -1:] - self.ring)
            turned = torch.where(slots < self.first, slots, self.first + (slots - self.first) % self.ring)
            slots = torch.where(is_over, -1, turned)
        return torch.where(positions < 0, -1, slots)

    def held(self, last: Tensor, count: int) -> Tensor:
        """The positions of the tokens in the first slots of a table with a ring, (..., count); -1 where there
        is none.

        Args:
            last: (..., 1), the position of the last token.
            count: slots.
        """
        assert self.ring is not None
        slots = torch.arange(count, device=last.device).expand(*last.shape[:-1], -1)
        turned = last - (last - slots) % self.ring
        held_positions = torch.where(slots < self.first, slots, torch.where(turned < self.first, -1, turned))
        return torch.where(held_positions > last, -1, held_positions)


class TableCache(OneLayerCache):
    """The cache of a baseline layer; memory grows by pages of tokens.

    Args:
        tables: by name.
        max_length, page_size, left_padding: as of ``LevelCache``.

    Raises:
        ConfigError: an option is out of its range.
    """

    def __init__(
        self,
        tables: Mapping[str, SlotTable],
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> None:
        if max_length is not None:
            check_size("max_length", max_length, MAX_LENGTH)
        check_size("page_size", page_size, MAX_LENGTH)
        self.tables = dict(tables)
        self.max_length, self.page_size = max_length, page_size
        self._padding = None if left_padding is None else checked_padding(left_padding)
        self._numbers: dict[str, Tensor] = {}  # from the first tokens on
        self._length = 0
        self._before: int | None = None  # the length before the last tokens; None: they cannot be taken back
        self._overwritten: list[tuple[Tensor, tuple[Tensor, Tensor], Tensor]] = []
        self._layer: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_before": None, "_overwritten": [], "_layer": None}

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def bind(self, layer: object, tables: Mapping[str, SlotTable]) -> None:
        """Makes this the cache of one layer; a copy has none yet. Raises ``ConfigError`` if it is the cache
        of another one.
        """
        if self.tables != tables or (self._layer is not None and self._layer() is not layer):
            raise ConfigError("the cache is of another layer: make it with new_cache(), and give each layer its own")
        self._layer = weakref.ref(layer)

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return self._length

    @property
    def batch_size(self) -> int | None:
        """B, known from the first tokens or from ``left_padding``."""
        for numbers in self._numbers.values():
            return numbers.shape[0]
        return None if self._padding is None else len(self._padding)

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Leading tokens of each row that are padding; ``None`` without padding."""
        return self._padding

    @property
    def nbytes(self) -> int:
        """Bytes of its tables, as allocated. Until the next tokens it also holds what the last ones replaced,
        for ``undo``.
        """
        return sum(numbers.nbytes for numbers in self._numbers.values())

    def take(self, x: Tensor) -> Tensor:
        """Counts new tokens and makes room for them.

        Args:
            x: (B, T, E).

        Returns:
            Their positions, (T,) or with padding (B, T), negative in the padding.

        Raises:
            ShapeError: another number of rows than before.
        """
        if self.batch_size not in (None, x.shape[0]):
            raise ShapeError(f"the cache is of {self.batch_size} rows, and the tokens of {x.shape[0]}")
        self._before, self._overwritten = self._length, []
        positions = self.positions(x.shape[1]).to(x.device)
        self._length += x.shape[1]
        needed = max(self._length, self.max_length or 0)
        if self.max_length is None or needed > self.max_length:
            needed = math.ceil(needed / self.page_size) * self.page_size
        with torch.inference_mode(False):
            for name, table in self.tables.items():
                old, slots = self._numbers.get(name), table.slots(needed)
                if old is None or old.shape[1] < slots:
                    new = x.new_zeros(x.shape[0], slots, table.width)
                    if old is not None:
                        new[:, : old.shape[1]] = old
                    self._numbers[name] = new
        return positions

    def read(self, name: str) -> Tensor:
        """A table as far as it is in use, (B, slots, width), a view."""
        return self._numbers[name][:, : self.tables[name].slots(self._length)]

    def write(self, name: str, numbers: Tensor, positions: Tensor) -> None:
        """Stores numbers (B, T, width) of the tokens at positions (T,) or (B, T); nothing where they are
        negative.
        """
        table = self._numbers[name]
        slots = self.tables[name].slot_of(positions).expand(numbers.shape[0], -1)
        rows, tokens = (slots >= 0).nonzero(as_tuple=True)
        place = rows, slots[rows, tokens]
        self._overwritten.append((table, place, table[place]))
        table.index_put_(place, numbers.detach()[rows, tokens].to(table.dtype))

    def extend(self, name: str, numbers: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the new tokens in a table with a ring, as ``write``; they may be more than it has slots.

        Returns:
            The numbers that were held before, with the new ones behind them, (B, S, width); and their
            positions, (S,) or (B, S), negative, and the numbers 0, where there is none.
        """
        assert self._before is not None
        table = self.tables[name]
        old = self._numbers[name][:, : table.slots(self._before)].to(numbers.dtype)
        held = torch.cat([table.held(positions[..., :1] - 1, old.shape[1]), positions], dim=-1)
        both = torch.cat([old, numbers], dim=1).masked_fill_((held < 0)[..., None], 0)  # padding may be NaN
        self.write(name, numbers, positions)
        return both, held

    def undo(self) -> None:
        """Takes the tokens of the last ``take`` back; raises ``CacheError`` if something else was done
        since.
        """
        if self._before is None:
            raise CacheError("the last thing done to this cache was not to take tokens: there is nothing to undo")
        for table, place, numbers in reversed(self._overwritten):
            table[place] = numbers
        self._length, self._before, self._overwritten = self._before, None, []

    def reset(self) -> None:
        """Forgets all tokens; memory, shape and padding stay."""
        self._length, self._before, self._overwritten = 0, None, []
        for numbers in self._numbers.values():
            numbers.zero_()

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``; errors as ``check_crop``."""
        self.check_crop(length)
        self._before = None
        if length == 0:
            self.reset()
        self._length = length

    def check_crop(self, length: int) -> None:
        """Raises ``ConfigError`` for a length that is not there, ``CacheError`` where slots are shared: their
        numbers have no way back.
        """
        check_int("length", length, minimum=0, maximum=self._length)
        is_shared = any(table.ring is not None or table.per > 1 for table in self.tables.values())
        if is_shared and length not in (0, self._length):
            raise CacheError("this cache keeps no tokens to go back to: reset() it, and read the text again")

    def _take_rows(self, indices: Tensor) -> None:
        self._before, self._overwritten = None, []
        self._numbers = {name: old.index_select(0, indices.to(old.device)) for name, old in self._numbers.items()}
        if self._padding is not None:
            self._padding = tuple(self._padding[row] for row in indices.tolist())
