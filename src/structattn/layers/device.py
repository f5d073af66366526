"""The device and the dtype in which a module is created, as ``nn.Linear`` takes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from structattn.checks import check_device, describe
from structattn.errors import ConfigError

Device = torch.device | str | None


def on_device(device: Device) -> AbstractContextManager[object]:
    """Within it parameters are created on a device; ``None`` is torch's default device.

    Raises:
        ConfigError: there is no such device.
    """
    return nullcontext() if device is None else check_device("device", device)


def check_dtype(dtype: object) -> None:
    """Raises ``ConfigError`` unless it is ``None`` or a floating dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating torch.dtype, got {describe(dtype)}")
