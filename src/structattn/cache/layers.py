"""The caches of all layers of a model, as one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from structattn.cache import files
from structattn.cache.latent import Latent
from structattn.cache.level_cache import LevelCache
from structattn.errors import ConfigError
from structattn.text_layout import TextHistory


class LayerCaches(Sequence[LevelCache]):
    """A sequence of ``LevelCache``, one per layer, that are reset, cropped and reordered together.

    Args:
        layers: at least one; they stand at the same length.
        text: what is remembered of the text, where layouts depend on it. Default ``None``.

    Raises:
        ConfigError: there is none.
    """

    def __init__(self, layers: Iterable[LevelCache], text: TextHistory | None = None) -> None:
        self._layers = tuple(layers)
        self.text = text
        if not self._layers:
            raise ConfigError("LayerCaches needs the cache of at least one layer, got none")

    @overload
    def __getitem__(self, index: int) -> LevelCache: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LevelCache]: ...
    def __getitem__(self, index: int | slice) -> LevelCache | Sequence[LevelCache]:
        return self._layers[index]

    def __len__(self) -> int:
        return len(self._layers)

    def __iter__(self) -> Iterator[LevelCache]:
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

    def positions(self, count: int) -> Tensor:
        """See ``LevelCache.positions``."""
        return self._layers[0].positions(count)

    def reset(self) -> None:
        """Forgets all tokens; see ``LevelCache.reset``."""
        for layer in self._layers:
            layer.reset()
        if self.text is not None:
            self.text.reset()

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``, in all layers or (with an error) in none; see ``LevelCache.crop``."""
        for layer in self._layers:
            layer.check_crop(length)
        for layer in self._layers:
            layer.crop(length)
        if self.text is not None:
            self.text.crop(length)

    def reorder(self, indices: Tensor) -> None:
        """Row b becomes row ``indices[b]``; see ``LevelCache.reorder``."""
        for layer in self._layers:
            layer.reorder(indices)
        if self.text is not None:
            self.text.select(indices.tolist())

    def select(self, indices: Tensor) -> None:
        """Keeps rows; see ``LevelCache.select``."""
        for layer in self._layers:
            layer.select(indices)
        if self.text is not None:
            self.text.select(indices.tolist())

    def repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times; see ``LevelCache.repeat_interleave``."""
        if self.batch_size is not None:
            self.select(torch.arange(self.batch_size).repeat_interleave(repeats))

    def save(self, path: str | Path) -> None:
        """Writes all layers to one safetensors file; see ``LevelCache.save``."""
        files.save(path, [(layer.state(), layer.layout) for layer in self._layers], self.text)

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
        if len(latents) != len(layers):
            raise ConfigError(f"{path} holds {len(layers)} layers, but {len(latents)} latents were given")
        pairs = zip(layers, latents, strict=True)
        return cls((LevelCache.from_state(*state, layout, latent) for (state, layout), latent in pairs), text)
