"""``LevelCache``: the keys and values of one attention layer, of which each level keeps only the block that
decoding is in, or its window.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from structattn.cache import files
from structattn.cache.contents import Contents, OtherLatentError, TokenShape
from structattn.cache.head_contents import HeadContents, contents_of
from structattn.cache.latent import Latent, alike
from structattn.cache.numbers import Count, new_number
from structattn.cache.rows import OneLayerCache
from structattn.cache.storage import PAGE_SIZE, LayerStorage, Storage, checked_storage
from structattn.cache.tokens import check_layout_of_call, check_options, checked_padding, checked_shape
from structattn.checks import check_tensor, check_type, describe, is_int
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import AnyLayout, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.ops import Backend
from structattn.ops.checks import autocasted
from structattn.ops.terms import ScoreTerms

# The options of a cache that it keeps.
_OPTIONS = (
    "layout",
    "window",
    "chunk_size",
    "max_length",
    "page_size",
    "latent",
    "text",
    "storage",
)
# Options that a file holds.
_SAVED = ("window", "chunk_size", "max_length", "page_size", "left_padding")


class LevelCache(OneLayerCache):
    """Keys and values of one causal attention layer while it decodes, without what no later query can share.

    A pair of positions shares level l only inside one block of that level, so level l keeps the slices of the
    keys (and, with ``value_ranks``, of the values) of the block that decoding is in: T r_1 + sum over l > 1
    of r_l min(T, block_size_l) numbers per key head instead of T D (``layout.key_cache_size``). With a
    sliding window, or sliding levels, a level keeps at most its window.

    Blocks are counted from the first real token of each row. What is kept carries no gradient.

    Args:
        layout: as of ``structured_attention``. Or a ``TextLayout``: each call is given its levels with the
            segments that the new tokens see. Or ``HeadLayouts``, one layout for each key head. Default
            ``None``: plain attention, everything is kept.
        window: sliding window in positions. Default ``None``.
        chunk_size: tokens see only those of their own chunk of this many, from whose start blocks are
            counted. Default ``None``.
        max_length: number of tokens for which memory is allocated when the first tokens come. Quantized
            numbers are allocated by pages up to there. More tokens are possible. Default ``None``: memory
            grows by pages.
        page_size: tokens per page; ``layout.key_cache_size(T)`` is allocated, each level rounded up to a page
            but not above its longest block. Default 1,024.
        left_padding: (B,) ints, leading tokens of each row that are padding. Default ``None``.
        latent: makes keys from a hidden state that all heads share, which ``attend`` is given in place of
            keys, and which is kept. Default ``None``.
        storage: in which bits numbers are kept; a list has one for each key head, ``None`` among them.
            Default ``None``: as the model makes them.

    Attributes:
        layout: the layout. With different segments per row its rows are in the present order of the rows,
            after ``select`` or ``reorder`` too.

    Raises:
        ConfigError: an option is out of its range.

    Example:
        >>> cache = LevelCache(LevelLayout.halving((4, 2, 2), 64))
        >>> q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
        >>> cache.attend(q, k, v).shape, cache.attend(q[:, :, :1], k[:, :, :1], v[:, :, :1]).shape
        (torch.Size([1, 2, 40, 8]), torch.Size([1, 2, 1, 8]))

    Cost: a decoding step costs what it reads: the numbers that are kept, once each. Appending copies only the
        new tokens.

    Source: the idea is Kuang et al. 2025, section 5 (a cache of T sum r_l / p_l); ragged rows, windows,
        values, latent states are ours.
    """

    def __init__(
        self,
        layout: AnyLayout | TextLayout | None = None,
        *,
        window: int | None = None,
        chunk_size: int | None = None,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        latent: Latent | None = None,
        storage: Storage | Sequence[Storage | None] | None = None,
    ) -> None:
        sizes = {"window": window, "chunk_size": chunk_size, "max_length": max_length, "page_size": page_size}
        self.storage: LayerStorage = checked_storage(storage)
        check_options(layout, latent, self.storage, **sizes)
        self.text = layout if isinstance(layout, TextLayout) else None
        self.layout: AnyLayout | None = layout.bound if isinstance(layout, TextLayout) else layout
        self.window, self.chunk_size = window, chunk_size
        self.max_length, self.page_size, self.latent = max_length, page_size, latent
        self._set_padding(None if left_padding is None else checked_padding(left_padding))
        self._kept: Contents | HeadContents | None = None  # from the first tokens on
        # the last new tokens; None: not known
        self._before: tuple[Contents | HeadContents | None, AnyLayout | None] | None = None
        self._layer: weakref.ref[object] | None = None  # the layer that it is for, which is not kept alive
        self._count = Count()
        self.number = new_number(self)

    def __getstate__(self) -> dict[str, Any]:
        # A copy may continue with a copy of the layer.
        self._end_broken_call()
        return {**self.__dict__, "_before": None, "_layer": None, "number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = new_number(self)

    def __copy__(self) -> Self:
        return copy.deepcopy(self)  # two caches that share memory would write over each other's tokens

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return self._count.tokens

    @property
    def _contents(self) -> Contents | HeadContents | None:
        self._end_broken_call()
        return self._kept

    def _kept_length(self) -> int:
        return 0 if self._kept is None else self._kept.length

    def _end_broken_call(self) -> None:
        """Takes tokens back that a compiled program appended before it broke off, for example by Ctrl-C in
        another layer. Raises ``CacheError`` where that cannot be done.
        """
        if (count := self._count.tokens) == self._kept_length():
            return
        if self._before is not None:
            self._take_back()
        if self._kept_length() != count:
            raise CacheError(
                "a change of this cache broke off, or a compiled function after several calls of it: reset() it and "
                "start again"
            )

    @property
    def batch_size(self) -> int | None:
        """B, known from the first tokens, from ``left_padding`` or from segments per row."""
        if self._kept is not None:
            return self._kept.shape.batch
        if self._padding is not None:
            return len(self._padding)
        return self.layout.num_rows if isinstance(self.layout, LevelLayout) else None

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """Leading tokens of each row that are padding; ``None`` without padding."""
        return self._padding

    @property
    def padding_tensor(self) -> Tensor | None:
        """``left_padding`` as int64 (B,), on the CPU."""
        return self._padding_tensor

    def _set_padding(self, padding: tuple[int, ...] | None) -> None:
        self._padding = padding
        with torch.inference_mode(False):
            self._padding_tensor = None if padding is None else torch.tensor(padding, device="cpu")

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys (or for the latent state)."""
        return self._kept.key_nbytes if self._kept else 0

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return self._kept.value_nbytes if self._kept else 0

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return self.key_nbytes + self.value_nbytes

    @property
    def keeps(self) -> str:
        """What is kept of the keys: ``"key features"`` or ``"hidden state"``."""
        return "key features" if self.latent is None else "hidden state"

    def __repr__(self) -> str:
        facts = f"length={self.length}, nbytes={self.nbytes:,}, keeps={self.keeps!r}"
        return f"LevelCache({facts}, layout={self.layout}, window={self.window})"

    def bind(self, layer: object) -> None:
        """Makes this the cache of one layer, from its first use on; a copy, or a cache that was loaded, has
        no layer yet.

        The layer is not kept alive. Where the cache keeps hidden states, keys are made by its attribute
        ``latent``: a copy of the cache still uses the weights of the original.

        Raises:
            ConfigError: it is the cache of another layer.
        """
        check_type("layer", layer, torch.nn.Module, "the module that the cache is for")
        self.check_layer(layer)
        if self._layer is not None:
            return
        if self.latent is not None:
            self.latent = latent = layer.latent  # type: ignore[attr-defined]
            if isinstance(self._kept, Contents):
                self._kept.set_latent(latent)
        self._layer = weakref.ref(layer)

    def check_layer(self, layer: object) -> None:
        """Raises what ``bind`` would raise, and changes nothing."""
        if self._layer is not None:
            if self._layer() is not layer:
                raise ConfigError(
                    f"the cache is of another layer: it was made or filled by another {type(layer).__name__}, whose "
                    "keys this one cannot use; make one with new_cache(), and give each layer its own"
                )
        elif self.latent is not None and not alike(self.latent, getattr(layer, "latent", None)):
            raise ConfigError(
                "the cache is of another layer: it keeps hidden states, from which this one makes other keys; make it "
                "with new_cache()"
            )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        backend: Backend = "auto",
        layout: LevelLayout | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        token_scores: Tensor | None = None,
    ) -> Tensor:
        """Appends new tokens and returns the attention of their queries over all tokens so far.

        The result is that of ``structured_attention`` over all keys and values, of the last T queries. If
        anything fails, the tokens are not appended.

        Args:
            q: (B, H, T, D), after rotary embedding.
            k: keys of the new tokens, (B, Gk, T, D), Gk dividing H, after rotary embedding; with ``latent``
                the hidden states, (B, 1, T, E).
            v: (B, Gv, T, V), Gv dividing H.
            scale, softcap, sinks, alibi_slopes: as of ``structured_attention``; the same at every call.
            backend: ``"auto"`` reads the cache directly for few new tokens without gradients; on a GPU it
                runs a fused kernel if ``max_length`` was given. ``"triton"`` runs that kernel or raises.
                Every other backend gets all keys and values as dense tensors. A cache with ``storage`` of one
                quantized level needs no ``max_length`` for the fused kernel. Default ``"auto"``.
            layout: of a cache with a ``TextLayout``: its levels with the segments that the new tokens see
                (``TextHistory.step``), for every batch row.
            attn_mask: as of ``structured_attention``, (B, H, T, S) or broadcastable. S counts all tokens,
                those so far, padding included, and the new ones: nothing of it is remembered, so that each
                call needs the columns of what an earlier one hid. It moves no block. At positions that a
                level has dropped it changes nothing, since no later query shares them at this level.
            token_scores: (B, Gk, T), how much later queries will need the new tokens, on any scale: of each
                block, a storage with ``keep`` keeps those with the highest; NaN is above all numbers. Default
                ``None``: for a storage that keeps all.

        Returns:
            (B, H, T, V). Under autocast q, k and v are cast first, as in ``structured_attention``, and so
            kept.

        Raises:
            ShapeError: a shape, dtype or device does not fit, or is not that of the first tokens.
            ConfigError: a layout is missing, not needed, or has other levels; a derivative is asked for where
                numbers have fewer bits; or ``torch.vmap`` maps over k or v.
            BackendUnavailableError: the named backend cannot run here; the message says why.
        """
        # Before anything is made of them: of a step over a short cache that would be a tenth.
        has_scale_only = softcap is None and sinks is None and attn_mask is None and alibi_slopes is None
        if backend == "auto" and layout is None and has_scale_only:
            length = self.length
            try:
                if (step := self.try_step(q, k, v, scale=scale, token_scores=token_scores)) is not None:
                    return step  # inside, so that an interruption here takes it back too
            except BaseException:
                self._drop_step(length)
                raise
        terms = ScoreTerms(scale=scale, softcap=softcap, sinks=sinks, attn_mask=attn_mask, alibi_slopes=alibi_slopes)
        self._mark()
        try:
            out = self._checked(q, k, v, layout, terms, token_scores).attend(q, k, v, terms, backend)
            self._end()
            return out  # inside, so that an interruption here takes it back too
        except BaseException:
            self._take_back()
            raise

    def try_step(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None,
        order: Tensor | None = None,
        token_scores: Tensor | None = None,
    ) -> Tensor | None:
        """``attend`` of a token like the last one, in C++ and without checks; see ``Contents.try_step``.

        Args:
            q, k, v, scale: as of ``attend``, and like those of its last call in all but their numbers.
            order: int64 (1 or Gk, D), the dimension of q and k at each position of the levels. Default: they
                are in that order.
            token_scores: as of ``attend``.

        Returns:
            (B, H, 1, V); ``None``, with nothing appended, where an argument differs in more than its numbers.
        """
        contents = self._contents
        if contents is None:
            return None
        length = contents.length
        try:
            if token_scores is not None:
                _give_scores(contents, token_scores)
            out = contents.try_step(q, k, v, scale, order)
            if out is not None:
                self._before = (contents, self.layout)
                self._end()
            return out  # inside, so that an interruption here takes it back too
        except BaseException:
            self._drop_step(length)
            raise

    def _drop_step(self, length: int) -> None:
        """After ``try_step`` was broken off: takes its token back, if it came to that, so that there are
        ``length`` tokens again.
        """
        if self._kept is None:  # this broke off before: what is counted says so
            return
        if self._kept.length != length:
            with self._changing() as contents:
                assert contents is not None
                contents.undo()
        self._before = None
        self._end()

    @contextmanager
    def uncounted(self, num_past: int, *, again: bool = False) -> Iterator[None]:
        """Within it an operator of a compiled program gives the cache the tokens after ``num_past`` others.
        The program counts them at its end: until then the cache is seen as it was, and if the program breaks
        off, the next use takes them back.

        Args:
            again: they are the last tokens once more.

        Raises:
            CacheError: it holds another number of tokens.
        """
        counted = self._count.tokens
        is_broken = again or self._kept_length() != counted
        if is_broken and self._kept_length() != num_past and self._before is not None:
            self._take_back()
            self._count.tokens = counted
        if (length := self._kept_length()) != num_past:
            raise CacheError(
                f"the cache holds {length} tokens, and the compiled program counts {num_past} before the new ones: a "
                "call of the model broke off, or a layer was used without the others; reset() it and give all tokens "
                "again"
            )
        self._count.tokens = num_past
        try:
            yield
        finally:
            self._count.tokens = counted

    def count_traced(self, tokens: int) -> None:
        """Counts in code that ``torch.compile`` traces what an operator has appended, which a compiler does
        not see.
        """
        self._count.tokens = tokens

    def count_with(self, count: Count) -> None:
        """Counts tokens in an object that others read too."""
        count.tokens = self._count.tokens
        self._count = count

    def dense_past(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys (or hidden states) and values of all tokens, (B, Gk, S, D) and (B, Gv, S, V), zero where a
        level has dropped them.

        Args:
            k, v: of new tokens, which are not appended; they tell the shape.
        """
        contents = self._checked(None, k, v, None)
        return contents.dense_keys(k[:, :, :0]), contents.dense_values(v[:, :, :0])

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        layout: LevelLayout | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        attn_mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """The weights that ``attend`` would give the tokens so far and the new ones, (B, H, T, S); nothing is
        appended.

        Arguments and errors are those of ``attend``. A global-window layout has the sum of its two softmaxes.
        Keys that a window has dropped have weight 0, as they have without a cache.

        Cost: that of ``reference`` with S values per key: 2 B H T S (D + S) FLOPs.
        """
        terms = ScoreTerms(scale=scale, softcap=softcap, sinks=sinks, attn_mask=attn_mask, alibi_slopes=alibi_slopes)
        self._mark()
        try:
            return self._checked(q, k, v, layout, terms).weights(q, k, terms)
        finally:
            self._take_back()

    def append(
        self, k: Tensor, v: Tensor, *, layout: LevelLayout | None = None, token_scores: Tensor | None = None
    ) -> None:
        """Appends tokens without attending, all or (with an error) none; arguments as ``attend``."""
        self._mark()
        try:
            self._checked(None, k, v, layout, token_scores=token_scores).append(*autocasted(k.detach(), v.detach()))
            self._end()
        except BaseException:
            self._take_back()
            raise

    def _mark(self) -> None:
        """Marks the point to which ``undo`` returns."""
        contents, self._before = self._contents, None
        if contents is not None:
            contents.set_mark()
        self._before = (contents, self.layout)

    def _end(self) -> None:
        """Counts what the contents hold now: a change has ended."""
        self._count.tokens = self._kept_length()

    def undo(self) -> None:
        """Takes back the tokens of the last ``attend`` or ``append``, as if they had not come: blocks that
        they left are there again.

        Raises:
            CacheError: there are none, or something else was done since.
        """
        self._end_broken_call()
        if self._before is None:
            raise CacheError(
                "the last thing done to this cache was not to append tokens: there is nothing to undo; crop() goes "
                "back further"
            )
        self._take_back()

    def _take_back(self) -> None:
        """Back to the mark; if that breaks off, the cache is not used again, as in ``_changing``."""
        assert self._before is not None
        contents, layout = self._before
        self._kept, self._before = None, None
        if contents is not None:
            contents.undo()
        self._kept, self.layout = contents, layout
        self._end()

    def _checked(
        self,
        q: Tensor | None,
        k: Tensor,
        v: Tensor,
        layout: LevelLayout | None,
        options: ScoreTerms | None = None,
        token_scores: Tensor | None = None,
    ) -> Contents | HeadContents:
        """The contents, if the tokens fit them, made for the first ones, and given the scores of the tokens;
        with queries they come with ``options``.
        """
        self._end_broken_call()
        if options is not None:
            check_tensor("q", q)
        shape = checked_shape(q, k, v, self.latent)
        check_layout_of_call(layout, self.text, self.layout, shape.batch)
        if layout is not None:
            self.layout = layout
        if self._kept is None:
            self._kept = self._empty(shape)
        elif shape != self._kept.shape:
            raise ShapeError(
                f"the tokens must be like the first ones: expected {self._kept.shape}, got {shape}; or use a new cache"
            )
        elif isinstance(self._kept, Contents) and layout is not None:
            self._kept.set_layout(layout)
        if q is not None and options is not None:
            options.check(q, self._kept.length + q.shape[2])
            of_heads = self.layout.layouts if isinstance(self.layout, HeadLayouts) else (self.layout,)
            if options.scale is not None and any(isinstance(each, GlobalWindowLayout) for each in of_heads):
                raise ConfigError("a global-window layout has its own scale: leave scale at None")
        if token_scores is not None:
            _give_scores(self._kept, token_scores)
        return self._kept

    def check_heads(self, keys: tuple[int, int], values: tuple[int, int]) -> None:
        """Raises ``ConfigError`` or ``ShapeError`` where tokens whose keys and values have these heads and
        dimensions could not be kept. No memory is taken.
        """
        self._empty(TokenShape(1, keys, values, torch.float32, torch.device("meta")))

    def _empty(self, shape: TokenShape) -> Contents | HeadContents:
        options = {name: getattr(self, name) for name in _OPTIONS}
        return contents_of(shape, padding=self._padding, **options)

    @contextmanager
    def _changing(self) -> Iterator[Contents | HeadContents | None]:
        """Within it what is kept changes in several places, and the cache has nothing: if that breaks off, by
        Ctrl-C for example, it is not used again before ``reset``.
        """
        contents, self._kept, self._before = self._kept, None, None
        yield contents
        self._kept = contents

    def reset(self) -> None:
        """Forgets all tokens; memory, shape and padding stay."""
        with self._changing() as contents:
            if contents is not None:
                contents.reset()
        self._end()

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``.

        Raises:
            ConfigError: ``length`` is negative or more than ``self.length``.
            CacheError: the next token would share a level with keys that are no longer kept: those of an
                earlier block, or beyond the window. Nothing is changed then.
        """
        self.check_crop(length)
        with self._changing() as contents:
            if contents is not None:
                contents.crop(length)
                self.layout = contents.layout
        self._end()

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        if not is_int(length) or not 0 <= length <= self.length:
            raise ConfigError(
                f"crop takes a length from 0 to {self.length}, the tokens there are; got {describe(length)}"
            )
        if (contents := self._contents) is not None:
            contents.check_crop(length)

    def _take_rows(self, indices: Tensor) -> None:
        if (contents := self._contents) is not None:
            take = contents.selection(indices)  # all memory is taken here
            with self._changing():
                take()
                self._set_padding(contents.padding)
                self.layout = contents.layout
            return
        rows = indices.tolist()
        if self._padding is not None:
            self._set_padding(tuple(self._padding[row] for row in rows))
        if isinstance(self.layout, LevelLayout):
            self.layout = self.layout.select_rows(rows)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``from_state`` makes an equal cache; the layout is not among
        them.

        Raises:
            CacheError: the cache is empty.
        """
        if (contents := self._contents) is None or not self.length:
            raise CacheError("an empty cache has nothing to save: decode first")
        of_contents, tensors = contents.state()
        plain = {name: getattr(self, name) for name in (*_SAVED, "keeps")}
        plain["text"] = None if self.text is None else self.text.units
        plain["storage"] = self.storage
        return plain | of_contents, tensors

    @classmethod
    def from_state(
        cls, plain: dict[str, Any], tensors: dict[str, Tensor], layout: AnyLayout | None, latent: Latent | None
    ) -> LevelCache:
        """A cache from what ``state`` returned, its layout, and with a hidden state its latent.

        Raises:
            OtherLatentError: a latent is missing, not needed, or of another layer.
            CheckpointError, ConfigError, ShapeError: it is not what ``state`` returned.
        """
        if (plain["keeps"] == "hidden state") != (latent is not None):
            raise OtherLatentError(
                f"the cache keeps the {plain['keeps']}: "
                + ("give the latent of its layer (Attention.latent)" if latent is None else "it takes no latent")
            )
        text = None
        if plain["text"] is not None:
            if not isinstance(layout, LevelLayout) or layout.boundaries is None:
                raise CheckpointError(
                    f"levels of text units {plain['text']} need the segments of a text, got {describe(layout)}"
                )
            text = TextLayout(layout.ranks, plain["text"], layout.scaling, layout.value_ranks, layout.sink_tokens)
        cache = cls(text or layout, latent=latent, storage=plain["storage"], **{name: plain[name] for name in _SAVED})
        cache._restore(plain, tensors, layout)
        return cache

    def _restore(self, plain: dict[str, Any], tensors: dict[str, Tensor], layout: AnyLayout | None) -> None:
        """Takes over what ``state`` returned, and its layout with the segments of the tokens."""
        self.layout = layout
        self._kept = self._empty(TokenShape.of_state(plain, tensors))
        self._kept.restore(plain, tensors)
        self._end()

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
        state, layout = layers[0]
        with files.damaged(path, "layer 0"):
            return cls.from_state(*state, layout, latent)


def _give_scores(contents: Contents | HeadContents, scores: Tensor) -> None:
    """Hands the scores of new tokens to contents that keep only some."""
    check_tensor("token_scores", scores)
    if scores.is_complex() or scores.is_meta:
        raise ShapeError(
            f"token_scores must be real numbers, which are compared, got {scores.dtype} on {scores.device.type}"
        )
    if not isinstance(contents, HeadContents) or not contents.chooses_tokens:
        raise ConfigError(
            "token_scores say which tokens stay, and this cache keeps all: leave them away, or give it a storage with "
            "keep"
        )
    contents.set_scores(scores)
