"""The compressed key/value cache."""

from structattn.cache.latent import Latent
from structattn.cache.layers import LayerCaches
from structattn.cache.level_cache import PAGE_SIZE, LevelCache

__all__ = ["PAGE_SIZE", "Latent", "LayerCaches", "LevelCache"]
