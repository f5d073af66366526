"""Attention of a decoding step straight from what a cache keeps: every number is read once, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from structattn.cache.latent import Latent
from structattn.cache.levels import Level, Part
from structattn.cache.store import Store


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a cache keeps, after the new tokens were appended.

    Attributes:
        parts: the softmaxes.
        keys: a store for each level of each part; with ``latent`` the states, then the gains.
        values: stores with their levels.
        latent: see ``Latent``.
        places: (row of the layout, position of the last token), one for all rows or one per row of the batch; the position is
            at least 0.
        kept_factors: what ``factors`` has made.
    """

    parts: tuple[Part, ...]
    keys: list[Store]
    values: list[tuple[Store, Level]]
    latent: Latent | None
    places: list[tuple[int, int]]
    kept_factors: dict[tuple[object, ...], Tensor]

    def factors(self, scale: float | None, like: Tensor) -> Tensor:
        """(D,): times a query, it gives what each level adds to a score where that level is the deepest that is shared."""
        key = (scale, like.dtype, like.device)
        if key not in self.kept_factors:
            values = [
                of_level * of_count
                for part in self.parts
                for rank, of_level, of_count in zip(part.layout.ranks, *part.layout.score_factors(scale), strict=True)
                for _ in range(rank)
            ]
            self.kept_factors[key] = torch.tensor(values, dtype=like.dtype, device=like.device)
        return self.kept_factors[key]


class _Place(Protocol):
    """Where the positions of a stretch of a page stand among the columns of the scores."""

    def add(self, total: Tensor, value: Tensor) -> None:
        """Adds (B, G, M, n) to the columns of (B, G, M, N)."""
        ...

    def take(self, x: Tensor) -> Tensor:
        """Their columns of (B, G, M, N)."""
        ...


@dataclass(frozen=True)
class _Slice:
    """The same columns for all rows."""

    columns: slice

    def add(self, total: Tensor, value: Tensor) -> None:
        """See ``_Place``."""
        total[..., self.columns] += value

    def take(self, x: Tensor) -> Tensor:
        """See ``_Place``."""
        return x[..., self.columns]


@dataclass(frozen=True)
class _Scattered:
    """Other columns for each row: index (B, n), and which slots count."""

    index: Tensor
    counts: Tensor

    def add(self, total: Tensor, value: Tensor) -> None:
        """See ``_Place``."""
        value = value.masked_fill(~self.counts[:, None, None], 0.0)
        total.scatter_add_(3, self.index[:, None, None].expand_as(value), value)

    def take(self, x: Tensor) -> Tensor:
        """See ``_Place``."""
        found = x.gather(3, self.index[:, None, None].expand(*x.shape[:3], -1))
        return found.masked_fill(~self.counts[:, None, None], 0.0)


class _Columns:
    """The columns of the scores of one part: positions in order, ending with the last token in every row."""

    def __init__(self, held: Held, part: Part, device: torch.device) -> None:
        self.held, self.part, self.device = held, part, device
        # Column 0 is the first position that any row sees, counted back from the last token.
        self.count = max(at - part.levels[0].first_needed(at, row) + 1 for row, at in held.places)

    def starts(self, level: Level) -> list[int]:
        """The column, per place, at which a level begins to be shared (and seen)."""
        return [level.first_needed(at, row) - at + self.count - 1 for row, at in self.held.places]

    def stretches(
        self, stores: Sequence[Store], level: Level, shared: int | None = None
    ) -> Iterator[tuple[list[Tensor], _Place]]:
        """The pages of stores of one level, (B, G, d, n) of each, and where their positions stand.

        Args:
            stores: filled alike.
            level: theirs.
            shared: only positions that share exactly so many levels with the last token. Default: all that are seen.
        """
        places, store = self.held.places, stores[0]
        if len(places) == 1:
            row, at = places[0]
            first, end = max(level.first_needed(at, row), at - self.count + 1), at + 1
            if shared is not None:
                edges = [*(x.first_needed(at, row) for x in self.part.levels), end]
                first, end = max(first, edges[shared - 1]), edges[shared]
            offset = first - at + self.count - 1
            start = level.start(at, row)
            for pieces in zip(*(x.pieces(first, end, start) for x in stores), strict=True):
                column = pieces[0].offset + offset
                yield [piece.rows(slice(None)) for piece in pieces], _Slice(slice(column, column + pieces[0].size))
            return
        last = self._per_place(at for _, at in places)
        start_of = self._per_place(level.start(at, row) for row, at in places)
        low, high = self._per_place(level.first_needed(at, row) for row, at in places), last + 1
        if shared is not None:
            low = self._per_place(self.part.levels[shared - 1].first_needed(at, row) for row, at in places)
            if shared < len(self.part.levels):
                high = self._per_place(self.part.levels[shared].first_needed(at, row) for row, at in places)
        used = max(store.slot(at, level.start(at, row)) + 1 for row, at in places)
        if store.ring is not None and any(at >= store.ring for _, at in places):
            used = store.ring
        offset = 0
        for pages in zip(*(x.pages for x in stores), strict=True):
            size = min(pages[0].shape[3], used - offset)
            if size <= 0:
                return
            slots = torch.arange(offset, offset + size, device=self.device)[None]
            # In a ring, the newest position that stands in the slot.
            position = start_of + slots if store.ring is None else last - (last - slots) % store.ring
            counts = (position < high) & (position >= low) & (position <= last) & (position > last - self.count)
            index = torch.where(counts, position - last + self.count - 1, 0)
            yield [page[..., :size] for page in pages], _Scattered(index, counts)
            offset += size

    def _per_place(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=self.device)[:, None]

    def per_column(self, values: Sequence[float], like: Tensor) -> list[tuple[slice, float]] | Tensor:
        """A number for each number of shared levels, spread over the columns: by slices, or (B, 1, 1, N)."""
        starts = [self.starts(level) for level in self.part.levels]
        if len(self.held.places) == 1:
            edges = [max(0, found[0]) for found in starts] + [self.count]
            return [(slice(a, b), value) for a, b, value in zip(edges, edges[1:], values, strict=False) if b > a]
        column = torch.arange(self.count, device=self.device)
        borders = torch.tensor(starts, device=self.device)  # (L, B)
        shared = (column >= borders[..., None]).sum(0)  # (B, N)
        table = torch.tensor([0.0, *values], dtype=like.dtype, device=self.device)
        return table[shared][:, None, None]

    def hidden(self) -> Tensor | None:
        """bool (B, 1, 1, N): columns before the first position of a row; ``None`` when there are none."""
        starts = self.starts(self.part.levels[0])
        if max(starts) == 0:
            return None
        border = torch.tensor(starts, device=self.device)
        return (torch.arange(self.count, device=self.device) < border[:, None])[:, None, None]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """(B, G, M, d) times (B, G, d, n), in float32 at least."""
    dtype = a.dtype
    flat = b.flatten(0, 1)
    return torch.bmm(a.flatten(0, 1), flat if flat.dtype == dtype else flat.to(dtype)).unflatten(0, a.shape[:2])


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(B, H, T, d) to (B, groups, H / groups * T, d)."""
    return x.unflatten(1, (groups, -1)).flatten(2, 3)


def _feature_scores(
    q: Tensor, part: Part, stores: Sequence[Store], columns: _Columns, factors: tuple[Sequence[float], Sequence[float]]
) -> Tensor:
    """Scaled scores (B, H, T, N) from the keys of each level."""
    per_level, per_count = factors
    batch, heads, tokens = q.shape[:3]
    groups = stores[0].pages[0].shape[1]
    total = q.new_zeros((batch, groups, heads // groups * tokens, columns.count))
    for store, level, dims, factor in zip(stores, part.levels, part.layout.slices, per_level, strict=True):
        query = _grouped(q[..., dims] if factor == 1 else q[..., dims] * factor, groups)
        for (page,), place in columns.stretches([store], level):
            place.add(total, _product(query, page))
    spread = columns.per_column(per_count, q)
    if isinstance(spread, Tensor):
        total = total * spread
    else:
        for where, factor in spread:
            total[..., where] *= factor
    return total.view(batch, heads, tokens, columns.count)


def _latent_scores(
    q: Tensor,
    part: Part,
    stores: Sequence[Store],
    latent: Latent,
    columns: _Columns,
    factors: tuple[Sequence[float], Sequence[float]],
) -> Tensor:
    """Scaled scores (B, H, T, N) from hidden states: an absorbed query for each number of shared levels."""
    per_level, per_count = factors
    batch, heads, tokens = q.shape[:3]
    total = q.new_zeros((batch, heads, tokens, columns.count))
    weight = torch.zeros(len(per_level), q.shape[3], dtype=q.dtype, device=q.device)
    for number, dims in enumerate(part.layout.slices):
        first = part.dims.start + dims.start
        weight[number:, first : first + part.layout.ranks[number]] = per_level[number]
    weight *= torch.tensor(per_count, dtype=q.dtype, device=q.device)[:, None]
    u, offset = latent.absorbed((q[:, :, :, None] * weight).flatten(2, 3))
    u = u.unflatten(2, (tokens, -1))  # B, H, T, L, A, E
    offset = offset.unflatten(2, (tokens, -1))
    for number in range(len(per_count)):
        query = u[:, :, :, number].flatten(1, 3)[:, None]  # B, 1, H * T * A, E
        for (states, *gains), place in columns.stretches(stores, part.levels[0], number + 1):
            score = _product(query, states).view(batch, heads, tokens, u.shape[4], -1)
            for gain in gains:  # (B, 1, key heads * A, n)
                of_heads = gain[:, 0].to(q.dtype).unflatten(1, (-1, 1, 1, u.shape[4]))
                score = (score.unflatten(1, (of_heads.shape[1], -1)) * of_heads).flatten(1, 2)
            place.add(total, score.sum(3) + offset[:, :, :, number, None])
    return total


def _weights(
    q: Tensor, held: Held, part: Part, stores: Sequence[Store], scale: float | None
) -> tuple[Tensor, _Columns]:
    """The softmax (B, H, T, N) of one part."""
    columns = _Columns(held, part, q.device)
    factors = part.layout.score_factors(scale)
    if held.latent is None:
        score = _feature_scores(q[..., part.dims], part, stores, columns, factors)
    else:
        score = _latent_scores(q, part, stores, held.latent, columns, factors)
    tokens = q.shape[2]
    if tokens > 1:
        steps = torch.arange(tokens, device=q.device)
        score[..., -tokens:].masked_fill_(steps[None, :] > steps[:, None], -torch.inf)
    hidden = columns.hidden()
    if hidden is not None:
        score = score.masked_fill(hidden, -torch.inf)
    return torch.softmax(score, dim=-1), columns


def _alike(q: Tensor, held: Held, scale: float | None) -> Tensor:
    """``attention`` where all rows stand at one position and keys are kept as features: as few operations as possible."""
    batch, heads, tokens = q.shape[:3]
    row, at = held.places[0]
    key_heads, value_heads = held.keys[0].heads, held.values[0][0].heads
    query = (q * held.factors(scale, q)).reshape(batch * key_heads, heads // key_heads * tokens, q.shape[3])
    queries = iter(query.split([store.dim for store in held.keys], dim=2))
    stores, sums = iter(held.keys), []
    for part in held.parts:
        starts = [level.first_needed(at, row) for level in part.levels]
        blocks = starts if part.window is None else [level.start(at, row) for level in part.levels]
        low, end = starts[0], at + 1
        score: Tensor | None = None
        previous = 1.0
        for first, block, of_count in zip(starts, blocks, part.layout.score_factors(scale)[1], strict=True):
            own, pieces = next(queries), next(stores).pieces(first, end, block)
            if score is None:
                score = _joined([torch.bmm(own, piece.numbers(q.dtype)) for piece in pieces])
            else:
                for piece in pieces:
                    # Far cheaper for one row than baddbmm; what a level adds changes the scale of the sum so far.
                    found = torch.bmm(own, piece.numbers(q.dtype))
                    columns = score.narrow(2, piece.offset + first - low, piece.size)
                    torch.add(found, columns, alpha=of_count / previous if previous else 1.0, out=columns)
            previous = of_count
        assert score is not None
        if tokens > 1:
            steps = torch.arange(tokens, device=q.device)
            by_token = score.view(query.shape[0], -1, tokens, score.shape[2])
            by_token[..., -tokens:].masked_fill_(steps[None, :] > steps[:, None], -torch.inf)
        weight = torch.softmax(score, dim=-1).view(batch * value_heads, heads // value_heads * tokens, -1)
        parts = []
        for number, (store, level) in enumerate(held.values):
            # Hierarchical values have the levels of the keys; others are all that the part sees.
            first, block = (starts[number], blocks[number]) if number else (low, level.start(at, row))
            products = [
                torch.bmm(
                    weight if piece.size == end - low else weight.narrow(2, piece.offset + first - low, piece.size),
                    piece.numbers(q.dtype).transpose(1, 2),
                )
                for piece in store.pieces(first, end, block)
            ]
            parts.append(products[0] if len(products) == 1 else torch.stack(products).sum(0))
        sums.append(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    return sum(sums[1:], sums[0]).view(batch, heads, tokens, -1)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attention(q: Tensor, held: Held, scale: float | None) -> Tensor:
    """Attention of the last T tokens, whose keys and values are held already.

    Args:
        q: (B, H, T, D). With T > 1 all T lie in one block of every level of every row, and there is no window.
        held: what the cache keeps.
        scale: replaces the layouts' scaling.

    Returns:
        (B, H, T, V) in q's dtype; computed in float32 at least.

    Cost: one multiply-add per number that is kept, per query head that shares it; B H T N scores.
    """
    batch, heads, tokens = q.shape[:3]
    kind = q.dtype
    q = q if kind == torch.float64 else q.float()
    if len(held.places) == 1 and held.latent is None:
        return _alike(q, held, scale).to(kind)
    value_heads = held.values[0][0].pages[0].shape[1]
    stores, out = iter(held.keys), None
    for part in held.parts:
        own = held.keys if held.latent is not None else [next(stores) for _ in part.levels]
        weight, columns = _weights(q, held, part, own, scale)
        weight = weight.view(batch, value_heads, -1, columns.count)
        sums = []
        for store, level in held.values:
            total = None
            for (page,), place in columns.stretches([store], level):
                found = _product(place.take(weight), page.transpose(2, 3))
                total = found if total is None else total + found
            assert total is not None
            sums.append(total)
        found = sums[0] if len(sums) == 1 else torch.cat(sums, dim=3)
        out = found if out is None else out + found
    assert out is not None
    return out.view(batch, heads, tokens, -1).to(kind)
