"""A patch transformer forecasts columns of a time series.

On the packaged ETTh1 or a CSV file, against simple methods and the models of neuralforecast.
"""

from structattn_lab.tasks.forecast.presets import PRESETS
from structattn_lab.tasks.forecast.task import ForecastTask

__all__ = ["PRESETS", "TASK"]

TASK = ForecastTask
