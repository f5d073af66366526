"""Benchmark "step": a whole training step of the small in-context regression models, ours against plain
PyTorch.

A step is forward, squared error, backward, clipping of the gradients to norm 1 and fused AdamW, on a batch of
64 prompts. The baseline is what a user would write: the same trunk with ``F.scaled_dot_product_attention``
heads; the other plain variant has ``nn.MultiheadAttention``. Each is timed eagerly and compiled.

After an untimed step weights and optimizer are set back, so that every step is the same one. What is checked
is the loss and all gradients, against the same model in float64 with ``backend="reference"``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.registry import Case, CaseUnavailableError, Check, Group, benchmark
from structattn.layers.attention import Attention
from structattn.models.icl_regressor import ICLRegressor
from structattn.models.language_model import LanguageModel
from structattn.ops import Backend
from structattn.testing.tolerances import WHOLE_MODEL

BASELINE = "SDPA heads"
MULTIHEAD = "nn.MultiheadAttention"
BATCH = 64
HEADS = 8
SEED = 0


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes of a model and its prompts.

    Attributes:
        dim: of the inputs of a prompt.
        num_points: pairs in a prompt; it has twice as many tokens.
        ranks: of bilinear MLR, which have to fit E / H.
    """

    embed_dim: int
    num_layers: int
    dim: int
    num_points: int
    ranks: str


SHAPES = (
    StepShape(embed_dim=64, num_layers=6, dim=16, num_points=32, ranks="4|2|2"),
    StepShape(embed_dim=16, num_layers=4, dim=6, num_points=12, ranks="1|1"),
)


def specs(shape: StepShape) -> dict[str, str]:
    """Our variants by label, which is their text."""
    texts = ("standard", "standard:1", "bilinear-btt:1", "bilinear-btt:2", f"bilinear-mlr:{shape.ranks}")
    return {text.partition("mlr:")[0] + "mlr" if "mlr" in text else text: text for text in texts}


class SDPAHeads(nn.Module):
    """Attention as a user writes it: one projection for q, k and v, norms of q and k or none,
    ``scaled_dot_product_attention``.

    Args:
        embed_dim, num_heads, qk_norm: as of ``Attention``.
    """

    def __init__(self, embed_dim: int, num_heads: int, *, qk_norm: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.LayerNorm(embed_dim // num_heads, bias=False) if qk_norm else nn.Identity() for _ in range(2)
        )
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)

    def forward(self, x: Tensor, **_: object) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        projected: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        return projected


class MultiheadHeads(nn.Module):
    """``nn.MultiheadAttention``, causal. It has no norms of q and k.

    Args:
        embed_dim: E.
        length: T.
    """

    def __init__(self, embed_dim: int, length: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(embed_dim, HEADS, bias=False, batch_first=True)
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, x: Tensor, **_: object) -> Tensor:
        """(B, T, E) to (B, T, E)."""
        out: Tensor = self.attention(x, x, x, attn_mask=self.mask, is_causal=True, need_weights=False)[0]
        return out


def build_model(label: str, shape: StepShape) -> ICLRegressor:
    """The model of a variant, in float32 on the CPU, random where weights start at zero: zeros would hide
    mistakes.
    """
    torch.manual_seed(SEED)
    model = ICLRegressor(
        specs(shape).get(label, "standard"),
        dim=shape.dim,
        num_points=shape.num_points,
        embed_dim=shape.embed_dim,
        num_layers=shape.num_layers,
        num_heads=HEADS,
    )
    for block in model.trunk.layers:
        if label == BASELINE:
            block.attention = cast(Attention, SDPAHeads(shape.embed_dim, HEADS, qk_norm=True))
        elif label == MULTIHEAD:
            block.attention = cast(Attention, MultiheadHeads(shape.embed_dim, 2 * shape.num_points))
        else:
            nn.init.normal_(block.attention.out_proj.weight, std=1 / math.sqrt(shape.embed_dim))
    nn.init.normal_(model.read_out.weight, std=1 / math.sqrt(shape.embed_dim))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = (
                0.1  # a norm of two numbers, at E / H = 2, is a step otherwise, and gradients in float32 are noise
            )
    return model


def prompts(shape: StepShape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs (B, N, d) and targets (B, N) of linear functions."""
    generator = torch.Generator().manual_seed(SEED)
    xs = torch.randn(BATCH, shape.num_points, shape.dim, generator=generator)
    weights = torch.randn(BATCH, shape.dim, 1, generator=generator) / math.sqrt(shape.dim)
    return xs.to(device, dtype), (xs @ weights)[..., 0].to(device, dtype)


def loss(model: nn.Module, xs: Tensor, ys: Tensor) -> Tensor:
    """The mean squared error of the predictions."""
    return F.mse_loss(model(xs, ys), ys)


class StepWork:
    """A training step of a model.

    Args:
        model: the model, on its device and in its dtype; its blocks are ``model.trunk.layers``.
        loss: of the model and a batch; it is checked in float64.
        batch: what it takes besides the model.
        is_compiled: whether forward and loss, and so their gradients, are compiled.
        exact: what attends in the check, in float64.

    Raises:
        CaseUnavailableError: it cannot be compiled here.
    """

    tolerances: ClassVar[dict[torch.dtype, float]] = WHOLE_MODEL

    def __init__(
        self,
        model: ICLRegressor | LanguageModel,
        loss: Callable[..., Tensor],
        batch: tuple[Tensor, Tensor],
        *,
        is_compiled: bool,
        exact: Backend = "reference",
    ) -> None:
        self.model, self.batch, self.is_compiled, self.loss_of, self.exact = model, batch, is_compiled, loss, exact
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.code = "compiled" if is_compiled else "eager"
        self.loss: Callable[[Tensor, Tensor], Tensor] = partial(loss, model)
        if is_compiled:
            # What is compiled is kept by code object: with one of its own, a variant is no new version of
            # those before it.
            own = FunctionType(loss.__code__.replace(), loss.__globals__)
            self.loss = partial(torch.compile(own, fullgraph=True, dynamic=False), model)
            try:
                self.gradients()
            except Exception as error:  # whatever a missing compiler or an unknown operation raises
                raise CaseUnavailableError(f"torch.compile: {type(error).__name__}: {error}".splitlines()[0]) from error
        self()  # the optimizer makes its state
        self._start = copy.deepcopy((model.state_dict(), self.optimizer.state_dict()))

    def gradients(self) -> Tensor:
        """The loss; the gradients are left in the parameters."""
        self.optimizer.zero_grad()
        loss = self.loss(*self.batch)
        loss.backward()
        return loss.detach()

    def __call__(self) -> Tensor:
        """A step; its loss."""
        loss = self.gradients()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss

    def prepare(self) -> None:
        """Weights and optimizer back to where they were."""
        self.model.load_state_dict(self._start[0])
        self.optimizer.load_state_dict(self._start[1])

    def check(self) -> Iterator[Check]:
        """The loss, and the gradients of all parameters as one vector."""
        self.prepare()
        exact = copy.deepcopy(self.model).double()
        for block in exact.trunk.layers:
            if isinstance(block.attention, Attention):
                block.attention.backend = self.exact
        expected = self.loss_of(exact, *(x.double() if x.is_floating_point() else x for x in self.batch))
        expected.backward()
        yield self.gradients(), expected.detach()
        yield _gradient(self.model), _gradient(exact), True


def _gradient(model: nn.Module) -> Tensor:
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    if missing:
        raise ValueError(f"backward left no gradient in {', '.join(missing)}")
    return torch.cat([cast(Tensor, p.grad).flatten() for p in model.parameters()])


def step_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shapes: Iterable[StepShape] = SHAPES,
    modes: Iterable[str] = ("eager", "compiled"),
) -> Iterator[Group]:
    """One group per size and mode."""
    for shape in shapes:
        for mode in modes:
            labels = [BASELINE, MULTIHEAD, *specs(shape)]
            yield Group(mode=mode, cases=tuple(_case(label, shape, mode, device, dtype) for label in labels))


def _case(label: str, shape: StepShape, mode: str, device: torch.device, dtype: torch.dtype) -> Case:
    def build() -> StepWork:
        model = build_model(label, shape).to(device, dtype)
        return StepWork(model, loss, prompts(shape, device, dtype), is_compiled=mode == "compiled")

    with torch.device("meta"):
        counted = build_model(label if label in specs(shape) else "standard", shape)
    weights = sum(p.numel() for p in counted.parameters())
    numbers = BATCH * shape.num_points * (shape.dim + 1)
    return Case(
        benchmark="step",
        label=label,
        sizes={"E": shape.embed_dim, "T": 2 * shape.num_points, "L": shape.num_layers, "H": HEADS, "B": BATCH},
        build=build,
        flops=3 * BATCH * counted.flops_per_example(),
        # Weights and the two moments are read and written, gradients written and read.
        bytes=dtype.itemsize * (numbers + 8 * weights),
        is_baseline=label == BASELINE,
    )


@benchmark(
    "step",
    "A training step of small in-context regression models: forward, loss, backward, clipping, AdamW.",
    baseline=BASELINE,
    axis="E",
    quick={"cpu": (16,), "cuda": (16,)},
)
def step(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """Batch 64, 8 heads; E = 64 with 6 layers and 64 tokens, E = 16 with 4 layers and 24 tokens; eager and
    compiled.
    """
    return step_groups(device, dtype)
