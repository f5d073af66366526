"""``allocate``: what every key head keeps under one budget of cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from structattn.cache.storage import Storage
from structattn.checks import MAX_LENGTH, check_choice, check_number, check_size, check_type
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.bit_losses import GROUP_SIZES
from structattn.integrations.transformers.calibration.choices import choices
from structattn.integrations.transformers.calibration.discovery import FoundAttention
from structattn.integrations.transformers.calibration.head_choices import (
    HeadChoices,
    head_choices,
    spec_of_heads,
    storage_of_choices,
)
from structattn.integrations.transformers.calibration.methods import Method, checked_methods
from structattn.integrations.transformers.calibration.record import (
    AttentionShape,
    Calibration,
    LayerCalibration,
    check_shapes,
)
from structattn.layers.attention_spec import AttentionSpec

Ranks = Literal["per_layer", "uniform"]
_NOT_MEASURED = (
    ". Which far tokens matter gives smaller ones; calibrate(model, batches) measures it for causal language models, "
    "on texts of at least 128 tokens"
)
_BYTES = 2  # of a number of a plain cache, to which a compression is relative
_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


class Sized(Protocol):
    """The choices of a part of a model: what each costs, and what it loses, (choices,) float64."""

    @property
    def sizes(self) -> Tensor: ...
    @property
    def losses(self) -> Tensor: ...


class Allocation(list[AttentionSpec]):
    """What ``allocate`` chose, for ``structurize(model, allocation)``: a list with a spec for each attention
    layer, and how their caches store numbers. A copy as a plain list, such as a slice, has the specs only.

    Attributes:
        storage: how the cache of each layer stores numbers, for ``structurize(storage=)``, which takes it
            from here; ``None`` for 16 bits everywhere.
        nbytes: of the cache of one row of ``context_length`` tokens, with exact numbers of 16 bits, or of the
            dtype of the model where the budget was in bytes.
        plain_nbytes: of a plain cache.
        context_length: T.
        expected_loss: change of the predictions of text, in nats per token.
        scorers: of each layer, what scores its tokens, (G, E + 1), as ``TokenScores`` has it; ``None`` of
            those that keep all.
        has_levels: whether ranks of levels were chosen, which need the calibration.
        shapes: of the attention layers of the model that was calibrated; none: not known.
    """

    def __init__(
        self,
        specs: Iterable[AttentionSpec],
        *,
        storage: list[Storage | list[Storage | None] | None] | None,
        nbytes: int,
        plain_nbytes: int,
        context_length: int,
        expected_loss: float,
        scorers: Sequence[Tensor | None] = (),
        has_levels: bool = False,
        shapes: Sequence[AttentionShape] = (),
    ) -> None:
        super().__init__(specs)
        self.has_levels = has_levels
        self.shapes = tuple(shapes)
        self.storage = storage
        self.nbytes, self.plain_nbytes, self.context_length = nbytes, plain_nbytes, context_length
        self.expected_loss = expected_loss
        self.scorers = tuple(scorers)

    def __repr__(self) -> str:
        """What was chosen, in a line."""
        kept = sum(scorer is not None for scorer in self.scorers)
        of_tokens = f", far tokens chosen in {kept}" if kept else ""
        return (
            f"Allocation({len(self)} attention layers{of_tokens}; {self.nbytes:,} of {self.plain_nbytes:,} bytes for "
            f"{self.context_length:,} tokens, {self.plain_nbytes / self.nbytes:.3g} times smaller; expected loss "
            f"{self.expected_loss:.2g} nats per token)"
        )

    def check(self, layers: Sequence[FoundAttention]) -> None:
        """Raises ``ConfigError`` unless these layers have the shapes of the model that was calibrated."""
        if self.shapes:
            check_shapes(self.shapes, layers, "allocation")

    def storage_of(self, chosen: Sequence[int], count: int) -> list[Storage | list[Storage | None] | None] | None:
        """``storage`` for ``structurize``: an entry for each of ``count`` layers of a model whose attention
        layers have these numbers.
        """
        if self.storage is None:
            return None
        by_layer = dict(zip(chosen, self.storage, strict=True))
        return [by_layer.get(number) for number in range(count)]


def allocate(
    calibration: Calibration,
    *,
    compression: float | None = None,
    bytes_per_token: float | None = None,
    context_length: int | None = None,
    ranks: Ranks = "per_layer",
    methods: Sequence[Method] | None = None,
) -> Allocation:
    """Chooses what every key head keeps, so that the cache of the whole model fits a budget with the least
    expected loss.

    With ``"tokens"``, a key head keeps its last 64 to 1,024 tokens and some eighths of those further back,
    with the highest scores (``Storage(keep=..., recent=...)``); with ``"bits"``, numbers that are far back
    have 16, 8 or 4 bits, or keys 8 and values 4; with ``"heads"``, a key head keeps all tokens, or a window
    of recent ones and the first four. The loss of a choice is the head's part of the change of the
    predictions, as ``calibrate`` measured it; copies of far text have a tenth of the weight. Where far tokens
    are chosen, groups have 16, 32 or 64 tokens, whichever loses least; all heads have the same, and at least
    four groups of recent tokens; heads that keep all tokens have groups of that size, or of 64. Tokens of a
    block that is not decided on are recent too.
    ``expected_loss`` is of text, without copies.

    With ``"levels"``, every layer gets two to five levels, of keys and of values, instead: level 1 keeps r_1
    and v_1 dimensions of all T tokens, level l others of one block of n_l tokens, so that a key/value head
    holds (r_1 + v_1) T + (r_2 + v_2) n_2 + ... numbers; or the layer stays plain. The loss is then to first
    order, the squared error of the attention output relative to its square, times the sensitivity of the
    layer,

        sensitivity (sum over heads of |sum of z_p over dropped pairs|^2 + |P f|^2) / |o|^2

    in the terms of ``calibrate``; without rotary positions the first term is the dropped variance of scores
    (the tail of the singular values) times the spread of values. Without training, levels lost more than
    heads and bits at the same bytes on SmolLM2-135M, the one real model that was measured.

    The choices that lie on the lower convex hull of loss over size are taken in the order of loss per byte,
    over all heads (or layers) of the model, until the budget is spent. With groups of one size, a larger
    budget never has a larger expected loss.

    Args:
        calibration: of the model.
        compression: bytes of a plain cache of T tokens over those of the chosen one, both with numbers of 16
            bits; scales, exact tokens and first tokens are counted. Give this or ``bytes_per_token``.
        bytes_per_token: bytes of the chosen cache of T tokens over T, with exact numbers in the dtype of the
            model. Give this or ``compression``.
        context_length: T, tokens up to which the model will decode. Give it: the default is the longest text
            of the calibration, and a cache of more tokens is smaller than asked for, and loses more.
        ranks: of levels, ``"per_layer"``; or ``"uniform"``: one choice for all layers, the best that fits,
            as a baseline.
        methods: ``("tokens", "bits")``, ``("heads", "bits")``, one of these, or ``("levels",)``. Default: of
            these the first that the calibration has measured; levels where ``ranks`` is given as uniform.

    Returns:
        An ``Allocation``, for ``structurize(model, allocation)``; levels need
        ``rotary_split="calibrated", calibration=calibration`` too.

    Raises:
        ConfigError: not one budget; one that no choices give, with the nearest that some do; other methods;
            effects of heads that were not measured; or uniform ranks for heads of several sizes.

    Cost: of heads, a cache of each choice, filled once, some seconds; of levels, for each layer and each set
        of up to four block sizes 64 choices, on the host, by tensors of 64 D numbers. No model is called.

    Source: ours; CARE (arXiv 2603.17946) distributes ranks over layers by the covariance of activations,
        DuoAttention (2410.10819) gives windows to heads, KVzip (2505.23416) budgets of tokens.
    """
    check_type("calibration", calibration, Calibration, "a Calibration", "calibrate(model, batches) makes one")
    check_choice("ranks", ranks, get_args(Ranks))
    chosen_methods = _methods_of(methods, calibration, ranks)
    length = calibration.context_length if context_length is None else context_length
    check_size("context_length", length, MAX_LENGTH)
    if chosen_methods == {"levels"}:
        return _by_levels(calibration, compression, bytes_per_token, length, ranks)
    return _by_heads(calibration, compression, bytes_per_token, length, chosen_methods)


def _methods_of(methods: Sequence[Method] | None, calibration: Calibration, ranks: Ranks) -> set[Method]:
    if methods is None:
        found: set[Method] = {"bits"} if calibration.bits is not None else set()
        if calibration.tokens is not None:
            found.add("tokens")
        elif calibration.effects is not None:
            found.add("heads")
        chosen: set[Method] = {"levels"} if ranks == "uniform" or not found else found
    else:
        chosen = checked_methods(methods)
    if "levels" in chosen and len(chosen) > 1:
        raise ConfigError("levels are chosen alone: give methods=('levels',), or others without it")
    if {"heads", "tokens"} <= chosen:
        raise ConfigError("of far tokens either some are chosen or all are dropped: give 'tokens' or 'heads', not both")
    if "levels" not in chosen and ranks == "uniform":
        raise ConfigError("ranks='uniform' is for levels: give methods=('levels',), or leave ranks away")
    known: dict[Method, bool] = {
        "tokens": calibration.tokens is not None,
        "bits": calibration.bits is not None,
        "heads": calibration.effects is not None,
        "levels": calibration.has_levels,
    }
    if not any(known.values()):
        raise ConfigError(
            "this calibration has not measured any method of allocate: calibrate a causal language model on texts of "
            "at least 128 tokens, or with 'levels' in methods="
        )
    for method in sorted(chosen):
        if not known[method]:
            models = "" if method == "levels" else ", for causal language models, on texts of at least 128 tokens"
            raise ConfigError(
                f"this calibration has not measured {method}: calibrate(model, batches, methods=...) with {method!r} "
                f"among them does{models}"
            )
    return chosen


def _by_heads(
    calibration: Calibration, compression: float | None, per_token: float | None, length: int, methods: set[Method]
) -> Allocation:
    size = _BYTES if per_token is None else calibration.element_size
    found: list[tuple[float, list[list[HeadChoices]], list[int]]] = []
    budget, plain, smallest = 0.0, 0.0, math.inf
    for group_size in GROUP_SIZES:
        of_layers = head_choices(calibration, length, dtype=_DTYPES[size], methods=methods, group_size=group_size)
        groups = [group for of_layer in of_layers for group in of_layer]
        plain = sum(float(group.sizes[0]) for group in groups)
        budget = _budget(compression, per_token, plain / size, size, length) * size
        smallest = min(smallest, sum(float(group.sizes.min()) for group in groups))
        chosen = cheapest(groups, budget)
        if chosen is not None:
            loss = sum(float(group.losses[number]) for group, number in zip(groups, chosen, strict=True))
            found.append((loss, of_layers, chosen))
    if not found:
        names = " and ".join(method for method in get_args(Method) if method in methods)
        advice = "" if methods & {"tokens", "heads"} else _NOT_MEASURED
        raise _too_small(f"choice of {names} gives", budget, plain, smallest, length, advice)
    _, of_layers, chosen = min(found, key=lambda one: one[0])  # of equal losses the largest groups
    groups = [group for of_layer in of_layers for group in of_layer]
    numbers, left = iter(chosen), iter(of_layers)
    of_tokens = iter(() if calibration.tokens is None else calibration.tokens.scorers)
    specs: list[AttentionSpec] = []
    storage: list[Storage | list[Storage | None] | None] = []
    scorers: list[Tensor | None] = []
    for layer in calibration.layers:
        if layer.shape.keys_of is not None:
            specs.append(specs[_place(calibration, layer.shape.keys_of)])
            storage.append(storage[_place(calibration, layer.shape.keys_of)])
            scorers.append(None)
            continue
        heads = [group.choices[next(numbers)] for group in next(left)]
        scorer = next(of_tokens, None)
        specs.append(spec_of_heads(heads))
        storage.append(storage_of_choices(heads))
        scorers.append(scorer if any(choice.way is not None for choice in heads) else None)
    pairs = list(zip(groups, chosen, strict=True))
    return Allocation(
        specs,
        storage=storage if any(one is not None for one in storage) else None,
        nbytes=int(sum(float(group.sizes[number]) for group, number in pairs)),
        plain_nbytes=int(plain),
        context_length=length,
        expected_loss=sum(float(group.of_text[number]) for group, number in pairs),
        scorers=scorers,
        shapes=[layer.shape for layer in calibration.layers],
    )


def _place(calibration: Calibration, index: int) -> int:
    """Where the layer of a number is among those calibrated."""
    return next(place for place, layer in enumerate(calibration.layers) if layer.shape.index == index)


def _by_levels(
    calibration: Calibration, compression: float | None, per_token: float | None, length: int, ranks: Ranks
) -> Allocation:
    together = [calibration.layers] if ranks == "uniform" else _groups(calibration)
    groups = [choices(calibration, layers, length) for layers in together]
    plain = sum(float(group.sizes[-1]) for group in groups)
    budget = _budget(compression, per_token, plain, calibration.element_size, length)
    chosen = cheapest(groups, budget)
    size = _BYTES if per_token is None else calibration.element_size
    if chosen is None:
        smallest = sum(float(group.sizes.min()) for group in groups)
        raise _too_small("ranks give", budget * size, plain * size, smallest * size, length)
    pairs = list(zip(groups, chosen, strict=True))
    specs = {layer.shape.index: group.spec(number) for group, number in pairs for layer in group.layers}
    return Allocation(
        [specs[layer.shape.index] for layer in calibration.layers],
        storage=None,
        nbytes=int(sum(float(group.sizes[number]) for group, number in pairs)) * size,
        plain_nbytes=int(plain) * size,
        context_length=length,
        expected_loss=sum(float(group.losses[number]) for group, number in pairs),
        has_levels=any(group.specs[number] for group, number in pairs),
        shapes=[layer.shape for layer in calibration.layers],
    )


def _too_small(
    choices_give: str, budget: float, plain: float, smallest: float, length: int, advice: str = ""
) -> ConfigError:
    """The error of a budget of bytes that nothing fits."""
    return ConfigError(
        f"no {choices_give} a cache that is {plain / budget:.4g} times smaller ({budget / length:.4g} bytes per "
        f"token): the smallest one of {length} tokens is {plain / smallest:.4g} times smaller "
        f"({smallest / length:.4g} bytes per token); context_length= sets the number of tokens{advice}"
    )


def _groups(calibration: Calibration) -> list[tuple[LayerCalibration, ...]]:
    """Layers, each with those that score its keys."""
    return [
        (layer, *(other for other in calibration.layers if other.shape.keys_of == layer.shape.index))
        for layer in calibration.layers
        if layer.shape.keys_of is None
    ]


def _budget(compression: float | None, per_token: float | None, plain: float, element_size: int, length: int) -> float:
    """How many numbers the cache may hold."""
    if (compression is None) == (per_token is None):
        raise ConfigError("give a budget: either compression (such as 4.0) or bytes_per_token")
    if compression is not None:
        check_number("compression", compression, minimum=1)
        return plain / compression
    check_number("bytes_per_token", per_token, above=0)
    assert per_token is not None
    return per_token * length / element_size


def cheapest(groups: Sequence[Sized], budget: float) -> list[int] | None:
    """The number of the choice of each group that loses least within a budget; ``None`` if the smallest ones
    are too large.
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


def _hull(group: Sized) -> list[int]:
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
