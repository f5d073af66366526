"""Baseline models: forecasters of neuralforecast as plain modules, trained by our loop and scored on the same
windows.
"""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from structattn.checks import quoted
from structattn.errors import ConfigError, MissingDependencyError, nearest_name
from structattn.extras import install_command
from structattn.grammar import assignment, one_of, reading, split_list
from structattn_lab.old_formats import todays_spec

PREFIX = "baseline:"


@dataclass(frozen=True)
class _Known:
    """A forecaster of neuralforecast.

    Args:
        settings: those that differ from neuralforecast's defaults: the paper's for hourly ETT data.
        mixes_channels: whether one forward pass takes all channels of a window.
    """

    settings: dict[str, Any]
    mixes_channels: bool = False


_MODELS = {
    "DLinear": _Known({"moving_avg_window": 25}),
    "NHITS": _Known({}),
    "PatchTST": _Known(
        {"hidden_size": 16, "n_heads": 4, "linear_hidden_size": 128, "encoder_layers": 3}
        | {"dropout": 0.3, "fc_dropout": 0.3}
    ),
    "iTransformer": _Known({"hidden_size": 256, "n_heads": 8, "e_layers": 2, "d_ff": 256}, mixes_channels=True),
}  # fmt: skip


@dataclass(frozen=True)
class BaselineModelSpec:
    """A baseline model in one line, such as ``baseline:PatchTST`` or
    ``baseline:NHITS,dropout_prob_theta=0.1,n_freq_downsample=[8,4,1]``.

    Args:
        name: DLinear, NHITS, PatchTST or iTransformer.
        settings: arguments of its class, by name, in place of those above.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, spec: str) -> BaselineModelSpec | None:
        """The baseline model that a text names; ``None`` for another text, such as an attention spec.

        Raises:
            ConfigError: an unknown name, or a setting that is not ``name=value``.
        """
        spec = todays_spec(spec)
        if not spec.startswith(PREFIX):
            return None
        with reading("baseline model", spec, f"Written {PREFIX}NAME[,KEY=VALUE...], such as {PREFIX}DLinear"):
            name, *settings = split_list(spec.removeprefix(PREFIX))
            one_of("forecaster", _MODELS)(name)
            return cls(name, tuple((key, _literal(value)) for key, value in map(assignment, settings)))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ConfigError(f"expected a Python number, text or list, got {quoted(text)}") from None


class BaselineModel(nn.Module):
    """The network of a model of neuralforecast, trained by our loop on our windows.

    Args:
        spec: which.
        look_back: input steps.
        horizon: output steps.
        num_channels: series of a window.

    Attributes:
        num_tokens: 1: what is counted is windows.

    Raises:
        MissingDependencyError: without neuralforecast.
        ConfigError: its class does not take the settings.

    Cost: importing neuralforecast takes several seconds of each process.
    """

    num_tokens = 1

    def __init__(self, spec: BaselineModelSpec, *, look_back: int, horizon: int, num_channels: int) -> None:
        super().__init__()
        try:
            models = import_module("neuralforecast.models")
        except ImportError as error:
            raise MissingDependencyError(
                f"{PREFIX}{spec.name} is a model of neuralforecast, which is not installed: "
                f"{install_command('forecast')} ({error})"
            ) from error
        known_model = _MODELS[spec.name]
        self.mixes_channels = known_model.mixes_channels
        self.num_channels, self.look_back = num_channels, look_back
        self._flops: int | None = None
        arguments = {"h": horizon, "input_size": look_back, **known_model.settings, **dict(spec.settings)}
        if self.mixes_channels:
            arguments["n_series"] = num_channels
        kind = getattr(models, spec.name)
        # What its class does not know, it would hand on to a trainer that is not used here.
        accepted = [
            name
            for name, parameter in inspect.signature(kind).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if unknown := [name for name in arguments if name not in accepted]:
            raise ConfigError(
                f"{PREFIX}{spec.name} has no setting {quoted(unknown[0])}: {nearest_name(unknown[0], accepted)}"
            )
        with _own_seed():
            try:
                # It sets the global seed to this one, which is therefore that of the run.
                model = kind(**arguments, random_seed=torch.initial_seed() % 2**32)
            except Exception as error:  # whatever it raises for arguments that it does not take
                raise ConfigError(
                    f"{PREFIX}{spec.name} of neuralforecast does not take these settings: {error}"
                ) from error
        self.network = model

    def forward(self, window: Tensor) -> Tensor:
        """(B, channels, look_back) scaled values to (B, channels, horizon)."""
        batch, channels, _ = window.shape
        steps = window.transpose(1, 2) if self.mixes_channels else window.reshape(batch * channels, -1, 1)
        inputs = {
            "insample_y": steps,
            "insample_mask": torch.ones_like(steps),
            "futr_exog": None,
            "hist_exog": None,
            "stat_exog": None,
        }
        out: Tensor = self.network(inputs)
        return out.transpose(1, 2) if self.mixes_channels else out.reshape(batch, channels, -1)

    def flops_per_example(self) -> int:
        """Forward FLOPs of one channel of a window, as PyTorch counts them: products of matrices and
        convolutions.
        """
        if self._flops is None:  # asked for at every step of the training
            network = copy.deepcopy(self).to("meta").eval()
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                network(torch.zeros(1, self.num_channels, self.look_back, device="meta"))
            self._flops = counter.get_total_flops() // self.num_channels
        return self._flops


@contextmanager
def _own_seed() -> Iterator[None]:
    """Leaves the generators of Python and NumPy as they were, and Lightning's note on seeds unsaid."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    logger = logging.getLogger("lightning_fabric.utilities.seed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
