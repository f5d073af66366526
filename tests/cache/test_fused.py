"""A cache that decodes by the Triton kernel, against the definition; without a GPU in Triton's
interpreter.
"""

from __future__ import annotations

import pytest
import torch

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
@pytest.mark.quick(layout=["levels", "sink tokens", "sink tokens in blocks", "values"])
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
