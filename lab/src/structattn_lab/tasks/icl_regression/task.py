"""In-context regression (Garg et al. 2022): learn to learn a function from the pairs in the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import check_choice, check_field_types, check_int, check_number
from structattn.errors import ConfigError
from structattn.models.icl_regressor import ICLRegressor
from structattn.seeds import generator
from structattn_lab.tasks.base import Baseline, Batch, Split, Task, check_sizes_of
from structattn_lab.tasks.icl_regression.baselines import predictors
from structattn_lab.tasks.icl_regression.prompts import COVARIATES, Covariates, DrawnPrompts, PromptConfig

# Prompts of an evaluation that are drawn, and given to the model, at a time. Each chunk has its own random
# stream, so another number would give other prompts.
EVAL_CHUNK = 256
# Prompts that the baselines handle at a time: their d x d matrices should stay in the cache of a processor.
_BASELINE_CHUNK = 64


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Prompts grow from small to full: live dimensions, the others being zero, and points.

    After k of n = max(1, end_step // interval) raises, evenly spaced so that the last comes at ``end_step``,
    a prompt has start_dim + ceil(k (dim - start_dim) / n) live dimensions, and as many points by the same
    rule. Only the raises change the size, since a compiled model is compiled again for each.

    Args:
        start_dim: live dimensions at step 0; ``dim`` where that is smaller. Default 4.
        start_points: points at step 0; ``num_points`` where that is smaller. Default 8.
        interval: steps from one raise to the next (longer where it does not divide ``end_step``). Default
            2000.
        end_step: the step from which prompts are full. Default 0: full from the start.

    Raises:
        ConfigError: a number below 1, or ``end_step`` below 0.

    Source: Garg et al. 2022, appendix A; Kuang et al. 2025: 4 dimensions and 8 points at first, raised every
    2,000 steps, full after 6 % of the steps.
    """

    start_dim: int = 4
    start_points: int = 8
    interval: int = 2000
    end_step: int = 0

    def __post_init__(self) -> None:
        for name, low in (("start_dim", 1), ("start_points", 1), ("interval", 1), ("end_step", 0)):
            check_int(f"task.curriculum.{name}", getattr(self, name), minimum=low)

    def size_at(self, step: int, dim: int, num_points: int) -> tuple[int, int]:
        """Live dimensions and points at a step.

        Args:
            step: of the training, from 0.
            dim: d, of the full prompt.
            num_points: N, of the full prompt.
        """
        if step >= self.end_step:
            return dim, num_points
        raises = max(1, self.end_step // self.interval)
        done = step * raises // self.end_step

        def grown(start: int, full: int) -> int:
            start = min(start, full)
            return start - (start - full) * done // raises  # start + ceil((full - start) done / raises)

        return grown(self.start_dim, dim), grown(self.start_points, num_points)


@dataclass(frozen=True, kw_only=True)
class Shift:
    """How the prompts of evaluations differ from those of training: a test outside the training distribution.

    Args:
        noise_std: of the noise on y. Default ``None``: as in training.
        covariates: distribution of x, see ``PromptConfig``. Default ``None``: as in training.

    Raises:
        ConfigError: noise that is negative or not finite, or an unknown name.

    Source: Garg et al. 2022, section 4.
    """

    noise_std: float | None = None
    covariates: Covariates | None = None

    def __post_init__(self) -> None:
        if self.noise_std is not None:
            check_number("task.shift.noise_std", self.noise_std, minimum=0)
        if self.covariates is not None:
            check_choice("task.shift.covariates", self.covariates, COVARIATES)

    def of(self, prompts: PromptConfig) -> PromptConfig:
        """The prompts of evaluations, given those of training."""
        changes: dict[str, Any] = {name: value for name, value in vars(self).items() if value is not None}
        return replace(prompts, **changes)


@dataclass(frozen=True, kw_only=True)
class ICLRegressionConfig:
    """Prompts of N pairs (x, f(x)) with x of d dimensions and a fresh f in each, and the model.

    Args:
        dim: dimension d of x.
        num_points: examples of a prompt, N. Default ``None``: 2 d.
        prompts: distribution of x, f and noise. Default: x ~ N(0, I_d), f(x) = w.x with w ~ N(0, I_d), no
            noise.
        shift: how evaluations differ from it. Default: they do not.
        embed_dim: width of the model.
        num_layers: blocks of the model.
        num_heads: attention heads of a block.
        qk_norm: norms of queries and keys, see ``ICLRegressor``.
        read_in_std: of the first weights, see ``ICLRegressor``.
        curriculum: how prompts grow in training. Default: full from the start.
        eval_prompts: fresh full prompts of each evaluation.

    Raises:
        ConfigError: a number below 1, heads that do not divide the width, or more nonzero weights than
            dimensions.
    """

    dim: int = 8
    num_points: int | None = None
    prompts: PromptConfig = field(default_factory=PromptConfig)
    shift: Shift = Shift()
    embed_dim: int = 64
    num_layers: int = 3
    num_heads: int = 4
    qk_norm: bool = True
    read_in_std: float | None = None
    curriculum: Curriculum = Curriculum()
    eval_prompts: int = 1024

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        optional = () if self.num_points is None else ("num_points",)
        check_sizes_of(self, "dim", *optional, "embed_dim", "num_layers", "num_heads", "eval_prompts")
        if self.read_in_std is not None:
            check_number("task.read_in_std", self.read_in_std, above=0)
        if self.prompts.function == "sparse-linear" and self.prompts.sparsity > self.dim:
            raise ConfigError(
                f"task.prompts.sparsity must be at most task.dim, got {self.prompts.sparsity} and {self.dim}: lower "
                "it, or raise the dimension"
            )

    @property
    def full_points(self) -> int:
        """N: ``num_points``, or 2 d."""
        return 2 * self.dim if self.num_points is None else self.num_points


class ICLRegressionTask(Task):
    """Squared error at the last point over that of predicting zero (d for linear f): 1 = knows nothing, 0 =
    solved.

    Training compares each prediction with y of the prompt, noise included; evaluation with f(x), without
    noise, so 0 is what knowing f gives. Linear f is determined by N > d pairs without noise.

    Source: Garg et al. 2022; Kuang et al. 2025, section 4.
    """

    name = "icl-regression"
    config_class = ICLRegressionConfig
    metric = "last_point_error"
    metric_label = "squared error at the last point, over that of predicting 0 (1 = knows nothing)"
    no_skill_score = 1.0
    question = "Which score structures let a transformer learn a function from the examples in its context?"

    config: ICLRegressionConfig

    def data_summary(self) -> dict[str, str]:
        config = self.config
        return {
            "data": (
                f"random functions of {config.dim} numbers, {config.full_points} examples in a prompt, drawn anew at "
                "each step"
            )
        }

    def build_model(self, spec: str) -> ICLRegressor:
        """A causal transformer over 2 N tokens."""
        config = self.config
        return ICLRegressor(
            spec,
            dim=config.dim,
            num_points=config.full_points,
            embed_dim=config.embed_dim,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            qk_norm=config.qk_norm,
            read_in_std=config.read_in_std,
        )

    def size_at(self, step: int) -> tuple[int, int]:
        """Live dimensions and points of the training prompts at a step."""
        return self.config.curriculum.size_at(step, self.config.dim, self.config.full_points)

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Fresh prompts at the curriculum's size for that step: ``xs`` (B, n, d) and ``ys`` (B, n)."""
        live, num_points = self.size_at(step)
        rng = generator(self.name, "train", seed, step)
        drawn = self.config.prompts.draw(rng, batch_size, num_points, self.config.dim, live=live)
        return {"xs": drawn.xs, "ys": drawn.ys}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """Mean squared error over all positions of the prompt, against y with its noise."""
        return F.mse_loss(model(batch["xs"], batch["ys"]), batch["ys"])

    def flops(self, model: nn.Module, step: int | None = None) -> int:
        """Forward FLOPs of one training prompt at its length at that step (full length without one), without
        the input projection.
        """
        num_points = self.config.full_points if step is None else self.size_at(step)[1]
        return cast(ICLRegressor, model).flops(num_points)

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """An x and a y for each point of a prompt at that step."""
        return 2 * (self.config.full_points if step is None else self.size_at(step)[1])

    def eval_prompts(self, split: Split, dtype: torch.dtype = torch.float32) -> Iterator[DrawnPrompts]:
        """The prompts of an evaluation, at most ``EVAL_CHUNK`` at a time: full size, the same for every
        model, never in training.

        Args:
            split: which of the two sets.
            dtype: float64 gives the same prompts with more exact values.
        """
        config = self.config
        prompts = config.shift.of(config.prompts)
        for start in range(0, config.eval_prompts, EVAL_CHUNK):
            count = min(EVAL_CHUNK, config.eval_prompts - start)
            yield prompts.draw(generator(self.name, split, start), count, config.full_points, config.dim, dtype=dtype)

    def _score(self, squared_errors: Tensor) -> Tensor:
        """Sums of squared errors over all prompts to scores, by point."""
        zero_error = self.config.prompts.distribution.variance(self.config.dim)
        return squared_errors / (self.config.eval_prompts * zero_error)

    @torch.no_grad()
    def _point_errors(self, model: nn.Module, split: Split) -> Tensor:
        device = next(model.parameters()).device
        total = torch.zeros(self.config.full_points, dtype=torch.float64)
        for drawn in self.eval_prompts(split):
            predicted = model(drawn.xs.to(device), drawn.ys.to(device)).cpu().double()
            total += (predicted - drawn.values).square().sum(0)
        return self._score(total)

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``last_point_error`` and ``mean_error``, against f(x) without noise, on fresh full prompts (see
        ``Shift``).
        """
        return _summary(self._point_errors(model, split))

    def details(self, model: nn.Module) -> dict[str, Any]:
        """``error_by_point`` on the test split, and ``dim``."""
        return {"error_by_point": self._point_errors(model, "test").tolist(), "dim": self.config.dim}

    @cached_property
    def _baselines(self) -> list[Baseline]:
        methods = predictors(self.config.shift.of(self.config.prompts))
        totals = [torch.zeros(self.config.full_points, dtype=torch.float64) for _ in methods]
        for drawn in self.eval_prompts("test", torch.float64):
            for xs, ys, values in zip(*(part.split(_BASELINE_CHUNK) for part in drawn), strict=True):
                for method, total in zip(methods, totals, strict=True):
                    total += (method.predict(xs, ys) - values).square().sum(0)
        rows = []
        for method, total in zip(methods, totals, strict=True):
            errors = self._score(total)
            details = {"error_by_point": errors.tolist()}
            rows.append(Baseline(name=method.name, metrics=_summary(errors), note=method.note, details=details))
        return rows

    def baselines(self) -> list[Baseline]:
        """Zero, averaging, least squares, nearest neighbors and, with noise, ridge regression, in float64,
        with ``error_by_point``; computed once."""
        return self._baselines


def _summary(errors: Tensor) -> dict[str, float]:
    """The metrics of errors by point."""
    return {"last_point_error": float(errors[-1]), "mean_error": float(errors.mean())}
