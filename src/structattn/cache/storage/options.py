"""How a cache stores numbers: in which bits, and which tokens stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from structattn.checks import MAX_LENGTH, check_int, check_size, describe, is_int
from structattn.errors import ConfigError

BITS = (16, 8, 4)


@dataclass(frozen=True)
class Storage:
    """Keys and values of tokens that are far back in 8 or 4 bits; recent tokens and sink tokens as the model
    makes them.

    A number x is kept as a code c, a whole number from 0 to 2^bits - 1, and read as zero + scale c. Keys have
    scale and zero for each dimension and ``group_size`` consecutive tokens, values for each token and
    ``group_size`` dimensions. They have 16 bits each, or 64 where the model has float64. The error of a
    number is at most half a step, scale / 2.

    A query at position p reads the codes of the tokens before ``first_exact(p)``, whatever calls the tokens
    came in, so that one call, many, and decoding agree. A group is quantized once, when all of its tokens
    have left the residual.

    Args:
        key_bits, value_bits: 4, 8, or 16 for the numbers of the model. A tuple has one for each level, level
            1 first: ``(4, 8, 16)`` spends more on near tokens. Values without ``value_ranks`` have one level.
        group_size: numbers that share a scale; even. Blocks of levels are multiples of it, or stay
            exact: those of ``exact_slots`` positions at most.
        residual: how many of the last tokens are exact, the query's own counted.

    Raises:
        ConfigError: an option is out of its range.

    Cost: bits per number, and two 16-bit numbers for each group; residual + 2 ``group_size`` tokens of each
        level are kept exact.

    Source: KIVI (Liu et al. 2024, arXiv 2402.02750): keys per channel, values per token, a residual window.
    """

    key_bits: int | tuple[int, ...] = 4
    value_bits: int | tuple[int, ...] = 4
    group_size: int = 64
    residual: int = 128

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            key_bits: int | Sequence[int] = 4,
            value_bits: int | Sequence[int] = 4,
            group_size: int = 64,
            residual: int = 128,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            entries = bits if isinstance(bits, tuple | list) else (bits,)
            if not entries or not all(is_int(entry) and entry in BITS for entry in entries):
                raise ConfigError(
                    f"{name} must be 16, 8 or 4, or a tuple of them with one per level, got {describe(bits)}"
                )
            if isinstance(bits, list):
                object.__setattr__(self, name, tuple(bits))
        check_size("group_size", self.group_size, MAX_LENGTH)
        if self.group_size % 2:
            raise ConfigError(f"group_size must be even, since two codes of 4 bits share a byte, got {self.group_size}")
        check_int("residual", self.residual, minimum=0, maximum=MAX_LENGTH)

    @property
    def exact_slots(self) -> int:
        """Exact tokens that are kept: the residual, the group that is leaving it, and one more, so that
        tokens can be taken back.
        """
        return self.residual + 2 * self.group_size

    def stays_exact(self, longest: int | None) -> bool:
        """Whether a level that never keeps more than ``longest`` positions is not quantized."""
        return longest is not None and longest <= self.exact_slots

    def first_exact(self, position: int) -> int:
        """The first position whose numbers a query at ``position`` sees as the model made them."""
        return max(0, (position + 1 - self.residual) // self.group_size * self.group_size)

    def bits(self, name: str, count: int) -> tuple[int, ...]:
        """``key_bits`` or ``value_bits`` of each of ``count`` levels.

        Raises:
            ConfigError: they are those of another number of levels.
        """
        bits = getattr(self, name)
        if not isinstance(bits, tuple):
            return (bits,) * count
        if len(bits) != count:
            raise ConfigError(f"{name} needs one entry per level: expected {count}, got {len(bits)}, {bits}")
        return bits
