"""Attention whose key heads have layouts of their own: one call for each layout, of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from structattn.errors import ShapeError
from structattn.layout.heads import HeadGroup, HeadLayouts
from structattn.ops.terms import ScoreTerms


def check_key_heads(layout: HeadLayouts, *tensors: Tensor) -> None:
    """Raises ``ShapeError`` unless keys and values, (B, G, S, ...), have one head for each layout."""
    for x in tensors:
        if x.shape[1] != layout.num_heads:
            raise ShapeError(
                f"keys and values need {layout.num_heads} heads, one for each of the layouts, got {x.shape[1]}"
            )


def query_heads(heads: tuple[int, ...], per_key_head: int) -> tuple[int, ...]:
    """The query heads that read these key heads."""
    return tuple(head * per_key_head + i for head in heads for i in range(per_key_head))


def select_heads(x: Tensor, heads: tuple[int, ...], dim: int = 1) -> Tensor:
    """These heads of a tensor, ascending: a view where they are next to each other."""
    if all(b == a + 1 for a, b in pairwise(heads)):
        return x.narrow(dim, heads[0], len(heads))
    return _taken(x, heads, dim)


def _taken(x: Tensor, heads: tuple[int, ...], dim: int) -> Tensor:
    """These heads, in their order."""
    if torch.compiler.is_compiling():
        # A program cannot keep an index for later calls, and would copy a new one to the GPU in each, which a
        # CUDA graph cannot.
        starts = [0, *(i for i in range(1, len(heads)) if heads[i] != heads[i - 1] + 1), len(heads)]
        return torch.cat([x.narrow(dim, heads[a], b - a) for a, b in pairwise(starts)], dim)
    return x.index_select(dim, _index(heads, x.device))


@lru_cache(maxsize=256)
def _index(heads: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(heads, device=device)


class Grouped(Protocol):
    """What divides key heads into groups: ``HeadLayouts``, and what a cache keeps of heads."""

    @property
    def groups(self) -> Sequence[HeadGroup]: ...


def joined(outs: Sequence[Tensor], heads: Grouped, per_key_head: int = 1) -> Tensor:
    """What each group of heads gave, (B, its heads, ...), in the order of the heads."""
    if len(outs) == 1:
        return outs[0]
    order = [head for group in heads.groups for head in query_heads(group.heads, per_key_head)]
    out = torch.cat(list(outs), dim=1)
    if order == sorted(order):
        return out
    positions = tuple(sorted(range(len(order)), key=order.__getitem__))
    return _taken(out, positions, 1)


def terms_of(terms: ScoreTerms, heads: tuple[int, ...]) -> ScoreTerms:
    """The terms of some query heads."""
    if terms.has_scale_only:
        return terms

    def per_pair(x: Tensor | None) -> Tensor | None:
        return select_heads(x, heads, x.dim() - 3) if x is not None and x.dim() > 2 and x.shape[-3] > 1 else x

    sinks, slopes = terms.sinks, terms.alibi_slopes
    return replace(
        terms,
        sinks=None if sinks is None else select_heads(sinks, heads, 0),
        attn_mask=per_pair(terms.attn_mask),
        attn_bias=per_pair(terms.attn_bias),
        alibi_slopes=None if slopes is None else select_heads(slopes, heads, slopes.dim() - 1),
    )
