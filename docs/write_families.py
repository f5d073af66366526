"""Writes the table of docs/families.md from tiny random models of each family: ``python docs/write_families.py``.

A test makes the same models, checks what the page says of them, and compares the table.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from structattn.integrations.transformers import structurize

PAGE = Path(__file__).parent / "families.md"
HEAD_DIM, VOCAB = 16, 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPS = {"num_key_value_heads": 2}
_HEADS = _GROUPS | {"head_dim": HEAD_DIM}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_DECODER = {"is_decoder": True}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# Options of each family beside the sizes: what makes it differ from Llama must be present in its tiny model.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": _HEADS | _EXPERTS | {"sliding_window": 6, "num_dense_layers": 1},
    "apertus": _GROUPS,
    "arcee": _HEADS,
    "aria_text": _HEADS
    | _EXPERTS
    | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 16},
    "bamba": _HEADS | _MAMBA | {"attn_layer_indices": [1]},
    "beam": _HEADS | _EXPERTS | _WINDOWS | {"n_group": 1, "topk_group": 1},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "biogpt": {},
    "bitnet": _GROUPS,
    "camembert": _DECODER,
    "cohere": _GROUPS,
    "cohere2": _GROUPS | _WINDOWS,
    "cohere2_moe": _HEADS | _EXPERTS | _WINDOWS,
    "cwm": _HEADS | _WINDOWS,
    "data2vec-text": _DECODER,
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": _HEADS | _EXPERTS | _ROUTED,
    "electra": _DECODER | {"embedding_size": 64},
    "ernie": _DECODER,
    "ernie4_5": _HEADS,
    "ernie4_5_moe": _HEADS | _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "exaone4": _HEADS | _WINDOWS,
    "exaone_moe": _HEADS
    | _EXPERTS
    | _WINDOWS
    | {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "flex_olmo": _GROUPS | _EXPERTS,
    "gemma": _HEADS,
<<<<<<< Updated upstream
    "gemma2": _HEADS
    | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 0.5},
    "gemma3_text": _HEADS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
=======
    "gemma3_text": _HEADS | _WINDOWS,
    "gemma3n_text": _HEADS
    | _WINDOWS
    | {
        "num_kv_shared_layers": 0,
        "intermediate_size": [64, 64],
        "activation_sparsity_pattern": [0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": _HEADS
    | _WINDOWS
    | {"global_head_dim": 16, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
>>>>>>> Stashed changes
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": _HEADS | _EXPERTS | {"n_routed_experts": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": _HEADS
    | _EXPERTS
    | {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
        },
    },
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "granite": _GROUPS | {"attention_multiplier": 0.1},
    "granitemoe": _GROUPS | _EXPERTS,
    "granitemoehybrid": _GROUPS
    | _EXPERTS
    | _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
    "granitemoeshared": _GROUPS | _EXPERTS | {"shared_intermediate_size": 16},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS | _EXPERTS | {"moe_topk": 2},
    "hy_v3": _HEADS | _EXPERTS | {"first_k_dense_replace": 1},
    "hyperclovax": _HEADS,
    "internlm3": _HEADS,
    "iquestcoder": _HEADS,
    "jais2": _HEADS,
    "jamba": _GROUPS
    | _EXPERTS
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kolibri1": _HEADS | _EXPERTS | _WINDOWS,
    "laguna": _HEADS
    | _EXPERTS
    | {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": _GROUPS | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _GROUPS | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": _GROUPS,
    "mellum": _HEADS | _EXPERTS,
    "minimax_m2": _HEADS | _EXPERTS,
    "ministral": _HEADS | _WINDOWS,
    "ministral3": _HEADS,
    "mistral": _HEADS | {"sliding_window": 6},
    "mixtral": _HEADS | _EXPERTS,
    "modernbert-decoder": {
        "layer_types": ["full_attention", "sliding_attention"],
        "local_attention": 6,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "moshi": _HEADS | {"sliding_window": 64, "ffn_dim": 64},
    "nanochat": _GROUPS,
    "nemotron": _HEADS,
    "nemotron_h": _HEADS
    | _EXPERTS
    | _ROUTED
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "olmo": _GROUPS,
    "olmo2": _GROUPS,
    "olmo3": _GROUPS | _WINDOWS,
    "olmo_hybrid": _GROUPS | _LINEAR,
    "olmoe": _GROUPS | _EXPERTS,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": _GROUPS,
    "phi3": _GROUPS | {"sliding_window": 6},
    "phimoe": _GROUPS | _EXPERTS,
    "qwen2": _GROUPS | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2_moe": _GROUPS | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": _HEADS,
    "qwen3_5_moe_text": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _HEADS | _LINEAR,
    "qwen3_moe": _HEADS | _EXPERTS,
    "qwen3_next": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
    "recurrent_gemma": _HEADS
    | {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 6},
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "seed_oss": _HEADS,
    "smollm3": _GROUPS | {"no_rope_layers": [1, 0]},
    "solar_open": _HEADS | _EXPERTS | _ROUTED,
    "stablelm": _GROUPS,
    "starcoder2": _GROUPS | {"sliding_window": 6},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": _DECODER | {"default_language": "en_XX"},
}


# These do not run on PyTorch's kernels in transformers.
EAGER = ("gemma2", "gpt_oss", "gptj")


def tiny(family: str) -> PreTrainedModel:
    """A tiny model of a family whose every parameter is far from its initial value."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**_SIZES | FAMILIES[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if family in EAGER else "sdpa"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def row(family: str, model: PreTrainedModel) -> str:
    """The line of the table for a model that ``structurize`` changed."""
    record = model.config.structattn
    pairs = ", ".join(sorted({_words(r) for s, r in zip(record["specs"], record["rotations"], strict=True) if s}))
    return f"| `{family}` | {type(model).__name__.removeprefix('StructAttn')} | {pairs} |"


def _words(rotation: str | None) -> str:
    if rotation is None:
        return "none"
    pairing, dims = rotation.split(":")
    pairs = "i and i + n / 2" if pairing == "halves" else "2 i and 2 i + 1"
    return f"{pairs} of {'all' if int(dims) == HEAD_DIM else f'{int(dims)} of {HEAD_DIM}'} dimensions"


def table(rows: list[str]) -> str:
    """The table, with its head."""
    return "\n".join(["| `model_type` | model | rotated pairs of its tiny model |", "|---|---|---|", *rows])


if __name__ == "__main__":
    lines = [row(family, structurize(copy.deepcopy(tiny(family)), f"mlr:{HEAD_DIM}")) for family in sorted(FAMILIES)]
    text = PAGE.read_text()
    start, end = text.index("| `model_type`"), text.index("\n\n", text.index("| `model_type`"))
    PAGE.write_text(text[:start] + table(lines) + text[end:])
