"""The splits that a calibration decides: which rotary pairs each level of a key head gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from structattn.checks import describe
from structattn.errors import ConfigError
from structattn.grammar import check_name
from structattn.integrations.transformers.calibration.basis import pair_order
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layers.rotary_order import ROTARY_SPLITS
from structattn.layout.levels import LevelLayout

# The pairs of each key head in the order of the levels; see ``pair_order``, which has the same arguments.
PairOrder = Callable[[Calibration, Sequence[LayerCalibration], LevelLayout], list[list[int]]]

_SPLITS: dict[str, PairOrder] = {
    "calibrated": pair_order,
}
CALIBRATED_SPLITS: Mapping[str, PairOrder] = MappingProxyType(_SPLITS)


def register_split(name: str, order: PairOrder) -> None:
    """Adds a ``rotary_split`` of ``structurize`` that a calibration decides. A saved model needs it again
    when it is loaded.

    Args:
        name: of the split.
        order: takes the calibration, the layers that share the keys, and their layout; returns the rotary
            pairs of each key head (where nothing is rotated, its dimensions), those of level 1 first.

    Raises:
        ConfigError: the name is that of another split.

    Example:
        >>> register_split("fast_far", lambda calibration, layers, layout: [[0, 1, 2, 3]] * num_kv_heads)
    """
    check_name("a rotary_split", name)
    if not callable(order):
        raise ConfigError(f"the order of a rotary_split is a function, got {describe(order)}")
    if name in (*ROTARY_SPLITS, "per_level") or _SPLITS.setdefault(name, order) is not order:
        raise ConfigError(f"the rotary_split {name!r} is taken: choose another name")
