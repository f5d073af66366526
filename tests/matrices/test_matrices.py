"""Every structured matrix against a loop-written dense form, by the inherited test case."""

from typing import Any

import pytest
import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.matrices import BlockTensorTrain, Dense, LowRank, MultiLevelLowRank
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


class TestLowRank(MatrixCase):
    def make(self, num_rows, num_cols, **options):
        return LowRank(num_rows, num_cols, 3, **options)

    def dense(self, m):
        left, right = (w.reshape(-1, *w.shape[-2:]) for w in (m.left, m.right))

        def one(i):
            return sum(torch.outer(left[i, :, r], right[i, :, r]) for r in range(m.rank))

        return over_batch(m, one)


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


class TestBlockTensorTrainOfRank2(TestBlockTensorTrain):
    rank = 2


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


class TestDeepMultiLevelLowRank(TestMultiLevelLowRank):
    """Ranks above the block sides: the rank bound is not their sum."""

    shapes = ((16, 16), (8, 16))
    ranks = (1, 1, 3)


@pytest.mark.parametrize("kind", [LowRank, BlockTensorTrain])
def test_shared_right_factors_are_grouped_heads(kind: Any) -> None:
    """Matrices of one group use one right factor: the dense forms equal those with the factor repeated."""
    torch.manual_seed(1)
    grouped = kind(12, 8, 2, batch_shape=(2, 3), right_batch_shape=(2, 1)).double()
    full = kind(12, 8, 2, batch_shape=(2, 3)).double()
    with torch.no_grad():
        full.left.copy_(grouped.left)
        full.right.copy_(grouped.right.expand_as(full.right))
    torch.testing.assert_close(grouped.to_dense(), full.to_dense())
    for lead in ((), (5, 1, 1), (5, 2, 3), (2, 1)):
        x = torch.randn(*lead, 4, 12, dtype=torch.float64)
        y = torch.randn(*lead, 6, 8, dtype=torch.float64)
        torch.testing.assert_close(grouped.matmul(y), full.matmul(y))
        torch.testing.assert_close(grouped.rmatmul(x), full.rmatmul(x))
        torch.testing.assert_close(grouped.bilinear(x, y), full.bilinear(x, y))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(16, 16, 4, batch_shape=(2,), rms_cap=True),
        lambda: BlockTensorTrain(16, 16, 2, batch_shape=(2,), rms_cap=True),
        lambda: MultiLevelLowRank(16, 16, (2, 1), batch_shape=(2,), rms_cap=True),
    ],
)
def test_rms_cap_limits_large_factors_only(make: Any) -> None:
    """A factor below the cap is used as it is; a large one is used as if it had the cap's rms, matrix by matrix."""
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
        (lambda: LowRank(8, 8, 0), "positive"),
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
