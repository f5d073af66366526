"""How a cache stores numbers: in which bits, and which tokens stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from structattn.checks import MAX_LENGTH, check_int, check_size, check_type, describe, is_int
from structattn.errors import ConfigError

BITS = (16, 8, 4)
FIRST_TOKENS = 4  # which stay where far tokens are chosen: models attend to them from everywhere


@dataclass(frozen=True)
class Storage:
    """Keys and values of tokens that are far back in 8 or 4 bits; recent tokens and sink tokens as the model
    makes them.

    A number x is kept as a code c, a whole number from 0 to 2^bits - 1, and read as zero + scale c. Keys have
    scale and zero for each dimension and ``group_size`` consecutive tokens, values for each token and
    ``group_size`` dimensions. They have 16 bits each, or 64 where the model has float64. The error of a
    number is at most half a step, scale / 2. Sixteen bits end at 65,504: of groups that begin below -65,504,
    or that span more than 2^bits - 1 such steps, numbers beyond are read as the last one that codes reach.

    A query at position p reads the codes of the tokens before ``first_exact(p)``, whatever calls the tokens
    came in, so that one call, many, and decoding agree. A group is quantized once, when all of its tokens
    have left the residual.

    With ``keep``, only that many tokens of each block stay once it is no longer ``recent``, in each row and
    key head those with the highest ``token_scores``, the first 4 tokens of the sequence among them; the
    memory of the others is free. This is for plain attention. A call of up to ``group_size`` tokens is as
    many single ones. A call of more attends to all of its own tokens, and they are chosen at its end: what a
    prompt of two calls reads is not what one call reads. Codes of a block that decoding has filled are
    quantized once more when they are chosen.

    Args:
        key_bits, value_bits: 4, 8, or 16 for the numbers of the model. A tuple has one for each level, level
            1 first: ``(4, 8, 16)`` spends more on near tokens. Values without ``value_ranks`` have one level.
            Default 4.
        group_size: how many numbers share a scale; even. Block sizes of levels are multiples of it; levels
            with blocks of at most ``exact_slots`` positions stay exact, and may have any size. Default 64.
        residual: how many of the last tokens are exact, the token of the query included. Default 128.
        keep: how many tokens of a block stay: a multiple of ``group_size`` below ``block``. With 0, only the
            first group of the sequence does. Default ``None``: all.
        block: with ``keep``, the number of tokens of which ``keep`` are chosen at once, a multiple of
            ``group_size``. Default 512.
        recent: with ``keep``, how many of the last tokens always stay, at least ``residual`` +
            2 ``group_size``, which are exact. Default 256.

    Raises:
        ConfigError: an option is out of its range.

    Cost: bits per number, and two 16-bit numbers for each group; residual + 2 ``group_size`` tokens of each
        level are kept exact. With ``keep`` all of that for ``keep / block`` of the tokens and the last
        ``recent + block``, of which each has 4 bytes for its score.

    Source: KIVI (Liu et al. 2024, arXiv 2402.02750): keys per channel, values per token, a residual window.
        Tokens chosen for each head by a score: KVzip (2505.23416), KVzap (2601.07891).
    """

    key_bits: int | tuple[int, ...] = 4
    value_bits: int | tuple[int, ...] = 4
    group_size: int = 64
    residual: int = 128
    keep: int | None = None
    block: int = 512
    recent: int = 256

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            key_bits: int | Sequence[int] = 4,
            value_bits: int | Sequence[int] = 4,
            group_size: int = 64,
            residual: int = 128,
            keep: int | None = None,
            block: int = 512,
            recent: int = 256,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("key_bits", "value_bits"):
            bits = getattr(self, name)
            entries = bits if isinstance(bits, tuple | list) else (bits,)
            if not entries or not all(is_int(entry) and entry in BITS for entry in entries):
                raise ConfigError(
                    f"{name} must be 16, 8 or 4, or a tuple of them with one per level, got {describe(bits)}"
                )
            if isinstance(bits, list):
                object.__setattr__(self, name, tuple(bits))
        check_size("group_size", self.group_size, MAX_LENGTH)
        if self.group_size % 2:
            raise ConfigError(f"group_size must be even, since two codes of 4 bits share a byte, got {self.group_size}")
        check_int("residual", self.residual, minimum=0, maximum=MAX_LENGTH)
        check_size("block", self.block, MAX_LENGTH)
        check_size("recent", self.recent, MAX_LENGTH)
        if self.keep is not None:
            self._check_choice(self.keep)

    def _check_choice(self, keep: int) -> None:
        check_int("keep", keep, minimum=0, maximum=self.block - 1)
        for name, count in (("keep", keep), ("block", self.block)):
            if count % self.group_size:
                raise ConfigError(
                    f"tokens stay in whole groups: {name} must be a multiple of group_size, {self.group_size}, "
                    f"got {count}"
                )
        if self.recent < self.exact_slots:
            raise ConfigError(
                f"recent must be at least residual + 2 group_size, {self.exact_slots}, whose numbers are exact, got "
                f"{self.recent}"
            )

    @property
    def exact_slots(self) -> int:
        """Exact tokens that are kept: the residual, the group that is leaving it, and one more, so that
        tokens can be taken back.
        """
        return self.residual + 2 * self.group_size

    def stays_exact(self, longest: int | None) -> bool:
        """Whether a level that never keeps more than ``longest`` positions is not quantized."""
        return longest is not None and longest <= self.exact_slots

    def first_exact(self, position: int) -> int:
        """The first position whose numbers a query at ``position`` sees as the model made them."""
        return max(0, (position + 1 - self.residual) // self.group_size * self.group_size)

    def bits(self, name: str, count: int) -> tuple[int, ...]:
        """``key_bits`` or ``value_bits`` of each of ``count`` levels.

        Raises:
            ConfigError: they are those of another number of levels.
        """
        bits = getattr(self, name)
        if not isinstance(bits, tuple):
            return (bits,) * count
        if len(bits) != count:
            raise ConfigError(f"{name} needs one entry per level: expected {count}, got {len(bits)}, {bits}")
        return bits


# How a layer stores numbers: all of its key heads alike, or each in its way.
LayerStorage = Storage | tuple[Storage | None, ...] | None
# How each layer of a model stores numbers: all alike, or an entry for each.
ModelStorage = Storage | Sequence[Storage | Sequence[Storage | None] | None] | None


def checked_storage(storage: Any) -> LayerStorage:
    """How a layer stores numbers, a list as a tuple.

    Raises:
        ConfigError: it is neither a ``Storage``, nor ``None``, nor one of these for each key head.
    """
    if not isinstance(storage, tuple | list):
        kinds = "a Storage, such as sa.Storage(key_bits=4), None, or a list with one of these for each key head"
        check_type("storage", storage, Storage | None, kinds)
        return storage
    if not storage:
        raise ConfigError("storage needs an entry for each key head, got none")
    for head, each in enumerate(storage):
        check_type(f"the storage of key head {head}", each, Storage | None, "a Storage or None")
    return tuple(storage)


def chooses_tokens(storage: LayerStorage) -> bool:
    """Whether key heads of a layer keep only some of the far tokens."""
    each = storage if isinstance(storage, tuple) else (storage,)
    return any(of_head is not None and of_head.keep is not None for of_head in each)


def storage_of_heads(storage: LayerStorage, num_heads: int) -> tuple[Storage | None, ...]:
    """The storage of each of that many key heads.

    Raises:
        ConfigError: it is for another number of heads.
    """
    if not isinstance(storage, tuple):
        return (storage,) * num_heads
    if len(storage) != num_heads:
        raise ConfigError(
            f"there is a storage for each of {len(storage)} key heads, and the layer has {num_heads}: give one for each"
        )
    return storage


def storage_of_layers(storage: ModelStorage, num_layers: int) -> tuple[LayerStorage, ...]:
    """How each layer of a model stores numbers; a list has an entry for each layer, which may be a list with
    one for each key head.

    Raises:
        ConfigError: it is for another number of layers, or an entry is of another kind.
    """
    if not isinstance(storage, tuple | list):
        return (checked_storage(storage),) * num_layers
    if len(storage) != num_layers:
        raise ConfigError(
            f"a list as storage needs {num_layers} entries, one for each layer, got {len(storage)}: the entry of a "
            "layer may be a list with one for each key head; a Storage that is in no list is for all layers"
        )
    return tuple(checked_storage(each) for each in storage)


def storage_data(storage: ModelStorage) -> Any:
    """How a layer, or each layer of a model, stores numbers, as JSON has it."""
    if isinstance(storage, Sequence):
        return [storage_data(each) for each in storage]
    if storage is None:
        return None
    data = asdict(storage)
    if storage.keep is None:  # as files of before have it
        for name in ("keep", "block", "recent"):
            del data[name]
    return data


def storage_from(data: object) -> Any:
    """What ``storage_data`` wrote.

    Raises:
        ConfigError: it is written otherwise.
    """
    if data is None:
        return None
    if isinstance(data, list):
        return tuple(storage_from(each) for each in data)
    names = [field.name for field in fields(Storage)]
    if not isinstance(data, dict) or not set(data) <= set(names):
        raise ConfigError(f"a storage has the fields {', '.join(names)}, got {describe(data)}")
    return Storage(**data)
