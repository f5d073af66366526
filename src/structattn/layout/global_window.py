"""``GlobalWindowLayout``: a global and a windowed softmax, added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from structattn.checks import MAX_LENGTH, check_bool, check_choice, check_int, check_size
from structattn.errors import ConfigError
from structattn.layout.checks import positive_ints
from structattn.layout.cost import visible_pairs
from structattn.layout.levels import MAX_COUNTED, LevelLayout


@dataclass(frozen=True)
class GlobalWindowLayout:
    """Two softmaxes, added: one over all keys on the first dimensions, one over a sliding window on the
    others.

        out_i = softmax_j(<q_i[:r_1], k_j[:r_1]> c_1) v_j
              + softmax_{j in window(i)}(<q_i[r_1:], k_j[r_1:]> c_2) v_j

    A baseline of the paper. Not one softmax, so it has no log-sum-exp and is not a ``LevelLayout``.

    Args:
        ranks: dimensions (r_1, r_2) of the global and of the windowed softmax; they sum to the head
            dimension.
        window: visible keys of the windowed softmax, as the ``window`` of ``structured_attention``.
        scaling: ``"variance"`` c = 1/sqrt(r), or ``"mup"`` 8/r.

    Raises:
        ConfigError: not two positive ranks, a window below 1, or an unknown scaling.

    Source: Kuang et al. 2025, section 5.1 (global + window baseline).
    """

    ranks: tuple[int, int]
    window: int
    scaling: Literal["variance", "mup"] = "variance"

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            window: int,
            scaling: Literal["variance", "mup"] = "variance",
        ) -> None: ...

    def __post_init__(self) -> None:
        ranks = positive_ints(self.ranks, "ranks")
        if len(ranks) != 2:
            raise ConfigError(f"a global-window layout has 2 ranks (global, windowed), got {len(ranks)}: {ranks}")
        object.__setattr__(self, "ranks", ranks)
        check_size("window", self.window, MAX_LENGTH)
        check_choice("scaling", self.scaling, ("variance", "mup"))

    @property
    def scales(self) -> tuple[float, float]:
        """(c_1, c_2), what the scores of the two softmaxes are multiplied by."""
        first, second = (8 / rank if self.scaling == "mup" else rank**-0.5 for rank in self.ranks)
        return first, second

    @property
    def head_dim(self) -> int:
        """D, the dimension of queries and keys: the sum of the ranks."""
        return sum(self.ranks)

    def score_flops(self, num_positions: int, is_causal: bool = True) -> int:
        """FLOPs of all the scores of one head over T positions, 2 per multiply-add, counting only visible
        pairs.
        """
        check_size("num_positions", num_positions, MAX_COUNTED)
        check_bool("is_causal", is_causal)
        everywhere = visible_pairs(num_positions, num_positions, None, is_causal)
        near = visible_pairs(num_positions, num_positions, self.window, is_causal)
        return 2 * (self.ranks[0] * everywhere + self.ranks[1] * near)

    def key_cache_size(self, num_positions: int) -> int:
        """Numbers per key head that a cache must hold at T positions: T r_1 + min(T, window) r_2."""
        check_int("num_positions", num_positions, minimum=0)
        return num_positions * self.ranks[0] + min(num_positions, self.window) * self.ranks[1]


Layout = LevelLayout | GlobalWindowLayout
