"""Tensors of fixed size with positions in tensors: decoding from them is one forward pass, for rows of
different lengths.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import structattn as sa
from structattn.cache.bounded import BoundedCache, BoundedLevels, bounded
from structattn.errors import ConfigError, ShapeError
from structattn.testing.tolerances import assert_close

LAYOUTS = {
    "plain": None,
    "one level": sa.LevelLayout((6,), (64,)),
    "levels": sa.LevelLayout((3, 2, 1), (32, 8, 4)),
    "equal blocks, values": sa.LevelLayout((2, 2, 2), (20, 20, 5), "mup", (1, 3, 2)),
    "values": sa.LevelLayout((3, 3), (64, 16), "paper_sum", (4, 2)),
    "paper": sa.LevelLayout((3, 2, 1), (32, 16, 4), "paper"),
    "sliding, values": sa.LevelLayout.sliding((3, 2, 1), (None, 9, 4), "paper", (1, 3, 2)),
    "window": sa.LevelLayout.sliding((6,), (9,)),
    "sink tokens": sa.LevelLayout((3, 2, 1), (32, 8, 4), "paper", (1, 3, 2), sink_tokens=3),
    "window, sink tokens": sa.LevelLayout.sliding((6,), (5,), sink_tokens=4),
    "global window": sa.GlobalWindowLayout((2, 4), 7),
    "heads": sa.HeadLayouts([None, sa.LevelLayout((3, 2, 1), (32, 8, 4), "paper", (1, 3, 2), sink_tokens=3), None]),
    "heads in turn": sa.HeadLayouts([sa.LevelLayout.sliding((6,), (5,), sink_tokens=4), None] * 2),
    "heads with two softmaxes": sa.HeadLayouts([sa.LevelLayout((3, 3), (20, 5)), sa.GlobalWindowLayout((2, 4), 7)]),
}


def has_own_window(layout) -> bool:
    layouts = layout.layouts if isinstance(layout, sa.HeadLayouts) else (layout,)
    return any(isinstance(each, sa.GlobalWindowLayout) for each in layouts)


def heads_of(layout, heads):
    """As many heads of keys and values as there are layouts."""
    return (2 * layout.num_heads, layout.num_heads, layout.num_heads) if isinstance(layout, sa.HeadLayouts) else heads


@given(
    layout=st.sampled_from(sorted(LAYOUTS)),
    window=st.none() | st.integers(1, 24),
    max_length=st.integers(2, 40),
    heads=st.sampled_from([(1, 1, 1), (4, 2, 1), (6, 2, 3)]),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    terms=st.booleans(),
    seed=st.integers(0, 99),
)
def test_decoding_is_one_forward_pass(layout, window, max_length, heads, rows, terms, seed) -> None:
    chosen = LAYOUTS[layout]
    window, heads = None if has_own_window(chosen) else window, heads_of(chosen, heads)
    lengths = [min(length, max_length) for length in rows]
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(len(rows), count, max_length, 6, generator=generator, dtype=torch.float64) for count in heads
    )
    options = {"softcap": 0.8, "sinks": torch.randn(heads[0], generator=generator).double()} if terms else {}
    shared_k, shared_v = (x.repeat_interleave(math.lcm(*heads[1:]) // x.shape[1], dim=1) for x in (k, v))
    expected = sa.structured_attention(q, shared_k, shared_v, chosen, window=window, backend="reference", **options)

    levels = bounded(chosen, window, max_length=max_length, key_shape=(heads[1], 6), value_shape=(heads[2], 6))
    longest = max(lengths)
    last = torch.tensor(lengths) - 1
    cache = BoundedCache(levels, last)
    first = cache.attend(q[:, :, :longest], k[:, :, :longest], v[:, :, :longest], **options)
    for row, length in enumerate(lengths):
        assert_close(first[row, :, :length], expected[row, :, :length])
    assert [tuple(x.shape) for x in cache.tensors] == levels.shapes(len(rows))
    for _ in range(max_length - longest):
        last = last + 1
        index = last[:, None, None, None]
        new = [x.gather(2, index.expand(-1, x.shape[1], 1, 6)) for x in (q, k, v)]
        cache = BoundedCache(levels, last, cache.tensors)
        assert_close(cache.attend(*new, **options), expected.gather(2, index.expand(-1, heads[0], 1, 6)))


@pytest.mark.parametrize("window", [None, 5])
def test_what_is_kept_has_the_size_of_a_level_cache(window) -> None:
    for layout in LAYOUTS.values():
        if window is not None and has_own_window(layout):
            continue
        _, of_keys, of_values = heads_of(layout, (2, 2, 1))
        levels = bounded(layout, window, max_length=50, key_shape=(of_keys, 6), value_shape=(of_values, 6))
        cache = sa.LevelCache(layout, window=window, max_length=50)
        cache.append(torch.zeros(3, of_keys, 50, 6), torch.zeros(3, of_values, 50, 6))
        assert sum(torch.Size(shape).numel() for shape in levels.shapes(3)) * 4 == cache.nbytes
    levels = BoundedLevels(LAYOUTS["levels"], None, max_length=50, key_shape=(2, 6), value_shape=(1, 6))
    assert levels.shapes(3) == [(3, 2, 3, 50), (3, 2, 2, 8), (3, 2, 1, 4), (3, 1, 6, 50)]


def test_what_a_block_left_behind_reaches_nothing() -> None:
    levels = BoundedLevels(LAYOUTS["values"], None, max_length=40, key_shape=(1, 6), value_shape=(1, 6))
    q, k, v = (torch.randn(1, 1, 34, 6, dtype=torch.float64) for _ in range(3))
    outs = []
    for filler in (0.0, 1e6):
        cache = BoundedCache(levels, torch.tensor([31]))
        cache.attend(q[:, :, :32], k[:, :, :32], v[:, :, :32])
        # Position 32 begins a block of 16: all of the one before is of no use any more.
        tensors = [torch.full_like(x, filler) if x.shape[3] == 16 else x for x in cache.tensors]
        for at in (32, 33):
            cache = BoundedCache(levels, torch.tensor([at]), tensors)
            outs.append(cache.attend(*(x[:, :, at : at + 1] for x in (q, k, v))))
            tensors = cache.tensors
    assert torch.equal(torch.cat(outs[:2]), torch.cat(outs[2:]))


def test_segments_of_one_text_are_refused() -> None:
    layout = sa.LevelLayout.from_boundaries((3, 3), ((0,), (0, 9)))
    with pytest.raises(ConfigError, match=r"are those of one text, .*LevelLayout\.halving"):
        BoundedLevels(layout, None, max_length=20, key_shape=(1, 6), value_shape=(1, 6))
    with pytest.raises(ConfigError, match="max_length must be an int of at least 1, got 0"):
        BoundedLevels(None, None, max_length=0, key_shape=(1, 6), value_shape=(1, 6))


def test_heads_need_a_layout_each() -> None:
    layout = LAYOUTS["heads"]
    with pytest.raises(ConfigError, match="a layout for each of 3 key heads, and the layer has 4"):
        bounded(layout, None, max_length=20, key_shape=(4, 6), value_shape=(4, 6))
    levels = bounded(layout, None, max_length=20, key_shape=(3, 6), value_shape=(3, 6))
    q, k, v = (torch.randn(1, heads, 4, 6) for heads in (6, 3, 1))
    with pytest.raises(ShapeError, match="keys and values need 3 heads, one for each of the layouts, got 1"):
        BoundedCache(levels, torch.tensor([3])).attend(q, k, v)
