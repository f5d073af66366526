"""An order of a head's dimensions in which every level's slice is closed under the pairing of rotary
positions.

"The first r dimensions" of a rotated key are halves of pairs, whose product with a query's does not depend
only on the distance. Permuting the dimensions of queries and keys alike changes no score, so they are
permuted such that each slice holds whole pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from structattn.checks import check_choice, check_size, check_type, is_int, quoted
from structattn.errors import ConfigError
from structattn.layers.rotary import Rotary
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import LevelLayout
from structattn.ops.checks import is_eager

Pairing = Literal["halves", "adjacent"]
RotarySplit = Literal["low_far", "interleaved"]
MOST_DIMS = 999_998  # of a rotation, whose text has six digits at most
_FEW_NUMBERS = 2**14  # of a decoding step, where sixteen slices cost more than a gather

ROTARY_SPLITS: tuple[RotarySplit, ...] = get_args(RotarySplit)


@dataclass(frozen=True)
class Rotation:
    """The rotary pairs of a head.

    Attributes:
        pairing: ``"halves"``: dimension i with i + dims / 2; ``"adjacent"``: 2 i with 2 i + 1.
        dims: rotated dimensions, the first ones of the head. The others keep their values at every position.
    """

    pairing: Pairing
    dims: int

    def __post_init__(self) -> None:
        if self.pairing not in get_args(Pairing) or not is_int(self.dims) or self.dims < 2 or self.dims % 2:
            raise ConfigError(
                f"a rotation is of 'halves' or 'adjacent' pairs in an even number of dimensions, got {self}"
            )

    def __str__(self) -> str:
        return f"{self.pairing}:{self.dims}"

    @classmethod
    def parse(cls, text: str) -> Rotation:
        """The rotation of a text such as ``"halves:64"``, which ``str`` writes.

        Raises:
            ConfigError: it is another text.
        """
        check_type("a rotation", text, str, "a text such as 'halves:64'")
        match = re.fullmatch(r"(halves|adjacent):(\d{1,6})", text)
        if match is None:
            raise ConfigError(f"a rotation is written 'halves:64' or 'adjacent:64', got {quoted(text)}")
        return cls(match[1], int(match[2]))  # type: ignore[arg-type]

    def pairs(self, head_dim: int) -> tuple[tuple[int, int], ...]:
        """The D / 2 pairs of a head, from the fastest to the slowest; dimensions that are not rotated come
        last.

        Raises:
            ConfigError: the head has fewer dimensions than are rotated, or an odd number.
        """
        check_size("head_dim", head_dim)
        if head_dim < self.dims or head_dim % 2:
            raise ConfigError(f"{self.dims} dimensions are rotated in pairs, and the head has {head_dim}")
        half = self.dims // 2
        rotated = [(i, i + half) if self.pairing == "halves" else (2 * i, 2 * i + 1) for i in range(half)]
        return (*rotated, *((i, i + 1) for i in range(self.dims, head_dim, 2)))


def check_split(split: Any) -> RotarySplit:
    """The split; raises ``ConfigError`` unless it keeps trained frequencies, which ``per_level`` does not."""
    if isinstance(split, str) and split == "per_level":
        raise ConfigError(
            "rotary_split 'per_level' gives every level separate frequencies, but a trained model keeps those that it "
            "was trained with: use 'low_far' or 'interleaved'"
        )
    check_choice("rotary_split", split, ROTARY_SPLITS)
    return split


def even_ranks(ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The number of rotary pairs of each level; raises ``ConfigError`` where a rank is odd."""
    for level, rank in enumerate(ranks, start=1):
        if rank % 2:
            raise ConfigError(
                f"ranks must be even with rotary positions, which rotate two dimensions together: level {level} of "
                f"{'|'.join(map(str, ranks))} has {rank}"
            )
    return tuple(rank // 2 for rank in ranks)


def level_pairs(ranks: tuple[int, ...], split: RotarySplit) -> tuple[tuple[int, ...], ...]:
    """Which of the D / 2 rotary pairs each level gets, as ``Rotary`` with that split does it.

    Args:
        ranks: dimensions of each level, level 1 first.
        split: ``"low_far"``: level 1 gets the slowest; ``"interleaved"``: every level gets some of the whole
            range.

    Returns:
        For each level the numbers of its pairs, ascending: 0 is the fastest.

    Raises:
        ConfigError: a rank is odd.
    """
    even_ranks(ranks)
    frequencies = Rotary(split=split).frequencies(ranks)
    fast_to_slow = sorted((theta for level in frequencies for theta in level), reverse=True)
    number = {theta: pair for pair, theta in enumerate(fast_to_slow)}
    return tuple(tuple(number[theta] for theta in level) for level in frequencies)


def dimension_order(ranks: tuple[int, ...], split: RotarySplit, rotation: Rotation) -> tuple[int, ...]:
    """The dimension of the model at each position in the order of the levels.

    The slice of a level holds the first dimensions of its pairs, then their partners, in the same order. With
    one level this is the model's own order. Dimensions that are not rotated count as the slowest pairs.

    Args:
        ranks: dimensions of each level, level 1 first; their sum is D.
        split: see ``level_pairs``.
        rotation: which dimensions are pairs.

    Returns:
        D numbers, a permutation.

    Raises:
        ConfigError: a rank is odd.
    """
    if len(ranks) == 1:
        return tuple(range(ranks[0]))
    return dimensions_of(level_pairs(ranks, split), rotation, sum(ranks))


def dimensions_of(levels: Iterable[Sequence[int]], rotation: Rotation, head_dim: int) -> tuple[int, ...]:
    """The dimensions of a head in the order of levels, of which each has these of its rotary pairs: 0 is the
    fastest.
    """
    pairs = rotation.pairs(head_dim)
    return tuple(pairs[pair][end] for level in levels for end in (0, 1) for pair in level)


def rotation_of(rotary: str | Rotation, head_dim: int) -> Rotation:
    """The rotation of a text: ``"halves"`` and ``"adjacent"`` are of the whole head, ``"halves:64"`` of its
    first 64 dimensions.

    Raises:
        ConfigError: it is another text, or the head has fewer dimensions or an odd number.
    """
    check_type("rotary", rotary, str | Rotation, "a text such as 'halves', 'adjacent' or 'halves:64'")
    if isinstance(rotary, str):
        rotary = Rotation.parse(f"{rotary}:{head_dim}" if rotary in get_args(Pairing) else rotary)
    rotary.pairs(head_dim)  # which checks the sizes
    return rotary


def rotary_order(layout: Layout, rotary: str | Rotation = "halves", split: RotarySplit = "low_far") -> tuple[int, ...]:
    """The order of a head's dimensions in which each level of a layout has whole rotary pairs.

    For code that rotates queries and keys itself: a level is a slice of the dimensions, and a slice that cuts
    a rotary pair scores by positions in place of distances. Rotated queries and keys in this order have no
    cut pair:

        q, k = q[..., order], k[..., order]

    ``attention_function(layout, rotary=...)`` does so at every call. Values keep their order.

    Args:
        layout: ``LevelLayout`` or ``GlobalWindowLayout``; its ranks are even and sum to the head dimension D.
        rotary: how the code pairs dimensions: ``"halves"`` (dimension i with i + D / 2), ``"adjacent"`` (2 i
            with 2 i + 1), or either with the number of rotated dimensions, the first ones of the head:
            ``"halves:64"``. Default ``"halves"``.
        split: ``"low_far"`` (default): level 1 gets the slowest pairs; ``"interleaved"``: every level gets
            some of the whole range.

    Returns:
        D numbers, a permutation: the dimension of the head at each position. Dimensions that are not rotated
        count as the slowest.

    Raises:
        ConfigError: a rank is odd, or the rotation does not fit the head.

    Cost: O(D) on the host; indexing with it copies queries and keys once.

    Source: ours; rotary positions are those of Su et al. 2021.

    Example:
        >>> rotary_order(LevelLayout((4, 4), (64, 16)), "adjacent")
        (4, 6, 5, 7, 0, 2, 1, 3)
    """
    check_type("layout", layout, (LevelLayout, GlobalWindowLayout), "a LevelLayout or GlobalWindowLayout")
    return dimension_order(layout.ranks, check_split(split), rotation_of(rotary, layout.head_dim))


Runs = tuple[tuple[int, int], ...]  # the first dimension of each, and the one after its last


@lru_cache(maxsize=64)
def runs_of(order: tuple[int, ...]) -> Runs:
    """An order of dimensions as runs of consecutive ones: ``x[..., order]`` is their concatenation."""
    starts = [0, *(i for i in range(1, len(order)) if order[i] != order[i - 1] + 1), len(order)]
    return tuple((order[a], order[b - 1] + 1) for a, b in pairwise(starts))


def reordered(x: Tensor, runs: Runs) -> Tensor:
    """The last axis of x as its runs, concatenated: slices need no index tensor on the device, and are faster
    than a gather of many numbers.
    """
    if len(runs) <= 1:
        return x
    if x.is_cpu and is_eager(x) and x.numel() <= _FEW_NUMBERS:
        return x.index_select(-1, _index(runs))
    return torch.cat([x[..., first:end] for first, end in runs], dim=-1)


@dataclass(frozen=True)
class RunOrder:
    """Puts the dimensions of queries and keys (B, heads, T, D) in an order that all heads share, given as
    runs; none: the one they have.
    """

    runs: Runs

    def __call__(self, x: Tensor, /) -> Tensor:
        """See ``reordered``."""
        return reordered(x, self.runs)

    @cached_property
    def index(self) -> Tensor | None:
        """The dimension at each position, int64 (1, D) on the CPU; ``None`` where they stay."""
        return _index(self.runs)[None] if len(self.runs) > 1 else None

    def of_heads(self, first: int, end: int) -> RunOrder:
        """The same: heads share it."""
        return self


UNCHANGED = RunOrder(())


@lru_cache(maxsize=64)
def _index(runs: Runs) -> Tensor:
    """The positions of the runs, on the CPU."""
    with torch.inference_mode(False):
        return torch.tensor([i for run in runs for i in range(*run)], device="cpu")
