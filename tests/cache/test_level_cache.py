"""Prefill and decoding through a cache, in any chunking, is one forward pass; and nothing that is kept is
wrong or too much.
"""

import json
import struct
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import structattn as sa
from structattn.cache import LayerCaches
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.testing.tolerances import COMPUTED, FORWARD, ROUNDING, ROUNDINGS, assert_close, relative_error

SEGMENTS = ((0,), (0, 13, 30), (0, 7, 13, 30, 33))
LAYOUTS = {
    "plain": None,
    "one level": sa.LevelLayout((6,), (64,)),
    "levels": sa.LevelLayout((3, 2, 1), (32, 8, 4)),
    "paper": sa.LevelLayout((3, 2, 1), (32, 16, 4), "paper"),
    "equal blocks, values": sa.LevelLayout((2, 2, 2), (20, 20, 5), "mup", (1, 3, 2)),
    "values": sa.LevelLayout((3, 3), (64, 16), "paper_sum", (4, 2)),
    "segments": sa.LevelLayout.from_boundaries((2, 2, 2), SEGMENTS),
    "segments, values": sa.LevelLayout.from_boundaries((2, 2, 2), SEGMENTS, value_ranks=(1, 1, 4)),
    "rows": sa.LevelLayout.from_boundaries((3, 3), [((0,), (0, 9)), ((0,), (0,)), ((0,), (0, 20, 21))]),
    "sliding": sa.LevelLayout.sliding((3, 2, 1), (None, 9, 4)),
    "sliding, values": sa.LevelLayout.sliding((2, 2, 2), (20, 20, 5), "paper", (1, 3, 2)),
    "sink tokens": sa.LevelLayout((3, 2, 1), (32, 8, 4), "paper", (1, 3, 2), sink_tokens=3),
    "window, sink tokens": sa.LevelLayout.sliding((6,), (5,), sink_tokens=4),
    "sliding, sink tokens": sa.LevelLayout.sliding((3, 2, 1), (None, 9, 4), sink_tokens=6),
    "rows, sink tokens": sa.LevelLayout.from_boundaries(
        (3, 3), [((0,), (0, 9)), ((0,), (0,)), ((0,), (0, 20, 21))], sink_tokens=2
    ),
    "global window": sa.GlobalWindowLayout((2, 4), 7),
    "global window, mup": sa.GlobalWindowLayout((2, 4), 7, "mup"),
}


def draw(batch, heads, key_heads, value_heads, length, *, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(batch, h, length, 6, generator=rng, dtype=torch.float64).to(dtype)
        for h in (heads, key_heads, value_heads)
    )


def dense(q, k, v, layout, **options):
    """The definition, with keys and values repeated for each query head."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return sa.structured_attention(q, k, v, layout, backend="reference", **options)


def masked(kind, batch, heads, length):
    """A mask that hides about a third of the pairs, and rows that see nothing: of keys, of pairs, of heads,
    or added to the scores.
    """
    shape = {"keys": (batch, 1, 1, length), "pairs": (batch, 1, length, length), "heads": (heads, 1, length)}
    draws = torch.rand(shape.get(kind, (batch, 1, 1, length)), generator=torch.Generator().manual_seed(length))
    shown = (draws > 0.3) & (torch.arange(length) != 0)
    return shown if kind in shape else draws.double().masked_fill(~shown, -torch.inf)


MASKS = [None, None, "keys", "pairs", "heads", "added"]


def in_chunks(q, k, v, layout, size, left_padding, attn_mask=None, alibi_slopes=None, **options):
    """The definition, chunk by chunk of each row."""
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for row, pad in enumerate([0] * len(q) if left_padding is None else left_padding.tolist()):
        own = layout.select_rows([row]) if isinstance(layout, sa.LevelLayout) else layout
        for start in range(pad, q.shape[2], size):
            part = slice(row, row + 1), slice(None), slice(start, start + size)
            mask = None
            if attn_mask is not None:
                shape = (len(q), -1, q.shape[2], q.shape[2])
                whole = attn_mask[(None,) * (4 - attn_mask.dim())].expand(shape)
                mask = whole[row : row + 1, :, start : start + size, start : start + size]
            slopes = alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[row : row + 1]
            out[part] = dense(q[part], k[part], v[part], own, attn_mask=mask, alibi_slopes=slopes, **options)
    return out


def through(cache, q, k, v, sizes, attn_mask=None, **options):
    outs, first = [], 0
    for size in sizes:
        part, own = slice(first, first + size), None
        if attn_mask is not None:
            own = attn_mask[..., part if attn_mask.shape[-2] > 1 else slice(None), : first + size]
        outs.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part], attn_mask=own, **options))
        first += size
    assert first == q.shape[2]
    return torch.cat(outs, dim=2)


def cut(total, sizes):
    """The sizes, repeated, as a chunking of ``total``."""
    found, left = [], total
    while left:
        size = min(left, sizes[len(found) % len(sizes)])
        found.append(size)
        left -= size
    return found


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.sampled_from([None, None, 1, 3, 9, 50]),
    chunk_size=st.sampled_from([None, None, 1, 6, 16]),
    heads=st.sampled_from([(4, 2, 2), (4, 4, 2), (4, 1, 4), (6, 2, 3)]),
    length=st.integers(1, 61),
    sizes=st.lists(st.sampled_from([1, 1, 2, 5, 16, 17, 40]), min_size=1, max_size=4),
    padding=st.one_of(st.none(), st.tuples(*[st.integers(0, 20)] * 3)),
    scale=st.sampled_from([None, 0.3, 0.0, -1.0]),
    page_size=st.sampled_from([1, 4, 1024]),
    max_length=st.sampled_from([None, 7, 61]),
    softcap=st.sampled_from([None, 0.4]),
    with_sinks=st.booleans(),
    mask=st.sampled_from(MASKS),
    slopes_of=st.sampled_from([None, (), (3,)]),
)
def test_any_chunking_is_one_forward_pass(
    layout,
    window,
    chunk_size,
    heads,
    length,
    sizes,
    padding,
    scale,
    page_size,
    max_length,
    softcap,
    with_sinks,
    mask,
    slopes_of,
) -> None:
    form = LAYOUTS[layout]
    if isinstance(form, sa.GlobalWindowLayout):
        window = scale = None
    elif form is not None and form.sink_tokens:
        chunk_size = None  # a chunk sees no other one
    if padding is not None:
        padding = torch.tensor(padding).clamp(max=length)
    q, k, v = draw(3, *heads, length, seed=length)
    sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if with_sinks else None
    mask = None if mask is None else masked(mask, 3, heads[0], length)
    slopes = None if slopes_of is None else torch.linspace(0, 1, heads[0]).expand(*slopes_of, heads[0])
    if slopes_of:
        slopes = slopes * torch.tensor([[1.0], [0.1], [-0.1]])
    options = {"scale": scale, "softcap": softcap, "sinks": sinks, "attn_mask": mask, "alibi_slopes": slopes}
    if chunk_size is None:
        expected = dense(q, k, v, form, window=window, left_padding=padding, **options)
    else:
        expected = in_chunks(q, k, v, form, chunk_size, padding, window=window, **options)
    own = {"window": window, "chunk_size": chunk_size, "left_padding": padding}
    cache = sa.LevelCache(form, page_size=page_size, max_length=max_length, **own)
    assert_close(through(cache, q, k, v, cut(length, sizes), **options), expected)
    assert cache.length == length
    cache.reset()
    assert_close(through(cache, q, k, v, [length], **options), expected)
    cache.reset()
    assert_close(through(cache, q, k, v, [1] * length, **options), expected)


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.sampled_from([None, 9]),
    past=st.integers(0, 40),
    new=st.integers(1, 9),
    padding=st.sampled_from([None, (0, 3, 1)]),
    mask=st.sampled_from(MASKS),
    with_sinks=st.booleans(),
)
def test_weights_are_those_of_one_forward_pass(layout, window, past, new, padding, mask, with_sinks) -> None:
    form, length = LAYOUTS[layout], past + new
    window = None if isinstance(form, sa.GlobalWindowLayout) else window
    padding = None if padding is None else torch.tensor(padding).clamp(max=length)
    q, k, v = draw(3, 4, 2, 2, length)
    sinks = torch.linspace(-1, 2, 4, dtype=torch.float64) if with_sinks else None
    mask = None if mask is None else masked(mask, 3, 4, length)
    options = {"softcap": 0.4, "sinks": sinks}
    each = torch.eye(length, dtype=torch.float64).expand(3, 4, -1, -1)
    scores = replace(form, value_ranks=None) if isinstance(form, sa.LevelLayout) else form
    expected = dense(q, k, each, scores, window=window, left_padding=padding, attn_mask=mask, **options)
    cache = sa.LevelCache(form, window=window, left_padding=padding)
    cache.append(k[:, :, :past], v[:, :, :past])
    own = mask if mask is None or mask.shape[-2] == 1 else mask[..., past:, :]
    found = cache.weights(q[:, :, past:], k[:, :, past:], v[:, :, past:], attn_mask=own, **options)
    assert_close(found, expected[:, :, past:])
    assert cache.length == past


def test_a_mask_needs_a_column_for_every_token() -> None:
    q, k, v = draw(2, 4, 2, 2, 6)
    cache = sa.LevelCache()
    cache.append(k[:, :, :4], v[:, :, :4])
    for mask, message in (
        (torch.ones(2, 1, 1, 2, dtype=torch.bool), r"does not broadcast to \(B, H, T, S\) = \(2, 4, 2, 6\)"),
        (torch.ones(2, 1, 1, 6, dtype=torch.int64), "attn_mask must be bool"),
        ([True] * 6, "attn_mask must be a torch.Tensor"),
    ):
        for call in (cache.attend, cache.weights):
            with pytest.raises(ShapeError, match=message):
                call(q[:, :, 4:], k[:, :, 4:], v[:, :, 4:], attn_mask=mask)
        assert cache.length == 4


def test_a_gradient_reaches_a_mask_that_is_added() -> None:
    q, k, v = draw(1, 2, 2, 2, 9)
    cache = sa.LevelCache(LAYOUTS["levels"])
    cache.append(k[:, :, :8], v[:, :, :8])
    bias = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    cache.attend(q[:, :, 8:], k[:, :, 8:], v[:, :, 8:], attn_mask=bias).sum().backward()
    other = torch.zeros(9, dtype=torch.float64, requires_grad=True)
    dense(q[:, :, 8:], k, v, LAYOUTS["levels"], attn_mask=other).sum().backward()
    assert bias.grad.any()
    assert_close(bias.grad, other.grad, gradient=True)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_named_backend_gives_the_same(backend) -> None:
    q, k, v = draw(2, 4, 2, 2, 40)
    layout = LAYOUTS["equal blocks, values"]
    cache = sa.LevelCache(layout)
    assert_close(through(cache, q, k, v, [9, 1, 1, 20, 9], backend=backend), dense(q, k, v, layout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["plain", "equal blocks, values"])
@pytest.mark.parametrize("padding", [None, (0, 3)])
def test_narrow_dtypes(dtype, layout, padding) -> None:
    q, k, v = draw(2, 4, 2, 2, 50, dtype=dtype)
    padding = None if padding is None else torch.tensor(padding)
    expected = dense(*(x.double() for x in (q, k, v)), LAYOUTS[layout], left_padding=padding)
    cache = sa.LevelCache(LAYOUTS[layout], left_padding=padding)
    out = through(cache, q, k, v, [20] + [1] * 30)
    assert out.dtype == dtype
    assert relative_error(out, expected) <= FORWARD[dtype]


def test_without_padding_a_padding_of_zeros_changes_nothing() -> None:
    q, k, v = draw(2, 2, 2, 2, 30)
    one, two = (sa.LevelCache(LAYOUTS["levels"], left_padding=pad) for pad in (None, [0, 0]))
    assert torch.equal(through(one, q, k, v, [10] + [1] * 20), through(two, q, k, v, [10] + [1] * 20))
    assert two.positions(2).tolist() == [[30, 31]] * 2
    assert one.positions(2).tolist() == [30, 31]


def test_the_future_cannot_change_the_past() -> None:
    q, k, v = draw(1, 2, 2, 2, 30)
    one, two = sa.LevelCache(LAYOUTS["levels"]), sa.LevelCache(LAYOUTS["levels"])
    other = k.clone()
    other[:, :, 20:] = 100.0
    a, b = through(one, q, k, v, [5] * 6), through(two, q, other, v, [5] * 6)
    assert torch.equal(a[:, :, :20], b[:, :, :20])
    assert not torch.equal(a[:, :, 20:], b[:, :, 20:])


def test_old_blocks_leave_no_trace_even_if_not_finite() -> None:
    layout = sa.LevelLayout((2, 4), (64, 8))
    q, k, v = draw(2, 2, 2, 2, 24)
    for padding in (None, [0, 3]):
        cache = sa.LevelCache(layout, left_padding=padding)
        expected = dense(q, k, v, layout, left_padding=None if padding is None else torch.tensor(padding))
        poisoned = k.clone()
        poisoned[:, :, :8, 2:] = torch.nan  # level 2 of the first block, which no later query shares
        cache.append(poisoned[:, :, :19], v[:, :, :19])
        outs = [cache.attend(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(19, 24)]
        assert_close(torch.cat(outs, dim=2), expected[:, :, 19:])


@pytest.mark.parametrize("length", [1, 5, 64, 100, pytest.param(257, marks=pytest.mark.full)])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    "layout",
    [
        sa.LevelLayout.halving((3, 2, 1), 128, value_ranks=(2, 2, 2)),
        sa.LevelLayout.sliding((3, 2, 1), (None, 64, 32), value_ranks=(2, 2, 2)),
    ],
    ids=["blocks", "sliding"],
)
def test_what_is_allocated_is_what_the_layout_says(length, page_size, layout) -> None:
    q, k, v = draw(2, 4, 2, 2, length)
    numbers = 2 * 2 * 8  # batch, heads, bytes
    grown, at_once = sa.LevelCache(layout, page_size=page_size), sa.LevelCache(layout, max_length=length)
    for cache in (grown, at_once):
        through(cache, q, k, v, [1] * length)
    keys, values = layout.key_cache_size(length), layout.value_cache_size(length, 6)
    assert at_once.key_nbytes == numbers * keys
    assert at_once.value_nbytes == numbers * values
    assert at_once.nbytes == at_once.key_nbytes + at_once.value_nbytes
    slack = page_size - 1
    assert numbers * keys <= grown.key_nbytes <= numbers * (keys + slack * 6)
    assert numbers * values <= grown.value_nbytes <= numbers * (values + slack * 6)


@pytest.mark.parametrize(("page_size", "slack"), [(1, 0), (7, 6)])
def test_sliding_levels_take_the_bytes_of_their_windows_at_every_step(page_size, slack) -> None:
    """Each level a ring of its window, at most a page more while it fills, and nothing that grows after."""
    q, k, v = draw(2, 4, 2, 2, 50)
    for windows, window, ends in (((None, 20, 8), None, (999, 20, 8)), ((40, 20, 20), 30, (30, 20, 20))):
        layout = sa.LevelLayout.sliding((3, 2, 1), windows, value_ranks=(1, 2, 3))
        cache = sa.LevelCache(layout, window=window, page_size=page_size)
        for step in range(50):
            cache.attend(*(x[:, :, step : step + 1] for x in (q, k, v)))
            for nbytes, ranks in ((cache.key_nbytes, (3, 2, 1)), (cache.value_nbytes, (1, 2, 3))):
                least, most = (
                    2 * 2 * 8 * sum(r * min(end, step + 1 + more) for r, end in zip(ranks, ends, strict=True))
                    for more in (0, slack)
                )
                assert least <= nbytes <= most


def test_eight_levels_are_four_times_smaller() -> None:
    layout = sa.LevelLayout.halving((8,) * 8, 4096, value_ranks=(8,) * 8)
    cache = sa.LevelCache(layout, max_length=4096)
    cache.append(*(torch.zeros(1, 1, 4096, 64) for _ in range(2)))
    plain = 2 * 4096 * 64 * 4
    assert plain / cache.nbytes == pytest.approx(8 / (2 - 2**-7), rel=COMPUTED)


def test_a_window_keeps_no_more_than_the_window() -> None:
    q, k, v = draw(1, 2, 2, 2, 300)
    cache = sa.LevelCache(sa.LevelLayout((2, 4), (512, 4)), window=10, page_size=1)
    through(cache, q, k, v, [1] * 300)
    assert cache.key_nbytes == 8 * 2 * (10 * 2 + 4 * 4)
    assert cache.value_nbytes == 8 * 2 * 10 * 6


def test_appending_moves_nothing() -> None:
    q, k, v = draw(1, 2, 2, 2, 200)
    cache = sa.LevelCache(LAYOUTS["levels"], page_size=16)
    before: list[int] = []
    for step in range(200):
        cache.attend(q[:, :, step : step + 1], k[:, :, step : step + 1], v[:, :, step : step + 1])
        now = [page.buffers[0].data_ptr() for store, _ in cache._contents.stores() for page in store.pages]
        assert set(before) <= set(now)
        before = now
    assert cache._contents.keys[0].capacity == 208


# crop, reorder, select


def test_crop_within_the_blocks_goes_on_as_if_nothing_had_been() -> None:
    layout = sa.LevelLayout((3, 3), (64, 16))
    q, k, v = draw(2, 4, 2, 2, 40)
    expected = dense(q, k, v, layout)
    cache = sa.LevelCache(layout)
    wrong = torch.full_like(k, 7.0)
    through(cache, q[:, :, :36], k[:, :, :36], v[:, :, :36], [36])
    cache.attend(q[:, :, :3], wrong[:, :, :3], wrong[:, :, :3])
    cache.crop(34)
    assert cache.length == 34
    out = cache.attend(q[:, :, 34:35], k[:, :, 34:35], v[:, :, 34:35])
    out = torch.cat([out, cache.attend(q[:, :, 35:], k[:, :, 35:], v[:, :, 35:])], dim=2)
    assert_close(out, expected[:, :, 34:])


@given(
    layout=st.sampled_from(sorted(set(LAYOUTS) - {"rows", "rows, sink tokens"})),
    window=st.sampled_from([None, 3, 9]),
    length=st.integers(1, 60),
    to=st.integers(0, 60),
    again=st.integers(0, 60),
    padding=st.one_of(st.none(), st.tuples(*[st.integers(0, 10)] * 2)),
)
def test_crop_works_or_says_why_not(layout, window, length, to, again, padding) -> None:
    form = LAYOUTS[layout]
    window = None if isinstance(form, sa.GlobalWindowLayout) else window
    to, again = min(to, length), min(again, to, length)
    q, k, v = draw(2, 2, 2, 2, length)
    padding = None if padding is None else torch.tensor(padding).clamp(max=length)
    expected = dense(q, k, v, form, window=window, left_padding=padding)
    cache = sa.LevelCache(form, window=window, left_padding=padding, page_size=4)
    through(cache, q, k, v, [length])
    for target in (to, again):
        before, refused = cache.length, None
        try:
            cache.crop(target)
        except CacheError as error:
            refused = str(error)
        if refused is not None:
            assert cache.length == before  # nothing was changed
            shortest = int(refused.split("at least ")[1].split(",")[0])
            assert target < shortest <= before
            cache.check_crop(shortest)
            return
        assert cache.length == target
    rest = slice(cache.length, length)
    if rest.stop > rest.start:
        assert_close(cache.attend(q[:, :, rest], k[:, :, rest], v[:, :, rest]), expected[:, :, rest])


def test_a_plain_cache_crops_to_any_length() -> None:
    _, k, v = draw(1, 2, 2, 2, 50)
    cache = sa.LevelCache()
    cache.append(k, v)
    for length in (49, 20, 1, 0):
        cache.crop(length)
        assert cache.length == length


def test_crop_refuses_what_was_dropped() -> None:
    _, k, v = draw(1, 2, 2, 2, 40)
    cache = sa.LevelCache(sa.LevelLayout((3, 3), (64, 16)))
    cache.append(k, v)
    with pytest.raises(CacheError, match="level 2 would need the positions from 16 on, and keeps those from 32 on"):
        cache.crop(20)
    with pytest.raises(ConfigError, match="length from 0 to 40"):
        cache.crop(41)
    with pytest.raises(ConfigError, match="length from 0 to 40"):
        cache.crop(-1)
    cache.crop(32)  # the next token begins a block: nothing of level 2 is needed
    assert cache.length == 32


@pytest.mark.quick(layout=["plain", "levels", "segments, values", "sliding, sink tokens"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("padding", [None, (0, 4, 9)])
def test_rows_can_be_reordered_and_selected(layout, padding) -> None:
    form, rows = LAYOUTS[layout], [2, 0, 0]
    q, k, v = draw(3, 4, 2, 2, 36)
    padding = None if padding is None else torch.tensor(padding)

    def picked(x):
        return torch.cat([x[:, :, :20][rows], x[:, :, 20:]], dim=2)

    new_form = form.select_rows(rows) if isinstance(form, sa.LevelLayout) else form
    expected = dense(picked(q), picked(k), picked(v), new_form, left_padding=None if padding is None else padding[rows])
    for move in ("reorder", "select"):
        cache = sa.LevelCache(form, left_padding=padding, page_size=8)
        through(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [12] + [1] * 8)
        getattr(cache, move)(torch.tensor(rows))
        out = through(cache, q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], [1] * 5 + [11])
        assert_close(out, expected[:, :, 20:])
    cache = sa.LevelCache(form, left_padding=padding)
    through(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [20])
    cache.select(torch.tensor([1]))
    assert cache.batch_size == 1
    cache.repeat_interleave(2)
    assert cache.batch_size == 2
    both = slice(1, 2)
    out = through(cache, *(x[both, :, 20:].repeat_interleave(2, 0) for x in (q, k, v)), [1] * 16)
    own = form.select_rows([1]) if isinstance(form, sa.LevelLayout) else form
    alone = dense(q[both], k[both], v[both], own, left_padding=None if padding is None else padding[both])
    assert_close(out, alone[:, :, 20:].repeat_interleave(2, 0))


# files


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("padding", [None, (0, 4, 9)])
def test_a_saved_cache_goes_on_with_the_same_numbers(tmp_path, layout, padding) -> None:
    q, k, v = draw(3, 4, 2, 2, 36)
    window = None if layout.startswith("global window") else 20
    cache = sa.LevelCache(LAYOUTS[layout], left_padding=padding, window=window, page_size=8)
    through(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [20])
    cache.save(tmp_path / "one.safetensors")
    found = sa.LevelCache.load(tmp_path / "one.safetensors")
    assert (found.length, found.nbytes, found.layout, found.window) == (20, cache.nbytes, cache.layout, window)
    rest = (x[:, :, 20:] for x in (q, k, v))
    expected = through(cache, q[:, :, 20:], k[:, :, 20:], v[:, :, 20:], [1] * 16)
    assert torch.allclose(through(found, *rest, [1] * 16), expected, rtol=ROUNDINGS, atol=ROUNDING)


def test_layers_are_saved_together(tmp_path) -> None:
    _, k, v = draw(2, 2, 2, 2, 20, dtype=torch.bfloat16)
    layers = LayerCaches([sa.LevelCache(LAYOUTS["levels"]), sa.LevelCache()])
    for layer in layers:
        layer.append(k, v)
    layers.save(tmp_path / "all.safetensors")
    found = LayerCaches.load(tmp_path / "all.safetensors")
    assert len(found) == 2
    assert found.nbytes == layers.nbytes
    assert [layer.layout for layer in found] == [LAYOUTS["levels"], None]
    with pytest.raises(ConfigError, match="2 layers: read it with LayerCaches.load"):
        sa.LevelCache.load(tmp_path / "all.safetensors")


def test_a_damaged_file_is_refused(tmp_path) -> None:
    path = tmp_path / "one.safetensors"
    with pytest.raises(CheckpointError, match="cannot read the cache"):
        sa.LevelCache.load(path)
    with pytest.raises(CacheError, match="empty cache has nothing to save"):
        sa.LevelCache().save(path)
    assert not path.exists()
    _, k, v = draw(1, 2, 2, 2, 20)
    cache = sa.LevelCache()
    cache.append(k, v)
    cache.save(path)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        sa.LevelCache.load(path)
    path.write_bytes(content[:-9])
    with pytest.raises(CheckpointError, match="missing or damaged"):
        sa.LevelCache.load(path)
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    assert "length" in header["__metadata__"]["structattn_cache"]
    path.write_bytes(content.replace(b'\\"length\\": 20', b'\\"length\\": 19'))
    with pytest.raises(CheckpointError, match="was changed since it was written"):
        sa.LevelCache.load(path)
    header.pop("__metadata__")
    plain = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(plain)) + plain + content[8 + size :])
    with pytest.raises(CheckpointError, match="is not a cache that structattn saved"):
        sa.LevelCache.load(path)


def test_layers_crop_together_or_not_at_all() -> None:
    _, k, v = draw(1, 2, 2, 2, 40)
    layers = LayerCaches([sa.LevelCache(), sa.LevelCache(sa.LevelLayout((3, 3), (64, 16)))])
    for layer in layers:
        layer.append(k, v)
    with pytest.raises(CacheError):
        layers.crop(20)
    assert [layer.length for layer in layers] == [40, 40]
    layers.crop(35)
    assert [layer.length for layer in layers] == [35, 35]
    layers.reset()
    assert layers.length == 0


# mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be an int of at least 1, got 0"),
        ({"page_size": 0}, "page_size must be an int of at least 1, got 0"),
        ({"max_length": 1.5}, "max_length must be an int of at least 1, got 1.5"),
        ({"left_padding": [1, -1]}, "left_padding needs one int of at least 0 per batch row"),
        ({"left_padding": [0.5]}, "left_padding needs one int"),
        ({"layout": LAYOUTS["global window"], "window": 3}, "a global-window layout has its own window"),
        ({"layout": LAYOUTS["sink tokens"], "chunk_size": 4}, "see no other chunk, and so no sink tokens"),
    ],
)
def test_options_out_of_range(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        sa.LevelCache(**options)


def test_a_global_window_layout_has_its_own_scale() -> None:
    q, k, v = draw(1, 2, 2, 2, 5)
    with pytest.raises(ConfigError, match="has its own scale: leave scale at None"):
        sa.LevelCache(LAYOUTS["global window"]).attend(q, k, v, scale=0.3)


def test_tokens_that_do_not_fit() -> None:
    q, k, v = draw(2, 4, 2, 2, 5)
    cases = [
        (sa.LevelCache(), (q, k[:1], v), "one batch and length"),
        (sa.LevelCache(), (q, k, v[:, :, :3]), "one batch and length"),
        (sa.LevelCache(), (q, k.float(), v), "one dtype and device"),
        (sa.LevelCache(), (q[:, :3], k, v), "multiple of the key and value heads, got 3, 2, 2"),
        (sa.LevelCache(), (q[..., :5], k, v), "head dimensions differ: q 5, k 6"),
        (sa.LevelCache(), (q[0], k, v), "q must be floating point of shape"),
        (sa.LevelCache(sa.LevelLayout((4, 4), (8, 4))), (q, k, v), "expected 6, got 4|4 = 8"),
        (sa.LevelCache(sa.LevelLayout((4, 2), (8, 4), value_ranks=(1, 1))), (q, k, v), r"expected 6, got 1\|1 = 2"),
        (sa.LevelCache(left_padding=[1, 2, 3]), (q, k, v), "left_padding has 3 rows, but the tokens have 2"),
        (sa.LevelCache(LAYOUTS["rows"]), (q, k, v), "expected 2, got 3"),
        (sa.LevelCache(), (q, k.to(torch.float8_e5m2), v), "k must be .*, of 16, 32 or 64 bits, .* got torch.float8"),
        (sa.LevelCache(storage=sa.Storage(4, 4, 2, 0)), [x.to(torch.float8_e5m2) for x in (q, k, v)], "16, 32 or 64"),
    ]
    for cache, tokens, message in cases:
        with pytest.raises(ShapeError, match=message.replace("4|4", r"4\|4")):
            cache.attend(*tokens)
        assert cache.length == 0
    cache = sa.LevelCache()
    cache.attend(q, k, v)
    with pytest.raises(ShapeError, match="must be like the first ones"):
        cache.attend(q[:, :, :1], k[:, :1, :1], v[:, :, :1])
    for indices, message in (
        (torch.tensor([0, 2]), r"indices must lie in \[0, 2\), got 0 to 2"),
        (torch.tensor([0]), r"must have shape \(2,\)"),
        (torch.tensor([0.0, 1.0]), "1-dimensional int tensor"),
    ):
        with pytest.raises(ShapeError, match=message):
            cache.reorder(indices)


def test_rows_move_before_the_first_token_too() -> None:
    layout = LAYOUTS["rows"]
    q, k, v = draw(3, 2, 2, 2, 30)
    cache = sa.LevelCache(layout)
    cache.reorder(torch.tensor([2, 0, 1]))
    assert_close(through(cache, q, k, v, [20] + [1] * 10), dense(q, k, v, layout.select_rows([2, 0, 1])))
    cache = sa.LevelCache(layout)
    cache.repeat_interleave(2)
    assert cache.batch_size == 6


def test_padding_alone_is_not_saved(tmp_path) -> None:
    q, k, v = draw(2, 2, 2, 2, 3)
    cache = sa.LevelCache(left_padding=[5, 6])
    cache.attend(q, k, v)
    with pytest.raises(CacheError, match="nothing but padding"):
        cache.save(tmp_path / "cache.safetensors")


def test_inference_mode_may_come_and_go() -> None:
    layout = LAYOUTS["levels"]
    for padding in (None, [0, 3]):
        q, k, v = draw(2, 2, 2, 2, 30)
        expected = dense(q, k, v, layout, left_padding=None if padding is None else torch.tensor(padding))
        cache = sa.LevelCache(layout, left_padding=padding, page_size=4)
        with torch.inference_mode():
            outs = [through(cache, *(x[:, :, :12] for x in (q, k, v)), [10, 1, 1])]
            cache.reorder(torch.tensor([0, 1]))
        outs.append(through(cache, *(x[:, :, 12:20] for x in (q, k, v)), [1] * 8))
        with torch.inference_mode():
            outs.append(through(cache, *(x[:, :, 20:] for x in (q, k, v)), [1] * 10))
        assert_close(torch.cat(outs, dim=2), expected)


def test_what_is_kept_carries_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in draw(1, 2, 2, 2, 10))
    cache = sa.LevelCache(LAYOUTS["levels"])
    out = cache.attend(q, k, v)
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = torch.autograd.grad(dense(q, k, v, LAYOUTS["levels"]).square().sum(), (q, k, v))
    for a, b in zip(grads, expected, strict=True):
        assert_close(a, b, gradient=True)
    later = cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    (only,) = torch.autograd.grad(later.sum(), q)
    assert bool(only.isfinite().all())
    assert not cache._contents.keys[0].pages[0].buffers[0].requires_grad


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["plain", "levels", "sliding, sink tokens", "rows"])
def test_derivatives_in_forward_mode_are_those_of_the_definition(name, count) -> None:
    layout, (q, k, v), tangents = LAYOUTS[name], draw(3, 2, 2, 2, 30), draw(3, 2, 2, 2, count, seed=1)
    past, new = (tuple(x[:, :, part] for x in (q, k, v)) for part in (slice(-count), slice(-count, None)))

    def cached(*new):
        cache = sa.LevelCache(layout)
        with torch.no_grad():
            through(cache, *past, [28 - count, 1, 1])  # a step of the C++ code could go on
            return cache.attend(*new)

    def whole(*new):
        parts = zip(past, new, strict=True)
        return dense(*(torch.cat(x, dim=2) for x in parts), layout)[:, :, -count:]

    expected, slope = torch.func.jvp(whole, new, tangents)
    with torch.autograd.forward_ad.dual_level():
        out = cached(*map(torch.autograd.forward_ad.make_dual, new, tangents))
        assert_close(torch.autograd.forward_ad.unpack_dual(out).tangent, slope, gradient=True)
    for x, y in zip(torch.func.jvp(cached, new, tangents), (expected, slope), strict=True):
        assert_close(x, y, gradient=True)


def test_vmap_maps_over_queries_and_not_over_what_is_kept() -> None:
    q, k, v = draw(1, 2, 2, 2, 12)
    new = tuple(x[:, :, 11:] for x in (q, k, v))

    def cached(q, k, v, storage=None):
        cache = sa.LevelCache(LAYOUTS["levels"], storage=storage)
        with torch.no_grad():
            cache.append(*(x[:, :, :11] for x in both))
            return cache.attend(q, k, v)

    both = (k, v)
    several = torch.stack([new[0], 2 * new[0]])
    for storage in (None, sa.Storage(key_bits=8, value_bits=8, group_size=2, residual=2)):
        outs = torch.vmap(lambda q, storage=storage: cached(q, *new[1:], storage))(several)
        assert_close(outs, torch.stack([cached(q, *new[1:], storage) for q in several]))
    with pytest.raises(ConfigError, match="other keys and values for each call that torch.vmap makes"):
        torch.vmap(lambda k: cached(new[0], k, new[2]))(torch.stack([new[1], new[1]]))
