"""register_attention: equal to the definition on any decoder, and an error wherever a mask or a term would be
lost.
"""

import copy

import pytest
import torch
import transformers
from hf_models import (
    _SIZES,
    FAMILIES,
    HEAD_DIM,
    LAYERS,
    by_definition,
    drafting,
    generate,
    llama,
    padded,
    qwen2,
    tokens,
    trained,
)
from transformers.masking_utils import create_causal_mask

from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.integrations.transformers import level_cache, register_attention
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import SAME_MODEL, assert_close, relative_error

IDS, MASK = padded([tokens(1, 9)[0], tokens(1, 17, seed=2)[0]])
REAL = MASK.bool()
PLAIN = register_attention("standard", name="test_plain")
LEVELS = register_attention("mlr:4|2|2", name="test_levels", context_length=16)


def logits(model, ids=IDS, mask=MASK, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def on(model, name):
    model = copy.deepcopy(model)
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("split", ["low_far", "interleaved", None])
def test_by_the_definition(family, split) -> None:
    model = trained(FAMILIES[family])
    layout = LevelLayout.halving((4, 2, 2), 16)
    expected = by_definition(model, [layout] * LAYERS, split)
    name = register_attention("mlr:4|2|2", name=f"test_{split}", context_length=16, rotary_split=split)
    assert name == f"test_{split}"
    found = on(model, name)
    assert_close(logits(found)[REAL], logits(expected, use_cache=False)[REAL])
    assert_close(logits(on(model, PLAIN))[REAL], logits(model)[REAL])
    ids = IDS[1:]
    found(ids, labels=ids, use_cache=False).loss.backward()
    expected(ids, labels=ids, use_cache=False).loss.backward()
    for one, two in zip(found.parameters(), expected.parameters(), strict=True):
        assert_close(one.grad, two.grad, gradient=True)


def test_the_context_is_the_model_s_own_by_default() -> None:
    model = trained(llama)
    name = register_attention("mlr:4|4", name="test_context")
    expected = by_definition(
        model, [LevelLayout.halving((4, 4), _SIZES["max_position_embeddings"])] * LAYERS, "low_far"
    )
    ids = tokens(1, 40)
    assert_close(logits(on(model, name), ids, None), logits(expected, ids, None, use_cache=False))


OTHERS = {
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_SIZES, sliding_window=6)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**_SIZES, head_dim=HEAD_DIM, sliding_window=6, pad_token_id=0)
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**_SIZES, pad_token_id=0)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**_SIZES)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=50,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    ),
}


@pytest.mark.parametrize("family", OTHERS)
def test_other_decoders(family) -> None:
    torch.manual_seed(0)
    model = OTHERS[family]().double().eval()
    assert_close(logits(on(model, PLAIN))[REAL], logits(model)[REAL])
    text = generate(model, IDS, MASK)
    assert torch.equal(generate(on(model, PLAIN), IDS, MASK, past_key_values=level_cache(model)), text)
    levels = on(model, LEVELS)
    found = generate(levels, IDS, MASK, past_key_values=level_cache(model))
    assert torch.equal(found, generate(levels, IDS, MASK, use_cache=False))


def test_caches() -> None:
    model = on(trained(llama), LEVELS)
    for options in ({}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        expected = generate(model, IDS, MASK, new=12, use_cache=False, **options)
        cache = level_cache(model)
        assert torch.equal(generate(model, IDS, MASK, new=12, past_key_values=cache, **options), expected)
        assert torch.equal(generate(model, IDS, MASK, new=12, **options), expected)  # with transformers' dense cache
    found = []
    for options in ({"past_key_values": level_cache(model)}, {}, {"use_cache": False}):
        torch.manual_seed(4)
        found.append(generate(model, IDS, MASK, do_sample=True, **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    text = generate(model, IDS, MASK)
    for row in range(2):
        alone = IDS[row][REAL[row]][None]
        assert torch.equal(generate(model, alone, past_key_values=level_cache(model))[0, -12:], text[row, -12:])
    ids = tokens(1, 6)
    expected = generate(model, ids, new=12)
    for assistant in (trained(llama, seed=5), copy.deepcopy(model)):
        cache = level_cache(model)
        assert torch.equal(
            generate(model, ids, new=12, assistant_model=drafting(assistant), past_key_values=cache), expected
        )
    cache = level_cache(model)
    again = [generate(model, ids, past_key_values=cache)]
    cache.reset()
    again.append(generate(model, ids, past_key_values=cache))
    assert torch.equal(*again)


def test_packed_sequences() -> None:
    model = on(trained(llama), LEVELS)
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4, 17)]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    ids = torch.cat(prompts)[None]
    expected = torch.cat([logits(model, prompt[None], None) for prompt in prompts], 1)
    assert_close(logits(model, ids, None, position_ids=positions, use_cache=False), expected)
    with pytest.raises(ConfigError, match="use_cache=False"):
        logits(model, ids, None, position_ids=positions)
    with pytest.raises(ConfigError, match="use_cache=False"):
        logits(model, ids, None, position_ids=positions, past_key_values=level_cache(model))
    with pytest.raises(ConfigError, match="a batch of 2 rows"):
        logits(model, ids.expand(2, -1), None, position_ids=positions.expand(2, -1), use_cache=False)
    sliding = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    windows = on(trained(qwen2, **sliding), PLAIN)
    expected = torch.cat([logits(windows, prompt[None], None) for prompt in prompts], 1)
    assert_close(logits(windows, ids, None, position_ids=positions, use_cache=False), expected)


def test_dropout_passes_through() -> None:
    model = on(trained(llama, attention_dropout=0.5), LEVELS).train()
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(logits(model))
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().max() > 1e-3
    assert torch.equal(logits(model.eval()), logits(model))


def test_the_implementation_is_not_saved(tmp_path) -> None:
    on(trained(llama), LEVELS).save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config._attn_implementation == "sdpa"
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation=LEVELS)
    assert loaded.config._attn_implementation == LEVELS


# Guards


def test_masks_that_would_leak() -> None:
    model = on(trained(llama), LEVELS)
    cache = level_cache(model)
    logits(model, past_key_values=cache)
    with pytest.raises(ConfigError, match="expected 18 columns, got 1"):
        logits(model, IDS[:, :1], torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)
    with pytest.raises(CacheError, match="left padding changed"):
        logits(model, IDS[:, :1], None, past_key_values=cache)


def test_a_lost_mask() -> None:
    model = on(trained(llama), LEVELS)
    attention = model.model.layers[0].self_attn
    x = torch.randn(1, 5, 32, dtype=torch.float64)
    angles = model.model.rotary_emb(x, torch.arange(5)[None])
    with pytest.raises(ConfigError, match="no mask reached"):
        attention(x, angles, attention_mask=None)
    # a model that asks for the mask of another number of tokens
    mask = create_causal_mask(model.config, x[:, :4], None, None)
    with pytest.raises(ConfigError, match="4 queries and 4 keys, and the attention got 5 and 5"):
        attention(x, angles, attention_mask=mask)


def test_a_position_bias_is_added_to_the_scores() -> None:
    model = on(trained(llama), LEVELS)
    bias = torch.randn(1, 4, 17, 17, dtype=torch.float64)
    mask = bias.masked_fill(torch.ones(17, 17, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(model(IDS, position_bias=bias).logits, model(IDS, attention_mask=mask).logits)
    with pytest.raises(ShapeError, match="attn_mask"):
        model(IDS, position_bias=bias[..., 1:])


def test_chunks_of_llama_4() -> None:
    sizes = _SIZES | {"head_dim": HEAD_DIM, "attention_chunk_size": 4, "no_rope_layers": [1] * LAYERS}
    model = transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=48, num_local_experts=2)
    ).eval()
    for mask in (MASK, None):
        model.set_attn_implementation("sdpa")
        expected = model(IDS, attention_mask=mask, use_cache=False).logits
        found = on(model, PLAIN)(IDS, attention_mask=mask, use_cache=False).logits
        assert relative_error(found[REAL], expected[REAL]) <= SAME_MODEL


def test_own_mask_functions_are_not_known() -> None:
    model = on(trained(llama), PLAIN)

    def every_other(batch, head, query, key):
        return (query - key) % 2 == 0

    with pytest.raises(ConfigError, match="every_other.* does not know"):
        create_causal_mask(model.config, torch.zeros(1, 5, 32), None, None, and_mask_function=every_other)
    with pytest.raises(ConfigError, match="or_mask.* does not know"):
        create_causal_mask(model.config, torch.zeros(1, 5, 32), None, None, or_mask_function=every_other)


def test_windows_of_the_model() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    model = trained(qwen2, **sliding)
    plain = on(model, PLAIN)
    with pytest.raises(ConfigError, match="level_cache"):  # transformers drops keys that blocks are counted from
        generate(plain, IDS, MASK)
    assert torch.equal(generate(plain, IDS, MASK, past_key_values=level_cache(model)), generate(model, IDS, MASK))
    register_attention("window:4", name="test_window")
    with pytest.raises(ConfigError, match="has a sliding window, 5"):
        on(model, "test_window")(IDS)
    with pytest.raises(ConfigError, match="static cache"):
        generate(on(trained(llama), PLAIN), IDS, MASK, cache_implementation="static")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("bilinear-btt:1", {}, "cannot keep trained"),
        ("mlr:5|3", {}, "must be even"),
        ("mlr:4|4", {"rotary_split": "per_level"}, "separate frequencies"),
        ("mlr:4|4", {"name": "sdpa"}, "registered already"),
        ("mlr:4|4", {"name": "eager"}, "registered already"),
        ("mlr:4|4", {"name": "my_flash"}, "plain word"),
        ("mlr:4|4", {"name": "a b"}, "plain word"),
        ("mlr:4|4", {"name": "test_levels"}, "registered already"),
        ("mlr:4|4", {"context_length": 0}, "context_length"),
        ("mlr:4|4", {"backend": "tritn"}, "did you mean 'triton'"),
    ],
)
def test_refused_registrations(spec, options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        register_attention(spec, **{"name": "test_refused"} | options)


def test_registered_twice_and_ranks_that_do_not_fit() -> None:
    assert register_attention("mlr:4|2|2", name="test_levels", context_length=16) == LEVELS
    register_attention("mlr:8|8", name="test_wide")
    with pytest.raises(ConfigError, match="expected 8, got 8\\|8 = 16"):
        on(trained(llama), "test_wide")(IDS)
