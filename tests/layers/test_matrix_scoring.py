"""``scoring.Matrix``: any family as a score, against the dense bilinear form."""

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.matrices import FAMILIES, BlockTensorTrain, Butterfly, Dense, FactoredMatrix, Monarch, Structure
from structattn.spec.attention import parse_spec
from structattn.testing.tolerances import assert_close

TEXTS = [
    "dense",
    "lowrank:3",
    "mlr:2|1|1",
    "btt:2",
    "kronecker",
    "monarch",
    "monarch:2x4",
    "butterfly",
    "butterfly:2",
    "kaleidoscope",
    "mlbtc:1x1x2|4x4x16s",
]


def dense_heads(attention):
    """M of every query head, (H, E, E)."""
    matrix = attention.scoring.matrix
    return matrix.to_dense().reshape(attention.num_heads, matrix.num_rows, matrix.num_cols)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("lengths", [(5, 5), (1, 30), (2, 3)], ids=str)
def test_scores_are_the_bilinear_form(text, kv_heads, lengths) -> None:
    """Without norms, in whatever order the counting chose, scores are x^T M_h x' / sqrt(E)."""
    torch.manual_seed(0)
    queries, keys = lengths
    attention = sa.Attention(16, 4, kv_heads, scoring=sa.scoring.Matrix(matrix=text), qk_norm=False).double()
    x, context = torch.randn(2, queries, 16).double(), torch.randn(2, keys, 16).double()
    q, k, _, scale = attention.project(x, context)
    k = k.repeat_interleave(4 // k.shape[1], dim=1)
    expected = torch.einsum("bti,hij,bsj->bhts", x, dense_heads(attention), context) / 16**0.5
    assert_close(q @ k.transpose(-2, -1) * scale, expected)
    costs = attention.scoring.matrix.contraction(queries, keys)
    assert attention.cost(queries, keys).contraction == costs.order
    assert costs.flops == min(costs.alternatives.values())
    assert set(costs.alternatives) >= {"formed_left", "formed_right"}


def test_heads_share_their_keys_where_that_costs_as_much() -> None:
    """A block tensor train of a square size: its factored form would have keys of their own for every
    head.
    """
    attention = sa.Attention(16, 4, scoring=sa.scoring.Matrix(matrix="btt:1"), qk_norm=False)
    costs = attention.scoring.matrix.contraction(6, 6)
    assert costs.alternatives["factored"] == costs.alternatives["formed_left"]
    assert costs.order == "formed_left"
    assert attention.project(torch.randn(1, 6, 16))[1].stride(1) == 0


@pytest.mark.parametrize("text", TEXTS)
def test_norms_and_layouts_use_the_formed_key(text) -> None:
    attention = sa.Attention(16, 2, scoring=sa.scoring.Matrix(matrix=text), bias=True).double()
    x = torch.randn(3, 6, 16).double()
    q, k, _, scale = attention.project(x)
    norm = torch.nn.functional.layer_norm
    keys = torch.einsum("hij,bsj->bhsi", dense_heads(attention), x)
    assert_close(q, norm(x, (16,))[:, None].expand(-1, 2, -1, -1))
    assert_close(k, norm(keys, (16,)))
    assert scale == 0.25
    layout = sa.LevelLayout.halving((8, 8), 6)
    out = sa.Attention(16, 2, scoring=sa.scoring.Matrix(matrix=text), layout=layout)(x.float())
    out.sum().backward()
    assert out.shape == x.shape


@pytest.mark.parametrize("text", TEXTS)
def test_text_forms_of_specs(text) -> None:
    family = text.partition(":")[0]
    if family in ("btt", "mlr"):
        return  # these two have scorings of their own
    spec = parse_spec(f"bilinear-{text},scaling=mup+window:4")
    assert spec.scoring == sa.scoring.Matrix(matrix=Structure.parse(text), scaling="mup")
    assert parse_spec(str(spec)) == spec
    layer = sa.Attention.from_spec(spec, embed_dim=16, num_heads=4, context_length=8)
    assert layer(torch.randn(1, 8, 16)).isfinite().all()


def test_every_family_has_a_spec() -> None:
    from structattn.spec.attention import FORMS

    assert {f"bilinear-{name}" for name in FAMILIES} <= set(FORMS)


@pytest.mark.parametrize("make", [Dense, BlockTensorTrain, Butterfly, Monarch], ids=lambda kind: kind.__name__)
def test_a_matrix_of_ones_own_is_copied_to_every_head(make) -> None:
    one = make(16, 16)
    attention = sa.Attention(16, 4, 2, scoring=sa.scoring.Matrix(matrix=one))
    for head in dense_heads(attention):
        assert_close(head, one.to_dense())
    many = make(16, 16, batch_shape=(4,))
    attention = sa.Attention(16, 4, 2, scoring=sa.scoring.Matrix(matrix=many))
    assert_close(dense_heads(attention), many.to_dense())
    with torch.no_grad():
        for p in attention.parameters():
            p.zero_()
    assert float(many.to_dense().detach().abs().sum()) > 0


def test_key_heads_share_right_factors() -> None:
    shared = sa.Attention(16, 4, 2, scoring=sa.scoring.Matrix(matrix="monarch"))
    assert isinstance(shared.scoring.matrix, FactoredMatrix)
    assert shared.scoring.matrix.right.shape[:2] == (2, 1)
    assert shared.scoring.matrix.left.shape[:2] == (2, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.scoring.Matrix(matrix="monarchy"), "did you mean 'monarch'"),
        (lambda: sa.scoring.Matrix(matrix="lowrank"), "lowrank:R"),
        (lambda: sa.scoring.Matrix(matrix="lowrank:0"), "positive"),
        (lambda: sa.scoring.Matrix(matrix="monarch:4"), "16x16"),
        (lambda: sa.scoring.Matrix(matrix="dense:3"), "no number"),
        (lambda: sa.scoring.Matrix(matrix="mlbtc:2x2"), "BxCxF"),
        (lambda: sa.scoring.Matrix(matrix="mlbtc:2x2x5"), "use 4 or 6"),
        (lambda: sa.scoring.Matrix(matrix=7), "Structure"),
        (lambda: sa.scoring.Matrix(matrix="dense", scaling="half"), "scaling"),
        (lambda: sa.Attention(16, 4, scoring=sa.scoring.Matrix(matrix=Dense(8, 16))), "16 x 16"),
        (lambda: sa.Attention(16, 4, scoring=sa.scoring.Matrix(matrix=Dense(16, 16, batch_shape=(3,)))), "batch_shape"),
        (lambda: sa.Attention(22, 2, scoring=sa.scoring.Matrix(matrix="butterfly")), "21 and 24"),
        (lambda: sa.parse_spec("bilinear-butterfly:x"), "butterfly"),
        (lambda: str(sa.AttentionSpec(scoring=sa.scoring.Matrix(matrix=Dense(4, 4)))), "no text form"),
    ],
)
def test_bad_input_is_named(make, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
