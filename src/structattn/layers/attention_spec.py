"""An attention variant as a value: a scoring, a layout and a window."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import get_args

from structattn import text_forms
from structattn.checks import MAX_LENGTH, check_choice, check_size, check_type
from structattn.errors import ConfigError
from structattn.layers.layer import CustomAttention
from structattn.layers.scoring import BTT, MLR, Matrix, Standard
from structattn.layers.scoring_modules import ScoreScaling
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.halving import Halving
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.sink_window import SinkWindow
from structattn.layout.text import TextLayout

AnyScoring = Standard | BTT | MLR | Matrix


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
        heads: for each key head a spec with a layout or a window, in place of ``layout`` and ``window``; all
            have ``scoring``, whose keys are then as many. Default ``None``: all heads have those.

    Raises:
        ConfigError: an option is of another kind or out of its range, or two exclude each other.
    """

    scoring: AnyScoring = field(default_factory=Standard)
    layout: LevelLayout | GlobalWindowLayout | Halving | SinkWindow | TextLayout | None = None
    window: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    custom: CustomAttention | None = None
    heads: tuple[AttentionSpec, ...] | None = None

    def __post_init__(self) -> None:
        if self.heads is not None:
            self._check_heads()
        check_type("custom", self.custom, CustomAttention | None, "a CustomAttention or None", "parse_spec reads text")
        others = (self.layout, self.window, self.num_heads, self.num_kv_heads, self.heads)
        if self.custom is not None and (self.scoring != Standard() or any(value is not None for value in others)):
            raise ConfigError(f"{self.custom} is a layer of its own: leave out scoring, layout, window and heads")
        check_type(
            "scoring", self.scoring, AnyScoring, "a scoring.Standard, BTT, MLR or Matrix", "parse_spec reads text"
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

    def _check_heads(self) -> None:
        """Raises ``ConfigError`` unless there is a spec for each head, of a layout or a window only."""
        check_type("heads", self.heads, tuple | list, "a tuple of AttentionSpec, one for each key head", "or None")
        assert self.heads is not None
        if not self.heads:
            raise ConfigError("heads need a spec for each key head, got none")
        if self.layout is not None or self.window is not None:
            raise ConfigError("heads have layouts and windows of their own: leave layout and window out")
        if isinstance(self.scoring, Standard) and self.scoring != Standard():
            raise ConfigError("the scaling of standard heads is that of their specs: heads:standard,scaling=mup")
        for head, spec in enumerate(self.heads):
            check_type(f"the spec of head {head}", spec, AttentionSpec, "an AttentionSpec", "parse_spec reads text")
            is_plain = spec.custom is None and (spec.heads, spec.num_heads, spec.num_kv_heads) == (None, None, None)
            if not is_plain or spec.scoring not in (Standard(), Standard(scaling="mup")):
                raise ConfigError(
                    f"the spec of head {head}, {spec}, must be a layout or a window alone, such as standard, "
                    "window:252,sink_tokens=4, mlr:32|32 or sliding:32|32@-|128"
                )
            if isinstance(spec.layout, TextLayout) or (spec.layout is not None and spec.window is not None):
                what = "text units as levels" if isinstance(spec.layout, TextLayout) else "both a layout and a window"
                raise ConfigError(f"the spec of head {head}, {spec}, has {what}: give a layout of blocks or a window")
        object.__setattr__(self, "heads", tuple(self.heads))

    @property
    def halves_blocks(self) -> bool:
        """Whether there are blocks whose sizes follow from a context length."""
        return any(isinstance(spec.layout, Halving) for spec in self.heads or (self,))

    def layout_for(
        self, context_length: int, feature_dim: int | None = None
    ) -> LevelLayout | GlobalWindowLayout | HeadLayouts | TextLayout | None:
        """The layout for a model of that context length (in positions), whose queries have that dimension,
        which windows with sink tokens and those of single heads need.
        """
        check_size("context_length", context_length, MAX_LENGTH)
        if feature_dim is not None:
            check_size("feature_dim", feature_dim)
        if self.heads is not None:
            # All heads have one dimension: that of the ranks, where one has ranks.
            ranks = next((x.ranks for spec in self.heads if (x := spec.layout) and not isinstance(x, SinkWindow)), None)
            dim = feature_dim if ranks is None else sum(ranks)
            return HeadLayouts([_layout_of_head(spec, context_length, dim) for spec in self.heads])
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
        if self.heads is not None and isinstance(scoring, Standard):
            return dataclasses.replace(self, heads=tuple(spec.with_scaling(scaling) for spec in self.heads))
        if self.heads is not None:  # those without a layout have the scale of the scoring
            heads = [spec if spec == AttentionSpec() else spec.with_scaling(scaling) for spec in self.heads]
            scoring = scoring if scoring.scaling != "variance" else dataclasses.replace(scoring, scaling=scaling)
            return dataclasses.replace(self, scoring=scoring, heads=tuple(heads))
        if layout is not None and layout.scaling == "variance":
            return dataclasses.replace(self, layout=dataclasses.replace(layout, scaling=scaling))
        if layout is None and scoring.scaling == "variance":
            return dataclasses.replace(self, scoring=dataclasses.replace(scoring, scaling=scaling))
        return self

    def __str__(self) -> str:
        return text_forms.write(self)


def _layout_of_head(
    spec: AttentionSpec, context_length: int, feature_dim: int | None
) -> LevelLayout | GlobalWindowLayout | None:
    """The layout of a head of that dimension; a window is one sliding level."""
    if spec.layout is None and spec.window is None and spec.scoring.scaling == "variance":
        return None
    if spec.layout is not None:
        layout = spec.layout_for(context_length, feature_dim)
        assert isinstance(layout, LevelLayout | GlobalWindowLayout)
        return layout
    if feature_dim is None:
        raise ConfigError("the window of a head is a layout of heads of one size: give feature_dim")
    return LevelLayout.sliding((feature_dim,), (spec.window,), spec.scoring.scaling)
