"""Pages that requests share: who has which, what is in them, and how many times a beginning is computed."""

import random
from collections import Counter

import pytest
import torch

from structattn.cache.paged import PagedCache, PagedLayerShape, PagePool, Tokens
from structattn.cache.paged.geometry import Lifetime, groups_of, pages_of
from structattn.cache.paged.prefixes import PrefixIndex, share_unit
from structattn.cache.storage import Storage
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.ops import structured_attention
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close

LAYERS = {
    "plain": [PagedLayerShape(None, None, (2, 4), (2, 3))],
    "levels": [PagedLayerShape(LevelLayout((4, 2, 2), (64, 16, 8)), None, (1, 8), (2, 3))],
    "values": [PagedLayerShape(LevelLayout((2, 4), (72, 12), value_ranks=(2, 1)), None, (2, 6), (1, 3))],
    "two layers": [
        PagedLayerShape(LevelLayout((4, 2), (64, 4), value_ranks=(1, 2)), None, (1, 6), (1, 3)),
        PagedLayerShape(LevelLayout((2, 2), (66, 6)), None, (1, 4), (1, 3)),
    ],
    "sink tokens": [PagedLayerShape(LevelLayout((4, 2), (64, 8), sink_tokens=2), None, (1, 6), (1, 3))],
    "window": [PagedLayerShape(LevelLayout((4, 2), (64, 8)), 5, (1, 6), (1, 3))],
    "full and window": [PagedLayerShape(None, None, (1, 4), (1, 3)), PagedLayerShape(None, 7, (1, 4), (1, 3))],
    "two softmaxes": [PagedLayerShape(GlobalWindowLayout((4, 4), 6), None, (1, 8), (1, 3))],
    "streaming heads": [
        PagedLayerShape(HeadLayouts((None, LevelLayout.sliding((4,), (9,), sink_tokens=2))), None, (2, 4), (2, 3))
    ],
    "windows only": [
        PagedLayerShape(LevelLayout.sliding((4,), (5,), sink_tokens=7), None, (1, 4), (1, 3)),
        PagedLayerShape(None, 1, (1, 4), (1, 3)),
    ],
    "one token": [PagedLayerShape(None, 1, (1, 4), (1, 3))],
    "fewer bits": [PagedLayerShape(None, None, (2, 4), (2, 3), Storage(4, 8, 4, 3))],
    "fewer bits, levels": [
        PagedLayerShape(LevelLayout((4, 2), (60, 12), sink_tokens=2), None, (1, 6), (1, 3), Storage(8, 8, 4, 0))
    ],
    "fewer bits, windows": [
        PagedLayerShape(LevelLayout.sliding((4, 2), (None, 15)), None, (1, 6), (1, 3), Storage(8, 4, 4, 3)),
        PagedLayerShape(None, 13, (1, 4), (1, 3), Storage(8, 4, 4, 3)),
    ],
    "fewer bits, heads": [PagedLayerShape(None, None, (2, 4), (2, 3), (Storage(4, 8, 2, 1), None))],
}


def pool_of(layers, num_pages, most_slots):
    """A pool of exactly this many pages."""
    options = {"dtype": torch.float64, "device": torch.device("cpu"), "most_slots": most_slots, "length": 4096}
    return PagePool(layers, nbytes=num_pages * PagePool(layers, nbytes=2**20, **options).page_nbytes, **options)


def number_of(text, dtype):
    """A number that stands for a text."""
    return 1 + hash(tuple(text)) % (2**40 if dtype == torch.float64 else 251)


class Machine:
    """A pool with requests whose slots hold a number that stands for the text up to their position."""

    def __init__(self, layers, num_pages, most_slots):
        self.pages = pool_of(layers, num_pages, most_slots)
        self.levels = [level for layer in range(len(layers)) for level in self.pages.levels(layer)]
        self.texts, self.done = {}, {}
        self.computed = 0

    def places(self, name, length):
        """(group, end, page, slot) of all that a request needs after some tokens: what is in a slot is that
        of the tokens before the end.
        """
        pages = self.pages
        for number, (group, slots) in enumerate(zip(pages.groups, pages.slots, strict=True)):
            kept, count = group.lifetime.kept(length), group.lifetime.entries(length)
            first = 0 if group.lifetime.sinks is not None else count - len(kept)
            for slot, entry in zip(kept, range(first, count), strict=False):
                end = (entry + 1) * group.lifetime.span
                yield number, end, pages.tables[name][number][slot // slots], slot % slots

    def write(self, name, past, end):
        """Numbers of new tokens, in all pages that a call of the model would write them to."""
        pages = self.pages
        for number, (group, slots) in enumerate(zip(pages.groups, pages.slots, strict=True)):
            for entry in group.lifetime.written(past, end):
                slot, text = group.lifetime.slot(entry), self.texts[name][: (entry + 1) * group.lifetime.span]
                page = pages.tables[name][number].get(slot // slots)
                assert page or group.lifetime.window is not None
                if page:
                    assert pages._uses[page] == 1
                    for level in self.levels:
                        if level.group == number:
                            level.view[page, :, slot % slots] = number_of(text, level.view.dtype)

    def begin(self, name, text):
        self.texts[name] = text
        self.done[name] = self.pages.begin(name, text)
        return self.done[name]

    def step(self, name, count):
        """Whether there were pages."""
        before = self.state()
        if not self.pages.reserve(name, self.done[name], count):
            assert self.state() == before
            return False
        past, self.done[name] = self.done[name], self.done[name] + count
        self.pages.extend(name, past, count)
        self.write(name, past, self.done[name])
        self.computed += count
        self.pages.note(name, self.texts[name][: self.done[name]])
        self.pages.trim(name, self.done[name])
        return True

    def fork(self, source, name):
        before = self.state()
        if not self.pages.fork(source, name, self.done[source]):
            assert self.state() == before
            return False
        self.texts[name], self.done[name] = self.texts[source], self.done[source]
        return True

    def free(self, name):
        self.pages.free(name)
        del self.texts[name], self.done[name]

    def state(self):
        pages = self.pages
        return pages.num_free, pages.num_cached, pages.num_used, repr(pages.tables)

    def check(self):
        """Every page is with as many requests as it says; what they hold is theirs; and all pages are
        somewhere.
        """
        pages = self.pages
        uses = Counter(page for table in pages.tables.values() for own in table for page in own.values())
        free = [*pages._returned, *range(pages._fresh, pages.num_pages + 1)]
        assert len(set(free)) == len(free) == pages.num_free
        everywhere = [*free, *pages._cached, *uses]
        assert sorted(everywhere) == list(range(1, pages.num_pages + 1))  # once each; page 0 is nobody's
        assert [uses[page] for page in range(pages.num_pages + 1)] == pages._uses
        assert (pages.num_cached, pages.num_used) == (len(pages._cached), len(uses))
        assert all(pages._uses[page] == 0 and page in pages.prefixes for page in pages._cached)
        assert not set(pages.prefixes._nodes) & set(free)
        self.check_index()
        for name, table in pages.tables.items():
            done = self.done[name]
            for number, (group, slots, own) in enumerate(zip(pages.groups, pages.slots, table, strict=True)):
                assert own.keys() == set(pages_of(group.lifetime.kept(done), slots))
                is_shared, count = group.lifetime.block is None, group.lifetime.entries(done)
                assert all(uses[page] == 1 or (is_shared and n < count // slots) for n, page in own.items())
                last = own.get(count // slots)
                if is_shared and last:  # nothing of others behind its last token
                    assert not any(
                        level.view[last, :, count % slots :].any() for level in self.levels if level.group == number
                    )
            for number, end, page, slot in self.places(name, done):
                self.check_number(number, page, slot, self.texts[name][:end])
        assert not pages.memory[0].any()

    def check_index(self):
        """Every node is with the pages that it needs, which hold its text, and none is there for nothing."""
        index, needed = self.pages.prefixes, Counter()
        waiting = [(node, ()) for node in index._root.children.values()]
        while waiting:
            node, before = waiting.pop()
            text = before + node.tokens
            waiting.extend((child, text) for child in node.children.values())
            tables = [*node.pages, *(node.window_pages or [])]
            needed.update((page, id(node)) for table in tables for page in table.values())
            assert node.children or any(tables)
            for group, table in enumerate(tables):
                group %= len(node.pages)
                lifetime, slots = self.pages.groups[group].lifetime, self.pages.slots[group]
                for number, page in table.items():
                    end = min(lifetime.entries(len(text)), (number + 1) * slots, lifetime.sinks or len(text))
                    for entry in range(number * slots, end):
                        self.check_number(group, page, entry % slots, text[: (entry + 1) * lifetime.span])
        assert needed == Counter((page, id(node)) for page, nodes in index._nodes.items() for node in nodes)

    def check_number(self, group, page, slot, text):
        for level in self.levels:
            if level.group == group:
                assert bool((level.view[page, :, slot] == number_of(text, level.view.dtype)).all())


SEEDS = 5


@pytest.mark.quick(name=["plain", "two layers", "window", "fewer bits, windows"])
@pytest.mark.parametrize("name", LAYERS)
def test_any_order_of_what_requests_do(name, monkeypatch) -> None:
    shared = forked = 0
    dropped = []
    drop = PrefixIndex.drop
    monkeypatch.setattr(PrefixIndex, "drop", lambda self, page: dropped.append(page) or drop(self, page))
    for seed in range(SEEDS):
        draw = random.Random(seed)
        machine = Machine(LAYERS[name], draw.choice((8, 16, 40)), draw.choice((1, 3, 5, 16)))
        roots = [[draw.randrange(3) for _ in range(60)] for _ in range(2)]
        for index in range(100):
            names = sorted(machine.texts)
            other = draw.choice(names) if names else None
            action = draw.random()
            if other is None or (action < 0.3 and len(names) < 8):
                text = list(draw.choice(roots))[: draw.randint(1, 60)]
                if draw.random() < 0.5:  # differs in one token
                    text[draw.randrange(len(text))] = 7
                shared += machine.begin(str(index), text)
            elif action < 0.75:
                left = len(machine.texts[other]) - machine.done[other]
                if not left or not machine.step(other, draw.choice((1, left, draw.randint(1, left)))):
                    machine.free(other)
            elif action < 0.85:
                forked += machine.fork(other, str(index)) if machine.done[other] else 0
            elif action < 0.97:
                machine.free(other)
            elif action < 0.98:
                machine.pages.forget()
            machine.check()
        machine.pages.free_all()
        for page in list(machine.pages._cached):
            machine.pages.prefixes.drop(page)
        assert (machine.pages.prefixes._nodes, machine.pages.prefixes._root.children) == ({}, {})
        machine.pages.forget()
        assert machine.pages.num_free == machine.pages.num_pages
    assert (shared > 50, bool(dropped)) == (True, True)
    assert forked > 10


def test_the_unit_ends_all_deeper_blocks_and_is_at_least_a_page() -> None:
    found = {
        name: [
            share_unit([group.lifetime for group in groups_of(layers, torch.float64)], slots)
            for slots in (1, 7, 48, 50)
        ]
        for name, layers in LAYERS.items()
    }
    assert found["plain"] == [1, 7, 48, 50]
    assert found["levels"] == [16, 16, 48, 64]
    assert found["values"] == [12, 12, 48, 60]
    assert found["two layers"] == [12, 12, 48, 60]  # blocks of 4 and 6
    assert found["window"] == [1, 7, 48, 50]  # shorter than the blocks
    assert found["sink tokens"] == [8, 8, 48, 56]


def numbered(*pages):
    """Tables of one group."""
    return [dict(enumerate(pages))]


def test_beginnings_are_found_by_their_tokens() -> None:
    index = PrefixIndex(4, [Lifetime()], [3])  # units end in pages: 0 1 2 | 3 4 5 | 6 7 8
    text = list(range(9))
    index.add(text, numbered(10, 11, 12))
    assert index.match(text) == (8, numbered(10, 11, 12))
    assert index.match(text[:7]) == (4, numbered(10, 11))
    assert index.match([*text[:5], 99, *text[6:]]) == (4, numbered(10, 11))
    assert index.match([99, *text[1:]]) == (0, numbered())
    index.add([*text[:4], 5, 5, 5, 5], numbered(20, 21, 22))  # the first unit is known: page 20 is not needed
    assert index.match([*text[:4], 5, 5, 5, 5]) == (8, numbered(10, 21, 22))
    assert 20 not in index
    assert index.drop(21) == {21, 22}
    assert index.match([*text[:4], 5, 5, 5, 5]) == (4, numbered(10, 11))
    assert index.drop(10) == {10, 11, 12}  # and all that follows
    assert index.match(text) == (0, numbered())
    assert not index._nodes


def test_a_beginning_needs_its_window_and_no_other() -> None:
    index = PrefixIndex(4, [Lifetime(), Lifetime(window=3)], [4, 2])
    text = list(range(12))
    index.add(text, [{0: 10, 1: 11, 2: 12}, {1: 21, 5: 25}])
    assert index.match(text) == (12, [{0: 10, 1: 11, 2: 12}, {5: 25}])
    assert index.match(text[:11]) == (4, [{0: 10}, {1: 21}])  # the window after 8 tokens is not there
    assert index.drop(25) == {25}
    assert index.match(text) == (4, [{0: 10}, {1: 21}])
    index.add(text, [{0: 10, 1: 11, 2: 12}, {3: 23, 5: 26}])
    assert index.match(text) == (12, [{0: 10, 1: 11, 2: 12}, {5: 26}])
    assert index.match(text[:11]) == (8, [{0: 10, 1: 11}, {3: 23}])
    assert index.drop(10) == {10, 11, 12, 21, 23, 26}


def test_a_text_without_pages_is_forgotten() -> None:
    index = PrefixIndex(4, [Lifetime(window=3)], [2])
    text = list(range(12))
    index.add(text, [{}])
    assert not index._root.children
    index.add(text, [{3: 23, 5: 25}])
    assert (index.match(text[:8]), index.match(text)) == ((8, [{3: 23}]), (12, [{5: 25}]))
    assert index.drop(25) == {25}
    assert index.match(text) == (8, [{3: 23}])
    index.add(text, [{1: 21}])
    assert (index.drop(23), index.match(text)) == ({23}, (4, [{1: 21}]))
    assert (index.drop(21), index._root.children, index._nodes) == ({21}, {}, {})


def test_a_text_is_computed_once() -> None:
    text = [*range(40)]
    machine = Machine(LAYERS["levels"], 200, 5)
    machine.begin("a", text)
    assert machine.step("a", 40)
    for name, own, shared in (
        ("equal", text, 32),
        ("one token differs", [*text[:20], 99, *text[21:]], 16),
        ("the first differs", [99, *text[1:]], 0),
        ("ends within a block", text[:30], 16),
        ("ends with a block", text[:32], 16),  # whose last token must be computed
        ("one more", text[:33], 32),
    ):
        assert machine.begin(name, own) == shared
        computed = machine.computed
        assert machine.step(name, len(own) - shared)
        assert machine.computed - computed == len(own) - shared
        machine.check()
    used = machine.pages.num_used
    machine.free("equal")
    assert (machine.pages.num_used < used, machine.pages.num_used > 0) == (True, True)
    for name in sorted(machine.texts):
        machine.free(name)
    machine.check()
    pages = machine.pages
    assert (pages.num_used, pages.num_cached > 0, pages.num_free + pages.num_cached) == (0, True, pages.num_pages)
    assert machine.begin("later", text) == 32  # of a request that has ended


def test_two_that_computed_the_same_have_it_once() -> None:
    machine = Machine(LAYERS["plain"], 50, 4)
    for name in ("a", "b"):
        assert machine.begin(name, [*range(21)]) == 0
    assert machine.step("a", 21)
    assert machine.step("b", 21)
    machine.check()
    assert machine.pages.num_used == 5 + 2  # five full pages, and the last one of each


def test_what_is_unused_longest_goes_first() -> None:
    machine = Machine(LAYERS["plain"], 10, 4)
    for name in ("old", "new"):
        machine.begin(name, [ord(letter) for letter in name * 7])
        assert machine.step(name, 16)
        machine.free(name)
    assert (machine.pages.num_cached, machine.pages.num_free) == (8, 2)
    machine.begin("large", [0] * 16)
    assert machine.step("large", 16)
    assert machine.begin("new", [ord(letter) for letter in "new" * 7]) == 16
    assert machine.begin("old", [ord(letter) for letter in "old" * 7]) == 8  # the end of a text goes first
    machine.check()


def test_a_copy_needs_a_page() -> None:
    machine = Machine(LAYERS["values"], 40, 5)
    assert (machine.pages.slots[0], machine.pages.prefixes.unit) == (5, 12)
    machine.begin("a", [*range(13)])
    assert machine.step("a", 13)
    while machine.pages.num_available:
        number = str(machine.pages.num_available)
        machine.begin(number, [99])
        machine.step(number, 1)
    assert machine.begin("b", [*range(13)]) == 0
    machine.check()
    machine.free(number)
    assert machine.begin("b", [*range(13)]) == 12
    machine.check()


def test_a_page_in_use_may_be_forgotten() -> None:
    machine = Machine(LAYERS["values"], 40, 5)
    machine.begin("a", [*range(13)])
    assert machine.step("a", 13)
    machine.free("a")
    assert machine.begin("b", [*range(30)]) == 12  # with a copy of the third page, in which the beginning ends
    assert machine.step("b", 18)
    assert machine.pages.num_cached == 1
    while machine.pages.num_available:
        number = str(machine.pages.num_available)
        machine.begin(number, [99])
        machine.step(number, 1)
    machine.check()
    for name in sorted(machine.texts):
        machine.free(name)
    machine.check()
    assert (machine.pages.num_free, machine.begin("c", [*range(30)])) == (40, 0)


def test_nothing_of_a_model_with_other_weights_is_shared() -> None:
    machine = Machine(LAYERS["plain"], 50, 4)
    machine.begin("a", [*range(20)])
    machine.step("a", 10)
    machine.pages.forget()
    machine.step("a", 10)  # its first pages are of the old model
    assert machine.fork("a", "child")
    machine.pages.note("child", [*range(20)])
    machine.check()
    assert machine.begin("b", [*range(20)]) == 0
    machine.step("b", 20)
    assert machine.begin("c", [*range(20)]) == 16


@pytest.mark.parametrize("name", [name for name in LAYERS if "fewer bits" not in name])
def test_attention_over_shared_pages_is_that_of_the_whole_text(name) -> None:
    torch.manual_seed(0)
    layers = LAYERS[name]
    cache = PagedCache(layers, pool_of(layers, 200, 5))
    length, same = 40, 27

    def random_inputs(layer):
        for heads, dim in ((2, layer.keys[1]), layer.keys, layer.values):
            yield torch.randn(1, heads, length, dim, dtype=torch.float64)

    first = [list(random_inputs(layer)) for layer in layers]
    second = [
        [torch.cat([x[:, :, :same], y[:, :, same:]], dim=2) for x, y in zip(inputs, random_inputs(layer), strict=True)]
        for layer, inputs in zip(layers, first, strict=True)
    ]
    texts = {"first": [*range(40)], "second": [*range(same), *range(100, 100 + length - same)]}
    for request, inputs in (("first", first), ("second", second)):
        done = cache.pages.begin(request, texts[request])
        assert done == (0 if request == "first" else cache.pages.prefixes.unit * (same // cache.pages.prefixes.unit))
        for count in (length - done - 3, 1, 2):
            assert cache.pages.reserve(request, done, count)
            with cache.step([Tokens(request, done, count, texts[request][: done + count])]):
                for index, (layer, (q, k, v)) in enumerate(zip(layers, inputs, strict=True)):
                    new = slice(done, done + count)
                    out = cache.attend(
                        index,
                        q[:, :, new],
                        k[:, :, new],
                        v[:, :, new],
                        ScoreTerms(),
                        layout=layer.layout,
                        window=layer.window,
                    )
                    k, v = (x.repeat_interleave(2 // x.shape[1], dim=1) for x in (k, v))
                    whole = structured_attention(q, k, v, layer.layout, window=layer.window, backend="reference")
                    assert_close(out, whole[:, :, new])
            done += count
