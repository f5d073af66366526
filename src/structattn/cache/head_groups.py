"""Which key heads of a layer are kept together: those of one layout and one storage."""

from __future__ import annotations

from structattn.cache.storage import LayerStorage, Storage, storage_of_heads
from structattn.layout.global_window import Layout
from structattn.layout.heads import AnyLayout, HeadGroup, HeadLayouts


def head_groups(layout: AnyLayout | None, storage: LayerStorage, heads: int) -> list[tuple[HeadGroup, Storage | None]]:
    """The key heads of each layout and storage.

    Args:
        layout, storage: one for each key head, or of all.
        heads: how many key heads there are.

    Raises:
        ConfigError: there is not a storage for each head.
    """
    layouts = layout.layouts if isinstance(layout, HeadLayouts) else (layout,) * heads
    numbers: dict[tuple[Layout | None, Storage | None], list[int]] = {}
    for head, kept in enumerate(zip(layouts, storage_of_heads(storage, heads), strict=True)):
        numbers.setdefault(kept, []).append(head)
    return [(HeadGroup(of_heads, tuple(group)), bits) for (of_heads, bits), group in numbers.items()]
