"""What a cache needs to keep hidden states in place of keys."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Latent(Protocol):
    """Keys that are made from a hidden state x of E numbers that all heads share.

    Where a key is a normed linear map of x, its product with a query is a product of x with an absorbed
    query, times a number of the key (its inverse RMS, rstd): then decoding makes no keys.

        <q, k_h(x)> = offset(q) + sum over a of rstd_a(x) <u_a(q), x>
    """

    @property
    def key_dim(self) -> int:
        """D, the dimension of the queries and of the keys that are made."""

    @property
    def num_rstd(self) -> int:
        """Numbers per token that are kept besides the state: (key heads) * A; 0 where all are 1, or none are
        needed.
        """

    @property
    def can_absorb(self) -> bool:
        """Whether ``absorbed`` works; else keys are made again from all states at every step."""

    def keys(self, state: Tensor, positions: Tensor) -> Tensor:
        """Keys from states.

        Args:
            state: (B, S, E).
            positions: int64 (S,) or (B, S), for rotary embedding.

        Returns:
            (B, heads, S, D), heads dividing the query heads.
        """

    def rstd(self, state: Tensor) -> Tensor:
        """The inverse RMS of the keys of states (B, S, E): (B, S, key heads * A)."""

    def absorbed(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """u and offset of queries (B, H, T, D): (B, H, T, A, E) and (B, H, T)."""


def alike(latent: Latent, other: Latent | None) -> bool:
    """Whether two layers keep the same of a hidden state, as far as the sizes tell."""
    names = ("key_dim", "num_rstd", "can_absorb")
    return other is not None and all(getattr(latent, name) == getattr(other, name) for name in names)
