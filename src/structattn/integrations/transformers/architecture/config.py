"""``StructAttnConfig``: the architecture of ``StructAttnForCausalLM``, its attention specs included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from structattn.checks import check_bool, check_int, check_number, check_size, quoted, shortened
from structattn.errors import ConfigError
from structattn.integrations.transformers.architecture.auto_map import SelfLoadingConfig
from structattn.layers.rotary import Rotary
from structattn.layout.text import TextLayout
from structattn.spec.attention import parse_spec
from structattn.spec.layers import LayerSpecs

_OPTIONAL_SIZES = ("num_key_value_heads", "intermediate_size")
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    *_OPTIONAL_SIZES,
)


@contextmanager
def _as_config_errors() -> Iterator[None]:
    """Errors of transformers for its own fields, such as dtype and id2label, become ours. Up to 5.17 it
    checks a field when it is set.
    """
    try:
        yield
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"transformers cannot use a field of this config: {shortened(ascii(str(error)))}") from error


class OwnErrors:
    """A mixin that precedes a config class: a field that transformers cannot use is a ``ConfigError``,
    whenever it is set.
    """

    def __post_init__(self, **kwargs: Any) -> None:
        with _as_config_errors():
            super().__post_init__(**kwargs)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        with _as_config_errors():
            super().__setattr__(name, value)


class ReturnsWeights:
    """A mixin that precedes a config class: ``output_attentions`` takes no other attention implementation
    than that of the model.
    """

    _output_attentions: bool | None

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns attention weights when it is not asked."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        self._output_attentions = value

    def validate(self) -> None:
        """The checks of transformers, of which one refuses the setting with any implementation but
        "eager".
        """
        shown, self._output_attentions = self._output_attentions, False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = shown


class StructAttnConfig(OwnErrors, ReturnsWeights, SelfLoadingConfig, PreTrainedConfig):  # type: ignore[misc]
    """A Llama-like decoder whose attention is given by specs.

    Args:
        attention: one spec of ``structattn.spec`` for all layers, a text of ``structattn.spec.layers`` that
            is repeated over them, or a list with one per layer. There is no default.
        rotary: text of ``structattn.layers.rotary.Rotary``, such as ``"low_far,base=500000"``; ``None``:
            positions are learned, up to ``max_position_embeddings``. Default ``"low_far"``.
        vocab_size: V. Default 32,000.
        hidden_size: E. Default 512.
        intermediate_size: width of the MLP. Default ``None``: 8 E / 3, rounded up to a multiple of 64.
        num_hidden_layers: blocks. Default 8.
        num_attention_heads: H, which divides E. Default 8.
        num_key_value_heads: G, which divides H. Default ``None``: H.
        max_position_embeddings: context length in positions, from which blocks are halved. Default 2,048.
        qk_norm: layer norm of queries and keys. Default ``True``.
        attention_bias: biases of the value and output projections and of those norms. Default ``False``.
        attention_dropout, hidden_dropout: of attention weights, and of what is added to the residual stream.
        rms_norm_eps: of the RMS norms.
        initializer_range: standard deviation of embeddings and of the MLP.
        tie_word_embeddings: the head shares the embeddings. Default ``False``.
        use_cache: default of ``forward`` outside training.

    Raises:
        ConfigError: a spec is missing, unknown or too many, a text is not of its form, or a number is out of
            its range. Ranks, and numbers of heads that do not divide, are found when the model is made.
    """

    model_type = "structattn"
    has_no_defaults_at_init = True  # otherwise transformers up to 5.17 makes one without arguments, to compare with
    keys_to_ignore_at_inference = ["cache", "past_key_values"]  # noqa: RUF012 - transformers' own form

    attention: str | list[str] | None = None
    rotary: str | None = "low_far"
    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 2048
    qk_norm: bool = True
    attention_bias: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in _SIZES:
            if getattr(self, name) is not None or name not in _OPTIONAL_SIZES:
                check_size(name, getattr(self, name))
        for name in ("attention_dropout", "hidden_dropout"):
            check_number(name, getattr(self, name), minimum=0, below=1)
        for name in ("rms_norm_eps", "initializer_range"):
            check_number(name, getattr(self, name), minimum=0)
        for name in ("qk_norm", "attention_bias", "tie_word_embeddings", "use_cache"):
            check_bool(name, getattr(self, name))
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            tokens = getattr(self, name)
            for token in tokens if name == "eos_token_id" and isinstance(tokens, list) else [tokens]:
                if token is not None:
                    check_int(name, token, minimum=0, maximum=self.vocab_size - 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // 3 // 64) * 64
        for spec in self.layer_specs:
            if isinstance(parse_spec(spec).layout, TextLayout):
                raise ConfigError(
                    f"attention spec {quoted(spec)} has text units as levels, and a StructAttnConfig does not know "
                    "which tokens end lines: train a structattn.LanguageModel, or give blocks (mlr)"
                )
        if self.rotary is not None:
            Rotary.parse(self.rotary)
        super().__post_init__(**kwargs)

    @property
    def layer_specs(self) -> tuple[str, ...]:
        """The attention spec of each layer.

        Raises:
            ConfigError: it is missing, no text, or not one per layer.
        """
        attention = self.attention
        if attention is None:
            raise ConfigError(
                "a StructAttnConfig needs attention=, one spec such as 'mlr:32|16|16' or a list with one per layer: it "
                "has no default, so that a model without its structure is never mistaken for one with it"
            )
        if isinstance(attention, str):
            return LayerSpecs.parse(attention).texts(self.num_hidden_layers)
        if not isinstance(attention, list | tuple) or not all(isinstance(spec, str) for spec in attention):
            raise ConfigError(f"attention must be a text or a list of texts, got {quoted(attention)}")
        if len(attention) != self.num_hidden_layers:
            raise ConfigError(
                f"attention needs one spec, or one per layer: expected {self.num_hidden_layers}, got {len(attention)}"
            )
        return tuple(attention)
