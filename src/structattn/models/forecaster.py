"""A univariate forecaster: patches of the look-back as tokens, a non-causal encoder, a linear head, and
optional covariates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import MAX_SIZE, check_bool, check_int, check_like, check_size, check_tensor
from structattn.errors import ConfigError, ShapeError
from structattn.layers.linear import linear_flops
from structattn.layers.rotary import Rotary
from structattn.memory import check_memory
from structattn.models.transformer import Transformer
from structattn.optim.roles import Role, RoleKind, linear_roles

_EPS = 1e-5  # added to the variance of a window


class Forecaster(nn.Module):
    """Reversible instance norm, patches, transformer encoder, linear head from all tokens to the horizon.

    Each window is centred on its last value and divided by its standard deviation; the forecast is
    transformed back. With covariates a token is the sum of what is read from its patch of each of them:

        token_t = W_y y[patch_t] + W_c c[patch_t] + W_s s
        forecast_j = head(tokens)_j + W_o gelu(W_f f_j + W_m mean_t token_t)

    with c the historic and future covariates in the look-back, s the static ones, and f_j the future ones of
    step j.

    Args:
        spec: attention of the layers, as ``Transformer`` takes it.
        look_back: input steps; patches are cut from its end, so the newest steps are always whole patches.
        horizon: output steps.
        patch_length: steps per token.
        stride: steps between the starts of tokens.
        embed_dim, num_layers, num_heads, mlp_ratio, dropout, rotary: of the trunk.
        num_outputs: numbers forecast for each step, such as quantiles. Default ``None``: one, without an axis
            for it.
        num_historic: covariates known only in the look-back. Default 0.
        num_future: covariates known in the look-back and the horizon. Default 0.
        num_static: covariates of the whole series. Default 0.
        head_tokens: the number of last tokens that the head reads, which have seen the others. Default
            ``None``: all of them, whose head has horizon * num_outputs * tokens * E weights.
        instance_norm: default ``True``. Covariates are not normalised.
        marks_missing: a term of each token says which of its steps were not observed; it starts at zero,
            under muP as the other input projections do.
            Default ``False``.

    Raises:
        ConfigError: the patches do not fit in the look-back, or a number is out of its range.

    Source: Nie et al. 2023 (patches), Kim et al. 2022 (reversible instance norm).
    """

    def __init__(
        self,
        spec: str | Sequence[str],
        *,
        look_back: int,
        horizon: int,
        patch_length: int,
        stride: int,
        embed_dim: int,
        num_layers: int,
        num_heads: int,
        mlp_ratio: int = 2,
        dropout: float = 0.0,
        rotary: Rotary | None = None,
        num_outputs: int | None = None,
        num_historic: int = 0,
        num_future: int = 0,
        num_static: int = 0,
        head_tokens: int | None = None,
        instance_norm: bool = True,
        marks_missing: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"look_back": look_back, "horizon": horizon, "patch_length": patch_length, "stride": stride}
        optional = {"num_outputs": num_outputs, "head_tokens": head_tokens}
        counts = {"num_historic": num_historic, "num_future": num_future, "num_static": num_static}
        _check_sizes({**sizes, "embed_dim": embed_dim}, optional, counts)
        check_bool("instance_norm", instance_norm)
        check_bool("marks_missing", marks_missing)
        self.look_back = look_back
        self.horizon = horizon
        self.patch_length = patch_length
        self.stride = stride
        self.num_outputs = num_outputs
        self.num_historic = num_historic
        self.num_future = num_future
        self.num_static = num_static
        self.instance_norm = instance_norm
        self.num_tokens = (look_back - patch_length) // stride + 1
        self.used_steps = (self.num_tokens - 1) * stride + patch_length
        self.head_tokens = self.num_tokens if head_tokens is None else head_tokens
        if not 1 <= self.head_tokens <= self.num_tokens:
            raise ConfigError(f"head_tokens must be from 1 to the {self.num_tokens} tokens, got {head_tokens}")
        inputs = (2 + num_historic + num_future) * patch_length + num_static + num_future
        outputs = self.head_tokens * horizon * (num_outputs or 1)
        check_memory(
            f"the first and last layers of a Forecaster of embed_dim {embed_dim}", (inputs + outputs) * embed_dim
        )
        self.embed = nn.Linear(patch_length, embed_dim)
        self.trunk = Transformer(
            spec,
            num_layers=num_layers,
            embed_dim=embed_dim,
            num_heads=num_heads,
            context_length=self.num_tokens,
            is_causal=False,
            rotary=rotary,
            mlp_ratio=mlp_ratio,
            dropout=dropout,
        )
        self.head_dropout = nn.Dropout(dropout)
        self.head = nn.Linear(self.head_tokens * embed_dim, horizon * (num_outputs or 1))
        nn.init.normal_(self.embed.weight, std=1 / math.sqrt(patch_length))
        for linear in (self.embed, self.head):
            nn.init.zeros_(linear.bias)
        nn.init.zeros_(self.head.weight)
        self._add_inputs(embed_dim, marks_missing)

    def _add_inputs(self, embed_dim: int, marks_missing: bool) -> None:
        """The layers that read what is there besides the window."""
        self.missing: nn.Linear | None = None
        self.covariates: nn.Linear | None = None
        self.static: nn.Linear | None = None
        self.ahead: _Ahead | None = None
        if marks_missing:
            self.missing = nn.Linear(self.patch_length, embed_dim, bias=False)
            nn.init.zeros_(self.missing.weight)
        if channels := self.num_historic + self.num_future:
            self.covariates = _read_in(channels * self.patch_length, embed_dim)
        if self.num_static:
            self.static = _read_in(self.num_static, embed_dim)
        if self.num_future:
            self.ahead = _Ahead(self.num_future, embed_dim, self.num_outputs or 1)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP roles of the input projections, whose inputs do not grow with the width, and of the
        head.
        """
        inputs = {"embed": self.embed, "missing": self.missing, "covariates": self.covariates, "static": self.static}
        kinds: dict[str, RoleKind] = {name: "embedding" for name, linear in inputs.items() if linear is not None}
        return linear_roles(self, {**kinds, "head": "output"})

    def forward(
        self,
        window: Tensor,
        *,
        historic: Tensor | None = None,
        future: Tensor | None = None,
        static: Tensor | None = None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """Forecasts.

        Args:
            window: (B, look_back) scaled values; or (B, C, look_back) of C series, each forecast by itself,
                without covariates.
            historic: (B, look_back, num_historic), if there are any.
            future: (B, look_back + horizon, num_future), if there are any.
            static: (B, num_static), if there are any.
            observed: (B, look_back) bool: values of other steps are ignored, also by the norm, whose last
                value is the last one observed, and replaces theirs. Default ``None``: all are observed.

        Returns:
            (B, horizon), or (B, horizon, num_outputs) if that was given; with C after B for C series.

        Raises:
            ShapeError: a tensor is missing, has another shape, or belongs to covariates that the model does
                not have.
        """
        check_tensor("window", window)
        if window.dim() == 3 and historic is None and future is None and static is None and observed is None:
            return self(window.flatten(0, 1)).unflatten(0, window.shape[:2])
        batch = window.shape[0] if window.dim() else 0
        steps = (batch, self.look_back)
        _check("window", window, steps)
        _check("historic", historic, (*steps, self.num_historic))
        _check("future", future, (batch, self.look_back + self.horizon, self.num_future))
        _check("static", static, (batch, self.num_static))
        if observed is not None:
            _check("observed", observed, steps)
            if observed.dtype != torch.bool:
                raise ShapeError(f"observed must be of dtype torch.bool, got {observed.dtype}")
        for name, states in (("window", window), ("historic", historic), ("future", future), ("static", static)):
            if states is not None:
                check_like(name, states, self.embed.weight)
        normed, last, spread = self._normed(window, observed)
        tokens = self.embed(self._patches(normed))
        if self.missing is not None and observed is not None:
            tokens = tokens + self.missing(self._patches(1.0 - observed.to(tokens.dtype)))
        if self.covariates is not None:
            past = [x for x in (historic, None if future is None else future[:, : self.look_back]) if x is not None]
            joined = torch.cat(past, dim=-1)
            if observed is not None:
                joined = torch.where(observed[..., None], joined, 0.0)
            tokens = tokens + self.covariates(self._patches(joined).flatten(2))
        if self.static is not None:
            tokens = tokens + self.static(static)[:, None]
        features = self.trunk(tokens)
        out: Tensor = self.head(self.head_dropout(features[:, -self.head_tokens :].flatten(1)))
        if self.ahead is not None and future is not None:
            out = out + self.ahead(future[:, self.look_back :], features.mean(dim=1)).flatten(1)
        out = out * spread + last
        return out if self.num_outputs is None else out.unflatten(1, (self.horizon, self.num_outputs))

    def _normed(self, window: Tensor, observed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The window as the network sees it, and what puts a forecast back: (B, look_back), (B, 1), (B,
        1).
        """
        if observed is None:
            if not self.instance_norm:
                return window, window.new_zeros(1, 1), window.new_ones(1, 1)
            last = window[:, -1:]
            spread = torch.sqrt(window.var(dim=1, keepdim=True, unbiased=False) + _EPS)
            return (window - last) / spread, last, spread
        # The values of steps that were not observed may be anything, NaN too: a product with zero would keep
        # it.
        window = torch.where(observed, window, 0.0)
        if not self.instance_norm:
            return window, window.new_zeros(1, 1), window.new_ones(1, 1)
        count = observed.sum(dim=1, keepdim=True).clamp(min=1)
        mean = window.sum(dim=1, keepdim=True) / count
        centred = torch.where(observed, window - mean, 0.0)
        spread = torch.sqrt(centred.square().sum(dim=1, keepdim=True) / count + _EPS)
        steps = torch.arange(1, self.look_back + 1, device=window.device)
        newest = (steps * observed).argmax(dim=1, keepdim=True)
        last = window.gather(1, newest)
        return torch.where(observed, (window - last) / spread, 0.0), last, spread

    def _patches(self, steps: Tensor) -> Tensor:
        """(B, look_back) to (B, tokens, patch_length), and (B, look_back, C) to (B, tokens, C,
        patch_length).
        """
        return steps[:, -self.used_steps :].unfold(1, self.patch_length, self.stride)

    def flops_per_example(self) -> int:
        """Forward FLOPs of one window."""
        per_token = (self.embed, self.missing, self.covariates)
        flops = self.trunk.flops(self.num_tokens) + _flops(self.head)
        flops += self.num_tokens * sum(_flops(linear) for linear in per_token if linear is not None)
        if self.static is not None:
            flops += _flops(self.static)
        return flops if self.ahead is None else flops + self.ahead.flops(self.horizon)


class _Ahead(nn.Module):
    """What the future covariates of a step add to its forecast: W_o gelu(W_f f_j + W_m m), zero at first."""

    def __init__(self, num_future: int, embed_dim: int, num_outputs: int) -> None:
        super().__init__()
        self.step = nn.Linear(num_future, embed_dim)
        self.context = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out = nn.Linear(embed_dim, num_outputs, bias=False)
        nn.init.normal_(self.step.weight, std=1 / math.sqrt(num_future))
        nn.init.normal_(self.context.weight, std=1 / math.sqrt(embed_dim))
        nn.init.zeros_(self.step.bias)
        nn.init.zeros_(self.out.weight)

    def parameter_roles(self) -> dict[str, Role]:
        return linear_roles(self, {"step": "embedding", "context": "hidden", "out": "output"})

    def forward(self, future: Tensor, context: Tensor) -> Tensor:
        """(B, horizon, num_future) and (B, E) to (B, horizon, num_outputs)."""
        hidden = self.step(future) + self.context(context)[:, None]
        out: Tensor = self.out(F.gelu(hidden))
        return out

    def flops(self, horizon: int) -> int:
        return horizon * (_flops(self.step) + _flops(self.out)) + _flops(self.context)


def _check_sizes(sizes: dict[str, int], optional: dict[str, int | None], counts: dict[str, int]) -> None:
    """Raises ``ConfigError`` unless sizes are positive, counts are not negative, and patches fit."""
    for name, size in {**sizes, **optional}.items():
        if size is not None or name in sizes:
            check_size(name, size)
    for name, count in counts.items():
        check_int(name, count, minimum=0, maximum=MAX_SIZE)
    if sizes["patch_length"] > sizes["look_back"]:
        raise ConfigError(
            f"patches must fit in the look-back: got patch_length {sizes['patch_length']}, stride {sizes['stride']}, "
            f"look_back {sizes['look_back']}"
        )


def _read_in(num_inputs: int, embed_dim: int) -> nn.Linear:
    """A linear layer without a bias whose outputs start at the size of its inputs."""
    linear = nn.Linear(num_inputs, embed_dim, bias=False)
    nn.init.normal_(linear.weight, std=1 / math.sqrt(num_inputs))
    return linear


def _flops(linear: nn.Linear) -> int:
    """Forward FLOPs for one input."""
    return linear_flops(linear, linear.in_features, linear.out_features)


def _check(name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> None:
    """A tensor of that shape, or ``None`` where the shape has no covariates."""
    if tensor is not None:
        check_tensor(name, tensor)
    if tensor is None:
        if shape[-1]:
            raise ShapeError(f"{name} must have shape {shape}, and was not given")
    elif tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
