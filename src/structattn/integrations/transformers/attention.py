"""Attention modules that replace those of transformers in a structurized model and keep their weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.transformers.cache import level_cache_layer
from structattn.integrations.transformers.interface import attend_with, check_arguments, checked_mask
from structattn.integrations.transformers.rotary_order import (
    RotarySplit,
    check_fits,
    dimension_order,
    reordered,
    runs_of,
)
from structattn.integrations.transformers.variant import Variant

# Version 0.1 stored the rows of these in the order of the levels, and stored that order as well.
OLD_ORDER = "rotary_order"
_OLD_ROWS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "q_norm.weight", "k_norm.weight")


class StructuredAttention(nn.Module):
    """An attention module of transformers with the score of a variant; its projections keep their names.

    Args:
        original: the module that it replaces; its submodules are reused.
        variant: layout and window; the window of the module itself is added.
        rotary_split: how the rotary pairs are permuted; ``None`` without rotary positions.

    Raises:
        ConfigError: the ranks do not fit the head, or both have a window.
    """

    def __init__(self, original: nn.Module, variant: Variant, rotary_split: RotarySplit | None) -> None:
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        self.config: Any = original.config
        self.layer_idx: int = original.layer_idx  # type: ignore[assignment]
        self.head_dim: int = original.head_dim  # type: ignore[assignment]
        self.scaling: float = original.scaling  # type: ignore[assignment]
        self.is_causal = True
        self.rotary_split = rotary_split
        self.variant = variant.within(getattr(original, "sliding_window", None))
        check_fits(self.variant.layout, self.head_dim, self.head_dim)

    @property
    @abstractmethod
    def weight_dropout(self) -> float:
        """Dropout of attention weights in training."""

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, attention_mask: object, cache: Cache | None, arguments: dict[str, Any]
    ) -> Tensor:
        """(B, H, T, D) and (B, G, T, D) to (B, T, H D)."""
        check_arguments(arguments)
        mask = checked_mask(attention_mask)
        layer = None if cache is None else level_cache_layer(cache, self.layer_idx)
        out = attend_with(
            self.variant,
            q,
            k,
            v,
            mask=mask,
            arguments=arguments,
            scaling=self.scaling,
            dropout=self.weight_dropout if self.training else 0.0,
            layer=layer,
            module=self,
        )
        return out.transpose(1, 2).flatten(2).contiguous()  # the Conv1D of GPT-2 takes views

    def extra_repr(self) -> str:
        """The layout and the window, for ``repr``."""
        return f"layout={self.variant.layout}, window={self.variant.window}, rotary_split={self.rotary_split}"


class RotaryStructuredAttention(StructuredAttention):
    """The attention of Llama, Qwen2 and Qwen3: linear projections, perhaps normed per head, and rotary positions.

    The projections stay in the model's own order, so that adapters, quantized weights and weights loaded later fit. Queries and keys are
    put in the order of the levels while they are rotated, by the angles of the model's own rotary module.

    Args: as ``StructuredAttention``.
    """

    q_proj: nn.Module  # a linear layer, or the module with which an adapter or a quantizer replaced it
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.RMSNorm  # transformers' classes of that kind, only in Qwen3
    k_norm: nn.RMSNorm

    def __init__(self, original: nn.Module, variant: Variant, rotary_split: RotarySplit | None) -> None:
        super().__init__(original, variant, rotary_split)
        assert rotary_split is not None
        self._has_norms = "q_norm" in dict(original.named_children())
        self._dropout: float = original.attention_dropout  # type: ignore[assignment]
        layout = self.variant.layout
        order = dimension_order((self.head_dim,) if layout is None else layout.ranks, rotary_split)
        half = self.head_dim // 2
        self._order = order
        self._runs = runs_of(order)
        self._partner_runs = runs_of(tuple((dim + half) % self.head_dim for dim in order))

    @property
    def weight_dropout(self) -> float:
        return self._dropout

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        order = state_dict.pop(f"{prefix}{OLD_ORDER}", None)
        for name in _OLD_ROWS if order is not None else ():
            if (rows := state_dict.get(f"{prefix}{name}")) is not None:
                state_dict[f"{prefix}{name}"] = _rows(rows, order.argsort())
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def restore_old_rows(self) -> None:
        """Puts loaded rows that version 0.1 stored in the order of the levels in the model's own.

        Raises:
            CheckpointError: a projection is no plain linear layer, whose rows can be moved.
        """
        if not (type(self.q_proj) is type(self.k_proj) is nn.Linear and self.q_proj.weight.is_floating_point()):
            raise CheckpointError(
                "structattn 0.1 stored the rows of q_proj and k_proj in the order of the levels, and those of quantized weights cannot be put "
                "back: load the model without quantization, save it, and quantize that"
            )
        inverse = torch.tensor(self._order, device=self.q_proj.weight.device).argsort()
        for name, parameter in self.named_parameters():
            if name in _OLD_ROWS:
                parameter.copy_(_rows(parameter, inverse))

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (B, T, heads, D) in the model's order, rotated, in the order of the levels; so are the angles, the signs in the sines."""
        return reordered(x, self._runs) * cos + reordered(x, self._partner_runs) * sin

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: object = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As the module of transformers: (B, T, E) to (B, T, E), and ``None`` in place of weights.

        Args:
            hidden_states: (B, T, E).
            position_embeddings: cosines and sines of the model, (B or 1, T, D) each.
            attention_mask: what ``structured_mask`` returned.
            past_key_values: cache of all layers.

        Raises:
            ConfigError: see ``attend_with``.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self._has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (angles[:, :, None, :] for angles in position_embeddings)
        # The first of a pair takes its partner times -sin, the second times sin.
        first, second = sin.chunk(2, dim=-1)
        sin = torch.cat([-first, second], dim=-1)
        cos, sin = reordered(cos, self._runs), reordered(sin, self._runs)
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        out = self._attend(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attention_mask, past_key_values, kwargs
        )
        return self.o_proj(out), None


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """The rows of every head in an order; x is (heads D, ...) or (D,)."""
    return x.view(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)


class FusedStructuredAttention(StructuredAttention):
    """The attention of GPT-2: one projection for queries, keys and values, no rotary positions, so nothing is permuted.

    Args: as ``StructuredAttention``.
    """

    c_attn: nn.Module
    c_proj: nn.Module
    attn_dropout: nn.Dropout
    resid_dropout: nn.Dropout

    def __init__(self, original: nn.Module, variant: Variant, rotary_split: RotarySplit | None) -> None:
        super().__init__(original, variant, None)

    @property
    def weight_dropout(self) -> float:
        return self.attn_dropout.p

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: object = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As the module of transformers; arguments as ``RotaryStructuredAttention.forward``.

        Raises:
            ConfigError: cross attention is asked for; or see ``attend_with``.
        """
        if encoder_hidden_states is not None:
            raise ConfigError("a structurized GPT-2 has no cross attention: leave encoder_hidden_states away")
        parts = self.c_attn(hidden_states).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        out = self._attend(q, k, v, attention_mask, past_key_values, kwargs)
        return self.resid_dropout(self.c_proj(out)), None
