"""What makes the weights of a decoding step of the products of queries and keys, besides the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from structattn.checks import check_scale
from structattn.ops.checks import check_sinks, check_softcap, checked_mask, checked_slopes


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Options of a call; see ``structured_attention``."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def check(self, q: Tensor, num_keys: int) -> None:
        """Raises what ``structured_attention`` would raise for them, with S keys."""
        if self.scale is not None:
            check_scale("scale", self.scale)
        if self.softcap is not None:
            check_softcap(self.softcap)
        if self.sinks is not None:
            check_sinks(q, self.sinks)
        if self.attn_mask is not None:
            checked_mask(q, num_keys, None, self.attn_mask)
        if self.alibi_slopes is not None:
            checked_slopes(q, self.alibi_slopes)

    @property
    def has_scale_only(self) -> bool:
        """Whether the weights are the softmax of scaled products."""
        return self.softcap is None and self.sinks is None and self.attn_mask is None and self.alibi_slopes is None

    @property
    def slopes(self) -> Tensor | None:
        """The ALiBi slopes, (1 or B, H), without a gradient."""
        slopes = self.alibi_slopes
        return slopes if slopes is None else slopes.detach()[None] if slopes.dim() == 1 else slopes.detach()

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient is asked for one of the tensors."""
        return any(x is not None and x.requires_grad for x in (self.sinks, self.attn_mask))

    def of_queries(self, first: int, end: int, num_queries: int, num_keys: int) -> ScoreOptions:
        """The options for queries ``first`` ... ``end - 1`` of T, of which the last sees the first of S keys only as far as itself."""
        if self.attn_mask is None:
            return self
        mask = self.attn_mask[(None,) * (4 - self.attn_mask.dim())].expand(-1, -1, num_queries, num_keys)
        return replace(self, attn_mask=mask[:, :, first:end, : num_keys - num_queries + end])

    def finish(self, scores: Tensor) -> None:
        """Makes scaled products the scores, in place: soft cap, ALiBi, mask, and no later tokens.

        Args:
            scores: (B, H, T, N), contiguous, of the last N keys.
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        tokens, count = scores.shape[2:]
        if self.slopes is not None:
            keys = torch.arange(count, dtype=scores.dtype, device=scores.device)
            distance = keys[count - tokens :, None] - keys
            scores.addcmul_(self.slopes.to(scores.dtype)[:, :, None, None], distance, value=-1.0)
        if tokens > 1:
            steps = torch.arange(tokens, device=scores.device)
            scores[..., -tokens:].masked_fill_(steps[None, :] > steps[:, None], -torch.inf)
        if self.attn_mask is None:
            return
        mask = self.attn_mask[..., -count:]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.detach())

    def softmax(self, scores: Tensor, of_queries: Sequence[int]) -> Tensor:
        """The weights of scores (..., N), which may be overwritten; ``of_queries`` is what their other dimensions are together, (B, H, T)."""
        empty = None
        if self.attn_mask is not None:  # a query may see no key, and gives 0
            empty = scores.amax(-1, keepdim=True) == -torch.inf
            scores.masked_fill_(empty, 0.0)
        weights = torch.softmax(scores, dim=-1)
        if self.sinks is not None:
            sinks = self.sinks.detach().to(scores.dtype)[:, None].expand(*of_queries).reshape(*scores.shape[:-1], 1)
            weights.mul_(torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks))
        return weights if empty is None else weights.masked_fill_(empty, 0.0)
