"""Causal levels by spans of queries against the definition, with spans of every level, and how the spans are
chosen.
"""

import copy
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.ops import explain, small_causal
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close


def draw(batch, heads, length, dim, value_dim, dtype=torch.float64):
    return tuple(torch.randn(batch, heads, length, n, dtype=dtype).requires_grad_() for n in (dim, dim, value_dim))


def results(function, leaves, cotangent):
    out = function(*leaves)
    return [out, *torch.autograd.grad(out, leaves, cotangent)]


@given(
    heads=st.integers(1, 3),
    length=st.sampled_from([1, 2, 5, 7, 12, 21, 33]),
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    steps=st.lists(st.sampled_from([1, 2, 3, 8]), min_size=5, max_size=5),
    scaling=st.sampled_from(["variance", "mup", "paper", "paper_sum", "standard"]),
    scale=st.sampled_from([None, 0.0, -1.3, 2]),
    value_dim=st.sampled_from([1, 3, 17]),
)
def test_spans_of_every_level_are_the_definition(heads, length, ranks, steps, scaling, scale, value_dim) -> None:
    torch.manual_seed(0)
    sizes = [steps[-1]]
    for step in steps[: len(ranks) - 1]:
        sizes.insert(0, sizes[0] * step)
    layout = sa.LevelLayout(ranks, sizes, scaling)
    call = Call(layout=layout, terms=ScoreTerms(scale=scale))
    leaves = draw(2, heads, length, sum(ranks), value_dim)
    cotangent = torch.randn(2, heads, length, value_dim, dtype=torch.float64)
    expected = results(
        lambda *x: sa.structured_attention(*x, layout, scale=scale, backend="reference"), leaves, cotangent
    )
    for size in {length, *(size for size in sizes[1:] if size < length)}:
        plan = small_causal.plan(layout, length, size, scale, torch.float64)
        assert [span.start for span in plan.spans] == list(range(0, length, size))
        actual = results(lambda *x, plan=plan: small_causal.attend(*x, call, plan), leaves, cotangent)
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_close(a, b, gradient=number > 0)


@pytest.mark.parametrize("length", [42, 129])
@pytest.mark.parametrize("token_major", [False, True])
def test_what_auto_runs(length, token_major) -> None:
    torch.manual_seed(0)
    layout = sa.LevelLayout.halving((8, 4, 2, 2), length)
    leaves = draw(4, 8, length, 16, 16)
    if token_major:
        leaves = tuple(x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves)
    assert explain(*leaves, layout).startswith("small: 4 levels")
    cotangent = torch.randn_like(leaves[0])
    actual, expected = (
        results(lambda *x, backend=backend: sa.structured_attention(*x, layout, backend=backend), leaves, cotangent)
        for backend in ("auto", "reference")
    )
    for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, b, gradient=number > 0)
    with torch.no_grad():
        assert torch.equal(sa.structured_attention(*leaves, layout), actual[0])


def test_second_derivatives() -> None:
    torch.manual_seed(0)
    layout = sa.LevelLayout((2, 1), (6, 3))
    leaves = draw(1, 2, 5, 3, 2)
    assert explain(*leaves, layout).startswith("small")
    assert torch.autograd.gradgradcheck(lambda *x: sa.structured_attention(*x, layout), leaves)


def test_only_some_inputs_have_gradients() -> None:
    torch.manual_seed(0)
    layout = sa.LevelLayout((2, 1), (6, 3))
    q, k, v = (x.detach() for x in draw(1, 2, 7, 3, 2))
    for n in range(3):
        leaves = [x.clone().requires_grad_(n == i) for i, x in enumerate((q, k, v))]
        outs = [sa.structured_attention(*leaves, layout, backend=backend) for backend in ("auto", "reference")]
        actual, expected = (torch.autograd.grad(out.square().sum(), leaves[n])[0] for out in outs)
        assert_close(actual, expected, gradient=True)


def test_the_future_does_not_change_the_past() -> None:
    layout = sa.LevelLayout.halving((2, 1, 1), 40)
    q, k, v = (x.detach() for x in draw(2, 4, 40, 4, 4))
    before = sa.structured_attention(q, k, v, layout)
    later = [torch.cat((x[:, :, :23], 1e3 * torch.randn_like(x[:, :, 23:])), 2) for x in (q, k, v)]
    assert torch.equal(sa.structured_attention(*later, layout)[:, :, :23], before[:, :, :23])


def test_more_work_means_shorter_spans() -> None:
    def size(ranks, length, batch):
        return small_causal.span_size(sa.LevelLayout.halving(ranks, length), length, sum(ranks), batch)

    assert size((8, 4, 2, 2), 16, 1) == 16  # operations would cost more than they save
    assert size((8, 4, 2, 2), 128, 256) < 128
    assert size((8,) * 8, 512, 64) < size((8,) * 8, 512, 1)


def test_what_is_kept_serves_inference_and_training_and_threads() -> None:
    layout = sa.LevelLayout((3, 1), (900, 9))
    leaves = draw(2, 2, 20, 4, 4)
    small_causal.plan.cache_clear()
    found = []
    with torch.inference_mode():
        found.append(sa.structured_attention(*leaves, layout))
    threads = [
        threading.Thread(target=lambda: found.append(sa.structured_attention(*leaves, copy.copy(layout)).detach()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = sa.structured_attention(*leaves, layout)
    torch.autograd.grad(out.sum(), leaves)
    assert len(found) == 5
    assert all(torch.equal(x, out) for x in found)


def test_inputs_and_what_is_kept_stay_as_they_are() -> None:
    layout = sa.LevelLayout.halving((2, 1, 1), 20)
    leaves = draw(2, 2, 19, 4, 4)
    before = [x.detach().clone() for x in leaves]
    out = sa.structured_attention(*leaves, layout)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.sum(), leaves), first, strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(x, y) for x, y in zip(leaves, before, strict=True))
