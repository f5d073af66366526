"""What an attention layer costs, counted from its structure: FLOPs, and the numbers that its cache keeps."""

from __future__ import annotations

from dataclasses import dataclass

from structattn.cache.levels import sink_level, softmaxes_of, value_levels, widest
from structattn.checks import check_size
from structattn.layers.scoring_modules import ScoringModule
from structattn.layout.cost import visible_pairs, visible_pairs_per_level
from structattn.layout.global_window import Layout
from structattn.layout.heads import AnyLayout, HeadLayouts, groups_of
from structattn.layout.levels import MAX_COUNTED, LevelLayout


@dataclass(frozen=True, kw_only=True)
class AttentionCost:
    """FLOPs of one forward pass for one example, 2 per multiply-add, and what was chosen. Softmax and norms
    not counted.

    Attributes:
        contraction: ``factored``, ``formed_left`` or ``formed_right`` (see ``matrices.Contraction``).
        score_dim: dimension of the queries and keys.
        projection_flops: hidden states to queries and keys.
        score_flops: scores of visible pairs, each at its shared rank.
        value_flops: value projection and weighted sum.
        output_flops: output projection.
        key_cache_numbers, value_cache_numbers: numbers that ``new_cache`` holds for keys and for values at
            this length, all heads.
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

    @property
    def cache_numbers(self) -> int:
        """Numbers that ``new_cache`` holds, of keys and values."""
        return self.key_cache_numbers + self.value_cache_numbers


@dataclass(frozen=True, kw_only=True)
class CachedNumbers:
    """The most numbers that a cache keeps, all heads: of keys as features, of hidden states in their place,
    and of values.
    """

    features: int
    hidden: int
    values: int


def cached_numbers(
    scoring: ScoringModule, layout: AnyLayout | None, window: int | None, num_rstd: int, length: int
) -> CachedNumbers:
    """What a cache keeps of ``length`` tokens.

    Args:
        scoring, layout, window: of the layer.
        num_rstd: numbers that are kept beside a hidden state (see ``cache.Latent``).
        length: tokens.
    """
    shape, order = scoring.shape, scoring.cached_order
    head_dim, key_dim = shape.embed_dim // shape.num_heads, scoring.matrix.pair_dim(order)
    features = values = slots = 0
    for of_heads, heads in groups_of(layout, shape.num_kv_heads):
        softmaxes = softmaxes_of(of_heads, window, key_dim)
        per_head = sum(level.rank * level.most_slots(length) for softmax in softmaxes for level in softmax.levels)
        of_values = sum(level.rank * level.most_slots(length) for level in value_levels(softmaxes, of_heads, head_dim))
        widest_slots = widest(softmaxes).most_slots(length)
        if (sinks := sink_level(of_heads, key_dim)) is not None:
            per_head += sinks.rank * sinks.most_slots(length)
            of_values += head_dim * sinks.most_slots(length)
            widest_slots += sinks.most_slots(length)
        has_own_keys = isinstance(layout, HeadLayouts)
        features += (len(heads) if has_own_keys else scoring.num_key_heads(order)) * per_head
        values += len(heads) * of_values
        slots = max(slots, widest_slots)
    return CachedNumbers(features=features, hidden=(shape.embed_dim + num_rstd) * slots, values=values)


def attention_cost(
    scoring: ScoringModule,
    layout: AnyLayout | None,
    window: int | None,
    is_causal: bool,
    num_rstd: int,
    num_queries: int,
    num_keys: int | None,
    *,
    value_flops: int,
    output_flops: int,
) -> AttentionCost:
    """See ``Attention.cost``; the first five arguments are of the layer, and the last two of its value and
    output projection of one token.
    """
    num_keys = num_queries if num_keys is None else num_keys
    check_size("num_queries", num_queries, MAX_COUNTED)
    check_size("num_keys", num_keys, MAX_COUNTED)
    heads, groups, width = scoring.shape.num_heads, scoring.shape.num_kv_heads, scoring.shape.embed_dim
    head_dim = width // heads
    dim = scoring.score_dim(num_queries, num_keys)
    scores = values = 0
    for of_heads, key_heads in groups_of(layout, groups):
        count = heads * len(key_heads) // groups
        per_head = _flops_of_a_head(of_heads, window, is_causal, dim, head_dim, num_queries, num_keys)
        scores, values = scores + count * per_head[0], values + count * per_head[1]
    cached = cached_numbers(scoring, layout, window, num_rstd, num_keys)
    return AttentionCost(
        contraction=scoring.order(num_queries, num_keys),
        score_dim=dim,
        projection_flops=scoring.projection_flops(num_queries, num_keys),
        score_flops=scores,
        value_flops=num_keys * value_flops + values,
        output_flops=num_queries * output_flops,
        key_cache_numbers=cached.features if isinstance(layout, HeadLayouts) else min(cached.features, cached.hidden),
        value_cache_numbers=cached.values,
    )


def _flops_of_a_head(
    layout: Layout | None, window: int | None, is_causal: bool, dim: int, head_dim: int, num_queries: int, num_keys: int
) -> tuple[int, int]:
    """FLOPs of the scores of a query head of D dimensions, and of its weighted sum."""
    pairs = visible_pairs(num_queries, num_keys, window, is_causal)
    scores, values = 2 * dim * pairs, 2 * head_dim * pairs
    if isinstance(layout, LevelLayout):
        counts = visible_pairs_per_level(layout, num_queries, num_keys, window, is_causal)
        scores = 2 * sum(rank * n for rank, n in zip(layout.ranks, counts, strict=True))
        values = 2 * sum(rank * n for rank, n in zip(layout.value_ranks or (head_dim,), counts, strict=False))
    elif layout is not None:
        full = visible_pairs(num_keys, num_keys, None, is_causal)
        scores = round(layout.score_flops(num_keys, is_causal) * pairs / full)
        values *= 2
    return scores, values
