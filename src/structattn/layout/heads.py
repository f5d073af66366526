"""``HeadLayouts``: a layout for each key head of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, overload

from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.levels import LevelLayout


class HeadGroup(NamedTuple):
    """Key heads of one layout.

    Attributes:
        layout: of each of them; ``None`` is plain.
        heads: their numbers, ascending.
    """

    layout: Layout | None
    heads: tuple[int, ...]


@dataclass(frozen=True)
class HeadLayouts:
    """A layout for each key head: heads that see all tokens beside heads that see a window, say.

    A query head has the layout of the key head that it reads. Heads of equal layouts are computed together,
    and share a store of the cache.

    Args:
        layouts: one for each key head, in their order: ``LevelLayout``, ``GlobalWindowLayout``, or ``None``,
            plain attention. A window is a layout of one sliding level:
            ``LevelLayout.sliding((64,), (252,), sink_tokens=4)`` for heads of 64 dimensions.

    Raises:
        ConfigError: there is none, one is of another kind or has segments per row, or two need different
            dimensions of keys or values.

    Cost: that of its layouts, and one copy of the queries, keys and values of layouts whose heads are not
        next to each other.

    Source: Xiao et al. 2024 (DuoAttention) for windows beside heads that see all tokens.

    Example:
        >>> near = LevelLayout.sliding((8,), (252,), sink_tokens=4)
        >>> HeadLayouts((None, near, near)).groups[1].heads
        (1, 2)
    """

    layouts: tuple[Layout | None, ...]

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(self, layouts: Sequence[Layout | None]) -> None: ...

    def __post_init__(self) -> None:
        check_type("layouts", self.layouts, tuple | list, "a tuple with a layout or None for each key head")
        if not self.layouts:
            raise ConfigError("layouts of heads need at least one, got none")
        for layout in self.layouts:
            check_type("each of layouts", layout, Layout | None, "a LevelLayout, a GlobalWindowLayout or None")
            if isinstance(layout, LevelLayout) and layout.num_rows is not None:
                raise ConfigError("layouts of heads have the same blocks in every row: give no boundaries per row")
        object.__setattr__(self, "layouts", tuple(self.layouts))
        dims = {layout.head_dim for layout in self.layouts if layout is not None}
        if len(dims) > 1:
            raise ConfigError(f"the ranks of all heads need one sum, the head dimension, got {sorted(dims)}")
        values = {sum(x.value_ranks) for x in self.layouts if isinstance(x, LevelLayout) and x.value_ranks is not None}
        if len(values) > 1:
            raise ConfigError(f"the value_ranks of all heads need one sum, got {sorted(values)}")
        # Made here, and no field, which files would have: functools.cached_property takes a lock, which
        # torch.compile cannot trace.
        heads: dict[Layout | None, list[int]] = {}
        for head, layout in enumerate(self.layouts):
            heads.setdefault(layout, []).append(head)
        groups = tuple(HeadGroup(layout, tuple(numbers)) for layout, numbers in heads.items())
        object.__setattr__(self, "_groups", groups)

    @property
    def num_heads(self) -> int:
        """G, the number of key heads."""
        return len(self.layouts)

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The heads of each layout, in the order of their first heads."""
        groups: tuple[HeadGroup, ...] = self._groups  # type: ignore[attr-defined]
        return groups

    @property
    def head_dim(self) -> int | None:
        """D, the dimension of queries and keys; ``None`` where no head has a layout."""
        return next((layout.head_dim for layout in self.layouts if layout is not None), None)

    def check_heads(self, num_heads: int) -> None:
        """Raises ``ConfigError`` unless there is a layout for each of that many key heads."""
        if num_heads != self.num_heads:
            raise ConfigError(
                f"there is a layout for each of {self.num_heads} key heads, and the layer has {num_heads}: give one "
                "for each"
            )

    def __str__(self) -> str:
        texts = [f"{len(heads)} x {layout}" for layout, heads in self.groups]
        return f"HeadLayouts({', '.join(texts)})"


AnyLayout = Layout | HeadLayouts


def groups_of(layout: AnyLayout | None, num_heads: int) -> tuple[HeadGroup, ...]:
    """The key heads of each layout of a layer, whose heads may all have the same."""
    return layout.groups if isinstance(layout, HeadLayouts) else (HeadGroup(layout, tuple(range(num_heads))),)


@overload
def with_whole_values(layout: Layout | None) -> Layout | None: ...
@overload
def with_whole_values(layout: AnyLayout | None) -> AnyLayout | None: ...
def with_whole_values(layout: AnyLayout | None) -> AnyLayout | None:
    """A layout whose levels share the scores as before, and all pairs the whole values: that of the
    weights.
    """
    if isinstance(layout, HeadLayouts):
        return HeadLayouts(tuple(with_whole_values(x) for x in layout.layouts))
    return replace(layout, value_ranks=None) if isinstance(layout, LevelLayout) else layout
