"""The mean of points: a task outside of the package, as a user would write it."""

from old_mean.presets import PRESETS
from old_mean.task import MeanTask

__all__ = ["PRESETS", "TASK"]

TASK = MeanTask
