"""``Rotary``: rotary positions inside the slices of the levels, as a value, and the module that rotates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from structattn import text_forms
from structattn.checks import (
    INT_DTYPES,
    MAX_LENGTH,
    check_choice,
    check_number,
    check_size,
    check_tensor,
    check_type,
    quoted,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layout.checks import positive_ints

Split = Literal["low_far", "interleaved", "per_level"]
ScalingKind = Literal["linear", "ntk", "yarn"]
SPLITS: tuple[Split, ...] = get_args(Split)
ROPE_SCALINGS: tuple[ScalingKind, ...] = get_args(ScalingKind)

_DEFAULT_BASE = 10_000.0
_MOST_DIMS = 2**20  # of a level: its frequencies are written out one by one
# YaRN's bounds, in turns within the original length: below the first interpolated fully, above the second not
# at all.
_FEW_TURNS = 1.0
_MANY_TURNS = 32.0


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """A change of the frequencies for contexts longer than those of training, by the factor s.

        linear   theta_i' = theta_i / s                            (positions divided by s)
        ntk      theta_i' = b'^(-i/N), b' = base s^(d/(d-2))       (d = 2N rotated dimensions; the slowest is
                                                                   divided by s, the fastest kept; with
                                                                   N = 1 nothing changes)
        yarn     theta_i' = theta_i (g + (1 - g) / s),  g = (t_i - 1) / (32 - 1) clipped to [0, 1],
                 t_i = LENGTH theta_i / 2 pi, the turns within the original length; and q and k times 0.1 ln s
                 + 1

    With the split ``per_level`` N and d are those of the level.

    All are static: the frequencies depend on this value only. Dynamic scaling, where s follows the current
    length, does not go with a key cache: cached keys were rotated with the frequencies of the length at that
    time, and turning them again at every step would cost a pass over the cache for each token. Choose s for
    the longest context instead.

    Args:
        kind: ``"linear"``, ``"ntk"`` or ``"yarn"``.
        factor: s, at least 1: the longest context over that of training.
        original_length: context length of training in positions; for ``yarn``, and for no other.

    Raises:
        ConfigError: an unknown kind, a factor that is not a finite number of at least 1, or a length missing
            or too much.

    Source: linear: Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    Interpolation"; ntk: "NTK-aware" in Peng et al. 2023, "YaRN", section 3.1; yarn: the same, sections 3.2
    and 3.4. As in the text there, the ramp is linear in turns; the code published with it, and those that
    follow it, make it linear in the index of the frequency. Our temperature also scales the dimensions that
    are not rotated, so that it is one for the whole score.
    """

    kind: ScalingKind
    factor: float
    original_length: int | None = None

    def __post_init__(self) -> None:
        check_choice("rotary scaling", self.kind, ROPE_SCALINGS)
        check_number("the factor of a rotary scaling", self.factor, minimum=1)
        object.__setattr__(self, "factor", float(self.factor))
        length = self.original_length
        if self.kind != "yarn":
            if length is not None:
                raise ConfigError(f"{self.kind} scaling has no original_length: leave it at None, got {quoted(length)}")
        else:
            check_size("the original_length of yarn scaling, the context length of training,", length, MAX_LENGTH)

    @classmethod
    def parse(cls, text: str) -> RotaryScaling:
        """Reads ``linear=S``, ``ntk=S`` or ``yarn=S@LENGTH``; ``RotaryScaling.parse(str(s)) == s``.

        Raises:
            ConfigError: another form, or as the class.
        """
        return text_forms.read(cls, text)

    def __str__(self) -> str:
        return text_forms.write(self)

    @property
    def amplitude(self) -> float:
        """What q and k are multiplied by: the root of YaRN's inverse temperature, 1 for the others."""
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0

    def apply(self, frequencies: tuple[float, ...]) -> tuple[float, ...]:
        """The scaled frequencies of base^(-i/N), i = 0 ... N-1, in the same order."""
        check_type("frequencies", frequencies, tuple | list, "a tuple of numbers")
        for theta in frequencies:
            check_number("each of frequencies", theta, above=0)
        match self.kind:
            case "linear":
                return tuple(theta / self.factor for theta in frequencies)
            case "ntk":
                # The new base written out: (s^(2N / (2N - 2)))^(-i/N) = s^(-i / (N - 1)), and 1 at i = 0.
                last = max(len(frequencies) - 1, 1)
                return tuple(theta * self.factor ** (-i / last) for i, theta in enumerate(frequencies))
            case "yarn":
                return tuple(theta * self._yarn(theta) for theta in frequencies)

    def _yarn(self, theta: float) -> float:
        assert self.original_length is not None
        turns = self.original_length * theta / (2 * math.pi)
        kept = min(max((turns - _FEW_TURNS) / (_MANY_TURNS - _FEW_TURNS), 0.0), 1.0)
        return kept + (1 - kept) / self.factor


@dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary positions for queries and keys whose dimensions are divided among levels.

    In the slice of level l, of r_l dimensions, dimension i and dimension i + floor(r_l / 2) are one complex
    number, which position p turns by p times its frequency; with an odd r_l the last dimension is not
    rotated:

        (x_i + j x_{i + n_l})  ->  exp(j p theta) (x_i + j x_{i + n_l}),    n_l = floor(r_l / 2), i < n_l.

    So every slice is closed under the pairing, and <q_i[slice l], k_j[slice l]> depends on the positions only
    by i - j, for each level. With one level this is the usual rotation of the two halves of the head
    dimension.

    With N = sum n_l and theta_i = base^(-i/N), i = 0 the fastest, ``split`` says which level gets which
    frequencies:

    * ``"low_far"``: level 1, the global one, gets the n_1 slowest, level 2 the next slower, ..., the deepest
      level, which sees only near pairs, the fastest.
    * ``"interleaved"``: every level gets frequencies from the whole range, evenly spread: in the order of (k
      + 1/2) / n_l, k = 0 ... n_l - 1, over all levels, at a tie the deepest level first.
    * ``"per_level"``: every level has the whole range, theta_k = base^(-k/n_l).

    Within a level frequencies go from fast to slow. With one level the three are equal.

    Args:
        base: above 1. Default: 10000.
        split: default ``"low_far"``.
        scaling: for contexts longer than those of training. Default ``None``.

    Raises:
        ConfigError: the base is not a finite number above 1, or the split is unknown.

    Example:
        >>> rotary = Rotary.parse("interleaved,base=500000,ntk=4")
        >>> rotary.base, str(rotary.scaling)
        (500000.0, 'ntk=4')
        >>> rotary.build((16, 8, 8))(torch.randn(1, 4, 10, 32), torch.arange(10)).shape
        torch.Size([1, 4, 10, 32])

    Source: Su et al. 2021, "RoFormer", section 3.2; halves in place of neighbours are paired, as most open
    models do. The split among levels is ours.
    """

    base: float = _DEFAULT_BASE
    split: Split = "low_far"
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        check_number("the base of Rotary", self.base, above=1)
        object.__setattr__(self, "base", float(self.base))
        check_choice("rotary split", self.split, SPLITS)
        check_type(
            "scaling", self.scaling, RotaryScaling | None, "None or a RotaryScaling", "RotaryScaling.parse reads text"
        )

    @classmethod
    def parse(cls, text: str) -> Rotary:
        """Reads ``SPLIT[,base=B][,linear=S | ,ntk=S | ,yarn=S@LENGTH]``; ``Rotary.parse(str(r)) == r``.

        Raises:
            ConfigError: an unknown split or option, an option given twice, or as the class.
        """
        return text_forms.read(cls, text)

    def __str__(self) -> str:
        return text_forms.write(self)

    def frequencies(self, ranks: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        """The frequencies of each level, level 1 first, in radians per position, from fast to slow.

        Args:
            ranks: dimensions of each level, level 1 first.

        Returns:
            floor(r_l / 2) frequencies for level l; none for a level of rank 1.

        Raises:
            ConfigError: a rank is not a positive int.
        """
        pairs = [rank // 2 for rank in positive_ints(ranks, "ranks", _MOST_DIMS)]
        levels = range(len(pairs))
        if self.split == "per_level":
            return tuple(self._range(count) for count in pairs)
        if self.split == "low_far":
            owners = [level for level in reversed(levels) for _ in range(pairs[level])]
        else:
            order = sorted(((k + 0.5) / pairs[level], -level) for level in levels for k in range(pairs[level]))
            owners = [-negative for _, negative in order]
        handed = list(zip(owners, self._range(len(owners)), strict=True))
        return tuple(tuple(theta for owner, theta in handed if owner == level) for level in levels)

    def _range(self, count: int) -> tuple[float, ...]:
        """base^(-i/count), scaled."""
        plain = tuple(self.base ** (-i / count) for i in range(count))
        return plain if self.scaling is None else self.scaling.apply(plain)

    def build(self, ranks: Sequence[int]) -> RotaryEmbedding:
        """The module for levels of these ranks; a plain head is one level, ``(head_dim,)``. Errors as
        ``frequencies``.
        """
        return RotaryEmbedding(self, ranks)


class RotaryEmbedding(nn.Module):
    """Rotates queries or keys by their positions, every level with its own frequencies; see ``Rotary`` for
    the formula.

    Args:
        rotary: base, split and scaling.
        ranks: dimensions of each level, level 1 first; they sum to the head dimension D.

    Attributes:
        head_dim: D.
        frequencies: per level, in radians per position, level 1 first and fast to slow.
        turns, partners: (D,), int64, not in the state dict: the turn of each dimension per position, and its
            pair.

    Raises:
        ConfigError: a rank is not a positive int.

    Cost: no parameters; 3 D operations per head and position, and D sines and cosines per position, in
    float32 (float64 for float64); 16 D bytes of tables.
    """

    turns: Tensor
    partners: Tensor

    def __init__(self, rotary: Rotary, ranks: Sequence[int]) -> None:
        super().__init__()
        check_type("rotary", rotary, Rotary, "a Rotary", "Rotary.parse reads text")
        self.rotary = rotary
        self.ranks = positive_ints(ranks, "ranks", _MOST_DIMS)
        self.head_dim = sum(self.ranks)
        self.frequencies = rotary.frequencies(self.ranks)
        self._amplitude = 1.0 if rotary.scaling is None else rotary.scaling.amplitude
        turns: list[int] = []
        sizes: list[int] = []
        order: list[int] = []
        for rank, thetas in zip(self.ranks, self.frequencies, strict=True):
            # A turn of the circle is 2^64, so that int64 holds angles: sums and products drop whole turns by
            # overflow, no accuracy is lost at far positions, and no `.to(bfloat16)`, which casts all that
            # floats, can touch the table. The first of a pair turns backwards: the rotation is x cos +
            # partner sin with no table of signs.
            pairs = [round(theta / (2 * math.pi) * 2**64) for theta in thetas]
            rest = rank % 2
            turns += [-turn for turn in pairs] + pairs + [0] * rest
            if pairs:
                order += [len(sizes) + 1, len(sizes)]
                sizes += [len(pairs), len(pairs)]
            if rest:
                order.append(len(sizes))
                sizes.append(1)
        starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
        self._sizes, self._order = sizes, order
        self._turns = turns
        self._partners = [starts[span] + i for span in order for i in range(sizes[span])]
        self.register_buffer("turns", torch.tensor(self._turns), persistent=False)
        self.register_buffer("partners", torch.tensor(self._partners), persistent=False)

    def reset_parameters(self) -> None:
        """Makes the tables again, on their device. For code that gives a module of the meta device memory by
        its own means.
        """
        self._make_tables(self.turns.device)

    def _make_tables(self, device: torch.device) -> None:
        self.turns, self.partners = (torch.tensor(table, device=device) for table in (self._turns, self._partners))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # `to_empty` gives memory without content, and what is not in the state dict is not loaded afterwards
        # either.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.reset_parameters()
        return self

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotates.

        Args:
            x: queries or keys, (B, heads, T, D), float.
            positions: (T,) or (B, T), int; negative ones are allowed (padding).

        Returns:
            (B, heads, T, D), of the dtype of x.

        Raises:
            ShapeError: a shape or dtype does not fit.
        """
        check_tensor("x", x)
        check_tensor("positions", positions)
        if x.dim() != 4 or x.shape[-1] != self.head_dim or not x.is_floating_point() or x.element_size() == 1:
            raise ShapeError(
                f"x must be float (of 16, 32 or 64 bits) of shape (batch, heads, length, {self.head_dim}), the last "
                f"the sum of the ranks {'|'.join(map(str, self.ranks))}; got {x.dtype} of shape {tuple(x.shape)}"
            )
        batch, _, length, _ = x.shape
        # A batch is not compared with a length: an exported program would then refuse inputs where they are
        # equal.
        if positions.shape != ((batch, length) if positions.dim() == 2 else (length,)):
            raise ShapeError(
                f"positions must have shape ({length},) or ({batch}, {length}) for x of shape {tuple(x.shape)}, got "
                f"{tuple(positions.shape)}"
            )
        if self.turns.is_meta and not x.is_meta:  # `load_state_dict(..., assign=True)` does not give them memory
            self._make_tables(x.device)
        if x.device != positions.device or positions.device != self.turns.device:
            raise ShapeError(
                f"x, positions and this module need one device: they are on {x.device}, {positions.device} and "
                f"{self.turns.device}"
            )
        if positions.dtype not in INT_DTYPES:
            raise ShapeError(f"positions must be of an integer dtype, such as torch.int64; got {positions.dtype}")
        cos, sin = self._cos_sin(positions, torch.float64 if x.dtype == torch.float64 else torch.float32)
        return (x * cos + self._partner(x) * sin).to(x.dtype)

    def _cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, (T, D), or (B, 1, T, D) of positions (B, T)."""
        turned = positions.unsqueeze(-1) * self.turns
        angles = turned.to(dtype) * (2 * math.pi / 2**64)
        cos, sin = angles.cos(), angles.sin()
        if self._amplitude != 1.0:
            cos, sin = cos * self._amplitude, sin * self._amplitude
        return (cos, sin) if positions.dim() == 1 else (cos.unsqueeze(1), sin.unsqueeze(1))

    def _partner(self, x: Tensor) -> Tensor:
        """x with the two of every pair exchanged."""
        if x.shape[-2] == 1:  # decoding: one small operation counts, and the gather is that
            return x.index_select(-1, self.partners)
        # Long inputs: whole spans are copied, forwards and backwards, several times faster than a gather of
        # single numbers.
        spans = x.split(self._sizes, dim=-1)
        return torch.cat([spans[span] for span in self._order], dim=-1)

    def extra_repr(self) -> str:
        """The text form and the ranks, for ``repr``."""
        return f"{self.rotary}, ranks={'|'.join(map(str, self.ranks))}"
