"""Decoding with a cache through ``torch.compile``: few graphs, whatever the positions, and the results of
eager code.
"""

import copy

import pytest
import torch
import transformers
from hf_models import NONE, SOME, chosen_copy, chosen_llama, llama, tokens, trained
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

import structattn as sa
from structattn.errors import CacheError, ConfigError
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


@pytest.mark.full
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


BITS = sa.Storage(4, 8, group_size=4, residual=4, keep=8, block=16, recent=16)
IDS = torch.randint(50, (2, 120), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def chosen():
    return chosen_llama([[SOME, BITS], [None, NONE], None]).requires_grad_(False)


def chosen_steps(function, cache, first, last):
    return torch.cat([function(IDS[:, n : n + 1], **{CACHE: cache}).logits for n in range(first, last)], dim=1)


@pytest.mark.full
def test_steps_with_chosen_tokens_are_those_of_eager_code_in_two_graphs(chosen) -> None:
    cache, other = level_cache(chosen), level_cache(chosen)
    for each in (cache, other):
        chosen(IDS[:, :50], **{CACHE: each})
    expected = chosen_steps(chosen, other, 50, 110)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(chosen.forward, backend=counter, fullgraph=True)
    found = [chosen_steps(compiled, cache, 50, 52)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found.append(chosen_steps(compiled, cache, 52, 110))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert counter.frame_count <= 3
    assert cache.nbytes == other.nbytes
    # Which tokens stay is the same as well: eager code goes on with both.
    torch.testing.assert_close(chosen_steps(chosen, cache, 110, 120), chosen_steps(chosen, other, 110, 120))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_prompts_rows_and_tokens_that_are_taken_back(chosen, backend) -> None:
    cache, other = level_cache(chosen), level_cache(chosen)
    compiled = torch.compile(chosen.forward, backend=backend)
    for function, each in ((compiled, cache), (chosen, other)):
        function(IDS[:, :40], **{CACHE: each})
        chosen_steps(function, each, 40, 47)
        function(IDS[:, 47:52], **{CACHE: each})
        each.crop(-3)
        each.reorder_cache(torch.tensor([1, 1]))
    near = {"atol": 1e-3, "rtol": 1e-3}  # inductor rounds in another order; another choice of tokens changes more
    torch.testing.assert_close(chosen_steps(compiled, cache, 49, 90), chosen_steps(chosen, other, 49, 90), **near)
    again = copy.deepcopy(cache)
    torch.testing.assert_close(chosen_steps(compiled, again, 90, 100), chosen_steps(chosen, other, 90, 100), **near)


@pytest.mark.full
def test_layers_that_share_keys_share_their_scores() -> None:
    """In Gemma 3n the last layers append the keys of an earlier one again, with the scores that it gave."""
    config = transformers.Gemma3nTextConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=2,
        layer_types=["full_attention"] * 4,
        activation_sparsity_pattern=[0.0] * 4,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=50,
        laurel_rank=4,
        altup_num_inputs=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    chosen = chosen_copy(transformers.Gemma3nForCausalLM(config), [SOME, SOME, None, None]).requires_grad_(False)
    cache, other = level_cache(chosen), level_cache(chosen)
    for each in (cache, other):
        chosen(IDS[:, :50], **{CACHE: each})
    compiled = torch.compile(chosen.forward, backend="eager")
    near = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(chosen_steps(compiled, cache, 50, 90), chosen_steps(chosen, other, 50, 90), **near)


@pytest.mark.full
def test_what_cannot_be_compiled_of_chosen_tokens_is_said(chosen) -> None:
    compiled = torch.compile(chosen.forward, backend="eager")
    with pytest.raises(ConfigError, match=r"cannot make a cache that chooses tokens .*level_cache\(model\)"):
        compiled(IDS[:, :40])
    chosen.train()
    with pytest.raises(ConfigError, match=r"not for compiled models: leave torch\.compile away"):
        compiled(IDS[:, :40], use_cache=False)
    chosen.eval().requires_grad_(True)
    with torch.enable_grad(), pytest.raises(ConfigError, match="gives no gradients"):
        compiled(IDS[:, :40], **{CACHE: level_cache(chosen)})
