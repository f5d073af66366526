"""Every wrong call of the transformers integration is one of our errors, and changes nothing."""

import copy

import pytest
import torch
from hf_models import _SIZES, llama, tokens

from structattn.errors import StructAttnError
from structattn.integrations.transformers import (
    LevelCacheLayer,
    StructAttnConfig,
    StructAttnForCausalLM,
    StructAttnModel,
    level_cache,
    load_structurized,
    register_attention,
    structurize,
)

IDS = tokens(1, 5)
PLAIN = llama()
OPTIONS = {name: _SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}


def own(**options):
    return StructAttnForCausalLM(StructAttnConfig(**OPTIONS | {"attention": "mlr:4|4"} | options)).eval()


PLAIN_OWN = own()
CHANGED = structurize(llama(), "mlr:4|4").config


def changed_config(**options):
    return type(CHANGED)(**CHANGED.to_dict() | options)


def register(**options):
    return register_attention(**{"spec": "mlr:4|4", "name": "wrong"} | options)


def own_model(**options):
    return StructAttnForCausalLM(StructAttnConfig(**OPTIONS | {"attention": "standard"} | options))


def own_cache(**options):
    return level_cache(PLAIN, **options)


def change(model=PLAIN, **options):
    return structurize(copy.deepcopy(model), **{"spec": "mlr:4|4"} | options)


PATHS = ("\ud800", "a\0b", "z" * 5000, b"x", None, 3, "")
INTS = (0, -1, True, 1.5, "8", [8])
BOOLS = ("no", 1, None)
NUMBERS = (-0.1, float("nan"), float("inf"), True, "0.1", None, [0.1])
TOKENS = ("x", 1.5, -1, 50, True)
NO_MODELS = (None, 7, "llama", torch.nn.Linear(2, 2), type(PLAIN), PLAIN.config)
# (call, argument, wrong values)
TABLE = [
    (change, "spec", (None, 7, True, [], "", "x", ["mlr:4|4", None], {"a": 1}, torch.ones(2), b"mlr:4|4")),
    (change, "model", NO_MODELS),
    (change, "layers", (0, "all", [0, "1"], [True], [0.0], {}, 7.5, torch.tensor([0]))),
    (change, "rotary_split", (None, "low", 1, ["low_far"], "calibrated")),
    (change, "calibration", (7, "found", {}, [])),
    (change, "context_length", (*INTS, float("nan"))),
    (load_structurized, "path", (None, 7, True, [], "", "/nonexistent", "a/b/c", b"x")),
    (register, "spec", (None, 7, [], "", "x", torch.ones(1), "[mlr:4|4,standard]")),
    (register, "name", (None, 7, "", "eager", "sdpa", "flash_attention_2", "a-b", [], "structurized")),
    (register, "context_length", INTS),
    (register, "rotary_split", ("low", 1, ["low_far"])),
    (register, "backend", (None, 7, "fast", ["auto"], torch.ones(2), "z" * 5000)),
    (load_structurized, "path", PATHS),
    (StructAttnForCausalLM.from_pretrained, "pretrained_model_name_or_path", (*PATHS, "/nonexistent")),
    (PLAIN_OWN.save_pretrained, "save_directory", PATHS),
    (LevelCacheLayer().batch_select_indices, "indices", (None, 3, [0])),
    *((own_model, name, (2**40, 2**31 - 1)) for name in ("vocab_size", "intermediate_size")),
    (own, "dtype", ("nope", "\ud800")),
    *((call, "id2label", (3, "x", [1], {"a": 1})) for call in (own, changed_config)),
    *((changed_config, name, ("x",)) for name in ("dtype", "hidden_size", "rope_parameters", "attention_dropout")),
    (level_cache, "model", NO_MODELS),
    *((call, name, INTS) for call in (LevelCacheLayer, own_cache) for name in ("max_length", "page_size")),
    *((own, name, INTS) for name in (*OPTIONS, "max_position_embeddings", "num_key_value_heads", "intermediate_size")),
    (own, "attention", (None, 7, [], "x", "", [None, None], {"a": 1}, ["mlr:4|4"], True, "mlr:8|8")),
    (own, "rotary", (7, True, "", "x", ["low_far"], "low_far,base=nan")),
    *((own, name, (*NUMBERS, 1.0)) for name in ("attention_dropout", "hidden_dropout")),
    *((own, name, NUMBERS) for name in ("rms_norm_eps", "initializer_range")),
    *((own, name, BOOLS) for name in ("qk_norm", "attention_bias", "tie_word_embeddings", "use_cache")),
    *((own, name, TOKENS) for name in ("pad_token_id", "bos_token_id", "eos_token_id")),
    *((kind, "config", (None, 7, "c", PLAIN.config)) for kind in (StructAttnForCausalLM, StructAttnModel)),
    (LevelCacheLayer().crop, "tokens_to_remove", (1, "x", None, 1.5, True)),
]  # fmt: skip


@pytest.mark.parametrize(("call", "name", "values"), TABLE, ids=[f"{row[0].__name__}-{row[1]}" for row in TABLE])
def test_wrong_arguments(call, name, values, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for value in values:
        with pytest.raises(StructAttnError):
            call(**{name: value})


LONGS = torch.ones(1, 5, dtype=torch.int64)
INPUTS = {
    "input_ids": (
        None,
        7,
        "x",
        [1, 2],
        IDS[0],
        IDS.double(),
        IDS.short(),
        IDS.to(torch.uint64),
        IDS[:0],
        IDS[:, :0],
        IDS[None],
        IDS + 50,
        IDS - 50,
    ),
    "attention_mask": (
        7,
        "x",
        [[1] * 5],
        LONGS[0],
        LONGS[:, :4],
        LONGS.expand(2, 5),
        torch.ones(1, 1, 5, 5),
        {},
        {"a": 1},
        LONGS * 0,
        LONGS * float("nan"),
        LONGS * 2,
        LONGS.log(),
        LONGS.to("meta"),
        LONGS.to_sparse(),
        torch.tensor(1),
    ),
    "position_ids": (
        7,
        "x",
        [0, 1],
        LONGS[0],
        LONGS[:, :4],
        LONGS.expand(3, 1, 5),
        LONGS * 0.5,
        LONGS.to(torch.uint16),
        LONGS.to("meta"),
    ),
    "cache": (7, "x", [], (), ((IDS, IDS),), PLAIN.config),
    "past_key_values": (7,),  # its older name
    "use_cache": ("no", 3),
    "inputs_embeds": (
        7,
        "x",
        torch.ones(5, 32),
        torch.ones(1, 5, 31),
        torch.ones(1, 5, 32),
    ),  # the last together with tokens
}
HEAD = {
    "labels": (
        7,
        "x",
        LONGS[:, :4],
        LONGS * 0.5,
        LONGS * 60,
        LONGS * -3,
        LONGS.int(),
        LONGS.to(torch.uint16),
        LONGS.to("meta"),
    ),
    "logits_to_keep": (-1, "x", 1.5, True, torch.ones(2), [1]),
}


@pytest.mark.parametrize("kind", ["own", "structurized"])
def test_wrong_inputs(kind) -> None:
    model = own() if kind == "own" else change()
    for name, values in (INPUTS | HEAD).items():
        for value in values:
            with pytest.raises(StructAttnError):
                model(**{"input_ids": IDS, name: value})
    for wrong in (
        *([None] if kind == "own" else []),
        7,
        "x",
        [1],
        IDS[0],
        IDS.double(),
        IDS[:, :0],
        IDS + 50,
        IDS.to("meta"),
    ):
        with pytest.raises(StructAttnError):
            model.generate(wrong, max_new_tokens=1)
    for mask in (LONGS * 0, LONGS * float("nan"), "x", torch.tensor(1), LONGS[0], LONGS[None]):
        with pytest.raises(StructAttnError):
            model.generate(IDS, attention_mask=mask, max_new_tokens=1, pad_token_id=0)
    with pytest.raises(StructAttnError, match="generate needs use_cache=True with a cache"):
        model.generate(IDS, past_key_values=level_cache(model), use_cache=False, max_new_tokens=1)
    for embeds in (
        *INPUTS["inputs_embeds"][:-1],
        *(torch.ones(1, 5, 32).to(x) for x in (torch.long, torch.float64, "meta")),
    ):
        with pytest.raises(StructAttnError):
            model(inputs_embeds=embeds)
    assert model(inputs_embeds=torch.ones(1, 5, 32)).logits.isfinite().all()
    assert model(IDS.int(), LONGS.bool(), position_ids=torch.arange(5)[None], use_cache=False).logits.isfinite().all()


def test_a_mask_of_zeros_is_refused_where_attention_is_registered() -> None:
    model = copy.deepcopy(PLAIN)
    model.set_attn_implementation(register_attention("mlr:4|4", name="zeros"))
    with pytest.raises(StructAttnError, match="zero everywhere"):
        model(IDS, attention_mask=LONGS * 0)
