"""What docs/families.md says of each family, with a tiny random model: the page's table is made from the same
models.
"""

import copy
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import generate
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    call_attention,
    level_cache,
    load_structurized,
    register_adapter,
    structurize,
)
from structattn.testing.tolerances import SIX_DIGITS

DOCS = Path(__file__).parents[2] / "docs"
_page = runpy.run_path(str(DOCS / "write_families.py"))
FAMILIES, RARE, HEAD_DIM, VOCAB = _page["FAMILIES"], _page["RARE"], _page["HEAD_DIM"], _page["VOCAB"]
LEVELS = {"spec": f"mlr:{HEAD_DIM // 2}|{HEAD_DIM // 4}|{HEAD_DIM // 4}", "context_length": 16}
IDS = torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
REAL = MASK.bool()
# Grouped matrix products of experts know no float64, and Gemma 2 and GPT-J score in float32.
SINGLE = {
    "bloom",
    "codegen",
    "flint",
    "gemma2",
    "gpt_neo",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "llama4_text",
    "mimo_v2_flash",
    "mpt",
}
SINGLE |= {"vaultgemma", "xglm"}
LEARNED = {"biogpt", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "xglm"} | {
    f for f, options in RARE.items() if "is_decoder" in options
}  # learned positions
NORM_AFTER = {
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
}  # queries and keys are normed after they are rotated, which changes with the position

SCALED = {"beam", "recurrent_gemma"}  # queries are scaled by their position; a recurrence starts anew at position 0


def logits(model, shift=0):
    positions = (MASK.cumsum(-1) - 1).clamp(min=0) + shift
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, position_ids=positions, use_cache=False).logits[REAL]


def make(family):
    model = _page["tiny"](family)
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    return (model, 1e-5) if family in SINGLE or has_experts else (model.double(), 1e-10)


# In `make test`: the first of each kind of layer and of refusal; all others are in `make test-full`.
QUICK = {"bitnet", "cohere", "gemma3_text", "gpt2", "gpt_oss", "gptj", "lfm2", "phi3"}
QUICK |= {"bert", "falcon_h1", "smollm3"}
QUICK |= {"llama4_text", "bloom", "diffllama", "whisper"}


SINCE_5_19 = {"megatron-bert", "rembert"}  # before, these decoders saw what follows


def known(family):
    """Marks of a test that needs a family."""
    is_old = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 19)
    if family in transformers.CONFIG_MAPPING and not (is_old and family in SINCE_5_19):
        return []
    return [pytest.mark.skip(reason=f"this transformers does not know {family} as a decoder")]


def marks(family):
    return known(family) if family in QUICK else [*known(family), pytest.mark.full]


@pytest.mark.parametrize("family", [pytest.param(family, marks=marks(family)) for family in [*FAMILIES, *RARE]])
def test_family(family, tmp_path) -> None:
    made, tolerance = make(family)
    made.save_pretrained(
        tmp_path / "plain"
    )  # weights are saved in the order of the hub, experts one by one for example
    kind = made.config._attn_implementation
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=made.dtype, attn_implementation=kind
    )
    plain, text = logits(model), generate(model, IDS, MASK, new=6)
    one = structurize(copy.deepcopy(model), f"mlr:{HEAD_DIM}")
    assert _page["row"](family, one) in (DOCS / "families.md").read_text(), "run python docs/write_families.py"
    size = plain.abs().max()
    assert (logits(one) - plain).abs().max() <= tolerance * size
    assert torch.equal(generate(one, IDS, MASK, new=6), text)

    structurize(model, **LEVELS)
    found = logits(model)
    assert (found - plain).abs().max() > 1e-3 * size
    if family not in LEARNED | NORM_AFTER | SCALED:
        moved = logits(model, 13)
        assert (moved - found).abs().max() <= (1e-5 if tolerance == 1e-5 else SIX_DIGITS) * size
    uncached = generate(model, IDS, MASK, new=6, use_cache=False)
    assert torch.equal(generate(model, IDS, MASK, new=6), uncached)
    cache = level_cache(model)
    assert torch.equal(generate(model, IDS, MASK, new=6, past_key_values=cache), uncached)
    assert cache.nbytes > 0
    model.save_pretrained(tmp_path / "levels")
    again = load_structurized(tmp_path / "levels", dtype=model.dtype).eval()
    assert type(again) is type(model)
    assert (logits(again) - found).abs().max() <= (1e-5 if tolerance == 1e-5 else SIX_DIGITS) * size


def test_the_page_has_a_row_for_each_family_and_no_other() -> None:
    works = (DOCS / "families.md").read_text().split("## Models that are refused")[0]
    rows = [line for line in works.splitlines() if line.startswith("| `") and "`model_" not in line]
    assert [line.split("`")[1] for line in rows] == sorted(FAMILIES | RARE)
    assert _page["refused"]() in (DOCS / "families.md").read_text(), "run python docs/write_families.py"


@pytest.mark.full  # test_hf_auto_map.py reloads others in a new process
def test_reloaded_in_a_new_process_by_the_auto_classes(tmp_path) -> None:
    expected = {}
    for family in ("phi3", "cohere", "gemma3_text"):
        model = structurize(make(family)[0], **LEVELS)
        model.save_pretrained(tmp_path / family)
        expected[family] = logits(model)[-1]
    torch.save(expected, tmp_path / "expected.pt")
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
import torch, transformers, structattn.integrations.transformers
from test_hf_families import logits
expected = torch.load({str(tmp_path / "expected.pt")!r}, weights_only=True)
for family, wanted in expected.items():
    path = {str(tmp_path)!r} + "/" + family
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    torch.testing.assert_close(logits(model)[-1], wanted, rtol=1e-5, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REFUSED = [(family, reason) for reason, (_, families) in _page["REFUSED"].items() for family in families]


def everything(model):
    """What structurize must leave as it was when it refuses a model."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    attributes = [(type(module), sorted(vars(module)), module.training) for module in model.modules()]
    tensors = [(name, id(x), x._version) for name, x in model.state_dict(keep_vars=True).items()]
    written = [(config.to_dict(), config._attn_implementation) for config in configs.values()]
    return attributes, tensors, written, torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("family", "reason"),
    [pytest.param(*one, marks=marks(one[0])) for one in REFUSED],
)
def test_refused_by_name_with_the_reason(family, reason) -> None:
    model = _page["tiny"](family, dict(_page["REFUSED"][reason][1][family])).train()
    before = everything(model)
    with pytest.raises(ConfigError, match=reason) as caught:
        structurize(model, f"mlr:{HEAD_DIM}")
    assert type(model).__name__ in str(caught.value)
    assert everything(model) == before


def test_the_configs_of_missing_parts_stay() -> None:
    model = structurize(_page["tiny"]("moshi"), f"mlr:{HEAD_DIM}")
    assert "structattn" not in str(model.config.audio_encoder_config._attn_implementation)


@pytest.mark.parametrize("family", [pytest.param(family, marks=marks(family)) for family in _page["PARTS"]])
def test_decoders_with_other_parts_are_refused_by_name(family) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING[family]())
    with pytest.raises(
        ConfigError, match=f"{type(model).__name__} cannot be structurized: its decoder is one of several parts"
    ):
        structurize(model, "mlr:8")


def test_the_page_names_every_causal_model_of_transformers() -> None:
    """Of the latest version that was tried: what neither works nor is refused by name is named too."""
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the page was written for transformers 5.24")
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert names <= set((DOCS / "families.md").read_text().split("`"))


def test_models_of_several_parts_are_refused_by_name() -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(
        ConfigError, match="T5ForConditionalGeneration cannot be structurized: its decoder is one of several parts"
    ):
        structurize(transformers.T5ForConditionalGeneration(config), "mlr:8")


def test_models_without_tokens_are_refused_by_name() -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    with pytest.raises(ConfigError, match="ViTModel cannot be structurized"):
        structurize(transformers.ViTModel(config), "mlr:8")


def test_the_halved_context_must_be_known() -> None:
    model = _page["tiny"]("recurrent_gemma")
    del model.config.max_position_embeddings
    with pytest.raises(ConfigError, match="RecurrentGemmaForCausalLM has no max_position_embeddings"):
        structurize(model, f"mlr:{HEAD_DIM}")
    structurize(model, f"mlr:{HEAD_DIM}", context_length=32)
    states = [module.recurrent_states for module in model.modules() if hasattr(module, "recurrent_states")]
    assert states == [None]


# Frequencies so low that hardly any pair turns within a text; fewer queries than dimensions; large biases;
# dropout.
HARD = {
    "slow": ({"rope_parameters": {"rope_type": "linear", "factor": 2000.0, "rope_theta": 10000.0}}, "halves:16"),
    "one head": ({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}, "halves:128"),
    "bias": ({"attention_bias": True}, "halves:16"),
    "dropout": ({"attention_dropout": 0.5}, "halves:16"),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_pairs_are_found_where_they_hardly_show(case, dtype) -> None:
    options, expected = HARD[case]
    model = _page["tiny"]("llama", {"head_dim": HEAD_DIM, "num_key_value_heads": 2} | options).to(dtype).train()
    if case == "bias":
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.data.normal_().mul_(20)
    state = torch.get_rng_state()
    structurize(model, "window:8")
    assert model.config.structattn["rotations"] == [expected] * 2
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_classifiers_without_a_padding_token() -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = structurize(transformers.LlamaForSequenceClassification(config), f"mlr:{HEAD_DIM}")
    assert model.config.structattn["rotations"] == ["halves:16"]


@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "gpt2"])
def test_on_the_meta_device_the_rotation_is_read(family) -> None:
    expected = structurize(make(family)[0], **LEVELS)
    found = structurize(copy.deepcopy(_page["tiny"](family)).to("meta"), **LEVELS)
    assert found.config.structattn == expected.config.structattn


class OutsideAttention(GPTNeoSelfAttention):
    """An attention class of another package, which scores in a method of its own."""

    def _attn(self, query, key, value, attention_mask=None):
        return self.weigh(query, key, value, attention_mask), None

    def weigh(self, query, key, value, mask):
        scores = query @ key.transpose(-1, -2)
        return (scores if mask is None else scores + mask).softmax(-1) @ value


class OutsideAdapter(torch.nn.Module):
    is_causal = True

    def weigh(self, query, key, value, mask):
        return call_attention(self, query, key, value, mask, scaling=1.0, dropout=0.0)


class ChangingAttention(OutsideAttention):
    pass


class ChangingAdapter(torch.nn.Module):
    def weigh(self, query, key, value, mask):
        return call_attention(self, query, 2 * key, value, mask, scaling=None, dropout=0.0)


def test_keys_that_are_changed_after_they_are_cached() -> None:
    model = _page["tiny"]("gpt_neo")
    for block in model.transformer.h:
        block.attn.attention.__class__ = ChangingAttention
    register_adapter(ChangingAttention, ChangingAdapter)
    with pytest.raises(ConfigError, match="ChangingAttention changes its keys after it has cached them"):
        structurize(model, f"mlr:{HEAD_DIM}")


def test_an_adapter_from_outside() -> None:
    model = _page["tiny"]("gpt_neo").double()
    for block in model.transformer.h:
        block.attn.attention.__class__ = OutsideAttention
    plain = logits(model)
    with pytest.raises(ConfigError, match="would have no effect"):
        structurize(model, f"mlr:{HEAD_DIM}")
    for wrong in (3, int):
        with pytest.raises(ConfigError, match="adapter must be a class of modules"):
            register_adapter(OutsideAttention, wrong)
    register_adapter(OutsideAttention, OutsideAdapter)
    with pytest.raises(ConfigError, match="has the adapter OutsideAdapter already"):
        register_adapter(OutsideAttention, torch.nn.Identity)
    one = structurize(copy.deepcopy(model), f"mlr:{HEAD_DIM}")
    assert (logits(one) - plain).abs().max() <= 1e-10 * plain.abs().max()
    structurize(model, **LEVELS)
    assert (logits(model) - plain).abs().max() > 1e-3 * plain.abs().max()
    uncached = generate(model, IDS, MASK, new=6, use_cache=False)
    assert torch.equal(generate(model, IDS, MASK, new=6), uncached)


@pytest.mark.parametrize("name", ["gpt_neox", "bert"])
def test_windows_with_sink_tokens_fit_heads_whose_size_has_another_name(name: str, tmp_path: Path) -> None:
    config = {"gpt_neox": transformers.GPTNeoXConfig, "bert": transformers.BertConfig}[name](
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    config.is_decoder = True
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    structured = structurize(copy.deepcopy(model), "heads:standard/window:9,sink_tokens=3")
    structured.save_pretrained(tmp_path)
    tokens = torch.randint(2, VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = load_structurized(tmp_path)(tokens).logits
        torch.testing.assert_close(found, structured(tokens).logits)
        assert (found - model(tokens).logits).abs().max() > 1e-4
