"""Tiles that a search on a GPU found to be the fastest: a JSON file for all GPUs, by their compute
capability.

``python -m benchmarks.gpu`` searches and writes such a file. The one of the package is ``tiles.json`` beside
this file.

    {"format_version": 1, "capabilities": {"9.0": [{"kernel": "forward", "itemsize": 2, "dim": 64,
        "levels": 8, "values": false, "own": 128, "walk": 64, "num_warps": 8, "num_stages": 3}, ...]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from structattn.errors import ConfigError
from structattn.ops.triton.plan import Tiles

KERNELS = ("forward", "grad_queries", "grad_keys", "decode", "cached")
PACKAGED = Path(__file__).with_name("tiles.json")
FORMAT_VERSION = 1

Capability = tuple[int, int]  # such as (9, 0)


@dataclass(frozen=True, kw_only=True)
class TileEntry:
    """The fastest tiles of one kernel for one shape, which also serve smaller shapes.

    Args:
        kernel: a name in ``KERNELS``.
        itemsize: bytes of a number, 2 or 4.
        dim: the larger of the head and the value dimension, up to which the entry holds.
        levels: number of levels up to which it holds.
        values: whether values have levels too.
        own, walk, num_warps, num_stages: see ``Tiles``. Of the cached kernel, ``own`` is the most rows of a
            tile.

    Raises:
        ConfigError: a number that no kernel can have.
    """

    kernel: str
    itemsize: int
    dim: int
    levels: int
    values: bool
    own: int
    walk: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = {"str": str, "int": int, "bool": bool}[str(field.type)]
            value = getattr(self, field.name)
            if type(value) is not kind:
                raise ConfigError(f"{field.name} must be of type {field.type}, got {value!r}")
        if self.kernel not in KERNELS:
            raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {self.kernel!r}")
        if self.itemsize not in (2, 4):
            raise ConfigError(f"itemsize must be 2 or 4, got {self.itemsize}")
        for name, least, is_power in (
            ("dim", 1, False),
            ("levels", 1, False),
            ("own", 16, True),
            ("walk", 16, True),
            ("num_warps", 1, True),
            ("num_stages", 1, False),
        ):
            value = getattr(self, name)
            if value < least or (is_power and value & (value - 1)):
                power = "a power of two of " if is_power else ""
                raise ConfigError(f"{name} must be {power}at least {least}, got {value}")

    @property
    def tiles(self) -> Tiles:
        """What a kernel is given."""
        return Tiles(own=self.own, walk=self.walk, num_warps=self.num_warps, num_stages=self.num_stages)


@dataclass(frozen=True, eq=False)
class TileTable:
    """Entries by compute capability; tables are compared by identity, so that what is looked up can be
    kept.
    """

    entries: Mapping[Capability, Sequence[TileEntry]]

    def find(
        self, kernel: str, capability: Capability | None, *, itemsize: int, dim: int, levels: int, values: bool
    ) -> Tiles | None:
        """The tiles of the smallest shape that has this one in it, or ``None``.

        Args:
            kernel: a name in ``KERNELS``.
            capability: of the GPU; ``None`` without one.
            itemsize, dim, levels, values: of the call, see ``TileEntry``.
        """
        fits = [
            entry
            for entry in (() if capability is None else self.entries.get(capability, ()))
            if (entry.kernel, entry.itemsize, entry.values) == (kernel, itemsize, values)
            and entry.dim >= dim
            and entry.levels >= levels
        ]
        return min(fits, key=lambda entry: (entry.dim, entry.levels)).tiles if fits else None

    def to_json(self) -> str:
        """The contents of a file that ``read_tiles`` reads."""
        capabilities = {
            ".".join(map(str, capability)): [asdict(entry) for entry in entries]
            for capability, entries in sorted(self.entries.items())
        }
        return json.dumps({"format_version": FORMAT_VERSION, "capabilities": capabilities}, indent=1) + "\n"


def read_tiles(path: Path) -> TileTable:
    """The table of a file.

    Raises:
        ConfigError: the file cannot be read, or holds something else; the message names the entry.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"the table of tiles {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or set(content) != {"format_version", "capabilities"}:
        raise ConfigError(f"{path} is no table of tiles: expected an object with format_version and capabilities")
    if content["format_version"] != FORMAT_VERSION:
        raise ConfigError(f"{path}: expected format version {FORMAT_VERSION}, got {content['format_version']!r}")
    if not isinstance(content["capabilities"], dict):
        raise ConfigError(f"{path}: capabilities must be an object, got {content['capabilities']!r}")
    return TileTable(dict(_entries_of(path, *item) for item in content["capabilities"].items()))


def _entries_of(path: Path, name: str, rows: Any) -> tuple[Capability, tuple[TileEntry, ...]]:
    major, _, minor = name.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise ConfigError(f"{path}: a compute capability is written as 9.0, got {name!r}")
    if not isinstance(rows, list):
        raise ConfigError(f"{path}, {name}: expected a list of entries, got {rows!r}")
    names = {field.name for field in fields(TileEntry)}
    entries = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != names:
            raise ConfigError(
                f"{path}, {name}, entry {number}: expected the fields {', '.join(sorted(names))}, got {row!r}"
            )
        try:
            entries.append(TileEntry(**row))
        except ConfigError as error:
            raise ConfigError(f"{path}, {name}, entry {number}: {error}") from error
    return (int(major), int(minor)), tuple(entries)
