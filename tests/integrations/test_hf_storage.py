"""Models of transformers with sink tokens, and with a cache of 8 and 4 bits."""

import hf_models as models
import pytest
import torch
from transformers import AttentionInterface

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import level_cache, register_attention, structurize
from structattn.testing.tolerances import assert_close

STORAGE = sa.Storage(key_bits=8, value_bits=4, group_size=4, residual=6)
SPECS = ["standard", "window:9,sink_tokens=3", "mlr:4|4@32|8,scaling=standard,sink_tokens=2"]


def ids(batch=2, length=50):
    return torch.randint(models.VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_prompts_chunks_and_steps_agree(spec) -> None:
    model, tokens = structurize(models.llama().double().eval(), spec), ids()
    whole = model(tokens, past_key_values=level_cache(model, storage=STORAGE)).logits
    cache = level_cache(model, storage=STORAGE)
    parts = [
        model(tokens[:, a:b], past_key_values=cache).logits
        for a, b in [(0, 17), (17, 40), *((n, n + 1) for n in range(40, 50))]
    ]
    assert_close(torch.cat(parts, 1), whole)
    exact = model(tokens, past_key_values=level_cache(model)).logits
    assert_close(exact, model(tokens).logits)
    is_quantized = spec != SPECS[1]  # a window that is no longer than the exact tokens stays exact
    assert bool((whole - exact).abs().max() > 1e-6) is is_quantized
    assert (whole - exact).abs().max() < 0.3 * exact.abs().max()


@torch.no_grad()
def test_padded_rows_are_those_of_each_prompt() -> None:
    model, tokens = structurize(models.llama().double().eval(), "standard"), ids()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    both = model.generate(tokens, attention_mask=mask, past_key_values=level_cache(model, storage=STORAGE), **options)
    for row, first in ((0, 7), (1, 0)):
        one = tokens[row : row + 1, first:]
        found = model.generate(one, past_key_values=level_cache(model, storage=STORAGE), **options)
        assert torch.equal(found[0, one.shape[1] :], both[row, tokens.shape[1] :])


@torch.no_grad()
def test_a_window_with_sink_tokens_is_the_mask_that_says_so() -> None:
    plain, tokens = models.llama().double().eval(), ids()
    step = torch.arange(50)
    distance = step[:, None] - step
    mask = (distance >= 0) & ((distance < 9) | (step < 3))
    expected = plain(tokens, attention_mask=mask.expand(2, 1, -1, -1)).logits
    name = register_attention("window:9,sink_tokens=3", name="sink_window")
    try:
        plain.set_attn_implementation(name)
        assert_close(plain(tokens).logits, expected)
    finally:
        AttentionInterface._global_mapping.pop(name, None)
    plain.set_attn_implementation("sdpa")
    model = structurize(plain, "window:9,sink_tokens=3")
    assert_close(model(tokens).logits, expected)
    cache = level_cache(model)
    parts = [model(tokens[:, n : n + 1], past_key_values=cache).logits for n in range(50)]
    assert_close(torch.cat(parts, 1), expected)


def test_a_storage_is_one_of_ours() -> None:
    with pytest.raises(ConfigError, match="storage must be a Storage"):
        level_cache(structurize(models.llama(), "standard"), storage="4 bits")  # type: ignore[arg-type]
