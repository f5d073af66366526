"""The parts of a spec that fit an attention layer with trained weights: a layout and a window, no scoring."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structattn.checks import quoted
from structattn.errors import ConfigError
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.layers.scoring import Standard
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import AnyLayout, HeadLayouts, with_whole_values
from structattn.layout.text import TextLayout
from structattn.ops import Backend, structured_attention
from structattn.ops.chunks import chunked_attention
from structattn.ops.terms import ScoreTerms
from structattn.spec.attention import AttentionSpec, parse_spec


def trained_spec(spec: str | AttentionSpec) -> AttentionSpec:
    """A spec, checked to fit trained weights.

    Raises:
        ConfigError: it asks for a scoring, a number of heads or a custom layer, which need other weights; or
            is not a spec.
    """
    if not isinstance(spec, str | AttentionSpec):
        raise ConfigError(f"an attention spec is a text such as 'mlr:32|16|16' or an AttentionSpec, got {quoted(spec)}")
    value = parse_spec(spec) if isinstance(spec, str) else spec
    is_kept = value.custom is None and value.scoring == Standard()
    if not is_kept or (value.num_heads, value.num_kv_heads) != (None, None):
        what = (
            "a layer of its own"
            if value.custom is not None
            else "a bilinear scoring"
            if not isinstance(value.scoring, Standard)
            else "a number of heads, a rank or a scaling"
        )
        raise ConfigError(
            f"attention spec {quoted(str(value))} asks for {what}, which cannot keep trained query and key weights: "
            "give a layout (mlr, global-window) and a window only, or train a StructAttnForCausalLM from scratch"
        )
    if isinstance(value.layout, TextLayout):
        raise ConfigError(
            f"attention spec {quoted(str(value))} has text units as levels, and transformers does not give a model the "
            "tokens that end lines: train a structattn.LanguageModel, or give blocks (mlr)"
        )
    return value


def _has_sink_tokens(layout: AnyLayout | None) -> bool:
    layouts = layout.layouts if isinstance(layout, HeadLayouts) else (layout,)
    return any(getattr(one, "sink_tokens", 0) for one in layouts)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A layout and a window, resolved for a model.

    Args:
        layout, window: as of ``structured_attention``.
        chunk_size: of a model in which tokens only see their own chunk of this many.
        backend: of ``structured_attention``.
    """

    layout: AnyLayout | None = None
    window: int | None = None
    chunk_size: int | None = None
    backend: Backend = "auto"

    @classmethod
    def of(cls, spec: AttentionSpec, context_length: int, head_dim: int | None, backend: Backend = "auto") -> Variant:
        """That of a spec, with blocks halved from a context length, for heads of that dimension if it is
        known.
        """
        layout = spec.layout_for(context_length, head_dim)
        assert not isinstance(layout, TextLayout)  # trained_spec has refused it
        return cls(layout=layout, window=spec.window, backend=backend)

    def within(self, window: int | None, chunk_size: int | None = None) -> Variant:
        """This variant in a layer that has a sliding window or chunks.

        Raises:
            ConfigError: both have a window; or the layer has chunks, and the variant sink tokens.
        """
        if chunk_size is not None and _has_sink_tokens(self.layout):
            raise ConfigError(
                f"the model's layer has chunks of {chunk_size} tokens, which see no other chunk and so no sink tokens: "
                "choose a spec without sink_tokens, or leave the layer out"
            )
        if window is None:
            return self if chunk_size is None else replace(self, chunk_size=chunk_size)
        if self.window is not None or isinstance(self.layout, GlobalWindowLayout):
            raise ConfigError(
                f"the model's layer has a sliding window, {window}, and so has the attention spec: choose a spec "
                "without a window, or leave the layer out"
            )
        return replace(self, window=window, chunk_size=chunk_size)

    def scaled(self, q: Tensor, scaling: float | None) -> tuple[Tensor, float | None]:
        """The queries and the scale that preserve the score scale c of a model.

        A layout scales by the shared rank, 1 / sqrt(R) for ``"variance"``; a model by c, 1 / sqrt(D) for
        most. The queries are multiplied by c sqrt(D): with one level the scores are then the model's own, and
        with levels every distance keeps its variance. Without a layout c is used as it is.
        """
        dim = q.shape[-1]
        if self.layout is None:
            return q, 1 / math.sqrt(dim) if scaling is None else scaling
        factor = 1.0 if scaling is None else scaling * math.sqrt(dim)
        return (q if math.isclose(factor, 1.0, rel_tol=1e-12) else q * factor), None

    def fitted(self, q: Tensor, terms: ScoreTerms) -> tuple[Tensor, ScoreTerms]:
        """The queries and the terms of a model as ``structured_attention`` takes them: with the scale of
        ``scaled``, and the mask on the device of the queries.

        A model may be spread over devices, and the mask is made on that of its inputs.
        """
        q, scale = self.scaled(q, terms.scale)
        mask = terms.attn_mask
        return q, replace(terms, scale=scale, attn_mask=None if mask is None else mask.to(q.device))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: ScoreTerms,
        *,
        sequences: Sequences,
        is_causal: bool = True,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attention without a cache: (B, H, T, D) and (B, G, S, D or V) to (B, H, T, V).

        Args:
            terms: of the model, as are the scale and the mask.
        """
        q, terms = self.fitted(q, terms)
        offsets, padding = (
            None if x is None else x.to(q.device) for x in (sequences.cu_seqlens, sequences.left_padding)
        )
        attention: Callable[..., Tensor] = structured_attention
        if self.chunk_size is not None:
            attention = functools.partial(chunked_attention, chunk_size=self.chunk_size)
        return attention(
            q,
            k,
            v,
            self.layout,
            is_causal=is_causal,
            scale=terms.scale,
            window=self.window,
            attn_bias=terms.attn_bias,
            attn_mask=terms.attn_mask,
            dropout_p=dropout,
            cu_seqlens=offsets,
            left_padding=padding,
            backend=self.backend,
            softcap=terms.softcap,
            sinks=terms.sinks,
            alibi_slopes=terms.alibi_slopes,
        )

    def weights(
        self, q: Tensor, k: Tensor, terms: ScoreTerms, *, sequences: Sequences, is_causal: bool = True
    ) -> Tensor:
        """The attention weights, (B, H, T, S), of all levels, before dropout; arguments as ``attend``.

        Cost: the values of ``attend`` are the S unit vectors: T S^2 multiply-adds for each head.
        """
        each = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        variant = replace(self, layout=with_whole_values(self.layout), backend="reference")
        return variant.attend(q, k, each, terms, sequences=sequences, is_causal=is_causal)
