"""Where a cache keeps numbers: a ``LevelStore`` finds slots, a ``Page`` has their numbers; a ``GroupStore``
has those that are quantized, as a ``Storage`` asks.
"""

from structattn.cache.storage.full import FullPage
from structattn.cache.storage.groups import GroupStore
from structattn.cache.storage.level_store import PAGE_SIZE, TEXT_PAGE_SIZE, LevelStore, PageSpan
from structattn.cache.storage.options import (
    FIRST_TOKENS,
    LayerStorage,
    ModelStorage,
    Storage,
    checked_storage,
    chooses_tokens,
    storage_data,
    storage_from,
    storage_of_heads,
    storage_of_layers,
)
from structattn.cache.storage.page import Page
from structattn.cache.storage.quantize import GroupFormat

__all__ = [
    "FIRST_TOKENS",
    "PAGE_SIZE",
    "TEXT_PAGE_SIZE",
    "FullPage",
    "GroupFormat",
    "GroupStore",
    "LayerStorage",
    "LevelStore",
    "ModelStorage",
    "Page",
    "PageSpan",
    "Storage",
    "checked_storage",
    "chooses_tokens",
    "storage_data",
    "storage_from",
    "storage_of_heads",
    "storage_of_layers",
]
