"""Which level gets which rotary pairs in structurized models: by a rule, or in an order of each key head that
a calibration gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from structattn.checks import check_choice, quoted
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.splits import CALIBRATED_SPLITS
from structattn.layers.rotary_order import ROTARY_SPLITS, check_split
from structattn.layout.heads import groups_of
from structattn.layout.text import TextLayout
from structattn.spec.attention import parse_spec


def check_any_split(split: Any) -> str:
    """The split; raises ``ConfigError`` unless it is known."""
    if isinstance(split, str) and split == "per_level":
        return check_split(split)
    check_choice("rotary_split", split, (*ROTARY_SPLITS, *CALIBRATED_SPLITS))
    return str(split)


def read_pair_orders(
    entry: Any, specs: Sequence[str | None], rotations: Sequence[str | None], length: int, *, is_needed: bool
) -> tuple[tuple[tuple[int, ...], ...] | None, ...]:
    """The entry ``pair_orders``, checked: texts such as ``"2 0 1"``, one for each key head of a layer with
    rotary pairs and levels.

    Where nothing is rotated they may be orders of single dimensions.
    """
    if entry is None and not is_needed:
        return (None,) * len(specs)
    name = "config.structattn['pair_orders']"
    if not isinstance(entry, list | tuple) or len(entry) != len(specs):
        raise ConfigError(f"{name} needs a list of texts or null for each of {len(specs)} layers, got {quoted(entry)}")
    orders: list[tuple[tuple[int, ...], ...] | None] = []
    for layer, (texts, spec, rotation) in enumerate(zip(entry, specs, rotations, strict=True)):
        layout = None if spec is None else parse_spec(spec).layout_for(length, 1)
        groups = [] if layout is None or isinstance(layout, TextLayout) else groups_of(layout, 1)
        with_levels = [group.layout for group in groups if group.layout is not None and len(group.layout.ranks) > 1]
        if not with_levels or (rotation is None and texts is None):
            orders.append(None)
            continue
        pairs = [str(pair) for pair in range(with_levels[0].head_dim // (1 if rotation is None else 2))]
        if not isinstance(texts, list | tuple) or not texts:
            raise ConfigError(
                f"{name} needs an order of rotary pairs for each key head of layer {layer}, got {quoted(texts)}"
            )
        for text in texts:
            if not isinstance(text, str) or sorted(text.split()) != sorted(pairs):
                raise ConfigError(
                    f"{name} of layer {layer} needs each of {len(pairs)} rotary pairs once, got {quoted(text)}"
                )
        orders.append(tuple(tuple(map(int, text.split())) for text in texts))
    return tuple(orders)
