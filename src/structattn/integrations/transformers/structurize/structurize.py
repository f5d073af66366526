"""``structurize``: MLR attention and windows in trained models of transformers, weights kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from structattn.cache.level_cache import LevelCache
from structattn.cache.storage import (
    ModelStorage,
    chooses_tokens,
    storage_data,
    storage_of_heads,
    storage_of_layers,
)
from structattn.checks import check_path, check_type
from structattn.errors import ConfigError, StructAttnError
from structattn.integrations.hub import source_config
from structattn.integrations.transformers.architecture.loading import check_one_decoder, check_plain
from structattn.integrations.transformers.calibration.absorb import Absorption
from structattn.integrations.transformers.calibration.allocate import Allocation
from structattn.integrations.transformers.calibration.discovery import FoundAttention, find_attention
from structattn.integrations.transformers.calibration.record import Calibration
from structattn.integrations.transformers.calibration.splits import CALIBRATED_SPLITS
from structattn.integrations.transformers.structurize.calibrated import add_calibration, layouts_of_bases
from structattn.integrations.transformers.structurize.classes import (
    StructureRecord,
    check_frequencies,
    install,
    saved_class,
    structurized_class,
    structurized_config,
)
from structattn.integrations.transformers.structurize.layer_specs import (
    chosen_layers,
    layout_with_levels,
    specs_of_layers,
)
from structattn.integrations.transformers.structurize.modules import IMPLEMENTATION
from structattn.integrations.transformers.structurize.pair_orders import check_any_split
from structattn.layers.checks import check_fits
from structattn.layout.heads import HeadLayouts
from structattn.spec.attention import AttentionSpec, parse_spec


def structurize(
    model: PreTrainedModel,
    spec: str | AttentionSpec | Sequence[str | AttentionSpec],
    *,
    layers: Sequence[int] | None = None,
    rotary_split: str = "low_far",
    context_length: int | None = None,
    calibration: Calibration | None = None,
    storage: ModelStorage = None,
) -> PreTrainedModel:
    """Puts structured attention into a trained decoder of transformers; without a calibration its weights are
    kept.

    With one level the logits are unchanged up to rounding. With several, pairs in one block of the deepest
    level keep their scores, and farther ones lose the dimensions of the levels that they do not share:
    fine-tune the model.

    No weight changes: when queries and keys are rotated, their dimensions are permuted so that the slice of
    every level holds whole rotary pairs. Adapters of the original model fit, loaded before or after. The
    frequencies remain those of the model, with its RoPE scaling for long contexts.

    With a calibration, levels keep what far tokens need most. With ``rotary_split="calibrated"`` each key
    head has its own order of rotary pairs, applied after the rotation: level 1 gets those without which the
    output changes most. Hierarchical values (``values=``) get the basis in which the dimensions that are
    dropped matter least, and so do queries and keys without rotary positions: these bases are written into
    the projections, and the logits are unchanged until levels drop dimensions. Calibrated keys need specs
    with ``scaling=standard``, the scale of the trained model at every distance: the default one would enlarge
    what is left of far scores by sqrt(D / rank).

    A pair could also be multiplied by a complex number c in queries and 1 / conj(c) in keys. That changes no
    score and no choice of pairs, so that it is left out: it would only matter for caches of fewer bits.

    Args:
        model: it is changed in place: its class, its config and its attention modules.
        spec: a layout and a window, such as ``"mlr:32|16|16"``, ``"mlr:32|32,values=32|32"`` or
            ``"window:512"``; a list that is repeated over the chosen layers, such as
            ``"[mlr:32|32,window:512]"``; or one per chosen layer.
        layers: numbers of the layers to change. Default: all.
        rotary_split: ``"low_far"``: the global level gets the slowest frequencies; ``"interleaved"``: every
            level gets some of the whole range; ``"calibrated"``: see above. No effect without rotary
            positions.
        context_length: from which blocks are halved. Default: ``config.max_position_embeddings``; BLOOM and
            MPT have none, and need it for specs with blocks that are halved only.
        calibration: of this model, from ``calibrate``. Default ``None``: no weight changes.
        storage: in which bits the caches of the model store numbers, ``level_cache`` and those that
            ``generate`` makes: ``structurize(model, "standard", storage=sa.Storage(4, 4))`` gives any
            supported model a cache of 4 bits. A list has an entry for each layer of the model: a storage,
            ``None``, or a list of these with one for each key head. It is saved with the model. Default
            ``None``: as they are, or as an ``Allocation`` says.

    Returns:
        The model, now of a class such as ``StructAttnLlamaForCausalLM``. ``save_pretrained`` keeps the
        structure, and ``from_pretrained`` of that class, ``load_structurized`` and the Auto classes restore
        it.

    Raises:
        ConfigError: the model is not of a supported class, or is structurized already; the spec asks for
            other weights; ranks are odd (with rotary positions) or do not sum to the head dimension; both a
            layer and the spec have a window; the rotary frequencies depend on the length; the calibration is
            missing, or of a model with other heads; the storage or the sink tokens do not fit a layer; or a
            basis would change where values (or queries and keys) are not those of a linear layer, as with
            norms, adapters and quantized weights. The model is as it was then.

    Cost: of a forward pass, one more copy of queries and keys in each layer with levels.

    Source: MHA2MLA (arXiv 2502.14837) and TransMLA (2502.07864) restructure rotary pairs and values for one
        latent vector; KQ-SVD (2512.05916) for keys without rotary positions. Levels by distance are ours.
    """
    _check(model, rotary_split, calibration)
    split = check_any_split(rotary_split)
    attention = _attention_layers(model, calibration)
    if isinstance(spec, Allocation):
        spec.check(list(attention.values()))
    chosen = chosen_layers(layers, list(attention))
    specs = specs_of_layers(spec, chosen, model.config.num_hidden_layers)
    length = _length_of_blocks(model, specs, context_length)
    if isinstance(spec, Allocation) and spec.has_levels and split not in CALIBRATED_SPLITS:
        raise ConfigError(
            "allocate chose ranks of levels, for dimensions in the order of its calibration: give structurize "
            "rotary_split='calibrated' and calibration= too. Tokens and bits of single heads were not measured: that "
            "takes texts of 128 tokens and more, an output head, and a layer without a window or chunks"
        )
    scorers: dict[int, Tensor] = {}
    if storage is None and isinstance(spec, Allocation):
        storage = spec.storage_of(chosen, len(specs))
        scorers = {number: x for number, x in zip(chosen, spec.scorers, strict=False) if x is not None}
    _check_scorers(storage, scorers, attention, len(specs))
    layouts = {
        number: layout for number, text in enumerate(specs) if (layout := layout_with_levels(text, length)) is not None
    }

    config = _config_with_record(model.config, attention, specs, length, split)
    if storage is not None:
        config.structattn["storage"] = storage_data(_checked_storage(storage, attention, len(specs)))
    if scorers:
        sizes = {number: [len(scorer), scorer.shape[1] - 1] for number, scorer in scorers.items()}
        config.structattn["scorers"] = [sizes.get(number) for number in range(len(specs))]
    if calibration is not None:
        add_calibration(config, split, calibration, layouts)
    record = _checked_record(config, attention)
    _check_caches(record, attention)

    bases = None
    if calibration is not None:
        bases = Absorption(model, list(attention.values()), calibration, layouts_of_bases(layouts, config))
    _install(model, attention, config, record)
    if bases is not None:
        bases.write()
    for number, scorer in scorers.items():
        attention[number].module.write_token_scorer(scorer)  # type: ignore[operator]
    return model


def _check(model: PreTrainedModel, rotary_split: str, calibration: Calibration | None) -> None:
    """Raises ``ConfigError`` unless the model is one decoder that can be structurized, and the arguments fit
    each other.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    check_plain(model)
    split = check_any_split(rotary_split)
    check_type(
        "calibration", calibration, Calibration | None, "a Calibration or None", "calibrate(model, batches) makes one"
    )
    if split in CALIBRATED_SPLITS and calibration is None:
        raise ConfigError(f"rotary_split {split!r} needs calibration=calibrate(model, batches)")
    check_one_decoder(model)
    check_frequencies(model)


def _attention_layers(model: PreTrainedModel, calibration: Calibration | None) -> dict[int, FoundAttention]:
    """The attention of a model by the number of its layer; raises ``ConfigError`` where the calibration is of
    another model.
    """
    attention = {layer.index: layer for layer in find_attention(model)}
    if calibration is not None:
        calibration.check(list(attention.values()))
    return attention


def _length_of_blocks(model: PreTrainedModel, specs: Sequence[str | None], context_length: int | None) -> int:
    """The length from which blocks are halved; 1 where it is not known, and no spec needs it."""
    length = getattr(model.config, "max_position_embeddings", None) if context_length is None else context_length
    if length is None:
        if not any(parse_spec(spec).halves_blocks for spec in specs if spec is not None):
            return 1
        raise ConfigError(
            f"the config of {type(model).__name__} has no max_position_embeddings to halve blocks from: give "
            "structurize a context_length"
        )
    return length


def _checked_storage(storage: ModelStorage, attention: Mapping[int, FoundAttention], count: int) -> ModelStorage:
    """How each of ``count`` layers stores numbers; raises ``ConfigError`` where it does not fit them."""
    for number, of_layer in enumerate(storage_of_layers(storage, count)):
        if number in attention:
            storage_of_heads(of_layer, attention[number].num_kv_heads)
    return storage


def _check_scorers(
    storage: ModelStorage, scorers: Mapping[int, Tensor], attention: Mapping[int, FoundAttention], count: int
) -> None:
    """Raises ``ConfigError`` where tokens are chosen of a layer whose scores are not known."""
    for number, of_layer in enumerate(storage_of_layers(storage, count)):
        is_shared = number in attention and attention[number].keys_of is not None
        if chooses_tokens(of_layer) and number not in scorers and not is_shared:
            raise ConfigError(
                f"the storage of layer {number} chooses tokens (keep=), and nothing scores them: give structurize what "
                "allocate(calibrate(model, batches), ...) returns, without storage="
            )


def _config_with_record(
    old: PreTrainedConfig,
    attention: Mapping[int, FoundAttention],
    specs: list[str | None],
    length: int,
    split: str,
) -> Any:
    """A copy of a config that has the structure; the old one may belong to other models as well."""
    every = [attention.get(number) for number in range(old.num_hidden_layers)]
    rotations = [None if layer is None or layer.rotation is None else str(layer.rotation) for layer in every]
    config: Any = copy.deepcopy(old)
    config.__class__ = structurized_config(type(old))
    config.structattn = {
        "specs": specs,
        "context_length": length,
        "rotary_split": split if any(rotations) else None,
        "attention": type(next(iter(attention.values())).module).__name__,
        "rotations": rotations,
    }
    if any(layer.keys_of is not None for layer in attention.values()):
        config.structattn["keys_of"] = [None if layer is None else layer.keys_of for layer in every]
    return config


def _checked_record(config: PreTrainedConfig, attention: Mapping[int, FoundAttention]) -> StructureRecord:
    """The record of a config; raises ``ConfigError`` unless it fits the layers that have a spec."""
    record = StructureRecord.read(config)
    for number, layer in attention.items():
        if record.specs[number] is not None:
            structure = record.structure(layer.module, number)
            if isinstance(structure.variant.layout, HeadLayouts):
                structure.variant.layout.check_heads(layer.num_kv_heads)
            check_fits(structure.variant.layout, layer.head_dim, layer.value_dim)
            structure.variant.within(layer.window, layer.chunk_size)
    return record


def _check_caches(record: StructureRecord, attention: Mapping[int, FoundAttention]) -> None:
    """Raises ``ConfigError`` unless the cache of each layer can be made; those of layers without a spec may
    have a storage too.
    """
    storages = storage_of_layers(record.storage, len(record.specs))
    for number, layer in attention.items():
        variant = record.structure(layer.module, number).variant.within(layer.window, layer.chunk_size)
        window, chunk_size = variant.window, variant.chunk_size
        try:
            cache = LevelCache(variant.layout, window=window, chunk_size=chunk_size, storage=storages[number])
            cache.check_heads((layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, layer.value_dim))
        except StructAttnError as error:
            raise ConfigError(f"the cache of layer {number} cannot be made: {error}") from error


def _install(
    model: PreTrainedModel,
    attention: Mapping[int, FoundAttention],
    config: PreTrainedConfig,
    record: StructureRecord,
) -> None:
    """Gives a model our classes and its new config."""
    old = model.config
    structurized_class(type(model), type(old))
    install(model, {number: layer.module for number, layer in attention.items()}, record)
    config._attn_implementation = IMPLEMENTATION
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config


def load_structurized(path: str | Path, **options: Any) -> Any:
    """Loads what ``save_pretrained`` of a structurized model wrote, as the class that was saved.

    Args:
        path: a folder or a name on the hub.
        **options: as of ``from_pretrained``.

    Raises:
        ConfigError: there is no such folder, or it holds another kind of model.
        CheckpointError: see ``StructuredModelMixin.from_pretrained``.
    """
    check_path("path", path)
    config = source_config(path, **options)
    names = config.architectures or []
    if (kind := saved_class(config, names)) is not None:
        return kind.from_pretrained(path, **options)
    raise ConfigError(
        f"{path} holds a {config.model_type} model ({', '.join(names)}), not one that structurize() changed and saved"
    )
