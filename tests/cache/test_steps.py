"""Decoding steps of the C++ code against those without it: the same numbers, the same cache after each of
them, and the same errors.
"""

import copy
import random
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_undo import croppable, interrupted

import structattn as sa
from structattn.cache import contents, native_decode
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.testing.tolerances import assert_close, relative_error

pytestmark = pytest.mark.usefixtures("built")

LEVELS = sa.LevelLayout((2, 2, 2), (64, 8, 4), value_ranks=(2, 2, 1))
SLIDING = sa.LevelLayout.sliding((2, 2, 2), (None, 7, 3), value_ranks=(2, 2, 1))
SEGMENTS = sa.LevelLayout.from_boundaries((2, 2, 2), [[0], [0, 5, 19], [0, 3, 5, 11, 19, 30]])
CASES = {
    "plain": {"layout": None},
    "levels": {"layout": LEVELS},
    "pages": {"layout": LEVELS, "page_size": 3},
    "window": {"layout": LEVELS, "window": 6, "page_size": 2},
    "sliding": {"layout": SLIDING, "page_size": 2},
    "sink tokens": {"layout": replace(SLIDING, sink_tokens=3), "page_size": 2},
    "window, sink tokens": {"layout": sa.LevelLayout.sliding((6,), (7,), sink_tokens=4)},
    "global window": {"layout": sa.GlobalWindowLayout((4, 2), 5), "page_size": 4},
    "chunks": {"layout": LEVELS, "chunk_size": 9},
    "padding": {"layout": LEVELS, "left_padding": [3, 3]},
    "room": {"layout": SLIDING, "max_length": 40},
    "segments": {"layout": SEGMENTS},
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each call of the C++ code."""
    calls: list[int] = []
    call = native_decode.Step._call
    monkeypatch.setattr(native_decode.Step, "_call", lambda *x, **options: calls.append(1) or call(*x, **options))
    return calls


def tokens(length, kv_heads=(2, 4), dtype=torch.float64):
    rng = torch.Generator().manual_seed(3)
    sizes = ((4, 6), (kv_heads[0], 6), (kv_heads[1], 5))
    return [torch.randn(2, heads, length, dim, generator=rng, dtype=dtype) for heads, dim in sizes]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": sa.LevelLayout((20, 12, 11), (256, 64, 16), value_ranks=(20, 12, 9))},
        {"layout": sa.LevelLayout.sliding((43,), (90,), sink_tokens=4)},
        {"storage": sa.Storage(8, 8, group_size=16, residual=16)},
        {"storage": sa.Storage(4, 4, group_size=32, residual=16)},
    ],
    ids=["levels", "window", "8 bits", "4 bits"],
)
def test_steps_in_16_bits_are_as_exact_as_without_the_code(options, dtype, steps) -> None:
    """Against float64 over the same numbers."""
    rng = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 150, dim, generator=rng).to(dtype) for heads, dim in ((6, 43), (3, 43), (2, 41)))
    fast = sa.LevelCache(**{"layout": None} | options)
    slow, exact = copy.deepcopy(fast), sa.LevelCache(**{"layout": None} | options)
    for cache, kind in ((fast, dtype), (slow, dtype), (exact, torch.float64)):
        cache.append(*(x[:, :, :100].to(kind) for x in (k, v)))
    found, other, right = [], [], []
    for at in range(100, 150):
        new = [x[:, :, at : at + 1] for x in (q, k, v)]
        found.append(fast.attend(*new))
        with no_code():
            other.append(slow.attend(*new))
            right.append(exact.attend(*(x.double() for x in new)))
    assert len(steps) == 50
    found, other, right = (torch.cat(x, dim=2) for x in (found, other, right))
    if "storage" not in options:  # scales are rounded to 16 bits, not to those of float64
        assert relative_error(found, right) <= 1.05 * relative_error(other, right)
    assert_close(found, other)


@pytest.mark.parametrize("kv_heads", [(6, 6), (2, 2), (1, 1), (3, 6)])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("bits", [16, 4])
def test_threads_that_write_and_read(bits, threads, kv_heads, steps) -> None:
    """Each token is written by the thread that reads its head, where that is one, and otherwise before."""
    rng = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(2, heads, 720, dim, generator=rng) for heads, dim in ((6, 19), (kv_heads[0], 19), (kv_heads[1], 8))
    )
    storage = None if bits == 16 else sa.Storage(bits, bits, group_size=64, residual=64)
    fast = sa.LevelCache(sa.LevelLayout((11, 8), (512, 16)) if bits == 16 else None, storage=storage)
    fast.append(k[:, :, :700], v[:, :, :700])
    slow, before = copy.deepcopy(fast), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for at in range(700, 720):
            new = [x[:, :, at : at + 1] for x in (q, k, v)]
            fast.attend(*new)
            fast.undo()  # what was in the slots of the token comes back
            found = fast.attend(*new)
            with no_code():
                assert_close(found, slow.attend(*new))
    finally:
        torch.set_num_threads(before)
    assert len(steps) == 40


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_sums_over_long_contexts(bits) -> None:
    """Weights and values that are alike but for one: each addition is rounded in the same direction."""
    length, dim = 120_001, 8
    q, k = torch.zeros(1, 1, 1, dim), torch.zeros(1, 1, length, dim)
    q[..., 0], k[:, :, -2, 0] = dim**0.5, 0.36
    v = torch.full((1, 1, length, dim), 100.3)
    cache = sa.LevelCache(storage=None if bits == 16 else sa.Storage(bits, bits, 64, 128))
    cache.append(k[:, :, :-1], v[:, :, :-1])
    new = [x[:, :, -1:] for x in (q, k, v)]
    found = cache.attend(*new)
    keys, values = cache.dense_past(*new[1:])
    weights = torch.softmax(q.double() @ keys.double().mT * dim**-0.5, dim=-1)
    assert relative_error(found, weights @ values.double()) < 3e-6


WITHOUT_MEMORY = """
import resource, sys
from pathlib import Path
import torch
import structattn as sa

window = 9_000_000  # whose weights are more than the C library keeps of what was freed
k, v = torch.zeros(2, 1, 1, window + 10, 1)
k[:, :, :, 0] = torch.arange(window + 10.) % 1000
new = [x[:, :, -1:] for x in (k, k, v)]
cache = sa.LevelCache(window=window, max_length=window)
cache.append(k[:, :, :-2], v[:, :, :-2])
with torch.no_grad():
    cache.attend(*(x[:, :, -2:-1] for x in (k, k, v)))  # which the next step goes on from
    page = cache._kept.keys[0].pages[0].buffers[0]
    before = page.clone()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, -1))
    try:
        cache.attend(*new)
    except (MemoryError, RuntimeError):
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        sys.exit(0 if torch.equal(page, before) and cache.length == window + 9 else "the cache has changed")
sys.exit("there was memory")
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of memory")
def test_a_step_without_memory_is_taken_back() -> None:
    """The slot that it would write to holds what it held."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_page_of_more_positions_than_are_added_at_once(heads, steps) -> None:
    """A cache that is one page is read in several pieces: 1,024 to 4,096 positions for 4 queries to one."""
    rng = torch.Generator().manual_seed(9)
    q, k, v = (torch.randn(1, count, 4300, dim, generator=rng) for count, dim in ((heads, 9), (1, 9), (1, 7)))
    fast = sa.LevelCache(max_length=4300)
    fast.append(k[:, :, :4290], v[:, :, :4290])
    slow = copy.deepcopy(fast)
    for at in range(4290, 4300):
        new = [x[:, :, at : at + 1] for x in (q, k, v)]
        with no_code():
            right = slow.attend(*new)
        assert_close(fast.attend(*new), right)
    assert len(steps) == 10


@contextmanager
def no_code():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "is_here", lambda _: False)
        yield


@pytest.mark.quick(kv_heads=[(2, 4)], dtype=[torch.float64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [(2, 4), (1, 1), (4, 2)])
@pytest.mark.parametrize("case", CASES)
def test_steps_among_all_else_that_changes_a_cache(case, kv_heads, dtype, steps) -> None:
    """Tokens, one and several, are added, taken back and cropped; rows are moved, and copies go on, with the
    code and without it.
    """
    q, k, v = tokens(40, kv_heads, dtype)
    rng = random.Random(case)
    fast = sa.LevelCache(**CASES[case])
    slow = copy.deepcopy(fast)
    for cache in (fast, slow):
        cache.attend(*(x[:, :, :4] for x in (q, k, v)))
    for _ in range(160):
        start, kind = fast.length, rng.choice(["token"] * 8 + ["append", "several", "undo", "crop", "rows", "copy"])
        new = [x[:, :, start : start + (4 if kind == "several" else 1)] for x in (q, k, v)]
        if start > 30 or kind == "crop":
            lengths = croppable(fast)
            assert lengths == croppable(slow)
            to = rng.choice([length for length in lengths if length] or [0])
            for cache in (fast, slow):
                cache.crop(to) if to else cache.reset()
        elif kind in ("token", "several"):
            with torch.set_grad_enabled(rng.random() < 0.2):
                found = fast.attend(*new)
                with no_code():
                    assert_close(found, slow.attend(*new))
        elif kind == "append":
            fast.append(*new[1:])
            with no_code():
                slow.append(*new[1:])
        elif kind == "undo":
            try:
                fast.undo()
            except CacheError:
                with pytest.raises(CacheError):
                    slow.undo()
            else:
                slow.undo()
        elif kind == "rows" and case != "padding":
            for cache in (fast, slow):
                cache.reorder(torch.tensor([1, 0]))
            q, k, v = (x.flip(0) for x in (q, k, v))
        elif kind == "copy":
            fast, slow = copy.deepcopy(fast), copy.deepcopy(slow)
        assert (fast.length, fast.nbytes) == (slow.length, slow.nbytes)
    assert len(steps) > 15


@pytest.mark.quick(case=["window", "sliding"])
@pytest.mark.parametrize("case", ["levels", "window", "sliding", "pages"])
def test_an_interrupt_at_every_line(case) -> None:
    q, k, v = tokens(40)
    for start in (8, 11, 12):
        base = sa.LevelCache(**CASES[case])
        base.attend(*(x[:, :, : start - 1] for x in (q, k, v)))
        base.attend(*(x[:, :, start - 1 : start] for x in (q, k, v)))  # from here on steps are known
        new = [x[:, :, start : start + 1] for x in (q, k, v)]
        expected = copy.deepcopy(base).attend(*new)
        lengths, at = croppable(base), 0
        while True:
            at += 1
            with torch.no_grad(), interrupted(at) as seen:
                try:
                    base.attend(*new)
                except KeyboardInterrupt:
                    pass
                else:
                    break
            assert seen[0] == at
            assert base.length == start
            assert croppable(base) == lengths
        assert at > 20
        base.undo()
        with torch.no_grad():
            assert_close(base.attend(*new), expected)


@torch.no_grad()
def test_what_differs_from_the_last_token_is_checked(steps, monkeypatch) -> None:
    q, k, v = tokens(9, dtype=torch.float32)
    cache = sa.LevelCache(LEVELS)
    cache.attend(*(x[:, :, :5] for x in (q, k, v)), scale=0.5)
    one = [x[:, :, 5:6] for x in (q, k, v)]
    cache.attend(*one, scale=0.5)
    checked = []
    check = sa.LevelCache._checked
    monkeypatch.setattr(sa.LevelCache, "_checked", lambda *x: checked.append(1) or check(*x))
    cache.attend(*one, scale=0.5)
    assert (len(steps), len(checked)) == (2, 0)
    q, k, v = one
    with pytest.raises(ShapeError, match="q must be a torch.Tensor"):
        cache.attend(q.tolist(), k, v, scale=0.5)
    with pytest.raises(ShapeError, match="must be like the first ones"):
        cache.attend(q[:1], k[:1], v[:1], scale=0.5)
    with pytest.raises(ShapeError, match="one dtype and device"):
        cache.attend(q, k.double(), v, scale=0.5)
    with pytest.raises(ShapeError, match="head dimensions differ"):
        cache.attend(q[..., :4], k, v, scale=0.5)
    with pytest.raises(ShapeError, match="dense tensor"):
        cache.attend(q, k.to_sparse(), v, scale=0.5)
    with pytest.raises(ConfigError, match="scale must be a finite number"):
        cache.attend(q, k, v, scale=True)
    with pytest.raises(ConfigError, match="unknown backend"):
        cache.attend(q, k, v, scale=0.5, backend="fast")
    with pytest.raises(ConfigError, match="leave layout at None"):
        cache.attend(q, k, v, scale=0.5, layout=LEVELS)
    assert len(checked) == 8
    assert cache.length == 7
    one_scale, other = (copy.deepcopy(cache).attend(q, k, v, scale=scale) for scale in (0.5, 2.0))
    assert not torch.equal(one_scale, other)
    assert_close(cache.attend(q, k, v, scale=2.0), other)


@torch.no_grad()
def test_an_order_of_dimensions(steps) -> None:
    q, k, v = tokens(20)
    orders = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(n)) for n in range(2)])
    for order in (orders[:1], orders):
        of_keys = order.expand(2, -1)
        placed = [x.gather(3, of_keys.repeat_interleave(n, 0)[None, :, None].expand_as(x)) for x, n in ((q, 2), (k, 1))]
        expected, cache = sa.LevelCache(LEVELS), sa.LevelCache(LEVELS)
        for t in range(20):
            own = [x[:, :, t : t + 1] for x in (*placed, v)]
            wanted = expected.attend(*own)
            found = cache.try_step(*(x[:, :, t : t + 1] for x in (q, k, v)), scale=None, order=order)
            assert (found is None) == (t < 2)
            assert_close(cache.attend(*own) if found is None else found, wanted)
    for wrong in (orders[:, :5], orders.T, orders + 1, -orders, orders.expand(4, 2, 6)[:, 0], orders.int()):
        with pytest.raises(RuntimeError):
            cache.try_step(q[:, :, :1], k[:, :, :1], v[:, :, :1], scale=None, order=wrong)
    assert cache.length == 20
