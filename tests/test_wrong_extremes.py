"""Values at the far ends: sizes that no machine holds, names that no file has, endless texts, numbers beyond
float32, tensors of rare kinds.
"""

import pytest
import torch

import structattn as sa
from structattn import matrices, mup, scoring
from structattn.cache import LayerCaches
from structattn.errors import ConfigError, StructAttnError
from structattn.layers.block import MLP
from structattn.layout.text import TextUnits
from structattn.memory import check_memory
from structattn.models.forecaster import Forecaster
from structattn.models.icl_regressor import ICLRegressor
from structattn.models.transformer import Transformer
from structattn.spec.layers import LayerSpecs

HUGE = (2**31 - 1, 2**40)
PATHS = ("\ud800", "a\0b", "", "z" * 300, b"x", None, 3, ".")
TEXTS = ("z" * 5000, "\ud800")
LAZY = torch.nn.UninitializedParameter()
WRONG = (LAZY, torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
UNSIGNED = (torch.arange(3).to(torch.uint16), torch.arange(3).to(torch.uint64))
LEVELS = sa.LevelLayout((4, 4), (8, 4))
Q = torch.randn(2, 2, 3, 8)
MODEL = sa.LanguageModel(8, "mlr:4|4", num_layers=1, embed_dim=16, num_heads=2, context_length=8)
TRUNK = {"spec": "standard", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "context_length": 8}
WITHOUT_CONTEXT = {name: value for name, value in TRUNK.items() if name != "context_length"}
FLOAT8 = torch.float8_e4m3fn
ATTENTION = sa.Attention(16, 2, layout=LEVELS)


def filled() -> sa.LevelCache:
    cache = sa.LevelCache(LEVELS)
    cache.attend(Q, Q, Q)
    return cache


TABLE = {
    "Attention": (sa.Attention, {"embed_dim": 16, "num_heads": 2}, {"embed_dim": (2**30, *HUGE)}),
    "MLP": (MLP, {"embed_dim": 8}, {"embed_dim": HUGE, "ratio": HUGE}),
    "Transformer": (Transformer, TRUNK, {"context_length": HUGE, "num_layers": HUGE, "reads_text": ("no", 1, None)}),
    "LanguageModel": (sa.LanguageModel, {"vocab_size": 8, **TRUNK}, {"vocab_size": HUGE, "context_length": HUGE}),
    "Forecaster": (
        Forecaster,
        {"look_back": 8, "horizon": 2, "patch_length": 2, "stride": 2, **WITHOUT_CONTEXT},
        dict.fromkeys(("look_back", "horizon", "num_outputs", "num_historic", "num_static"), HUGE),
    ),
    "ICLRegressor": (
        ICLRegressor,
        {"dim": 3, "num_points": 4, **{k: v for k, v in TRUNK.items() if k[0] != "c"}},
        {"dim": HUGE, "num_points": HUGE, "read_in_std": (1e308,)},
    ),
    "StructuredLinear": (
        sa.StructuredLinear,
        {"in_features": 8, "out_features": 8, "structure": "btt:1"},
        {"out_features": HUGE, "structure": TEXTS, "device": TEXTS, "dtype": TEXTS},
    ),
    "Dense": (matrices.Dense, {"num_rows": 8, "num_cols": 8}, {"num_rows": HUGE}),
    "LowRank": (matrices.LowRank, {"num_rows": 8, "num_cols": 8, "rank": 2}, {"rank": HUGE}),
    "Butterfly": (matrices.Butterfly, {"num_rows": 8, "num_cols": 8}, {"num_rows": (2**30, *HUGE), "rank": HUGE}),
    "Kaleidoscope": (matrices.Kaleidoscope, {"num_rows": 8, "num_cols": 8}, {"width": HUGE, "inner_size": HUGE}),
    "Rotary.build": (sa.Rotary().build, {"ranks": (4,)}, {"ranks": ((2**31 - 1,), (2**24,))}),
    "LayerSpecs.layers": (LayerSpecs.parse("standard").layers, {"num_layers": 2}, {"num_layers": HUGE}),
    "LevelCache.positions": (filled().positions, {"count": 2}, {"count": HUGE}),
    "LevelCache.repeat_interleave": (filled().repeat_interleave, {"repeats": 1}, {"repeats": HUGE}),
    "LevelCache.load": (lambda path: path is False or sa.LevelCache.load(path), {"path": False}, {"path": PATHS[:5]}),
    "LevelCache.save": (lambda path: path is False or filled().save(path), {"path": False}, {"path": PATHS}),
    "LayerCaches.load": (lambda path: path is False or LayerCaches.load(path), {"path": False}, {"path": PATHS[:2]}),
    "LevelCache": (sa.LevelCache, {}, {"left_padding": WRONG, "layout": (LAZY, *TEXTS)}),
    "op": (
        sa.structured_attention,
        {"q": Q, "k": Q, "v": Q},
        {"scale": (1e308, -1e30), "backend": TEXTS, "layout": (LAZY, *TEXTS), "window": (LAZY,), "is_causal": (LAZY,)},
    ),
    "Attention.forward": (ATTENTION, {"x": torch.randn(2, 3, 16)}, {"layout": (LAZY, *TEXTS, [0] * 3000)}),
    "parse_spec": (sa.parse_spec, {"text": "standard"}, {"text": (*TEXTS, LAZY, "[" + "z" * 5000)}),
    "Rotary.parse": (sa.Rotary.parse, {"text": "low_far"}, {"text": (*TEXTS, "low_far," + "z" * 5000)}),
    "RotaryScaling.parse": (sa.RotaryScaling.parse, {"text": "ntk=2"}, {"text": TEXTS}),
    "scoring.BTT": (scoring.BTT, {}, {"scaling": (*TEXTS, LAZY)}),
    "MLBTC": (
        matrices.MLBTC,
        {"num_rows": 8, "num_cols": 8, "terms": (matrices.BlockTerm(left_blocks=2, right_blocks=2, inner_dim=4),)},
        {"terms": (*TEXTS, [0] * 3000)},
    ),
    "positions": (sa.Rotary().build((8,)), {"x": Q, "positions": torch.arange(3)}, {"positions": UNSIGNED}),
    "blocks": (LEVELS.blocks, {"level": 2, "positions": torch.arange(3)}, {"positions": UNSIGNED}),
    "generate": (
        MODEL.generate,
        {"prompts": [[1, 2]], "max_new_tokens": 1},
        {"prompts": ("z" * 5000, ["z" * 5000]), "seed": (-1, 2**63, True), "max_new_tokens": (2**70,)},
    ),
    "check_caches": (MODEL.trunk.check_caches, {"caches": MODEL.new_cache()}, {"caches": (None, 3, "x", [], Q)}),
    "cache of other rows": (
        lambda caches: MODEL(torch.tensor([[1, 2]]), caches=caches),
        {"caches": None},
        {"caches": (MODEL.new_cache(left_padding=[0, 1]),)},
    ),
    "marks_of": (TextUnits.of(["a"]).marks_of, {"tokens": torch.zeros(1, 2).long()}, {"tokens": (LAZY, *WRONG)}),
    "Role": (mup.Role, {"kind": "embedding"}, {"std": (1e308,), "kind": TEXTS}),
    "Role.learning_rate": (mup.Role(kind="hidden").learning_rate, {"base": 0.1}, {"base": (1e308,)}),
    "parameter_groups": (mup.parameter_groups, {"model": ATTENTION, "learning_rate": 0.1}, {"learning_rate": (1e308,)}),
    "Role.draw_": (
        mup.Role(kind="hidden").draw_,
        {"parameter": torch.zeros(3)},
        {"parameter": (LAZY, torch.zeros(3).to_sparse(), torch.zeros(1).expand(3), torch.zeros(3).to(FLOAT8))},
    ),
    "fit": (matrices.fit, {"dense": torch.randn(4, 4), "like": "lowrank:1"}, {"seed": (2**63,), "like": TEXTS}),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_our_errors_are_short_and_can_be_printed(name) -> None:
    call, right, wrong = TABLE[name]
    call(**right)
    for argument, values in wrong.items():
        for value in values:
            with pytest.raises(StructAttnError) as caught:
                call(**{**right, argument: value})
            assert len(str(caught.value).encode()) < 1500


def test_the_meta_device_holds_what_no_machine_does_up_to_what_torch_counts() -> None:
    with torch.device("meta"):
        assert sa.Attention(2**20, 2).value_proj.weight.shape == (2**20, 2**20)
        with pytest.raises(ConfigError, match="more than any machine"):
            matrices.Dense(2**31 - 1, 2**31 - 1)
    with pytest.raises(ConfigError, match="numbers need 4,398,046,511,104 bytes, and this machine has"):
        check_memory("numbers", 2**40)
    check_memory("numbers", 2**20)
