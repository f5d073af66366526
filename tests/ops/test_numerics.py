"""Dtypes, magnitudes and hidden numbers: every backend gives the definition, and one output dtype."""

import pytest
import torch
import torch.nn.functional as F

import structattn as sa
from structattn.testing.tolerances import assert_close

BACKENDS = ("auto", "reference", "blocked")
ONE = sa.LevelLayout((8,), (32,))
TWO = sa.LevelLayout((4, 4), (32, 8))


def make(T=20, S=20, D=8, V=8, B=2, H=2, G=2, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(B, heads, n, d).to(dtype) for heads, n, d in ((H, T, D), (G, S, D), (G, S, V))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [None, ONE, TWO], ids=["none", "one", "two"])
@pytest.mark.parametrize("bias_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_keeps_its_digits(bias_dtype, layout, backend) -> None:
    bias = (1000 + torch.randn(2, 20, 20, dtype=torch.float64)).to(bias_dtype).requires_grad_()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q, k, v = make(dtype=dtype)
        out = sa.structured_attention(q, k, v, layout, attn_bias=bias, backend=backend)
        exact_bias = bias.detach().double().requires_grad_()
        exact = sa.structured_attention(
            q.double(), k.double(), v.double(), layout, attn_bias=exact_bias, backend="reference"
        )
        assert out.dtype == dtype
        assert float((out.detach() - exact.detach()).abs().max()) < (1e-3 if dtype == torch.float32 else 2e-2)
        (grad,) = torch.autograd.grad(out.float().sum(), bias)
        (exact_grad,) = torch.autograd.grad(exact.sum(), exact_bias)
        assert grad.dtype == bias_dtype
        assert float((grad - exact_grad).abs().max()) < 3e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [ONE, TWO], ids=["one", "two"])
@pytest.mark.parametrize("least", [-1e9, -1e30, -1e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_whose_biases_are_all_far_below_zero(dtype, least, layout, backend) -> None:
    q, k, v = (x.requires_grad_() for x in make(dtype=dtype))
    bias = torch.zeros(20, 20)
    bias[:3] = least  # as a mask of numbers hides: such a row takes the mean of what it sees
    out = sa.structured_attention(q, k, v, layout, attn_bias=bias, is_causal=False, backend=backend)
    assert_close(out[:, :, :3].detach(), v.detach().double().mean(2, keepdim=True).expand(-1, -1, 3, -1))
    for grad in torch.autograd.grad(out.float().sum(), (q, k, v)):
        assert float(grad.abs().max()) < 30


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("backend", [*BACKENDS, "native"])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_row_of_the_least_numbers_has_no_nan(softcap, backend) -> None:
    leaves = [x.requires_grad_() for x in make()]
    bias = torch.zeros(20, 20)
    bias[:3] = torch.finfo(torch.float32).min
    leaves.append(bias.requires_grad_())
    out = sa.structured_attention(*leaves[:3], attn_bias=bias, softcap=softcap, backend=backend)
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("layout", [None, ONE, TWO, sa.GlobalWindowLayout((4, 4), 3)], ids=str)
def test_autocast_gives_the_dtype_of_pytorchs_attention(layout) -> None:
    dtypes = [(torch.float32,) * 3, (torch.float32, torch.bfloat16, torch.float16), (torch.float64,) * 3]
    for kinds in dtypes:
        q, k, v = (x.to(kind).requires_grad_() for x, kind in zip(make(), kinds, strict=True))
        for length in (20, 2):  # few scores, and fewer queries than keys
            with torch.autocast("cpu", torch.bfloat16):
                expected = F.scaled_dot_product_attention(q[:, :, :length], k, v)
            cast = [x if x.dtype == torch.float64 else x.bfloat16() for x in (q[:, :, -length:], k, v)]
            for backend in BACKENDS:
                with torch.autocast("cpu", torch.bfloat16):
                    out = sa.structured_attention(q[:, :, -length:], k, v, layout, backend=backend)
                assert out.dtype == expected.dtype
                assert_close(out, sa.structured_attention(*(x.double() for x in cast), layout))
                for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
                    assert grad.dtype == x.dtype
                if not isinstance(layout, sa.GlobalWindowLayout):
                    with torch.autocast("cpu", torch.bfloat16):
                        out, lse = sa.structured_attention(
                            q[:, :, -length:], k, v, layout, backend=backend, return_lse=True
                        )
                    assert out.dtype == expected.dtype
                    assert lse.dtype == torch.promote_types(expected.dtype, torch.float32)


@pytest.mark.parametrize("layout", [None, TWO])
def test_autocast_keeps_a_bias_of_float32(layout) -> None:
    q, k, v = make()
    bias = 1000 + torch.randn(20, 20)
    exact = sa.structured_attention(*(x.bfloat16().double() for x in (q, k, v)), layout, attn_bias=bias.double())
    for backend in BACKENDS:
        with torch.autocast("cpu", torch.bfloat16):
            out = sa.structured_attention(q, k, v, layout, attn_bias=bias, backend=backend)
        assert float((out - exact).abs().max()) < 2e-2


def test_modules_and_caches_under_autocast() -> None:
    torch.manual_seed(0)
    model = sa.LanguageModel(
        11, "mlr:4|4", num_layers=1, embed_dim=16, num_heads=2, context_length=8, rotary=sa.Rotary()
    )
    torch.nn.init.normal_(model.read_out.weight)
    ids = torch.randint(11, (2, 12))
    exact = model(ids)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids)
        caches = model.new_cache()
        parts = ids.split([5, 1, 1, 1, 4], dim=1)
        steps = torch.cat([model(part, caches=caches) for part in parts], dim=1)
    assert out.dtype == steps.dtype == torch.bfloat16
    for actual in (out, steps):
        assert float((actual - exact).detach().norm() / exact.detach().norm()) < 3e-2


@torch.no_grad()
def test_a_cache_keeps_what_autocast_makes() -> None:
    q, k, v = make(T=12, S=12)
    mixed = q, k.bfloat16(), v.half()
    expected = sa.structured_attention(*(x.bfloat16() for x in mixed), TWO)
    cache = sa.LevelCache(TWO)
    with torch.autocast("cpu", torch.bfloat16):
        parts = zip(*(x.split([5, 1, 2, 4], dim=2) for x in mixed), strict=True)
        out = torch.cat([cache.attend(*part) for part in parts], dim=2)
    assert out.dtype == torch.bfloat16
    assert_close(out, expected)


def test_rotary_queries_before_the_first_key() -> None:
    torch.manual_seed(0)
    layer = sa.Attention(16, 2, rotary=sa.Rotary(), is_causal=False).double()
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    for length in (1, 5):  # one query more, that every query could be taken for
        out = layer(x, x[:, 6 - length :])
        q, k, v, scale = layer.project(x)
        expected = sa.structured_attention(
            q, k[:, :, 6 - length :], v[:, :, 6 - length :], is_causal=False, scale=scale
        )
        assert_close(out, layer._merged(expected))
    layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x.float(), x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("layout", [None, TWO, sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 3, 7)))], ids=str)
@pytest.mark.parametrize("window", [None, 4])
def test_padding_of_zero_is_no_padding(layout, window) -> None:
    q, k, v = (x.double().requires_grad_() for x in make(T=17, S=9))
    options = {"is_causal": False, "window": window}
    expected = sa.structured_attention(q, k, v, layout, backend="reference", **options)
    wanted = torch.autograd.grad(expected.sin().sum(), (q, k, v))
    for backend in BACKENDS:
        out = sa.structured_attention(q, k, v, layout, backend=backend, left_padding=torch.tensor([0, 0]), **options)
        assert_close(out, expected)
        for a, b in zip(torch.autograd.grad(out.sin().sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(a, b)
        padded = sa.structured_attention(q, k, v, layout, backend=backend, left_padding=torch.tensor([3, 0]), **options)
        real = torch.tensor([*range(8), *range(11, 17)])  # the queries at positions -8 ... -1 and 3 ... 8
        alone = sa.structured_attention(
            q[:1], k[:1, :, 3:], v[:1, :, 3:], layout, backend="reference", **options
        )  # 17 queries and 6 keys: the last 6 queries are at the same positions
        assert_close(padded[:1, :, 11:], alone[:, :, 11:])
        assert bool((padded[0, :, 8:11] == 0).all())
        if window is None:
            assert bool((padded[0, :, real] != 0).all())
            assert_close(padded[:1, :, :8], alone[:, :, :8])
        assert_close(padded[1:], expected[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1e-300, 1e-36, 1e-22, 1e14, 1e36])
@pytest.mark.parametrize("score", [-52.0, 0.0, 52.0])
def test_values_and_scores_of_any_size(score, value, dtype) -> None:
    if dtype == torch.float32 and value < 1e-38:
        value = 0.0  # all of them
    layout = sa.LevelLayout((2, 2), (64, 16), scaling="paper_sum")
    q, k, v = make(T=40, S=40, D=4, V=4, dtype=dtype)
    q[:], k[:] = 0, k / 10
    q[..., 0], k[..., 0] = score, 2.0  # every score is about ``score``
    v[..., :2] *= value  # columns and rows of other sizes than their neighbours
    v[:, :, 1:20] *= value / max(value, 1e-3)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    exact = sa.structured_attention(*(x.double() for x in (q, k, v)), layout, backend="reference")
    out = sa.structured_attention(q, k, v, layout, backend="blocked")
    limit = 1e-4 if dtype == torch.float32 else 1e-11
    columns = (out.detach().double() - exact.detach()).abs(), exact.detach().abs()
    for rows in (slice(0, 20), slice(20, 40)):
        error, size = (x[:, :, rows].amax((0, 1, 2)) for x in columns)
        assert bool((error <= limit * size).all())
    grads = torch.autograd.grad(out[..., 2:].sum(), (q, k, v))
    wanted = torch.autograd.grad(exact[..., 2:].sum(), (q, k, v))
    for a, b in zip(grads, wanted, strict=True):
        assert float((a - b).abs().max()) <= 10 * limit * float(b.abs().max()) + 1e-30


@pytest.mark.parametrize("tiny", ["q", "k"])
def test_norms_that_vanish_are_no_bound(tiny) -> None:
    q, k, v = make(T=40, S=40)
    q, k = (q * 1e-24, k * 1e6) if tiny == "q" else (q * 1e6, k * 1e-24)
    options = {"scale": 1e20}
    out = sa.structured_attention(q, k, v, TWO, backend="blocked", **options)
    assert_close(out, sa.structured_attention(q.double(), k.double(), v.double(), TWO, **options))


def poisoned(x, hidden):
    return x.detach().masked_fill(hidden, torch.nan).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [None, TWO, sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 3, 7)))], ids=str)
@pytest.mark.parametrize("kind", ["padded", "few", "packed", "biased"])
def test_nan_in_padding_or_in_another_sequence_reaches_nothing(kind, layout, backend) -> None:
    T = 7 if kind == "few" else 20
    q, k, v = (x.double() for x in make(T=T, S=20))
    options: dict = {"is_causal": False}
    if kind in ("packed", "biased"):
        q, k, v = (x[:1] for x in (q, k, v))
        options["cu_seqlens"] = torch.tensor([0, 4, 9, 20])
        hidden = (torch.arange(20) >= 4) & (torch.arange(20) < 9)
        hidden, padded = hidden[None, None, :, None], torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    else:
        options["left_padding"] = torch.tensor([15, 2])
        hidden = padded = (torch.arange(20) < options["left_padding"][:, None])[:, None, :, None]
    hidden_queries = hidden[:, :, -T:]
    leaves = [poisoned(q, hidden_queries), poisoned(k, hidden), poisoned(v, hidden)]
    clean = [x.requires_grad_() for x in (q, k, v)]
    if kind == "biased":
        bias = torch.randn(1, 1, 20, 20, dtype=torch.float64)
        clean.append(bias.requires_grad_())
        leaves.append(poisoned(bias, hidden | hidden.mT))
    results = []
    for tensors in (clean, leaves):
        bias = {"attn_bias": tensors[3]} if kind == "biased" else {}
        out, lse = sa.structured_attention(*tensors[:3], layout, backend=backend, return_lse=True, **options, **bias)
        both = out.square() + lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        results.append((out, torch.autograd.grad(both.sum(), tensors)))
    (expected, wanted), (out, grads) = results
    assert_close(out.masked_fill(hidden_queries, 0.0), expected.masked_fill(hidden_queries, 0.0))
    assert bool((out[padded.expand(out.shape[0], 1, 20, 1)[:, :, -T:].expand_as(out)] == 0).all())
    for a, b, mask in zip(grads, wanted, (hidden_queries, hidden, hidden, hidden | hidden.mT), strict=False):
        torch.testing.assert_close(a.masked_fill(mask, 0.0), b.masked_fill(mask, 0.0))
