"""Models of transformers with sink tokens, and with a cache of 8 and 4 bits."""

import copy
import gc
import weakref

import hf_models as models
import pytest
import torch
import transformers
from transformers import AttentionInterface

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    level_cache,
    load_structurized,
    register_attention,
    structurize,
)
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
    torch.manual_seed(0)
    model, tokens = structurize(models.llama().double().eval(), "standard"), ids()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    both = model.generate(tokens, attention_mask=mask, past_key_values=level_cache(model, storage=STORAGE), **options)
    for row, first in ((0, 7), (1, 0)):
        one = tokens[row : row + 1, first:]
        # All tokens are real, those too that are the padding token.
        alone = {"attention_mask": torch.ones_like(one), "past_key_values": level_cache(model, storage=STORAGE)}
        found = model.generate(one, **alone, **options)
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


@torch.no_grad()
def test_the_storage_of_a_model_is_saved_with_it(tmp_path) -> None:
    torch.manual_seed(0)
    plain, tokens = models.llama().double().eval(), ids(1, 40)
    exact = structurize(copy.deepcopy(plain), "standard")
    model = structurize(plain, "standard", storage=STORAGE)
    model.save_pretrained(tmp_path)
    options = {"max_new_tokens": 15, "do_sample": False, "return_dict_in_generate": True}
    for each in (model, load_structurized(tmp_path, dtype=torch.float64).eval()):
        found = each.generate(tokens, **options)
        assert all(layer.storage == STORAGE for layer in found.past_key_values.layers)
        cache = level_cache(exact, storage=STORAGE)
        assert torch.equal(found.sequences, exact.generate(tokens, past_key_values=cache, **options).sequences)
        assert level_cache(each).layers[0].storage == STORAGE
    model.config.structattn["storage"] = {"bits": 4}
    with pytest.raises(
        ConfigError, match=r"config.structattn\['storage'\] is no storage: a storage has the fields key_bits, "
    ):
        level_cache(model)


@torch.no_grad()
@pytest.mark.parametrize("spec", ["standard", "heads:standard*2/window:9,sink_tokens=3*2"])
def test_layers_and_heads_in_bits_of_their_own(spec, tmp_path) -> None:
    torch.manual_seed(0)
    of_layers = [[None, STORAGE, None, STORAGE], STORAGE]
    plain, tokens = models.llama(num_key_value_heads=4).double().eval(), ids()
    exact = structurize(copy.deepcopy(plain), spec)
    model = structurize(plain, spec, storage=of_layers)
    whole = model(tokens, past_key_values=level_cache(model)).logits
    assert_close(exact(tokens, past_key_values=level_cache(exact, storage=of_layers)).logits, whole)
    cache = level_cache(model)
    assert [layer.storage for layer in cache.layers] == [tuple(of_layers[0]), STORAGE]
    parts = [
        model(tokens[:, a:b], past_key_values=cache).logits
        for a, b in [(0, 17), (17, 40), *((n, n + 1) for n in range(40, 50))]
    ]
    assert_close(torch.cat(parts, 1), whole)
    kept = [level_cache(exact, storage=storage) for storage in (STORAGE, None)]
    for other in kept:
        exact(tokens, past_key_values=other)
    fewest, most = (sum(layer.nbytes for layer in other.layers) for other in kept)
    assert fewest < sum(layer.nbytes for layer in cache.layers) < most
    model.save_pretrained(tmp_path)
    loaded = load_structurized(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.structattn["storage"] == model.config.structattn["storage"]
    options = {"max_new_tokens": 15, "do_sample": False}
    assert torch.equal(loaded.generate(tokens, **options), model.generate(tokens, **options))


@torch.no_grad()
def test_a_model_of_ours_stores_fewer_bits() -> None:
    torch.manual_seed(0)
    config = StructAttnConfig(
        attention="mlr:4|2|2",
        rotary=str(sa.Rotary()),
        vocab_size=models.VOCAB,
        hidden_size=models.DIM,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=models.CONTEXT,
    )
    model, tokens = StructAttnForCausalLM(config).double().eval(), ids()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for storage in (STORAGE, [None, [None, STORAGE, None, STORAGE]]):
        cache = level_cache(model, storage=storage)
        whole = model(tokens, past_key_values=level_cache(model, storage=storage)).logits
        assert_close(model(tokens[:, :31], past_key_values=cache).logits, whole[:, :31])
        assert_close(model(tokens[:, 31:], past_key_values=cache).logits, whole[:, 31:])
        assert bool((whole - model(tokens).logits).abs().max() > 1e-6)


def test_a_storage_is_one_of_ours() -> None:
    model = models.llama(num_key_value_heads=4)
    for storage, message in (
        ([STORAGE] * 4, "a list as storage needs 2 entries, one for each layer, got 4: the entry of a layer may be a"),
        ([None, [STORAGE] * 3], "a storage for each of 3 key heads, and the layer has 4"),
        ([None, [STORAGE, 4, None, None]], "the storage of key head 1 must be a Storage or None"),
    ):
        with pytest.raises(ConfigError, match=message):
            structurize(model, "standard", storage=storage)

    with pytest.raises(ConfigError, match="storage must be a Storage"):
        level_cache(structurize(models.llama(), "standard"), storage="4 bits")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="storage must be a Storage"):
        structurize(models.llama(), "standard", storage="4 bits")  # type: ignore[arg-type]


@pytest.mark.parametrize("padding", [0, 3])
@torch.no_grad()
def test_the_weights_of_a_prompt_are_those_that_made_its_output(padding) -> None:
    """Far tokens of a prompt are read in fewer bits, also by its own queries."""
    model, tokens = structurize(models.llama().double().eval(), "standard"), ids()
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    cache = level_cache(model, storage=STORAGE)
    whole = model(tokens, mask, output_attentions=True, past_key_values=level_cache(model, storage=STORAGE))
    model(tokens[:, :5], mask[:, :5], past_key_values=cache)
    parts = model(tokens[:, 5:], mask, output_attentions=True, past_key_values=cache)
    for found, expected in zip(whole.attentions, parts.attentions, strict=True):
        assert_close(found[:, :, 5:], expected)
    exact = model(tokens, mask, output_attentions=True, use_cache=False).attentions[0]
    assert (whole.attentions[0] - exact).abs().max() > 1e-6


def test_a_wrapper_that_calls_forward_trains_too() -> None:
    """As adapters do: it hands on arguments that it was not given."""

    class Wrapper(torch.nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args, **options):
            return self.model.forward(*args, **options)

    model = structurize(models.llama(), "standard", storage=STORAGE).train()
    assert_close(Wrapper(model)(ids(), labels=ids()).loss, model(ids(), labels=ids()).loss)


@torch.no_grad()
def test_a_copied_cache_goes_on_alone_and_a_reset_one_holds_nothing() -> None:
    model, tokens = structurize(models.llama().eval(), "standard"), ids()
    cache = level_cache(model)
    for first, end in ((0, 20), (20, 21), (21, 22)):
        model(tokens[:, first:end], past_key_values=cache)
    model(tokens[:, 22:30], past_key_values=copy.copy(cache))
    assert [layer.get_seq_length() for layer in cache.layers] == [22, 22]
    held = [weakref.ref(layer.level_cache) for layer in cache.layers]
    cache.reset()
    gc.collect()
    assert all(one() is None for one in held)


@torch.no_grad()
def test_values_of_other_dimensions_than_keys_have_levels_too() -> None:
    sizes = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 12, "kv_lora_rank": 16, "q_lora_rank": None}
    experts = {"first_k_dense_replace": 2, "n_routed_experts": 4}
    sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.DeepseekV3Config(vocab_size=models.VOCAB, num_key_value_heads=4, **sizes, **experts)
    model, tokens = transformers.DeepseekV3ForCausalLM(config).eval(), ids(length=40)
    expected = model(tokens).logits
    for name, values, message in (("fits", "6|6", None), ("short", "4|4", "value dimension .* expected 12, got")):
        spec = f"mlr:4|4@64|64,scaling=standard,values={values}"
        model.set_attn_implementation(register_attention(spec, name=f"values_{name}", rotary_split=None))
        if message is None:
            assert_close(model(tokens).logits, expected)
        else:
            with pytest.raises(ConfigError, match=message):
                model(tokens)


GROUPS_OF_10 = sa.Storage(4, 4, group_size=10, residual=2)


@pytest.mark.parametrize(
    ("make", "spec", "storage", "message"),
    [
        (models.llama, "standard", sa.Storage(key_bits=(8, 4)), "layer 0 .*key_bits needs .* expected 1, got 2"),
        (models.llama, "standard", [None, sa.Storage(value_bits=(8, 4))], "layer 1 .*value_bits needs"),
        (models.llama, "mlr:4|4", sa.Storage(4, 4, group_size=6, residual=6), "layer 0 .*divisor of 32.* got 6"),
        (models.llama, "heads:standard/mlr:4|4", sa.Storage((8, 4), 4, group_size=4, residual=4), "expected 1, got 2"),
        (models.llama4, "window:9,sink_tokens=2", None, "chunks of 24 tokens.*without sink_tokens"),
        (models.llama4, "mlr:4|4,sink_tokens=2", None, "chunks of 24 tokens.*without sink_tokens"),
        (models.llama4, "heads:standard/window:9,sink_tokens=2", None, "chunks of 24 tokens.*without sink_tokens"),
        (models.llama4, "standard", GROUPS_OF_10, "layer 0 .*divisor of 24.* got 10"),
    ],
)
def test_structurize_refuses_caches_that_no_call_could_make(make, spec, storage, message) -> None:
    model = make()
    kinds, config = [type(module) for module in model.modules()], model.config.to_dict()
    with pytest.raises(ConfigError, match=message):
        structurize(model, spec, storage=storage)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config.to_dict() == config


def test_layers_without_chunks_may_have_any_groups() -> None:
    model = models.llama4(num_hidden_layers=4, attention_chunk_size=8192)  # the last sees all tokens
    with pytest.raises(ConfigError, match="layer 2 .*divisor of 8192"):
        structurize(model, "standard", storage=[None, None, GROUPS_OF_10, None])
    structurize(model, "standard", storage=[None, None, None, GROUPS_OF_10])
    with torch.no_grad():
        assert model(ids(), use_cache=True).logits.isfinite().all()
