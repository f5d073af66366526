"""The sequences of a batch: rows without their padding, and packed sequences one by one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from structattn.ops.call import Call


@dataclass(frozen=True)
class SequenceSpan:
    """One sequence of a batch.

    Attributes:
        batch: its batch row.
        row: which segments of a free partition it has.
        queries, keys: index of its first query and key in the batch row.
        num_queries, num_keys: how many it has.
        first_query: the position of its first query.
        first_key: the position of its first key; 0 unless earlier ones are elsewhere, in another process.
    """

    batch: int
    row: int
    queries: int
    keys: int
    num_queries: int
    num_keys: int
    first_query: int
    first_key: int = 0

    @property
    def end_key(self) -> int:
        """The position after its last key."""
        return self.first_key + self.num_keys


def sequences_of(q: Tensor, k: Tensor, call: Call) -> list[SequenceSpan]:
    """The sequences of a batch, without padding."""
    batch, num_queries, num_keys = q.shape[0], q.shape[2], k.shape[2]
    if call.cu_seqlens is not None and call.key_seqlens is not None:
        ends = zip(pairwise(call.cu_seqlens.tolist()), pairwise(call.key_seqlens.tolist()), strict=True)
        return [
            SequenceSpan(0, n, i, j, i_end - i, j_end - j, (j_end - j) - (i_end - i))
            for n, ((i, i_end), (j, j_end)) in enumerate(ends)
            if i < i_end and j < j_end
        ]
    padding = [0] * batch if call.left_padding is None else call.left_padding.tolist()
    sequences = []
    first = num_keys - num_queries  # the position of the first query
    for row, pad in enumerate(padding):
        # Queries in the padding are hidden; those before the first key are not.
        spans = [(first, num_keys)] if pad == 0 else [(first, 0), (max(first, pad), num_keys)]
        sequences += [
            SequenceSpan(row, row, low - first, pad, high - low, num_keys - pad, low - pad)
            for low, high in spans
            if low < high and pad < num_keys
        ]
    return sequences
