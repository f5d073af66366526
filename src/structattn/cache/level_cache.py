"""``LevelCache``: the keys and values of one attention layer, of which each level keeps only the block that decoding is in."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, get_args

import torch
from torch import Tensor

from structattn.cache import decode, files, fused
from structattn.cache.contents import Contents, Shape
from structattn.cache.latent import Latent
from structattn.checks import (
    INT_DTYPES,
    MAX_LENGTH,
    MAX_SIZE,
    check_choice,
    check_int,
    check_int_tensor,
    check_scale,
    check_size,
    check_tensor,
    check_type,
    describe,
    is_int,
)
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.layout.global_window import GlobalWindowLayout, Layout
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.memory import check_memory
from structattn.ops import Backend, structured_attention
from structattn.ops.checks import autocasted, check_tensors, taken_dtype, without_autocast

# So many new tokens at once are decoded one run after the other; more are computed as a stretch of a sequence.
_FEW_TOKENS = 16
PAGE_SIZE = 1024  # tokens


class LevelCache:
    """Keys and values of one causal attention layer while it decodes, without what no later query can share.

    A pair of positions shares level l only inside one block of that level, so level l keeps the slices of the keys (and, with
    ``value_ranks``, of the values) of the block that decoding is in: T r_1 + sum over l > 1 of r_l min(T, block_size_l)
    numbers per key head instead of T D (``layout.key_cache_size``). With a sliding window a level keeps at most the window.

    Blocks are counted from the first real token of each row. What is kept carries no gradient.

    Args:
        layout: as of ``structured_attention``. Or a ``TextLayout``: then each call is given its levels with the segments that the new
            tokens see. Default ``None``: plain attention, everything is kept.
        window: sliding window in positions. Default ``None``.
        max_length: tokens for which memory is taken with the first ones; more are possible. Default ``None``: it grows by pages.
        page_size: tokens per page. What is allocated is ``layout.key_cache_size(T)`` with each level rounded up to a page (but
            never above its longest block). Default 1,024.
        left_padding: (B,) ints, leading tokens of each row that are padding. Default ``None``.
        latent: makes keys from a hidden state that all heads share; then ``attend`` is given that state in place of
            keys, and it is what is kept. Default ``None``. See ``Attention.new_cache``.

    Raises:
        ConfigError: an option is out of its range.

    Example:
        >>> cache = LevelCache(LevelLayout.halving((4, 2, 2), 64))
        >>> q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
        >>> cache.attend(q, k, v).shape, cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]).shape
        (torch.Size([1, 2, 40, 8]), torch.Size([1, 2, 1, 8]))

    Cost: a decoding step costs what it reads: the numbers that are kept, once each. Appending copies the new tokens alone.

    Source: the idea is Kuang et al. 2025, section 5 (a cache of T sum r_l / p_l); ragged rows, windows, values, latent states
    and any chunking are ours.
    """

    def __init__(
        self,
        layout: Layout | TextLayout | None = None,
        *,
        window: int | None = None,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        latent: Latent | None = None,
    ) -> None:
        kinds = (LevelLayout, GlobalWindowLayout, TextLayout, type(None))
        check_type("layout", layout, kinds, "a LevelLayout, GlobalWindowLayout, TextLayout or None")
        for name, value in (("window", window), ("max_length", max_length), ("page_size", page_size)):
            if value is not None or name == "page_size":
                check_size(name, value, MAX_LENGTH)
        if latent is not None and not all(hasattr(latent, name) for name in ("key_dim", "num_gains", "can_absorb")):
            raise ConfigError(f"latent must be a Latent, such as Attention.latent, or None, got {describe(latent)}")
        if window is not None and isinstance(layout, GlobalWindowLayout):
            raise ConfigError("a global-window layout has its own window: leave window at None")
        self.text = layout if isinstance(layout, TextLayout) else None
        self._layout: Layout | None = layout.bound if isinstance(layout, TextLayout) else layout
        self.window = window
        self.max_length = max_length
        self.page_size = page_size
        self.latent = latent
        self._padding = None if left_padding is None else _padding(left_padding)
        self._contents: Contents | None = None  # from the first tokens on
        self._before: tuple[Contents | None, Layout | None] | None = None  # the last new tokens; None: not known
        self._layer: weakref.ref[object] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy may continue with a copy of the layer.
        return {**self.__dict__, "_before": None, "_layer": None}

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches that share memory would write over each other's tokens

    @property
    def layout(self) -> Layout | None:
        """The layout; where rows have segments of their own, in the order of the rows that there are now."""
        return self._layout

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return 0 if self._contents is None else self._contents.length

    @property
    def batch_size(self) -> int | None:
        """B, known from the first tokens, from ``left_padding`` or from segments per row."""
        if self._contents is not None:
            return self._contents.shape.batch
        if self._padding is not None:
            return len(self._padding)
        return self._layout.num_rows if isinstance(self._layout, LevelLayout) else None

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Leading tokens of each row that are padding; ``None`` without padding."""
        return self._padding

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys (or for the latent state)."""
        return sum(store.nbytes for store in self._contents.keys) if self._contents else 0

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return sum(store.nbytes for store in self._contents.values) if self._contents else 0

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.key_nbytes + self.value_nbytes

    @property
    def keeps(self) -> str:
        """What is kept of the keys: ``"key features"`` or ``"hidden state"``."""
        return "key features" if self.latent is None else "hidden state"

    def __repr__(self) -> str:
        return (
            f"LevelCache(length={self.length}, nbytes={self.nbytes:,}, keeps={self.keeps!r}, layout={self.layout}, "
            f"window={self.window})"
        )

    def positions(self, count: int) -> Tensor:
        """The positions of the next tokens in their sequences, counted from the first real token.

        Args:
            count: how many.

        Returns:
            int64 (count,), or (B, count) with left padding, negative in the padding.
        """
        check_int("count", count, minimum=0, maximum=MAX_SIZE)
        check_memory(f"{count} positions", count * (self.batch_size or 1), torch.int64)
        steps = torch.arange(self.length, self.length + count)
        return steps if self._padding is None else steps - torch.tensor(self._padding)[:, None]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        backend: Backend = "auto",
        layout: LevelLayout | None = None,
    ) -> Tensor:
        """Appends new tokens and returns the attention of their queries over all tokens so far.

        The result is that of ``structured_attention`` over all keys and values, of the last T queries. If anything fails, the
        tokens are not appended.

        Args:
            q: (B, H, T, D), after rotary embedding.
            k: keys of the new tokens, (B, Gk, T, D), Gk dividing H, after rotary embedding; with ``latent`` the hidden states,
                (B, 1, T, E).
            v: (B, Gv, T, V), Gv dividing H.
            scale: as of ``structured_attention``; the same at every call.
            backend: ``"auto"`` decodes few tokens straight from what is kept (where no gradient is asked for), on a GPU by a
                fused kernel if ``max_length`` was given; so does ``"triton"``, or raises. Any other is given all keys as a
                dense tensor.
            layout: of a cache with a ``TextLayout``: its levels with the segments that the new tokens see (``TextHistory.step``),
                for every batch row.

        Returns:
            (B, H, T, V). Under autocast q, k and v are cast first, as in ``structured_attention``, and so kept.

        Raises:
            ShapeError: a shape, dtype or device does not fit, or is not that of the first tokens.
            ConfigError: a layout is missing, not needed, or has other levels.
            BackendUnavailableError: the named backend cannot run here; the message says why.
        """
        self._mark()
        try:
            return self._attend(q, k, v, scale, backend, layout)
        except BaseException:
            self.undo()
            raise

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: Backend, layout: LevelLayout | None
    ) -> Tensor:
        check_choice("backend", backend, get_args(Backend))
        if scale is not None:
            check_scale("scale", scale)
        check_tensor("q", q)
        contents = self._checked(q, k, v, layout)
        q, k, v = autocasted(q, k, v)
        kept_k, kept_v = k.detach(), v.detach()
        if contents.length == 0 or not self._is_direct(contents, q, k, v, backend):
            state, values = (k, v) if contents.length == 0 else contents.dense(k, v)
            out = self._dense(q, self._made(state), values, scale, backend)
            contents.append(kept_k, kept_v)
            return out
        outs = []
        for first, end in contents.runs(q.shape[2]):
            contents.append(kept_k[:, :, first:end], kept_v[:, :, first:end])
            query, held = q[:, :, first:end], contents.held()
            is_fused = backend == "triton" or (q.is_cuda and fused.why_not(query, held) is None)
            with without_autocast(q):  # it would turn the products here into 16-bit ones
                outs.append((fused if is_fused else decode).attention(query, held, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)

    def _is_direct(self, contents: Contents, q: Tensor, k: Tensor, v: Tensor, backend: Backend) -> bool:
        """Whether new tokens are decoded straight from what is kept: few ones, past the padding, without a gradient."""
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return False
        makes_keys = self.latent is not None and not self.latent.can_absorb
        is_past_padding = contents.length >= contents.most_padding
        return backend in ("auto", "triton") and q.shape[2] <= _FEW_TOKENS and is_past_padding and not makes_keys

    def append(self, k: Tensor, v: Tensor, *, layout: LevelLayout | None = None) -> None:
        """Appends tokens without attending, all or (with an error) none; arguments as ``attend``."""
        self._mark()
        try:
            contents = self._checked(None, k, v, layout)
            contents.append(*autocasted(k.detach(), v.detach()))
        except BaseException:
            self.undo()
            raise

    def _mark(self) -> None:
        """Marks the point to which ``undo`` returns."""
        self._before = None
        if self._contents is not None:
            self._contents.mark()
        self._before = (self._contents, self._layout)

    def undo(self) -> None:
        """Takes back the tokens of the last ``attend`` or ``append``, as if they had not come: blocks that they left are there again.

        Raises:
            CacheError: there are none, or something else was done since.
        """
        if self._before is None:
            raise CacheError(
                "the last thing done to this cache was not to append tokens: there is nothing to undo; crop() goes back further"
            )
        contents, layout = self._before
        if contents is not None:
            contents.take_back()
        self._contents, self._layout, self._before = contents, layout, None

    def bind(self, layer: object) -> None:
        """Makes this the cache of one layer, from its first use on; a copy, or a cache that was loaded, has no layer yet.

        Args:
            layer: the module. It is not kept alive. Where the cache keeps hidden states, keys are made by its attribute ``latent``:
                what a copy of a cache has still uses the weights of the original.

        Raises:
            ConfigError: it is the cache of another layer.
        """
        check_type("layer", layer, torch.nn.Module, "the module that the cache is for")
        self.check_layer(layer)
        if self._layer is not None:
            return
        if self.latent is not None:
            self.latent = layer.latent  # type: ignore[attr-defined]
            if self._contents is not None:
                self._contents.latent = self.latent
        self._layer = weakref.ref(layer)

    def check_layer(self, layer: object) -> None:
        """Raises what ``bind`` would raise, and changes nothing."""
        if self._layer is not None:
            if self._layer() is not layer:
                raise ConfigError(
                    f"the cache is of another layer: it was made or filled by another {type(layer).__name__}, whose keys this one "
                    "cannot use; make one with new_cache(), and give each layer its own"
                )
        elif self.latent is not None:
            latent: Latent | None = getattr(layer, "latent", None)
            if latent is None or _facts(latent) != _facts(self.latent):
                raise ConfigError(
                    "the cache is of another layer: it keeps hidden states, from which this one makes other keys; make it with new_cache()"
                )

    def _checked(self, q: Tensor | None, k: Tensor, v: Tensor, layout: LevelLayout | None) -> Contents:
        """The contents, if the tokens fit them, made for the first ones."""
        given = (("k", k), ("v", v)) if q is None else (("q", q), ("k", k), ("v", v))
        for name, x in given:
            check_tensor(name, x)
            if x.dim() != 4 or min(x.shape) < 1 or not x.is_floating_point():
                raise ShapeError(
                    f"{name} must be floating point of shape (batch, heads, length, dim), all at least 1, got {x.dtype} "
                    f"{tuple(x.shape)}"
                )
        for name, x in given:
            if x.shape[0] != k.shape[0] or x.shape[2] != k.shape[2]:
                raise ShapeError(
                    f"new tokens need one batch and length: k is {tuple(k.shape)}, {name} is {tuple(x.shape)}"
                )
            if taken_dtype(x) != taken_dtype(k) or x.device != k.device:
                raise ShapeError(
                    f"new tokens need one dtype and device: k is {k.dtype} on {k.device}, {name} {x.dtype} on {x.device}"
                )
        if q is not None:
            if any(q.shape[1] % heads for heads in (k.shape[1], v.shape[1])):
                raise ShapeError(
                    f"the query heads must be a multiple of the key and value heads, got {q.shape[1]}, {k.shape[1]}, {v.shape[1]}"
                )
            if self.latent is None and q.shape[3] != k.shape[3]:
                raise ShapeError(f"head dimensions differ: q {q.shape[3]}, k {k.shape[3]}")
            if self.latent is not None and q.shape[3] != self.latent.key_dim:
                raise ShapeError(f"queries need the dimension of the keys, {self.latent.key_dim}, got {q.shape[3]}")
        if self.latent is not None and k.shape[1] != 1:
            raise ShapeError(
                f"a cache that keeps hidden states is given those in place of keys, (batch, 1, length, E), got {tuple(k.shape)}"
            )
        found = Shape(
            batch=k.shape[0],
            keys=(k.shape[1], k.shape[3]),
            values=(v.shape[1], v.shape[3]),
            dtype=taken_dtype(k),
            device=k.device,
        )
        if layout is not None and self.text is None:
            raise ConfigError(
                f"the layout of this cache is always {self.layout}: leave layout at None, got {describe(layout)}"
            )
        if self.text is not None:
            if layout is None or not self.text.fits(layout):
                raise ConfigError(
                    f"a cache with {self.text} needs its levels with the segments that the tokens see: got {describe(layout)}"
                )
            if len(layout.boundaries or ()) != found.batch:
                raise ShapeError(
                    f"segments need one entry per batch row: expected {found.batch}, got {len(layout.boundaries or ())}"
                )
            self._layout = layout
        if self._contents is None:
            if self._padding is not None and len(self._padding) != found.batch:
                raise ShapeError(
                    f"left_padding has {len(self._padding)} rows, but the tokens have {found.batch}: they need to be equal"
                )
            self._contents = self._empty(found)
        elif found != self._contents.shape:
            raise ShapeError(
                f"the tokens must be like the first ones: expected {self._contents.shape}, got {found}; or use a new cache"
            )
        elif layout is not None:
            self._contents.set_layout(layout)
        return self._contents

    def _empty(self, shape: Shape) -> Contents:
        return Contents(
            shape,
            layout=self._layout,
            window=self.window,
            max_length=self.max_length,
            page_size=self.page_size,
            padding=self._padding,
            latent=self.latent,
            text=self.text,
        )

    def _made(self, state: Tensor) -> Tensor:
        """Keys from what ``attend`` was given, of all tokens: itself, or made from the hidden states."""
        if self.latent is None:
            return state
        steps = torch.arange(state.shape[2], device=state.device)
        if self._padding is not None:
            steps = steps - torch.tensor(self._padding, device=state.device)[:, None]
        return self.latent.keys(state[:, 0], steps)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: Backend) -> Tensor:
        """Attention over dense keys and values."""
        heads = math.lcm(k.shape[1], v.shape[1])  # divides the query heads, as both do
        k, v = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        check_tensors(q, k, v)
        padding = None
        if self._padding is not None:  # a row may still be in its padding
            padding = torch.tensor(self._padding, device=q.device).clamp(max=k.shape[2])
        return structured_attention(
            q, k, v, self.layout, scale=scale, window=self.window, left_padding=padding, backend=backend
        )

    def reset(self) -> None:
        """Forgets all tokens; memory, shape and padding stay."""
        self._before = None
        if self._contents is not None:
            self._contents.reset()

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``.

        Args:
            length: at most ``self.length``.

        Raises:
            ConfigError: ``length`` is negative or more than there are.
            CacheError: the next token would share a level with keys that are no longer kept: those of an earlier block,
                or beyond the window. Nothing is changed then.
        """
        self.check_crop(length)
        self._before = None
        if self._contents is not None:
            self._contents.crop(length)
            self._layout = self._contents.layout

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        if not is_int(length) or not 0 <= length <= self.length:
            raise ConfigError(
                f"crop takes a length from 0 to {self.length}, the tokens there are; got {describe(length)}"
            )
        if self._contents is not None:
            self._contents.check_crop(length)

    def reorder(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``: what beam search does with its beams.

        Args:
            indices: (B,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        check_tensor("indices", indices)
        if self.batch_size is not None and tuple(indices.shape) != (self.batch_size,):
            raise ShapeError(f"indices must have shape ({self.batch_size},), one per row, got {tuple(indices.shape)}")
        self.select(indices)

    def select(self, indices: Tensor) -> None:
        """Keeps rows ``indices``, in that order; a row may be taken several times.

        Args:
            indices: (N,) int, each in [0, B).

        Raises:
            ShapeError: it is not of that shape, or an index is out of range.
        """
        check_tensor("indices", indices)
        if indices.dim() != 1 or indices.dtype not in INT_DTYPES or not len(indices) or indices.is_meta:
            raise ShapeError(
                f"indices must be a 1-dimensional int tensor, not on the meta device, got {indices.dtype} {tuple(indices.shape)}"
            )
        size = self.batch_size
        if size is None:
            return
        rows = indices.tolist()
        if min(rows) < 0 or max(rows) >= size:
            raise ShapeError(f"indices must lie in [0, {size}), got {min(rows)} to {max(rows)}")
        self._before = None
        if self._contents is not None:
            self._contents.select(indices.long())
            self._padding, self._layout = self._contents.padding, self._contents.layout
            return
        if self._padding is not None:
            self._padding = tuple(self._padding[row] for row in rows)
        if isinstance(self._layout, LevelLayout):
            self._layout = self._layout.select_rows(rows)

    def repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one behind the other."""
        check_size("repeats", repeats)
        if self.batch_size is not None:
            check_memory(f"{repeats} copies of the rows", repeats * (self.nbytes + 64 * self.batch_size), torch.uint8)
            self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``from_state`` makes an equal cache; the layout is not among them.

        Raises:
            CacheError: the cache is empty.
        """
        if self._contents is None or not self.length:
            raise CacheError("an empty cache has nothing to save: decode first")
        if any(not store.pages for store, _ in self._contents.stores()):
            raise CacheError("the cache holds nothing but padding so far: save it when a row has a real token")
        plain = {
            "window": self.window,
            "max_length": self.max_length,
            "page_size": self.page_size,
            "length": self.length,
            "left_padding": self._padding,
            "keeps": self.keeps,
            "text": None if self.text is None else self.text.units,
            "oldest": [store.oldest for store, _ in self._contents.stores()],
            "key_shape": self._contents.shape.keys,
            "value_shape": self._contents.shape.values,
        }
        return plain, {str(n): torch.cat(store.pages, dim=3) for n, (store, _) in enumerate(self._contents.stores())}

    @classmethod
    def from_state(
        cls, plain: dict[str, Any], tensors: dict[str, Tensor], layout: Layout | None, latent: Latent | None
    ) -> LevelCache:
        """A cache from what ``state`` returned, its layout, and with a hidden state its latent."""
        if (plain["keeps"] == "hidden state") != (latent is not None):
            raise ConfigError(
                f"the cache keeps the {plain['keeps']}: "
                + ("give the latent of its layer (Attention.latent)" if latent is None else "it takes no latent")
            )
        text = None
        if plain.get("text") is not None and isinstance(layout, LevelLayout):
            text = TextLayout(layout.ranks, tuple(plain["text"]), layout.scaling, layout.value_ranks)
        cache = cls(
            text or layout,
            window=plain["window"],
            max_length=plain["max_length"],
            page_size=plain["page_size"],
            left_padding=plain["left_padding"],
            latent=latent,
        )
        cache._layout = layout  # with its segments
        first = tensors["0"]
        (key_heads, key_dim), (value_heads, value_dim) = plain["key_shape"], plain["value_shape"]
        contents = cache._empty(
            Shape(
                batch=first.shape[0],
                keys=(key_heads, key_dim),
                values=(value_heads, value_dim),
                dtype=first.dtype,
                device=first.device,
            )
        )
        contents.length = plain["length"]
        found = [tensors[str(number)].shape[2] for number in range(len(plain["oldest"]))]
        if found != [store.dim for store, _ in contents.stores()]:
            raise ConfigError(
                "the latent is of another layer: its keys or states have other sizes than those that are kept"
            )
        for number, ((store, _), oldest) in enumerate(zip(contents.stores(), plain["oldest"], strict=True)):
            store.pages, store.oldest = [tensors[str(number)]], list(oldest)
        cache._contents = contents
        return cache

    def save(self, path: str | Path) -> None:
        """Writes the cache to a safetensors file, at once and completely or not at all; ``load`` verifies it.

        Raises:
            CacheError: it is empty.
            CheckpointError: it cannot be written.
        """
        files.save(path, [(self.state(), self.layout)])

    @classmethod
    def load(
        cls, path: str | Path, device: torch.device | str | None = None, latent: Latent | None = None
    ) -> LevelCache:
        """Reads what ``save`` wrote; decoding goes on with the same numbers.

        Args:
            path: the file.
            device: where the tensors go. Default: the CPU.
            latent: of the layer (``Attention.latent``), for a cache that keeps hidden states.

        Raises:
            CheckpointError: the file is missing, truncated, changed, or not a cache.
            ConfigError: a latent is missing or not needed.
        """
        layers, _ = files.load(path, device)
        if len(layers) != 1:
            raise ConfigError(f"{path} holds the caches of {len(layers)} layers: read it with LayerCaches.load")
        (state, layout) = layers[0]
        return cls.from_state(*state, layout, latent)


def _facts(latent: Latent) -> tuple[int, int, bool]:
    return latent.key_dim, latent.num_gains, latent.can_absorb


def _padding(given: Tensor | Sequence[int]) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        check_int_tensor("left_padding", given, (None,))
    values = given.tolist() if isinstance(given, Tensor) and not given.is_meta else given
    fits = isinstance(values, list | tuple) and values and all(is_int(x) and 0 <= x <= MAX_LENGTH for x in values)
    if not fits:
        raise ConfigError(f"left_padding needs one int of at least 0 per batch row, got {describe(given)}")
    return tuple(values)
