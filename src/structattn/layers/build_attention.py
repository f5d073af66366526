"""The attention layer of any spec."""

from __future__ import annotations

import dataclasses

from torch import nn

from structattn import text_forms
from structattn.checks import check_type
from structattn.layers.attention import Attention
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.layer import AttentionLayer, LayerShape


def build_attention(spec: str | AttentionSpec, shape: LayerShape) -> AttentionLayer:
    """The layer of a spec in a model: an ``Attention``, or what a ``CustomAttention`` builds.

    Raises:
        ConfigError: the spec does not fit, or a ``CustomAttention`` builds no ``AttentionLayer`` with an
            ``out_proj``.
    """
    value = spec if isinstance(spec, AttentionSpec) else text_forms.read(AttentionSpec, spec)
    if value.custom is not None:
        layer = value.custom.build(shape)
        name = type(value.custom).__name__
        check_type(f"what {name}.build returns", layer, AttentionLayer, "a structattn.layers.AttentionLayer")
        check_type(
            f"out_proj of {type(layer).__name__}",
            getattr(layer, "out_proj", None),
            nn.Linear,
            "an nn.Linear, the last layer",
            "assign it in __init__",
        )
        return layer
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return Attention.from_spec(value, **fields)
