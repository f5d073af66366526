"""Requests with contents of their own, of models that choose tokens: in whatever calls their tokens come, the
attention is that of a ``LevelCache`` for each, and the bytes are those that were reserved.
"""

import random

import pytest
import torch
from torch import Tensor

import structattn as sa
from structattn.cache.paged import PagedLayerShape, RequestCaches, RequestPool, Tokens
from structattn.errors import CacheError, ConfigError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadLayouts
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close

DIM, HEADS = 8, 2
WINDOW = sa.LevelLayout.sliding((DIM,), (9,), "standard", sink_tokens=2)
LEVELS = sa.LevelLayout((4, 4), (32, 8), value_ranks=(2, 6), sink_tokens=3)
LAYOUTS = [
    None,
    WINDOW,
    LEVELS,
    sa.LevelLayout((2, 4, 2), (64, 32, 4)),
    sa.LevelLayout.sliding((4, 4), (None, 11)),
    GlobalWindowLayout((4, 4), 7),
]


def random_storage(draw: random.Random) -> sa.Storage:
    """One that chooses tokens."""
    size = draw.choice([2, 4])
    residual, block = draw.choice([0, 3, 6]), size * draw.choice([2, 4, 8])
    keep, recent = size * draw.randrange(block // size), residual + 2 * size + draw.choice([0, 1, 10])
    return sa.Storage(draw.choice([4, 8, 16]), draw.choice([4, 8, 16]), size, residual, keep, block, recent)


def random_layer(draw: random.Random) -> PagedLayerShape:
    """A layer of which all heads, some or none choose tokens."""
    shape = (HEADS, DIM), (HEADS, DIM)
    bits = sa.Storage(draw.choice([4, 8]), 8, 4, draw.choice([0, 5]))
    kind = draw.randrange(5)
    if kind == 0:
        return PagedLayerShape(None, None, *shape, random_storage(draw))
    if kind == 1:
        return PagedLayerShape(None, None, *shape, (random_storage(draw), draw.choice([None, bits])))
    if kind == 2:
        return PagedLayerShape(None, None, *shape, (random_storage(draw), random_storage(draw)))
    if kind == 3:
        return PagedLayerShape(HeadLayouts([None, WINDOW]), None, *shape, (random_storage(draw), None))
    layout = draw.choice(LAYOUTS)
    window = None if isinstance(layout, GlobalWindowLayout) else draw.choice([None, 13])
    return PagedLayerShape(layout, window, *shape, draw.choice([None, bits]))


class Program:
    """Random layers, and requests with random tokens and their attention."""

    def __init__(self, seed: int, nbytes: int = 2**20) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = [PagedLayerShape(None, None, (HEADS, DIM), (HEADS, DIM), random_storage(draw))]
        self.layers += [random_layer(draw) for _ in range(draw.randint(0, 2))]
        self.dtype = draw.choice([torch.float64, torch.float32])
        place = {"dtype": self.dtype, "device": torch.device("cpu")}
        self.pool = RequestPool(self.layers, nbytes=nbytes, page_size=draw.choice([1, 8, 64]), **place)
        self.caches = RequestCaches(self.layers, self.pool)
        has_own_scale = any(isinstance(layer.layout, GlobalWindowLayout) for layer in self.layers)
        self.scale = None if has_own_scale else draw.choice([None, 0.3])
        self.inputs: dict[str, list[list[Tensor]]] = {}
        self.expected: dict[str, list[Tensor]] = {}
        self.prompts: dict[str, int] = {}

    def add(self, name: str, prompt: int, length: int) -> None:
        """A request: its prompt is one call of a ``LevelCache``, and each other token one more."""
        self.inputs[name], self.expected[name], self.prompts[name] = [], [], prompt
        for layer in self.layers:
            heads = (4, HEADS, HEADS)
            x = [torch.randn(1, count, length, DIM, dtype=self.dtype) for count in heads]
            x.append(torch.randn(1, HEADS, length, dtype=self.dtype).round(decimals=1))  # some are equal
            self.inputs[name].append(x)
            cache, outs = sa.LevelCache(layer.layout, window=layer.window, storage=layer.storage), []
            for at in (slice(0, prompt), *(slice(n, n + 1) for n in range(prompt, length))):
                q, k, v, scores = (part[:, :, at] for part in x)
                scores = {"token_scores": scores} if layer.chooses_tokens else {}
                outs.append(cache.attend(q, k, v, scale=self.scale, **scores))
            self.expected[name].append(torch.cat(outs, dim=2))

    def step(self, requests: list[Tokens], names: dict[str, str]) -> None:
        """A call of the model with new tokens, whose attention is compared; ``names`` are those of the inputs
        of each request.
        """
        for one in requests:
            self.pool.expect(one.request, self.prompts[names[one.request]])
            assert self.pool.reserve(one.request, one.past, one.count)
        new = [(names[one.request], slice(one.past, one.past + one.count)) for one in requests]
        with self.caches.step(requests), torch.no_grad():
            for index, layer in enumerate(self.layers):
                q, k, v, scores = (
                    torch.cat([self.inputs[name][index][kind][:, :, tokens] for name, tokens in new], dim=2)
                    for kind in range(4)
                )
                assert self.caches.chooses_tokens(index) == layer.chooses_tokens
                if layer.chooses_tokens:
                    self.caches.set_scores(index, scores)
                terms = ScoreTerms(scale=self.scale)
                out = self.caches.attend(index, q, k, v, terms, layout=layer.layout, window=layer.window)
                assert_close(out, torch.cat([self.expected[name][index][:, :, tokens] for name, tokens in new], dim=2))
        self.check_bytes()

    def check_bytes(self) -> None:
        """Each request takes no more than its pages, and the pool knows how many there are."""
        pool = self.pool
        for name, of_layers in pool.tables.items():
            nbytes = sum(contents.key_nbytes + contents.value_nbytes for contents in of_layers)
            assert nbytes <= pool.held(name) * pool.page_nbytes
        assert pool.num_used == sum(map(pool.held, pool.tables)) <= pool.num_pages
        assert pool.num_used + pool.num_available == pool.num_pages
        assert pool.nbytes <= pool.num_used * pool.page_nbytes


def run(seed: int) -> None:
    """Requests that come and go, are forked, computed again, and free in any order."""
    program = Program(seed)
    draw, pool = program.draw, program.pool
    for number in range(draw.randint(1, 3)):
        prompt = draw.choice([1, 5, 30, 70])
        program.add(f"text{number}", prompt, prompt + draw.randint(0, 50))
    texts = list(program.inputs)
    names = {f"request{number}": draw.choice(texts) for number in range(draw.randint(1, 4))}
    done = dict.fromkeys(names, 0)
    forks = 0
    while done:
        chosen = draw.sample(sorted(done), draw.randint(1, len(done)))
        lengths = {name: program.inputs[names[name]][0][0].shape[2] for name in done}
        counts = {name: min(draw.choice([1, 1, 1, 2, 17, 40, 90]), lengths[name] - done[name]) for name in chosen}
        program.step([Tokens(name, done[name], count) for name, count in counts.items()], names)
        for name, count in counts.items():
            done[name] += count
            if done[name] == lengths[name]:
                pool.free(name)
                del done[name]
                continue
            change = draw.random()
            if change < 0.05:  # it is computed again
                pool.free(name)
                done[name] = 0
            elif change < 0.15 and forks < 3:
                other, forks = f"{name} fork{forks}", forks + 1
                assert pool.fork(name, other, done[name])
                names[other], done[other] = names[name], done[name]
                program.check_bytes()
    assert (pool.num_used, pool.tables, pool.prompts, pool.nbytes) == (0, {}, {}, 0)


SEEDS = [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.full) for seed in range(300)]


@pytest.mark.parametrize("seed", SEEDS)
def test_any_arrivals_and_any_calls(seed) -> None:
    run(seed)


@pytest.mark.parametrize("seed", SEEDS[:100])
def test_the_same_with_the_cpp_code(seed, built) -> None:
    run(1000 + seed)


@pytest.mark.parametrize("seed", range(8))
def test_the_bytes_of_a_length_are_those_that_are_allocated(seed) -> None:
    """With a page of codes that the next token may read, and no more."""
    draw = random.Random(seed)
    layer = PagedLayerShape(None, None, (HEADS, DIM), (HEADS, DIM), random_storage(draw))
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    pool = RequestPool([layer], nbytes=2**24, page_size=draw.choice([1, 40]), **place)
    assert pool.reserve("request", 0, 1)
    (contents,), most = pool.tables["request"], 0
    stores = [store for store, _ in contents.parts[0][1].kept.groups]
    of_codes = sum(store.nbytes_of(1, (1, HEADS), torch.float32) for store in stores)
    for length in range(1, 260):
        contents.decide()
        contents.set_scores(torch.randn(1, HEADS, 1))
        contents.append(torch.randn(1, HEADS, 1, DIM), torch.randn(1, HEADS, 1, DIM))
        most = max(most, pool.nbytes)
        assert most <= contents.most_nbytes(length) <= most + of_codes
        assert most <= pool.needed(length) * pool.page_nbytes


def test_reserving_is_all_or_nothing() -> None:
    storage = sa.Storage(16, 16, group_size=4, residual=4, keep=4, block=16, recent=12)
    layer = PagedLayerShape(None, None, (HEADS, DIM), (HEADS, DIM), storage)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    token = 2 * HEADS * DIM * 4
    pool = RequestPool([layer], nbytes=100 * token, page_size=8, **place)
    assert (pool.page_nbytes, pool.num_pages) == (token, 100)
    pool.expect("a", 80)
    assert pool.reserve("a", 0, 50)  # a part of a prompt is kept whole until its end
    assert pool.held("a") > 50
    whole = pool.missing("b", 0, 60)
    assert 0 < whole < 40
    assert not pool.reserve("a", 50, 1000)
    assert not pool.fork("a", "c", 50)
    assert set(pool.tables) == {"a"}
    assert pool.reserve("b", 0, 60)
    used = pool.num_used
    pool.free("b")
    assert pool.num_used == used - whole
    pool.free_all()
    assert (pool.num_used, pool.tables) == (0, {})
    with pytest.raises(ConfigError, match=r"has 3 pages of 128, and a request needs \d+ at least: give it more memory"):
        RequestPool([layer], nbytes=3 * token, page_size=8, **place)
    with pytest.raises(ConfigError, match="a window or chunks forget far tokens"):
        RequestPool([PagedLayerShape(None, 9, (2, 8), (2, 8), storage)], nbytes=2**20, page_size=8, **place)


def test_a_pool_of_few_bytes_holds_many_requests() -> None:
    """Of 4,096 tokens, with an eighth of those that are far."""
    storage = sa.Storage(4, 4, group_size=16, residual=32, keep=16, block=128, recent=128)
    layer = PagedLayerShape(None, None, (HEADS, 64), (HEADS, 64), storage)
    place = {"dtype": torch.float32, "device": torch.device("cpu")}
    pool = RequestPool([layer], nbytes=4096 * 2 * HEADS * 64 * 4, page_size=32, **place)
    count = 0
    while pool.reserve(str(count), 0, 4096):
        count += 1
    assert count >= 9


def test_wrong_use_is_named() -> None:
    program = Program(1)
    program.add("text", 5, 9)
    tokens, caches, layer = [Tokens("text", 0, 5)], program.caches, program.layers[0]
    q, k, v, scores = (x[:, :, :5] for x in program.inputs["text"][0])

    def attend(terms) -> None:
        caches.attend(0, q, k, v, terms, layout=layer.layout, window=None)

    def step(times=1, *, has_scores=True, **terms) -> None:
        with caches.step(tokens):
            if has_scores:
                caches.set_scores(0, scores)
            for _ in range(times):
                attend(ScoreTerms(**terms))

    with pytest.raises(CacheError, match="call the model within step"):
        attend(ScoreTerms())
    with pytest.raises(CacheError, match="has no pages for 5 tokens after 0: reserve them"):
        step()
    program.pool.reserve("text", 0, 5)
    with pytest.raises(ConfigError, match="needs token_scores"):
        step(has_scores=False)
    with pytest.raises(CacheError, match="was called twice"):
        step(2)
    with pytest.raises(CacheError, match="has 5 tokens in attention layer 0, and the step says 0"):
        step()
    program.pool.free("text")
    program.pool.reserve("text", 0, 5)
    with pytest.raises(ConfigError, match="does not know masks and biases of positions"):
        step(alibi_slopes=torch.ones(4))
    with pytest.raises(CacheError, match="left out the attention layers"):
        step(0)
