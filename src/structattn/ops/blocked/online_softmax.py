"""One pass over the scores, tile by tile: the arithmetic that every geometry of ``blocked`` attention shares.

Scores are in units of log 2 and relative to an offset per row that is known before the pass, so that tiles
add up:

    forward    P = 2^(s - offset),  out += P V,  total += P 1          and in the end out / total
    backward   P = 2^(s - lse),  dS = P * (dO V^T - delta),  dQ += dS K,  dK += dS^T Q,  dV += P^T dO

with delta = rowsum(dO * out) - dlse. Offset, lse and delta enter their matrix product as one more column, so
that a score is written once, turned into its weight in place, and read by the products: no maximum, no
subtraction.

Source: the recomputation of weights from the log-sum-exp is that of Dao et al. 2022 (FlashAttention).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.ops.blocked.tiles import (
    LOG2_E,
    KnownLevels,
    ScoreParameters,
    Tile,
    TileLevels,
    masked_products,
    product,
)
from structattn.ops.dropout import Dropout


def _dense_rows(x: Tensor, uses: int) -> Tensor:
    """x, copied if its rows lie apart, as those of a prefix do, and are read often enough: once per step of
    the rows.
    """
    return x if x.stride(1) == x.shape[2] or uses < 2 else x.contiguous()


def _with_column(x: Tensor, column: Tensor | float) -> tuple[Tensor, Tensor]:
    """[x, column] along the last dimension, and the x in it; rows start on cache lines, since products read
    them often.
    """
    width = x.shape[-1]
    joined = x.new_empty((*x.shape[:-1], (width // 16 + 1) * 16))
    joined[..., :width] = x
    joined[..., width] = column
    return joined[..., : width + 1], joined[..., :width]


@dataclass(frozen=True)
class _Chunk:
    """Some batches, rows and columns of a tile."""

    batch: slice
    rows: slice
    cols: slice


def _slices(total: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _steps(shape: tuple[int, int, int], width: int, budget: int) -> tuple[int, int, int]:
    """How much of batch, rows and columns is done at once: products of a good shape first, then as many as
    fit.

    Of small tiles the copied rows, ``width`` numbers each, would take more memory than the scores: they count
    too.
    """
    batch, rows, cols = shape
    row_step = min(rows, 512, budget)
    col_step = min(cols, max(1, min(256, budget // row_step)))
    numbers_per_batch = max(row_step * col_step, (row_step + col_step) * width // 4)
    batch_step = min(batch, max(1, budget // numbers_per_batch))
    col_step = min(cols, max(col_step, budget // (batch_step * row_step)))
    row_step = min(rows, max(row_step, budget // (batch_step * col_step)))
    return batch_step, row_step, col_step


def _grid(tile: Tile, width: int, budget: int) -> Iterator[list[list[_Chunk]]]:
    """The chunks of a tile, for each step of the batch: a list per step of the rows, of one chunk per step of
    the columns.
    """
    batch, rows, cols = tile.shape
    batch_step, row_step, col_step = _steps(tile.shape, width, budget)
    for batch_slice in _slices(batch, batch_step):
        grid = []
        for row_slice in _slices(rows, row_step):
            grid.append([_Chunk(batch_slice, row_slice, col_slice) for col_slice in _slices(cols, col_step)])
        yield grid


class _Scratch:
    """Memory for the scores of one chunk, used again for every chunk."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._memory = like.new_empty(0)

    def __call__(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self._memory.numel() < size:
            self._memory = self._like.new_empty(size)
        return self._memory[:size].view(shape)


class _Dropped:
    """The weights of a tile that dropout drops."""

    def __init__(self, dropout: Dropout | None, tile: Tile) -> None:
        self._dropout = dropout
        if dropout is not None:
            self._rows, self._cols = tile.rows_of(dropout.queries), tile.cols_of(dropout.keys)

    def of(self, chunk: _Chunk) -> Tensor | None:
        """Bool, shaped as the chunk; ``None`` without dropout."""
        if self._dropout is None:
            return None
        return self._dropout.dropped(self._rows[chunk.batch, chunk.rows], self._cols[chunk.batch, chunk.cols])


def row_maxima(tiles: Iterable[Tile], q: Tensor, k: Tensor, parameters: ScoreParameters) -> Tensor:
    """The largest score of each row, (..., 1), in units of log 2; 0 where a row sees no column."""
    width = 2 * q.shape[-1]
    best = q.new_full((*q.shape[:-1], 1), -torch.inf)
    scratch, spare = _Scratch(q), _Scratch(q)
    levels_of_tiles = KnownLevels(parameters, q, 0)
    for tile in tiles:
        levels = levels_of_tiles.of(tile)
        factor = levels.factor * LOG2_E
        query, key = tile.rows_of(q[..., : levels.rank]), tile.cols_of(k[..., : levels.rank])
        maxima = tile.rows_of(best).clone()
        for grid in _grid(tile, width, levels.budget):
            for line in grid:
                batch, rows = line[0].batch, line[0].rows
                row_query, row_best = query[batch, rows] * factor, maxima[batch, rows]
                for chunk in line:
                    hidden = tile.hides(batch, rows, chunk.cols)
                    if hidden is True:
                        continue
                    shape = row_query.shape[0], row_query.shape[1], chunk.cols.stop - chunk.cols.start
                    scores, spare_scores = scratch(*shape), spare(*shape) if levels.is_mixed else None
                    levels.scores(tile, row_query, key[batch, chunk.cols], scores, spare_scores, rows, chunk.cols)
                    parameters.add_terms(scores, tile, batch, rows, chunk.cols, hidden)
                    torch.maximum(row_best, scores.amax(-1, keepdim=True), out=row_best)
        tile.max_rows(best, maxima)
    return best.masked_fill_(best == -torch.inf, 0.0)


def forward(
    tiles: Iterable[Tile],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offset: Tensor | None,
    parameters: ScoreParameters,
) -> tuple[Tensor, Tensor]:
    """The weighted sums and the log-sum-exp.

    Args:
        tiles: every visible pair in exactly one of them.
        q: (..., D), float32 or float64, leading dimensions as the geometry has them.
        k, v: (..., D) and (..., V).
        offset: (..., 1) about the largest score of each row, in units of log 2; ``None`` is 0 and right where
            every score is small (``ScoreParameters.are_small``).
        parameters: the rest of the call.

    Returns:
        out (..., V) and lse (...), base e; 0 and -inf where a row sees nothing.

    Cost: one exponential and 2 (R + V) FLOPs per pair; memory for ``budget`` scores and copies of some rows.
    """
    out, total = q.new_zeros((*q.shape[:-1], v.shape[-1])), q.new_zeros((*q.shape[:-1], 1))
    scratch, spare, width = _Scratch(q), _Scratch(q), q.shape[-1] + v.shape[-1]
    levels_of_tiles = KnownLevels(parameters, q, v.shape[-1])
    for tile in tiles:
        levels = levels_of_tiles.of(tile)
        rank, value_rank, factor = levels.rank, levels.value_rank, levels.factor * LOG2_E
        query, shift = tile.rows_of(q[..., :rank]), None if offset is None else tile.rows_of(offset)[..., 0]
        key, value = tile.cols_of(k[..., :rank]), tile.cols_of(v[..., :value_rank])
        sums, totals = tile.rows_of(out[..., :value_rank]), tile.rows_of(total)
        dropped = _Dropped(parameters.dropout, tile)
        for grid in _grid(tile, width, levels.budget):
            batch = grid[0][0].batch
            # As a column of the product, unless the copy of the keys that this takes would be used once, or
            # something comes between.
            is_plain = not parameters.has_slope and parameters.terms.attn_bias is None and not levels.is_mixed
            in_product = shift is not None and len(grid) > 1 and is_plain
            dense_key = _with_column(key[batch], 1.0)[0] if in_product else _dense_rows(key[batch], len(grid))
            dense_value = _dense_rows(value[batch], len(grid))
            keys = [dense_key[:, chunk.cols] for chunk in grid[0]]
            values = [dense_value[:, chunk.cols] for chunk in grid[0]]
            for line in grid:
                rows = line[0].rows
                row_query, row_total = query[batch, rows] * factor, totals[batch, rows]
                products: list[Tensor | None] = [None] * len(levels.values)
                if shift is not None and in_product:
                    row_query, _ = _with_column(row_query, -shift[batch, rows])
                for chunk, some_keys, some_values in zip(line, keys, values, strict=True):
                    hidden = tile.hides(batch, rows, chunk.cols)
                    if hidden is True:
                        continue
                    shape = row_query.shape[0], row_query.shape[1], some_keys.shape[1]
                    scores, spare_scores = scratch(*shape), spare(*shape) if levels.is_mixed else None
                    levels.scores(tile, row_query, some_keys, scores, spare_scores, rows, chunk.cols)
                    offset_here = None if shift is None or in_product else shift[batch, rows, None]
                    parameters.add_terms(scores, tile, batch, rows, chunk.cols, hidden, offset_here)
                    scores.exp2_()
                    row_total.add_(scores.sum(-1, keepdim=True))
                    is_dropped = dropped.of(chunk)
                    if is_dropped is not None:
                        scores.masked_fill_(is_dropped, 0.0)
                    for n, dims in levels.value_slices:
                        if n:
                            scores.mul_(levels.tables(tile, rows, chunk.cols)[0][n - 1])
                        products[n] = product(scores, some_values[..., dims], products[n])
                _add_products(sums[batch, rows], levels.values, products)
        tile.write_rows(out[..., :value_rank], sums)
        tile.write_rows(total, totals)
    empty = total == 0
    out.div_(total.masked_fill_(empty, 1.0))
    if parameters.dropout is not None:
        out.div_(parameters.dropout.keep_probability)
    lse = total.log_()
    if offset is not None:
        lse.add_(offset, alpha=math.log(2))
    return out, lse.masked_fill_(empty, -torch.inf)[..., 0]


def _add_products(total: Tensor, dims: Sequence[slice], products: Sequence[Tensor | None]) -> None:
    """Adds products to some dimensions each of ``total``; ``None`` where there was nothing to multiply."""
    for some, x in zip(dims, products, strict=True):
        if x is not None:
            total[..., some].add_(x)


class _Sides:
    """The rows and columns of some batches of a tile, as the backward pass reads them.

    Args:
        query, key, value, outward: (batch, rows or columns, d), ``outward`` the gradient of the output; the
            queries in units of log 2.
        shift, drop: (batch, rows), -lse in units of log 2 and -delta, which are added to the products: as one
            more column where all pairs share the same levels.
    """

    def __init__(
        self,
        *,
        tile: Tile,
        levels: TileLevels,
        parameters: ScoreParameters,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        outward: Tensor,
        shift: Tensor,
        drop: Tensor,
    ) -> None:
        self._tile, self._levels, self._parameters = tile, levels, parameters
        self.query, self.key, self.value, self.outward = query, key, value, outward
        self._shift, self._drop = shift, drop
        if not levels.is_mixed:
            self._query_1, self.query = _with_column(query, shift)
            self._key_1, self.key = _with_column(key, 1.0)
            self._value_1, self.value = _with_column(value, 1.0)
            self._outward_1, self.outward = _with_column(outward, drop)

    def weights(
        self, chunk: _Chunk, hidden: Tensor | bool, weight: Tensor, slope: Tensor | None, spare: Tensor | None
    ) -> None:
        """Writes P to ``weight``, and the derivative of the scores by their products to ``slope``."""
        rows, cols, terms = chunk.rows, chunk.cols, self._parameters
        if slope is None and spare is None:
            torch.bmm(self._query_1[:, rows], self._key_1[:, cols].mT, out=weight)
            terms.add_terms(weight, self._tile, chunk.batch, rows, cols, hidden)
        else:
            self._levels.scores(self._tile, self.query[:, rows], self.key[:, cols], weight, spare, rows, cols)
            shift = -self._shift[:, rows, None]
            terms.add_terms(weight, self._tile, chunk.batch, rows, cols, hidden, shift, slope)
        if terms.terms.attn_bias is not None:  # far from 0 a log-sum-exp is rounded, and no weight is above 1
            weight.clamp_(max=0.0)
        weight.exp2_()

    def weight_gradients(
        self, chunk: _Chunk, masks: list[Tensor], is_dropped: Tensor | None, change: Tensor, spare: Tensor | None
    ) -> None:
        """Writes dO V^T - delta to ``change``."""
        rows, cols = chunk.rows, chunk.cols
        if is_dropped is None and spare is None:
            torch.bmm(self._outward_1[:, rows], self._value_1[:, cols].mT, out=change)
            return
        masked_products(self.outward[:, rows], self.value[:, cols], self._levels.values, masks, change, spare)
        if is_dropped is not None:
            change.masked_fill_(is_dropped, 0.0)
        change.add_(self._drop[:, rows, None])


def backward(
    tiles: Iterable[Tile],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    grad_bias: Tensor | None,
    parameters: ScoreParameters,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, keys and values; that of the bias is added to ``grad_bias``.

    Args:
        tiles, q, k, v, parameters: as ``forward``.
        lse: (...), base e; -inf where a row sees nothing.
        delta: (...), rowsum(grad_out * out) - grad_lse.
        grad_out: (..., V).
        grad_bias: shaped as what the tiles take their bias from, or ``None``.

    Returns:
        dq, dk, dv, shaped as q, k, v.

    Cost: one exponential and 2 (3 R + 2 V) FLOPs per pair; memory for 2 ``budget`` scores (1 more with a soft
    cap, and where a tile has pairs of different levels) and copies of some rows.
    """
    grad_q, grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    # A row that sees nothing, or is not there, has weights 0 whatever its columns are; infinity itself would
    # make NaN, and so would a row that sees only the least numbers, which are infinite in units of log 2.
    large = torch.finfo(lse.dtype).max / 4
    offset = lse.masked_fill(lse == -torch.inf, large).clamp(min=-large)[..., None] * LOG2_E
    if parameters.dropout is not None:
        grad_out = grad_out / parameters.dropout.keep_probability  # of the weights that are kept
    weights, changes, slopes, spares = _Scratch(q), _Scratch(q), _Scratch(q), _Scratch(q)
    width = q.shape[-1] + v.shape[-1]
    levels_of_tiles = KnownLevels(parameters, q, v.shape[-1])
    for tile in tiles:
        levels = levels_of_tiles.of(tile)
        rank, value_rank, factor = levels.rank, levels.value_rank, levels.factor
        all_query, all_key = tile.rows_of(q[..., :rank]), tile.cols_of(k[..., :rank])
        all_value, all_outward = tile.cols_of(v[..., :value_rank]), tile.rows_of(grad_out[..., :value_rank])
        shift, drop = -tile.rows_of(offset)[..., 0], -tile.rows_of(delta[..., None])[..., 0]
        row_grad = tile.rows_of(grad_q[..., :rank])
        dropped = _Dropped(parameters.dropout, tile)
        key_grad, value_grad = tile.cols_of(grad_k[..., :rank]), tile.cols_of(grad_v[..., :value_rank])
        for grid in _grid(tile, width, levels.budget):
            batch = grid[0][0].batch
            sides = _Sides(
                tile=tile,
                levels=levels,
                parameters=parameters,
                query=all_query[batch] * (factor * LOG2_E),
                key=all_key[batch],
                value=all_value[batch],
                outward=all_outward[batch],
                shift=shift[batch],
                drop=drop[batch],
            )
            for line in zip(*grid, strict=True):  # the chunks of one span of columns
                cols = line[0].cols
                key_products: list[Tensor | None] = [None] * len(levels.features)
                value_products: list[Tensor | None] = [None] * len(levels.values)
                for chunk in line:
                    rows = chunk.rows
                    hidden = tile.hides(batch, rows, cols)
                    if hidden is True:
                        continue
                    shape = tuple(s.stop - s.start for s in (batch, rows, cols))
                    weight, change = weights(*shape), changes(*shape)
                    slope = slopes(*shape) if parameters.has_slope else None
                    spare = spares(*shape) if levels.is_mixed else None
                    masks, scale = levels.tables(tile, rows, cols) if levels.is_mixed else ([], None)
                    sides.weights(chunk, hidden, weight, slope, spare)
                    is_dropped = dropped.of(chunk)
                    kept_weight = weight if is_dropped is None else change.copy_(weight).masked_fill_(is_dropped, 0.0)
                    for n, dims in levels.value_slices:
                        masked = torch.mul(kept_weight, masks[n - 1], out=spare) if n else kept_weight
                        value_products[n] = product(masked.mT, sides.outward[:, rows, dims], value_products[n])
                    sides.weight_gradients(chunk, masks, is_dropped, change, spare)
                    change.mul_(weight)
                    if grad_bias is not None:
                        tile.add_bias(grad_bias, batch, rows, cols, change)
                    if slope is not None:
                        change.mul_(slope)
                    if scale is not None:
                        change.mul_(scale)
                    for n, dims in enumerate(levels.features):
                        if n:
                            change.mul_(masks[n - 1])
                        row_product = product(change, sides.key[:, cols, dims], None)
                        row_grad[batch, rows, dims].add_(row_product.mul_(factor[dims]))
                        key_products[n] = product(change.mT, sides.query[:, rows, dims], key_products[n])
                _add_products(key_grad[batch, cols], levels.features, key_products)
                _add_products(value_grad[batch, cols], levels.values, value_products)
        tile.write_rows(grad_q[..., :rank], row_grad)
        tile.write_cols(grad_k[..., :rank], key_grad)
        tile.write_cols(grad_v[..., :value_rank], value_grad)
    grad_k.mul_(1 / LOG2_E)  # the queries that it was summed from were in units of log 2
    return grad_q, grad_k, grad_v
