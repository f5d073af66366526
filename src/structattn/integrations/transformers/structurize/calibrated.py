"""What a calibration adds to a structurized model: orders of rotary pairs, and which layers get a basis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.record import Calibration
from structattn.integrations.transformers.calibration.splits import CALIBRATED_SPLITS, PairOrder
from structattn.integrations.transformers.structurize.layer_specs import layouts_with_levels
from structattn.layers.checks import check_fits
from structattn.layers.rotary_order import even_ranks
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout


def add_calibration(
    config: Any, split: str, calibration: Calibration, layouts: Mapping[int, LevelLayout | HeadLayouts]
) -> None:
    """Adds the calibrated orders of rotary pairs to a config.

    Raises:
        ConfigError: a layout scales scores otherwise than the trained model.
    """
    specs, rotations = config.structattn["specs"], config.structattn["rotations"]
    order = CALIBRATED_SPLITS.get(split)
    for number, layout in layouts.items():
        for scaling in {of_heads.scaling for of_heads in layouts_with_levels(layout)} - {"standard"}:
            if order is not None or rotations[number] is None:
                written = specs[number].replace(f",scaling={scaling}", "")
                remedy = f"write {written},scaling=standard"
                if isinstance(layout, HeadLayouts):
                    remedy = "write scaling=standard for each head with levels"
                raise ConfigError(
                    "calibrated keys keep the scale of the trained scores at every distance, and the spec of layer "
                    f"{number} has scaling={scaling}: {remedy}"
                )
    if order is not None:
        config.structattn["pair_orders"] = _pair_orders(order, calibration, layouts, config.num_hidden_layers)


def layouts_of_bases(layouts: Mapping[int, LevelLayout | HeadLayouts], config: Any) -> dict[int, LevelLayout]:
    """The layouts that a basis is found for; raises ``ConfigError`` where single heads would need one."""
    rotations = config.structattn["rotations"]
    for number, layout in layouts.items():
        if isinstance(layout, HeadLayouts) and (
            rotations[number] is None or any(x.value_ranks is not None for x in layouts_with_levels(layout))
        ):
            raise ConfigError(
                f"the basis of single heads cannot be calibrated: give the heads of layer {number} no values=, in a "
                "model with rotary positions, or leave the calibration out"
            )
    return {number: layout for number, layout in layouts.items() if isinstance(layout, LevelLayout)}


def _pair_orders(
    order: PairOrder, calibration: Calibration, layouts: Mapping[int, LevelLayout | HeadLayouts], count: int
) -> list[list[str] | None]:
    """The orders of rotary pairs of each layer, as texts; layers that share keys have one."""
    orders: list[list[str] | None] = [None] * count
    for layer in calibration.layers:
        number = layer.shape.index
        if layer.has_key_basis or number not in layouts:
            continue
        layout = layouts[number]
        if layer.rotation is not None:
            for with_levels in layouts_with_levels(layout):
                even_ranks(with_levels.ranks)
        check_fits(layout, layer.shape.head_dim, layer.shape.value_dim)
        source = number if layer.shape.keys_of is None else layer.shape.keys_of
        sharing = [other for other in calibration.layers if source in (other.shape.index, other.shape.keys_of)]
        if isinstance(layout, LevelLayout):
            pairs = order(calibration, sharing, layout)
        else:
            pairs = [list(range(layer.shape.head_dim // 2))] * layout.num_heads
            for of_heads in layouts_with_levels(layout):
                calibrated = order(calibration, sharing, of_heads)
                pairs = [
                    of_head if each == of_heads else kept
                    for each, of_head, kept in zip(layout.layouts, calibrated, pairs, strict=True)
                ]
        orders[number] = [" ".join(map(str, head)) for head in pairs]
    return orders
