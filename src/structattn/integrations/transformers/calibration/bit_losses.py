"""What the predictions of a model lose where far keys or far values of a key head have 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from structattn.cache.storage.quantize import quantized
from structattn.integrations.transformers.calibration.output_gradients import AttentionOutput
from structattn.integrations.transformers.calibration.query_terms import weights_of_queries

GROUP_SIZES = (64, 32, 16)  # of tokens, or of dimensions of values, that share a scale
_BITS = 4
_ROWS = 64  # neighboring queries that see the same rounded keys: some tokens more than the residual are exact
_MEASURED = 512  # queries of a text


@dataclass(frozen=True, kw_only=True, eq=False)
class BitLosses:
    """The expected change of the predictions with far numbers of 4 bits, in nats per token, to be added over
    heads. It grows with the square of a step.

    Attributes:
        group_sizes: descending.
        text: (group sizes, 2, heads) float64; where keys have 4 bits, and where values have, on the user's
            text.
        copies: likewise; on tokens that are a copy of what the context has.
    """

    group_sizes: tuple[int, ...]
    text: Tensor
    copies: Tensor

    def of(self, group_size: int) -> tuple[Tensor, Tensor]:
        """``text`` and ``copies`` of groups of one size, (2, heads); of one that was not measured those of
        the largest.
        """
        place = self.group_sizes.index(group_size) if group_size in self.group_sizes else 0
        return self.text[place], self.copies[place]


def _rounded(x: Tensor, axis: int, group: int) -> Tensor:
    """Numbers (..., T, d) in groups along an axis, as a cache stores them; a last group may be shorter."""
    parts = []
    for part in x.detach().split(group, dim=axis):
        codes, scale, zero = quantized(part, _BITS, axis)
        parts.append(zero.to(x) + scale.to(x) * codes.to(x))
    return torch.cat(parts, dim=axis)


@torch.no_grad()
def rounding_losses(output: AttentionOutput, slope: Tensor) -> Tensor:
    """What the G key heads of a layer lose, summed over the queries of the second half: (G, group sizes, 2),
    of keys and of values.

    Cost: the weights of 512 queries, or up to twice as many, for each group size.
    """
    call, (key, value) = output.call, (output.call.key, output.call.value)
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    heads, length = key.shape[1], key.shape[2]
    values = value[0].repeat_interleave(heads // value.shape[1], dim=0).float()
    rough_keys = [_rounded(key, -2, group) for group in GROUP_SIZES]
    of_values = [_rounded(values, -1, group) - values for group in GROUP_SIZES]
    step = max(1, (length - length // 2) // _MEASURED)
    total = torch.zeros((heads, len(GROUP_SIZES), 2), dtype=torch.float64, device=key.device)
    for start in range(length // 2, length, step * _ROWS):
        stop = min(start + _ROWS, length)
        weights = weights_of_queries(call, start, stop).unflatten(0, (heads, -1))
        slopes = slope[start:stop].float().transpose(0, 1).unflatten(0, (heads, -1))
        worth = slopes @ values[:, None, :stop].mT
        for number, group in enumerate(GROUP_SIZES):
            end = max(0, start - min(2 * group, length // 8)) // group * group
            mixed = torch.cat([rough_keys[number][:, :, :end], key[:, :, end:]], dim=2)
            others = weights_of_queries(call._replace(key=mixed), start, stop).unflatten(0, (heads, -1))
            of_keys = ((others - weights) * worth).sum(-1)
            far = slopes @ of_values[number][:, None, :end].mT
            of_both = torch.stack([of_keys, (weights[..., :end] * far).sum(-1)], dim=-1)
            # Of all query heads together.
            total[:, number] += of_both.sum(1).double().square().sum(1) / 2
    return step * total
