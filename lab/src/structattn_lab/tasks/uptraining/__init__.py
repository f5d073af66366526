"""A trained language model of transformers gets a smaller key/value cache, and is trained further with the
original as its teacher.

The model (the teacher) is any decoder that ``structurize`` knows; the student is a copy of it with other
attention. Needs the extra ``hf``.
"""

from structattn_lab.tasks.uptraining.presets import PRESETS
from structattn_lab.tasks.uptraining.task import UptrainTask

__all__ = ["PRESETS", "TASK"]

TASK = UptrainTask
