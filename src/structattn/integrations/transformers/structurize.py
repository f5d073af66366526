"""``structurize``: MLR attention and windows in trained models of transformers, weights kept, and classes that reload them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from structattn.checks import check_int, check_path, check_type, describe, is_int, quoted, shortened
from structattn.errors import ConfigError, StructAttnError
from structattn.integrations.transformers.attention import (
    OLD_ORDER,
    FusedStructuredAttention,
    RotaryStructuredAttention,
    StructuredAttention,
)
from structattn.integrations.transformers.effect import register
from structattn.integrations.transformers.inputs import checked
from structattn.integrations.transformers.loading import StructuredModelMixin, structure_entry
from structattn.integrations.transformers.masks import structured_mask
from structattn.integrations.transformers.rotary_order import RotarySplit, check_split
from structattn.integrations.transformers.variant import Variant, trained_spec
from structattn.spec.attention import AttentionSpec, parse_spec
from structattn.spec.layers import LayerSpecs

# Each supported architecture: its config class, its attention class and ours. Matched exactly: a subclass may compute something else.
ARCHITECTURES: dict[type[PreTrainedConfig], tuple[type[nn.Module], type[StructuredAttention]]] = {
    LlamaConfig: (LlamaAttention, RotaryStructuredAttention),
    Qwen2Config: (Qwen2Attention, RotaryStructuredAttention),
    Qwen3Config: (Qwen3Attention, RotaryStructuredAttention),
    GPT2Config: (GPT2Attention, FusedStructuredAttention),
}
STRUCTURED_ATTENTION = dict(ARCHITECTURES.values())
# The attn_implementation of structurized models: it makes transformers build our masks.
IMPLEMENTATION = "structurized"
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def _not_structurized(module: Any, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"attn_implementation={IMPLEMENTATION!r} belongs to models that structurize() changed, and {type(module).__name__} is of "
        "none: use register_attention() and its name"
    )


register(IMPLEMENTATION, _not_structurized, structured_mask)


@dataclass(frozen=True, kw_only=True)
class StructureRecord:
    """What ``config.structattn`` holds.

    Attributes:
        specs: attention spec of each layer; ``None`` for unchanged layers.
        context_length: from which blocks are halved.
        rotary_split: ``None`` for models without rotary positions.
    """

    specs: tuple[str | None, ...]
    context_length: int
    rotary_split: RotarySplit | None

    @classmethod
    def read(cls, config: PreTrainedConfig) -> StructureRecord:
        """The record of a config, checked.

        Raises:
            ConfigError: it is missing, incomplete, or does not fit the config.
        """
        given = structure_entry(config, list(cls.__dataclass_fields__))
        specs, length, split = (given[name] for name in ("specs", "context_length", "rotary_split"))
        if not isinstance(specs, list | tuple) or not all(isinstance(spec, str | None) for spec in specs):
            raise ConfigError(f"config.structattn['specs'] must be a list of specs or nulls, got {quoted(specs)}")
        if len(specs) != config.num_hidden_layers:
            raise ConfigError(
                f"config.structattn['specs'] needs one entry per layer: expected {config.num_hidden_layers}, got {len(specs)}"
            )
        check_int("config.structattn['context_length']", length, minimum=1)
        for spec in specs:
            if spec is not None:
                trained_spec(spec).layout_for(length)
        return cls(
            specs=tuple(specs), context_length=length, rotary_split=None if split is None else check_split(split)
        )

    def variant(self, layer: int) -> Variant:
        """The variant of a layer."""
        spec = self.specs[layer]
        return Variant() if spec is None else Variant.of(parse_spec(spec), self.context_length)


class StructurizedConfig:
    """A mixin that precedes the config class of a family: the config is only valid with its record."""

    has_no_defaults_at_init = True  # otherwise transformers up to 5.17 makes one without arguments, to compare with

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        StructureRecord.read(self)


class StructurizedModel(StructuredModelMixin):
    """A mixin that precedes the model class of a family: its attention modules are replaced when it is made."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        self.claim(config, IMPLEMENTATION)
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        record = StructureRecord.read(config)
        _install(self, record)
        if record.rotary_split is not None:
            _check_rotary(self)

    def check_loaded(self, info: dict[str, Any]) -> None:
        """See ``StructuredModelMixin``: weights that version 0.1 stored in the order of the levels are converted to the order of the model."""
        if any(key.endswith(f".{OLD_ORDER}") for key in info["unexpected_keys"]):
            for module in self.modules():  # type: ignore[attr-defined]
                if isinstance(module, RotaryStructuredAttention):
                    module.restore_old_rows()


def _parts(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, name, attention module) of every attention module that can be replaced or was, in the order of the layers."""
    kinds = (*STRUCTURED_ATTENTION, StructuredAttention)
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kinds)
    ]


def _structured(module: torch.nn.Module, record: StructureRecord) -> StructuredAttention:
    """The module that replaces an attention module of transformers.

    Raises:
        ConfigError: it does not fit the record, or is cross attention.
    """
    name = type(module).__name__
    if type(module) not in STRUCTURED_ATTENTION:
        raise ConfigError(
            f"{name} is a subclass that may compute something else; supported attention modules are "
            f"{', '.join(known.__name__ for known in STRUCTURED_ATTENTION)}"
        )
    kind = STRUCTURED_ATTENTION[type(module)]
    has_rotary = issubclass(kind, RotaryStructuredAttention)
    if has_rotary != (record.rotary_split is not None):
        raise ConfigError(
            f"config.structattn['rotary_split'] is {quoted(record.rotary_split)}, but {name} has {'' if has_rotary else 'no '}rotary positions"
        )
    if not module.is_causal:
        raise ConfigError(
            f"a {name} with cross attention cannot be structurized: load the model with add_cross_attention=False"
        )
    return kind(module, record.variant(module.layer_idx), record.rotary_split)  # type: ignore[arg-type]


def _install(model: PreTrainedModel, record: StructureRecord) -> None:
    """Replaces attention modules and classes. Weights stay as they are."""
    for parent, name, module in _parts(model):
        made = module if isinstance(module, StructuredAttention) else _structured(module, record)
        made.train(parent.training)
        setattr(parent, name, made)
    for module in model.modules():
        if type(module) in STRUCTURIZED_MODELS:
            module.__class__ = STRUCTURIZED_MODELS[type(module)]


_AUTO = {
    transformers.AutoModel: transformers.MODEL_MAPPING,
    transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    transformers.AutoModelForSequenceClassification: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    transformers.AutoModelForTokenClassification: transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    transformers.AutoModelForQuestionAnswering: transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}
# Our classes by those of transformers.
STRUCTURIZED_CONFIGS: dict[type, type] = {}
STRUCTURIZED_MODELS: dict[type, type] = {}


def _make_family(config_class: type[PreTrainedConfig]) -> None:
    """Makes our config and model classes of a family, and registers them with the Auto classes."""
    own_config = type(
        f"StructAttn{config_class.__name__}",
        (StructurizedConfig, config_class),
        {"model_type": f"structattn_{config_class.model_type}", "__module__": __name__},
    )
    STRUCTURIZED_CONFIGS[config_class] = globals()[own_config.__name__] = own_config
    AutoConfig.register(own_config.model_type, own_config)  # type: ignore[attr-defined]
    for auto, mapping in _AUTO.items():
        model_class = mapping[config_class]
        own_model = type(
            f"StructAttn{model_class.__name__}",
            (StructurizedModel, model_class),
            {"config_class": own_config, "__module__": __name__, "forward": checked(model_class.forward)},
        )
        STRUCTURIZED_MODELS[model_class] = globals()[own_model.__name__] = own_model
        auto.register(own_config, own_model)


for _config in ARCHITECTURES:
    _make_family(_config)


def structurize(
    model: PreTrainedModel,
    spec: str | AttentionSpec | Sequence[str | AttentionSpec],
    *,
    layers: Sequence[int] | None = None,
    rotary_split: RotarySplit = "low_far",
    context_length: int | None = None,
) -> PreTrainedModel:
    """Puts structured attention into a trained Llama, Qwen2, Qwen3 or GPT-2 model; its weights are kept.

    With one level the logits are unchanged up to rounding. With several, pairs in one block of the deepest level
    keep their scores, and farther ones lose the dimensions of the levels that they do not share: fine-tune the
    model.

    No weight changes: when queries and keys are rotated, their dimensions are permuted so that the slice of every level holds whole
    rotary pairs. Adapters of the original model fit, loaded before or after. The frequencies remain those of the model, with its
    RoPE scaling for long contexts.

    Args:
        model: it is changed in place: its class, its config and its attention modules.
        spec: a layout and a window, such as ``"mlr:32|16|16"``, ``"mlr:32|32,values=32|32"`` or ``"window:512"``; a list that is
            repeated over the chosen layers, such as ``"[mlr:32|32,window:512]"``; or one per chosen layer.
        layers: numbers of the layers to change. Default: all.
        rotary_split: ``"low_far"``: the global level gets the slowest frequencies; ``"interleaved"``: every level gets some of
            the whole range. No effect for GPT-2.
        context_length: from which blocks are halved. Default: ``config.max_position_embeddings``.

    Returns:
        The model, now of a class such as ``StructAttnLlamaForCausalLM``. ``save_pretrained`` keeps the structure, and
        ``from_pretrained`` of that class, ``load_structurized`` and the Auto classes restore it.

    Raises:
        ConfigError: the model is not of a supported class, or is structurized already; the spec asks for other weights; ranks are
            odd (with rotary positions) or do not sum to the head dimension; both a layer and the spec have a window; the rotary
            frequencies depend on the length.

    Cost: of a forward pass, one more copy of queries and keys in each layer with levels.
    """
    if type(model) not in STRUCTURIZED_MODELS:
        raise ConfigError(_unsupported(model))
    old = model.config
    chosen = _chosen(layers, old.num_hidden_layers)
    given: list[Any]
    if isinstance(spec, str):
        given = list(LayerSpecs.parse(spec).layers(len(chosen)))
    else:
        given = list(spec) if isinstance(spec, Sequence) else [spec] * len(chosen)
    if len(given) != len(chosen):
        raise ConfigError(f"expected one attention spec or {len(chosen)}, one per chosen layer, got {len(given)}")
    specs: list[str | None] = [None] * old.num_hidden_layers
    for layer, one in zip(chosen, given, strict=True):
        specs[layer] = str(trained_spec(one))
    has_rotary = getattr(model.base_model, "rotary_emb", None) is not None
    if has_rotary:
        _check_rotary(model)

    config = copy.deepcopy(old)  # the old one may belong to other models as well
    config.__class__ = STRUCTURIZED_CONFIGS[type(old)]
    config.structattn = {
        "specs": specs,
        "context_length": old.max_position_embeddings if context_length is None else context_length,
        "rotary_split": check_split(rotary_split) if has_rotary else None,
    }
    record = StructureRecord.read(config)
    config._attn_implementation = IMPLEMENTATION
    for _, _, module in _parts(model):
        _structured(module, record)  # once, so that errors are raised before anything is changed
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = config
    _install(model, record)
    return model


def _chosen(layers: Sequence[int] | None, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    check_type("layers", layers, Sequence, "a list of ints or None")
    for layer in layers:
        if not is_int(layer) or not 0 <= layer < count:
            raise ConfigError(f"layers must be ints from 0 to {count - 1}, got {describe(layer)}")
    if len(set(layers)) != len(layers) or not layers:
        raise ConfigError(f"layers must name at least one layer, each once, got {describe(layers)}")
    return list(layers)


def _unsupported(model: Any) -> str:
    if isinstance(model, StructurizedModel):
        return f"{type(model).__name__} is structurized already: structurize the plain model again, from its original weights"
    attentions = ", ".join(kind.__name__ for kind in STRUCTURED_ATTENTION)
    models = ", ".join(kind.__name__ for kind in STRUCTURIZED_MODELS)
    return (
        f"structurize supports models whose attention modules are of the classes {attentions}: {models}; got {type(model).__name__}. "
        "Other decoders: register_attention()"
    )


def _check_rotary(model: Any) -> None:
    """Raises ``ConfigError`` unless the model's rotary frequencies are fixed, and decrease over the whole head."""
    rotary = model.base_model.rotary_emb
    kind = getattr(rotary, "rope_type", None)
    if kind not in _STATIC_ROPE:
        raise ConfigError(
            f"rope_type {quoted(kind)} changes the frequencies with the length of the text, and cached keys would keep the old ones; "
            f"supported: {', '.join(_STATIC_ROPE)}"
        )
    frequencies = rotary.inv_freq
    head_dim = next(module.head_dim for _, _, module in _parts(model))
    if 2 * frequencies.numel() != head_dim:
        raise ConfigError(
            f"the model rotates {2 * frequencies.numel()} of {head_dim} dimensions of each head; only all of them is supported"
        )
    if not frequencies.is_meta and bool((frequencies.diff() > 0).any()):
        raise ConfigError(
            "the rotary frequencies of the model do not decrease from the first pair to the last, as expected"
        )


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
    try:
        config = AutoConfig.from_pretrained(path)
    except StructAttnError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{quoted(str(path))} is neither a folder with the config.json of a model nor the name of one on the hub: {shortened(str(error))}"
        ) from error
    names = config.architectures or []
    for own in STRUCTURIZED_MODELS.values():
        if type(config) is own.config_class and own.__name__ in names:  # type: ignore[attr-defined]
            return own.from_pretrained(path, **options)  # type: ignore[attr-defined]
    raise ConfigError(
        f"{path} holds a {config.model_type} model ({', '.join(names)}), not one that structurize() changed and saved"
    )
