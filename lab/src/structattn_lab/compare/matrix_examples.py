"""Matrices to fit: from a file, from a finished run, or one of the named examples."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from structattn.checks import check_int
from structattn.errors import ConfigError, DataError, nearest_name
from structattn.layers.attention import Attention
from structattn_lab.analysis.fits import NamedMatrix
from structattn_lab.data.series import WindowedSeries
from structattn_lab.data.series_file import read_series
from structattn_lab.training.evaluate import load_run

_LARGEST_EXAMPLE = 2**14  # a matrix of 2 GiB


@dataclass(frozen=True)
class Example:
    """A matrix that can be made at any size: a description and a function."""

    about: str
    make: Callable[[int], Tensor]


def _gaussian(size: int) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _hadamard(size: int) -> Tensor:
    if size & (size - 1):
        low = 1 << (size.bit_length() - 1)
        raise ConfigError(f"the Hadamard example exists at powers of two, got {size}; use --size {low} or {2 * low}")
    h = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    for _ in range(size.bit_length() - 1):
        h = torch.kron(h, step)
    return h / math.sqrt(size)


def _line(size: int) -> Tensor:
    points = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).sort().values
    return torch.exp(-8 * (points[:, None] - points).abs())


def _etth1(size: int) -> Tensor:
    windows, _ = WindowedSeries(read_series(None, "date", "OT"), size, 1).windows("train")
    return torch.cov(windows.double().T)


EXAMPLES: Mapping[str, Example] = MappingProxyType(
    {
        "gaussian": Example("independent normal numbers, without structure", _gaussian),
        "hadamard": Example("the Walsh-Hadamard transform, orthogonal", _hadamard),
        "line": Example("exp(-8 |x - y|) of sorted random points on the unit interval", _line),
        "etth1": Example("covariance of windows of ETTh1's oil temperature, hour against hour", _etth1),
    }
)


def load_matrix(text: str, size: int) -> NamedMatrix:
    """The matrix that a command-line argument names.

    Args:
        text: a path ending in .npy; a name in ``EXAMPLES``; or the folder of a finished run, whose score
            matrix of one head is taken: ``FOLDER`` (first attention layer, head 0) or ``FOLDER@LAYER.HEAD``.
        size: of an example.

    Raises:
        ConfigError: the text names no matrix, or a layer or head that does not exist.
        DataError: the file cannot be read as one real matrix.
        CheckpointError: the folder holds no finished run.
    """
    if text in EXAMPLES:
        check_int("--size", size, minimum=2, maximum=_LARGEST_EXAMPLE)
        return NamedMatrix(name=text, about=EXAMPLES[text].about, values=EXAMPLES[text].make(size))
    if not text:
        raise ConfigError("a matrix has an empty name: give a .npy file, the folder of a run, or an example")
    if text.endswith(".npy"):
        return _from_file(Path(text))
    match = re.fullmatch(r"(.+)@(\d+)\.(\d+)", text)
    folder = Path(match[1] if match else text)
    if folder.is_dir():
        return _from_run(folder, int(match[2]) if match else 0, int(match[3]) if match else 0)
    raise ConfigError(
        f"{text!r} is not a .npy file, the folder of a run, or an example: {nearest_name(text, EXAMPLES)}; "
        "save your array with numpy.save to fit it"
    )


def _from_file(path: Path) -> NamedMatrix:
    try:
        values = np.load(path, allow_pickle=False)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: its header asks for more than the memory, and it has {path.stat().st_size:,} bytes: write a "
            "smaller matrix"
        ) from error
    except (ValueError, EOFError) as error:  # the message of numpy advises to allow pickles
        raise DataError(
            f"{path} is not a file of numpy.save, or holds objects: write the matrix with numpy.save"
        ) from error
    if not isinstance(values, np.ndarray) or values.ndim != 2 or values.dtype.kind not in "fiub":
        shape, kind = getattr(values, "shape", None), getattr(values, "dtype", type(values).__name__)
        raise DataError(f"{path}: expected one real matrix, got shape {shape} of type {kind}")
    return NamedMatrix(
        name=path.stem, about=f"the file {path.name}", values=torch.from_numpy(values.astype(np.float64))
    )


def _from_run(folder: Path, layer: int, head: int) -> NamedMatrix:
    """M of one head: the score of two hidden states x, y is x^T M y, up to norms and scale."""
    run = load_run(folder)
    layers = [module for module in run.model.modules() if isinstance(module, Attention)]
    if not layers:
        raise ConfigError(f"{folder} has the attention {run.spec}, which has no score matrix: name a run of a scoring")
    if layer >= len(layers) or head >= layers[layer].num_heads:
        heads = layers[min(layer, len(layers) - 1)].num_heads
        raise ConfigError(
            f"{folder} has {len(layers)} attention layers of {heads} heads, numbered from 0; got layer {layer}, head "
            f"{head}"
        )
    matrix = layers[layer].scoring.matrix
    values = matrix.to_dense().detach().double().reshape(-1, matrix.num_rows, matrix.num_cols)[head]
    about = f"score matrix of {run.spec} trained on {run.task.name}, layer {layer}, head {head}"
    return NamedMatrix(name=f"{run.task.name} {run.spec}", about=about, values=values)
