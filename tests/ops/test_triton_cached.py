"""The Triton kernel over a compressed cache against the definition over all keys, and its compilation without
a GPU.

Without a GPU in Triton's interpreter (``tests/conftest.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from structattn.cache import LevelCache, contents
from structattn.layout.levels import LevelLayout
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import FORWARD, relative_error

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language", reason="triton is not installed")

from structattn.ops.triton import cached_attention as triton_cached  # noqa: E402
from structattn.ops.triton.config import INTERPRETED  # noqa: E402
from structattn.ops.triton.plan import Tiles  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
BROKEN = "this Triton's interpreter cannot run a loop"


@triton.jit
def _loop_kernel(out, stop):
    for start in range(0, stop, 16):
        tl.store(out + start + tl.arange(0, 16), 1.0)


def _why_skip() -> str | None:
    """Why no kernel can run here: what is asked of Triton is a loop up to a number known at run time."""
    if DEVICE == "cuda":
        return None if torch.cuda.is_available() else "no GPU, and TRITON_INTERPRET is not 1"
    out = torch.zeros(32)
    try:
        _loop_kernel[(1,)](out, 32)
    except Exception as error:
        return f"{BROKEN}: {error}"
    return None


REASON = _why_skip()
runs = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@dataclass(frozen=True, kw_only=True)
class Cache:
    """What a cache holds after some tokens, built by plain loops; every number that does not belong to it is
    NaN.
    """

    keys: list[Tensor]
    values: list[Tensor]
    starts: Tensor  # (L, B)
    counts: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: LevelLayout
    lengths: tuple[int, ...] = (75, 41)  # tokens so far of each row
    heads: tuple[int, int, int] = (2, 1, 1)  # of queries, keys, values
    queries: int = 1
    value_dim: int = 16
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    has_slopes: bool = False
    rings: tuple[int | None, ...] | None = None  # default: none
    capacities: tuple[int, ...] | None = None  # default: the largest count
    dtype: torch.dtype = torch.float32
    multiples: tuple[int, ...] | None = None
    integers: torch.dtype = torch.int32
    surrounded: bool = False  # by NaN in memory, which must not be read
    mask: tuple[int, int, int, int] | None = None  # its shape, that of (B, H, T, S) or 1
    tiles: Tiles | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), and keys and values of all positions of the longest row."""
        torch.manual_seed(0)
        heads, key_heads, value_heads = self.heads
        rows, length = len(self.lengths), max(*self.lengths, 1)
        value_dim = sum(self.layout.value_ranks or (self.value_dim,))
        shapes = (
            (rows, heads, self.queries, self.layout.head_dim),
            (rows, key_heads, length, self.layout.head_dim),
            (rows, value_heads, length, value_dim),
        )
        q, k, v = (torch.randn(shape).to(self.dtype).to(DEVICE) for shape in shapes)
        return q, k, v

    def shown(self) -> Tensor | None:
        """The mask: its last column is that of the last token in every row."""
        if self.mask is None:
            return None
        generator = torch.Generator().manual_seed(1)
        return (torch.rand(self.mask, generator=generator) > 0.3).to(DEVICE)

    def start(self, level: int, length: int) -> int:
        last = length - 1
        start = 0 if level == 0 else last // self.layout.block_sizes[level] * self.layout.block_sizes[level]
        return start if self.window is None else max(start, last - self.window + 1)

    def cache(self, k: Tensor, v: Tensor) -> Cache:
        layout, levels = self.layout, range(self.layout.num_levels)
        starts = [[self.start(level, length) if length else 0 for length in self.lengths] for level in levels]
        counts = [
            [length - start for start, length in zip(starts[level], self.lengths, strict=True)] for level in levels
        ]
        capacities = self.capacities or tuple(max(*row, 1) for row in counts)
        rings = self.rings or (None,) * layout.num_levels
        value_slices = layout.value_slices or (slice(0, self.value_dim),)
        keys = [self._empty(k.shape[1], part, slots) for part, slots in zip(layout.slices, capacities, strict=True)]
        values = [self._empty(v.shape[1], part, slots) for part, slots in zip(value_slices, capacities, strict=False)]
        for level in levels:
            for row, length in enumerate(self.lengths):
                start = starts[level][row]
                for x in range(start, length):
                    slot = x - start if (ring := rings[level]) is None else x % ring
                    keys[level][row, :, :, slot] = k[row, :, x, layout.slices[level]]
                    if level < len(values):
                        values[level][row, :, :, slot] = v[row, :, x, value_slices[level]]
        numbers = [torch.tensor(x, dtype=self.integers, device=DEVICE) for x in (starts, counts)]
        return Cache(keys=keys, values=values, starts=numbers[0], counts=numbers[1])

    def _empty(self, heads: int, part: slice, slots: int) -> Tensor:
        rows, dim = len(self.lengths), part.stop - part.start
        if not self.surrounded:
            return torch.full((rows, heads, dim, slots), torch.nan, dtype=self.dtype, device=DEVICE)
        memory = torch.full((rows, dim + 3, heads + 1, slots + 48), torch.nan, dtype=self.dtype, device=DEVICE)
        return memory[:, 2 : 2 + dim, 1:, 16 : 16 + slots].transpose(1, 2)

    @property
    def slopes(self) -> Tensor | None:
        """ALiBi slopes, others for each row."""
        count = len(self.lengths) * self.heads[0]
        return torch.linspace(0.01, 0.6, count, device=DEVICE).view(-1, self.heads[0]) if self.has_slopes else None

    def run(self, num_splits: int | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.tensors()
        cache = self.cache(k, v)
        return triton_cached.decode(
            q,
            cache.keys,
            cache.values,
            cache.starts,
            cache.counts,
            self.rings or (None,) * self.layout.num_levels,
            self.layout.score_factors(self.scale),
            softcap=self.softcap,
            mask=self.shown(),
            slopes=self.slopes,
            multiples=self.multiples,
            tiles=self.tiles,
            num_splits=num_splits,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """By the definition, row by row; the first of several tokens may be before the first position of its
        row.
        """
        q, k, v = self.tensors()
        heads = q.shape[1]
        k, v = (x.double().repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        shown = self.shown()
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=DEVICE)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=DEVICE)
        for row, length in enumerate(self.lengths):
            new = min(self.queries, length)
            if new == 0:
                continue
            one, mask = slice(row, row + 1), None
            if shown is not None:
                mask = shown.expand(*q.shape[:3], -1)[one, :, self.queries - new :, -length:]
            out[one, :, self.queries - new :], lse[one, :, self.queries - new :] = reference.attention(
                q[one, :, self.queries - new :].double(),
                k[one, :, :length],
                v[one, :, :length],
                Call(
                    layout=self.layout,
                    window=self.window,
                    terms=ScoreTerms(
                        scale=self.scale,
                        softcap=self.softcap,
                        attn_mask=mask,
                        alibi_slopes=None if (slopes := self.slopes) is None else slopes[row : row + 1],
                    ),
                ),
            )
        return out, lse


def _check(case: Case, num_splits: int | None = None) -> None:
    expected_out, expected_lse = case.expected()
    out, lse = case.run(num_splits)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    assert relative_error(out, expected_out) <= FORWARD[case.dtype]
    assert relative_error(lse.masked_fill(empty, 0.0), expected_lse.masked_fill(empty, 0.0)) <= FORWARD[case.dtype]


ONE = LevelLayout((24,), (256,))
TWO = LevelLayout((16, 8), (256, 32), scaling="mup")
ODD = LevelLayout((1, 5, 8), (252, 36, 12), scaling="paper")
HALVING = LevelLayout((8, 8, 8, 8), (128, 64, 32, 16))
EQUAL = LevelLayout((8, 12, 4, 8), (64, 16, 16, 4), scaling="paper_sum")
WIDE = LevelLayout((16, 20, 12), (256, 64, 16))
VALUES = LevelLayout((16, 20, 8), (240, 60, 20), scaling="paper", value_ranks=(17, 11, 3))

CASES = {
    "one level": Case(layout=ONE),
    "two levels": Case(layout=TWO, heads=(2, 2, 2), lengths=(50, 97, 1)),
    "odd ranks and sizes": Case(layout=ODD, lengths=(95, 37, 36), value_dim=20),
    "halving": Case(layout=HALVING, lengths=(100, 16, 33), multiples=(0, 64, 32, 16), capacities=(112, 64, 32, 16)),
    "levels of one size": Case(layout=EQUAL, lengths=(50, 63, 18)),
    "values": Case(layout=VALUES, lengths=(70, 41, 21)),
    "an empty row": Case(layout=WIDE, lengths=(40, 0, 3)),
    "only empty rows": Case(layout=VALUES, lengths=(0, 0)),
    "first token": Case(layout=WIDE, lengths=(1,), heads=(1, 1, 1), value_dim=1),
    "a number as scale": Case(layout=ODD, scale=0.3),
    "soft cap": Case(layout=VALUES, softcap=0.4, lengths=(70, 41)),
    "ALiBi": Case(layout=WIDE, has_slopes=True, heads=(6, 2, 2), lengths=(70, 41), queries=3, softcap=0.9),
    "ALiBi, window": Case(layout=ODD, has_slopes=True, window=21, rings=(21, 25, 17), capacities=(21, 25, 17)),
    "grouped heads": Case(layout=WIDE, heads=(6, 2, 2)),
    "more heads than rows of a tile": Case(layout=TWO, heads=(20, 1, 1), lengths=(45,)),
    "one key head, several value heads": Case(layout=WIDE, heads=(4, 1, 2)),
    "several key heads, one value head": Case(layout=VALUES, heads=(4, 4, 1)),
    "key and value heads that do not nest": Case(layout=ODD, heads=(6, 2, 3), lengths=(40,)),
    "window": Case(layout=TWO, window=37, rings=(48, 32), capacities=(48, 32), lengths=(100, 41, 20)),
    "window, unaligned rings": Case(
        layout=ODD, window=21, rings=(21, 25, 17), capacities=(21, 25, 17), lengths=(90, 25)
    ),
    "window, rings below their buffers": Case(
        layout=ODD, window=21, rings=(21, 25, 17), capacities=(32, 32, 48), lengths=(90, 25)
    ),
    "window in small rings": Case(layout=WIDE, window=7, rings=(7, 7, 9), capacities=(7, 7, 9), lengths=(61, 3, 0)),
    "window, rings above blocks": Case(
        layout=VALUES, window=30, rings=(40, 33, None), capacities=(40, 33, 32), lengths=(75, 52)
    ),
    "window without rings": Case(layout=WIDE, window=20, lengths=(75, 12)),
    "surrounded by NaN": Case(layout=VALUES, surrounded=True, capacities=(80, 64, 32), integers=torch.int64),
    "surrounded by NaN, odd capacities": Case(layout=ODD, surrounded=True, capacities=(77, 39, 13)),
    "several tokens": Case(layout=WIDE, queries=4, lengths=(77, 52), heads=(2, 1, 1)),
    "several tokens, one level": Case(layout=ONE, queries=4, lengths=(80, 66)),
    "several tokens, values": Case(layout=VALUES, queries=3, lengths=(84, 23), heads=(4, 1, 2)),
    "several tokens after padding": Case(layout=TWO, queries=8, lengths=(74, 3, 0), heads=(4, 2, 2)),
    "a mask of keys, window": Case(layout=WIDE, window=20, lengths=(75, 12), mask=(2, 1, 1, 80)),
    "a mask of pairs and heads": Case(layout=VALUES, lengths=(75, 3, 52), queries=2, mask=(1, 2, 2, 75)),
    "wider tiles": Case(layout=WIDE, queries=2, lengths=(93, 66), tiles=Tiles(own=16, walk=32)),
    "float16": Case(layout=HALVING, dtype=torch.float16, capacities=(80, 64, 32, 16), surrounded=True),
    "float16, odd ranks, window": Case(
        layout=ODD, dtype=torch.float16, window=30, rings=(32, 32, 16), capacities=(32, 32, 16), lengths=(66, 12)
    ),
    "float16, values": Case(layout=VALUES, dtype=torch.float16, heads=(4, 2, 2)),
}

if not INTERPRETED:  # the interpreter computes bfloat16 wrongly
    CASES["bfloat16"] = Case(layout=WIDE, dtype=torch.bfloat16, heads=(8, 2, 2), lengths=(200, 90))
    CASES["bfloat16, values"] = Case(layout=VALUES, dtype=torch.bfloat16, lengths=(255, 40))
    CASES["bfloat16, many heads"] = Case(layout=HALVING, dtype=torch.bfloat16, heads=(64, 1, 1), lengths=(127, 64))

# In `make test-full` alone: others have each of their options, in another combination.
FULL = {
    "several tokens after padding",
    "one key head, several value heads",
    "ALiBi",
    "several key heads, one value head",
    "several tokens, values",
    "two levels",
    "float16, values",
    "values",
    "halving",
    "grouped heads",
    "levels of one size",
    "only empty rows",
    "a number as scale",
    "window, rings below their buffers",
    "surrounded by NaN, odd capacities",
    "several tokens",
    "a mask of keys, window",
    "float16",
}


@runs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in CASES]
)
def test_agrees_with_the_definition(name: str) -> None:
    _check(CASES[name])


@runs
@pytest.mark.parametrize("splits", [1, 3, 9])
@pytest.mark.parametrize("name", ["odd ranks and sizes", "values", "window, unaligned rings", "several tokens"])
@pytest.mark.quick(splits=[3])
def test_any_number_of_splits(name: str, splits: int) -> None:
    _check(CASES[name], splits)


@pytest.mark.full
@runs
def test_every_length() -> None:
    """One row per length: tiles, blocks and splits begin and end everywhere."""
    _check(Case(layout=LevelLayout((4, 3, 2), (60, 20, 5)), lengths=tuple(range(49)), heads=(1, 1, 1), value_dim=3), 2)


@runs
def test_large_scores_do_not_overflow() -> None:
    case = Case(layout=TWO, scale=400.0)
    out, lse = case.run(3)
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())
    _check(case, 3)


def test_slots_are_read_together_only_where_all_of_them_are_there() -> None:
    stores = [torch.empty(1, 1, 8, slots) for slots in (96, 101, 96, 101)]
    capacities = triton_cached._capacities(stores, [None, None, 256, 256])
    assert triton_cached._aligns(stores, capacities) == (16, 1, 16, 1)


def test_the_cache_gives_no_longer_runs_than_the_kernel_takes() -> None:
    assert contents._LONGEST_RUN == triton_cached.MAX_QUERIES


@runs
@pytest.mark.parametrize("count", [9, 16])
def test_more_tokens_than_the_kernel_takes_are_several_runs(count: int) -> None:
    layout = LevelLayout.halving((16, 16), 256)
    q, k, v = (torch.randn(1, 2, 30 + count, 32, device=DEVICE) for _ in range(3))
    found = []
    for backend in ("triton", "reference"):
        cache = LevelCache(layout, max_length=256)
        cache.append(k[:, :, :30], v[:, :, :30])
        found.append(cache.attend(*(x[:, :, 30:] for x in (q, k, v)), backend=backend))
    assert relative_error(*found) <= FORWARD[torch.float32]


def test_says_what_it_lacks() -> None:
    def reason(**options: object) -> str | None:
        defaults = {
            "device": torch.device(DEVICE),
            "dtype": torch.float32,
            "ranks": (16, 8),
            "value_ranks": (24,),
            "num_queries": 1,
            "capacity": 1024,
        }
        return triton_cached.why_not(**(defaults | options))  # type: ignore[arg-type]

    assert "CUDA" in str(reason(device=torch.device("meta")))
    if REASON is not None:
        return
    assert reason() is None
    assert "float64" in str(reason(dtype=torch.float64))
    assert "at once, not 9" in str(reason(num_queries=9))
    assert "512 and 24" in str(reason(ranks=(256, 256)))
    assert "24 and 300" in str(reason(value_ranks=(300,)))
    assert "16 levels" in str(reason(ranks=(1,) * 17))
    assert "lengths below" in str(reason(capacity=2**30))


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from structattn.ops.triton import cached_attention as host
from structattn.ops.triton.cached_decode import cached_kernel as kernel

def shared(ranks, value_ranks, name, itemsize, rows, ring, softcap, masked, has_slopes=False, bits=16, paged=False):
    tiles = host.tiles_for(ranks, value_ranks, itemsize, rows, masked)
    levels, parts, x, strides = len(ranks), len(value_ranks), "*" + name, ("i32",) * 3
    of_codes = (x,) * 4 if bits == 16 else ("*u8", "*fp16", "*fp16", "*i64" if paged else "*u8")
    constants = {
        "RANKS": ranks, "VALUE_RANKS": value_ranks, "SCALES": (1 / 3,) * levels, "FACTORS": (0.5,) * levels,
        "ALIGNS": (16,) * levels, "MULTIPLES": (16,) * levels, "RINGS": (ring,) * levels,
        "VALUE_ALIGNS": (16,) * parts, "VALUE_RINGS": (ring,) * parts, "VALUE_OF": tuple(range(parts)),
        "CODES": tuple((bits, (rank * 8 * bits, rank), ring, paged) for rank in ranks),
        "VALUE_CODES": tuple((bits, (rank * 8 * bits, 64), ring, paged) for rank in value_ranks),
        "GROUP": 0 if bits == 16 else 64, "RUN": host.run_of(tiles, 64),
        "OWN": tiles.own, "WALK": tiles.walk, "SOFTCAP": softcap,
    }
    constants |= ({} if masked else {"mask": None}) | ({} if has_slopes else {"slopes": None})
    types = {
        "q": x, "keys": (x,) * levels, "values": (x,) * parts, "key_codes": (of_codes,) * levels,
        "value_codes": (of_codes,) * parts, "starts": "*i32", "counts": "*i64", "blocks": "*i32", "edges": "*i32",
        "slopes": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "mask": "*u8",
        "key_strides": (strides,) * levels, "value_strides": (strides,) * parts,
    }
    for side, count in (("key", levels), ("value", parts)):
        types |= {side + "_slots": ("i32",) * count, side + "_rings": ("i32",) * count}
    types |= {"capacities": ("i32",) * levels, "value_capacities": ("i32",) * parts}
    signature, attributes = {}, {}
    def aligned(kind, path):
        if isinstance(kind, tuple):
            for n, part in enumerate(kind):
                aligned(part, (*path, n))
        else:
            attributes[path] = [["tt.divisibility", 16]]
    for n, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in types or name.startswith("q_"):
            aligned(signature[name], (n,))
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]  # copies of 16 bytes (cg) ahead of their use, and none narrower (ca)
    narrow = "cp.async.ca.shared.global" in ptx
    assert "cp.async.cg.shared.global" in ptx and (itemsize == 4 or bits < 16 or not narrow)
    return compiled.metadata.shared

print(max(
    shared((8,) * 8, (64,), "bf16", 2, 1, False, 0.0, False, True),
    shared((64, 32, 32), (64, 32, 32), "fp16", 2, 32, True, 50.0, True),
    shared((1, 5, 122), (128,), "fp32", 4, 1, False, 0.0, False),
    shared((64,), (64,), "bf16", 2, 4, False, 0.0, False, bits=4),
    shared((64, 32, 32), (64, 32, 32), "fp16", 2, 1, True, 50.0, True, bits=8, paged=True),
))
"""


@pytest.mark.full
def test_compiles_for_a_gpu_within_the_shared_memory_of_small_ones() -> None:
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton carries no ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= 99 * 1024
