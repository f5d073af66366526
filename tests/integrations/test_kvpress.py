"""``StructuredPress``: what a dense model keeps within kvpress, against the cache of ``structurize``."""

import importlib.util

import hf_models as models
import pytest
import torch
from transformers import DynamicCache

import structattn as sa
from structattn.errors import ConfigError, MissingDependencyError
from structattn.testing.tolerances import assert_close

HAS_KVPRESS = importlib.util.find_spec("kvpress") is not None
needs_kvpress = pytest.mark.skipif(not HAS_KVPRESS, reason="kvpress is not installed")
BITS = sa.Storage(key_bits=8, value_bits=4, group_size=4, residual=6)
NEEDED = "needs kvpress >= 0.5.5, which is not installed: pip install .*kvpress"
SPECS = (
    "standard",
    "window:11",
    "window:11,sink_tokens=3",
    "heads:standard/window:11,sink_tokens=3",
    "heads:window:5/window:9",
)


def small(layers=1, **options):
    """A Llama of two key heads, which four query heads read."""
    torch.manual_seed(0)
    model = models.llama(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, **options)
    return model.double().eval().requires_grad_(False)


def press_of(*args, **options):
    from structattn.integrations.kvpress import StructuredPress

    return StructuredPress(*args, **options)


def after(model, press, ids, count):
    """Logits of the tokens from ``count`` on, behind a prompt within a press, and the cache."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :count], cache=cache)
    positions = torch.arange(count, ids.shape[1])[None]
    return model(ids[:, count:], cache=cache, position_ids=positions).logits, cache


@needs_kvpress
@pytest.mark.parametrize("storage", [None, BITS, [BITS, None]], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_next_token_gets_what_our_cache_gives_it(spec, storage) -> None:
    """With one layer keys and values of the prompt are the same, densely computed or not."""
    from structattn.integrations.transformers import level_cache, structurize

    if isinstance(storage, list) and not spec.startswith("heads"):
        spec = f"heads:{spec}*2"
    plain = small()
    for length in (41, 40, 5):
        ids = torch.randint(models.VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(1))
        press = press_of(spec, [storage])
        logits, _ = after(small(), press, ids, length)
        model = structurize(small(), spec, storage=[storage])
        cache = level_cache(model)
        model(ids[:, :length], cache=cache)
        assert_close(logits, model(ids[:, length:], cache=cache).logits)
        drops = "window" in spec and (length > 5 or spec == SPECS[-1])
        assert (press.compression_ratio > 0) is drops
        is_same = not drops and (storage is None or length == 5)
        assert torch.allclose(logits, plain(ids).logits[:, -1:]) is is_same


@needs_kvpress
@pytest.mark.parametrize("length", [21, 22, 40])
@pytest.mark.parametrize("bits", [16, 4])
def test_tokens_that_scores_choose(bits, length) -> None:
    """As our cache chooses them, in each row and head."""
    from structattn.integrations.transformers import Allocation, level_cache, structurize

    ids = torch.randint(models.VOCAB, (2, length + 1), generator=torch.Generator().manual_seed(1))
    some, none = (sa.Storage(bits, bits, group_size=4, residual=6, keep=keep, block=8, recent=14) for keep in (4, 0))
    scorer = torch.randn(2, models.DIM + 1, generator=torch.Generator().manual_seed(2))
    scorer[:, -1] += 100  # of the numbers of 16 bits near 100 several scores are one
    numbers = {"nbytes": 1, "plain_nbytes": 1, "context_length": 40, "expected_loss": 0.0}
    chosen = Allocation([sa.AttentionSpec()], storage=[[some, none]], scorers=[scorer], **numbers)
    press = press_of(chosen)
    logits, _ = after(small(), press, ids, length)
    model = structurize(small(), chosen)
    cache = level_cache(model)
    model(ids[:, :length], cache=cache)
    assert_close(logits, model(ids[:, length:], cache=cache).logits)
    blocks = (length - 14) // 8
    dropped = blocks * 4 + max(0, blocks * 8 - 4)  # where none stay, the first group does
    assert press.compression_ratio == pytest.approx(dropped / (2 * length))
    with (
        pytest.raises(ConfigError, match="layer 0 chooses tokens .*give what allocate returned, or its scorers"),
        press_of(["standard"], chosen.storage)(small()),
    ):
        pass


@needs_kvpress
def test_what_no_head_keeps_is_freed_and_the_rest_is_masked() -> None:
    ids = torch.randint(models.VOCAB, (1, 44), generator=torch.Generator().manual_seed(1))
    model = small(layers=3)
    full = DynamicCache(config=model.config)
    model(ids[:, :40], cache=full)

    press = press_of(["window:11,sink_tokens=3", "window:6,sink_tokens=2", "heads:window:11,sink_tokens=3/window:9"])
    logits, cache = after(model, press, ids, 40)
    kept = [0, 1, 2, *range(30, 40)]
    for layer, whole in zip(cache.layers, full.layers, strict=True):
        assert layer.keys.shape[2] == len(kept) + 4
        assert torch.equal(layer.values[:, :, : len(kept)], whole.values[:, :, kept])
    masked = [getattr(x.self_attn, "masked_key_indices", None) for x in model.model.layers]
    assert masked[0] is None
    seen = torch.tensor([0, 1, *range(35, 40)])
    assert set(zip(*(x.tolist() for x in masked[1][1:]), strict=True)) == {
        (head, place) for head in (0, 1) for place, token in enumerate(kept) if token not in seen
    }
    assert masked[2][1].unique().tolist() == [1]
    assert press.compression_ratio == pytest.approx(1 - (2 * 13 + 2 * 7 + 13 + 8) / 240)
    assert not torch.allclose(logits, after(model, press_of("standard"), ids, 40)[0])

    both = press_of(["standard", *["heads:standard/window:11"] * 2])
    logits, cache = after(model, both, ids, 40)
    assert cache.layers[1].keys.shape[2] == 44  # all heads of layer 0 keep all


@needs_kvpress
def test_the_window_of_kvpress_is_ours() -> None:
    """StreamingLLM keeps a share of the prompt: of 40 tokens the first 4 and the last 16."""
    from kvpress import StreamingLLMPress

    from structattn.integrations.kvpress import hook_arguments

    ids = torch.randint(models.VOCAB, (1, 43), generator=torch.Generator().manual_seed(1))
    streaming = StreamingLLMPress(compression_ratio=0.5)
    hook = streaming.forward_hook
    streaming.forward_hook = lambda module, args, kwargs, out: hook(module, args, hook_arguments(kwargs), out)
    theirs, _ = after(small(2), streaming, ids, 40)
    ours, _ = after(small(2), press_of("window:17,sink_tokens=4"), ids, 40)
    assert_close(ours, theirs)


@needs_kvpress
def test_an_allocation_brings_its_storage_and_runs_in_the_pipeline(tmp_path) -> None:
    import kvpress  # registers the pipeline
    import tokenizers
    import transformers

    from structattn.integrations.transformers import allocate, calibrate

    model = small(2, max_position_embeddings=512)
    texts = torch.randint(models.VOCAB, (2, 128), generator=torch.Generator().manual_seed(1))
    chosen = allocate(calibrate(model.float(), [texts]), compression=2, context_length=4096)
    assert chosen.storage is not None or any(spec.heads for spec in chosen)
    press = press_of(chosen)
    again = press_of([str(spec) for spec in chosen], chosen.storage)
    ids = torch.randint(models.VOCAB, (1, 300), generator=torch.Generator().manual_seed(2))
    assert torch.equal(after(model, press, ids, 299)[0], after(model, again, ids, 299)[0])

    letters = {chr(97 + n): n for n in range(models.VOCAB)}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="a"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder, bos_token="a", eos_token="a")
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    assert isinstance(pipe("b c d " * 200, question="e f", press=press, max_new_tokens=3)["answer"], str)


@needs_kvpress
def test_mistakes_say_what_a_press_takes() -> None:
    from structattn.integrations.transformers import structurize

    for spec in ("mlr:4|4", "sliding:4|4@-|8", "global-window:4|4@8", "standard,kv_heads=1", "bilinear-btt:1"):
        with pytest.raises(ConfigError, match="neither all tokens .*structurize\\(model, spec\\) takes others"):
            press_of(spec)
    with pytest.raises(ConfigError, match="must be an Allocation, a text, an AttentionSpec or a list .*, got 3"):
        press_of(3)
    model = small(2)
    for args, message in (
        ((["standard"],), "the model has 2 layers: give one attention spec or 2, got 1"),
        (("heads:standard/window:8/window:9",), "the layers of the model have 2 key heads, and heads:.* has 3"),
        (("standard", [BITS]), "a list as storage needs 2 entries"),
    ):
        with pytest.raises(ConfigError, match=message), press_of(*args)(model):
            pass
    with (
        pytest.raises(ConfigError, match="a press is for the model as it was"),
        press_of("standard")(structurize(small(2), "standard")),
    ):
        pass
    press = press_of("heads:standard/window:8")
    with pytest.raises(ConfigError, match="run the model within press"):
        _ = press.compression_ratio
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="load the model with attn_implementation='sdpa'"), press(model):
        model(torch.zeros(1, 20, dtype=torch.int64), cache=DynamicCache(config=model.config))


@pytest.mark.skipif(HAS_KVPRESS, reason="kvpress is installed")
def test_without_kvpress_the_import_says_how_to_install_it() -> None:
    with pytest.raises(MissingDependencyError, match=NEEDED):
        importlib.import_module("structattn.integrations.kvpress")
