"""Attention of a decoding step straight from what a cache keeps: every number is read once, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from structattn.cache.latent import Latent
from structattn.cache.levels import Level, Softmax
from structattn.cache.storage import GroupStore, LevelStore, Storage
from structattn.ops.terms import ScoreTerms


@dataclass(frozen=True, kw_only=True)
class KeyValueView:
    """What a cache keeps, after the new tokens were appended.

    Attributes:
        softmaxes: those of the layout.
        keys: a store for each level of each softmax; with ``latent`` the states, then their inverse RMS.
        values: stores with their levels.
        sink_keys, sink_values: of the sink tokens, in all dimensions; empty where there are none.
        latent: see ``Latent``.
        positions: (row of the layout, position of the last token), one for all rows or one per row of the
            batch; the position is at least 0.
        factors_by_scale: what ``factors`` has made.
        columns: what was made for these positions; views of layers at the same positions may share it.
        key_groups, value_groups: the quantized tokens of each of ``keys`` and ``values``, or ``None``: only
            the fused kernel reads them.
        storage: which these are; ``None`` where there are none.
    """

    softmaxes: tuple[Softmax, ...]
    keys: list[LevelStore]
    values: list[tuple[LevelStore, Level]]
    sink_keys: list[LevelStore]
    sink_values: list[LevelStore]
    latent: Latent | None
    positions: list[tuple[int, int]]
    factors_by_scale: dict[tuple[object, ...], Tensor]
    columns: dict[tuple[Level, ...], Columns] = field(default_factory=dict)
    key_groups: Sequence[GroupStore | None] = ()
    value_groups: Sequence[GroupStore | None] = ()
    storage: Storage | None = None

    def factors(self, scale: float | None, like: Tensor) -> Tensor:
        """(D,): times a query, it gives what each level adds to a score where that level is the deepest that
        is shared.
        """
        if torch.compiler.is_compiling():  # they are constants of the program; a dict would be guarded
            return self._new_factors(scale, like)
        key = (scale, like.dtype, like.device)
        if key not in self.factors_by_scale:
            self.factors_by_scale[key] = self._new_factors(scale, like)
        return self.factors_by_scale[key]

    def _new_factors(self, scale: float | None, like: Tensor) -> Tensor:
        values = [
            of_level * of_count
            for softmax in self.softmaxes
            for rank, of_level, of_count in zip(softmax.layout.ranks, *softmax.layout.score_factors(scale), strict=True)
            for _ in range(rank)
        ]
        return torch.tensor(values, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class _Slice:
    """The columns of the scores that a span of a page holds, the same for all rows."""

    columns: slice

    def add(self, total: Tensor, value: Tensor) -> None:
        """Adds (B, G, M, n) to these columns of (B, G, M, N)."""
        total[..., self.columns] += value

    def take(self, x: Tensor) -> Tensor:
        """These columns of (B, G, M, N)."""
        return x[..., self.columns]


@dataclass(frozen=True)
class _Scattered:
    """As ``_Slice``, with other columns for each row: index (B, n), and which slots count."""

    index: Tensor
    counts: Tensor

    def add(self, total: Tensor, value: Tensor) -> None:
        value = value.masked_fill(~self.counts[:, None, None], 0.0)
        total.scatter_add_(3, self.index[:, None, None].expand_as(value), value)

    def take(self, x: Tensor) -> Tensor:
        columns = x.gather(3, self.index[:, None, None].expand(*x.shape[:3], -1))
        return columns.masked_fill(~self.counts[:, None, None], 0.0)


class Columns:
    """The columns of the scores of one softmax: sink tokens, then positions in order, ending with the last
    token in every row.
    """

    def __init__(self, positions: list[tuple[int, int]], softmax: Softmax, device: torch.device) -> None:
        self.positions, self.softmax, self.device = positions, softmax, device
        self._targets: dict[object, list[tuple[int, _Scattered]]] = {}
        self._spread: dict[object, Tensor] = {}
        self.num_sinks = min(softmax.layout.sink_tokens, max(at for _, at in positions) + 1)
        # After them is the first position that any row sees, counted back from the last token.
        most = max(at - softmax.levels[0].first_needed(at, row) + 1 for row, at in positions)
        self.count = self.num_sinks + most

    def starts(self, level: Level) -> list[int]:
        """The column, per row, at which a level begins to be shared (and seen)."""
        return [level.first_needed(at, row) - at + self.count - 1 for row, at in self.positions]

    def spans(
        self, stores: Sequence[LevelStore], level: Level, shared: int | None = None
    ) -> Iterator[tuple[list[Tensor], _Slice | _Scattered]]:
        """The pages of stores of one level, (B, G, d, n) of each, and the columns of their positions.

        Args:
            stores: filled alike.
            level: theirs.
            shared: only positions that share exactly this many levels with the last token. Default: all that
                are seen.
        """
        positions, store = self.positions, stores[0]
        if len(positions) == 1:
            row, at = positions[0]
            first, end = max(level.first_needed(at, row), at - self.count + 1 + self.num_sinks), at + 1
            if shared is not None:
                edges = [*(x.first_needed(at, row) for x in self.softmax.levels), end]
                first, end = max(first, edges[shared - 1]), edges[shared]
            offset = first - at + self.count - 1
            start = level.start(at, row)
            for spans in zip(*(x.spans(first, end, start) for x in stores), strict=True):
                column = spans[0].offset + offset
                yield (
                    [span.page.rows(slice(None), span.slot, span.size) for span in spans],
                    _Slice(slice(column, column + spans[0].size)),
                )
            return
        sizes = tuple(page.shape[3] for page in store.pages)
        key = level, store.ring, sizes, shared
        if key not in self._targets:
            self._targets[key] = list(self._scattered(level, store.ring, sizes, shared))
        for pages, (size, target) in zip(
            zip(*(x.pages for x in stores), strict=True), self._targets[key], strict=False
        ):
            yield [page.rows(slice(None), 0, size) for page in pages], target

    def _scattered(
        self, level: Level, ring: int | None, sizes: Sequence[int], shared: int | None
    ) -> Iterator[tuple[int, _Scattered]]:
        """For each page of a store, by their sizes: how many slots are used, and their columns in each
        row.
        """
        positions = self.positions
        last = self._per_row(at for _, at in positions)
        start_of = self._per_row(level.start(at, row) for row, at in positions)
        low, high = self._per_row(level.first_needed(at, row) for row, at in positions), last + 1
        if shared is not None:
            low = self._per_row(self.softmax.levels[shared - 1].first_needed(at, row) for row, at in positions)
            if shared < len(self.softmax.levels):
                high = self._per_row(self.softmax.levels[shared].first_needed(at, row) for row, at in positions)
        used = max(at - level.start(at, row) + 1 for row, at in positions)
        if ring is not None:
            used = min(max(at for _, at in positions) + 1, ring)
        offset = 0
        for page in sizes:
            size = min(page, used - offset)
            if size <= 0:
                return
            slots = torch.arange(offset, offset + size, device=self.device)[None]
            # In a ring, the newest position that is in the slot.
            position = start_of + slots if ring is None else last - (last - slots) % ring
            counts = (position < high) & (position >= low) & (position <= last)
            counts = counts & (position > last - self.count + self.num_sinks)
            yield size, _Scattered(torch.where(counts, position - last + self.count - 1, 0), counts)
            offset += size

    def _per_row(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)[:, None]

    def per_column(self, values: Sequence[float], like: Tensor) -> list[tuple[slice, float]] | Tensor:
        """A number for each number of shared levels, spread over the columns, sink tokens aside: by slices,
        or (B, 1, 1, N).
        """
        starts = [self.starts(level) for level in self.softmax.levels]
        if len(self.positions) == 1:
            edges = [max(self.num_sinks, of_rows[0]) for of_rows in starts] + [self.count]
            return [(slice(a, b), value) for a, b, value in zip(edges, edges[1:], values, strict=False) if b > a]
        key = tuple(values), like.dtype
        if key not in self._spread:
            column = torch.arange(self.count, device=self.device)
            first = torch.tensor(starts, device=self.device)  # (L, B)
            shared = (column >= first[..., None]).sum(0)  # (B, N)
            table = torch.tensor([0.0, *values], dtype=like.dtype, device=self.device)
            self._spread[key] = table[shared][:, None, None]
        return self._spread[key]

    @cached_property
    def hidden(self) -> Tensor | None:
        """bool (B, 1, 1, N): columns before the first position of a row; ``None`` when there are none."""
        starts = self.starts(self.softmax.levels[0])
        if max(starts) == 0:
            return None
        border = torch.tensor(starts, device=self.device)
        column = torch.arange(self.count, device=self.device)
        hidden = column < border[:, None]
        if self.num_sinks:  # of a row with fewer tokens some are not there
            last = self._per_row(at for _, at in self.positions)
            hidden = torch.where(column < self.num_sinks, column > last, hidden)
        return hidden[:, None, None]

    @cached_property
    def back(self) -> Tensor | None:
        """How many positions before the last token each column is, (1 or B, N) int64; ``None`` where the
        columns are the last N.
        """
        if not self.num_sinks:
            return None
        column = torch.arange(self.count, device=self.device)
        last = self._per_row(at for _, at in self.positions)
        return torch.where(column < self.num_sinks, last - column, self.count - 1 - column)


def product(a: Tensor, b: Tensor) -> Tensor:
    """(B, G, M, d) times (B, G, d, n), in float32 at least."""
    dtype = a.dtype
    flat = b.flatten(0, 1)
    return torch.bmm(a.flatten(0, 1), flat if flat.dtype == dtype else flat.to(dtype)).unflatten(0, a.shape[:2])


def grouped(x: Tensor, groups: int) -> Tensor:
    """(B, H, T, d) to (B, groups, H / groups * T, d)."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def sink_tokens(store: LevelStore, count: int) -> Tensor:
    """The first numbers of a store of sink tokens, (B, G, d, count)."""
    return store.read(slice(None), 0, count, 0)


def _feature_scores(
    q: Tensor,
    softmax: Softmax,
    stores: Sequence[LevelStore],
    sinks: Sequence[LevelStore],
    columns: Columns,
    scale: float | None,
) -> Tensor:
    """Scaled scores (B, H, T, N) from the keys of each level."""
    per_level, per_count = softmax.layout.score_factors(scale)
    batch, heads, tokens = q.shape[:3]
    groups = stores[0].heads
    total = q.new_zeros((batch, groups, heads // groups * tokens, columns.count))
    for store, level, dims, factor in zip(stores, softmax.levels, softmax.layout.slices, per_level, strict=True):
        query = grouped(q[..., dims] if factor == 1 else q[..., dims] * factor, groups)
        for (page,), target in columns.spans([store], level):
            target.add(total, product(query, page))
    spread = columns.per_column(per_count, q)
    if isinstance(spread, Tensor):
        total = total * spread
    else:
        for where, factor in spread:
            total[..., where] *= factor
    for store in sinks:
        whole = grouped(q * q.new_tensor(softmax.layout.whole_factors(scale)), groups)
        total[..., : columns.num_sinks] = product(whole, sink_tokens(store, columns.num_sinks))
    return total.view(batch, heads, tokens, columns.count)


def _latent_scores(
    q: Tensor,
    softmax: Softmax,
    stores: Sequence[LevelStore],
    sinks: Sequence[LevelStore],
    latent: Latent,
    columns: Columns,
    scale: float | None,
) -> Tensor:
    """Scaled scores (B, H, T, N) from hidden states: an absorbed query for each number of shared levels."""
    per_level, per_count = softmax.layout.score_factors(scale)
    batch, heads, tokens = q.shape[:3]
    total = q.new_zeros((batch, heads, tokens, columns.count))
    weight = torch.zeros(len(per_level), q.shape[3], dtype=q.dtype, device=q.device)
    for number, dims in enumerate(softmax.layout.slices):
        first = softmax.dims.start + dims.start
        weight[number:, first : first + softmax.layout.ranks[number]] = per_level[number]
    weight *= torch.tensor(per_count, dtype=q.dtype, device=q.device)[:, None]
    u, offset = latent.absorbed((q[:, :, :, None] * weight).flatten(2, 3))
    u = u.unflatten(2, (tokens, -1))  # B, H, T, L, A, E
    offset = offset.unflatten(2, (tokens, -1))
    for number in range(len(per_count)):
        query = u[:, :, :, number].flatten(1, 3)[:, None]  # B, 1, H * T * A, E
        spans = list(columns.spans(stores, softmax.levels[0], number + 1))
        if sinks and number == len(per_count) - 1:
            spans.append(
                ([sink_tokens(store, columns.num_sinks) for store in sinks], _Slice(slice(0, columns.num_sinks)))
            )
        for (states, *rstds), target in spans:
            score = product(query, states).view(batch, heads, tokens, u.shape[4], -1)
            for rstd in rstds:  # (B, 1, key heads * A, n)
                of_heads = rstd[:, 0].to(q.dtype).unflatten(1, (-1, 1, 1, u.shape[4]))
                score = (score.unflatten(1, (of_heads.shape[1], -1)) * of_heads).flatten(1, 2)
            target.add(total, score.sum(3) + offset[:, :, :, number, None])
    return total


def _weights(
    q: Tensor, view: KeyValueView, softmax: Softmax, stores: Sequence[LevelStore], options: ScoreTerms
) -> tuple[Tensor, Columns]:
    """The weights (B, H, T, N) of one softmax."""
    if softmax.levels not in view.columns:
        view.columns[softmax.levels] = Columns(view.positions, softmax, q.device)
    columns = view.columns[softmax.levels]
    if view.latent is None:
        score = _feature_scores(q[..., softmax.dims], softmax, stores, view.sink_keys, columns, options.scale)
    else:
        score = _latent_scores(q, softmax, stores, view.sink_keys, view.latent, columns, options.scale)
    options.finish(score, columns.back)
    hidden = columns.hidden
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
    return options.softmax(score, q.shape[:3]), columns


def _alike(q: Tensor, view: KeyValueView, options: ScoreTerms) -> Tensor:
    """``attention`` where all rows are at one position and keys are kept as features: as few operations as
    possible.
    """
    batch, heads, tokens = q.shape[:3]
    row, at = view.positions[0]
    key_heads, value_heads = view.keys[0].heads, view.values[0][0].heads
    query = (q * view.factors(options.scale, q)).reshape(batch * key_heads, heads // key_heads * tokens, q.shape[3])
    queries = iter(query.split([store.dim for store in view.keys], dim=2))
    stores, sums = iter(view.keys), []
    for softmax in view.softmaxes:
        starts, blocks = softmax.begins(at, row)
        low, end = starts[0], at + 1
        score: Tensor | None = None
        previous = 1.0
        for first, block, of_count in zip(starts, blocks, softmax.layout.score_factors(options.scale)[1], strict=True):
            level_query, spans = next(queries), next(stores).spans(first, end, block)
            if score is None:
                score = _joined(
                    [torch.bmm(level_query, span.page.numbers(span.slot, span.size, q.dtype)) for span in spans]
                )
            else:
                for span in spans:
                    # Far cheaper for one row than baddbmm; what a level adds changes the scale of the sum so
                    # far.
                    added = torch.bmm(level_query, span.page.numbers(span.slot, span.size, q.dtype))
                    columns = score.narrow(2, span.offset + first - low, span.size)
                    torch.add(added, columns, alpha=of_count / previous if previous else 1.0, out=columns)
            previous = of_count
        assert score is not None
        options.finish(score.view(batch, heads, tokens, -1))
        weight = options.softmax(score, q.shape[:3]).view(batch * value_heads, heads // value_heads * tokens, -1)
        parts = []
        for number, (store, level) in enumerate(view.values):
            # Hierarchical values have the levels of the keys; others are all that the softmax sees.
            first, block = (starts[number], blocks[number]) if number else (low, level.start(at, row))
            products = [
                torch.bmm(
                    weight if span.size == end - low else weight.narrow(2, span.offset + first - low, span.size),
                    span.page.numbers(span.slot, span.size, q.dtype).transpose(1, 2),
                )
                for span in store.spans(first, end, block)
            ]
            parts.append(products[0] if len(products) == 1 else torch.stack(products).sum(0))
        sums.append(_joined(parts))
    return sum(sums[1:], sums[0]).view(batch, heads, tokens, -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attention(q: Tensor, view: KeyValueView, options: ScoreTerms) -> Tensor:
    """Attention of the last T tokens, whose keys and values are held already.

    Args:
        q: (B, H, T, D). With T > 1 all T lie in one block of every level of every row, and there is no
            window.
        view: what the cache keeps.
        options: scale, soft cap, ALiBi, mask of these queries, and sinks.

    Returns:
        (B, H, T, V) in q's dtype; computed in float32 at least.

    Cost: one multiply-add per number that is kept, per query head that shares it; B H T N scores.
    """
    batch, heads, tokens = q.shape[:3]
    kind = q.dtype
    q = q if kind == torch.float64 else q.float()
    if len(view.positions) == 1 and view.latent is None and not view.sink_keys:
        return _alike(q, view, options).to(kind)
    value_heads = view.values[0][0].heads
    stores, out = iter(view.keys), None
    for softmax in view.softmaxes:
        keys = view.keys if view.latent is not None else [next(stores) for _ in softmax.levels]
        weight, columns = _weights(q, view, softmax, keys, options)
        weight = weight.view(batch, value_heads, -1, columns.count)
        sums = []
        for store, level in view.values:
            total = None
            for (page,), target in columns.spans([store], level):
                weighed = product(target.take(weight), page.transpose(2, 3))
                total = weighed if total is None else total + weighed
            sums.append(weight.new_zeros((*weight.shape[:3], store.dim)) if total is None else total)
        values = sums[0] if len(sums) == 1 else torch.cat(sums, dim=3)
        for store in view.sink_values:
            values = values + product(
                weight[..., : columns.num_sinks], sink_tokens(store, columns.num_sinks).transpose(2, 3)
            )
        out = values if out is None else out + values
    assert out is not None
    return out.view(batch, heads, tokens, -1).to(kind)
