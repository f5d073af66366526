"""The device and the dtype in which a module is created, as ``nn.Linear`` takes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from structattn.checks import check_device, describe
from structattn.errors import ConfigError
from structattn.ops.terms import DTYPES

Device = torch.device | str | None


def on_device(device: Device) -> AbstractContextManager[object]:
    """Within it parameters are created on a device; ``None`` is torch's default device.

    Raises:
        ConfigError: there is no such device.
    """
    return nullcontext() if device is None else check_device("device", device)


def check_dtype(dtype: object) -> None:
    """Raises ``ConfigError`` unless it is ``None`` or a dtype that attention computes with."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype must be a floating torch.dtype of 16, 32 or 64 bits, got {describe(dtype)}")
