"""Key heads that keep some far tokens, chosen by scores of hidden states that were calibrated."""

import contextlib
import copy

import pytest
import torch

import structattn as sa
from structattn.errors import CalibrationError, ConfigError
from structattn.integrations.transformers import allocate, calibrate, level_cache, load_structurized, structurize
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.calibration import allocate as allocate_module
from structattn.integrations.transformers.calibration import token_scores
from structattn.integrations.transformers.calibration.bit_losses import GROUP_SIZES
from structattn.integrations.transformers.calibration.query_terms import plain_weights
from structattn.integrations.transformers.calibration.record import Calibration
from structattn.integrations.transformers.calibration.token_losses import WAYS, TokenLosses, losses_of_head
from structattn.integrations.transformers.calibration.token_scores import _uses
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.ops.terms import ScoreTerms
from structattn.tensor_files import read_tensors, write_tensors

transformers = pytest.importorskip("transformers")

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
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


@pytest.mark.full
def test_more_tokens_lose_less(found) -> None:
    losses = found.tokens.losses
    assert losses.recents == (64, 128, 256, 512)  # up to half of a text
    assert [scorer.shape for scorer in found.tokens.scorers] == [(GROUPS, 64 + 1)] * LAYERS
    for of_kind in (losses.text, losses.copies):
        assert of_kind.shape == (LAYERS * GROUPS, len(WAYS), 4)
        total = of_kind.sum(dim=0)
        assert bool((total[0] > total[WAYS.index((4, 8))]).all())
        assert bool((total[WAYS.index((4, 8))] > total[-1]).all())
        assert bool((total[0, :-1] > total[0, 1:]).all())
    for share in (0.2, 0.4, 0.7):
        ways, recents = zip(*losses.choices(share, LENGTH), strict=True)
        kept = [WAYS[way][0] / WAYS[way][1] for way in ways]
        shares = [x + (1 - x) * recent / LENGTH for x, recent in zip(kept, recents, strict=True)]
        assert share - 0.15 < sum(shares) / len(shares) <= share


def test_losses_are_those_of_outputs_without_the_tokens() -> None:
    """By the definition: the softmax over what stays, times the gradient."""
    torch.manual_seed(0)
    scores, gradient, v = torch.randn(2, 9, 40).double(), torch.randn(2, 9, 8).double(), torch.randn(40, 8).double()
    rows, recents, lost = torch.arange(31, 40), (1, 3, 30, 64), torch.rand(3, 40) < 0.4
    lost[:, 0] = False
    scores.masked_fill_(torch.arange(40) > rows[:, None], -torch.inf)
    weights = scores.softmax(-1)
    found = losses_of_head(weights, gradient @ v.mT, lost, rows, recents)
    for way, of_way in enumerate(lost):
        for number, recent in enumerate(recents):
            hidden = of_way & (torch.arange(40) <= rows[:, None] - recent)
            change = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v - weights @ v
            wanted = (gradient * change).sum(-1).sum(0).square().sum() / 2
            assert float(found[way, number]) == pytest.approx(float(wanted), rel=1e-9, abs=1e-20)


def test_losses_between_numbers_of_recent_tokens_are_powers() -> None:
    text = torch.tensor([[[4.0, 1.0, 1.0, 0.25]]], dtype=torch.float64)
    losses = TokenLosses(recents=(64, 128, 256, 512), text=text, copies=2 * text)

    def loss(recent: int, waiting: int = 1) -> float:
        found = losses.with_recent(recent, waiting)
        assert found.recents == (recent,)
        assert torch.allclose(found.copies, 2 * found.text)
        return float(found.text)

    assert [loss(recent) for recent in losses.recents] == pytest.approx([4, 1, 1, 0.25])
    assert loss(96) == pytest.approx(4 * (96 / 64) ** -2)
    assert loss(200) == pytest.approx(1)
    assert loss(1024) == pytest.approx(0.25 / 4)
    assert loss(32) == pytest.approx(16)
    each = [loss(64 + more) for more in range(100)]  # as the block of a cache fills
    assert loss(64, 100) == pytest.approx(sum(each) / 100)
    one = TokenLosses(recents=(64,), text=text[..., :1], copies=text[..., :1])
    assert float(one.with_recent(128).text) == pytest.approx(2)
    nothing = TokenLosses(recents=(64, 128), text=0 * text[..., :2], copies=0 * text[..., :2])
    assert float(nothing.with_recent(100, 64).both) < 1e-9


def test_losses_are_scaled_to_what_was_measured() -> None:
    torch.manual_seed(0)
    text, copies = torch.rand(2, 3, len(WAYS), 2, dtype=torch.float64)
    losses, choices = TokenLosses(recents=(64, 128), text=text, copies=copies), [(0, 64), (2, 128), (8, 64)]
    found = losses.scaled(choices, 0.7, 1.9)
    for of_kind, wanted in ((found.text, 0.7), (found.copies, 1.9)):
        assert float(of_kind[0, 0, 0] + of_kind[1, 2, 1] + of_kind[2, 8, 0]) == pytest.approx(wanted)
    assert torch.allclose(losses.scaled(choices, 1e9, 0.0).copies, copies / 8)  # no measurement is trusted that far


def test_weights_are_those_of_the_score() -> None:
    q, k = torch.randn(4, 30, 8), torch.randn(2, 50, 8)
    for scale in (None, 0.7):
        wanted = Variant().weights(q[None], k[None], ScoreTerms(scale=scale), sequences=Sequences())[0]
        assert torch.allclose(plain_weights(q, k, scale), wanted, atol=1e-6)


@torch.no_grad()
@pytest.mark.quick(size=[16])
@pytest.mark.parametrize("size", GROUP_SIZES)
def test_losses_by_bits_sum_to_what_is_measured(model, texts, found, size) -> None:
    """Of keys alone, and of values alone, in the cache itself; the last texts measure losses."""
    texts = texts[2:]
    for row, bits in enumerate(((4, 16), (16, 4))):
        changed = structurize(copy.deepcopy(model), "standard", storage=sa.Storage(*bits, size, 2 * size))
        before = model(texts).logits[:, -512:].log_softmax(-1)  # what is measured
        cache = level_cache(changed, max_length=LENGTH)
        after = changed(texts, **{CACHE: cache}).logits[:, -512:].log_softmax(-1)
        wanted = float((before.exp() * (before - after)).sum(-1).mean())
        losses, _ = found.bits.of(size)
        assert float(losses[row].sum()) == pytest.approx(wanted, rel=0.25)


@torch.no_grad()
def test_uses_are_mean_squares_of_weights() -> None:
    """By the definition, of a text of 80 tokens and its copy: of queries at least ten tokens away."""
    torch.manual_seed(0)
    length, far = 80, 10
    q, k = torch.randn(1, 4, 2 * length, 8), torch.randn(1, 2, 2 * length, 8)
    module = transformers.models.llama.modeling_llama.LlamaAttention(
        transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2), 0
    )
    call = AttentionCall(module, Variant(), lambda x: x, q, k, k, None, 0.0, None, {})
    found = _uses(call, length)
    weights = Variant().weights(q, k, ScoreTerms(), sequences=Sequences())[0].view(2, 2, 2 * length, 2 * length)
    assert found.shape == (2, length - 2 * far)
    for token in (0, 1, 33, length - 2 * far - 1):
        squares = weights[..., token].square().mean(dim=1)  # (G, queries)
        wanted = squares[:, token + far : length].mean(dim=1) + squares[:, length:].mean(dim=1)
        assert torch.allclose(found[:, token], wanted, rtol=1e-4)


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
            assert any(torch.allclose(of_head, head, rtol=2**-8, atol=1e-4) for head in wanted)  # of bfloat16


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
    in_parts = level_cache(changed, max_length=LONG)
    for part in torch.randint(97, (1, LONG)).split([LONG // 4, LONG - LONG // 4], dim=1):
        changed(part, logits_to_keep=1, **{CACHE: in_parts})
    assert in_parts.nbytes <= chosen.nbytes
    storages = [storage for layer in chosen.storage for storage in (layer if isinstance(layer, list) else [layer])]
    assert any(storage is not None and storage.keep is not None for storage in storages)


@torch.no_grad()
@pytest.mark.parametrize("compression", [1.5, 2, 2.8])
def test_a_model_loses_what_is_expected(model, found, texts, monkeypatch, compression) -> None:
    """Within a factor of three; and a prompt attends to all of its tokens."""
    monkeypatch.setattr(allocate_module, "GROUP_SIZES", (16,))
    chosen = allocate(found, compression=compression, context_length=LENGTH, methods=("tokens",))
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


def _storages(chosen):
    """Of the heads that keep some far tokens."""
    each = [storage for layer in chosen.storage for storage in (layer if isinstance(layer, list) else [layer])]
    return [storage for storage in each if storage is not None and storage.keep is not None]


@pytest.mark.parametrize("compression", [3, 10, 25])
def test_heads_have_the_groups_that_lose_least(found, monkeypatch, compression) -> None:
    chosen, of_size = allocate(found, compression=compression, context_length=LONG), {}
    for size in GROUP_SIZES:
        monkeypatch.setattr(allocate_module, "GROUP_SIZES", (size,))
        with contextlib.suppress(ConfigError):  # what always stays may be more than the budget
            of_size[size] = allocate(found, compression=compression, context_length=LONG)
    (size,) = {storage.group_size for storage in _storages(chosen)}
    assert of_size[size].expected_loss == chosen.expected_loss
    least = min(other.expected_loss for other in of_size.values())
    assert chosen.expected_loss < 1.2 * least  # of text alone; with copies it is the least
    assert all(storage.recent >= 4 * size for storage in _storages(chosen))


@pytest.mark.full
def test_files_of_before_are_read(found, tmp_path) -> None:
    """Theirs have losses with one number of recent tokens, which fall by a power of it."""
    found.save(tmp_path / "new.safetensors")
    key = "structattn_calibration"
    data, tensors = read_tensors(tmp_path / "new.safetensors", key, what="calibration", remedy="again", version=1)
    assert data["tokens"] == {"recents": [64, 128, 256, 512]}
    for name in ("text", "copies"):
        del tensors[f"tokens.{name}"]
    tensors["tokens.losses"] = torch.rand(LAYERS * GROUPS, len(WAYS), dtype=torch.float64)
    for of_tokens, exponent, of_text in (
        (None, 1.0, 1.0),
        ({"recent": 256, "exponent": 0.5, "measured": 0.01, "of_text": 0.6}, 0.5, 0.6),
    ):
        data.pop("tokens", None)
        data |= {} if of_tokens is None else {"tokens": of_tokens}
        write_tensors(tmp_path / "old.safetensors", key, data, tensors)
        old = Calibration.load(tmp_path / "old.safetensors").tokens
        assert all(map(torch.equal, old.scorers, found.tokens.scorers))
        losses = old.losses.with_recent(128)
        assert torch.allclose(losses.both[..., 0], tensors["tokens.losses"] * 2**exponent)
        assert torch.allclose(losses.text, of_text * losses.both)
        assert allocate(Calibration.load(tmp_path / "old.safetensors"), compression=4).expected_loss > 0
    assert old.losses.both.shape == (LAYERS * GROUPS, len(WAYS), 3)


@pytest.mark.full
def test_a_saved_model_and_its_cache_go_on(smaller, found, texts, tmp_path) -> None:
    found.save(tmp_path / "found.safetensors")
    read = Calibration.load(tmp_path / "found.safetensors")
    assert read.tokens.losses.recents == found.tokens.losses.recents
    assert torch.equal(read.tokens.losses.text, found.tokens.losses.text)
    assert torch.equal(read.tokens.losses.copies, found.tokens.losses.copies)
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


@pytest.mark.quick(beams=[1])
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


@pytest.mark.skipif(VERSION < (5, 20), reason="continuous batching with levels needs transformers 5.20")
@pytest.mark.quick(most_tokens=[256])
@pytest.mark.parametrize("most_tokens", [256, 4096])
def test_requests_together_have_the_tokens_that_each_has_alone(model, found, texts, most_tokens) -> None:
    smaller = structurize(copy.deepcopy(model), allocate(found, compression=8, context_length=LONG))
    given = [texts[row, :length].tolist() for row, length in enumerate((980, 700, 30))]
    outs = smaller.generate_batch(
        given,
        transformers.GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=-1),
        continuous_batching_config=transformers.ContinuousBatchingConfig(num_blocks=10, max_batch_tokens=most_tokens),
    )
    for prompt, out in zip(given, outs.values(), strict=True):
        alone = smaller.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert out.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.full
@torch.no_grad()
def test_drafts_leave_no_trace(smaller, texts) -> None:
    """Also where a block is decided on between them."""
    ids, outs = texts[:1, :820], []
    one_by_one, with_drafts = level_cache(smaller), level_cache(smaller)
    for cache in (one_by_one, with_drafts):
        smaller(ids[:, :740], past_key_values=cache)
    expected = [smaller(ids[:, at : at + 1], past_key_values=one_by_one).logits for at in range(740, 820)]
    for at in range(740, 820, 2):
        wrong = texts[1:2, at : at + 4]
        call = torch.cat([ids[:, at : at + 2], wrong], dim=1)
        outs.append(smaller(call, past_key_values=with_drafts).logits[:, :2])
        with_drafts.crop(-4)
    torch.testing.assert_close(torch.cat(outs, dim=1), torch.cat(expected, dim=1), rtol=1e-4, atol=1e-4)
    assistant = {"assistant_model": smaller, "max_new_tokens": 20, "do_sample": False}
    assert torch.equal(*(smaller.generate(ids[:, :740], **assistant) for _ in range(2)))


def test_gradients_that_are_no_numbers_are_an_error(model, texts, monkeypatch) -> None:
    monkeypatch.setattr(token_scores, "losses_of_head", lambda *args: losses_of_head(*args) * torch.nan)
    with pytest.raises(CalibrationError, match="the gradients of the predictions of the model are NaN or infinite"):
        calibrate(model, [texts[:2, :256]], methods=("tokens",))


@torch.no_grad()
def test_what_cannot_be_is_refused(smaller, model, found, texts) -> None:
    cache = level_cache(smaller)
    smaller(texts[:1], **{CACHE: cache})
    with pytest.raises(ConfigError, match="does not remember which they are"):
        smaller(texts[:1, :1], output_attentions=True, **{CACHE: cache})
    mask = torch.ones_like(texts[:1])
    mask[0, -5:] = 0
    with pytest.raises(ConfigError, match="padding on the left only: pad there"):
        smaller(texts[:1], attention_mask=mask, **{CACHE: level_cache(smaller)})
    with pytest.raises(ConfigError, match="nothing scores them"):
        structurize(copy.deepcopy(model), "standard", storage=sa.Storage(4, 4, residual=64, keep=64))
    plain = structurize(copy.deepcopy(model), "standard")
    with pytest.raises(ConfigError, match="layer 0 of this model has no token scores"):
        plain(texts[:1], **{CACHE: level_cache(plain, storage=sa.Storage(4, 4, residual=64, keep=64))})
    short = calibrate(model, [texts[:, :100]], methods=("tokens", "bits"))
    assert short.tokens is None
    with pytest.raises(ConfigError, match="has not measured tokens"):
        allocate(short, compression=2, methods=("tokens",))
    with pytest.raises(ConfigError, match="no choice of bits .* on texts of at least 128 tokens"):
        allocate(short, compression=4)
    with pytest.raises(ConfigError, match="no choice of tokens and bits gives a cache"):
        allocate(found, compression=500)
    with pytest.raises(ConfigError, match="methods must be a tuple"):
        calibrate(model, [texts], methods="tokens")


@torch.no_grad()
def test_an_allocation_says_what_it_is_and_fits_its_model_only(model, found, texts) -> None:
    chosen = allocate(found, compression=6, context_length=LONG)
    assert f"{chosen.nbytes:,} of {chosen.plain_nbytes:,} bytes for {LONG:,} tokens" in repr(chosen)
    assert f"far tokens chosen in {sum(x is not None for x in chosen.scorers)}" in repr(chosen)

    def other(**changes):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**model.config.to_dict(), **changes})).eval()

    for changes, message in (
        ({"num_key_value_heads": 4}, "the allocation is of another model: layer 0"),
        ({"num_hidden_layers": LAYERS + 1}, f"of a model with {LAYERS} attention layers"),
    ):
        with pytest.raises(ConfigError, match=message):
            structurize(other(**changes), chosen)
    wide = structurize(other(hidden_size=128, head_dim=16), chosen)  # whose attention has the same shapes
    with pytest.raises(ConfigError, match="hidden states of 64 numbers, and these have 128"):
        wide(texts[:1], **{CACHE: level_cache(wide)})


@pytest.mark.parametrize(
    ("lengths", "fitted"),
    [([300], 1), ([300, 300], 1), ([300, 300, 300], 2), ([2048] * 10, 4), ([1024] * 20, 8), ([4096] * 4, 2)],
)
def test_some_texts_fit_scorers_and_the_others_measure(lengths, fitted) -> None:
    texts = [torch.full((1, length), number) for number, length in enumerate(lengths)]
    fit, held = token_scores._divided(texts)
    assert fit == texts[:fitted]
    assert held == (texts[fitted:] or texts)
