"""Which arguments of an attention call change its score.

A model of transformers hands what its caller gave, such as ``seq_idx`` or ``num_items_in_batch``, through all
of its layers to the attention function, and the attention modules add arguments of their own. The former mean
nothing to attention; of the latter each must be known.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from types import CodeType
from typing import Any

from torch import nn

from structattn.checks import quoted
from structattn.errors import ConfigError
from structattn.tracing import constant_when_traced

# Terms of the score that we have too: transformers' names, and ours.
TERMS = {"softcap": "softcap", "s_aux": "sinks", "alibi_slopes": "alibi_slopes"}
# Added to the scores, (1 or B, 1 or H, 1 or T, S): it travels with the mask.
POSITION_BIAS = "position_bias"
# What attention functions of transformers read, and not all of ours do: score terms, choices of keys, paged
# caches.
_CHANGES_SCORES = frozenset(
    {*TERMS, POSITION_BIAS, "block_indices", "cache", "head_mask", "indices", "output_attentions", "sinks"}
)
# What attention modules pass on, and structured attention reads or does not need; a module may name what its
# caller gives.
_KNOWN = frozenset(
    {
        "cache_position",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "deterministic",
        "is_causal",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "sliding_window",
        "token_type_ids",
        "use_cache",
    }
)


def check_arguments(
    module: nn.Module | None, arguments: dict[str, Any], terms: Collection[str] = (), *, strict: bool = False
) -> None:
    """Raises ``ConfigError`` for an argument of an attention call that changes the score in a way that
    structured attention does not know.

    Args:
        module: the attention module that calls. An unknown argument that its own code names is refused, and
            any other is its caller's.
        arguments: what reached the attention function besides queries, keys, values, mask, dropout and
            scaling.
        terms: which terms of the score the attention function computes.
        strict: the caller of the model gave no argument of his own, so that all unknown ones are the model's.
    """
    for name, value in arguments.items():
        if name in _KNOWN or name in terms or value is None or value is False:
            continue
        if name in _CHANGES_SCORES or strict or (module is not None and _is_named(type(module), name)):
            raise ConfigError(
                f"structured attention does not know the argument {quoted(name)} of this model's attention: leaving it "
                "out would change the result silently"
            )


@constant_when_traced
def _is_named(kind: Any, name: str) -> bool:
    """Whether the code of an attention class contains this text, as it does where the class passes an
    argument of this name.
    """
    return name in _texts_of(kind)


@functools.cache
def _texts_of(kind: Any) -> frozenset[str]:
    methods = (
        inspect.unwrap(value)
        for base in kind.__mro__
        if base not in (nn.Module, object)
        for value in vars(base).values()
        if inspect.isfunction(value)
    )
    return frozenset(text for method in methods for text in _texts(method.__code__))


def _texts(constant: object) -> Iterator[str]:
    """The texts in a constant of compiled code; names of arguments are texts, or tuples of them."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | CodeType):
        for inner in constant.co_consts if isinstance(constant, CodeType) else constant:
            yield from _texts(inner)
