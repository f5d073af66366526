"""A decoding step in C++: a call or two for all levels, where Python would make some sixty."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.cache.levels import Level, Softmax
from structattn.cache.options import ScoreOptions
from structattn.cache.store import PageSpan, Store
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

    def add(self, span: PageSpan, column: int, first: int, before: float = 0.0) -> None:
        """A span from a column of the scores on, with dimensions from ``first`` on; what is there already is multiplied by ``before``."""
        self.pages.append(span.flat)
        self.places += (span.slot, span.size, column, first)
        self.before.append(before)


def attention(
    q: Tensor,
    softmaxes: Sequence[Softmax],
    keys: Sequence[Store],
    values: _Values,
    position: tuple[int, int],
    scale: float | None,
) -> Tensor:
    """As ``decode.attention``, of a step that ``suits``: all rows at one position.

    Args:
        q: (B, H, 1, D), times the factors of the levels (``KeyValueView.factors``).
        softmaxes, keys, values, position: as of ``KeyValueView``.
        scale: of the call.
    """
    batch, heads, tokens, dim = q.shape
    row, at = position
    query = q.reshape(batch * heads, dim)
    value_dim = sum(store.dim for store, _ in values)
    stores, out, first_dim = iter(keys), None, 0
    for softmax in softmaxes:
        of_keys, of_values = _Places(), _Places()
        low, end, previous = softmax.levels[0].first_needed(at, row), at + 1, 0.0
        for level, of_count in zip(softmax.levels, softmax.layout.score_factors(scale)[1], strict=True):
            store, first = next(stores), level.first_needed(at, row)
            before = 0.0 if level is softmax.levels[0] else of_count / previous if previous else 1.0
            for span in store.spans(first, end, level.start(at, row)):
                of_keys.add(span, span.offset + first - low, first_dim, before)
            first_dim, previous = first_dim + store.dim, of_count
        value_first = 0
        for number, (store, level) in enumerate(values):
            # Hierarchical values have the levels of the keys; others are all that the softmax sees.
            first = softmax.levels[number].first_needed(at, row) if number else low
            for span in store.spans(first, end, level.start(at, row)):
                of_values.add(span, span.offset + first - low, value_first)
            value_first += store.dim
        key_rows, value_rows = of_keys.pages[0].shape[0], of_values.pages[0].shape[0]
        found = torch.ops.structattn_native.decode(
            *(query, key_rows, value_rows, end - low, value_dim),
            *(of_keys.pages, of_keys.places, of_keys.before, of_values.pages, of_values.places),
        )
        out = found if out is None else out + found
    assert out is not None
    return out.view(batch, heads, tokens, value_dim)


def append(tokens: Sequence[Tensor], pages: Sequence[Tensor], slots: Sequence[int]) -> None:
    """Writes one token of all rows into a slot of each page.

    Args:
        tokens: (rows, dims) each; together they have the dims of all pages, in the order of the pages.
        pages: (rows, dims, slots) each.
    """
    if tokens[0].dtype in _DTYPES and _is_here(tokens[0]):
        torch.ops.structattn_native.append(tokens, pages, slots)
        return
    numbers: list[Tensor] = []
    dims = iter([page.shape[1] for page in pages])
    for x in tokens:
        own: list[int] = []
        while sum(own) < x.shape[1]:
            own.append(next(dims))
        numbers += x.split(own, dim=1)
    torch._foreach_copy_([page.select(2, slot) for page, slot in zip(pages, slots, strict=True)], numbers)
