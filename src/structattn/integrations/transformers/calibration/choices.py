"""The choices of ranks and blocks that layers have, what each costs and what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

from structattn.cache.levels import softmaxes_of, value_levels
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.basis import key_losses, value_losses
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layers.attention_spec import AttentionSpec
from structattn.layout.levels import LevelLayout

_MOST_BLOCKS = 4  # levels but the first: each one more makes a step of decoding slower
_PRICES = 64  # of a number in the cache, at each of which the best ranks are a choice


@dataclass(frozen=True)
class Choices:
    """What a group of layers may have; all of them get the same.

    Attributes:
        specs: one for each choice, as (block sizes, key ranks, value ranks), level 1 first; () is plain
            attention, the last choice.
        sizes: numbers that the caches hold, (choices,) float64.
        losses: expected change of the predictions, (choices,) float64.
    """

    layers: tuple[LayerCalibration, ...]
    specs: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: Tensor
    losses: Tensor

    def spec(self, number: int) -> AttentionSpec:
        """A choice as a spec."""
        if not self.specs[number]:
            return AttentionSpec()
        blocks, ranks, value_ranks = self.specs[number]
        return AttentionSpec(layout=LevelLayout(ranks, blocks, "standard", value_ranks or None))


def choices(calibration: Calibration, layers: Sequence[LayerCalibration], length: int) -> Choices:
    """The choices of layers that get one spec.

    For each set of blocks, and each price of a number in the cache, the ranks that cost least: price times
    numbers, plus loss. What a level loses is the loss outside its blocks of the dimensions that the levels
    before it do not have, less their loss outside the larger blocks of the level before, which is counted
    there.

    Args:
        layers: those that score the keys of others have no cache.
        length: T.

    Raises:
        ConfigError: the heads have several sizes.
    """
    shape = layers[0].shape
    if any(_sizes(layer) != _sizes(layers[0]) for layer in layers):
        raise ConfigError(
            "uniform ranks need layers with heads of one size: this model has several, give ranks='per_layer'"
        )
    head, value, step = shape.head_dim, shape.value_dim, 2 if shape.rotation else 1

    def width(size: int) -> int:
        """The tokens that a level of blocks of this size keeps, over all heads."""
        return sum(_tokens(size, length, layer) for layer in layers if layer.shape.keys_of is None)

    # Blocks beyond which no query was measured would seem to lose nothing.
    calibrated = [
        n
        for n, size in enumerate(calibration.block_sizes)
        if size < length and any(float(key_losses(layer, n)[0]) > 0 for layer in layers)
    ]
    units = [layer.sensitivity / layer.moments.output.clamp(min=1e-300) for layer in layers]
    zero = torch.zeros((), dtype=torch.float64)
    keys = {
        n: sum((key_losses(layer, n) * unit for layer, unit in zip(layers, units, strict=True)), zero)
        for n in calibrated
    }
    values = {
        n: sum((value_losses(layer, n) * unit for layer, unit in zip(layers, units, strict=True)), zero)
        for n in calibrated
    }
    has_values = all(layer.has_value_basis for layer in layers)
    specs: list[tuple[tuple[int, ...], ...]] = []
    sizes, losses = [], []
    sets = [some for count in range(1, _MOST_BLOCKS + 1) for some in combinations(calibrated, count)]
    for some in sets:
        blocks = [calibration.block_sizes[n] for n in reversed(some)]
        if any(a % b for a, b in pairwise(blocks)):
            continue
        blocks = [-(-length // blocks[0]) * blocks[0], *blocks]
        widths = [width(size) for size in blocks]
        prices = _prices(keys, values, widths)
        of_keys = _best(keys, some, widths, head, step, prices)
        whole = [
            torch.full((len(prices), 1), value),
            torch.full((len(prices),), float(value * widths[0])),
            zero.expand(len(prices)),
        ]
        for of_values in ([_best(values, some, widths, value, 1, prices)] if has_values else []) + [whole]:
            if of_keys is None or of_values is None:
                continue
            for ranks, value_ranks in zip(of_keys[0].tolist(), of_values[0].tolist(), strict=True):
                specs.append((tuple(blocks), tuple(ranks), tuple(value_ranks) if len(value_ranks) > 1 else ()))
            sizes.append(of_keys[1] + of_values[1])
            losses.append(of_keys[2] + of_values[2])
    return Choices(
        layers=tuple(layers),
        specs=(*specs, ()),
        sizes=torch.cat([*sizes, torch.tensor([(head + value) * width(length)])]).double(),
        losses=torch.cat([*losses, zero[None]]),
    )


def _sizes(layer: LayerCalibration) -> tuple[object, ...]:
    return layer.shape.head_dim, layer.shape.value_dim, layer.shape.rotation is None


def _tokens(size: int, length: int, layer: LayerCalibration) -> int:
    """The most numbers of one dimension, over all heads, that a cache of a layer keeps for a level of blocks
    of a size.
    """
    layout = LevelLayout((1, 1), (-(-length // size) * size, size), value_ranks=(1, 1))
    levels = value_levels(softmaxes_of(layout, layer.shape.window, 2, layer.chunk_size), layout, 2)
    return layer.shape.num_kv_heads * levels[1].most_slots(length)


def _prices(keys: dict[int, Tensor], values: dict[int, Tensor], widths: Sequence[int]) -> Tensor:
    """From one at which nothing is kept to one at which all is."""
    most = max(float(x.max()) for x in (*keys.values(), *values.values()))
    return max(most, 1e-300) / widths[-1] * torch.logspace(1, -9, _PRICES, dtype=torch.float64)


def _best(
    losses: dict[int, Tensor], some: Sequence[int], widths: Sequence[int], dims: int, step: int, prices: Tensor
) -> list[Tensor] | None:
    """The ranks of each level at each price, by dynamic programming from level 1 on; ``None`` if there are
    more levels than ranks.

    Args:
        losses: outside blocks, if 0 ... D dimensions are kept, for each block number.
        some: block numbers, ascending.
        widths: numbers of a dimension in the cache, level 1 first.
        dims: D.
        step: ranks are multiples of it.

    Returns:
        Ranks, (prices, levels); the sizes and the losses of each, (prices,).
    """
    counts = torch.arange(step, dims, step)  # kept by a level and those before it
    if len(counts) < len(some):
        return None
    outside, previous = torch.zeros(len(counts), dtype=torch.float64), None
    froms: list[Tensor] = []
    level_losses: list[Tensor] = []
    for level, block in enumerate(reversed(some)):
        here = losses[block][counts]
        level_losses.append((here - outside).clamp(min=0))
        outside = here
        total = level_losses[-1] + prices[:, None] * counts * (widths[level] - widths[level + 1])
        if previous is not None:
            least, place = previous[:, :-1].cummin(dim=1)
            total = total + torch.cat([torch.full_like(total[:, :1], torch.inf), least], dim=1)
            froms.append(torch.cat([place[:, :1], place], dim=1))
        previous = total
    assert previous is not None
    at = [previous.argmin(dim=1)]
    for places in reversed(froms):
        at.insert(0, places.gather(1, at[0][:, None])[:, 0])
    kept = torch.stack([counts[place] for place in at], dim=1)
    ranks = torch.diff(kept, dim=1, prepend=torch.zeros_like(kept[:, :1]), append=torch.full_like(kept[:, :1], dims))
    lost = sum(
        (lost_at_level[place] for lost_at_level, place in zip(level_losses, at, strict=True)),
        torch.zeros(len(prices), dtype=torch.float64),
    )
    return [ranks, (ranks * torch.tensor(widths)).sum(dim=1).double(), lost]
