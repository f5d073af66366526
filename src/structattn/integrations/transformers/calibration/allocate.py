"""``allocate``: the ranks of every layer under one budget of cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from structattn.checks import MAX_LENGTH, check_choice, check_number, check_size, check_type
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.choices import Choices, choices
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layers.attention_spec import AttentionSpec

Ranks = Literal["per_layer", "uniform"]


def allocate(
    calibration: Calibration,
    *,
    compression: float | None = None,
    bytes_per_token: float | None = None,
    context_length: int | None = None,
    ranks: Ranks = "per_layer",
) -> list[AttentionSpec]:
    """Chooses the ranks and the block of every layer, so that the cache of the whole model fits a budget with
    the least expected loss.

    Every layer gets two to five levels, of keys and of values: level 1 keeps r_1 and v_1 dimensions of all T
    tokens, level l others of one block of n_l tokens, so that a key/value head holds (r_1 + v_1) T + (r_2 +
    v_2) n_2 + ... numbers; or the layer stays plain. The loss of a choice is the expected change of the
    model's predictions, in nats per token: to first order, the squared error of the attention output relative
    to its square, times the sensitivity of the layer,

        sensitivity (sum over heads of |sum of z_p over dropped pairs|^2 + |P f|^2) / |o|^2

    in the terms of ``calibrate``; without rotary positions the first term is the dropped variance of scores
    (the tail of the singular values) times the spread of values. The choices of each layer that lie on the
    lower convex hull of loss over size are taken in the order of loss per byte, over all layers, until the
    budget is spent. A larger budget never has a larger expected loss.

    Args:
        calibration: of the model.
        compression: how many times smaller than a plain cache of T tokens; or
        bytes_per_token: of the whole cache of T tokens, in the dtype of the model, divided by T. Exactly one
            of the two.
        context_length: T, tokens up to which the model will decode. Default: that of the calibration.
        ranks: ``"per_layer"``; or ``"uniform"``: one choice for all layers, the best that fits, as a
            baseline.

    Returns:
        A spec for each attention layer, for
        ``structurize(model, specs, rotary_split="calibrated", calibration=calibration)``.

    Raises:
        ConfigError: not one budget; one that no ranks give, with the nearest that some do; or uniform ranks
            for heads of several sizes.

    Cost: for each layer and each set of up to four block sizes 64 choices, on the host, by tensors of 64 D
        numbers; no model is called.

    Source: ours; CARE (arXiv 2603.17946) distributes ranks over layers by the covariance of activations.
    """
    check_type("calibration", calibration, Calibration, "a Calibration", "calibrate(model, batches) makes one")
    check_choice("ranks", ranks, get_args(Ranks))
    length = calibration.context_length if context_length is None else context_length
    check_size("context_length", length, MAX_LENGTH)
    together = [calibration.layers] if ranks == "uniform" else _groups(calibration)
    groups = [choices(calibration, layers, length) for layers in together]
    plain = sum(float(group.sizes[-1]) for group in groups)
    budget = _budget(compression, bytes_per_token, plain, calibration.element_size, length)
    chosen = cheapest(groups, budget)
    if chosen is None:
        smallest = sum(float(group.sizes.min()) for group in groups)
        raise ConfigError(
            f"no ranks give a cache that is {plain / budget:.4g} times smaller "
            f"({budget * calibration.element_size / length:.4g} bytes per token): the "
            f"smallest one of {length} tokens is {plain / smallest:.4g} times smaller "
            f"({smallest * calibration.element_size / length:.4g} bytes per token)"
        )
    specs = {
        layer.shape.index: group.spec(number)
        for group, number in zip(groups, chosen, strict=True)
        for layer in group.layers
    }
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


def cheapest(groups: Sequence[Choices], budget: float) -> list[int] | None:
    """The number of the choice of each group that loses least within a budget of numbers; ``None`` if the
    smallest ones are too large.
    """
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


def _hull(group: Choices) -> list[int]:
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
