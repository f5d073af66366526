"""Pages that hold far tokens in 8 and 4 bits: attention over the numbers that are read, and the bits of a
``LevelCache``, for any arrivals and any chunks.
"""

import random
from dataclasses import replace

import pytest
import torch
from quantized_numbers import attention
from torch import Tensor

import structattn as sa
from structattn.cache.paged import PagedCache, PagedLayerShape, PagePool, Tokens
from structattn.cache.paged.geometry import pages_of
from structattn.cache.paged.levels import QuantizedLevel
from structattn.cache.paged.native_step import PagedStep
from structattn.errors import ConfigError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadLayouts
from structattn.ops.by_heads import query_heads
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close

DIM, VALUE_DIM = 6, 5
SEEDS = [pytest.param(seed, marks=[] if seed < 8 else pytest.mark.full) for seed in range(200)]


def split(draw: random.Random, total: int, count: int) -> list[int]:
    """Ranks with a sum."""
    cuts = sorted(draw.sample(range(1, total), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def random_layout(draw: random.Random, size: int, count: int):
    """A layout with ``count`` levels, or one that does not say it."""
    ranks = split(draw, DIM, count)
    value_ranks = split(draw, VALUE_DIM, count) if draw.random() < 0.5 else None
    scaling, sinks = draw.choice(["variance", "mup", "paper"]), draw.choice([0, 0, 2, 5, 9])
    if count == 1 and draw.random() < 0.4:
        return None
    if draw.random() < 0.5:
        sizes = [size * draw.choice([1, 2, 4])]
        for _ in range(count - 1):
            sizes.insert(0, sizes[0] * draw.choice([1, 2, 3]))
        return sa.LevelLayout(ranks, sizes, scaling, value_ranks, sink_tokens=sinks)
    windows: list[int | None] = sorted((draw.randint(1, 60) for _ in range(count)), reverse=True)
    if draw.random() < 0.4:
        windows[0] = None
    return sa.LevelLayout.sliding(ranks, windows, scaling, value_ranks, sink_tokens=sinks)


class Program:
    """Random layers, and requests with random tokens."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        size, count = draw.choice([2, 4, 8]), draw.randint(1, 3)
        layers = [self._layer(size, count) for _ in range(draw.choice([1, 1, 2]))]
        layouts = [heads.layout for layer in layers for heads in layer.by_heads]
        values = {len(getattr(layout, "value_ranks", None) or (0,)) for layout in layouts}
        same = self._storage(size, count, values)
        self.layers = [replace(layer, storage=same) for layer in layers]
        if draw.random() < 0.4:
            self.layers = [replace(layer, storage=self._storage(size, count, values)) for layer in layers]
        elif draw.random() < 0.4:
            self.layers = [
                replace(layer, storage=[draw.choice([same, other, None]) for _ in range(layer.keys[0])])
                for layer in layers
                for other in (self._storage(size, count, values),)
            ]
        self.dtype = draw.choice([torch.float64, torch.float32])
        self.tolerance = 1e-9 if self.dtype == torch.float64 else 2e-5
        self.terms = {}
        if not any(isinstance(layout, GlobalWindowLayout) for layout in layouts):
            self.terms = {"softcap": 0.8} if draw.random() < 0.3 else {}
            self.terms |= {"sinks": torch.randn(4, dtype=self.dtype)} if draw.random() < 0.3 else {}
            self.terms |= {"scale": 0.4} if draw.random() < 0.3 else {}
        self.most_slots = draw.choice([1, 3, 8, 64])
        self.inputs: dict[tuple[str, int], list[Tensor]] = {}
        self.expected: dict[tuple[str, int], Tensor] = {}

    def _storage(self, size: int, count: int, values: set[int]) -> sa.Storage:
        """A storage for layouts of ``count`` levels, whose blocks are multiples of ``size``."""
        draw, by_level = self.draw, self.draw.random() < 0.3
        keys, bits = draw.choice([4, 8, 16]), draw.choice([4, 8, 16])
        if by_level:
            keys = tuple(draw.choice([4, 8, 16]) for _ in range(count))
        if by_level and len(values) == 1:
            bits = tuple(draw.choice([4, 8, 16]) for _ in range(*values))
        group = draw.choice([group for group in (2, 4, 8) if group <= size])
        return sa.Storage(keys, bits, group, draw.choice([0, 1, 3, 8, 11]))

    def _layer(self, size: int, count: int) -> PagedLayerShape:
        draw = self.draw
        window = draw.choice([None, None, None, 30])
        if draw.random() < 0.3:
            layout = HeadLayouts([random_layout(draw, size, count) for _ in range(2)])
            return PagedLayerShape(layout, window, (2, DIM), (2, VALUE_DIM))
        heads = draw.choice([1, 2])
        if count == 2 and draw.random() < 0.3:
            return PagedLayerShape(
                GlobalWindowLayout((4, 2), draw.choice([3, 30])), None, (heads, DIM), (heads, VALUE_DIM)
            )
        return PagedLayerShape(random_layout(draw, size, count), window, (heads, DIM), (heads, VALUE_DIM))

    def add(self, name: str, length: int, same: str | None = None, common: int = 0) -> None:
        """Random tokens of a request, the first of which may be those of another one."""
        for index, layer in enumerate(self.layers):
            q = torch.randn(1, 4, length, DIM, dtype=self.dtype)
            k = torch.randn(1, layer.keys[0], length, DIM, dtype=self.dtype) * 3 + 5
            v = torch.randn(1, layer.values[0], length, VALUE_DIM, dtype=self.dtype)
            if same is not None:
                for x, other in zip((q, k, v), self.inputs[same, index], strict=True):
                    x[:, :, :common] = other[:, :, :common]
            self.inputs[name, index] = [q, k, v]
            self.expected[name, index] = self._attention(layer, q, k, v)

    def _attention(self, layer: PagedLayerShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, count = q.new_zeros((*q.shape[:3], v.shape[3])), k.shape[1]
        layouts = layer.layout.layouts if isinstance(layer.layout, HeadLayouts) else (layer.layout,) * count
        storages = layer.storage if isinstance(layer.storage, tuple) else (layer.storage,) * count
        for head, (layout, storage) in enumerate(zip(layouts, storages, strict=True)):
            queries, heads = list(query_heads((head,), 4 // count)), [head]
            terms = {name: x[queries] if name == "sinks" else x for name, x in self.terms.items()}
            for at in range(q.shape[2]):
                out[:, queries, at : at + 1] = attention(
                    q[:, queries, at : at + 1],
                    k[:, heads, : at + 1],
                    v[:, heads, : at + 1],
                    layout,
                    layer.window,
                    storage,
                    at,
                    **terms,
                )
        return out

    def new_cache(self, nbytes: int = 2**19) -> PagedCache:
        pages = PagePool(
            self.layers,
            nbytes=nbytes,
            dtype=self.dtype,
            device=torch.device("cpu"),
            most_slots=self.most_slots,
        )
        return PagedCache(self.layers, pages)

    def step(self, cache: PagedCache, requests: list[Tokens]) -> None:
        """A call of the model with new tokens, whose attention is compared."""
        for one in requests:
            assert cache.pages.reserve(one.request, one.past, one.count)
        with cache.step(requests), torch.no_grad():
            for index, layer in enumerate(self.layers):
                new = [(one.request, slice(one.past, one.past + one.count)) for one in requests]
                q, k, v = (
                    torch.cat([self.inputs[name, index][kind][:, :, tokens] for name, tokens in new], dim=2)
                    for kind in range(3)
                )
                out = cache.attend(index, q, k, v, ScoreTerms(**self.terms), layout=layer.layout, window=layer.window)
                expected = torch.cat([self.expected[name, index][:, :, tokens] for name, tokens in new], dim=2)
                torch.testing.assert_close(out, expected, rtol=self.tolerance, atol=self.tolerance)

    def check_bits(self, cache: PagedCache, name: str, length: int) -> int:
        """Compares codes, scales and zeros with those of a ``LevelCache``; returns how many groups."""
        pages, compared = cache.pages, 0
        for index, layer in enumerate(self.layers):
            whole = sa.LevelCache(layer.layout, window=layer.window, storage=layer.storage)
            _, k, v = self.inputs[name, index]
            whole.append(k[:, :, :length], v[:, :, :length])
            contents = whole._contents
            each = [of_heads for _, of_heads in contents.parts] if hasattr(contents, "parts") else [contents]
            for of_heads, heads in zip(each, cache._parts[index], strict=True):
                levels = [level for level in heads.levels if isinstance(level, QuantizedLevel)]
                for (store, level), paged in zip(of_heads.groups, levels, strict=True):
                    number = paged._groups[0].group
                    lifetime, size = pages.groups[number].lifetime, pages.slots[number]
                    seen = range(level.first_group(length, 0), lifetime.entries(length))
                    for group in seen:
                        slot = lifetime.slot(group)
                        where = torch.tensor([pages.tables[name][number][slot // size]]), torch.tensor([slot % size])
                        page, at = store.place(store.slot(group, level.start(group * store.format.group_size, 0)))
                        for part, held in zip(paged._groups, page, strict=True):
                            assert torch.equal(part.get(*where)[:, 0], held[0, :, at].flatten(1))
                        compared += 1
        return compared


def check_pages(cache: PagedCache, done: dict[str, int]) -> None:
    """Each request has the pages of what it keeps, and no others."""
    for name, table in cache.pages.tables.items():
        for group, slots, own in zip(cache.pages.groups, cache.pages.slots, table, strict=True):
            assert own.keys() == set(pages_of(group.lifetime.kept(done[name]), slots))


def run(seed: int) -> int:
    """Requests that come and go, with any numbers of new tokens; returns how many groups were compared."""
    program = Program(seed)
    draw, cache = program.draw, program.new_cache()
    lengths = {str(number): draw.randint(1, 90) for number in range(draw.randint(1, 3))}
    for name, length in lengths.items():
        program.add(name, length)
    done, compared = dict.fromkeys(lengths, 0), 0
    waiting = set(lengths)
    while waiting:
        chosen = draw.sample(sorted(waiting), draw.randint(1, len(waiting)))
        counts = {name: min(draw.choice([1, 1, 1, 1, 2, 3, 5, 17, 40]), lengths[name] - done[name]) for name in chosen}
        program.step(cache, [Tokens(name, done[name], count) for name, count in counts.items()])
        for name, count in counts.items():
            done[name] += count
        check_pages(cache, done)
        for name in chosen:
            if done[name] == lengths[name] or draw.random() < 0.02:
                compared += program.check_bits(cache, name, done[name])
                cache.pages.free(name)
                waiting.discard(name)
    assert not cache.pages.num_used
    return compared


@pytest.mark.quick(seed=[3, 6])
@pytest.mark.parametrize("seed", SEEDS)
def test_any_arrivals_and_any_chunks(seed: int) -> None:
    run(seed)


@pytest.mark.quick(seed=[0, 2, 4, 6, 7])
@pytest.mark.parametrize("seed", SEEDS[:40])
def test_the_same_with_the_cpp_code(seed: int, built) -> None:
    run(seed)


@pytest.mark.parametrize(
    "layout",
    [
        None,
        sa.LevelLayout.sliding((40, 16), (None, 290), value_ranks=(56, 16), sink_tokens=5),
        sa.LevelLayout((32, 8), (1024, 256)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_step_reads_codes_in_the_pages(layout, dtype: torch.dtype, built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at several positions, groups of whole vectors, three queries for each key head."""
    calls: list[int] = []
    attend = PagedStep.attend
    monkeypatch.setattr(PagedStep, "attend", lambda *arguments: calls.append(1) or attend(*arguments))
    torch.manual_seed(0)
    dim = sum(layout.ranks) if layout else 64
    storage = sa.Storage(4, 8, 64, 30)
    layer = PagedLayerShape(layout, None, (2, dim), (2, 72), storage=storage)
    cache = PagedCache([layer], pool_of([layer], dtype))
    lengths = {"a": 330, "b": 70, "c": 540}
    tokens = {
        name: [torch.randn(1, n, length, d).to(dtype) for n, d in ((6, dim), (2, dim), (2, 72))]
        for name, length in lengths.items()
    }

    def step(requests: list[Tokens]) -> Tensor:
        for one in requests:
            assert cache.pages.reserve(one.request, one.past, one.count)
        new = [[x[:, :, one.past : one.past + one.count] for x in tokens[one.request]] for one in requests]
        with cache.step(requests):
            q, k, v = (torch.cat(each, dim=2) for each in zip(*new, strict=True))
            return cache.attend(0, q, k, v, ScoreTerms(), layout=layout, window=None)

    for name, length in lengths.items():
        step([Tokens(name, 0, length - 2)])
    for back in (2, 1):
        out = step([Tokens(name, length - back, 1) for name, length in lengths.items()])
        for row, (name, length) in enumerate(lengths.items()):
            q, k, v = (x.float() for x in tokens[name])  # codes are read as float32
            at = length - back
            query, keys, values = q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]
            assert_close(out[:, :, row : row + 1], attention(query, keys, values, layout, None, storage, at).to(dtype))
    assert len(calls) == 2


def test_programs_compare_codes() -> None:
    assert run(2) > 0


def share(seed: int) -> tuple[int, int]:
    """Requests that begin as another one, or go on from it; returns shared tokens and compared groups."""
    program = Program(seed)
    draw, cache, shared, compared = program.draw, program.new_cache(), 0, 0
    first = [draw.randrange(100) for _ in range(80)]
    program.add("0", 80)
    done, texts = {}, {"0": first}

    def compute(name: str, end: int) -> None:
        while done[name] < end:
            count = min(draw.choice([1, 1, 5, 17, 60]), end - done[name])
            program.step(cache, [Tokens(name, done[name], count, texts[name][: done[name] + count])])
            done[name] += count
        check_pages(cache, done)

    for name in ("0", "1", "2"):
        if name != "0":
            common = draw.randint(20, 79)
            texts[name] = [*first[:common], *(100 + draw.randrange(100) for _ in range(80 - common))]
            program.add(name, 80, "0", common)
        done[name] = cache.pages.begin(name, texts[name])
        shared += done[name]
        compute(name, draw.randint(max(40, done[name]), 80))
        compared += program.check_bits(cache, name, done[name])
    assert cache.pages.fork("0", "child", done["0"])
    done["child"], texts["child"] = done["0"], [*first[: done["0"]], *range(200, 280 - done["0"])]
    program.add("child", 80, "0", done["0"])
    for name in ("child", "0"):
        compute(name, 80)
        compared += program.check_bits(cache, name, 80)
    cache.pages.free_all()
    assert not cache.pages.num_used
    return shared, compared


@pytest.mark.quick(seed=[6])
@pytest.mark.parametrize("seed", SEEDS[:60:2])
def test_requests_that_share_pages(seed: int) -> None:
    share(1000 + seed)


@pytest.mark.full
def test_programs_share_tokens_and_groups() -> None:
    shared, compared = zip(*(share(1000 + seed) for seed in range(2)), strict=True)
    assert (sum(shared) > 100, sum(compared) > 20) == (True, True)


def pool_of(layers, dtype: torch.dtype = torch.float32) -> PagePool:
    return PagePool(layers, nbytes=2**24, dtype=dtype, device=torch.device("cpu"), length=4096)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_formula(dtype: torch.dtype) -> None:
    """Codes and two scales for each group, exact tokens from the residual to one group more, and no other
    page.
    """
    storage, length, heads, dim = sa.Storage(8, 4, 64, 128), 1999, 2, 64
    layers = [PagedLayerShape(None, None, (heads, dim), (heads, dim))] * 2
    pages, plain = pool_of([replace(layer, storage=storage) for layer in layers], dtype), pool_of(layers, dtype)
    scale = 8 if dtype == torch.float64 else 2
    group = 2 * heads * (64 * dim + 2 * scale * dim) + 2 * heads * (64 * dim // 2 + 2 * scale * 64)
    token = 4 * heads * dim * dtype.itemsize
    by_width = {group.lifetime.span: group.width * dtype.itemsize for group in pages.groups}
    assert by_width == {64: group, 1: token}
    assert pages.memory.numel() * pages.memory.element_size() == (pages.num_pages + 1) * pages.page_nbytes
    groups = (length - 128) // 64
    assert [len(group.lifetime.kept(length)) for group in pages.groups] == [groups, 64 + 128 - 1]
    slots = dict(zip((64, 1), pages.slots, strict=True))
    used = -(-groups // slots[64]) + len(pages_of(pages.groups[1].lifetime.kept(length), slots[1]))
    assert pages.reserve("a", 0, length)
    assert pages.num_used == used
    stored = groups * group + (64 + 128 - 1) * token
    assert stored <= used * pages.page_nbytes <= 1.15 * stored
    assert plain.reserve("a", 0, length)
    assert used * pages.page_nbytes < 0.65 * plain.num_used * plain.page_nbytes


def test_what_cannot_be_is_refused() -> None:
    layer = PagedLayerShape(sa.LevelLayout((4, 4), (1200, 600)), None, (2, 8), (2, 8))
    with pytest.raises(ConfigError, match="storage must be a Storage"):
        replace(layer, storage=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a storage for each of 3 key heads, and the layer has 2"):
        replace(layer, storage=[None] * 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="group_size must divide the blocks of each level: expected a divisor of 600"):
        pool_of([replace(layer, storage=sa.Storage(group_size=64))])
    with pytest.raises(ConfigError, match="key_bits needs one entry per level: expected 2, got 3"):
        pool_of([replace(layer, storage=sa.Storage((4, 8, 16), group_size=8))])
    layer = PagedLayerShape(None, None, (2, 8), (2, 8), sa.Storage())
    cache = PagedCache([layer], pool_of([layer]))
    assert cache.pages.reserve("a", 0, 3)
    x = torch.randn(1, 2, 3, 8)
    with cache.step([Tokens("a", 0, 3)]), pytest.raises(ConfigError, match="gives no gradients"):
        cache.attend(0, x, x, x.clone().requires_grad_(), ScoreTerms(), layout=None, window=None)
