"""The terms of the score of some queries of one row."""

from __future__ import annotations

from dataclasses import replace

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
