"""What language models do with their context: loss by position, and attention by distance."""

from __future__ import annotations

from structattn.studies.report.figures.octaves import attention_by_distance, loss_by_position

FIGURES = {"loss-by-position": loss_by_position, "attention-by-distance": attention_by_distance}
