"""structurize with levels that slide."""

import pytest
import torch
from hf_models import FAMILIES, HEAD_DIM, LAYERS, by_definition, exact, generate, llama, padded, tokens, trained

from structattn.integrations.transformers import level_cache, load_structurized, structurize
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import assert_close

IDS, MASK = padded([tokens(1, 9)[0], tokens(1, 17, seed=2)[0]])
REAL = MASK.bool()


def logits(model, **options):
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, **options).logits


@pytest.mark.parametrize("values", [None, (3, 4, 1)], ids=["whole values", "values"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(family=["qwen3", "gpt2"], values=[(3, 4, 1)])
def test_levels(family, values, tmp_path) -> None:
    """By the definition, cached as uncached, a padded batch as each prompt, one cache of the size that the
    layout says, saved and loaded.
    """
    model = trained(FAMILIES[family])
    layout = LevelLayout.sliding((4, 2, 2), (None, 7, 3), value_ranks=values)
    expected = by_definition(model, [layout] * LAYERS, None if family == "gpt2" else "low_far")
    spec = "sliding:4|2|2@-|7|3" + ("" if values is None else ",values=" + "|".join(map(str, values)))
    structurize(model, spec)
    assert_close(logits(model)[REAL], logits(expected, use_cache=False)[REAL])
    text = generate(model, IDS, MASK, new=16, use_cache=False)
    cache = level_cache(model, max_length=40)
    assert torch.equal(generate(model, IDS, MASK, new=16, past_key_values=cache), text)
    heads = model.config.num_attention_heads if family == "gpt2" else model.config.num_key_value_heads
    numbers = layout.key_cache_size(40) + layout.value_cache_size(40, HEAD_DIM)
    assert cache.nbytes == LAYERS * 2 * heads * 8 * numbers  # two rows of float64
    for row in range(2):
        alone = IDS[row][REAL[row]][None]
        assert torch.equal(generate(model, alone, new=16)[0], text[row][-16 - alone.shape[1] :])
    model.save_pretrained(tmp_path)
    loaded = exact(load_structurized(tmp_path).eval())
    assert_close(logits(loaded)[REAL], logits(model)[REAL])


@pytest.mark.parametrize("spec", [f"sliding:{HEAD_DIM}@-", "sliding:4|2|2@-|-|-,values=2|2|4"])
def test_levels_without_a_limit_change_nothing(spec) -> None:
    model = trained(llama)
    before, text = logits(model), generate(model, IDS, MASK)
    structurize(model, spec)
    assert_close(logits(model)[REAL], before[REAL])
    assert torch.equal(generate(model, IDS, MASK), text)
