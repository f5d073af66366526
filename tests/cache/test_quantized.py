"""Caches that store far tokens in 8 and 4 bits: attention over the numbers that are read, in any order of
calls, with and without the C++ code.
"""

import copy
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
import torch
from quantized_numbers import attention
from torch import Tensor

import structattn as sa
from structattn.cache import native_decode
from structattn.cache.storage import GroupStore, quantize
from structattn.cache.storage.quantize import GroupFormat, packed, quantized, unpacked
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.ops.native import compiler
from structattn.testing.tolerances import assert_close

# In 16 bits the C++ step rounds once at the end, and the others each number that is read.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
QUICK = {0, 1, 2, 5, 6, 7, 8, 9, 10}  # programs of few tokens
SEEDS = [pytest.param(seed, marks=[] if seed in QUICK else pytest.mark.full) for seed in range(300)]


class Program:
    """A random cache, its tokens, and what each query should get."""

    def __init__(self, seed: int, dtype: torch.dtype | None = None) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        size = draw.choice([2, 4, 8])
        self.layout = layout = self._layout(size)
        levels, values = (layout.num_levels, len(layout.value_ranks or (0,))) if layout else (1, 1)
        bits = [
            draw.choice([4, 8, 16]) if draw.random() < 0.6 else tuple(draw.choice([4, 8, 16]) for _ in range(count))
            for count in (levels, values)
        ]
        self.storage = sa.Storage(*bits, size, draw.choice([0, 1, 3, 8, 11]))
        batch, groups = draw.choice([1, 2]), draw.choice([1, 2])
        heads, length, dtype = (
            groups * draw.choice([1, 2]),
            draw.randint(6, 90),
            draw.choice([torch.float64, torch.float32] if dtype is None else [dtype]),
        )
        dim, value_dim = (layout.head_dim, sum(layout.value_ranks or (9,))) if layout else (5, 3)
        self.q = torch.randn(batch, heads, length, dim, dtype=dtype)
        size = 1.0 if dtype.itemsize > 2 else 0.3  # scores as large as those of models: they are rounded too
        self.q *= size
        self.k = torch.randn(batch, groups, length, dim, dtype=dtype) * 3 + 5
        self.v = torch.randn(batch, groups, length, value_dim, dtype=dtype)
        self.padding = [draw.randint(0, 5) for _ in range(batch)] if draw.random() < 0.35 else [0] * batch
        self.window = draw.choice([None, None, None, 30])
        self.terms: dict = {}
        if draw.random() < 0.3:
            self.terms["softcap"] = 0.8
        if draw.random() < 0.3:
            self.terms["alibi_slopes"] = torch.rand(batch, heads, dtype=dtype)
        if draw.random() < 0.3:
            self.terms["sinks"] = torch.randn(heads, dtype=dtype)
        shape = draw.choice([1, batch]), draw.choice([1, heads]), length, length
        self.mask = torch.rand(shape) < 0.8 if draw.random() < 0.3 else None
        self.tolerance = TOLERANCES[dtype]
        self.expected = torch.stack([torch.stack(self._row(row), 1) for row in range(batch)])

    def _layout(self, size: int) -> sa.LevelLayout | None:
        draw, count = self.draw, self.draw.randint(1, 3)
        ranks = [draw.randint(1, 5) for _ in range(count)]
        value_ranks = [draw.randint(1, 5) for _ in range(count)] if draw.random() < 0.5 else None
        scaling, sinks = draw.choice(["variance", "mup", "paper"]), draw.choice([0, 0, 2, 5, 9])
        kind = draw.choice(["plain", "blocks", "windows", "windows"])
        if kind == "plain":
            return None
        if kind == "blocks":
            sizes = [size * draw.choice([1, 2, 4])]
            for _ in range(count - 1):
                sizes.insert(0, sizes[0] * draw.choice([1, 2, 3]))
            return sa.LevelLayout(ranks, sizes, scaling, value_ranks, sink_tokens=sinks)
        windows: list[int | None] = sorted((draw.randint(1, 60) for _ in range(count)), reverse=True)
        if draw.random() < 0.4:
            windows[0] = None
        return sa.LevelLayout.sliding(ranks, windows, scaling, value_ranks, sink_tokens=sinks)

    def _row(self, row: int) -> list[Tensor]:
        pad = self.padding[row]
        found = [self.q.new_zeros((self.q.shape[1], self.v.shape[3]))] * pad
        for at in range(pad, self.q.shape[2]):
            tokens, terms = slice(pad, at + 1), dict(self.terms)
            if "alibi_slopes" in terms:
                terms["alibi_slopes"] = terms["alibi_slopes"][row : row + 1]
            if self.mask is not None:
                terms["attn_mask"] = self.mask[min(row, self.mask.shape[0] - 1)][None, :, at : at + 1, tokens]
            q = self.q[row : row + 1, :, at : at + 1]
            k, v = (x[row : row + 1, :, tokens] for x in (self.k, self.v))
            out = attention(q, k, v, self.layout, self.window, self.storage, at - pad, **terms)
            found.append(out[0, :, 0])
        return found

    def new_cache(self) -> sa.LevelCache:
        return sa.LevelCache(
            self.layout,
            window=self.window,
            left_padding=self.padding if any(self.padding) else None,
            page_size=self.draw.choice([3, 8, 1024]),
            max_length=self.draw.choice([None, self.q.shape[2]]),
            storage=self.storage,
        )

    def attend(self, cache: sa.LevelCache, first: int, count: int, backend: Literal["auto", "triton"] = "auto") -> None:
        """Gives the cache tokens, and compares what it returns."""
        end = first + count
        mask = None if self.mask is None else self.mask[:, :, first:end, :end]
        tokens = [x[:, :, first:end] for x in (self.q, self.k, self.v)]
        with torch.no_grad():
            out = cache.attend(*tokens, attn_mask=mask, backend=backend, **self.terms)
        for row, pad in enumerate(self.padding):
            low = max(first, pad)
            expected = self.expected[row, :, low:end]
            tolerance = {"rtol": self.tolerance, "atol": self.tolerance}
            torch.testing.assert_close(out[row, :, low - first :].to(expected.dtype), expected, **tolerance)


def run(seed: int, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Tokens in any order of calls, taken back, cropped, copied, saved, and forgotten."""
    program = Program(seed, dtype)
    draw, cache, done, length = program.draw, program.new_cache(), 0, program.q.shape[2]
    while done < length:
        count = min(draw.choice([1, 1, 1, 2, 3, 5, 17, 40]), length - done)
        program.attend(cache, done, count)
        done += count
        match draw.choice(["undo", "crop", "crop", "copy", "pickle", "save", "append", "reset", *["go on"] * 8]):
            case "undo":
                cache.undo()
                done -= count
            case "crop":
                shorter = draw.randint(max(0, done - 12), done)
                try:
                    cache.crop(shorter)
                    done = shorter
                except CacheError:
                    pass
            case "copy":
                cache = copy.deepcopy(cache)
            case "pickle":
                cache = pickle.loads(pickle.dumps(cache))
            case "save":
                if done > max(program.padding):
                    cache.save(folder / "cache")
                    cache = sa.LevelCache.load(folder / "cache")
            case "append":
                count = min(draw.choice([1, 5, 20]), length - done)
                cache.append(*(x[:, :, done : done + count] for x in (program.k, program.v)))
                done += count
            case "reset":
                if draw.random() < 0.4:
                    cache.reset()
                    done = 0


@pytest.mark.parametrize("seed", SEEDS)
def test_any_calls_give_attention_over_the_numbers_that_are_read(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_with_the_cpp_code(seed: int, tmp_path: Path, built) -> None:
    run(seed, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_in_16_bits(seed: int, dtype: torch.dtype, tmp_path: Path, built) -> None:
    run(seed, tmp_path, dtype)


@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (4, 8), (8, 4)])
@pytest.mark.parametrize("size", [4, 8, 16, 24, 32, 48, 64, 96])
def test_groups_of_all_sizes_in_the_cpp_code(size: int, bits: tuple[int, int], built) -> None:
    """Whole vectors of codes, half ones and several, for as many queries as are computed together."""
    storage, length, groups = sa.Storage(*bits, size, 5), 3 * size + 12, 2
    torch.manual_seed(size)
    for per_head, dim, value_dim in ((1, 64, 64), (2, 24, 40), (3, 64, 64), (4, 16, 7), (5, 30, 33), (7, 5, 16)):
        q = torch.randn(1, groups * per_head, 2, dim)
        k, v = torch.randn(1, groups, length, dim) * 3 + 5, torch.randn(1, groups, length, value_dim) + 10
        cache = sa.LevelCache(storage=storage)
        cache.append(k[:, :, :-2], v[:, :, :-2])
        for n in range(2):  # the second step finds what the first one prepared
            at = length - 2 + n
            with torch.no_grad():
                out = cache.attend(q[:, :, n : n + 1], k[:, :, at : at + 1], v[:, :, at : at + 1])
            seen = q[:, :, n : n + 1], k[:, :, : at + 1], v[:, :, : at + 1]
            torch.testing.assert_close(out, attention(*seen, None, None, storage, at), rtol=2e-5, atol=2e-5)


def test_a_step_reads_codes_in_the_cpp_code(built, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    attend, again = native_decode.Step.attend, native_decode.Step.try_attend

    def counted(self, *arguments):
        calls.append(1)
        return attend(self, *arguments)

    def counted_again(self, *arguments):
        out = again(self, *arguments)
        calls.extend([1] * (out is not None))
        return out

    monkeypatch.setattr(native_decode.Step, "attend", counted)
    monkeypatch.setattr(native_decode.Step, "try_attend", counted_again)
    cache = sa.LevelCache(sa.LevelLayout.sliding((8,), (None,), sink_tokens=2), storage=sa.Storage(4, 8, 8, 8))
    q, k, v = (torch.randn(1, 2, 60, 8) for _ in range(3))
    with torch.no_grad():
        cache.attend(q[:, :, :30], k[:, :, :30], v[:, :, :30])
        for at in range(30, 60):
            cache.attend(*(x[:, :, at : at + 1] for x in (q, k, v)))
    assert len(calls) == 30


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1e-4, 1.0, 100.0])
def test_a_number_is_read_within_half_a_step(bits: int, dtype: torch.dtype, size: float) -> None:
    torch.manual_seed(0)
    x = (size * torch.randn(50, 3, 8) + 5 * torch.randn(50, 3, 1)).to(dtype)
    for axis in (-1, -2):
        codes, scale, zero = quantized(x, bits, axis)
        wide = torch.promote_types(dtype, torch.float32)
        error = (zero.to(wide) + scale.to(wide) * codes.to(wide) - x.to(wide)).abs()
        assert bool((error <= 0.51 * scale.to(wide)).all())  # and the rounding of float32
        assert torch.equal(unpacked(packed(codes, bits), bits), codes)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("low", [-65504.0, -3.0, 60000.0])
@pytest.mark.parametrize("native", [True, False])
def test_the_largest_number_of_float16_stays_finite(
    bits: int, low: float, native: bool, built, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "is_here", lambda x: native)
    torch.manual_seed(0)
    x = torch.linspace(low, 65504.0, 16 * 10, dtype=torch.float64)[torch.randperm(160)].reshape(1, 1, 16, 10).half()
    x[:, :, 3], x[:, :, :, 4] = 65504.0, 65504.0
    for per_token in (False, True):
        read = x.clone()
        of_dim = GroupFormat(dim=10, bits=bits, group_size=16, per_token=per_token)
        _, scale, _ = of_dim.from_tokens(read, [0], sinks=0)
        step = scale[0, 0, 0, 0, :, None] if per_token else scale[0, 0, 0, :, 0]
        rounding = x[0, 0].double().abs() * 2.0**-11  # a number that is read has 16 bits
        assert bool(((read - x)[0, 0].double().abs() <= 0.51 * step.double() + rounding).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size", "dim"), [(64, 64), (16, 24), (6, 19), (8, 8)])
def test_the_cpp_code_gives_the_same_codes(
    size: int, dim: int, bits: int, dtype: torch.dtype, built, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, 4 * size, 2 * dim) * torch.randn(2 * dim).exp() + 3 * torch.randn(2 * dim)
    x[1, 2, size // 2, dim + 3] = 1e5  # more than a zero of 16 bits can hold
    x[1, 2, size // 2 + 1, dim + 3] = -6e4
    x[0, 0, 2 * size :] = 0.5
    starts = [size, 2 * size, 3 * size, 4 * size]
    for per_token in (False, True):
        of_dim = GroupFormat(dim=dim, bits=bits, group_size=size, per_token=per_token)
        results = []
        for is_here in (True, False):
            monkeypatch.setattr(quantize, "is_here", lambda x, is_here=is_here: is_here)
            read = x.to(dtype, copy=True)
            stored = of_dim.from_tokens(read[..., dim:], starts, sinks=size + 3)
            assert torch.equal(read[..., :dim], x[..., :dim].to(dtype))
            assert torch.equal(read[:, :, :3, dim:], x[:, :, :3, dim:].to(dtype))
            results.append((*stored, read))
            assert [tuple(x.shape[3:]) for x in stored] == [shape for shape, _ in of_dim.tensors(dtype)]
        for ours, expected in zip(*results, strict=True):
            assert torch.equal(ours, expected)
        hidden = of_dim.from_tokens(x.to(dtype, copy=True)[..., dim:], starts, sinks=9 * size)
        assert bool((hidden[0] == hidden[0][0, 0, 0, 0, 0]).all())  # of nothing but sink tokens


@pytest.mark.parametrize("longest", [None, 10])
def test_groups_that_come_together_are_one_page(longest: int | None) -> None:
    """A step takes time for each page."""
    of_dim = GroupFormat(dim=8, bits=4, group_size=16, per_token=False)
    store = GroupStore(of_dim, ring=None, longest=longest, page_size=4)
    like = torch.zeros(2, 3, 1)
    for slots, sizes in ((0, []), (5, [8]), (7, [8]), (9, [8, 4]), (9, [8, 4])):
        store.grow(slots, 2, like)
        if longest is not None:
            sizes = [min(size, longest - 8 * number) for number, size in enumerate(sizes)]
        assert [page[0].shape[2] for page in store.pages] == sizes
        assert store.nbytes == store.nbytes_of(slots, (2, 3), like.dtype)


def test_groups_take_no_page_beyond_what_is_expected() -> None:
    of_dim = GroupFormat(dim=8, bits=4, group_size=16, per_token=False)
    store = GroupStore(of_dim, ring=None, longest=None, page_size=4, reserve=6)
    like = torch.zeros(2, 3, 1)
    for slots, sizes in ((3, [4]), (5, [4, 2]), (6, [4, 2]), (7, [4, 2, 2]), (9, [4, 2, 2, 4])):
        store.grow(slots, 2, like)
        assert [page[0].shape[2] for page in store.pages] == sizes
        assert store.nbytes == store.nbytes_of(slots, (2, 3), like.dtype)


def test_bytes_are_those_of_the_formula() -> None:
    """Codes and scales of what has left the residual, and exact tokens."""
    storage, length, dim = sa.Storage(8, 4, 64, 128), 1024, 64
    cache = sa.LevelCache(None, storage=storage, page_size=64)
    cache.append(torch.randn(1, 2, length, dim), torch.randn(1, 2, length, dim))
    groups = storage.first_exact(length - 1) // 64
    assert groups == (length - 128) // 64
    exact = storage.exact_slots * dim * 4
    assert cache.key_nbytes == 2 * (exact + groups * (64 * dim + 2 * 2 * dim))
    assert cache.value_nbytes == 2 * (exact + groups * (64 * dim // 2 + 2 * 2 * 64))
    short = [sa.LevelCache(None, storage=storage, max_length=256, page_size=size) for size in (256, 1024)]
    for one in short:  # no page is longer than all tokens
        one.append(*torch.randn(2, 1, 2, 256, dim))
    assert short[0].nbytes == short[1].nbytes


def test_a_rejected_token_leaves_no_trace() -> None:
    """Of speculative decoding: codes are the same bits as if it had not been there."""
    q, k, v = (torch.randn(1, 2, 80, 8) for _ in range(3))
    storage = sa.Storage(4, 8, 8, 16)
    caches = [sa.LevelCache(None, storage=storage) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            cache.attend(q[:, :, :50], k[:, :, :50], v[:, :, :50])
        wrong = [torch.randn(1, 2, 8, 8) for _ in range(3)]
        caches[1].attend(*wrong)
        caches[1].crop(50)
        for cache in caches:
            cache.attend(q[:, :, 50:], k[:, :, 50:], v[:, :, 50:])
    (_, one), (_, other) = (cache.state() for cache in caches)
    assert all(torch.equal(one[name][:, :, :7], other[name][:, :, :7]) for name in one if name.startswith("group"))


@pytest.mark.quick(layout=[None])
@pytest.mark.parametrize("layout", [None, sa.LevelLayout.sliding((3, 2), (None, 30), sink_tokens=3)], ids=str)
@torch.no_grad()
def test_heads_in_bits_of_their_own(layout, tmp_path: Path, built) -> None:
    torch.manual_seed(0)
    bits = [sa.Storage((4, 8) if layout else 4, 8, 4, 6), None, sa.Storage(8, 4, 2, 0), sa.Storage(8, 4, 2, 0)]
    q, k, v = (torch.randn(2, heads, 71, 5, dtype=torch.float64) for heads in (8, 4, 4))
    expected = []
    for at in range(71):
        of_heads = []
        for head, storage in enumerate(bits):
            x, y = k[:, head : head + 1, : at + 1], v[:, head : head + 1, : at + 1]
            query = q[:, 2 * head : 2 * head + 2, at : at + 1]
            of_heads.append(attention(query, x, y, layout, None, storage, at))
        expected.append(torch.cat(of_heads, 1))
    cache = sa.LevelCache(layout, storage=bits)
    found = [cache.attend(*(x[:, :, a:b] for x in (q, k, v))) for a, b in ((0, 33), (33, 40), (40, 41))]
    cache.save(tmp_path / "cache")
    cache = sa.LevelCache.load(tmp_path / "cache")
    assert cache.storage == tuple(bits)
    found += [cache.attend(*(x[:, :, at : at + 1] for x in (q, k, v))) for at in range(41, 71)]
    assert_close(torch.cat(found, 2), torch.cat(expected, 2))
    alone = [sa.LevelCache(layout, storage=storage) for storage in bits]
    for head, one in enumerate(alone):
        one.append(k[:, head : head + 1], v[:, head : head + 1])
    assert cache.nbytes == sum(one.nbytes for one in alone)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key_bits must be 16, 8 or 4, or a tuple of them .*, got 5"):
        sa.Storage(5)
    with pytest.raises(ConfigError, match="group_size must be even"):
        sa.Storage(group_size=7)
    with pytest.raises(ConfigError, match=r"key_bits needs one entry per level: expected 2, got 3"):
        sa.LevelCache(sa.LevelLayout((4, 4), (64, 8)), storage=sa.Storage((4, 8, 16)))
    with pytest.raises(ConfigError, match="segments end anywhere"):
        sa.LevelCache(sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 9))), storage=sa.Storage())
    with pytest.raises(ConfigError, match="storage must be a Storage"):
        sa.LevelCache(storage=4)  # type: ignore[arg-type]
    heads = sa.HeadLayouts([None] * 3)
    for storage, message in (
        ([], "storage needs an entry for each key head, got none"),
        ([None, 4], "the storage of key head 1 must be a Storage or None"),
        ([None, sa.Storage()], "there is a storage for each of 2 key heads, and the layer has 3: give one for each"),
        ([None, sa.Storage((4, 8)), None], "key_bits needs one entry per level: expected 1, got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            sa.LevelCache(heads, storage=storage)
    cache = sa.LevelCache(storage=[None, sa.Storage()])
    with pytest.raises(ConfigError, match="a storage for each of 2 key heads, and the layer has 3"):
        cache.append(*torch.randn(2, 1, 3, 9, 8))
    with pytest.raises(ShapeError, match="keys and values need 2 heads, .* got 2 and 1"):
        cache.append(torch.randn(1, 2, 9, 8), torch.randn(1, 1, 9, 8))
    layer = sa.Attention(16, 2, scoring=sa.scoring.BTT())
    with pytest.raises(ConfigError, match="stores them as they are"):
        sa.LevelCache(storage=[None, None], latent=layer.latent)
    x = torch.randn(1, 1, 9, 8)
    cache = sa.LevelCache(sa.LevelLayout((4, 4), (1200, 600)), storage=sa.Storage(group_size=64))
    with pytest.raises(ConfigError, match="group_size must divide the blocks of each level: expected a divisor of 600"):
        cache.append(x, x)
    layout = sa.LevelLayout((5, 3), (192, 24))  # whose chunks begin within groups of a level with shorter blocks
    cache = sa.LevelCache(layout, chunk_size=36, storage=sa.Storage((16, 8), 16, 8, 0))
    with pytest.raises(ConfigError, match="expected a divisor of 36, the chunk_size, got 8"):
        cache.append(x, x)
    cache = sa.LevelCache(storage=sa.Storage())
    with pytest.raises(ConfigError, match="gives no gradients"):
        cache.attend(x.requires_grad_(), x, x)
    cache = sa.LevelCache(storage=sa.Storage(group_size=2, residual=0))
    cache.append(x.detach(), x.detach())
    cache.save(tmp_path / "cache")
    (plain, tensors) = cache.state()
    for name in [name for name in tensors if name.startswith("group")]:
        with pytest.raises(CheckpointError):
            sa.LevelCache.from_state(plain, {**tensors, name: tensors[name][:, :, :1]}, None, None)
    with pytest.raises(CheckpointError, match="must end from"):
        sa.LevelCache.from_state({**plain, "quantized": [([2], [0]), ([8], [0])]}, tensors, None, None)


@pytest.mark.parametrize("padding", [None, [0, 21]])
@pytest.mark.parametrize("layout", [None, sa.LevelLayout((12,), (8,), "paper")])
@pytest.mark.parametrize("value_heads", [2, 1])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_prompt_in_several_pieces_reads_what_single_tokens_read(
    is_compiled, value_heads, layout, padding, monkeypatch: pytest.MonkeyPatch, built
) -> None:
    """All queries in one call of the C++ code; without it many at once over what all of them read as codes,
    and few over the rest.
    """
    monkeypatch.setattr("structattn.cache.over_quantized._PROMPT_QUERIES", 24)
    if not is_compiled:
        monkeypatch.setattr("structattn.cache.over_quantized.library.is_here", lambda _: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 120, 12, dtype=torch.float64) for heads in (4, 2, value_heads))
    options = {"storage": sa.Storage(4, 8, group_size=8, residual=10), "left_padding": padding}
    whole, single = sa.LevelCache(layout, **options), sa.LevelCache(layout, **options)
    found = torch.cat([whole.attend(*(x[:, :, part] for x in (q, k, v))) for part in (slice(100), slice(100, 120))], 2)
    right = torch.cat([single.attend(*(x[:, :, n : n + 1] for x in (q, k, v))) for n in range(120)], dim=2)
    assert_close(found[:, :, 21:], right[:, :, 21:])
    assert whole.state()[1].keys() == single.state()[1].keys()


@pytest.mark.parametrize(
    ("layout", "value_dim"),
    [
        (None, 136),
        (sa.LevelLayout((24,), (512,)), 24),
        (sa.LevelLayout.sliding((48, 16), (None, 300), value_ranks=(8, 32), sink_tokens=3), 40),
        (sa.LevelLayout.halving((16, 8), context_length=1024), 16),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_groups_of_whole_vectors(layout, value_dim: int, size: int, heads: int, dtype: torch.dtype, built) -> None:
    """Codes that a processor multiplies as integers, where it can."""
    torch.manual_seed(0)
    dim, length = sum(layout.ranks) if layout else 64, 500
    q, k, v = (torch.randn(1, n, length, d).to(dtype) for n, d in ((2 * heads, dim), (2, dim), (2, value_dim)))
    k = k * torch.randn(dim).exp().to(dtype) + 3  # channels of other sizes, as real keys have
    for bits in ((4, 8), (8, 4)):
        storage = sa.Storage(*bits, size, 20)
        cache = sa.LevelCache(layout, storage=storage)
        cache.append(k[:, :, :-2], v[:, :, :-2])
        for at in (length - 2, length - 1):
            step = slice(at, at + 1)
            found = cache.attend(q[:, :, step], k[:, :, step], v[:, :, step])
            wide = (x.float()[:, :, : at + 1] for x in (k, v))  # codes are read as float32
            expected = attention(q.float()[:, :, step], *wide, layout, None, storage, at)
            assert_close(found, expected.to(dtype))


@pytest.mark.parametrize("size", [64, 24, 96])  # by integers, by numbers, and of 4 bits a part by words
@pytest.mark.parametrize("bits", [4, 8])
@torch.no_grad()
def test_the_mean_of_many_values_is_exact(bits: int, size: int, built) -> None:
    """Weights that are nearly equal: what is left of values of both signs is a hundredth of them."""
    torch.manual_seed(0)
    length = 5000
    q, k, v = (torch.randn(1, heads, length, 32) for heads in (2, 1, 1))
    cache = sa.LevelCache(None, storage=sa.Storage(bits, bits, size, 30))
    cache.append(k[:, :, :-1], v[:, :, :-1])
    found = cache.attend(*(x[:, :, -1:] for x in (0.1 * q, k, v)))
    keys, values = cache.dense_past(k[:, :, -1:], v[:, :, -1:])
    wide = (x.double() for x in (0.1 * q[:, :, -1:], keys, values))
    expected = sa.structured_attention(*wide, backend="reference")
    assert float((found - expected).norm() / expected.norm()) < 5e-6


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("outlier", [30, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_key_with_a_very_large_number_spoils_no_other(bits, heads, outlier, dtype, built) -> None:
    """One that queries do not look at, among the first group of 64, and many others."""
    torch.manual_seed(0)
    length = 300
    q, k, v = (torch.randn(1, n, length, 64) for n in (heads, 1, 1))
    q[..., 0] = -q[..., 0].abs() - 1
    k[:, :, 5, 0] = outlier
    q, k, v = (x.to(dtype) for x in (q, k, v))
    cache = sa.LevelCache(storage=sa.Storage(bits, 16, 64, 16))
    cache.append(k[:, :, :-1], v[:, :, :-1])
    new = [x[:, :, -1:] for x in (q, k, v)]
    found = cache.attend(*new).double()
    keys, values = cache.dense_past(*new[1:])
    expected = sa.structured_attention(*(x.double() for x in (new[0], keys, values)), backend="reference")
    assert float((found - expected).norm() / expected.norm()) < (3e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 264), (264, 64), (256, 512)])
@torch.no_grad()
def test_more_dimensions_than_whole_numbers_take(bits, dim, value_dim, built) -> None:
    """Keys or values of more than 256 dimensions, beside others of fewer."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 200, d) for n, d in ((4, dim), (1, dim), (1, value_dim)))
    storage = sa.Storage(bits, bits, 64, 16)
    cache = sa.LevelCache(storage=storage)
    cache.append(k[:, :, :-1], v[:, :, :-1])
    found = cache.attend(*(x[:, :, -1:] for x in (q, k, v)))
    assert_close(found, attention(q[:, :, -1:], k, v, None, None, storage, 199))


@pytest.mark.full
@pytest.mark.usefixtures("built")  # where there is a compiler
@pytest.mark.parametrize("instructions", compiler.instructions_here()[1:])
def test_codes_with_instructions_of_other_processors(instructions: str, tmp_path: Path) -> None:
    """The tests above again, with the libraries that are not the first choice here."""
    chosen = "test_groups_of_whole or test_the_mean_of or spoils_no_other or whole_numbers_take"
    command = [sys.executable, "-m", "pytest", "-q", "-k", chosen, f"--basetemp={tmp_path / 'tests'}", __file__]
    # Else it would be a worker of this test run to the fixture `built`, which compiles elsewhere for those.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**inherited, "STRUCTATTN_TEST_CPU": instructions}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
    assert list((tmp_path / "tests" / "native").glob(f"native_{instructions}_*.so"))


def test_more_codes_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("structattn.cache.storage.page.free_memory", lambda: 2**28)
    cache, x = sa.LevelCache(storage=sa.Storage(8, 8, 64, 64), page_size=2**23), torch.randn(1, 1, 200, 64)
    with pytest.raises(CacheError, match="would take 570,425,344 bytes .* and this machine has 268,435,456 left"):
        cache.append(x, x)
    assert cache.length == 0


@torch.no_grad()
def test_queries_of_any_size(built) -> None:
    """Numbers that have no common unit as integers: none at all, very small ones, and such as are none."""
    torch.manual_seed(0)
    k, v = torch.randn(1, 1, 200, 16), torch.randn(1, 1, 200, 16)
    storage = sa.Storage(4, 4, 64, 10)
    for size in (0.0, 1e-36, 1e3, torch.inf, torch.nan):
        q = torch.randn(1, 1, 1, 16) * torch.cat([torch.full((8,), size), torch.full((8,), 1e-38)])
        cache = sa.LevelCache(None, storage=storage)
        cache.append(k[:, :, :-1], v[:, :, :-1])
        found = cache.attend(q, k[:, :, -1:], v[:, :, -1:])
        expected = attention(q, k, v, None, None, storage, 199)
        assert bool(found.isfinite().all()) == (size <= 1e3)
        if size <= 1e3:
            assert_close(found, expected)


@torch.no_grad()
def test_another_default_device_changes_nothing(built) -> None:
    """Prompts and steps: what the C++ code is given beside the tokens is on the CPU."""
    q, k, v = (torch.randn(1, 2, 400, 8) for _ in range(3))
    found = []
    for device in ("cpu", "meta"):
        cache = sa.LevelCache(storage=sa.Storage(4, 4, group_size=64, residual=8))
        with torch.device(device):
            prompt = cache.attend(*(x[:, :, :399] for x in (q, k, v)))
            found.append((prompt, cache.attend(*(x[:, :, 399:] for x in (q, k, v)))))
    for cpu, meta in zip(*found, strict=True):
        assert torch.equal(cpu, meta)
