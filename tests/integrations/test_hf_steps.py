"""Decoding steps of structurized models in C++: the logits of a call without a cache, and nothing is left out
when a call differs.
"""

import copy

import pytest
import torch
import transformers
from hf_models import generate, gpt2, llama, tokens, trained

from structattn.cache import contents
from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers import level_cache, register_attention, structurize
from structattn.integrations.transformers.attention.next_token import KnownCall
from structattn.layers.head_orders import HeadOrders
from structattn.testing.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("built")

SPECS = ("standard", "mlr:4|2|2", "mlr:4|2|2,values=4|2|2", "sliding:4|2|2@-|9|4", "window:6", "global-window:4|4@5")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call of a layer that is compared with the one before, whether it went without checks."""
    found: list[bool] = []
    again = KnownCall.again

    def noted(*args):
        out = again(*args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(KnownCall, "again", noted)
    return found


def step(model, ids, cache, **options):
    return model(ids, past_key_values=cache, use_cache=True, **options).logits


@torch.no_grad()
@pytest.mark.parametrize("order", [None, ((1, 0, 2, 3, 7, 6, 5, 4), (7, 6, 5, 4, 3, 2, 1, 0))])
@pytest.mark.parametrize("spec", SPECS)
def test_steps_give_the_logits_of_whole_texts(spec, order, known) -> None:
    model = structurize(trained(llama), spec)
    for layer in model.model.layers if order else ():
        layer.self_attn.reorder = HeadOrders(order)
    ids = tokens(2, 30)
    whole = model(ids).logits
    cache = level_cache(model)
    found = [step(model, ids[:, :7], cache)]
    found += [step(model, ids[:, t : t + 1], cache, attention_mask=torch.ones(2, t + 1)) for t in range(7, 30)]
    assert_close(torch.cat(found, dim=1), whole)
    assert known == [True] * 2 * 22  # of two layers, all but the first step


@torch.no_grad()
def test_another_call_is_checked(known) -> None:
    model = structurize(trained(llama), "mlr:4|2|2")
    ids = tokens(1, 30)
    cache, start = level_cache(model), 10
    step(model, ids[:, :start], cache)
    for t in range(start, start + 3):
        step(model, ids[:, t : t + 1], cache)
    del known[:]
    one = ids[:, 13:14]
    plain = step(model, one, copy.deepcopy(cache))
    hidden = torch.ones(1, 14)
    hidden[:, 5] = 0
    expected = step(model, one, copy.deepcopy(cache), attention_mask=hidden)  # a copy has no call before it
    assert_close(step(model, one, cache, attention_mask=hidden), expected)
    assert not torch.allclose(expected, plain)
    cache.crop(-1)
    weights = model(one, past_key_values=cache, output_attentions=True).attentions
    assert weights[0].shape == (1, 4, 1, 14)
    cache.crop(-1)
    assert_close(step(model, one, cache), plain)
    cache.crop(-1)
    del known[:]
    hidden[:, :3] = 0
    with pytest.raises(CacheError, match="the left padding changed"):
        step(model, one, cache, attention_mask=hidden)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    with pytest.raises(ConfigError, match=r"attention dropout \(0.5\) cannot be applied"):
        step(model, one, cache)
    model.eval()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match="was changed to 'sdpa'"):
        step(model, one, cache)
    model.config._attn_implementation = "structurized"
    with pytest.raises(ConfigError, match="input_ids must be from 0 to"):
        step(model, one + 1000, cache)
    with pytest.raises(ConfigError, match="the cache is of another layer"):
        step(copy.deepcopy(model), one, cache)
    cache.layers[1].crop(-1)
    with pytest.raises(CacheError, match="different numbers of tokens"):
        step(model, one, cache)
    assert not any(known)
    cache.layers[0].crop(-1)
    assert_close(step(model, ids[:, 12:13], cache), model(ids[:, :13]).logits[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {}])
def test_generation(options, known) -> None:
    model = structurize(trained(llama), "mlr:4|2|2,values=4|2|2")
    ids = tokens(1, 9).repeat(1, 2)
    expected = generate(model, ids, use_cache=False, **({} if "num_beams" not in options else options))
    assert torch.equal(generate(model, ids, past_key_values=level_cache(model), **options), expected)
    assert torch.equal(generate(model, ids, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_registered_attention(make, known) -> None:
    model = trained(make)
    model.set_attn_implementation(register_attention("mlr:4|4", name=f"steps_{make.__name__}", context_length=64))
    ids = tokens(2, 20)
    whole, cache = model(ids).logits, transformers.DynamicCache(config=model.config)
    cache = level_cache(model)
    found = [step(model, ids[:, :7], cache)]
    found += [step(model, ids[:, t : t + 1], cache) for t in range(7, 20)]
    assert_close(torch.cat(found, dim=1), whole)
    assert known == [True] * 2 * 12


@torch.no_grad()
def test_without_the_code_nothing_is_known(known, monkeypatch) -> None:
    monkeypatch.setattr(contents, "is_here", lambda _: False)
    model = structurize(trained(llama), "mlr:4|2|2")
    ids, cache = tokens(1, 12), level_cache(model)
    found = [step(model, ids[:, :7], cache)]
    found += [step(model, ids[:, t : t + 1], cache) for t in range(7, 12)]
    assert_close(torch.cat(found, dim=1), model(ids).logits)
    assert not any(known)
