"""An attention variant as a value: a scoring, a layout and a window."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import get_args

from structattn import text_forms
from structattn.checks import MAX_LENGTH, check_choice, check_size, check_type
from structattn.errors import ConfigError
from structattn.layers.layer import CustomAttention
from structattn.layers.scoring import BTT, MLR, LowRank, Matrix
from structattn.layers.scoring_modules import ScoreScaling
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.halving import Halving
from structattn.layout.levels import LevelLayout
from structattn.layout.sink_window import SinkWindow
from structattn.layout.text import TextLayout

AnyScoring = LowRank | BTT | MLR | Matrix


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention variant as a value: what ``parse_spec`` reads and ``str`` writes.

    Args:
        scoring: structure of M. Default: standard low rank.
        layout: structure of the score matrix; ``None`` is plain.
        window: sliding window in positions, ``None`` for none.
        num_heads: overrides the model's number of heads (``standard:1``); ``None`` keeps it.
        num_kv_heads: overrides the model's number of key and value heads (``standard,kv_heads=1``); ``None``
            keeps it.
        custom: a variant that is no scoring and layout, in place of all of these. Default ``None``.
    """

    scoring: AnyScoring = field(default_factory=LowRank)
    layout: LevelLayout | GlobalWindowLayout | Halving | SinkWindow | TextLayout | None = None
    window: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    custom: CustomAttention | None = None

    def __post_init__(self) -> None:
        check_type("custom", self.custom, CustomAttention | None, "a CustomAttention or None", "parse_spec reads text")
        others = (self.layout, self.window, self.num_heads, self.num_kv_heads)
        if self.custom is not None and (self.scoring != LowRank() or any(value is not None for value in others)):
            raise ConfigError(f"{self.custom} is a layer of its own: leave out scoring, layout, window and heads")
        check_type(
            "scoring", self.scoring, AnyScoring, "a scoring.LowRank, BTT, MLR or Matrix", "parse_spec reads text"
        )
        layouts = LevelLayout | GlobalWindowLayout | Halving | SinkWindow | TextLayout | None
        check_type("layout", self.layout, layouts, "a layout or None", "parse_spec reads text")
        if self.window is not None:
            check_size("window", self.window, MAX_LENGTH)
            if isinstance(self.layout, GlobalWindowLayout):
                raise ConfigError("a global-window layout has its own window: leave window at None")
            if isinstance(self.layout, SinkWindow):
                raise ConfigError("a window with sink tokens is the layout: leave window at None")
        for name in ("num_heads", "num_kv_heads"):
            if (heads := getattr(self, name)) is not None:
                check_size(name, heads)

    def layout_for(
        self, context_length: int, feature_dim: int | None = None
    ) -> LevelLayout | GlobalWindowLayout | TextLayout | None:
        """The layout for a model of that context length (in positions), whose queries have that dimension,
        which only a window with sink tokens needs.
        """
        if feature_dim is not None:
            check_size("feature_dim", feature_dim)
        if isinstance(self.layout, SinkWindow):
            if feature_dim is None:
                raise ConfigError("a window with sink tokens is a layout of heads of one size: give feature_dim")
            return self.layout.resolve(feature_dim)
        return self.layout.resolve(context_length) if isinstance(self.layout, Halving) else self.layout

    def with_scaling(self, scaling: ScoreScaling) -> AttentionSpec:
        """The same variant with another scaling of its scores, as muP needs it (``"mup"``), where it had the
        default.

        A scaling that was chosen (``"paper"``, say) stays. With a layout it is the layout's that counts.

        Args:
            scaling: ``"variance"`` or ``"mup"``.

        Raises:
            ConfigError: a custom variant, which has no muP.
        """
        check_choice("scaling", scaling, get_args(ScoreScaling))
        if self.custom is not None:
            raise ConfigError(f"{self.custom} has no scaling for muP: train it with the standard parametrization")
        layout, scoring = self.layout, self.scoring
        if layout is not None and layout.scaling == "variance":
            return dataclasses.replace(self, layout=dataclasses.replace(layout, scaling=scaling))
        if layout is None and scoring.scaling == "variance":
            return dataclasses.replace(self, scoring=dataclasses.replace(scoring, scaling=scaling))
        return self

    def __str__(self) -> str:
        return text_forms.write(self)
