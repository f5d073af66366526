"""Sums over tokens that tell what an attention layer loses when far tokens lose dimensions. Tensors only; no
model.

Let a be the attention weights of a query i, v_j and o_i values and output of a head, and far(n) the visible
keys outside the block of n positions in which i lies. If the score of the pair (i, j) loses s_p(i, j), the
part of dimensions p, then to first order the output of the head changes by

    z_p = sum over far j of a_ij s_p(i, j) (v_j - o_i),

which is 0 for a part that is the same for all keys; and if far values lose the dimensions of a projection P,
it changes by P f with f = sum over far j of a_ij v_j. Both are measured behind the output projection W of the
head, |x|^2 = |W x|^2 = x^T (W^T W) x.

Axes: G key/value heads, N query heads of each, M queries, S keys, D and V dimensions, P rotary pairs (or
single dimensions where nothing is rotated), B block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(kw_only=True)
class Moments:
    """The sums of one layer, float64.

    Attributes:
        tokens: real tokens.
        queries: those whose scores were looked at.
        query_products: (G, D, D), sum of q q^T over tokens and the query heads of a group.
        key_sum, key_products: (G, D) and (G, D, D), over tokens.
        value_sum, value_products: (G, V) and (G, V, V).
        pair_effects: (B, G, P, P), sum of z_p . z_p' over queries and the heads of a group; P is 0 where
            queries and keys get another basis.
        pair_energy, pair_counts: (distances, G, P) and (distances,), sum of s_p(i, j)^2, of which the mean
            over the keys of each query is subtracted, and how many pairs of a query of the first group and a
            key: at distances 0, 1, 2 and 3, 4 to 7, and so on.
        value_effects: (B, G, V, V), sum of f f^T over queries and the heads of a group.
        spread: (B, G), sum over queries, heads and far keys of a_ij^2 |v_j - o_i|^2.
        output: (), sum of |o_i|^2 over queries and all heads.
    """

    tokens: Tensor
    queries: Tensor
    query_products: Tensor
    key_sum: Tensor
    key_products: Tensor
    value_sum: Tensor
    value_products: Tensor
    pair_effects: Tensor
    pair_energy: Tensor
    pair_counts: Tensor
    value_effects: Tensor
    spread: Tensor
    output: Tensor

    @classmethod
    def zeros(
        cls, heads: int, head_dim: int, value_dim: int, pairs: int, blocks: int, distances: int, device: torch.device
    ) -> Moments:
        """Nothing so far."""
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (),
            "queries": (),
            "query_products": (heads, head_dim, head_dim),
            "key_sum": (heads, head_dim),
            "key_products": (heads, head_dim, head_dim),
            "value_sum": (heads, value_dim),
            "value_products": (heads, value_dim, value_dim),
            "pair_effects": (blocks, heads, pairs, pairs),
            "pair_energy": (distances, heads, pairs),
            "pair_counts": (distances,),
            "value_effects": (blocks, heads, value_dim, value_dim),
            "spread": (blocks, heads),
            "output": (),
        }
        return cls(**{name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in shapes.items()})

    def tensors(self) -> dict[str, Tensor]:
        """The sums by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add_tokens(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Adds the second moments of the tokens of one sequence: (H, S, D), (G, S, D), (G, S, V)."""
        q, k, v = q.double(), k.double(), v.double()
        grouped = q.unflatten(0, (k.shape[0], -1)).flatten(1, 2)
        self.tokens += k.shape[1]
        self.query_products += grouped.mT @ grouped
        self.key_products += k.mT @ k
        self.value_products += v.mT @ v
        self.key_sum += k.sum(dim=1)
        self.value_sum += v.sum(dim=1)

    def add_queries(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: Tensor,
        *,
        scale: float,
        root: Tensor,
        parts: Tensor | None,
        block_sizes: tuple[int, ...],
        chunk_size: int | None,
    ) -> None:
        """Adds what the last M of S tokens of one sequence would lose.

        Args:
            q, k, v: (H, M, D), (G, S, D), (G, S, V), floating point.
            weights: attention weights, (H, M, S).
            scale: c in the score c q.k.
            root: (H, V, V), the square root of W^T W of each head.
            parts: (P, 2) int64, the dimensions of the rotary pairs, or (P, 1) of single dimensions; ``None``:
                their effects are not summed.
            block_sizes: ascending.
            chunk_size: of a model in which tokens see their own chunk only, from whose start blocks are
                counted.
        """
        length, count = k.shape[1], q.shape[1]
        places = torch.arange(length - count, length, device=q.device)
        chunk = 0 if chunk_size is None else places - places % chunk_size
        starts = torch.stack([places - (places - chunk) % size for size in block_sizes])
        self.queries += count
        per_group = q.shape[0] // k.shape[0]
        for head in range(q.shape[0]):
            group = head // per_group
            key, value, head_weights = k[group], v[group], weights[head]
            out = head_weights @ value
            self.output += (out @ root[head]).double().square().sum()
            moved = value @ root[head]
            at = out @ root[head]
            distance = (moved.square().sum(1)[None] - 2 * at @ moved.T + at.square().sum(1)[:, None]).clamp(min=0)
            costs = head_weights.square() * distance
            scores = None if parts is None else _part_scores(q[head], key, parts, scale)
            if scores is not None:
                self._add_energy(scores, places, group)
            lost = torch.zeros_like(out)
            effect = None if scores is None else out.new_zeros(scores.shape[0], count, value.shape[1])
            later = torch.zeros_like(places)
            for block in reversed(
                range(len(block_sizes))
            ):  # from the farthest keys on: those outside the largest block
                first, end = int(later.min()), int(starts[block].max())
                if first < end:
                    keys = torch.arange(first, end, device=q.device)
                    shown = (keys >= later[:, None]) & (keys < starts[block][:, None])
                    near = head_weights[:, first:end] * shown
                    lost = lost + near @ value[first:end]
                    if scores is not None and effect is not None:
                        weighted = scores[:, :, first:end] * near
                        effect = effect + weighted @ moved[first:end] - weighted.sum(-1, keepdim=True) * at
                is_far = torch.arange(length, device=q.device) < starts[block][:, None]
                self.spread[block, group] += (costs * is_far).double().sum()
                self.value_effects[block, group] += lost.double().T @ lost.double()
                if effect is not None:
                    flat = effect.flatten(1).double()
                    self.pair_effects[block, group] += flat @ flat.T
                later = starts[block]

    def _add_energy(self, parts: Tensor, places: Tensor, group: int) -> None:
        """Adds the squares of parts of scores, (P, M, S), by distance."""
        length = parts.shape[2]
        distance = places[:, None] - torch.arange(length, device=parts.device)
        visible = distance >= 0
        mean = (parts * visible).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        bucket = distance_bucket(distance[visible])
        squares = (parts - mean)[:, visible].double().square()
        self.pair_energy[:, group] += squares.new_zeros(len(self.pair_counts), len(parts)).index_add_(
            0, bucket, squares.T
        )
        if group == 0:
            self.pair_counts += torch.bincount(bucket, minlength=len(self.pair_counts))


def distance_bucket(distance: Tensor) -> Tensor:
    """The number of the bucket of each distance: 0, 1, 2 to 3, 4 to 7, and so on."""
    return torch.frexp(distance.double())[1].long()


def _part_scores(q: Tensor, k: Tensor, parts: Tensor, scale: float) -> Tensor:
    """What each part of the dimensions adds to the scores, (P, M, S)."""
    return q[:, parts].transpose(0, 1) @ k[:, parts].permute(1, 2, 0) * scale
