"""What a cache keeps of key heads that keep only some of the far tokens, in rows with left padding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from structattn.cache.chosen_tokens import ChosenTokens, checked_scores
from structattn.cache.contents import TokenShape
from structattn.cache.levels import Level
from structattn.cache.parts import restore_parts, state_of_parts
from structattn.cache.storage import LevelStore, Storage
from structattn.errors import CacheError, ShapeError
from structattn.ops import Backend
from structattn.ops.terms import ScoreTerms


class ChosenRows:
    """A ``ChosenTokens`` for each row, whose blocks begin with its first real token: so a row is that of a
    cache of its own, without padding.

    The methods are those of ``ChosenTokens``.

    Args:
        shape: of the tokens.
        storage: of these heads.
        padding: of each row.
        **options: others of ``ChosenTokens``.

    Attributes:
        length: tokens so far, padding included.

    Cost: a call for each row.
    """

    def __init__(self, shape: TokenShape, *, storage: Storage, padding: tuple[int, ...], **options: Any) -> None:
        if len(padding) != shape.batch:
            raise ShapeError(
                f"left_padding has {len(padding)} rows, but the tokens have {shape.batch}: they need to be equal"
            )
        self.padding = padding
        self.rows = [ChosenTokens(shape._replace(batch=1), storage=storage, **options) for _ in padding]
        self.length = 0
        self._before = 0
        self._new: Tensor | None = None

    @property
    def shape(self) -> TokenShape:
        """Of the tokens."""
        return self.rows[0].shape._replace(batch=len(self.rows))

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys, and for scores."""
        return sum(row.key_nbytes for row in self.rows)

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return sum(row.value_nbytes for row in self.rows)

    def stores(self) -> Iterator[tuple[LevelStore, Level]]:
        """All stores with their levels, row by row."""
        return chain.from_iterable(row.stores() for row in self.rows)

    @property
    def groups(self) -> Iterator[object]:
        """As of ``ChosenTokens``, row by row."""
        return chain.from_iterable(row.groups for row in self.rows)

    def set_scores(self, scores: Tensor) -> None:
        """Takes the scores of the tokens that come next, (B, G, T)."""
        self._new = scores

    def _of_rows(self, count: int) -> Iterator[tuple[int, ChosenTokens, int]]:
        """The rows that have real tokens among ``count`` new ones, each given its scores, with how many of
        these are its padding.
        """
        new, self._new = self._new, None
        scores = checked_scores(new, self.shape, count, self.rows[0].storage)
        for number, (row, padding) in enumerate(zip(self.rows, self.padding, strict=True)):
            skipped = max(0, padding - self.length)
            if skipped < count:
                row.set_scores(scores[number : number + 1, :, skipped:])
                yield number, row, skipped

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens, whose scores were set."""
        for number, row, skipped in self._of_rows(k.shape[2]):
            row.append(k[number : number + 1, :, skipped:], v[number : number + 1, :, skipped:])
        self.length += k.shape[2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """As of ``ChosenTokens``; 0 for padding."""
        out = q.new_zeros((*q.shape[:3], v.shape[3]))
        for number, row, skipped in self._of_rows(k.shape[2]):
            query, key, value = (x[number : number + 1, :, skipped:] for x in (q, k, v))
            of_row = row.attend(query, key, value, options, backend)
            out = out.to(of_row.dtype)  # another one under autocast
            out[number, :, skipped:] = of_row[0]
        self.length += k.shape[2]
        return out

    def try_step(self, q: Any, k: Any, v: Any, scale: object, order: Tensor | None) -> Tensor | None:
        """As ``Contents.try_step``: all rows take the token, or none."""
        new, shape = self._new, self.shape
        if new is None or self.length < max(self.padding) or new.shape != (shape.batch, shape.keys[0], 1):
            return None
        if not len(q) == len(k) == len(v) == shape.batch:
            return None
        self._before, outs = self.length, []
        try:
            for number, row in enumerate(self.rows):
                row.set_scores(new[number : number + 1])
                query, key, value = (x[number : number + 1] for x in (q, k, v))
                out = row.try_step(query, key, value, scale, order)
                if out is None:
                    break
                outs.append(out)
        finally:
            if len(outs) < len(self.rows):
                self._take_back()
        if len(outs) < len(self.rows):
            return None
        self.length, self._new = self.length + 1, None
        return torch.cat(outs)

    def _take_back(self) -> None:
        """Takes the token of a step back from the rows that have it."""
        for row, length in zip(self.rows, self._lengths(self.length), strict=True):
            if row.length != length:
                row.undo()

    def _lengths(self, length: int) -> list[int]:
        """The real tokens of each row among the first ones."""
        return [max(0, length - padding) for padding in self.padding]

    def weights(self, q: Tensor, k: Tensor, options: ScoreTerms) -> Tensor:
        """As of ``ChosenTokens``."""
        return self.rows[0].weights(q, k, options)

    def dense_keys(self, k: Tensor) -> Tensor:
        """As of ``ChosenTokens``."""
        return self.rows[0].dense_keys(k)

    dense_values = dense_keys

    def set_mark(self) -> None:
        """Marks the point to which ``undo`` returns."""
        for row in self.rows:
            row.set_mark()
        self._before = self.length

    def undo(self) -> None:
        """Makes the contents what they were at the mark."""
        for row in self.rows:
            row.undo()
        self.length, self._new = self._before, None

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        for number, (row, of_row) in enumerate(zip(self.rows, self._lengths(length), strict=True)):
            try:
                row.check_crop(min(of_row, row.length))
            except CacheError as error:
                raise CacheError(f"row {number}, without its padding: {error}") from None

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``."""
        self.check_crop(length)
        for row, of_row in zip(self.rows, self._lengths(length), strict=True):
            row.crop(min(of_row, row.length))
        self.length = length

    def reset(self) -> None:
        """Forgets all tokens; memory stays."""
        for row in self.rows:
            row.reset()
        self.length, self._new = 0, None

    def selection(self, indices: Tensor) -> Callable[[], None]:
        """What makes row b row ``indices[b]``, once it is called, and cannot fail."""
        numbers = indices.tolist()
        with torch.inference_mode(False):
            rows = [copy.deepcopy(self.rows[number]) for number in numbers]
        padding = tuple(self.padding[number] for number in numbers)

        def take() -> None:
            self.rows, self.padding = rows, padding

        return take

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """As of ``ChosenTokens``, row by row.

        Raises:
            CacheError: a row has no real token yet.
        """
        if self.length <= max(self.padding):
            raise CacheError("the cache holds nothing but padding of a row so far: save it when each has a real token")
        plain, tensors = state_of_parts(self.rows)
        shape = self.shape
        return {"length": self.length, "key_shape": shape.keys, "value_shape": shape.values, **plain}, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned; raises ``CheckpointError`` where it is not that."""
        restore_parts(self.rows, plain, tensors, self._lengths(plain["length"]))
        self.length = plain["length"]
