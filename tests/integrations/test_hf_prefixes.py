"""Continuous batching: requests with the same beginning compute it once, and all tokens are those of
``generate``.
"""

import time
from contextlib import contextmanager

import pytest
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

from structattn import Storage
from structattn.cache.paged import PagedCache
from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM, structurize

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    pytest.skip("continuous batching with levels needs transformers 5.20", allow_module_level=True)

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # so that the largest logit is largest by far
    "eos_token_id": None,
}
UNIT = 16  # tokens after which the deeper blocks of MODELS end; without blocks the unit is a page


def structurized(spec, **options):
    torch.manual_seed(0)
    return structurize(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48)).eval(), spec, **options)


def own(spec):
    torch.manual_seed(0)
    return StructAttnForCausalLM(StructAttnConfig(attention=spec, **SIZES)).eval()


MODELS = {
    "values": lambda: structurized("mlr:4|2|2@64|16|8,values=4|2|2"),
    "levels": lambda: structurized("mlr:4|2|2@64|16|8"),
    "own": lambda: own(["mlr:4|4@128|16", "bilinear-btt:1"]),
    "windows": lambda: structurized("[mlr:4|2|2@64|16|8,window:9]"),
    "heads": lambda: structurized("heads:mlr:4|2|2@64|16|8/window:9,sink_tokens=2"),
    "fewer bits": lambda: structurized("mlr:4|2|2@64|16|8,values=4|2|2", storage=Storage(8, 4, 4, 3)),
    "windows only": lambda: own(["window:8", "window:20,sink_tokens=3"]),
}


def text(length, seed=1):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(model, tokens, count):
    return model.generate(torch.tensor([tokens]), do_sample=False, max_new_tokens=count)[0, len(tokens) :].tolist()


class Server:
    """A manager, and the tokens that its cache was given."""

    def __init__(self, manager, computed):
        self.manager, self._computed = manager, computed

    def ask(self, *given, count=3):
        """The new tokens of prompts, one after the other, and how many tokens were computed for each."""
        found = []
        for tokens in given:
            before = self.computed
            self.manager.add_request(tokens, max_new_tokens=count)
            result = self.manager.get_result(timeout=60)
            assert result.error is None
            found.append((result.generated_tokens, self.computed - before))
        return found

    @property
    def computed(self):
        return sum(self._computed)

    @property
    def pages(self):
        return self.manager.batch_processor.cache.pages


@contextmanager
def served(model, monkeypatch, sequences=1, **options):
    computed = []
    step = PagedCache.step

    def counted(cache, requests):
        computed.append(sum(one.count for one in requests))
        return step(cache, requests)

    monkeypatch.setattr(PagedCache, "step", counted)
    config = ContinuousBatchingConfig(**{"page_size": 6, "num_blocks": 60} | options)
    generation = GenerationConfig(do_sample=False, eos_token_id=-1)
    generation.num_return_sequences = sequences
    with model.continuous_batching_context_manager(generation, continuous_batching_config=config) as manager:
        yield Server(manager, computed)


@pytest.mark.quick(name=["fewer bits"])
@pytest.mark.parametrize("name", MODELS)
def test_a_beginning_is_computed_once(name, monkeypatch) -> None:
    model = MODELS[name]()
    first = text(40)
    prompts = {  # with how many tokens they have in common with what came before
        "equal": (first, 40),
        "one token differs": ([*first[:20], (first[20] + 1) % VOCAB, *first[21:]], 20),
        "the first token differs": ([(first[0] + 1) % VOCAB, *first[1:]], 0),
        "ends within a block": (first[:30], 30),
        "ends with a block": (first[:32], 32),  # whose last token must be computed
        "a token more than a block": (first[:33], 33),
        "goes on": ([*first, *text(30, 2)], 40),
        "goes on, again": ([*first, *text(30, 2)], 70),
        "short": (first[:9], 9),
    }
    with served(model, monkeypatch) as server:
        assert server.ask(first) == [(expected(model, first, 3), 42)]
        unit = server.pages.prefixes.unit
        assert unit == UNIT if name != "windows only" else unit < 8
        for what, (tokens, same) in prompts.items():
            shared = min(same, len(tokens) - 1) // unit * unit
            assert server.ask(tokens) == [(expected(model, tokens, 3), len(tokens) + 2 - shared)], what
        pages = server.pages
        assert (pages.num_used, pages.num_cached > 0, pages.tables) == (0, True, {})
    with served(model, monkeypatch, allow_block_sharing=False) as server:
        assert server.ask(first, first) == [(expected(model, first, 3), 42)] * 2
        assert server.pages.num_free == server.pages.num_pages


def test_what_a_request_has_written_is_shared_with_the_next_turn(monkeypatch) -> None:
    model = MODELS["values"]()
    question = text(40)
    with served(model, monkeypatch, max_batch_tokens=18) as server:  # prompts in chunks
        ((answer, _),) = server.ask(question, count=15)
        turn = [*question, *answer, *text(8, 3)]
        assert server.ask(turn) == [(expected(model, turn, 3), len(turn) + 2 - 48)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "blocks"), [("values", 12), ("heads", 16)])
def test_beginnings_leave_a_small_pool(name, blocks, monkeypatch) -> None:
    model = MODELS[name]()
    beginnings = [text(34, seed) for seed in range(4)]
    given = [[*beginnings[n % 4], *text(3 + n, n)] for n in range(6)]
    with served(model, monkeypatch, num_blocks=blocks) as server:
        for tokens in given * 2:
            ((found, _),) = server.ask(tokens)
            assert found == expected(model, tokens, 3)
            assert server.pages.num_used == 0
        total = sum(len(tokens) + 2 for tokens in given * 2)
        assert total / 2 < server.computed < total - 5 * UNIT  # some were still there, and some were not


@pytest.mark.quick(length=[21])
@pytest.mark.parametrize("length", [1, UNIT, UNIT + 1, 21])
def test_answers_of_one_prompt_share_it(length, monkeypatch) -> None:
    model = MODELS["values"]()
    tokens = text(length)
    wanted = expected(model, tokens, 6)
    with served(model, monkeypatch, sequences=3) as server:
        for _ in range(2):  # the second time of one unit and a token, no token is left to be computed before the fork
            server.manager.add_request(tokens, max_new_tokens=6)
            found = [server.manager.get_result(timeout=60) for _ in range(3)]
            assert [(one.error, one.generated_tokens) for one in found] == [(None, wanted)] * 3
        if length == 21:
            assert server.computed == (20 + 3 * 6) + (20 - UNIT + 3 * 6)
        assert not server.pages.num_used


@pytest.mark.full
def test_all_answers_of_a_prompt_that_is_too_long_fail(monkeypatch) -> None:
    with served(MODELS["values"](), monkeypatch, sequences=3, num_blocks=6) as server:
        server.manager.add_request(text(100))
        results = [server.manager.get_result(timeout=60) for _ in range(3)]
        assert len({result.request_id for result in results}) == 3
        assert all("give it more memory" in result.error for result in results)
        assert server.manager.is_running()


@pytest.mark.full
def test_a_fork_has_the_last_tokens_of_a_window(monkeypatch) -> None:
    model = structurized("[mlr:4|2|2@64|16|8,window:9]")
    tokens = text(29)
    with served(model, monkeypatch, sequences=2) as server:
        server.manager.add_request(tokens, max_new_tokens=6)
        found = [server.manager.get_result(timeout=60).generated_tokens for _ in range(2)]
        assert found == [expected(model, tokens, 6)] * 2
        assert server.computed == 28 + 2 * 6


def retrain(model, seed=1):
    """Other weights."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn_like(weight))


@pytest.mark.full
def test_other_weights_share_nothing(monkeypatch) -> None:
    model = MODELS["values"]()
    tokens = text(40)

    with served(model, monkeypatch) as server:
        before = server.ask(tokens, tokens)
        with server.manager.pause():
            retrain(model)
            after = expected(model, tokens, 3), 42
        assert after[0] != before[0][0]
        assert server.ask(tokens, tokens) == [after, (after[0], 42 - 32)]
        with pytest.raises(RuntimeError, match="a step of training"), server.manager.pause():  # noqa: PT012
            retrain(model, seed=2)
            last = expected(model, tokens, 3), 42
            raise RuntimeError("a step of training")
        assert last[0] != after[0]
        assert server.ask(tokens) == [last]


@pytest.mark.full
def test_a_manager_that_is_kept_shares_nothing_with_its_next_session() -> None:
    model, tokens = MODELS["values"](), text(40)
    options = {"continuous_batching_config": ContinuousBatchingConfig(num_blocks=60), "persistent_manager": True}
    generation = GenerationConfig(do_sample=False, max_new_tokens=3, eos_token_id=-1)
    found = []
    for _ in range(2):
        (out,) = model.generate_batch([tokens], generation, **options).values()
        assert out.generated_tokens == expected(model, tokens, 3)
        found.append(out.generated_tokens)
        retrain(model)
    assert found[0] != found[1]
    model.destroy_cached_continuous_batching_manager()


@pytest.mark.quick(chunk=[31])
@pytest.mark.parametrize("chunk", [31, 32, 64])
def test_a_chunk_that_needs_more_pages_than_its_prompt_ends_one_request(chunk, monkeypatch) -> None:
    """Deeper blocks are nearly full after 31 tokens of 33: more pages than the pool has, and than 33 tokens
    need.
    """
    model = structurized("mlr:4|2|2@64|32|16,values=4|2|2")
    tokens, other = text(34), text(5, 2)
    with served(model, monkeypatch, page_size=4, num_blocks=6, max_batch_tokens=chunk) as server:
        server.manager.add_request(tokens, max_new_tokens=2)
        result = server.manager.get_result(timeout=60)
        assert (server.pages.needed(31), server.pages.needed(34), server.pages.num_pages) == (14, 11, 12)
        if chunk == 31:
            assert "31 tokens need 14 pages of the cache, which has 12: give it more" in result.error
        else:
            assert result.generated_tokens == expected(model, tokens, 2)
        assert server.ask(other)[0][0] == expected(model, other, 3)
        assert server.manager.is_running()


@pytest.mark.full
def test_a_request_that_held_back_others_may_be_cancelled(monkeypatch) -> None:
    """transformers admits no request after it has taken pages from one, until one ends."""
    model = MODELS["values"]()
    with served(model, monkeypatch, num_blocks=12) as server:
        for number in range(2):
            server.manager.add_request(text(30, number), request_id=str(number), max_new_tokens=1000)
        deadline = time.monotonic() + 60
        scheduler = server.manager.batch_processor.scheduler
        while not scheduler.block_new_requests:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for number in range(2):
            server.manager.cancel_request(str(number))
        tokens = text(9)
        server.manager.add_request(tokens, request_id="next", max_new_tokens=3)
        found = {}
        while "next" not in found:
            result = server.manager.get_result(timeout=60)
            assert result is not None, "the request was not admitted"
            found[result.request_id] = result.generated_tokens
        assert found["next"] == expected(model, tokens, 3)
