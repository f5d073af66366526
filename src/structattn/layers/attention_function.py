"""Structured attention with the arguments of ``torch.nn.functional.scaled_dot_product_attention``, for other
people's code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from structattn import text_forms
from structattn.checks import MAX_LENGTH, check_bool, check_choice, check_size, check_tensor, check_type, holds, quoted
from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.head_orders import HeadOrders, orders_of_heads
from structattn.layers.rotary_order import (
    MOST_DIMS,
    UNCHANGED,
    RotarySplit,
    Rotation,
    RunOrder,
    check_split,
    dimension_order,
    rotation_of,
    runs_of,
)
from structattn.layers.scoring import Standard
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.halving import Halving
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.sink_window import SinkWindow
from structattn.layout.text import TextLayout
from structattn.ops import Backend, structured_attention
from structattn.ops.backends import NAMED
from structattn.ops.by_heads import check_key_heads

TensorLayout = Literal["BHTD", "BTHD", "THD"]


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionFunction:
    """A callable with the arguments of ``torch.nn.functional.scaled_dot_product_attention``;
    ``attention_function`` makes it.

    It is a value: it has no weights, is equal to another with the same settings, and can be copied, pickled,
    compiled and exported.

    Attributes:
        layout: ``LevelLayout``, ``GlobalWindowLayout``, ``SinkWindow`` or ``HeadLayouts`` (one layout for
            each key head); ``None`` is plain attention. An ``AttentionSpec`` of heads is resolved at each
            call, which gives the head dimension.
        window: as of ``structured_attention``.
        rotary: which dimensions of queries and keys the caller rotates together; ``None`` leaves their order.
        rotary_split: which level gets which rotary pairs.
        tensor_layout: the dimensions of the tensors.
        backend: as of ``structured_attention``.
    """

    layout: AnyLayout | SinkWindow | AttentionSpec | None = None
    window: int | None = None
    rotary: Rotation | None = None
    rotary_split: RotarySplit = "low_far"
    tensor_layout: TensorLayout = "BHTD"
    backend: Backend = "auto"
    _order: RunOrder | HeadOrders = field(init=False, compare=False)

    def __post_init__(self) -> None:
        kinds = AnyLayout | SinkWindow | AttentionSpec | None
        named = "a LevelLayout, a GlobalWindowLayout, HeadLayouts, a SinkWindow or None"
        check_type("layout", self.layout, kinds, named)
        if isinstance(self.layout, AttentionSpec) and self.layout.heads is None:
            raise ConfigError(f"layout must be {named}, got a spec of all heads: attention_function takes specs")
        if self.window is not None:
            check_size("window", self.window, MAX_LENGTH)
            layouts = self.layout.layouts if isinstance(self.layout, HeadLayouts) else (self.layout,)
            if any(isinstance(layout, GlobalWindowLayout) for layout in layouts):
                raise ConfigError("a global-window layout has its own window: leave window at None")
        check_type("rotary", self.rotary, Rotation | None, "a Rotation or None", "attention_function takes text")
        check_split(self.rotary_split)
        check_choice("tensor_layout", self.tensor_layout, get_args(TensorLayout))
        check_choice("backend", self.backend, NAMED)
        order: RunOrder | HeadOrders = UNCHANGED
        if self.rotary is not None and isinstance(self.layout, LevelLayout | GlobalWindowLayout):
            order = RunOrder(runs_of(dimension_order(self.layout.ranks, self.rotary_split, self.rotary)))
        elif self.rotary is not None and isinstance(self.layout, HeadLayouts):
            orders = orders_of_heads(self.layout, self.rotary_split, self.rotary)
            order = HeadOrders(orders) if orders else UNCHANGED
        object.__setattr__(self, "_order", order)

    def __repr__(self) -> str:
        shown = [x for x in dataclasses.fields(self) if x.init and getattr(self, x.name) != x.default]
        return f"AttentionFunction({', '.join(f'{x.name}={getattr(self, x.name)!r}' for x in shown)})"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Attends; the arguments are those of PyTorch's function, in its order and with its defaults.

        Args:
            query, key, value: with the dimensions of ``tensor_layout``; ``"BHTD"`` takes (B, T, D) too.
            attn_mask: bool, ``True`` where a pair may attend, or floating point, added to the scores;
                broadcastable to (B, H, T, S) whatever the ``tensor_layout``. A query that sees no key has
                output 0.
            dropout_p: probability of dropping a weight; applied whenever it is above 0.
            is_causal: query i sees keys 0 ... i, as in PyTorch, also where T and S differ. ``False``, with a
                mask or without (decoding), takes the queries as the last T of the S positions.
            scale: replaces the layout's scaling. Default: that scaling; without a layout 1 / sqrt(D).
            enable_gqa: allows fewer heads of keys and values than of queries.
            cu_seqlens: (N + 1,) int32 or int64, the boundaries of packed sequences, of queries and keys
                alike.
            cu_seqlens_q, cu_seqlens_k: those of queries and of keys, both given, as flash attention takes
                them. They may differ: with ``is_causal`` the queries of a sequence are then the last of its
                positions, as in flash attention.

        Returns:
            With the dimensions of ``tensor_layout``, contiguous in all but ``"BHTD"``.

        Raises:
            ConfigError: ``attn_mask`` together with ``is_causal``; one of ``cu_seqlens_q`` and
                ``cu_seqlens_k`` without the other; or an option is out of its range.
            ShapeError: shapes, dtypes or devices do not fit.
        """
        for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
            check_bool(name, flag)
        for name, x in (("query", query), ("key", key), ("value", value)):
            self._check(name, x, query)
        if attn_mask is not None and is_causal:
            raise ConfigError(
                "give attn_mask or is_causal=True, not both, as in PyTorch: a mask says which pairs may attend"
            )
        if hasattr(attn_mask, "variant"):  # torch.nn.attention.bias.CausalBias, a tensor without its numbers
            raise ConfigError(
                "attn_mask is a causal bias without numbers: give is_causal=True, or a bool mask of the pairs"
            )
        if (cu_seqlens_q is None) != (cu_seqlens_k is None) or (cu_seqlens is not None and cu_seqlens_q is not None):
            raise ConfigError("give cu_seqlens, of queries and keys alike, or both cu_seqlens_q and cu_seqlens_k")
        if cu_seqlens_q is not None:
            cu_seqlens = cu_seqlens_q
        has_heads = query.dim() == 4 or self.tensor_layout == "THD"
        q, k, v = (self._heads_first(x) for x in (query, key, value))
        if not has_heads and isinstance(attn_mask, Tensor) and attn_mask.dim() == 3:
            attn_mask = attn_mask[:, None]
        if not enable_gqa and k.shape[1] not in (1, q.shape[1]):
            raise ShapeError(f"query has {q.shape[1]} heads and key {k.shape[1]}: give enable_gqa=True to share them")
        layout = self._layout_of(q.shape[3])
        if isinstance(layout, HeadLayouts):
            check_key_heads(layout, k, v)
        if self._order != UNCHANGED and q.shape[3] == k.shape[3] == getattr(layout, "head_dim", None):
            q, k = self._order(q), self._order(k)
        if is_causal and cu_seqlens is None and not holds(q.shape[2] == k.shape[2]):
            k, v, attn_mask = _from_the_first_key(q, k, v)
        out = structured_attention(
            q,
            k,
            v,
            layout,
            is_causal=is_causal,
            scale=scale,
            window=self.window,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            cu_seqlens=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k,
            backend=self.backend,
        )
        if self.tensor_layout == "BHTD":
            return out if has_heads else out[:, 0]
        return out.transpose(1, 2).contiguous() if self.tensor_layout == "BTHD" else out[0].transpose(0, 1).contiguous()

    def _layout_of(self, head_dim: int) -> AnyLayout | None:
        """The layout of heads of that dimension."""
        if isinstance(self.layout, SinkWindow):
            return self.layout.resolve(head_dim)
        return _layout_of_heads(self.layout, 1, head_dim) if isinstance(self.layout, AttentionSpec) else self.layout

    def _check(self, name: str, x: Any, query: Tensor) -> None:
        check_tensor(name, x)
        numbers_of_dims = {"BHTD": (3, 4), "BTHD": (4,), "THD": (3,)}[self.tensor_layout]
        if x.dim() not in numbers_of_dims or x.dim() != query.dim():
            raise ShapeError(
                f"{name} must have the dimensions {self.tensor_layout}, as query has, got shape {tuple(x.shape)}; "
                "tensor_layout says which"
            )

    def _heads_first(self, x: Tensor) -> Tensor:
        """(B, H, T, D)."""
        if self.tensor_layout == "BTHD":
            return x.transpose(1, 2)
        if self.tensor_layout == "THD":
            return x.transpose(0, 1)[None]
        return x if x.dim() == 4 else x[:, None]


def _from_the_first_key(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values for as many positions as there are queries, and a mask of those that there are: query i
    is at position i.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    if num_queries < num_keys:
        return k[:, :, :num_queries], v[:, :, :num_queries], None
    k, v = (F.pad(x, (0, 0, 0, num_queries - num_keys)) for x in (k, v))
    return k, v, torch.arange(num_queries, device=q.device) < num_keys


def attention_function(
    layout: AnyLayout | AttentionSpec | str | tuple[int, ...] | list[int] | None,
    *,
    context_length: int | None = None,
    window: int | None = None,
    rotary: str | Rotation | None = None,
    rotary_split: RotarySplit = "low_far",
    tensor_layout: TensorLayout = "BHTD",
    backend: Backend = "auto",
) -> AttentionFunction:
    """Structured attention to put where code calls ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        layout: a layout, or ``HeadLayouts``, one for each key head; or a spec such as ``"mlr:32|16|8|8"`` or
            ``"heads:standard*2/window:252,sink_tokens=4*6"``, of layouts and windows only; or the ranks of a
            layout of halved blocks, ``(32, 16, 8, 8)``; ``None`` is plain attention. Ranks sum to the head
            dimension.
        context_length: length in positions from which blocks are halved, which specs and ranks need.
        window: sliding window in positions, as of ``structured_attention``.
        rotary: which dimensions the code that calls it rotates together: ``"halves"``, ``"adjacent"``, or
            either with the number of rotated dimensions, ``"halves:64"``. Queries and keys are then put in
            ``rotary_order`` at every call. Default ``None``: no rotary positions, or already in that order.
        rotary_split: which level gets which rotary pairs, see ``rotary_order``.
        tensor_layout: ``"BHTD"`` (batch, heads, length, dim), as PyTorch's function; ``"BTHD"``, as flash
            attention; or ``"THD"``, packed sequences.
        backend: as of ``structured_attention``.

    Raises:
        ConfigError: the layout is of another kind, or an option does not fit it.

    Cost: of a call, that of ``structured_attention``; with ``rotary`` and several levels one more copy of
        queries and keys.

    Source: ours; the arguments of a call are those of PyTorch's function.

    Example:
        >>> attend = attention_function("mlr:4|4", context_length=64)
        >>> q = torch.randn(1, 2, 10, 8)
        >>> attend(q, q, q, is_causal=True).shape
        torch.Size([1, 2, 10, 8])
    """
    if isinstance(layout, str | AttentionSpec):
        spec = text_forms.read(AttentionSpec, layout) if isinstance(layout, str) else layout
        if spec.scoring != Standard() or spec.num_heads is not None or isinstance(spec.layout, TextLayout):
            raise ConfigError(
                "a function of queries and keys has a layout of blocks and a window only, and the spec "
                f"{quoted(str(spec))} asks for more: sa.Attention.from_spec makes a module of it"
            )
        if window is not None:
            raise ConfigError(
                f"give the window in the spec, 'mlr:4|4+window:{window}', or a layout and window={window}"
            )
        window = spec.window
        resolved: AnyLayout | SinkWindow | AttentionSpec | None
        length = 1 if context_length is None and not spec.halves_blocks else _length(context_length)
        if spec.heads is not None:
            has_ranks = any(isinstance(head.layout, LevelLayout | Halving | GlobalWindowLayout) for head in spec.heads)
            resolved = _layout_of_heads(spec, length) if has_ranks else spec
        else:
            resolved = spec.layout.resolve(length) if isinstance(spec.layout, Halving) else spec.layout
    elif isinstance(layout, tuple | list):
        resolved = LevelLayout.halving(layout, _length(context_length))
    else:
        if context_length is not None:
            raise ConfigError("context_length is for specs and ranks: a layout has its block sizes")
        check_type("layout", layout, AnyLayout | None, "a layout, a spec, ranks or None")
        resolved = layout
    head_dim = resolved.head_dim if isinstance(resolved, AnyLayout) else None
    # A text is read, so that it is checked, also where nothing is put in its order.
    rotation = None if rotary is None else rotation_of(rotary, head_dim or MOST_DIMS)
    return AttentionFunction(
        layout=resolved,
        window=window,
        rotary=None if head_dim is None else rotation,
        rotary_split=rotary_split,
        tensor_layout=tensor_layout,
        backend=backend,
    )


def _layout_of_heads(spec: AttentionSpec, context_length: int, head_dim: int | None = None) -> HeadLayouts:
    layout = spec.layout_for(context_length, head_dim)
    assert isinstance(layout, HeadLayouts)
    return layout


def _length(context_length: int | None) -> int:
    if context_length is None:
        raise ConfigError("blocks are halved from a context length: give context_length=1024, say")
    check_size("context_length", context_length, MAX_LENGTH)
    return context_length
