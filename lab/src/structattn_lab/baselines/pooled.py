"""Far tokens in blocks, each of which is one key and one value: learned weighted means."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from structattn.checks import check_size
from structattn.grammar import Form, named, positive, write_term
from structattn.layers.layer import CustomAttention, LayerShape
from structattn_lab.baselines.key_value import KeyValueLayer, joined, pair_width, separate
from structattn_lab.baselines.layer import causal_pairs
from structattn_lab.baselines.tables import SlotTable, TableCache

_MOST_IN_BLOCK = 2**20  # tokens, each of which has a learned number


@dataclass(frozen=True)
class Pooled(CustomAttention):
    """The variant as a value.

    Args:
        block: M, tokens of a block.
        window: W, the last tokens, the query's own included, that are never pooled. Default 128.
        kv_heads: G, heads of keys and values. Default ``None``: those of the model.
    """

    block: int
    window: int = 128
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_size("the block of pooled", self.block, _MOST_IN_BLOCK)
        check_size("the window of pooled", self.window)
        if self.kv_heads is not None:
            check_size("kv_heads of pooled", self.kv_heads)

    def build(self, shape: LayerShape) -> PooledLayer:
        """The layer; raises ``ConfigError`` where it does not fit."""
        return PooledLayer(self, replace(shape, num_kv_heads=self.kv_heads or shape.num_kv_heads))

    def __str__(self) -> str:
        return write_term("pooled", self.block, window=self.window, kv_heads=self.kv_heads)


class PooledLayer(KeyValueLayer):
    """Standard attention in which far tokens are pooled by blocks, with one softmax over both.

    Query i sees the tokens f <= j <= i with f = M floor(max(0, i - W + 1) / M), at least its last W and at
    most W + M - 1, and of each block n < f / M of the tokens before one summary, which counts as one key.
    With k_j = W_K x_j before its norm:

        a_j = softmax_{j in n}( <u_g, k_j> + b_g[j mod M] )
        k_n = turn_nM(norm(sum a_j k_j));   v_n = sum a_j v_j

    u and b are learned per key head and start at 0, the mean. A summary has the rotary position of the first
    token of its block.

    Args:
        variant: M and W.
        shape: of the model.

    Cost: the cache keeps W + M - 1 tokens and a summary per block that has left the window: 2 G D (min(T, W +
    M - 1) + max(0, T - W) // M) numbers. A block costs 6 G D M FLOPs, once.

    Source: DeepSeek-AI 2026, "DeepSeek-V4", section 2.3.2, heavily compressed attention: blocks without
    overlap, the softmax of a linear function of the token and a bias of its position, norm and rotation after
    the mean. There each dimension has its own weights, keys are values, and a complete block in the window
    has its summary too. Yuan et al. 2025, "Native Sparse Attention", arXiv 2502.11089, on token compression,
    has a small network of the block in place of the mean; its selection of blocks to read in full is left out
    here.
    """

    def __init__(self, variant: Pooled, shape: LayerShape) -> None:
        width = pair_width(shape)
        tables = {
            "tokens": SlotTable(width=width, ring=variant.window + variant.block - 1),
            "blocks": SlotTable(width=width, per=variant.block, lag=variant.window),
        }
        super().__init__(str(variant), shape, tables)
        self.variant = variant
        self.score = nn.Parameter(torch.zeros(self.num_kv_heads, self.head_dim))
        self.place = nn.Parameter(torch.zeros(self.num_kv_heads, variant.block))

    def _num_pooled(self, lengths: Tensor) -> Tensor:
        """Blocks whose summaries sequences of these lengths have."""
        return (lengths - self.variant.window).clamp(min=0) // self.variant.block

    def _summaries(self, rows: Tensor, starts: Tensor) -> Tensor:
        """Keys, normed and rotated, and values of whole blocks.

        Args:
            rows: (B, N, M, 2 G D), keys before their norm, and values.
            starts: (N,) or (B, N), positions of the first token of each.

        Returns:
            (B, N, 2 G D).
        """
        pairs = rows.unflatten(-1, (2, self.num_kv_heads, self.head_dim))  # (B, N, M, 2, G, D)
        weights = torch.softmax(torch.einsum("bnmgd,gd->bngm", pairs[:, :, :, 0], self.score) + self.place, dim=-1)
        k, v = torch.einsum("bngm,bnmpgd->pbgnd", weights, pairs).unbind(0)
        return joined(self.keys(k, starts), v)

    def _seen(self, q: Tensor, at: Tensor, rows: Tensor, held: Tensor, summaries: Tensor) -> Tensor:
        """Attends.

        Args:
            q: queries (B, H, T, D) at positions ``at``, (T,) or (B, T).
            rows: tokens (B, S, 2 G D) at positions ``held``, (S,) or (B, S), negative where there is none.
            summaries: (B, N, 2 G D), of blocks 0 ... N - 1.
        """
        block, window = self.variant.block, self.variant.window
        k, v = separate(rows, self.num_kv_heads)
        far_k, far_v = separate(summaries, self.num_kv_heads)
        at, near = at[..., None], held[..., None, :]
        first = (at - window + 1).clamp(min=0) // block * block
        is_near = (near >= first) & (near <= at) | (near == at)  # a query in the padding sees itself
        is_far = torch.arange(summaries.shape[1], device=at.device) * block < first
        keys = torch.cat([far_k, self.keys(k, held)], dim=2)
        return self.attended(q, keys, torch.cat([far_v, v], dim=2), torch.cat([is_far, is_near], dim=-1))

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``BaselineLayer``."""
        rows, block = joined(*self.keys_and_values(x)), self.variant.block
        count = self.tables["blocks"].slots(x.shape[1])
        whole = rows[:, : count * block].unflatten(1, (count, block))
        summaries = self._summaries(whole, positions[: count * block : block])
        return self._seen(self.queries(x, positions), positions, rows, positions, summaries)

    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """See ``BaselineLayer``; blocks that leave the window are pooled from what was held and the new
        tokens.
        """
        rows, held = cache.extend("tokens", joined(*self.keys_and_values(x)), positions)
        new, block = positions[..., :1], self.variant.block
        pooled, pooled_then = self._num_pooled(new), self._num_pooled(positions[..., -1:] + 1)
        starts = block * (pooled + torch.arange(int((pooled_then - pooled).max()), device=x.device))
        inside = (starts[..., None] + torch.arange(block, device=x.device)).flatten(-2)
        num_old, ring = rows.shape[1] - x.shape[1], block + self.variant.window - 1
        index = torch.where(inside < new, inside % ring, num_old + inside - new).clamp(max=rows.shape[1] - 1)
        whole = rows.gather(1, index.expand(len(x), -1)[..., None].expand(-1, -1, rows.shape[2]))
        summaries = self._summaries(whole.unflatten(1, (starts.shape[-1], block)), starts)
        cache.write("blocks", summaries, torch.where(starts < pooled_then * block, starts, -1))
        return self._seen(self.queries(x, positions), positions, rows, held, cache.read("blocks").to(rows.dtype))

    def mixing_flops(self, num_tokens: int) -> int:
        """See ``BaselineLayer``; scores of pairs that are seen."""
        block, pooled = self.variant.block, self.tables["blocks"].slots(num_tokens)
        whole, rest = divmod(max(0, num_tokens - self.variant.window + 1), block)
        summaries = (
            block * causal_pairs(max(0, whole - 1)) + whole * rest
        )  # that all queries see, each in place of a block
        pairs = causal_pairs(num_tokens) - (block - 1) * summaries
        return self.pair_flops(num_tokens, pairs) + 6 * self.num_kv_heads * self.head_dim * block * pooled


FORM = Form(
    "pooled:M[,window=W][,kv_heads=G]",
    "pooled:16,window=128",
    "softmax attention over near tokens, and over learned means of M tokens each further away; a baseline",
    value=named("block", positive),
    options={"window": positive, "kv_heads": positive},
    make=lambda **arguments: {"custom": Pooled(**arguments)},
)
