"""The text form of the attention of a whole model: one spec for all layers, or a list that is repeated over
them.

    mlr:32|16|8|8        [standard,window:128,window:128]        [mlr:32|32,scaling=paper,window:128]

A comma in the brackets ends a spec, unless an option ``key=value`` follows it, which belongs to that spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from structattn.checks import check_size, check_type
from structattn.errors import ConfigError
from structattn.grammar import Form, reading, split_specs
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.scoring_modules import ScoreScaling
from structattn.spec.attention import describe_spec, parse_spec

MAX_LAYERS = 2**16
FORM = Form(
    "[SPEC,SPEC,...]",
    "[standard,window:128,window:128]",
    "one spec for each layer, in order; the list is repeated if there are more layers",
)


@dataclass(frozen=True)
class LayerSpecs:
    """The attention of every layer of a model: layer n has spec n mod N of a pattern of N.

    Args:
        pattern: the specs, at least one.

    Raises:
        ConfigError: the pattern is empty.

    Example:
        >>> LayerSpecs.parse("[standard, window:128]").texts(3)
        ('standard', 'window:128', 'standard')

    Source: the repeated patterns of Kuang et al. 2025, such as one global layer and two with a window.
    """

    pattern: tuple[AttentionSpec, ...]

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(self, pattern: Sequence[AttentionSpec]) -> None: ...

    def __post_init__(self) -> None:
        check_type("pattern", self.pattern, tuple | list, "a tuple of AttentionSpec", "parse reads text")
        for spec in self.pattern:
            check_type("each of pattern", spec, AttentionSpec, "an AttentionSpec", "parse_spec reads text")
        if not self.pattern:
            raise ConfigError("a list of attention specs needs at least one, got none")
        object.__setattr__(self, "pattern", tuple(self.pattern))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form: one spec, or several in brackets; ``parse(str(x)) == x``.

        Raises:
            ConfigError: a bracket is not closed, a spec is empty, or one is not known (see ``parse_spec``).
        """
        check_type("attention specs", text, str, f"text, such as {FORM.example}")
        bare = text.strip()
        if not bare.startswith("["):
            return cls((parse_spec(bare),))
        inner = bare[1:-1]
        with reading("attention specs", text, FORM.help):
            if not bare.endswith("]") or len(bare) < 2 or "[" in inner or "]" in inner:
                raise ConfigError("a list is written in one pair of brackets")
            specs = split_specs(inner)
            if not all(specs):
                raise ConfigError("expected a spec before and after every comma")
        return cls(tuple(map(parse_spec, specs)))

    def __str__(self) -> str:
        return str(self.pattern[0]) if len(self.pattern) == 1 else f"[{','.join(map(str, self.pattern))}]"

    def layers(self, num_layers: int) -> tuple[AttentionSpec, ...]:
        """The spec of each layer.

        Raises:
            ConfigError: there are more specs than layers, so that some would not be used.
        """
        check_size("num_layers", num_layers, MAX_LAYERS)
        if len(self.pattern) > num_layers:
            raise ConfigError(
                f"attention specs {self}: {len(self.pattern)} specs for {num_layers} layers, so that some would not be "
                "used: give at most as many as layers"
            )
        return tuple(self.pattern[layer % len(self.pattern)] for layer in range(num_layers))

    def texts(self, num_layers: int) -> tuple[str, ...]:
        """As ``layers``, each as text."""
        return tuple(map(str, self.layers(num_layers)))

    def describe(self) -> str:
        """What the specs mean, in words: one sentence, or one for each layer of a list in turn."""
        texts = [describe_spec(str(spec)) for spec in self.pattern]
        return texts[0] if len(texts) == 1 else f"layers in turn: {' / '.join(texts)}"

    def with_scaling(self, scaling: ScoreScaling) -> Self:
        """Every spec ``AttentionSpec.with_scaling``."""
        return type(self)(tuple(spec.with_scaling(scaling) for spec in self.pattern))
