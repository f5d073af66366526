"""What attention modules of transformers get in a structurized model: a layout in their score and a
compressed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from structattn.cache.chosen_tokens import seen_pairs
from structattn.cache.numbers import NumberedLayer, is_traced
from structattn.cache.storage import LayerStorage, chooses_tokens
from structattn.checks import check_type, quoted
from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.transformers.attention.adapters import adapted_class
from structattn.integrations.transformers.attention.call import AttentionCall, Reorder
from structattn.integrations.transformers.attention.divided_sequence import attend_shard, division_of
from structattn.integrations.transformers.attention.interface import attend, attend_packed
from structattn.integrations.transformers.attention.registration import register
from structattn.integrations.transformers.caches.model_cache import (
    given_packed_cache,
    level_cache_layer,
    of_decoder,
    storage_of_layer,
)
from structattn.integrations.transformers.masks.mask_functions import structured_mask
from structattn.integrations.transformers.masks.structured_mask import Sequences
from structattn.integrations.transformers.variant import Variant
from structattn.layers.head_orders import HeadOrders, orders_of_heads, ranks_of_heads
from structattn.layers.rotary_order import (
    RotarySplit,
    Rotation,
    RunOrder,
    dimension_order,
    dimensions_of,
    even_ranks,
    runs_of,
)
from structattn.layout.heads import HeadLayouts

# The attn_implementation of structurized models: it makes transformers build our masks.
IMPLEMENTATION = "structurized"
# Version 0.1 stored the rows of these in the order of the levels, and stored that order as well.
OLD_ORDER = "rotary_order"
# The module that scores tokens, for caches that choose some.
TOKEN_SCORES = "token_scores"
_OLD_ROWS = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "q_norm.weight", "k_norm.weight")


@dataclass(frozen=True)
class LayerStructure:
    """The score of a structurized attention layer.

    Attributes:
        variant: layout and window.
        order: the model's dimension at each position in the order of the levels; ``None`` where they are the
            same.
        head_orders: the same for each key head, where they differ; empty where they do not.
        keys_of: number of the layer whose keys it scores; ``None`` where it makes and caches keys.
    """

    variant: Variant
    order: tuple[int, ...] | None
    keys_of: int | None = None
    head_orders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(
        cls,
        variant: Variant,
        split: RotarySplit | tuple[tuple[int, ...], ...] | None,
        rotation: Rotation | None,
        *,
        keys_of: int | None = None,
    ) -> LayerStructure:
        """That of a variant in a layer with these rotary pairs; ``split`` is a rule, or the order of the
        pairs of each key head, of single dimensions where nothing is rotated.

        Raises:
            ConfigError: a rank is odd.
        """
        if isinstance(split, tuple) and rotation is None:
            return cls(variant, None, keys_of, split)
        if variant.layout is None or split is None or rotation is None:
            return cls(variant, None, keys_of)
        if isinstance(variant.layout, HeadLayouts):
            return cls(variant, None, keys_of, _orders_of_heads(variant.layout, split, rotation))
        if isinstance(split, tuple):
            sizes = even_ranks(variant.layout.ranks)
            orders = (dimensions_of(_cut(pairs, sizes), rotation, 2 * sum(sizes)) for pairs in split)
            return cls(variant, None, keys_of, tuple(orders))
        return cls(variant, dimension_order(variant.layout.ranks, split, rotation), keys_of)

    @property
    def has_keys(self) -> bool:
        """Whether the layer makes and caches keys."""
        return self.keys_of is None

    @property
    def reorder(self) -> Reorder:
        """What puts the dimensions of queries and keys in their order."""
        if self.head_orders:
            return HeadOrders(self.head_orders)
        runs = () if self.order is None else runs_of(self.order)
        return RunOrder(runs)


def _orders_of_heads(
    layout: HeadLayouts, split: RotarySplit | tuple[tuple[int, ...], ...], rotation: Rotation
) -> tuple[tuple[int, ...], ...]:
    """The order of the dimensions of each key head; empty where all stay where they are."""
    if not isinstance(split, tuple):
        return orders_of_heads(layout, split, rotation)
    ranks = ranks_of_heads(layout)
    if not ranks:
        return ()
    layout.check_heads(len(split))
    return tuple(
        tuple(range(sum(of_head)))
        if len(of_head) == 1
        else dimensions_of(_cut(pairs, even_ranks(of_head)), rotation, sum(of_head))
        for of_head, pairs in zip(ranks, split, strict=True)
    )


def _cut(pairs: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Pairs as one piece of each size."""
    ends = list(accumulate(sizes))
    return [pairs[end - size : end] for size, end in zip(sizes, ends, strict=True)]


class StructuredAttention(NumberedLayer):
    """A mixin that precedes an attention class of transformers. Its projections, norms and rotary positions
    stay what they are.

    Queries and keys reach the score after all of these; there their dimensions are put in the order of the
    levels.
    """

    config: Any
    layer_idx: int
    structure: LayerStructure
    reorder: Reorder
    is_as_cached = False
    _seen: Callable[[Sequences], Tensor] | None = None  # during a call: see ``AttentionCall.seen``

    def set_structure(self, structure: LayerStructure) -> None:
        """Makes this the score of the layer."""
        self.structure, self.reorder = structure, structure.reorder
        self.set_number()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module of transformers; a layer of the cache that is empty becomes a ``LevelCacheLayer``.

        In training, and within ``as_cached``, a call without a cache hides what a cache that chooses tokens
        would no longer have: so the model learns to do without it.

        Raises:
            ConfigError: another attention implementation was set, which would leave the structure out; or a
                compiled model would make a cache that chooses tokens, or train with what one would have.
        """
        if (asked := self.config._attn_implementation) != IMPLEMENTATION:
            raise ConfigError(
                "the attention of this model is given by its config, and its attn_implementation was changed to "
                f"{quoted(asked)}: set it back to {IMPLEMENTATION!r}"
            )
        caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
        storage = None
        for cache in caches if self.structure.has_keys else []:
            layer = level_cache_layer(of_decoder(cache), self.layer_idx, self.config)
            if layer.chooses_tokens:
                if is_traced() and layer.number is None:
                    raise ConfigError(
                        "a compiled model cannot make a cache that chooses tokens (keep=): give it "
                        "past_key_values=level_cache(model), or read the prompt with the model itself"
                    )
                layer.token_scores = self._token_scores(_states(args, kwargs))
        packed = given_packed_cache()
        if packed is not None and packed.chooses_tokens(self.layer_idx):
            if self.structure.keys_of is None:
                packed.set_scores(self.layer_idx, self._token_scores(_states(args, kwargs)))
            else:
                packed.share_scores(self.layer_idx, self.structure.keys_of)
        if not caches and (self.training or self.is_as_cached):
            storage = storage_of_layer(self.config, self.layer_idx)
        if not chooses_tokens(storage):
            return super().forward(*args, **kwargs)
        if is_traced():
            raise ConfigError(
                "training with what a cache that chooses tokens (keep=) would have is not for compiled models: leave "
                "torch.compile away"
            )
        self._seen = partial(_seen, storage, self._token_scores(_states(args, kwargs)))
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._seen = None

    def _token_scores(self, states: Tensor) -> Tensor:
        """How much later queries will need each token, (B, G, T), from hidden states (B, T, E)."""
        scorer = getattr(self, TOKEN_SCORES, None)
        if scorer is None:
            raise ConfigError(
                f"the cache chooses tokens (keep=), and layer {self.layer_idx} of this model has no token scores: "
                "structurize(model, allocate(calibrate(model, batches), ...)) adds them"
            )
        if states.shape[-1] != scorer.in_features:
            raise ConfigError(
                f"the token scores of layer {self.layer_idx} are of a model with hidden states of {scorer.in_features} "
                f"numbers, and these have {states.shape[-1]}: calibrate this model"
            )
        scores: Tensor = scorer(states)
        # Equal tokens of the first layer have equal scores, of which the first ones stay. In more bits the
        # roundings of the calls would choose: of a prompt, of single tokens, or of those of several requests.
        return scores.detach().bfloat16().transpose(1, 2)

    def set_token_scorer(self, num_heads: int, hidden_size: int) -> None:
        """Gives the layer a linear map from hidden states to a score of each key head, for caches that choose
        tokens; ``calibrate`` finds its weights.
        """
        like = next(x for x in self.parameters() if x.is_floating_point())  # quantized weights are ints
        scorer = nn.Linear(hidden_size, num_heads, device=like.device, dtype=like.dtype)
        setattr(self, TOKEN_SCORES, scorer.requires_grad_(False))  # which tokens stay has no gradient

    @torch.no_grad()
    def write_token_scorer(self, scorer: Tensor) -> None:
        """Sets the weights of the token scores to (G, E + 1), as ``TokenScores`` has them."""
        module = getattr(self, TOKEN_SCORES)
        module.weight.copy_(scorer[:, :-1])
        module.bias.copy_(scorer[:, -1])

    def extra_repr(self) -> str:
        """The layout and the window, for ``repr``."""
        return f"layout={self.structure.variant.layout}, window={self.structure.variant.window}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        order = state_dict.pop(f"{prefix}{OLD_ORDER}", None)
        for name in _OLD_ROWS if order is not None else ():
            if (rows := state_dict.get(f"{prefix}{name}")) is not None:
                state_dict[f"{prefix}{name}"] = _rows(rows, order.argsort())
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def restore_old_rows(self) -> None:
        """Puts loaded rows that version 0.1 stored in the order of the levels in the model's own.

        Raises:
            CheckpointError: a projection is no plain linear layer, whose rows can be moved.
        """
        if self.structure.order is None:
            return
        if not all(type(x) is nn.Linear and x.weight.is_floating_point() for x in (self.q_proj, self.k_proj)):
            raise CheckpointError(
                "structattn 0.1 stored the rows of q_proj and k_proj in the order of the levels, and those of "
                "quantized weights cannot be put back: load the model without quantization, save it, and quantize that"
            )
        parameters = dict(self.named_parameters())
        inverse = torch.tensor(self.structure.order, device=parameters["q_proj.weight"].device).argsort()
        for name in _OLD_ROWS:
            if name in parameters:
                parameters[name].copy_(_rows(parameters[name], inverse))


def _rows(x: Tensor, order: Tensor) -> Tensor:
    """The rows of every head in an order; x is (heads D, ...) or (D,)."""
    return x.view(-1, len(order), *x.shape[1:])[:, order].reshape(x.shape)


_CLASSES: dict[type[nn.Module], type[StructuredAttention]] = {}


def structured_name(name: str) -> str:
    """The name of our class for an attention class of transformers."""
    return f"Structured{name}"


def structured_class(kind: type[nn.Module]) -> type[StructuredAttention]:
    """The class that an attention class of transformers gets in structurized models, made once."""
    if kind not in _CLASSES:
        names, bases = {"__module__": __name__}, (StructuredAttention, adapted_class(kind))
        made = _CLASSES.setdefault(kind, type(structured_name(kind.__name__), bases, names))  # another thread's first
        globals()[made.__name__] = made  # so that a model can be pickled and copied
    return _CLASSES[kind]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: object,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of structurized models; arguments as transformers' ``AttentionInterface`` gives
    them.

    Raises:
        ConfigError: the module is of no structurized model; see ``attend``.
    """
    if not isinstance(module, StructuredAttention):
        raise ConfigError(
            f"attn_implementation={IMPLEMENTATION!r} belongs to models that structurize() changed, and "
            f"{type(module).__name__} is of none: use register_attention() and its name"
        )
    variant, reorder = module.structure.variant, module.reorder
    call = AttentionCall(
        module, variant, reorder, query, key, value, attention_mask, dropout, scaling, kwargs, module._seen
    )
    if isinstance(variant.layout, HeadLayouts) or isinstance(reorder, HeadOrders):
        call = call.of_process()
    if (cache := given_packed_cache()) is not None:
        return attend_packed(call, cache=cache)
    return attend(call) if division_of(module) is None else attend_shard(call)


def _seen(storage: LayerStorage, scores: Tensor, sequences: Sequences) -> Tensor:
    """See ``AttentionCall.seen``."""
    padding, offsets = (None if x is None else x.tolist() for x in (sequences.left_padding, sequences.cu_seqlens))
    return seen_pairs(storage, scores, left_padding=padding, offsets=offsets)


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that an attention module gets, (B, T, E)."""
    states: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return states


@contextmanager
def as_cached(model: nn.Module) -> Iterator[None]:
    """Within it, calls of a structurized model without a cache hide from each token what a cache that chooses
    tokens (``Storage(keep=...)``) would no longer have, if it got one token at a time.

    Training does so always; a call in eval mode sees all tokens otherwise, as prompts do. Bits are not
    rounded. It changes nothing in a model whose cache keeps all tokens, as that of a plain one does.

    Raises:
        ConfigError: it is no model; and of a call whose rows are divided among processes.

    Cost: a mask of all pairs, (B, H, T, T) bool, in each layer.

    Example:
        >>> with torch.no_grad(), as_cached(model):  # doctest: +SKIP
        ...     loss = model(ids, labels=ids, use_cache=False).loss
    """
    check_type("model", model, nn.Module, "a model")
    layers = [module for module in model.modules() if isinstance(module, StructuredAttention)]
    before = [layer.is_as_cached for layer in layers]
    try:
        for layer in layers:
            layer.is_as_cached = True
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.is_as_cached = value


register(IMPLEMENTATION, _attention, structured_mask)
