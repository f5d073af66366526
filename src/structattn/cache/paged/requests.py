"""``RequestCaches``: attention of the new tokens of many requests, each of which has contents of its own. For
models with key heads that keep only some of the far tokens, which lie in no pages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from structattn.cache.contents import Contents, TokenShape
from structattn.cache.head_contents import HeadContents, contents_of
from structattn.cache.paged.batch import Tokens
from structattn.cache.paged.cache import SteppedCache, shape_of_call
from structattn.cache.paged.geometry import PagedLayerShape
from structattn.cache.tokens import check_options
from structattn.checks import check_size
from structattn.errors import CacheError, ConfigError
from structattn.layout.heads import AnyLayout
from structattn.ops.terms import ScoreTerms

# Bytes are counted for lengths that are multiples of this.
_STEP = 16

_LayerContents = list[Contents | HeadContents]


class RequestPool:
    """A number of bytes for the caches of many requests, which are allocated as requests need them, and freed
    when they end. It counts in pages, and has the methods of a ``PagePool`` that a scheduler calls.

    What a request may allocate for a length follows from the layers: ``reserve`` counts that. So all caches
    together never take more than the pool.

    Nothing is shared. A beginning that two requests have in common is computed twice, since the tokens of it
    that stay are chosen at the end of a prompt.

    Args:
        layers: what each layer keeps.
        nbytes: of the pool; what is left of the last page is not used.
        dtype, device: of keys and values.
        page_size: tokens for which a level takes memory at a time; key heads that choose tokens take it for
            whole blocks.

    Attributes:
        page_nbytes: what a token takes whose numbers are all kept as the model makes them.
        num_pages: of the pool.
        tables: the contents of each layer, for each request.
        prompts: how many of the first tokens of each request are its prompt.

    Raises:
        ConfigError: the pool has no room for one token, or a storage does not fit its layer.
    """

    def __init__(
        self,
        layers: Sequence[PagedLayerShape],
        *,
        nbytes: int,
        dtype: torch.dtype,
        device: torch.device,
        page_size: int,
    ) -> None:
        check_size("page_size", page_size)
        self._layers, self._page_size = tuple(layers), page_size
        self._dtype, self._device = dtype, device
        for layer in layers:
            check_options(layer.layout, None, layer.storage, window=layer.window)
        self._empty = self._new_contents()
        self._sizes: dict[int, int] = {}
        self.page_nbytes = dtype.itemsize * sum(
            heads * dim for layer in layers for heads, dim in (layer.keys, layer.values)
        )
        self.num_pages = nbytes // self.page_nbytes
        self.tables: dict[str, _LayerContents] = {}
        self.prompts: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._used = 0
        if self.num_pages < self.needed(1):
            raise ConfigError(
                f"a pool of {nbytes:,} bytes has {self.num_pages} pages of {self.page_nbytes:,}, and a request needs "
                f"{self.needed(1)} at least: give it more memory"
            )

    def _new_contents(self) -> _LayerContents:
        """Empty contents of each layer."""
        made: _LayerContents = []
        for layer in self._layers:
            options: dict[str, Any] = {"window": layer.window, "page_size": self._page_size}
            options |= {"chunk_size": None, "max_length": None, "padding": None, "latent": None}
            shape = TokenShape(1, layer.keys, layer.values, self._dtype, self._device)
            made.append(contents_of(shape, layout=layer.layout, storage=layer.storage, **options))
        return made

    def _pages(self, length: int) -> int:
        """Pages that hold what a request allocates at most while it grows to ``length`` tokens, with its
        prompt in one call.
        """
        length = -(-length // _STEP) * _STEP
        if length not in self._sizes:
            self._sizes[length] = sum(contents.most_nbytes(length) for contents in self._empty)
        return -(-self._sizes[length] // self.page_nbytes)

    def _pages_of_prompt(self, length: int, prompt: int) -> int:
        """As ``_pages``, while the first ``length`` tokens of a prompt come in several calls."""
        nbytes = 0
        for contents in self._empty:
            if isinstance(contents, HeadContents):
                nbytes += contents.most_nbytes(length, prompt=prompt)
            else:
                nbytes += contents.most_nbytes(length)
        return max(self._pages(length), -(-nbytes // self.page_nbytes))

    def _wanted(self, request: str, past: int, count: int) -> int:
        """Pages that a request has while ``count`` tokens follow ``past`` others."""
        prompt = self.prompts.get(request, 0)
        if past >= prompt or (past == 0 and count >= prompt):  # it is over, or comes in one call
            return self._pages(past + count)
        return max(self._pages(past + count), self._pages_of_prompt(min(past + count, prompt), prompt))

    @property
    def num_used(self) -> int:
        """Pages that requests have."""
        return self._used

    @property
    def num_available(self) -> int:
        """Pages that a request can get."""
        return self.num_pages - self._used

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        every = [contents for layers in list(self.tables.values()) for contents in layers]
        return sum(contents.key_nbytes + contents.value_nbytes for contents in every)

    def held(self, request: str) -> int:
        """Pages that a request has."""
        return self._held.get(request, 0)

    def needed(self, length: int) -> int:
        """Pages that a request has after ``length`` tokens, and so at least while it is given the last of
        them.
        """
        return self._pages(length)

    def expect(self, request: str, count: int) -> None:
        """Says how many of the first tokens of a new request are its prompt, before its first ``reserve``:
        in whatever calls they come, they attend to each other as in one. Later ones attend one by one.
        Default: the tokens for which the first ``reserve`` is.
        """
        if request not in self.tables:
            self.prompts[request] = count

    def missing(self, request: str, past: int, count: int) -> int:
        """Pages that a request lacks for ``count`` tokens after ``past`` others."""
        return max(0, self._wanted(request, past, count) - self.held(request))

    def reserve(self, request: str, past: int, count: int) -> bool:
        """Gives a request the pages for ``count`` tokens after ``past`` others; false, and nothing is
        changed, where there are too few.
        """
        missing = self.missing(request, past, count)
        if missing > self.num_available:
            return False
        if request not in self.tables:
            prompt = self.prompts.setdefault(request, count)
            self.tables[request] = self._new_contents()
            for contents in self.tables[request]:
                if isinstance(contents, HeadContents):
                    contents.expect(prompt)
        self._hold(request, self.held(request) + missing)
        return True

    def _hold(self, request: str, count: int) -> None:
        """Makes ``count`` the pages of a request."""
        self._used += count - self._held.pop(request, 0)
        if count:
            self._held[request] = count

    def fork(self, source: str, request: str, length: int) -> bool:
        """Gives a new request a copy of what another one has after ``length`` tokens; false, and nothing is
        changed, where there are too few pages.
        """
        if (held := self.held(source)) > self.num_available:
            return False
        self.tables[request] = copy.deepcopy(self.tables[source])
        self.prompts[request] = self.prompts[source]
        self._hold(request, held)
        return True

    def trim(self, request: str, length: int) -> None:
        """Takes back the pages that a prompt has needed until its end, if its ``length`` tokens reach it."""
        if request in self._held and length >= self.prompts[request]:
            self._hold(request, min(self._held[request], self._pages(length)))

    def free(self, request: str) -> None:
        """Takes back all pages of a request, if it has any."""
        self._hold(request, 0)
        self.tables.pop(request, None)
        self.prompts.pop(request, None)

    def free_all(self) -> None:
        """Takes back all pages."""
        for request in list(self.prompts):
            self.free(request)

    def forget(self) -> None:
        """Nothing: no beginning is kept for other requests."""


class RequestCaches(SteppedCache):
    """A ``SteppedCache`` in which each request has contents of its own in each layer: those of a
    ``LevelCache``, with the same numbers.

    Args:
        layers: what each layer keeps.
        pages: a pool for the same layers.

    Cost: a call for each request, layer and group of key heads that are kept alike. A step reads what is kept
        of a request once. Tokens of one call that follow the prompt, of a request that is computed again, are
        computed one by one in each layer.
    """

    def __init__(self, layers: Sequence[PagedLayerShape], pages: RequestPool) -> None:
        super().__init__(layers)
        self.pages = pages
        self._requests: tuple[Tokens, ...] = ()
        self._scores: dict[int, Tensor] = {}

    def chooses_tokens(self, layer: int) -> bool:
        """See ``PackedCache``."""
        return 0 <= layer < len(self.layers) and self.layers[layer].chooses_tokens

    def set_scores(self, layer: int, scores: Tensor) -> None:
        """See ``PackedCache``."""
        self._scores[layer] = scores

    def share_scores(self, layer: int, source: int) -> None:
        """See ``PackedCache``."""
        self._scores[layer] = self._scores[source]

    def _begin(self, requests: Sequence[Tokens]) -> None:
        for one in requests:
            if one.request not in self.pages.tables or self.pages.missing(one.request, one.past, one.count):
                raise CacheError(
                    f"request {one.request!r} has no pages for {one.count} tokens after {one.past}: reserve them"
                )
        self._requests, self._scores = tuple(requests), {}

    def _end(self, requests: Sequence[Tokens]) -> None:
        self._scores = {}
        for one in requests:
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
            CacheError: there is no ``step``, the layer has had its tokens, it is not of the layers that this
                cache was made for, or an earlier call of the model broke off.
            ConfigError: a layer that chooses tokens was given no scores; or masks, biases of positions, or
                gradients, which its cache does not know.
        """
        self._check(layer, shape_of_call(layout, window, k, v), q.shape)
        scores, outs, first = self._scores.get(layer), [], 0
        for one in self._requests:
            contents, tokens = self.pages.tables[one.request][layer], slice(first, first + one.count)
            if contents.length != one.past:
                raise CacheError(
                    f"request {one.request!r} has {contents.length} tokens in attention layer {layer}, and the step "
                    f"says {one.past}: a call of the model broke off; free the request and compute it again"
                )
            for at in _calls(tokens, self.pages.prompts[one.request] - one.past):
                query, key, value = (x[:, :, at] for x in (q, k, v))
                outs.append(_attend(contents, query, key, value, options, None if scores is None else scores[:, :, at]))
            first += one.count
        return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]


def _calls(tokens: slice, rest: int) -> Iterator[slice]:
    """The tokens of a request that attend at once: of the ``rest`` of its prompt all, then one by one."""
    end = min(tokens.stop, tokens.start + max(0, rest))
    if end > tokens.start:
        yield slice(tokens.start, end)
    for at in range(end, tokens.stop):
        yield slice(at, at + 1)


def _attend(
    contents: Contents | HeadContents, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, scores: Tensor | None
) -> Tensor:
    """Appends new tokens to contents and returns the attention of their queries, as ``LevelCache.attend``."""
    is_step = q.shape[2] == 1 and options.has_scale_only
    if not isinstance(contents, HeadContents):
        out = contents.try_step(q, k, v, options.scale, None) if is_step else None
        return contents.attend(q, k, v, options, "auto") if out is None else out
    contents.decide()
    out = None
    if is_step:
        _give_scores(contents, scores)
        out = contents.try_step(q, k, v, options.scale, None)
    if out is None:
        _give_scores(contents, scores)  # once more: heads that took the token have used them up
        out = contents.attend(q, k, v, options, "auto")
    return out


def _give_scores(contents: HeadContents, scores: Tensor | None) -> None:
    if scores is not None:
        contents.set_scores(scores)
