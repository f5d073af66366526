"""Peak memory of training a neuralforecast model on long inputs:
``python -m benchmarks.forecast_memory MODEL INPUT_SIZE``.

MODEL is an attention spec of ``StructTransformer`` or ``patchtst``. Every step is a token; one layer of width
32 with 4 heads, 4 windows. Printed is what the process needed beyond the same program with an input of 32
steps.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import PatchTST

from structattn.integrations.neuralforecast.model import StructTransformer

_QUIET = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False, "accelerator": "cpu"}
_COMMON = {
    "h": 24,
    "max_steps": 2,
    "batch_size": 1,
    "windows_batch_size": 4,
    "inference_windows_batch_size": 4,
    **_QUIET,
}


def build(name: str, input_size: int) -> Any:
    """The model of that name."""
    if name == "patchtst":
        sizes = {
            "patch_len": 1,
            "stride": 1,
            "hidden_size": 32,
            "linear_hidden_size": 64,
            "encoder_layers": 1,
            "n_heads": 4,
        }
        return PatchTST(input_size=input_size, **sizes, **_COMMON)
    return StructTransformer(
        input_size=input_size, attention=name, patch_length=1, embed_dim=32, num_layers=1, num_heads=4, **_COMMON
    )


def peak_mib(name: str, input_size: int) -> float:
    """Peak resident memory so far, after two steps of training and a forecast."""
    steps = np.arange(6000)
    times = pd.date_range("2024-01-01", periods=6000, freq="h")
    nf = NeuralForecast(models=[build(name, input_size)], freq="h")
    nf.fit(pd.DataFrame({"unique_id": "a", "ds": times, "y": np.sin(steps / 4)}))
    nf.predict()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    small = peak_mib("standard", 32)
    print(f"{peak_mib(sys.argv[1], int(sys.argv[2])) - small:.0f} MiB")  # noqa: T201
