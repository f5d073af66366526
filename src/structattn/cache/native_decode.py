"""A decoding step in C++: a call or two for all levels, where Python would make some sixty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.cache.levels import Level, Softmax
from structattn.cache.options import ScoreOptions
from structattn.cache.store import Store
from structattn.ops.checks import is_eager
from structattn.ops.native import library

_DTYPES = (torch.float32, torch.float64)

_Values = Sequence[tuple[Store, Level]]


def _is_here(x: Tensor) -> bool:
    """Whether the C++ code is there for a tensor, and nothing traces or counts what is done to it."""
    return x.is_cpu and is_eager(x) and library.why_not_here() is None


def suits(q: Tensor, keys: Sequence[Store], values: _Values, options: ScoreOptions) -> bool:
    """Whether the C++ code computes a step: of one token per row, without terms besides the products."""
    has_terms = (
        options.softcap is not None
        or options.sinks is not None
        or options.attn_mask is not None
        or options.alibi_slopes is not None
    )
    if q.shape[2] > 1 or has_terms or not _is_here(q):
        return False
    # Pages of a cache of many requests are gathered token by token.
    return all(x.dtype == q.dtype and x.stride(3) == 1 for x in (keys[0].pages[0], values[0][0].pages[0]))


class _Places:
    """Spans of pages as the C++ code takes them."""

    def __init__(self) -> None:
        self.pages: list[Tensor] = []
        self.places: list[int] = []
        self.before: list[float] = []

    def add(self, store: Store, first: int, end: int, start: int, column: int, dim: int, before: float = 0.0) -> None:
        """The positions first ... end - 1 of a block that starts at ``start``.

        Args:
            column: of the first of them in the scores.
            dim: the first of their dimensions in a query or a value.
            before: what the scores are multiplied by before this level is added; 0 where nothing was.
        """
        for span in store.spans(first, end, start):
            self.pages.append(span.flat)
            self.places += (span.slot, span.size, column + span.offset, dim)
            self.before.append(before)


def attention(
    q: Tensor,
    factors: Tensor,
    softmaxes: Sequence[Softmax],
    keys: Sequence[Store],
    values: _Values,
    position: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """As ``decode.attention``, of a step that ``suits``: all rows at one position.

    Args:
        q: (B, H, 1, D).
        factors: of the levels (``KeyValueView.factors``).
        softmaxes, keys, values, position: as of ``KeyValueView``.
        scale: of the call.
    """
    batch, heads, tokens, dim = q.shape
    row, at = position
    query = q.reshape(batch * heads, dim)
    stores, out, dim, end = iter(keys), None, 0, at + 1
    for softmax in softmaxes:
        starts, blocks = softmax.begins(at, row)
        of_keys, of_values, low, previous = _Places(), _Places(), starts[0], 0.0
        for first, block, of_count in zip(starts, blocks, softmax.layout.score_factors(scale)[1], strict=True):
            store = next(stores)
            before = 0.0 if not of_keys.pages else of_count / previous if previous else 1.0
            of_keys.add(store, first, end, block, first - low, dim, before)
            dim, previous = dim + store.dim, of_count
        value_dim = 0
        for number, (store, level) in enumerate(values):
            # Hierarchical values have the levels of the keys; others are all that the softmax sees.
            first, block = (starts[number], blocks[number]) if number else (low, level.start(at, row))
            of_values.add(store, first, end, block, first - low, value_dim)
            value_dim += store.dim
        found = torch.ops.structattn_native.decode(
            *(query, factors, end - low, value_dim),
            *(of_keys.pages, of_keys.places, of_keys.before, of_values.pages, of_values.places),
        )
        out = found if out is None else out + found
    assert out is not None
    return out.view(batch, heads, tokens, -1)


def exchange(tokens: Sequence[Tensor], pages: Sequence[Tensor], slots: Sequence[int], keep: bool) -> Sequence[Tensor]:
    """Writes one token of all rows into a slot of each page; returns what was there, like ``tokens``, if it is to be kept.

    Args:
        tokens: (rows, dims) each; together they have the dims of all pages, in the order of the pages.
        pages: (rows, dims, slots) each.
    """
    if tokens[0].dtype in _DTYPES and _is_here(tokens[0]):
        found: Sequence[Tensor] = torch.ops.structattn_native.exchange(tokens, pages, slots, keep)
        return found
    cells = iter([page.select(2, slot) for page, slot in zip(pages, slots, strict=True)])
    numbers: list[Tensor] = []
    places: list[Tensor] = []
    before: list[Tensor] = []
    for x in tokens:
        own: list[Tensor] = []
        while sum(cell.shape[1] for cell in own) < x.shape[1]:
            own.append(next(cells))
        places += own
        numbers += x.split([cell.shape[1] for cell in own], dim=1)
        if keep:
            before.append(torch.cat(own, dim=1))
    torch._foreach_copy_(places, numbers)
    return before
