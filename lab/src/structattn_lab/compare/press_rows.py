"""The presses of kvpress that ``structattn compare caches`` measures: the context is shortened once, before
what follows is known. Another one is another line of ``_DROPS``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from structattn_lab.compare.measured_cache import MeasuredCache, Prepared, UnavailableError

_KEPT = (0.5, 0.25)  # shares of the tokens of the context
_DROPS = ("KVzip", "ExpectedAttention", "SnapKV", "TOVA", "KeyDiff", "StreamingLLM")


def press_rows() -> Iterator[MeasuredCache]:
    """Presses that drop tokens, and ThinK, which drops dimensions of keys. They keep all tokens that follow.

    KVzip masks what it drops, and ThinK writes zeros: both leave all memory allocated.
    """
    for name in _DROPS:
        for share in _KEPT:
            yield MeasuredCache(
                name=f"{name}, {share:g}",
                about=f"{name}Press of kvpress: {share:g} of the context is kept",
                prepare=_pressed(name, compression_ratio=1 - share),
                kept=share,
            )
    for share in _KEPT:
        yield MeasuredCache(
            name=f"ThinK, {share:g} of keys",
            about=f"ThinKPress of kvpress: {share:g} of the dimensions of keys are kept, and all values",
            prepare=_pressed("ThinK", key_channel_compression_ratio=1 - share),
            kept=(1 + share) / 2,
        )


def _pressed(name: str, **options: float) -> Callable[[Any], Prepared]:
    def prepare(model: Any) -> Prepared:
        from transformers import DynamicCache

        try:
            kvpress = importlib.import_module("kvpress")
        except ImportError as error:
            missing = error.name == "kvpress"
            reason = "which is not installed" if missing else f"which cannot be imported here: {error}"
            raise UnavailableError(f"it needs the package kvpress, {reason}") from error
        from structattn.integrations.kvpress import hook_arguments

        press = _kvzip(kvpress)(**options) if name == "KVzip" else getattr(kvpress, f"{name}Press")(**options)
        hook = press.forward_hook
        press.forward_hook = lambda module, args, kwargs, output: hook(module, args, hook_arguments(kwargs), output)
        return Prepared(model, lambda: DynamicCache(config=model.config), press)

    return prepare


def _kvzip(kvpress: ModuleType) -> Any:
    """KVzip for a context that no chat template surrounds: it would take the first tokens for the template,
    and drop them.
    """
    from structattn.integrations.transformers.caches.model_cache import CACHE

    class PlainKVzip(kvpress.KVzipPress):  # type: ignore[misc, name-defined]
        @contextmanager
        def __call__(self, model: Any) -> Iterator[None]:
            with super().__call__(model):
                recording = model.model.forward

                def forward(*args: Any, **kwargs: Any) -> Any:
                    return recording(*args, past_key_values=kwargs.pop(CACHE), **kwargs)

                model.model.forward = forward  # until the end of this block
                yield

        def prepare(self, model: Any, tokenizer: Any, *args: Any, **options: Any) -> Any:
            self.prefix_length = 0
            self._suffix_ids = tokenizer.encode("\n", return_tensors="pt", add_special_tokens=False)
            return super().prepare(model, tokenizer, *args, **options)

    return PlainKVzip
