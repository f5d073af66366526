"""Key heads that keep some far tokens, chosen by scores of hidden states that were calibrated."""

import contextlib
import copy

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import allocate, calibrate, level_cache, load_structurized, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.calibration import allocate as allocate_module
from structattn.integrations.transformers.calibration.head_choices import GROUP_SIZES, RECENT_TOKENS
from structattn.integrations.transformers.calibration.prompts import COPIES
from structattn.integrations.transformers.calibration.record import Calibration
from structattn.integrations.transformers.calibration.token_scores import WAYS, _plain_weights, _ways
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.ops.terms import ScoreTerms
from structattn.tensor_files import read_tensors, write_tensors

transformers = pytest.importorskip("transformers")

LAYERS, GROUPS, LENGTH, LONG = 2, 2, 1024, 4096


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=GROUPS,
        intermediate_size=64,
        vocab_size=97,
        max_position_embeddings=8192,
        eos_token_id=None,
        initializer_range=0.2,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def texts():
    return torch.randint(97, (4, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(model, texts):
    return calibrate(model, [texts], methods=("tokens", "bits"))


@pytest.fixture(scope="module")
def smaller(model, found):
    return structurize(copy.deepcopy(model), allocate(found, compression=6, context_length=LONG))


def _layer(cache, number):
    return [contents for _, contents in cache.layers[number].level_cache._kept.parts]


def test_scores_predict_what_is_looked_back_at(found) -> None:
    losses = found.tokens.losses
    assert losses.shape == (LAYERS * GROUPS, len(WAYS))
    assert bool((losses[:, :-1] >= losses[:, 1:]).all())  # more tokens never lose more
    assert [scorer.shape for scorer in found.tokens.scorers] == [(GROUPS, 64 + 1)] * LAYERS
    half = WAYS.index((4, 8))
    assert bool((losses[:, half] < 0.5 * losses[:, 0]).all())  # in any other order half of them lose half
    shares = torch.tensor([keep / block for keep, block in WAYS])
    assert 0.15 < float(shares[_ways(losses, 0.25)].mean()) <= 0.25


def test_weights_are_those_of_the_score() -> None:
    q, k = torch.randn(4, 30, 8), torch.randn(2, 50, 8)
    for scale in (None, 0.7):
        wanted = Variant().weights(q[None], k[None], ScoreTerms(scale=scale), sequences=Sequences())[0]
        assert torch.allclose(_plain_weights(q, k, scale), wanted, atol=1e-6)


@torch.no_grad()
def test_the_scores_of_a_model_are_those_of_its_hidden_states(smaller, found, texts) -> None:
    cache = level_cache(smaller)
    ids = texts[:1, :100]
    smaller(ids, **{CACHE: cache})
    states = smaller.model.layers[0].input_layernorm(smaller.model.embed_tokens(ids))[0]
    wanted = found.tokens.scorers[0] @ torch.cat([states, torch.ones(100, 1)], 1).mT
    held = [part._scores[0, :, :100] for part in _layer(cache, 0) if hasattr(part, "_scores")]
    assert held
    for scores in held:
        for of_head in scores:
            assert any(torch.allclose(of_head, head, atol=1e-4) for head in wanted)


@torch.no_grad()
@pytest.mark.parametrize("compression", [6.0, 10.0])
def test_the_bytes_are_those_allocated(model, found, compression) -> None:
    chosen = allocate(found, compression=compression, context_length=LONG)
    assert compression * chosen.nbytes <= chosen.plain_nbytes
    assert chosen.expected_loss > 0
    changed = structurize(copy.deepcopy(model).bfloat16(), chosen)
    cache = level_cache(changed, max_length=LONG)
    changed(torch.randint(97, (1, LONG)), logits_to_keep=1, **{CACHE: cache})
    assert 0.8 * chosen.nbytes < cache.nbytes <= chosen.nbytes  # at its largest, just before a block is decided on
    storages = [storage for layer in chosen.storage for storage in (layer if isinstance(layer, list) else [layer])]
    assert any(storage is not None and storage.keep is not None for storage in storages)


@torch.no_grad()
@pytest.mark.parametrize("recent_tokens", [None, 64, 128])
def test_a_model_loses_what_is_expected(model, found, texts, monkeypatch, recent_tokens) -> None:
    """Within a factor of three, whatever number of recent tokens stays; and a prompt attends to all of its
    tokens.
    """
    if recent_tokens is not None:
        monkeypatch.setattr(allocate_module, "RECENT_TOKENS", (recent_tokens,))
        monkeypatch.setattr(allocate_module, "GROUP_SIZES", (16,))
    chosen = allocate(found, compression=2, context_length=LENGTH, methods=("tokens",))
    changed = structurize(copy.deepcopy(model), chosen)
    ids = texts[3:]
    plain = model(ids).logits[0].log_softmax(-1)
    assert torch.allclose(changed(ids, **{CACHE: level_cache(changed)}).logits[0].log_softmax(-1), plain, atol=1e-3)
    cache, divergences = level_cache(changed), []
    changed(ids[:, :900], **{CACHE: cache})
    for at in range(900, LENGTH):
        step = changed(ids[:, at : at + 1], **{CACHE: cache}).logits[0, 0].log_softmax(-1)
        divergences.append(float((plain[at].exp() * (plain[at] - step)).sum()))
    measured = sum(divergences) / len(divergences)
    assert chosen.expected_loss / 3 < measured < 3 * chosen.expected_loss


def test_fewer_recent_tokens_lose_more_by_a_power_that_is_measured(found) -> None:
    tokens = found.tokens
    assert tokens.recent == 256
    assert 0 < tokens.exponent < 2
    assert torch.equal(tokens.losses_with(256), tokens.losses)
    ratio = tokens.losses_with(64)[:, 0] / tokens.losses[:, 0]
    assert torch.allclose(ratio, torch.tensor(4**tokens.exponent, dtype=torch.float64))
    each = torch.stack([tokens.losses_with(64 + more) for more in range(100)])  # as the block of a cache fills
    assert torch.allclose(tokens.losses_with(64, 100), each.mean(dim=0))


@pytest.mark.parametrize(("compression", "recent"), [(3, 256), (10, 256), (19, 128), (25, 64)])
def test_as_many_recent_tokens_stay_as_fit_and_the_groups_that_lose_least(
    found, monkeypatch, compression, recent
) -> None:
    monkeypatch.setattr(allocate_module, "LONG", LONG)
    chosen = allocate(found, compression=compression, context_length=LONG)
    losses = {}
    for size in ((recent, group_size) for recent in RECENT_TOKENS for group_size in GROUP_SIZES):
        monkeypatch.setattr(allocate_module, "RECENT_TOKENS", size[:1])
        monkeypatch.setattr(allocate_module, "GROUP_SIZES", size[1:])
        if size[0] >= 4 * size[1]:
            with contextlib.suppress(ConfigError):  # what always stays may be more than the budget
                losses[size] = allocate(found, compression=compression, context_length=LONG).expected_loss
    assert max(size[0] for size in losses) == recent
    of_recent = {size: loss for size, loss in losses.items() if size[0] == recent}
    assert chosen.expected_loss == min(of_recent.values())
    storages = [storage for layer in chosen.storage for storage in (layer if isinstance(layer, list) else [layer])]
    sizes = {(storage.recent, storage.group_size) for storage in storages if storage and storage.keep is not None}
    assert sizes == {min(of_recent, key=of_recent.get)}


def test_long_contexts_have_the_largest_groups_that_fit(found) -> None:
    sizes = []
    for compression in (12, 40, 48):
        storages = allocate(found, compression=compression, context_length=2 * LONG).storage
        each = [storage for layer in storages for storage in (layer if isinstance(layer, list) else [layer])]
        sizes.append({(storage.recent, storage.group_size) for storage in each if storage and storage.keep is not None})
    assert sizes[0] == {(256, 64)}
    assert sizes[-1] == {(128, 16)}
    storages = allocate(found, compression=8, context_length=LONG).storage
    each = [storage for layer in storages for storage in (layer if isinstance(layer, list) else [layer])]
    assert {storage.group_size for storage in each if storage and storage.keep is not None} == {64}


def test_files_of_before_say_nothing_of_recent_tokens(found, tmp_path) -> None:
    """Their losses are those with 256, and half as many lose twice as much."""
    found.save(tmp_path / "new.safetensors")
    key = "structattn_calibration"
    data, tensors = read_tensors(tmp_path / "new.safetensors", key, what="calibration", remedy="again", version=1)
    tokens = found.tokens
    names = ("exponent", "measured", "of_text")
    assert data.pop("tokens") == {"recent": 256} | {name: getattr(tokens, name) for name in names}
    write_tensors(tmp_path / "old.safetensors", key, data, tensors)
    old = Calibration.load(tmp_path / "old.safetensors")
    assert (old.tokens.recent, old.tokens.exponent, old.tokens.measured) == (256, 1.0, 0.0)
    assert old.tokens.change(0.01) == 0.01
    assert 0 < tokens.of_text < 1 / (1 - COPIES)
    assert tokens.change(tokens.measured / 4) == pytest.approx(tokens.of_text * tokens.measured / 8)
    assert tokens.change(2 * tokens.measured) == 2 * tokens.of_text * tokens.measured
    assert torch.equal(old.tokens.losses_with(128), 2 * found.tokens.losses)


def test_a_saved_model_and_its_cache_go_on(smaller, found, texts, tmp_path) -> None:
    found.save(tmp_path / "found.safetensors")
    read = Calibration.load(tmp_path / "found.safetensors")
    assert torch.equal(read.tokens.losses, found.tokens.losses)
    assert read.tokens.exponent == found.tokens.exponent
    assert all(map(torch.equal, read.tokens.scorers, found.tokens.scorers))
    prompt = texts[:2, :980]
    tokens = smaller.generate(prompt, max_new_tokens=60, do_sample=False)
    smaller.save_pretrained(tmp_path / "model")
    for loaded in (
        load_structurized(tmp_path / "model"),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model"),
    ):
        assert torch.equal(loaded.generate(prompt, max_new_tokens=60, do_sample=False), tokens)
    cache = level_cache(smaller)
    assert torch.equal(smaller.generate(prompt, max_new_tokens=60, do_sample=False, **{CACHE: cache}), tokens)
    one = level_cache(smaller)
    half = smaller.generate(prompt, max_new_tokens=30, do_sample=False, **{CACHE: one})
    assert torch.equal(smaller.generate(half, max_new_tokens=30, do_sample=False, **{CACHE: one}), tokens)
    beams = smaller.generate(prompt, max_new_tokens=40, num_beams=2, do_sample=False)
    assert torch.equal(beams, smaller.generate(prompt, max_new_tokens=40, num_beams=2, do_sample=False))


@pytest.mark.parametrize("beams", [1, 2])
def test_padded_prompts_have_the_tokens_that_each_has_alone(smaller, texts, beams) -> None:
    lengths, longest = (980, 700, 30), 980
    ids, mask = torch.zeros((2, 3, longest), dtype=torch.int64)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = texts[row, :length]
        mask[row, longest - length :] = 1
    options = {"max_new_tokens": 40, "do_sample": False, "num_beams": beams}
    found = smaller.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(lengths):
        alone = smaller.generate(texts[row : row + 1, :length], **options)
        assert torch.equal(found[row, longest:], alone[0, length:])


def test_speculative_decoding_takes_tokens_back(smaller, model, texts) -> None:
    """Its calls are other calls, so that its tokens need not be those of greedy decoding; but most are."""
    prompt = texts[:1, :800]
    assistant = copy.deepcopy(model)
    assisted = smaller.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=assistant)
    assert assisted.shape == (1, 860)
    assert torch.equal(
        assisted, smaller.generate(prompt, max_new_tokens=60, do_sample=False, assistant_model=assistant)
    )


@torch.no_grad()
def test_what_cannot_be_is_refused(smaller, model, found, texts) -> None:
    cache = level_cache(smaller)
    smaller(texts[:1], **{CACHE: cache})
    with pytest.raises(ConfigError, match="does not remember which they are"):
        smaller(texts[:1, :1], output_attentions=True, **{CACHE: cache})
    with pytest.raises(ConfigError, match="nothing scores them"):
        structurize(copy.deepcopy(model), "standard", storage=sa.Storage(4, 4, residual=64, keep=64))
    plain = structurize(copy.deepcopy(model), "standard")
    with pytest.raises(ConfigError, match="layer 0 of this model has no token scores"):
        plain(texts[:1], **{CACHE: level_cache(plain, storage=sa.Storage(4, 4, residual=64, keep=64))})
    short = calibrate(model, [texts[:, :100]], methods=("tokens", "bits"))
    assert short.tokens is None
    with pytest.raises(ConfigError, match="has not measured tokens"):
        allocate(short, compression=2, methods=("tokens",))
    with pytest.raises(ConfigError, match="no choice of tokens and bits gives a cache"):
        allocate(found, compression=500)
    with pytest.raises(ConfigError, match="methods must be a tuple"):
        calibrate(model, [texts], methods="tokens")
