"""What each key head may see and in how many bits, what it costs and what it loses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from structattn.cache.level_cache import LevelCache
from structattn.cache.storage import Storage
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.head_effects import SINK_TOKENS
from structattn.integrations.transformers.calibration.methods import Method
from structattn.integrations.transformers.calibration.prompts import COPIES
from structattn.integrations.transformers.calibration.record import Calibration, LayerCalibration
from structattn.integrations.transformers.calibration.token_losses import WAYS, TokenLosses
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import AttentionSpec, parse_spec

_ROUNDING = {16: 0.0, 8: (15 / 255) ** 2, 4: 1.0}  # what numbers lose, of 4 bits 1: it grows with the square of a step
_EXACT, _FEWEST = (16, 16), (4, 4)
_ALL_BITS = (_EXACT, (8, 8), (8, 4), _FEWEST)  # of keys and values: rounded keys lose more


@dataclass(frozen=True)
class HeadChoice:
    """One way for a key head.

    Attributes:
        window: recent tokens that it sees, besides the first; ``None``: all tokens.
        bits: of keys and of values that are far back.
        way: which of ``WAYS`` far tokens stay in; ``None``: all do.
        group_size: of tokens that are chosen together, and quantized.
        recent: tokens that always stay where far ones are chosen.
    """

    window: int | None
    bits: tuple[int, int]
    way: int | None = None
    group_size: int = 64
    recent: int = 256

    @property
    def spec(self) -> AttentionSpec:
        """What it sees."""
        return parse_spec("standard" if self.window is None else f"window:{self.window},sink_tokens={SINK_TOKENS}")

    @property
    def storage(self) -> Storage | None:
        """How its cache stores numbers."""
        if self.way is not None:
            keep, block = (groups * self.group_size for groups in WAYS[self.way])
            residual = min(64, 2 * self.group_size)
            return Storage(*self.bits, self.group_size, residual, keep, block, self.recent)
        return None if self.bits == _EXACT else Storage(*self.bits, self.group_size, 2 * self.group_size)


@dataclass(frozen=True)
class HeadChoices:
    """The choices of one key head.

    Attributes:
        choices: all of them.
        sizes: bytes of the cache, (choices,) float64.
        losses: expected change of the predictions in nats per token, (choices,) float64; copies of far text
            are a tenth of the tokens.
        of_text: likewise, of text without copies.
    """

    choices: tuple[HeadChoice, ...]
    sizes: Tensor
    losses: Tensor
    of_text: Tensor


def head_choices(
    calibration: Calibration,
    length: int,
    *,
    dtype: torch.dtype,
    methods: set[Method],
    group_size: int = 64,
) -> list[list[HeadChoices]]:
    """The choices of each key head of each layer that has keys of its own; of one whose window is the
    model's own, only bits.

    Args:
        calibration: has measured these methods.
        length: T, tokens in the cache.
        dtype: of exact numbers.
        methods: what is chosen; otherwise heads see all tokens, or have 16 bits.
        group_size: where far tokens are chosen; heads that keep all tokens have groups of this size or of 64.
    """
    first, found = 0, []
    of_tokens: dict[tuple[int, int], TokenLosses] = {}  # by the number of recent tokens, and of those that wait
    for layer in calibration.layers:
        if layer.shape.keys_of is not None:
            continue
        of_layer = []
        is_free = layer.shape.window is None and layer.chunk_size is None
        all_bits = _ALL_BITS if "bits" in methods and is_free else (_EXACT,)
        ways = [HeadChoice(None, _EXACT)]
        rounded = [some for some in all_bits if some != _EXACT]
        ways += [
            HeadChoice(None, some, group_size=size) for some in rounded for size in dict.fromkeys((64, group_size))
        ]
        if "heads" in methods and is_free:
            assert calibration.effects is not None
            narrow = [window for window in calibration.effects.windows if window + SINK_TOKENS < length]
            ways += [HeadChoice(window, some) for window in narrow for some in all_bits if some in (_EXACT, _FEWEST)]
        if "tokens" in methods and is_free:
            assert calibration.tokens is not None
            recents = [recent for recent in calibration.tokens.losses.recents if recent >= 4 * group_size]
            ways += [
                HeadChoice(None, some, way, group_size, recent)
                for way in range(len(WAYS))
                for recent in recents
                for some in all_bits
            ]
        with _one_thread():
            sizes = torch.tensor([_nbytes(way, layer, length, dtype) for way in ways], dtype=torch.float64)
        for head in range(first, first + layer.shape.num_kv_heads):
            losses, of_text = torch.stack([_losses(way, calibration, head, of_tokens) for way in ways], dim=1)
            of_layer.append(HeadChoices(choices=tuple(ways), sizes=sizes, losses=losses, of_text=of_text))
        first += layer.shape.num_kv_heads
        found.append(of_layer)
    return found


def _losses(
    way: HeadChoice, calibration: Calibration, head: int, of_tokens: dict[tuple[int, int], TokenLosses]
) -> Tensor:
    """Of text and copies, and of text alone, (2,) float64."""
    found = torch.zeros(2, dtype=torch.float64)
    if way.way is not None:
        assert calibration.tokens is not None
        key = way.recent, WAYS[way.way][1] * way.group_size
        if key not in of_tokens:
            of_tokens[key] = calibration.tokens.losses.with_recent(*key)
        found += torch.stack([x[head, way.way, 0] for x in (of_tokens[key].both, of_tokens[key].text)])
    effects = calibration.effects
    if way.window is not None:
        assert effects is not None
        row = effects.windows.index(way.window)
        text, copies = (x[row, head].clamp(min=0) for x in (effects.text, effects.retrieval))
        found += torch.stack([(1 - COPIES) * text + COPIES * copies, text])
    if way.bits != _EXACT:
        assert calibration.bits is not None
        shares = torch.tensor([_ROUNDING[bits] for bits in way.bits], dtype=torch.float64)
        text, copies = ((x[:, head] * shares).sum() for x in calibration.bits.of(way.group_size))
        found += torch.stack([(1 - COPIES) * text + COPIES * copies, text])
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """A context for many small operations: on a busy machine, each would wait for the slowest thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _nbytes(way: HeadChoice, layer: LayerCalibration, length: int, dtype: torch.dtype) -> int:
    """What the cache of a head allocates for T tokens."""
    shape = layer.shape
    return _allocated(way, shape.head_dim, shape.value_dim, shape.window, length, dtype)


@lru_cache(maxsize=1024)
def _allocated(
    way: HeadChoice, head_dim: int, value_dim: int, window: int | None, length: int, dtype: torch.dtype
) -> int:
    layout = None
    if way.window is not None:
        layout = LevelLayout.sliding((head_dim,), (way.window,), "standard", sink_tokens=SINK_TOKENS)
    storage = way.storage
    cache = LevelCache(layout, window=window, storage=storage, max_length=length)
    pieces = [length]
    if way.way is not None and isinstance(storage, Storage) and length >= storage.recent + storage.block:
        # The most tokens are there just before a block is decided on.
        rest = (length - storage.recent) % storage.block
        pieces = [length - rest - storage.block, storage.block, rest]
    try:
        for count in pieces:
            key, value = (torch.zeros(1, 1, count, dim, dtype=dtype) for dim in (head_dim, value_dim))
            cache.append(key, value, token_scores=None if way.way is None else torch.zeros(1, 1, count))
    except RuntimeError as error:  # the allocator's
        raise ConfigError(
            f"bytes are counted on the cache of one head, and that of {length:,} tokens does not fit into memory: give "
            "a smaller context_length"
        ) from error
    return cache.nbytes


def spec_of_heads(choices: Sequence[HeadChoice]) -> AttentionSpec:
    """The spec of a layer."""
    specs = tuple(choice.spec for choice in choices)
    return specs[0] if all(spec == specs[0] for spec in specs) else AttentionSpec(heads=specs)


def storage_of_choices(choices: Sequence[HeadChoice]) -> Storage | list[Storage | None] | None:
    """The storage of a layer."""
    storages = [choice.storage for choice in choices]
    return storages[0] if all(storage == storages[0] for storage in storages) else storages
