"""Dropout of attention weights: a mask that is a function of seed, batch row, query head, query and key, and
of nothing else.

So every backend drops the same weights of a call, whatever its tiles, threads or device, and the backward
pass makes the mask of the forward pass again. The random numbers are those of Philox 4x32-10: a counter (key
// 8, query, head, batch row) under the seed gives four words of 32 bits, 16 bits for each of eight
neighbouring keys.

Source: Salmon et al. 2011 (Parallel random numbers: as easy as 1, 2, 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 2**32 - 1
_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words of each counter.

    Args:
        counter: int64 tensors in [0, 2^32) that broadcast.
        seed: at least 0; its low and high 32 bits are the key.

    Returns:
        Four int64 tensors in [0, 2^32), of the broadcast shape.

    Cost: about 100 integer operations; what depends on one word of the counter is computed once for each
        value of that word.
    """
    a, b, c, d = counter
    low, high = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(_ROUNDS):
        # A product wraps at 64 bits; the bits above a word that stay in b and d are cut with the next
        # exclusive or.
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b = ((right >> 32) ^ (b ^ low)) & _WORD, right
        c, d = ((left >> 32) ^ (d ^ high)) & _WORD, left
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return a, b & _WORD, c, d & _WORD


def query_positions(q: Tensor) -> Tensor:
    """Where each of the queries (B, H, T, D) is: its number, head and batch row, int64 (B, H, T, 3)."""
    row, head, query = (torch.arange(n, device=q.device) for n in q.shape[:3])
    return torch.stack(torch.broadcast_tensors(query, head[:, None], row[:, None, None]), dim=-1)


def key_positions(k: Tensor) -> Tensor:
    """Where each of the keys (B, G, S, D) is: its number, int64 (B, G, S, 1)."""
    return torch.arange(k.shape[2], device=k.device)[:, None].expand(k.shape[0], k.shape[1], -1, -1)


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """The dropout of a call.

    Attributes:
        p: the probability of dropping a weight, in (0, 1).
        seed: an int, or 0-dimensional int64, at least 0.
        queries: (..., rows, 3), ``query_positions`` as the geometry has the queries.
        keys: (..., columns, 1), ``key_positions`` as it has the keys.
    """

    p: float
    seed: int | Tensor
    queries: Tensor
    keys: Tensor

    @property
    def _limit(self) -> int:
        """A weight is dropped where its 16 bits are below this."""
        return min(round(self.p * 2**16), 2**16 - 1)

    @property
    def keep_probability(self) -> float:
        """The probability of keeping a weight: 1 - p to 16 bits."""
        return 1 - self._limit / 2**16

    def dropped(self, queries: Tensor | None = None, keys: Tensor | None = None) -> Tensor:
        """Which weights are dropped, bool (..., rows, columns).

        Args:
            queries: (..., rows, 3), some of the queries. Default: all.
            keys: (..., columns, 1), some of the keys, neighbours in rising order. Default: all, of a call as
                it is.

        Cost: one ``philox`` per row and eight columns, in int64.
        """
        offset: int | None = 0
        count = (self.keys if keys is None else keys).shape[-2]
        if count == 0:
            queries = self.queries if queries is None else queries
            return torch.zeros((*queries.shape[:-1], 0), dtype=torch.bool, device=queries.device)
        if keys is None:
            keys = self.keys
        elif keys.device.type == "cpu":
            low, high = (int(x) for x in torch.aminmax(keys[..., 0, :] % 8))
            offset = low if low == high else None
        else:
            offset = None  # not worth waiting for the device
        first = keys[..., :1, :]  # (..., 1, 1)
        # A length may be dynamic while PyTorch traces: then two groups at least, since it treats 1 as a
        # special case.
        is_traced = offset is not None and torch.compiler.is_compiling()
        spare = 14 if offset is None else offset + (15 if is_traced else 7)
        eights = torch.arange((count + spare) // 8, device=keys.device) + first // 8
        query, head, row = (self.queries if queries is None else queries).unsqueeze(-2).unbind(-1)  # (..., rows, 1)
        halves = []
        for word in philox((eights, query, head, row), self.seed):
            halves += [(word & 2**16 - 1) < self._limit, word < self._limit << 16]
        words = torch.stack(halves, dim=-1)
        if is_traced and offset is not None:  # to join two dynamic dimensions would fix the length
            index = offset + torch.arange(count, device=keys.device)
            return words[..., index // 8, index % 8]
        is_dropped = words.flatten(-2)
        if offset is not None:
            return is_dropped[..., offset : offset + count]
        index = first % 8 + torch.arange(count, device=keys.device)
        return is_dropped.gather(-1, index.expand(*is_dropped.shape[:-1], -1))
