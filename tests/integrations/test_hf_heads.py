"""Trained models whose key heads have specs of their own."""

import copy

import hf_models as models
import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    calibrate,
    level_cache,
    load_structurized,
    register_attention,
    structurize,
)
from structattn.testing.tolerances import assert_close

MIXED = "heads:standard/window:9,sink_tokens=3/mlr:4|4@32|8,scaling=standard/window:6"


def llama():
    return models.llama(num_key_value_heads=4).double().eval()


def ids(batch=2, length=50):
    return torch.randint(models.VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("storage", [None, sa.Storage(key_bits=8, value_bits=4, group_size=4, residual=6)])
@pytest.mark.parametrize("spec", [MIXED, f"[{MIXED},standard]"])
def test_prompts_chunks_and_steps_agree(spec, storage, built) -> None:
    model, tokens = structurize(llama(), spec), ids()
    whole = model(tokens, past_key_values=level_cache(model, storage=storage)).logits
    cache = level_cache(model, storage=storage)
    parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 33))]
    parts += [model(tokens[:, at : at + 1], past_key_values=cache).logits for at in range(33, 50)]
    assert_close(torch.cat(parts, dim=1), whole)
    if storage is None:
        assert_close(model(tokens, use_cache=False).logits, whole)


@torch.no_grad()
def test_each_head_sees_what_its_spec_says() -> None:
    plain, tokens = llama(), ids()
    far = structurize(copy.deepcopy(plain), "heads:standard*2/window:64,sink_tokens=2*2")
    assert_close(far(tokens).logits, plain(tokens).logits)
    by_heads = structurize(copy.deepcopy(plain), "heads:window:5*4")
    assert_close(by_heads(tokens).logits, structurize(copy.deepcopy(plain), "window:5")(tokens).logits)


@torch.no_grad()
def test_weights_and_padding() -> None:
    model, tokens = structurize(llama(), MIXED), ids()
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    padded = model(tokens, attention_mask=mask).logits
    expected = model(tokens[:1, 7:]).logits  # rotary angles are float32, of other positions
    assert (padded[:1, 7:] - expected).norm() < 1e-7 * expected.norm()
    weights = model(tokens, output_attentions=True).attentions[0]
    assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert (weights[:, 6:, 20, :15] == 0).all()  # the query heads of the last key head, whose window is 6


@torch.no_grad()
def test_generation_beams_and_folders(tmp_path) -> None:
    model, tokens = structurize(llama(), MIXED), ids(length=20)
    options = {"max_new_tokens": 12, "do_sample": False}
    for beams in (1, 3):
        cached = model.generate(tokens, num_beams=beams, **options)
        assert torch.equal(cached, model.generate(tokens, num_beams=beams, use_cache=False, **options))
    model.save_pretrained(tmp_path)
    loaded = load_structurized(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.structattn["specs"][0] == MIXED
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_a_gradient_is_that_of_the_model() -> None:
    plain, tokens = llama(), ids()
    model = structurize(copy.deepcopy(plain), "heads:standard*2/window:64,sink_tokens=2*2").train()
    plain.train()
    for each in (plain, model):
        each(tokens, labels=tokens).loss.backward()
    for x, y in zip(plain.parameters(), model.parameters(), strict=True):
        assert_close(x.grad, y.grad, gradient=True)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="a layout for each of 3 key heads, and the layer has 4"):
        structurize(llama(), "heads:standard*3")
    with pytest.raises(ConfigError, match="must be a layout or a window alone"):
        structurize(llama(), "heads:bilinear-btt:1*4")
    model = llama()
    model.set_attn_implementation(register_attention("heads:standard*3", name="three_heads"))
    with pytest.raises(ConfigError, match="a layout for each of 3 key heads, and the layer has 4"):
        model(ids())
    with pytest.raises(ConfigError, match="must be even"):
        register_attention("heads:standard/mlr:5|3", name="odd_heads", context_length=32)


@torch.no_grad()
@pytest.mark.parametrize("split", ["low_far", "interleaved"])
def test_a_registered_attention_is_that_of_a_structurized_model(split) -> None:
    plain, tokens = llama(), ids()
    expected = structurize(copy.deepcopy(plain), MIXED, rotary_split=split)
    plain.set_attn_implementation(register_attention(MIXED, name=f"heads_{split}", rotary_split=split))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    assert_close(plain(tokens).logits, expected(tokens).logits)
    assert_close(plain(tokens, attention_mask=mask).logits[:, 7:], expected(tokens, attention_mask=mask).logits[:, 7:])
    options = {"max_new_tokens": 12, "do_sample": False}
    text = plain.generate(tokens[:, :20], use_cache=False, **options)
    assert torch.equal(plain.generate(tokens[:, :20], past_key_values=level_cache(plain), **options), text)
    assert torch.equal(expected.generate(tokens[:, :20], **options), text)


@torch.no_grad()
def test_blocks_of_a_registered_attention_follow_the_context_of_the_model() -> None:
    plain, tokens = llama(), ids()
    expected = structurize(copy.deepcopy(plain), "heads:standard*2/mlr:4|4*2")
    plain.set_attn_implementation(register_attention("heads:standard*2/mlr:4|4*2", name="heads_context"))
    assert_close(plain(tokens).logits, expected(tokens).logits)


@torch.no_grad()
def test_heads_have_calibrated_orders_of_their_own() -> None:
    plain, tokens = llama(), ids()
    calibration = calibrate(plain, [tokens])
    options = {"rotary_split": "calibrated", "calibration": calibration}
    levels = "mlr:4|4@32|8,scaling=standard"
    all_heads = structurize(copy.deepcopy(plain), levels, **options)
    by_heads = structurize(copy.deepcopy(plain), f"heads:{levels}*4", **options)
    assert torch.equal(by_heads(tokens).logits, all_heads(tokens).logits)
    mixed = structurize(copy.deepcopy(plain), f"heads:standard*2/{levels}*2", **options)
    orders, same = (model.config.structattn["pair_orders"][0] for model in (mixed, all_heads))
    assert orders == ["0 1 2 3", "0 1 2 3", *same[2:]]
    assert sorted(map(int, same[3].split())) == [0, 1, 2, 3]
    assert_close(structurize(copy.deepcopy(plain), "heads:standard*4", **options)(tokens).logits, plain(tokens).logits)
    cache = level_cache(mixed)
    parts = [mixed(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 30), (30, 31), (31, 50))]
    assert_close(torch.cat(parts, dim=1), mixed(tokens, use_cache=False).logits)
    with pytest.raises(ConfigError, match="scaling=standard for each head with levels"):
        structurize(copy.deepcopy(plain), "heads:standard*2/mlr:4|4*2", **options)
    with pytest.raises(ConfigError, match="the basis of single heads cannot be calibrated"):
        structurize(copy.deepcopy(plain), f"heads:standard*2/{levels},values=4|4*2", **options)
