"""Sink tokens for kernels that know levels only: a call whose mask hides them, and a small dense call of
them, joined by the log-sum-exp.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from structattn.ops.call import Call
from structattn.ops.joined_softmax import joined_softmax


class SinkTokens:
    """The sink tokens of a call, whose pairs share all levels.

    Args:
        q, k, v, call: as of a backend; there is no padding.

    Attributes:
        remaining_call: the call without them.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        device, num_queries, num_keys = q.device, q.shape[2], k.shape[2]
        count = min(call.layout.sink_tokens, num_keys)
        steps = torch.arange(count, device=device)
        if call.cu_seqlens is None or call.key_seqlens is None:
            index, is_own = steps, torch.ones_like(steps, dtype=torch.bool)
            position = torch.arange(num_keys - num_queries, num_keys, device=device)
            distance = position[:, None] - steps
            visible = is_own.expand_as(distance)
        else:
            of_queries, of_keys = (x.to(device).long() for x in (call.cu_seqlens, call.key_seqlens))
            lengths = of_keys.diff()
            index = (of_keys[:-1, None] + steps).flatten().clamp(max=num_keys - 1)
            rows = torch.arange(num_queries, device=device)
            sequence = torch.searchsorted(of_queries[1:].contiguous(), rows, right=True)
            first = lengths - of_queries.diff()  # the position of the first query of each sequence
            position = rows - of_queries[sequence] + first[sequence]
            distance = position[:, None] - steps.repeat(len(lengths))
            visible = sequence[:, None] == torch.arange(len(lengths), device=device).repeat_interleave(count)
            is_own = (steps < lengths[:, None]).flatten()  # not in a sequence that is shorter
            visible = visible & is_own
        if call.is_causal:
            visible = visible & (distance >= 0)
        shown = visible[None, None]
        hidden = torch.zeros(num_keys, dtype=torch.int32, device=device).index_add(0, index, is_own.int()) > 0
        mask = call.terms.attn_mask
        if mask is not None:
            shown = shown & mask.expand(*q.shape[:3], num_keys)[..., index]
        self.remaining_call = replace(call, layout=replace(call.layout, sink_tokens=0)).with_terms(
            attn_mask=~hidden if mask is None else mask & ~hidden
        )
        self._call, self._index, self._shown, self._distance = call, index, shown, distance
        self._factors = torch.tensor(call.layout.whole_factors(call.terms.scale), device=device)
        self._q, self._k, self._v = q, k[:, :, index], v[:, :, index]
        self._repeats = q.shape[1] // k.shape[1]

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, T, M) float32, of queries (B, H, T, D) and keys (B, H, M, D)."""
        score = (q * self._factors) @ k.transpose(2, 3)
        if (softcap := self._call.terms.softcap) is not None:
            score = softcap * torch.tanh(score / softcap)
        if (slopes := self._call.terms.alibi_slopes) is not None:
            score = score - slopes.float()[:, :, None, None] * self._distance.abs()
        return score.masked_fill(~self._shown, -torch.inf)

    def _of_heads(self, x: Tensor) -> Tensor:
        return x.float().repeat_interleave(self._repeats, dim=1)

    def add(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all keys from those of ``remaining_call``."""
        score = self._scores(self._q.float(), self._of_heads(self._k))
        total, share, weights = joined_softmax(lse, score)
        return (out * share + weights @ self._of_heads(self._v)).to(out.dtype), total

    def add_gradients(
        self, grad_out: Tensor, delta: Tensor, lse: Tensor, grads: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v from those of ``remaining_call``.

        Args:
            delta: (B, H, T), the sum of ``grad_out`` times the output of each row, less the gradient of the
                log-sum-exp.
            lse: of all keys.
        """
        with torch.enable_grad():
            q, k = self._q.detach().float().requires_grad_(), self._of_heads(self._k).detach().requires_grad_()
            score = self._scores(q, k)
        weight = torch.exp(score.detach() - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        change = weight * (grad_out.float() @ self._of_heads(self._v).transpose(2, 3) - delta[..., None])
        found_q, found_k = torch.autograd.grad(score, (q, k), change)
        found_v = weight.transpose(2, 3) @ grad_out.float()
        grad_q, grad_k, grad_v = grads
        sums = [x.unflatten(1, (-1, self._repeats)).sum(2) for x in (found_k, found_v)]
        return (
            (grad_q + found_q).to(grad_q.dtype),
            grad_k.index_add(2, self._index, sums[0].to(grad_k.dtype)),
            grad_v.index_add(2, self._index, sums[1].to(grad_v.dtype)),
        )
