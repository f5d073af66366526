"""Numbers in 8 or 4 bits: codes, with a scale and a zero for each group of them."""

from __future__ import annotations

import torch
from torch import Tensor


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of scales and zeros, for numbers of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float16


def quantized(x: Tensor, bits: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of numbers that are in groups along an axis.

    Scale and zero are rounded before codes are chosen, outwards: x lies between zero and zero + scale (2^bits
    - 1), and is read with an error of at most scale / 2, where 16 bits hold them.

    Returns:
        Codes of the shape of x, uint8; scale and zero, of that shape with 1 in place of the axis.
    """
    dtype, wide = scale_dtype(x.dtype), torch.promote_types(x.dtype, torch.float32)
    x, limits = x.to(wide), torch.finfo(dtype)
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    zero = (low - low.abs() * limits.eps - limits.tiny).clamp(limits.min, limits.max).to(dtype)
    most = 2**bits - 1
    step = (high - zero.to(wide)).clamp(min=0) / most
    scale = (step * (1 + 2 * limits.eps) + limits.tiny).clamp(max=limits.max).to(dtype)
    codes = ((x - zero.to(wide)) / scale.to(wide)).round_().clamp_(0, most)
    return codes.to(torch.uint8), scale, zero


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., n) as bytes: of 4 bits the first half of n in the low ones, the other half in the high
    ones.
    """
    if bits == 8:
        return codes
    low, high = codes.chunk(2, dim=-1)
    return low | (high << 4)


def unpacked(codes: Tensor, bits: int) -> Tensor:
    """What ``packed`` was made of."""
    return codes if bits == 8 else torch.cat([codes & 15, codes >> 4], dim=-1)
