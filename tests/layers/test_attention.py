"""``Attention`` against definitions from dense matrices and loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.layers.block import TransformerBlock
from structattn.testing.tolerances import assert_close

SPECS = [
    "standard",
    "standard:1",
    "bilinear-btt:1",
    "bilinear-btt:2",
    "bilinear-mlr:4|2|2",
    "mlr:4|2|2",
    "mlr:4|4@4|2,scaling=paper",
    "window:3",
    "sliding:4|2|2@-|4|2",
    "global-window:4|4@3",
    "bilinear-btt:1+mlr:16|8|8",
    "bilinear-mlr:4|2|2+mlr:8|8",
    "bilinear-mlr:4|2|2+window:2",
]


def layer(spec: str, **options) -> sa.Attention:
    torch.manual_seed(0)
    defaults = {"embed_dim": 32, "num_heads": 4, "context_length": 8}
    return sa.Attention.from_spec(spec, **defaults, **options).double()


def normed(x: torch.Tensor, norm: bool) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:]) if norm else x


def output(attn: sa.Attention, scores: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Heads by a Python loop from scores (T, T) with -inf where hidden."""
    heads = []
    for h, score in enumerate(scores):
        g = h // (attn.num_heads // attn.num_kv_heads)
        weight = attn.value_proj.weight[g * attn.head_dim : (g + 1) * attn.head_dim]
        heads.append(torch.softmax(score, -1) @ (x @ weight.T))
    return torch.cat(heads, -1) @ attn.out_proj.weight.T


def causal(T: int) -> torch.Tensor:
    return torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("groups", [4, 2])
def test_bilinear_btt_by_its_dense_matrix(norm: bool, rank: int, groups: int) -> None:
    """k_h = LN(M_h x'), q = LN(x), over sqrt(E); with and without norms, which free the order of
    contraction.
    """
    attn = layer(f"bilinear-btt:{rank}", num_kv_heads=groups, qk_norm=norm)
    x = torch.randn(9, 32, dtype=torch.float64, requires_grad=True)
    dense = attn.scoring.matrix.to_dense().flatten(0, 1)
    scores = [normed(x, norm) @ normed(x @ m.T, norm).T / math.sqrt(32) + causal(9) for m in dense]
    expected = output(attn, scores, x)
    actual = attn(x[None])[0]
    assert_close(actual, expected)
    leaves = [x, *(p for name, p in attn.named_parameters() if "norm" not in name)]
    weight = torch.randn_like(actual)
    for a, e in zip(
        torch.autograd.grad((actual * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        assert_close(a, e, gradient=True)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scaling", ["variance", "mup"])
@pytest.mark.parametrize("divide", [True, False])
def test_bilinear_mlr_level_by_level(norm: bool, scaling: str, divide: bool) -> None:
    ranks = (4, 2, 2)
    scoring = sa.scoring.MLR(ranks=ranks, scaling=scaling, divide_by_levels=divide)
    torch.manual_seed(1)
    attn = sa.Attention(32, 4, scoring=scoring, qk_norm=norm).double()
    x = torch.randn(7, 32, dtype=torch.float64)
    scores = []
    for h in range(4):
        total = causal(7)
        for level, rank in enumerate(ranks):
            p = 2**level
            left, right = attn.scoring.matrix.left[level][h, 0], attn.scoring.matrix.right[level][h, 0]
            chunks = x.chunk(p, dim=-1)
            w = torch.cat([c @ left[k] for k, c in enumerate(chunks)], -1)
            u = torch.cat([c @ right[k] for k, c in enumerate(chunks)], -1)
            size = rank * p
            scale = 1 / math.sqrt(size) if scaling == "variance" else 8 / size
            total = total + normed(w, norm) @ normed(u, norm).T * scale / (3 if divide else 1)
        scores.append(total)
    assert_close(attn(x[None])[0], output(attn, scores, x))


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("scaling", ["variance", "mup", "paper", "paper_sum", "standard"])
def test_mlr_attention_by_loops(norm: bool, scaling: str) -> None:
    attn = layer(f"mlr:4|2|2@8|4|2,scaling={scaling}", num_kv_heads=2, qk_norm=norm)
    x = torch.randn(11, 32, dtype=torch.float64)
    scores = []
    for h in range(4):
        q = normed(x @ attn.scoring.matrix.left[h // 2, h % 2], norm)
        k = normed(x @ attn.scoring.matrix.right[h // 2, 0], norm)
        score = causal(11)
        for i in range(11):
            for j in range(i + 1):
                levels = 1 + (i // 4 == j // 4) + (i // 2 == j // 2)
                parts = [(slice(0, 4), 4), (slice(4, 6), 2), (slice(6, 8), 2)][:levels]
                shared = sum(r for _, r in parts)
                total = sum(q[i, p] @ k[j, p] for p, _ in parts)
                by_rank = sum(q[i, p] @ k[j, p] / r for p, r in parts)
                value = {
                    "variance": total / math.sqrt(shared),
                    "mup": total * 8 / shared,
                    "paper": by_rank / levels,
                    "paper_sum": by_rank,
                    "standard": total / math.sqrt(8),
                }[scaling]
                score[i, j] = value
        scores.append(score)
    assert_close(attn(x[None])[0], output(attn, scores, x))


@pytest.mark.parametrize("spec", SPECS)
def test_the_future_cannot_change_the_past(spec: str) -> None:
    attn = layer(spec)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] += 1
    before, after = attn(x), attn(changed)
    assert_close(after[:, :5], before[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().min() > 0


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_reach_every_parameter(spec: str, norm: bool, is_causal: bool) -> None:
    attn = layer(spec, qk_norm=norm, is_causal=is_causal, bias=True)
    x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)
    attn(x).square().sum().backward()
    for name, p in [*attn.named_parameters(), ("x", x)]:
        assert p.grad is not None, name
        assert bool(p.grad.isfinite().all()), name


@pytest.mark.parametrize("spec", SPECS)
def test_cross_attention_of_the_last_positions_equals_self_attention(spec: str) -> None:
    """Queries are the last T of S positions: a cached decode step sees what the full pass sees."""
    attn = layer(spec, num_kv_heads=1 if spec == "standard:1" else 2)
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    assert_close(attn(x[:, 6:], x), attn(x)[:, 6:])


def test_contraction_is_the_cheapest_and_does_not_change_the_result() -> None:
    attn = layer("bilinear-btt:2", qk_norm=False)
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    full = attn(x)
    orders = set()
    for T in (1, 8):
        choice = attn.scoring.matrix.contraction(T, 8)
        assert attn.cost(T, 8).contraction == choice.order
        assert choice.flops == min(choice.alternatives.values())
        orders.add(choice.order)
        assert_close(attn(x[:, 8 - T :], x), full[:, 8 - T :])
    assert "formed_left" in orders


@pytest.mark.parametrize("spec", ["standard", "mlr:4|2|1|1", "mlr:4|4,values=4|4", "global-window:4|4@3", "window:3"])
def test_every_layout_has_shapes_on_the_meta_device(spec: str) -> None:
    with torch.device("meta"):
        attn = sa.Attention.from_spec(spec, embed_dim=32, num_heads=4, context_length=16)
        out = attn(torch.empty(2, 16, 32))
    assert (out.device.type, out.shape) == ("meta", (2, 16, 32))


@pytest.mark.parametrize("spec", ["standard", "bilinear-btt:1", "bilinear-btt:2", "bilinear-mlr:4|2|2"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("norm", [True, False])
def test_cost_is_what_a_forward_pass_executes(spec: str, groups: int, norm: bool) -> None:
    with torch.device("meta"):
        attn = sa.Attention.from_spec(
            spec, embed_dim=32, num_heads=4, context_length=8, is_causal=False, num_kv_heads=groups, qk_norm=norm
        )
        x = torch.empty(1, 8, 32)
        with FlopCounterMode(display=False) as counter:
            attn(x)
    assert counter.get_total_flops() == attn.cost(8).flops


def test_levels_and_windows_cost_less() -> None:
    plain = layer("standard").cost(8)
    assert layer("mlr:4|2|2").cost(8).score_flops < plain.score_flops
    assert layer("window:2").cost(8).score_flops < plain.score_flops
    assert layer("mlr:4|2|2").cost(8).key_cache_numbers < plain.key_cache_numbers


def test_rotary_gets_positions_and_both_sides() -> None:
    seen = []

    def rotary(x, positions):
        seen.append((x.shape[-1], positions.tolist()))
        return x

    x = torch.randn(1, 8, 32)
    sa.Attention(32, 4, rotary=rotary)(x[:, 5:], x)
    assert seen == [(8, [5, 6, 7]), (8, list(range(8)))]


def test_padding_on_the_right_is_a_mask_of_keys() -> None:
    module = sa.Attention(32, 4, layout=sa.LevelLayout((4, 4), (8, 4)), is_causal=False).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    is_padding = torch.arange(9) >= torch.tensor([9, 6])[:, None]
    out = module(x, attn_mask=~is_padding[:, None, None])
    assert_close(out[:1], module(x[:1]))
    assert_close(out[1:, :6], module(x[1:, :6]))


def test_padding_and_packing_pass_through() -> None:
    attn = layer("mlr:4|2|2")
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    packed = attn(x, cu_seqlens=torch.tensor([0, 3, 8]))
    assert_close(packed[:, 3:], attn(x[:, 3:]))
    padded = attn(x, left_padding=torch.tensor([3]))
    assert_close(padded[:, 3:], attn(x[:, 3:]))


def test_block_and_dropout() -> None:
    block = TransformerBlock(layer("standard", dropout=0.5), dropout=0.5).double()
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.Attention(30, 4), "num_heads must divide embed_dim: got 4 heads and embed_dim 30"),
        (lambda: sa.Attention(32, 4, 3), "num_kv_heads must divide"),
        (lambda: sa.Attention(32, 4, 0.1), "num_kv_heads, the third argument, .* give options such as dropout by name"),
        (lambda: sa.Attention(32, 0), "num_heads must be an int of at least 1, got 0"),
        (
            lambda: sa.Attention(32, 4, layout=sa.LevelLayout((4, 3), (8, 4))),
            r"\(embed_dim / num_heads\): expected 8, got 4\|3 = 7",
        ),
        (
            lambda: layer("bilinear-btt:1+mlr:4|2|2"),
            r"BTT: expected 32, got 4\|2\|2 = 8; in the same proportions: 16\|8\|8",
        ),
        (lambda: sa.Attention(32, 4, window=0), "window"),
        (lambda: sa.Attention(32, 4, dropout=1.0), "dropout"),
        (lambda: layer("bilinear-mlr:1|1|1|1|1|1|1"), "level 7: 64 blocks must divide"),
        (lambda: sa.scoring.BTT(rank=0), "BTT rank"),
        (lambda: sa.scoring.MLR(ranks=(2, 0)), "level 2"),
    ],
)
def test_bad_settings_are_named(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_bad_input_is_named() -> None:
    with pytest.raises(ShapeError, match=r"\(batch, length, 32\), got \(2, 8, 31\)"):
        layer("standard")(torch.zeros(2, 8, 31, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"x\[None\] is a batch of one"):
        layer("standard")(torch.zeros(8, 32, dtype=torch.float64))
    with pytest.raises(ShapeError, match="embed token ids first"):
        layer("standard")(torch.zeros(2, 8, dtype=torch.int64))


def test_scripted_use_in_a_module_and_state() -> None:
    first, second = layer("bilinear-mlr:4|2|2"), layer("bilinear-mlr:4|2|2")
    with torch.no_grad():
        for p in second.parameters():
            p.add_(1)
    second.load_state_dict(first.state_dict())
    x = torch.randn(1, 8, 32, dtype=torch.float64)
    assert torch.equal(first(x), second(x))
    assert isinstance(first, nn.Module)


def test_hierarchical_values_by_spec() -> None:
    attn = sa.Attention.from_spec("mlr:8|4|4,values=2|6|8", embed_dim=32, num_heads=2, context_length=64)
    plain = sa.Attention.from_spec("mlr:8|4|4", embed_dim=32, num_heads=2, context_length=64)
    plain.load_state_dict(attn.state_dict())
    x = torch.randn(1, 64, 32)
    assert not torch.allclose(attn(x), plain(x))
    saved = plain.cost(64).value_flops - attn.cost(64).value_flops
    assert saved == 2 * (plain.layout.value_flops(64, 16) - attn.layout.value_flops(64, 16))
    with pytest.raises(ConfigError, match=r"expected 16, got 2\|6\|9 = 17"):
        sa.Attention.from_spec("mlr:8|4|4,values=2|6|9", embed_dim=32, num_heads=2, context_length=64)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith("global-window")])
@pytest.mark.parametrize("rotary", [None, sa.Rotary()])
def test_weights_give_the_output(spec, rotary) -> None:
    """Of whole texts with padding, packing or a mask, and of tokens after those in a cache."""
    attention = layer(spec, rotary=rotary).eval()
    x = torch.randn(2, 11, 32, dtype=torch.float64)
    shown = torch.rand(2, 1, 11, 11) < 0.7
    shown |= torch.eye(11, dtype=torch.bool)

    def merged(weights, states):
        values = attention.value_proj(states).unflatten(-1, (4, 8)).transpose(1, 2)
        return attention.out_proj((weights @ values).transpose(1, 2).flatten(2))

    for options in ({}, {"left_padding": torch.tensor([0, 3])}, {"attn_mask": shown}):
        expected = attention(x, **options)
        found = merged(attention.weights(x, **options), x)
        assert_close(found[0], expected[0])
        assert_close(found[1, 3:], expected[1, 3:])
    packed = {"cu_seqlens": torch.tensor([0, 4, 11])}
    assert_close(merged(attention.weights(x[:1], **packed), x[:1]), attention(x[:1], **packed))
    with torch.no_grad():
        cache = attention.new_cache()
        attention(x[:, :6], cache=cache)
        weights = attention.weights(x[:, 6:], cache=cache)
        assert cache.length == 6
        assert_close(merged(weights, x), attention(x)[:, 6:])
        assert_close(attention(x[:, 6:], cache=cache), attention(x)[:, 6:])
