"""A Chronos T5 with structured self-attention forecasts time series as sequences of tokens.

Trained from scratch or fine-tuned from a checkpoint, on synthetic series and on ETTh1; needs the extra
``chronos``.
"""

from structattn_lab.tasks.chronos.presets import PRESETS
from structattn_lab.tasks.chronos.task import ChronosTask

__all__ = ["PRESETS", "TASK"]

TASK = ChronosTask
