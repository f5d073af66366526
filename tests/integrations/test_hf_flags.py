"""The flags of our models for transformers are true where a thing works, and false where it is refused."""

import os
import subprocess
import sys

import pytest
import torch
from hf_models import generate, gpt2, llama, tokens
from safetensors.torch import save_file
from test_hf_saving import changed, own
from transformers import GenerationMixin

from structattn.errors import CacheError, ConfigError
from structattn.integrations.transformers import calibrate, structurize
from structattn.integrations.transformers.masks.structured_mask import StructuredMask

IDS = tokens(2, 12)
MODELS = {"own": own, "llama": changed, "gpt2": lambda: changed(gpt2)}


@pytest.mark.parametrize("kind", MODELS)
def test_no_other_attention_takes_the_place(kind, tmp_path) -> None:
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    flags = {
        "sdpa": "_supports_sdpa",
        "flex_attention": "_supports_flex_attn",
        "flash_attention_2": "_supports_flash_attn",
    }
    if kind == "own":  # what programs ask for by default changes nothing
        assert torch.equal(
            type(model).from_pretrained(tmp_path, attn_implementation="sdpa")(IDS).logits, model(IDS).logits
        )
        del flags["sdpa"]
    for name, flag in flags.items():
        assert getattr(type(model), flag) is False
        with pytest.raises(ConfigError, match="given by its config"):
            model.set_attn_implementation(name)
        with pytest.raises((ConfigError, ImportError, ValueError)):
            type(model).from_pretrained(tmp_path, attn_implementation=name)
    # which is what other servers ask before they put their own attention in
    assert not type(model).is_backend_compatible()
    assert not type(model)._supports_context_parallel
    assert not type(model)._can_set_attn_implementation()


@pytest.mark.parametrize("kind", MODELS)
def test_generation_is_among_the_direct_bases(kind) -> None:
    model = MODELS[kind]()
    assert GenerationMixin in type(model).__bases__  # where transformers' own classes have it, and its tests look
    assert GenerationMixin not in type(model.base_model).__bases__


@pytest.mark.parametrize("kind", MODELS)
def test_static_caches_are_refused(kind) -> None:
    model = MODELS[kind]()
    assert type(model)._can_compile_fullgraph is False  # transformers means: with a static cache
    with pytest.raises((CacheError, ConfigError), match="cache"):
        generate(model, IDS, cache_implementation="static")


@pytest.mark.parametrize("kind", MODELS)
def test_stages_of_a_pipeline_cannot_send_the_mask(kind) -> None:
    model = MODELS[kind]()
    assert not model.supports_pp_plan
    assert not model.pp_plan
    seen = []
    layer = next(module for name, module in model.named_modules() if name.endswith((".layers.1", ".h.1")))
    layer.register_forward_pre_hook(lambda _, args, kwargs: seen.extend((*args, *kwargs.values())), with_kwargs=True)
    model(IDS, use_cache=False)
    assert any(not isinstance(x, torch.Tensor) and x is not None for x in seen)
    assert kind == "own" or any(isinstance(x, StructuredMask) for x in seen)


PARALLEL = """
import os
import sys
import torch
import torch.distributed as dist
from pathlib import Path
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
import structattn.integrations.transformers
folder = Path(sys.argv[1])
try:
    from transformers.distributed import DistributedConfig
    how = {"distributed_config": DistributedConfig(tp_size=2, tp_plan="auto")}
except (ImportError, TypeError):
    how = {"tp_plan": "auto"}
model = AutoModelForCausalLM.from_pretrained(folder, **how)
expected = load_file(folder.parent / "expected")
logits = model(expected["ids"]).logits
error = (logits - expected["logits"]).abs().max()
text = model.generate(expected["ids"], max_new_tokens=9, do_sample=False, pad_token_id=0)
weight = model.model.layers[0].self_attn.q_proj.weight
is_divided = weight.to_local().shape[0] * 2 == weight.shape[0]
line = f"rank {type(model).__name__} {is_divided} {error < 1e-12} {torch.equal(text, expected['text'])}\\n"
os.write(1, line.encode())  # at once: both processes have one output
"""


def test_which_models_have_a_plan_for_tensor_parallelism() -> None:
    assert changed().supports_tp_plan
    assert changed().tp_plan == llama().tp_plan
    assert not own().supports_tp_plan
    assert not changed(gpt2).supports_tp_plan


def with_heads(**options):
    model = llama(num_key_value_heads=4).double().eval()
    spec = "heads:standard/window:5,sink_tokens=2/mlr:4|4@16|4,scaling=standard/window:5,sink_tokens=2"
    return structurize(model, spec, **options)


def with_calibrated_heads():
    plain = llama(num_key_value_heads=4).double().eval()
    options = {"rotary_split": "calibrated", "calibration": calibrate(plain, [tokens(2, 30)])}
    return structurize(plain, "mlr:4|4@16|4,scaling=standard", **options)


@pytest.mark.full
@pytest.mark.parametrize("make", [changed, with_heads, with_calibrated_heads])
def test_tensor_parallelism(make, tmp_path) -> None:
    model = make()
    model.save_pretrained(tmp_path / "model")
    text = model.generate(IDS, max_new_tokens=9, do_sample=False, pad_token_id=0)
    save_file({"logits": model(IDS).logits, "ids": IDS, "text": text}, tmp_path / "expected")
    program = tmp_path / "parallel.py"
    program.write_text(PARALLEL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path / "model")], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert found == ["rank StructAttnLlamaForCausalLM True True True"] * 2
