"""Benchmark "decode": one step of attention with a key/value cache, ``LevelCache`` against a plain cache.

A step appends one token to a cache of S - 1 and attends to all S. S is the context length of the layouts, so
that after it every block of every level is full: nothing that a level drops is left to drop, which is the
worst case for a ``LevelCache``. What the step appended is forgotten again before the next one, which is not
timed; ``DecodeWork.check`` compares the second step as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import LAYOUTS, layout_of, row_reference
from benchmarks.registry import Case, Check, Group, benchmark
from structattn import HeadLayouts, LevelCache, LevelLayout, Storage, structured_attention
from structattn.layout.heads import groups_of

BASELINE = "plain cache"
CAT = "plain cache, torch.cat"
OURS = "plain cache, structured_attention"
PLAIN_LEVEL = "LevelCache, full attention"  # how much of a difference is how numbers are kept, and not the levels
GROWING = "mlr 8x8, growing"
# All tokens, of which those further back than the last 128 are in 8 or 4 bits; and few tokens, all of them.
STORAGES = {"8 bits": Storage(8, 8), "4 bits": Storage(4, 4)}
STREAMING = "window 252, 4 sink tokens"
HALF = "half of the heads: window 252, 4 sink tokens"
HEADS = 8
DIM = 64
BATCHES = (1, 8)
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUICK = (1024, 16384)
CAT_TOKENS = 2**18  # in all rows; beyond, copying everything takes seconds a step and twice the memory
MEMORY_LENGTHS = (16384, 65536)  # with one sequence
SEED = 0


class Cache(Protocol):
    """What a variant keeps between steps."""

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for S tokens."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends a token, k and v (B, H, 1, D), and returns its attention to all S, (B, H, 1, D)."""
        ...

    def forget(self) -> None:
        """Back to the S - 1 tokens before the last ``attend``, if there was one."""
        ...


class PlainCache:
    """Keys and values in tensors of S tokens; the new one is written in place, and a slice is read without a
    copy.

    Args:
        k, v: (B, H, S, D), of which the last token is not in the cache yet.
        attention: of a query to them, which computes (q, k, v).
    """

    def __init__(self, k: Tensor, v: Tensor, attention: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        self.k, self.v, self.length, self.attention = k.clone(), v.clone(), k.shape[2] - 1, attention
        for x in (self.k, self.v):
            x[:, :, self.length :] = torch.nan  # a step that does not write its token is seen

    @property
    def nbytes(self) -> int:
        """See ``Cache``."""
        return self.k.nbytes + self.v.nbytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Cache``."""
        end = self.length + 1
        self.k[:, :, self.length : end] = k
        self.v[:, :, self.length : end] = v
        return self.attention(q, self.k[:, :, :end], self.v[:, :, :end])

    def forget(self) -> None:
        """See ``Cache``; the next token is written over the last one."""


class ConcatenatedCache:
    """Keys and values that ``torch.cat`` copies with every token, as the default cache of Hugging Face
    transformers does.

    A step allocates the longer tensors and frees as much, as it does in use: there the old ones, here the new
    ones.

    Args:
        k, v: as for ``PlainCache``.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = (x[:, :, :-1].clone() for x in (k, v))
        self.nbytes = k.nbytes + v.nbytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Cache``."""
        keys, values = torch.cat((self.k, k), dim=2), torch.cat((self.v, v), dim=2)
        return F.scaled_dot_product_attention(q, keys, values)

    def forget(self) -> None:
        """See ``Cache``; the longer tensors are gone already."""


class LevelsCache:
    """``structattn.LevelCache``.

    Args:
        cache: an empty one.
        k, v: as for ``PlainCache``.
    """

    def __init__(self, cache: LevelCache, k: Tensor, v: Tensor) -> None:
        self.cache, self.length = cache, k.shape[2] - 1
        cache.append(k[:, :, :-1], v[:, :, :-1])

    @property
    def nbytes(self) -> int:
        """See ``Cache``."""
        return self.cache.nbytes

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See ``Cache``."""
        return self.cache.attend(q, k, v)

    def forget(self) -> None:
        """See ``Cache``."""
        self.cache.crop(self.length)


@dataclass(frozen=True, kw_only=True)
class DecodeWork:
    """A decoding step; ``prepare`` comes before each.

    Attributes:
        cache: with S - 1 tokens.
        layout: what it must compute; plain attention is a layout of one level. With fewer bits, over the
            numbers that the cache has.
        new: query, key and value of token S, (B, H, 1, D) each.
        length: S.
    """

    cache: Cache
    layout: LevelLayout | HeadLayouts
    new: tuple[Tensor, Tensor, Tensor]
    length: int

    def prepare(self) -> None:
        """Forgets what the step before appended."""
        self.cache.forget()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The attention of token S, (B, H, 1, D)."""
        return self.cache.attend(*self.new)

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the cache allocated."""
        return self.cache.nbytes

    def check(self) -> Iterator[Check]:
        """Every row of two steps against float64."""
        q, k, v = self.new
        for _ in range(2):
            self.prepare()
            out = self()
            if isinstance(self.cache, LevelsCache) and self.cache.cache.storage is not None:
                held = self.cache.cache.dense_past(k, v)  # of this step too, which may have packed a group
                yield out, _attention(q, *held, self.layout)
            else:
                yield out, reference(q.shape[0], q.shape[1], self.length, self.layout, q.device, q.dtype)


@lru_cache(maxsize=1)  # up to 2 GiB, drawn for several seconds: once for all variants of a group
def tokens(
    batch: int, heads: int, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The last query, (B, H, 1, D), and all keys and values, (B, H, S, D): to be read, never written."""
    generator = torch.Generator(device).manual_seed(SEED)
    q, k, v = (
        torch.randn((batch, heads, n, DIM), dtype=dtype, device=device, generator=generator)
        for n in (1, length, length)
    )
    return q, k, v


@lru_cache(maxsize=8)
def reference(
    batch: int, heads: int, length: int, layout: LevelLayout | HeadLayouts, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The attention of the last query to all S ``tokens`` by the definition, (B, H, 1, D), float64."""
    return _attention(*tokens(batch, heads, length, device, dtype), layout)


def _attention(q: Tensor, k: Tensor, v: Tensor, layout: LevelLayout | HeadLayouts) -> Tensor:
    """The attention of the last query, (B, H, 1, D), to all keys, (B, H, S, D), by the definition."""
    row, outs = torch.zeros(1).long().to(q.device), []
    for group, heads in groups_of(layout, k.shape[1]):
        assert isinstance(group, LevelLayout)
        outs += row_reference(*(x[:, heads[0] : heads[-1] + 1] for x in (q, k, v)), group, row, None)
    return torch.cat(outs, dim=1)


def decode_work(
    label: str, *, batch: int, length: int, heads: int, device: torch.device, dtype: torch.dtype
) -> DecodeWork:
    """The work of a variant: its cache is filled, and one token is left to append."""
    q, k, v = tokens(batch, heads, length, device, dtype)
    layout = decode_layout(label, length, heads)
    cache: Cache
    if label == BASELINE:
        cache = PlainCache(k, v)
    elif label == OURS:
        cache = PlainCache(k, v, partial(structured_attention, is_causal=False))
    elif label == CAT:
        cache = ConcatenatedCache(k, v)
    else:
        options = {"max_length": None if label == GROWING else length, "storage": STORAGES.get(label)}
        cache = LevelsCache(LevelCache(layout, **options), k, v)
    new = (q, k[:, :, -1:].clone(), v[:, :, -1:].clone())
    return DecodeWork(cache=cache, layout=layout, new=new, length=length)


def decode_layout(label: str, length: int, heads: int = HEADS) -> LevelLayout | HeadLayouts:
    """What a variant computes; full attention is one level."""
    streaming = LevelLayout.sliding((DIM,), (252,), sink_tokens=4)
    if label == STREAMING:
        return streaming
    if label == HALF:
        near = heads // 2
        return HeadLayouts((layout_of(PLAIN_LEVEL, length, DIM),) * (heads - near) + (streaming,) * near)
    if label in STORAGES:
        label = PLAIN_LEVEL
    return layout_of("mlr 8x8" if label == GROWING else label, length, DIM)


def decode_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    lengths: Iterable[int] = LENGTHS,
    batches: Iterable[int] = BATCHES,
    heads: int = HEADS,
) -> Iterator[Group]:
    """One group per batch size and length S."""
    for batch in batches:
        for length in lengths:
            labels = [BASELINE, *([CAT] if batch * length <= CAT_TOKENS else []), OURS, PLAIN_LEVEL]
            labels += [*LAYOUTS[DIM], GROWING, *STORAGES, STREAMING, *([HALF] if heads > 1 else [])]
            yield Group(
                mode="decode", cases=tuple(_case(label, batch, length, heads, device, dtype) for label in labels)
            )


def _case(label: str, batch: int, length: int, heads: int, device: torch.device, dtype: torch.dtype) -> Case:
    def build() -> DecodeWork:
        return decode_work(label, batch=batch, length=length, heads=heads, device=device, dtype=dtype)

    groups = groups_of(decode_layout(label, length, heads), heads)
    kept = 0  # of all heads together, and all of it is read
    for group, of_group in groups:
        assert isinstance(group, LevelLayout)
        kept += len(of_group) * (group.key_cache_size(length) + group.value_cache_size(length, DIM))
    moved = (kept + heads * 2 * DIM) * dtype.itemsize  # the query and the output; the new key and value are kept
    if label == CAT:
        moved += kept * dtype.itemsize  # every number is written too
    if (storage := STORAGES.get(label)) is not None:
        codes = heads * 2 * DIM * storage.first_exact(length - 1)
        moved -= codes * dtype.itemsize
        moved += codes * int(storage.key_bits) // 8 + 2 * 2 * codes // storage.group_size  # type: ignore[call-overload]
    return Case(
        benchmark="decode",
        label=label,
        sizes={"S": length, "B": batch, "H": heads, "D": DIM},
        build=build,
        flops=batch * 2 * kept,
        bytes=batch * moved,
        is_baseline=label == BASELINE,
        measures_memory=batch == 1 and length in MEMORY_LENGTHS,
        tokens=batch,
        cached_tokens=batch * length,
    )


@benchmark(
    "decode",
    "One decoding step of attention: a token is appended to a key/value cache and attends to all S.",
    baseline=BASELINE,
    axis="S",
    quick={"cpu": QUICK, "cuda": QUICK},
    quick_others={"B": 1},
)
def decode(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """H = 8, D = 64, S 1,024 to 65,536, batch 1 and 8."""
    return decode_groups(device, dtype)
