"""The compressed key/value cache."""

from structattn.cache.latent import Latent
from structattn.cache.layers import LayerCaches
from structattn.cache.level_cache import LevelCache
from structattn.cache.storage import PAGE_SIZE, Storage

__all__ = ["PAGE_SIZE", "Latent", "LayerCaches", "LevelCache", "Storage"]
