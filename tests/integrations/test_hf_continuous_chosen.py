"""Continuous batching of models whose key heads choose tokens: the tokens of ``generate``, in bounded
memory.
"""

import random

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import Allocation, structurize
from structattn.spec import parse_spec

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    pytest.skip("continuous batching with levels needs transformers 5.20", allow_module_level=True)

from hf_models import NONE, SOME
from test_hf_continuous import VOCAB, batched, expected, greedy, llama, prompts, storm
from transformers.generation.continuous_batching.requests import RequestState

from structattn.integrations.transformers.caches import continuous_batching
from structattn.integrations.transformers.caches.continuous_batching import ServedRequests

BITS = sa.Storage(4, 8, group_size=4, residual=4, keep=8, block=16, recent=16)
LATE = sa.Storage(16, 16, group_size=4, residual=4, keep=8, block=32, recent=40)  # of it some prompts are short
FEWER = sa.Storage(8, 4, group_size=4, residual=6)
STANDARD, WINDOW = "standard", "heads:standard/window:12,sink_tokens=2"
# The spec and the storage of each layer.
MODELS = {
    "mixed": [(STANDARD, SOME), (STANDARD, [FEWER, BITS]), (WINDOW, [NONE, None]), (STANDARD, FEWER)],
    "all": [(STANDARD, SOME), (STANDARD, [LATE, NONE])],
    "one head": [(STANDARD, None), (STANDARD, [None, SOME]), ("window:11", None), ("mlr:4|4@64|16", None)],
}
MORE = {
    "fewer bits": [(STANDARD, BITS), (STANDARD, [BITS, FEWER])],
    "late": [(STANDARD, LATE), (WINDOW, [LATE, None])],
    "none far": [(STANDARD, NONE), (WINDOW, None)],
}


def chosen_model(name):
    layers = (MODELS | MORE)[name]
    plain = llama(num_hidden_layers=len(layers), max_position_embeddings=512)
    chosen = Allocation(
        [parse_spec(spec) for spec, _ in layers],
        storage=[storage for _, storage in layers],
        nbytes=1,
        plain_nbytes=2,
        context_length=128,
        expected_loss=0.1,
        scorers=[torch.randn(2, 33) for _ in layers],
    )
    return structurize(plain, chosen).eval()


@pytest.fixture(autouse=True)
def steps(monkeypatch) -> list[tuple[int, int]]:
    """Checks after each step that requests take no more than their pages; (bytes, requests) of each."""
    seen, end = [], ServedRequests._end

    def checked(self, requests) -> None:
        end(self, requests)
        pages = self.pages
        for name, contents in pages.tables.items():
            nbytes = sum(of_layer.key_nbytes + of_layer.value_nbytes for of_layer in contents)
            assert nbytes <= pages.held(name) * pages.page_nbytes
        assert pages.num_used <= pages.num_pages
        seen.append((pages.nbytes, len(requests)))

    monkeypatch.setattr(ServedRequests, "_end", checked)
    return seen


@pytest.fixture
def restarts(monkeypatch) -> list[str]:
    """The names of the requests that are computed again."""
    names, create = [], RequestState.create_equivalent_initial_request

    def recorded(self):
        names.append(self.request_id)
        return create(self)

    monkeypatch.setattr(RequestState, "create_equivalent_initial_request", recorded)
    return names


@pytest.mark.quick(name=["mixed"], code=["c++"])
@pytest.mark.parametrize("code", ["python", "c++"])
@pytest.mark.parametrize("name", MODELS | MORE)
def test_the_tokens_are_those_of_generate(name, code, steps, request) -> None:
    if code == "c++":
        request.getfixturevalue("built")
    model = chosen_model(name)
    given = prompts((1, 7, 29, 40, 70, 58))
    wanted = [expected(model, one, 20) for one in given]
    assert len({tuple(one) for one in wanted}) > 3
    assert batched(model, given, 20, num_blocks=60) == wanted
    assert max(count for _, count in steps) == len(given)
    assert batched(model, given, 20, num_blocks=60, max_batch_tokens=13) == wanted  # prompts in chunks


@pytest.mark.full
def test_requests_that_do_not_fit_are_computed_again(restarts, steps) -> None:
    """Tokens that a request had generated are then not chosen as those of a prompt are."""
    model = chosen_model("all")
    given = prompts((30, 25, 41, 33, 12))
    wanted = [expected(model, one, 60) for one in given]
    for scheduler in ("fifo", "prefill_first"):
        assert batched(model, given, 60, num_blocks=12, max_batch_tokens=24, scheduler_type=scheduler) == wanted
    assert len(restarts) >= 4
    assert max(count for _, count in steps) > 2
    token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, dimension, bytes
    assert 8 * 16 * token < max(nbytes for nbytes, _ in steps) <= 12 * 16 * token


@pytest.mark.full
@pytest.mark.parametrize("length", [9, 50])
@pytest.mark.parametrize("sharing", [True, False])
def test_several_answers_of_one_prompt(length, sharing) -> None:
    model = chosen_model("all")
    options = greedy(30)
    options.num_return_sequences = 3
    given = prompts((length, 1))
    for blocks, tokens in ((60, 64), (60, 11), (9, 11)):
        config = ContinuousBatchingConfig(
            page_size=16, num_blocks=blocks, max_batch_tokens=tokens, allow_block_sharing=sharing
        )
        outs = model.generate_batch(given, options, continuous_batching_config=config).values()
        answers = [(out.prompt_ids, out.generated_tokens) for out in outs]
        assert len(answers) == 6
        for prompt in given:
            wanted = expected(model, prompt, 30)
            assert [tokens for ids, tokens in answers if ids == prompt] == [wanted] * 3


def test_a_request_that_is_larger_than_the_pool_fails_alone() -> None:
    model = chosen_model("all")
    (fits, long) = prompts((20, 400))
    options = {"continuous_batching_config": ContinuousBatchingConfig(page_size=16, num_blocks=6, max_batch_tokens=64)}
    first, second = model.generate_batch([fits, long], greedy(12), **options).values()
    assert first.generated_tokens == expected(model, fits, 12)
    assert "pages of the cache, which has 96: give it more memory" in second.error
    manager = model.init_continuous_batching(greedy(1), ContinuousBatchingConfig(page_size=4, num_blocks=1))
    with pytest.raises(ConfigError, match=r"and a request needs \d+ at least: give it more memory"):
        manager._create_batch_processor()


def test_nothing_is_shared_and_more_requests_fit() -> None:
    """Counted by the allocators, with a sixteenth of the far tokens."""
    few = sa.Storage(4, 4, group_size=16, residual=32, keep=16, block=256, recent=64)
    sizes = {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 64, "head_dim": 64}
    plain = llama(**sizes, max_position_embeddings=4096, num_hidden_layers=1)
    chosen = Allocation(
        [parse_spec(STANDARD)],
        storage=[few],
        nbytes=1,
        plain_nbytes=2,
        context_length=128,
        expected_loss=0.1,
        scorers=[torch.randn(1, 65)],
    )
    options = ContinuousBatchingConfig(page_size=32, num_blocks=2 * 4096 // 32)
    manager = structurize(plain, chosen).init_continuous_batching(greedy(1), options)
    cache = manager._create_batch_processor().cache
    assert not cache.use_prefix_sharing
    states = [RequestState(str(number), [0] * 4096) for number in range(100)]
    assert sum(cache.can_store_request_tokens(state, 4096) for state in states) > 20


def test_the_size_of_the_pool_is_that_of_the_free_memory(monkeypatch) -> None:
    monkeypatch.setattr(continuous_batching, "free_memory", lambda: 10**6)
    model = chosen_model("all")
    pages = model.init_continuous_batching(greedy(1))._create_batch_processor().cache.pages
    assert 500_000 < pages.num_pages * pages.page_nbytes < 10**6
    assert pages.nbytes == 0  # memory is taken when requests need it


def run(seed) -> None:
    """Random prompts, budgets and memory."""
    draw = random.Random(seed)
    model = chosen_model(draw.choice(sorted(MODELS | MORE)))
    given = prompts([draw.randint(1, 100) for _ in range(draw.randint(2, 6))], seed)
    count = draw.randint(1, 50)
    options = {
        "num_blocks": draw.choice([20, 30, 60]),
        "max_batch_tokens": draw.choice([7, 30, 200]),
        "scheduler_type": draw.choice(["fifo", "prefill_first"]),
        "page_size": draw.choice([16, 20]),
    }
    assert batched(model, given, count, **options) == [expected(model, one, count) for one in given]


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[] if n < 1 else pytest.mark.full) for n in range(60)])
def test_any_requests(seed) -> None:
    run(seed)


@pytest.mark.full
@pytest.mark.parametrize("name", ["all", "mixed"])
def test_a_storm_of_requests(name) -> None:
    options = ContinuousBatchingConfig(page_size=16, num_blocks=60, max_batch_tokens=64)
    storm(chosen_model(name), 100, 4, 100, options)


def test_a_small_storm_of_cancelled_requests() -> None:
    options = ContinuousBatchingConfig(page_size=16, num_blocks=24, max_batch_tokens=40)
    storm(chosen_model("all"), 12, 3, 40, options)


def test_a_manager_can_be_kept_and_a_model_trained_in_between() -> None:
    model = chosen_model("all")
    given = prompts((3, 47))
    options = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=30), "persistent_manager": True}
    for _ in range(2):
        outs = model.generate_batch(given, greedy(25), **options)
        assert [out.generated_tokens for out in outs.values()] == [expected(model, one, 25) for one in given]
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(7, dims=0))
    pages = model._cached_continuous_batching_manager.batch_processor.cache.pages
    assert (pages.num_used, pages.tables) == (0, {})
    model.destroy_cached_continuous_batching_manager()


def test_a_model_without_scores_says_so() -> None:
    model = chosen_model("all")
    del model.model.layers[1].self_attn.token_scores
    options = ContinuousBatchingConfig(page_size=16, num_blocks=30)
    (out,) = model.generate_batch([[1, 2, 3]], greedy(3), continuous_batching_config=options).values()
    assert "layer 1 of this model has no token scores" in out.error


def test_the_dtype_of_the_model_may_have_16_bits() -> None:
    """Then tokens are not compared: a rounding may choose another one."""
    model = chosen_model("mixed").bfloat16()
    outs = batched(model, prompts((60, 5)), 20, num_blocks=40)
    assert [len(out) for out in outs] == [20, 20]
    assert all(0 <= token < VOCAB for out in outs for token in out)
