"""Adapters of attention classes of transformers that score by themselves: what each does before and after its
scores.

They are found by the names of file and class: importing all these files would take time that most programs
need for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.integrations.transformers.attention.adapters import register_known, weighed
from structattn.integrations.transformers.caches.model_cache import CACHE, of_decoder
from structattn.integrations.transformers.masks.structured_mask import StructuredMask


def _heads(x: Tensor, dim: int) -> Tensor:
    """(B, T, H D) as (B, H, T, D)."""
    return x.unflatten(-1, (-1, dim)).transpose(1, 2)


def _fused_heads(fused: Tensor, num_heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one projection, (B, T, (H + 2 G) D): for each of G groups its queries, its
    key, its value.

    With G = H it is BLOOM's order, with G = 1 Falcon's ``multi_query``, and any other is its
    ``new_decoder_architecture``.
    """
    groups = (fused.shape[-1] // dim - num_heads) // 2
    parts = fused.unflatten(-1, (groups, -1, dim))
    q, k, v = parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class _Adapter(nn.Module):
    """What the adapters share."""

    is_causal = True
    training: bool

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """What the class behind has."""

    def weighed(self, q: Tensor, k: Any, v: Any, mask: object, **terms: Any) -> tuple[Tensor, Tensor | None]:
        """The heads' outputs, (B, T, H V), and the weights where they are asked for."""
        out, weights = weighed(self, q, k, v, mask, **terms)
        return out.flatten(2), weights

    def dropped(self, dropout: nn.Dropout) -> float:
        return dropout.p if self.training else 0.0

    def cached(self, k: Tensor, v: Tensor, cache: Any) -> tuple[Any, Any]:
        return (k, v) if cache is None else of_decoder(cache).update(k, v, self.layer_idx)


class _GPTJAdapter(_Adapter):
    """GPT-J and CodeGen."""

    def _attn(self, query: Tensor, key: Any, value: Any, attention_mask: object = None) -> tuple[Tensor, Tensor | None]:
        out, weights = weighed(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=1 / float(self.scale_attn),
            dropout=self.dropped(self.attn_dropout),
        )
        return out.transpose(1, 2), weights


class _GPTNeoXJapaneseAdapter(_Adapter):
    def _attn(self, query: Tensor, key: Any, value: Any, attention_mask: object = None) -> tuple[Tensor, Tensor | None]:
        out, weights = weighed(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=1 / float(self.norm_factor),
            dropout=self.dropped(self.attention_dropout),
        )
        return out.transpose(1, 2), weights


class _BloomAdapter(_Adapter):
    """Its ALiBi is a number for each key, in the model's dtype, and counts real tokens only."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: object,
        layer_past: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _fused_heads(self.query_key_value(hidden_states), self.num_heads, self.head_dim)
        k, v = self.cached(k, v, layer_past)
        out, weights = self.weighed(
            q,
            k,
            v,
            attention_mask,
            scaling=self.inv_norm_factor,
            dropout=self.dropped(self.attention_dropout),
            position_bias=alibi.unflatten(0, (-1, self.num_heads)),
        )
        is_sliced = self.pretraining_tp > 1 and self.slow_but_exact  # sums parts of a product, and leaves its bias out
        out = F.linear(out, self.dense.weight) if is_sliced else self.dense(out)
        return residual + F.dropout(out, self.hidden_dropout, self.training), weights


class _FalconAdapter(_Adapter):
    """Its ALiBi is a number for each key too, rounded to bfloat16, and is divided by sqrt(D) like the
    scores.
    """

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: object,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        position_embeddings: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = _fused_heads(self.query_key_value(hidden_states), self.num_heads, self.head_dim)
        terms: dict[str, Any] = {"scaling": self.inv_norm_factor, "dropout": 0.0}
        if alibi is None:
            from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        else:
            terms["dropout"] = self.dropped(self.attention_dropout)
            terms["position_bias"] = alibi.unflatten(0, (-1, self.num_heads)) * self.inv_norm_factor
        k, v = self.cached(k, v, layer_past)
        out, weights = self.weighed(q, k, v, attention_mask, **terms)
        return self.dense(out), weights


class _MptAdapter(_Adapter):
    """Its ALiBi counts all tokens, hidden ones too, so that slopes say it; masks of all pairs reach it true
    where a pair is hidden.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        attention_mask: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        fused = self.Wqkv(hidden_states)
        if self.clip_qkv:
            fused = fused.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        q, k, v = (_heads(x, self.head_dim) for x in fused.chunk(3, dim=2))
        k, v = self.cached(k, v, arguments.get(CACHE))
        out, weights = self.weighed(
            q,
            k,
            v,
            ~attention_mask if isinstance(attention_mask, Tensor) else attention_mask,
            scaling=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
            alibi_slopes=-position_bias[:, 0, -2],  # the bias of the key before the last
        )
        return self.out_proj(out), weights


class _GPTNeoAdapter(_Adapter):
    """Its local layers have a window that the mask of the model does not have."""

    def _attn(self, query: Tensor, key: Any, value: Any, attention_mask: object = None) -> tuple[Tensor, Tensor | None]:
        terms: dict[str, Any] = {"scaling": 1.0, "dropout": self.dropped(self.attn_dropout)}
        if isinstance(attention_mask, Tensor):
            count = attention_mask.shape[-1]
            shown = self.bias[:, :, count - query.shape[2] : count, :count]
            is_bool = attention_mask.dtype == torch.bool
            attention_mask = attention_mask & shown if is_bool else attention_mask.masked_fill(~shown, -torch.inf)
        elif self.attention_type == "local":
            terms["sliding_window"] = self.config.window_size
            if isinstance(attention_mask, StructuredMask):
                attention_mask = attention_mask.within(self.config.window_size)
        out, weights = weighed(self, query, key, value, attention_mask, **terms)
        return out.transpose(1, 2), weights


class _XGLMAdapter(_Adapter):
    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        attention_mask: object = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        q, k, v = (_heads(p(hidden_states), self.head_dim) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = self.cached(k, v, arguments.get(CACHE))
        dropout = self.dropout if self.training else 0.0
        out, weights = self.weighed(q, k, v, attention_mask, scaling=self.scaling, dropout=dropout)
        return self.out_proj(out), weights


class _BertAdapter(_Adapter):
    """RemBERT and Megatron-BERT as decoders."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        encoder_hidden_states: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        dim: int = self.attention_head_size
        q, k, v = (_heads(p(hidden_states), dim) for p in (self.query, self.key, self.value))
        k, v = self.cached(k, v, arguments.get(CACHE))
        return self.weighed(q, k, v, attention_mask, scaling=dim**-0.5, dropout=self.dropped(self.dropout))


class _JetMoeAdapter(_Adapter):
    """Its queries are of experts e for key heads g, with the experts first, so that query head e G + g reads
    key head g.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: object = None,
        position_embeddings: Any = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:
        from transformers.models.jetmoe.modeling_jetmoe import apply_rotary_pos_emb

        queries, router_logits, topology = self.experts.map(hidden_states)
        keys, values = self.kv_proj(hidden_states).chunk(2, dim=-1)
        q, k, v = (_heads(x.flatten(2), self.head_dim) for x in (queries, keys, values))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        groups = k.shape[1]
        k, v = self.cached(k, v, arguments.pop(CACHE, None))
        dropout = self.attention_dropout if self.training else 0.0
        arguments |= {"scaling": self.scaling, "dropout": dropout}
        out, weights = weighed(self, _swapped(q, 1, (-1, groups)), k, v, attention_mask, **arguments)
        out = self.experts.reduce(_swapped(out, 2, (groups, -1)).unflatten(2, (-1, groups)).flatten(3), topology)
        return out.flatten(2), None if weights is None else _swapped(weights, 1, (groups, -1)), router_logits


def _swapped(x: Tensor, dim: int, parts: tuple[int, int]) -> Tensor:
    """Heads (a, b) of this dimension in the order (b, a)."""
    return x.unflatten(dim, parts).transpose(dim, dim + 1).flatten(dim, dim + 1)


class _NumberedAdapter(nn.Module):
    """Zamba and Zamba2: they run through the interface, and only lack the number of the layer, which comes
    with each call.
    """


for _file, _attention, _kind in (
    ("gptj.modeling_gptj", "GPTJAttention", _GPTJAdapter),
    ("codegen.modeling_codegen", "CodeGenAttention", _GPTJAdapter),
    ("gpt_neox_japanese.modeling_gpt_neox_japanese", "GPTNeoXJapaneseAttention", _GPTNeoXJapaneseAdapter),
    ("bloom.modeling_bloom", "BloomAttention", _BloomAdapter),
    ("falcon.modeling_falcon", "FalconAttention", _FalconAdapter),
    ("mpt.modeling_mpt", "MptAttention", _MptAdapter),
    ("gpt_neo.modeling_gpt_neo", "GPTNeoSelfAttention", _GPTNeoAdapter),
    ("xglm.modeling_xglm", "XGLMAttention", _XGLMAdapter),
    ("rembert.modeling_rembert", "RemBertSelfAttention", _BertAdapter),
    ("megatron_bert.modeling_megatron_bert", "MegatronBertSelfAttention", _BertAdapter),
    ("jetmoe.modeling_jetmoe", "JetMoeAttention", _JetMoeAdapter),
    ("zamba.modeling_zamba", "ZambaAttention", _NumberedAdapter),
    ("zamba2.modeling_zamba2", "Zamba2Attention", _NumberedAdapter),
):
    register_known(_file, _attention, _kind)
