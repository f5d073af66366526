"""Small matrices that are written out before they multiply many vectors: the same numbers as by the factors,
and only where meant.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from structattn.matrices import (
    MLBTC,
    BlockTensorTrain,
    BlockTerm,
    Butterfly,
    Dense,
    FactoredMatrix,
    Kaleidoscope,
    Kronecker,
    LowRank,
    Monarch,
    MultiLevelLowRank,
    base,
)
from structattn.testing.tolerances import assert_close

MEMBERS = {
    "dense": Dense,
    "low rank": lambda r, c, **o: LowRank(r, c, 3, **o),
    "mlr": lambda r, c, **o: MultiLevelLowRank(r, c, (2, 1, 1), **o),
    "btt": lambda r, c, **o: BlockTensorTrain(r, c, 2, **o),
    "monarch": lambda r, c, **o: Monarch(r, c, num_blocks=(2, 4), **o),
    "kronecker": Kronecker,
    "kronecker, outer first": lambda r, c, **o: Kronecker(r, c, row_dims=(2, r // 2), col_dims=(c // 2, 2), **o),
    "butterfly": Butterfly,
    "kaleidoscope": lambda r, c, **o: Kaleidoscope(r, c, 2, **o),
    "mlbtc": lambda r, c, **o: MLBTC(r, c, (BlockTerm(left_blocks=2, right_blocks=4, inner_dim=8),), **o),
}


def products(m):
    """Every product of shared vectors, with the size of a vector."""
    found = {"matmul": (m.matmul, m.num_cols), "rmatmul": (m.rmatmul, m.num_rows)}
    if isinstance(m, FactoredMatrix):
        found["left_features"] = m.left_features, m.num_rows
        found["right_features"] = m.right_features, m.num_cols
        found["right_expand"] = m.right_expand, m.inner_dim
    return found


def results(product, x, cotangent, parameters):
    """The output, and the gradients of the vectors and of the factors that they meet."""
    out = product(x)
    gradients = torch.autograd.grad((out * cotangent).sum(), [x, *parameters], allow_unused=True)
    return [out, *(g for g in gradients if g is not None)]


@pytest.mark.quick(name=["low rank", "btt", "kronecker, outer first", "mlbtc"])
@pytest.mark.parametrize("name", MEMBERS)
@given(
    shape=st.sampled_from([(8, 8), (12, 8), (8, 20)]),
    batch=st.sampled_from([(), (3,), (2, 2)]),
    shares=st.booleans(),
    caps=st.booleans(),
    lead=st.sampled_from([(), (3,)]),
)
def test_both_ways_agree(name, shape, batch, shares, caps, lead) -> None:
    torch.manual_seed(0)
    make, options = MEMBERS[name], {"batch_shape": batch}
    if isinstance(make(*shape), FactoredMatrix):
        options |= {"rms_cap": caps} | ({"right_batch_shape": (*batch[:-1], 1)} if shares and batch else {})
    m = make(*shape, **options).double()
    for product, size in products(m).values():
        tokens = 4 * max(*shape, size) // 3 + 8
        full = (*lead, *(1,) * len(batch), tokens) if lead else (3 * tokens,)
        x = torch.randn(*full, size, dtype=torch.float64, requires_grad=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "MOST_ROWS_WRITTEN_OUT", 0)
            assert not m._is_written_out(x, size)
            by_factors = product(x)
            cotangent = torch.randn_like(by_factors)
            expected = results(product, x, cotangent, m.parameters())
        assert m._is_written_out(x, size) != isinstance(m, Dense)
        actual = results(product, x, cotangent, m.parameters())
        assert len(actual) == len(expected) >= 3
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, b, gradient=number > 0)


def test_second_derivatives() -> None:
    m = BlockTensorTrain(4, 4, batch_shape=(2,)).double()
    x = torch.randn(16, 4, dtype=torch.float64, requires_grad=True)
    assert m._is_written_out(x, 4)
    names = [name for name, _ in m.named_parameters()]

    def product(vectors, *values):
        return torch.func.functional_call(m, dict(zip(names, values, strict=True)), (vectors,))

    assert torch.autograd.gradgradcheck(product, (x, *m.parameters()))


def test_only_many_vectors_of_small_matrices_on_a_cpu() -> None:
    small, large = BlockTensorTrain(64, 64, batch_shape=(2,)), BlockTensorTrain(144, 64)
    many = torch.empty(4 * 64, 64)
    assert small._is_written_out(many, 64)
    assert not small._is_written_out(many[1:], 64)
    assert not large._is_written_out(many.expand(10, -1, -1), 64)
    assert not small._is_written_out(many.to("meta"), 64)
    with torch.autocast("cpu"):
        assert not small._is_written_out(many, 64)


def test_vectors_of_single_matrices_go_by_the_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    m = BlockTensorTrain(8, 8, batch_shape=(2,))
    shared, own = torch.randn(40, 8), torch.randn(2, 40, 8)
    calls = []
    factors = m._matmul
    monkeypatch.setattr(m, "_matmul", lambda x: calls.append(tuple(x.shape)) or factors(x))
    m.matmul(shared)
    m.matmul(own)
    assert calls == [(1, 8, 8), (2, 8, 40)]  # the identity, then the vectors themselves
