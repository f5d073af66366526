"""``PagedCache``: attention of the new tokens of many requests, over pages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from structattn.cache import decode
from structattn.cache.attend import over_dense
from structattn.cache.decode import KeyValueView
from structattn.cache.over_quantized import check_no_gradient, over_quantized
from structattn.cache.paged.batch import Batch, Chunk, Singles, Tokens
from structattn.cache.paged.geometry import HeadsShape, PagedLayerShape
from structattn.cache.paged.levels import QuantizedLevel, paged_levels
from structattn.cache.paged.native_step import PagedStep
from structattn.cache.paged.pages import LevelPages, PagePool
from structattn.errors import CacheError
from structattn.layout.heads import AnyLayout
from structattn.ops.by_heads import joined, query_heads, select_heads, terms_of
from structattn.ops.terms import ScoreTerms


class PackedCache(ABC):
    """What a model calls for the attention of the tokens of many requests that are concatenated in one
    row.
    """

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: ScoreTerms,
        *,
        layout: AnyLayout | None,
        window: int | None,
    ) -> Tensor:
        """Keeps the new tokens and returns the attention of their queries over all tokens of their requests.

        Args:
            layer: number of the attention layer.
            q, k, v: (1, H, T, D), (1, G, T, D) and (1, Gv, T, V).
            options: of the scores.
            layout, window: of the layer.

        Returns:
            (1, H, T, V).
        """

    def chooses_tokens(self, layer: int) -> bool:
        """Whether a layer needs ``set_scores`` before ``attend``: key heads keep only some of the far
        tokens.
        """
        return False

    def set_scores(self, layer: int, scores: Tensor) -> None:
        """Takes the scores of the new tokens of a layer that chooses tokens, (1, G, T)."""
        raise AssertionError(f"layer {layer} chooses no tokens")

    def share_scores(self, layer: int, source: int) -> None:
        """In place of ``set_scores``, after that of ``source``: a layer with the keys of another one chooses
        the same tokens.
        """
        raise AssertionError(f"layer {layer} chooses no tokens")


class ShapeProbe(PackedCache):
    """Finds out what a ``PagedCache`` of a model must keep: call the model with one token and this.

    Attributes:
        layers: what was found, by the number of the layer.
        places: dtype and device of the keys and values.
    """

    def __init__(self) -> None:
        self.layers: dict[int, PagedLayerShape] = {}
        self.places: set[tuple[torch.dtype, torch.device]] = set()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: ScoreTerms,
        *,
        layout: AnyLayout | None,
        window: int | None,
    ) -> Tensor:
        """See ``PackedCache``: of the one token, over itself."""
        self.layers[layer] = shape_of_call(layout, window, k, v)
        self.places |= {(x.dtype, x.device) for x in (k, v)}
        return over_dense(q, k, v, options, layout=layout, window=window)


class SteppedCache(PackedCache):
    """The keys and values of the attention layers of a model, for many requests that come and go.

    ``step`` says which tokens the next call of the model has, and within it every layer calls ``attend``
    once.

    Args:
        layers: what each layer keeps.
    """

    def __init__(self, layers: Sequence[PagedLayerShape]) -> None:
        self.layers = tuple(layers)
        self._length: int | None = None  # tokens of the step
        self._done: set[int] = set()

    @abstractmethod
    def _begin(self, requests: Sequence[Tokens]) -> None:
        """Gets ready for these tokens; raises ``CacheError`` where a request has no memory for them."""

    @abstractmethod
    def _end(self, requests: Sequence[Tokens]) -> None:
        """Gives memory back that these tokens need no longer, after all layers have had them."""

    @contextmanager
    def step(self, requests: Sequence[Tokens]) -> Iterator[None]:
        """A context for one call of the model with these tokens. After it later requests may begin with them,
        where they have a text, and what is needed no longer is free.

        Raises:
            CacheError: a request has no memory for its tokens; or a layer was left out, whose tokens would be
                missing later.
        """
        self._begin(requests)
        self._length, self._done = sum(one.count for one in requests), set()
        try:
            yield
            if len(self._done) != len(self.layers):
                missed = sorted(set(range(len(self.layers))) - self._done)
                raise CacheError(
                    f"the model left out the attention layers {missed} of {len(self.layers)}, and a paged cache keeps "
                    "them all"
                )
        finally:
            self._length = None
        self._end(requests)

    def _check(self, layer: int, found: PagedLayerShape, shape: Sequence[int]) -> None:
        """Raises ``CacheError`` unless a layer may be given its tokens, of which q has this shape, now."""
        if self._length is None:
            raise CacheError(
                "a paged cache must be told which requests the tokens are of: call the model within step()"
            )
        if layer in self._done or not 0 <= layer < len(self.layers):
            raise CacheError(f"attention layer {layer} was called twice, or is not one of {len(self.layers)}")
        if found != self.layers[layer]:
            raise CacheError(f"attention layer {layer} keeps {found}, and this cache was made for {self.layers[layer]}")
        if (shape[0], shape[2]) != (1, self._length):
            raise CacheError(f"the step has {self._length} tokens in one row, and the model {tuple(shape)}")
        self._done.add(layer)


class _Heads:
    """The key heads of a layer that have one layout: what is kept of them, and where."""

    def __init__(self, shape: HeadsShape, parts: Iterator[LevelPages], dtype: torch.dtype) -> None:
        self.shape = shape
        self.levels = paged_levels([level for _, level in shape.levels()], parts, dtype)
        self.storage = shape.storage if any(isinstance(level, QuantizedLevel) for level in self.levels) else None
        self._native = PagedStep(shape, self.levels)
        self._factors: dict[tuple[object, ...], Tensor] = {}

    def attend(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms) -> Tensor:
        """Keeps the new tokens and returns the attention of their queries: see ``PackedCache.attend``."""
        shape = self.shape
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        if (wholes := batch.wholes) is not None:
            own_q, own_k, own_v = (x[:, :, wholes.tokens] for x in (q, k, v))
            offsets = wholes.cu_seqlens
            out[:, :, wholes.tokens] = over_dense(
                own_q, own_k, own_v, options, layout=shape.layout, window=shape.window, cu_seqlens=offsets
            )
        for chunk in batch.chunks:  # before anything is written: its block may end within the chunk
            out[:, :, chunk.tokens] = self._over_past(chunk, q, k, v, options)
        for level, numbers in zip(self.levels, self._per_level(k[0], v[0]), strict=True):
            level.put(numbers, batch)
        if batch.singles is not None:
            out[:, :, batch.singles.tokens] = self._decoded(batch.singles, q, options)
        return out

    def _per_level(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """What belongs to each of the levels: dimensions (the last axis) of keys and values, all of them for
        sink tokens.
        """
        of_levels = [
            part
            for x, levels in ((k, self.shape.key_levels), (v, self.shape.value_levels))
            for part in x.split([level.rank for level in levels], dim=-1)
        ]
        return of_levels + [x for x, _ in zip((k, v), self.shape.sink_levels, strict=False)]

    def _over_past(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms) -> Tensor:
        """Attention of several tokens that follow others, over dense keys and values: zero where nothing is
        kept.
        """
        shape = self.shape
        q, k, v = (x[:, :, chunk.tokens] for x in (q, k, v))
        k, v = (torch.cat([x.new_zeros((*x.shape[:2], chunk.past, x.shape[3])), x], dim=2) for x in (k, v))
        dense = self._per_level(k, v)  # views
        for level, numbers in zip(self.levels, dense, strict=True):
            level.fill(numbers[0], chunk)
        if self.storage is None:
            return over_dense(q, k, v, options, layout=shape.layout, window=shape.window)
        done = [self.storage.first_exact(chunk.past - 1) // self.storage.group_size] * len(dense)

        def quantize(position: int) -> None:
            for number, (level, numbers) in enumerate(zip(self.levels, dense, strict=True)):
                done[number] = level.quantize(numbers, chunk, done[number], position)

        return over_quantized(
            q, k, v, options, quantize, storage=self.storage, layout=shape.layout, window=shape.window
        )

    def _decoded(self, singles: Singles, q: Tensor, options: ScoreTerms) -> Tensor:
        """Attention of one token of each of several requests, whose keys and values are in the pages."""
        query = q[0][:, singles.tokens].transpose(0, 1)[:, :, None]
        if self._native.can_attend(query, singles, options):
            return self._native.attend(query, singles, options.scale)[:, :, 0].transpose(0, 1)[None]
        shape = self.shape
        stores = [level.decoded(singles) for level in self.levels]
        count, end = len(shape.key_levels), len(shape.key_levels) + len(shape.value_levels)
        kept = KeyValueView(
            softmaxes=shape.softmaxes,
            keys=stores[:count],
            values=list(zip(stores[count:end], shape.value_levels, strict=True)),
            sink_keys=stores[end : end + 1],
            sink_values=stores[end + 1 :],
            latent=None,
            positions=[(0, at) for at in singles.positions],
            factors_by_scale=self._factors,
            columns=singles.columns,
        )
        return decode.attention(query, kept, options)[:, :, 0].transpose(0, 1)[None]


class PagedCache(SteppedCache):
    """A ``SteppedCache`` in pages.

    The pool gives pages (``pages.reserve``). As in ``LevelCache``, a level keeps the block that a request
    is in. With a ``storage`` of the layers, far tokens are kept in fewer bits, the same ones as in a
    ``LevelCache``, and a query reads the same numbers.

    Args:
        layers: what each layer keeps.
        pages: a pool for the same layers.

    Cost: a decoding step reads what is kept of each request once, in the pages, by the C++ code. Without it,
        or with terms of the scores besides a scale, it copies all of it together first, by level (one
        gather); of quantized tokens the copy has the numbers of the model.

    Source: pages and tables as in vLLM (Kwon et al. 2023, PagedAttention); a lifetime for each level is ours.
    """

    def __init__(self, layers: Sequence[PagedLayerShape], pages: PagePool) -> None:
        super().__init__(layers)
        self.pages = pages
        self._parts = [self._heads(index) for index in range(len(self.layers))]
        self._batch: Batch | None = None

    def _heads(self, index: int) -> list[_Heads]:
        """The heads of each layout of a layer, with their parts of its pages."""
        parts = iter(self.pages.levels(index))
        return [_Heads(shape, parts, self.pages.memory.dtype) for shape in self.layers[index].by_heads]

    def _begin(self, requests: Sequence[Tokens]) -> None:
        for one in requests:
            if one.text is not None:
                self.pages.extend(one.request, one.past, one.count)
        self._batch = Batch(self.pages, requests)

    def _end(self, requests: Sequence[Tokens]) -> None:
        self._batch = None
        for one in requests:
            if one.text is not None:
                self.pages.note(one.request, one.text)
            self.pages.trim(one.request, one.past + one.count)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: ScoreTerms,
        *,
        layout: AnyLayout | None,
        window: int | None,
    ) -> Tensor:
        """See ``PackedCache``.

        Raises:
            CacheError: there is no ``step``, the layer has had its tokens, or it is not of the layers that
                this cache was made for.
            ConfigError: a gradient is asked for, and far tokens are quantized.
        """
        found = shape_of_call(layout, window, k, v)
        self._check(layer, found, q.shape)
        if any(part.storage is not None for part in self._parts[layer]):
            check_no_gradient(q, k, v, options)
        shape, parts, batch = self.layers[layer], self._parts[layer], self._batch
        assert batch is not None
        if len(parts) == 1:
            return parts[0].attend(batch, q, k, v, options)
        outs, per_key_head = [], q.shape[1] // shape.keys[0]
        for (_, heads), part in zip(shape.groups, parts, strict=True):
            queries = query_heads(heads, per_key_head)
            of_heads = select_heads(q, queries), select_heads(k, heads), select_heads(v, heads)
            outs.append(part.attend(batch, *of_heads, terms_of(options, queries)))
        return joined(outs, shape, per_key_head)


def shape_of_call(layout: AnyLayout | None, window: int | None, k: Tensor, v: Tensor) -> PagedLayerShape:
    """That of a layer with these keys and values."""
    return PagedLayerShape(layout, window, (k.shape[1], k.shape[3]), (v.shape[1], v.shape[3]))
