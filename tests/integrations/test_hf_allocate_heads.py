"""Key heads that see a window and fewer bits, chosen by what their predictions lose."""

import copy
import json
from dataclasses import replace

import hf_models as models
import pytest
import torch

import structattn as sa
from structattn.cache.storage import checked_storage, storage_of_heads
from structattn.errors import ConfigError
from structattn.integrations.transformers import allocate, calibrate, level_cache, load_structurized, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.calibration.head_effects import SINK_TOKENS
from structattn.integrations.transformers.calibration.record import Calibration
from structattn.tensor_files import read_tensors, write_tensors

transformers = pytest.importorskip("transformers")

LENGTH, LAYERS, GROUPS = 256, 2, 2
SILENT = (1, 0)  # the key head of this layer that nothing reads


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
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight *= 8  # so that attention matters
        layer, head = SILENT
        made.model.layers[layer].self_attn.o_proj.weight[:, head * 32 : (head + 1) * 32] = 0
    return made


@pytest.fixture(scope="module")
def texts():
    return torch.randint(97, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(model, texts):
    return calibrate(model, [texts], methods=("heads", "bits", "levels"))


def _divergence(model, changed, ids):
    before, after = (x(ids).logits.log_softmax(-1) for x in (model, changed))
    return float((before.exp() * (before - after)).sum(-1).mean())


@torch.no_grad()
def test_effects_of_heads_sum_to_what_is_measured(model, texts, found) -> None:
    """Of the heads that see less while the most important one sees all."""
    effects = found.effects
    assert effects.windows == (LENGTH // 8 - SINK_TOKENS, LENGTH // 2 - SINK_TOKENS)
    scores = 0.9 * effects.text.sum(0) + 0.1 * effects.retrieval.sum(0)
    best = int(scores.argmax())
    for window, of_heads in zip(effects.windows, effects.text, strict=True):
        narrow = f"window:{window},sink_tokens={SINK_TOKENS}"
        specs = [narrow] * (LAYERS * GROUPS)
        specs[best] = "standard"
        of_layers = ["heads:" + "/".join(specs[at : at + GROUPS]) for at in range(0, LAYERS * GROUPS, GROUPS)]
        measured = _divergence(model, structurize(copy.deepcopy(model), of_layers), texts)
        others = float(of_heads.sum() - of_heads[best])
        assert others == pytest.approx(measured, rel=0.2)
    assert float(effects.text[0].sum()) > 2 * float(effects.text[1].sum()) > 0  # a smaller window loses more
    assert 0 < float(found.bits.text[0].sum()) < 0.01 * float(effects.text[1].sum())


def test_a_head_that_nothing_reads_has_no_effect(found) -> None:
    silent = SILENT[0] * GROUPS + SILENT[1]
    effects = found.effects
    of_bits = (x for losses in (found.bits.text, found.bits.copies) for x in losses.flatten(0, 1))
    for of_heads in (*effects.text, *effects.retrieval, *of_bits):
        assert of_heads[silent] == 0
        assert int((of_heads != 0).sum()) == LAYERS * GROUPS - 1
    chosen = allocate(found, compression=2.5, context_length=2048)
    first = chosen[SILENT[0]]
    assert first.heads is not None
    assert first.heads[SILENT[1]].layout is not None  # it sees a window
    assert any(spec.heads is None or any(head.layout is None for head in spec.heads) for spec in chosen)


def test_a_copied_span_is_what_retrieval_asks_for(model, texts) -> None:
    from structattn.integrations.transformers.calibration.prompts import _CUE, _SPAN, retrieval_prompt

    prompt = retrieval_prompt(texts[:1], torch.Generator().manual_seed(0))
    ids, count = prompt.ids[0], LENGTH // (4 * _SPAN)
    kept = LENGTH - count * _SPAN
    windows = ids[:kept].unfold(0, _SPAN, 1)
    for copied in ids[kept:].view(count, _SPAN):
        assert bool((windows == copied).all(1).any())
    assert len(prompt.scored) == count * (_SPAN - _CUE)
    assert int(prompt.scored[0]) == kept + _CUE - 1


@torch.no_grad()
@pytest.mark.quick(compression=[3.0])
@pytest.mark.parametrize("compression", [1.0, 1.6, 3.0, 6.0])
def test_the_bytes_are_those_allocated(model, found, compression) -> None:
    length = 2048
    chosen = allocate(found, compression=compression, context_length=length)
    assert isinstance(chosen, list)
    assert len(chosen) == LAYERS
    assert chosen.plain_nbytes == LAYERS * GROUPS * 32 // 2 * 2 * 2 * length
    assert compression * chosen.nbytes <= chosen.plain_nbytes
    changed = structurize(copy.deepcopy(model).bfloat16(), chosen)
    cache = level_cache(changed, max_length=length)
    changed(torch.randint(97, (1, length)), logits_to_keep=1, **{CACHE: cache})
    assert cache.nbytes == chosen.nbytes


def test_a_larger_budget_never_loses_more(found) -> None:
    chosen = [allocate(found, compression=c, context_length=2048) for c in (8, 6, 4, 3, 2, 1.5, 1)]
    losses = [one.expected_loss for one in chosen]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0 < losses[0]
    for methods in (("bits",), ("heads",)):
        alone = allocate(found, compression=2, context_length=2048, methods=methods)
        assert alone.expected_loss >= chosen[4].expected_loss
    assert all(
        spec == sa.AttentionSpec() for spec in allocate(found, compression=2, methods=("bits",), context_length=2048)
    )
    assert allocate(found, compression=2, methods=("heads",), context_length=2048).storage is None
    levels = allocate(found, compression=2, methods=("levels",))
    assert levels[0].layout.num_levels > 1
    # A budget in bytes is of the model's dtype, float32 here.
    of_dtype = allocate(found, bytes_per_token=levels.nbytes * 2 / levels.context_length, methods=("levels",))
    assert (of_dtype.nbytes, of_dtype.plain_nbytes) == (2 * levels.nbytes, 2 * levels.plain_nbytes)


def test_keys_and_values_have_bits_of_their_own(found) -> None:
    """With a little more than the smallest cache, the keys of one head get what they need, nothing else."""
    losses = torch.full((3, 2, LAYERS * GROUPS), 1e-9, dtype=torch.float64)
    losses[:, 0, 1] = 1.0  # in groups of every size
    one_head = replace(found, bits=replace(found.bits, text=losses, copies=losses))
    sizes = {some: _nbytes(sa.Storage(*some), 8192) for some in ((4, 4), (8, 4), (8, 8))}
    budget = (LAYERS * GROUPS - 1) * sizes[4, 4] + sizes[8, 4]
    plain = LAYERS * GROUPS * 2 * 16 * 2 * 8192
    chosen = allocate(one_head, compression=plain / budget, context_length=8192, methods=("bits",))
    of_heads = [one for of_layer in chosen.storage for one in storage_of_heads(checked_storage(of_layer), GROUPS)]
    assert [(one.key_bits, one.value_bits) for one in of_heads] == [(4, 4), (8, 4), *[(4, 4)] * (LAYERS * GROUPS - 2)]
    assert chosen.expected_loss == pytest.approx((15 / 255) ** 2, rel=1e-4)
    assert sizes[8, 4] < sizes[8, 8]


def _nbytes(storage, length):
    """Of a key head, in 16 bits where numbers are exact."""
    cache = sa.LevelCache(storage=storage, max_length=length)
    cache.append(*torch.zeros(2, 1, 1, length, 16, dtype=torch.bfloat16))
    return cache.nbytes


def test_files_keep_effects_and_old_files_have_none(found, tmp_path) -> None:
    found.save(tmp_path / "new.safetensors")
    read = Calibration.load(tmp_path / "new.safetensors")
    assert read.effects.windows == found.effects.windows
    for name in ("text", "retrieval"):
        assert torch.equal(getattr(read.effects, name), getattr(found.effects, name))
    assert read.bits.group_sizes == found.bits.group_sizes == (64, 32, 16)
    for name in ("text", "copies"):
        assert torch.equal(getattr(read.bits, name), getattr(found.bits, name))
    key = "structattn_calibration"
    plain, tensors = read_tensors(
        tmp_path / "new.safetensors", key, what="calibration", remedy="calibrate again", version=1
    )
    plain = json.loads(json.dumps(plain))
    del plain["group_sizes"]
    tensors = {name: x for name, x in tensors.items() if not name.startswith("bits.")}
    of_both = found.bits.text[0]  # of before: one group size, text alone; still before, keys and values together
    for number, old in enumerate((of_both, of_both.sum(dim=0))):
        write_tensors(tmp_path / f"before-{number}.safetensors", key, plain, {**tensors, "effects.bits": old})
        bits = Calibration.load(tmp_path / f"before-{number}.safetensors").bits
        for size in (64, 16):
            for losses in bits.of(size):
                assert losses.shape == of_both.shape
                assert torch.allclose(losses.sum(dim=0), of_both.sum(dim=0))
    write_tensors(tmp_path / "signed.safetensors", key, plain, {**tensors, "effects.bits": -of_both})
    assert all(float(x.min()) == 0 for x in Calibration.load(tmp_path / "signed.safetensors").bits.of(64))
    del plain["windows"]
    kept = {name: x for name, x in tensors.items() if not name.startswith("effects.")}
    write_tensors(tmp_path / "old.safetensors", key, plain, kept)
    old = Calibration.load(tmp_path / "old.safetensors")
    assert old.effects is None
    assert old.bits is None
    assert allocate(old, compression=1.5)[0].layout.num_levels > 1
    with pytest.raises(
        ConfigError, match=r"has not measured heads: calibrate\(model, batches, methods=...\) with 'heads'"
    ):
        allocate(old, compression=2, methods=("heads",))


def test_the_model_is_as_before_and_the_choice_is_saved(model, texts, found, tmp_path) -> None:
    before = copy.deepcopy(model)
    before.lm_head.weight.requires_grad_(False)
    wanted = [parameter.requires_grad for parameter in before.parameters()]
    implementation = before.config._attn_implementation
    again = calibrate(before, [texts], methods=("heads", "bits"))
    assert torch.equal(again.effects.text, found.effects.text)  # the same in every run
    assert [parameter.requires_grad for parameter in before.parameters()] == wanted
    assert before.config._attn_implementation == implementation
    assert all(parameter.grad is None for parameter in before.parameters())
    chosen = allocate(found, compression=3, context_length=2048)
    assert chosen.storage is not None
    changed = structurize(before, chosen)
    tokens = changed.generate(texts[:, :200], max_new_tokens=6, do_sample=False)
    changed.save_pretrained(tmp_path)
    loaded = load_structurized(tmp_path)
    assert torch.equal(loaded.generate(texts[:, :200], max_new_tokens=6, do_sample=False), tokens)
    assert level_cache(loaded).nbytes == level_cache(changed).nbytes


@pytest.mark.full
def test_a_model_with_fewer_bits_is_trained_without_a_cache(model, texts, found) -> None:
    changed = structurize(copy.deepcopy(model), allocate(found, compression=3, context_length=2048))
    exact = copy.deepcopy(changed)
    del exact.config.structattn["storage"]
    for one, mode in ((changed, True), (changed, False), (exact, False)):
        one.train(mode)
        one.zero_grad()
        one(texts, labels=texts).loss.backward()
    for parameter, other in zip(changed.parameters(), exact.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    with pytest.raises(ConfigError, match="gives no gradients"):
        changed(texts, labels=texts, use_cache=True)


def test_what_cannot_be_chosen_is_refused(model, texts, found) -> None:
    for options, match in (
        ({"compression": 500}, r"no choice of heads and bits gives a cache .* smallest one of 256 tokens is \d"),
        ({"compression": 2, "methods": "heads"}, "methods must be"),
        ({"compression": 2, "methods": ()}, "methods must be"),
        ({"compression": 2, "methods": ("tokens",)}, "has not measured tokens"),
        ({"compression": 2, "methods": ("tokens", "heads")}, "either some are chosen or all are dropped"),
        ({"compression": 2, "methods": ("rows",)}, "unknown methods .rows.: known"),
        ({"compression": 2, "methods": ("levels", "bits")}, "levels are chosen alone"),
        ({"compression": 2, "methods": ("bits",), "ranks": "uniform"}, "ranks='uniform' is for levels"),
    ):
        with pytest.raises(ConfigError, match=match):
            allocate(found, **options)
    without = calibrate(model, [texts], retrieval=False)
    assert without.effects is None
    levels = allocate(without, compression=1.5)
    with pytest.raises(ConfigError, match="ranks of levels, for dimensions in the order of its calibration"):
        structurize(copy.deepcopy(model), levels)
    structurize(copy.deepcopy(model), levels, rotary_split="calibrated", calibration=without)
    assert calibrate(model.model, [texts]).effects is None  # without an output head
    with pytest.raises(ConfigError, match="retrieval must be"):
        calibrate(model, [texts], retrieval="yes")


def test_layers_with_chunks_keep_what_they_see() -> None:
    model = models.llama4(num_hidden_layers=4, max_position_embeddings=512).eval()  # the last sees all tokens
    found = calibrate(model, [models.tokens(1, 256)], methods=("heads", "bits"))
    for effects in (found.effects.text, found.effects.retrieval):
        assert bool((effects[:, :-2] == 0).all())
        assert bool((effects[:, -2:] != 0).all())
    allocation = allocate(found, compression=1.2)
    assert [str(spec) for spec in allocation[:3]] == ["standard"] * 3
    structurize(model, allocation)
    with torch.no_grad():
        assert model(models.tokens(1, 64), use_cache=True).logits.isfinite().all()


def test_a_model_that_never_sees_far_tokens_has_no_heads_to_choose() -> None:
    model, batches = models.llama4(max_position_embeddings=512).eval(), [models.tokens(1, 256)]
    for methods in (("heads", "bits"), ("tokens", "bits")):
        with pytest.raises(ConfigError, match="every attention layer of Llama4ForCausalLM .*levels"):
            calibrate(model, batches, methods=methods)
    found = calibrate(model, batches)
    assert (found.tokens, found.bits) == (None, None)
