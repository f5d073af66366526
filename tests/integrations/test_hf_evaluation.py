"""``evaluate_cache``: losses, recall, bytes and times of a model through its cache."""

import contextlib
import functools
import math
import re
from itertools import pairwise

import hf_models as models
import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

import structattn as sa
from structattn.errors import ConfigError, DataError, GenerationError
from structattn.integrations.transformers import evaluate_cache, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.kept import cache_nbytes
from structattn.integrations.transformers.evaluation.retrieval import TASKS, retrieval_prompts
from structattn.integrations.transformers.evaluation.scores import CacheScores, Estimate, Recall, student_t
from structattn.integrations.transformers.evaluation.texts import random_window, windows_of
from structattn.seeds import generator
from structattn.testing.tolerances import assert_close

SMALL = {"context_length": 60, "num_steps": 5, "num_windows": 3, "num_prompts": 2, "distances": (50, 58)}


def dynamic(model):
    return lambda: DynamicCache(config=model.config)


def random_text(length=500, vocab=models.VOCAB):
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(1))


def letters(length=3000):
    return random_text(length, 26) + ord("a")


def looking_back(distance, vocab=128):
    """A Llama of one head and no feed-forward that predicts whatever came ``distance`` tokens before the next
    one.
    """
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=2 * vocab,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        attention_bias=True,
        max_position_embeddings=2048,
    )
    model = transformers.LlamaForCausalLM(config).double().eval().requires_grad_(False)
    layer = model.model.layers[0]
    attention = layer.self_attn
    for weights in (*attention.parameters(), *layer.mlp.parameters(), model.lm_head.weight):
        weights.zero_()
    eye = torch.eye(vocab, dtype=torch.float64)
    model.model.embed_tokens.weight.copy_(torch.cat([eye, 0 * eye], 1))
    # Rotated keys are all the same number, and queries that number turned by the distance.
    angles = (distance - 1) * model.model.rotary_emb.inv_freq.double()
    attention.k_proj.bias[:vocab] = 1
    attention.q_proj.bias.copy_(100 * torch.cat([angles.cos(), -angles.sin()]))
    attention.v_proj.weight[:vocab, :vocab] = eye
    attention.o_proj.weight[vocab:, :vocab] = eye
    model.lm_head.weight[:, vocab:] = 20 * eye
    return model


def test_the_loss_is_that_of_one_call_without_a_cache() -> None:
    torch.manual_seed(0)
    model, text = models.llama().double().train(), random_text()
    scores = evaluate_cache(model, dynamic(model), text, **SMALL)
    assert model.training
    windows = windows_of([text], 66, 3, seed=0)
    with torch.no_grad():
        logits = model.eval()(windows, use_cache=False).logits[:, 60:-1]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[:, 61:], reduction="none").mean(1)
    assert_close(torch.tensor(scores.losses, dtype=torch.float64), losses)
    assert scores.loss.mean == pytest.approx(float(losses.mean()))
    assert (scores.context_length, scores.num_steps) == (60, 5)
    assert scores.prefill_ms > 0
    assert scores.step_ms > 0
    assert scores.nbytes == 2 * models.LAYERS * 2 * models.HEAD_DIM * 65 * 8
    assert [(x.task, x.distance, x.count) for x in scores.recall] == [("copy", 50, 2), ("copy", 58, 2)]


def test_a_seed_gives_the_same_windows_and_prompts_for_every_cache() -> None:
    torch.manual_seed(0)
    model, text = models.llama().double().eval(), random_text()
    first = evaluate_cache(model, dynamic(model), text, **SMALL)
    ours = structurize(model, "standard")
    same = evaluate_cache(ours, lambda: level_cache(ours), text, **SMALL)
    assert same.losses == pytest.approx(first.losses)
    assert same.recall == first.recall
    assert same.loss_above(first).mean == pytest.approx(0, abs=1e-9)
    other = evaluate_cache(ours, lambda: level_cache(ours), text, **SMALL, seed=1)
    assert other.losses != pytest.approx(first.losses)


def test_what_a_cache_has_forgotten_is_not_recalled() -> None:
    options = {"context_length": 300, "num_windows": 1, "num_steps": 2, "num_prompts": 3, "distances": (100, 250)}
    tasks = ("copy", "pass key", "several keys")

    def shares(scores):
        return {(x.task, x.distance): x.share for x in scores.recall}

    for distance in (100, 250):
        model = looking_back(distance)
        scores = evaluate_cache(model, dynamic(model), letters(), tokenizer=models.Letters(), tasks=tasks, **options)
        assert shares(scores) == {(task, at): at == distance for task in tasks for at in (100, 250)}
        assert scores.recall_of() == scores.recall_of("copy") == 0.5

        structurize(model, "window:150,sink_tokens=4")
        new = functools.partial(level_cache, model)
        scores = evaluate_cache(model, new, letters(), tokenizer=models.Letters(), tasks=tasks, **options)
        assert shares(scores) == {(task, at): at == distance == 100 for task in tasks for at in (100, 250)}


def keeping(last, model):
    """As the presses of kvpress: a context in which a prefill leaves the last tokens in the cache."""

    @contextlib.contextmanager
    def press(pressed):
        assert pressed is model

        def hook(module, args, kwargs, output):
            layer = kwargs[CACHE].layers[module.layer_idx]
            layer.keys, layer.values = layer.keys[:, :, -last:], layer.values[:, :, -last:]

        hooks = [x.self_attn.register_forward_hook(hook, with_kwargs=True) for x in model.model.layers]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    return press


def test_a_press_shortens_the_context_and_positions_stay() -> None:
    torch.manual_seed(0)
    model, text = models.llama().double().eval(), random_text()
    plain = evaluate_cache(model, dynamic(model), text, **SMALL)
    same = evaluate_cache(model, dynamic(model), text, **SMALL, press=keeping(60, model))
    assert same.losses == pytest.approx(plain.losses)
    half = evaluate_cache(model, dynamic(model), text, **SMALL, press=keeping(30, model))
    assert half.losses != pytest.approx(plain.losses)
    assert half.nbytes == plain.nbytes // 65 * 35  # no token that follows is dropped

    model = looking_back(100)
    options = {"context_length": 300, "num_windows": 1, "num_steps": 2, "num_prompts": 3, "distances": (100,)}
    for last, share in ((150, 1), (50, 0)):
        scores = evaluate_cache(model, dynamic(model), letters(), **options, press=keeping(last, model))
        assert scores.recall_of("copy") == share


def test_bytes_of_our_cache_are_its_own() -> None:
    model, text = structurize(models.llama().double().eval(), "standard"), random_text()
    made = []

    def new_cache():
        made.append(level_cache(model, storage=sa.Storage(key_bits=8, value_bits=4, group_size=4, residual=6)))
        return made[-1]

    scores = evaluate_cache(model, new_cache, text, **SMALL, tasks=())
    assert scores.recall == ()
    assert len(made) == 3
    assert scores.nbytes == max(cache.nbytes for cache in made) > 0


def test_bytes_of_other_caches_are_those_of_all_they_keep() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 10, 8), torch.zeros(1, 2, 10, 8), 0)
    assert cache_nbytes(cache) == 2 * 2 * 10 * 8 * 4

    class Coded(DynamicLayer):
        """As the layers of quantized caches: codes, and what they are multiplied by."""

    layer, codes = Coded(), torch.zeros(100, dtype=torch.uint8)
    layer._quantized_keys = (codes, {"scale": torch.zeros(5), "bits": 4})
    layer._quantized_values = (codes, {"scale": torch.zeros(7), "bits": 4})  # memory that both share
    assert cache_nbytes(transformers.cache_utils.Cache(layers=[layer])) == 100 + 4 * 12
    layer.values = torch.zeros(1000)[:3]
    assert cache_nbytes(transformers.cache_utils.Cache(layers=[layer])) == 100 + 4 * 12 + 4000


def test_intervals_are_those_of_student() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (1, 2, 3, 4, 7, 8, 30, 101):
        assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom))
    values = [2.0, 2.5, 3.5]
    low, high = stats.t.interval(0.95, 2, loc=sum(values) / 3, scale=stats.sem(values))
    estimate = Estimate.of(values)
    assert (estimate.mean, estimate.low, estimate.high) == pytest.approx((8 / 3, low, high))
    assert Estimate.of([2.0]) == Estimate(2.0, -math.inf, math.inf)


def test_a_difference_is_paired() -> None:
    def scores(losses, **options):
        values = {"context_length": 8, "num_steps": 2, "nbytes": 1, "step_ms": 1.0, "prefill_ms": 1.0}
        return CacheScores(losses=losses, **values | {"recall": (Recall("copy", 4, 1, 2),)} | options)

    above = scores((2.1, 4.1)).loss_above(scores((2.0, 4.0)))
    assert (above.mean, above.low, above.high) == pytest.approx((0.1, 0.1, 0.1))
    with pytest.raises(ConfigError, match="the same windows, got 2 of 8 and 2 tokens and 1 of 8 and 2"):
        scores((2.0, 3.0)).loss_above(scores((2.0,)))
    with pytest.raises(ConfigError, match="no recall of the task 'pass key' was measured: expected one of copy"):
        scores((2.0,)).recall_of("pass key")


@pytest.mark.parametrize("begins", [False, True])
def test_needles_are_where_the_distance_says(begins) -> None:
    tokenizer, text = models.Letters(begins), letters()
    options = {"context_length": 1000, "tokenizer": tokenizer, "num_prompts": 3, "distances": (200, 500, 999)}
    prompts = list(retrieval_prompts([text], **options))
    assert [x.task for x in prompts] == [task for task in TASKS for _ in range(9)]
    again = list(retrieval_prompts([text], **options))
    for prompt, same in zip(prompts, again, strict=True):
        assert torch.equal(prompt.context, same.context)
        assert torch.equal(prompt.query, same.query)
        assert len(prompt.context) == 1000
        assert not prompt.scored[0]
        assert prompt.scored.any()
        context, query = tokenizer.decode(prompt.context), tokenizer.decode(prompt.query)
        answer = tokenizer.decode(prompt.query[prompt.scored])
        behind = context[1000 - prompt.distance :]
        if prompt.task == "copy":
            assert behind.startswith(query)
            assert query.endswith(answer)
            continue
        assert (context[0] == "\x01") is begins
        if prompt.task == "frequent words":
            named = re.findall(r"City is (\w+)\n", context)
            assert sorted(map(named.count, {*named})) == [1, 1, 16]
            assert named.count(answer.strip()) == 16
            assert behind.startswith(f"\nCity is{answer}\n")
            continue
        number = answer[-5:]
        assert number.isdigit()
        assert context.count(number) == 1
        assert 0 < behind.index(number) < 80
        keys = {"pass key": 1, "several keys": 4, "similar keys": 6, "several values": 3, "variables": 1}[prompt.task]
        assert len(re.findall(r"\d{5}", context)) == keys
        if prompt.task == "several values":
            assert answer == ", ".join(re.findall(r"\d{5}", context))
        if prompt.task == "variables":
            assert answer[:-5] in behind
    assert len({tuple(x.query.tolist()) for x in prompts}) > len(prompts) - 5


def test_default_distances_are_those_with_room_for_the_needles() -> None:
    options = {"tokenizer": models.Letters(), "num_prompts": 2}
    prompts = list(retrieval_prompts([letters()], context_length=1000, **options))
    assert {(x.task, x.distance) for x in prompts} == {(task, far) for task in TASKS for far in (125, 500, 875)}
    few = [(x.task, x.distance) for x in retrieval_prompts([letters()], context_length=120, **options)]
    assert {far for _, far in few} == {64, 105}
    assert 0 < len(few) < 2 * 2 * len(TASKS)
    assert few.count(("copy", 64)) == 2
    assert list(retrieval_prompts([letters()], context_length=16, **options)) == []


def test_windows_do_not_overlap_and_stay_within_a_text() -> None:
    texts = [torch.arange(25), torch.arange(100, 107), torch.arange(200, 231)]
    windows = windows_of(texts, 10, 100, seed=0)
    assert windows.tolist() == [[*range(n, n + 10)] for n in (0, 10, 200, 210, 220)]
    few = windows_of(texts, 10, 2, seed=0)
    assert len(few) == 2
    assert all(x in windows.tolist() for x in few.tolist())
    made = generator("test")
    starts = {int(x[0]) for x in (random_window(texts, 10, made) for _ in range(500))}
    assert starts == {*range(16), *range(200, 222)}
    assert all(b - a == 1 for x in (random_window(texts, 31, made),) for a, b in pairwise(x.tolist()))


def test_bad_input_says_what_to_do() -> None:
    model, text = models.llama().eval(), random_text()
    new = dynamic(model)

    def refused(kind, match, texts=text, model=model, new=new, **options):
        with pytest.raises(kind, match=match):
            evaluate_cache(model, new, texts, **SMALL | options)

    refused(ConfigError, r"tokenizer\(text\).input_ids makes them", texts="a text")
    refused(ConfigError, "got .*as number 1", texts=[[1, 2], "ab"])
    refused(ConfigError, "got a Tensor of shape \\(500,\\) as number 0", texts=[text.float()])
    refused(ConfigError, "the vocabulary of the model those from 0 to 49", texts=text + 1)
    refused(DataError, "the longest text has 30 tokens, and a window takes 66", texts=text[:30])
    refused(DataError, "the longest text has 0 tokens", texts=[])
    refused(ConfigError, "AutoModelForCausalLM", model=model.model)
    refused(ConfigError, "a model of transformers", model=torch.nn.Linear(2, 2))
    refused(ConfigError, "a cache of transformers", new=lambda: None)
    refused(ConfigError, "a function that makes an empty cache, .* got a DynamicCache", new=new())
    used = new()
    refused(ConfigError, "got one with 65 tokens", new=lambda: used)
    refused(ConfigError, "makes a context manager, such as a press of kvpress, got 0.5", press=0.5)
    refused(ConfigError, "num_steps must be", num_steps=0)
    refused(ConfigError, "seed must be", seed=-1)
    refused(ConfigError, "unknown task 'passkey': did you mean 'pass key'", tasks=("passkey",))
    refused(ConfigError, "give the tokenizer of the model", tasks=("pass key",))
    refused(ConfigError, "such as \\('copy',\\), got 'copy'", tasks="copy")
    refused(ConfigError, "from 36 to 60 tokens .*, got 61", distances=(61,))
    refused(ConfigError, "such as \\('copy',\\), got 5", tasks=5)
    refused(ConfigError, "a tokenizer of transformers or None, got 3", tokenizer=3)
    refused(ConfigError, "a tokenizer of transformers or None, got 'gpt2'", tokenizer="gpt2", tasks=("pass key",))
    refused(
        ConfigError,
        "id 121, and the vocabulary of the model has 50",
        tokenizer=models.Letters(),
        texts=random_text(2000),
        context_length=500,
        distances=(100,),
    )
    wide = looking_back(100)
    options = {"model": wide, "new": dynamic(wide), "tokenizer": models.Letters(), "context_length": 120}
    refused(
        ConfigError,
        "do not fit into 120 tokens",
        texts=letters(),
        tasks=("similar keys",),
        **options | {"distances": (60,)},
    )
    broken = models.llama().eval()
    broken.lm_head.weight.data[:] = math.nan
    refused(GenerationError, "step 1 after 60 tokens hold NaN", model=broken, new=dynamic(broken))


def test_a_window_beyond_a_table_of_positions_is_refused() -> None:
    model = models.gpt2().eval()
    text = torch.randint(3, models.VOCAB, (300,))
    with pytest.raises(ConfigError, match="a text has 65 tokens, and GPT2LMHeadModel has a table of 64 positions"):
        evaluate_cache(model, lambda: DynamicCache(config=model.config), text, context_length=60, num_steps=5)
    options = {"context_length": 50, "num_steps": 5, "num_windows": 1, "tasks": ()}
    assert evaluate_cache(model, lambda: DynamicCache(config=model.config), text, **options).num_steps == 5
