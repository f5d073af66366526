"""A causal transformer looks up the value of a key at a known distance in synthetic sequences."""

from structattn_lab.tasks.recall.presets import PRESETS
from structattn_lab.tasks.recall.task import RecallTask

__all__ = ["PRESETS", "TASK"]

TASK = RecallTask
