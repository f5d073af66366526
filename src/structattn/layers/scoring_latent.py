"""Keys from the hidden state that all heads share: what a cache keeps in place of the keys of bilinear
scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from structattn.errors import CacheError, ShapeError
from structattn.layers.scoring_modules import ScoringModule


class ScoringLatent:
    """``cache.Latent`` of a scoring: k_h = norm(A_h x) with A_h linear, one x of E numbers for all heads.

    A norm is a centred and scaled key: with g its weight vector, c its centring and s_h(x) one over the
    deviation of A_h x,

        <q, norm(A_h x)> = s_h(x) <A_h^T c(g * q), x> + <q, bias>,

    so that a decoding step multiplies one absorbed query per head with the hidden states, and s_h(x), a
    number per head (and per norm), is kept beside them. With rotary embedding a key depends on its position
    too: then keys are made again at every step, which is exact, but costs ``scoring.projection_flops`` of all
    keys.

    Args:
        scoring: the module.
        rotary: of the attention module, or ``None``.

    Source: the absorbed product is that of multi-head latent attention (DeepSeek-V2, 2024); the norms are
        ours.
    """

    def __init__(self, scoring: ScoringModule, rotary: Callable[[Tensor, Tensor], Tensor] | None) -> None:
        self._scoring = scoring
        self._rotary = rotary
        self._order = scoring.cached_order

    def __deepcopy__(self, memo: object) -> Self:
        return self  # a copy of a cache is no copy of the weights

    @property
    def can_absorb(self) -> bool:
        return self._rotary is None

    @property
    def key_dim(self) -> int:
        return self._scoring.matrix.pair_dim(self._order)

    @property
    def num_rstd(self) -> int:
        if not self.can_absorb:
            return 0
        return self._scoring.num_key_heads(self._order) * len(self._scoring.key_norms(self._order))

    def keys(self, state: Tensor, positions: Tensor) -> Tensor:
        keys = self._scoring.normed_keys(self._raw(state), self._order)
        return keys if self._rotary is None else self._rotary(keys, positions)

    def rstd(self, state: Tensor) -> Tensor:
        raw = self._raw(state)
        of_norms = [
            (raw[..., dims].var(-1, correction=0) + norm.eps).rsqrt()
            for dims, norm in self._scoring.key_norms(self._order)
        ]
        return torch.stack(of_norms, dim=2).flatten(1, 2).transpose(1, 2)  # B, heads * A, S to B, S, heads * A

    def _raw(self, state: Tensor) -> Tensor:
        """Keys before any norm."""
        width = self._scoring.shape.embed_dim
        if state.shape[-1] != width:
            raise ShapeError(f"the hidden states of this layer have {width} numbers, got {tuple(state.shape)}")
        return self._scoring.keys(state, self._order)

    def absorbed(self, q: Tensor) -> tuple[Tensor, Tensor]:
        if not self.can_absorb:
            raise CacheError("rotary embedding turns each key by its own position: there is no absorbed query")
        if q.shape[1] != self._scoring.shape.num_heads:
            raise ShapeError(f"expected queries of {self._scoring.shape.num_heads} heads, got {tuple(q.shape)}")
        norms = self._scoring.key_norms(self._order)
        offset = q.new_zeros(q.shape[:3])
        parts = []
        for dims, norm in norms:
            query = q[..., dims]
            weighted = query if norm.weight is None else query * norm.weight.to(q.dtype)
            if norm.bias is not None:
                offset = offset + (query * norm.bias.to(q.dtype)).sum(-1)
            full = torch.zeros_like(q)
            full[..., dims] = weighted - weighted.mean(-1, keepdim=True)
            parts.append(full)
        stacked = torch.stack(parts or [q], dim=3)  # B, H, T, A, D
        weight = next(self._scoring.parameters())
        u = self._scoring.adjoint_keys(stacked.flatten(2, 3).to(weight.dtype), self._order).to(q.dtype)
        return u.unflatten(2, (q.shape[2], -1)), offset
