"""The mean of points: a task outside of the package, as a user would write it.

Importing it registers it.
"""

from mean_task.presets import PRESETS
from mean_task.task import MeanTask
from structattn_lab.tasks.registry import register_task

__all__ = ["PRESETS", "TASK"]

TASK = MeanTask
register_task("mean", __name__)
