"""What an online softmax pass is given: tiles of the score matrix, the parameters of the scores, and products
of a tile level by level:

    S = (Q_0 K_0^T + sum over deeper levels n of M_n * (Q_n K_n^T)) * C

M_n is 1 where a pair shares level n, else 0. C is the scale of a pair over that of one that shares the fewest
levels. One exponential is computed per pair, however many numbers of levels there are in a tile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from structattn.layout.levels import LevelLayout
from structattn.ops.dropout import Dropout
from structattn.ops.terms import ScoreTerms

LOG2_E = math.log2(math.e)
# A bound of |score| in units of log 2: 2^80 times any length is far from the end of float32, and so is 2^-80.
_SMALL = 80.0
# How far, in powers of 2, sums and single products stay from the ends of the exponents of their dtype.
_ROOM_ABOVE = 8
_ROOM_BELOW = 28


class Tile(ABC):
    """Some rows against some columns of the score matrix, in a batch; visible pairs share ``level`` levels or
    one of ``deeper``, rising.
    """

    level: int
    deeper: tuple[int, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int]:
        """Batch, rows and columns."""

    @abstractmethod
    def rows_of(self, x: Tensor) -> Tensor:
        """Its rows of a query-side tensor (..., d), shaped as the geometry has it: (batch, rows, d), at best
        a view.
        """

    @abstractmethod
    def cols_of(self, x: Tensor) -> Tensor:
        """Its columns of a key-side tensor (..., d): (batch, columns, d), at best a view."""

    def write_rows(self, x: Tensor, changed: Tensor) -> None:  # noqa: B027 (not abstract: right for views)
        """Makes what ``rows_of`` gave the rows of x again, after it was written to; a view needs nothing."""

    def write_cols(self, x: Tensor, changed: Tensor) -> None:  # noqa: B027
        """As ``write_rows``, of what ``cols_of`` gave."""

    @abstractmethod
    def max_rows(self, x: Tensor, value: Tensor) -> None:
        """Takes the larger of (batch, rows, d) and what ``rows_of`` reads, in its memory."""

    @abstractmethod
    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        """What is hidden of some rows and columns: all (``True``), nothing (``False``), or a bool mask that
        broadcasts to it.
        """

    @abstractmethod
    def shared(self, rows: slice, cols: slice) -> Tensor:
        """The number of levels that some rows and columns share, int (rows, columns), any where hidden: the
        same in the whole batch.
        """

    @property
    def pattern(self) -> object:
        """What is the same object for tiles whose pairs share the same levels."""
        return self

    @abstractmethod
    def distances(self, rows: slice, cols: slice, dtype: torch.dtype) -> Tensor:
        """|query position - key position| of some rows and columns, (rows, columns): the same in the whole
        batch.
        """

    def bias_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """The additive bias, or the mask, of some rows and columns, (batch, rows, columns)."""
        raise AssertionError("a bias or mask is computed by spans")

    def add_bias(self, bias: Tensor, batch: slice, rows: slice, cols: slice, value: Tensor) -> None:
        """Adds to what ``bias_of`` reads."""
        raise AssertionError("a bias is computed by spans")


@dataclass(frozen=True, kw_only=True)
class ScoreParameters:
    """What a pass needs of a call besides the tensors.

    Attributes:
        layout: its ranks, scaling and value ranks are used here; its blocks by the geometry.
        terms: of the scores; bias and mask have 4 dimensions, and the ALiBi slopes are (..., 1), of each
            query, as the geometry has the queries.
        dropout: of the weights; ``None`` without.
        budget: scores that are held at once.
    """

    layout: LevelLayout
    terms: ScoreTerms
    dropout: Dropout | None
    budget: int
    _factors: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def rank(self, level: int) -> int:
        """R, the dimensions of a score."""
        return sum(self.layout.ranks[:level])

    def value_rank(self, level: int, value_dim: int) -> int:
        """The dimensions of the value that a pair contributes to."""
        return value_dim if self.layout.value_ranks is None else sum(self.layout.value_ranks[:level])

    def factor(self, level: int, deepest: int, like: Tensor) -> Tensor:
        """(R,) of the ``deepest`` level: times a query, it gives scores in natural units of pairs that share
        ``level`` levels.
        """
        key = (level, deepest, like.dtype, like.device)
        if key not in self._factors:
            per_level, per_count = self.layout.score_factors(self.terms.scale)
            values = [
                per_count[level - 1] * factor
                for factor, rank in zip(per_level[:deepest], self.layout.ranks[:deepest], strict=True)
                for _ in range(rank)
            ]
            self._factors[key] = torch.tensor(values, dtype=like.dtype, device=like.device)
        return self._factors[key]

    @property
    def has_slope(self) -> bool:
        """Whether the derivative of a score by its scaled product is not 1, so that ``add_terms`` says it."""
        return self.terms.softcap is not None

    def add_terms(
        self,
        scores: Tensor,
        tile: Tile,
        batch: slice,
        rows: slice,
        cols: slice,
        hidden: Tensor | bool,
        offset: Tensor | None = None,
        slope: Tensor | None = None,
    ) -> None:
        """Makes scaled products of some rows and columns of a tile, in units of log 2, its scores; -inf where
        they are hidden.

        Args:
            offset: (batch, rows, 1), subtracted from the scores. With a soft cap the products must be without
                it.
            slope: shaped as the scores; the soft cap's derivative is written to it. Default: not needed.
        """
        if self.terms.softcap is not None:
            cap = self.terms.softcap * LOG2_E
            scores.div_(cap).tanh_()
            if slope is not None:
                torch.mul(scores, scores, out=slope).neg_().add_(1.0)
            scores.mul_(cap)
        # Before the offset, as for the maxima: far from 0 the largest score is then the offset, to the bit.
        if self.terms.attn_bias is not None:
            scores.add_(tile.bias_of(self.terms.attn_bias, batch, rows, cols), alpha=LOG2_E)
        if offset is not None:
            scores.sub_(offset)
        if self.terms.alibi_slopes is not None:
            slopes = tile.rows_of(self.terms.alibi_slopes)[batch, rows]
            scores.addcmul_(slopes, tile.distances(rows, cols, scores.dtype), value=-LOG2_E)
        if self.terms.attn_mask is not None:
            scores.masked_fill_(~tile.bias_of(self.terms.attn_mask, batch, rows, cols), -torch.inf)
        if isinstance(hidden, Tensor):
            scores.masked_fill_(hidden, -torch.inf)

    def _largest_safe_score(self, v: Tensor) -> float:
        """The largest |score|, in units of log 2, whose exponential times any value, or sum of them, its
        dtype holds.

        Negative if there is none, as where a value is not finite.
        """
        largest, least = 0.0, math.inf
        # In chunks, so that the sizes never take as much memory as v.
        for chunk in v.flatten(0, -2).split(max(1, self.budget // v.shape[-1])):
            size = chunk.abs()
            low, high = (float(x) for x in torch.aminmax(size))
            if low == 0:
                low = float(size.masked_fill_(size == 0, torch.inf).amin())
            if not math.isfinite(high):
                return -1.0
            largest, least = max(largest, high), min(least, low)
        if largest == 0:
            return _SMALL
        end = math.log2(torch.finfo(v.dtype).max)
        above = end - _ROOM_ABOVE - math.log2(largest) - math.log2(v.shape[-2])
        return min(_SMALL, above, end - _ROOM_BELOW + math.log2(least))

    def are_small(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether every score is surely so small that its exponential can be summed as it is, without a
        maximum.

        By Cauchy and Schwarz: first from the norms of whole rows, then, if that is not enough, from the norms
        of the prefixes that each number of levels uses. False if an input is not finite.

        Args:
            q, k: (..., D).
            v: (..., V): large and tiny values leave less room for the exponentials.

        Cost: one or two passes over q and k and one over v, and waiting for a GPU.
        """
        per_level, per_count = self.layout.score_factors(self.terms.scale)
        limit = self._largest_safe_score(v)
        if self.terms.softcap is not None and self.terms.softcap * LOG2_E <= limit:
            return True
        # Squares of numbers below 2^-63 vanish in float32: so much may be missing from a norm.
        norm_error = math.sqrt(q.shape[-1]) * 2.0**-62
        norms = [float(torch.linalg.vector_norm(x, dim=-1).amax()) + norm_error for x in (q, k)]
        factor = max(map(abs, per_level)) * max(map(abs, per_count)) * LOG2_E
        if norms[0] * norms[1] * factor <= limit:
            return True
        largest = []
        for x, factors in ((q, per_level), (k, (1.0,) * len(per_level))):
            prefixes = x.new_zeros((len(factors), x.shape[-1]))  # of each number of levels, weighted
            for level, (features, weight) in enumerate(zip(self.layout.slices, factors, strict=True)):
                prefixes[level:, features] = weight**2
            # In chunks, so that the squares never take as much memory as x.
            chunks = x.flatten(0, -2).split(max(1, self.budget // x.shape[-1]))
            largest.append(torch.stack([(prefixes @ chunk.square().T).amax(1) for chunk in chunks]).amax(0))
        bounds = (
            (a + norm_error) * (b + norm_error) * abs(c)
            for a, b, c in zip(*(x.sqrt().tolist() for x in largest), per_count, strict=True)
        )
        return all(bound * LOG2_E <= limit for bound in bounds)


def product(weights: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
    """Adds weights @ x to ``total``; (batch, rows, d).

    On a CPU few rows times many columns are 3 times as fast, at d = 8, as many rows times few columns: a
    narrow product is taken transposed, and so is its memory.
    """
    if x.shape[2] >= 48:
        return torch.bmm(weights, x) if total is None else total.baddbmm_(weights, x)
    return torch.bmm(x.mT, weights.mT).mT if total is None else total.mT.baddbmm_(x.mT, weights.mT).mT


class TileLevels:
    """The levels of tiles whose pairs share the same numbers of levels.

    Attributes:
        features, values: the dimensions of keys and of values that all pairs have, then those of each deeper
            level; of values they may be none.
        value_slices: those of the values that have dimensions, numbered as the levels.
        rank, value_rank: the dimensions of keys and of values that any pair has.
        factor: of the queries, in natural units, for pairs that share the fewest levels.
        is_mixed: whether pairs share different numbers of levels.
        budget: scores that are held at once.
    """

    def __init__(self, levels: tuple[int, ...], parameters: ScoreParameters, like: Tensor, value_dim: int) -> None:
        self._levels, self._like = levels, like
        self.features = _slices([parameters.rank(n) for n in levels])
        self.values = _slices([parameters.value_rank(n, value_dim) for n in levels])
        self.value_slices = [(n, dims) for n, dims in enumerate(self.values) if dims.start < dims.stop]
        self.rank, self.value_rank = self.features[-1].stop, self.values[-1].stop
        self.factor = parameters.factor(levels[0], levels[-1], like)
        self.is_mixed = len(levels) > 1
        self.budget = max(1, parameters.budget // 2) if self.is_mixed else parameters.budget  # two products are held
        scales = parameters.layout.score_factors(parameters.terms.scale)[1][levels[0] - 1 : levels[-1]]
        self._scales = None if scales[-1] == scales[0] else [x / scales[0] for x in scales]
        self._pattern: object = None
        self._tables: dict[tuple[int, int, int, int], tuple[list[Tensor], Tensor | None]] = {}  # of the last pattern

    def tables(self, tile: Tile, rows: slice, cols: slice) -> tuple[list[Tensor], Tensor | None]:
        """M_n of each deeper level, (rows, columns), and C; ``None`` where it is 1."""
        if tile.pattern is not self._pattern:
            self._pattern = tile.pattern
            self._tables.clear()
        key = rows.start, rows.stop, cols.start, cols.stop
        if key not in self._tables:
            shared = tile.shared(rows, cols)
            masks = [(shared >= level).to(self._like.dtype) for level in self._levels[1:]]
            scale = None
            if self._scales is not None:
                table = torch.tensor(self._scales, dtype=self._like.dtype, device=self._like.device)
                scale = table[(shared.long() - self._levels[0]).clamp_(min=0)]
            self._tables[key] = masks, scale
        return self._tables[key]

    def scores(
        self, tile: Tile, query: Tensor, key: Tensor, out: Tensor, spare: Tensor | None, rows: slice, cols: slice
    ) -> None:
        """S of some rows and columns, from queries that are multiplied by ``factor`` and keys; ``spare`` is
        as ``out``.
        """
        masks, scale = self.tables(tile, rows, cols) if self.is_mixed else ((), None)
        masked_products(query, key, self.features, masks, out, spare)
        if scale is not None:
            out.mul_(scale)


class KnownLevels:
    """The levels of the tiles of a pass, made once for each combination of them."""

    def __init__(self, parameters: ScoreParameters, like: Tensor, value_dim: int) -> None:
        self._arguments = parameters, like, value_dim
        self._by_numbers: dict[tuple[int, ...], TileLevels] = {}

    def of(self, tile: Tile) -> TileLevels:
        """Those of a tile."""
        levels = (tile.level, *tile.deeper)
        if levels not in self._by_numbers:
            self._by_numbers[levels] = TileLevels(levels, *self._arguments)
        return self._by_numbers[levels]


def masked_products(
    a: Tensor, b: Tensor, slices: Sequence[slice], masks: Sequence[Tensor], out: Tensor, spare: Tensor | None
) -> None:
    """A_0 B_0^T + sum of M_n * (A_n B_n^T) over the slices of the last dimension, into ``out``."""
    if not masks:  # which may have one more column than the slices say
        torch.bmm(a, b.mT, out=out)
        return
    assert spare is not None
    torch.bmm(a[..., slices[0]], b[..., slices[0]].mT, out=out)
    for dims, mask in zip(slices[1:], masks, strict=True):
        if dims.start < dims.stop:
            torch.bmm(a[..., dims], b[..., dims].mT, out=spare)
            out.addcmul_(spare, mask)


def _slices(ends: list[int]) -> list[slice]:
    return [slice(start, end) for start, end in pairwise([0, *ends])]
