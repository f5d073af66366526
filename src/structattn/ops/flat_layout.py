"""A layout as arguments of an operator, which takes nothing but lists of ints and text."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.segments import Boundaries

SCHEMA = (
    "int[] ranks, int[]? block_sizes, int[]? value_ranks, int[]? boundaries, int[]? windows, int sink_tokens, "
    "str scaling"
)
_HEADS = "heads:"
SIZE = SCHEMA.count(",") + 1  # how many they are


def flat(layout: LevelLayout) -> tuple[Any, ...]:
    """The arguments that ``SCHEMA`` names; a window without limit is 0."""
    return (
        layout.ranks,
        layout.block_sizes,
        layout.value_ranks or (),
        _flat_boundaries(layout.boundaries),
        [window or 0 for window in layout.windows or ()],
        layout.sink_tokens,
        layout.scaling,
    )


def _flat_boundaries(boundaries: Boundaries | None) -> list[int]:
    """Rows, levels, then for each row and level the number of starts and the starts."""
    if boundaries is None:
        return []
    flat = [len(boundaries), len(boundaries[0])]
    for row in boundaries:
        for starts in row:
            flat += [len(starts), *starts]
    return flat


def _nested_boundaries(flat: Sequence[int] | None) -> Boundaries | None:
    if not flat:
        return None
    num_rows, num_levels, *rest = flat
    values = iter(rest)
    return tuple(
        tuple(tuple(next(values) for _ in range(next(values))) for _ in range(num_levels)) for _ in range(num_rows)
    )


@functools.lru_cache(maxsize=256)  # a layout is checked once, not whenever the operator runs
def _known_layout(
    ranks: tuple[int, ...],
    block_sizes: tuple[int, ...],
    value_ranks: tuple[int, ...],
    boundaries: tuple[int, ...],
    windows: tuple[int, ...],
    sink_tokens: int,
    scaling: Any,
) -> LevelLayout:
    return LevelLayout(
        ranks,
        block_sizes,
        scaling,
        value_ranks or None,
        _nested_boundaries(boundaries),
        tuple(window or None for window in windows) or None,
        sink_tokens,
    )


def layout_of(*values: Any) -> LevelLayout:
    """The layout of which ``flat`` made these."""
    *lists, sink_tokens, scaling = values
    # A program of AOTInductor hands over an empty list as None, so that the schema allows it.
    return _known_layout(*(tuple(x or ()) for x in lists), sink_tokens, scaling)


def flat_any(layout: AnyLayout | None) -> tuple[Any, ...]:
    """As ``flat``, of any layout: of none there are no ranks, a global-window layout has one window and two
    ranks, and those of heads are in one list, with their scalings after ``heads:``.
    """
    if isinstance(layout, HeadLayouts):
        numbers, scalings = [], []
        for *lists, sink_tokens, scaling in map(flat_any, layout.layouts):
            for values in lists:
                numbers += [len(values), *values]
            numbers.append(sink_tokens)
            scalings.append(scaling)
        return (1,), (), (), numbers, [], 0, _HEADS + ",".join(scalings)
    if layout is None:
        return (), (), (), [], [], 0, ""
    if isinstance(layout, GlobalWindowLayout):
        return layout.ranks, (), (), [], [layout.window], 0, layout.scaling
    return flat(layout)


def any_layout_of(*values: Any) -> AnyLayout | None:
    """The layout of which ``flat_any`` made these."""
    if values[-1].startswith(_HEADS):
        return _heads(tuple(values[3]), values[-1])
    return _layout_of_head(*values)


@functools.lru_cache(maxsize=256)
def _heads(numbers: tuple[int, ...], scalings: str) -> HeadLayouts:
    rest = iter(numbers)
    layouts = []
    for scaling in scalings.removeprefix(_HEADS).split(","):
        lists = [tuple(next(rest) for _ in range(next(rest))) for _ in range(SIZE - 2)]
        layouts.append(_layout_of_head(*lists, next(rest), scaling))
    return HeadLayouts(layouts)


def _layout_of_head(*values: Any) -> Layout | None:
    ranks, _, _, _, windows, _, scaling = values
    if not ranks:
        return None
    return (
        _global_window(tuple(ranks), *windows, scaling)
        if len(windows or ()) < len(ranks) and windows
        else layout_of(*values)
    )


@functools.lru_cache(maxsize=256)
def _global_window(ranks: tuple[int, ...], window: int, scaling: Any) -> GlobalWindowLayout:
    return GlobalWindowLayout(ranks, window, scaling)
