"""Chunked attention is the definition with a mask that hides other chunks, where blocks divide chunks."""

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import structattn as sa
from structattn.ops.chunks import chunked_attention
from structattn.testing.tolerances import assert_close

LAYOUTS = {
    "plain": None,
    "levels": sa.LevelLayout((3, 2, 1), (96, 6, 3), value_ranks=(1, 1, 4)),
    "segments of rows": sa.LevelLayout.from_boundaries((3, 3), [((0,), (0, 4)), ((0,), (0, 1, 2)), ((0,), (0,))]),
    "global window": sa.GlobalWindowLayout((2, 4), 4),
}


def draw(length, queries, heads=(4, 2, 2)):
    rng = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(3, h, length, 6, generator=rng, dtype=torch.float64) for h in heads)
    return [x.requires_grad_() for x in (q[:, :, length - queries :], k, v)]


@given(
    layout=st.sampled_from(["plain", "levels", "global window"]),
    length=st.integers(1, 40),
    queries=st.integers(1, 40),
    chunk_size=st.sampled_from([6, 12, 96]),
    padding=st.one_of(st.none(), st.tuples(*[st.integers(0, 20)] * 3)),
    window=st.sampled_from([None, 4]),
)
def test_by_a_mask(layout, length, queries, chunk_size, padding, window) -> None:
    form, queries = LAYOUTS[layout], min(queries, length)
    window = None if layout == "global window" else window
    left = None if padding is None else torch.tensor(padding).clamp(max=length - 1)
    at = torch.arange(length) - (torch.zeros(3, 1, dtype=torch.int64) if left is None else left[:, None])
    chunk = at.div(chunk_size, rounding_mode="floor")
    mask = (chunk[:, None, length - queries :, None] == chunk[:, None, None, :]) & (at >= 0)[:, None, None, :]
    inputs, others = draw(length, queries), draw(length, queries)
    found = chunked_attention(*inputs, form, chunk_size=chunk_size, left_padding=left, window=window, scale=None)
    q, k, v = others
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    wanted = sa.structured_attention(
        q, k, v, form, attn_mask=mask, left_padding=left, window=window, backend="reference"
    )
    assert_close(found, wanted)
    cotangent = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent * (at >= 0)[:, None, length - queries :, None]
    for one, other in zip(
        torch.autograd.grad(found, inputs, cotangent), torch.autograd.grad(wanted, others, cotangent), strict=True
    ):
        assert_close(one, other, gradient=True)


@pytest.mark.parametrize("layout", ["levels", "segments of rows"])
def test_chunk_by_chunk(layout) -> None:
    """Blocks begin anew in each chunk, and each row has its own segments."""
    form, padding = LAYOUTS[layout], torch.tensor([0, 3, 8])
    q, k, v = draw(23, 23)
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    found = chunked_attention(q, k, v, form, chunk_size=5, left_padding=padding)
    for row, pad in enumerate(padding.tolist()):
        assert not found[row, :, :pad].any()
        for start in range(pad, 23, 5):
            part = slice(row, row + 1), slice(None), slice(start, start + 5)
            alone = sa.structured_attention(q[part], k[part], v[part], form.select_rows([row]), backend="reference")
            assert_close(found[part], alone)
    packed = torch.tensor([0, 7, 8, 23])
    rows = [x[:1] for x in (q, k, v)]
    found = chunked_attention(*rows, form, chunk_size=5, cu_seqlens=packed)
    for number, (first, end) in enumerate([(0, 7), (7, 8), (8, 23)]):
        for start in range(first, end, 5):
            part = slice(None), slice(None), slice(start, min(start + 5, end))
            own = form.select_rows([number])
            alone = sa.structured_attention(*(x[part] for x in rows), own, backend="reference")
            assert_close(found[part], alone)


@pytest.mark.parametrize("is_packed", [False, True])
def test_nan_at_the_start_of_the_next_row_does_not_reach_a_short_chunk(is_packed: bool) -> None:
    """The last chunk of a row is shorter than others; what fills it up is of the next row."""
    q, k, v = (torch.randn(2, 2, 12, 8, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {"left_padding": torch.tensor([2, 2])}
    noise = torch.zeros(2, 1, 12, 1)
    noise[:, :, :2] = torch.nan
    inputs = [x + noise for x in (q, k, v)]
    if is_packed:
        inputs = [x.transpose(0, 1).flatten(1, 2)[None] for x in inputs]
        options = {"cu_seqlens": torch.tensor([0, 12, 24])}
    out = chunked_attention(*inputs, None, chunk_size=7, scale=None, **options)
    last = out[:1, :, 9:12]  # of the first row, both times
    assert last.isfinite().all()
    for gradient in torch.autograd.grad(last.sum(), (q, k, v)):
        assert gradient[0, :, 9:].isfinite().all()
