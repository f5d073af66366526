"""Spreads the values of each head over its dimensions, so that few bits hold them better."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.integrations.transformers.architecture.loading import check_one_decoder, check_plain
from structattn.integrations.transformers.calibration.absorb import multiply_inputs, multiply_outputs
from structattn.integrations.transformers.calibration.discovery import find_attention
from structattn.integrations.transformers.calibration.projections import find_projections


@torch.no_grad()
def rotate_values(model: PreTrainedModel) -> PreTrainedModel:
    """Multiplies the values of each head by an orthogonal matrix R, and the layer that reads the output of
    attention by its inverse, in the weights: v' = v R and W' = W R^T.

    The model computes what it did, in the same time, with any cache. But R has entries of nearly equal size,
    so that a dimension with large values is spread over all of a head, and values that share a scale in a
    cache of 4 or 8 bits (``Storage``) have a smaller range, and less error. Call it before ``calibrate`` and
    ``structurize``.

    Args:
        model: a decoder that ``structurize`` takes, not structurized yet. It is changed in place. R is its
            own inverse: a second call gives the old weights, up to rounding.

    Returns:
        The model. Layers stay as they are where values, or what reads the output, are not of a linear layer
        with weights of its own: there is a norm, a gate, an adapter (merge it first) or quantized weights.

    Raises:
        ConfigError: the model is of another kind, structurized already, or none of its layers can be changed.

    Cost: six forward passes of 64 tokens, and the products with R, in float64. New weights are rounded to
        their dtype.

    Source: QuaRot (arXiv 2404.00456) rotates the values of each head by a Hadamard matrix in the weights. R
        is one where the size of a head is a power of 2; an odd factor of it gets a Hartley matrix.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    check_plain(model)
    check_one_decoder(model)
    attention = find_attention(model)
    projections = find_projections(model, [layer.module for layer in attention])
    by_source = {layer.index: [layer] for layer in attention if layer.keys_of is None}
    for layer in attention:
        if layer.keys_of is not None:
            by_source[layer.keys_of].append(layer)
    is_changed = False
    for source, *readers in by_source.values():
        value = projections[source.module].value
        every_out = [out for layer in (source, *readers) if (out := projections[layer.module].out) is not None]
        if value is None or len(every_out) <= len(readers):
            continue
        matrix = _spreading(source.value_dim)[None]
        multiply_outputs(value, matrix)
        for out in every_out:
            multiply_inputs(out, matrix)
        is_changed = True
    if not is_changed:
        raise ConfigError(
            f"the values of {type(model).__name__} cannot be rotated: in every layer they, or what reads the output "
            "of attention, are not those of a linear layer: there is a norm, a gate, an adapter (merge it first) or "
            "a quantized weight"
        )
    return model


def _spreading(size: int) -> Tensor:
    """An orthogonal and symmetric matrix whose entries have nearly the same size, (size, size) float64: the
    Kronecker product of Hartley matrices of 2, which make a Hadamard matrix, and one of the odd factor.
    """
    odd = size
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while odd % 2 == 0:
        odd //= 2
        matrix = torch.kron(matrix, _hartley(2))
    return torch.kron(matrix, _hartley(odd))


def _hartley(size: int) -> Tensor:
    """cos + sin of 2 pi i j / n, over sqrt(n)."""
    numbers = torch.arange(size, dtype=torch.float64)
    angles = 2 * torch.pi / size * torch.outer(numbers, numbers)
    return (angles.cos() + angles.sin()) / size**0.5
