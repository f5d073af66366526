"""Sink tokens for kernels that know levels only: a call whose mask hides them, and their own scores, in
PyTorch, joined by the log-sum-exp. Each row of queries reads the sink tokens of its own sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from structattn.ops.call import Call, whole_factors
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
        rows = torch.arange(num_queries, device=device)
        # The key of each sink token, (1, M), or (T, M) where every query has those of its own sequence; and
        # whether it is there, and not in a sequence that is shorter.
        if call.cu_seqlens is None or call.key_seqlens is None:
            index, is_there = steps[None], torch.ones((1, count), dtype=torch.bool, device=device)
            position = rows + (num_keys - num_queries)
        else:
            of_queries, of_keys = (x.to(device).long() for x in (call.cu_seqlens, call.key_seqlens))
            lengths = of_keys.diff()
            sequence = torch.searchsorted(of_queries[1:].contiguous(), rows, right=True)
            index = (of_keys[sequence, None] + steps).clamp(max=num_keys - 1)
            is_there = steps < lengths[sequence, None]
            first = lengths - of_queries.diff()  # the position of the first query of each sequence
            position = rows - of_queries[sequence] + first[sequence]
        distance = position[:, None] - steps
        visible = is_there.expand(num_queries, count)
        if call.is_causal:
            visible = visible & (distance >= 0)
        shown = visible[None, None]
        counts = torch.zeros(num_keys, dtype=torch.int32, device=device)
        hidden = counts.index_add(0, index.flatten(), is_there.flatten().int()) > 0
        mask = call.terms.attn_mask
        if mask is not None:
            of_rows = mask.expand(*q.shape[:3], num_keys)
            shown = shown & of_rows.gather(3, index.expand(*q.shape[:3], count))
        self.remaining_call = replace(call, layout=replace(call.layout, sink_tokens=0)).with_terms(
            attn_mask=~hidden if mask is None else mask & ~hidden
        )
        self._call, self._index, self._shown, self._distance = call, index, shown, distance
        self._factors = whole_factors(call.layout, call.terms.scale, torch.float32, device)
        self._q, self._k, self._v = q, k, v
        self._repeats = q.shape[1] // k.shape[1]

    def _products(self, x: Tensor, y: Tensor) -> Tensor:
        """(B, H, T, M) float32, of rows x (B, H, T, D) and the sink tokens' rows of y (B, Hk, S, D)."""
        return torch.stack([(x * self._rows(y, n)).sum(-1) for n in range(self._index.shape[1])], dim=-1)

    def _rows(self, x: Tensor, number: int) -> Tensor:
        """Those of one sink token for the rows of queries, (B, H, T or 1, D) float32."""
        return x[:, :, self._index[:, number]].float().repeat_interleave(self._repeats, dim=1)

    def _weighted(self, weights: Tensor, x: Tensor) -> Tensor:
        """(B, H, T, D), the sum of the sink tokens' rows of x (B, Hk, S, D), weighed. What a query does not
        see is left out: it may be no number.
        """
        out = torch.zeros(self._q.shape[:3] + x.shape[3:], device=x.device)
        for n in range(self._index.shape[1]):
            out += self._visible(weights[..., n, None] * self._rows(x, n), n)
        return out

    def _visible(self, x: Tensor, number: int) -> Tensor:
        return x.masked_fill(~self._shown[..., number, None], 0.0)

    def _add_sums(self, weights: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """``out`` (B, Hk, S, D) and, for each sink token, the sum over the rows of queries that see it of x
        (B, H, T, D), weighed. The order of the additions does not change from call to call.
        """
        added = torch.zeros((out.shape[2], *out.shape[:2], out.shape[3]), device=out.device)
        for n in range(self._index.shape[1]):
            found = self._visible(weights[..., n, None] * x, n).unflatten(1, (-1, self._repeats)).sum(2)
            if len(self._index) == 1:
                found = found.sum(2, keepdim=True)
            added.index_put_((self._index[:, n],), found.movedim(2, 0), accumulate=True)
        return (out + added.movedim(0, 2)).to(out.dtype)

    def _scores(self) -> tuple[Tensor, Tensor]:
        """Those of base e, (B, H, T, M) float32, and their derivatives by the products."""
        score = self._products(self._q.float() * self._factors, self._k)
        slope = torch.ones_like(score)
        if (softcap := self._call.terms.softcap) is not None:
            bent = torch.tanh(score / softcap)
            score, slope = softcap * bent, 1 - bent * bent
        if (slopes := self._call.terms.alibi_slopes) is not None:
            score = score - slopes.float()[:, :, None, None] * self._distance.abs()
        return score.masked_fill(~self._shown, -torch.inf), slope

    def add(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all keys from those of ``remaining_call``."""
        total, share, weights = joined_softmax(lse, self._scores()[0])
        return (out * share + self._weighted(weights, self._v)).to(out.dtype), total

    def add_gradients(
        self, grad_out: Tensor, delta: Tensor, lse: Tensor, grads: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v from those of ``remaining_call``.

        Args:
            delta: (B, H, T), the sum of ``grad_out`` times the output of each row, less the gradient of the
                log-sum-exp.
            lse: of all keys.
        """
        score, slope = self._scores()
        weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
        grad = grad_out.float()
        change = weight * (self._products(grad, self._v) - delta[..., None]) * slope
        grad_q, grad_k, grad_v = grads
        return (
            (grad_q + self._weighted(change, self._k) * self._factors).to(grad_q.dtype),
            self._add_sums(change, self._q.float() * self._factors, grad_k),
            self._add_sums(weight, grad, grad_v),
        )
