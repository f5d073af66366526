"""For every scoring x layout x window x rotary: prefill and decoding in any chunking is one forward pass."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import structattn as sa
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.testing.tolerances import assert_close

E, H = 16, 4
SCORINGS = {
    "low rank": sa.scoring.Standard(),
    "wide low rank": sa.scoring.Standard(rank=20),
    "btt": sa.scoring.BTT(rank=1),
    "mlr": sa.scoring.MLR(ranks=(2, 1, 1)),
    "mlr wider than E": sa.scoring.MLR(ranks=(4, 4, 4)),
    "monarch": sa.scoring.Matrix(matrix="monarch"),
    "dense": sa.scoring.Matrix(matrix="dense"),
    "butterfly": sa.scoring.Matrix(matrix="butterfly"),
}


def layout_of(name, dim):
    match name:
        case "plain":
            return None
        case "levels":
            return sa.LevelLayout((dim - 2, 1, 1), (32, 16, 4))
        case "paper, values":
            return sa.LevelLayout((dim - 2, 1, 1), (32, 8, 8), "paper", (2, 1, 1))
        case "segments":
            return sa.LevelLayout.from_boundaries((dim - 2, 2), [(0, 11, 30)])
        case "global window":
            return sa.GlobalWindowLayout((dim - 2, 2), 6)
    raise AssertionError(name)


def module(scoring, layout, *, groups=2, window=None, rotary=None, qk_norm=True, bias=False, seed=0):
    torch.manual_seed(seed)
    form = SCORINGS[scoring]
    attention = sa.Attention(
        E, H, groups, form, layout_of(layout, form.feature_dim(E, H)),
        window=window, rotary=rotary, qk_norm=qk_norm, bias=bias,
    ).double()  # fmt: skip
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention.requires_grad_(False)


def cut(total, sizes):
    found, left = [], total
    while left:
        found.append(min(left, sizes[len(found) % len(sizes)]))
        left -= found[-1]
    return found


@given(
    scoring=st.sampled_from(sorted(SCORINGS)),
    layout=st.sampled_from(["plain", "levels", "paper, values", "segments", "global window"]),
    groups=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, None, 3, 9]),
    split=st.sampled_from([None, None, "low_far", "interleaved", "per_level"]),
    qk_norm=st.booleans(),
    bias=st.booleans(),
    length=st.integers(1, 45),
    sizes=st.lists(st.sampled_from([1, 1, 2, 5, 17, 40]), min_size=1, max_size=4),
    padding=st.one_of(st.none(), st.tuples(*[st.integers(0, 20)] * 2)),
    keys=st.sampled_from(["smaller", "features", "hidden"]),
    with_mask=st.booleans(),
)
def test_cached_is_uncached(
    scoring, layout, groups, window, split, qk_norm, bias, length, sizes, padding, keys, with_mask
) -> None:
    window = None if layout == "global window" else window
    rotary = None if split is None else sa.Rotary(split=split)
    attention = module(
        scoring, layout, groups=groups, window=window, rotary=rotary, qk_norm=qk_norm, bias=bias, seed=length
    )
    padding = None if padding is None else torch.tensor(padding).clamp(max=length)
    x = torch.randn(2, length, E, dtype=torch.float64)
    attention.backend = "reference"
    mask = torch.rand(2, 1, 1, length) > 0.3 if with_mask else None
    expected = attention(x, left_padding=padding, attn_mask=mask)
    attention.backend = "auto"
    cache = attention.new_cache(left_padding=padding, keys=keys, page_size=8)
    for _ in range(2):
        outs, first = [], 0
        for size in cut(length, sizes):
            own = None if mask is None else mask[..., : first + size]
            outs.append(attention(x[:, first : first + size], cache=cache, attn_mask=own))
            first += size
        assert_close(torch.cat(outs, dim=1), expected)
        cache.reset()


@pytest.mark.parametrize("scoring", sorted(SCORINGS))
@pytest.mark.parametrize("keys", ["features", "hidden"])
def test_reorder_crop_and_files_with_both_kinds_of_keys(tmp_path, scoring, keys) -> None:
    attention = module(scoring, "levels")
    x = torch.randn(3, 30, E, dtype=torch.float64)
    rows = torch.tensor([2, 0, 0])
    expected = attention(torch.cat([x[rows, :22], x[:, 22:]], dim=1))
    cache = attention.new_cache(keys=keys)
    attention(x[:, :23], cache=cache)
    cache.crop(22)
    cache.reorder(rows)
    cache.save(tmp_path / "cache.safetensors")
    latent = None if cache.latent is None else attention.latent
    for found in (cache, sa.LevelCache.load(tmp_path / "cache.safetensors", latent=latent)):
        out = torch.cat([attention(x[:, i : i + 1], cache=found) for i in range(22, 30)], dim=1)
        assert_close(out, expected[:, 22:])
    if keys == "hidden" and cache.latent is not None:
        with pytest.raises(ConfigError, match="keeps the hidden state: give the latent of its layer"):
            sa.LevelCache.load(tmp_path / "cache.safetensors")
    elif keys == "features":
        with pytest.raises(ConfigError, match="it takes no latent"):
            sa.LevelCache.load(tmp_path / "cache.safetensors", latent=attention.latent)


def test_the_smaller_of_features_and_hidden_state_is_kept() -> None:
    # One numbers the heads together: E, and one gain per head and norm.
    btt = module("btt", "plain")
    x = torch.randn(1, 20, E, dtype=torch.float64)
    for attention, keeps, per_token in (
        (btt, "hidden state", E + H),
        (module("btt", "plain", qk_norm=False), "key features", E),  # keys are the hidden state itself
        (module("btt", "plain", rotary=sa.Rotary()), "hidden state", E),
        (module("low rank", "plain", groups=4), "key features", E),
        (module("low rank", "plain", groups=1), "key features", E // H),
        (module("mlr", "plain", groups=4), "hidden state", E + 4 * 3),
        (module("mlr", "plain", groups=1), "key features", 2 + 2 + 4),
    ):
        cache = attention.new_cache(max_length=20)
        attention(x, cache=cache)
        assert cache.keeps == keeps
        assert cache.key_nbytes == 20 * 8 * per_token
        assert cache.key_nbytes == 8 * attention.cost(20).key_cache_numbers
        assert keeps in repr(cache)
    forced = btt.new_cache(keys="features", max_length=20)
    btt(x, cache=forced)
    assert forced.key_nbytes == 20 * 8 * E * H


def test_no_keys_are_made_again_from_absorbed_states(monkeypatch) -> None:
    attention = module("btt", "levels")
    x = torch.randn(1, 20, E, dtype=torch.float64)
    expected = attention(x)
    cache = attention.new_cache()
    attention(x[:, :19], cache=cache)

    def refuse(*_):
        raise AssertionError("keys were made from all states")

    monkeypatch.setattr(type(cache.latent), "keys", refuse)
    assert_close(attention(x[:, 19:], cache=cache), expected[:, 19:])


@pytest.mark.parametrize("scoring", ["low rank", "btt", "mlr"])
@pytest.mark.parametrize("layout", ["plain", "levels"])
@pytest.mark.parametrize("padding", [None, (0, 3)])
@pytest.mark.parametrize("keys", ["features", "hidden"])
def test_autocast(scoring, layout, padding, keys) -> None:
    attention = module(scoring, layout).float()
    x = torch.randn(2, 20, E)
    padding = None if padding is None else torch.tensor(padding)
    expected = attention(x, left_padding=padding)
    with torch.autocast("cpu", torch.bfloat16):
        whole = attention(x, left_padding=padding)
        cache = attention.new_cache(keys=keys, left_padding=padding)
        steps = [attention(x[:, :15], cache=cache), *(attention(x[:, i : i + 1], cache=cache) for i in range(15, 20))]
    real = torch.ones(2, 20, 1) if padding is None else (torch.arange(20) >= padding[:, None])[..., None]
    for out in (whole, torch.cat(steps, dim=1)):
        error = float(((out - expected) * real).norm() / (expected * real).norm())
        assert error < 0.1, f"relative error {error}"  # scores of several tens magnify what bfloat16 rounds


def test_hidden_states_carry_no_gradient() -> None:
    attention = module("btt", "plain").requires_grad_(True)
    cache = attention.new_cache(keys="hidden")
    x = torch.randn(1, 6, E, dtype=torch.float64)
    for step in range(6):
        attention(x[:, step : step + 1], cache=cache).sum().backward()
    assert not any(page.buffers[0].requires_grad for store, _ in cache._contents.stores() for page in store.pages)


def test_mistakes() -> None:
    attention = module("low rank", "levels")
    x = torch.randn(1, 4, E, dtype=torch.float64)
    with pytest.raises(ConfigError, match="the cache is of another layer"):
        attention(x, cache=sa.LevelCache())
    with pytest.raises(ConfigError, match="the cache is of another layer"):
        attention(x, cache=sa.LevelCache(attention.layout, window=3))
    with pytest.raises(ConfigError, match="leave context, attn_bias, cu_seqlens and left_padding at None"):
        attention(x, cache=attention.new_cache(), left_padding=torch.tensor([1]))
    with pytest.raises(ConfigError, match="unknown keys"):
        attention.new_cache(keys="best")
    with pytest.raises(ShapeError, match=r"x must have shape \(batch, length, 16\)"):
        attention(x[..., :3], cache=attention.new_cache())
    with pytest.raises(ConfigError, match="is_causal=False"):
        sa.Attention(E, H, is_causal=False).new_cache()
    rotary = module("btt", "plain", rotary=sa.Rotary())
    with pytest.raises(CacheError, match="there is no absorbed query"):
        rotary.latent.absorbed(torch.zeros(1, H, 1, E))
