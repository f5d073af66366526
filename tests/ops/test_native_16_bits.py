"""The C++ backend in bfloat16 and float16: no less exact than PyTorch's own kernel, with every option."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from random_calls import cases, tensors
from torch import Tensor

import structattn as sa
from structattn.ops import reference

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("built")]

DTYPES = [torch.bfloat16, torch.float16]
LAYOUTS = {
    "one level": sa.LevelLayout((64,), (1024,)),
    "eight levels": sa.LevelLayout.halving((8,) * 8, 1024),
    "hierarchical values": sa.LevelLayout.halving((8,) * 8, 1024, value_ranks=(8,) * 8),
    "odd ranks": sa.LevelLayout((31, 17, 9, 7), (1024, 256, 64, 16), value_ranks=(29, 19, 9, 7)),
    "sliding": sa.LevelLayout.sliding((32, 16, 16), (None, 128, 32)),
    "factors of levels": sa.LevelLayout((32, 12, 12, 8), (1024, 256, 64, 16), scaling="paper"),
}


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """By norm, and the largest; both relative."""
    difference = found.detach().double() - exact.detach()
    return (
        float(difference.norm() / exact.detach().norm()),
        float(difference.abs().max() / exact.detach().abs().max()),
    )


def with_gradients(attend, tensors_: list[Tensor], cotangent: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    leaves = [x.to(dtype).requires_grad_() for x in tensors_]
    out = attend(*leaves)
    return out, *torch.autograd.grad(out, leaves, cotangent.to(dtype))


def rounded_as_pytorchs_kernel(
    q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor, layout: sa.LevelLayout
) -> tuple[Tensor, ...]:
    """The definition, causal, in float64, with what PyTorch's kernel rounds to 16 bits rounded: weights and
    gradients of scores before they are multiplied, and all results.
    """
    dtype, length = q.dtype, torch.arange(q.shape[2])
    q, k, v, cotangent = (x.double() for x in (q, k, v, cotangent))

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).double()

    shared = layout.shared_levels(length[:, None], length[None]) * (length[:, None] >= length[None])
    score = reference.scores(q, k, layout, None, shared.clamp(min=1))
    weight = score.masked_fill(shared == 0, -torch.inf).softmax(-1)
    per_level, per_count = layout.score_factors()
    levels = [shared > level for level in range(layout.num_levels)]
    slices = layout.value_slices or (slice(None),)
    out = rounded(torch.cat([(rounded(weight) * x) @ v[..., y] for x, y in zip(levels, slices, strict=False)], -1))
    of_weight = sum((cotangent[..., y] @ v[..., y].mT) * x for x, y in zip(levels, slices, strict=False))
    change = weight * (of_weight - (cotangent * out).sum(-1, keepdim=True))
    change = rounded(change * torch.tensor(per_count, dtype=torch.float64)[shared.clamp(min=1) - 1])
    each = list(zip(levels, layout.slices, per_level, strict=True))
    dq = torch.cat([factor * (change * x) @ k[..., y] for x, y, factor in each], -1)
    dk = torch.cat([factor * (change * x).mT @ q[..., y] for x, y, factor in each], -1)
    parts = zip(levels, slices, strict=False)
    dv = torch.cat([(rounded(weight) * x).mT @ cotangent[..., y] for x, y in parts], -1)
    return out, rounded(dq), rounded(dk), rounded(dv)


@pytest.mark.parametrize(("deviation", "mean"), [(1.0, 0.0), (1.0, 10.0), (4.0, 0.0)])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_are_at_most_those_of_pytorchs_kernel(
    dtype: torch.dtype, name: str, deviation: float, mean: float
) -> None:
    """A mean of the values makes gradients of scores differences of large numbers. Scores of a large
    deviation give most of the weight to one key, whose weight should lose nothing.
    """
    torch.manual_seed(0)
    layout = LAYOUTS[name]
    q, k, v, cotangent = (torch.randn(1, 2, 301, 64).to(dtype) for _ in range(4))
    q, v = (deviation * q.float()).to(dtype), (v.float() + mean).to(dtype)

    def exactly(*x: Tensor) -> Tensor:
        return sa.structured_attention(*x, layout, backend="reference")

    def natively(*x: Tensor) -> Tensor:
        return sa.structured_attention(*x, layout, backend="native")

    def plainly(*x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x, is_causal=True)

    exact = with_gradients(exactly, [q, k, v], cotangent, torch.float64)
    found = with_gradients(natively, [q, k, v], cotangent, dtype)
    limits = [rounded_as_pytorchs_kernel(q, k, v, cotangent, layout)]
    if name == "one level":
        limits.append(with_gradients(plainly, [q, k, v], cotangent, dtype))
    for limit in limits:
        for actual, other, expected in zip(found, limit, exact, strict=True):
            assert actual.dtype == dtype
            (norm, largest), (norm_of_other, largest_of_other) = errors(actual, expected), errors(other, expected)
            assert norm <= 1.2 * norm_of_other
            assert largest <= 1.5 * largest_of_other


@given(case=cases(), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_every_option(case, seed: int, dtype: torch.dtype) -> None:
    layout, shape, bias, options = case
    if layout.boundaries is not None:
        layout = sa.LevelLayout(layout.ranks, tuple(4 ** (4 - n) for n in range(len(layout.ranks))), layout.scaling)
    torch.manual_seed(seed)
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors(*shape)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    if bias is not None:
        options["attn_bias"] = torch.randn(bias).masked_fill(torch.rand(bias) < 0.2, -torch.inf)
    (out, lse), (expected, exact_lse) = (
        sa.structured_attention(*x, layout, backend=name, return_lse=True, **options)
        for x, name in ((leaves, "native"), (exact, "reference"))
    )
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    seen = exact_lse.isfinite()
    assert torch.equal(seen, lse.isfinite())
    cotangent, of_lse = torch.randn_like(out), torch.randn_like(lse)
    found, wanted = (
        torch.autograd.grad((x * cotangent.to(x.dtype)).sum() + (y[seen] * of_lse.to(y.dtype)[seen]).sum(), z)
        for x, y, z in ((out, lse, leaves), (expected, exact_lse, exact))
    )
    for a, b in zip((out, lse[seen], *found), (expected, exact_lse[seen], *wanted), strict=True):
        largest = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a.detach().double(), b.detach(), rtol=0, atol=0.02 * (1 + largest))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32, torch.float64])
@pytest.mark.parametrize("of_bias", [*DTYPES, torch.float32, torch.float64])
def test_a_bias_of_16_bits_is_read_as_it_is(dtype: torch.dtype, of_bias: torch.dtype) -> None:
    """Also keys that are not neighbours, and rows that all heads share."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 90, 16).to(dtype) for _ in range(3))
    bias = torch.randn(2, 1, 90, 90).to(of_bias).masked_fill(torch.rand(90, 90) < 0.2, -torch.inf)
    expected = sa.structured_attention(q, k, v, backend="native", attn_bias=bias.to(torch.float64))
    for own in (bias, bias.mT.contiguous().mT):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = sa.structured_attention(q, k, v, backend="native", attn_bias=own)
        assert torch.equal(out, expected)
        copies = any(event.name == "aten::_to_copy" for event in profile.events())
        added_up_in = torch.float64 if dtype == torch.float64 else torch.float32
        assert copies == (of_bias != added_up_in and (of_bias not in DTYPES or dtype == torch.float64))


@pytest.mark.parametrize("size", [1e-30, 1e-6, 30.0, 3e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_finite_where_pytorchs_kernel_is(dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    x = [(torch.randn(1, 2, 130, 32) * factor).to(dtype).requires_grad_() for factor in (30.0, 1.0, size)]
    cotangent = torch.randn(1, 2, 130, 32).to(dtype)
    for layout in (None, sa.LevelLayout((16, 8, 8), (1024, 64, 16))):
        out = sa.structured_attention(*x, layout, backend="native")
        plain = F.scaled_dot_product_attention(*x, is_causal=True)
        found, expected = (torch.autograd.grad(y, x, cotangent) for y in (out, plain))
        for a, b in zip((out, *found), (plain, *expected), strict=True):
            assert bool(a.isfinite().all()) or not bool(b.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_rounded_to_the_nearest_even_number(dtype: torch.dtype) -> None:
    """The mean of two values lies between two numbers of 16 bits as often as not. NaN and infinity stay."""
    torch.manual_seed(0)
    most = round(4 / torch.finfo(dtype).eps)  # whole numbers up to half of it are exact
    v = torch.randint(-most, most, (8, 16, 2, 64)).to(dtype)
    v[:, 0, 1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    q = torch.zeros_like(v)
    expected = v.double().mean(2).to(dtype)
    assert float((expected.double() != v.double().mean(2)).double().mean()) > 0.2  # some are rounded
    out = sa.structured_attention(q, q, v, backend="native")[:, :, 1]
    cache = sa.LevelCache()
    cache.append(q[:, :, :1], v[:, :, :1])
    with torch.no_grad():
        step = cache.attend(q[:, :, 1:], q[:, :, 1:], v[:, :, 1:], backend="native")[:, :, 0]
    for found in (out, step):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
