"""The caches that ``structattn compare caches`` measures. Another one is another line of ``cache_rows``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from structattn import Storage
from structattn.errors import ConfigError
from structattn_lab.compare.measured_cache import MeasuredCache, Prepared, UnavailableError
from structattn_lab.compare.press_rows import press_rows

DEFAULT = "DynamicCache"
_QUESTION = 64  # tokens of the longest question with its answer
_SINKS = 4  # tokens at the beginning that a window keeps


def cache_rows(context_length: int, num_steps: int, head_dim: int) -> Iterator[MeasuredCache]:
    """All of them, the model as it is first.

    Args:
        context_length: of the windows, from which windows and blocks follow.
        num_steps: tokens that follow. Our caches are allocated for so many tokens, or for a question.
        head_dim: D.
    """
    longest = longest_of(context_length, num_steps)
    yield default_row()
    for backend, bits, axis in (("quanto", 4, 0), ("quanto", 2, 0), ("hqq", 8, 1), ("hqq", 4, 1)):
        yield MeasuredCache(
            name=f"{backend}, {bits} bits",
            about=f"QuantizedCache of transformers with {backend}, {bits} bits, axis {axis}, its default groups and "
            "residual",
            prepare=_quantized(backend, bits, axis),
        )
    for bits in (8, 4):
        yield bits_row(bits, context_length, num_steps)
    for share in (2, 4):
        yield window_row(context_length / share, context_length, num_steps)
    for spec in _levels(head_dim):
        yield MeasuredCache(
            name=f"levels {spec.partition(',')[0].partition(':')[2]}",
            about=f"{spec} in every layer, without a calibration",
            prepare=_structured(spec, None, context_length, longest),
        )
    yield from press_rows()


def longest_of(context_length: int, num_steps: int) -> int:
    """The tokens for which our caches are allocated: a context and its steps, or a question."""
    return context_length + max(num_steps, _QUESTION)


def default_row() -> MeasuredCache:
    """The model as it is."""
    return MeasuredCache(name=DEFAULT, about="the model as it is", prepare=_plain)


def bits_row(bits: int, context_length: int, num_steps: int) -> MeasuredCache:
    """All far keys and values in 8 or 4 bits."""
    return MeasuredCache(
        name=f"{bits} bits",
        about=f"structurize with Storage({bits}, {bits}): recent and sink tokens exact",
        prepare=_structured("standard", Storage(bits, bits), context_length, longest_of(context_length, num_steps)),
    )


def window_row(tokens: float, context_length: int, num_steps: int) -> MeasuredCache:
    """A window that holds so many tokens, the first ones included."""
    window = max(1, int(tokens) - _SINKS)
    return MeasuredCache(
        name=f"window of {window}",
        about=f"the last {window} and the first {_SINKS} tokens",
        prepare=_structured(
            f"window:{window},sink_tokens={_SINKS}", None, context_length, longest_of(context_length, num_steps)
        ),
    )


def chosen_rows(calibration: str, context_length: int, num_steps: int) -> Iterator[MeasuredCache]:
    """What ``allocate`` chooses, at a quarter and an eighth of the bytes.

    Args:
        calibration: a file that ``Calibration.save`` wrote, of text that is not measured.
    """
    longest = longest_of(context_length, num_steps)
    for times in (4, 8):
        yield MeasuredCache(
            name=f"chosen, 1/{times}",
            about=f"allocate(calibration, compression={times}, context_length={context_length})",
            prepare=_chosen(calibration, times, context_length, longest),
        )


def _chosen(calibration: str, times: int, context_length: int, longest: int) -> Callable[[Any], Prepared]:
    def prepare(model: Any) -> Prepared:
        from structattn.integrations.transformers import Calibration, allocate, level_cache, structurize

        read = Calibration.load(calibration)
        try:
            structurize(model, allocate(read, compression=times, context_length=context_length))
        except ConfigError as error:
            raise UnavailableError(str(error)) from error
        return Prepared(model, lambda: level_cache(model, max_length=longest))

    return prepare


def _levels(head_dim: int) -> Iterator[str]:
    """Keys and values whose far tokens keep a half, and a quarter, of their dimensions."""
    half, quarter = head_dim // 4 * 2, head_dim // 8 * 2
    for ranks in ((half, head_dim - half), (quarter, quarter, head_dim - 2 * quarter)):
        if min(ranks) >= 2:
            text = "|".join(map(str, ranks))
            yield f"mlr:{text},values={text},scaling=standard"


def _plain(model: Any) -> Prepared:
    from transformers import DynamicCache

    return Prepared(model, lambda: DynamicCache(config=model.config))


def _quantized(backend: str, bits: int, axis: int) -> Callable[[Any], Prepared]:
    def prepare(model: Any) -> Prepared:
        from transformers import QuantizedCache

        def new_cache() -> Any:
            return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis, axis_value=axis)

        try:
            new_cache()
        except ImportError as error:
            package = {"quanto": "optimum-quanto"}.get(backend, backend)
            raise UnavailableError(f"it needs the package {package}, which is not installed") from error
        return Prepared(model, new_cache)

    return prepare


def _structured(spec: str, storage: Storage | None, context_length: int, longest: int) -> Callable[[Any], Prepared]:
    def prepare(model: Any) -> Prepared:
        from structattn.integrations.transformers import level_cache, structurize

        try:
            structurize(model, spec, storage=storage, context_length=context_length)
        except ConfigError as error:
            raise UnavailableError(str(error)) from error
        return Prepared(model, lambda: level_cache(model, max_length=longest))

    return prepare
