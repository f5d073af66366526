"""A causal transformer looks up the value of a key at a known distance in synthetic sequences."""

from structattn.studies.tasks.recall.presets import PRESETS
from structattn.studies.tasks.recall.task import RecallTask

__all__ = ["PRESETS", "TASK"]

TASK = RecallTask
