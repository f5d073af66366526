"""One softmax over all keys, from the attention over some of them and its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def joined_softmax(lse: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights with which attention over some keys is joined with more keys.

        total = log(exp(lse) + sum_n exp(scores_n))
        out = exp(lse - total) out_lse + sum_n exp(scores_n - total) v_n

    Args:
        lse: (...), the log-sum-exp of the scores of the first keys, -inf where a query sees none of them.
        scores: (..., N), of N more keys, whose values are v_n; or the log-sum-exps of N more sets of keys,
            whose outputs are v_n. -inf for what a query does not see.

    Returns:
        total (...), the weight of the first keys (..., 1) and those of the others (..., N). A query without
        any key has total -inf and weights 0.

    Source: Milakov and Gimelshein 2018.
    """
    total = torch.logaddexp(lse, scores.logsumexp(-1))
    shift = total.masked_fill(total == -torch.inf, 0.0)[..., None]  # -inf less -inf is NaN
    return total, torch.exp(lse[..., None] - shift), torch.exp(scores - shift)
