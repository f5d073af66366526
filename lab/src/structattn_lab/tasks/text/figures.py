"""What language models do with their context, and what they score for the cache that they need."""

from __future__ import annotations

from structattn_lab.report.cache_map import cache_table
from structattn_lab.report.figures.cache_map import by_cache, by_decode_time
from structattn_lab.report.figures.octaves import attention_by_distance, loss_by_position

FIGURES = {
    "cache": by_cache,
    "decode-time": by_decode_time,
    "loss-by-position": loss_by_position,
    "attention-by-distance": attention_by_distance,
}
TABLES = {"cache": cache_table}
