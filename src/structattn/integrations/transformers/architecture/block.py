"""``StructAttnLayer``: one block of ``StructAttnModel``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from structattn.cache import LevelCache
from structattn.cache.paged import PackedCache
from structattn.integrations.transformers.architecture.config import StructAttnConfig
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer
from structattn.integrations.transformers.caches.model_cache import level_cache_layer
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.layers.attention import Attention
from structattn.layers.packed import attend_packed
from structattn.layers.rotary import Rotary
from structattn.memory import check_memory
from structattn.optim.roles import Role, linear_roles


class GatedMLP(nn.Module):
    """W_down (silu(W_gate x) * (W_up x)), without biases.

    Args:
        width: E.
        hidden: width between.
        std: of the initial weights.
    """

    def __init__(self, width: int, hidden: int, std: float) -> None:
        super().__init__()
        check_memory(f"the layers of an MLP of hidden_size {width} and intermediate_size {hidden}", 3 * width * hidden)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            nn.init.normal_(linear.weight, std=std)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles: two hidden layers and an output."""
        return linear_roles(self, {"gate_proj": "hidden", "up_proj": "hidden", "down_proj": "output"})

    def forward(self, x: Tensor) -> Tensor:
        """(..., E) to (..., E)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class StructAttnLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        config: sizes and options.
        spec: attention spec of this layer.
        index: number of the layer.
    """

    def __init__(self, config: StructAttnConfig, spec: str, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        assert config.intermediate_size is not None  # the config fills it in
        self.index = index
        self.attention_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.attention = Attention.from_spec(
            spec,
            embed_dim=width,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            context_length=config.max_position_embeddings,
            rotary=None if config.rotary is None else Rotary.parse(config.rotary),
            qk_norm=config.qk_norm,
            bias=config.attention_bias,
            dropout=config.attention_dropout,
        )
        self.mlp_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = GatedMLP(width, config.intermediate_size, config.initializer_range)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self, x: Tensor, sequences: Sequences, caches: Cache | None, padding: Any, attn_mask: Tensor | None
    ) -> Tensor:
        """(B, T, E) to (B, T, E).

        Args:
            x: (B, T, E).
            sequences: where sequences begin.
            caches: cache of all layers.
            padding: the padding of each row as ints, for a cache.
            attn_mask: what is hidden besides, on the device of the model's inputs.
        """
        shown = None if attn_mask is None else attn_mask.to(x.device)
        normed = self.attention_norm(x)
        if caches is None:
            out = self.attention(
                normed, left_padding=sequences.left_padding, cu_seqlens=sequences.cu_seqlens, attn_mask=shown
            )
        else:
            out = self.attention(normed, cache=self._cache(caches, normed, padding), attn_mask=shown)
        return self._and_mlp(x, out)

    def weights(
        self, x: Tensor, sequences: Sequences, caches: Cache | None, padding: Any, attn_mask: Tensor | None
    ) -> Tensor:
        """The attention weights of these tokens, (B, H, T, S), before they are in the cache; arguments as
        ``forward``.
        """
        shown = None if attn_mask is None else attn_mask.to(x.device)
        normed = self.attention_norm(x)
        if caches is not None and level_cache_layer(caches, self.index).get_seq_length() > 0:
            cache = self._cache(caches, normed, padding)
            return self.attention.weights(normed, cache=cache, attn_mask=shown)
        return self.attention.weights(
            normed, left_padding=sequences.left_padding, cu_seqlens=sequences.cu_seqlens, attn_mask=shown
        )

    def bring_scoring(self) -> None:
        """Lets the weights of the scoring come with a call of the attention, where accelerate keeps them on
        disk or on a CPU.

        accelerate brings the weights of a module when that module is called, and the attention calls no
        matrix: it multiplies by it.
        """
        parts = [(part, getattr(part, "_hf_hook", None)) for part in self.attention.scoring.modules()]
        kept = [(part, hook) for part, hook in parts if getattr(hook, "offload", False)]

        def bring(*_: object) -> None:
            for part, hook in kept:
                hook.pre_forward(part)  # type: ignore[union-attr]

        def leave(*_: object) -> None:
            for part, hook in kept:
                hook.post_forward(part, None)  # type: ignore[union-attr]

        if kept:
            self.attention.register_forward_pre_hook(bring)
            self.attention.register_forward_hook(leave, always_call=True)

    def packed(self, x: Tensor, cache: PackedCache, positions: Tensor) -> Tensor:
        """As ``forward``, for the tokens of many requests in one row, with their positions (T,)."""
        return self._and_mlp(x, attend_packed(self.attention, cache, self.index, self.attention_norm(x), positions))

    def _and_mlp(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.dropout(out)
        return x + self.dropout(self.mlp(self.mlp_norm(x)))

    def _cache(self, caches: Cache, normed: Tensor, padding: tuple[int, ...] | None) -> LevelCache:
        layer: LevelCacheLayer = level_cache_layer(caches, self.index)

        def new() -> LevelCache:
            return self.attention.new_cache(
                max_length=layer.max_length, page_size=layer.page_size, left_padding=padding, storage=layer.storage
            )

        @torch.no_grad()
        def append(cache: LevelCache, count: int) -> None:
            self.attention(normed[:, :count], cache=cache)

        return layer.ready(new, append, padding, normed.shape[1])
