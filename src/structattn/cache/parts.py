"""The saved state of contents that consist of several: of groups of heads, or of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from structattn.errors import CheckpointError

_NUMBERED = "group "  # begins the names of tensors with quantized numbers


class PartOfContents(Protocol):
    """Contents, as far as their state needs them."""

    def stores(self) -> Iterator[object]:
        """All stores with their levels."""

    @property
    def groups(self) -> Iterator[object]:
        """The stores of quantized tokens."""

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``restore`` makes equal contents."""

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned."""


def state_of_parts(parts: Iterable[PartOfContents]) -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    """The entries ``oldest`` and ``quantized`` of the states of parts, and their tensors, one part after the
    other.
    """
    plain: dict[str, list[Any]] = {"oldest": [], "quantized": []}
    tensors: dict[str, Tensor] = {}
    for part in parts:
        of_part, of_stores = part.state()
        tensors |= _renamed(of_stores, len(plain["oldest"]), len(plain["quantized"]))
        for name, entries in plain.items():
            entries += of_part[name]
    return plain, tensors


def restore_parts(
    parts: Sequence[PartOfContents], plain: dict[str, Any], tensors: dict[str, Tensor], lengths: Sequence[int]
) -> None:
    """Takes over what ``state_of_parts`` returned.

    Args:
        plain: with the other entries that each part needs.
        lengths: the tokens of each part.

    Raises:
        CheckpointError: it is not that.
    """
    counts = [(len(list(part.stores())), len(list(part.groups))) for part in parts]
    for name, count in (
        ("oldest", sum(stores for stores, _ in counts)),
        ("quantized", sum(groups for _, groups in counts)),
    ):
        if len(plain[name]) != count:
            raise CheckpointError(f"{name} needs {count} entries for all heads, got {len(plain[name])}")
    first_store = first_group = 0
    left = set(tensors)
    for part, length, (stores, groups) in zip(parts, lengths, counts, strict=True):
        own = {name: _name_within(name, first_store, stores, first_group, groups) for name in tensors}
        of_part = {renamed: tensors[name] for name, renamed in own.items() if renamed is not None}
        left -= {name for name, renamed in own.items() if renamed is not None}
        plain_of_part = plain | {
            "length": length,
            "oldest": plain["oldest"][first_store : first_store + stores],
            "quantized": plain["quantized"][first_group : first_group + groups],
        }
        part.restore(plain_of_part, of_part)
        first_store, first_group = first_store + stores, first_group + groups
    if left:
        raise CheckpointError(f"expected no tensor {sorted(left)[0]!r}")


def _renamed(tensors: dict[str, Tensor], first_store: int, first_group: int) -> dict[str, Tensor]:
    """The tensors of a part under the numbers that they have among those of all parts."""
    renamed = {}
    for name, x in tensors.items():
        if name.startswith(_NUMBERED):
            _, number, what = name.split(" ", 2)
            renamed[f"{_NUMBERED}{first_group + int(number)} {what}"] = x
        else:
            renamed[str(first_store + int(name))] = x
    return renamed


def _name_within(name: str, first_store: int, stores: int, first_group: int, groups: int) -> str | None:
    """The name that a tensor has in its part; ``None`` where it is of another one."""
    words = name.split(" ", 2) if name.startswith(_NUMBERED) else [name]
    number = words[1] if len(words) == 3 else words[0]
    if not number.isdecimal():
        return None
    first, count = (first_group, groups) if len(words) == 3 else (first_store, stores)
    if not first <= int(number) < first + count:
        return None
    return f"{_NUMBERED}{int(number) - first} {words[2]}" if len(words) == 3 else str(int(number) - first)
