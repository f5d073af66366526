"""Writes the table of docs/families.md from tiny random models of each family:
``python docs/write_families.py``.

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

# Options of each family beside the sizes: what makes it differ from Llama must be present in its tiny model.
FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": _GROUPS,
    "arcee": _HEADS,
    "biogpt": {},
    "bitnet": _GROUPS,
    "cohere": _GROUPS,
    "cohere2": _GROUPS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": _HEADS,
    "exaone4": _HEADS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma": _HEADS,
    "gemma2": _HEADS
    | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "attn_logit_softcapping": 0.5},
    "gemma3_text": _HEADS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
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
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "lfm2": _GROUPS | {"layer_types": ["conv", "full_attention"]},
    "llama": _GROUPS,
    "mistral": _HEADS | {"sliding_window": 6},
    "mixtral": _HEADS | _EXPERTS,
    "nemotron": _HEADS,
    "olmo": _GROUPS,
    "olmo2": _GROUPS,
    "olmo3": _GROUPS | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": _GROUPS,
    "phi3": _GROUPS | {"sliding_window": 6},
    "phimoe": _GROUPS | _EXPERTS,
    "qwen2": _GROUPS | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen2_moe": _GROUPS | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": _HEADS,
    "qwen3_moe": _HEADS | _EXPERTS,
    "seed_oss": _HEADS,
    "smollm3": _GROUPS | {"no_rope_layers": [1, 0]},
    "stablelm": _GROUPS,
    "starcoder2": _GROUPS | {"sliding_window": 6},
}

_WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_DECODER = {"is_decoder": True}
_ENCODER = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
}
_PART = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = (
    _EXPERTS
    | _ROUTED
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_layers": 1,
    }
)

# More families, that have nothing which those above have not; their tests run with --full.
RARE: dict[str, dict[str, Any]] = {
    "afmoe": _HEADS | _EXPERTS | {"sliding_window": 6, "num_dense_layers": 1},
    "apertus1p5_text": _GROUPS,
    "aria_text": _HEADS
    | _EXPERTS
    | {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1, "intermediate_size": 16},
    "bamba": _HEADS | _MAMBA | {"attn_layer_indices": [1]},
    "beam": _HEADS | _EXPERTS | _WINDOWS | {"n_group": 1, "topk_group": 1},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "bloom": {"n_layer": 2, "n_head": 4},
    "camembert": _DECODER,
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8},
    "cohere2_moe": _HEADS | _EXPERTS | _WINDOWS,
    "cohere_compass_text": _HEADS
    | _EXPERTS
    | _WINDOWS
    | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _WINDOWS["layer_types"]}},
    "ctrl": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 64},
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
    "ernie4_5_moe": _HEADS | _EXPERTS | {"moe_num_experts": 4, "moe_k": 2},
    "exaone": _HEADS,
    "exaone_moe": _HEADS
    | _EXPERTS
    | _WINDOWS
    | {"mlp_layer_types": ["dense", "sparse"], "n_group": 1, "topk_group": 1},
    "flex_olmo": _GROUPS | _EXPERTS,
    "flint": _HEADS | _WINDOWS,
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_h1": _HEADS | _MAMBA | {"mamba_d_ssm": 128},
    "gemma3n_text": _HEADS
    | {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": _HEADS
    | {
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_unified_text": _HEADS
    | _WINDOWS
    | {"global_head_dim": 16, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gpt-sw3": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 6,
    },
    "gpt_neox_japanese": {},
    "granite_swa": _GROUPS | _WINDOWS,
    "granitemoe_swa": _GROUPS | _EXPERTS | _WINDOWS,
    "granitemoehybrid": _GROUPS
    | _EXPERTS
    | _MAMBA
    | {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 16},
    "granitemoeshared": _GROUPS | _EXPERTS | {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": _HEADS | _EXPERTS | {"moe_topk": 2},
    "hy_v3": _HEADS | _EXPERTS | {"first_k_dense_replace": 1},
    "hyperclovax": _HEADS,
    "inkling_text": _HEADS
    | _ROUTED
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "d_rel": 8,
        "rel_extent": 16,
        "sliding_window_size": 6,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    },
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
    "jetmoe": {"num_key_value_heads": 4, "kv_channels": HEAD_DIM, "num_local_experts": 4, "num_experts_per_tok": 2},
    "kolibri1": _HEADS | _EXPERTS | _WINDOWS,
    "laguna": _HEADS
    | _EXPERTS
    | {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 6,
        "shared_expert_intermediate_size": 16,
    },
    "lara_mini": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
    "lfm3": _HEADS | _EXPERTS | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": _GROUPS | _EXPERTS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": _HEADS
    | _EXPERTS
    | {
        "intermediate_size_mlp": 64,
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
        "floor_scale": 4,
    },
    "megatron-bert": _DECODER,
    "mellum": _HEADS | _EXPERTS,
    "mimo_v2_flash": _HEADS | _EXPERTS | _ROUTED | _WINDOWS | {"mlp_layer_types": ["dense", "sparse"], "v_head_dim": 8},
    "minimax_m2": _HEADS | _EXPERTS,
    "ministral": _HEADS | _WINDOWS,
    "ministral3": _HEADS,
    "modernbert-decoder": {
        "layer_types": ["full_attention", "sliding_attention"],
        "local_attention": 6,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "moshi": _HEADS | {"sliding_window": 64, "ffn_dim": 64},
    "mpt": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "use_cache": True,
        "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3},
    },
    "nanochat": _GROUPS,
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
    "olmo_hybrid": _GROUPS | _LINEAR,
    "olmoe": _GROUPS | _EXPERTS,
    "phi4_multimodal": _GROUPS
    | {
        "vision_config": _PART | {"image_size": 28, "crop_size": 28, "patch_size": 14, "image_token_id": 3},
        "audio_config": _PART
        | {"num_blocks": 1, "ext_pw_out_channel": 16, "nemo_conv_channels": 16, "nemo_final_size": 16, "input_size": 8}
        | {"audio_token_id": 4},
    },
    "qwen3_5_moe_text": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": _HEADS | _LINEAR,
    "qwen3_next": _HEADS | _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 16},
    "recurrent_gemma": _HEADS
    | {"block_types": ["recurrent", "attention"], "lru_width": 64, "attention_window_size": 6},
    "rembert": _DECODER,
    "roc_bert": _DECODER
    | {
        "shape_vocab_size": 20,
        "pronunciation_vocab_size": 20,
        "enable_pronunciation": False,
        "enable_shape": False,
    },
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "sarvam_moe": _HEADS | _EXPERTS | _ROUTED,
    "solar_open": _HEADS | _EXPERTS | _ROUTED,
    "vaultgemma": _HEADS | _WINDOWS | {"attn_logit_softcapping": 0.5},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xmod": _DECODER | {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_mem_blocks": 2,
        "adapter_rank": 8,
        "chunk_size": 8,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "zaya": _HEADS | {"num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
}

# What the error of each refused family says, in the words of the page, and options of the families.
REFUSED: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "multi-head latent attention": (
        "multi-head latent attention: the cache holds one compressed vector for all heads already",
        {
            family: _LATENT | options
            for family, options in {
                "axk1": {},
                "axk2": {},
                "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
                "deepseek_v2": {},
                "deepseek_v3": {},
                "deepseek_v32": {},
                "dots3_note_text": {"num_key_value_heads": 4},
                "glm4_moe_lite": {},
                "glm_moe_dsa": {},
                "hy_v4": {},
                "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 16},
                "longcat_flash": {"ffn_hidden_size": 64, "expert_ffn_hidden_size": 16, "moe_topk": 2},
                "minicpm3": {"dim_model_base": 16},
                "sarvam_mla": {"num_key_value_heads": 4},
                "youtu": {},
            }.items()
        },
    ),
    "would have no effect": (
        "no softmax attention, or one that does not run through transformers' `AttentionInterface`",
        {
            "big_bird": _DECODER,
            "cpmant": {"dim_head": 16, "dim_ff": 64, "prompt_types": 2, "prompt_length": 4},
            "falcon_mamba": {"state_size": 8},
            "mamba": {"state_size": 8},
            "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 8},
            "mvp": _ENCODER,
            "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
            "reformer": _DECODER
            | {"attn_layers": ["local"], "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 8]},
            "roformer": _DECODER,
            "rwkv": {},
            "trocr": _ENCODER,
            "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
            "xlstm": {"num_heads": 2},
        },
    ),
    "more than once": (
        "two scores in a layer, or one layer that is used twice",
        {
            "diffllama": {},
            "dory": _HEADS | {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1},
            "hrm_text": {},
        },
    ),
    "holds more than keys and values": ("a cache of compressed keys", {"deepseek_v4": _LATENT}),
    "block_indices": (
        "keys that are chosen by the tokens",
        {
            "minimax_m3_vl_text": _HEADS
            | _EXPERTS
            | {"layer_types": ["full_attention", "minimax_m3_sparse"], "intermediate_size": 16}
            | {"dense_intermediate_size": 16}
        },
    ),
    "or_mask": (
        "a mask that is neither causal nor one of all pairs",
        {"git": {"vision_config": _PART | {"image_size": 8, "patch_size": 4}}},
    ),
    "argument 'sinks'": (
        "a sink for each token",
        dict.fromkeys(["inkling2_loop_text", "inkling2_text"], _HEADS | _ROUTED | _EXPERTS),
    ),
    "computes with the attention mask": (
        "a mask that is computed from the tokens",
        {
            "doge": _HEADS,
            "qwen4_exp_text": _HEADS
            | _EXPERTS
            | _LINEAR
            | {
                "shared_expert_intermediate_size": 16,
                "indexer_n_heads": 2,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 8,
                "indexer_compress_ratio": 4,
            },
        },
    ),
    "own cache|of its own": (
        "a cache of its own",
        {"minimax": _HEADS | _EXPERTS | {"layer_types": ["linear_attention", "full_attention"]}},
    ),
    "some calls only": (
        "cross attention",
        dict.fromkeys(
            [
                "whisper",
                "bart",
                "bigbird_pegasus",
                "blenderbot",
                "blenderbot-small",
                "marian",
                "mbart",
                "pegasus",
                "plbart",
            ],
            _ENCODER,
        ),
    ),
}
# Models whose decoder is one of several parts: their tests make them on the meta device.
PARTS = ("blt", "fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "moss_transcribe_diarize")


# These do not run on PyTorch's kernels in transformers.
EAGER = (
    "bloom",
    "codegen",
    "flint",
    "gemma2",
    "gpt_neo",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "granitemoe_swa",
    "megatron-bert",
    "mimo_v2_flash",
    "mpt",
    "rembert",
    "vaultgemma",
    "xglm",
)


def tiny(family: str, options: dict[str, Any] | None = None) -> PreTrainedModel:
    """A tiny model of a family whose every parameter is far from its initial value; ``options``: others than
    those above.
    """
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**_SIZES | ((FAMILIES | RARE)[family] if options is None else options))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if family in EAGER or options is not None else "sdpa"
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


def refused() -> str:
    """The table of what is refused."""
    rows = [
        f"| {', '.join(f'`{family}`' for family in sorted(families))} | {words} |"
        for words, families in [*REFUSED.values(), ("a decoder that is one of several parts with a config each", PARTS)]
    ]
    return "\n".join(["| refused `model_type` | reason |", "|---|---|", *rows])


def replaced(text: str, new: str) -> str:
    """A page with another table in place of that with the same head."""
    start = text.index(new.splitlines()[0])
    return text[:start] + new + text[(text + "\n\n").index("\n\n", start) :].rstrip() + "\n"


if __name__ == "__main__":
    families = sorted(FAMILIES | RARE)
    lines = [row(family, structurize(copy.deepcopy(tiny(family)), f"mlr:{HEAD_DIM}")) for family in families]
    PAGE.write_text(replaced(replaced(PAGE.read_text(), table(lines)), refused()))
