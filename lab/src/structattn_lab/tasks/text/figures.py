"""What language models do with their context, and what they score for the cache that they need."""

from __future__ import annotations

from structattn_lab.report import cache_map
from structattn_lab.report.figures.octaves import attention_by_distance, loss_by_position

_MAP = cache_map.report()
FIGURES = {
    **_MAP.figures,
    "loss-by-position": loss_by_position,
    "attention-by-distance": attention_by_distance,
}
TABLES = _MAP.tables
