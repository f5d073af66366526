"""Which dimensions a pair of positions shares, by distance."""

from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout, TextUnits

__all__ = ["GlobalWindowLayout", "HeadLayouts", "LevelLayout", "TextLayout", "TextUnits"]
