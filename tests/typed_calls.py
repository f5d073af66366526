"""Calls as users write them, with lists instead of tuples: mypy checks that the types allow them, a test
checks the results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import structattn as sa
from structattn.layout.halving import Halving
from structattn.spec.layers import LayerSpecs


def with_lists_and_tuples() -> list[tuple[Any, Any]]:
    """The same value made from lists and from tuples."""
    term = sa.matrices.BlockTerm(left_blocks=1, right_blocks=1, inner_dim=2, right_permutation=[1, 0])
    units = sa.TextUnits.of(["a", " "])
    tokens = torch.tensor([[0, 1]], device="cpu")
    return [
        (sa.LevelLayout([4, 4], [8, 4], value_ranks=[4, 4]), sa.LevelLayout((4, 4), (8, 4), value_ranks=(4, 4))),
        (sa.LevelLayout.halving([4, 4], 8), sa.LevelLayout.halving((4, 4), 8)),
        (sa.LevelLayout.halving(ranks=torch.Size((4, 4)), context_length=8), sa.LevelLayout.halving((4, 4), 8)),
        (
            sa.LevelLayout.from_boundaries([4, 4], [[0], [0, 3]]),
            sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 3))),
        ),
        (sa.GlobalWindowLayout([4, 4], 3), sa.GlobalWindowLayout((4, 4), 3)),
        (sa.TextLayout([4, 4], ["line"]), sa.TextLayout((4, 4), ("line",))),
        (Halving([4, 4]), Halving((4, 4))),
        (LayerSpecs([sa.parse_spec("standard")]), LayerSpecs((sa.parse_spec("standard"),))),
        (sa.scoring.MLR(ranks=[2, 2]), sa.scoring.MLR(ranks=(2, 2))),
        (sa.Rotary().frequencies([4, 4]), sa.Rotary().frequencies((4, 4))),
        (sa.Rotary().build([4, 4]).ranks, (4, 4)),
        (units.segments(tokens, units=["word"]), units.segments(tokens, units=("word",))),
        (term.right_permutation, (1, 0)),
        (sa.matrices.Structure("mlr", [("ranks", [2, 2])]), sa.matrices.Structure("mlr", (("ranks", (2, 2)),))),
        (
            sa.matrices.MultiLevelLowRank(8, 8, [2, 2], num_blocks=[1, 2]).options,
            {"ranks": (2, 2), "num_blocks": (1, 2)},
        ),
        (sa.matrices.BlockTensorTrain(8, 8, row_dims=[4, 2], col_dims=[2, 4], batch_shape=[3]).batch_shape, (3,)),
        (sa.matrices.Kronecker(8, 8, row_dims=[4, 2], right_batch_shape=[]).row_dims, (4, 2)),
        (sa.matrices.Monarch(8, 8, num_blocks=[2, 4]).num_blocks, (2, 4)),
        (sa.matrices.Butterfly(4, 4, row_radices=[2, 2], col_radices=[2, 2]).row_radices, (2, 2)),
        (sa.matrices.MLBTC(4, 4, [term]).terms, (term,)),
        (sa.matrices.allocate_ranks(torch.eye(4, device="cpu"), 2, [1, 2]).is_optimal, False),
        (sa.mup.adamw(_model(), learning_rate=0.1, betas=[0.9, 0.95]).defaults["betas"], (0.9, 0.95)),
    ]


def calls_with_plain_values(return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """A script of a user: lists for ranks, a device by its name, a spec as an object, a bool that is not
    known to mypy.
    """
    layout = sa.LevelLayout.halving([4, 4], 8)
    attention = sa.Attention(8, 1, layout=layout, device="cpu", dtype=torch.float64)
    q, k, v, scale = attention.project(torch.zeros(1, 3, 8, dtype=torch.float64, device="cpu"))
    sa.LanguageModel(
        8,
        [sa.parse_spec("mlr:4|4"), "standard"],
        num_layers=2,
        embed_dim=16,
        num_heads=2,
        context_length=8,
        device=torch.device("meta"),
        dtype=torch.bfloat16,
    )
    return sa.structured_attention(q, k, v, layout, scale=scale, return_lse=return_lse)


def _model() -> nn.Module:
    return sa.LanguageModel(8, ["mlr:4|4"], num_layers=1, embed_dim=16, num_heads=2, context_length=8)
