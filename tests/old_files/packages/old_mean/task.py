"""One attention layer learns the mean of the points that it sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from structattn.studies.tasks.base import Baseline, Batch, Split, Task
from torch import Tensor, nn

from structattn import Attention
from structattn.seeds import generator


@dataclass(frozen=True, kw_only=True)
class MeanConfig:
    embed_dim: int = 8
    num_points: int = 4


class MeanModel(nn.Module):
    def __init__(self, spec: str, config: MeanConfig) -> None:
        super().__init__()
        self.attention = Attention.from_spec(
            spec, embed_dim=config.embed_dim, num_heads=2, context_length=config.num_points, is_causal=False
        )
        self.num_points = config.num_points

    def forward(self, points: Tensor) -> Tensor:
        return self.attention(points).mean(dim=1)

    def flops_per_example(self) -> int:
        return self.attention.cost(self.num_points).flops


class MeanTask(Task):
    name = "old-mean"
    config_class = MeanConfig
    metric = "mse"
    metric_label = "mean squared error"
    question = "Can attention average?"

    def build_model(self, spec: str) -> MeanModel:
        return MeanModel(spec, self.config)

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        return self._points(generator(self.name, "train", seed, step), batch_size)

    def _points(self, rng: torch.Generator, count: int) -> Batch:
        points = torch.randn(count, self.config.num_points, self.config.embed_dim, generator=rng)
        return {"points": points, "mean": points.mean(dim=1)}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        return F.mse_loss(model(batch["points"]), batch["mean"])

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        return {"mse": float(self.loss(model, self._points(generator(self.name, split), 64), 0))}

    def details(self, model: nn.Module) -> dict[str, Any]:
        return {"error_by_coordinate": [1.0] * self.config.embed_dim}

    def baselines(self) -> list[Baseline]:
        mean = self._points(generator(self.name, "test"), 64)["mean"]
        return [Baseline(name="zero", metrics={"mse": float(mean.square().mean())}, note="predicts zero")]
