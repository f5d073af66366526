"""Every structured matrix against a loop-written dense form, by the inherited test case."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.matrices import (
    MLBTC,
    BlockTensorTrain,
    BlockTerm,
    Butterfly,
    Dense,
    Kaleidoscope,
    Kronecker,
    LowRank,
    Monarch,
    MultiLevelLowRank,
)
from structattn.matrices.btt import factor_pair
from structattn.testing.matrix_case import MatrixCase


def over_batch(m: Any, one: Any) -> Tensor:
    """Stacks ``one(index)`` over the flattened batch."""
    parts = [one(i) for i in range(m.num_matrices)]
    return torch.stack(parts).reshape(*m.batch_shape, m.num_rows, m.num_cols)


class TestDense(MatrixCase):
    def make(self, num_rows, num_cols, **options):
        return Dense(num_rows, num_cols, **options)

    def dense(self, m):
        return m.weight

    def expected_params(self, m):
        return m.num_rows * m.num_cols


class TestLowRank(MatrixCase):
    def make(self, num_rows, num_cols, **options):
        return LowRank(num_rows, num_cols, 3, **options)

    def dense(self, m):
        left, right = (w.reshape(-1, *w.shape[-2:]) for w in (m.left, m.right))

        def one(i):
            return sum(torch.outer(left[i, :, r], right[i, :, r]) for r in range(m.rank))

        return over_batch(m, one)

    def expected_params(self, m):
        return 3 * (m.num_rows + m.num_cols)


class TestBlockTensorTrain(MatrixCase):
    shapes = ((12, 8), (8, 12), (16, 16), (6, 35), (7, 4))
    rank = 1

    def make(self, num_rows, num_cols, **options):
        return BlockTensorTrain(num_rows, num_cols, self.rank, **options)

    def dense(self, m):
        (a, b), (c, d), s = m.row_dims, m.col_dims, m.rank
        left, right = m.left.reshape(-1, b, a, c, s), m.right.reshape(-1, c, d, b, s)

        def one(i):
            out = torch.zeros(a * b, c * d, dtype=left.dtype)
            for row in range(a * b):
                for col in range(c * d):
                    i_a, i_b, i_c, i_d = row // b, row % b, col // d, col % d
                    value = sum(left[i, i_b, i_a, i_c, r] * right[i, i_c, i_d, i_b, r] for r in range(s))
                    out[row, col] = value
            return out

        return over_batch(m, one)

    def expected_params(self, m):
        (_, b), (c, _) = m.row_dims, m.col_dims
        return m.rank * (m.num_rows * c + m.num_cols * b)


@pytest.mark.full
class TestBlockTensorTrainOfRank2(TestBlockTensorTrain):
    rank = 2


class TestMonarch(MatrixCase):
    """Blocks of both factors placed in full matrices, the permutations as matrices of ones."""

    shapes = ((12, 8), (8, 12), (16, 16), (18, 10), (7, 4))

    def make(self, num_rows, num_cols, **options):
        blocks = (3, 2) if (num_rows, num_cols) == (18, 10) else None
        return Monarch(num_rows, num_cols, num_blocks=blocks, **options)

    def dense(self, m):
        b, c = m.num_blocks
        left = m.left.reshape(-1, b, m.num_rows // b, c)
        right = m.right.reshape(-1, c, m.num_cols // c, b)
        exchange = torch.zeros(b * c, c * b, dtype=left.dtype)
        back = torch.zeros(m.num_rows, m.num_rows, dtype=left.dtype)
        for i in range(b):
            for j in range(c):
                exchange[i * c + j, j * b + i] = 1
            for j in range(m.num_rows // b):
                back[j * b + i, i * (m.num_rows // b) + j] = 1

        def one(i):
            return back @ torch.block_diag(*left[i]) @ exchange @ torch.block_diag(*(r.T for r in right[i]))

        return over_batch(m, one)

    def expected_params(self, m):
        b, c = m.num_blocks
        return m.num_rows * c + m.num_cols * b


class TestKronecker(MatrixCase):
    shapes = ((12, 8), (8, 12), (16, 16), (6, 35), (7, 4), (5, 7))
    dims = None

    def make(self, num_rows, num_cols, **options):
        if self.dims is not None:
            options |= self.dims
        return Kronecker(num_rows, num_cols, **options)

    def dense(self, m):
        (a, b), (c, d) = m.row_dims, m.col_dims
        outer, inner = m.outer.reshape(-1, a, c), m.inner.reshape(-1, b, d)

        def one(i):
            out = torch.zeros(a * b, c * d, dtype=outer.dtype)
            for i_a in range(a):
                for i_c in range(c):
                    out[i_a * b : (i_a + 1) * b, i_c * d : (i_c + 1) * d] = outer[i, i_a, i_c] * inner[i]
            return out

        return over_batch(m, one)

    def expected_params(self, m):
        (a, b), (c, d) = m.row_dims, m.col_dims
        return a * c + b * d


@pytest.mark.full
class TestKroneckerWithTheOuterFactorFirst(TestKronecker):
    shapes = ((12, 18),)
    dims: Any = {"row_dims": (2, 6), "col_dims": (9, 2)}  # noqa: RUF012

    def test_which_factor_acts_first(self):
        m = self.make(12, 18)
        assert not m.inner_first
        assert m.flops == 2 * (2 * 9 * 2 + 2 * 2 * 6)
        assert Kronecker(12, 18, row_dims=(6, 2), col_dims=(2, 9)).inner_first


class TestButterfly(MatrixCase):
    """Every stage written out as a full matrix, entry by entry."""

    shapes = ((16, 16), (12, 8), (8, 12), (10, 21), (5, 5), (1, 6))
    rank = 1

    def make(self, num_rows, num_cols, **options):
        return Butterfly(num_rows, num_cols, self.rank, **options)

    def dense(self, m):
        k, s = m.num_stages, m.rank

        def stage(t, weight):
            outer, inner, height, width = weight.shape
            ch_out, ch_in = (1 if t == 0 else s), (1 if t == k - 1 else s)
            rows, cols = height // ch_out, width // ch_in
            out = torch.zeros(outer * rows * inner * ch_out, outer * cols * inner * ch_in, dtype=weight.dtype)
            for o in range(outer):
                for i in range(inner):
                    for h in range(height):
                        for w in range(width):
                            row = ((o * rows + h // ch_out) * inner + i) * ch_out + h % ch_out
                            col = ((o * cols + w // ch_in) * inner + i) * ch_in + w % ch_in
                            out[row, col] = weight[o, i, h, w]
            return out

        def one(i):
            out = torch.eye(m.num_cols, dtype=torch.float64)
            for t in reversed(range(k)):
                out = stage(t, m.stages[t].reshape(-1, *m.stages[t].shape[-4:])[i].to(out.dtype)) @ out
            return out

        return over_batch(m, one)

    def expected_params(self, m):
        if m.num_rows == m.num_cols == 16:
            inside = {1: 2 * 16 * 4, 2: 16 * 2 * (2 + 4 + 4 + 2)}
            return inside[m.rank]
        return sum(math.prod(stage.shape) for stage in m.stages)


@pytest.mark.full
class TestButterflyOfRank2(TestButterfly):
    rank = 2


class TestButterflyOfGivenRadices(TestButterfly):
    shapes = ((24, 30),)
    rank = 3

    def make(self, num_rows, num_cols, **options):
        return Butterfly(num_rows, num_cols, self.rank, row_radices=(4, 1, 6), col_radices=(2, 5, 3), **options)


class TestKaleidoscope(MatrixCase):
    shapes = ((8, 8), (12, 8), (6, 10))
    width = 1

    def make(self, num_rows, num_cols, **options):
        return Kaleidoscope(num_rows, num_cols, self.width, **options)

    def dense(self, m):
        case = TestButterfly()
        out = None
        for index, butterfly in enumerate(m.butterflies):
            factor = case.dense(butterfly)
            factor = factor if index % 2 == 0 else factor.transpose(-2, -1)
            out = factor if out is None else out @ factor
        return out

    def expected_params(self, m):
        if (m.num_rows, m.num_cols) == (8, 8):
            return m.width * 2 * (2 * 8 * 3)
        return sum(butterfly.num_params for butterfly in m.butterflies)


@pytest.mark.full
class TestWideKaleidoscope(TestKaleidoscope):
    width = 2


def mixed_terms(num_rows, num_cols):
    """Different blocks, inner dimensions and permutations, with free indices on both sides."""
    generator = torch.Generator().manual_seed(3)
    rows = tuple(torch.randperm(num_rows, generator=generator).tolist())
    inner = tuple(torch.randperm(8, generator=generator).tolist())
    return (
        BlockTerm(left_blocks=1, right_blocks=1, inner_dim=2),
        BlockTerm(left_blocks=2, right_blocks=4, inner_dim=8, left_permutation="stride", right_permutation="stride"),
        BlockTerm(left_blocks=4, right_blocks=2, inner_dim=8, left_permutation=rows, right_permutation=inner),
        BlockTerm(left_blocks=2, right_blocks=2, inner_dim=4, right_permutation="stride"),
        BlockTerm(left_blocks=4, right_blocks=1, inner_dim=4, left_permutation="stride"),
    )


class TestMLBTC(MatrixCase):
    """All permutations as matrices of ones, all factors as full matrices."""

    shapes = ((12, 8), (8, 12), (16, 16))

    def terms(self, num_rows, num_cols):
        return mixed_terms(num_rows, num_cols)

    def make(self, num_rows, num_cols, **options):
        m = MLBTC(num_rows, num_cols, self.terms(num_rows, num_cols), **options)
        with torch.no_grad():
            m.alpha.normal_()
        return m

    def permutation(self, kind, n, blocks, groups):
        out = torch.zeros(n, n, dtype=torch.float64)
        for i in range(n):
            if kind == "identity":
                source = i
            elif kind == "stride" and groups is None:  # rows: (i_a, i_b) is (i_b, i_a) of the blocks
                source = i % blocks * (n // blocks) + i // blocks
            elif kind == "stride":  # features: (k', k, s) is (k, k', s) of the right blocks
                s = n // (blocks * groups)
                source = (i // s % groups) * blocks * s + i // (s * groups) * s + i % s
            else:
                source = kind[i]
            out[i, source] = 1
        return out

    def dense(self, m):
        def one(i):
            out = torch.zeros(m.num_rows, m.num_cols, dtype=torch.float64)
            for level, term in enumerate(m.terms):
                b, c = term.left_blocks, term.right_blocks
                left = m.left[level].reshape(-1, *m.left[level].shape[-3:])[i]
                right = m.right[level].reshape(-1, *m.right[level].shape[-3:])[i]
                outer = self.permutation(term.left_permutation, m.num_rows, b, None)
                inner = self.permutation(term.right_permutation, term.inner_dim, b, c)
                product = outer @ torch.block_diag(*left) @ inner @ torch.block_diag(*(r.T for r in right))
                out = out + m.alpha.reshape(-1, len(m.terms))[i, level] * product
            return out

        return over_batch(m, one)

    def expected_params(self, m):
        inner = [t.inner_dim * (m.num_rows // t.left_blocks + m.num_cols // t.right_blocks) for t in m.terms]
        return sum(inner) + len(inner)


@pytest.mark.full
class TestMLBTCOfOneTerm(TestMLBTC):
    """One term with free permutations: the rank is below the size."""

    def terms(self, num_rows, num_cols):
        return mixed_terms(num_rows, num_cols)[2:3]


class TestMultiLevelLowRank(MatrixCase):
    shapes = ((12, 8), (8, 12), (16, 16))
    ranks: tuple[int, ...] = (2, 1, 1)

    def make(self, num_rows, num_cols, **options):
        return MultiLevelLowRank(num_rows, num_cols, self.ranks, **options)

    def dense(self, m):
        def one(i):
            out = torch.zeros(m.num_rows, m.num_cols, dtype=m.left[0].dtype)
            for left, right, p in zip(m.left, m.right, m.num_blocks, strict=True):
                flat_left = left.reshape(-1, *left.shape[-3:])
                flat_right = right.reshape(-1, *right.shape[-3:])
                rows, cols = m.num_rows // p, m.num_cols // p
                for k in range(p):
                    block = torch.zeros_like(out)
                    block[k * rows : (k + 1) * rows, k * cols : (k + 1) * cols] = flat_left[i, k] @ flat_right[i, k].T
                    out = out + block
            return out

        return over_batch(m, one)

    def expected_params(self, m):
        return (m.num_rows + m.num_cols) * sum(self.ranks)


@pytest.mark.full
class TestDeepMultiLevelLowRank(TestMultiLevelLowRank):
    """Ranks above the block sides: the rank bound is not their sum."""

    shapes = ((16, 16), (8, 16))
    ranks = (1, 1, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(16, 16, 4, batch_shape=(2,), rms_cap=True),
        lambda: BlockTensorTrain(16, 16, 2, batch_shape=(2,), rms_cap=True),
        lambda: MultiLevelLowRank(16, 16, (2, 1), batch_shape=(2,), rms_cap=True),
        lambda: Kronecker(16, 16, batch_shape=(2,), rms_cap=True),
        lambda: Butterfly(16, 16, batch_shape=(2,), rms_cap=True),
    ],
)
def test_rms_cap_limits_large_factors_only(make: Any) -> None:
    """A factor below the cap is used as it is; a large one is used as if it had the cap's rms, matrix by
    matrix.
    """
    m = make()
    free = make()
    free.rms_cap = False
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1e-2)
        free.load_state_dict(m.state_dict())
        torch.testing.assert_close(m.to_dense(), free.to_dense())
        for p in m.parameters():
            p[0] *= 1e5
        large = m.to_dense()
        for p in m.parameters():
            p[0] *= 10
        torch.testing.assert_close(m.to_dense(), large)


def test_factor_pair_is_closest_to_the_square_root() -> None:
    assert [factor_pair(n) for n in (64, 128, 96, 7, 1)] == [(8, 8), (8, 16), (8, 12), (1, 7), (1, 1)]


def test_btt_is_full_rank_at_widths_that_are_no_squares() -> None:
    for width in (32, 96, 128, 768):
        assert BlockTensorTrain(width, width).rank_bound == width


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LowRank(8, 8, 0), "at least 1"),
        (lambda: LowRank(8, -8, 2), "-8"),
        (lambda: MultiLevelLowRank(12, 12, (1, 1, 1, 1)), "level 4: 8 blocks must divide"),
        (lambda: MultiLevelLowRank(12, 12, ()), "ranks"),
        (lambda: MultiLevelLowRank(12, 12, (1, 0)), "level 2"),
        (lambda: BlockTensorTrain(12, 12, row_dims=(5, 2)), "product 12"),
        (lambda: LowRank(8, 8, 2, batch_shape=(4,), right_batch_shape=(3,)), "broadcast"),
    ],
)
def test_bad_structures_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_kaleidoscope_draws_the_factors_that_are_named() -> None:
    m = Kaleidoscope(8, 8, 1)
    before, name = {key: x.clone() for key, x in m.state_dict().items()}, next(iter(m.product_fan_ins))
    m.reset_parameters({name: 2})
    assert [key for key, x in m.state_dict().items() if not torch.equal(x, before[key])] == [name]
