"""A window of the last tokens and the first tokens of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from structattn.checks import check_size
from structattn.grammar import Form, named, positive, write_term
from structattn.layers.layer import CustomAttention, LayerShape
from structattn_lab.baselines.key_value import KeyValueLayer, joined, pair_width, separate
from structattn_lab.baselines.layer import causal_pairs
from structattn_lab.baselines.tables import SlotTable, TableCache


@dataclass(frozen=True)
class Recent(CustomAttention):
    """The variant as a value.

    Args:
        window: W, the last tokens, the query's own included, as of ``window:W``.
        sinks: S, the first tokens of the sequence. Default 4, as in the source.
        kv_heads: G, heads of keys and values. Default ``None``: those of the model.
    """

    window: int
    sinks: int = 4
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_size("the window of recent", self.window)
        check_size("sinks of recent", self.sinks)
        if self.kv_heads is not None:
            check_size("kv_heads of recent", self.kv_heads)

    def build(self, shape: LayerShape) -> RecentLayer:
        """The layer; raises ``ConfigError`` where it does not fit."""
        return RecentLayer(self, replace(shape, num_kv_heads=self.kv_heads or shape.num_kv_heads))

    def __str__(self) -> str:
        return write_term("recent", self.window, sinks=self.sinks, kv_heads=self.kv_heads)


class RecentLayer(KeyValueLayer):
    """Standard attention in which query i sees the keys j <= i with i - j < W or j < S.

    Keys are rotated by their positions in the sequence, in training as with a cache.

    Args:
        variant: W and S.
        shape: of the model.

    Cost: 2 G D min(T, S + W) numbers in the cache. A new token costs 4 H D (S + W) FLOPs at most, besides its
        projections.

    Source: Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
    There positions are counted within the cache, for texts longer than those of training.
    """

    def __init__(self, variant: Recent, shape: LayerShape) -> None:
        table = SlotTable(width=pair_width(shape), ring=variant.window, first=variant.sinks)
        super().__init__(str(variant), shape, {"tokens": table})
        self.variant = variant

    def _pairs(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values."""
        keys, values = self.keys_and_values(x)
        return self.keys(keys, positions), values

    def _visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys queries at positions (..., T, 1) see, at positions (..., 1, S); a query in the padding
        sees itself.
        """
        is_kept = (queries - keys < self.variant.window) | (keys < self.variant.sinks)
        return (keys >= 0) & (keys <= queries) & is_kept | (keys == queries)

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``BaselineLayer``."""
        visible = self._visible(positions[:, None], positions)
        return self.attended(self.queries(x, positions), *self._pairs(x, positions), visible)

    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """See ``BaselineLayer``."""
        rows, held = cache.extend("tokens", joined(*self._pairs(x, positions)), positions)
        visible = self._visible(positions[..., None], held[..., None, :])
        return self.attended(self.queries(x, positions), *separate(rows, self.num_kv_heads), visible)

    def mixing_flops(self, num_tokens: int) -> int:
        """See ``BaselineLayer``; scores of pairs that are seen."""
        hidden = causal_pairs(max(0, num_tokens - self.variant.window - self.variant.sinks))
        return self.pair_flops(num_tokens, causal_pairs(num_tokens) - hidden)


FORM = Form(
    "recent:W[,sinks=S][,kv_heads=G]",
    "recent:124,sinks=4",
    "softmax attention over the last W tokens and the first ones, as StreamingLLM; a baseline",
    value=named("window", positive),
    options={"sinks": positive, "kv_heads": positive},
    make=lambda **arguments: {"custom": Recent(**arguments)},
)
