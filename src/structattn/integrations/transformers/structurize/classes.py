"""The config and model classes of structurized models: those of transformers, with a record of the
structure.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from transformers import AutoConfig, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from structattn.cache.storage import ModelStorage, chooses_tokens, storage_of_layers
from structattn.checks import MAX_SIZE, check_int, is_int, quoted
from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.transformers.architecture.auto_map import AUTO_MODELS, SelfLoadingConfig, publish
from structattn.integrations.transformers.architecture.config import OwnErrors, ReturnsWeights
from structattn.integrations.transformers.architecture.inputs import checked
from structattn.integrations.transformers.architecture.loading import StructuredModelMixin, first_keys, structure_entry
from structattn.integrations.transformers.attention.adapters import complete, has_adapter
from structattn.integrations.transformers.attention.registration import record_outputs
from structattn.integrations.transformers.caches.model_cache import storage_of
from structattn.integrations.transformers.calibration.splits import CALIBRATED_SPLITS
from structattn.integrations.transformers.structurize.modules import (
    IMPLEMENTATION,
    OLD_ORDER,
    LayerStructure,
    StructuredAttention,
    structured_class,
    structured_name,
)
from structattn.integrations.transformers.structurize.pair_orders import (
    check_any_split,
    read_pair_orders,
)
from structattn.integrations.transformers.variant import Variant, trained_spec
from structattn.layers.checks import check_fits
from structattn.layers.rotary_order import Rotation, check_split
from structattn.spec.attention import parse_spec

# Names for the dimension of a head in attention modules of transformers.
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
# Version 0.1 did not record these two: its models were of these attention classes, and rotated all pairs (i,
# i + D / 2) or none.
_OLD_ATTENTION = {
    "structattn_llama": "LlamaAttention",
    "structattn_qwen2": "Qwen2Attention",
    "structattn_qwen3": "Qwen3Attention",
    "structattn_gpt2": "GPT2Attention",
}


@dataclass(frozen=True, kw_only=True)
class StructureRecord:
    """What ``config.structattn`` holds.

    Attributes:
        specs: attention spec of each layer; ``None`` for unchanged layers.
        context_length: from which blocks are halved.
        rotary_split: ``None`` for models without rotary positions; a calibrated one: see ``pair_orders``.
        attention: name of the attention class of transformers.
        rotations: rotary pairs of each layer, as ``Rotation`` writes them; ``None`` for layers that rotate
            nothing.
        keys_of: number of the layer whose keys each layer scores; ``None`` where it has keys of its own.
            Recorded where there are any.
        pair_orders: for each layer and key head the rotary pairs in the order of the levels, where they are
            calibrated. They are part of the config, as the specs are: the weights remain those of the plain
            model, in names and order.
        storage: in which bits the cache of the model stores numbers. Recorded where it is given.
        scorers: of each layer whose cache chooses tokens, the key heads and the numbers of a hidden state
            that reaches it; ``None`` for others. Recorded where there are any.
    """

    specs: tuple[str | None, ...]
    context_length: int
    rotary_split: str | None
    attention: str
    rotations: tuple[str | None, ...]
    keys_of: tuple[int | None, ...]
    pair_orders: tuple[tuple[tuple[int, ...], ...] | None, ...]
    storage: ModelStorage = None
    scorers: tuple[tuple[int, int] | None, ...] = ()

    @classmethod
    def read(cls, config: PreTrainedConfig) -> StructureRecord:
        """The record of a config, checked.

        Raises:
            ConfigError: it is missing, incomplete, or does not fit the config.
        """
        names = [field.name for field in fields(cls)]
        entry = structure_entry(config, names, optional=names[3:])
        count, split = config.num_hidden_layers, entry["rotary_split"]
        specs = _one_per_layer("specs", entry["specs"], count, "specs")
        length = entry["context_length"]
        check_int("config.structattn['context_length']", length, minimum=1)
        for spec in specs:
            if spec is not None:
                trained_spec(spec).layout_for(length, 1)
        if "rotations" in entry:
            rotations = _one_per_layer("rotations", entry["rotations"], count, "rotations such as 'halves:64'")
            attention = entry.get("attention")
        else:
            dims = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            rotations = (None if config.model_type == "structattn_gpt2" else f"halves:{dims}",) * count
            attention = _OLD_ATTENTION.get(config.model_type)
        for rotation in rotations:
            if rotation is not None:
                Rotation.parse(rotation)
        if split is None and any(rotations):
            raise ConfigError(
                "config.structattn['rotary_split'] is null, but the queries of this model have rotary positions, "
                f"{rotations}"
            )
        if not isinstance(attention, str):
            raise ConfigError(
                f"config.structattn['attention'] must be the name of an attention class, got {quoted(attention)}"
            )
        keys_of = _keys_of(entry.get("keys_of"), specs, rotations)
        return cls(
            specs=specs,
            context_length=length,
            rotary_split=None if split is None else check_any_split(split),
            attention=attention,
            rotations=rotations,
            keys_of=keys_of,
            pair_orders=read_pair_orders(
                entry.get("pair_orders"), specs, rotations, length, is_needed=split in CALIBRATED_SPLITS
            ),
            storage=storage_of(config),
            scorers=_scorers(entry.get("scorers"), config, keys_of),
        )

    def structure(self, module: torch.nn.Module, layer: int) -> LayerStructure:
        """The score of the attention module of a layer.

        Raises:
            ConfigError: the record does not fit it.
        """
        spec, rotation = self.specs[layer], self.rotations[layer]
        dim = next((size for name in _HEAD_DIMS if isinstance(size := getattr(module, name, None), int)), None)
        variant = Variant() if spec is None else Variant.of(parse_spec(spec), self.context_length, dim)
        variant.within(getattr(module, "sliding_window", None))  # raises if both have a window
        if dim is not None:
            value_dim = getattr(module, "v_head_dim", dim)
            check_fits(variant.layout, dim, value_dim if isinstance(value_dim, int) else dim)
        pairs = None if rotation is None else Rotation.parse(rotation)
        orders = self.pair_orders[layer]
        split = None if self.rotary_split in (None, *CALIBRATED_SPLITS) else check_split(self.rotary_split)
        return LayerStructure.of(variant, orders or split, pairs, keys_of=self.keys_of[layer])


def _one_per_layer(name: str, entries: Any, count: int, what: str) -> tuple[str | None, ...]:
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str | None) for entry in entries):
        raise ConfigError(f"config.structattn[{name!r}] must be a list of {what} or nulls, got {quoted(entries)}")
    if len(entries) != count:
        raise ConfigError(
            f"config.structattn[{name!r}] needs one entry per layer: expected {count}, got {len(entries)}"
        )
    return tuple(entries)


def _keys_of(sources: Any, specs: Sequence[str | None], rotations: Sequence[str | None]) -> tuple[int | None, ...]:
    """The entry ``keys_of``, checked: layers that score the same keys need one spec."""
    if sources is None:
        return (None,) * len(specs)
    if not isinstance(sources, list | tuple) or len(sources) != len(specs):
        raise ConfigError(
            f"config.structattn['keys_of'] needs a layer or null for each of {len(specs)} layers, got {quoted(sources)}"
        )
    for layer, source in enumerate(sources):
        if source is None:
            continue
        if not is_int(source) or not 0 <= source < len(specs) or sources[source] is not None:
            raise ConfigError(
                f"config.structattn['keys_of'] must name layers that have keys of their own, got {quoted(source)}"
            )
        if specs[layer] != specs[source] or rotations[layer] != rotations[source]:
            raise ConfigError(
                f"layer {layer} scores the keys of layer {source}, so that both need one spec: got {specs[layer]} and "
                f"{specs[source]}"
            )
    return tuple(sources)


def _scorers(sizes: Any, config: PreTrainedConfig, keys_of: Sequence[int | None]) -> tuple[tuple[int, int] | None, ...]:
    """The entry ``scorers``, checked; where older versions did not record it, the sizes that they assumed."""
    if sizes is None:
        text: Any = config.get_text_config(decoder=True)
        usual = getattr(text, "num_key_value_heads", None) or text.num_attention_heads, text.hidden_size
        storages = storage_of_layers(storage_of(config), len(keys_of))
        return tuple(
            usual if source is None and chooses_tokens(storage) else None
            for source, storage in zip(keys_of, storages, strict=True)
        )
    is_list = isinstance(sizes, list | tuple) and len(sizes) == len(keys_of)
    if not is_list or not all(_is_size_of_scorer(size) for size in sizes):
        raise ConfigError(
            f"config.structattn['scorers'] needs [heads, numbers] or null for each of {len(keys_of)} layers, got "
            f"{quoted(sizes)}"
        )
    return tuple(None if size is None else (size[0], size[1]) for size in sizes)


def _is_size_of_scorer(size: Any) -> bool:
    return size is None or (
        isinstance(size, list | tuple) and len(size) == 2 and all(is_int(x) and 0 < x <= MAX_SIZE for x in size)
    )


class StructurizedConfig(OwnErrors, ReturnsWeights, SelfLoadingConfig):
    """A mixin that precedes the config class of a family: the config is only valid with its record."""

    has_no_defaults_at_init = True  # otherwise transformers up to 5.17 makes one without arguments, to compare with
    base_model_pp_plan = None  # see StructuredModelMixin

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: the fields are those of transformers' own config, which 5.17 would rename in the configs of
        other packages.
        """
        return False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        StructureRecord.read(self)

    def has_import(self, kind: type) -> bool:
        """See ``SelfLoadingConfig``: a family of someone's own is not known in a new process."""
        return class_named(kind.__name__) is kind


# The frequencies of these are the same for every length of the text.
_STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")


class StructurizedModel(StructuredModelMixin):
    """A mixin that precedes the model class of a family: its attention modules get their structure when it is
    made.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.claim(config, IMPLEMENTATION)
        # transformers makes the attention modules of these by the name of an implementation of its own.
        if has_adapter(type(self)):
            config._attn_implementation = "eager"
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        config._attn_implementation = IMPLEMENTATION
        record = StructureRecord.read(config)
        # Parts that are made by AutoModel have their structure already.
        kinds = (record.attention, structured_name(record.attention))
        modules = [module for module in self.modules() if type(module).__name__ in kinds]  # type: ignore[attr-defined]
        complete(self)
        layers = [module.layer_idx for module in modules]
        wanted = {layer for layer, spec in enumerate(record.specs) if spec is not None}
        if len(set(layers)) != len(layers) or not wanted <= set(layers) <= set(range(len(record.specs))):
            raise ConfigError(
                f"config.structattn['specs'] structures the layers {sorted(wanted)}, and those of this model with a "
                f"{quoted(record.attention)} are {layers}"
            )
        check_frequencies(self)  # type: ignore[arg-type]
        install(self, dict(zip(layers, modules, strict=True)), record)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False where the family is one of transformers: parts of other packages that have no parameters are
        not initialized again after loading, and some write buffers there that are not saved."""
        plain = next(
            base
            for base in cls.__mro__
            if issubclass(base, PreTrainedModel) and not issubclass(base, StructurizedModel)
        )
        return bool(plain.is_custom_code())  # type: ignore[attr-defined]

    def attention_layers(self) -> list[int]:
        """See ``StructuredModelMixin``: hybrid models have other layers too. An early exit lowers the number
        of layers for a moment.
        """
        modules = [module for module in self.modules() if isinstance(module, StructuredAttention)]  # type: ignore[attr-defined]
        layers = [module.layer_idx for module in modules if module.structure.has_keys]
        return [layer for layer in layers if layer < self.config.num_hidden_layers]  # type: ignore[attr-defined]

    def check_loaded(self, info: dict[str, Any]) -> None:
        """See ``StructuredModelMixin``: no weight is missing, except of a head that the checkpoint does not
        have. Weights that version 0.1 stored in the order of the levels are converted to the order of the
        model."""
        is_saved_class = type(self).__name__ in (self.config.architectures or ())  # type: ignore[attr-defined]
        body = "" if is_saved_class or self is self.base_model else f"{self.base_model_prefix}."  # type: ignore[attr-defined]
        if missing := sorted(key for key in info["missing_keys"] if key.startswith(body)):
            raise CheckpointError(
                f"expected all weights of a {type(self).__name__}, got none of {first_keys(missing)}: the checkpoint "
                "is damaged, or of another model"
            )
        if any(key.endswith(f".{OLD_ORDER}") for key in info["unexpected_keys"]):
            for module in self.modules():  # type: ignore[attr-defined]
                if isinstance(module, StructuredAttention):
                    module.restore_old_rows()


def install(model: PreTrainedModel, modules: Mapping[int, torch.nn.Module], record: StructureRecord) -> None:
    """Gives the attention modules of layers their structure and our classes, and the model ours. Weights stay
    as they are.

    Raises:
        ConfigError: the record does not fit a module; nothing is changed then.
    """
    structures = [record.structure(module, layer) for layer, module in modules.items()]
    complete(model)
    for module, structure in zip(modules.values(), structures, strict=True):
        if not isinstance(module, StructuredAttention):
            module.__class__ = structured_class(type(module))
        module.set_structure(structure)  # type: ignore[operator]
    for number, module in modules.items():
        if (size := record.scorers[number]) is not None:
            module.set_token_scorer(*size)  # type: ignore[operator]
    config = type(model.config)
    for part in model.modules():  # those of images or sound have another config
        if (
            isinstance(part, PreTrainedModel)
            and not isinstance(part, StructurizedModel)
            and type(part.config) is config
        ):
            part.__class__ = structurized_class(type(part), config)
            part.pp_plan = None  # see StructuredModelMixin
            record_outputs(part)


def check_frequencies(model: torch.nn.Module) -> None:
    """Raises ``ConfigError`` unless the model's rotary frequencies are the same for every length of the
    text.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else (kinds,):
            if kind is not None and kind not in _STATIC_ROPE:
                raise ConfigError(
                    f"rope_type {quoted(kind)} of {type(model).__name__} changes the frequencies with the length of "
                    "the text, and cached keys would keep the old ones; "
                    f"supported: {', '.join(_STATIC_ROPE)}"
                )


_PREFIX = "structattn_"  # of model types
_making = threading.RLock()  # a class is made once, also where several threads want it
_CLASS_PREFIX = "StructAttn"
_CONFIGS: dict[type[PreTrainedConfig], type[PreTrainedConfig]] = {}
_MODELS: dict[tuple[type[PreTrainedModel], type[PreTrainedConfig]], type[PreTrainedModel]] = {}


def structurized_config(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Our config class for one of transformers, made once and registered with the Auto classes."""
    with _making:
        return _structurized_config(kind)


def _structurized_config(kind: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    if kind not in _CONFIGS:
        names = {"model_type": f"{_PREFIX}{kind.model_type}", "__module__": __name__}
        made = _CONFIGS[kind] = type(f"{_CLASS_PREFIX}{kind.__name__}", (StructurizedConfig, kind), names)
        globals()[made.__name__] = made  # so that it can be pickled
        AutoConfig.register(made.model_type, made, exist_ok=True)  # type: ignore[attr-defined]
        _read_as(made.model_type, kind.model_type)  # type: ignore[attr-defined]
        for auto, mapping in AUTO_MODELS.items():
            if kind in mapping:
                auto.register(made, structurized_class(mapping[kind], kind))
    return _CONFIGS[kind]


def structurized_class(kind: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Our class for a model class of transformers with a config class, made once: some families only have a
    config of their own.

    Args:
        kind: the model class.
        config: the config class, of transformers or ours.
    """
    with _making:
        return _structurized_class(kind, config)


def _structurized_class(kind: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    plain = config.__bases__[1] if issubclass(config, StructurizedConfig) else config
    config_class = structurized_config(plain)
    if (kind, plain) not in _MODELS:
        family = "" if plain is kind.config_class else plain.__name__.removesuffix("Config")
        names = {"config_class": config_class, "__module__": __name__, "forward": checked(kind.forward)}
        # Programs look for GenerationMixin among the direct bases, where transformers' own classes have it.
        direct = (GenerationMixin,) if GenerationMixin in kind.__bases__ else ()
        bases = (StructurizedModel, kind, *direct)
        made = _MODELS[kind, plain] = type(f"{_CLASS_PREFIX}{family}{kind.__name__}", bases, names)
        globals()[made.__name__] = made
        _read_as(made.__name__, kind.__name__)
        publish(made)
    return _MODELS[kind, plain]


def _read_as(name: str, plain_name: str) -> None:
    """Saved weights of ``name``, a model type or a class, have the names and shapes that transformers gives
    those of ``plain_name``: experts one by one, for example.
    """
    if mapping := get_checkpoint_conversion_mapping(plain_name):
        register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def class_named(name: str) -> type | None:
    """Our config or model class of a name such as ``StructAttnLlamaForCausalLM``, if that without
    ``StructAttn`` is one of transformers.
    """
    rest = name.removeprefix(_CLASS_PREFIX)
    plain = getattr(transformers, rest, None) if rest != name else None
    if isinstance(plain, type) and issubclass(plain, PreTrainedConfig):
        return structurized_config(plain)
    if isinstance(plain, type) and issubclass(plain, PreTrainedModel):
        return structurized_class(plain, plain.config_class)  # type: ignore[attr-defined]
    for family in (config.removesuffix("Config") for config in CONFIG_MAPPING_NAMES.values()):
        kind = getattr(transformers, rest.removeprefix(family), None) if rest.startswith(family) else None
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return structurized_class(kind, getattr(transformers, f"{family}Config"))
    return None


def saved_class(config: PreTrainedConfig, names: Sequence[str]) -> type[PreTrainedModel] | None:
    """Our class of one of these names for a config; ``None`` if there is none."""
    for name in names:
        class_named(name)  # makes it, if the Auto classes do not know it
    return next(
        (kind for kind in _MODELS.values() if kind.config_class is type(config) and kind.__name__ in names), None
    )


def _register_later(model_type: str, name: str) -> None:
    """Registers a family with ``AutoConfig`` under the name of its config class, which is only made when a
    config of it is read.

    Importing the classes of all families at once would take seconds.
    """

    def made() -> type[PreTrainedConfig]:
        return structurized_config(transformers.CONFIG_MAPPING[model_type])

    def new(_: type, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return made()(*args, **kwargs)

    def from_dict(*args: Any, **kwargs: Any) -> Any:
        return made().from_dict(*args, **kwargs)

    our_type = f"{_PREFIX}{model_type}"
    names = {"model_type": our_type, "__new__": new, "from_dict": staticmethod(from_dict), "__module__": __name__}
    AutoConfig.register(our_type, type(f"{_CLASS_PREFIX}{name}", (), names))


for (
    _type,
    _name,
) in CONFIG_MAPPING_NAMES.items():  # also those of text models that are parts, and have no entry of their own
    _register_later(_type, _name)
