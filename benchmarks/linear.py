"""Benchmark "linear": ``StructuredLinear`` against ``torch.nn.Linear``, square, without bias.

A forward product costs tokens * flops of the matrix; forward and backward cost three of them, since the
gradients of inputs and of weights cost one each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from benchmarks.registry import Case, Group, benchmark
from structattn.layers.linear import StructuredLinear
from structattn.matrices.btt import factor_pair

Layer = nn.Linear | StructuredLinear

TOKENS = 1024
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
BASELINE = "nn.Linear"
CHECKED_TOKENS = 8


def _low_rank_and_btt(E: int) -> str:
    """An MLBTC of two terms: low rank E/16, and what ``btt:1`` is."""
    b, c = factor_pair(E)
    return f"mlbtc:1x1x{E // 16}|{b}x{c}x{E}s"


# Label to the text of the structure at width E. Low rank, MLR and MLBTC get ranks that grow with E, as full
# rank needs.
STRUCTURES: dict[str, Callable[[int], str]] = {
    "dense": lambda E: "dense",
    "btt:1": lambda E: "btt:1",
    "btt:2": lambda E: "btt:2",
    "monarch": lambda E: "monarch",
    "lowrank:E/8": lambda E: f"lowrank:{E // 8}",
    "mlr:E/16|E/32|E/64|E/64": lambda E: f"mlr:{E // 16}|{E // 32}|{E // 64}|{E // 64}",
    "kronecker": lambda E: "kronecker",
    "butterfly": lambda E: "butterfly",
    "kaleidoscope": lambda E: "kaleidoscope",
    "mlbtc (lowrank:E/16 + btt:1)": _low_rank_and_btt,
}


@dataclass(frozen=True)
class LinearWork:
    """One product of a layer with fixed random inputs; with ``backward`` also the gradients of inputs and
    weights.

    Attributes:
        layer: the layer.
        dense: its matrix, (E, E) float64, written out.
        x: inputs, (tokens, E).
        cotangent: the gradient of the outputs, (tokens, E), or ``None`` for the forward product alone.
    """

    layer: Layer
    dense: Callable[[], Tensor]
    x: Tensor
    cotangent: Tensor | None

    def __call__(self) -> Tensor:
        """The output, (tokens, E); gradients are left in ``x.grad`` and in the parameters."""
        if self.cotangent is None:
            with torch.no_grad():
                return cast(Tensor, self.layer(self.x))
        # Without this the sums of gradients would be timed too.
        self.x.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        out: Tensor = self.layer(self.x)
        out.backward(self.cotangent)
        return out.detach()

    def check(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A few tokens of the output, and of the gradient of the inputs; raises if a weight has no
        gradient.
        """
        out = self()
        picked = torch.linspace(0, len(self.x) - 1, CHECKED_TOKENS, device=out.device).long()
        matrix = self.dense()
        yield out[picked], self.x.detach()[picked].double() @ matrix.T
        if self.cotangent is not None:
            missing = [name for name, parameter in self.layer.named_parameters() if parameter.grad is None]
            if self.x.grad is None or missing:
                raise ValueError(f"backward left no gradient in {missing or 'the inputs'}")
            yield self.x.grad[picked], self.cotangent[picked].double() @ matrix


@torch.no_grad()
def dense_matrix(layer: Layer) -> Tensor:
    """The matrix of a layer, (E, E) float64. Structures write it by TRANSPOSED products, which share little
    with what is timed.
    """
    if not isinstance(layer, StructuredLinear):
        return layer.weight.double()
    matrix = copy.deepcopy(layer.matrix).double()
    eye = torch.eye(matrix.num_rows, dtype=torch.float64, device=next(matrix.parameters()).device)
    return matrix.rmatmul(eye)


def linear_work(layer: Layer, E: int, tokens: int, *, backward: bool) -> LinearWork:
    """The work of a layer on fresh normal inputs of its own dtype and device."""
    weight = next(layer.parameters())
    x = torch.randn(tokens, E, dtype=weight.dtype, device=weight.device, requires_grad=backward)
    cotangent = torch.randn(tokens, E, dtype=weight.dtype, device=weight.device) if backward else None
    return LinearWork(layer, lambda: dense_matrix(layer), x, cotangent)


def linear_groups(
    device: torch.device, dtype: torch.dtype, *, widths: Iterable[int] = WIDTHS, tokens: int = TOKENS
) -> Iterator[Group]:
    """One group per width and mode, the smallest width first."""
    for E in widths:
        for mode, backward in (("forward", False), ("forward+backward", True)):
            cases = [_case(E, tokens, backward, BASELINE, device, dtype)]
            cases += [_case(E, tokens, backward, label, device, dtype) for label in STRUCTURES]
            yield Group(mode=mode, cases=tuple(cases))


def _case(E: int, tokens: int, backward: bool, label: str, device: torch.device, dtype: torch.dtype) -> Case:
    def layer(device: torch.device | str) -> Layer:
        if label == BASELINE:
            return nn.Linear(E, E, bias=False, device=device, dtype=dtype)
        return StructuredLinear(E, E, STRUCTURES[label](E), bias=False, device=device, dtype=dtype)

    def build() -> LinearWork:
        return linear_work(layer(device), E, tokens, backward=backward)

    with torch.device("meta"):  # sizes alone: nothing is drawn
        shape = layer("meta")
    flops = tokens * (shape.matrix.flops if isinstance(shape, StructuredLinear) else 2 * E * E)
    vectors, weights = tokens * E, sum(parameter.numel() for parameter in shape.parameters())
    # Forward: x, W, y. Backward: the cotangent, x and W again, and their gradients; x and W are read once for
    # both.
    numbers = 4 * vectors + 2 * weights if backward else 2 * vectors + weights
    return Case(
        benchmark="linear",
        label=label,
        sizes={"E": E, "tokens": tokens},
        build=build,
        flops=3 * flops if backward else flops,
        bytes=numbers * dtype.itemsize,
        is_baseline=label == BASELINE,
    )


@benchmark(
    "linear",
    "Products of structured linear layers, E x E without bias.",
    baseline=BASELINE,
    axis="E",
    quick={"cpu": (256, 1024), "cuda": (1024, 4096)},
)
def linear(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """1,024 tokens, widths 64 to 4,096."""
    return linear_groups(device, dtype)
