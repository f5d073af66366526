"""A causal transformer predicts the next character or token of a text.

On a packaged excerpt, a text file, or a corpus of ``structattn data prepare text``.
"""

from structattn_lab.tasks.text.presets import PRESETS
from structattn_lab.tasks.text.task import TextTask

__all__ = ["PRESETS", "TASK"]

TASK = TextTask
