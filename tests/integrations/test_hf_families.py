"""What docs/families.md says of each family, with a tiny random model: the page's table is made from the same models."""

import copy
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import generate

from structattn.errors import ConfigError
from structattn.integrations.transformers import level_cache, load_structurized, structurize
from structattn.testing.tolerances import SIX_DIGITS

DOCS = Path(__file__).parents[2] / "docs"
_page = runpy.run_path(str(DOCS / "write_families.py"))
FAMILIES, HEAD_DIM, VOCAB = _page["FAMILIES"], _page["HEAD_DIM"], _page["VOCAB"]
LEVELS = {"spec": f"mlr:{HEAD_DIM // 2}|{HEAD_DIM // 4}|{HEAD_DIM // 4}", "context_length": 16}
IDS = torch.randint(3, VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :5] = 0
REAL = MASK.bool()
# Grouped matrix products of experts know no float64, and Gemma 2 and GPT-J score in float32.
SINGLE = {"gemma2", "gpt_oss", "gptj", "glm4_moe", "granitemoe", "mixtral", "phimoe", "qwen2_moe", "qwen3_moe"}
LEARNED = {"biogpt", "gpt2", "gpt_bigcode", "opt"}  # learned positions
NORM_AFTER = {"hunyuan_v1_dense"}  # queries and keys are normed after they are rotated, which changes with the position


def logits(model, shift=0):
    positions = (MASK.cumsum(-1) - 1).clamp(min=0) + shift
    with torch.no_grad():
        return model(IDS, attention_mask=MASK, position_ids=positions, use_cache=False).logits[REAL]


def make(family):
    model = _page["tiny"](family)
    return (model, 1e-5) if family in SINGLE else (model.double(), 1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, tmp_path) -> None:
    model, tolerance = make(family)
    plain, text = logits(model), generate(model, IDS, MASK, new=6)
    one = structurize(copy.deepcopy(model), f"mlr:{HEAD_DIM}")
    assert _page["row"](family, one) in (DOCS / "families.md").read_text(), "run python docs/write_families.py"
    size = plain.abs().max()
    assert (logits(one) - plain).abs().max() <= tolerance * size
    assert torch.equal(generate(one, IDS, MASK, new=6), text)

    structurize(model, **LEVELS)
    found = logits(model)
    assert (found - plain).abs().max() > 1e-3 * size
    if family not in LEARNED | NORM_AFTER:
        moved = logits(model, 13)
        assert (moved - found).abs().max() <= (1e-5 if family in SINGLE else SIX_DIGITS) * size
    uncached = generate(model, IDS, MASK, new=6, use_cache=False)
    assert torch.equal(generate(model, IDS, MASK, new=6), uncached)
    cache = level_cache(model)
    assert torch.equal(generate(model, IDS, MASK, new=6, past_key_values=cache), uncached)
    assert cache.nbytes > 0
    model.save_pretrained(tmp_path)
    again = load_structurized(tmp_path, dtype=model.dtype).eval()
    assert type(again) is type(model)
    assert (logits(again) - found).abs().max() <= (1e-5 if family in SINGLE else SIX_DIGITS) * size


def test_the_page_has_a_row_for_each_family_and_no_other() -> None:
    rows = [
        line
        for line in (DOCS / "families.md").read_text().splitlines()
        if line.startswith("| `") and "`model_" not in line
    ]
    assert [line.split("`")[1] for line in rows] == sorted(FAMILIES)


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
    model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r} + "/" + family, dtype=torch.float64).eval()
    torch.testing.assert_close(logits(model)[-1], wanted, rtol=1e-5, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_SIZES = _page["_SIZES"]
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, "would have no effect"),
    "mamba": ({}, "would have no effect"),
    "diffllama": ({}, "more than once"),
    "jetmoe": ({"num_key_value_heads": 4, "kv_channels": HEAD_DIM, "num_local_experts": 2}, "changes its keys after"),
}  # fmt: skip


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_with_the_reason(family) -> None:
    options, message = REFUSED[family]
    config = transformers.CONFIG_MAPPING[family](**_SIZES | options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match=message):
        structurize(model, f"mlr:{HEAD_DIM}")
    assert model.config._attn_implementation == before
    model(IDS)


@pytest.mark.parametrize("family", ["llama", "phi", "cohere", "gpt2"])
def test_on_the_meta_device_the_rotation_is_read(family) -> None:
    expected = structurize(make(family)[0], **LEVELS)
    found = structurize(copy.deepcopy(_page["tiny"](family)).to("meta"), **LEVELS)
    assert found.config.structattn == expected.config.structattn
