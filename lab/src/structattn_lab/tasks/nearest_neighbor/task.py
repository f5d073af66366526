"""Nearest neighbor on the sphere: the cleanest case of the low-rank bottleneck (Amsel et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import check_field_types, check_int
from structattn.seeds import generator
from structattn_lab.tasks.base import Baseline, Batch, Split, Task, check_sizes_of, on_device_of
from structattn_lab.tasks.nearest_neighbor.model import NearestNeighborModel

_CHUNK = 1024  # examples that are scored at a time


@dataclass(frozen=True, kw_only=True)
class NearestNeighborConfig:
    """N points and a query uniform on the sphere of radius sqrt(d); the target is the point nearest to the
    query.

    Args:
        dim: dimension d of a point.
        num_points: points of an example, N.
        num_heads: heads where the spec does not say otherwise.
        qk_norm: layer norm of queries and keys. Default ``False``: the points already have one length, and a
            norm keeps the scores of sharp choices (large) out of reach of a short training.
        eval_examples: fresh examples of each evaluation.

    Raises:
        ConfigError: a number below 1 (fewer than 2 points or dimensions).
    """

    dim: int = 64
    num_points: int = 16
    num_heads: int = 8
    qk_norm: bool = False
    eval_examples: int = 8192

    def __post_init__(self) -> None:
        for name in ("dim", "num_points"):
            check_int(f"task.{name}", getattr(self, name), minimum=2)
        check_sizes_of(self, "num_heads", "eval_examples")
        check_field_types(self, "task.")


class NearestNeighborTask(Task):
    """Squared error per dimension, 1 = knows nothing (predicting zero), 0 = always finds the point."""

    name = "nearest-neighbor"
    config_class = NearestNeighborConfig
    metric = "nmse"
    metric_label = "squared error per dimension (1 = knows nothing)"
    no_skill_score = 1.0
    question = (
        "Can one attention layer find the nearest of some points on a sphere, when each head may only compare them "
        "through a score of limited rank?"
    )

    config: NearestNeighborConfig

    def data_summary(self) -> dict[str, str]:
        config = self.config
        return {
            "data": (
                f"random points on a sphere, {config.num_points} of dimension {config.dim} in an example, drawn anew "
                "at each step"
            )
        }

    def build_model(self, spec: str) -> NearestNeighborModel:
        """One attention layer over the raw points."""
        self.check_spec(spec)
        config = self.config
        return NearestNeighborModel(
            spec, dim=config.dim, num_points=config.num_points, num_heads=config.num_heads, qk_norm=config.qk_norm
        )

    def _examples(self, rng: torch.Generator, count: int) -> Batch:
        dim, num = self.config.dim, self.config.num_points
        x = F.normalize(torch.randn(count, num + 1, dim, generator=rng), dim=-1) * dim**0.5
        query, points = x[:, 0], x[:, 1:]
        nearest = torch.einsum("bd,bnd->bn", query, points).argmax(dim=1)
        return {"query": query, "points": points, "target": points[torch.arange(count), nearest]}

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Fresh examples, a function of (seed, step)."""
        return self._examples(generator(self.name, "train", seed, step), batch_size)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error per dimension."""
        return F.mse_loss(model(batch["query"], batch["points"]), batch["target"])

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """The points and the query."""
        return self.config.num_points + 1

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``nmse`` on examples that training never draws, the same for every model."""
        rng, most = generator(self.name, split), self.config.eval_examples
        total = 0.0
        for start in range(0, most, _CHUNK):
            count = min(_CHUNK, most - start)
            total += float(self.loss(model, on_device_of(model, self._examples(rng, count)), 0)) * count
        return {"nmse": total / most}

    def baselines(self) -> list[Baseline]:
        """Predicting zero, and the best constant weights: the mean of the points."""
        examples = self._examples(generator(self.name, "test"), self.config.eval_examples)
        mean = F.mse_loss(examples["points"].mean(dim=1), examples["target"]).item()
        zero = examples["target"].square().mean().item()
        return [
            Baseline(name="zero", metrics={"nmse": zero}, note="predicts the zero vector"),
            Baseline(name="mean of the points", metrics={"nmse": mean}, note="attends to all points equally"),
        ]
