"""``structured_attention`` against a definition written as Python loops, that shares no code with it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from by_loops import Window, loops, make
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import BackendUnavailableError, ConfigError, ShapeError
from structattn.ops import explain
from structattn.testing.tolerances import SOLVED, assert_close

BACKENDS = pytest.mark.parametrize("backend", ["reference", "blocked"])


nested = st.integers(1, 3).flatmap(
    lambda levels: st.tuples(
        st.lists(st.integers(1, 3), min_size=levels, max_size=levels),
        st.lists(st.sampled_from([1, 2, 3]), min_size=levels, max_size=levels),
    )
)


@given(
    structure=nested,
    scaling=st.sampled_from(["variance", "mup", "paper", "paper_sum", "standard"]),
    T=st.integers(1, 7),
    S=st.integers(1, 7),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, 1, 3]),
    scale=st.sampled_from([None, 0.7]),
    with_bias=st.booleans(),
    masked=st.none() | st.tuples(*[st.booleans()] * 4),
    with_value_ranks=st.booleans(),
    softcap=st.sampled_from([None, None, 0.8]),
    with_sinks=st.booleans(),
    slopes_of=st.sampled_from([None, "head", "row"]),
    sliding=st.booleans(),
    sink_tokens=st.sampled_from([0, 0, 1, 3]),
    cuts=st.none() | st.lists(st.lists(st.integers(1, 6), max_size=2), min_size=6, max_size=6),
    backend=st.sampled_from(["auto", "reference", "blocked"]),
)
def test_outputs_and_all_gradients_equal_the_definition(
    structure,
    scaling,
    T,
    S,
    heads,
    is_causal,
    window,
    scale,
    with_bias,
    masked,
    with_value_ranks,
    softcap,
    with_sinks,
    slopes_of,
    sliding,
    sink_tokens,
    cuts,
    backend,
) -> None:
    ranks, steps = structure
    value_ranks = tuple(reversed(ranks)) if with_value_ranks else None
    if sliding:  # the first levels reach every position, while steps are 3
        bounded = next((level for level, step in enumerate(steps) if step < 3), len(steps))
        windows = [None if level < bounded else sum(steps[level:]) for level in range(len(steps))]
        sizes = [Window(window) for window in windows]
        layout = sa.LevelLayout.sliding(ranks, windows, scaling, value_ranks)
    elif cuts is None:
        sizes, size = [], 1
        for step in reversed(steps):
            size *= step
            sizes.insert(0, size)
        layout = sa.LevelLayout(tuple(ranks), tuple(sizes), scaling=scaling, value_ranks=value_ranks)
    else:  # different segments for each of the two rows
        sizes = [[(0,)], [(0,)]]
        for row in range(2):
            for level in range(len(ranks) - 1):
                sizes[row].append(tuple(sorted({*sizes[row][-1], *cuts[2 * level + row]})))
        layout = sa.LevelLayout.from_boundaries(tuple(ranks), sizes, scaling, value_ranks)
    layout = replace(layout, sink_tokens=sink_tokens)
    H, G = heads
    q, k, v = make(2, H, G, T, S, sum(ranks), sum(ranks) if with_value_ranks else 3)
    bias = torch.randn(2, H, T, S, dtype=torch.float64).requires_grad_() if with_bias else None
    sinks = torch.randn(H, dtype=torch.float64).requires_grad_() if with_sinks else None
    slopes = None if slopes_of is None else torch.randn((H,) if slopes_of == "head" else (2, H), dtype=torch.float64)
    inputs = [q, k, v, *(x for x in (bias, sinks) if x is not None)]
    mask = whole_mask = None
    if masked is not None:  # which of the four dimensions it has
        mask = torch.rand([n if own else 1 for n, own in zip((2, H, T, S), masked, strict=True)]) < 0.7
        whole_mask = mask.expand(2, H, T, S)
    expected, expected_lse = loops(
        q,
        k,
        v,
        ranks,
        sizes,
        scaling,
        is_causal=is_causal,
        scale=scale,
        window=window,
        bias=bias,
        mask=whole_mask,
        value_ranks=value_ranks,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=None if slopes is None else slopes.expand(2, H),
        sink_tokens=sink_tokens,
    )
    weight, lse_weight = torch.randn_like(expected), torch.randn_like(expected_lse)
    seen = expected_lse.isfinite()
    goal = (expected * weight).sum() + (expected_lse[seen] * lse_weight[seen]).sum()
    for return_lse in (True, False):
        result = sa.structured_attention(
            q,
            k,
            v,
            layout,
            is_causal=is_causal,
            scale=scale,
            window=window,
            attn_bias=bias,
            attn_mask=mask,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=slopes,
            return_lse=return_lse,
            backend=backend,
        )
        out = result[0] if return_lse else result
        assert_close(out, expected)
        loss = (out * weight).sum()
        target = goal
        if return_lse:
            assert torch.equal(result[1].isfinite(), seen)
            assert_close(result[1][seen], expected_lse[seen])
            loss = loss + (result[1][seen] * lse_weight[seen]).sum()
        else:
            target = (expected * weight).sum()
        actual_grads = torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True)
        # A loop that sees no pair at all has no graph: then every gradient is zero.
        if target.requires_grad:
            wanted = torch.autograd.grad(target, inputs, retain_graph=True, allow_unused=True)
        else:
            wanted = [None] * len(inputs)
        for actual, goal_grad, leaf in zip(actual_grads, wanted, inputs, strict=True):
            assert actual is not None
            expected_grad = torch.zeros_like(leaf) if goal_grad is None else goal_grad
            torch.testing.assert_close(actual, expected_grad, rtol=SOLVED, atol=1e-11)


@pytest.mark.parametrize("is_causal", [True, False])
def test_no_layout_is_scaled_dot_product_attention(is_causal: bool) -> None:
    q, k, v = make(2, 4, 4, 9, 9, 8, 5)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    for backend in ("auto", "reference", "blocked"):
        assert_close(sa.structured_attention(q, k, v, is_causal=is_causal, backend=backend), expected)


def test_one_level_falls_through_to_pytorch_untouched() -> None:
    q, k, v = (x.float() for x in make(1, 4, 2, 700, 700, 8, 8, grad=False))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(sa.structured_attention(q, k, v, sa.LevelLayout((8,), (700,))), expected)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype: torch.dtype, backend) -> None:
    q, k, v = (x.detach().to(dtype) for x in make(2, 2, 2, 33, 33, 8, 4))
    layout = sa.LevelLayout.halving((4, 2, 2), 32)
    out, lse = sa.structured_attention(q, k, v, layout, return_lse=True, backend=backend)
    exact, exact_lse = sa.structured_attention(q.double(), k.double(), v.double(), layout, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(out, exact)
    assert_close(lse, exact_lse)


@BACKENDS
def test_the_future_cannot_change_the_past(backend) -> None:
    layout = sa.LevelLayout.halving((4, 2, 2), 16)
    q, k, v = make(1, 2, 2, 16, 16, 8, 4, grad=False)
    before = sa.structured_attention(q, k, v, layout, backend=backend)
    k2, v2 = k.clone(), v.clone()
    k2[:, :, 9:] += 5
    v2[:, :, 9:] -= 5
    after = sa.structured_attention(q, k2, v2, layout, backend=backend)
    assert torch.equal(before[:, :, :9], after[:, :, :9])
    assert not torch.equal(before[:, :, 9:], after[:, :, 9:])


@BACKENDS
def test_score_terms_of_packed_and_padded_rows_and_in_lower_precision(backend) -> None:
    layout = sa.LevelLayout((4, 2, 2), (8, 4, 2))
    q, k, v = make(1, 4, 2, 11, 11, 8, 3, grad=False)
    sinks = torch.tensor([0.0, 2.0, -torch.inf, -1.0], dtype=torch.float64)
    slopes = torch.tensor([[0.5, 0.1, 0.0, -0.2]], dtype=torch.float64)
    terms = {"softcap": 0.6, "sinks": sinks, "alibi_slopes": slopes}
    first, second = (
        loops(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], (4, 2, 2), (8, 4, 2), "variance", **terms)[0]
        for a, b in ((0, 4), (4, 11))
    )
    terms |= {"backend": backend, "alibi_slopes": slopes[0]}
    packed = sa.structured_attention(q, k, v, layout, cu_seqlens=torch.tensor([0, 4, 11]), **terms)
    assert_close(packed, torch.cat((first, second), dim=2))
    padded, lse = sa.structured_attention(q, k, v, layout, left_padding=torch.tensor([4]), return_lse=True, **terms)
    assert_close(padded[:, :, 4:], second)
    assert not padded[:, :, :4].any()
    assert torch.equal(lse[0, :, 0], sinks)
    narrow = sa.structured_attention(*(x.bfloat16() for x in (q, k, v)), layout, **terms)
    exact = sa.structured_attention(*(x.bfloat16().double() for x in (q, k, v)), layout, **terms)
    assert narrow.dtype == torch.bfloat16
    assert_close(narrow, exact)


@pytest.mark.parametrize("scaling", ["variance", "mup"])
def test_global_window_adds_two_softmaxes(scaling) -> None:
    q, k, v = make(2, 2, 2, 9, 9, 8, 3, grad=False)
    slopes = torch.tensor([[0.5, 0.1], [0.2, 0.0]], dtype=torch.float64)
    sinks = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for terms in ({}, {"softcap": 0.5, "sinks": sinks, "alibi_slopes": slopes}):
        far, _ = loops(q[..., :5], k[..., :5], v, [5], [99], scaling, **terms)
        near, _ = loops(q[..., 5:], k[..., 5:], v, [3], [99], scaling, window=2, **terms)
        assert_close(sa.structured_attention(q, k, v, sa.GlobalWindowLayout((5, 3), 2, scaling), **terms), far + near)


@pytest.mark.quick(backend=["blocked"])
@BACKENDS
def test_dropout_is_reproducible_and_unbiased(backend) -> None:
    q, k, v = make(1, 1, 1, 12, 12, 4, 3, grad=False)
    layout = sa.LevelLayout((2, 2), (12, 6))

    def run(p: float):
        return sa.structured_attention(q, k, v, layout, dropout_p=p, backend=backend)

    torch.manual_seed(3)
    first = run(0.5)
    torch.manual_seed(3)
    assert torch.equal(first, run(0.5))
    assert not torch.equal(first, run(0.5))
    expected = run(0.0)
    q, k, v = (x.expand(1000, -1, -1, -1) for x in (q, k, v))
    torch.testing.assert_close(run(0.5).mean(0, keepdim=True), expected, atol=0.15, rtol=0.15)


def test_explain_names_what_runs() -> None:
    def meta(length: int, heads: int = 4):
        return [torch.empty(1, heads, length, 4, device="meta") for _ in range(3)]

    layout = sa.LevelLayout((2, 2), (4, 2))
    assert explain(*meta(4096)).startswith("scaled_dot_product_attention")
    assert explain(*meta(4096), layout).startswith("blocked: 2 levels")
    assert explain(*meta(16), layout).startswith("reference: 1024 scores")  # not on a CPU
    assert explain(*meta(4096), window=100).startswith("blocked: one level")
    q, k, _ = (torch.empty(1, 4, 1024, 8) for _ in range(3))
    assert explain(q, k, k).startswith("scaled_dot_product_attention")
    assert explain(q, k, k[..., :4]).startswith("blocked: one level")  # PyTorch would keep all scores
    assert explain(*meta(4096), return_lse=True).startswith("blocked: one level")
    mask = torch.empty(1, 1, 1, 4096, dtype=torch.bool, device="meta")
    assert explain(*meta(4096), attn_mask=mask).startswith("blocked: one level")  # PyTorch would need T x S numbers
    assert explain(*meta(4096), attn_mask=mask, is_causal=False).startswith("scaled_dot_product_attention")
    assert "PyTorch's kernels have no soft cap" in explain(*meta(4096), softcap=5.0)
    slopes = torch.empty(4, device="meta")
    assert "PyTorch's kernels take ALiBi as T x S numbers" in explain(*meta(4096), alibi_slopes=slopes)
    assert explain(*meta(4096), layout, alibi_slopes=slopes, softcap=5.0).startswith(
        "blocked: 2 levels with a soft cap and ALiBi"
    )
    assert "no log-sum-exp, which sinks need" in explain(*meta(4096), sinks=torch.empty(4, device="meta"))
    assert explain(*meta(4096), sa.GlobalWindowLayout((2, 2), 9)).startswith("two softmaxes, added: scaled_dot")


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_alibi_is_a_bias_and_its_slopes_are_constants(backend) -> None:
    q, k, v = make(2, 4, 2, 5, 9, 8, 3)
    slopes = 2.0 ** -torch.arange(1, 5)
    distance = (torch.arange(4, 9)[:, None] - torch.arange(9)).abs()
    bias = -slopes[:, None, None] * distance.double()

    def attend(slopes):
        return sa.structured_attention(q, k, v, is_causal=False, alibi_slopes=slopes, backend=backend)

    expected = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    assert_close(attend(slopes), expected)
    for derivative in (
        lambda x: attend(x.requires_grad_()),
        torch.func.grad(lambda x: attend(x).sum()),
        lambda x: torch.func.jvp(attend, (x,), (x,)),
    ):
        with pytest.raises(ConfigError, match=r"alibi_slopes\.detach"):
            derivative(slopes.clone())
    with torch.no_grad():
        assert_close(attend(slopes.clone().requires_grad_()), expected)
    both = torch.stack([slopes, 2 * slopes])
    assert_close(torch.func.vmap(attend)(both), torch.stack([attend(x) for x in both]))


def call(batch=2, **changes):
    q, k, v = make(batch, 4, 2, 6, 6, 8, 3, grad=False)
    arguments = {"q": q, "k": k, "v": v, **changes}
    return sa.structured_attention(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layout": sa.LevelLayout((4, 3), (8, 4))}, ShapeError, r"expected 8, got 4\|3 = 7"),
        ({"q": torch.zeros(2, 4, 6)}, ShapeError, "4-dimensional"),
        ({"q": torch.zeros(2, 3, 6, 8, dtype=torch.float64)}, ShapeError, "multiple"),
        ({"q": torch.zeros(2, 4, 6, 8)}, ShapeError, "one dtype"),
        ({"q": torch.zeros(2, 4, 6, 9, dtype=torch.float64)}, ShapeError, "head dimensions differ"),
        ({"window": 0}, ConfigError, "window"),
        ({"dropout_p": 1.0}, ConfigError, "dropout_p"),
        ({"attn_bias": torch.ones(6, 6, dtype=torch.bool)}, ShapeError, "bool mask"),
        ({"attn_bias": torch.ones(5, 6, dtype=torch.float64)}, ShapeError, "broadcast"),
        ({"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, ShapeError, "attn_mask of shape .* does not broadcast"),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.int64)}, ShapeError, "mask != 0"),
        ({"attn_mask": torch.zeros(6, 6), "attn_bias": torch.zeros(6, 6)}, ConfigError, "their sum"),
        ({"attn_mask": [[True]]}, ShapeError, "attn_mask"),
        ({"backend": "cuda"}, ConfigError, "unknown backend"),
        ({"backend": "triton"}, BackendUnavailableError, "'triton' cannot run"),  # float64 has no fused kernel
        ({"layout": sa.LevelLayout((4, 4), (8, 4), value_ranks=(1, 1))}, ShapeError, r"expected 3, got 1\|1 = 2"),
        ({"layout": sa.LevelLayout.from_boundaries((8,), [((0,),)] * 3)}, ShapeError, "batch row: expected 2, got 3"),
        ({"cu_seqlens": torch.tensor([0, 6])}, ShapeError, "batch 1"),
        (
            {"batch": 1, "cu_seqlens": torch.tensor([0, 4])},
            ShapeError,
            r"rise or stay the same from 0 to the length 6.*\[0, 4\]",
        ),
        ({"batch": 1, "cu_seqlens": torch.tensor([0, 4, 3, 6])}, ShapeError, "rise or stay the same"),
        ({"batch": 1, "cu_seqlens": torch.tensor([0])}, ShapeError, "at least 2 entries"),
        ({"cu_seqlens_k": torch.tensor([0, 6])}, ConfigError, "give cu_seqlens, those of the queries"),
        ({"left_padding": torch.tensor([0, 7])}, ShapeError, "left_padding"),
        ({"left_padding": torch.tensor([0])}, ShapeError, "expected 2, got 1"),
        ({"layout": sa.GlobalWindowLayout((4, 4), 2), "return_lse": True}, ConfigError, "log-sum-exp"),
        ({"layout": sa.GlobalWindowLayout((4, 4), 2), "window": 2}, ConfigError, "own scale and window"),
    ],
)
def test_bad_input_is_named(changes, error, message: str) -> None:
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_scale_of_zero_averages_and_a_negative_one_turns(requires_grad: bool) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=requires_grad) for _ in range(3))
    expected = v.cumsum(dim=2) / torch.arange(1, 6)[:, None]
    torch.testing.assert_close(sa.structured_attention(q, k, v, None, scale=0.0), expected)
    negative = sa.structured_attention(q, k, v, None, scale=-1.0)
    torch.testing.assert_close(negative, sa.structured_attention(-q, k, v, None, scale=1.0))
