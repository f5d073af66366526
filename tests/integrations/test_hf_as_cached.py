"""Training of a model whose cache chooses tokens: each token sees what the cache would still have."""

import pytest
import torch
from hf_models import NONE, SOME, chosen_llama

import structattn as sa
from structattn.cache.chosen_tokens import seen_pairs
from structattn.errors import ConfigError
from structattn.integrations.transformers import as_cached, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("storage", [SOME, NONE, (SOME, None), (NONE, SOME)])
def test_the_pairs_are_those_of_single_tokens(storage) -> None:
    torch.manual_seed(0)
    length = 90
    q, k, v = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
    scores = torch.randn(2, 2, length)
    seen = seen_pairs(storage, scores)
    assert not bool(seen.triu(1).any())
    assert 0.2 < float(seen.float().mean()) < 0.45
    whole = sa.structured_attention(q, k, v, attn_mask=seen.repeat_interleave(2, dim=1), backend="reference")
    cache = sa.LevelCache(None, storage=storage)
    for at in range(length):
        one = [x[:, :, at : at + 1] for x in (q, k, v)]
        out = cache.attend(*one, token_scores=scores[:, :, at : at + 1])
        torch.testing.assert_close(out, whole[:, :, at : at + 1], atol=1e-5, rtol=1e-5)


@pytest.fixture
def model():
    return chosen_llama([SOME, [None, NONE]])


IDS = torch.randint(50, (2, 70), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def stepped(model):
    cache = level_cache(model)
    return torch.cat([model(IDS[:, at : at + 1], **{CACHE: cache}).logits for at in range(IDS.shape[1])], dim=1)


def test_training_sees_what_decoding_sees(model) -> None:
    expected = stepped(model)
    with torch.no_grad():
        whole = model(IDS, use_cache=False).logits
        with as_cached(model):
            ours = model(IDS, use_cache=False).logits
        assert torch.equal(model(IDS, use_cache=False).logits, whole)  # as before
    assert not torch.allclose(whole, expected, atol=1e-2)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    logits = model.train()(IDS, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    logits.square().sum().backward()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert float(getattr(model.model.layers[0].self_attn, name).weight.grad.abs().sum()) > 0


def test_padding_at_the_end_changes_nothing(model) -> None:
    model.train()
    whole = model(IDS, use_cache=False).logits
    mask = torch.ones_like(IDS)
    mask[1, 60:] = 0
    padded = model(IDS.masked_fill(mask == 0, 0), attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(padded[1, :60], whole[1, :60], atol=1e-5, rtol=1e-5)


def test_padded_and_packed_rows_are_those_alone(model) -> None:
    model.train()
    lengths = (70, 45)
    alone = [model(IDS[row : row + 1, :length], use_cache=False).logits[0] for row, length in enumerate(lengths)]
    ids, mask = torch.zeros((2, 2, 70), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, 70 - length :] = IDS[row, :length]
        mask[row, 70 - length :] = 1
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), use_cache=False).logits
    packed = torch.cat([IDS[row : row + 1, :length] for row, length in enumerate(lengths)], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(packed, position_ids=positions, use_cache=False).logits[0].split(lengths)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(padded[row, 70 - length :], alone[row], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(packed[row], alone[row], atol=1e-4, rtol=1e-4)
    padded[mask.bool()].square().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@torch.no_grad()
def test_other_models_stay_as_they_are(model) -> None:
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "structattn": None})
    plain = structurize(transformers.LlamaForCausalLM(config), "standard", storage=sa.Storage(8, 8)).train()
    with as_cached(plain):
        inside = plain(IDS, use_cache=False).logits
    assert torch.equal(inside, plain(IDS, use_cache=False).logits)
    with pytest.raises(ConfigError, match="model must be a model, got 'x'"), as_cached("x"):
        pass
