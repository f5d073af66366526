"""``allocate``: the ranks of every layer under one budget of cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from structattn.cache.levels import softmaxes_of, value_levels
from structattn.checks import MAX_LENGTH, check_choice, check_number, check_size, check_type
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.basis import key_basis, ranked_pairs, value_basis
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layers.attention_spec import AttentionSpec
from structattn.layout.levels import LevelLayout

Ranks = Literal["per_layer", "uniform"]


@dataclass(frozen=True)
class _Options:
    """What a group of layers may have: layers that score the same keys are one group and have one spec.

    Attributes:
        layers: the first one has the keys.
        specs: (block number, key rank, value rank) of each option; the last option is plain attention, block number -1.
        sizes: numbers that the cache holds, float64.
        losses: expected change of the predictions, summed over the layers.
    """

    layers: tuple[LayerCalibration, ...]
    specs: Tensor
    sizes: Tensor
    losses: Tensor


def allocate(
    calibration: Calibration,
    *,
    compression: float | None = None,
    bytes_per_token: float | None = None,
    context_length: int | None = None,
    ranks: Ranks = "per_layer",
) -> list[AttentionSpec]:
    """Chooses the ranks and the block of every layer, so that the cache of the whole model fits a budget with the least expected loss.

    Every layer gets two levels, of keys and of values: level 1 keeps r_1 and v_1 dimensions of all T tokens, level 2 the others of one block of n
    tokens, so that a key/value head holds r_1 T + (D - r_1) n + v_1 T + (V - v_1) n numbers; or the layer stays plain. The loss of a
    choice is the expected change of the model's predictions, in nats per token: to first order, the squared error of the attention output
    relative to its square, times the sensitivity of the layer,

        sensitivity (sum over heads of |sum of z_p over dropped pairs|^2 + |P f|^2) / |o|^2

    in the terms of ``calibrate``; without rotary positions the first term is the dropped variance of scores (the tail of the singular values)
    times the spread of values. The choices of each layer that lie on the lower convex hull of loss over size are taken in the order of
    loss per byte, over all layers, until the budget is spent. A larger budget never has a larger expected loss.

    Args:
        calibration: of the model.
        compression: how many times smaller than a plain cache of T tokens; or
        bytes_per_token: of the whole cache of T tokens, in the dtype of the model, divided by T. Exactly one of the two.
        context_length: T, tokens up to which the model will decode. Default: that of the calibration.
        ranks: ``"per_layer"``; or ``"uniform"``: one choice for all layers, the best that fits, as a baseline.

    Returns:
        A spec for each attention layer, for ``structurize(model, specs, rotary_split="calibrated", calibration=calibration)``.

    Raises:
        ConfigError: not one budget; one that no ranks give, with the nearest that some do; or uniform ranks for heads of several sizes.

    Cost: D V B / 2 choices for each layer and B block sizes, on the host; no model is called.

    Source: ours; CARE (arXiv 2603.17946) distributes ranks over layers by the covariance of activations.
    """
    check_type("calibration", calibration, Calibration, "a Calibration", "calibrate(model, batches) makes one")
    check_choice("ranks", ranks, get_args(Ranks))
    length = calibration.context_length if context_length is None else context_length
    check_size("context_length", length, MAX_LENGTH)
    groups = [_options(calibration, layers, length) for layers in _groups(calibration)]
    plain = sum(float(group.sizes[-1]) for group in groups)
    budget = _budget(compression, bytes_per_token, plain, calibration.element_size, length)
    chosen = _uniform(groups, budget) if ranks == "uniform" else _per_layer(groups, budget)
    if chosen is None:
        smallest = sum(float(group.sizes.min()) for group in groups)
        if ranks == "uniform":
            smallest = float(_common(groups)[0].min())
        raise ConfigError(
            f"no ranks give a cache that is {plain / budget:.4g} times smaller ({budget * calibration.element_size / length:.4g} bytes per token): the "
            f"smallest one of {length} tokens is {plain / smallest:.4g} times smaller ({smallest * calibration.element_size / length:.4g} bytes per token)"
        )
    specs: dict[int, AttentionSpec] = {}
    for group, number in zip(groups, chosen, strict=True):
        for layer in group.layers:
            specs[layer.shape.index] = _spec(calibration, layer, group.specs[number].tolist(), length)
    return [specs[layer.shape.index] for layer in calibration.layers]


def _groups(calibration: Calibration) -> list[tuple[LayerCalibration, ...]]:
    """Layers, each with those that score its keys."""
    return [
        (layer, *(other for other in calibration.layers if other.shape.keys_of == layer.shape.index))
        for layer in calibration.layers
        if layer.shape.keys_of is None
    ]


def _budget(compression: float | None, per_token: float | None, plain: float, element_size: int, length: int) -> float:
    """The numbers that the cache may hold."""
    if (compression is None) == (per_token is None):
        raise ConfigError("give a budget: either compression (such as 4.0) or bytes_per_token")
    if compression is not None:
        check_number("compression", compression, minimum=1)
        return plain / compression
    check_number("bytes_per_token", per_token, above=0)
    assert per_token is not None
    return per_token * length / element_size


def _options(calibration: Calibration, layers: tuple[LayerCalibration, ...], length: int) -> _Options:
    """All choices of a group of layers, with what they cost."""
    shape = layers[0].shape
    head, value = shape.head_dim, shape.value_dim
    key_ranks = torch.arange(2, head, 2) if shape.rotation else torch.arange(1, head)
    can_turn = all(layer.has_value_basis for layer in layers)
    value_ranks = torch.arange(1, value + 1) if can_turn else torch.tensor([value])
    specs, sizes, losses = [], [], []
    for block, size in enumerate(calibration.block_sizes):
        if size >= length or not all(layer.has_key_basis for layer in layers):
            continue
        of_keys, of_values = torch.zeros(head + 1), torch.zeros(value + 1)
        for layer in layers:
            unit = layer.sensitivity / layer.moments.output.clamp(min=1e-300)
            of_keys = of_keys + _key_losses(layer, block) * unit
            of_values = of_values + value_basis(layer, block)[1].sum(dim=0) * unit
        far, near = _tokens(length, shape.window), _tokens(min(size, length), shape.window)
        keys = key_ranks * far + (head - key_ranks) * near
        values = value_ranks * far + (value - value_ranks) * near
        of_values[value] = 0
        sizes.append(shape.num_kv_heads * (keys[:, None] + values).flatten().double())
        losses.append((of_keys[key_ranks][:, None] + of_values[value_ranks]).flatten())
        pairs = torch.cartesian_prod(key_ranks, value_ranks).view(-1, 2)
        specs.append(torch.cat([torch.full_like(pairs[:, :1], block), pairs], dim=1))
    plain = shape.num_kv_heads * (head + value) * _tokens(length, shape.window)
    return _Options(
        layers=layers,
        specs=torch.cat([*specs, torch.tensor([[-1, head, value]])]),
        sizes=torch.cat([*sizes, torch.tensor([plain], dtype=torch.float64)]),
        losses=torch.cat([*losses, torch.zeros(1)]).double(),
    )


def _tokens(length: int, window: int | None) -> int:
    """The most tokens that a level of a cache holds; its blocks are those of a spec, so that this is what the cache counts."""
    layout = LevelLayout((1,), (length,))
    (softmax,) = softmaxes_of(layout, window, 1)
    return value_levels((softmax,), layout, 1)[0].most_slots(length)


def _key_losses(layer: LayerCalibration, block: int) -> Tensor:
    """What is lost if far keys keep 0 ... D dimensions, summed over heads, (D + 1,)."""
    sums = layer.moments
    if layer.shape.rotation is not None:
        of_pairs = ranked_pairs(sums.pair_effects[block])[1].sum(dim=0)
        return of_pairs.repeat_interleave(2)[:-1]
    per_group = layer.shape.num_heads // layer.shape.num_kv_heads
    variance = layer.scale**2 * key_basis(layer, centered=layer.has_key_bias)[2] / per_group
    return (variance * sums.spread[block][:, None]).sum(dim=0)


def _per_layer(groups: Sequence[_Options], budget: float) -> list[int] | None:
    """The number of the choice of each group; ``None`` if the smallest ones are too large."""
    hulls = [_hull(group) for group in groups]
    at = [0] * len(groups)
    left = budget - sum(float(group.sizes[hull[0]]) for group, hull in zip(groups, hulls, strict=True))
    if left < 0:
        return None
    while True:
        steps = []
        for number, (group, hull) in enumerate(zip(groups, hulls, strict=True)):
            if at[number] + 1 < len(hull):
                here, there = hull[at[number]], hull[at[number] + 1]
                size = float(group.sizes[there] - group.sizes[here])
                steps.append((float(group.losses[here] - group.losses[there]) / size, size, number))
        if not steps:
            break
        _, size, number = max(steps, key=lambda step: step[0])
        if size > left:
            break
        at[number] += 1
        left -= size
    chosen = [hull[place] for hull, place in zip(hulls, at, strict=True)]
    if steps:  # what is left is not enough for the next step, and may be for a choice on the way to it
        group = groups[number]
        fits = group.sizes <= group.sizes[chosen[number]] + left
        chosen[number] = int(group.losses.masked_fill(~fits, torch.inf).argmin())
    return chosen


def _hull(group: _Options) -> list[int]:
    """The choices on the lower convex hull of loss over size, from the smallest on."""
    order = torch.argsort(group.losses, stable=True)
    order = order[torch.argsort(group.sizes[order], stable=True)]
    sizes, losses = group.sizes[order], group.losses[order]
    least = torch.cat([losses.new_tensor([torch.inf]), losses.cummin(0).values[:-1]])
    hull: list[tuple[float, float, int]] = []
    for n in (losses < least).nonzero()[:, 0].tolist():
        point = (float(sizes[n]), float(losses[n]), int(order[n]))
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return [number for _, _, number in hull]


def _is_above(a: tuple[float, float, int], b: tuple[float, float, int], c: tuple[float, float, int]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def _common(groups: Sequence[_Options]) -> tuple[Tensor, Tensor]:
    """Sizes and losses of each choice, over all groups."""
    if any(not torch.equal(group.specs, groups[0].specs) for group in groups):
        raise ConfigError(
            "uniform ranks need layers with heads of one size: this model has several, give ranks='per_layer'"
        )
    return torch.stack([group.sizes for group in groups]).sum(0), torch.stack([group.losses for group in groups]).sum(0)


def _uniform(groups: Sequence[_Options], budget: float) -> list[int] | None:
    """The best common choice."""
    sizes, losses = _common(groups)
    fits = sizes <= budget
    if not bool(fits.any()):
        return None
    return [int(losses.masked_fill(~fits, torch.inf).argmin())] * len(groups)


def _spec(calibration: Calibration, layer: LayerCalibration, choice: list[int], length: int) -> AttentionSpec:
    """The spec of a choice."""
    block, rank, value_rank = choice
    if block < 0:
        return AttentionSpec()
    size = calibration.block_sizes[block]
    shape = layer.shape
    values = None if value_rank == shape.value_dim else (value_rank, shape.value_dim - value_rank)
    layout = LevelLayout((rank, shape.head_dim - rank), (-(-length // size) * size, size), "standard", values)
    return AttentionSpec(layout=layout)
