"""Small problems on a CPU against the definition, outputs and all gradients, and when ``auto`` takes that
backend.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.models.icl_regressor import ICLRegressor
from structattn.ops import explain, small
from structattn.testing.tolerances import assert_close


def make(B, H, G, T, S, D, V, *, dtype=torch.float64, token_major=False):
    """q, k and v with gradients; token-major ones lie in memory as projections leave them, (B, T, H, D)."""

    def draw(heads, length, dim):
        shape = (B, length, heads, dim) if token_major else (B, heads, length, dim)
        x = torch.randn(shape, dtype=dtype)
        return (x.transpose(1, 2) if token_major else x).requires_grad_()

    return draw(H, T, D), draw(G, S, D), draw(G, S, V)


def outputs(q, k, v, cotangent=None, **options):
    """The output and the gradients of q, k, v and sinks."""
    out = sa.structured_attention(q, k, v, **options)
    cotangent = torch.randn_like(out) if cotangent is None else cotangent
    leaves = (q, k, v) if options.get("sinks") is None else (q, k, v, options["sinks"])
    return cotangent, [out, *torch.autograd.grad(out, leaves, cotangent)]


def terms(softcap, with_sinks, mask, heads, lengths, batch=2):
    """Options of the score: a soft cap, sinks, and a mask that hides a third of the pairs and one row, or of
    the given number of axes.
    """
    shapes = {
        "keys": (batch, 1, 1, lengths[1]),
        "pairs": (1, 1, *lengths),
        "heads": (heads[0], 1, lengths[1]),
        "all": (batch, heads[0], *lengths),
        "one axis": lengths[1:],
    }
    attn_mask = None if mask is None else torch.rand(shapes[mask]) > 0.3
    if mask == "all":
        attn_mask[0, 0, 0] = False
    sinks = torch.randn(heads[0], dtype=torch.float64).requires_grad_() if with_sinks else None
    return {"softcap": softcap, "sinks": sinks, "attn_mask": attn_mask}


TERMS = {
    "softcap": st.sampled_from([None, None, 0.7]),
    "with_sinks": st.booleans(),
    "mask": st.sampled_from([None, None, None, "keys", "pairs", "heads", "all", "one axis"]),
}


def check(q, k, v, **options):
    assert explain(q, k, v, **options).startswith("small: ")
    cotangent, actual = outputs(q, k, v, **options)
    _, expected = outputs(*(x.double() for x in (q, k, v)), cotangent.double(), backend="reference", **options)
    assert actual[0].dtype == q.dtype
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, b, gradient=number > 0)


@given(
    B=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    lengths=st.sampled_from([(2, 2), (3, 7), (17, 17), (20, 33)]),
    D=st.sampled_from([1, 2, 5, 16, 19]),
    V=st.sampled_from([1, 3, 16, 21]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, 1, 4, 50]),
    scale=st.sampled_from([None, 0.0, -1.3]),
    token_major=st.booleans(),
    **TERMS,
)
def test_it_is_the_definition(
    B, heads, lengths, D, V, is_causal, window, scale, token_major, softcap, with_sinks, mask
) -> None:
    torch.manual_seed(0)
    q, k, v = make(B, *heads, *lengths, D, V, token_major=token_major)
    if D != V or D <= small.NARROW_HEAD:
        given = terms(softcap, with_sinks, mask, heads, lengths, B)
        check(q, k, v, is_causal=is_causal, window=window, scale=scale, **given)


@given(
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    lengths=st.sampled_from([(1, 1), (1, 9), (3, 7), (17, 17), (33, 20)]),
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    steps=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=4, max_size=4),
    scaling=st.sampled_from(["variance", "mup", "paper", "paper_sum", "standard"]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, 1, 4]),
    scale=st.sampled_from([None, 0.0, -1.3]),
    token_major=st.booleans(),
    **TERMS,
)
def test_levels_are_the_definition(
    heads, lengths, ranks, steps, scaling, is_causal, window, scale, token_major, softcap, with_sinks, mask
) -> None:
    torch.manual_seed(0)
    sizes = [1]
    for step in steps[: len(ranks) - 1]:
        sizes.insert(0, sizes[0] * step)
    layout = sa.LevelLayout(ranks, sizes, scaling)
    q, k, v = make(2, *heads, *lengths, sum(ranks), 3, token_major=token_major)
    if lengths[0] <= lengths[1] or not (is_causal or window):
        given = terms(softcap, with_sinks, mask, heads, lengths)
        check(q, k, v, layout=layout, is_causal=is_causal, window=window, scale=scale, **given)


@pytest.mark.parametrize("given", [(0.7, True, None), (0.7, False, "all"), (None, True, "keys")], ids=str)
@pytest.mark.parametrize("layout", [None, sa.LevelLayout((2, 1), (8, 2))], ids=["one level", "levels"])
def test_second_derivatives_of_a_score_with_terms(given, layout) -> None:
    torch.manual_seed(0)
    q, k, v = make(1, 2, 1, 3, 4, 3, 2)
    options = terms(*given, (2, 1), (3, 4), 1)
    sinks = options.pop("sinks")

    def function(q, k, v, sinks=None):
        assert explain(q, k, v, layout, sinks=sinks, **options).startswith("small")
        return sa.structured_attention(q, k, v, layout, sinks=sinks, **options)

    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_gradient_of_sinks_only_and_of_two_softmaxes() -> None:
    q, k, v = make(2, 4, 2, 9, 9, 6, 3)
    options = terms(0.7, True, "keys", (4, 2), (9, 9))
    for inputs, layout in (([x.detach() for x in (q, k, v)], None), ((q, k, v), sa.GlobalWindowLayout((2, 4), 3))):
        assert explain(*inputs, layout, **options).count("small: ") == (1 if layout is None else 2)
        leaves = [x for x in (*inputs, options["sinks"]) if x.requires_grad]
        results = []
        for backend in ("auto", "reference"):
            out = sa.structured_attention(*inputs, layout, backend=backend, **options)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_what_is_kept_for_a_layout_serves_every_mode() -> None:
    layout = sa.LevelLayout((2, 2), (1000, 5))
    q, k, v = make(1, 2, 2, 11, 11, 4, 3)
    with torch.inference_mode():
        first = sa.structured_attention(q, k, v, layout)
    with torch.device("meta"):
        second = sa.structured_attention(q, k, v, layout)
    torch.autograd.grad(second.sum(), (q, k, v))
    assert torch.equal(first, second)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = sa.structured_attention(*(mode.from_tensor(x.detach()) for x in (q, k, v)), layout)
    assert fake.shape == first.shape
    assert torch.equal(sa.structured_attention(q, k, v, layout), first)


@pytest.mark.parametrize("sizes", [(2, 3, 3, 1, 1, 2, 3), (2, 3, 3, 1, 5, 2, 3), (2, 3, 3, 9, 4, 2, 3)], ids=str)
def test_what_it_leaves_to_others_is_right_too(sizes) -> None:
    q, k, v = make(*sizes)
    assert not explain(q, k, v).startswith("small")
    cotangent, actual = outputs(q, k, v)
    for a, b in zip(actual, outputs(q, k, v, cotangent, backend="reference")[1], strict=True):
        assert_close(a, b)


def test_more_queries_than_keys_without_a_mask() -> None:
    check(*make(2, 3, 3, 9, 4, 2, 3), is_causal=False)


@pytest.mark.parametrize("factor", [1.0, 1e2])  # exp of 200 would overflow
def test_float32_and_large_scores(factor) -> None:
    q, k, v = make(2, 4, 4, 24, 24, 4, 2, dtype=torch.float32)
    check((factor * q).detach().requires_grad_(), k, v)


def test_shared_queries_and_keys() -> None:
    q, k, v = make(3, 4, 4, 7, 7, 6, 2)
    for shared in ((True, False), (False, True)):
        pair = [x[:, :1].detach().requires_grad_() if one else x for x, one in zip((q, k), shared, strict=True)]
        a, b = (x.expand(-1, 4, -1, -1) for x in pair)
        results = []
        for backend in ("auto", "reference"):
            out = sa.structured_attention(a, b, v, backend=backend)
            results.append([out, *torch.autograd.grad(out, (*pair, v), torch.ones_like(out))])
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)


def test_inputs_stay_as_they_are() -> None:
    q, k, v = make(2, 2, 2, 8, 8, 20, 17)
    before = [x.detach().clone() for x in (q, k, v)]
    out = sa.structured_attention(q, k, v)
    first = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), first, strict=True):
        assert torch.equal(a, b)  # what is kept for the gradient is not overwritten by it
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))


def test_when_auto_takes_it() -> None:
    def chosen(*sizes, dtype=torch.float32, **options):
        return explain(*make(*sizes, dtype=dtype), **options).partition(":")[0]

    assert chosen(2, 8, 8, 24, 24, 2, 2) == "small"
    assert chosen(2, 8, 8, 24, 24, 16, 2) == "small"
    assert chosen(2, 8, 8, 24, 24, 16, 16) == "scaled_dot_product_attention"
    assert chosen(2, 8, 8, 24, 24, 16, 16, window=4) == "small"
    assert chosen(1, 2, 2, 129, 129, 16, 2) == "scaled_dot_product_attention"  # longer than measured
    assert chosen(2, 8, 8, 24, 24, 2, 2, dtype=torch.bfloat16) == "scaled_dot_product_attention"
    assert chosen(2, 8, 8, 24, 24, 2, 2, return_lse=True) == "reference"
    assert chosen(2, 8, 8, 24, 24, 2, 2, dropout_p=0.1) == "reference"  # PyTorch draws its own masks
    assert chosen(2, 8, 8, 24, 24, 2, 2, attn_bias=torch.zeros(24, 24)) == "scaled_dot_product_attention"
    assert chosen(2, 8, 8, 24, 24, 2, 2, left_padding=torch.tensor([0, 3])) == "reference"
    keys, pairs = torch.ones(2, 1, 1, 24, dtype=torch.bool), torch.ones(24, 24, dtype=torch.bool)
    assert chosen(2, 8, 8, 24, 24, 16, 16, softcap=5.0) == "small"
    assert chosen(2, 8, 8, 24, 24, 16, 16, sinks=torch.zeros(8)) == "small"
    assert chosen(2, 8, 8, 24, 24, 16, 16, attn_mask=keys) == "small"
    assert chosen(2, 8, 8, 24, 24, 16, 16, attn_mask=pairs) == "scaled_dot_product_attention"
    assert chosen(2, 8, 8, 24, 24, 2, 2, sinks=torch.zeros(8), return_lse=True) == "reference"
    levels = sa.LevelLayout((8, 8), (24, 12))
    assert chosen(128, 8, 8, 24, 24, 16, 16, layout=levels, softcap=5.0) == "small"
    assert chosen(256, 8, 8, 24, 24, 16, 16, layout=levels, softcap=5.0) == "blocked"  # which is as fast there
    assert chosen(1, 2, 2, 129, 129, 16, 16, layout=levels, softcap=5.0) == "reference"
    assert chosen(256, 8, 8, 24, 24, 16, 16, layout=levels) == "small"
    assert chosen(1, 2, 2, 512, 512, 16, 16, layout=levels) == "small"
    assert chosen(1, 2, 2, 513, 513, 16, 16, layout=levels) == "blocked"
    assert chosen(256, 8, 8, 24, 24, 16, 16, layout=levels, attn_mask=keys[:1]) == "small"
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert chosen(2, 8, 8, 24, 24, 2, 2, softcap=5.0) == "reference"
    levels = sa.LevelLayout((2, 2), (24, 12))
    assert chosen(2, 8, 8, 24, 24, 4, 2, layout=levels) == "small"
    assert chosen(2, 8, 8, 24, 24, 4, 2, layout=levels, dropout_p=0.1) == "reference"
    assert chosen(2, 8, 8, 24, 24, 4, 4, layout=sa.LevelLayout((2, 2), (24, 12), value_ranks=(2, 2))) == "reference"
    assert chosen(2, 8, 8, 24, 24, 4, 2, layout=sa.LevelLayout.from_boundaries((2, 2), [(0, 5)])) == "reference"
    with torch.no_grad():  # without gradients the fused kernel is faster
        assert chosen(2, 8, 8, 24, 24, 2, 2) == "scaled_dot_product_attention"
        assert chosen(2, 8, 8, 24, 24, 16, 2) == "small"
    with torch.autocast("cpu"):
        assert chosen(2, 8, 8, 24, 24, 2, 2) == "scaled_dot_product_attention"


@pytest.mark.full
@pytest.mark.parametrize(
    "spec",
    [
        "bilinear-mlr:1|1|1",
        *(
            pytest.param(x, marks=pytest.mark.full)
            for x in ("standard", "standard:1", "bilinear-btt:1", "bilinear-btt:2")
        ),
    ],
)
def test_a_model_is_one_graph_and_stays_it(spec) -> None:
    torch.manual_seed(0)
    model = ICLRegressor(spec, dim=3, num_points=6, embed_dim=16, num_layers=2, num_heads=4).double()
    torch.nn.init.normal_(model.read_out.weight)
    xs, ys = torch.randn(5, 6, 3, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    for _ in range(3):
        results = []
        for call in (compiled, model):
            model.zero_grad()
            out = call(xs, ys)
            out.square().sum().backward()
            results.append([out, *(p.grad.clone() for p in model.parameters())])
        for actual, expected in zip(*results, strict=True):
            assert_close(actual, expected)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn_like(p))
    assert len(graphs) == 1
