"""``Attention``: one module for every variant, from a scoring, a layout and a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from structattn import text_forms
from structattn.cache import PAGE_SIZE, LevelCache, Storage
from structattn.cache.bounded import BoundedCache, LayerCache
from structattn.cache.compiled import attend_compiled
from structattn.cache.numbers import NumberedLayer, is_traced
from structattn.cache.rows import all_or_nothing
from structattn.cache.storage import checked_storage, storage_of_heads
from structattn.checks import (
    MAX_LENGTH,
    check_bool,
    check_choice,
    check_number,
    check_sequences,
    check_size,
    check_tensor,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layers import checks
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.cost import AttentionCost, attention_cost, cached_numbers
from structattn.layers.device import Device, check_dtype, on_device
from structattn.layers.layer import AttentionLayer
from structattn.layers.linear import linear_flops
from structattn.layers.rotary import Rotary
from structattn.layers.rotary_heads import HeadRotary
from structattn.layers.scaled_queries import scaled_queries
from structattn.layers.scoring import Scoring, Standard, check_scoring
from structattn.layers.scoring_latent import ScoringLatent
from structattn.layers.scoring_modules import HeadShape
from structattn.layout.heads import AnyLayout, HeadLayouts, with_whole_values
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.memory import check_memory
from structattn.ops import Backend, structured_attention
from structattn.ops.checks import taken_dtype
from structattn.optim.roles import Role, linear_roles

if TYPE_CHECKING:  # it imports torch.distributed and torch.compile, which takes a second
    from structattn.parallel.shard import SequenceShard

RotaryFunction = Callable[[Tensor, Tensor], Tensor]
KeyCache = Literal["smaller", "features", "hidden"]


class Attention(AttentionLayer, NumberedLayer):
    """Multi-head attention with a structured score.

        out = W_O concat_h( softmax_j( score_h(i, j) ) W_V x_j )

    with score_h from the scoring, shared by the layout.

    Args:
        embed_dim, num_heads: E, and H, which divides it. Give the rest by name: ``nn.MultiheadAttention`` has
            another order.
        num_kv_heads: G, key and value heads; divides H. Default: H.
        scoring: ``scoring.Standard`` (default: standard attention), ``BTT``, ``MLR`` or ``Matrix``.
        layout: ``LevelLayout``, ``GlobalWindowLayout``, or ``HeadLayouts``, one per key head. Ranks sum to
            the feature dimension of the scoring (E / H; E for BTT and Matrix; sum r_l p_l for MLR); the
            scaling replaces the scoring's. Or a ``TextLayout``. Default ``None``: plain.
        is_causal: whether later keys are hidden. Default ``True``.
        qk_norm: layer norm of queries and keys (per level for MLR). Default ``True``.
        rotary: a ``Rotary``, fitted to the levels; or a function ``rotary(x, positions)`` of q and k (B,
            heads, length, D) and int positions (length,), or (B, length) with padding. Default ``None``.
        bias: of the value and output projections and the norms. Default ``False``.
        window: sliding window in positions, with any layout of levels. Default ``None``.
        dropout: of attention weights in training; the op's ``dropout_p``. Default 0.
        backend: as of ``structured_attention``. Default ``"auto"``.
        device, dtype: of the parameters, as ``nn.Linear``.

    Raises:
        ConfigError: heads do not divide, ranks do not sum to the feature dimension, or an option is out of
            range.
    Cost: see ``cost``. Source: Kuang et al. 2025, sections 3 to 5.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        scoring: Scoring | None = None,
        layout: AnyLayout | TextLayout | None = None,
        is_causal: bool = True,
        qk_norm: bool = True,
        rotary: Rotary | RotaryFunction | None = None,
        bias: bool = False,
        *,
        window: int | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, flag in (("is_causal", is_causal), ("qk_norm", qk_norm), ("bias", bias)):
            check_bool(name, flag)
        checks.check_kv_heads(num_kv_heads)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        shape = HeadShape(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            norm=qk_norm,
            bias=bias,
            fixed_features=layout is not None or rotary is not None,
        )
        if window is not None:
            check_size("window", window, MAX_LENGTH)
        check_number("dropout", dropout, minimum=0, below=1)
        check_choice("backend", backend, get_args(Backend))
        scoring = Standard() if scoring is None else scoring
        check_scoring(scoring)
        checks.check_rotary(rotary)
        checks.check_layout(layout, window, scoring, embed_dim, num_heads, num_kv_heads)
        check_dtype(dtype)
        super().__init__(embed_dim, num_heads, num_kv_heads)
        self.set_number()
        self.layout = layout
        # The key heads of this process, the first and the one after the last, where a plan divides them.
        self.heads_here: tuple[int, int] | None = None
        self.window = window
        self.is_causal = is_causal
        self.dropout = dropout
        self.backend: Backend = backend
        with on_device(device):
            self.scoring = scoring.build(shape)
            self.rotary = self._rotary(rotary) if isinstance(rotary, Rotary) else rotary
            check_memory(f"the projections of an Attention of embed_dim {embed_dim}", 2 * embed_dim * embed_dim)
            self.value_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias)
            self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
            for linear in (self.value_proj, self.out_proj):
                nn.init.normal_(linear.weight, std=1 / math.sqrt(embed_dim))
                if bias:
                    nn.init.zeros_(linear.bias)
        if dtype is not None:
            self.to(dtype)

    def _rotary(self, rotary: Rotary) -> RotaryFunction:
        """What rotates queries and keys, fitted to the levels."""
        if isinstance(self.layout, HeadLayouts):
            return HeadRotary(rotary, self.layout, self.scoring.level_sizes)
        return rotary.build(self.scoring.level_sizes if self.layout is None else self.layout.ranks)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the value and output projections; the scoring declares its own."""
        return linear_roles(self, {"value_proj": "hidden", "out_proj": "output"})

    @classmethod
    def from_spec(
        cls,
        spec: str | AttentionSpec,
        *,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        context_length: int,
        **options: Any,
    ) -> Attention:
        """The module of a text form such as ``"mlr:32|16|8|8"`` (see ``structattn.spec``); raises
        ``ConfigError`` where it does not fit.

        Args:
            spec: its numbers of heads, if it has any, replace ``num_heads`` and ``num_kv_heads``.
            context_length: length in positions from which MLR blocks are halved.
            **options: further arguments of the class, except scoring, layout and window.
        """
        value = spec if isinstance(spec, AttentionSpec) else text_forms.read(AttentionSpec, spec)
        for name in ("scoring", "layout", "window"):
            if name in options:
                raise ConfigError(f"the spec gives the {name}: write it there, as 'mlr:4|4+window:3'")
        check_size("num_heads", num_heads)
        check_size("context_length", context_length, MAX_LENGTH)
        if value.custom is not None:
            raise ConfigError(f"{value.custom} is a layer of its own, no Attention: give it to a LanguageModel")
        num_heads = value.num_heads or num_heads
        return cls(
            embed_dim,
            num_heads,
            value.num_kv_heads or num_kv_heads,
            scoring=value.scoring,
            layout=value.layout_for(context_length, value.scoring.feature_dim(embed_dim, num_heads)),
            window=value.window,
            **options,
        )

    def project(
        self, x: Tensor, context: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """q (B, H, T, D), k (B, G or H, S, D), v and ``scale`` as ``structured_attention`` takes them; scale
        ``None`` is the layout's.

        Args:
            positions: of the keys, int64 (S,) or (B, S), for rotary embedding. The queries are the last T.
                Default: 0 ... S - 1.
        """
        source = x if context is None else context
        self._check_states("x", x)
        self._check_states("context", source)
        if source.shape[0] != x.shape[0] or taken_dtype(source) != taken_dtype(x) or source.device != x.device:
            raise ShapeError(
                f"x and context must be of one batch size, dtype and device, got {tuple(x.shape)} {x.dtype} on "
                f"{x.device} and {tuple(source.shape)} {source.dtype} on {source.device}"
            )
        if positions is not None:
            check_tensor("positions", positions)
            if positions.dim() not in (1, 2):
                raise ShapeError(f"positions must have shape (S,) or (batch, S), got {tuple(positions.shape)}")
        q, k = self.scoring(x, source)
        v = self._values(source)
        if self.rotary is not None:
            positions = torch.arange(source.shape[1], device=x.device) if positions is None else positions
            first = source.shape[1] - x.shape[1]
            if first < 0:  # queries before the first key
                zero = positions[..., :1] if source.shape[1] else positions.new_zeros((*positions.shape[:-1], 1))
                early = zero + torch.arange(first, 0, device=x.device)
                q = self.rotary(q, torch.cat([early, positions], dim=-1))
            else:
                q = self.rotary(q, positions[..., first:])
            k = self.rotary(k, positions)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast norms give float32 and projections 16 bits
        if k.shape[1] < v.shape[1]:
            k = k.expand(-1, v.shape[1], -1, -1)
        elif v.shape[1] < k.shape[1]:
            v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
        q, scale = scaled_queries(self.scoring, self.layout, q)
        return q, k, v, scale

    def _check_states(self, name: str, states: Tensor) -> None:
        checks.check_states(name, states, self.embed_dim, next(self.scoring.matrix.parameters()))

    def _values(self, source: Tensor) -> Tensor:
        """(B, S, E) to (B, G, S, head_dim)."""
        return self.value_proj(source).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        attn_bias: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        left_padding: Tensor | None = None,
        cache: LayerCache | None = None,
        layout: LevelLayout | None = None,
        attn_mask: Tensor | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Attends: (B, T, E) to (B, T, E).

        Args:
            context: (B, S, E), where keys and values come from; the queries are its last T positions.
                Default: x.
            attn_bias, attn_mask, cu_seqlens, left_padding: see ``structured_attention``; with a cache a mask
                is that of ``LevelCache.attend``.
            cache: from ``new_cache``; x are the tokens that follow those in it, and are added to it unless
                anything fails. Without dropout, and without a gradient through what it holds. ``reset`` it
                after a change of the weights.
            layout, shard: the layout of the text of this batch (``TextLayout.at``), only with a
                ``TextLayout``; see ``Transformer.forward``.

        Raises:
            ShapeError: a shape does not fit.
            ConfigError: a cache of another layer, or with another option; a layout that is missing or not of
                the module.
        """
        layout_of_call = self._layout_of_call(layout)
        if shard is not None:
            checks.check_is_shard(shard)
            checks.check_shard(self.layout, self.backend, self.dropout if self.training else 0.0)
            checks.check_left_out("a shard", context=context, attn_bias=attn_bias, attn_mask=attn_mask, cache=cache)
        if cache is not None:
            others = {"attn_bias": attn_bias, "cu_seqlens": cu_seqlens, "left_padding": left_padding}
            checks.check_left_out("a cache, whose padding new_cache() takes", context=context, **others)
            return self._decode(x, cache, layout, attn_mask)
        q, k, v, scale = self.project(x, context, self._positions(x, context, cu_seqlens, left_padding, shard))
        options: dict[str, Any] = {"scale": scale, "cu_seqlens": cu_seqlens, "left_padding": left_padding}
        if shard is not None:
            return self._merged(
                shard.attend(q, k, v, layout_of_call, is_causal=self.is_causal, window=self.window, **options)
            )
        options |= {"attn_mask": attn_mask, "attn_bias": attn_bias, "dropout_p": self.dropout if self.training else 0.0}
        return self._merged(self._attend(q, k, v, layout_of_call, **options))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, layout: AnyLayout | None, **options: Any) -> Tensor:
        """``structured_attention`` with the options of the module."""
        return structured_attention(
            q, k, v, layout, is_causal=self.is_causal, window=self.window, backend=self.backend, **options
        )

    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        left_padding: Tensor | None = None,
        cache: LevelCache | None = None,
        layout: LevelLayout | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """The attention weights, (B, H, T, S); of two added softmaxes (``GlobalWindowLayout``) the sum.
        Arguments as ``forward``, without ``shard`` and ``attn_bias`` (give an ``attn_mask`` of floats).
        Cost: T S numbers and T S^2 multiply-adds per head, for short sequences. No cache is changed."""
        layout_of_call = self._layout_of_call(layout)
        if cache is not None:
            others = {"cu_seqlens": cu_seqlens, "left_padding": left_padding}
            checks.check_left_out("a cache, whose padding new_cache() takes", context=context, **others)
            q, k, v, scale = self._cached(x, cache)
            cache.bind(self)
            return cache.weights(q, k, v, scale=scale, layout=layout, attn_mask=attn_mask)
        q, k, _, scale = self.project(x, context, self._positions(x, context, cu_seqlens, left_padding, None))
        layout_of_call = with_whole_values(layout_of_call)
        if not k.shape[2]:
            return q.new_zeros((*q.shape[:3], 0))
        each = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        options = {"cu_seqlens": cu_seqlens, "left_padding": left_padding, "attn_mask": attn_mask, "scale": scale}
        return self._attend(q, k, each, layout_of_call, **options)

    def _positions(
        self, x: Tensor, context: Tensor | None, ends: Tensor | None, left: Tensor | None, shard: SequenceShard | None
    ) -> Tensor | None:
        """Positions of the tokens, (S,) or (B, S), where they are not 0 ... S - 1."""
        if left is not None or ends is not None:
            self._check_states("x", x)
            check_sequences(x.shape[0], left, ends)
        if self.rotary is None or context is not None or (left is None and shard is None):
            return None
        tokens = torch.arange(x.shape[1], device=x.device) if shard is None else shard.tokens(x.device)
        return tokens if left is None else tokens - left.to(x.device)[:, None]

    def _merged(self, out: Tensor) -> Tensor:
        """The output projection of all heads, (B, H, T, head_dim) to (B, T, E)."""
        return self.out_proj(out.transpose(1, 2).flatten(-2))

    def _layout_of_call(self, layout: LevelLayout | None) -> AnyLayout | None:
        """The module's layout, or that of the text it is given."""
        checks.check_layout_of_call(self.layout, layout)
        return self._known_layout if layout is None else layout

    @property
    def _known_layout(self) -> AnyLayout | None:
        """The layout, of a text without segments where it depends on the text."""
        return self.layout.bound if isinstance(self.layout, TextLayout) else self.layout

    @property
    def _cached_layout(self) -> AnyLayout | TextLayout | None:
        """See ``AttentionLayer``."""
        if self.heads_here is None or not isinstance(self.layout, HeadLayouts):
            return self.layout
        return HeadLayouts(self.layout.layouts[slice(*self.heads_here)])

    def _decode(self, x: Tensor, cache: LayerCache, layout: LevelLayout | None, mask: Tensor | None) -> Tensor:
        """The next tokens against a cache."""
        q, k, v, scale = self._cached(x, cache)
        if isinstance(cache, BoundedCache):
            return self._merged(cache.attend(q, k, v, scale=scale))
        if is_traced() and layout is None and cache.number is not None:
            return self._merged(
                attend_compiled(cache, self, q, k, v, scale=scale, backend=self.backend, attn_mask=mask)
            )
        cache.bind(self)
        with all_or_nothing((cache,)):
            return self._merged(cache.attend(q, k, v, scale=scale, backend=self.backend, layout=layout, attn_mask=mask))

    def _cached(self, x: Tensor, cache: LayerCache) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """Queries, keys or hidden states, values and scale of the next tokens, as the cache takes them."""
        self._check_states("x", x)
        if not is_traced() or isinstance(cache, BoundedCache):
            self.check_cache(cache)
        order = self.scoring.cached_order
        q = self.scoring.queries(x, order)
        positions = cache.positions(x.shape[1]).to(x.device)
        q = q if self.rotary is None else self.rotary(q, positions)
        if cache.latent is None:
            k = self.scoring.normed_keys(self.scoring.keys(x, order), order)
            k = k if self.rotary is None else self.rotary(k, positions)
        else:
            k = x[:, None]
        v = self._values(x)
        q, scale = scaled_queries(self.scoring, self.layout, q)
        return q.to(v.dtype), k.to(v.dtype), v, scale

    @property
    def latent(self) -> ScoringLatent:
        """What makes keys from the hidden states of a cache that keeps those."""
        return ScoringLatent(self.scoring, self.rotary)

    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        keys: KeyCache = "smaller",
        storage: Storage | Sequence[Storage | None] | None = None,
    ) -> LevelCache:
        """An empty cache for decoding with ``forward(x, cache=cache)``; raises ``ConfigError`` unless the
        attention is causal.

        Args:
            max_length, page_size, left_padding, storage: see ``LevelCache``. With a storage keys are kept,
                not hidden states.
            keys: ``"features"`` keeps keys, by level; ``"hidden"`` the hidden state, E numbers for all heads
                together (and one per head and norm); ``"smaller"`` what is smaller at ``max_length``
                (default: the context of the layout, else 1,024).
        """
        if not self.is_causal:
            raise ConfigError("only causal attention can be decoded with a cache: this module has is_causal=False")
        check_choice("keys", keys, get_args(KeyCache))
        if max_length is not None:
            check_size("max_length", max_length, MAX_LENGTH)
        kept = checked_storage(storage)
        if isinstance(kept, tuple):
            kept = storage_of_heads(kept, self.num_kv_heads)
            kept = kept if self.heads_here is None else kept[slice(*self.heads_here)]
        latent: ScoringLatent | None = None
        has_one_layout = not isinstance(self.layout, HeadLayouts)
        if keys == "hidden" and (storage is not None or not has_one_layout):
            what = "a storage is for keys" if has_one_layout else "heads with layouts of their own keep keys"
            raise ConfigError(f"{what}: leave keys at 'smaller' or 'features'")
        is_key_state = self.scoring.cached_order == "formed_left"  # the keys are the hidden state
        if keys != "features" and storage is None and not is_key_state and has_one_layout:
            latent = self.latent
            blocks = self.layout.block_sizes if isinstance(self.layout, LevelLayout) else None
            length = max_length or (blocks[0] if blocks else 1024)
            numbers = cached_numbers(self.scoring, self._known_layout, self.window, latent.num_rstd, length)
            if keys == "smaller" and numbers.features <= numbers.hidden:
                latent = None
        cache = LevelCache(
            self._cached_layout,
            window=self.window,
            max_length=max_length,
            page_size=page_size,
            left_padding=left_padding,
            latent=latent,
            storage=kept,
        )
        cache.bind(self)
        return cache

    def cost(self, num_queries: int, num_keys: int | None = None) -> AttentionCost:
        """What one forward pass of T queries over S keys (default: T) costs for one example, counted from the
        structure. A global-window layout with T != S is counted at the S x S rate, segments per batch row by
        the first row, a ``TextLayout`` as a text without segments: other texts cost less."""
        num_rstd, width = self.latent.num_rstd, self.embed_dim
        return attention_cost(
            self.scoring,
            self._known_layout,
            self.window,
            self.is_causal,
            num_rstd,
            num_queries,
            num_keys,
            value_flops=linear_flops(self.value_proj, width, self.num_kv_heads * self.head_dim),
            output_flops=linear_flops(self.out_proj, width, width),
        )

    def extra_repr(self) -> str:
        """The layout and the window, for ``repr``."""
        return f"layout={self.layout}, window={self.window}, is_causal={self.is_causal}"
