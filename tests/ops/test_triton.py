"""The Triton kernels against the definition, and their compilation without a GPU.

The kernels run on a GPU where there is one, else in Triton's interpreter (``tests/conftest.py``).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import structattn as sa
from structattn.errors import BackendUnavailableError
from structattn.layout.levels import LevelLayout
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import FORWARD, GRADIENT, relative_error

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language", reason="triton is not installed")

from structattn.ops.triton import backend as triton_attention  # noqa: E402
from structattn.ops.triton.config import INTERPRETED, KernelConfig  # noqa: E402
from structattn.ops.triton.plan import Tiles, coarse_of, make_plan  # noqa: E402
from structattn.ops.triton.primitives import sliding_range  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[2]


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


def _config(own: int = 16, walk: int = 16, **options: object) -> KernelConfig:
    tiles = Tiles(own=own, walk=walk)
    return KernelConfig(forward=tiles, grad_queries=tiles, grad_keys=tiles, decode=Tiles(own=16, walk=walk), **options)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: LevelLayout
    lengths: tuple[int, int] = (50, 50)  # queries, keys
    heads: tuple[int, int] = (1, 1)  # queries, keys
    batch: int = 1
    value_dim: int = 16
    is_causal: bool = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    has_slopes: bool = False  # of ALiBi, others for each row and head
    masked: str | None = None  # the dimensions of (B, H, T, S) that a mask has
    ends: tuple[int, ...] | None = None
    key_ends: tuple[int, ...] | None = None  # where they are not those of the queries
    dtype: torch.dtype = torch.float32
    config: KernelConfig | None = None
    transposed: bool = False
    surrounded: bool = False  # by NaN in memory, which must not be read

    @property
    def call(self) -> Call:
        cu_seqlens = None if self.ends is None else torch.tensor((0, *self.ends), dtype=torch.int32, device=DEVICE)
        keys = None if self.key_ends is None else torch.tensor((0, *self.key_ends), device=DEVICE)
        window = self.layout.window_of(1, self.window)
        options = {"cu_seqlens_k": keys, "window": window}
        terms = {"scale": self.scale, "softcap": self.softcap}
        if self.has_slopes:
            slopes = torch.linspace(0.02, 0.5, self.batch * self.heads[0], device=DEVICE)
            terms["alibi_slopes"] = slopes.view(self.batch, self.heads[0])
        if self.masked is not None:
            shape = zip("BHTS", (self.batch, self.heads[0], *self.lengths), strict=True)
            sizes = [n if name in self.masked else 1 for name, n in shape]
            terms["attn_mask"] = (torch.rand(sizes, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE)
        own = {"is_causal": self.is_causal, "cu_seqlens": cu_seqlens}
        return Call(layout=self.layout, terms=ScoreTerms(**terms), **own, **options)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        (queries, keys), (heads, groups), dim = self.lengths, self.heads, self.layout.head_dim
        value_dim = sum(self.layout.value_ranks or (self.value_dim,))
        return (
            self._random(heads, queries, dim),
            self._random(groups, keys, dim),
            self._random(groups, keys, value_dim),
        )

    def _random(self, heads: int, length: int, dim: int) -> Tensor:
        if self.surrounded:
            memory = torch.full((self.batch, heads, length + 64, dim + 40), torch.nan, dtype=self.dtype, device=DEVICE)
            memory[:, :, 32 : 32 + length, 24 : 24 + dim] = torch.randn(self.batch, heads, length, dim)
            return memory[:, :, 32 : 32 + length, 24 : 24 + dim]
        if self.transposed:
            return torch.randn(self.batch, length, heads, dim).to(self.dtype).to(DEVICE).transpose(1, 2)
        return torch.randn(self.batch, heads, length, dim).to(self.dtype).to(DEVICE)


def _check(case: Case, *, with_grad_lse: bool = True) -> None:
    """Output, log-sum-exp and the three gradients against the definition in float64."""
    q, k, v = case.tensors()
    call = case.call
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected_out, expected_lse = reference.attention(*exact, call)
    out, lse = triton_attention.forward(q, k, v, call, case.config)
    assert (out.dtype, lse.dtype) == (case.dtype, torch.float32)
    empty = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, empty)
    assert not out[empty].any()
    seen = expected_lse.masked_fill(empty, 0.0)
    assert relative_error(out, expected_out) <= FORWARD[case.dtype]
    assert relative_error(lse.masked_fill(empty, 0.0), seen) <= FORWARD[case.dtype]
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    loss = (expected_out * grad_out.double()).sum()
    if with_grad_lse:
        loss = loss + (seen * grad_lse.double()).sum()
    expected = torch.autograd.grad(loss, exact)
    grads = triton_attention.backward(
        grad_out, grad_lse if with_grad_lse else None, q, k, v, out, lse, call, case.config
    )
    for name, actual, right in zip("qkv", grads, expected, strict=True):
        assert actual.dtype == case.dtype
        assert relative_error(actual, right) <= GRADIENT[case.dtype], f"gradient of {name}"


HALVING = LevelLayout((8, 8, 8, 8), (64, 32, 16, 8))
FREE = LevelLayout((5, 17, 10), (36, 12, 3), scaling="paper")
WIDE = LevelLayout((16, 20, 12), (128, 64, 32), scaling="mup")  # every block is larger than a tile
EQUAL = LevelLayout((8, 12, 4, 8), (64, 16, 16, 4), scaling="paper_sum")
VALUES = LevelLayout((16, 20, 8), (64, 32, 4), scaling="paper", value_ranks=(17, 11, 3))
SLIDING = LevelLayout.sliding((8, 12, 4, 8), (None, 37, 20, 5))
NEAR = LevelLayout.sliding((5, 17, 10), (60, 3, 1), "paper")  # windows that end in one tile, and hidden pairs
FAR_APART = LevelLayout.sliding((16, 20, 12), (None, 64, 32), "mup")  # tiles in which all pairs share as much
SLIDING_VALUES = LevelLayout.sliding((16, 20, 8), (None, None, 19), "paper", (17, 11, 3))

CASES = {
    "halving": Case(layout=HALVING, lengths=(41, 41), batch=2),
    "halving, not causal": Case(layout=HALVING, is_causal=False, value_dim=24),
    "free sizes": Case(layout=FREE, lengths=(47, 47), value_dim=20),
    "free sizes, not causal": Case(layout=FREE, lengths=(47, 47), is_causal=False),
    "large blocks": Case(layout=WIDE, lengths=(130, 130)),
    "large blocks, not causal": Case(layout=WIDE, lengths=(83, 83), is_causal=False),
    "large blocks that are no whole tiles": Case(layout=LevelLayout((16, 16, 16), (132, 44, 22)), lengths=(97, 97)),
    "the same, not causal": Case(layout=LevelLayout((16, 16, 16), (132, 44, 22)), lengths=(71, 71), is_causal=False),
    "equal sizes": Case(layout=EQUAL, lengths=(41, 41)),
    "wide tiles": Case(layout=WIDE, lengths=(90, 90), config=_config(64, 32)),
    "tiles that walk in larger steps": Case(layout=HALVING, config=_config(16, 32), is_causal=False),
    "whole tiles": Case(layout=WIDE, lengths=(96, 96)),
    "whole tiles, not causal": Case(
        layout=replace(WIDE, value_ranks=(3, 20, 9)), lengths=(96, 96), heads=(2, 1), is_causal=False
    ),
    "whole tiles of keys, fewer queries": Case(layout=HALVING, lengths=(39, 64)),
    "whole tiles, more queries, not causal": Case(layout=WIDE, lengths=(80, 64), is_causal=False, masked="TS"),
    "window": Case(layout=HALVING, window=9),
    "window, not causal": Case(layout=WIDE, lengths=(70, 70), window=20, is_causal=False),
    "window of one": Case(layout=FREE, lengths=(19, 19), window=1, value_dim=5),
    "huge window": Case(layout=HALVING, lengths=(20, 20), window=10**12),
    "grouped heads": Case(layout=WIDE, lengths=(23, 23), heads=(4, 2), transposed=True),
    "fewer queries": Case(layout=HALVING, lengths=(19, 61)),
    "fewer queries, not causal, window": Case(layout=FREE, lengths=(19, 61), is_causal=False, window=13),
    "more queries": Case(layout=HALVING, lengths=(61, 23)),
    "more queries, not causal": Case(layout=FREE, lengths=(61, 23), is_causal=False),
    "more queries, not causal, one level": Case(layout=LevelLayout((7,), (8,)), lengths=(40, 5), is_causal=False),
    "one query, one key": Case(layout=HALVING, lengths=(1, 1), value_dim=1),
    "beyond the context": Case(layout=LevelLayout((16, 16), (32, 16)), lengths=(71, 71)),
    "one level": Case(layout=LevelLayout((24,), (64,)), lengths=(53, 53), heads=(2, 2)),
    "a number as scale": Case(layout=FREE, lengths=(37, 37), scale=0.3),
    "a negative number as scale": Case(layout=FREE, lengths=(19, 19), scale=-0.3),
    "mask of pairs": Case(layout=FREE, lengths=(19, 23), heads=(2, 1), batch=2, masked="BHTS"),
    "mask of keys, not causal": Case(layout=WIDE, lengths=(40, 40), batch=2, masked="BS", is_causal=False, window=30),
    "mask of queries, packed": Case(layout=HALVING, lengths=(50, 50), ends=(17, 50), masked="HT", heads=(2, 1)),
    "mask, more queries": Case(layout=FREE, lengths=(41, 23), masked="TS"),
    "soft cap": Case(layout=FREE, lengths=(37, 37), softcap=0.7),
    "large soft cap, not causal": Case(layout=VALUES, lengths=(37, 37), scale=30.0, softcap=50.0, is_causal=False),
    "ALiBi": Case(layout=HALVING, lengths=(21, 21), heads=(2, 1), batch=2, has_slopes=True),
    "ALiBi, not causal, soft cap": Case(
        layout=FREE, lengths=(19, 47), is_causal=False, has_slopes=True, softcap=0.7, heads=(2, 1)
    ),
    "ALiBi, packed, window, mask": Case(
        layout=WIDE, lengths=(50, 50), ends=(17, 50), has_slopes=True, window=20, masked="S", heads=(2, 2)
    ),
    "ALiBi, more queries": Case(layout=VALUES, lengths=(41, 23), has_slopes=True, is_causal=False),
    "packed": Case(layout=HALVING, lengths=(60, 60), ends=(3, 40, 60)),
    "packed, not causal": Case(layout=WIDE, lengths=(80, 80), ends=(1, 50, 80), is_causal=False),
    "packed, free sizes, window": Case(layout=FREE, lengths=(53, 53), ends=(17, 53), window=11),
    "packed apart": Case(
        layout=HALVING, lengths=(37, 45), ends=(3, 21, 21, 30, 37), key_ends=(20, 27, 31, 31, 45), heads=(2, 1)
    ),
    "packed apart, not causal": Case(
        layout=WIDE, lengths=(83, 50), ends=(1, 50, 50, 70, 83), key_ends=(20, 24, 24, 24, 50), is_causal=False
    ),
    "packed apart, values, window, mask, ALiBi": Case(
        layout=VALUES,
        lengths=(31, 45),
        ends=(20, 31),
        key_ends=(8, 45),
        window=13,
        masked="TS",
        has_slopes=True,
        is_causal=False,
        heads=(2, 1),
    ),
    "values": Case(layout=VALUES, lengths=(70, 70)),
    "values, not causal": Case(layout=VALUES, lengths=(53, 53), is_causal=False, heads=(2, 1)),
    "values, large blocks": Case(layout=replace(WIDE, value_ranks=(3, 20, 9)), lengths=(90, 90), is_causal=False),
    "sliding": Case(layout=SLIDING, lengths=(61, 61), heads=(2, 1), batch=2, transposed=True),
    "sliding, not causal": Case(layout=SLIDING, lengths=(53, 53), is_causal=False, value_dim=20),
    "sliding, near": Case(layout=NEAR, lengths=(83, 83)),
    "sliding, near, not causal": Case(layout=NEAR, lengths=(70, 70), is_causal=False),
    "sliding, far apart": Case(layout=FAR_APART, lengths=(130, 130)),
    "sliding, far apart, not causal": Case(layout=FAR_APART, lengths=(101, 101), is_causal=False),
    "sliding, wide tiles": Case(layout=FAR_APART, lengths=(90, 90), config=_config(64, 32)),
    "sliding, larger steps": Case(layout=SLIDING, lengths=(71, 71), config=_config(16, 32), is_causal=False),
    "sliding, window": Case(layout=SLIDING, lengths=(61, 61), window=30),
    "sliding, window, not causal": Case(layout=SLIDING, lengths=(61, 61), window=4, is_causal=False),
    "sliding, huge windows": Case(
        layout=LevelLayout.sliding((16, 16), (None, 10**12)), lengths=(20, 20), window=10**12
    ),
    "sliding, fewer queries": Case(layout=SLIDING, lengths=(19, 75)),
    "sliding, fewer queries, not causal": Case(layout=NEAR, lengths=(19, 75), is_causal=False, window=13),
    "sliding, more queries": Case(layout=SLIDING, lengths=(75, 23)),
    "sliding, more queries, not causal": Case(layout=SLIDING_VALUES, lengths=(61, 23), is_causal=False),
    "sliding, one level": Case(layout=LevelLayout.sliding((24,), (17,)), lengths=(53, 53), is_causal=False),
    "sliding, one query, one key": Case(layout=NEAR, lengths=(1, 1), value_dim=1),
    "sliding, packed": Case(layout=SLIDING, lengths=(60, 60), ends=(3, 40, 60), scale=0.3, heads=(2, 1)),
    "sliding, packed, not causal": Case(layout=FAR_APART, lengths=(80, 80), ends=(1, 50, 80), is_causal=False),
    "sliding, packed apart, all options": Case(
        layout=SLIDING_VALUES,
        lengths=(31, 45),
        ends=(20, 31),
        key_ends=(8, 45),
        window=21,
        masked="TS",
        has_slopes=True,
        softcap=0.7,
        is_causal=False,
        heads=(2, 1),
    ),
    "sliding, values": Case(layout=SLIDING_VALUES, lengths=(70, 70), heads=(2, 1), softcap=0.7),
    "sliding, mask, ALiBi": Case(
        layout=SLIDING, lengths=(41, 50), masked="BHTS", has_slopes=True, batch=2, heads=(2, 1)
    ),
    "sliding, surrounded by NaN": Case(layout=SLIDING_VALUES, lengths=(37, 45), surrounded=True, is_causal=False),
    "sliding, float16": Case(layout=SLIDING, dtype=torch.float16, heads=(2, 1)),
    "surrounded by NaN": Case(layout=VALUES, lengths=(37, 45), surrounded=True),
    "surrounded by NaN, not causal": Case(layout=FREE, lengths=(37, 37), surrounded=True, is_causal=False),
    "sink tokens": Case(layout=replace(VALUES, sink_tokens=4), lengths=(47, 47), heads=(2, 1), batch=2, softcap=0.7),
    "sink tokens of a window, not causal": Case(
        layout=LevelLayout.sliding((24,), (9,), sink_tokens=3), lengths=(41, 41), is_causal=False, masked="TS"
    ),
    "sink tokens, more queries": Case(layout=replace(SLIDING, sink_tokens=20), lengths=(41, 23), has_slopes=True),
    "sink tokens, packed apart": Case(
        layout=replace(NEAR, sink_tokens=5),
        lengths=(37, 45),
        ends=(3, 21, 21, 30, 37),
        key_ends=(20, 27, 31, 33, 45),
        heads=(2, 1),
        window=9,
    ),
    "float16": Case(layout=HALVING, dtype=torch.float16, heads=(2, 1)),
    "float16, free sizes": Case(layout=FREE, lengths=(47, 47), dtype=torch.float16, is_causal=False),
    "float16, values": Case(layout=VALUES, lengths=(37, 37), dtype=torch.float16),
}

if not INTERPRETED:  # the interpreter computes bfloat16 wrongly
    CASES["bfloat16"] = Case(layout=WIDE, lengths=(150, 150), heads=(2, 1), dtype=torch.bfloat16)
    CASES["bfloat16, values"] = Case(layout=VALUES, lengths=(70, 70), dtype=torch.bfloat16, is_causal=False)


# In `make test-full` alone: others have each of their options, in another combination.
FULL = {
    "whole tiles, not causal",
    "whole tiles of keys, fewer queries",
    "whole tiles, more queries, not causal",
    "mask of queries, packed",
    "halving",
    "large blocks that are no whole tiles",
    "beyond the context",
    "more queries, not causal",
    "packed apart",
    "ALiBi",
    "equal sizes",
    "fewer queries",
    "mask of pairs",
    "values, not causal",
    "halving, not causal",
    "free sizes",
    "large blocks",
    "large blocks, not causal",
    "the same, not causal",
    "tiles that walk in larger steps",
    "window, not causal",
    "huge window",
    "fewer queries, not causal, window",
    "more queries",
    "more queries, not causal, one level",
    "a number as scale",
    "mask of keys, not causal",
    "mask, more queries",
    "large soft cap, not causal",
    "ALiBi, not causal, soft cap",
    "ALiBi, packed, window, mask",
    "ALiBi, more queries",
    "packed",
    "packed, not causal",
    "packed apart, not causal",
    "values",
    "values, large blocks",
    "surrounded by NaN, not causal",
    "float16, free sizes",
    "float16, values",
    "free sizes, not causal",
    "grouped heads",
    "soft cap",
    "packed, free sizes, window",
    "whole tiles",
    "sink tokens, packed apart",
    "packed apart, values, window, mask, ALiBi",
    "window",
    "sink tokens, more queries",
    "sink tokens of a window, not causal",
}
FULL |= {name for name in CASES if name.startswith("sliding")} - {"sliding, wide tiles"}
assert set(CASES) > FULL


@runs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in FULL else []) for name in CASES]
)
def test_agrees_with_the_definition(name: str) -> None:
    _check(CASES[name])


DECODING = {
    "one query": Case(layout=HALVING, lengths=(1, 90), heads=(6, 2), batch=2),
    "sliding": Case(layout=SLIDING, lengths=(1, 90), heads=(6, 2), batch=2),
    "sliding, values, not causal, window, mask, ALiBi": Case(
        layout=SLIDING_VALUES, lengths=(5, 75), heads=(2, 1), window=40, is_causal=False, masked="TS", has_slopes=True
    ),
    "queries on both sides of a boundary": Case(layout=WIDE, lengths=(5, 66), heads=(2, 1)),
    "window": Case(layout=FREE, lengths=(3, 80), window=20),
    "not causal, values": Case(layout=VALUES, lengths=(4, 75), is_causal=False, heads=(4, 1)),
    "soft cap": Case(layout=HALVING, lengths=(2, 60), softcap=0.5),
    "mask": Case(layout=WIDE, lengths=(3, 66), heads=(2, 1), batch=2, masked="BHTS"),
    "ALiBi": Case(layout=WIDE, lengths=(3, 66), heads=(2, 1), batch=2, has_slopes=True, softcap=0.9),
    "float16": Case(layout=EQUAL, lengths=(2, 70), dtype=torch.float16),
}


@runs
@pytest.mark.quick(
    splits=[5], name=["one query", "sliding, values, not causal, window, mask, ALiBi", "soft cap", "mask"]
)
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("name", DECODING)
def test_decoding_agrees_with_the_definition(name: str, splits: int) -> None:
    case = DECODING[name]
    q, k, v = case.tensors()
    out, lse = triton_attention.forward(q, k, v, case.call, _config(num_splits=splits, decode_keys=1))
    expected_out, expected_lse = reference.attention(q.double(), k.double(), v.double(), case.call)
    assert out.dtype == case.dtype
    assert relative_error(out, expected_out) <= FORWARD[case.dtype]
    assert relative_error(lse, expected_lse) <= FORWARD[case.dtype]


@runs
def test_the_gradient_of_the_log_sum_exp_is_optional() -> None:
    _check(Case(layout=HALVING, lengths=(20, 20)), with_grad_lse=False)


@runs
@pytest.mark.parametrize("layout", [HALVING, FREE, VALUES], ids=["halving", "free", "values"])
def test_packed_sequences_are_those_computed_separately(layout: LevelLayout) -> None:
    case = Case(layout=layout, lengths=(45, 45), ends=(7, 38, 45))
    q, k, v = case.tensors()
    out, lse = triton_attention.forward(q, k, v, case.call)
    for start, end in ((0, 7), (7, 38), (38, 45)):
        alone, alone_lse = triton_attention.forward(*(x[:, :, start:end] for x in (q, k, v)), Call(layout=layout))
        torch.testing.assert_close(out[:, :, start:end], alone)
        torch.testing.assert_close(lse[:, :, start:end], alone_lse)


@runs
def test_boundaries_may_be_a_column() -> None:
    case = Case(layout=HALVING, lengths=(45, 45), ends=(7, 38, 45))
    q, k, v = case.tensors()
    assert case.call.cu_seqlens is not None
    column = torch.stack([case.call.cu_seqlens, case.call.cu_seqlens + 1], dim=1)[:, 0]
    found, expected = (
        triton_attention.forward(q, k, v, replace(case.call, cu_seqlens=ends))
        for ends in (column, case.call.cu_seqlens)
    )
    torch.testing.assert_close(found, expected)


@runs
@pytest.mark.parametrize("layout", [replace(HALVING, sink_tokens=4), replace(SLIDING, sink_tokens=4)])
def test_nan_stays_in_its_packed_sequence(layout: LevelLayout) -> None:
    case = Case(layout=layout, lengths=(45, 45), ends=(20, 45))
    leaves = case.tensors()
    for x in leaves:
        x[:, :, 20:] = torch.nan
    q, k, v = leaves
    out, lse = triton_attention.forward(q, k, v, case.call)
    grads = triton_attention.backward(torch.ones_like(out), None, q, k, v, out, lse, case.call)
    for x in (out, lse, *grads):
        assert not x[:, :, :20].isnan().any()
        assert x[:, :, 20:].isnan().any()


@runs
def test_small_gradients_keep_the_digits_of_float16() -> None:
    """Against the same gradient times 128, whose numbers are far above the least of float16."""
    case = Case(layout=LevelLayout((64,), (2048,)), lengths=(16, 2048), dtype=torch.float16)
    q, k, v = case.tensors()
    out, lse = triton_attention.forward(q, k, v, case.call)
    grad = torch.randn_like(out)
    small, large = (
        triton_attention.backward(x * grad, None, q, k, v, out, lse, case.call)[0].double() / x for x in (1 / 128, 1.0)
    )
    assert relative_error(small, large) <= 2e-3


def test_no_tiles_without_rows() -> None:
    """Blocks of 12,500 positions have 196 tiles of 64, of which 128 positions need two."""
    plan = make_plan(LevelLayout.halving((4, 4, 4, 4), 100_000), None, 16, Tiles(own=64, walk=64))
    assert (plan.anchor, plan.per_anchor) == (12_500, 196)
    assert triton_attention._grid(plan, 0, 128, None)[0] == 2
    assert triton_attention._grid(plan, 0, 12_501, None)[0] == 197
    ends = torch.arange(0, 16 * 101, 16)
    count, _, tile_map = triton_attention._grid(plan, 0, 1600, (ends, ends))
    assert count <= 126
    sequence, number = tile_map.view(2, -1)[:, :100]
    assert sequence.tolist() == list(range(100))
    assert not number.any()


@runs
def test_a_scale_too_small_for_float32_is_0() -> None:
    plan = make_plan(HALVING, 1e-40, 24, Tiles(own=16, walk=16))
    assert set(plan.constants[1]) == {0.0}
    tiny, none = (Case(layout=HALVING, lengths=(20, 20), scale=scale) for scale in (1e-40, 0.0))
    torch.testing.assert_close(*(triton_attention.forward(*tiny.tensors(), case.call) for case in (tiny, none)))


@runs
def test_large_negative_scores_do_not_overflow() -> None:
    """The weight of a key beyond the end of a range must not become inf * 0."""
    q, k, v = Case(layout=FREE, lengths=(23, 23)).tensors()
    k = -40 * q + k
    call = Call(layout=FREE, is_causal=False)
    out, lse = triton_attention.forward(q, k, v, call)
    grads = triton_attention.backward(torch.ones_like(out), None, q, k, v, out, lse, call)
    assert all(bool(x.isfinite().all()) for x in (out, lse, *grads))


@pytest.mark.full
@runs
def test_through_the_public_function() -> None:
    """The same operator as ``blocked``: autograd, and a clear error for what the kernels lack."""
    case = Case(layout=HALVING, lengths=(40, 40), heads=(2, 1))
    leaves = [x.requires_grad_() for x in (*case.tensors(), torch.tensor([0.5, 2.0], device=DEVICE))]
    results = []
    for backend in ("triton", "reference"):
        out, lse = sa.structured_attention(
            *leaves[:3], case.layout, backend=backend, return_lse=True, softcap=1.5, sinks=leaves[3]
        )
        results.append((out, lse, *torch.autograd.grad((out.square().sum() + lse.sum()), leaves)))
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) <= GRADIENT[case.dtype]
    with pytest.raises(
        BackendUnavailableError, match="'triton' cannot run this call: the Triton kernels have no dropout"
    ):
        sa.structured_attention(*leaves[:3], case.layout, backend="triton", dropout_p=0.1)


def test_says_what_it_lacks() -> None:
    def reason(
        layout: LevelLayout = HALVING,
        device: str = DEVICE,
        dtype: torch.dtype = torch.float32,
        attn_bias: Tensor | None = None,
        **options: object,
    ) -> str | None:
        q = torch.empty(1, 1, 8, layout.head_dim, device=device, dtype=dtype)
        return triton_attention.why_not(
            q, q, q[..., :16], Call(layout=layout, terms=ScoreTerms(attn_bias=attn_bias), **options)
        )

    assert "CUDA" in str(reason(device="meta"))
    if REASON is not None:
        return
    assert reason() is None
    assert reason(SLIDING) is None
    assert "attn_bias" in str(reason(attn_bias=torch.zeros(8, 8)))
    assert "dropout" in str(reason(dropout_p=0.1))
    assert "left_padding" in str(reason(left_padding=torch.zeros(1, dtype=torch.int64)))
    assert "float64" in str(reason(dtype=torch.float64))
    assert "512" in str(reason(LevelLayout((512,), (64,))))
    assert "boundaries" in str(reason(LevelLayout.from_boundaries((16, 16), ((0,), (0, 3)))))


@pytest.mark.parametrize("tiles", [Tiles(own=16, walk=16), Tiles(own=64, walk=32)], ids=str)
@pytest.mark.parametrize("layout", [HALVING, FREE, WIDE, EQUAL, VALUES, SLIDING, NEAR, SLIDING_VALUES], ids=str)
def test_subtiles_cover_each_dimension_once(layout: LevelLayout, tiles: Tiles) -> None:
    _, _, ends, value_ends, _, keys, values, *_ = make_plan(layout, None, 20, tiles).constants
    for subtiles, dim in ((keys, ends[-1]), (values, value_ends[-1])):
        stored = [column for start, width, stop, _, _ in subtiles for column in range(start, min(start + width, stop))]
        assert stored == list(range(dim))


@triton.jit
def _ranges_kernel(
    out, first, last, low, high, window,
    PLAN: tl.constexpr, OWN_IS_KEY: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, WALK: tl.constexpr,
):  # fmt: skip
    for level in range(coarse_of(PLAN)):
        for turn in range(1 if IS_CAUSAL else 2):
            found = sliding_range(
                level, turn, first, last, low, high, window, PLAN, OWN_IS_KEY, IS_CAUSAL, HAS_WINDOW, WALK
            )
            for n in tl.static_range(7):
                tl.store(out + (level * 2 + turn) * 7 + n, found[n])


@pytest.mark.full
@runs
@given(
    windows=st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(lambda x: sorted(x, reverse=True)),
    unbounded=st.booleans(),
    window=st.none() | st.integers(1, 50),
    own=st.tuples(st.integers(-20, 80), st.integers(0, 31)),
    bounds=st.tuples(st.integers(0, 30), st.integers(0, 80)),
    is_causal=st.booleans(),
    own_is_key=st.booleans(),
    walk=st.sampled_from([16, 32]),
)
def test_walks_of_sliding_levels_see_every_pair_once(
    windows, unbounded, window, own, bounds, is_causal, own_is_key, walk
) -> None:
    """Whole tiles have only pairs of their level, and few tiles of a level have hidden ones."""
    ends = [None, *windows] if unbounded else windows
    plan = make_plan(LevelLayout.sliding((1,) * len(ends), ends), None, 16, Tiles(own=32, walk=walk))
    (first, more), (low, length) = own, bounds
    last, high = first + more, low + length
    ranges = torch.zeros(len(ends), 2, 7, dtype=torch.int32, device=DEVICE)
    _ranges_kernel[(1,)](
        ranges, first, last, low, high, window or 0,
        PLAN=plan.constants, OWN_IS_KEY=own_is_key, IS_CAUSAL=is_causal, HAS_WINDOW=window is not None, WALK=walk,
    )  # fmt: skip
    seen: dict[tuple[int, int], list[int]] = {}
    for level, turns in enumerate(ranges.tolist()):
        for side, near, far, start, whole, rest, stop in turns[: 1 if is_causal else 2]:
            assert (rest - whole) % walk == 0
            assert whole >= rest or (start <= whole and rest <= stop)
            masked = [*range(start, min(whole, stop)), *range(rest, stop)]
            assert len(masked) <= 2 * more + 2 * walk
            for i in range(first, last + 1):
                shown = [j for j in masked if near <= (i - j) * side < far]
                for j in [*shown, *range(whole, rest)]:
                    seen.setdefault((i, j), []).append(level)
    for i in range(first, last + 1):
        for j in range(low, high):
            distance = j - i if own_is_key else i - j
            levels = [n for n, end in enumerate(ends) if abs(distance) < min(end or 999, window or 999)]
            hidden = not levels or (is_causal and distance < 0)
            assert seen.pop((i, j), []) == ([] if hidden else [levels[-1]])
    assert not seen


COMPILE = """
import torch
from benchmarks.gpu.compiled import compile_for, sources
from structattn.layout import LevelLayout
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms

levels = LevelLayout.halving((8,) * 4, 512)
sliced = LevelLayout.halving((64, 32, 32), 4096, value_ranks=(64, 32, 32))
sliding = LevelLayout.sliding((8,) * 8, [4096 >> level for level in range(8)])
packed = Call(layout=levels, cu_seqlens=torch.tensor([0, 1]), terms=ScoreTerms(alibi_slopes=torch.ones(1, 1)))
terms = ScoreTerms(softcap=50.0, attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool))
masked = Call(layout=sliced, is_causal=False, terms=terms)
found = [
    compile_for(source, (9, 0))
    for layout, dtype, value_dim, call in (
        (levels, torch.bfloat16, 64, packed), (sliced, torch.float16, 128, masked), (sliding, torch.bfloat16, 64, None)
    )
    for source in sources(layout, dtype, value_dim, call=call)
]
assert len(found) == 3 + 4 + 5
assert all(one.loops and all(loop.kinds["tensor"] for loop in one.loops) for one in found)
print(max(one.shared for one in found))
"""


@pytest.mark.full
def test_compiles_for_a_gpu_within_the_shared_memory_of_small_ones() -> None:
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton carries no ptxas")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= 99 * 1024
