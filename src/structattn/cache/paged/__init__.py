"""The cache of a server: the keys and values of many requests, by level, in pages of one pool, or where a
model chooses tokens, in contents of each request.
"""

from structattn.cache.paged.batch import Tokens
from structattn.cache.paged.cache import PackedCache, PagedCache, ShapeProbe
from structattn.cache.paged.geometry import PagedLayerShape
from structattn.cache.paged.pages import PagePool
from structattn.cache.paged.requests import RequestCaches, RequestPool

__all__ = [
    "PackedCache",
    "PagePool",
    "PagedCache",
    "PagedLayerShape",
    "RequestCaches",
    "RequestPool",
    "ShapeProbe",
    "Tokens",
]
