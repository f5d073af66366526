"""Prompts of different lengths as one tensor, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from structattn.checks import check_tensor, quoted
from structattn.errors import ConfigError, ShapeError

PromptTokens = Tensor | Sequence[Sequence[int] | Tensor]


@dataclass(frozen=True)
class Prompts:
    """Token ids of several prompts, checked.

    Args:
        rows: of each prompt.
    """

    rows: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, prompts: PromptTokens, vocab_size: int) -> Prompts:
        """Checked prompts from a tensor or lists of token ids.

        Args:
            prompts: (B, T) ints, or B lists or 1-dimensional tensors of ints, of any lengths.
            vocab_size: V; ids lie in [0, V).

        Raises:
            ShapeError: not one row of ids per prompt, no prompt, or an empty one.
            ConfigError: an id that is not an int, or out of range.
        """
        expected = "expected a (B, T) tensor or a list with the token ids of each prompt"
        for tensor in prompts if isinstance(prompts, tuple | list) else (prompts,):
            if isinstance(tensor, Tensor):
                check_tensor("prompts", tensor)
                if tensor.is_meta:
                    raise ShapeError("prompts are on the meta device, where tensors have no numbers")
        if isinstance(prompts, Tensor) and prompts.dim() != 2:
            raise ShapeError(f"prompts: {expected}, got a tensor of shape {tuple(prompts.shape)}")
        token_rows: Any = (
            prompts.tolist() if isinstance(prompts, Tensor) else prompts
        )  # what a user gives may be anything
        if isinstance(token_rows, str) or not isinstance(token_rows, Sequence) or not token_rows:
            raise ShapeError(f"prompts: {expected}, got {quoted(token_rows)}; text needs to be encoded")
        rows = []
        for number, prompt in enumerate(token_rows):
            row: Any = prompt.tolist() if isinstance(prompt, Tensor) else prompt
            if isinstance(row, str) or not isinstance(row, Sequence):
                raise ShapeError(
                    f"prompts: {expected}, got {quoted(prompt)} for prompt {number}; put one prompt into a list"
                )
            if not row:
                raise ShapeError(
                    f"prompt {number} is empty: give at least one token, such as the one that starts a text"
                )
            for token in row:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    raise ConfigError(f"prompt {number}: token ids are ints in [0, {vocab_size}), got {quoted(token)}")
            rows.append(tuple(row))
        return cls(tuple(rows))

    @property
    def longest(self) -> int:
        """T, tokens of the longest prompt."""
        return max(map(len, self.rows))

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Padding of each row, (B,); ``None`` when all have the same length."""
        padding = tuple(self.longest - len(row) for row in self.rows)
        return padding if any(padding) else None

    def tokens(self, device: torch.device) -> Tensor:
        """(B, T) int64, with zeros for padding."""
        padded = [(0,) * (self.longest - len(row)) + row for row in self.rows]
        return torch.tensor(padded, dtype=torch.int64, device=device)
