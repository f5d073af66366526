"""A cache whose key heads have layouts of their own, against one cache for each head."""

import copy
import random
from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.cache.contents import Contents
from structattn.errors import CacheError, ConfigError
from structattn.testing.tolerances import assert_close

DIM = 8
LAYOUTS = (
    None,
    sa.LevelLayout.sliding((8,), (9,), sink_tokens=3),
    sa.LevelLayout.sliding((8,), (5,)),
    sa.LevelLayout.halving((4, 2, 2), 32),
    sa.LevelLayout.halving((4, 4), 64, value_ranks=(2, 6)),
    sa.LevelLayout.sliding((4, 4), (None, 8), sink_tokens=2),
    sa.GlobalWindowLayout((4, 4), 6),
)
STORAGES = (
    None,
    sa.Storage(key_bits=8, value_bits=4, group_size=2, residual=3),
    sa.Storage(key_bits=4, value_bits=4, group_size=4, residual=0),
)
QUICK = range(4)
SEEDS = [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.full) for seed in range(150)]


class OneByOne:
    """A cache for each key head, all changed alike: what ``LevelCache(HeadLayouts(...))`` has to be."""

    def __init__(self, layout: sa.HeadLayouts, storage=None, **options) -> None:
        storages = storage if isinstance(storage, list) else [storage] * layout.num_heads
        self.caches = [
            sa.LevelCache(of_head, storage=bits, **options)
            for of_head, bits in zip(layout.layouts, storages, strict=True)
        ]

    def __getattr__(self, name: str):
        return lambda *arguments: [getattr(cache, name)(*arguments) for cache in self.caches]

    def attend(self, q, k, v, **options):
        per_head = q.shape[1] // k.shape[1]
        mask, slopes = options.pop("attn_mask", None), options.pop("alibi_slopes", None)
        outs = []
        for head, cache in enumerate(self.caches):
            queries = slice(head * per_head, (head + 1) * per_head)
            if mask is not None:
                options["attn_mask"] = mask[:, queries] if mask.shape[1] > 1 else mask
            if slopes is not None:
                options["alibi_slopes"] = slopes[queries]
            outs.append(cache.attend(q[:, queries], k[:, head : head + 1], v[:, head : head + 1], **options))
        return torch.cat(outs, dim=1)


def run(seed: int, folder: Path) -> None:
    """A random program: tokens in chunks, crops, undos, moved rows, copies and files."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    storage = draw.choice(STORAGES)
    layout = sa.HeadLayouts([draw.choice(LAYOUTS) for _ in range(draw.randint(1, 4))])
    if draw.random() < 0.4:
        storage = [draw.choice(STORAGES) for _ in layout.layouts]
    is_one_layout = draw.random() < 0.2
    if is_one_layout:
        layout = sa.HeadLayouts([layout.layouts[0]] * layout.num_heads)
    batch, per_head = draw.randint(1, 3), draw.randint(1, 2)
    options = {"page_size": draw.choice([4, 1024]), "storage": storage}
    if draw.random() < 0.4:
        options["left_padding"] = [draw.randint(0, 4) for _ in range(batch)]
    if draw.random() < 0.3:
        options["max_length"] = 70
    given = layout.layouts[0] if is_one_layout and isinstance(storage, list) else layout
    cache, expected = sa.LevelCache(given, **options), OneByOne(layout, **options)
    length = 0
    for _ in range(14):
        kind = draw.choice(["attend", "step", "step", "step", "crop", "undo", "rows", "copy", "file", "weights"])
        count = draw.randint(2, 12) if kind == "attend" else draw.randint(1, 3)
        if kind in ("attend", "step"):
            terms = {}
            if draw.random() < 0.2:
                terms["attn_mask"] = torch.rand(batch, per_head * layout.num_heads, 1, length + count) > 0.2
            if draw.random() < 0.2:
                terms["alibi_slopes"] = torch.rand(per_head * layout.num_heads)
            for _ in range(1 if kind == "attend" else count):
                tokens = count if kind == "attend" else 1
                q = torch.randn(batch, per_head * layout.num_heads, tokens, DIM)
                k, v = (torch.randn(batch, layout.num_heads, tokens, DIM) for _ in range(2))
                if kind == "step" and "attn_mask" in terms:
                    terms["attn_mask"] = torch.rand(batch, 1, 1, length + 1) > 0.2
                with torch.no_grad():
                    out = cache.attend(q, k, v, **terms)
                    assert_close(out, expected.attend(q, k, v, **dict(terms)))
                length += tokens
        elif kind == "crop" and length:
            shorter = max(0, length - draw.randint(1, 6))
            try:
                for one in expected.caches:
                    one.check_crop(shorter)
            except CacheError:
                with pytest.raises(CacheError, match="key heads"):
                    cache.crop(shorter)
                assert cache.length == length
            else:
                cache.crop(shorter)
                expected.crop(shorter)
                length = shorter
        elif kind == "undo" and length:
            q = torch.randn(batch, per_head * layout.num_heads, count, DIM)
            k, v = (torch.randn(batch, layout.num_heads, count, DIM) for _ in range(2))
            with torch.no_grad():
                cache.attend(q, k, v)
            cache.undo()
        elif kind == "rows" and length:
            rows = torch.tensor([draw.randrange(batch) for _ in range(draw.randint(1, 3))])
            cache.select(rows)
            expected.select(rows)
            batch = len(rows)
        elif kind == "copy":
            cache = copy.deepcopy(cache)
        elif kind == "file" and length > 5:
            cache.save(folder / "cache.safetensors")
            cache = sa.LevelCache.load(folder / "cache.safetensors")
        elif kind == "weights" and length:
            q = torch.randn(batch, per_head * layout.num_heads, 1, DIM)
            k = torch.randn(batch, layout.num_heads, 1, DIM)
            with torch.no_grad():
                weights = cache.weights(q, k, k)
            assert weights.shape == (batch, per_head * layout.num_heads, 1, length + 1)
        assert cache.length == length
    if length:
        assert cache.nbytes == sum(one.nbytes for one in expected.caches)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_calls_are_those_of_one_cache_per_head(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_with_the_cpp_code(seed: int, tmp_path: Path, built) -> None:
    run(seed, tmp_path)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("method", ["attend", "append", "try_step"])
def test_a_group_that_fails_leaves_all_as_they_were(method, error, built, monkeypatch) -> None:
    layout = sa.HeadLayouts((None, LAYOUTS[1], LAYOUTS[3]))
    cache = sa.LevelCache(layout)

    def tokens(count):
        return [torch.randn(1, 3, count, DIM) for _ in range(3)]

    with torch.no_grad():
        cache.attend(*tokens(20))
        for _ in range(3):
            cache.attend(*tokens(1))  # the C++ code has taken a token like the next one
        same, new = copy.deepcopy(cache), tokens(1 if method == "try_step" else 2)
        calls, original = [], getattr(Contents, method)

        def broken(self, *arguments):
            calls.append(self)
            if len(calls) == 2:
                raise error
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Contents, method, broken)
            with pytest.raises(error):
                cache.append(*new[1:]) if method == "append" else cache.attend(*new)
        assert len(calls) == 2
        assert cache.length == 23
        assert cache.nbytes == same.nbytes
        for _ in range(12):
            assert_close(cache.attend(*new), same.attend(*new))


def test_a_head_with_two_softmaxes_has_its_own_scale() -> None:
    q, k, v = (torch.randn(1, 2, 40, DIM) for _ in range(3))
    cache = sa.LevelCache(sa.HeadLayouts((None, sa.GlobalWindowLayout((4, 4), 6))))
    first = 0
    for count in (30, 1, 1, 5):
        tokens = [x[:, :, first : first + count] for x in (q, k, v)]
        for call in (cache.attend, cache.weights):
            with pytest.raises(ConfigError, match="has its own scale: leave scale at None"):
                call(*tokens, scale=0.3)
        assert cache.length == first
        cache.attend(*tokens)
        first += count
