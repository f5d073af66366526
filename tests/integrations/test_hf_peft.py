"""LoRA by PEFT: the names that the documentation gives, on our architecture and on a structurized model."""

import re
from pathlib import Path

import pytest
import torch
from hf_models import llama, tokens, trained

from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM, structurize
from structattn.testing.tolerances import assert_close

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
LINEARS = ["value_proj", "out_proj", "gate_proj", "up_proj", "down_proj"]


def ours(spec="mlr:4|2|2"):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return StructAttnForCausalLM(StructAttnConfig(attention=spec, **sizes, max_position_embeddings=64)).double().eval()


def test_the_documented_names() -> None:
    listed = re.search(r"target_modules=(\[.*?\])", PAGE.read_text())[1]
    assert re.findall(r'"(\w+)"', listed) == LINEARS
    for spec in ("mlr:4|2|2", "bilinear-btt:1", "bilinear-mlr:4|2|1|1"):
        layer = ours(spec).model.layers[0]
        names = {name for name, module in layer.named_modules() if isinstance(module, torch.nn.Linear)}
        assert {name.rpartition(".")[2] for name in names} == set(LINEARS)
        assert layer.attention.scoring is not None  # what modules_to_save=["scoring"] names
    structurized = structurize(trained(llama), "mlr:4|2|2")
    plain = {name for name, _ in trained(llama).named_modules()}
    assert {name for name, _ in structurized.named_modules()} == plain  # PEFT's own list for the family fits


def restructured():
    return structurize(trained(llama), "mlr:4|2|2", context_length=8)


OURS = {"target_modules": LINEARS, "modules_to_save": ["scoring"]}
ADAPTED = {
    "own": (ours, OURS),
    "own, full rank": (lambda: ours("bilinear-btt:1"), OURS),
    "structurized": (restructured, {"target_modules": ["q_proj", "v_proj"]}),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", ADAPTED)
def test_trained_saved_and_merged(kind, tmp_path) -> None:
    peft = pytest.importorskip("peft", reason="LoRA: pip install peft")
    make, options = ADAPTED[kind]
    model = peft.get_peft_model(make(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    ids = tokens(2, 9)
    before = model(input_ids=ids).logits
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(trainable, lr=1.0).step()
    after = model.eval()(input_ids=ids).logits
    assert (after - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    assert_close(loaded.eval()(input_ids=ids).logits, after)
    assert_close(model.merge_and_unload()(input_ids=ids).logits, after)


@pytest.mark.full
def test_defaults_added_to_the_table_of_peft() -> None:
    """As the page shows it: without it PEFT asks for target_modules."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(structurize(trained(llama), "mlr:4|2|2"), config)
    example = next(text for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "peft" in text)
    values: dict = {}
    exec(example, values)
    try:
        for model in (ours(), structurize(trained(llama), "mlr:4|2|2")):
            assert "lora" in str(peft.get_peft_model(model, config)).lower()
            config = peft.LoraConfig(task_type="CAUSAL_LM")
    finally:
        for name in ("structattn", "structattn_llama"):
            del values["targets"][name]
