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
