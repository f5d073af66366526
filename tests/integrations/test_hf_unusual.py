"""Configurations with settings that few models have, together: biases, windows, tied embeddings, odd heads,
scaled positions, experts in float16.
"""

import copy

import pytest
import torch
from hf_models import generate
from test_hf_families import IDS, MASK, _page, logits
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from structattn.integrations.transformers import level_cache, load_structurized, structurize
from structattn.testing.tolerances import FORWARD, SAME_MODEL, SIX_DIGITS, relative_error

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 3.0,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.3,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TWO, ONE = {"num_key_value_heads": 2}, {"num_key_value_heads": 1}
TIED, BIAS = {"tie_word_embeddings": True}, {"attention_bias": True}
CASES = {
    "llama": (TWO | TIED | BIAS | {"head_dim": 24, "mlp_bias": True, "rope_parameters": LLAMA_3}, (12, 8, 4)),
    "mistral": (ONE | TIED | {"head_dim": 12, "sliding_window": 5, "rope_parameters": YARN}, (6, 4, 2)),
    "qwen3": (TWO | BIAS | {"head_dim": 32, "rope_parameters": YARN | {"truncate": False}}, (16, 8, 8)),
    "olmo2": (TWO | TIED | BIAS | {"num_attention_heads": 8, "rope_parameters": LINEAR}, (4, 2, 2)),
    "gemma3_text": (
        ONE
        | BIAS
        | {"head_dim": 10, "query_pre_attn_scalar": 7, "sliding_window": 3}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            }
        },
        (4, 4, 2),
    ),
    "stablelm": (TWO | {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}, (8, 4, 4)),
    "cohere": (TWO | BIAS | {"use_qk_norm": True, "rope_parameters": YARN}, (8, 4, 4)),
    "nemotron": (
        TWO
        | BIAS
        | {"head_dim": 20}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.3}},
        (8, 8, 4),
    ),
    "granite": (TWO | TIED | BIAS | {"attention_multiplier": 0.3, "rope_parameters": LINEAR}, (8, 4, 4)),
    "smollm3": (
        TWO
        | {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4, "rope_parameters": YARN}
        | {"layer_types": ["sliding_attention", "full_attention"]},
        (8, 4, 4),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("family", CASES)
def test_unusual_configurations(family, tmp_path) -> None:
    options, ranks = CASES[family]
    torch.manual_seed(1)
    config = CONFIG_MAPPING[family](**_page["_SIZES"] | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for dtype, limit in ((torch.float32, SAME_MODEL), (torch.float64, 1e-10)):
        model = model.to(dtype)
        plain, text = logits(model), generate(model, IDS, MASK, new=6)
        one = structurize(copy.deepcopy(model), f"mlr:{sum(ranks)}")
        assert (logits(one) - plain).abs().max() <= limit * plain.abs().max()
        assert torch.equal(generate(one, IDS, MASK, new=6), text)
    structurize(model, f"mlr:{'|'.join(map(str, ranks))}", context_length=16)
    found = logits(model)
    assert relative_error(found, plain) > 1e-2
    assert relative_error(logits(model, 13), found) <= SIX_DIGITS
    uncached = generate(model, IDS, MASK, new=8, use_cache=False)
    for options in ({}, {"past_key_values": level_cache(model)}):
        assert torch.equal(generate(model, IDS, MASK, new=8, **options), uncached)
    model.save_pretrained(tmp_path)
    assert relative_error(logits(load_structurized(tmp_path, dtype=torch.float64).eval()), found) <= SIX_DIGITS


@pytest.mark.full
def test_float16_experts_change_where_the_router_is_undecided() -> None:
    """In float16 the logits of Mixtral may differ by far more than rounding: rounding chooses another expert
    for a token between two.

    Nothing else differs. Against SDPA, which computes one level too, no number does without padding.
    """
    ids = torch.randint(3, 97, (4, 60), generator=torch.Generator().manual_seed(0))
    changed = 0
    for seed in range(6):
        torch.manual_seed(seed)
        config = CONFIG_MAPPING["mixtral"](**_page["_SIZES"] | _page["FAMILIES"]["mixtral"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            model = model.half()
            one = structurize(copy.deepcopy(model), "mlr:16")
            plain, other = (x(ids, use_cache=False, output_router_logits=True) for x in (model, one))
        undecided = torch.zeros(ids.shape, dtype=torch.bool)
        for a, b in zip(plain.router_logits, other.router_logits, strict=True):
            is_changed = (a.topk(2).indices.sort().values != b.topk(2).indices.sort().values).any(-1)
            best = a.float().topk(3).values
            gap, rounding = best[:, 1] - best[:, 2], (a.float() - b.float()).abs().amax(-1)
            assert (gap <= 2 * rounding)[is_changed].all()
            undecided |= is_changed.view(ids.shape)
            changed += int(is_changed.sum())
        decided = undecided.cumsum(-1) == 0  # later tokens see the changed ones
        assert relative_error(other.logits[decided], plain.logits[decided]) <= 2 * FORWARD[torch.float16]
    assert changed > 0, "no token of these models is between two experts: choose other seeds"
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, one(ids, use_cache=False).logits)
