"""Modules are made, counted and run whatever the default device and dtype are."""

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError

FREE = sa.LevelLayout.from_boundaries((4, 4), [((0,), (0, 3))])
VARIANTS = {
    "plain": lambda: sa.Attention(16, 2),
    "levels": lambda: sa.Attention(16, 2, layout=sa.LevelLayout.halving((4, 4), 8), rotary=sa.Rotary()),
    "free": lambda: sa.Attention(16, 2, layout=FREE),
    "both": lambda: sa.Attention(16, 2, layout=sa.GlobalWindowLayout((4, 4), 3)),
    "text": lambda: sa.Attention(16, 2, layout=sa.TextLayout((4, 4))),
    "btt": lambda: sa.Attention(16, 2, scoring=sa.scoring.BTT()),
    "mlr": lambda: sa.Attention(16, 2, scoring=sa.scoring.MLR(ranks=(4, 2))),
    "kaleidoscope": lambda: sa.Attention(16, 2, scoring=sa.scoring.Matrix(matrix="kaleidoscope")),
    "mlbtc": lambda: sa.Attention(16, 2, scoring=sa.scoring.Matrix(matrix="mlbtc:1x1x4|4x4x16s")),
}


def options(name):
    return {"layout": FREE} if name == "text" else {}


@pytest.mark.parametrize("name", VARIANTS)
def test_on_the_meta_device(name) -> None:
    plain, x = VARIANTS[name](), torch.randn(1, 6, 16)
    with torch.device("meta"):
        module = VARIANTS[name]()
        assert module.cost(6) == plain.cost(6)
        assert module(torch.randn(1, 6, 16), **options(name)).shape == x.shape
        expected = plain(x, **options(name))  # a module of the CPU
    module.to_empty(device="cpu").load_state_dict(plain.state_dict())
    assert torch.equal(module(x, **options(name)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", VARIANTS)
def test_in_a_default_dtype(name, dtype) -> None:
    counted = VARIANTS[name]().cost(6)
    torch.set_default_dtype(dtype)
    try:
        module = VARIANTS[name]()
        assert module.cost(6) == counted
        assert module(torch.randn(1, 6, 16), **options(name)).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


MAKERS = {
    "attention": lambda **options: sa.Attention(
        16, 2, layout=sa.LevelLayout.halving((4, 4), 8), rotary=sa.Rotary(), bias=True, **options
    ),
    "matrix": lambda **options: sa.Attention(16, 2, scoring=sa.scoring.Matrix(matrix="monarch"), **options),
    "model": lambda **options: sa.LanguageModel(
        8, "mlr:4|4", num_layers=1, embed_dim=16, num_heads=2, context_length=8, **options
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_device_and_dtype_are_arguments(name) -> None:
    torch.manual_seed(0)
    plain = MAKERS[name]()
    on_meta = MAKERS[name](device="meta", dtype=torch.bfloat16)
    assert {p.device.type for p in (*on_meta.parameters(), *on_meta.buffers())} == {"meta"}
    assert {p.dtype for p in on_meta.parameters()} == {torch.bfloat16}
    torch.manual_seed(0)
    double = MAKERS[name](device=torch.device("cpu"), dtype=torch.float64)
    for key, value in plain.state_dict().items():  # the numbers do not depend on either
        assert torch.equal(double.state_dict()[key], value.double()), key
    on_meta.to_empty(device="cpu").load_state_dict(plain.state_dict())
    x = torch.randint(8, (1, 6)) if name == "model" else torch.randn(1, 6, 16, dtype=torch.bfloat16)
    assert torch.equal(on_meta(x), plain.bfloat16()(x))
    for wrong in ({"device": "cpux"}, {"dtype": torch.int64}, {"dtype": "float32"}, {"device": 1.5}):
        with pytest.raises(ConfigError, match="device|dtype"):
            MAKERS[name](**wrong)


def test_layouts_and_models_are_counted_on_the_meta_device() -> None:
    def numbers():
        layout = sa.LevelLayout.halving((4, 4), 8)
        model = sa.LanguageModel(8, "mlr:4|4", num_layers=1, embed_dim=16, num_heads=2, context_length=8)
        sa.mup.initialize(model)
        return layout.shared_levels(1, 5), layout.shared_rank(1, 5), layout.score_flops(9), model.flops_per_example()

    with torch.device("meta"):
        on_meta = numbers()
    assert on_meta == numbers()
