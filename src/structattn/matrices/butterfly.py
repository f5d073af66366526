"""Butterfly: a product of many sparse stages, E log E parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import check_size, check_sizes
from structattn.errors import ConfigError
from structattn.grammar import positive
from structattn.matrices.block_term import TermFactors, one_block
from structattn.matrices.btt import stride_term
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.family import Family, TextValue
from structattn.matrices.feature_major import contiguous_features
from structattn.matrices.nearest import split_svd
from structattn.matrices.solver import Solver, Tick
from structattn.memory import check_memory

_LARGEST_PRIME = 7


def prime_factors(size: int) -> list[int]:
    """The prime factors in ascending order; empty for 1."""
    factors, divisor = [], 2
    while divisor * divisor <= size:
        while size % divisor == 0:
            factors.append(divisor)
            size //= divisor
        divisor += 1
    return [*factors, size] if size > 1 else factors


def _smooth_numbers(limit: int) -> list[int]:
    """All numbers up to a limit without a prime factor above the largest one, in no order; there are few."""
    numbers = [1]
    for prime in (2, 3, 5, _LARGEST_PRIME):
        for n in numbers:  # it grows
            if n * prime <= limit:
                numbers.append(n * prime)
    return numbers


def default_radices(num_rows: int, num_cols: int, owner: str = "Butterfly") -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Row and column radices of equal number: prime factors, with ones where the shorter list would narrow
    the product.

    Raises:
        ConfigError: a size has a prime factor above 7; the nearest sizes that work are named, for ``owner``.
    """
    for size in (num_rows, num_cols):
        if max(prime_factors(size), default=1) > _LARGEST_PRIME:
            candidates = _smooth_numbers(2 * size)
            low, high = max(n for n in candidates if n < size), min(n for n in candidates if n > size)
            raise ConfigError(
                f"{owner}: the prime factors of a size must be at most {_LARGEST_PRIME}, got {size} = "
                f"{' * '.join(map(str, prime_factors(size)))}; the nearest sizes that work are {low} and {high}"
                + (", or give row_radices and col_radices yourself" if owner == "Butterfly" else "")
            )
    rows, cols = prime_factors(num_rows) or [1], prime_factors(num_cols) or [1]
    # The innermost index is transformed first: let it grow there, and let the outermost one shrink last.
    rows = [1] * (len(cols) - len(rows)) + rows
    cols = cols + [1] * (len(rows) - len(cols))
    return tuple(rows), tuple(cols)


class Butterfly(FactoredMatrix):
    """A product of k stages; stage t mixes index t of the vector only, with a separate matrix for every value
    of the others.

    A vector of num_cols numbers has indices (i_1, ..., i_k), i_t < n_t; one of num_rows has (o_1, ..., o_k),
    o_t < m_t. Stage k acts first and stage 1 last; stage t turns i_t into o_t:

        y[i_1 .. i_{t-1}, o_t, o_{t+1} .. o_k] =
            sum over i_t of W_t[outer, inner, o_t, i_t] x[i_1 .. i_t, o_{t+1} .. o_k]

    with outer = (i_1 ... i_{t-1}), inner = (o_{t+1} ... o_k) flattened. With all radices 2 it is the
    butterfly matrix of Dao et al. 2019; two stages are a block tensor train. With ``rank`` s neighbouring
    stages exchange s channels: the element (o_t, channel) of a stage's output meets (i_{t-1}, channel) of the
    next, and the last stage ends, the first begins, with one.

    Args:
        num_rows, num_cols: shape of one matrix.
        rank: s. Default 1.
        row_radices: (m_1, ..., m_k) with product num_rows. Default: the prime factors, ascending.
        col_radices: (n_1, ..., n_k) with product num_cols, as many as row_radices (1 is allowed). Default:
            likewise.
        batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``. The right factor is the half of the
            stages that acts first.

    Attributes:
        left, right: stages 1 ... k // 2 and k // 2 + 1 ... k, each (*batch, outer, inner, m_t s, n_t s), s =
            1 at the two ends.

    Raises:
        ConfigError: radices do not fit the sizes, or by default a prime factor above 7; the nearest sizes
            that work are named.

    Cost: 2 E log2 E parameters for E a power of two (s = 1), twice that in FLOPs per vector.

    Source: Dao et al. 2019, Learning fast algorithms for linear transforms using butterfly factorizations; Li
    et al. 2015, Butterfly factorization, for rank s.
    """

    def __init__(
        self,
        num_rows: int,
        num_cols: int,
        rank: int = 1,
        *,
        row_radices: Sequence[int] | None = None,
        col_radices: Sequence[int] | None = None,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> None:
        super().__init__(
            num_rows, num_cols, batch_shape=batch_shape, right_batch_shape=right_batch_shape, rms_cap=rms_cap
        )
        check_size("Butterfly rank", rank)
        if (row_radices is None) != (col_radices is None):
            raise ConfigError("Butterfly: give row_radices and col_radices, or neither")
        if row_radices is None or col_radices is None:
            row_radices, col_radices = default_radices(num_rows, num_cols)
        rows = check_sizes("Butterfly row_radices", row_radices)
        cols = check_sizes("Butterfly col_radices", col_radices)
        if len(rows) != len(cols) or not rows or math.prod(rows) != num_rows or math.prod(cols) != num_cols:
            raise ConfigError(
                f"Butterfly: row_radices and col_radices must be equally many, with products {num_rows} and "
                f"{num_cols}, got {rows} and {cols}"
            )
        self.rank = rank
        self.row_radices, self.col_radices = rows, cols
        self.split = len(rows) // 2
        ranks = [1, *[rank] * (len(rows) - 1), 1]
        self._grid = [
            (math.prod(cols[:t]), math.prod(rows[t + 1 :]), rows[t] * ranks[t], cols[t] * ranks[t + 1])
            for t in range(len(rows))
        ]
        copies = math.prod(self.batch_shape)
        check_memory(
            f"the stages of a {num_rows} x {num_cols} Butterfly", copies * sum(math.prod(grid) for grid in self._grid)
        )
        self.left = nn.ParameterList(self._empty(*self.batch_shape, *grid) for grid in self._grid[: self.split])
        self.right = nn.ParameterList(self._empty(*self.right_batch_shape, *grid) for grid in self._grid[self.split :])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, fan_ins: Mapping[str, int] | None = None) -> None:
        """Draws orthogonal blocks, scaled to the mean square 1/fan-in that every structure starts from.

        A product of many independent normals has heavy tails; rotations keep the size of every vector.
        """
        for name, fan_in in self._checked(fan_ins).items():
            weight = self.get_parameter(name)
            height, width = weight.shape[-2:]
            tall = torch.randn(
                *weight.shape[:-2], max(height, width), min(height, width), dtype=weight.dtype, device=weight.device
            )
            if weight.device.type == "meta":
                continue
            q, r = torch.linalg.qr(tall.to(torch.promote_types(weight.dtype, torch.float32)))
            q = q * r.diagonal(dim1=-2, dim2=-1).sign()[..., None, :]
            q = q if height >= width else q.transpose(-2, -1)
            weight.copy_(q * math.sqrt(max(height, width) / fan_in))

    @property
    def num_stages(self) -> int:
        """k."""
        return len(self.row_radices)

    @property
    def stages(self) -> list[nn.Parameter]:
        """All stages, stage 1 first."""
        return [*self.left, *self.right]

    @property
    def options(self) -> dict[str, Any]:
        return {"rank": self.rank, "row_radices": self.row_radices, "col_radices": self.col_radices, **super().options}

    @property
    def factor_groups(self) -> list[list[nn.Parameter]]:
        return [[stage] for stage in self.stages]

    @property
    def product_fan_ins(self) -> dict[str, int]:
        """n_t s of every stage."""
        names = [f"left.{t}" for t in range(self.split)]
        names += [f"right.{t}" for t in range(self.num_stages - self.split)]
        return {name: grid[3] for name, grid in zip(names, self._grid, strict=True)}

    @property
    def feature_fan_ins(self) -> dict[str, int]:
        """n_t s of the right stages, m_t s of the left ones, which act transposed."""
        left = {f"left.{t}": self._grid[t][2] for t in range(self.split)}
        return {**self.product_fan_ins, **left}

    def used_stage(self, t: int) -> Tensor:
        """Stage t (0-based) as it is used, (P or P', outer, inner, m s, n s), capped."""
        return self._used(self.stages[t], -1)

    def _channels(self, t: int) -> tuple[int, int]:
        """Channels after and before stage t: its output side and its input side."""
        return self._grid[t][2] // self.row_radices[t], self._grid[t][3] // self.col_radices[t]

    def _forward_stages(self, x: Tensor, weights: Mapping[int, Tensor]) -> Tensor:
        """Stages hi ... lo (0-based, descending) on feature-major vectors in natural order, with channels
        innermost.

        Between the stages the indices are rotated: the next index leads and the product of a stage is one
        batched matrix product that reads it strided and writes contiguous memory, so no stage copies anything
        (constant geometry). The matrices of the batch come after the other indices.
        """
        hi, lo = max(weights), min(weights)
        tokens = x.shape[-1]
        channels = self._channels(hi)[1]
        untouched, touched = self.col_radices[: hi + 1], self.row_radices[hi + 1 :]
        # (p, i_1 .. i_hi, o_hi+1 .. o_k, ch, R) to (i_hi .. i_lo reversed, i_1 .. i_lo-1, p, o .., ch, R)
        turned, kept = untouched[lo:], math.prod(untouched[:lo])
        inner = math.prod(touched)
        x = contiguous_features(x).reshape(x.shape[0], kept, *turned, inner, channels, tokens)
        n = len(turned)
        x = x.permute(*range(n + 1, 1, -1), 1, 0, n + 2, n + 3, n + 4)
        outers = list(turned)  # sizes of i_lo .. i_t, not yet transformed
        done: list[int] = []  # sizes of o_t+1 .. o_hi in the order of time: o_hi first
        num = x.shape[n + 1]
        for t in range(hi, lo - 1, -1):
            weight = weights[t]  # (P, outer, inner, m s, n s)
            height, width = weight.shape[-2:]
            size = self.col_radices[t]
            outers.pop()
            ch_out, ch_in = self._channels(t)
            shared = num == 1 and weight.shape[0] > 1
            # memory: (i_t, [i_t-1 .. i_lo], kept, p, [inner], [o_hi .. o_t+1], ch, R)
            rest = math.prod(outers) * kept
            x = x.reshape(size, rest * num, inner * math.prod(done), ch_in, tokens)
            # weights follow: outer (kept, i_lo .. i_t-1) reversed, inner (o_t+1 .. o_hi, inner) with o_hi ..
            # reversed
            w = weight.reshape(weight.shape[0], kept, *outers, *done[::-1], inner, height, width)
            a, b = len(outers), len(done)
            w = w.permute(*range(a + 1, 1, -1), 1, 0, 2 + a + b, *range(1 + a + b, 1 + a, -1), 3 + a + b, 4 + a + b)
            if shared:
                # All matrices read the same vectors: their outputs are concatenated in one product.
                count = weight.shape[0]
                w = w.reshape(rest, count, inner * math.prod(done), height, width).transpose(1, 2)
                w = w.reshape(-1, count * height, width)
            else:
                w = w.reshape(-1, height, width)
            x = x.permute(1, 2, 0, 3, 4).reshape(w.shape[0], width, tokens)
            x = torch.bmm(w, x)
            if shared:
                num = weight.shape[0]
                x = x.reshape(rest, inner * math.prod(done), num, height, tokens).transpose(1, 2)
            done.append(self.row_radices[t])
            # (rest, p, inner, done.., o_t, ch, R): rest leads with i_t-1
        ch_out = self._channels(lo)[0]
        m = len(done)
        x = x.reshape(kept, num, inner, *done, ch_out, tokens)
        return x.permute(1, 0, *range(2 + m, 2, -1), 2, 3 + m, 4 + m).flatten(1, -2)

    def _backward_stages(self, x: Tensor, weights: Mapping[int, Tensor]) -> Tensor:
        """Transposed stages lo ... hi (ascending) on feature-major vectors in natural order; the mirror image
        of ``_forward_stages``.
        """
        lo, hi = min(weights), max(weights)
        tokens = x.shape[-1]
        num = x.shape[0]
        kept = math.prod(self.col_radices[:lo])
        inner = math.prod(self.row_radices[hi + 1 :])
        # (p, kept, o_lo .. o_hi, inner, ch, R) to (o_lo .. o_hi, inner, p, kept, ch, R)
        x = contiguous_features(x).reshape(
            num, kept, math.prod(self.row_radices[lo : hi + 1]) * inner, self._channels(lo)[0], tokens
        )
        x = x.permute(2, 0, 1, 3, 4)
        for t in range(lo, hi + 1):
            weight = weights[t]
            count, outer, rest, height, width = weight.shape
            ch_out, _ = self._channels(t)
            shared = num == 1 and count > 1
            # memory: (o_t, [o_t+1 .. inner], p, [kept, i_lo .. i_t-1], ch, R)
            x = x.reshape(self.row_radices[t], rest * num * outer, ch_out, tokens)
            x = x.transpose(0, 1).reshape(rest * num * outer, height, tokens)
            w = weight.permute(2, 1, 0, 4, 3) if shared else weight.permute(2, 0, 1, 4, 3)
            if shared:
                x = torch.bmm(w.reshape(rest * outer, count * width, height), x)
                num = count
                x = x.reshape(rest, outer, num, width, tokens).transpose(1, 2)
            else:
                x = torch.bmm(w.reshape(rest * num * outer, width, height), x)
        # (inner, p, kept, i_lo .. i_hi, ch, R)
        middle = math.prod(self.col_radices[: hi + 1])
        x = x.reshape(inner, num, middle, self._channels(hi)[1], tokens).permute(1, 2, 0, 3, 4)
        return x.flatten(1, -2)

    def _range(self, lo: int, hi: int) -> dict[int, Tensor]:
        return {t: self.used_stage(t) for t in range(lo, hi)}

    def _spread_range(self, lo: int, hi: int) -> dict[int, Tensor]:
        return {t: self._spread_right(w) for t, w in self._range(lo, hi).items()}

    def _left_features(self, x: Tensor) -> Tensor:
        if not self.split:
            return x.expand(self.num_matrices, -1, -1).clone()  # never a view of the caller's vectors
        return self._backward_stages(x, self._range(0, self.split))

    def _left_expand(self, u: Tensor) -> Tensor:
        return self._forward_stages(u, self._range(0, self.split)) if self.split else u

    def _right_features(self, y: Tensor) -> Tensor:
        return self._forward_stages(y, self._range(self.split, self.num_stages))

    def _right_expand(self, w: Tensor) -> Tensor:
        return self._backward_stages(w, self._spread_range(self.split, self.num_stages))

    def _matmul(self, x: Tensor) -> Tensor:
        if self.right_batch_shape != self.batch_shape:
            return super()._matmul(x)
        return self._forward_stages(x, self._range(0, self.num_stages))

    def _rmatmul(self, x: Tensor) -> Tensor:
        weights = {**self._range(0, self.split), **self._spread_range(self.split, self.num_stages)}
        return self._backward_stages(x, weights)

    @property
    def inner_dim(self) -> int:
        """The numbers between the two halves: n_1 ... n_{k // 2} s m_{k // 2 + 1} ... m_k."""
        middle = self.rank if 0 < self.split < self.num_stages else 1
        return math.prod(self.col_radices[: self.split]) * math.prod(self.row_radices[self.split :]) * middle

    @property
    def left_flops(self) -> int:
        """2 for every parameter of the left stages of one matrix."""
        return sum(2 * math.prod(grid) for grid in self._grid[: self.split])

    @property
    def right_flops(self) -> int:
        """2 for every parameter of the right stages of one matrix."""
        return sum(2 * math.prod(grid) for grid in self._grid[self.split :])

    @property
    def rank_bound(self) -> int:
        """The smallest number of values between any two stages, the ends included (see
        ``BlockTermSum.rank_bound``).
        """
        widths = [outer * inner * width for outer, inner, _, width in self._grid]
        return min(self.num_rows, *widths)

    def solver(self) -> Solver:
        is_one = self.num_stages <= 2  # one split, by an SVD
        method = "blockwise SVD" if is_one else "hierarchical factorisation"
        return Solver(self.factorize, method, is_optimal=is_one)

    def factorize(self, target: Tensor, tick: Tick | None = None) -> None:
        """Sets the stages by splitting them in two halves, again and again, with a blockwise SVD at each
        split.

        Two halves of a butterfly are a block tensor train of the same rank, whose nearest one is known
        (``nearest_term``), and each block of each half is a butterfly with fewer stages. A matrix that is a
        butterfly is found exactly; of any other, the first split is optimal and the later ones are optimal
        for what the earlier left them.

        Source: Le, Zheng, Riccietti and Gribonval 2022 for rank 1; Li et al. 2015 for higher ranks.
        """
        stages = _split_stages(target[None], self.row_radices, self.col_radices, self.rank, (1, 1))
        for stage, value in zip(self.stages, stages, strict=True):
            stage.copy_(value[0])

    @torch.no_grad()
    def block_terms(self) -> list[TermFactors]:
        """The halves of the stages, each fused: those before the split touch only the outer indices, the
        others the inner ones.

        So the fused right half is block diagonal in (i_1 ... i_split), the fused left half in (o_split+1 ...
        o_k): a BTT whose rank is that of the butterfly.
        """
        if not self.split:  # one stage: one dense block on the right
            right = (
                self.used_stage(0)[:, 0, 0]
                .transpose(1, 2)
                .reshape(*self.right_batch_shape, self.num_cols, self.num_rows)
            )
            eye = torch.eye(self.num_rows, dtype=right.dtype, device=right.device)
            return one_block(eye.expand(*self.batch_shape, self.num_rows, self.num_rows), right)
        a, b = math.prod(self.row_radices[: self.split]), math.prod(self.row_radices[self.split :])
        c, d = math.prod(self.col_radices[: self.split]), math.prod(self.col_radices[self.split :])
        s, inner = self.rank, self.inner_dim
        eye = torch.eye(inner, dtype=self.left[0].dtype, device=self.left[0].device)
        # Column (i_c, k', s) of the left half, for rows (i_a, i_b): only those with k' = i_b are not zero.
        left = self._left_expand(eye.expand(self.num_matrices, -1, -1)).reshape(-1, a, b, c, b, s)
        left = left.diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3).reshape(*self.batch_shape, b, a, c * s)
        # Row (k, i_b, s) of the right half, for columns (i_c, i_d): only those with i_c = k are not zero.
        eye = torch.eye(self.num_cols, dtype=eye.dtype, device=eye.device)
        right = self._right_features(eye[None]).reshape(-1, c, b, s, c, d)
        right = right.diagonal(dim1=1, dim2=4).permute(0, 4, 3, 1, 2).reshape(*self.right_batch_shape, c, d, b * s)
        return [TermFactors(term=stride_term(b, c, s), left=left, right=right)]


def _split_stages(
    blocks: Tensor, rows: Sequence[int], cols: Sequence[int], rank: int, channels: tuple[int, int]
) -> list[Tensor]:
    """Stages of every block: (G, rows * ch_out, cols * ch_in) to one (G, outer, inner, m ch, n ch) per
    radix.
    """
    if len(rows) == 1:
        return [blocks[:, None, None]]
    groups, (ch_out, ch_in), split = blocks.shape[0], channels, len(rows) // 2
    a, b = math.prod(rows[:split]), math.prod(rows[split:])
    c, d = math.prod(cols[:split]), math.prod(cols[split:])
    grid = blocks.reshape(groups, a, b, ch_out, c, d, ch_in).permute(0, 2, 4, 1, 3, 5, 6)
    u, v = split_svd(grid.reshape(groups, b, c, a * ch_out, d * ch_in), rank)
    left = u.transpose(2, 3).reshape(groups * b, a * ch_out, c * rank)
    right = v.permute(0, 2, 1, 4, 3).reshape(groups * c, b * rank, d * ch_in)
    first = [
        stage.unflatten(0, (groups, b)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        for stage in _split_stages(left, rows[:split], cols[:split], rank, (ch_out, rank))
    ]
    last = [
        stage.unflatten(0, (groups, c)).flatten(1, 2)
        for stage in _split_stages(right, rows[split:], cols[split:], rank, (rank, ch_in))
    ]
    return first + last


FAMILY = Family(
    Butterfly,
    "butterfly[:S]",
    "butterfly",
    "a butterfly matrix of rank S (1 by default), one stage per prime factor of the size",
    TextValue("rank", positive, is_optional=True),
)
