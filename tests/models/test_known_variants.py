"""Variants of other papers that are values of scoring and layout: grouped heads, DAR, local layers. Each
against loops from its own definition.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import structattn as sa
from structattn.errors import ConfigError
from structattn.testing.tolerances import assert_close

WIDTH, HEADS, DIM, LENGTH = 32, 4, 8, 13


def layer(spec: str, **options) -> sa.Attention:
    torch.manual_seed(0)
    attn = sa.Attention.from_spec(spec, embed_dim=WIDTH, num_heads=HEADS, context_length=LENGTH, **options).double()
    for p in attn.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return attn


def turned(x: Tensor, position: int) -> Tensor:
    """Rotary positions of one vector of one level: dimension i and i + D / 2 are a complex number."""
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag])


def by_loops(attn: sa.Attention, x: Tensor, is_rotated: bool, far: int | None = None, window: int = 0) -> Tensor:
    """Causal attention token by token; keys and values at distance ``window`` and beyond have their first
    ``far`` dimensions only.
    """
    groups = attn.num_kv_heads
    left, right = attn.scoring.matrix.left, attn.scoring.matrix.right  # (G, H / G, E, D) and (G, 1, E, D)
    norms = attn.scoring.q_norm, attn.scoring.k_norm
    out = []
    for h in range(HEADS):
        g, own = divmod(h, HEADS // groups)
        queries = [F.layer_norm(row @ left[g, own], (DIM,), norms[0].weight) for row in x]
        keys = [F.layer_norm(row @ right[g, 0], (DIM,), norms[1].weight) for row in x]
        if is_rotated:
            queries, keys = ([turned(row, i) for i, row in enumerate(rows)] for rows in (queries, keys))
        values = [attn.value_proj.weight[g * DIM : (g + 1) * DIM] @ row for row in x]
        rows = []
        for i, query in enumerate(queries):
            sizes = [DIM if far is None or i - j < window else far for j in range(i + 1)]
            scores = [query[:n] @ keys[j][:n] / math.sqrt(n) for j, n in enumerate(sizes)]
            weights = torch.softmax(torch.stack(scores), 0)
            seen = [F.pad(values[j][:n], (0, DIM - n)) for j, n in enumerate(sizes)]
            rows.append(sum(w * v for w, v in zip(weights, seen, strict=True)))
        out.append(torch.stack(rows))
    return torch.cat(out, dim=1) @ attn.out_proj.weight.T


def check(attn: sa.Attention, expected: Tensor, x: Tensor) -> None:
    """Outputs, all gradients, and decoding with a cache in parts."""
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *attn.parameters()], cotangent)
    found = attn(x[None])[0]
    assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found, [x, *attn.parameters()], cotangent), wanted, strict=True):
        assert_close(one, other, gradient=True)
    for sizes in ([1] * LENGTH, [5, 1, 7]):
        cache = attn.new_cache(max_length=LENGTH)
        with torch.no_grad():
            cached = torch.cat([attn(part, cache=cache) for part in x[None].split(sizes, dim=1)], dim=1)
        assert_close(cached[0], expected)
        assert cache.nbytes == 8 * attn.cost(LENGTH).cache_numbers


@pytest.mark.parametrize("rotary", [None, sa.Rotary()], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_grouped_and_multi_query_heads_by_loops(groups: int, rotary: sa.Rotary | None) -> None:
    attn = layer(f"standard,kv_heads={groups}", rotary=rotary)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    check(attn, by_loops(attn, x, rotary is not None), x)
    assert attn.cost(LENGTH).cache_numbers == 2 * groups * DIM * LENGTH


@pytest.mark.parametrize("window", [1, 5])
def test_dar_is_two_sliding_levels(window: int) -> None:
    attn = layer(f"sliding:2|6@-|{window},values=2|6")
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
    check(attn, by_loops(attn, x, is_rotated=False, far=2, window=window), x)
    assert attn.cost(LENGTH).cache_numbers == 2 * HEADS * (2 * LENGTH + 6 * window)


def test_a_spec_has_its_heads_whatever_those_of_the_model_are() -> None:
    model = sa.LanguageModel(
        9,
        "[standard,kv_heads=1,standard,standard:2,kv_heads=1+mlr:8|8]",
        num_layers=3,
        embed_dim=WIDTH,
        num_heads=HEADS,
        num_kv_heads=2,
        context_length=8,
    )
    found = [(block.attention.num_heads, block.attention.num_kv_heads) for block in model.trunk.layers]
    assert found == [(4, 1), (4, 2), (2, 1)]
    with pytest.raises(ConfigError, match="num_kv_heads must divide num_heads: got 3 and 4"):
        layer("standard,kv_heads=3")
    with pytest.raises(ConfigError, match="only standard has numbers of heads in its text form"):
        str(sa.AttentionSpec(scoring=sa.scoring.BTT(), num_kv_heads=1))


@pytest.mark.parametrize("local", [3, 5])
def test_one_global_layer_among_local_ones_keeps_the_numbers_of_both(local: int) -> None:
    spec = f"[{','.join(['window:16'] * local)},standard]"
    model = sa.LanguageModel(
        9,
        spec,
        num_layers=2 * (local + 1),
        embed_dim=WIDTH,
        num_heads=HEADS,
        context_length=64,
        rotary=sa.Rotary(),
    )
    numbers = 2 * (2 * HEADS * DIM) * (64 + local * 16)
    assert model.trunk.cache_numbers(64) == numbers
    caches = model.new_cache(max_length=64)
    model(torch.zeros(1, 64, dtype=torch.long), caches=caches)
    assert caches.nbytes == 4 * numbers
    assert model.trunk.cache_numbers(8) == 2 * (local + 1) * 2 * HEADS * DIM * 8
