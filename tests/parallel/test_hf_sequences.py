"""Models of transformers with a sequence over several processes, against one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import divided_hf
import pytest
from cluster import Cluster

from structattn.testing.tolerances import SAME_MODEL

PAGE = Path(__file__).parents[2] / "docs" / "huggingface-sequences.md"
PACKED = {"position_ids": [[*range(20), *range(17)]]}


def done(found: list[Any]) -> list[Any]:
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("family", "spec", "order", "extra", "checkpointing"),
    [
        ("llama", "mlr:4|2|2,values=4|2|2", "head-tail", {}, False),
        ("llama", "mlr:4|2|2", "contiguous", PACKED, True),
        ("llama", "heads:standard/mlr:4|4@32|8", "head-tail", {}, False),
        pytest.param(
            "llama", "standard", "contiguous", {"position_ids": [list(range(5, 42))]}, False, marks=pytest.mark.full
        ),
        pytest.param("qwen2", "[mlr:4|4,window:7]", "head-tail", {}, False, marks=pytest.mark.full),
        pytest.param("gpt2", "sliding:4|4@-|9", "contiguous", {}, False, marks=pytest.mark.full),
        pytest.param("llama", "mlr:4|2|2", "head-tail", PACKED, True, marks=pytest.mark.full),
        pytest.param("registered llama", "mlr:4|2|2", "head-tail", {}, False, marks=pytest.mark.full),
    ],
)
def test_a_divided_sequence_equals_a_whole_one(
    cluster: Cluster, world: int, family: str, spec: str, order: str, extra: Any, checkpointing: bool
) -> None:
    done(cluster.run(world, divided_hf.compare, family, spec, order, extra, checkpointing))


@pytest.mark.parametrize(
    ("world", "wrapper"),
    [
        (2, "ddp"),
        pytest.param(4, "ddp", marks=pytest.mark.full),
        pytest.param(2, "fsdp", marks=pytest.mark.full),
        pytest.param(4, "fsdp", marks=pytest.mark.full),
    ],
)
def test_twenty_steps_equal_those_of_one_process(cluster: Cluster, world: int, wrapper: str) -> None:
    found = done(cluster.run(world, divided_hf.compare_training, "mlr:4|2|2", wrapper))
    _, expected = found[0]
    assert len(expected) == 20
    for losses, _ in found:
        assert losses == pytest.approx(expected, abs=SAME_MODEL, rel=0)


@pytest.mark.parametrize(("is_balanced", "order"), [(True, "head-tail"), (False, "contiguous")])
def test_a_divided_model_takes_the_shards_of_torch(cluster: Cluster, is_balanced: bool, order: str) -> None:
    done(cluster.run(2, divided_hf.in_context_of_torch, is_balanced, order))


def test_the_order_of_the_model_must_be_that_of_the_tokens(cluster: Cluster) -> None:
    for error in cluster.run(2, divided_hf.in_context_of_torch, True, "contiguous"):
        assert "in 'contiguous' order, as sequence_shard gives them" in str(error)


def test_the_division_can_be_taken_back(cluster: Cluster) -> None:
    done(cluster.run(2, divided_hf.whole_again))


MESSAGES = {
    "plain": "has the attention 'sdpa', which does not exchange keys",
    "own class": "StructAttnForCausalLM counts positions by itself",
    "recurrent": "has layers of linear_attention, which need the tokens of other processes too",
    "no model": "model must be a model of transformers",
    "padding": "a sequence with padding cannot be divided",
    "entry": "got 'pixel_values': leave it away",
    "no tokens": "needs input_ids, got labels",
    "few": "a sequence of 1 tokens cannot be divided among 2 processes",
    "shape": "labels must have shape (batch, tokens), as input_ids, got (2, 36) and (2, 37)",
    "numbers": "labels must be ints (such as torch.int64), got torch.float32",
    "backend": "chooses its backend: register 'auto', got 'reference'",
    "dropout": "attention over a divided sequence has no dropout, got 0.1",
    "cache": "has tokens of one process only, and a cache needs all: pass use_cache=False",
    "mask": "attention over a divided sequence takes no mask and no padding",
    "weights": "does not know the argument 'output_attentions'",
    "labels": "the label of the last token of a shard is in another one: give shift_labels",
    "positions": "a process does not know where its tokens are in the sequence: give position_ids",
    "local positions": "position_ids of the first token in all is 0 in process 0; -19 in process 1 (counted from 0)",
    "jump": "position_ids must be those of the tokens that this process has in 'contiguous' order",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_divided_sequence_does_not_have_is_an_error(cluster: Cluster, name: str) -> None:
    for message in done(cluster.run(2, divided_hf.refused, name)):
        assert MESSAGES[name] in message


def test_the_other_processes_hear_of_a_wrong_call(cluster: Cluster) -> None:
    first, second = done(cluster.run(2, divided_hf.refused, "one process"))
    assert "the call of process 1 of 2 (counted from 0) is wrong" in first
    assert MESSAGES["positions"] in first
    assert MESSAGES["positions"] in second


TINY = """AutoModelForCausalLM.from_config(
    __import__("transformers").Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128
    )
)"""


DDP = """wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
"""
ACCELERATE = """accelerator = Accelerator(cpu=True)
wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-5))
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "wrapper"), [("loop.py", "ddp"), ("loop.py", "accelerate"), ("trainer.py", "")])
def test_the_examples_run_under_torchrun(tmp_path: Path, name: str, wrapper: str) -> None:
    code = re.search(rf"starts {name}.*?```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    text = code[1].replace('AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")', TINY)
    assert text != code[1]
    if wrapper == "accelerate":  # as the page says in words
        text = "from accelerate import Accelerator\n" + text.replace(DDP, ACCELERATE)
        assert ACCELERATE in text
    losses = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        (folder / name).write_text("import torch\ntorch.manual_seed(0)\n" + text)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run([*command, name], cwd=folder, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        losses.append([float(x) for x in re.findall(r"^loss (\S+)$", done.stdout, re.MULTILINE)])
        assert (folder / "structured" / "model.safetensors").exists()
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)  # as they are printed
