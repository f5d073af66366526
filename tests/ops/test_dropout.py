"""Dropout: one mask for a seed on every backend, whatever the tiles and threads; no two rows share one."""

import pytest
import torch

import structattn as sa
from structattn.ops import dropout
from structattn.ops.blocked import backend as blocked
from structattn.testing.tolerances import assert_close

LEVELS = sa.LevelLayout.halving((2, 2, 2), 64)
FREE = sa.LevelLayout.from_boundaries((2, 2, 2), ((0,), (0, 30), (0, 10, 30, 41)))


def run(q, k, v, layout, backend, seed=5, p=0.3, **options):
    torch.manual_seed(seed)
    return sa.structured_attention(q, k, v, layout, dropout_p=p, backend=backend, **options)


def make(B, H, G, T, S):
    return [torch.randn(B, h, n, 6, dtype=torch.float64, requires_grad=True) for h, n in ((H, T), (G, S), (G, S))]


@pytest.mark.parametrize(
    ("counter", "seed", "words"),  # of the authors of Philox
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_random_numbers(counter, seed, words) -> None:
    assert [int(x) for x in dropout.philox(tuple(torch.tensor(x) for x in counter), seed)] == words


@pytest.mark.parametrize(
    "layout", [None, LEVELS, FREE, sa.GlobalWindowLayout((3, 3), 7)], ids=["none", "mlr", "free", "gw"]
)
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((2, 4, 2, 45, 45), {}),
        ((2, 2, 1, 21, 45), {"is_causal": False}),
        ((3, 2, 1, 45, 45), {"left_padding": torch.tensor([0, 5, 17])}),
        ((1, 2, 1, 90, 90), {"cu_seqlens": torch.tensor([0, 5, 52, 53, 90])}),
        ((2, 2, 1, 45, 45), {"attn_bias": torch.randn(45, 45, dtype=torch.float64)}),
    ],
    ids=["whole", "few", "padded", "packed", "bias"],
)
def test_every_backend_drops_the_same_weights(layout, sizes, options, monkeypatch) -> None:
    leaves = make(*sizes)
    expected = run(*leaves, layout, "reference", **options)
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for backend in ("blocked", "auto"):
        monkeypatch.setattr(blocked, "_SCORES_PER_THREAD", 700)
        out = run(*leaves, layout, backend, **options)
        monkeypatch.setattr(blocked, "_SCORES_PER_THREAD", 2**17)  # as with other threads: other tiles
        assert_close(out, expected)
        for a, b in zip(torch.autograd.grad(out.sin().sum(), leaves), wanted, strict=True):
            assert_close(a, b, gradient=True)
    assert not torch.allclose(run(*leaves, layout, "blocked", seed=6, **options), expected)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_no_two_rows_share_a_mask_and_the_rate_is_right(backend) -> None:
    B, H, T = 40, 2, 32
    q = torch.zeros(B, H, T, 4)
    v = torch.eye(T).expand(B, H, T, T)  # the output is the weights
    for p in (0.1, 0.9):
        out = run(q, q, v, None, backend, p=p, is_causal=False)
        kept = out != 0
        assert torch.allclose(out[kept], torch.tensor(1 / T / (1 - p)), rtol=1e-3)
        assert float(kept.float().mean()) == pytest.approx(1 - p, abs=5 / (B * H * T * T) ** 0.5)
    half = run(q, q, v, None, backend, p=0.5, is_causal=False) != 0
    assert len(torch.unique(half.flatten(0, 2), dim=0)) == B * H * T
    assert len(torch.unique(half.transpose(2, 3).flatten(0, 2), dim=0)) == B * H * T
    assert not torch.equal(run(q, q, v, None, backend, seed=6, p=0.5, is_causal=False) != 0, half)


def test_two_softmaxes_have_two_masks() -> None:
    T = 40
    q = torch.zeros(1, 1, T, 4)
    weights = run(q, q, torch.eye(T).expand(1, 1, T, T), sa.GlobalWindowLayout((2, 2), T), "blocked", p=0.5)
    # A pair is kept by none, one or both: one mask would give none or both.
    counts = (weights[0, 0] * 0.5 * torch.arange(1, T + 1)[:, None]).round().unique()
    assert counts.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.full
@pytest.mark.parametrize("backend", ["auto", "blocked"])
def test_a_compiled_call_has_the_seed_of_torch(backend) -> None:
    leaves = make(1, 2, 1, 20, 20)
    compiled = torch.compile(
        lambda *x: sa.structured_attention(*x, LEVELS, dropout_p=0.3, backend=backend),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.manual_seed(5)
    out = compiled(*leaves)
    expected = run(*leaves, LEVELS, backend)
    assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, expected)), strict=True):
        assert_close(a, b, gradient=True)
