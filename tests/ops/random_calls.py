"""Random calls of ``structured_attention``, and how a backend is held to ``reference`` in them."""

from dataclasses import replace

import torch
from hypothesis import strategies as st

import structattn as sa
from structattn.testing.tolerances import assert_close


def tensors(B, H, G, T, S, D, V, dtype=torch.float64, size=1.0):
    return [
        (size * torch.randn(B, H, T, D, dtype=dtype)).requires_grad_(),
        torch.randn(B, G, S, D, dtype=dtype, requires_grad=True),
        torch.randn(B, G, S, V, dtype=dtype, requires_grad=True),
    ]


def both(backend, leaves, layout, **options):
    """(out, lse, gradients) of reference and of a backend; the log-sum-exp takes part in the loss where it is
    finite.
    """
    results = []
    weights = None
    for name in ("reference", backend):
        out, lse = sa.structured_attention(*leaves[:3], layout, backend=name, return_lse=True, **options)
        if weights is None:
            weights = torch.randn_like(out), torch.randn_like(lse)
        seen = lse.isfinite()
        loss = (out * weights[0]).sum() + (lse[seen] * weights[1][seen]).sum()
        results.append((out, lse, torch.autograd.grad(loss, leaves)))
    return results


def assert_same(backend, leaves, layout, **options) -> None:
    (out, lse, grads), (fast, fast_lse, fast_grads) = both(backend, leaves, layout, **options)
    assert fast.dtype == out.dtype
    assert_close(fast, out)
    seen = lse.isfinite()
    assert torch.equal(seen, fast_lse.isfinite())
    assert_close(fast_lse[seen], lse[seen])
    for a, b in zip(fast_grads, grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9 * (1 + float(b.abs().max())))


@st.composite
def cases(draw):
    levels = draw(st.integers(1, 4))
    ranks = tuple(draw(st.lists(st.integers(1, 3), min_size=levels, max_size=levels)))
    value_ranks = draw(st.none() | st.just(tuple(reversed(ranks))))
    scaling = draw(st.sampled_from(["variance", "mup", "paper", "paper_sum", "standard"]))
    T = draw(st.integers(1, 150))
    kind = draw(st.sampled_from(["whole", "whole", "packed", "padded"]))
    S = T if kind == "packed" else draw(st.just(T) | st.integers(1, 150))
    batch = 1 if kind == "packed" else draw(st.integers(1, 3))
    groups, repeats = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    options: dict = {
        "is_causal": draw(st.booleans()),
        "window": draw(st.sampled_from([None, None, 1, 3, 10, 60])),
        "scale": draw(st.sampled_from([None, None, 0.7, -0.2])),
        "softcap": draw(st.sampled_from([None, None, 0.5, 90.0])),
        "alibi_slopes": draw(
            st.none() | st.sampled_from([(groups * repeats,), (batch, groups * repeats)]).map(torch.rand)
        ),
    }
    rows = batch
    if kind == "packed":
        offsets = [0, *sorted(draw(st.lists(st.integers(0, T), max_size=4))), T]  # those of an empty sequence are equal
        rows = len(offsets) - 1
        options["cu_seqlens"] = torch.tensor(offsets, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
        if draw(st.booleans()):
            S = draw(st.just(T) | st.integers(1, 150))
            inner = draw(st.lists(st.integers(0, S), min_size=rows - 1, max_size=rows - 1))
            options["cu_seqlens_k"] = torch.tensor([0, *sorted(inner), S])
    if kind == "padded":
        options["left_padding"] = torch.tensor(draw(st.lists(st.integers(0, S), min_size=batch, max_size=batch)))
    how = draw(st.sampled_from(["blocks", "windows", "blocks", "segments", "windows"]))
    if how == "windows":
        windows = sorted(draw(st.lists(st.integers(1, 160), min_size=levels, max_size=levels)), reverse=True)
        unbounded = draw(st.integers(0, levels))
        layout = sa.LevelLayout.sliding(ranks, [None] * unbounded + windows[unbounded:], scaling, value_ranks)
    elif how == "blocks":
        sizes = [draw(st.integers(1, 9))]
        for _ in range(levels - 1):
            sizes.insert(0, sizes[0] * draw(st.sampled_from([1, 2, 2, 3, 5])))
        layout = sa.LevelLayout(ranks, tuple(sizes), scaling, value_ranks)
    else:
        rows_of_starts = []
        for _ in range(draw(st.sampled_from([1, rows]))):
            starts = [(0,)]
            for _ in range(levels - 1):
                starts.append(tuple(sorted({*starts[-1], *draw(st.lists(st.integers(1, 150), max_size=4))})))
            rows_of_starts.append(starts)
        layout = sa.LevelLayout.from_boundaries(ranks, rows_of_starts, scaling, value_ranks)
    layout = replace(layout, sink_tokens=draw(st.sampled_from([0, 0, 0, 1, 4, 70])))
    wide = draw(st.none() | st.tuples(*[st.booleans()] * 4))  # the dimensions of a bias that are not 1
    shape = (batch, groups * repeats, groups, T, S, sum(ranks), sum(ranks))
    bias = None if wide is None else [n if w else 1 for n, w in zip((*shape[:2], T, S), wide, strict=True)]
    masked = draw(st.none() | st.tuples(*[st.booleans()] * 4))
    if masked is not None:
        sizes = [n if own else 1 for n, own in zip((*shape[:2], T, S), masked, strict=True)]
        options["attn_mask"] = torch.rand(sizes, generator=torch.Generator().manual_seed(T)) < 0.8
    return layout, shape, bias, options
