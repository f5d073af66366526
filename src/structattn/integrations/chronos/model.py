"""``structurize``: structured self-attention in a T5 of Chronos, weights kept, and the classes that save and
reload it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, T5Config, T5ForConditionalGeneration

from structattn.checks import check_int, quoted
from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.chronos.attention import IMPLEMENTATION, VARIANT
from structattn.integrations.transformers.architecture.loading import StructuredModelMixin, first_keys, structure_entry
from structattn.integrations.transformers.variant import Variant, trained_spec
from structattn.layers.checks import check_fits
from structattn.layout.cost import visible_pairs, visible_pairs_per_level
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import parse_spec
from structattn.spec.layers import LayerSpecs


@dataclass(frozen=True, kw_only=True)
class T5Structure:
    """What ``config.structattn`` holds.

    Attributes:
        encoder, decoder: attention spec of each layer's self-attention.
        encoder_length, decoder_length: tokens from which blocks are halved.
    """

    encoder: tuple[str, ...]
    decoder: tuple[str, ...]
    encoder_length: int
    decoder_length: int

    @classmethod
    def read(cls, config: PreTrainedConfig) -> T5Structure:
        """The record of a config, checked.

        Raises:
            ConfigError: it is missing, incomplete, or does not fit the config.
        """
        given = structure_entry(config, list(cls.__dataclass_fields__))
        layers = {"encoder": config.num_layers, "decoder": config.num_decoder_layers}
        for stack, count in layers.items():
            length, specs = given[f"{stack}_length"], given[stack]
            check_int(f"config.structattn['{stack}_length']", length, minimum=1)
            if not isinstance(specs, list | tuple) or len(specs) != count:
                raise ConfigError(
                    f"config.structattn['{stack}'] needs one spec for each of {count} layers, got {quoted(specs)}"
                )
            for spec in specs:
                check_fits(trained_spec(spec).layout_for(length, config.d_kv), config.d_kv, config.d_kv)  # type: ignore[arg-type]
        return cls(**{**given, "encoder": tuple(given["encoder"]), "decoder": tuple(given["decoder"])})

    def variants(self, stack: str) -> list[Variant]:
        """The variant of each layer of ``"encoder"`` or ``"decoder"``."""
        return [Variant.of(parse_spec(spec), getattr(self, f"{stack}_length"), None) for spec in getattr(self, stack)]


class StructAttnT5Config(T5Config):  # type: ignore[misc]
    """``T5Config`` with the entry ``structattn``, see ``T5Structure``."""

    model_type = "structattn_t5"
    has_no_defaults_at_init = True  # otherwise transformers up to 5.17 makes one without arguments, to compare with

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        T5Structure.read(self)


class StructAttnT5ForConditionalGeneration(StructuredModelMixin, T5ForConditionalGeneration):  # type: ignore[misc]
    """T5 whose self-attention, of the encoder and of the decoder, has the structure of its config; cross
    attention is plain.

    Scores keep T5's scale of 1 and its relative position bias. The decoder's cache keeps all keys: Chronos
    decodes tens of tokens, and a compressed cache takes no bias. ``structurize`` and ``new_pipeline`` make
    the config.

    Raises:
        ConfigError: the specs do not fit, or another attention implementation is asked for.
    """

    config_class = StructAttnT5Config

    def __init__(self, config: StructAttnT5Config) -> None:
        self.claim(config, IMPLEMENTATION)
        super().__init__(config)
        _install(self, T5Structure.read(config))

    def check_loaded(self, info: dict[str, Any]) -> None:
        """See ``StructuredModelMixin``: weights that are missing would be random."""
        if info["missing_keys"]:
            raise CheckpointError(
                f"weights are missing: {first_keys(info['missing_keys'])}; save the whole model again"
            )

    def _prepare_cache_for_generation(self, *args: Any, **kwargs: Any) -> None:
        # The cache of transformers, whose keys are all there: not the level caches of StructuredModelMixin,
        # which take no bias.
        GenerationMixin._prepare_cache_for_generation(self, *args, **kwargs)

    def flops(self, num_inputs: int, num_outputs: int) -> int:
        """Forward FLOPs (2 per multiply-add) for the given numbers of context tokens and predicted tokens."""
        config, structure = self.config, T5Structure.read(self.config)
        width, inner = config.d_model, config.num_heads * config.d_kv
        mlp = 2 * width * config.d_ff * (3 if config.is_gated_act else 2)
        projections = 2 * width * inner  # of one token, each of q, k, v and o
        total = 2 * num_outputs * width * config.vocab_size
        for stack, length in (("encoder", num_inputs), ("decoder", num_outputs)):
            for variant in structure.variants(stack):
                pairs = _pair_flops(variant, length, config.d_kv, is_causal=stack == "decoder")
                total += length * (mlp + 4 * projections) + config.num_heads * pairs
        cross = 2 * projections * (num_inputs + num_outputs) + 4 * inner * num_inputs * num_outputs
        return int(total + config.num_decoder_layers * cross)


def _pair_flops(variant: Variant, length: int, dim: int, *, is_causal: bool) -> int:
    """Scores and weighted sums of one head over T positions."""
    layout, window = variant.layout, variant.window
    if isinstance(layout, HeadLayouts):  # the mean over heads
        flops = [_pair_flops(replace(variant, layout=x), length, dim, is_causal=is_causal) for x in layout.layouts]
        return round(sum(flops) / len(flops))
    if layout is None:
        return 4 * dim * visible_pairs(length, length, window, is_causal)
    if not isinstance(layout, LevelLayout):
        return layout.score_flops(length, is_causal) + 4 * dim * visible_pairs(length, length, None, is_causal)
    counts = visible_pairs_per_level(layout, length, length, window, is_causal)
    scores = 2 * sum(rank * count for rank, count in zip(layout.ranks, counts, strict=True))
    values = (dim,) if layout.value_ranks is None else layout.value_ranks
    return scores + 2 * sum(rank * count for rank, count in zip(values, counts, strict=False))


def _install(model: nn.Module, structure: T5Structure) -> None:
    """Stores its variant in every self-attention module, where ``t5_attention`` reads it."""
    for stack in ("encoder", "decoder"):
        blocks = getattr(model, stack).block
        for block, variant in zip(blocks, structure.variants(stack), strict=True):
            setattr(block.layer[0].SelfAttention, VARIANT, variant)


def structured_config(
    config: PreTrainedConfig,
    spec: str,
    decoder_spec: str | None,
    encoder_length: int | None,
    decoder_length: int | None,
) -> StructAttnT5Config:
    """A copy of the config of a T5 with the entry ``structattn``; arguments as ``structurize``."""
    chronos = getattr(config, "chronos_config", None) or {}
    # One more than Chronos counts: the end-of-series token of the context, the start token of the decoder.
    for name, value in (("encoder_length", encoder_length), ("decoder_length", decoder_length)):
        if value is not None:
            check_int(name, value, minimum=1)
    known = {
        "encoder": encoder_length or chronos.get("context_length", -1) + 1,
        "decoder": decoder_length or chronos.get("prediction_length", -1) + 1,
    }
    for stack, length in known.items():
        if length < 1:
            raise ConfigError(
                f"the config has no chronos_config to halve blocks from: give {stack}_length, the tokens of the {stack}"
            )
    decoder_spec = spec if decoder_spec is None else decoder_spec
    new = copy.deepcopy(config)  # the old one may belong to other models as well
    new.__class__ = StructAttnT5Config
    new.structattn = {
        "encoder": list(LayerSpecs.parse(spec).texts(config.num_layers)),
        "decoder": list(LayerSpecs.parse(decoder_spec).texts(config.num_decoder_layers)),
        "encoder_length": known["encoder"],
        "decoder_length": known["decoder"],
    }
    T5Structure.read(new)
    new._attn_implementation = IMPLEMENTATION
    return new


def structurize(
    model: T5ForConditionalGeneration,
    spec: str,
    *,
    decoder_spec: str | None = None,
    encoder_length: int | None = None,
    decoder_length: int | None = None,
) -> StructAttnT5ForConditionalGeneration:
    """Puts structured self-attention into a T5, such as that of a Chronos pipeline; its weights and position
    biases are kept.

    With one level, forecasts are unchanged up to rounding. With several, pairs in one block of the deepest
    level keep their scores, and farther ones lose the dimensions of the levels that they do not share:
    fine-tune the model.

    Args:
        model: it is changed in place, so that a pipeline around it (``pipeline.inner_model``) is too.
        spec: a layout and a window, such as ``"mlr:32|16|8|8"`` or ``"window:64"``, or a list that is
            repeated over the layers, such as ``"[standard,window:64]"``.
        decoder_spec: of the decoder. Default: the same, with blocks halved from the decoder's own length.
        encoder_length: tokens from which the encoder's blocks are halved. Default: Chronos' context length
            plus one.
        decoder_length: likewise for the decoder. Default: Chronos' prediction length plus one.

    Returns:
        The model, now a ``StructAttnT5ForConditionalGeneration``. ``save_pretrained`` keeps the structure;
        ``load_pipeline`` and ``ChronosPipeline.from_pretrained`` restore it.

    Raises:
        ConfigError: the model is not a T5 of transformers, or is structurized already; the spec asks for
            other weights; ranks do not sum to ``d_kv``; no length is known.
    """
    if type(model) is not T5ForConditionalGeneration:
        hint = (
            "it is structurized already: start from the plain model"
            if isinstance(model, StructAttnT5ForConditionalGeneration)
            else "Chronos-Bolt and Chronos-2 are other architectures; the first Chronos models are T5"
        )
        raise ConfigError(f"expected a T5ForConditionalGeneration, got {type(model).__name__}: {hint}")
    old = model.config
    config = structured_config(old, spec, decoder_spec, encoder_length, decoder_length)
    # Each stack has a separate copy of the config, which says which stack it is.
    configs: dict[int, Any] = {id(old): config}
    for module in model.modules():
        own = getattr(module, "config", None)
        if isinstance(own, PreTrainedConfig):
            if id(own) not in configs:
                copied = copy.deepcopy(own)
                copied.__class__ = StructAttnT5Config
                copied.structattn, copied._attn_implementation = config.structattn, IMPLEMENTATION
                configs[id(own)] = copied
            module.config = configs[id(own)]
    model.__class__ = StructAttnT5ForConditionalGeneration
    _install(model, T5Structure.read(config))
    return model
