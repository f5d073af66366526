"""Sequences of different lengths in one call: packed, padded on either side, of queries and keys apart; each
as if it were alone.
"""

import pytest
import torch
from by_loops import Window, loops, make
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.testing.tolerances import SOLVED, assert_close

BACKENDS = pytest.mark.parametrize("backend", ["reference", "blocked"])


SLIDING = sa.LevelLayout.sliding((4, 2, 2), (7, 4, 2))
LAYOUTS = [None, sa.LevelLayout((4, 2, 2), (8, 4, 2)), SLIDING, sa.GlobalWindowLayout((4, 4), 3)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
@BACKENDS
def test_packed_sequences_equal_each_alone(layout, is_causal: bool, backend) -> None:
    q, k, v = make(1, 4, 2, 16, 16, 8, 3, grad=False)
    offsets = [0, 1, 6, 16]
    packed = sa.structured_attention(
        q, k, v, layout, is_causal=is_causal, cu_seqlens=torch.tensor(offsets, dtype=torch.int32), backend=backend
    )
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        alone = sa.structured_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], layout, is_causal=is_causal)
        assert_close(packed[:, :, a:b], alone)


@pytest.mark.parametrize("offsets", [[0, 0, 7], [0, 7, 7], [0, 0, 3, 3, 3, 7, 7], [0, 7]])
@pytest.mark.parametrize("layout", [*LAYOUTS, sa.LevelLayout((4, 2, 2), (8, 4, 2), value_ranks=(1, 1, 1))])
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_an_empty_sequence_changes_nothing(offsets, layout, backend) -> None:
    leaves, weight = make(1, 4, 2, 7, 7, 8, 3, seed=1), torch.randn(1, 4, 7, 3, dtype=torch.float64)
    results = []
    for ends in (offsets, sorted(set(offsets))):
        out = sa.structured_attention(*leaves, layout, cu_seqlens=torch.tensor(ends), backend=backend)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("spec", ["standard", "mlr:4|2|2", "bilinear-btt:1+mlr:8|4|4", "window:2"])
@pytest.mark.parametrize("rotary", [None, sa.Rotary()])
def test_modules_take_empty_sequences(spec, rotary) -> None:
    torch.manual_seed(0)
    model = sa.LanguageModel(
        11, spec, num_layers=1, embed_dim=16, num_heads=2, context_length=8, rotary=rotary
    ).double()
    ids = torch.randint(11, (1, 7))
    out = model(ids, cu_seqlens=torch.tensor([0, 0, 3, 3, 7, 7]))
    assert_close(out, torch.cat([model(part) for part in ids.split([3, 4], dim=1)], dim=1))
    nothing = torch.zeros(1, 0, dtype=torch.long)
    assert model(nothing, cu_seqlens=torch.tensor([0, 0, 0])).shape == (1, 0, 11)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    sizes=st.sampled_from(
        [(9, 9, 9), (8, 4, 2), (Window(None), Window(3), Window(2)), None]
    ),  # None: segments of each sequence
    is_causal=st.booleans(),
    window=st.sampled_from([None, 2]),
    with_bias=st.booleans(),
    masked=st.booleans(),
    has_terms=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    backend=st.sampled_from(["auto", "reference", "blocked"]),
)
def test_packed_sequences_of_queries_and_keys_apart(
    lengths, sizes, is_causal, window, with_bias, masked, has_terms, dtype, backend
) -> None:
    (ends_q, ends_k), N = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in zip(*lengths, strict=True)), len(lengths)
    T, S = ends_q[-1], ends_k[-1]
    q, k, v = leaves = make(1, 4, 2, T, S, 6, 3, seed=T)
    starts = [[(0,), (0, 2), (0, 2, 3)], [(0,), (0,), (0, 1)]]
    if sizes is None:
        layout = sa.LevelLayout.from_boundaries((3, 2, 1), [starts[n % 2] for n in range(N)])
    elif isinstance(sizes[0], Window):
        layout = sa.LevelLayout.sliding((3, 2, 1), [window.size for window in sizes])
    else:
        layout = sa.LevelLayout((3, 2, 1), sizes)
    bias = torch.randn(4, T, S, dtype=torch.float64).requires_grad_() if with_bias else None
    mask = torch.rand(1, 1, T, S) < 0.7 if masked else None
    terms = {"window": window, "is_causal": is_causal}
    if has_terms:
        terms |= {"softcap": 0.8, "alibi_slopes": torch.tensor([[0.5, 0.1, 0.0, -0.2]], dtype=torch.float64)}
    outs, lses = [], []
    for n, (a, b, c, d) in enumerate(zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)):
        if a == b:
            continue
        own = starts[n % 2] if sizes is None else sizes
        pair = {} if bias is None else {"bias": bias[None, :, a:b, c:d]}
        pair |= {} if mask is None else {"mask": mask[:, :, a:b, c:d].expand(1, 4, -1, -1)}
        out, lse = loops(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], (3, 2, 1), own, "variance", **terms, **pair)
        outs.append(out)
        lses.append(lse)
    expected = torch.cat(outs, 2) if outs else torch.zeros(1, 4, 0, 3, dtype=torch.float64)
    expected_lse = torch.cat(lses, 2) if lses else torch.zeros(1, 4, 0, dtype=torch.float64)
    seqlens = {"cu_seqlens": torch.tensor(ends_q, dtype=dtype), "cu_seqlens_k": torch.tensor(ends_k)}
    result, lse = sa.structured_attention(
        q, k, v, layout, attn_bias=bias, attn_mask=mask, backend=backend, return_lse=True, **terms, **seqlens
    )
    assert_close(result, expected)
    seen = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen)
    assert_close(lse[seen], expected_lse[seen])
    inputs = leaves if bias is None else [*leaves, bias]
    weight = torch.randn_like(expected)
    actual = torch.autograd.grad((result * weight).sum() + lse[seen].sum(), inputs, allow_unused=True)
    goal = (expected * weight).sum() + expected_lse[seen].sum()
    wanted = torch.autograd.grad(goal, inputs, allow_unused=True) if goal.requires_grad else [None] * len(inputs)
    for x, grad, right in zip(inputs, actual, wanted, strict=True):
        right = torch.zeros_like(x) if right is None else right
        torch.testing.assert_close(torch.zeros_like(x) if grad is None else grad, right, rtol=SOLVED, atol=1e-11)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("T", [10, 2])
@pytest.mark.parametrize("window", [None, 3])
@BACKENDS
def test_left_padding_equals_rows_without_it(layout, T: int, window, backend) -> None:
    q, k, v = make(3, 4, 2, T, 10, 8, 3, grad=False)
    padding = torch.tensor([0, 3, 10])
    out = sa.structured_attention(q, k, v, layout, left_padding=padding, window=window, backend=backend)
    for row, pad in enumerate([0, 3]):
        real = min(T, 10 - pad)
        alone = sa.structured_attention(
            q[row : row + 1, :, T - real :],
            k[row : row + 1, :, pad:],
            v[row : row + 1, :, pad:],
            layout,
            window=window,
        )
        assert_close(out[row : row + 1, :, T - real :], alone)
        assert bool((out[row, :, : T - real] == 0).all())
    assert bool((out[2] == 0).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_a_padding_mask_on_the_right_equals_shorter_rows(layout, is_causal: bool, backend) -> None:
    leaves = make(3, 4, 2, 10, 10, 8, 3)
    lengths = torch.tensor([10, 7, 0])
    mask = (torch.arange(10) < lengths[:, None])[:, None, None]
    options = {"is_causal": is_causal, "backend": backend}
    out = sa.structured_attention(*leaves, layout, attn_mask=mask, **options)
    weight = torch.randn_like(out)
    grads = torch.autograd.grad((out * weight).sum(), leaves)
    for row, length in enumerate(lengths[:2].tolist()):
        alone = [x[row : row + 1, :, :length] for x in leaves]
        short = sa.structured_attention(*alone, layout, **options)
        assert_close(out[row : row + 1, :, :length], short)
        assert all(not grad[row, :, length:].any() for grad in grads[1:])
    assert not out[2].any()  # rows that see nothing
    assert not any(grad[2].any() for grad in grads)
    bias = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    assert_close(sa.structured_attention(*leaves, layout, attn_mask=bias, **options), out)


@pytest.mark.parametrize("ranks", [(4,), (2, 1, 1)])
@pytest.mark.parametrize("backend", ["blocked", "auto"])
def test_as_many_queries_before_the_padding_as_keys_after_it(backend: str, ranks: tuple[int, ...]) -> None:
    """Both groups of queries see the same keys, whose gradients are sums over both."""
    layout = sa.LevelLayout(ranks, (8, 4, 2)[: len(ranks)])
    leaves = [torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (73, 65, 65)]
    results = []
    for name in (backend, "reference"):
        out = sa.structured_attention(*leaves, layout, is_causal=False, left_padding=torch.tensor([57]), backend=name)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, gradient=True)
