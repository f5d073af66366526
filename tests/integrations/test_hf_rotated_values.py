"""``rotate_values``: weights change, and nothing else but the error of a cache in few bits."""

import copy

import pytest
import torch
import transformers
from hf_models import gpt2, llama, qwen2
from hypothesis import given
from hypothesis import strategies as st
from test_hf_families import FAMILIES, VOCAB, _page

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    allocate,
    calibrate,
    level_cache,
    load_structurized,
    rotate_values,
    structurize,
)
from structattn.integrations.transformers.calibration.rotate_values import _spreading

KEPT = {"bitnet"}  # of which no layer can change: a norm reads the output of attention
QUICK = {"gpt2", "llama", "gpt_neox", "gemma2", "phi3", "bitnet"}


@given(st.integers(1, 200))
def test_the_matrix_is_its_own_inverse_and_even(size) -> None:
    matrix = _spreading(size)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix, matrix.mT)
    largest = 1 if size & (size - 1) == 0 else 2**0.5  # of a Hadamard matrix, all are equal
    assert matrix.abs().max() <= largest / size**0.5 + 1e-12


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in FAMILIES]
)
def test_a_model_of_each_family_computes_what_it_did(family) -> None:
    model = _page["tiny"](family).eval()
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(1))
    before, weights = model(ids).logits, copy.deepcopy(model.state_dict())
    if family in KEPT:
        with pytest.raises(ConfigError, match=r"the values of \w+ cannot be rotated: in every layer"):
            rotate_values(model)
        assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
        return
    assert rotate_values(model) is model
    assert any(not torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    torch.testing.assert_close(model(ids).logits, before, atol=2e-5, rtol=2e-5)
    rotate_values(model)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, weights[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("make", [llama, qwen2, gpt2])
@pytest.mark.parametrize("hidden", [32, 48])  # heads of 8, and of 12
def test_values_with_a_bias_and_heads_of_other_sizes(make, hidden) -> None:
    torch.manual_seed(0)
    model = make(**{"n_embd" if make is gpt2 else "hidden_size": hidden}).double().eval()
    for name, x in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(x)
    ids = torch.randint(3, 50, (2, 11))
    before = model(ids).logits
    torch.testing.assert_close(rotate_values(model)(ids).logits, before, atol=1e-10, rtol=1e-10)


def of_outliers() -> transformers.PreTrainedModel:
    """A Llama in which one value of each head is large, and little of it is read."""
    torch.manual_seed(0)
    model = llama(hidden_size=128, head_dim=32, num_attention_heads=4, max_position_embeddings=512).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for head in range(2):
                layer.self_attn.v_proj.weight[32 * head + 5] *= 20
            layer.self_attn.o_proj.weight[:, 5::32] /= 20
            layer.self_attn.o_proj.weight *= 20
    return model


def error_of_four_bits(model, ids) -> float:
    """What 4 bits for values change in logits, relative to them."""
    exact = model(ids).logits
    storage = sa.Storage(16, 4, group_size=32, residual=32)
    cache = level_cache(structurize(copy.deepcopy(model), "standard", storage=storage))
    small = structurize(copy.deepcopy(model), "standard", storage=storage)
    steps = torch.cat([small(part, past_key_values=cache).logits for part in ids.split(32, dim=1)], dim=1)
    return float((steps - exact).norm() / exact.norm())


@torch.no_grad()
def test_few_bits_lose_less_where_one_value_is_large() -> None:
    model = of_outliers()
    ids = torch.randint(3, 50, (2, 320), generator=torch.Generator().manual_seed(1))
    before = error_of_four_bits(model, ids)
    after = error_of_four_bits(rotate_values(model), ids)
    assert after < 0.5 * before


@pytest.mark.full
def test_it_comes_before_calibrate_and_is_saved(tmp_path) -> None:
    model = rotate_values(of_outliers())
    ids = torch.randint(3, 50, (4, 320), generator=torch.Generator().manual_seed(1))
    found = calibrate(model, [ids], methods=("tokens", "bits"))
    changed = structurize(copy.deepcopy(model), allocate(found, compression=2, context_length=512))
    changed.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(load_structurized(tmp_path)(ids[:1]).logits, changed(ids[:1]).logits)
    other = of_outliers()
    assert not torch.equal(other.model.layers[0].self_attn.v_proj.weight, model.model.layers[0].self_attn.v_proj.weight)


def test_layers_whose_values_cannot_change_stay() -> None:
    torch.manual_seed(0)
    model = llama().double().eval()
    model.model.layers[1].self_attn.v_proj.weight = model.model.layers[1].self_attn.k_proj.weight  # shared
    ids, weights = torch.randint(3, 50, (2, 11)), copy.deepcopy(model.state_dict())
    before = model(ids).logits
    torch.testing.assert_close(rotate_values(model)(ids).logits, before, atol=1e-10, rtol=1e-10)
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, weights[name])}
    assert changed == {f"model.layers.0.self_attn.{name}_proj.weight" for name in "vo"}


def test_what_is_no_plain_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="is structurized already"):
        rotate_values(structurize(llama(), "standard"))
    with pytest.raises(ConfigError, match="model must be a model of transformers"):
        rotate_values(torch.nn.Linear(2, 2))
