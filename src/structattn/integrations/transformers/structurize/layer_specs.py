"""The layers that ``structurize`` changes, their specs, and the layouts of those with several levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from structattn.checks import check_type, describe, is_int
from structattn.errors import ConfigError
from structattn.integrations.transformers.variant import trained_spec
from structattn.layout.heads import HeadLayouts, groups_of
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import AttentionSpec, parse_spec
from structattn.spec.layers import LayerSpecs


def chosen_layers(layers: Sequence[int] | None, numbers: list[int]) -> list[int]:
    """The layers to change, of those with these numbers."""
    if layers is None:
        return numbers
    check_type("layers", layers, Sequence, "a list of ints or None")
    for layer in layers:
        if not is_int(layer) or layer not in numbers:
            is_every = numbers == list(range(len(numbers)))
            which = f"from {numbers[0]} to {numbers[-1]}" if is_every else f"of {numbers}"
            raise ConfigError(f"layers must be ints {which}, got {describe(layer)}")
    if len(set(layers)) != len(layers) or not layers:
        raise ConfigError(f"layers must name at least one layer, each once, got {describe(layers)}")
    return list(layers)


def specs_of_layers(
    spec: str | AttentionSpec | Sequence[str | AttentionSpec], chosen: list[int], count: int
) -> list[str | None]:
    """One spec for each of ``count`` layers, as text; ``None`` for those that are not chosen."""
    chosen_specs: list[Any]
    if isinstance(spec, str):
        chosen_specs = list(LayerSpecs.parse(spec).layers(len(chosen)))
    else:
        chosen_specs = list(spec) if isinstance(spec, Sequence) else [spec] * len(chosen)
    if len(chosen_specs) != len(chosen):
        raise ConfigError(
            f"expected one attention spec or {len(chosen)}, one per chosen layer, got {len(chosen_specs)}"
        )
    texts: list[str | None] = [None] * count
    for layer, layer_spec in zip(chosen, chosen_specs, strict=True):
        texts[layer] = str(trained_spec(layer_spec))
    return texts


def layout_with_levels(spec: str | None, length: int) -> LevelLayout | HeadLayouts | None:
    """The layout of a spec with several levels, of all heads or of some."""
    layout = None if spec is None else parse_spec(spec).layout_for(length, 1)
    return layout if isinstance(layout, LevelLayout | HeadLayouts) and layouts_with_levels(layout) else None


def layouts_with_levels(layout: LevelLayout | HeadLayouts) -> list[LevelLayout]:
    """The layouts with several levels, of all heads or of some."""
    layouts = [group.layout for group in groups_of(layout, 1)]
    return [x for x in layouts if isinstance(x, LevelLayout) and x.num_levels > 1]
