"""A saved model loads in a process that has not imported the package, through the module file that is saved
with it.
"""

import json

import pytest
import torch
import transformers
from hf_models import llama, tokens
from safetensors.torch import save_file
from test_hf_saving import changed, own, python

from structattn.errors import CheckpointError, ConfigError
from structattn.integrations import transformers as integration
from structattn.integrations.transformers import StructAttnModel, structurize

IDS = tokens(2, 17)


@pytest.mark.full
def test_without_the_import(tmp_path) -> None:
    for name, model in (("changed", changed()), ("own", own())):
        model.save_pretrained(tmp_path / name)
        save_file({"logits": model(IDS).logits, "ids": IDS}, tmp_path / f"{name}.expected")
    changed().save_pretrained(tmp_path / "older")
    (tmp_path / "older" / "structattn_model.py").unlink()
    path = tmp_path / "older" / "config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "auto_map"}))
    found = python(
        """
        import importlib
        import sys
        from pathlib import Path
        from safetensors.torch import load_file
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
        folder = Path(sys.argv[1])
        for name, message in (("changed", "trust_remote_code=True"), ("older", "does not recognize this architecture")):
            try:
                AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=False)
            except ValueError as error:
                print(message in str(error))
        assert not [name for name in sys.modules if name.startswith("structattn")]
        for name in ("changed", "own"):
            expected = load_file(folder / f"{name}.expected")
            model = AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
            model.save_pretrained(folder / f"{name}-again")
            again = AutoModelForCausalLM.from_pretrained(folder / f"{name}-again", trust_remote_code=True)
            for x in (model, again):
                print(type(x).__name__, bool((x(expected["ids"]).logits - expected["logits"]).abs().max() < 1e-12))
            base = AutoModel.from_pretrained(folder / name, trust_remote_code=True)
            print(type(base).__name__, type(base) is type(model.model))
            from structattn.integrations.transformers import StructAttnForCausalLM
            from structattn.integrations.transformers.structurize import classes
            kind = classes.class_named(type(model).__name__) or StructAttnForCausalLM
            config = AutoConfig.from_pretrained(folder / name)
            print(type(model) is type(again) is kind, type(config) is kind.config_class)
            # where pipelines and trainers look
            print(getattr(importlib.import_module("transformers"), model.config.architectures[0]) is kind)
        print(type(AutoModelForCausalLM.from_pretrained(folder / "older")).__name__)  # the package is imported by now
        """,
        tmp_path,
    )
    llama_lm, own_lm = "StructAttnLlamaForCausalLM", "StructAttnForCausalLM"
    each = [
        [f"{kind} True"] * 2 + [f"{kind.replace('ForCausalLM', 'Model')} True", "True True", "True"]
        for kind in (llama_lm, own_lm)
    ]
    assert found.splitlines() == ["True", "True", *each[0], *each[1], llama_lm]
    again = tmp_path / "changed-again"
    assert sorted(file.name for file in again.glob("*.py")) == ["structattn_model.py"]
    assert (again / "structattn_model.py").read_bytes() == (tmp_path / "changed" / "structattn_model.py").read_bytes()


def test_what_is_written(tmp_path, monkeypatch) -> None:
    model = changed()
    model.config.auto_map = {"AutoConfig": "theirs.Config", "AutoTokenizer": ["theirs.Tokenizer", None]}
    model.config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert written["AutoTokenizer"] == ["theirs.Tokenizer", None]
    names = {entry.removeprefix("structattn_model.") for name, entry in written.items() if name != "AutoTokenizer"}
    assert {"StructAttnLlamaConfig", "StructAttnLlamaForSequenceClassification"} < names
    values: dict = {}
    exec((tmp_path / "structattn_model.py").read_text(), values)
    assert names <= set(values)
    assert values["StructAttnLlamaForCausalLM"] is type(model)
    # The classes stay those of the package when transformers marks them as remote code.
    type(model.config).register_for_auto_class()
    type(model).register_for_auto_class("AutoModelForCausalLM")
    model.save_pretrained(tmp_path / "marked")
    assert [file.name for file in (tmp_path / "marked").glob("*.py")] == ["structattn_model.py"]
    # A file that cannot be written is our error, and nothing is left.
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="cannot write"):
        model.config.save_pretrained(tmp_path / "file")
    with pytest.raises(ConfigError, match="save_directory"):
        model.config.save_pretrained("")


def test_a_family_of_someone_s_own_is_not_promised(tmp_path) -> None:
    class MyConfig(transformers.LlamaConfig):
        model_type = "my_llama"

    class MyModel(transformers.LlamaForCausalLM):
        config_class = MyConfig

    torch.manual_seed(0)
    model = structurize(MyModel(MyConfig(**llama().config.to_diff_dict() | {"model_type": "my_llama"})), "mlr:4|4")
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {}


def test_classes_by_name() -> None:
    assert integration.StructAttnGPT2LMHeadModel.config_class is integration.StructAttnGPT2Config
    assert integration.StructAttnModel is StructAttnModel
    for name in ("StructAttnNothing", "LlamaForCausalLM", "StructAttntorch"):
        with pytest.raises(AttributeError, match=name):
            getattr(integration, name)
