"""Continuous batching of transformers with a paged cache that has levels: the tokens of ``generate``, and no
page lost.
"""

import asyncio
import importlib
import random
import re
import sys
import time

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from structattn import Storage
from structattn.cache.storage import storage_data
from structattn.errors import ConfigError, MissingDependencyError
from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM, structurize

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    pytest.skip("continuous batching with levels needs transformers 5.20", allow_module_level=True)

VOCAB, CONTEXT = 50, 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # so that the largest logit is largest by far
    "eos_token_id": None,
}


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options)).eval()


def mistral():
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, head_dim=8, sliding_window=11)).eval()


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=None, initializer_range=0.2)
    ).eval()


def own(spec, **options):
    torch.manual_seed(0)
    return StructAttnForCausalLM(StructAttnConfig(attention=spec, **SIZES | options)).eval()


STORAGE = Storage(8, 4, group_size=4, residual=6)
SHARING = "values, whose beginnings are shared"
MODELS = {
    SHARING: lambda: structurize(llama(), "mlr:4|2|2@64|16|8,values=4|2|2"),
    "values": lambda: structurize(llama(), "[mlr:4|2|2,values=4|2|2,window:9]"),
    "own": lambda: own(["mlr:4|2|2", "bilinear-btt:1"]),
    "heads": lambda: structurize(llama(), "heads:standard/window:12,sink_tokens=2"),
}
MORE = {
    "heads of levels": lambda: structurize(llama(), "[heads:mlr:4|2|2@64|16|8/window:9*1,mlr:4|4]"),
    "own heads": lambda: own(["heads:standard/window:12,sink_tokens=2", "heads:mlr:4|4/window:7"]),
    "bilinear heads": lambda: own(
        [
            "bilinear-btt:1,scaling=mup+heads:window:12,sink_tokens=2*3/standard",
            "bilinear-mlr:4|2,scaling=mup+heads:standard/window:9*3",
        ],
        num_key_value_heads=4,
    ),
    "four heads": lambda: own("heads:standard/window:12,sink_tokens=2*2/standard", num_key_value_heads=4),
    "window and levels": lambda: structurize(mistral(), "mlr:4|4"),
    "levels": lambda: structurize(llama(), "mlr:4|2|2"),
    "fewer bits": lambda: structurize(llama(), "standard", storage=STORAGE),
    "fewer bits, levels": lambda: structurize(llama(), "mlr:4|2|2@64|32|16,values=4|2|2", storage=STORAGE),
    "fewer bits, some levels": lambda: structurize(
        llama(), "mlr:4|2|2@64|32|16,sink_tokens=2", storage=Storage((4, 8, 16), 8, 4, 6)
    ),
    "fewer bits, heads": lambda: structurize(
        llama(num_key_value_heads=4), "heads:standard/window:12,sink_tokens=2*2/mlr:4|4@64|16", storage=STORAGE
    ),
    "fewer bits, of each": lambda: structurize(llama(), "standard", storage=[[STORAGE, None], Storage(8, 8, 2, 3)]),
    "fewer bits, window": lambda: structurize(mistral(), "standard", storage=Storage(8, 8, 2, 3)),
    "gpt2": lambda: structurize(gpt2(), "mlr:4|2|2@64|32|16"),
    "own, learned positions": lambda: own("global-window:4|4@6", rotary=None, max_position_embeddings=128),
}


def prompts(lengths, seed=1):
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=made).tolist() for length in lengths]


def expected(model, tokens, count, eos=None):
    out = model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=count, eos_token_id=eos)
    return out[0, len(tokens) :].tolist()


def greedy(count, eos=-1):
    return GenerationConfig(do_sample=False, max_new_tokens=count, eos_token_id=eos)


def batched(model, given, count, eos=-1, **options):
    outs = model.generate_batch(
        given, greedy(count, eos), continuous_batching_config=ContinuousBatchingConfig(**{"page_size": 16} | options)
    )
    assert not [out.error for out in outs.values() if out.error]
    return [out.generated_tokens for out in outs.values()]


@pytest.mark.quick(name=["fewer bits, heads"])
@pytest.mark.parametrize("name", MODELS | MORE)
def test_the_tokens_are_those_of_generate(name) -> None:
    model = (MODELS | MORE)[name]()
    given = prompts((1, 7, 29, 40, 32))
    wanted = [expected(model, one, 10) for one in given]
    assert len({tuple(one) for one in wanted}) > 3
    assert batched(model, given, 10, num_blocks=30) == wanted
    assert batched(model, given, 10, num_blocks=30, max_batch_tokens=13) == wanted  # prompts in chunks


@pytest.mark.full
@pytest.mark.parametrize("name", ["values", "heads"])
def test_requests_that_do_not_fit_wait_and_those_that_stop_leave(name) -> None:
    model = MODELS[name]()
    given = prompts((40, 3, 17, 33, 9, 50))
    eos = expected(model, given[0], 16)[4]
    wanted = [expected(model, one, 16, eos) for one in given]
    assert len({len(one) for one in wanted}) > 1
    for scheduler in ("fifo", "prefill_first"):
        assert batched(model, given, 16, eos, num_blocks=3, scheduler_type=scheduler) == wanted


def results(manager, count):
    """Those of ``count`` requests, by their names."""
    found, deadline = {}, time.monotonic() + 120
    while len(found) < count and time.monotonic() < deadline:
        if (result := manager.get_result(timeout=0.1)) is not None:
            found[result.request_id] = result
    return found


def test_a_request_that_is_larger_than_the_pool_fails_alone() -> None:
    model = MODELS["values"]()
    (fits, long, grows) = prompts((20, 300, 30))
    options = ContinuousBatchingConfig(page_size=16, num_blocks=3)
    with model.continuous_batching_context_manager(greedy(12), continuous_batching_config=options) as manager:
        manager.add_request(long, request_id="long")
        manager.add_request(grows, request_id="grows", max_new_tokens=1000)
        manager.add_request(fits, request_id="fits")
        found = results(manager, 3)
        assert manager.is_running()
        pages = manager.batch_processor.cache.pages
        assert not pages.num_used
    assert found["fits"].generated_tokens == expected(model, fits, 12)
    for name in ("long", "grows"):
        assert re.search(r"tokens need \d+ pages of the cache, which has \d+: give it more memory", found[name].error)
    assert found["grows"].generated_tokens[:12] == expected(model, grows, 12)


def test_an_empty_prompt_fails_alone() -> None:
    model = MODELS["values"]()
    (other,) = prompts((20,))
    options = ContinuousBatchingConfig(page_size=16, num_blocks=20)
    with model.continuous_batching_context_manager(greedy(6), continuous_batching_config=options) as manager:
        manager.add_request(other, request_id="other")
        manager.add_request([], request_id="empty")
        found = results(manager, 2)
        assert manager.is_running()
    assert found["other"].generated_tokens == expected(model, other, 6)
    assert "a prompt needs at least one token" in found["empty"].error


def test_the_id_of_a_request_that_has_not_ended_is_refused() -> None:
    model = MODELS["values"]()
    first, second = prompts((20, 9))
    options = ContinuousBatchingConfig(page_size=16, num_blocks=200)
    received = []

    async def serve(manager):
        manager.register_result_handler("same", received.append)
        manager.add_request(first, request_id="same", max_new_tokens=150)
        with pytest.raises(ConfigError, match="request id 'same' is in use"):
            manager.register_result_handler("same", lambda result: None)
        with pytest.raises(ConfigError, match="request id 'same' is in use"):
            manager.add_request(second, request_id="same")
        deadline = time.monotonic() + 120
        while not received and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    with model.continuous_batching_context_manager(greedy(6), continuous_batching_config=options) as manager:
        asyncio.run(serve(manager))
        manager.add_request(second, request_id="same")  # the first one has ended
        assert results(manager, 1)["same"].generated_tokens == expected(model, second, 6)
    (result,) = received
    assert result.generated_tokens == expected(model, first, 150)


@pytest.mark.full
@pytest.mark.parametrize("name", ["values", "heads"])
def test_several_answers_of_one_prompt(name) -> None:
    model = MODELS[name]()
    options = greedy(9)
    options.num_return_sequences = 3
    (given,) = prompts((20,))
    outs = model.generate_batch([given], options, continuous_batching_config=ContinuousBatchingConfig(num_blocks=30))
    assert [out.generated_tokens for out in outs.values()] == [expected(model, given, 9)] * 3


def storm(model, count, seed, longest, options):
    """Requests of random lengths that come in any order, some of them cancelled: all others have the right
    tokens, and all pages are free.
    """
    draw = random.Random(seed)
    given, wanted = [], {}
    (beginning,) = prompts([longest], seed)
    while len(given) < count:  # several of one length, which `generate` computes together
        length, new = draw.randint(1, longest), draw.randint(1, 20)
        group = prompts([length] * min(10, count - len(given)), draw.randrange(10**6))
        for one in group[::2]:
            same = draw.randint(0, length)
            one[:same] = beginning[:same]
        outs = model.generate(torch.tensor(group), do_sample=False, max_new_tokens=new)
        wanted |= {f"request{len(given) + n}": out for n, out in enumerate(outs[:, length:].tolist())}
        given += group
    cancelled = set(draw.sample(sorted(wanted), count // 4))
    found = {}
    with model.continuous_batching_context_manager(greedy(20), continuous_batching_config=options) as manager:
        names = list(wanted)
        draw.shuffle(names)
        waiting = list(names)
        deadline = time.monotonic() + 300
        while len(found) < count - len(cancelled) or waiting:
            for name in waiting[: draw.randint(1, 8)]:
                number = int(name.removeprefix("request"))
                length = 60 if name in cancelled else len(wanted[name])
                manager.add_request(given[number], request_id=name, max_new_tokens=length, streaming=name in cancelled)
                waiting.remove(name)
            result = manager.get_result(timeout=0.02)
            if result is None:
                assert time.monotonic() < deadline
                assert manager.is_running()
            elif result.request_id in cancelled:
                tokens = result.generated_tokens
                assert tokens[: len(wanted[result.request_id])] == wanted[result.request_id][: len(tokens)]
                if draw.random() < 0.5:
                    manager.cancel_request(result.request_id)
            else:
                assert result.error is None
                found[result.request_id] = result.generated_tokens
            if draw.random() < 0.3 and cancelled:
                manager.cancel_request(
                    draw.choice(sorted(cancelled))
                )  # also those that have not come yet, or are not begun
        for name in cancelled:
            manager.cancel_request(name)
        pages = manager.batch_processor.cache.pages
        while pages.num_used and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (pages.num_used, pages.tables) == (0, {})
    assert found == {name: tokens for name, tokens in wanted.items() if name not in cancelled}


@pytest.mark.full
def test_a_small_storm_of_cancelled_requests() -> None:
    storm(MODELS[SHARING](), 15, 3, 40, ContinuousBatchingConfig(page_size=16, num_blocks=20))


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_a_storm_of_two_hundred_requests(name) -> None:
    options = ContinuousBatchingConfig(page_size=16, num_blocks=40, max_batch_tokens=64)
    storm(MODELS[name](), 200, 4, 100, options)


def test_four_times_smaller_is_four_times_as_many_requests() -> None:
    """Counted by both allocators: requests of 4,096 tokens in one number of bytes."""
    length, fitting = 4096, 8
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 64, "head_dim": 64}
    plain = llama(**sizes, max_position_embeddings=length, num_hidden_layers=1)
    ranks = "|".join(["8"] * 8)
    compressed = structurize(
        llama(**sizes, max_position_embeddings=length, num_hidden_layers=1), f"mlr:{ranks},values={ranks}"
    )
    options = ContinuousBatchingConfig(page_size=32, num_blocks=fitting * length // 32, max_batch_tokens=64)
    counts, sizes = [], []
    for model in (plain, compressed):
        cache = model.init_continuous_batching(greedy(1), options)._create_batch_processor().cache
        count = 0
        while True:
            state = transformers.generation.continuous_batching.RequestState(str(count), list(range(4)))
            if not cache.can_store_request_tokens(state, length):
                break
            count += 1
        counts.append(count)
        memory = cache.cache_tensor if model is plain else cache.pages.memory
        sizes.append(memory.numel() * memory.element_size())
    assert counts[0] == fitting
    assert counts[1] >= 3.5 * counts[0]
    assert sizes[1] <= sizes[0]


def test_other_models_are_not_touched() -> None:
    model = llama()
    given = prompts((3, 17))
    assert batched(model, given, 5, num_blocks=30, max_batch_tokens=64) == [expected(model, one, 5) for one in given]
    assert type(model.init_continuous_batching(greedy(1))).__module__.startswith("transformers.")


@pytest.mark.full
def test_a_manager_can_be_kept() -> None:
    model = MODELS["values"]()
    given = prompts((3, 17))
    options = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=30), "persistent_manager": True}
    for _ in range(2):
        outs = model.generate_batch(given, greedy(5), **options)
        assert [out.generated_tokens for out in outs.values()] == [expected(model, one, 5) for one in given]
    kept = model._cached_continuous_batching_manager
    assert not kept.batch_processor.cache.pages.num_used
    model.destroy_cached_continuous_batching_manager()


def test_the_size_of_the_pool_is_that_of_the_free_memory(monkeypatch) -> None:
    from structattn.integrations.transformers.caches import continuous_batching

    monkeypatch.setattr(continuous_batching, "free_memory", lambda: 10**6)
    model = MODELS["values"]()
    pages = model.init_continuous_batching(greedy(1))._create_batch_processor().cache.pages
    assert 500_000 < pages.num_pages * pages.page_nbytes < 10**6
    monkeypatch.setattr(continuous_batching, "free_memory", lambda: None)
    with pytest.raises(ConfigError, match="how much memory is free: give ContinuousBatchingConfig num_blocks"):
        model.init_continuous_batching(greedy(1))._create_batch_processor()


def test_what_cannot_be_is_refused() -> None:
    model = MODELS["values"]()

    def made(**options):
        return model.init_continuous_batching(greedy(1), ContinuousBatchingConfig(num_blocks=30, **options))

    for option in ({"use_async_batching": True}, {"default_compile_level": 1}, {"cpu_offload_space": 1.0}):
        with pytest.raises(ConfigError, match="continuous batching with levels has no"):
            made(**option)
    with pytest.raises(ConfigError, match=r"scheduler_type must be one of \['fifo', 'prefill_first'\], got 'other'"):
        made(scheduler_type="other")._create_batch_processor()
    with pytest.raises(ConfigError, match="a paged cache needs input_ids and position_ids"):
        MODELS["own"]().model._packed(None, None, None)
    with pytest.raises(ConfigError, match=r"cb_config.page_size.*give another value"):
        made(page_size=1)
    stored = structurize(llama(), "mlr:4|4@66|22")
    stored.config.structattn["storage"] = storage_data(Storage(group_size=4, residual=0))  # structurize refuses it
    with pytest.raises(ConfigError, match="group_size must divide the blocks of each level"):
        stored.init_continuous_batching(greedy(1), ContinuousBatchingConfig(num_blocks=30))._create_batch_processor()


def test_an_old_version_is_named(monkeypatch) -> None:
    name = "structattn.integrations.transformers.caches.continuous_batching"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.19.1")  # which may be another object by now
    with pytest.raises(MissingDependencyError, match=r"needs transformers 5.20 or later, and 5.19.1 is installed"):
        importlib.import_module(name)
