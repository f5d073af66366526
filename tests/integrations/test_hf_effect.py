"""register_attention takes effect on a model, keeps scores a matter of distances, or is refused with the
reason.
"""

import copy

import pytest
import torch
import transformers
from hf_models import _SIZES, HEAD_DIM, drafting, generate, llama, tokens
from transformers.generation import candidate_generator
from transformers.models.llama.modeling_llama import LlamaAttention

from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    register_attention,
    structurize,
)
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS

PLAIN = register_attention("standard", name="effect_plain")
LEVELS = register_attention("mlr:4|4", name="effect_levels", context_length=8)
IDS = tokens(1, 12)
_LATENT = _SIZES | {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
_EXPERTS = {
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}


def make(family, **options):
    """A tiny model of a family: ``make("Llama", hidden_size=32)``."""
    torch.manual_seed(0)
    config = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))(**options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def logits(model, shift=0):
    with torch.no_grad():
        return model(IDS, position_ids=torch.arange(12)[None] + shift, use_cache=False).logits


# Their attention is written out in the model's file. transformers only logs a line.
_SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
OWN_ATTENTION = {
    "Falcon": _SMALL,
    "Bloom": {"vocab_size": 50, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "Mpt": {"vocab_size": 50, "d_model": 32, "n_layers": 1, "n_heads": 4},
    "Mamba": {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1},  # no attention at all
}


@pytest.mark.parametrize("family", OWN_ATTENTION)
def test_without_effect_is_refused(family) -> None:
    model = make(family, **OWN_ATTENTION[family], bos_token_id=1, eos_token_id=2, pad_token_id=0)
    before = model.config._attn_implementation
    for asked in (PLAIN, {"": PLAIN}, "structurized"):
        with pytest.raises(ConfigError, match="would have no effect"):
            model.set_attn_implementation(asked)
    assert model.config._attn_implementation == before
    if family != "Mamba":
        with pytest.raises(ConfigError, match="would have no effect"):
            type(model)._from_config(copy.deepcopy(model.config), attn_implementation=PLAIN)


def test_other_names_pass_through() -> None:
    model = llama()
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="not supported"):
        model.set_attn_implementation("no_such_attention")
    make("Bloom", **OWN_ATTENTION["Bloom"]).set_attn_implementation("eager")


LATENT_FAMILIES = {
    "DeepseekV3": _LATENT | _EXPERTS | {"head_dim": 4},
    "Glm4MoeLite": _LATENT | _EXPERTS | {"mlp_layer_types": ["dense", "dense"]},
    "LongcatFlash": _LATENT | {"head_dim": 4, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 8, "num_layers": 1}
    | {"n_routed_experts": 2, "moe_topk": 2, "zero_expert_num": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_latent_attention_is_refused(family) -> None:
    model = make(family, **LATENT_FAMILIES[family])
    expected = logits(model)
    with pytest.raises(ConfigError, match="has multi-head latent attention"):
        structurize(copy.deepcopy(model), "mlr:4|4")
    model.set_attn_implementation(LEVELS)
    with pytest.raises(ConfigError, match="multi-head latent attention"):
        logits(model)
    model.set_attn_implementation(PLAIN)  # one level needs no order
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=SIX_DIGITS)


SHIFTED = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"head_dim": HEAD_DIM, "pad_token_id": 0},
    "Olmo2": {},
    "SmolLM3": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "no_rope_layers": [1, 0]},
    "Granite": {},
    "GPTNeoX": {"rotary_pct": 0.5},
    "Phi": {},  # rotates half of each head
    "Cohere": {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},  # these four rotate neighbours
    "Helium": {"head_dim": HEAD_DIM, "pad_token_id": 0},
    "Ernie4_5": {"head_dim": HEAD_DIM},
    "Glm": {"head_dim": HEAD_DIM, "pad_token_id": 0, "eos_token_id": 2},
}


@pytest.mark.parametrize("family", SHIFTED)
def test_levels_score_by_distances(family) -> None:
    model = make(family, **_SIZES | SHIFTED[family])
    plain = logits(model)
    model.set_attn_implementation(LEVELS)
    found = logits(model)
    torch.testing.assert_close(logits(model, 13), found, rtol=0, atol=SAME_MODEL)
    assert (found - plain).abs().max() > 1e-3


class SomeAttention(LlamaAttention):
    """An attention in another file, which has no function that shows how it rotates."""

    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options)


def test_a_rotation_that_cannot_be_asked_for_is_refused() -> None:
    model = llama()
    model.set_attn_implementation(LEVELS)
    attention = model.model.layers[0].self_attn
    attention.__class__ = type("OnlyAName", (LlamaAttention,), {})
    model(IDS)
    attention.__class__ = SomeAttention
    with pytest.raises(ConfigError, match="SomeAttention rotates pairs that are not known"):
        model(IDS)


def test_a_model_that_computes_with_the_mask_is_refused() -> None:
    doge = make("Doge", **_SIZES, pad_token_id=0)
    doge.set_attn_implementation(PLAIN)
    with pytest.raises(ConfigError, match=r"computes with the attention mask itself \(dtype\)"):
        doge(IDS)
    mask = transformers.masking_utils.create_causal_mask(doge.config, torch.zeros(1, 12, 32), None, None)
    assert not hasattr(mask, "shape")  # as of any object that is no tensor
    for use in (lambda: torch.zeros(1) + mask, lambda: mask[:, 0], lambda: torch.where(mask, 0.0, 1.0)):
        with pytest.raises(ConfigError, match="computes with the attention mask itself"):
            use()


def _own():
    torch.manual_seed(0)
    sizes = {key: _SIZES[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return StructAttnForCausalLM(StructAttnConfig(attention="mlr:4|4", max_position_embeddings=16, **sizes)).eval()


def _registered():
    model = make("Llama", **_SIZES)
    model.set_attn_implementation(LEVELS)
    return model


KINDS = {
    "own": _own,
    "structurized": lambda: structurize(make("Llama", **_SIZES), "mlr:4|4", context_length=8),
    "registered": _registered,
}


@pytest.mark.parametrize("kind", KINDS)
def test_early_exit_leaves_the_model_whole(kind, monkeypatch) -> None:
    model = drafting(KINDS[kind]())
    assert torch.equal(generate(model, IDS, new=16, assistant_early_exit=1), generate(model, IDS, new=16))
    before = logits(model)

    def fail(*_, **__):
        raise ConfigError("while drafting")

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", fail)
    with pytest.raises(ConfigError, match="while drafting"):
        generate(model, IDS, assistant_early_exit=1)
    assert model.config.num_hidden_layers == 2
    assert torch.equal(logits(model), before)


def test_continuous_batching_with_a_registered_attention_is_refused_by_transformers() -> None:
    with pytest.raises(ValueError, match="not supported"):
        _registered().generate_batch([[3, 4, 5]])
