"""``Attention``: one module for every variant, from a scoring, a layout and a window."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor, arange, cat, eye, nn

from structattn import text_forms
from structattn.cache import PAGE_SIZE, LevelCache
from structattn.cache.levels import softmaxes_of, value_levels, widest
from structattn.cache.undo import all_or_nothing
from structattn.checks import (
    MAX_LENGTH,
    check_bool,
    check_choice,
    check_like,
    check_number,
    check_sequences,
    check_size,
    check_tensor,
    check_type,
    describe,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layers.latent import ScoringLatent
from structattn.layers.rotary import Rotary
from structattn.layers.scoring import LowRank, Scoring, check_scoring
from structattn.layers.scoring_modules import HeadShape
from structattn.layers.variant import AttentionSpec
from structattn.layout.cost import visible_pairs, visible_pairs_per_level
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import MAX_COUNTED, LevelLayout
from structattn.layout.text import TextLayout
from structattn.memory import check_memory
from structattn.ops import Backend, structured_attention
from structattn.ops.checks import taken_dtype
from structattn.optim.roles import Role

_FROM_TEXT = (
    "give a LevelLayout, such as LevelLayout.halving((32, 16, 8, 8), 1024), or use Attention.from_spec for text"
)
RotaryFunction = Callable[[Tensor, Tensor], Tensor]
KeyCache = Literal["smaller", "features", "hidden"]


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """FLOPs of one forward pass for one example, 2 per multiply-add, and what was chosen. Softmax and norms not counted.

    Attributes:
        contraction: ``factored``, ``formed_left`` or ``formed_right`` (see ``matrices.Contraction``).
        score_dim: dimension of the queries and keys.
        projection_flops: hidden states to queries and keys.
        score_flops: scores of visible pairs, each at its shared rank.
        value_flops: value projection and weighted sum.
        output_flops: output projection.
        key_cache_numbers, value_cache_numbers: numbers that ``new_cache`` holds for keys and for values at this length, all heads.
    """

    contraction: str
    score_dim: int
    projection_flops: int
    score_flops: int
    value_flops: int
    output_flops: int
    key_cache_numbers: int
    value_cache_numbers: int

    @property
    def flops(self) -> int:
        """The sum of the four."""
        return self.projection_flops + self.score_flops + self.value_flops + self.output_flops


def check_states(name: str, states: Tensor, embed_dim: int, weight: Tensor) -> None:
    """Raises ``ShapeError`` unless these are hidden states (B, T, embed_dim) that a weight can read."""
    check_tensor(name, states)
    if states.dim() != 3 or states.shape[-1] != embed_dim or 0 in states.shape:
        empty = "; none of them may be 0" if 0 in states.shape else ""
        raise ShapeError(f"{name} must have shape (batch, length, {embed_dim}), got {tuple(states.shape)}{empty}")
    check_like(name, states, weight)


class Attention(nn.Module):
    """Multi-head attention with a structured score.

        out = W_O concat_h( softmax_j( score_h(i, j) ) W_V x_j ), score_h from the scoring, shared by the layout.

    Args:
        embed_dim: E.
        num_heads: H; divides E.
        num_kv_heads: G, key and value heads; divides H. Default: H.
        scoring: ``scoring.LowRank``, ``BTT``, ``MLR`` or ``Matrix``. Default: ``LowRank()``, standard attention.
        layout: ``LevelLayout`` or ``GlobalWindowLayout`` whose ranks sum to the feature dimension of the scoring (E / H,
            E for BTT and Matrix, sum r_l p_l for MLR). Its scaling replaces the scoring's. Or a ``TextLayout``: then each call is given
            the layout of its text. Default ``None``: plain.
        window: sliding window in positions, with any layout of levels. Default ``None``.
        is_causal: default ``True``.
        qk_norm: layer norm of queries and keys (per level for MLR). Default ``True``.
        rotary: rotary embedding, a ``Rotary`` value, which is fitted to the ranks of the layout, without one to the levels of bilinear
            MLR, each of which has a scale of its own; or a function, called as
            ``rotary(x, positions)`` on q and k (B, heads, length, D) with int positions (length,), or (B, length) with padding.
        bias: bias of the value and output projections and of the norms. Default ``False``.
        dropout: dropout of attention weights in training. Default 0.
        backend: backend of ``structured_attention``.

    Raises:
        ConfigError: heads do not divide, ranks do not sum to the feature dimension, or an option is out of range.

    Cost: see ``cost``. Source: Kuang et al. 2025, sections 3 to 5.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        scoring: Scoring | None = None,
        layout: Layout | TextLayout | None = None,
        is_causal: bool = True,
        qk_norm: bool = True,
        rotary: Rotary | RotaryFunction | None = None,
        bias: bool = False,
        *,
        window: int | None = None,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        for name, flag in (("is_causal", is_causal), ("qk_norm", qk_norm), ("bias", bias)):
            check_bool(name, flag)
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
        scoring = LowRank() if scoring is None else scoring
        check_scoring(scoring)
        layouts = LevelLayout | GlobalWindowLayout | TextLayout | None
        check_type("layout", layout, layouts, "a LevelLayout, GlobalWindowLayout, TextLayout or None", _FROM_TEXT)
        if isinstance(rotary, type) or not (rotary is None or callable(rotary) or isinstance(rotary, Rotary)):
            raise ConfigError(
                f"rotary must be a Rotary, a function of x and positions, or None, got {describe(rotary)}; for the usual "
                "rotation give Rotary(), for text Rotary.parse(text)"
            )
        feature_dim = scoring.feature_dim(embed_dim, num_heads)
        if layout is not None and layout.head_dim != feature_dim:
            raise ConfigError(_rank_mismatch(layout, feature_dim, scoring))
        if window is not None and not isinstance(layout, LevelLayout | TextLayout | None):
            raise ConfigError("a global-window layout has its own window: leave window at None")
        value_ranks = layout.value_ranks if isinstance(layout, LevelLayout | TextLayout) else None
        if value_ranks is not None and sum(value_ranks) != embed_dim // num_heads:
            raise ConfigError(
                f"the value_ranks of the layout must sum to the head dimension: expected {embed_dim // num_heads}, got "
                f"{'|'.join(map(str, value_ranks))} = {sum(value_ranks)}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.layout = layout
        self.window = window
        self.is_causal = is_causal
        self.dropout = dropout
        self.backend: Backend = backend
        self.scoring = scoring.build(shape)
        ranks = self.scoring.level_sizes if layout is None else layout.ranks
        self.rotary = rotary.build(ranks) if isinstance(rotary, Rotary) else rotary
        check_memory(f"the projections of an Attention of embed_dim {embed_dim}", 2 * embed_dim * embed_dim)
        self.value_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        for linear in (self.value_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=1 / math.sqrt(embed_dim))
            if bias:
                nn.init.zeros_(linear.bias)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the value and output projections; the scoring declares its own."""
        roles = {
            "value_proj.weight": Role(kind="hidden", fan_in=self.embed_dim),
            "out_proj.weight": Role(kind="output", fan_in=self.embed_dim),
        }
        biases = {f"{name}.bias": Role(kind="bias") for name in ("value_proj", "out_proj")}
        return roles if self.out_proj.bias is None else {**roles, **biases}

    @classmethod
    def from_spec(
        cls, spec: str | AttentionSpec, *, embed_dim: int, num_heads: int, context_length: int, **options: Any
    ) -> Attention:
        """The module of a text form such as ``"mlr:32|16|8|8"``.

        Args:
            spec: see ``structattn.spec``; a number of heads in it overrides ``num_heads``.
            embed_dim, num_heads: as the class.
            context_length: length in positions from which MLR blocks are halved.
            **options: further arguments of the class, except scoring, layout and window.

        Raises:
            ConfigError: the spec is unknown or does not fit the sizes.
        """
        value = spec if isinstance(spec, AttentionSpec) else text_forms.read(AttentionSpec, spec)
        check_size("num_heads", num_heads)
        check_size("context_length", context_length, MAX_LENGTH)
        if value.num_heads is not None:
            num_heads = value.num_heads
        return cls(
            embed_dim,
            num_heads,
            scoring=value.scoring,
            layout=value.layout_for(context_length),
            window=value.window,
            **options,
        )

    def project(
        self, x: Tensor, context: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, float | None]:
        """Queries, keys and values as ``structured_attention`` takes them, and the scale to give it.

        Args:
            x: (B, T, E).
            context: where keys and values come from, (B, S, E). Default: x.
            positions: of the keys, int64 (S,) or (B, S), for rotary embedding; the queries are the last T, and where T > S those
                before the first key too. Default: 0 ... S - 1.

        Returns:
            q (B, H, T, D), k (B, G or H, S, D), v likewise, and ``scale`` (``None``: the layout's own).
        """
        source = x if context is None else context
        self._check_states("x", x)
        self._check_states("context", source)
        if source.shape[0] != x.shape[0] or taken_dtype(source) != taken_dtype(x) or source.device != x.device:
            raise ShapeError(
                f"x and context must be of one batch size, dtype and device, got {tuple(x.shape)} {x.dtype} on {x.device} and "
                f"{tuple(source.shape)} {source.dtype} on {source.device}"
            )
        if positions is not None:
            check_tensor("positions", positions)
            if positions.dim() not in (1, 2):
                raise ShapeError(f"positions must have shape (S,) or (batch, S), got {tuple(positions.shape)}")
        q, k = self.scoring(x, source)
        v = self._values(source)
        if self.rotary is not None:
            positions = arange(source.shape[1], device=x.device) if positions is None else positions
            first = source.shape[1] - x.shape[1]
            if first < 0:  # queries before the first key
                early = positions[..., :1] + arange(first, 0, device=x.device)
                q = self.rotary(q, cat([early, positions], dim=-1))
            else:
                q = self.rotary(q, positions[..., first:])
            k = self.rotary(k, positions)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast norms give float32 and projections 16 bits
        if k.shape[1] < v.shape[1]:
            k = k.expand(-1, v.shape[1], -1, -1)
        elif v.shape[1] < k.shape[1]:
            v = v.repeat_interleave(k.shape[1] // v.shape[1], dim=1)
        if self.layout is not None:
            return q, k, v, None
        q, scale = self.scoring.scaled(q)
        return q, k, v, scale

    def _check_states(self, name: str, states: Tensor) -> None:
        check_states(name, states, self.embed_dim, next(self.scoring.matrix.parameters()))

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
        cache: LevelCache | None = None,
        layout: LevelLayout | None = None,
    ) -> Tensor:
        """Attends.

        Args:
            x: (B, T, E).
            context: (B, S, E), where keys and values come from; the queries are its last T positions. Default: x.
            attn_bias, cu_seqlens, left_padding: see ``structured_attention``.
            cache: from ``new_cache``: x holds the tokens that follow those in it, and they are added to it; if anything fails, they
                are not. There is no dropout then, and no gradient through what it holds. It serves only this layer; a copy of
                it, or one that was loaded, the layer that uses it first. After a change of the weights, ``reset`` it.
            layout: where the module's layout is a ``TextLayout``, its levels with the segments of this batch
                (``TextLayout.at``); with a cache those that the new tokens see. Otherwise ``None``.

        Returns:
            (B, T, E).

        Raises:
            ShapeError: a shape does not fit.
            ConfigError: a cache of another layer, or a cache beside another option; a layout that is missing or not of the module.
        """
        known = self._layout_of_call(layout)
        if cache is not None:
            if any(option is not None for option in (context, attn_bias, cu_seqlens, left_padding)):
                raise ConfigError(
                    "with a cache, leave context, attn_bias, cu_seqlens and left_padding at None; padding belongs to new_cache()"
                )
            return self._decode(x, cache, layout)
        positions = None
        if left_padding is not None or cu_seqlens is not None:
            self._check_states("x", x)
            check_sequences(x.shape[0], left_padding, cu_seqlens)
        if left_padding is not None and self.rotary is not None and context is None:
            positions = arange(x.shape[1], device=x.device) - left_padding.to(x.device)[:, None]
        q, k, v, scale = self.project(x, context, positions)
        out = structured_attention(
            q,
            k,
            v,
            known,
            is_causal=self.is_causal,
            scale=scale,
            window=self.window,
            attn_bias=attn_bias,
            dropout_p=self.dropout if self.training else 0.0,
            cu_seqlens=cu_seqlens,
            left_padding=left_padding,
            backend=self.backend,
        )
        return self._merged(out)

    def weights(self, x: Tensor, context: Tensor | None = None, *, layout: LevelLayout | None = None) -> Tensor:
        """What each query takes from each key, for looking at it: of two added softmaxes (``GlobalWindowLayout``) the sum.

        Args:
            x, context, layout: as ``forward``.

        Returns:
            (B, H, T, S), at least 0; rows sum to 1, or to 2 with two softmaxes.

        Raises:
            ShapeError, ConfigError: as ``forward``.

        Cost: T * S numbers per head are stored, and T * S * S multiply-adds spent: for short sequences.
        """
        q, k, _, scale = self.project(x, context)
        known = self._layout_of_call(layout)
        known = replace(known, value_ranks=None) if isinstance(known, LevelLayout) else known
        each = eye(k.shape[2], dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        return structured_attention(
            q, k, each, known, is_causal=self.is_causal, scale=scale, window=self.window, backend=self.backend
        )

    def _merged(self, out: Tensor) -> Tensor:
        """The output projection of all heads, (B, H, T, head_dim) to (B, T, E)."""
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(-2))
        return projected

    def _layout_of_call(self, layout: LevelLayout | None) -> Layout | None:
        """The module's layout, or that of the text it is given."""
        if isinstance(self.layout, TextLayout):
            if not self.layout.fits(layout):
                raise ConfigError(
                    f"a module with {self.layout} needs the layout of each text, layout.at(text_units.segments(tokens)): got {_named(layout)}"
                )
        elif layout is not None:
            raise ConfigError(
                f"the layout of this module is always {self.layout}: leave layout at None, got {_named(layout)}"
            )
        return self._known_layout if layout is None else layout

    @property
    def _known_layout(self) -> Layout | None:
        """The layout, of a text without borders where it depends on the text."""
        return self.layout.bound if isinstance(self.layout, TextLayout) else self.layout

    def _decode(self, x: Tensor, cache: LevelCache, layout: LevelLayout | None) -> Tensor:
        """The next tokens against a cache."""
        self._check_states("x", x)
        self.check_cache(cache)
        cache.bind(self)
        order = self.scoring.cached_order
        q = self.scoring.queries(x, order)
        positions = cache.positions(x.shape[1]).to(x.device)
        if self.rotary is not None:
            q = self.rotary(q, positions)
        if cache.latent is None:
            k = self.scoring.normed_keys(self.scoring.keys(x, order), order)
            k = k if self.rotary is None else self.rotary(k, positions)
        else:
            k = x[:, None]
        v, scale = self._values(x), None
        if self.layout is None:
            q, scale = self.scoring.scaled(q)
        with all_or_nothing((cache,)):
            out = cache.attend(q.to(v.dtype), k.to(v.dtype), v, scale=scale, backend=self.backend, layout=layout)
            return self._merged(out)

    def check_cache(self, cache: LevelCache) -> None:
        """Raises ``ConfigError`` unless a cache is of this layer, or of none yet and like its own."""
        check_type("cache", cache, LevelCache, "a LevelCache, as new_cache() makes one")
        if not _has_levels_of(cache, self.layout) or cache.window != self.window:
            raise ConfigError(
                f"the cache is of another layer: expected layout {self.layout} and window {self.window}, got {cache.text or cache.layout} and "
                f"{cache.window}; make it with new_cache()"
            )
        cache.check_layer(self)

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
    ) -> LevelCache:
        """An empty cache for decoding with ``forward(x, cache=cache)``.

        Args:
            max_length, page_size, left_padding: see ``LevelCache``.
            keys: ``"features"`` keeps keys, by level; ``"hidden"`` the hidden state, E numbers for all heads together (and one per
                head and norm), from which scores are computed; ``"smaller"`` what is smaller at ``max_length`` (default: the
                context length of the layout, else any), key features if equal. ``LevelCache.keeps`` says which.

        Raises:
            ConfigError: the attention is not causal, or an option is out of its range.
        """
        if not self.is_causal:
            raise ConfigError("only causal attention can be decoded with a cache: this module has is_causal=False")
        check_choice("keys", keys, get_args(KeyCache))
        if max_length is not None:
            check_size("max_length", max_length, MAX_LENGTH)
        latent = None
        if keys != "features" and self.scoring.cached_order != "formed_left":  # there the keys are the hidden state
            features, hidden = self._cached_numbers(max_length or self._nominal_length)
            latent = self.latent if keys == "hidden" or hidden < features else None
        cache = LevelCache(
            self.layout,
            window=self.window,
            max_length=max_length,
            page_size=page_size,
            left_padding=left_padding,
            latent=latent,
        )
        cache.bind(self)
        return cache

    @property
    def _nominal_length(self) -> int:
        return self.layout.block_sizes[0] if isinstance(self.layout, LevelLayout) and self.layout.block_sizes else 1024

    def _cached_numbers(self, length: int) -> tuple[int, int]:
        """The most numbers that a cache keeps for the keys of so many tokens: as features, and as hidden states."""
        order = self.scoring.cached_order
        parts = softmaxes_of(self._known_layout, self.window, self.scoring.matrix.pair_dim(order))
        features = sum(level.rank * level.most_slots(length) for part in parts for level in part.levels)
        states = (self.embed_dim + self.latent.num_rstd) * widest(parts).most_slots(length)
        return self.scoring.num_key_heads(order) * features, states

    def _cached_values(self, length: int) -> int:
        """The most numbers that a cache keeps for the values of so many tokens."""
        layout = self._known_layout
        parts = softmaxes_of(layout, self.window, self.scoring.matrix.pair_dim(self.scoring.cached_order))
        levels = value_levels(parts, layout, self.head_dim)
        return self.num_kv_heads * sum(level.rank * level.most_slots(length) for level in levels)

    def cost(self, num_queries: int, num_keys: int | None = None) -> AttentionCost:
        """What one forward pass of T queries costs for one example, counted from the structure.

        Args:
            num_queries: T.
            num_keys: S. Default: T. A global-window layout with T != S is counted at the S x S rate, a layout with segments
                per batch row by its first row, a text layout as if the text had no borders: other texts cost less.

        Returns:
            ``AttentionCost``.
        """
        num_keys = num_queries if num_keys is None else num_keys
        check_size("num_queries", num_queries, MAX_COUNTED)
        check_size("num_keys", num_keys, MAX_COUNTED)
        dim = self.scoring.score_dim(num_queries, num_keys)
        heads, groups, width = self.num_heads, self.num_kv_heads, self.embed_dim
        pairs = visible_pairs(num_queries, num_keys, self.window, self.is_causal)
        scores, values = 2 * dim * pairs, 2 * self.head_dim * pairs
        layout = self._known_layout
        if isinstance(layout, LevelLayout):
            counts = visible_pairs_per_level(layout, num_queries, num_keys, self.window, self.is_causal)
            scores = 2 * sum(rank * n for rank, n in zip(layout.ranks, counts, strict=True))
            if layout.value_ranks is not None:
                values = 2 * sum(rank * n for rank, n in zip(layout.value_ranks, counts, strict=True))
        elif layout is not None:
            full = visible_pairs(num_keys, num_keys, None, self.is_causal)
            scores = round(layout.score_flops(num_keys, self.is_causal) * pairs / full)
            values *= 2
        value_projection = 2 * num_keys * width * groups * self.head_dim
        return AttentionCost(
            contraction=self.scoring.order(num_queries, num_keys),
            score_dim=dim,
            projection_flops=self.scoring.projection_flops(num_queries, num_keys),
            score_flops=heads * scores,
            value_flops=value_projection + heads * values,
            output_flops=2 * num_queries * width * width,
            key_cache_numbers=min(self._cached_numbers(num_keys)),
            value_cache_numbers=self._cached_values(num_keys),
        )

    def extra_repr(self) -> str:
        """The layout and the window, for ``repr``."""
        return f"layout={self.layout}, window={self.window}, is_causal={self.is_causal}"


def _named(layout: object) -> str:
    """A layout of a call, or whatever else was given, for a message."""
    return str(layout) if isinstance(layout, LevelLayout) else describe(layout)


def _has_levels_of(cache: LevelCache, other: Layout | TextLayout | None) -> bool:
    """Whether a cache has the levels of a layout; the segments of single rows may be in another order."""
    if cache.text is not None or isinstance(other, TextLayout):
        return cache.text == other
    layout = cache.layout
    if isinstance(layout, LevelLayout) and isinstance(other, LevelLayout) and layout.num_rows is not None:
        return replace(layout, boundaries=other.boundaries) == other if other.boundaries else False
    return layout == other


def _rank_mismatch(layout: Layout | TextLayout, feature_dim: int, scoring: Scoring) -> str:
    """The error text for a layout whose ranks do not sum to the feature dimension, with a fitting one if scaling works."""
    given = "|".join(map(str, layout.ranks))
    text = (
        f"the ranks of the layout must sum to the feature dimension of {type(scoring).__name__}: expected {feature_dim}, "
        f"got {given} = {layout.head_dim}"
    )
    scaled = [rank * feature_dim / layout.head_dim for rank in layout.ranks]
    if all(value >= 1 and value == int(value) for value in scaled):
        text += f"; in the same proportions: {'|'.join(str(int(value)) for value in scaled)}"
    return text
