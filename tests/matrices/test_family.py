"""The family map: every reduction that docs/family.md draws is an equality here, and what is no reduction is
an error.
"""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
from structattn.testing.tolerances import COMPUTED, FORWARD, ROUNDING

MEMBERS = {
    "dense": Dense,
    "low rank": lambda r, c, **o: LowRank(r, c, 3, **o),
    "mlr": lambda r, c, **o: MultiLevelLowRank(r, c, (2, 1, 1), **o),
    "mlr, free blocks": lambda r, c, **o: MultiLevelLowRank(r, c, (2, 5), num_blocks=(4, 2), **o),
    "btt": lambda r, c, **o: BlockTensorTrain(r, c, 2, **o),
    "monarch": lambda r, c, **o: Monarch(r, c, num_blocks=(2, 4), **o),
    "kronecker": Kronecker,
    "kronecker, outer first": lambda r, c, **o: Kronecker(r, c, row_dims=(2, r // 2), col_dims=(c // 2, 2), **o),
    "butterfly": Butterfly,
    "butterfly of rank 2": lambda r, c, **o: Butterfly(r, c, 2, **o),
    "butterfly of one stage": lambda r, c, **o: Butterfly(r, c, row_radices=(r,), col_radices=(c,), **o),
    "kaleidoscope of a narrow inside": lambda r, c, **o: Kaleidoscope(r, c, inner_size=2, **o),
    "wide kaleidoscope of a narrow inside": lambda r, c, **o: Kaleidoscope(r, c, 2, inner_size=2, **o),
    "mlbtc": lambda r, c, **o: MLBTC(r, c, (BlockTerm(left_blocks=2, right_blocks=4, inner_dim=8),), **o),
}


def difference(a, b):
    return float((a - b).detach().abs().max())


@pytest.mark.parametrize("shape", [(16, 16), (12, 8), (8, 20)], ids=str)
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("name", MEMBERS)
def test_mlbtc_contains_the_family(name, shape, batch) -> None:
    m = MEMBERS[name](*shape, batch_shape=batch).double()
    copied = MLBTC.from_matrix(m)
    assert difference(copied.to_dense(), m.to_dense()) < COMPUTED
    assert copied.batch_shape == m.batch_shape
    y = torch.randn(*batch, 5, shape[1], dtype=torch.float64)
    assert difference(copied.matmul(y), m.matmul(y)) < FORWARD[torch.float64]
    assert all(p.grad_fn is None and p.requires_grad for p in copied.parameters())


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("shape", [(7, 7), (7, 5), (3, 5)], ids=str)
def test_a_kaleidoscope_of_prime_sizes_has_one_stage_and_is_one_block(shape, width) -> None:
    m = Kaleidoscope(*shape, width, batch_shape=(2,)).double()
    assert difference(MLBTC.from_matrix(m).to_dense(), m.to_dense()) < COMPUTED


@pytest.mark.parametrize("name", ["low rank", "mlr", "btt", "kronecker", "kronecker, outer first", "butterfly"])
def test_shared_right_factors_and_caps_are_kept(name) -> None:
    m = MEMBERS[name](12, 8, batch_shape=(2, 3), right_batch_shape=(2, 1), rms_cap=True).double()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(9)
    copied = MLBTC.from_matrix(m)
    assert difference(copied.to_dense(), m.to_dense()) < FORWARD[torch.float64]
    # A Kronecker product that applies A first shares A, which becomes the left factors of the term.
    outer_shared = isinstance(m, Kronecker) and not m.inner_first
    assert copied.right[0].shape[:2] == ((2, 3) if outer_shared else (2, 1))


@pytest.mark.parametrize("name", sorted(set(MEMBERS) - {"dense"}))
def test_right_factors_expand_vectors_that_all_matrices_share(name) -> None:
    m = MEMBERS[name](12, 8, batch_shape=(2, 3), right_batch_shape=(2, 1)).double()
    w = torch.randn(5, m.inner_dim, dtype=torch.float64)
    out = m.right_expand(w)
    assert out.shape == (2, 3, 5, 8)
    assert difference(out, m.right_expand(w.expand(2, 3, 5, m.inner_dim))) < COMPUTED
    y = torch.randn(8, dtype=torch.float64)
    assert difference(out @ y, (w @ m.right_features(y[None]).transpose(-2, -1))[..., 0].expand(2, 3, 5)) < COMPUTED


def test_the_copy_is_independent() -> None:
    m = LowRank(8, 8, 2)
    before = m.to_dense().clone()
    with torch.no_grad():
        for p in MLBTC.from_matrix(m).parameters():
            p.zero_()
    assert torch.equal(m.to_dense(), before)


@pytest.mark.parametrize("width", [1, 2])
def test_a_kaleidoscope_of_several_stages_is_refused_with_the_condition(width) -> None:
    with pytest.raises(ConfigError, match="only if its butterflies have one stage"):
        MLBTC.from_matrix(Kaleidoscope(16, 16, width))


def test_the_condition_is_necessary() -> None:
    """A term with fewer parameters than a dense matrix would make some blocks rank deficient; random
    Kaleidoscopes have none.
    """
    torch.manual_seed(0)
    dense = Kaleidoscope(16, 16).double().to_dense()
    for b, c in ((2, 8), (4, 4), (8, 2)):
        blocks = dense.reshape(16 // b, b, c, 16 // c).permute(1, 2, 0, 3)
        assert bool((torch.linalg.matrix_rank(blocks) == min(16 // b, 16 // c)).all())
    butterfly = Butterfly(16, 16).double().to_dense()
    blocks = butterfly.reshape(4, 4, 4, 4).permute(1, 2, 0, 3)
    assert bool((torch.linalg.matrix_rank(blocks) == 1).all())


def test_unknown_structures_are_refused() -> None:
    class Own(Dense):
        pass

    assert MLBTC.from_matrix(Own(4, 4)).num_rows == 4  # a subclass is its parent

    from structattn.matrices import StructuredMatrix

    class Foreign(StructuredMatrix):
        flops = rank_bound = 0
        product_fan_ins = options = {}  # noqa: RUF012
        factor_groups = ()

        def _matmul(self, x):
            return x

        _rmatmul = _matmul

    with pytest.raises(ConfigError, match="Foreign"):
        MLBTC.from_matrix(Foreign(4, 4))


def test_one_level_mlr_is_low_rank() -> None:
    mlr, low_rank = MultiLevelLowRank(12, 8, (3,)).double(), LowRank(12, 8, 3).double()
    with torch.no_grad():
        low_rank.left.copy_(mlr.left[0][0])
        low_rank.right.copy_(mlr.right[0][0])
    assert difference(mlr.to_dense(), low_rank.to_dense()) < ROUNDING


def test_low_rank_is_btt_with_one_block() -> None:
    btt, low_rank = BlockTensorTrain(12, 8, 3, row_dims=(12, 1), col_dims=(1, 8)).double(), LowRank(12, 8, 3).double()
    with torch.no_grad():
        low_rank.left.copy_(btt.left[0])
        low_rank.right.copy_(btt.right[0])
    assert difference(btt.to_dense(), low_rank.to_dense()) < ROUNDING


@pytest.mark.parametrize("name", [name for name in MEMBERS if name != "dense"])
def test_feature_fan_ins_are_those_of_the_features(name) -> None:
    """With factors of variance 1/fan-in on both sides, both features of vectors of variance 1 have variance
    1.
    """
    torch.manual_seed(0)
    m = MEMBERS[name](64, 128, batch_shape=(20,)).double()
    m.reset_parameters(m.feature_fan_ins)
    assert set(m.feature_fan_ins) == set(m.product_fan_ins)
    for features, size in ((m.left_features, 64), (m.right_features, 128)):
        variance = float(features(torch.randn(100, size, dtype=torch.float64)).detach().square().mean())
        assert 0.6 < variance < 1.5


def test_monarch_is_btt_of_rank_1_and_a_butterfly_of_two_stages() -> None:
    monarch = Monarch(12, 20, num_blocks=(3, 5)).double()
    btt = BlockTensorTrain(12, 20, 1, row_dims=(4, 3), col_dims=(5, 4)).double()
    butterfly = Butterfly(12, 20, row_radices=(4, 3), col_radices=(5, 4)).double()
    btt.load_state_dict(monarch.state_dict())
    with torch.no_grad():
        butterfly.left[0].copy_(monarch.left.reshape(1, 3, 4, 5))
        butterfly.right[0].copy_(monarch.right.transpose(1, 2).reshape(5, 1, 3, 4))
    assert difference(btt.to_dense(), monarch.to_dense()) == 0
    assert difference(butterfly.to_dense(), monarch.to_dense()) < ROUNDING


def test_btt_of_rank_s_is_a_butterfly_of_two_stages_of_rank_s() -> None:
    btt = BlockTensorTrain(12, 20, 3, row_dims=(4, 3), col_dims=(5, 4)).double()
    butterfly = Butterfly(12, 20, 3, row_radices=(4, 3), col_radices=(5, 4)).double()
    with torch.no_grad():
        butterfly.left[0].copy_(btt.left.reshape(1, 3, 4, 15))
        butterfly.right[0].copy_(btt.right.transpose(1, 2).reshape(5, 1, 9, 4))
    assert difference(butterfly.to_dense(), btt.to_dense()) < ROUNDING


def test_kronecker_is_torch_kron_and_a_tied_butterfly() -> None:
    m = Kronecker(12, 20, row_dims=(4, 3), col_dims=(5, 4)).double()
    assert difference(m.to_dense(), torch.kron(m.outer, m.inner)) < ROUNDING
    butterfly = Butterfly(12, 20, row_radices=(4, 3), col_radices=(5, 4)).double()
    with torch.no_grad():
        butterfly.left[0].copy_(m.outer.expand_as(butterfly.left[0]))
        butterfly.right[0].copy_(m.inner.expand_as(butterfly.right[0]))
    assert difference(butterfly.to_dense(), m.to_dense()) < ROUNDING


def test_a_butterfly_whose_second_factor_is_the_identity_is_a_kaleidoscope() -> None:
    kaleidoscope, butterfly = Kaleidoscope(8, 8).double(), Butterfly(8, 8).double()
    kaleidoscope.left[0].load_state_dict(butterfly.state_dict())
    with torch.no_grad():
        for stage in kaleidoscope.right.stages:
            stage.copy_(torch.eye(2, dtype=torch.float64).expand_as(stage))
    assert difference(kaleidoscope.to_dense(), butterfly.to_dense()) < ROUNDING


def test_butterflies_are_the_fast_transforms() -> None:
    """The Hadamard matrix is a butterfly with every stage [[1, 1], [1, -1]]."""
    m = Butterfly(8, 8).double()
    with torch.no_grad():
        for stage in m.stages:
            stage.copy_(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).expand_as(stage))
    h = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    assert difference(m.to_dense(), torch.kron(h, torch.kron(h, h))) < ROUNDING


@given(st.data())
def test_random_terms_keep_the_contract(data) -> None:
    """Any terms on any sizes: products agree with the dense form, ranks and counts with the formulas."""
    rows = data.draw(st.sampled_from([1, 4, 6, 12, 15]))
    cols = data.draw(st.sampled_from([1, 4, 6, 12, 14]))
    terms = []
    for _ in range(data.draw(st.integers(1, 3))):
        b = data.draw(st.sampled_from([d for d in range(1, rows + 1) if rows % d == 0]))
        c = data.draw(st.sampled_from([d for d in range(1, cols + 1) if cols % d == 0]))
        inner = b * c * data.draw(st.integers(1, 2))
        kinds = st.sampled_from(["identity", "stride", "free"])
        left, right = data.draw(kinds), data.draw(kinds)
        terms.append(
            BlockTerm(
                left_blocks=b,
                right_blocks=c,
                inner_dim=inner,
                left_permutation=tuple(data.draw(st.permutations(range(rows)))) if left == "free" else left,
                right_permutation=tuple(data.draw(st.permutations(range(inner)))) if right == "free" else right,
            )
        )
    torch.manual_seed(data.draw(st.integers(0, 99)))
    m = MLBTC(rows, cols, tuple(terms)).double()
    d = m.to_dense()
    x, y = torch.randn(3, rows, dtype=torch.float64), torch.randn(2, cols, dtype=torch.float64)
    scale = float(d.detach().abs().max()) * rows * cols + 1
    assert difference(m.rmatmul(x), x @ d) < COMPUTED * scale
    assert difference(m.left_features(x) @ m.right_features(y).T, x @ d @ y.T) < FORWARD[torch.float64] * scale
    assert int(torch.linalg.matrix_rank(d)) == m.rank_bound
    assert difference(MLBTC.from_matrix(copy.deepcopy(m)).to_dense(), d) < COMPUTED * scale
