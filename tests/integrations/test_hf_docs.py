"""The examples of docs/huggingface.md run, on a tiny model in place of the one that they name."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import _SIZES, VOCAB, Letters, tokens

from structattn.integrations.transformers import StructAttnForCausalLM
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.retrieval import TASKS

PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
FILES = PAGE.with_name("huggingface-use.md")


def _each(storage):
    return storage if isinstance(storage, list) else [storage]


@pytest.mark.full
def test_the_examples_run(monkeypatch, tmp_path) -> None:
    sizes = {**_SIZES, "head_dim": 128}

    def tiny(name):
        assert name == "Qwen/Qwen3-0.6B"
        torch.manual_seed(0)
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).eval()

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", tiny)
    monkeypatch.chdir(tmp_path)
    ids = tokens(2, 9)
    encoding = transformers.BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name: lambda text, return_tensors: encoding
    )
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 6  # that of PEFT runs in test_hf_peft
    values: dict = {}
    exec(examples[0], values)
    assert type(values["model"]) is StructAttnForCausalLM
    assert values["model"](ids).logits.shape == (2, 9, 1000)
    values = {}
    exec(examples[1], values)
    assert type(values["model"]).__name__ == "StructAttnQwen3ForCausalLM"
    shown = json.loads("{" + re.search(r"```json\n(.*?)```", FILES.read_text(), re.DOTALL)[1] + "}")["structattn"]
    assert values["model"].config.structattn == shown | {"specs": ["mlr:64|32|32"] * 2, "rotations": ["halves:128"] * 2}
    texts = {name: transformers.BatchEncoding({"input_ids": tokens(1, 128, seed)}) for seed, name in enumerate("ab")}
    values = {"documents": list(texts), "tokenizer": lambda text, return_tensors: texts[text]}
    sizes["max_position_embeddings"] = 256  # texts are read twice
    exec(examples[2], values)
    assert any(storage.keep is not None for of_layer in values["chosen"].storage for storage in _each(of_layer))
    assert values["chosen"].plain_nbytes >= 6 * values["chosen"].nbytes
    assert Path("calibration.safetensors").is_file()
    values = {}
    with monkeypatch.context() as patched:
        patched.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: Letters(vocab=VOCAB))
        Path("book.txt").write_text("0" * 1300)
        few = "tokenizer=tokenizer, num_windows=2, num_steps=4, num_prompts=1"
        exec(examples[3].replace("tokenizer=tokenizer", few), values)
    assert values["small"].nbytes < values["plain"].nbytes
    assert [x.task for x in values["small"].recall[::3]] == list(TASKS)
    values = {}
    exec(examples[4].replace("cache=", f"{CACHE}="), values)  # the page has the name of transformers 5.24
    assert values["text"].shape[0] == 2
