"""The scale of scores where a layer has no layout, or some of its heads have none."""

from __future__ import annotations

import math

from torch import Tensor

from structattn.layers.scoring_modules import ScoringModule
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.text import TextLayout
from structattn.ops.by_heads import joined, query_heads, select_heads


def scaled_queries(
    scoring: ScoringModule, layout: AnyLayout | TextLayout | None, q: Tensor
) -> tuple[Tensor, float | None]:
    """Queries (B, H, T, D), and the scale that the op is given: that of the scoring where there is no layout,
    else ``None``, for that of the layout.

    Heads without a layout beside others have the scale of the scoring too; their queries are multiplied by
    it, and by sqrt(D), since the op divides by that.
    """
    if layout is None:
        return scoring.scaled(q)
    if not isinstance(layout, HeadLayouts) or None not in layout.layouts or scoring.is_variance:
        return q, None
    parts, per_key_head = [], q.shape[1] // layout.num_heads
    for of_heads, heads in layout.groups:
        part = select_heads(q, query_heads(heads, per_key_head))
        if of_heads is None:
            part, scale = scoring.scaled(part)
            part = part * (scale * math.sqrt(q.shape[3]))
        parts.append(part)
    return joined(parts, layout, per_key_head), None
