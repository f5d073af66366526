"""Where a cache keeps numbers: a ``LevelStore`` finds slots, a ``Page`` has their numbers."""

from structattn.cache.storage.full import FullPage
from structattn.cache.storage.page import Page
from structattn.cache.storage.level_store import PAGE_SIZE, TEXT_PAGE_SIZE, PageSpan, LevelStore

__all__ = ["PAGE_SIZE", "TEXT_PAGE_SIZE", "FullPage", "Page", "PageSpan", "LevelStore"]
