"""Every wrong argument of modules, at building and at calling, raises one of our errors; caches and
generation have separate tables.
"""

import math

import pytest
import torch
from torch import nn
from wrong_calls import COUNT, FLAG, INTS, NAME, NUMBER, SIZE, TENSOR, TEXT, THING, count, faults

import structattn as sa
from structattn import matrices, scoring
from structattn.layers.block import MLP, TransformerBlock
from structattn.layers.rotary import RotaryEmbedding
from structattn.layout.text import TextLayout, TextUnits
from structattn.models.forecaster import Forecaster
from structattn.models.icl_regressor import ICLRegressor
from structattn.models.transformer import Transformer
from structattn.optim.roles import Role

LEVELS = sa.LevelLayout((4, 4), (8, 4))
FREE = sa.LevelLayout.from_boundaries((4, 4), [((0,), (0, 3)), ((0,), (0, 2, 5))])
ATTENTION = sa.Attention(16, 2, layout=LEVELS)
TURNED = sa.Attention(16, 2, rotary=sa.Rotary())
PLAIN = sa.Attention(16, 2, scoring=scoring.BTT())
TEXT_ATTENTION = sa.Attention(16, 2, layout=TextLayout((4, 4)))
X = torch.randn(2, 6, 16)
STATES = (
    *TENSOR,
    torch.tensor(1.0),
    X[0],
    X[..., :3],
    X.double(),
    torch.ones(2, 6, 16).long(),
    X.to("meta"),
    X.to_sparse(),
)
MATRIX = matrices.BlockTensorTrain(12, 8)
VECTORS = (*TENSOR, torch.randn(3, 5), torch.tensor(1.0), torch.randn(3, 8).double(), torch.ones(3, 8).long())
UNITS = TextUnits.of(["a", "b", " ", "\n"])
TOKENS = torch.tensor([[0, 1, 2, 3]])
NO_INTS = (torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), torch.ones(4, dtype=torch.int64))
MODEL = sa.LanguageModel(8, "mlr:4|4", num_layers=1, embed_dim=16, num_heads=2, context_length=8)
FORECASTER = Forecaster(
    "standard", look_back=8, horizon=2, patch_length=2, stride=2, embed_dim=8, num_layers=1, num_heads=2, num_future=1
)
REGRESSOR = ICLRegressor("standard", dim=3, num_points=4, embed_dim=8, num_layers=1, num_heads=2)
LAYER = sa.StructuredLinear(8, 8, "btt:1")
LINEARS = nn.Sequential(nn.Linear(8, 8))
ROTATION = RotaryEmbedding(sa.Rotary(), (4, 4))

HEADS = {"embed_dim": 16, "num_heads": 2}
WIDTHS = {"embed_dim": SIZE, "num_heads": (*SIZE, 3)}
ATTENTION_OPTIONS = {
    "num_kv_heads": (*SIZE, 3),
    "scoring": ("btt", scoring.BTT, PLAIN.scoring, 3, THING),
    "layout": ("mlr:4|4", (4, 4), sa.LevelLayout, sa.LevelLayout((3, 3), (8, 4)), THING),
    "is_causal": (None, *FLAG),
    "qk_norm": (None, *FLAG),
    "bias": (None, *FLAG),
    "rotary": (True, "low_far", 10_000.0, sa.Rotary, THING),
    "dropout": (None, *NUMBER, -0.1, 1.0),
    "backend": (None, "fast", 3, ["auto"]),
    "window": SIZE,
}
TRUNK_OPTIONS = {
    "spec": (*TEXT, ("mlr:4|4",) * 2, "mlr:4|5", "[standard", "[standard,window:2]", "mlr-text:4|4"),
    "num_layers": (None, *SIZE),
    "context_length": (None, *SIZE),
    "mlp_ratio": (None, *SIZE),
    "dropout": (None, *NUMBER, -0.1, 1.0),
    "rotary": (True, "low_far", sa.Rotary, THING),
    "num_kv_heads": (*SIZE, 3),
    **WIDTHS,
}
TRUNK_ARGUMENTS = {"spec": "mlr:4|4", "num_layers": 1, "context_length": 8, **HEADS}


# What is called, arguments that are right, and wrong values of each argument.
TABLE = {
    "Attention": (sa.Attention, HEADS, {**WIDTHS, **ATTENTION_OPTIONS}),
    "Attention.from_spec": (
        sa.Attention.from_spec,
        {"spec": "mlr:4|4", "context_length": 8, **HEADS},
        {"spec": (*TEXT, "mlr:4|5"), "context_length": (None, *SIZE), **WIDTHS},
    ),
    "Attention.forward": (
        ATTENTION,
        {"x": X},
        {
            "x": STATES,
            "context": (*STATES[1:], torch.randn(3, 6, 16)),
            "attn_bias": (torch.ones(7, 7), torch.ones(6, 6).bool()),
            "attn_mask": (torch.ones(7, 7).bool(), torch.ones(6, 6).long()),
            "cu_seqlens": (3, [0, 6], torch.tensor([0.0, 6.0]), torch.tensor([0, 6])),
            "left_padding": (3, [0, 1], torch.tensor([0, 1, 2]), torch.tensor([0.0, 1.0]), torch.tensor([0, 9])),
            "layout": (LEVELS, "mlr:4|4", THING),
            "cache": ("x", THING, True, MODEL),
        },
    ),
    "Attention.forward, rotary": (
        TURNED,
        {"x": X},
        {"left_padding": (3, [0, 1], torch.zeros(2), torch.zeros(3).long())},
    ),
    "Attention.forward, no layout": (PLAIN, {"x": X}, {"x": STATES, "context": STATES[1:], "layout": (LEVELS, THING)}),
    "Attention.forward, text": (TEXT_ATTENTION, {"x": X, "layout": FREE}, {"layout": (None, LEVELS, "x", THING)}),
    "Attention.weights": (ATTENTION.weights, {"x": X}, {"x": STATES, "context": STATES[1:], "layout": (LEVELS, THING)}),
    "Attention.project": (
        TURNED.project,
        {"x": X},
        {"x": STATES, "positions": (3, "x", torch.ones(6), torch.arange(5), torch.tensor(1))},
    ),
    "Attention.cost": (ATTENTION.cost, {"num_queries": 6}, {"num_queries": (None, *SIZE), "num_keys": SIZE}),
    "Attention.new_cache": (
        ATTENTION.new_cache,
        {},
        {
            "keys": (None, *NAME),
            "max_length": SIZE,
            "page_size": (None, *SIZE[:-1]),
            "left_padding": ("x", [-1], [1.5], [2**62], torch.tensor([1]).to("meta")),
        },
    ),
    "RotaryEmbedding": (
        RotaryEmbedding,
        {"rotary": sa.Rotary(), "ranks": (4,)},
        {"rotary": (None, "low_far", True), "ranks": INTS},
    ),
    "RotaryEmbedding.forward": (
        ROTATION,
        {"x": torch.randn(1, 2, 3, 8), "positions": torch.arange(3)},
        {
            "x": (
                *(*TENSOR, torch.randn(3, 8), torch.randn(1, 2, 3, 7), torch.ones(1, 2, 3, 8).long()),
                *(torch.ones(1, 2, 3, 8).to("meta"), torch.ones(1, 2, 3, 8).to(torch.float8_e4m3fn)),
            ),
            "positions": (*TENSOR, torch.arange(4), torch.ones(3), torch.ones(3).bool(), torch.arange(3).to("meta")),
        },
    ),
    "StructuredLinear": (
        sa.StructuredLinear,
        {"in_features": 8, "out_features": 12, "structure": "btt:1"},
        {
            "in_features": (None, *SIZE),
            "out_features": (None, *SIZE),
            "structure": (*TEXT, "btt", "btt:0", matrices.Dense(8, 12), matrices.Dense, nn.Linear(8, 12)),
            "bias": (None, *FLAG),
            "device": ("nope", "cuda:99", 2**62, 1.5, THING),
            "dtype": ("float32", torch.int64, torch.float8_e4m3fn, 3, float, THING),
        },
    ),
    "StructuredLinear.forward": (sa.StructuredLinear(8, 12, MATRIX), {"x": torch.randn(3, 8)}, {"x": VECTORS}),
    "weight_roles": (LAYER.weight_roles, {"role": Role(kind="output")}, {"role": (None, "output", THING)}),
    "replace_linears": (
        sa.replace_linears,
        {"model": LINEARS, "rule": lambda layer: None},
        {
            "model": (None, "x", nn.Linear, [LINEARS], THING),
            "rule": (
                None,
                "btt:1",
                matrices.Dense,
                LAYER,
                *(lambda layer, out=out: out for out in (3, "nope", True, THING, MATRIX, matrices.Dense)),
            ),
        },
    ),
    "scoring of another size": (
        lambda value: sa.Attention(14, 2, scoring=value),
        {"value": scoring.Standard()},
        {
            "value": (
                scoring.MLR(ranks=(2, 2, 2)),
                scoring.Matrix(matrix=matrices.Dense(4, 4)),
                scoring.Matrix(matrix="mlr:1|1|1"),
            )
        },
    ),
    "LanguageModel": (
        sa.LanguageModel,
        {"vocab_size": 8, **TRUNK_ARGUMENTS},
        {"vocab_size": (None, *SIZE), "text_units": ("x", UNITS, THING), **TRUNK_OPTIONS},
    ),
    "LanguageModel.forward": (
        MODEL,
        {"tokens": TOKENS},
        {
            "tokens": (
                *TENSOR,
                *NO_INTS,
                torch.tensor([[8]]),
                torch.tensor([[-1]]),
                TOKENS[None],
                torch.zeros(1, 9).long(),
            ),
            "caches": ("x", [], THING),
            "left_padding": (3, [1], torch.zeros(1), torch.zeros(2).long(), torch.tensor([-1])),
            "cu_seqlens": (3, [0, 4], torch.tensor([0.0, 4.0]), torch.tensor([0]), torch.tensor([0, 3])),
        },
    ),
    "Transformer": (Transformer, TRUNK_ARGUMENTS, {**TRUNK_OPTIONS, "is_causal": FLAG, "qk_norm": FLAG, "bias": FLAG}),
    "Transformer.forward": (
        MODEL.trunk,
        {"x": X},
        {
            "x": STATES,
            "caches": ("x", THING),
            "left_padding": (3, torch.zeros(2)),
            "cu_seqlens": (torch.tensor([0, 6]),),
            "segments": ("x",),
        },
    ),
    "Transformer.flops": (MODEL.trunk.flops, {"num_tokens": 8}, {"num_tokens": (None, *SIZE)}),
    "TransformerBlock": (
        TransformerBlock,
        {"attention": ATTENTION},
        {
            "attention": (None, "standard", nn.Linear(4, 4)),
            "mlp_ratio": (None, *SIZE),
            "bias": (*FLAG, X),
            "dropout": (*NUMBER, -1, 2),
        },
    ),
    "TransformerBlock.forward": (
        TransformerBlock(ATTENTION),
        {"x": X},
        {"x": STATES, "layout": (LEVELS,), "left_padding": (3,)},
    ),
    "TransformerBlock.flops": (TransformerBlock(ATTENTION).flops, {"num_tokens": 8}, {"num_tokens": (None, *SIZE)}),
    "Sampling.probabilities": (
        sa.Sampling().probabilities,
        {"logits": X},
        {"logits": (*TENSOR, torch.tensor(1.0), torch.zeros(2, 0), X.to(torch.complex64), X * math.nan, X.to("meta"))},
    ),
    "MLP": (
        MLP,
        {"embed_dim": 8},
        {"embed_dim": (None, *SIZE), "ratio": (None, *SIZE), "bias": FLAG, "dropout": (*NUMBER, -1, 2)},
    ),
    "MLP.forward": (MLP(8), {"x": torch.randn(3, 8)}, {"x": VECTORS}),
    "Forecaster": (
        Forecaster,
        {"spec": "standard", "look_back": 8, "horizon": 2, "patch_length": 2, "stride": 2, "num_layers": 1, **HEADS},
        {
            **dict.fromkeys(("look_back", "horizon", "stride", "mlp_ratio", "embed_dim", "num_layers"), (None, *SIZE)),
            **dict.fromkeys(("num_historic", "num_future", "num_static"), (None, *COUNT)),
            **dict.fromkeys(("instance_norm", "marks_missing"), FLAG),
            "head_tokens": (*SIZE, 5),
            "num_outputs": SIZE,
            "dropout": (*NUMBER, -1, 1.0),
            "patch_length": (*SIZE, 9),
        },
    ),
    "Forecaster.forward": (
        FORECASTER,
        {"window": torch.randn(2, 8), "future": torch.randn(2, 10, 1)},
        {
            "window": (*TENSOR, torch.randn(8), torch.randn(2, 7), torch.ones(2, 8).long(), torch.randn(2, 8).double()),
            "future": (*TENSOR, torch.randn(2, 9, 1), torch.randn(2, 10, 1).double()),
            "historic": (torch.randn(2, 8, 1),),
            "static": (torch.randn(2, 1),),
            "observed": (torch.ones(2, 7).bool(), torch.ones(2, 8), "x"),
        },
    ),
    "ICLRegressor": (
        ICLRegressor,
        {"spec": "standard", "dim": 3, "num_points": 4, "num_layers": 1, **HEADS},
        {
            "dim": SIZE,
            "num_points": SIZE,
            "num_layers": SIZE,
            "read_in_std": (*NUMBER, -1),
            "qk_norm": FLAG,
            "spec": TEXT,
            **WIDTHS,
        },
    ),
    "ICLRegressor.forward": (
        REGRESSOR,
        {"xs": torch.randn(2, 4, 3), "ys": torch.randn(2, 4)},
        {
            "xs": (
                *TENSOR,
                torch.randn(2, 5, 3),
                torch.randn(2, 4, 2),
                torch.randn(4, 3),
                torch.randn(2, 4, 3).double(),
            ),
            "ys": (*TENSOR, torch.randn(2, 3)),
        },
    ),
    "ICLRegressor.flops": (REGRESSOR.flops, {"num_points": 4}, {"num_points": (None, *SIZE)}),
}


@pytest.mark.parametrize("name", TABLE)
def test_wrong_values_raise_our_errors(name) -> None:
    found = faults(name, TABLE[name])
    assert not found, "\n" + "\n".join(found)


def test_there_are_many() -> None:
    assert count(TABLE) > 500


def test_what_a_layer_does_not_take_beside_other_things() -> None:
    """Each was taken without a word once, or ended in an error of Python."""
    cache = PLAIN.new_cache()
    for option in ({"left_padding": torch.tensor([2, 0])}, {"context": X}, {"cu_seqlens": torch.tensor([0, 6])}):
        with pytest.raises(sa.errors.ConfigError, match="with a cache"):
            PLAIN.weights(X, cache=cache, **option)
    with pytest.raises(sa.errors.ConfigError, match="chunks of 2 tokens"):
        sa.Attention(16, 2)(X, cache=sa.LevelCache(chunk_size=2))
    with pytest.raises(sa.errors.ConfigError, match="shard must be a sa.parallel.SequenceShard"):
        PLAIN(X, shard=3)
    for name in ("window", "layout", "scoring"):
        with pytest.raises(sa.errors.ConfigError, match=f"the spec gives the {name}"):
            sa.Attention.from_spec("standard", embed_dim=16, num_heads=2, context_length=8, **{name: None})
