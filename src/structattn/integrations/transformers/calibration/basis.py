"""Which dimensions of a head come first, so that what is dropped for far tokens changes the output least.

Rotary pairs may be permuted, and nothing else: a mixture of pairs of different frequencies would score by
positions. Values, and queries and keys without rotary positions, may be multiplied by any invertible matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layout.levels import LevelLayout

_RIDGE = 1e-6  # of the mean eigenvalue, so that every direction has an inverse


def ranked_pairs(effects: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary pairs by what is lost without them.

    The loss without the pairs of a set is the sum of their products z_p . z_p'. From no pair on, the one that
    adds least is dropped next.

    Args:
        effects: (G, P, P), sums of z_p . z_p'.

    Returns:
        (G, P) int64, the pair to keep first, second ...; and (G, P + 1), the loss if that many are kept.

    Cost: O(G P^2).
    """
    heads, count = effects.shape[:2]
    dropped = effects.new_zeros(heads, count, dtype=torch.bool)
    added = effects.diagonal(dim1=1, dim2=2).clone()
    order = torch.empty(heads, count, dtype=torch.int64)
    losses = effects.new_zeros(heads, count + 1)
    rows = torch.arange(heads)
    for kept in reversed(range(count)):
        pair = added.masked_fill(dropped, torch.inf).argmin(dim=1)
        losses[:, kept] = losses[:, kept + 1] + added[rows, pair]
        order[:, kept] = pair
        dropped[rows, pair] = True
        added += 2 * effects[rows, pair]
    return order, losses.clamp(min=0)


def pair_order(calibration: Calibration, layers: Sequence[LayerCalibration], layout: LevelLayout) -> list[list[int]]:
    """The rotary pairs (or single dimensions, see ``moments``) of each key head in the order of the levels of
    a layout.

    Level 1 gets those without which far keys change the output most, each further level those of the rest
    that matter outside the blocks of the next one.

    Args:
        calibration: which block sizes are known; the nearest one is taken.
        layers: a layer, and others that score its keys.
        layout: even ranks where there are pairs.
    """
    blocks = [calibration.nearest_block(size) for size in layout.block_sizes[1:]]
    orders: list[list[int]] = []
    count = layers[0].moments.pair_effects.shape[-1]
    size = layers[0].shape.head_dim // count
    for head in range(layers[0].shape.num_kv_heads):
        left = list(range(count))
        order: list[int] = []
        for rank, block in zip(layout.ranks, [*blocks, None], strict=True):
            chosen = left
            if block is not None:
                effects = sum(layer.moments.pair_effects[block, head] for layer in layers)
                assert isinstance(effects, Tensor)
                ranked, _ = ranked_pairs(effects[left][:, left][None])
                chosen = sorted(left[n] for n in ranked[0, : rank // size].tolist())
            order += chosen
            left = [pair for pair in left if pair not in chosen]
        orders.append(order)
    return orders


def value_basis(calibration: Calibration, layer: LayerCalibration, layout: LevelLayout) -> Tensor:
    """The basis of values whose dimensions add least to the outputs where the levels of a layout drop them.

    With F = E[f f^T] of the far sums f (see ``moments``) and M = E[W^T W] of the output projection, and X =
    M^(1/2), the eigenvectors U of X F X, the largest first, give v' = v A with A = X U / c, and W' with W' v'
    = W v: its columns are orthogonal, and c leaves the norm of W as it is. The first v_1 eigenvectors are of
    what lies outside the blocks of level 2; the others are turned among themselves for level 3, and so on.

    Args:
        calibration: which block sizes are known; the nearest one is taken.
        layer: the layer.
        layout: with ``value_ranks``.

    Returns:
        A, (G, V, V).
    """
    assert layout.value_ranks is not None
    root = _root(layer.metric)
    vectors = torch.eye(root.shape[-1], dtype=root.dtype).expand_as(root)
    kept: list[Tensor] = []
    for rank, size in zip(layout.value_ranks, layout.block_sizes[1:], strict=False):
        effects = root @ layer.moments.value_effects[calibration.nearest_block(size)] @ root
        vectors = vectors @ torch.linalg.eigh(vectors.mT @ effects @ vectors).eigenvectors.flip(-1)
        kept.append(vectors[..., :rank])
        vectors = vectors[..., rank:]
    norm = layer.metric.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=1e-300).sqrt()
    return root @ torch.cat([*kept, vectors], dim=-1) / norm[:, None, None]


def value_losses(layer: LayerCalibration, block: int) -> Tensor:
    """What is lost if the values of keys outside a block keep the best 0 ... V dimensions, summed over heads,
    (V + 1,).
    """
    root = _root(layer.metric)
    return _tails(torch.linalg.eigvalsh(root @ layer.moments.value_effects[block] @ root).flip(-1)).sum(dim=0)


def key_losses(layer: LayerCalibration, block: int) -> Tensor:
    """What is lost if keys outside a block keep 0 ... D dimensions, summed over heads, (D + 1,)."""
    sums = layer.moments
    if not layer.has_key_basis:
        of_parts = ranked_pairs(sums.pair_effects[block])[1].sum(dim=0)
        size = layer.shape.head_dim // (len(of_parts) - 1)
        return of_parts.repeat_interleave(size)[: layer.shape.head_dim + 1]
    per_group = layer.shape.num_heads // layer.shape.num_kv_heads
    variance = layer.scale**2 * key_basis(layer, centered=layer.has_key_bias)[2] / per_group
    return (variance * sums.spread[block][:, None]).sum(dim=0)


def key_basis(layer: LayerCalibration, *, centered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The basis of queries and keys without rotary positions whose leading dimensions approximate their
    product best (KQ-SVD).

    With the second moments C_q and C_k of the queries of a group and of its keys, and C_q^(1/2) C_k^(1/2) = U
    S V^T: q' = q C_q^(-1/2) U S^(1/2) and k' = k C_k^(-1/2) V S^(1/2). The product is unchanged, and queries
    and keys have equal second moments S.

    Args:
        centered: the mean key is subtracted; it adds the same number to all scores of a query.

    Returns:
        The two matrices, (G, D, D); and the expected squares of what is lost of q.k, summed over the heads of
        a group, if the first 0 ... D dimensions are kept, (G, D + 1).

    Source: KQ-SVD, arXiv 2512.05916; ours is on moments of activations, with the heads of a group stacked.
    """
    sums = layer.moments
    keys = sums.key_products / sums.tokens
    if centered:
        mean = sums.key_sum / sums.tokens
        keys = keys - mean[:, :, None] * mean[:, None]
    q, k = _root(sums.query_products / sums.tokens), _root(keys)
    left, sizes, right = torch.linalg.svd(q @ k)
    gain = sizes.sqrt()[:, None]
    return torch.linalg.solve(q, left) * gain, torch.linalg.solve(k, right.mT) * gain, _tails(sizes.square())


def _tails(losses: Tensor) -> Tensor:
    """The sums of the last D, D - 1, ... 0 numbers, (G, D + 1)."""
    sums = losses.clamp(min=0).flip(-1).cumsum(-1).flip(-1)
    return torch.cat([sums, torch.zeros_like(sums[:, :1])], dim=1)


def _root(x: Tensor) -> Tensor:
    """The symmetric square root of positive semidefinite matrices, made invertible."""
    values, vectors = torch.linalg.eigh(x)
    floor = _RIDGE * values.mean(dim=-1, keepdim=True).clamp(min=1e-300)
    return vectors * values.clamp(min=0).add(floor).sqrt()[:, None] @ vectors.mT
