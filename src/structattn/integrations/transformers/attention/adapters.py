"""Attention classes that score by themselves, made to run through transformers' ``AttentionInterface`` as
most classes do.

An adapter is a mixin that precedes such a class and overrides the method in which it scores. Write one for a
class of your own model, and ``register_adapter`` it: nothing else is needed for ``structurize``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from structattn.checks import check_type
from structattn.errors import ConfigError

_ADAPTERS: dict[type[nn.Module], type[nn.Module]] = {}
_KNOWN: dict[tuple[str, str], type[nn.Module]] = {}  # by file and class, so that no file is imported for it
_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {}


def register_adapter(attention: type[nn.Module], adapter: type[nn.Module]) -> None:
    """Makes ``structurize`` work for an attention class that does not run through transformers'
    ``AttentionInterface``.

    Args:
        attention: the attention class of a model. Modules without ``config`` get that of their model, and
            those whose ``layer_idx`` is missing, ``None`` or -1 the last number in their name, such as 3 in
            ``layers.3.attention``.
        adapter: a class that precedes it. It overrides the method that scores, and calls ``call_attention``
            with what reaches that method.

    Raises:
        ConfigError: one of them is no module class, or the class has another adapter.

    Cost: none; the adapted class is made once, when ``structurize`` meets it.

    Source: ours. GPT-J and BLOOM have adapters of this kind.
    """
    for name, kind in (("attention", attention), ("adapter", adapter)):
        check_type(name, kind, type, "a class of modules")
        if not issubclass(kind, nn.Module):
            raise ConfigError(f"{name} must be a class of modules, got {kind.__name__}")
    if _ADAPTERS.get(attention, adapter) is not adapter:
        raise ConfigError(f"{attention.__name__} has the adapter {_ADAPTERS[attention].__name__} already")
    _ADAPTERS[attention] = adapter


def register_known(file: str, attention: str, adapter: type[nn.Module]) -> None:
    """As ``register_adapter``, for a class of transformers by the names of its file, such as
    ``"gptj.modeling_gptj"``, and of the class.
    """
    _KNOWN[f"transformers.models.{file}", attention] = adapter


def _adapter(kind: type[nn.Module]) -> type[nn.Module] | None:
    return _ADAPTERS.get(kind) or _KNOWN.get((kind.__module__, kind.__name__))


def adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class with its adapter, made once; the class itself if it has none."""
    if (adapter := _adapter(kind)) is None:
        return kind
    if kind not in _ADAPTED:
        names = {"__module__": __name__}
        made = type(f"Adapted{kind.__name__}", (adapter, kind), names)
        made = _ADAPTED.setdefault(kind, made)  # another thread's first
        globals()[made.__name__] = made  # so that a model can be pickled and copied
    return _ADAPTED[kind]


def has_adapter(model: type[PreTrainedModel]) -> bool:
    """Whether an attention class of the file of a model class has an adapter."""
    files = {base.__module__ for base in model.__mro__}
    return any(kind.__module__ in files for kind in _ADAPTERS) or any(file in files for file, _ in _KNOWN)


def complete(model: PreTrainedModel) -> None:
    """Gives attention modules that have an adapter what some lack: the config of the model, and the number of
    their layer.
    """
    adapters = (*_ADAPTERS.values(), *_KNOWN.values())
    for name, module in model.named_modules():
        if not isinstance(module, adapters) and _adapter(type(module)) is None:
            continue
        if not hasattr(module, "config"):
            module.config = model.config
        if getattr(module, "layer_idx", None) in (None, -1):
            numbers = [int(part) for part in name.split(".") if part.isdecimal()]
            module.layer_idx = numbers[-1] if numbers else None


def call_attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, mask: object, *, scaling: float | None, dropout: float
) -> Tensor:
    """The attention that ``module.config`` names, for the method of an adapter.

    Args:
        module: the attention module.
        query: (B, H, T, D), after norms and rotary positions.
        key, value: (B, G, S, D or V), or what the cache returned for them.
        mask: as it reached the module.
        scaling: factor of the scores; ``None``: 1 / sqrt(D).
        dropout: probability, 0 outside training.

    Returns:
        (B, H, T, V), in the dtype of the values.

    Raises:
        ConfigError, CacheError: see ``structurize`` and ``LevelCacheLayer``.

    Cost: that of the attention; nothing is copied.
    """
    out, _ = weighed(module, query, key, value, mask, scaling=scaling, dropout=dropout)
    return out.transpose(1, 2)


def weighed(
    module: nn.Module, query: Tensor, key: Any, value: Any, mask: object, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    """As ``call_attention``, (B, T, H, V), with the weights, (B, H, T, S), where they are asked for.

    Args:
        **arguments: ``scaling``, ``dropout`` and other terms of the score, as ``attend`` takes them.
    """
    function = AttentionInterface()[module.config._attn_implementation]  # type: ignore[union-attr]
    out, weights = function(module, query, key, value, mask, **arguments)
    return out, weights
