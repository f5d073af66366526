"""A cache that decodes by the Triton kernel, against the definition; without a GPU in Triton's
interpreter.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_numbers import attention
from test_quantized import Program

import structattn as sa
from structattn.cache import attend
from structattn.errors import BackendUnavailableError
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import FORWARD, relative_error

pytest.importorskip("triton", reason="triton is not installed")

from structattn.ops.triton.config import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
runs = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="no GPU, and TRITON_INTERPRET is not 1"
)
LAYOUTS = {
    "plain": None,
    "levels": sa.LevelLayout((3, 2, 3), (64, 16, 8)),
    "values": sa.LevelLayout((5, 3), (64, 16), "paper", (2, 6)),
    "segments": sa.LevelLayout.from_boundaries((5, 3), [(0, 9, 30)]),
    "sliding": sa.LevelLayout.sliding((4, 2, 2), (None, 14, 6), value_ranks=(4, 3, 1)),
    "sink tokens in blocks": sa.LevelLayout((5, 3), (64, 16), sink_tokens=3),
    "sink tokens of a whole level": sa.LevelLayout.sliding((4, 4), (None, 6), sink_tokens=3),
    "sink tokens": sa.LevelLayout.sliding((4, 4), (20, 6), "paper", (4, 4), sink_tokens=3),
}


# Each layout once, and window and padding in all four ways; all of them together are in `make test-full`.
STEPS = [
    pytest.param(
        layout, window, padding, marks=[] if place % 4 == 2 * bool(window) + bool(padding) else pytest.mark.full
    )
    for place, layout in enumerate(sorted(LAYOUTS))
    for window in (None, 10)
    for padding in (None, (0, 3))
]


@runs
@pytest.mark.quick(layout=["levels", "sink tokens", "values"])
@pytest.mark.parametrize(("layout", "window", "padding"), STEPS)
def test_fused_steps_are_the_definition(monkeypatch, layout, window, padding) -> None:
    torch.manual_seed(0)
    form = LAYOUTS[layout]
    q, k, v = (torch.randn(2, heads, 40, 8, device=DEVICE) for heads in (4, 2, 2))
    left = None if padding is None else torch.tensor(padding, device=DEVICE)
    terms = {"softcap": 0.9, "sinks": torch.tensor([0.0, 1.0, 2.0, -1.0], device=DEVICE)} if padding is None else {}
    shown = torch.rand(2, 1, 40, 40, device=DEVICE) > 0.3
    mask = None if padding is None else (shown if window is None else shown[:, :, :1])
    terms["alibi_slopes"] = torch.tensor([[0.5, 0.2, 0.1, 0.05], [0.01, 0.3, 0.0, 1.0]], device=DEVICE)
    expected = sa.structured_attention(
        *(x.double() for x in (q, k, v)),
        form,
        window=window,
        left_padding=left,
        backend="reference",
        attn_mask=mask,
        **terms,
    )
    calls = []
    real = attend.fused_attention
    monkeypatch.setattr(attend, "fused_attention", lambda *args: calls.append(1) or real(*args))
    cache = sa.LevelCache(form, window=window, left_padding=padding, max_length=40)
    cache.append(k[:, :, :30], v[:, :, :30])
    sizes, first, outs = [1, 5], 30, []
    for size in sizes:
        part = slice(first, first + size)
        own = None if mask is None else mask[:, :, part if mask.shape[2] > 1 else slice(None), : part.stop]
        new = (x[:, :, part] for x in (q, k, v))
        outs.append(cache.attend(*new, backend="triton", attn_mask=own, **terms))
        first += size
    assert len(calls) >= len(sizes)
    assert relative_error(torch.cat(outs, dim=2), expected[:, :, 30:36]) <= FORWARD[torch.float32]


@runs
def test_what_the_kernel_cannot_do_is_said() -> None:
    x = torch.randn(1, 2, 20, 8, device=DEVICE)
    for cache, message in (
        (sa.LevelCache(page_size=4), "each level in one page: give the cache a max_length"),
        (sa.LevelCache(sa.GlobalWindowLayout((4, 4), 3), max_length=30), "a global-window layout has two"),
    ):
        cache.append(x, x)
        with pytest.raises(BackendUnavailableError, match=message):
            cache.attend(*(x[:, :, :1],) * 3, backend="triton")
    cache = sa.LevelCache(max_length=30)
    cache.append(x, x)
    with pytest.raises(BackendUnavailableError, match="takes a bool mask"):
        cache.attend(*(x[:, :, :1],) * 3, backend="triton", attn_mask=torch.zeros(21, device=DEVICE))
    hidden = sa.Attention(8, 2, scoring=sa.scoring.BTT(rank=1), backend="triton").to(DEVICE).requires_grad_(False)
    cache = hidden.new_cache(keys="hidden", max_length=30)
    cache.append(x[:, :1], x[..., :4])
    with pytest.raises(BackendUnavailableError, match="keeps hidden states"):
        hidden(x[:, 0, :1], cache=cache)


def test_without_a_gpu_the_reason_is_given(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = torch.randn(1, 2, 20, 8)
    cache = sa.LevelCache(max_length=30)
    cache.append(x, x)
    with pytest.raises(BackendUnavailableError, match="PyTorch finds no CUDA device"):
        cache.attend(*(x[:, :, :1],) * 3, backend="triton")


def test_a_term_that_the_kernel_does_not_name_is_refused() -> None:
    x = torch.randn(1, 2, 20, 8)
    cache = sa.LevelCache(max_length=30)
    cache.append(x, x)
    terms = ScoreTerms(attn_bias=torch.zeros(21))  # no cache takes it; a new term would come in the same way
    assert attend.why_not_fused(x[:, :, :1], cache._kept.view(), terms) == "the fused kernel has no attn_bias"


@dataclass
class Decoding:
    """Tokens of which the last ones are decoded by the kernel over a cache that stores fewer bits.

    Attributes:
        prompt: tokens before them.
        steps: how many each call has.
        options: of the cache; by default one page.
    """

    storage: sa.Storage
    layout: sa.LevelLayout | None = None
    window: int | None = None
    heads: tuple[int, int] = (2, 1)
    value_dim: int = 7
    prompt: int = 61
    steps: tuple[int, ...] = (1, 3, 1)
    padding: tuple[int, ...] = (0,)
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    is_masked: bool = False
    terms: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        layout, heads = self.layout, self.heads
        dim = layout.head_dim if layout else 10
        value_dim = sum(layout.value_ranks) if layout and layout.value_ranks else self.value_dim
        self.length = self.prompt + sum(self.steps)
        sizes = ((heads[0], dim, 0), (heads[1], dim, 3), (heads[1], value_dim, 1))
        q, k, v = (
            (torch.randn(len(self.padding), count, self.length, size) + shift).to(self.dtype).to(DEVICE)
            for count, size, shift in sizes
        )
        self.q, self.k, self.v = q, k, v
        self.mask = torch.rand(1, heads[0], self.length, self.length, device=DEVICE) < 0.7 if self.is_masked else None

    def new_cache(self) -> sa.LevelCache:
        """With the prompt."""
        cache = sa.LevelCache(
            self.layout,
            window=self.window,
            storage=self.storage,
            left_padding=self.padding if any(self.padding) else None,
            **(self.options or {"max_length": self.length}),
        )
        cache.append(self.k[:, :, : self.prompt], self.v[:, :, : self.prompt])
        return cache

    def step(self, cache: sa.LevelCache, first: int, size: int) -> None:
        """Tokens ``first`` ..., against the definition over the numbers that each query sees."""
        new = slice(first, first + size)
        mask = {} if self.mask is None else {"attn_mask": self.mask[:, :, new, : new.stop]}
        with torch.no_grad():
            out = cache.attend(
                *(x[:, :, new] for x in (self.q, self.k, self.v)), backend="triton", **mask, **self.terms
            )
        for row, pad in enumerate(self.padding):
            for at in range(first, first + size):
                tokens = slice(pad, at + 1)
                terms = dict(self.terms)
                if self.mask is not None:
                    terms["attn_mask"] = self.mask[:, :, at : at + 1, tokens]
                q, k, v = self.q[row, None, :, at : at + 1], self.k[row, None, :, tokens], self.v[row, None, :, tokens]
                expected = attention(q, k, v, self.layout, self.window, self.storage, at - pad, **terms)
                assert relative_error(out[row, None, :, at - first : at - first + 1], expected) <= FORWARD[self.dtype]


BLOCKS = sa.LevelLayout((5, 3, 4), (64, 16, 8), "mup")
RINGS = sa.LevelLayout.sliding((4, 2, 6), (37, 22, 5), value_ranks=(4, 3, 9))
DECODINGS = {
    "4 bits": Decoding(sa.Storage(4, 4, 4, 5), heads=(3, 1)),
    "8 bits, many groups in a tile": Decoding(sa.Storage(8, 8, 8, 3), value_dim=8, heads=(4, 2)),
    "groups larger than tiles": Decoding(sa.Storage(4, 8, 72, 5), prompt=150, value_dim=16, steps=(2,)),
    "groups that fill tiles": Decoding(sa.Storage(8, 4, 32, 5), BLOCKS, prompt=75, value_dim=33, steps=(1,)),
    "growing pages": Decoding(sa.Storage(4, 8, 8, 5), options={"page_size": 24}, padding=(0, 3)),
    "bits of each level": Decoding(sa.Storage((4, 8, 16), 8, 4, 3), BLOCKS),
    "exact keys": Decoding(sa.Storage(16, 4, 4, 3), BLOCKS),
    "exact values": Decoding(sa.Storage(4, 16, 4, 3), BLOCKS, terms={"softcap": 0.8}),
    "values of levels": Decoding(sa.Storage(8, (8, 4), 4, 0), sa.LevelLayout((5, 3), (64, 16), "paper", (9, 6))),
    "wrapped rings": Decoding(sa.Storage(4, 4, 4, 2), RINGS, prompt=125, padding=(0, 5)),
    "wrapped rings, window": Decoding(sa.Storage(8, 8, 2, 3), RINGS, window=19, prompt=92, steps=(1, 2)),
    "window cuts a group": Decoding(sa.Storage(4, 4, 8, 3), BLOCKS, window=45, steps=(1, 1)),
    "sink tokens": Decoding(sa.Storage(4, 4, 4, 3), sa.LevelLayout((5, 3), (64, 16), sink_tokens=6)),
    "sink tokens, wrapped rings": Decoding(
        sa.Storage(8, 4, 4, 3), sa.LevelLayout.sliding((4, 4), (30, 20), sink_tokens=5), padding=(4, 0)
    ),
    "few tokens": Decoding(sa.Storage(4, 4, 8, 5), BLOCKS, prompt=3),
    "a mask, ALiBi, sinks": Decoding(
        sa.Storage(4, 4, 4, 3),
        BLOCKS,
        padding=(2, 0),
        is_masked=True,
        terms={
            "sinks": torch.tensor([0.5, -1.0], device=DEVICE),
            "alibi_slopes": torch.tensor([0.1, 0.02], device=DEVICE),
        },
    ),
    "float16": Decoding(sa.Storage(4, 8, 8, 3), BLOCKS, dtype=torch.float16),
}
if not INTERPRETED:  # the interpreter computes bfloat16 wrongly
    DECODINGS["bfloat16"] = Decoding(sa.Storage(4, 4, 16, 3), dtype=torch.bfloat16, prompt=300)


@runs
@pytest.mark.quick(name=["4 bits", "growing pages"])
@pytest.mark.parametrize("name", DECODINGS)
def test_fused_steps_over_fewer_bits_are_the_definition(monkeypatch, name) -> None:
    decoding, calls = DECODINGS[name], []
    real = attend.fused_attention
    monkeypatch.setattr(attend, "fused_attention", lambda *args: calls.append(1) or real(*args))
    cache, first = decoding.new_cache(), decoding.prompt
    for number, size in enumerate(decoding.steps):
        decoding.step(cache, first, size)
        first += size
        assert len(calls) > number


@pytest.mark.full
@runs
def test_fused_steps_over_pages_that_are_moved(tmp_path: Path) -> None:
    """Undone, copied, saved and reordered, with pages of several sizes."""
    decoding = Decoding(sa.Storage(4, 8, 4, 3), options={"page_size": 12}, padding=(0, 0), steps=(1,) * 9)
    cache, at = decoding.new_cache(), decoding.prompt
    decoding.step(cache, at, 1)
    cache.undo()
    other = copy.deepcopy(cache)
    decoding.step(cache, at, 1)
    decoding.step(other, at, 1)
    other.save(tmp_path / "cache")
    cache = sa.LevelCache.load(tmp_path / "cache", device=DEVICE)
    for step in range(1, 5):
        decoding.step(cache, at + step, 1)
    cache.crop(at + 3)
    cache.reorder(torch.tensor([1, 0]))
    decoding.q, decoding.k, decoding.v = (x.flip(0) for x in (decoding.q, decoding.k, decoding.v))
    for step in range(3, 6):
        decoding.step(cache, at + step, 1)


@runs
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.full if seed > 1 else []) for seed in range(60)])
def test_fused_steps_of_random_caches(seed: int) -> None:
    program = Program(seed, torch.float32)
    cache, length = program.new_cache(), program.q.shape[2]
    done = max(length - 7, 1)
    program.attend(cache, 0, done)
    while done < length:
        count = min(program.draw.choice([1, 1, 3]), length - done)
        try:
            program.attend(cache, done, count, backend="triton")
        except BackendUnavailableError as error:
            # What the kernel cannot run is computed over dense keys, without padding; several pages are not.
            if not any(program.padding) and "each level in one page" not in str(error):
                raise
            program.attend(cache, done, count)
        done += count


@runs
def test_groups_of_values_that_are_too_many_are_decoded_without_the_kernel() -> None:
    x = torch.randn(1, 1, 70, 40, device=DEVICE)
    cache = sa.LevelCache(storage=sa.Storage(4, 4, 2, 3), max_length=70)
    cache.append(x, x)
    reason = attend.why_not_fused(x[:, :, :1], cache._kept.view(), ScoreTerms())
    assert reason == (
        "the Triton kernel over a cache takes at most 16 groups of value dimensions, and groups of 2 make 20: give a "
        "larger group_size"
    )
    expected = attention(x[:, :, -1:], x, x, None, None, cache.storage, 69)
    cache.crop(69)
    with torch.no_grad():
        out = cache.attend(*(x[:, :, -1:],) * 3, backend="triton")
    assert relative_error(out, expected) <= FORWARD[torch.float32]
