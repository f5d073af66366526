"""What each key head may see and in how many bits, what it costs and what it loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from structattn.cache.level_cache import LevelCache
from structattn.cache.storage import Storage
from structattn.integrations.transformers.calibration.head_effects import COPIES, SINK_TOKENS, HeadEffects
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import AttentionSpec, parse_spec

_STEPS = 2**4 - 1, 2**8 - 1  # of numbers of 4 and of 8 bits: the square of their ratio is that of what they lose


@dataclass(frozen=True)
class HeadChoice:
    """One way for a key head.

    Attributes:
        window: recent tokens that it sees, besides the first; ``None``: all tokens.
        bits: of numbers that are far back.
    """

    window: int | None
    bits: int

    @property
    def spec(self) -> AttentionSpec:
        """What it sees."""
        return parse_spec("standard" if self.window is None else f"window:{self.window},sink_tokens={SINK_TOKENS}")

    @property
    def storage(self) -> Storage | None:
        """How its cache stores numbers."""
        return None if self.bits == 16 else Storage(self.bits, self.bits)


@dataclass(frozen=True)
class HeadChoices:
    """The choices of one key head.

    Attributes:
        choices: all of them.
        sizes: bytes of the cache, (choices,) float64.
        losses: expected change of the predictions in nats per token, (choices,) float64.
    """

    choices: tuple[HeadChoice, ...]
    sizes: Tensor
    losses: Tensor


def head_choices(
    calibration: Calibration, effects: HeadEffects, length: int, *, dtype: torch.dtype, windows: bool, bits: bool
) -> list[list[HeadChoices]]:
    """The choices of each key head of each layer that has keys of its own; of one whose window is the
    model's own, only bits.

    Args:
        effects: of the calibration.
        length: T, tokens in the cache.
        dtype: of exact numbers.
        windows, bits: what is chosen; otherwise heads see all tokens, or have 16 bits.
    """
    first, found = 0, []
    for layer in calibration.layers:
        if layer.shape.keys_of is not None:
            continue
        of_layer = []
        is_free = layer.shape.window is None and layer.chunk_size is None
        for head in range(first, first + layer.shape.num_kv_heads):
            ways = [HeadChoice(None, some) for some in ((16, 8, 4) if bits and is_free else (16,))]
            if windows and is_free:
                narrow = [window for window in effects.windows if window + SINK_TOKENS < length]
                ways += [HeadChoice(window, some) for window in narrow for some in ((16, 4) if bits else (16,))]
            of_layer.append(
                HeadChoices(
                    choices=tuple(ways),
                    sizes=torch.tensor([_nbytes(way, layer, length, dtype) for way in ways], dtype=torch.float64),
                    losses=torch.stack([_loss(way, effects, head) for way in ways]),
                )
            )
        first += layer.shape.num_kv_heads
        found.append(of_layer)
    return found


def _loss(way: HeadChoice, effects: HeadEffects, head: int) -> Tensor:
    loss = torch.zeros((), dtype=torch.float64)
    if way.window is not None:
        row = effects.windows.index(way.window)
        loss = loss + (1 - COPIES) * effects.text[row, head].clamp(min=0)
        loss = loss + COPIES * effects.retrieval[row, head].clamp(min=0)
    if way.bits < 16:
        rounding = effects.bits[head].clamp(min=0)
        loss = loss + (rounding if way.bits == 4 else rounding * (_STEPS[0] / _STEPS[1]) ** 2)
    return loss


def _nbytes(way: HeadChoice, layer: LayerCalibration, length: int, dtype: torch.dtype) -> int:
    """What the cache of a head allocates for T tokens."""
    shape = layer.shape
    return _allocated(way, shape.head_dim, shape.value_dim, shape.window, length, dtype)


@lru_cache(maxsize=256)
def _allocated(
    way: HeadChoice, head_dim: int, value_dim: int, window: int | None, length: int, dtype: torch.dtype
) -> int:
    layout = None
    if way.window is not None:
        layout = LevelLayout.sliding((head_dim,), (way.window,), "standard", sink_tokens=SINK_TOKENS)
    cache = LevelCache(layout, window=window, storage=way.storage, max_length=length)
    key, value = (torch.zeros(1, 1, length, dim, dtype=dtype) for dim in (head_dim, value_dim))
    cache.append(key, value)
    return cache.nbytes


def spec_of_heads(choices: Sequence[HeadChoice]) -> AttentionSpec:
    """The spec of a layer."""
    specs = tuple(choice.spec for choice in choices)
    return specs[0] if all(spec == specs[0] for spec in specs) else AttentionSpec(heads=specs)


def storage_of_choices(choices: Sequence[HeadChoice]) -> Storage | list[Storage | None] | None:
    """The storage of a layer."""
    storages = [choice.storage for choice in choices]
    return storages[0] if all(storage == storages[0] for storage in storages) else storages
