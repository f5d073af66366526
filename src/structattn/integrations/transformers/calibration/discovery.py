"""Finds the attention layers of any decoder of transformers, and their rotary pairs, by calling it on a few
random tokens.

What a model does with its queries and keys before they are scored (fused projections, norms, partial
rotation, pairs of another order, layers without positions) is its own code, which stays as it is. What levels
need is only which dimensions are rotated together, and that shows: the same tokens at another position give
queries that are a fixed linear map of the first ones, made of 2 x 2 rotations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer

from structattn.checks import shortened
from structattn.errors import ConfigError, StructAttnError
from structattn.integrations.transformers.architecture.loading import check_plain
from structattn.integrations.transformers.attention.adapters import adapted_class, complete
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS, TERMS, check_arguments
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.registration import register
from structattn.integrations.transformers.attention.rotation import LATENT, read_rotation
from structattn.integrations.transformers.caches.model_cache import CACHE, has_state, is_plain
from structattn.integrations.transformers.masks.mask_functions import structured_mask
from structattn.integrations.transformers.masks.structured_mask import StructuredMask
from structattn.integrations.transformers.variant import Variant
from structattn.layers.rotary_order import UNCHANGED, Rotation

_NAME = "structattn_discovery"
_TOKENS = 64  # in one row: classifiers without a padding token know no batch
_POSITIONS = (1, 2, 9)  # recurrent layers may start anew at 0
# The next position of rotary models: all pairs have turned, also with frequencies that are divided for long
# texts.
_FAR = 2**17
_MOVED = 1e-3  # share of a dimension's squares that counts as rotated away, far above the rounding of bfloat16
_LEFT = 0.1  # of that share, what may be left when its partner is known


@dataclass(frozen=True)
class FoundAttention:
    """An attention layer of a model.

    Attributes:
        module: the attention module.
        index: number of the layer.
        rotation: of its queries and keys; ``None``: the same at every position.
        num_heads, num_kv_heads: query heads, and key and value heads.
        head_dim, value_dim: dimensions of each key and value head.
        window: its sliding window.
        keys_of: number of the layer whose keys it scores; ``None`` if it has keys of its own.
        chunk_size: its tokens only see those of their own chunk of this many; ``None``: all earlier ones.
    """

    module: nn.Module
    index: int
    rotation: Rotation | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    keys_of: int | None = None
    chunk_size: int | None = None

    @property
    def sees_all(self) -> bool:
        """Whether its tokens see all earlier ones, of which a cache may drop or round some."""
        return self.window is None and self.chunk_size is None


class _Seen(DynamicLayer):  # type: ignore[misc]
    """A cache layer that marks the keys it was given, so that a model that changes keys after they are cached
    is found.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.marked_keys = key_states
        return key_states, value_states


class _SeenHybrid(_Seen, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """The same in a layer with a recurrence or a convolution too."""

    def __init__(self, number_of_states: int) -> None:
        LinearAttentionAndFullAttentionLayer.__init__(self, number_of_states=number_of_states)


@dataclass
class _Call:
    """What an attention function was called with.

    Attributes:
        index: number of the layer; ``None`` where the module has none.
        chunk_size: of its mask.
    """

    module: nn.Module
    index: int | None
    query: Tensor
    key: Tensor
    value: Tensor
    chunk_size: int | None
    arguments: dict[str, Any]


_calls: ContextVar[list[_Call]] = ContextVar("_calls")  # of this thread: others look at other models


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """An attention in which every token sees itself alone, so that positions change queries and keys and
    nothing else.
    """
    check_arguments(module, arguments, (*TERMS, POSITION_BIAS), strict=True)
    if arguments.get("is_causal") is False or (
        isinstance(attention_mask, StructuredMask) and not attention_mask.is_causal
    ):
        raise ConfigError(
            f"{type(module).__name__} attends in both directions and keeps no cache, so that there is nothing for "
            "structurize to make smaller: use register_attention(), which works for encoders"
        )
    index = getattr(module, "layer_idx", None)  # some modules have it for the time of the observation only
    chunk_size = attention_mask.chunk_size if isinstance(attention_mask, StructuredMask) else None
    _calls.get().append(_Call(module, index, query, key, value, chunk_size, arguments))
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return out.transpose(1, 2).contiguous(), None


register(_NAME, _record, structured_mask)


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configs of a model's modules, and their parts, which may be of no module."""
    configs = [
        module.config for module in model.modules() if isinstance(getattr(module, "config", None), PreTrainedConfig)
    ]
    parts = [getattr(config, name, None) for config in configs for name in config.sub_configs]
    return [*configs, *(part for part in parts if isinstance(part, PreTrainedConfig))]


def register_observer(name: str, attention: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]) -> None:
    """Registers what plain models attend with while they are ``observed``, given each call as one value."""

    def of_interface(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        dropout: float = 0.0,
        scaling: float | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Tensor | None]:
        states = query, key, value
        return attention(
            AttentionCall(module, Variant(), UNCHANGED, *states, attention_mask, dropout, scaling, arguments)
        )

    register(name, of_interface, structured_mask)


@contextmanager
def observed(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """A context in which the model's attention is one of our implementations, in eval mode and without
    gradients; afterwards everything is as before.
    """
    # Some models keep tensors of a call in their modules, such as recurrent states.
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    classes = {module: type(module) for module in model.modules() if adapted_class(type(module)) is not type(module)}
    configs = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        for module, _, _ in saved:
            module.training = False
        if classes:
            model.config._attn_implementation = implementation
        else:
            model.set_attn_implementation(implementation)
        for module, kind in classes.items():
            module.__class__ = adapted_class(kind)
        complete(model)
        with torch.no_grad():
            yield
    finally:
        for module, kind in classes.items():
            module.__class__ = kind
        for config, implementation in configs:
            config._attn_implementation = implementation
        for module, attributes, buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def find_attention(model: PreTrainedModel) -> tuple[FoundAttention, ...]:
    """The attention layers of a decoder, in order.

    Args:
        model: any that runs through transformers' ``AttentionInterface``.

    Raises:
        ConfigError: its attention is one that levels cannot replace; the message says why.

    Cost: three or four forward passes of 64 tokens.
    """
    check_plain(model)
    name = type(model).__name__
    latent = [child for module in model.modules() for child, _ in module.named_children() if child.startswith(LATENT)]
    if latent:
        raise ConfigError(
            f"{name} has multi-head latent attention ({latent[0]}), whose cache holds one compressed vector for all "
            "heads already"
        )
    try:
        return _found(model)
    except StructAttnError as error:
        raise ConfigError(str(error) if name in str(error) else f"{name} cannot be structurized: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be structurized: a call on random tokens fails: {shortened(repr(error))}"
        ) from error


def _found(model: PreTrainedModel) -> tuple[FoundAttention, ...]:
    """See ``find_attention``; an error of the model itself is raised as it is."""
    inputs = random_inputs(model)
    positions = torch.zeros(1, _TOKENS, dtype=torch.int64, device=next(iter(inputs.values())).device)
    is_rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    passes: list[list[_Call]] = []
    for position in (*_POSITIONS, _FAR) if is_rotary else _POSITIONS:
        cache = DynamicCache(config=model.config)  # hybrid models have layers of other kinds in it
        cache.layers = [_seen(layer) for layer in cache.layers]
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = _Seen
        calls: list[_Call] = []
        token = _calls.set(calls)
        try:
            with observed(model, _NAME):
                model(**inputs, position_ids=positions + position, use_cache=True, **{CACHE: cache})
        finally:
            _calls.reset(token)
        _check_calls(model, calls, cache)
        passes.append(calls)
    first = passes[0]
    return tuple(
        _layer(calls, _source(calls[0], first[:number])) for number, calls in enumerate(zip(*passes, strict=True))
    )


def _seen(layer: Any) -> Any:
    """A layer of a cache that marks keys in place of one that holds them."""
    if is_plain(layer):
        return _Seen()
    return _SeenHybrid(layer.number_of_states) if has_state(layer) else layer


def random_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Random tokens; on the meta device, where tokens cannot be looked at, hidden states."""
    table: Any = model.get_input_embeddings()
    # Where parts are offloaded to the meta device, hooks move the tokens.
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):
        dims = table.weight.shape[1]
        return {"inputs_embeds": torch.empty(1, _TOKENS, dims, dtype=model.dtype, device="meta")}
    device = "cpu" if model.device.type == "meta" else model.device
    size = min(table.num_embeddings, model.config.vocab_size)
    ids = torch.randint(0, size, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.to(device)}


def _check_calls(model: PreTrainedModel, calls: Sequence[_Call], cache: Cache) -> None:
    """Raises ``ConfigError`` unless each attention layer was called once, is causal, and scores the keys that
    it caches.
    """
    if not calls:
        raise ConfigError("it has no attention that runs through transformers' AttentionInterface")
    called = [call.module for call in calls]
    kinds = {type(module) for module in called}
    for module in model.modules():
        is_attention = type(module) in kinds or "CrossAttention" in type(module).__name__
        if is_attention and not any(module is other for other in called):
            raise ConfigError(
                "it has attention modules that are used in some calls only, such as cross attention: load it with "
                "add_cross_attention=False if its config knows that"
            )
    layers: dict[int, _Call] = {}
    for call in calls:
        kind, index = type(call.module).__name__, call.index
        if not getattr(call.module, "is_causal", True):
            raise ConfigError(f"its {kind} is not causal")
        if index is None or index == -1:
            raise ConfigError(
                f"its {kind} is used in several layers, whose number comes with each call, and a structure is of one "
                "layer"
            )
        if not isinstance(index, int) or index in layers:
            raise ConfigError(
                f"it scores layer {index} more than once ({kind}), which structured attention does not know"
            )
        layer = cache.layers[index] if index < len(cache.layers) else None
        if _source(call, layers.values()) is not None:
            layers[index] = call
            continue
        if layer is not None and not isinstance(layer, _Seen):
            raise ConfigError(
                f"the cache of layer {index} holds more than keys and values ({type(layer).__name__}), and a "
                "compressed cache only these"
            )
        if getattr(layer, "marked_keys", None) is not call.key:
            raise ConfigError(
                f"its {kind} changes its keys after it has cached them, or does not cache them, so that a compressed "
                "cache cannot hold them"
            )
        layers[index] = call


def _source(call: _Call, earlier: Iterable[_Call]) -> int | None:
    """The number of the first layer that scored the keys of a call before it; ``None`` if they are new."""
    return next((other.index for other in earlier if other.key is call.key), None)


def _layer(calls: tuple[_Call, ...], keys_of: int | None) -> FoundAttention:
    """What the calls of one layer, one per position, show."""
    module, first = calls[0].module, calls[0]
    head_dim = first.key.shape[-1]
    assert first.index is not None  # _check_calls has refused it
    return FoundAttention(
        module=module,
        index=first.index,
        rotation=_rotation(calls, head_dim),
        num_heads=first.query.shape[1],
        num_kv_heads=first.key.shape[1],
        head_dim=head_dim,
        value_dim=first.value.shape[-1],
        window=first.arguments.get("sliding_window"),
        keys_of=keys_of,
        chunk_size=first.chunk_size,
    )


def _rotation(calls: tuple[_Call, ...], head_dim: int) -> Rotation | None:
    """The rotation that the queries of a layer show; where they cannot, on the meta device or with positions
    in the hidden state, the one read.
    """
    module, first = calls[0].module, calls[0].query
    if first.is_meta:
        return read_rotation(module, head_dim)
    still, noise = _rows(first), _noise(first)
    pairings = [_rotated_pairs(still, _rows(call.query), noise) for call in calls[1:]]
    if None in pairings:
        return read_rotation(module, head_dim)
    pairs: set[tuple[int, int]] = set().union(*(each for each in pairings if each is not None))
    if not pairs:
        return None if noise < _LEFT * float(still.square().mean()) else read_rotation(module, head_dim)
    low, high = min(pairs)
    distance = high - low
    rotation = Rotation("adjacent", head_dim) if distance == 1 < head_dim // 2 else Rotation("halves", 2 * distance)
    if not pairs <= set(rotation.pairs(head_dim)):
        raise ConfigError(
            f"its {type(module).__name__} rotates dimensions {sorted(pairs)} of a head together, and only halves and "
            "neighbors are known"
        )
    return rotation


def _rows(x: Tensor) -> Tensor:
    """(B, H, T, D) as (B H T, D), in float64 on the host; the mean of each head is subtracted, since large
    biases hide the rest.
    """
    rows = x.double().cpu()
    return (rows - rows.mean(dim=2, keepdim=True)).flatten(0, 2)


def _noise(x: Tensor) -> float:
    """An upper bound of the mean square of what queries (B, H, T, D) are rounded by: that of the largest
    dimension, since a pair takes the rounding of both, and cosines and sines are rounded too.
    """
    largest = float(x.double().square().mean(dim=(0, 1, 2)).max())
    return (torch.finfo(x.dtype).eps ** 2) * largest


def _rotated_pairs(still: Tensor, moved: Tensor, noise: float) -> set[tuple[int, int]] | None:
    """The pairs of dimensions that are rotated together; ``None`` if a dimension is no linear map of two of
    those at the first position.

    Args:
        noise: mean square of the rounding of a number.

    They are none where positions are added to the hidden state. Each dimension is regressed on itself, and on
    itself and any other.
    """
    products, targets = still.T @ still, still.T @ moved
    square = products.diagonal()
    total = moved.square().sum(dim=0).clamp(min=1e-300)
    diagonal = targets.diagonal()
    alone = 1 - diagonal.square() / (square.clamp(min=1e-300) * total)
    # Row i, column j: of dimension i, regressed on i and j.
    determinant = square[:, None] * square - products.square()
    fitted = (
        diagonal[:, None].square() * square
        - 2 * diagonal[:, None] * targets.T * products
        + targets.T.square() * square[:, None]
    )
    is_singular = determinant <= 1e-9 * square[:, None] * square
    left = (1 - fitted / determinant.clamp(min=1e-300) / total[:, None]).masked_fill(is_singular, torch.inf)
    least, partner = left.min(dim=1)
    rounding = noise * len(moved) / total
    rotated = (alone > _MOVED + rounding).nonzero().flatten().tolist()
    if any(least[i] > _LEFT * alone[i] + rounding[i] for i in rotated):
        return None
    return {(min(i, j), max(i, j)) for i in rotated for j in (int(partner[i]),)}
