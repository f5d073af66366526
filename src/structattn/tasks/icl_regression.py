"""In-context linear regression (Garg et al. 2022): learn to learn w from the pairs in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.errors import ConfigError
from structattn.models.icl_regressor import ICLRegressor
from structattn.seeds import generator
from structattn.tasks.base import Baseline, Batch, Split, Task


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Prompts grow: d' live dimensions and n' = 2 d' points, from small to full.

    Args:
        start_dim: live dimensions at step 0.
        end_step: the step from which prompts are full; between, dimensions rise evenly. 0: full from the start.
    """

    start_dim: int = 4
    end_step: int = 0

    def __post_init__(self) -> None:
        if self.start_dim < 1 or self.end_step < 0:
            raise ConfigError(
                f"task.curriculum: start_dim >= 1 and end_step >= 0 are needed, got {self.start_dim} and {self.end_step}"
            )

    def dims_at(self, step: int, dim: int) -> int:
        """Live dimensions at a step; ``dim`` from ``end_step`` on."""
        if step >= self.end_step:
            return dim
        start = min(self.start_dim, dim)
        return start + (dim - start) * step // self.end_step


@dataclass(frozen=True, kw_only=True)
class ICLRegressionConfig:
    """Prompts of N = 2 d pairs with x ~ N(0, I_d), one w ~ N(0, I_d) per prompt and y = w.x, and the model.

    Args:
        dim: d.
        embed_dim, num_layers, num_heads: of the model.
        curriculum: how prompts grow.
        eval_prompts: fresh full prompts of each evaluation.

    Raises:
        ConfigError: a number below 1, or heads that do not divide the width.
    """

    dim: int = 8
    embed_dim: int = 64
    num_layers: int = 3
    num_heads: int = 4
    curriculum: Curriculum = Curriculum()
    eval_prompts: int = 1024

    def __post_init__(self) -> None:
        for name in ("dim", "embed_dim", "num_layers", "num_heads", "eval_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"task.{name} must be at least 1, got {getattr(self, name)}")
        if self.embed_dim % self.num_heads:
            raise ConfigError(f"task.num_heads must divide embed_dim: got {self.num_heads} and {self.embed_dim}")


def least_squares(xs: Tensor, ys: Tensor) -> Tensor:
    """The optimal predictor: y_i from the minimum-norm least-squares fit to the pairs before it.

    Args:
        xs: (B, N, d).
        ys: (B, N).

    Returns:
        Predictions (B, N); the first is 0.
    """
    out = torch.zeros_like(ys)
    for i in range(1, xs.shape[1]):
        w = torch.linalg.pinv(xs[:, :i].double()) @ ys[:, :i, None].double()
        out[:, i] = (xs[:, i].double() * w[..., 0]).sum(-1).to(ys.dtype)
    return out


class ICLRegressionTask(Task):
    """Squared error at the last point over d: 1 = knows nothing, 0 = solved (N > d pairs determine w)."""

    name = "icl-regression"
    metric = "last_point_error"
    metric_label = "squared error at the last point / d (1 = knows nothing)"
    question = "Which score structures let a transformer learn linear regression in its context?"

    def __init__(self, config: ICLRegressionConfig) -> None:
        self.config = config

    def build_model(self, spec: str) -> ICLRegressor:
        """A causal transformer over 2 N tokens."""
        config = self.config
        return ICLRegressor(
            spec,
            dim=config.dim,
            num_points=2 * config.dim,
            embed_dim=config.embed_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
        )

    def _prompts(self, rng: torch.Generator, count: int, live: int) -> Batch:
        dim = self.config.dim
        xs = torch.randn(count, 2 * live, dim, generator=rng)
        xs[..., live:] = 0.0
        w = torch.randn(count, dim, generator=rng)
        return {"xs": xs, "ys": torch.einsum("bnd,bd->bn", xs, w)}

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Fresh prompts at the curriculum's size for that step."""
        live = self.config.curriculum.dims_at(step, self.config.dim)
        return self._prompts(generator(self.name, "train", seed, step), batch_size, live)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error over all positions of the prompt."""
        return F.mse_loss(model(batch["xs"], batch["ys"]), batch["ys"])

    def _point_errors(self, model: nn.Module, split: Split) -> Tensor:
        examples = self._prompts(generator(self.name, split), self.config.eval_prompts, self.config.dim)
        device = next(model.parameters()).device
        with torch.no_grad():
            predicted = model(examples["xs"].to(device), examples["ys"].to(device)).cpu()
        errors: Tensor = (predicted - examples["ys"]).square().mean(dim=0) / self.config.dim
        return errors

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``last_point_error`` and ``mean_error`` over d, on fresh prompts at full dimension."""
        errors = self._point_errors(model, split)
        return {"last_point_error": float(errors[-1]), "mean_error": float(errors.mean())}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """``error_by_point`` on the test split."""
        return {"error_by_point": self._point_errors(model, "test").tolist()}

    def _baseline_errors(self) -> dict[str, tuple[Tensor, str]]:
        """Error over d at each point, and a note, by the name of the baseline."""
        examples = self._prompts(generator(self.name, "test"), self.config.eval_prompts, self.config.dim)
        xs, ys, dim = examples["xs"], examples["ys"], self.config.dim
        counts = torch.arange(1, xs.shape[1] + 1)[:, None]
        w = (xs * ys[..., None]).cumsum(1) / counts
        averaging = torch.zeros_like(ys)
        averaging[:, 1:] = (w[:, :-1] * xs[:, 1:]).sum(-1)
        found = (
            ("zero", torch.zeros_like(ys), "predicts 0"),
            ("averaging", averaging, "w is the mean of y x over the pairs seen"),
            ("least squares", least_squares(xs, ys), "the optimal predictor"),
        )
        return {name: ((p - ys).square().mean(dim=0) / dim, note) for name, p, note in found}

    def baselines(self) -> list[Baseline]:
        """Zero, averaging and least squares."""
        return [
            Baseline(
                name=name,
                metrics={"last_point_error": float(errors[-1]), "mean_error": float(errors.mean())},
                note=note,
            )
            for name, (errors, note) in self._baseline_errors().items()
        ]

    def baseline_details(self) -> dict[str, dict[str, Any]]:
        """``error_by_point`` of each baseline."""
        return {name: {"error_by_point": errors.tolist()} for name, (errors, _) in self._baseline_errors().items()}
