"""The caches of all layers of a model, as one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from structattn.cache import files
from structattn.cache.latent import Latent
from structattn.cache.level_cache import LevelCache
from structattn.cache.numbers import is_traced
from structattn.cache.rows import CacheRows, OneLayerCache, all_or_nothing
from structattn.checks import check_type, describe
from structattn.errors import CacheError, ConfigError
from structattn.layout.text import TextHistory


class LayerCaches(Sequence[OneLayerCache], CacheRows):
    """A sequence of caches, one per layer (a ``LevelCache`` for ``Attention``), that are reset, cropped and
    reordered together.

    Args:
        layers: at least one; they hold the same number of tokens.
        text: what is remembered of the text, where layouts depend on it. Default ``None``.

    Raises:
        ConfigError: there is none, or not the cache of a layer.
        CacheError: they hold different numbers of tokens.
    """

    def __init__(self, layers: Iterable[OneLayerCache], text: TextHistory | None = None) -> None:
        self._layers = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, Tensor) else ()
        self.text = text
        if not self._layers or not all(isinstance(layer, OneLayerCache) for layer in self._layers):
            raise ConfigError(f"LayerCaches needs the cache of at least one layer, got {describe(layers)}")
        check_type("text", text, (TextHistory, type(None)), "a TextHistory or None")
        self._torn = False  # some layers were changed, others not
        self.check()

    def __copy__(self) -> LayerCaches:
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raises ``CacheError`` unless all layers hold the same tokens of the same rows: a call that broke
        off may have left them different.
        """
        if self._torn:
            raise CacheError("a change of the layers broke off between two of them: reset() and start again")
        lengths = [layer.length for layer in self._layers]
        if any(length != lengths[0] for length in lengths):  # a set would compile each number anew, in PyTorch 2.11
            raise CacheError(
                f"the layers hold different numbers of tokens, {lengths}: a layer was used without the others, or a "
                f"call broke off; crop({min(lengths)}) "
                "takes them back to the shortest, or reset() and start again"
            )
        rows = [layer.batch_size for layer in self._layers]
        rows += [] if self.text is None else [self.text.num_rows]
        if len({count for count in rows if count is not None}) > 1:
            raise CacheError(
                f"the layers (and, last, the text) have different numbers of rows, {rows}: a layer was used without "
                "the others; reset() and start again"
            )

    @contextmanager
    def _torn_unless_done(self) -> Iterator[None]:
        """Within it all layers are changed; if anything fails, Ctrl-C included, they are not used again
        before ``reset``.
        """
        self._torn = True
        yield
        self._torn = False

    def all_or_nothing(self) -> AbstractContextManager[None]:
        """Within it all layers take the next tokens, or (with any error) none.

        Raises:
            CacheError: as ``check``.
        """
        self.check()
        return all_or_nothing(self._layers if self.text is None else (*self._layers, self.text))

    @overload
    def __getitem__(self, index: int) -> OneLayerCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[OneLayerCache]: ...
    def __getitem__(self, index: int | slice) -> OneLayerCache | Sequence[OneLayerCache]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[OneLayerCache]:
        return iter(self._layers)

    def __repr__(self) -> str:
        return f"LayerCaches({len(self)} layers, length={self.length}, nbytes={self.nbytes:,})"

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return self._layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated, all layers."""
        return sum(layer.nbytes for layer in self._layers)

    @property
    def batch_size(self) -> int | None:
        """See ``LevelCache``."""
        return self._layers[0].batch_size

    @property
    def left_padding(self) -> tuple[int, ...] | None:
        """See ``LevelCache``."""
        return self._layers[0].left_padding

    @property
    def padding_tensor(self) -> Tensor | None:
        """See ``LevelCache``."""
        return self._layers[0].padding_tensor

    def reset(self) -> None:
        """Forgets all tokens; see ``LevelCache.reset``."""
        with self._torn_unless_done():
            for layer in self._layers:
                layer.reset()
            if self.text is not None:
                self.text.reset()

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``, in all layers or (with an error) in none; see
        ``LevelCache.crop``.
        """
        if self._torn:
            self.check()
        for layer in self._layers:
            layer.check_crop(length)
        with self._torn_unless_done():
            for layer in self._layers:
                layer.crop(length)
            if self.text is not None:
                self.text.crop(length)

    def check_select(self, indices: Tensor) -> None:
        """Raises what ``select`` would raise, and changes nothing."""
        self.check()
        super().check_select(indices)

    def _take_rows(self, indices: Tensor) -> None:
        first, *others = self._layers
        first.select(indices)  # with an error it is as it was, and so are the others
        with self._torn_unless_done():
            for layer in others:
                layer.select(indices)
            if self.text is not None:
                self.text.select(indices.tolist())

    def save(self, path: str | Path) -> None:
        """Writes all layers to one safetensors file; see ``LevelCache.save``. Raises ``ConfigError`` for the
        cache of a custom layer.
        """
        self.check()
        saved = []
        for layer in self._layers:
            check_type("each cache that is saved", layer, LevelCache, "a LevelCache", "read the prompt again instead")
            assert isinstance(layer, LevelCache)
            saved.append((layer.state(), layer.layout))
        files.save(path, saved, self.text)

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: torch.device | str | None = None,
        latents: Sequence[Latent | None] | None = None,
    ) -> LayerCaches:
        """Reads what ``save`` wrote.

        Args:
            path, device: as ``LevelCache.load``.
            latents: of each layer, as ``LevelCache.load``.

        Raises:
            CheckpointError, ConfigError: as ``LevelCache.load``.
        """
        layers, text = files.load(path, device)
        latents = [None] * len(layers) if latents is None else latents
        check_type("latents", latents, Sequence, "a sequence with the latent of each layer")
        if len(latents) != len(layers):
            raise ConfigError(f"{path} holds {len(layers)} layers, but {len(latents)} latents were given")
        caches = []
        for number, ((state, layout), latent) in enumerate(zip(layers, latents, strict=True)):
            with files.damaged(path, f"layer {number}"):
                caches.append(LevelCache.from_state(*state, layout, latent))
        with files.damaged(path, "the layers"):
            if len({cache.left_padding for cache in caches}) > 1:
                raise CacheError(f"they have different padding, {[cache.left_padding for cache in caches]}")
            return cls(caches, text)


def guarded(caches: LayerCaches | None) -> AbstractContextManager[None]:
    """``caches.all_or_nothing()`` for the caches of a model's call; nothing without caches.

    Raises:
        ConfigError: they are something else.
        CacheError: see ``LayerCaches.check``.
    """
    if caches is None:
        return nullcontext()
    if is_traced():  # the operators of a compiled program count tokens at its end
        if new := [x for x in caches if isinstance(x, LevelCache) and x.number is None and x.length > 0]:
            from structattn.cache.late_numbers import give_numbers

            give_numbers(new)
        return nullcontext()
    check_type("caches", caches, LayerCaches, "LayerCaches, as new_cache() makes them, or None")
    return caches.all_or_nothing()
