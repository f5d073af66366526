"""The benchmarks of a Llama: logits are right, caches are as large as they say, and prompts take no more
memory.
"""

import importlib.util

import pytest
import torch
from benchmarks import llama as bench
from benchmarks import memory
from benchmarks.registry import CaseUnavailableError

from structattn.testing.tolerances import FORWARD, relative_error

SHAPE = bench.ModelShape(num_layers=2, embed_dim=64, num_heads=2, num_kv_heads=1)


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_every_variant_is_right() -> None:
    (group,) = bench.llama_groups(torch.device("cpu"), torch.float32, shape=SHAPE, lengths=[256])
    sizes = {}
    for case in group.cases:
        try:
            work = case.build()
        except CaseUnavailableError:
            assert case.label == bench.QUANTIZED  # the only variant that asks for a package more
            continue
        for _ in range(2):
            for actual, expected in work.check():
                exact = bench.ROUNDED if case.label in bench.STORAGES else FORWARD
                assert relative_error(actual, expected) <= exact[torch.float32]
            sizes[case.label] = work.cache_nbytes
    plain = 2 * 2 * 256 * 32 * 4  # keys and values of two layers
    assert sizes[bench.BASELINE] == sizes["one level"] == plain
    assert sizes["mlr 8 levels"] == sizes["sliding 8 levels"] < plain
    assert sizes["4 bits"] < sizes["8 bits"]
    flops = {case.label: case.flops for case in group.cases}
    assert flops["mlr 8 levels, values"] < flops["mlr 8 levels"] < flops["one level"] == flops[bench.BASELINE]


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.full
@pytest.mark.parametrize("threads", [2, 16])
def test_a_prompt_takes_no_more_tensors_than_that_of_the_plain_model(threads, monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # buffers grow with them
    # Narrow feed-forward layers: with those of a Llama they have the peak, whatever attention takes.
    shape, length = bench.ModelShape(num_layers=4, embed_dim=256, num_heads=4, num_kv_heads=4), 8192
    sizes = {"vocab_size": 64, "intermediate_size": 128}
    ids, found = torch.randint(64, (1, length)), {}
    for label in (bench.BASELINE, "mlr 8 levels, values", "sliding 8 levels"):
        spec = bench.specs(shape, length)[label]
        model = bench.build_llama(shape, spec, torch.device("cpu"), torch.float32, length=length, **sizes)
        found[label] = memory.tensor_growth(bench.LlamaPrompt(model=model, spec=spec, ids=ids))
    assert found["mlr 8 levels, values"] < 0.85 * found[bench.BASELINE]
    assert found["sliding 8 levels"] < found[bench.BASELINE]


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_every_prompt_is_right() -> None:
    (group,) = bench.prompt_groups(torch.device("cpu"), torch.float32, shape=SHAPE, lengths=[256])
    flops = {}
    for case in group.cases:
        flops[case.label] = case.flops
        try:
            work = case.build()
        except CaseUnavailableError:
            assert case.label == bench.QUANTIZED  # the only variant that asks for a package more
            continue
        for actual, expected in work.check():
            exact = bench.ROUNDED if case.label in (*bench.STORAGES, bench.QUANTIZED) else FORWARD
            assert relative_error(actual, expected) <= exact[torch.float32]
    assert flops["mlr 8 levels, values"] < flops["mlr 8 levels"] < flops["one level"] == flops[bench.BASELINE]
