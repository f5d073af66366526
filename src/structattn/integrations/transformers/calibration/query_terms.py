"""Some queries of one row: the terms of their score, and their weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from structattn.integrations.transformers.attention.arguments import POSITION_BIAS
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.ops.terms import ScoreTerms


def of_queries(terms: ScoreTerms, row: int, first: int, start: int, stop: int) -> ScoreTerms:
    """The terms of the score of some queries of a row whose real tokens begin at ``first``; the mask is the
    bias of the model.
    """
    slopes, mask = terms.alibi_slopes, terms.attn_mask
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[row]
    if mask is not None:
        mask = mask[min(row, len(mask) - 1)][None, ..., first : first + stop]
        mask = mask if mask.shape[2] == 1 else mask[:, :, first + start : first + stop]
    return replace(terms, alibi_slopes=slopes, attn_mask=mask)


def weights_of_queries(call: AttentionCall, start: int, stop: int) -> Tensor:
    """The weights of queries ``start`` ... ``stop`` - 1 over all tokens up to the last, (H, M, stop)."""
    assert isinstance(call.key, Tensor)
    terms = call.terms(call.arguments.get(POSITION_BIAS))
    q, k = call.query[0, :, start:stop].float(), call.key[0, :, :stop].float()
    if terms.has_scale_only:
        return plain_weights(q, k, terms.scale)
    return Variant().weights(q[None], k[None], of_queries(terms, 0, 0, start, stop), sequences=Sequences())[0]


def plain_weights(q: Tensor, k: Tensor, scale: float | None) -> Tensor:
    """The weights (H, M, S) of the last M queries (H, M, D) over keys (G, S, D), without copies of keys."""
    count, length = q.shape[1], k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    scores = (q.unflatten(0, (len(k), -1)).flatten(1, 2) * scale) @ k.mT
    scores = scores.unflatten(1, (-1, count)).flatten(0, 1)
    future = torch.ones((count, count), dtype=torch.bool, device=q.device).triu(1)
    scores[:, :, length - count :].masked_fill_(future, -torch.inf)
    return scores.softmax(dim=-1)
