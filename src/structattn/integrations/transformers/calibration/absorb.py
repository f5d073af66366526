"""Writes changes of basis of values, and of queries and keys without rotary positions, into the projections
of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.basis import key_basis, value_basis
from structattn.integrations.transformers.calibration.discovery import FoundAttention
from structattn.integrations.transformers.calibration.projections import Projections, Rows, find_projections
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layout.levels import LevelLayout


class Absorption:
    """The changes of basis that calibrated layers with levels need: found first, so that a refusal changes
    nothing, and written later.

    Args:
        model: the plain model.
        found: its attention layers.
        calibration: of it.
        layouts: of the layers that get levels, by number.

    Raises:
        ConfigError: a projection that would change is not known.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: Sequence[FoundAttention],
        calibration: Calibration,
        layouts: Mapping[int, LevelLayout],
    ) -> None:
        self.calibration = calibration
        calibrated = {layer.shape.index: layer for layer in calibration.layers}
        needed = [layer for layer in attention if _needs(calibrated[layer.index], layouts.get(layer.index))]
        projections = find_projections(model, [layer.module for layer in attention]) if needed else {}
        sources = {layer.keys_of for layer in attention}
        self.parts: list[tuple[Projections, LayerCalibration, LevelLayout]] = []
        for layer in needed:
            layer_projections, layout = projections[layer.module], layouts[layer.index]
            where = f"layer {layer.index} of {type(model).__name__}"
            if layer.keys_of is not None or layer.index in sources:
                raise ConfigError(
                    f"{where} shares keys and values with other layers, whose basis cannot be changed: {_REMEDY}"
                )
            names = (["values", "output"] if layout.value_ranks else []) + (
                ["queries", "keys"] if calibrated[layer.index].has_key_basis else []
            )
            for name in names:
                if getattr(layer_projections, _FIELDS[name]) is None:
                    raise ConfigError(
                        f"the {name} of {where} are not those of a linear layer: there is a norm, a clamp, a gate, an "
                        f"adapter (merge it first), a quantized weight or one that other layers use: {_REMEDY}"
                    )
            self.parts.append((layer_projections, calibrated[layer.index], layout))

    @torch.no_grad()
    def write(self) -> None:
        """Changes the weights. The logits stay what they are, up to rounding, until levels drop
        dimensions.
        """
        for projections, layer, layout in self.parts:
            if layout.value_ranks is not None and projections.value is not None and projections.out is not None:
                basis = value_basis(self.calibration, layer, layout)
                multiply_outputs(projections.value, basis)
                multiply_inputs(projections.out, torch.linalg.inv(basis))
            if layer.has_key_basis and projections.query is not None and projections.key is not None:
                has_bias = getattr(projections.key.layer, "bias", None) is not None
                queries, keys, _ = key_basis(layer, centered=has_bias)
                if has_bias:
                    _shift(projections.key, -layer.moments.key_sum / layer.moments.tokens)
                multiply_outputs(projections.query, queries)
                multiply_outputs(projections.key, keys)


_FIELDS = {"values": "value", "output": "out", "queries": "query", "keys": "key"}
_REMEDY = "leave calibration away, or give this layer a spec without values= (with rotary positions) or of one level"


def _needs(layer: LayerCalibration, layout: LevelLayout | None) -> bool:
    """Whether a basis of a layer changes."""
    if layout is None or layout.num_levels == 1:
        return False
    return layout.value_ranks is not None or layer.has_key_basis


def multiply_outputs(rows: Rows, matrices: Tensor) -> None:
    """Output features x of each head become x A; (G, D, D), and heads are grouped."""
    layer: Any = rows.layer
    is_first = not isinstance(layer, Conv1D)  # the axis of outputs
    for index, matrix in _by_head(rows, matrices):
        _multiply(layer.weight, index, matrix, axis=0 if is_first else 1)
        if layer.bias is not None:
            _multiply(layer.bias, index, matrix, axis=0)


def multiply_inputs(rows: Rows, matrices: Tensor) -> None:
    """The layer reads features x A of each head as it read x; ``matrices`` are the inverses of A, (G, V, V),
    and heads are grouped.
    """
    layer: Any = rows.layer
    axis = 0 if isinstance(layer, Conv1D) else 1
    for index, matrix in _by_head(rows, matrices):
        _multiply(layer.weight, index, matrix.mT, axis=axis)


def _by_head(rows: Rows, matrices: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The features of each head, and the matrix of its group."""
    return zip(rows.index, matrices.repeat_interleave(len(rows.index) // len(matrices), dim=0), strict=True)


def _multiply(parameter: nn.Parameter, index: Tensor, matrix: Tensor, *, axis: int) -> None:
    """The entries ``index`` of an axis, x, become A^T x; computed in float64."""
    index = index.to(parameter.device)
    part = parameter.index_select(axis, index).double().movedim(axis, 0)
    new = torch.tensordot(matrix.to(part).mT, part, dims=1).movedim(0, axis)
    parameter.index_copy_(axis, index, new.to(parameter))


def _shift(rows: Rows, by: Tensor) -> None:
    """Adds to the features of each head, (G, D)."""
    bias: Any = rows.layer.bias
    index = rows.index.flatten().to(bias.device)
    bias.index_copy_(0, index, (bias[index].double() + by.flatten().to(index.device) / rows.factor).to(bias))
