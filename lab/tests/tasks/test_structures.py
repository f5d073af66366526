"""The presets ``structures``: their groups have equal parameters and FLOPs, and the ranks of the page."""

from __future__ import annotations

import pytest

from structattn.matrices import FAMILIES, Structure
from structattn_lab.compare.grid import points_of
from structattn_lab.tasks.registry import factory_of, recipe_for

# Of each task: the groups of consecutive specs after the first, as parameters per head and ranks.
GROUPS = {
    "icl-regression": ((240, (5, 24, 16, 9, 12, 15)), (432, (9, 24, 24))),
    "nearest-neighbor": ((1024, (8, 64, 20, 30, 47)), (1152, (9, 32, 64)), (1536, (12, 64))),
}


@pytest.mark.quick(task=["nearest-neighbor"])
@pytest.mark.parametrize("task", GROUPS)
def test_groups_differ_in_rank_only(task: str) -> None:
    (point,) = points_of(factory_of(task), recipe_for(task, "structures"))
    models = point.models()
    specs = iter(point.recipe.attention[1:])
    for parameters, ranks in GROUPS[task]:
        group = {spec: models[spec] for spec in (next(specs) for _ in ranks)}
        assert tuple(costs.rank for costs in group.values()) == ranks
        size = 24 if task == "icl-regression" else 64
        for spec in group:
            matrix = Structure.parse(spec.removeprefix("bilinear-")).build(size, size)
            scales = getattr(matrix, "alpha", ())  # one number per term of an MLBTC
            assert sum(weight.numel() for weight in matrix.parameters()) - len(scales) == parameters
        assert len({costs.flops_per_example for costs in group.values()}) == 1
        assert len({point.training_of(point.recipe, spec).steps for spec in group}) == 1


@pytest.mark.parametrize("task", GROUPS)
def test_every_family_is_a_score(task: str) -> None:
    specs = recipe_for(task, "structures").attention
    families = {spec.removeprefix("bilinear-").partition(":")[0] for spec in specs if spec.startswith("bilinear-")}
    assert families == set(FAMILIES)
