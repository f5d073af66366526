"""Every wrong argument of the structured matrices, of fits and of structures raises one of our errors."""

import pytest
import torch
from wrong_calls import COUNT, FLAG, INTS, NAME, NAN, NUMBER, SIZE, TENSOR, TEXT, THING, count, faults

from structattn import matrices

MATRIX = matrices.BlockTensorTrain(12, 8)
GROUPED = matrices.LowRank(8, 8, 2, batch_shape=(2, 2), right_batch_shape=(2, 1))
DENSE = torch.randn(8, 8)
JAGGED = torch.nested.nested_tensor([DENSE, DENSE], layout=torch.jagged)
ODD = (torch.nn.UninitializedParameter(), torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8), JAGGED)
VECTORS = (*TENSOR, *ODD, torch.randn(3, 5), torch.tensor(1.0), torch.randn(3, 8).double(), torch.ones(3, 8).long())

DIMS = {"num_rows": SIZE, "num_cols": SIZE}
BATCH = {"batch_shape": (3, "22", (0,), (1.5,), THING)}
FACTORED = {**BATCH, "right_batch_shape": (3, (0,), (2,), THING), "rms_cap": (None, *FLAG)}


# What is called, arguments that are right, and wrong values of each argument.
TABLE = {
    "Dense": (matrices.Dense, {"num_rows": 8, "num_cols": 8}, {**DIMS, **BATCH}),
    "LowRank": (
        matrices.LowRank,
        {"num_rows": 8, "num_cols": 8, "rank": 2},
        {**DIMS, "rank": (None, *SIZE), **FACTORED},
    ),
    "MultiLevelLowRank": (
        matrices.MultiLevelLowRank,
        {"num_rows": 8, "num_cols": 8, "ranks": (2, 2)},
        {**DIMS, "ranks": (None, *INTS, (2,) * 5), "num_blocks": (3, "12", (1,), (1, 3), (0, 1)), **FACTORED},
    ),
    "BlockTensorTrain": (
        matrices.BlockTensorTrain,
        {"num_rows": 8, "num_cols": 8},
        {
            **DIMS,
            "rank": (None, *SIZE),
            "row_dims": (3, "24", (2, 3), (2,), (0, 8)),
            "col_dims": (3, (2, 3)),
            **FACTORED,
        },
    ),
    "Monarch": (
        matrices.Monarch,
        {"num_rows": 8, "num_cols": 8},
        {**DIMS, "num_blocks": (3, "22", (2,), (3, 2), (0, 2)), **FACTORED},
    ),
    "Kronecker": (
        matrices.Kronecker,
        {"num_rows": 8, "num_cols": 8},
        {**DIMS, "row_dims": (3, "24", (2, 3), (2,)), "col_dims": (3, (2, 3), (2.0, 4)), **FACTORED},
    ),
    "Butterfly": (
        matrices.Butterfly,
        {"num_rows": 8, "num_cols": 8},
        {**DIMS, "rank": (None, *SIZE), "row_radices": (3, (2, 4)), "col_radices": ("222", (2, 4)), **FACTORED},
    ),
    "Butterfly of 11": (matrices.Butterfly, {"num_rows": 8, "num_cols": 8}, {"num_rows": (11, 22)}),
    "Kaleidoscope": (
        matrices.Kaleidoscope,
        {"num_rows": 8, "num_cols": 8},
        {**DIMS, "width": (None, *SIZE), "inner_size": (*SIZE, 11), **FACTORED},
    ),
    "MLBTC": (
        matrices.MLBTC,
        {"num_rows": 8, "num_cols": 8, "terms": (matrices.BlockTerm(left_blocks=2, right_blocks=2, inner_dim=4),)},
        {
            **DIMS,
            "terms": (None, (), "x", (1,), 3, (matrices.BlockTerm(left_blocks=3, right_blocks=1, inner_dim=3),)),
            **FACTORED,
        },
    ),
    "MLBTC.from_matrix": (
        matrices.MLBTC.from_matrix,
        {"m": MATRIX},
        {"m": (None, DENSE, "btt:1", matrices.Dense, THING)},
    ),
    "BlockTerm": (
        matrices.BlockTerm,
        {"left_blocks": 2, "right_blocks": 2, "inner_dim": 4},
        {
            **dict.fromkeys(("left_blocks", "right_blocks"), (None, *SIZE)),
            "inner_dim": (*SIZE, 3, 5),
            "left_permutation": (None, "x", 3, (0, 0), (0.0, 1.0)),
            "right_permutation": (None, "x", 3, (0, 1), (1, 2, 3, 4), (True, False, 2, 3), torch.arange(4)),
        },
    ),
    "matmul": (MATRIX.matmul, {"x": torch.randn(3, 8)}, {"x": VECTORS}),
    "rmatmul": (MATRIX.rmatmul, {"x": torch.randn(3, 12)}, {"x": VECTORS}),
    "matrix forward": (MATRIX, {"x": torch.randn(3, 8)}, {"x": VECTORS}),
    "bilinear": (
        MATRIX.bilinear,
        {"x": torch.randn(3, 12), "y": torch.randn(3, 8)},
        {"x": VECTORS, "y": (*VECTORS, torch.randn(8))},
    ),
    "batched matmul": (
        GROUPED.matmul,
        {"x": torch.randn(3, 8)},
        {"x": (torch.randn(3, 2, 5, 8), torch.randn(2, 3, 5, 8))},
    ),
    "left_features": (MATRIX.left_features, {"x": torch.randn(3, 12)}, {"x": VECTORS}),
    "right_features": (MATRIX.right_features, {"y": torch.randn(3, 8)}, {"y": VECTORS}),
    "contraction": (
        MATRIX.contraction,
        {"num_left": 3, "num_right": 3},
        {"num_left": (None, *SIZE), "num_right": SIZE},
    ),
    "projection_flops": (
        MATRIX.projection_flops,
        {"order": "factored", "num_left": 3, "num_right": 3},
        {"order": (None, *NAME), "num_left": (None, *COUNT), "num_right": COUNT},
    ),
    "pair_dim": (MATRIX.pair_dim, {"order": "factored"}, {"order": (None, *NAME, torch.ones(2))}),
    "reset_parameters": (
        MATRIX.reset_parameters,
        {},
        {"fan_ins": (3, "x", {"nope": 1}, {"left": 0}, {"left": 1.5}, {3: 3})},
    ),
    "scale_": (MATRIX.scale_, {"factor": 1.0}, {"factor": (None, *NUMBER)}),
    "rebatched": (MATRIX.rebatched, {"batch_shape": (2,)}, {"batch_shape": (None, 3, (0,), "2")}),
    "Structure": (
        matrices.Structure,
        {"family": "btt", "options": (("rank", 1),)},
        {
            "family": (*TEXT, "dense"),
            "options": (None, "x", 3, (("rang", 1),), (("rank", 1), ("rank", 2)), ((3, 4),), {"rank": 1}),
        },
    ),
    "Structure.parse": (
        matrices.Structure.parse,
        {"text": "btt:1"},
        {"text": (*TEXT, "btt", "btt:x", "btt:-1", "dense:3", "mlbtc:1x1", "monarch:2")},
    ),
    "register": (
        matrices.register,
        {"name": "dense", "family": matrices.FAMILIES["dense"]},
        {
            "name": (None, 3, "", "a b", "btt"),
            "family": (None, "x", matrices.Dense, matrices.Family(3, "x", "x", "x"), matrices.FAMILIES["btt"]),
        },
    ),
    "Structure.of": (matrices.Structure.of, {"value": "btt:1"}, {"value": (*TEXT, MATRIX)}),
    "Structure.build": (matrices.Structure.parse("btt:1").build, {"num_rows": 8, "num_cols": 8}, {**DIMS, **FACTORED}),
    "Structure.build, dense": (
        matrices.Structure.parse("dense").build,
        {"num_rows": 8, "num_cols": 8},
        {**DIMS, **BATCH, "rms_cap": FLAG, "right_batch_shape": (3, "x")},
    ),
    "fit": (
        matrices.fit,
        {"dense": DENSE, "like": "lowrank:2"},
        {
            "dense": (
                None,
                "x",
                3,
                [[1, 2], [3]],
                *ODD,
                DENSE[0],
                DENSE * NAN,
                DENSE.to(torch.complex64),
                torch.zeros(0, 8),
                DENSE.to("meta"),
                THING,
            ),
            "like": (*TEXT, "btt:0", MATRIX, matrices.Dense, matrices.LowRank(8, 8, 2, rms_cap=True), 2.0),
            "refine": COUNT,
            "seed": (None, *COUNT),
            "progress": (None, *FLAG),
        },
    ),
    "allocate_ranks": (
        matrices.allocate_ranks,
        {"dense": DENSE, "total_rank": 1, "num_blocks": (1,)},
        {
            "dense": (None, "x", DENSE[0], DENSE[None], DENSE * NAN),
            "total_rank": (None, *SIZE),
            "num_blocks": (None, (), 3, "12", (0,), (1, 1), (1, 3)),
            "progress": FLAG,
        },
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_wrong_values_raise_our_errors(name) -> None:
    found = faults(name, TABLE[name])
    assert not found, "\n" + "\n".join(found)


def test_every_public_name_has_wrong_calls() -> None:
    # Results, tables, bases and what a table or a class of another package holds.
    without = {"Contraction", "FAMILIES", "FactoredMatrix", "Family", "Fit", "StructuredMatrix", "TextValue"}
    without |= {"Solver", "TermFactors"}
    assert [name for name in matrices.__all__ if name not in TABLE and name not in without] == []
    assert count(TABLE) > 500
