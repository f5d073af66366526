"""What a model needs of an attention layer, so that it may have others than those of a scoring and a
layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.cache import PAGE_SIZE
from structattn.cache.rows import OneLayerCache
from structattn.checks import check_sequences, check_size
from structattn.errors import ConfigError, ShapeError
from structattn.layers.checks import check_cache, check_states
from structattn.layers.counted_flops import Weights, counted_flops, weights_of
from structattn.layers.rotary import Rotary
from structattn.layout.heads import AnyLayout
from structattn.layout.levels import MAX_COUNTED
from structattn.layout.text import TextLayout


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a model asks of the attention of one of its layers.

    A layer that cannot do what is asked, such as one that is always causal, raises ``ConfigError`` where it
    is built.

    Args:
        embed_dim: E, the width of the model.
        num_heads: H.
        num_kv_heads: heads of keys and values, which divides H. Default ``None``: H.
        context_length: the longest sequence that the model is made for, in tokens.
        is_causal: whether a token sees only itself and those before it. Language models ask for it. Default
            ``True``.
        rotary: how queries and keys are rotated by their positions. Default ``None``: the model adds learned
            positions.
        qk_norm: whether queries and keys are normalized. Default ``True``.
        bias: whether linear layers have biases. Default ``False``.
        dropout: of attention weights. Default 0.
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int | None = None
    context_length: int
    is_causal: bool = True
    rotary: Rotary | None = None
    qk_norm: bool = True
    bias: bool = False
    dropout: float = 0.0


class LayerCost(Protocol):
    """What a layer costs for one sequence; ``SequenceCost`` is one."""

    @property
    def flops(self) -> int:
        """Of one forward pass, 2 per multiply-add."""

    @property
    def cache_numbers(self) -> int | None:
        """Numbers that ``new_cache`` keeps of the sequence; ``None`` where that is not known, or where there
        is no cache.
        """


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """What a layer costs for one sequence.

    Args:
        flops: of one forward pass, 2 per multiply-add.
        cache_numbers: that ``new_cache`` keeps of the sequence. Default ``None``: there is no cache.
    """

    flops: int
    cache_numbers: int | None = None


class AttentionLayer(nn.Module):
    """A module (B, T, E) to (B, T, E) that mixes the tokens of a sequence.

    A subclass defines ``mix``, and assigns ``out_proj`` in its ``__init__``. The rest is optional:

    * ``cost`` counts the FLOPs of a forward pass by default, hidden pairs included: a layer that hides pairs
      is compared at equal compute by a ``cost`` without them, as built-in attention has.
    * ``new_cache``, and with it ``forward`` and ``check_cache``. Without a cache, ``generate`` computes the
      whole sequence again for each token, and reports show a dash for the size of the cache and the time of a
      decoding step.
    * ``forward(x, *, cache=None, left_padding=None, cu_seqlens=None, layout=None)``, with the meaning of that
      of ``Attention``, for a layer that takes padded and packed sequences at once; ``layout`` is ``None``
      unless the layer has a ``TextLayout``.

    Args:
        embed_dim, num_heads, num_kv_heads: E; H, which divides it; and G, which divides H. Default of G: H.

    Attributes:
        head_dim: E / H.
        out_proj: the last linear layer (M to E), which language models start at zero.
        layout, window: of the scores, if they have one.

    Raises:
        ConfigError: H does not divide E, or G does not divide H.

    Example:
        >>> class Mean(AttentionLayer):
        ...     def __init__(self, shape):
        ...         super().__init__(shape.embed_dim, shape.num_heads)
        ...         self.out_proj = nn.Linear(shape.embed_dim, shape.embed_dim, bias=False)
        ...
        ...     def mix(self, x):
        ...         return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
    """

    out_proj: nn.Linear
    layout: AnyLayout | TextLayout | None = None
    window: int | None = None

    def __init__(self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None) -> None:
        super().__init__()
        groups = num_heads if num_kv_heads is None else num_kv_heads
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("num_kv_heads", groups)):
            check_size(name, size)
        if embed_dim % num_heads or num_heads % groups:
            raise ConfigError(
                f"num_heads must divide embed_dim, and num_kv_heads num_heads: got embed_dim {embed_dim}, num_heads "
                f"{num_heads} and num_kv_heads {groups}"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = groups
        self.head_dim = embed_dim // num_heads
        self._flops: dict[tuple[int, Weights], int] = {}

    def mix(self, x: Tensor) -> Tensor:
        """One whole sequence in each row, without the output projection.

        Args:
            x: (B, T, E), T at least 1.

        Returns:
            (B, T, M), where M are the inputs of ``out_proj``.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither mix nor forward")

    def forward(
        self,
        x: Tensor,
        *,
        cache: Any = None,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        layout: Any = None,
    ) -> Tensor:
        """``out_proj`` of ``mix``: of packed sequences, concatenated; of padded ones without their padding.

        Args:
            x: (B, T, E).
            cache: of the tokens before; here there is none.
            left_padding: (B,), the leading tokens of each row that are padding.
            cu_seqlens: (N + 1,), the offsets of the sequences that are concatenated in the one row of x.
            layout: of the text of this batch; here there is none.

        Returns:
            (B, T, E); outputs for padding are meaningless.

        Raises:
            ConfigError: a cache or a layout.
            ShapeError: x is not (B, T, E), or ``mix`` returns another shape.
        """
        check_states("x", x, self.embed_dim, self.out_proj.weight)
        if layout is not None:
            raise ConfigError("this layer has no layout: leave it at None")
        if cache is not None:
            raise self._without_cache()
        check_sequences(x.shape[0], left_padding, cu_seqlens)
        if cu_seqlens is not None and x.shape[1]:
            parts = x.split(cu_seqlens.diff().tolist(), dim=1)
            return self.out_proj(torch.cat([self._mixed(part) for part in parts if part.shape[1]], dim=1))
        if left_padding is None:
            return self.out_proj(self._mixed(x))
        parts, rows = [], []
        for padding in left_padding.unique().tolist():
            indices = (left_padding == padding).nonzero().flatten().to(x.device)
            rows.append(indices)
            parts.append(F.pad(self._mixed(x[indices, padding:]), (0, 0, padding, 0)))
        return self.out_proj(torch.cat(parts)[torch.cat(rows).argsort()])

    def _mixed(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return self._nothing(x)
        mixed = self.mix(x)
        expected = (*x.shape[:2], self.out_proj.in_features)
        if mixed.shape != expected:
            raise ShapeError(f"{type(self).__name__}.mix must return {expected}, got {tuple(mixed.shape)}")
        return mixed

    def _nothing(self, x: Tensor) -> Tensor:
        """What is mixed of no tokens."""
        return x.new_zeros(x.shape[0], 0, self.out_proj.in_features)

    def cost(self, num_queries: int) -> LayerCost:
        """What one forward pass over that many tokens costs, and what the cache keeps of them.

        Default: the FLOPs that ``torch.utils.flop_counter`` counts in a forward pass on the meta device,
        which takes no memory: those of matrix products and of PyTorch's attention, hidden pairs included.
        Nothing is known of a cache.

        Raises:
            ConfigError: the default cannot run the layer without numbers.
        """
        check_size("num_queries", num_queries, MAX_COUNTED)
        key = num_queries, weights_of(self)
        if key not in self._flops:
            self._flops[key] = counted_flops(self, self.embed_dim, num_queries)
        return SequenceCost(flops=self._flops[key])

    @property
    def has_cache(self) -> bool:
        """Whether the layer has a cache: whether its class defines ``new_cache``."""
        return type(self).new_cache is not AttentionLayer.new_cache

    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
    ) -> OneLayerCache:
        """An empty cache for ``forward``; arguments as of ``LevelCache``. Default: ``ConfigError``, there is
        none.
        """
        raise self._without_cache()

    def check_cache(self, cache: object) -> None:
        """Raises ``ConfigError`` unless it is a cache of this layer, or like its own and of no layer yet; by
        default, a ``LevelCache``.
        """
        if not self.has_cache:
            raise self._without_cache()
        check_cache(cache, self, self._cached_layout, self.window)

    @property
    def _cached_layout(self) -> AnyLayout | TextLayout | None:
        """The layout of the caches of the layer: of the key heads of this process."""
        return self.layout

    def _without_cache(self) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} has no cache: compute whole sequences (use_cache=False), or define its new_cache"
        )


class CustomAttention(ABC):
    """An attention variant that is no scoring and layout, as a value that builds the layers of models.

    A subclass is a frozen dataclass of the options of the variant. ``AttentionSpec(custom=...)`` holds it; a
    ``Form`` gives it a text form, which ``add_form``, or an entry point of the group
    ``structattn.attention``, makes known.

    Example:
        >>> @dataclass(frozen=True)
        ... class MeanAttention(CustomAttention):
        ...     def build(self, shape):
        ...         return Mean(shape)
        ...
        ...     def __str__(self):
        ...         return "mean"
    """

    @abstractmethod
    def build(self, shape: LayerShape) -> AttentionLayer:
        """A layer of a model; raises ``ConfigError`` where it does not fit."""

    @abstractmethod
    def __str__(self) -> str:
        """The text form: ``parse_spec(str(x)).custom == x``."""
