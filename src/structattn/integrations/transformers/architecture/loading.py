"""What our models of transformers add to loading: only safetensors, and an error for missing weights."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from structattn.cache.numbers import is_traced
from structattn.cache.paged import PackedCache
from structattn.checks import check_path, quoted
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError, nearest_name
from structattn.integrations.hub import WHERE
from structattn.integrations.transformers.architecture.auto_map import NotCopied
from structattn.integrations.transformers.architecture.inputs import check_inputs
from structattn.integrations.transformers.attention.registration import is_registered
from structattn.integrations.transformers.caches.model_cache import (
    CACHE,
    guarded,
    level_cache_layer,
    packed_cache,
    storage_of,
    take_cache,
)


def check_safe(path: object, arguments: dict[str, Any]) -> None:
    """Raises ``CheckpointError`` for weights that are not in safetensors."""
    is_refused = any(arguments.get(name) is False for name in ("use_safetensors", "weights_only"))
    if is_refused or arguments.get("gguf_file"):
        raise CheckpointError(
            "structattn only loads weights from safetensors: leave use_safetensors, weights_only and gguf_file away"
        )
    if not isinstance(path, str | Path):
        return
    if Path(path).is_dir():
        folder = Path(path, arguments.get("subfolder") or "")
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        if not any(folder.glob("*.safetensors*")):
            content = f"{pickled[0]}, a pickle, which can run code when it is read" if pickled else "no weights"
            raise CheckpointError(
                f"{folder} holds {content}: expected model.safetensors; convert what there is with "
                "safetensors.torch.save_file"
            )
        indices = sorted(folder.glob("*.index.json"))
    else:  # a name on the hub, where transformers looks for the same index
        options = {name: arguments[name] for name in WHERE if arguments.get(name) is not None}
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, **_MAY_BE_MISSING, **options)
        indices = [] if index is None else [Path(index)]
    for index in indices:
        _check_index(index)


# A missing file is no error here.
_MAY_BE_MISSING = {
    "_raise_exceptions_for_gated_repo": False,
    "_raise_exceptions_for_missing_entries": False,
    "_raise_exceptions_for_connection_errors": False,
}


def _check_index(index: Path) -> None:
    """Raises ``CheckpointError`` unless an index of shards names only safetensors files: transformers
    unpickles any other.
    """
    try:
        shards = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of weights ({error!r}): the checkpoint is damaged") from error
    if others := sorted(name for name in shards if not name.endswith(".safetensors")):
        raise CheckpointError(
            f"{index} names {others[0]}, which is not safetensors; a pickle can run code when it is read and is never "
            "loaded"
        )


class StructuredModelMixin(NotCopied):
    """What our models have in common: a mixin that precedes the class of transformers.

    The flags say what holds, not what the plain model can do. Tensor parallelism does hold where the plain
    model has a plan: it splits heads.
    """

    # The attention is given by the config, so no other implementation takes its place; context parallelism
    # would cut the levels.
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = False
    _supports_context_parallel = False
    _can_compile_fullgraph = False  # with a static cache, which has no levels
    _pp_plan = None  # stages would send each other masks that are no tensors

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """``PreTrainedModel.from_pretrained``, only from safetensors and with the structure checked.

        Raises:
            CheckpointError: the weights are missing, damaged or a pickle, or are not those of this structure.
            ConfigError: the structure in ``config.json`` is missing or does not fit.
        """
        if pretrained_model_name_or_path is not None or kwargs.get("state_dict") is None:  # None: weights in memory
            check_path("pretrained_model_name_or_path", pretrained_model_name_or_path)
        options = dict(kwargs)
        with_info = kwargs.pop("output_loading_info", False)
        other_shapes = kwargs.pop("ignore_mismatched_sizes", False)
        # transformers' own error for shapes does not say which: they are looked at below.
        kwargs |= {
            "use_safetensors": True,
            "weights_only": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        try:
            check_safe(pretrained_model_name_or_path, options)
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]
        except OSError as error:
            raise CheckpointError(
                f"{pretrained_model_name_or_path} is neither a folder with a model nor the name of one on the hub: "
                f"{error}"
            ) from error
        except SafetensorError as error:
            raise CheckpointError(f"the weights in {pretrained_model_name_or_path} are damaged: {error}") from error
        if info["mismatched_keys"] and not other_shapes:
            wrong = [
                f"{name} (saved {tuple(saved)}, expected {tuple(expected)})"
                for name, saved, expected in info["mismatched_keys"]
            ]
            raise CheckpointError(f"the weights have other shapes than config.json asks for: {first_keys(wrong)}")
        model.check_loaded(info)
        return (model, info) if with_info else model

    def generate(self, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """``GenerationMixin.generate``, which reads its inputs before the model does; ``cache`` may have its
        older name ``past_key_values``.

        Raises:
            ConfigError, ShapeError: they are missing, or see ``check_inputs``.
        """
        ids = kwargs.get("input_ids") if inputs is None else inputs
        if ids is not None:
            mask = kwargs.get("attention_mask")
            check_inputs(self.config, {"input_ids": ids, "attention_mask": mask})  # type: ignore[attr-defined]
            if ids.is_meta:
                raise ShapeError("generate needs token ids with values, got a tensor on the meta device")
            if isinstance(mask, Tensor) and mask.dim() != 2:
                raise ShapeError(f"generate needs an attention_mask of shape (batch, tokens), got {tuple(mask.shape)}")
        elif (
            not args
            and not {"inputs_embeds", "generation_config", "bos_token_id"} & set(kwargs)
            and self.generation_config.bos_token_id is None  # type: ignore[attr-defined]
        ):
            raise ConfigError("generate needs inputs: the token ids of the prompts, (batch, tokens)")
        settings = (kwargs.get("generation_config"), self.generation_config)  # type: ignore[attr-defined]
        asked = (kwargs.get("use_cache"), *(getattr(config, "use_cache", None) for config in settings))
        if (cache := take_cache(kwargs)) is not None:
            if next((x for x in asked if x is not None), None) is False:
                raise ConfigError(
                    "generate needs use_cache=True with a cache, got False: the config of this model may have it"
                )
            kwargs[CACHE] = cache
        return super().generate(inputs, *args, **kwargs)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """``PreTrainedModel.save_pretrained``; raises ``ConfigError`` if the name is not that of a folder."""
        check_path("save_directory", save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model: if it fails, no layer of ``cache`` (older name: ``past_key_values``) keeps its
        tokens.
        """
        if (cache := take_cache(kwargs)) is None:
            is_trained = self._is_trained(kwargs) and storage_of(self.config) is not None  # type: ignore[attr-defined]
            if is_trained and kwargs.get("use_cache") is None:  # wrappers hand on what they were not given
                kwargs["use_cache"] = False  # fewer bits give no gradients, and training needs no cache
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if isinstance(cache, PackedCache):  # of continuous batching: transformers' models would ask it for masks
            with packed_cache(cache):
                return super().__call__(*args, **kwargs)  # type: ignore[misc]
        if is_traced():  # the operators of a compiled program count tokens at its end
            return super().__call__(*args, **kwargs, **{CACHE: cache})  # type: ignore[misc]
        with guarded(cache):
            return super().__call__(*args, **kwargs, **{CACHE: cache})  # type: ignore[misc]

    def _is_trained(self, inputs: dict[str, Any]) -> bool:
        is_training: bool = self.training  # type: ignore[attr-defined]
        return torch.is_grad_enabled() and (is_training or inputs.get("labels") is not None)

    @classmethod
    def claim(cls, config: PreTrainedConfig, implementation: str) -> None:
        """Sets the attention implementation of a config; raises ``ConfigError`` if another is asked for."""
        asked = config._attn_implementation
        if asked not in (None, implementation):
            raise ConfigError(_given_by_config(cls, asked))
        config._attn_implementation = implementation

    def attention_layers(self) -> Iterable[int]:
        """The numbers of the layers with attention that keep keys."""
        return range(self.config.num_hidden_layers)  # type: ignore[attr-defined]

    @abstractmethod
    def check_loaded(self, info: dict[str, Any]) -> None:
        """Raises ``CheckpointError`` unless what was loaded is of this model's structure; ``info`` as
        transformers reports it.
        """

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """False. transformers itself would search the source of the module for the word."""
        return False

    def _check_and_adjust_attn_implementation(self, implementation: Any, *args: Any, **kwargs: Any) -> Any:
        # transformers would ask whether the implementation can be set: no, but one of ours is that of the
        # model, see `claim`.
        if is_registered(implementation):
            return implementation
        return super()._check_and_adjust_attn_implementation(implementation, *args, **kwargs)  # type: ignore[misc]

    def set_attn_implementation(self, attn_implementation: Any, *_: Any, **__: Any) -> None:
        """Raises ``ConfigError``, unless nothing would change: the attention of this model is structured by
        its config.
        """
        implementation = self.config._attn_implementation  # type: ignore[attr-defined]
        if attn_implementation != implementation:
            raise ConfigError(_given_by_config(type(self), attn_implementation))

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """As in transformers: a manager that computes many requests together, here with a paged cache that
        has levels.

        ``generate_batch``, ``continuous_batching_context_manager`` and transformers' server are built on it.
        See ``docs/serving.md``.

        Raises:
            MissingDependencyError: this needs transformers 5.20 or later.
            ConfigError: an option that a cache with levels does not have, or a model with layers that are no
                attention.
        """
        from structattn.integrations.transformers.caches.continuous_batching import manager

        return manager(self, generation_config, continuous_batching_config, workload_hints)

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any
    ) -> None:
        # transformers has no public hook for the cache that `generate` makes. If it stops calling this, the
        # attention layers still replace empty layers themselves; rolling back over a block boundary is then
        # refused.
        if generation_config.cache_implementation == "quantized":  # for which transformers asks for other packages
            raise CacheError(
                "structured attention stores fewer bits in its own cache: leave cache_implementation='quantized' away, "
                "and give level_cache(model, storage=sa.Storage(4, 4)) as the cache"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        cache = model_kwargs.get(CACHE)
        if isinstance(cache, Cache):
            for index in self.attention_layers():
                level_cache_layer(cache, index, self.config)  # type: ignore[attr-defined]
            if generation_config.is_assistant:
                cache.activate_past_recording()


def check_plain(model: object) -> None:
    """Raises ``ConfigError`` for a model that has structured attention already."""
    if isinstance(model, StructuredModelMixin):
        raise ConfigError(
            f"{type(model).__name__} is structurized already: give the original model, with its own weights (the model "
            "card of this one names it)"
        )


def check_one_decoder(model: PreTrainedModel) -> None:
    """Raises ``ConfigError`` for a model whose decoder has a config of its own, beside other parts."""
    if model.config.get_text_config(decoder=True) is not model.config or not hasattr(model.config, "num_hidden_layers"):
        raise ConfigError(
            f"{type(model).__name__} cannot be structurized: its decoder is one of several parts (with an encoder, "
            "images or sound) that have a config each; load a decoder alone"
        )


def _given_by_config(kind: type, asked: object) -> str:
    return (
        f"the attention of {kind.__name__} is given by its config, and not by attn_implementation={quoted(asked)}: "
        "leave it away"
    )


def first_keys(keys: Iterable[str]) -> str:
    """The first few of some keys, for an error message."""
    names = sorted(keys)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def structure_entry(config: PreTrainedConfig, names: list[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    """The entry ``structattn`` of a config, with those names, of which some are optional; raises
    ``ConfigError`` for another one.
    """
    entry = getattr(config, "structattn", None)
    if not isinstance(entry, dict):
        raise ConfigError(
            f"the config of a {config.model_type} model needs the entry 'structattn' with {', '.join(names)}, got "
            f"{quoted(entry)}: structurize() and save_pretrained write it"
        )
    for name in entry:
        if name not in names:
            raise ConfigError(
                f"config.structattn has an unknown entry {quoted(name)}: {nearest_name(str(name), names)}"
            )
    for name in names:
        if name not in entry and name not in optional:
            raise ConfigError(f"config.structattn has no entry {quoted(name)}; it needs {', '.join(names)}")
    return entry
