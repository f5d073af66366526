"""What makes the weights of a row of the products of queries and keys, besides the layout: one value, checked
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from structattn.checks import MAX_SCALE, check_number, check_scale, check_tensor
from structattn.errors import ConfigError, ShapeError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreTerms:
    """The terms of a score, as ``structured_attention`` describes them.

    Attributes:
        scale: replaces the scaling of the layout.
        softcap: c, makes a scaled score s to c tanh(s / c).
        sinks: (H,), a logit more in the denominator of each row.
        attn_mask: broadcastable to (B, H, T, S), bool: ``True`` where a query may attend to a key. Floating
            point: an ``attn_bias``.
        attn_bias: broadcastable to (B, H, T, S), added to the scores.
        alibi_slopes: (H,) or (B, H): the bias -m |i - j| of each head.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def check_numbers(self) -> None:
        """Raises ``ConfigError`` unless scale and soft cap are numbers in their ranges."""
        if self.scale is not None:
            check_scale("scale", self.scale)
        if self.softcap is not None:  # scores are divided by it, and multiplied by it, in float32
            check_number("softcap", self.softcap, minimum=1 / MAX_SCALE, maximum=MAX_SCALE)

    def of_call(self, q: Tensor, num_keys: int) -> ScoreTerms:
        """The terms as backends need them: a bool mask, a bias, slopes (1 or B, H) without a gradient, and
        numbers that are floats.

        Args:
            q: the queries (B, H, T, D) that the tensors must fit.
            num_keys: S.

        Raises:
            ShapeError: shapes, dtypes or devices do not fit.
            ConfigError: a floating point mask beside a bias, or slopes that need a gradient.
        """
        if self.scale is None and self.has_scale_only:
            return self
        mask, bias, slopes = self.attn_mask, self.attn_bias, self.alibi_slopes
        if mask is not None:
            bias, mask = _checked_mask(q, num_keys, bias, mask)
        if bias is not None:
            _check_bias(q, num_keys, bias)
        if slopes is not None:
            slopes = _checked_slopes(q, slopes)
        if self.sinks is not None:
            _check_sinks(q, self.sinks)
        scale, softcap = self.scale, self.softcap  # an int may be larger than any that a tensor takes
        return ScoreTerms(
            scale=None if scale is None else float(scale),
            softcap=None if softcap is None else float(softcap),
            sinks=self.sinks,
            attn_mask=mask,
            attn_bias=bias,
            alibi_slopes=slopes,
        )

    def check(self, q: Tensor, num_keys: int) -> None:
        """Raises what ``check_numbers`` and ``of_call`` raise, and ``ConfigError`` for a bias, which caches
        take as a floating point mask.
        """
        if self.attn_bias is not None:
            raise ConfigError("a cache takes no attn_bias: give a floating point attn_mask, which is one")
        self.check_numbers()
        self.of_call(q, num_keys)

    @property
    def has_scale_only(self) -> bool:
        """Whether the weights are the softmax of scaled products."""
        return self.first_of(_BESIDES_SCALE) is None

    def first_of(self, names: tuple[str, ...]) -> str | None:
        """The first of these terms that is given, or ``None``."""
        for name in names:
            if getattr(self, name) is not None:
                return name
        return None

    @property
    def slopes(self) -> Tensor | None:
        """The ALiBi slopes, (1 or B, H), without a gradient."""
        slopes = self.alibi_slopes
        return slopes if slopes is None else slopes.detach()[None] if slopes.dim() == 1 else slopes.detach()

    @property
    def needs_gradient(self) -> bool:
        """Whether a derivative by one of the tensors is asked for."""
        return needs_gradient(self.sinks, self.attn_mask, self.attn_bias)

    def of_queries(self, first: int, end: int, num_queries: int, num_keys: int) -> ScoreTerms:
        """The terms for queries ``first`` ... ``end - 1`` of T, of which the last sees the first of S keys
        only as far as itself.
        """
        if self.attn_mask is None:
            return self
        mask = self.attn_mask[(None,) * (4 - self.attn_mask.dim())].expand(-1, -1, num_queries, num_keys)
        return replace(self, attn_mask=mask[:, :, first:end, : num_keys - num_queries + end])

    def of_rows(self, rows: slice) -> ScoreTerms:
        """The terms for some rows of the batch."""
        if rows == slice(None):
            return self
        mask, slopes = self.attn_mask, self.alibi_slopes
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[rows]
        if slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1:
            slopes = slopes[rows]
        return replace(self, attn_mask=mask, alibi_slopes=slopes)

    def finish(self, scores: Tensor, back: Tensor | None = None) -> None:
        """Makes scaled products the scores, in place: soft cap, ALiBi, mask, and no later tokens.

        Args:
            scores: (B, H, T, N), contiguous.
            back: (N,) or (B, N) int64, how many positions each key is before the last token; larger than any
                where there is none. Default: the keys are the last N.
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if back is not None:
            self._finish_at(scores, back)
            return
        tokens, count = scores.shape[2:]
        if self.slopes is not None:
            keys = torch.arange(count, dtype=scores.dtype, device=scores.device)
            distance = keys[count - tokens :, None] - keys
            scores.addcmul_(self.slopes.to(scores.dtype)[:, :, None, None], distance, value=-1.0)
        if tokens > 1:
            steps = torch.arange(tokens, device=scores.device)
            scores[..., -tokens:].masked_fill_(steps[None, :] > steps[:, None], -torch.inf)
        if self.attn_mask is None:
            return
        mask = self.attn_mask[..., -count:]
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.detach())

    def _finish_at(self, scores: Tensor, back: Tensor) -> None:
        """``finish`` for keys at any positions."""
        steps = torch.arange(scores.shape[2] - 1, -1, -1, device=scores.device)
        distance = (back[..., None, :] - steps[:, None]).view(-1, 1, scores.shape[2], scores.shape[3])
        if self.slopes is not None:
            scores.addcmul_(self.slopes.to(scores.dtype)[:, :, None, None], distance.to(scores.dtype), value=-1.0)
        scores.masked_fill_(distance < 0, -torch.inf)
        if self.attn_mask is None:
            return
        mask = self.attn_mask[(None,) * (4 - self.attn_mask.dim())]
        if mask.shape[3] > 1:
            column = (mask.shape[3] - 1 - back).clamp(0, mask.shape[3] - 1).view(-1, 1, 1, back.shape[-1])
            shape = [max(a, b) for a, b in zip(mask.shape[:3], column.shape[:3], strict=True)]
            mask = mask.expand(*shape, -1).gather(3, column.expand(*shape, -1))
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
        else:
            scores.add_(mask.detach())

    def softmax(self, scores: Tensor, of_queries: Sequence[int]) -> Tensor:
        """The weights of scores (..., N), which may be overwritten; ``of_queries`` is what their other
        dimensions are together, (B, H, T).
        """
        empty = None
        if self.attn_mask is not None:  # a query may see no key, and gives 0
            empty = scores.amax(-1, keepdim=True) == -torch.inf
            scores.masked_fill_(empty, 0.0)
        weights = torch.softmax(scores, dim=-1)
        if self.sinks is not None:
            sinks = self.sinks.detach().to(scores.dtype)[:, None].expand(*of_queries).reshape(*scores.shape[:-1], 1)
            weights.mul_(torch.sigmoid(scores.logsumexp(-1, keepdim=True) - sinks))
        return weights if empty is None else weights.masked_fill_(empty, 0.0)


def all_but(*names: str) -> tuple[str, ...]:
    """The names of the other terms: a backend names those that it computes, and refuses these."""
    return tuple(field.name for field in fields(ScoreTerms) if field.name not in names)


_BESIDES_SCALE = all_but("scale")


def _check_bias(q: Tensor, num_keys: int, attn_bias: Any) -> None:
    """Raises ``ShapeError`` unless the bias can be added to the scores."""
    check_tensor("attn_bias", attn_bias)
    if attn_bias.dtype not in DTYPES:
        raise ShapeError(
            f"attn_bias is added to the scores and must be floating point, got {attn_bias.dtype}; a bool mask is "
            "attn_mask=..."
        )
    _check_per_pair(q, num_keys, "attn_bias", attn_bias)


def _checked_mask(
    q: Tensor, num_keys: int, attn_bias: Tensor | None, attn_mask: Any
) -> tuple[Tensor | None, Tensor | None]:
    """The bias, and the mask where it is bool: a floating point mask is a bias.

    Raises:
        ShapeError: the mask has another dtype, or does not fit the scores.
        ConfigError: a floating point mask beside a bias.
    """
    check_tensor("attn_mask", attn_mask)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in DTYPES:
        raise ShapeError(
            "attn_mask must be bool, True where a pair may attend, or floating point, added to the scores, got "
            f"{attn_mask.dtype}; a mask of 0 and 1 is mask != 0"
        )
    _check_per_pair(q, num_keys, "attn_mask", attn_mask)
    if attn_mask.dtype == torch.bool:
        return attn_bias, attn_mask
    if attn_bias is not None:
        raise ConfigError("a floating point attn_mask is an attn_bias: give their sum as one of the two")
    return attn_mask, None


def _check_per_pair(q: Tensor, num_keys: int, name: str, x: Tensor) -> None:
    if x.device != q.device:
        raise ShapeError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    target = (q.shape[0], q.shape[1], q.shape[2], num_keys)
    shape = tuple(x.shape)
    fits = len(shape) <= 4 and all(a == 1 or a == b for a, b in zip(reversed(shape), reversed(target), strict=False))
    if not fits:
        raise ShapeError(f"{name} of shape {shape} does not broadcast to (B, H, T, S) = {target}")


def _check_sinks(q: Tensor, sinks: Any) -> None:
    """Raises ``ShapeError`` unless there is one logit per query head."""
    check_tensor("sinks", sinks)
    if sinks.dtype not in DTYPES or sinks.dim() != 1 or sinks.shape[0] != q.shape[1]:
        raise ShapeError(
            f"sinks must have one floating-point logit per query head, shape ({q.shape[1]},), got {sinks.dtype} of "
            f"shape {tuple(sinks.shape)}"
        )
    if sinks.device != q.device:
        raise ShapeError(f"sinks must be on the device of q, {q.device}, got {sinks.device}")


def _checked_slopes(q: Tensor, alibi_slopes: Any) -> Tensor:
    """The slopes, (1 or B, H).

    Raises:
        ShapeError: there is not one per query head.
        ConfigError: they need a gradient.
    """
    check_tensor("alibi_slopes", alibi_slopes)
    batch, heads = q.shape[:2]
    if alibi_slopes.dtype not in DTYPES or tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ShapeError(
            f"alibi_slopes must have one floating-point slope per query head, shape ({heads},) or ({batch}, {heads}), "
            f"got {alibi_slopes.dtype} of shape {tuple(alibi_slopes.shape)}"
        )
    if alibi_slopes.device != q.device:
        raise ShapeError(f"alibi_slopes must be on the device of q, {q.device}, got {alibi_slopes.device}")
    if needs_gradient(alibi_slopes):
        raise ConfigError(
            "alibi_slopes get no gradient, and these require one: give alibi_slopes.detach(); a bias that is learned "
            "is attn_bias"
        )
    slopes = alibi_slopes.detach()
    return slopes if slopes.dim() == 2 else slopes[None]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a derivative by one of the tensors is asked for, in reverse or forward mode."""
    forward_ad = torch.autograd.forward_ad
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        return True
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
