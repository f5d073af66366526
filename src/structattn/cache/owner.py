"""Which layer a cache is for: the keys of one layer mean nothing to another."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from structattn.cache.latent import Latent, alike
from structattn.cache.numbers import new_number
from structattn.checks import check_type
from structattn.errors import ConfigError


class NumberedLayer(torch.nn.Module):
    """A layer that compiled programs give to the operators of its cache; a copy has another number.

    Attributes:
        number: see ``new_number``; it is no buffer and is not saved.
    """

    number: Tensor | None

    def set_number(self) -> None:
        """Gives the layer its number, once when it is made."""
        self.number = new_number(self)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.set_number()


class OfOneLayer:
    """What a cache knows of its layer; the layer is not kept alive."""

    latent: Latent | None
    _layer: weakref.ref[object] | None = None

    @abstractmethod
    def _set_latent(self, latent: Latent) -> None:
        """Makes keys by this from now on."""

    def bind(self, layer: object) -> None:
        """Makes this the cache of one layer, from its first use on; a copy, or a cache that was loaded, has no layer yet.

        The layer is not kept alive. Where the cache keeps hidden states, keys are made by its attribute ``latent``: a copy of the
        cache still uses the weights of the original.

        Raises:
            ConfigError: it is the cache of another layer.
        """
        check_type("layer", layer, torch.nn.Module, "the module that the cache is for")
        self.check_layer(layer)
        if self._layer is not None:
            return
        if self.latent is not None:
            self._set_latent(layer.latent)  # type: ignore[attr-defined]
        self._layer = weakref.ref(layer)

    def check_layer(self, layer: object) -> None:
        """Raises what ``bind`` would raise, and changes nothing."""
        if self._layer is not None:
            if self._layer() is not layer:
                raise ConfigError(
                    f"the cache is of another layer: it was made or filled by another {type(layer).__name__}, whose keys this one "
                    "cannot use; make one with new_cache(), and give each layer its own"
                )
        elif self.latent is not None and not alike(self.latent, getattr(layer, "latent", None)):
            raise ConfigError(
                "the cache is of another layer: it keeps hidden states, from which this one makes other keys; make it with new_cache()"
            )
