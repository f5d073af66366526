"""Decoding with a cache through ``torch.compile``: few graphs, whatever the positions, and the results of
eager code.
"""

import pytest
import torch
from hf_models import llama, tokens, trained
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from structattn.errors import CacheError
from structattn.integrations.transformers import LevelCacheLayer, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.testing.tolerances import assert_close

SPECS = [
    "mlr:8|8@64|16",
    "mlr:8|4|4,values=8|4|4",
    "window:12",
    "sliding:8|8@-|8",
    ["mlr:16", "mlr:8|8@64|16"],
]


@pytest.fixture(autouse=True)
def _no_programs():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def made(spec):
    return structurize(trained(llama, hidden_size=64, head_dim=16), spec).requires_grad_(False)


def steps(function, ids, cache, expected, first, last):
    for i in range(first, last):
        assert_close(function(ids[:, i : i + 1], cache=cache).logits, expected[:, i : i + 1])
        assert cache.get_seq_length() == i + 1


@pytest.mark.quick(spec=(SPECS[4],))
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fifty_steps_take_two_graphs(spec) -> None:
    model, ids = made(spec), tokens(2, 66)
    expected = model(ids, use_cache=False).logits
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    cache, other = level_cache(model), level_cache(model)
    model(ids[:, :10], cache=cache)
    steps(compiled, ids, cache, expected, 10, 12)
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps(compiled, ids, cache, expected, 12, 64)
        # Another cache of the same program has its own memory.
        model(ids[:, :13], cache=other)
        steps(compiled, ids, other, expected, 13, 24)
        assert cache.get_seq_length() == 64
        steps(compiled, ids, cache, expected, 64, 66)
    assert counter.frame_count <= 3


@pytest.mark.full
def test_other_numbers_of_tokens_and_rows_are_programs_of_their_own() -> None:
    model, ids = made("mlr:8|8@64|16"), tokens(3, 40)
    expected = model(ids, use_cache=False).logits
    compiled = torch.compile(model.forward, backend="aot_eager")
    for rows in (slice(0, 2), slice(0, 3)):
        cache = level_cache(model)
        for first, last in ((0, 9), (9, 10), (10, 11), (11, 30)):
            out = compiled(ids[rows, first:last], cache=cache).logits
            assert_close(out, expected[rows, first:last])
        cache.crop(-2)
        steps(compiled, ids[rows], cache, expected[rows], 28, 34)
        cache.reorder_cache(torch.arange(cache.layers[0].batch_size).flip(0))
        assert_close(compiled(ids[rows].flip(0)[:, 34:35], cache=cache).logits, expected[rows].flip(0)[:, 34:35])


@pytest.mark.full
@pytest.mark.parametrize("given", ["none", "empty", "gradient"])
def test_a_prompt_without_our_cache_is_one_graph_and_its_cache_goes_on(given) -> None:
    model, ids = made(["mlr:16", "mlr:8|8@64|16"]), tokens(2, 34)
    expected = model(ids, use_cache=False).logits
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.forward, backend=counter)
    cache = {"cache": DynamicCache(config=model.config)} if given == "empty" else {}
    with torch.set_grad_enabled(given == "gradient"):
        model.requires_grad_(given == "gradient")
        out = compiled(ids[:, :10], **cache)
    assert counter.frame_count == 1
    assert_close(out.logits.detach(), expected[:, :10])
    cache = getattr(out, CACHE)
    steps(compiled, ids, cache, expected, 10, 12)
    with torch._dynamo.config.patch(error_on_recompile=True):
        steps(compiled, ids, cache, expected, 12, 34)
    assert counter.frame_count <= 3


@pytest.mark.full
def test_a_step_that_fails_changes_nothing(monkeypatch) -> None:
    model, ids = made("mlr:8|8@64|16"), tokens(2, 30)
    expected = model(ids, use_cache=False).logits
    compiled = torch.compile(model.forward, backend="eager")
    cache = level_cache(model)
    model(ids[:, :10], cache=cache)
    steps(compiled, ids, cache, expected, 10, 13)
    attend, last = LevelCacheLayer.attend, cache.layers[-1]

    def fail_in_the_last(self, *args, **options):
        if self is last:
            raise RuntimeError("no memory")
        return attend(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LevelCacheLayer, "attend", fail_in_the_last)
        with pytest.raises(RuntimeError, match="no memory"):
            compiled(ids[:, 13:14], cache=cache)
    assert [layer.get_seq_length() for layer in cache.layers] == [13, 13]
    steps(compiled, ids, cache, expected, 13, 16)


def test_a_cache_that_is_gone_is_named_not_used() -> None:
    from structattn.cache.numbers import new_number, numbered

    class Thing:
        pass

    thing = Thing()
    number = new_number(thing)
    assert numbered(number) is thing
    del thing
    with pytest.raises(CacheError, match="is gone"):
        numbered(number)


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_inductor_gives_the_same(spec) -> None:
    model, ids = made(spec), tokens(2, 40)
    expected = model(ids, use_cache=False).logits
    compiled = torch.compile(model.forward)
    cache = level_cache(model)
    model(ids[:, :10], cache=cache)
    steps(compiled, ids, cache, expected, 10, 40)
