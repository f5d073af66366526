"""Attention classes that score by themselves, made to run through transformers' ``AttentionInterface`` as most classes do.

An adapter is a mixin that precedes such a class and overrides the method in which it scores. Write one for a class of your own model, and
``register_adapter`` it: nothing else is needed for ``structurize``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.gptj.modeling_gptj import GPTJAttention

from structattn.checks import check_type
from structattn.errors import ConfigError

_ADAPTERS: dict[type[nn.Module], type[nn.Module]] = {}
_ADAPTED: dict[type[nn.Module], type[nn.Module]] = {}


def register_adapter(attention: type[nn.Module], adapter: type[nn.Module]) -> None:
    """Makes ``structurize`` work for an attention class that does not run through transformers' ``AttentionInterface``.

    Args:
        attention: the attention class of a model. Its modules have ``config`` and ``layer_idx``.
        adapter: a class that precedes it. It overrides the method that scores, and calls ``call_attention`` with what reaches that method.

    Raises:
        ConfigError: one of them is no module class, or the class has another adapter.

    Cost: none; the adapted class is made once, when ``structurize`` meets it.

    Source: ours. GPT-J has an adapter of this kind, in this file.
    """
    for name, kind in (("attention", attention), ("adapter", adapter)):
        check_type(name, kind, type, "a class of modules")
        if not issubclass(kind, nn.Module):
            raise ConfigError(f"{name} must be a class of modules, got {kind.__name__}")
    if _ADAPTERS.get(attention, adapter) is not adapter:
        raise ConfigError(f"{attention.__name__} has the adapter {_ADAPTERS[attention].__name__} already")
    _ADAPTERS[attention] = adapter


def adapted_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class with its adapter, made once; the class itself if it has none."""
    if kind not in _ADAPTERS:
        return kind
    if kind not in _ADAPTED:
        names = {"__module__": __name__}
        made = _ADAPTED[kind] = type(f"Adapted{kind.__name__}", (_ADAPTERS[kind], kind), names)
        globals()[made.__name__] = made  # so that a model can be pickled and copied
    return _ADAPTED[kind]


def has_adapter(model: type[PreTrainedModel]) -> bool:
    """Whether an attention class of the file of a model class has an adapter."""
    files = {base.__module__ for base in model.__mro__}
    return any(kind.__module__ in files for kind in _ADAPTERS)


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
    function = AttentionInterface()[module.config._attn_implementation]  # type: ignore[union-attr]
    out, _ = function(module, query, key, value, mask, dropout=dropout, scaling=scaling)
    return out.transpose(1, 2)


class _GPTJAdapter(nn.Module):
    is_causal = True
    training: bool

    def _attn(self, query: Tensor, key: Any, value: Any, attention_mask: object = None) -> tuple[Tensor, None]:
        dropout = self.attn_dropout.p if self.training else 0.0  # type: ignore[union-attr]
        scaling = 1 / float(self.scale_attn)  # type: ignore[arg-type]
        return call_attention(self, query, key, value, attention_mask, scaling=scaling, dropout=dropout), None  # type: ignore[arg-type]


register_adapter(GPTJAttention, _GPTJAdapter)
