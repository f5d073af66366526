"""Pages of many requests against the definition: any arrivals, any chunks, any layout."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from structattn.cache.paged import PagedCache, PagedLayerShape, PagePool, ShapeProbe, Tokens
from structattn.cache.paged.geometry import groups_of, page_numbers, pages_of
from structattn.errors import CacheError, ConfigError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.ops import structured_attention
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close

LAYOUTS = {
    "plain": (None, None),
    "window": (None, 5),
    "levels": (LevelLayout((4, 2, 2), (32, 8, 4)), None),
    "values": (LevelLayout((2, 4, 2), (64, 8, 2), "paper", (4, 1, 1)), None),
    "equal blocks": (LevelLayout((4, 2, 2), (16, 8, 8), "mup"), None),
    "long window": (LevelLayout((4, 4), (32, 8)), 11),
    "short window": (LevelLayout((4, 2, 2), (32, 16, 2), value_ranks=(2, 2, 2)), 5),
    "sliding": (LevelLayout.sliding((4, 2, 2), (None, 9, 4), "paper", (2, 2, 2)), None),
    "sliding window": (LevelLayout.sliding((4, 4), (12, 5)), 11),
    "sink tokens": (LevelLayout((4, 2, 2), (32, 8, 4), value_ranks=(1, 3, 2), sink_tokens=3), None),
    "window, sink tokens": (LevelLayout.sliding((8,), (5,), sink_tokens=4), None),
    "two softmaxes": (GlobalWindowLayout((4, 4), 6), None),
}
BY_HEADS = {
    "streaming heads": (HeadLayouts((None, LevelLayout.sliding((8,), (5,), sink_tokens=3))), None),
    "heads of levels": (HeadLayouts((LAYOUTS["levels"][0], LAYOUTS["values"][0])), None),
    "heads with a window": (HeadLayouts((LAYOUTS["sliding"][0], LAYOUTS["levels"][0])), 7),
}
HEADS, DIM, VALUE_DIM = 4, 8, 6


def shape(name, keys=2, values=2):
    layout, window = (LAYOUTS | BY_HEADS)[name]
    return PagedLayerShape(layout, window, (keys, DIM), (values, VALUE_DIM))


def random_shape(draw):
    if draw.random() < 0.6:
        return shape(draw.choice(list(LAYOUTS)), draw.choice((1, 2, 4)), draw.choice((1, 2, 4)))
    names = [draw.choice(list(LAYOUTS)) for _ in range(draw.choice((1, 2, 4)))]
    layout = HeadLayouts([LAYOUTS[name][0] for name in names])
    window = None if "two softmaxes" in names else draw.choice((None, 5, 11))
    return PagedLayerShape(layout, window, (len(names), DIM), (len(names), VALUE_DIM))


def pool_of(layers, nbytes=2**20, **options):
    return PagePool(layers, nbytes=nbytes, dtype=torch.float64, device=torch.device("cpu"), **options)


class Served:
    """Requests with random inputs, whose outputs are compared with those of their whole texts."""

    def __init__(self, layers, lengths, options, **pool):
        self.layers, self.options = layers, options
        self.cache = PagedCache(layers, pool_of(layers, **pool))
        self.done = dict.fromkeys(lengths, 0)
        self.inputs, self.expected = {}, {}
        for name, length in lengths.items():
            for index, layer in enumerate(layers):
                q = torch.randn(1, HEADS, length, DIM, dtype=torch.float64)
                k = torch.randn(1, layer.keys[0], length, DIM, dtype=torch.float64)
                v = torch.randn(1, layer.values[0], length, VALUE_DIM, dtype=torch.float64)
                self.inputs[name, index] = q, k, v
                if k.shape[1] != v.shape[1]:
                    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
                self.expected[name, index] = structured_attention(
                    q,
                    k,
                    v,
                    layer.layout,
                    window=layer.window,
                    scale=options.scale,
                    softcap=options.softcap,
                    sinks=options.sinks,
                    backend="reference",
                )

    def step(self, counts):
        """Computes the next tokens of some requests."""
        requests = [Tokens(name, self.done[name], count) for name, count in counts.items()]
        for one in requests:
            assert self.cache.pages.reserve(one.request, one.past, one.count)
        with self.cache.step(requests):
            for index, layer in enumerate(self.layers):
                parts = [
                    [x[:, :, one.past : one.past + one.count] for x in self.inputs[one.request, index]]
                    for one in requests
                ]
                q, k, v = (torch.cat([part[kind] for part in parts], dim=2) for kind in range(3))
                out = self.cache.attend(index, q, k, v, self.options, layout=layer.layout, window=layer.window)
                expected = [
                    self.expected[one.request, index][:, :, one.past : one.past + one.count] for one in requests
                ]
                assert_close(out, torch.cat(expected, dim=2))
        for one in requests:
            self.done[one.request] += one.count
        self.check_pages()

    def check_pages(self):
        """Each request has the pages of its current blocks and no others, and no page has two owners."""
        pages = self.cache.pages
        for name, table in pages.tables.items():
            for group, slots, own in zip(pages.groups, pages.slots, table, strict=True):
                assert own.keys() == set(pages_of(group.lifetime.kept(self.done[name]), slots))
        owned = [page for table in pages.tables.values() for own in table for page in own.values()]
        assert len(set(owned)) == len(owned) == pages.num_used
        assert 0 not in owned


@pytest.mark.parametrize("name", LAYOUTS | BY_HEADS)
def test_decoding_and_chunks_are_the_whole_text(name) -> None:
    torch.manual_seed(0)
    served = Served([shape(name)], {"a": 40, "b": 23, "c": 9}, ScoreTerms(), most_slots=4)
    served.step({"a": 17, "b": 1})
    served.step({"b": 1, "c": 2, "a": 1})
    while any(served.done[other] < len(served.expected[other, 0][0, 0]) for other in served.done):
        left = {other: len(served.expected[other, 0][0, 0]) - count for other, count in served.done.items()}
        served.step({other: min(count, 1 if other != "b" else 3) for other, count in left.items() if count})
    served.cache.pages.free("a")
    served.cache.pages.free("a")
    assert served.cache.pages.num_used
    served.cache.pages.free_all()
    assert not served.cache.pages.num_used


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10**6))
def test_any_arrivals_and_any_chunks(seed) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = [random_shape(draw) for _ in range(draw.randint(1, 3))]
    options = ScoreTerms(
        scale=draw.choice((None, 0.3)),
        softcap=draw.choice((None, 2.0)),
        sinks=draw.choice((None, torch.randn(HEADS, dtype=torch.float64))),
    )
    if any(isinstance(heads.layout, GlobalWindowLayout) for layer in layers for heads in layer.by_heads):
        options = ScoreTerms()
    lengths = {str(number): draw.randint(1, 40) for number in range(draw.randint(1, 5))}
    served = Served(layers, lengths, options, most_slots=draw.choice((1, 3, 8, 256)))
    waiting = set(lengths)
    while waiting:
        chosen = draw.sample(sorted(waiting), draw.randint(1, len(waiting)))
        left = {name: lengths[name] - served.done[name] for name in chosen}
        served.step({name: 1 if draw.random() < 0.6 else draw.randint(1, count) for name, count in left.items()})
        for name in chosen:
            if served.done[name] == lengths[name] or draw.random() < 0.05:  # ended, or cancelled
                served.cache.pages.free(name)
                waiting.discard(name)
    assert not served.cache.pages.num_used


def test_what_another_request_left_is_not_read() -> None:
    layer = shape("values")
    cache = PagedCache([layer], pool_of([layer], most_slots=4, nbytes=4096))
    pages = cache.pages

    def call(name, past, count, value):
        q, k, v = (
            torch.full((1, heads, count, dim), value, dtype=torch.float64) for heads, dim in ((4, 8), (2, 8), (2, 6))
        )
        assert pages.reserve(name, past, count)
        with cache.step([Tokens(name, past, count)]):
            return cache.attend(0, q, k, v, ScoreTerms(), layout=layer.layout, window=layer.window)

    most = max(n for n in range(1, 200) if pages.missing("x", 0, n) <= pages.num_pages)
    call("broken", 0, most, torch.nan)
    pages.free("broken")
    outs = [call("fine", past, 1, 1.0) for past in range(7)]
    assert all(torch.equal(out, torch.ones_like(out)) for out in outs[:2])
    assert all(bool(out.isfinite().all()) for out in outs)


def test_reserving_is_all_or_nothing() -> None:
    layers = [shape("levels")]
    pages = pool_of(layers, nbytes=4096, most_slots=4)
    most = max(n for n in range(1, 200) if pages.missing("a", 0, n) <= pages.num_pages)
    assert not pages.reserve("a", 0, most + 4)
    assert not pages.tables
    assert not pages.num_used
    assert pages.reserve("a", 0, most)
    assert not pages.reserve("b", 0, 5)
    pages.free("a")
    assert not pages.num_used


def test_a_page_is_small_where_blocks_are() -> None:
    deep = PagedLayerShape(LevelLayout.halving((8,) * 8, 4096, value_ranks=(8,) * 8), None, (2, 64), (2, 64))
    plain_values = PagedLayerShape(LevelLayout.halving((8,) * 8, 4096), None, (2, 64), (2, 64))
    for layer in (deep, plain_values):
        groups = groups_of([layer], torch.float32)
        size = page_numbers(groups, 256, 4096)
        rounded = sum(len(pages_of(group.lifetime.decoded(4095), size // group.width)) * size for group in groups)
        exact = 2 * (layer.layout.key_cache_size(4096) + layer.layout.value_cache_size(4096, 64))
        assert exact <= rounded <= 1.06 * exact
    assert len(groups_of([shape("levels"), shape("levels"), shape("plain")], torch.float32)) == 3  # shared by layers


def test_wrong_use_is_named() -> None:
    layer = shape("levels")
    cache = PagedCache([layer, layer], pool_of([layer, layer]))
    q, k, v = (torch.zeros(1, heads, 2, dim, dtype=torch.float64) for heads, dim in ((4, 8), (2, 8), (2, 6)))

    def attend(index=0, layout=layer.layout, tokens=2):
        return cache.attend(
            index, q[:, :, :tokens], k[:, :, :tokens], v[:, :, :tokens], ScoreTerms(), layout=layout, window=None
        )

    with pytest.raises(CacheError, match="within step"):
        attend()
    with pytest.raises(CacheError, match="'a' has no pages for 2 tokens"), cache.step([Tokens("a", 0, 2)]):
        pass
    cache.pages.reserve("a", 0, 2)
    step = cache.step([Tokens("a", 0, 2)])
    step.__enter__()
    attend()
    for wrong, match in (
        ({}, "layer 0 was called twice"),
        ({"index": 1, "layout": None}, "layer 1 keeps .*, and this cache was made for"),
        ({"index": 1, "tokens": 1}, "the step has 2 tokens in one row"),
    ):
        with pytest.raises(CacheError, match=match):
            attend(**wrong)
    with pytest.raises(CacheError, match=r"left out the attention layers \[1\] of 2"):
        step.__exit__(None, None, None)
    with pytest.raises(ConfigError, match="a pool of 100 bytes has 0 pages"):
        pool_of([layer], nbytes=100)
    with pytest.raises(ConfigError, match="needs equal blocks, and the layout has segments"):
        PagedLayerShape(LevelLayout.from_boundaries((4, 4), ((0,), (0, 3))), None, (2, 8), (2, 8))
    with pytest.raises(ConfigError, match="a layout for each of 2 key heads, and the layer has 4"):
        shape("streaming heads", values=4)


@pytest.mark.parametrize("layer", [shape("values", keys=1), shape("streaming heads")], ids=["one", "by heads"])
def test_a_probe_finds_what_a_layer_keeps(layer) -> None:
    probe = ShapeProbe()
    q, k, v = (torch.randn(1, heads, 1, dim) for heads, dim in ((4, 8), layer.keys, (2, 6)))
    out = probe.attend(3, q, k, v, ScoreTerms(), layout=layer.layout, window=None)
    assert_close(out, v.repeat_interleave(2, dim=1))
    assert probe.layers == {3: layer}
    assert probe.places == {(torch.float32, torch.device("cpu"))}
