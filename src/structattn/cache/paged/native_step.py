"""The attention of single tokens of several requests in C++: it reads codes where they are in the pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.cache.native_decode import step_factors
from structattn.cache.paged.batch import Singles
from structattn.cache.paged.geometry import HeadsShape
from structattn.cache.paged.levels import PagedLevel
from structattn.cache.paged.pages import LevelPages
from structattn.ops.native.library import is_here
from structattn.ops.terms import ScoreTerms


class PagedStep:
    """What the C++ code reads of the key heads of a layer that have one layout: their parts of all pages, and
    how tokens lie in them.

    Args:
        shape: of these heads.
        levels: theirs, in the order of ``HeadsShape.levels``.
    """

    def __init__(self, shape: HeadsShape, levels: Sequence[PagedLevel]) -> None:
        self._parts = [part.view for level in levels for part in level.parts]
        self._softmaxes = tuple((softmax.layout.ranks, softmax.layout.scaling) for softmax in shape.softmaxes)
        self._value_dim = shape.values[1]
        self._num_sinks = shape.softmaxes[0].layout.sink_tokens
        storage = shape.storage
        size, residual = (1, 0) if storage is None else (storage.group_size, storage.residual)
        plan = [self._num_sinks, size, residual, len(shape.softmaxes)]
        plan += [len(softmax.levels) for softmax in shape.softmaxes]
        kinds = (*shape.key_levels, *shape.value_levels, *shape.sink_levels)
        for kind, level in zip(kinds, levels, strict=True):
            plan += (kind.rank, kind.block_size, kind.window or 0, level.bits, *_where(level.parts[0]))
            plan += _where(level.parts[1]) if level.bits else (0, 0, 0)
        with torch.inference_mode(False):
            self._plan = torch.tensor(plan, device="cpu")

    def can_attend(self, q: Tensor, singles: Singles, options: ScoreTerms) -> bool:
        """Whether the C++ code can run a step: it is there for the tensors, no more than a scale changes the
        scores, and each query sees all sink tokens.
        """
        return (
            is_here(q)
            and self._parts[0].is_cpu
            and q.dtype == self._parts[0].dtype
            and options.has_scale_only
            and min(singles.positions) >= self._num_sinks
        )

    def attend(self, q: Tensor, singles: Singles, scale: float | None) -> Tensor:
        """The attention of a token of each request, whose keys and values are in the pages.

        Args:
            q: (B, H, 1, D), for which ``can_attend`` is true.
            singles: these tokens.
            scale: of the call.

        Returns:
            (B, H, 1, V).

        Cost: reads what is kept of each request once, and copies nothing.
        """
        factors = step_factors(self._softmaxes, scale, torch.promote_types(q.dtype, torch.float32))
        positions = torch.tensor(singles.positions, device="cpu")
        out: Tensor = torch.ops.structattn_native.attend_pages(
            q, factors, self._parts, singles.pages, positions, self._plan, self._value_dim
        )
        return out


def _where(part: LevelPages) -> tuple[int, int, int]:
    """The table of a part, slots of its block, and pages of its ring."""
    ring = 0 if part.ring is None else part.ring // part.view.shape[2]
    return part.group, part.block or 0, ring
