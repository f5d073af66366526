"""Empty batches and lengths are accepted, as ``nn.Linear`` and ``scaled_dot_product_attention`` accept
them.
"""

import pytest
import torch

import structattn as sa
from structattn.layers.block import MLP
from structattn.models.forecaster import Forecaster
from structattn.models.icl_regressor import ICLRegressor

LEVELS = sa.LevelLayout.halving((4, 4), 8)
LAYERS = {
    "plain": {},
    "levels": {"layout": LEVELS, "rotary": sa.Rotary()},
    "window": {"layout": LEVELS, "window": 3, "is_causal": False},
    "both": {"layout": sa.GlobalWindowLayout((4, 4), 3)},
    "btt": {"scoring": sa.scoring.BTT()},
    "free order": {"scoring": sa.scoring.Matrix(matrix="monarch"), "qk_norm": False},
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_attention(name, shape) -> None:
    layer = sa.Attention(16, 2, **LAYERS[name])
    x = torch.randn(*shape, 16, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert layer.weights(x).shape == (shape[0], 2, shape[1], shape[1])
    assert layer(torch.randn(*shape, 16), torch.randn(shape[0], 3, 16)).shape == x.shape
    assert not layer(torch.randn(2, 3, 16), torch.randn(2, 0, 16)).any()  # no keys, as SDPA: zeros
    if layer.is_causal:
        for keys in ("features", "hidden"):
            cache = layer.new_cache(keys=keys)
            first = layer(torch.randn(shape[0], 3, 16), cache=cache)
            assert layer(x.detach(), cache=cache).shape == x.shape
            assert cache.length == 3 + shape[1]
            assert layer(torch.randn(shape[0], 1, 16), cache=cache).shape == (shape[0], 1, 16)
            assert first.shape == (shape[0], 3, 16)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("spec", ["standard", "mlr:4|4", "mlr-text:4|4"])
def test_language_model(spec, shape) -> None:
    units = sa.TextUnits.of(["a", "b", " ", "\n"])
    model = sa.LanguageModel(
        4, spec, num_layers=1, embed_dim=16, num_heads=2, context_length=8, text_units=units
    ).eval()  # fmt: skip
    tokens = torch.zeros(shape, dtype=torch.int64)
    assert model(tokens).shape == (*shape, 4)
    caches = model.new_cache()
    before = torch.randint(4, (shape[0], 3))
    logits = model(before, caches=caches)
    assert model(tokens, caches=caches).shape == (*shape, 4)
    if shape[1] == 0:  # as if it had not come
        after = model(before[:, :1], caches=caches)
        assert after.shape == (shape[0], 1, 4)
        assert logits.shape == (shape[0], 3, 4)
        assert caches.length == 4


def test_other_modules() -> None:
    for structure in ("dense", "lowrank:2", "mlr:2|2", "btt:1", "kronecker", "monarch", "butterfly", "kaleidoscope"):
        assert sa.StructuredLinear(16, 8, structure)(torch.randn(3, 0, 16)).shape == (3, 0, 8)
    assert MLP(16)(torch.randn(2, 0, 16)).shape == (2, 0, 16)
    size = {"embed_dim": 8, "num_layers": 1, "num_heads": 2}
    regressor = ICLRegressor("standard", dim=3, num_points=4, **size)
    assert regressor(torch.randn(0, 2, 3), torch.randn(0, 2)).shape == (0, 2)
    assert regressor(torch.randn(2, 0, 3), torch.randn(2, 0)).shape == (2, 0)
    forecaster = Forecaster("standard", look_back=8, horizon=2, patch_length=2, stride=2, **size)
    assert forecaster(torch.randn(0, 8)).shape == (0, 2)
    assert forecaster(torch.randn(0, 3, 8)).shape == (0, 3, 2)
