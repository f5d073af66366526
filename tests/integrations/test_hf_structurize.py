"""structurize: trained weights kept, scores by the definition, and everything that a trained model does still
works.
"""

import copy
import threading

import pytest
import torch
import transformers
from hf_models import (
    CONTEXT,
    FAMILIES,
    HEAD_DIM,
    LAYERS,
    VOCAB,
    by_definition,
    drafting,
    generate,
    gpt2,
    level_order,
    llama,
    padded,
    qwen2,
    qwen3,
    tokens,
    trained,
)

from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers import calibrate, level_cache, structurize
from structattn.integrations.transformers.structurize.modules import StructuredAttention
from structattn.layers.rotary import Rotary
from structattn.layers.rotary_order import Rotation, dimension_order, level_pairs
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import assert_close

IDS, MASK = padded([tokens(1, 9)[0], tokens(1, 17, seed=2)[0]])
REAL = MASK.bool()


def logits(model, ids=IDS, mask=MASK, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


@pytest.mark.parametrize("split", ["low_far", "interleaved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_level_changes_neither_logits_nor_text(family, split) -> None:
    model = trained(FAMILIES[family])
    before, text = logits(model), generate(model, IDS, MASK)
    weights = copy.deepcopy(model.state_dict())
    changed = structurize(model, f"mlr:{HEAD_DIM}", rotary_split=split)
    assert changed is model
    assert type(model).__name__.startswith("StructAttn")
    assert_close(logits(model)[REAL], before[REAL])
    assert torch.equal(generate(model, IDS, MASK), text)
    for name, weight in weights.items():
        assert torch.equal(model.state_dict()[name], weight), name


@pytest.mark.parametrize("split", ["low_far", "interleaved"])
@pytest.mark.parametrize("family", FAMILIES)
def test_levels_by_the_definition(family, split) -> None:
    model = trained(FAMILIES[family])
    layout = LevelLayout.halving((4, 2, 2), 16)
    expected = by_definition(model, [layout] * LAYERS, None if family == "gpt2" else split)
    plain = logits(model)
    structurize(model, "mlr:4|2|2", rotary_split=split, context_length=16)
    found = logits(model)
    assert_close(found[REAL], logits(expected, use_cache=False)[REAL])
    assert (found - plain)[REAL].abs().max() > 1e-3  # the levels do something


def test_gradients_by_the_definition() -> None:
    model = trained(qwen3)
    layout = LevelLayout.halving((4, 4), 16)
    expected = by_definition(model, [layout] * LAYERS, "low_far")
    structurize(model, "mlr:4|4", context_length=16)
    for one in (model, expected):
        loss = one(IDS, labels=IDS, use_cache=False).loss
        loss.backward()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(found.grad, wanted.grad, gradient=True)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_frequencies_are_the_model_s_own(rope) -> None:
    model = trained(llama, rope_parameters=rope)
    expected = by_definition(model, [LevelLayout.halving((4, 4), 16)] * LAYERS, "interleaved")
    structurize(model, "mlr:4|4", rotary_split="interleaved", context_length=16)
    assert_close(logits(model)[REAL], logits(expected, use_cache=False)[REAL])


def test_chosen_layers_and_one_spec_each() -> None:
    model = trained(llama)
    expected = by_definition(model, [None, LevelLayout.halving((6, 2), CONTEXT)], "low_far")
    other = structurize(copy.deepcopy(model), ["standard", "mlr:6|2"])
    listed = structurize(copy.deepcopy(model), "[standard,mlr:6|2]")
    assert listed.config.structattn == other.config.structattn
    structurize(model, "mlr:6|2", layers=[1])
    assert_close(logits(model)[REAL], logits(expected, use_cache=False)[REAL])
    assert torch.equal(logits(other)[REAL], logits(model)[REAL])
    assert model.config.structattn == {
        "specs": [None, "mlr:6|2"],
        "context_length": CONTEXT,  # the model's own, by default
        "rotary_split": "low_far",
        "attention": "LlamaAttention",
        "rotations": [f"halves:{HEAD_DIM}"] * LAYERS,
    }


def test_windows_values_and_global_window() -> None:
    model = trained(llama)
    wide = by_definition(model, [None] * LAYERS, "low_far", window=5)
    assert_close(logits(structurize(copy.deepcopy(model), "window:5"))[REAL], logits(wide, use_cache=False)[REAL])
    layout = LevelLayout.halving((4, 4), 8, value_ranks=(6, 2))
    levels = by_definition(model, [layout] * LAYERS, "low_far", window=5)
    both = structurize(copy.deepcopy(model), "mlr:4|4,values=6|2+window:5", context_length=8)
    assert_close(logits(both)[REAL], logits(levels, use_cache=False)[REAL])
    two = structurize(copy.deepcopy(model), "global-window:4|4@5")
    assert torch.equal(generate(two, IDS, MASK), generate(two, IDS, MASK, use_cache=False))


def test_the_model_s_own_windows_are_kept() -> None:
    sliding = {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
    model = trained(qwen2, **sliding)
    before, text = logits(model), generate(model, IDS, MASK, new=20)
    changed = structurize(copy.deepcopy(model), f"mlr:{HEAD_DIM}")
    assert_close(logits(changed)[REAL], before[REAL])
    assert torch.equal(generate(changed, IDS, MASK, new=20), text)
    levels = structurize(copy.deepcopy(model), "mlr:4|4", context_length=8)
    assert torch.equal(generate(levels, IDS, MASK), generate(levels, IDS, MASK, use_cache=False))
    for spec in ("window:4", "global-window:4|4@4"):
        with pytest.raises(ConfigError, match="has a sliding window, 5"):
            structurize(copy.deepcopy(model), spec)
        structurize(copy.deepcopy(model), spec, layers=[0])


def test_the_model_s_own_scaling_is_kept() -> None:
    for options in ({"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}):
        model = trained(gpt2, **options)
        expected = by_definition(model, [LevelLayout.halving((4, 4), 16)] * LAYERS, None)
        one, window = (structurize(copy.deepcopy(model), spec) for spec in (f"mlr:{HEAD_DIM}", "window:64"))
        for changed in (one, window):
            assert_close(logits(changed)[REAL], logits(model)[REAL])
        structurize(model, "mlr:4|4", context_length=16)
        assert_close(logits(model)[REAL], logits(expected, use_cache=False)[REAL])
        assert torch.equal(generate(model, IDS, MASK), generate(model, IDS, MASK, use_cache=False))


def test_pairs_are_those_of_rotary() -> None:
    for ranks in ((4, 2, 2), (8, 8), (2, 6, 4, 12), (16,)):
        dim = sum(ranks)
        for split in ("low_far", "interleaved"):
            every = Rotary().frequencies((dim,))[0]
            taken = Rotary(split=split).frequencies(ranks)
            pairs = level_pairs(ranks, split)
            assert [tuple(every[pair] for pair in level) for level in pairs] == list(taken)
            assert list(dimension_order(ranks, split, Rotation("halves", dim))) == level_order(ranks, split, dim)


# Generation


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick(family=["llama", "gpt2"])
def test_cached_is_uncached(family) -> None:
    model = structurize(trained(FAMILIES[family]), "mlr:4|2|2", context_length=16)
    for options in ({}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5}):
        expected = generate(model, IDS, MASK, new=12, use_cache=False, **options)
        assert torch.equal(generate(model, IDS, MASK, new=12, **options), expected)
        cache = level_cache(model, max_length=40)
        assert torch.equal(generate(model, IDS, MASK, new=12, past_key_values=cache, **options), expected)
        assert cache.nbytes > 0
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        sampled.append(generate(model, IDS, MASK, do_sample=True, use_cache=use_cache, top_k=20))
    assert torch.equal(*sampled)


def test_a_padded_batch_is_each_prompt_alone() -> None:
    model = structurize(trained(llama), "mlr:4|2|2", context_length=16)
    text = generate(model, IDS, MASK, new=16)
    for row in range(2):
        alone = IDS[row][REAL[row]][None]
        assert torch.equal(generate(model, alone, new=16)[0], text[row][-16 - alone.shape[1] :])


def test_chunks_give_the_same_logits() -> None:
    model = structurize(trained(qwen3), "mlr:4|2|2", context_length=16)
    whole = logits(model, use_cache=False)
    cache, parts, first = level_cache(model), [], 0
    for end in (10, 11, 13, 17):
        with torch.no_grad():
            out = model(
                IDS[:, first:end],
                attention_mask=MASK[:, :end],
                position_ids=(MASK.cumsum(-1) - 1).clamp(min=0)[:, first:end],
                past_key_values=cache,
            )
        parts.append(out.logits)
        first = end
    assert_close(torch.cat(parts, 1)[REAL], whole[REAL])
    with pytest.raises(CacheError, match="a first chunk that reaches a real token of every row"):
        generate(model, IDS, MASK, prefill_chunk_size=4)


def test_assisted_generation_is_greedy() -> None:
    model = structurize(trained(llama), "mlr:4|2|2", context_length=16)
    ids = tokens(1, 6)
    expected = generate(model, ids, new=24)
    for assistant in (
        trained(llama, seed=5),
        structurize(trained(llama, seed=5), "mlr:4|4", context_length=8),
        copy.deepcopy(model),
    ):
        assert torch.equal(generate(model, ids, new=24, assistant_model=drafting(assistant)), expected)
    assert torch.equal(generate(model, ids, new=24, prompt_lookup_num_tokens=3), expected)


def test_caches_that_do_not_fit() -> None:
    model = structurize(trained(llama), "mlr:4|4", context_length=16)
    with pytest.raises(CacheError, match="keys structured attention cannot use"):
        generate(model, IDS, MASK, cache_implementation="static")
    with pytest.raises(CacheError, match="offload"):
        generate(model, IDS, MASK, cache_implementation="offloaded")
    with pytest.raises(CacheError, match="leave cache_implementation='quantized' away"):
        generate(model, IDS, MASK, cache_implementation="quantized")
    cache = level_cache(model)
    generate(model, IDS, MASK, past_key_values=cache)
    with pytest.raises(CacheError, match="left padding changed"):
        model(IDS[:, :1], past_key_values=cache)
    plain = trained(llama)
    filled = transformers.DynamicCache(config=plain.config)
    plain(IDS, past_key_values=filled)
    with pytest.raises(CacheError, match="keys structured attention cannot use"):
        model(IDS[:, :1], past_key_values=filled)


# Training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_equal(family, reentrant) -> None:
    model = structurize(trained(FAMILIES[family]), "mlr:4|4", context_length=16)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], gradient=True)


def test_dropout_reaches_the_weights() -> None:
    model = structurize(trained(llama, attention_dropout=0.5), "mlr:4|4", context_length=16)
    still = logits(model)
    model.train()
    for use_cache in (True, False):
        assert (logits(model, use_cache=use_cache) - still)[REAL].abs().max() > 1e-3
    cache = level_cache(model)
    logits(model, IDS[:, :5], MASK[:, :5], past_key_values=cache)
    with pytest.raises(ConfigError, match="dropout"):
        logits(model, IDS[:, 5:6], MASK[:, :6], past_key_values=cache)


def test_padding_on_the_right_is_harmless_in_training() -> None:
    model = structurize(trained(llama), "mlr:4|2|2", context_length=16)
    prompts = [tokens(1, 9)[0], tokens(1, 17, seed=2)[0]]
    ids, mask = padded(prompts, "right")
    found = logits(model, ids, mask)
    for row, prompt in enumerate(prompts):
        assert_close(found[row, : len(prompt)], logits(model, prompt[None], None)[0])


def test_packed_sequences() -> None:
    model = structurize(trained(llama), "mlr:4|2|2", context_length=16)
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4, 17)]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    ids = torch.cat(prompts)[None]
    expected = torch.cat([logits(model, prompt[None], None) for prompt in prompts], 1)
    assert_close(logits(model, ids, None, position_ids=positions, use_cache=False), expected)
    borders = torch.tensor([0, 9, 13, 30], dtype=torch.int32)
    flash = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 17, "max_length_k": 17}
    assert_close(logits(model, ids, None, use_cache=False, **flash), expected)
    assert_close(logits(model, ids, None, position_ids=positions, use_cache=False, **flash), expected)
    flash["cu_seq_lens_q"] = torch.tensor([0, 10, 30])
    with pytest.raises(ConfigError, match="different sequences"):
        logits(model, ids, None, position_ids=positions, use_cache=False, **flash)
    with pytest.raises(ConfigError, match="use_cache=False"):
        logits(model, ids, None, position_ids=positions)
    with pytest.raises(ConfigError, match="a batch of 2 rows"):
        logits(model, ids.expand(2, -1), None, position_ids=positions.expand(2, -1), use_cache=False)
    with pytest.raises(ConfigError, match="an attention mask"):
        logits(model, ids, torch.ones_like(ids), position_ids=positions, use_cache=False)


def test_tied_weights_and_other_heads() -> None:
    tied = structurize(trained(llama, tie_word_embeddings=True), "mlr:4|4")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**llama().config.to_dict() | {"num_labels": 3, "pad_token_id": 0})
    for kind in (transformers.LlamaModel, transformers.LlamaForSequenceClassification):
        model = kind(config).double().eval()
        before = model(IDS, attention_mask=MASK)[0]
        after = structurize(model, f"mlr:{HEAD_DIM}")(IDS, attention_mask=MASK)[0]
        assert_close(after[:, -1], before[:, -1])


def test_other_models_of_the_same_config_stay_plain() -> None:
    config = llama().config
    one, two = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    before = two(IDS).logits
    structurize(one, "mlr:4|4")
    assert two.config.model_type == "llama"
    assert torch.equal(two(IDS).logits, before)


class Adapted(torch.nn.Module):
    """A projection with a low-rank adapter, as in PEFT."""

    def __init__(self, base, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        draw = lambda *shape: 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.base, self.down, self.up = base, draw(2, base.in_features), draw(base.out_features, 2)

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T

    def merge(self):
        self.base.weight.data += self.up @ self.down


def adapt(model):
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), layer.self_attn.layer_idx))


@pytest.mark.parametrize("split", ["low_far", "interleaved"])
def test_adapters_fit_before_and_after(split) -> None:
    model, options = trained(qwen3), {"rotary_split": split, "context_length": 16}
    merged, early = copy.deepcopy(model), copy.deepcopy(model)
    adapt(merged)
    for module in merged.modules():
        if isinstance(module, Adapted):
            module.merge()
    for layer in merged.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, getattr(layer.self_attn, name).base)
    wanted = logits(structurize(merged, "mlr:4|2|2", **options))[REAL]
    structurize(model, "mlr:4|2|2", **options)
    assert (logits(model)[REAL] - wanted).abs().max() > 1e-3
    adapt(model)
    adapt(early)
    structurize(early, "mlr:4|2|2", **options)
    assert_close(logits(model)[REAL], wanted)
    assert_close(logits(early)[REAL], wanted)


# What is refused


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("bilinear-btt:1", {}, "bilinear scoring, which cannot keep trained"),
        ("standard:1", {}, "cannot keep trained"),
        ("standard,scaling=mup", {}, "cannot keep trained"),
        ("mlr:4|4", {"rotary_split": "per_level"}, "separate frequencies"),
        ("mlr:4|4", {"rotary_split": "low-far"}, "did you mean 'low_far'"),
        ("mlr:5|3", {}, "ranks must be even"),
        ("mlr:8|8", {}, "expected 8, got 8|8 = 16"),
        ("mlr:4|4,values=4|2", {}, "expected 8, got 4|2 = 6"),
        ("mlr:4|4", {"layers": [2]}, "from 0 to 1, got 2"),
        ("mlr:4|4", {"layers": [1, 1]}, "each once"),
        ("mlr:4|4", {"layers": []}, "at least one"),
        (["mlr:4|4"], {}, "expected one attention spec or 2"),
        ("mlr:4|4", {"context_length": 0}, "context_length"),
        (7, {}, "attention spec is a text"),
        ("mrl:4|4", {}, "did you mean 'mlr'"),
    ],
)
def test_refused_and_nothing_changed(spec, options, message) -> None:
    model = trained(llama)
    before = copy.deepcopy(model.state_dict())
    text = repr(model.config)
    with pytest.raises(ConfigError, match=message.replace("|", "\\|")):
        structurize(model, spec, **options)
    assert type(model) is transformers.LlamaForCausalLM
    assert repr(model.config) == text
    assert not any(isinstance(module, StructuredAttention) for module in model.modules())
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])


def test_refused_models() -> None:
    with pytest.raises(ConfigError, match="structurized already"):
        structurize(structurize(trained(llama), "mlr:4|4"), "mlr:4|4")
    for rope in (
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        },
    ):
        with pytest.raises(ConfigError, match="changes the frequencies with the length"):
            structurize(llama(rope_parameters=rope), "mlr:4|4")
    with pytest.raises(ConfigError, match="cross attention"):
        structurize(gpt2(add_cross_attention=True), "mlr:4|4")


def test_another_implementation_is_refused() -> None:
    model = structurize(trained(llama), "mlr:4|4")
    with pytest.raises(ConfigError, match="given by its config"):
        model.set_attn_implementation("sdpa")
    assert len(model(IDS, output_attentions=True).attentions) == LAYERS
    plain = trained(llama)
    plain.set_attn_implementation("structurized")
    with pytest.raises(ConfigError, match="LlamaAttention is of none"):
        plain(IDS)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match="attn_implementation was changed to 'sdpa'"):
        model(IDS)


# torch.compile


@pytest.mark.full
def test_compiled() -> None:
    model = structurize(trained(llama, num_hidden_layers=1), "mlr:4|2|2", context_length=16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    ids, positions = IDS[1:], torch.arange(17)[None]
    assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, logits(model, ids, None))
    with pytest.raises(RuntimeError, match="packed"):
        compiled(ids, position_ids=torch.cat([torch.arange(5), torch.arange(12)])[None], use_cache=False)
    assert_close(compiled(IDS, attention_mask=MASK, use_cache=False).logits[REAL], logits(model)[REAL])
    holes = MASK.clone()
    holes[1, 5] = 0
    assert_close(compiled(IDS, attention_mask=holes, use_cache=False).logits[REAL], logits(model, IDS, holes)[REAL])
    model.train()
    assert_close(compiled(IDS, attention_mask=MASK, use_cache=False).logits[REAL], logits(model)[REAL])
    with pytest.raises(RuntimeError, match="does not take in training"):
        compiled(IDS, attention_mask=holes, use_cache=False)


@pytest.mark.parametrize("change", [structurize, calibrate])
def test_a_thread_may_change_another_model(change) -> None:
    """It comes while a call on the first model is running."""
    first, second = llama().eval(), qwen3().eval()
    argument, found = {structurize: "mlr:4|4", calibrate: [tokens(1, 64)]}[change], []

    def interleave(*_) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: found.append(change(second, argument)))
        thread.start()
        thread.join()

    hook = first.model.layers[1].register_forward_pre_hook(interleave)
    found.append(change(first, argument))
    assert len(found) == 2


def test_only_halved_blocks_need_a_context_length() -> None:
    """The configs of these models have none."""

    def bloom():
        config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
        return transformers.BloomForCausalLM(config).eval()

    for spec in ("standard", "window:8", "sliding:4|4@-|8", "heads:standard*2/window:8,sink_tokens=2*2"):
        assert structurize(bloom(), spec).generate(tokens(1, 9), max_new_tokens=3, do_sample=False).shape == (1, 12)
    for spec in ("mlr:4|4", "[standard,mlr:4|4]"):
        with pytest.raises(ConfigError, match="give structurize a context_length"):
            structurize(bloom(), spec)
