"""Which dimensions a pair of positions shares, by distance."""

from structattn.layout.levels import GlobalWindowLayout, LevelLayout
from structattn.layout.text import TextLayout, TextUnits

__all__ = ["GlobalWindowLayout", "LevelLayout", "TextLayout", "TextUnits"]
