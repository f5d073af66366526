"""Moving between token-major and feature-major memory: done badly, it dominates the time of structured
products.

Inside a structure vectors are feature-major, (matrices, size, tokens) with the tokens innermost, so that
every permutation of features moves whole rows and every block product reads and writes unit strides. The two
changes of layout are done by separate functions because autograd would otherwise leave the transposition to a
strided copy inside some kernel, which is several times slower than one plain 2-D transposition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


class _Transpose(torch.autograd.Function):
    """(R, N) to (N, R), written out, in both directions."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.t().contiguous()

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        result: Tensor = _Transpose.apply(gradients[0])  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].t().contiguous()


class _TransposedView(_Transpose):
    """(R, N) to (N, R) as a view, which matrix products read well; the gradient is written out."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return tangents[0].t()


def _is_plain(x: Tensor) -> bool:
    """Whether none of our autograd functions is needed: no gradient is wanted, or a compiler chooses the
    layouts itself.
    """
    return not x.requires_grad or torch.compiler.is_compiling()


def to_feature_major(x: Tensor) -> Tensor:
    """(R, N) row-major to (N, R) as a view."""
    if _is_plain(x):
        return x.t()
    result: Tensor = _TransposedView.apply(x)  # type: ignore[no-untyped-call]
    return result


def to_token_major(x: Tensor) -> Tensor:
    """(N, R) to (R, N) in contiguous memory; no copy where it already is."""
    if x.t().is_contiguous():
        return x.t()
    if _is_plain(x):
        return x.t().contiguous()
    result: Tensor = _Transpose.apply(x)  # type: ignore[no-untyped-call]
    return result


def contiguous_features(x: Tensor) -> Tensor:
    """(P, N, R) with the tokens innermost in memory; no copy where they already are."""
    num, size, tokens = x.shape
    return x.reshape(num * size, tokens).contiguous().view(num, size, tokens)


def block_product(weight: Tensor, x: Tensor) -> Tensor:
    """The block-diagonal product: block k of every matrix times block k of the vectors.

    Args:
        weight: (P, K, C, A).
        x: (1 or P, K, A, R); with a leading 1 every matrix gets the same vectors.

    Returns:
        (P, K, C, R). Cost: 2 P K C A R FLOPs.
    """
    num, num_blocks, height, size = weight.shape
    if x.shape[0] == 1 and num > 1:
        joined = weight.transpose(0, 1).reshape(num_blocks, num * height, size)
        return torch.bmm(joined, x[0]).view(num_blocks, num, height, x.shape[-1]).transpose(0, 1)
    return torch.matmul(weight, x)


def exchanged_block_product(weight: Tensor, x: Tensor, num_groups: int) -> Tensor:
    """``block_product`` with the transposed weight, then the stride permutation that exchanges blocks and
    groups.

    The outputs of each block are ``num_groups`` groups of s: element (k, j, r) of the product goes to (j, k,
    r). The permutation costs nothing: the weights are permuted instead, so that the result is a view with
    mergeable strides.

    Args:
        weight: (P, K, A, J s), J = ``num_groups``.
        x: (1 or P, K, A, R).

    Returns:
        (P, J, K s, R).
    """
    num, num_blocks, size, width = weight.shape
    rank = width // num_groups
    tokens = x.shape[-1]
    parts = weight.reshape(num, num_blocks, size, num_groups, rank)
    if x.shape[0] == 1:
        joined = parts.permute(1, 4, 0, 3, 2).reshape(num_blocks, rank * num * num_groups, size)
        out = torch.bmm(joined, x[0]).view(num_blocks, rank, num, num_groups, tokens).permute(2, 3, 0, 1, 4)
    else:
        ordered = parts.permute(0, 1, 4, 3, 2).reshape(num, num_blocks, rank * num_groups, size)
        out = torch.matmul(ordered, x).view(num, num_blocks, rank, num_groups, tokens).permute(0, 3, 1, 2, 4)
    return out.reshape(num, num_groups, num_blocks * rank, tokens)
