"""A transformer learns to infer a random function from the examples in its prompt (Garg et al. 2022)."""

from structattn_lab.tasks.icl_regression.presets import PRESETS
from structattn_lab.tasks.icl_regression.task import ICLRegressionTask

__all__ = ["PRESETS", "TASK"]

TASK = ICLRegressionTask
