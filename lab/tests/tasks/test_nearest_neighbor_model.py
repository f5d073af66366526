"""Wrong arguments of the model that finds nearest neighbours raise our errors."""

import pytest
import torch
from wrong_calls import FLAG, SIZE, TENSOR, TEXT, faults

from structattn_lab.tasks.nearest_neighbor.model import NearestNeighborModel

NEAREST = NearestNeighborModel("standard", dim=8, num_points=4, num_heads=2)
TABLE = {
    "NearestNeighborModel": (
        NearestNeighborModel,
        {"spec": "standard", "dim": 8, "num_points": 4, "num_heads": 2},
        {"spec": TEXT, "dim": SIZE, "num_points": SIZE, "num_heads": SIZE, "qk_norm": FLAG},
    ),
    "NearestNeighborModel.forward": (
        NEAREST,
        {"query": torch.randn(2, 8), "points": torch.randn(2, 4, 8)},
        {
            "query": (*TENSOR, torch.randn(8), torch.randn(3, 8)),
            "points": (*TENSOR, torch.randn(4, 8), torch.randn(2, 4, 7)),
        },
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_wrong_values_raise_our_errors(name) -> None:
    found = faults(name, TABLE[name])
    assert not found, "\n" + "\n".join(found)
