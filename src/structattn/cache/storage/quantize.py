"""Numbers in 8 or 4 bits: codes, with a scale and a zero for each group of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.ops.checks import without_autocast
from structattn.ops.native.library import is_here


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
    is_half, x, limits = x.dtype == torch.float16, x.to(wide), torch.finfo(dtype)
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    zero = (low - low.abs() * limits.eps - limits.tiny).clamp(limits.min, limits.max).to(dtype)
    most = 2**bits - 1
    step = (high - zero.to(wide)).clamp(min=0) / most
    scale = (step * (1 + 2 * limits.eps) + limits.tiny).clamp(max=limits.max).to(dtype)
    if is_half:  # what is read is a float16 number too, and the highest code would be above the largest one
        scale = scale.minimum(((limits.max - zero.to(wide)) / most * (1 - limits.eps)).to(dtype))
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


@dataclass(frozen=True, kw_only=True)
class GroupFormat:
    """How one level's numbers are quantized, in groups of consecutive tokens.

    Attributes:
        dim: numbers per position and head.
        bits: 8 or 4.
        group_size: g, tokens of a group.
        per_token: whether scale and zero belong to a token and ``group_size`` dimensions, as of values; else
            to a dimension and the tokens of a group, as of keys.
    """

    dim: int
    bits: int
    group_size: int
    per_token: bool

    @property
    def parts(self) -> int:
        """Groups of dimensions, of values."""
        return -(-self.dim // self.group_size)

    def tensors(self, dtype: torch.dtype) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
        """Shape and dtype of codes, scale and zero of a group of one head, in a model of a dtype."""
        of_group = (self.parts, self.group_size) if self.per_token else (self.dim, 1)
        of_codes = (self.dim, self.group_size * self.bits // 8)
        return (of_codes, torch.uint8), (of_group, scale_dtype(dtype)), (of_group, scale_dtype(dtype))

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes in bytes, scale and zero of n groups (rows, heads, n, dim, g), with the shapes of ``tensors``
        in place of the last two axes.
        """
        codes, scale, zero = self._quantized(x)
        return packed(codes, self.bits), scale, zero

    def _quantized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.per_token:
            return quantized(x, self.bits, -1)
        missing = self.parts * self.group_size - self.dim
        if missing and self.parts > 1:
            parts = [quantized(part, self.bits, -2) for part in x.split(self.group_size, dim=-2)]
            with without_autocast(x):
                codes, scale, zero = (torch.cat(of_parts, dim=-2) for of_parts in zip(*parts, strict=True))
            return codes, scale, zero
        parted = x.unflatten(-2, (self.parts, -1))
        codes, scale, zero = quantized(parted, self.bits, -2)
        return codes.flatten(-3, -2), scale.squeeze(-2), zero.squeeze(-2)

    def numbers(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> Tensor:
        """What ``quantized`` returned, as it is read: (rows, heads, n, dim, g)."""
        wide = torch.promote_types(dtype, torch.float32)
        numbers = scale.new_empty((*codes.shape[:-1], self.group_size), dtype=wide)
        self.read(codes, scale, zero, numbers)
        return numbers.to(dtype)

    def read(self, codes: Tensor, scale: Tensor, zero: Tensor, numbers: Tensor) -> None:
        """Writes what ``quantized`` returned, as it is read, into ``numbers`` (rows, heads, n, dim, g), of
        float32 or float64.
        """
        if self.bits == 8:
            numbers.copy_(codes)
        else:
            half = self.group_size // 2
            numbers[..., :half].copy_(codes & 15)
            numbers[..., half:].copy_(codes >> 4)
        scale, zero = scale.to(numbers.dtype), zero.to(numbers.dtype)
        parts = numbers.split(self.group_size if self.per_token else self.dim, dim=-2)
        scales, zeros = (x.chunk(len(parts), dim=-2) for x in (scale, zero))
        for part, of_part, least in zip(parts, scales, zeros, strict=True):
            torch.addcmul(least, of_part, part, out=part)

    def from_tokens(self, x: Tensor, starts: Sequence[int], sinks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens as groups, and what is read of them in their place: codes, scale and zero as of
        ``quantized``.

        Sink tokens stay as they are: these are read elsewhere, and their numbers, often large, do not widen
        the range of others.

        Args:
            x: (rows, heads, n g, dim).
            starts: (n,), the first position of each group.
            sinks: how many of the first positions are sink tokens.
        """
        hidden = [min(max(0, sinks - start), self.group_size) for start in starts]
        if is_here(x) and x.dtype != torch.float64 and x.stride(3) == 1:
            codes, scale, zero = torch.ops.structattn_native.quantize(
                x, self.group_size, self.bits, int(self.per_token), hidden
            )
            return codes, scale, zero
        tokens = x.unflatten(2, (len(starts), self.group_size))
        groups = tokens.transpose(3, 4).clone(memory_format=torch.contiguous_format)
        for n, count in enumerate(hidden):
            if count > 0:
                of_group = groups[:, :, n]
                of_group[..., :count] = of_group[..., count : count + 1] if count < self.group_size else 0.0
        stored = self.quantized(groups)
        read = self.numbers(*stored, x.dtype).transpose(3, 4)
        for n, count in enumerate(hidden):
            tokens[:, :, n, count:] = read[:, :, n, count:]
        return stored
