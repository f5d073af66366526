"""What fails while tokens are appended leaves a cache as it was: an error or Ctrl-C at every line, copies,
and ``undo``.
"""

import copy
import io
import pickle
import sys
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.cache import LayerCaches
from structattn.errors import CacheError
from structattn.testing.tolerances import assert_close

LEVELS = sa.LevelLayout((2, 2, 2), (64, 4, 2), value_ranks=(2, 2, 2))
FOLDER = str(Path(sa.__file__).parent)


@contextmanager
def interrupted(*at, kind=KeyboardInterrupt):
    """Raises an error at each line number ``at`` that is run in the package, counted from the beginning;
    yields the count.
    """
    seen = [0]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            seen[0] += 1
            if seen[0] in at:
                raise kind("stopped")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def tokens(batch, length):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(batch, h, length, 6, generator=rng, dtype=torch.float64) for h in (4, 2, 2)]


def croppable(cache):
    """The lengths to which a cache can go back."""
    found = []
    for length in range(cache.length + 1):
        try:
            cache.check_crop(length)
        except CacheError:
            continue
        found.append(length)
    return found


CASES = {
    "levels": {"layout": LEVELS},
    "ring": {"layout": LEVELS, "window": 3, "page_size": 2},
    "rings": {"layout": sa.LevelLayout.sliding((2, 2, 2), (None, 5, 3), value_ranks=(2, 2, 2)), "page_size": 2},
    "rows": {"layout": LEVELS, "left_padding": [0, 3], "page_size": 2},
    "chunks of rows": {"layout": LEVELS, "chunk_size": 6, "left_padding": [0, 3]},
    "ring of rows": {"layout": None, "window": 3, "left_padding": [0, 3]},
}


@pytest.mark.quick(case=["levels", "ring of rows"])
@pytest.mark.parametrize("case", ["levels", "ring", "rows", "ring of rows"])
def test_an_interrupt_at_many_lines_leaves_the_cache_as_it_was(case) -> None:
    options = CASES[case]
    q, k, v = tokens(2, 24)
    padding = None if "left_padding" not in options else torch.tensor(options["left_padding"])
    expected = sa.structured_attention(
        q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), options["layout"], window=options.get("window"),
        left_padding=padding, backend="reference",
    )  # fmt: skip
    total = 0
    # The first token of a block, several across boundaries, a long chunk, and the very first tokens.
    for start, size in ((8, 1), (7, 5), (6, 17), (0, 4)):
        base = sa.LevelCache(**options)
        if start:
            base.attend(*(x[:, :, :start] for x in (q, k, v)))
        before = croppable(base)
        new = [x[:, :, start : start + size] for x in (q, k, v)]
        copy.deepcopy(base).attend(*new)  # what the first call of a process does, as loading code, is not counted
        cache = copy.deepcopy(base)
        with interrupted(0) as seen:
            cache.attend(*new)
        for at in range(1 + size % 3, seen[0] + 1, seen[0] // 25 + 1):
            cache = copy.deepcopy(base)
            with pytest.raises(KeyboardInterrupt), interrupted(at):
                cache.attend(*new)
            total += 1
            assert cache.length == start
            assert croppable(cache) == before
            out = cache.attend(*new)
            real = torch.ones(2, size, dtype=torch.bool)
            if padding is not None:
                real = torch.arange(start, start + size) >= padding[:, None]
            for row in range(2):
                assert_close(out[row][:, real[row]], expected[row, :, start : start + size][:, real[row]])
    assert total > 80


def copies(cache, folder):
    """The same cache in every way in which it can be copied."""
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    yield pickle.loads(pickle.dumps(cache))
    yield pickle.loads(ForkingPickler.dumps(cache))  # between processes: tensors are shared memory
    yield torch.load(buffer, weights_only=False)
    yield copy.copy(cache)
    yield copy.deepcopy(cache)
    cache.save(folder / "cache.safetensors")
    yield type(cache).load(folder / "cache.safetensors")
    with torch.inference_mode():
        found = [
            pickle.loads(pickle.dumps(cache)),
            copy.deepcopy(cache),
            type(cache).load(folder / "cache.safetensors"),
            cache.from_state(*cache.state(), cache.layout, None),
        ]
    yield from found


@pytest.mark.parametrize("case", CASES)
def test_copies_go_on_alone(case, tmp_path) -> None:
    options = CASES[case]
    q, k, v = tokens(2, 24)
    cache = sa.LevelCache(**options)
    cache.attend(*(x[:, :, :10] for x in (q, k, v)))
    cache.reorder(torch.tensor([1, 0]))
    cache.crop(9)
    expected = copy.deepcopy(cache).attend(*(x[:, :, 9:20] for x in (q, k, v)))
    for found in copies(cache, tmp_path):
        # The copy takes other tokens than the original, in turn: neither writes into the other.
        other = copy.deepcopy(cache)
        first = found.attend(*(x[:, :, 9:14] for x in (q, k, v)))
        other.attend(*(-x[:, :, 9:14] for x in (q, k, v)))
        cache.append(*(x[:, :, 20:21] * 9 for x in (k, v)))
        cache.undo()
        second = [found.attend(*(x[:, :, at : at + 1] for x in (q, k, v))) for at in range(14, 20)]
        assert_close(torch.cat([first, *second], dim=2), expected)


def test_undo() -> None:
    q, k, v = tokens(2, 24)
    cache = sa.LevelCache(LEVELS)
    with pytest.raises(CacheError, match="nothing to undo"):
        cache.undo()
    cache.attend(q[:, :, :7], k[:, :, :7], v[:, :, :7])
    cache.undo()
    assert cache.length == 0
    assert cache.nbytes == 0
    cache.append(k[:, :, :8], v[:, :, :8])
    with torch.inference_mode():  # what is kept for undo may come from another mode
        expected = cache.attend(q[:, :, 8:11], k[:, :, 8:11], v[:, :, 8:11])
    cache.undo()
    assert_close(cache.attend(q[:, :, 8:11], k[:, :, 8:11], v[:, :, 8:11]), expected)
    cache.crop(10)
    with pytest.raises(CacheError, match="crop\\(\\) goes back further"):
        cache.undo()


def test_layers_that_differ_are_refused() -> None:
    _, k, v = tokens(2, 24)
    layers = LayerCaches([sa.LevelCache(), sa.LevelCache(LEVELS)])
    with layers.all_or_nothing():
        for layer in layers:
            layer.append(k[:, :, :9], v[:, :, :9])
    layers[0].append(k[:, :, :1], v[:, :, :1])
    for use in (layers.all_or_nothing, layers.check, lambda: layers.save("x"), lambda: LayerCaches(layers)):
        with pytest.raises(CacheError, match=r"different numbers of tokens, \[10, 9\].*crop\(9\)"):
            use()
    layers.crop(9)
    layers.check()
    with pytest.raises(KeyboardInterrupt), interrupted(1):  # the first layer is as it was
        layers[0].select(torch.tensor([1, 1]))
    layers.check()
    layers[1].select = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layers.select(torch.tensor([1, 1]))
    with pytest.raises(CacheError, match="broke off between two of them: reset"):
        layers.check()
    layers.reset()
    layers.check()


@pytest.mark.quick(change=["crop", "reset"])
@pytest.mark.parametrize("change", ["select", "crop", "reset"])
def test_a_change_that_breaks_off_is_seen(change: str) -> None:
    """At every line: the cache is as before, changed, or refuses everything until it is reset."""
    storage = [sa.Storage(4, 4, 4, 3), None]
    k, v = tokens(2, 24)[1:]
    base, states = sa.LevelCache(storage=storage, page_size=8), []
    base.append(k, v)
    changes = {
        "select": lambda cache: cache.select(torch.tensor([1, 1])),
        "crop": lambda cache: cache.crop(22),
        "reset": lambda cache: cache.reset(),
    }
    change = changes[change]
    for at in [0, *range(1, 400)]:
        cache = copy.deepcopy(base)
        with interrupted(at) as seen:
            try:
                change(cache)
            except KeyboardInterrupt:
                assert at > 0
        if 0 < seen[0] < at:
            break
        try:
            kept = cache.dense_past(k[:, :, :0], v[:, :, :0])
        except CacheError as error:
            if "broke off" not in str(error):
                raise
            states.append("refused")
            cache.reset()
            assert cache.length == 0
            cache.append(k, v)
            kept = cache.dense_past(k[:, :, :0], v[:, :, :0])
            assert torch.equal(kept[0], base.dense_past(k[:, :, :0], v[:, :, :0])[0])
            continue
        wanted = [copy.deepcopy(base) for _ in range(2)]
        change(wanted[1])
        pasts = [one.dense_past(k[:, :, :0], v[:, :, :0]) for one in wanted]
        same = [number for number, past in enumerate(pasts) if all(map(torch.equal, past, kept))]
        assert same, at
        assert cache.length == wanted[same[0]].length
        states.append("as before" if same[0] == 0 else "changed")
    assert {"refused", "changed"} <= set(states)


TWO_STORAGES = [sa.Storage(4, 4, 4, 3), None]


@pytest.mark.quick(case=["levels"])
@pytest.mark.parametrize("case", ["levels", "storages"])
def test_undo_that_breaks_off_is_seen(case: str) -> None:
    """At every line of ``undo``, and of what a step that breaks off takes back: the cache is as it was, or
    refuses everything until it is reset.
    """
    q, k, v = tokens(2, 24)
    layout, storage = {"levels": (LEVELS, None), "storages": (None, TWO_STORAGES)}[case]
    base = sa.LevelCache(layout, storage=storage, page_size=8)
    base.attend(q[:, :, :20], k[:, :, :20], v[:, :, :20])
    last = [x[:, :, 20:21] for x in (q, k, v)]
    empty = [x[:, :, :0] for x in (k, v)]
    before = base.dense_past(*empty)

    def check(cache, after=None) -> str:
        try:
            past = cache.dense_past(*empty)
        except CacheError as error:
            if "broke off" not in str(error):
                raise
            cache.reset()
            assert cache.length == 0
            cache.append(*last[1:])
            return "refused"
        is_before = cache.length == 20
        assert all(map(torch.equal, past, before if is_before or after is None else after))
        return "as before" if is_before else "not undone"

    states = []
    for at in range(1, 400):
        cache = copy.deepcopy(base)
        cache.append(*last[1:])
        with interrupted(at) as seen, suppress(KeyboardInterrupt):
            cache.undo()
        states.append(check(cache, base_and(base, last, empty)))
        if seen[0] < at:
            break
    assert {"refused", "as before", "not undone"} == set(states)

    cache = copy.deepcopy(base)
    with interrupted() as seen:
        cache.attend(*last)
    for at in range(seen[0] + 1, seen[0] + 200):
        cache = copy.deepcopy(base)
        with interrupted(seen[0], at) as lines, pytest.raises(KeyboardInterrupt):
            cache.attend(*last)
        states.append(check(cache))
        if lines[0] < at:
            break
    assert "not undone" not in states[-1]


def base_and(base, new, empty):
    cache = copy.deepcopy(base)
    cache.append(*new[1:])
    return cache.dense_past(*empty)


def test_pages_that_a_failing_call_took_are_given_back(tmp_path) -> None:
    attention = sa.Attention(8, 2, scoring=sa.scoring.BTT()).double().requires_grad_(False)
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    cache = attention.new_cache(page_size=2, keys="hidden")
    attention(x[:, :2], cache=cache)
    contents = cache._contents
    contents.keys[1].grow = lambda *_: 1 / 0  # the states have taken a page by then, the second store has not
    with pytest.raises(ZeroDivisionError):
        attention(x[:, 2:3], cache=cache)
    del contents.keys[1].grow
    assert [store.num_pages for store, _ in contents.stores()] == [1, 1, 1]
    cache.save(tmp_path / "cache")
    found = sa.LevelCache.load(tmp_path / "cache", latent=attention.latent)
    out = torch.cat([attention(x[:, at : at + 1], cache=found) for at in (2, 3, 4)], dim=1)
    assert_close(out, attention(x)[:, 2:])
