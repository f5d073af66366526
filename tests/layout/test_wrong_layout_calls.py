"""Every wrong argument of layouts, specs, scorings, rotary positions and muP raises one of our errors."""

import inspect

import pytest
import torch
from torch import nn
from wrong_calls import (
    COUNT,
    FLAG,
    INTS,
    NAME,
    NAN,
    NUMBER,
    SIZE,
    TENSOR,
    TEXT,
    THING,
    count,
    faults,
)

import structattn as sa
from structattn import matrices, mup, scoring
from structattn.layers.block import MLP
from structattn.layers.rotary_order import Rotation
from structattn.layers.scoring_modules import HeadShape
from structattn.layout.halving import Halving
from structattn.layout.text import Segments, TextLayout, TextUnits
from structattn.spec.attention import describe_spec, format_spec
from structattn.spec.layers import LayerSpecs

LEVELS = sa.LevelLayout((4, 4), (8, 4))
FREE = sa.LevelLayout.from_boundaries((4, 4), [((0,), (0, 3)), ((0,), (0, 2, 5))])
BOTH = sa.GlobalWindowLayout((4, 4), 4)
SPEC = sa.parse_spec("mlr:4|4")
SHAPE = HeadShape(embed_dim=8, num_heads=2, num_kv_heads=1)
PLAIN = sa.Attention(16, 2, scoring=scoring.BTT())
MATRIX = matrices.BlockTensorTrain(12, 8)
UNITS = TextUnits.of(["a", "b", " ", "\n"])
TOKENS = torch.tensor([[0, 1, 2, 3]])
NO_INTS = (torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), torch.ones(4, dtype=torch.int64))
ROLE = mup.Role(kind="hidden", fan_in=4)

SCORES = {"scaling": (None, *NAME), "rms_cap": (None, *FLAG)}
COUNTED = {"num_positions": (None, *COUNT), "is_causal": (None, *FLAG)}
ROW = {"row": (None, *COUNT)}
FUNCTION = {
    "window": SIZE,
    "rotary_split": (None, *NAME),
    "tensor_layout": (None, "BDHT", *NAME),
    "backend": (None, *NAME),
}


# What is called, arguments that are right, and wrong values of each argument.
TABLE = {
    "Storage": (
        sa.Storage,
        {"key_bits": (4, 8), "value_bits": 8, "group_size": 4, "residual": 3},
        {
            "key_bits": (None, "x", 3, [], [4, 5], 4.0, True, torch.zeros(2)),
            "value_bits": (None, "x", 2, (), (16, None)),
            "group_size": (None, *SIZE, 7),
            "residual": (None, -1, 1.5, "3"),
        },
    ),
    "LayerCaches": (
        sa.LayerCaches,
        {"layers": [sa.LevelCache(), sa.LevelCache()]},
        {
            "layers": (None, "x", 3, [], [None], torch.zeros(2), [3, sa.LevelCache()]),
            "text": (3, "x", [], torch.zeros(2)),
        },
    ),
    "AttentionFunction": (
        sa.AttentionFunction,
        {"layout": LEVELS},
        FUNCTION | {"layout": ("mlr:4|4", (4, 4), 3, THING), "rotary": ("halves", 3, THING)},
    ),
    "attention_function": (
        sa.attention_function,
        {"layout": "mlr:4|4", "context_length": 8},
        FUNCTION
        | {
            "layout": (3, "nope", "bilinear-btt:1", THING),
            "context_length": SIZE,
            "rotary": ("nope", "halves:3", 3, THING),
        },
    ),
    "rotary_order": (
        sa.rotary_order,
        {"layout": LEVELS, "rotary": "halves", "split": "low_far"},
        {
            "layout": (None, "mlr:4|4", (4, 4), THING),
            "rotary": (None, "nope", "halves:3", "halves:16", 3),
            "split": NAME,
        },
    ),
    "AttentionSpec": (
        sa.AttentionSpec,
        {},
        {
            "scoring": (None, "x", scoring.BTT, THING),
            "layout": ("mlr:4|4", (4, 4), THING),
            "window": (-3, *SIZE),
            "num_heads": SIZE,
        },
    ),
    "AttentionSpec.layout_for": (
        SPEC.layout_for,
        {"context_length": 8, "feature_dim": 4},
        {"context_length": (None, *SIZE), "feature_dim": SIZE},
    ),
    "AttentionSpec.with_scaling": (SPEC.with_scaling, {"scaling": "mup"}, {"scaling": (None, *NAME)}),
    "parse_spec": (
        sa.parse_spec,
        {"text": "mlr:4|4"},
        {
            "text": (
                *(*TEXT, b"standard", SPEC, "standard+bilinear-btt:1", "bilinear-btt:1+standard", "standard+standard"),
                *(
                    "mlr:",
                    "mlr:4|4@8",
                    "mlr:4|x",
                    "window:0",
                    "window:4+window:4",
                    "global-window:4|4",
                    "mlr:4|4,scale=mup",
                ),
                *("global-window:4|4@2+window:3", "bilinear-btt", "bilinear-btt:0", "standard:0", "mlr:4|4,scaling=x"),
                *(
                    "bilinear-btt:1,scaling=paper",
                    "standard+",
                    "+",
                    "mlr-text:4|4@page",
                    "bilinear-nope:1",
                    "window:2,a=1",
                ),
            )
        },
    ),
    "LayerSpecs": (LayerSpecs, {"pattern": (SPEC,)}, {"pattern": ((), None, "standard", ("standard",), THING)}),
    "LayerSpecs.parse": (LayerSpecs.parse, {"text": "standard"}, {"text": (*TEXT, "[]", "[a,b", "[standard,]")}),
    "LayerSpecs.layers": (LayerSpecs((SPEC, SPEC)).layers, {"num_layers": 2}, {"num_layers": (None, *SIZE[:-1], 1)}),
    "Halving": (Halving, {"ranks": (4, 4)}, {"ranks": (None, *INTS), "scaling": (None, *NAME), "value_ranks": INTS}),
    "LevelLayout": (
        sa.LevelLayout,
        {"ranks": (4, 4), "block_sizes": (8, 4)},
        {
            "ranks": (None, *INTS, (4,), (4, 4, 4)),
            "block_sizes": (None, *INTS, (8, 3), (4, 8), (8,)),
            "scaling": (None, *NAME),
            "value_ranks": (*INTS, (4,)),
            "boundaries": (3, "x", ((0,), (0, 4))),
            "windows": (3, "x", (8, 4)),
        },
    ),
    "LevelLayout.sliding": (
        sa.LevelLayout.sliding,
        {"ranks": (4, 4), "windows": (None, 4)},
        {
            "ranks": (None, *INTS),
            "windows": (None, (), (4, 8), (4, None), (None,), (None, 4, 4), *INTS),
            "scaling": (None, *NAME),
            "value_ranks": (*INTS, (4,)),
        },
    ),
    "LevelLayout.halving": (
        sa.LevelLayout.halving,
        {"ranks": (4, 4), "context_length": 8},
        {
            "ranks": (None, *INTS),
            "context_length": (None, *SIZE),
            "scaling": (None, *NAME),
            "value_ranks": (*INTS, (4,)),
        },
    ),
    "LevelLayout.from_boundaries": (
        sa.LevelLayout.from_boundaries,
        {"ranks": (4, 4), "boundaries": ((0,), (0, 3))},
        {
            "ranks": (None, *INTS),
            "boundaries": (
                *(
                    None,
                    (),
                    3,
                    "x",
                    ((1,), (1, 3)),
                    ((0,), (1, 3)),
                    ((0,), (0, 3, 3)),
                    ((0,), (0, 1.5)),
                    ((0,), (0, True)),
                ),
                *(((0,), (0, 2**62)), ((0, 2), (0, 3)), ((0,), (0,), (0,)), [torch.tensor([0.5])], THING),
            ),
        },
    ),
    "LevelLayout.score_factors": (LEVELS.score_factors, {}, {"scale": NUMBER}),
    "LevelLayout.window_of": (LEVELS.window_of, {"level": 2}, {"level": (None, *SIZE, 3), "window": SIZE}),
    "LevelLayout.blocks": (
        LEVELS.blocks,
        {"level": 2, "positions": torch.arange(4)},
        {
            "level": (None, *SIZE, 3),
            "positions": (None, "x", 1.5, 2**70, torch.ones(3), torch.arange(4).to_sparse()),
            "rows": (None, *COUNT, torch.ones(4)),
        },
    ),
    "LevelLayout.block_start": (
        FREE.block_start,
        {"level": 2, "position": 3},
        {"level": (*SIZE, 3), "position": COUNT, "row": (*COUNT, 2)},
    ),
    "LevelLayout.select_rows": (FREE.select_rows, {"rows": [1, 0]}, {"rows": (None, 3, "x", [2], [-1], [0.5], THING)}),
    "LevelLayout.shared_levels": (
        FREE.shared_levels,
        {"i": 3, "j": 4},
        {
            "i": (None, 1.5, True, "x", torch.ones(2), [1], -(2**70)),
            "j": (None, 1.5, torch.ones(2)),
            "row": (*COUNT, 2),
        },
    ),
    "LevelLayout.shared_rank": (
        LEVELS.shared_rank,
        {"i": 3, "j": 4},
        {"i": (None, 1.5, True, "x", torch.ones(2)), **ROW},
    ),
    "LevelLayout.lengths": (
        FREE.lengths,
        {"level": 2, "num_positions": 9},
        {"level": (*SIZE, 3), "num_positions": (*COUNT, 2**62)},
    ),
    "LevelLayout.shared_pairs": (LEVELS.shared_pairs, {"num_positions": 9}, {**COUNTED, **ROW}),
    "LevelLayout.score_flops": (LEVELS.score_flops, {"num_positions": 9}, {**COUNTED, **ROW}),
    "LevelLayout.value_flops": (
        LEVELS.value_flops,
        {"num_positions": 9, "value_dim": 8},
        {**COUNTED, **ROW, "value_dim": SIZE},
    ),
    "LevelLayout.shared_interval": (
        FREE.shared_interval,
        {"level": 2, "position": 3, "num_positions": 9},
        {
            "level": (*COUNT, 0, 3),
            "position": (*COUNT, 9),
            "num_positions": (*COUNT, 3),
            "window": SIZE,
            "row": (*COUNT, 2),
        },
    ),
    "LevelLayout.communication_bytes": (
        FREE.communication_bytes,
        {"num_positions": 9, "num_processes": 2, "batch_size": 2},
        {
            "num_positions": SIZE,
            "num_processes": (*SIZE, (4, 4), (10, -1), (4, 5.0)),
            "order": ("zigzag", "", 1, None, THING),
            "is_causal": FLAG,
            "window": SIZE,
            "cu_seqlens": ((), (0,), (0, 8), (1, 9), (0, 5, 4, 9), (0, 9), "09", 9, THING),
            "num_kv_heads": SIZE,
            "value_dim": SIZE,
            "batch_size": (*SIZE, 1),
            "dtype": (torch.int8, "float32", 4, THING),
        },
    ),
    "LevelLayout.balanced_shards": (
        FREE.balanced_shards,
        {"num_positions": 9, "num_processes": 2, "value_dim": 8},
        {
            "num_positions": SIZE,
            "num_processes": SIZE,
            "window": SIZE,
            "value_dim": SIZE,
            "other_flops": (-1.0, float("nan"), float("inf"), "4", THING),
        },
    ),
    "LevelLayout.key_cache_size": (
        FREE.key_cache_size,
        {"num_positions": 9},
        {"num_positions": COUNT, "row": (*COUNT, 2)},
    ),
    "LevelLayout.value_cache_size": (
        LEVELS.value_cache_size,
        {"num_positions": 9, "value_dim": 8},
        {"num_positions": COUNT, "value_dim": SIZE},
    ),
    "GlobalWindowLayout": (
        sa.GlobalWindowLayout,
        {"ranks": (4, 4), "window": 3},
        {"ranks": (None, *INTS, (4,), (4, 4, 4)), "window": (None, *SIZE), "scaling": (None, *NAME, "paper")},
    ),
    "HeadLayouts": (
        sa.HeadLayouts,
        {"layouts": (None, BOTH)},
        {"layouts": (None, "x", 3, (), (3,), (LEVELS, "mlr:4|4"), (LEVELS, sa.LevelLayout((4,), (8,))), (FREE, None))},
    ),
    "HeadLayouts.check_heads": (sa.HeadLayouts((None, BOTH)).check_heads, {"num_heads": 2}, {"num_heads": COUNT}),
    "GlobalWindowLayout.score_flops": (
        BOTH.score_flops,
        {"num_positions": 9},
        {"num_positions": SIZE, "is_causal": FLAG},
    ),
    "GlobalWindowLayout.key_cache_size": (BOTH.key_cache_size, {"num_positions": 9}, {"num_positions": COUNT}),
    "TextLayout": (
        TextLayout,
        {"ranks": (4, 4)},
        {
            "ranks": (None, *INTS, (4,), (4,) * 5),
            "units": (None, "line", ("page",), ("word", "line"), 3, (3,)),
            "scaling": (None, *NAME),
            "value_ranks": (*INTS, (4,)),
        },
    ),
    "TextLayout.at": (
        TextLayout((4, 4)).at,
        {"segments": UNITS.segments(TOKENS)},
        {"segments": (None, "x", Segments(("word",), ()))},
    ),
    "TextUnits": (TextUnits, {"marks": b"\1"}, {"marks": (None, "x", 3, [1])}),
    "TextUnits.of": (TextUnits.of, {"texts": ["a"]}, {"texts": (None, "ab", 3, [1], THING)}),
    "TextUnits.segments": (
        UNITS.segments,
        {"tokens": TOKENS},
        {
            "tokens": (*TENSOR, *NO_INTS, torch.tensor([[4]]), torch.tensor([[-1]])),
            "left_padding": (3, torch.zeros(1), torch.zeros(2).long()),
            "cu_seqlens": (3, torch.zeros(2), torch.zeros(1).long()),
            "units": (None, "line", ("page",)),
        },
    ),
    "Rotary": (
        sa.Rotary,
        {},
        {"base": (None, *NUMBER, 1, 0, -1), "split": (None, *NAME), "scaling": ("ntk=4", 4, sa.RotaryScaling, THING)},
    ),
    "Rotary.parse": (
        sa.Rotary.parse,
        {"text": "low_far"},
        {"text": (*TEXT, "low_far,base=x", "low_far,base=2,base=3")},
    ),
    "Rotary.frequencies": (sa.Rotary().frequencies, {"ranks": (4, 4)}, {"ranks": (None, *INTS)}),
    "Rotary.build": (sa.Rotary().build, {"ranks": (4, 4)}, {"ranks": (None, *INTS)}),
    "RotaryScaling": (
        sa.RotaryScaling,
        {"kind": "yarn", "factor": 2, "original_length": 8},
        {"kind": (None, *NAME, "ntk"), "factor": (None, *NUMBER, 0.5, -1), "original_length": (None, *SIZE)},
    ),
    "RotaryScaling.parse": (
        sa.RotaryScaling.parse,
        {"text": "ntk=4"},
        {"text": (*TEXT, "ntk", "ntk=0", "yarn=2", "yarn=2@x")},
    ),
    "RotaryScaling.apply": (
        sa.RotaryScaling(kind="ntk", factor=2).apply,
        {"frequencies": (1.0,)},
        {"frequencies": (None, "x", ("x",), 3)},
    ),
    "scoring.Standard": (scoring.Standard, {}, {"rank": SIZE, **SCORES}),
    "scoring.BTT": (scoring.BTT, {}, {"rank": (None, *SIZE), **SCORES}),
    "scoring.MLR": (
        scoring.MLR,
        {"ranks": (2, 2)},
        {"ranks": (None, *INTS), "divide_by_levels": (None, *FLAG), **SCORES},
    ),
    "scoring.Matrix": (scoring.Matrix, {"matrix": "btt:1"}, {"matrix": (*TEXT, matrices.Dense), **SCORES}),
    "feature_dim": (
        lambda kind, **given: kind.feature_dim(**given),
        {"kind": scoring.Standard(), "embed_dim": 8, "num_heads": 2},
        {"embed_dim": (None, *SIZE), "num_heads": (None, *SIZE)},
    ),
    "scoring.build": (scoring.BTT().build, {"shape": SHAPE}, {"shape": (None, "x", THING)}),
    "HeadShape": (
        HeadShape,
        {"embed_dim": 8, "num_heads": 2, "num_kv_heads": 1},
        {"embed_dim": SIZE, "num_heads": (*SIZE, 3), "num_kv_heads": (*SIZE, 3), "norm": FLAG, "bias": FLAG},
    ),
    "format_spec": (format_spec, {"spec": SPEC}, {"spec": (None, "standard", 3)}),
    "describe_spec": (describe_spec, {"text": "standard"}, {"text": (None, 3, SPEC)}),
    "Role": (
        mup.Role,
        {"kind": "hidden"},
        {"kind": (None, *NAME), "fan_in": (None, *SIZE), "uses": (None, *SIZE), "std": (*NUMBER, 0, -1, 0.1)},
    ),
    "Role.learning_rate_scale": (ROLE.learning_rate_scale, {}, {"base_fan_in": (None, *NUMBER, 0, -1)}),
    "Role.learning_rate": (ROLE.learning_rate, {"base": 0.1}, {"base": (None, *NUMBER, -1), "base_fan_in": NUMBER}),
    "Role.draw_": (ROLE.draw_, {"parameter": torch.zeros(3)}, {"parameter": (*TENSOR, torch.arange(3))}),
    "roles_of": (mup.roles_of, {"model": PLAIN}, {"model": (None, "x", nn.Linear(3, 3), [PLAIN], nn.Linear)}),
    "initialize": (mup.initialize, {"model": MLP(8)}, {"model": (None, "x", nn.Linear(3, 3), [PLAIN])}),
    "parameter_groups": (
        mup.parameter_groups,
        {"model": PLAIN, "learning_rate": 0.1},
        {
            "model": (None, "x", nn.Linear(3, 3)),
            "learning_rate": (None, *NUMBER, 0, -1),
            "weight_decay": (None, *NUMBER, -1),
            "base_fan_in": (None, *NUMBER, 0),
        },
    ),
    "adamw": (
        mup.adamw,
        {"model": PLAIN, "learning_rate": 0.1},
        {
            "model": (None, "x", nn.Linear(3, 3), nn.GELU()),
            "learning_rate": (None, *NUMBER, 0),
            "betas": (None, (), (0.9,), (0.9, 1.0), (NAN, 0.9), ("a", "b"), 0.9, (0.9, 0.9, 0.9)),
            "eps": (None, *NUMBER, -1),
        },
    ),
    "fastest_adamw": (
        mup.fastest_adamw,
        {"groups": [{"params": [torch.zeros(1)]}]},
        {"groups": (None, 3, "x", [3], [{}])},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_wrong_values_raise_our_errors(name) -> None:
    found = faults(name, TABLE[name])
    assert not found, "\n" + "\n".join(found)


def test_every_public_name_has_wrong_calls() -> None:
    elsewhere = {
        "Attention",
        "DecoderPrograms",
        "LanguageModel",
        "LayerCaches",
        "LevelCache",
        "Sampling",
        "StructuredLinear",
        "export_decoder",
        "replace_linears",
        "structured_attention",
    }
    folders = {"__version__", "cache", "errors", "matrices", "mup", "ops", "parallel", "scoring"}
    protocols = {"DeclaresRoles", "DrawsFactors", "ComputesWeight"}
    public = [*sa.__all__, *(f"scoring.{name}" for name in ("Standard", "BTT", "MLR", "Matrix"))]
    public += [
        name for name in mup.__all__ if inspect.isclass(found := getattr(mup, name)) or inspect.isfunction(found)
    ]
    assert [name for name in public if name not in TABLE and name not in elsewhere | folders | protocols] == []
    assert count(TABLE) > 500


def test_level_one_is_one_block() -> None:
    positions = torch.tensor([-1, 0, 7, 8, 16])
    for layout in (LEVELS, FREE):
        assert layout.blocks(1, positions).tolist() == [0] * 5
    with pytest.raises(sa.errors.ShapeError, match="positions must be"):
        LEVELS.is_sink([3])


def test_segments_of_padding_and_packed_sequences_that_do_not_fit() -> None:
    for offsets in ([0, 3], [1, 4], [0, 5, 3, 4], [0, 12]):
        with pytest.raises(sa.errors.ShapeError, match="must rise or stay the same from 0 to the length 4"):
            UNITS.segments(TOKENS, cu_seqlens=torch.tensor(offsets))
    for padding in (-2, 5):
        with pytest.raises(sa.errors.ShapeError, match="must lie in"):
            UNITS.segments(TOKENS, left_padding=torch.tensor([padding]))
    with pytest.raises(sa.errors.ConfigError, match="not both"):
        UNITS.segments(TOKENS, left_padding=torch.tensor([0]), cu_seqlens=torch.tensor([0, 4]))


def test_a_rotation_of_other_things() -> None:
    for dims in ("4", None, 4.0, 3):
        with pytest.raises(sa.errors.ConfigError, match="an even number of dimensions"):
            Rotation("halves", dims)
    with pytest.raises(sa.errors.ConfigError, match="a text such as"):
        Rotation.parse(4)
    with pytest.raises(sa.errors.ConfigError, match="head_dim"):
        Rotation("halves", 4).pairs("x")
