"""structattn in kvpress: windows and bits of single key heads as a press on a dense model, so that kvpress's
pipeline and evaluation run them.

It works with the transformers that kvpress asks for, and with those that
``structattn.integrations.transformers`` asks for. See ``docs/huggingface-use.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from structattn.cache.chosen_tokens import chosen_places
from structattn.cache.level_cache import LevelCache
from structattn.cache.storage import (
    LayerStorage,
    ModelStorage,
    chooses_tokens,
    storage_of_heads,
    storage_of_layers,
)
from structattn.checks import describe
from structattn.errors import ConfigError, MissingDependencyError
from structattn.extras import install_command
from structattn.layers.scoring import Standard
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import AttentionSpec, parse_spec
from structattn.spec.layers import LayerSpecs

try:
    from kvpress import BasePress
except ModuleNotFoundError as error:
    if error.name != "kvpress":
        raise
    raise MissingDependencyError(
        f"structattn.integrations.kvpress needs kvpress >= 0.5.5, which is not installed: {install_command('kvpress')}"
    ) from error


def hook_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention module by the names that the hooks of kvpress 0.5.5 read: transformers
    from 5.17 on names the cache otherwise, or gives no positions in it.
    """
    named = dict(arguments)
    if "cache" in named:
        named["past_key_values"] = named["cache"]
    if "cache_position" not in named and named.get("position_ids") is not None:
        named["cache_position"] = named["position_ids"][0]
    return named


class StructuredPress(BasePress):  # type: ignore[misc]
    """A layout and a storage for each key head, as a press of kvpress on a dense model.

    After the prompt a key head keeps what its layout shows the next token: all tokens, or of a window of W
    the first ``sink_tokens`` and the last W - 1; a storage with ``keep`` chooses far tokens by their scores.
    Numbers that its storage keeps in 8 or 4 bits are replaced by what is read of them. With the keys and
    values of the prompt equal, the next token gets what the model of ``structurize`` gets from its cache.
    What differs from that model:

    * *The prompt* is computed densely, as always in kvpress; there it sees windows and codes itself. The
      keys and values of all layers but the first are others.
    * *Tokens after the prompt* are never dropped and never quantized; there the window moves on, and tokens
      that have become far are chosen.
    * *Memory*: only tokens outside the windows of all heads of all layers are freed, since the layers of a
      dense cache have one length. What single heads drop is masked (``module.masked_key_indices``), and
      numbers read of codes are stored whole. kvpress masks by keys that no query of a call sees, and raises
      ``ValueError`` where there are none, for many unlike queries of few dimensions: then give fewer tokens
      in a call.

    Args:
        specs: what ``allocate`` returned, whose storage is used; or an attention spec, or several that the
            layers have in turn (``"[standard,window:252,sink_tokens=4]"``), or a list with one for each
            layer. A spec is ``standard``, a window, or ``heads:`` of these. ``[str(spec) for spec in
            allocation]`` takes them to an environment with another transformers.
        storage: as of ``structurize``: for all layers, or one for each, which may be a list with one for each
            key head. Default: that of ``specs``, or 16 bits.
        scorers: for each layer what scores its tokens, (G, E + 1), or ``None``; needed where a storage has
            ``keep``. Default: those of ``specs``.

    Attributes:
        compression_ratio: of all keys of the last prompt, the share that no query sees any more.

    Raises:
        ConfigError: a spec is something else than all tokens or a window: levels keep dimensions of single
            pairs, in an order that the weights of a dense model do not have.

    Cost: of a prompt of T tokens, a copy of the keys and values of heads with bits.

    Source: kvpress (Devoto, Jeblick and Jegou 2025, arXiv 2510.00636) for the protocol.

    Example:
        >>> press = StructuredPress("heads:standard/window:252,sink_tokens=4*2")  # doctest: +SKIP
        >>> pipe(context, question=question, press=press)["answer"]  # doctest: +SKIP
    """

    def __init__(
        self,
        specs: str | AttentionSpec | Sequence[str | AttentionSpec],
        storage: ModelStorage = None,
        scorers: Sequence[Tensor | None] | None = None,
    ) -> None:
        if isinstance(specs, Sequence) and not isinstance(specs, str):
            self._specs = [parse_spec(spec) if isinstance(spec, str) else spec for spec in specs]
        else:
            self._specs = list(LayerSpecs.parse(specs).pattern) if isinstance(specs, str) else [specs]
        self._is_pattern = isinstance(specs, str | AttentionSpec)
        for spec in self._specs:
            _check(spec)
        self._storage = getattr(specs, "storage", None) if storage is None else storage
        self._scorers = getattr(specs, "scorers", ()) if scorers is None else scorers
        self._layers: list[tuple[AttentionSpec, LayerStorage]] = []
        self._dropped: dict[int, tuple[int, int]] = {}  # of each layer: keys that nobody sees, and all

    def post_init_from_model(self, model: Any) -> None:
        """Gives each layer of a plain model its spec and storage, or raises ``ConfigError``."""
        if getattr(model.config, "structattn", None) is not None:
            raise ConfigError(
                "a press is for the model as it was: a structurized one keeps its tokens in its own cache"
            )
        config = model.config.get_text_config(decoder=True)
        count = config.num_hidden_layers
        specs = LayerSpecs(self._specs).layers(count) if self._is_pattern else self._specs
        if len(specs) != count:
            raise ConfigError(f"the model has {count} layers: give one attention spec or {count}, got {len(specs)}")
        for spec in specs:
            if spec.heads is not None and len(spec.heads) != config.num_key_value_heads:
                raise ConfigError(
                    f"the layers of the model have {config.num_key_value_heads} key heads, and {spec} has "
                    f"{len(spec.heads)}: give a spec for each"
                )
        storages = storage_of_layers(self._storage, count)
        for number, storage in enumerate(storages):
            if chooses_tokens(storage) and (number >= len(self._scorers) or self._scorers[number] is None):
                raise ConfigError(
                    f"the storage of layer {number} chooses tokens (keep=), and nothing scores them: give what "
                    "allocate returned, or its scorers"
                )
        self._layers = list(zip(specs, storages, strict=True))
        self._dropped = {}

    @property
    def compression_ratio(self) -> float:
        """See the class."""
        if not self._dropped:
            raise ConfigError("the share of dropped keys is known after a prompt: run the model within press(model)")
        dropped, whole = (sum(numbers) for numbers in zip(*self._dropped.values(), strict=True))
        return dropped / whole

    def forward_hook(self, module: nn.Module, input: list[Tensor], kwargs: dict[str, Any], output: Any) -> Any:
        """That of ``BasePress``, for all versions of transformers."""
        return super().forward_hook(module, input, hook_arguments(kwargs), output)

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values (B, G, S, D) that any head of the model keeps, as they are read; the others of
        each head are named in ``module.masked_key_indices``.
        """
        layer: Any = module
        spec, storage = self._layers[layer.layer_idx]
        heads, length, dim = keys.shape[1:]
        storages = storage_of_heads(storage, heads)
        seen = _seen(spec, heads, dim, length).to(keys.device)
        kept = seen.expand(len(keys), -1, -1).clone()
        keys, values = keys.clone(), values.clone()
        for head, of_head in enumerate(storages):
            if of_head is None:
                continue
            places = torch.arange(length, device=keys.device).expand(len(keys), 1, -1)
            if of_head.keep is not None:
                scorer = self._scorers[layer.layer_idx][head].to(hidden_states)
                scores = linear(hidden_states, scorer[None, :-1], scorer[-1:]).bfloat16()  # as a cache gets them
                places = chosen_places(of_head, scores.transpose(1, 2))
                kept[:, head] = torch.zeros_like(kept[:, head]).scatter(1, places[:, 0], True)
            cache = LevelCache(
                _layouts(spec, heads, dim)[head], window=spec.window, storage=replace(of_head, keep=None)
            )
            of_keys, of_values = (places[..., None].expand(-1, -1, -1, x.shape[3]) for x in (keys, values))
            own = slice(head, head + 1)
            k, v = keys[:, own].gather(2, of_keys), values[:, own].gather(2, of_values)
            # A group of numbers may leave the residual with the next token: one is appended, and left out.
            cache.append(torch.cat([k, k[:, :, -1:]], dim=2), torch.cat([v, v[:, :, -1:]], dim=2))
            k, v = (x[:, :, :-1] for x in cache.dense_past(k, v))
            keys[:, own].scatter_(2, of_keys, k)
            values[:, own].scatter_(2, of_values, v)
        # All layers have one length: what no window of the model shows is dropped, the rest is masked.
        union = torch.stack([_seen(x, heads, dim, length).any(0) for x in {x for x, _ in self._layers}]).any(0)
        union = union.to(keys.device)
        masked = ~kept[:, :, union]
        if masked.any():
            if layer.config._attn_implementation == "eager":
                raise ConfigError(
                    "kvpress masks the keys of single heads in sdpa and flash attention only: load the model with "
                    "attn_implementation='sdpa'"
                )
            layer.masked_key_indices = masked.nonzero(as_tuple=True)
        self._dropped[layer.layer_idx] = int((~kept).sum()), kept.numel()
        return keys[:, :, union].contiguous(), values[:, :, union].contiguous()


def _check(spec: AttentionSpec) -> None:
    """Raises ``ConfigError`` unless a spec is all tokens, a window, or such a choice for each head."""
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(
            f"specs must be an Allocation, a text, an AttentionSpec or a list of these two, got {describe(spec)}"
        )
    is_kept = spec.custom is None and spec.scoring == Standard() and (spec.num_heads, spec.num_kv_heads) == (None, None)
    has_windows = is_kept and not spec.halves_blocks and all(map(_is_window, _layouts(spec, 1, 2)))
    if not has_windows:
        raise ConfigError(
            f"a press drops tokens of a dense model: {spec} is neither all tokens (standard), nor a window such as "
            "window:252,sink_tokens=4, nor heads: of these; structurize(model, spec) takes others"
        )


def _is_window(layout: Any) -> bool:
    """Whether a layout is plain or one sliding level, whose scores are those of a dense model."""
    return layout is None or (
        isinstance(layout, LevelLayout)
        and layout.num_levels == 1
        and layout.windows is not None
        and layout.scaling in ("variance", "standard")
    )


def _layouts(spec: AttentionSpec, heads: int, dim: int) -> list[Any]:
    """The layout of each key head of a layer, of that dimension."""
    layout: Any = spec.layout_for(1, dim)
    return list(layout.layouts) if isinstance(layout, HeadLayouts) else [layout] * heads


def _seen(spec: AttentionSpec, heads: int, dim: int, length: int) -> Tensor:
    """Of each key head, the tokens of a prompt that its layout shows the next one, (heads, length) bool."""
    positions, following = torch.arange(length), torch.tensor(length)
    of_layer = positions >= (0 if spec.window is None else length + 1 - spec.window)
    layouts = _layouts(spec, heads, dim)
    return torch.stack([of_layer if x is None else x.shared_levels(following, positions) > 0 for x in layouts])
