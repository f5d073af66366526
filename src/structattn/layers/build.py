"""The attention layer of any spec."""

from __future__ import annotations

import dataclasses

from structattn import text_forms
from structattn.layers.attention import Attention
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.layer import AttentionLayer, LayerShape


def build_attention(spec: str | AttentionSpec, shape: LayerShape) -> AttentionLayer:
    """The layer of a spec in a model: an ``Attention``, or what a ``CustomAttention`` builds.

    Raises:
        ConfigError: the spec does not fit.
    """
    value = spec if isinstance(spec, AttentionSpec) else text_forms.read(AttentionSpec, spec)
    if value.custom is not None:
        return value.custom.build(shape)
    fields = {field.name: getattr(shape, field.name) for field in dataclasses.fields(shape)}
    return Attention.from_spec(value, **fields)
