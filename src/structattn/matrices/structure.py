"""A structure without its size, as a value with a one-line text form: ``btt:2``, ``monarch``,
``mlbtc:1x1x8|4x4x16s``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from structattn import text_forms
from structattn.checks import check_bool, check_choice, check_sizes, describe, quoted
from structattn.errors import ConfigError, nearest_name
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.btt import BlockTensorTrain, Monarch
from structattn.matrices.butterfly import Butterfly
from structattn.matrices.elementary import Dense, Kronecker, LowRank
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.kaleidoscope import Kaleidoscope
from structattn.matrices.mlbtc import MLBTC
from structattn.matrices.mlr import MultiLevelLowRank


class Family(NamedTuple):
    """One family of structured matrices.

    Attributes:
        matrix: the class.
        syntax, example: of its text form (``structattn.spec.structure``), for help texts and error messages.
        meaning: in words.
    """

    matrix: type[StructuredMatrix]
    syntax: str
    example: str
    meaning: str


_MLR = "a multi-level low-rank matrix, one rank per level, 2^(l-1) blocks at level l"
_KRONECKER = "a Kronecker product of two matrices of about the root of the size"
_MONARCH = "a Monarch matrix with B left and C right blocks, about the root of the size by default"
_BUTTERFLY = "a butterfly matrix of rank S (1 by default), one stage per prime factor of the size"
_KALEIDOSCOPE = "a product of W pairs of a butterfly and a transposed butterfly (1 by default)"
_MLBTC = "a sum of block terms with B left and C right blocks and inner dimension F; s: stride permutation"
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "dense": Family(Dense, "dense", "dense", "a dense matrix"),
        "lowrank": Family(LowRank, "lowrank:R", "lowrank:64", "a low-rank matrix, R columns in each factor"),
        "mlr": Family(MultiLevelLowRank, "mlr:R|R|...", "mlr:16|8|4|4", _MLR),
        "btt": Family(BlockTensorTrain, "btt:S", "btt:1", "a block tensor train of rank S"),
        "kronecker": Family(Kronecker, "kronecker", "kronecker", _KRONECKER),
        "monarch": Family(Monarch, "monarch[:BxC]", "monarch", _MONARCH),
        "butterfly": Family(Butterfly, "butterfly[:S]", "butterfly", _BUTTERFLY),
        "kaleidoscope": Family(Kaleidoscope, "kaleidoscope[:W]", "kaleidoscope", _KALEIDOSCOPE),
        "mlbtc": Family(MLBTC, "mlbtc:BxCxF[s]|...", "mlbtc:1x1x16|16x16x256s", _MLBTC),
    }
)


_SHARED = {"num_rows", "num_cols", "batch_shape", "right_batch_shape", "rms_cap"}


@dataclass(frozen=True)
class Structure:
    """A family and its options, to be built at any size.

    Args:
        family: a name in ``FAMILIES``.
        options: arguments of its class besides the sizes, as pairs (hashable). Default: none.

    Raises:
        ConfigError: the family or an option is unknown, or one is missing; the known ones are listed.
    """

    family: str
    options: tuple[tuple[str, Any], ...] = ()

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(self, family: str, options: Sequence[tuple[str, Any]] = ()) -> None: ...

    def __post_init__(self) -> None:
        check_choice("structure", self.family, FAMILIES)
        pairs = self.options
        if not isinstance(pairs, tuple | list) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        ):
            raise ConfigError(f"the options of a Structure are pairs of a name and a value, got {describe(pairs)}")
        arguments = inspect.signature(FAMILIES[self.family].matrix).parameters
        valid_options = {name: p for name, p in arguments.items() if name not in _SHARED}
        for name, _ in pairs:
            if name not in valid_options:
                raise ConfigError(
                    f"{self.family} has no option {quoted(name)}: {nearest_name(str(name), valid_options)}"
                )
        names = [name for name, _ in pairs]
        missing = [name for name, p in valid_options.items() if p.default is p.empty and name not in names]
        if missing or len(set(names)) != len(names):
            raise ConfigError(
                f"{self.family} needs {', '.join(valid_options)} once each at most, got {', '.join(names) or 'nothing'}"
            )
        frozen = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in pairs)
        object.__setattr__(self, "options", frozen)

    @classmethod
    def parse(cls, text: str) -> Structure:
        """Reads the text form, ``family`` or ``family:numbers``; ``Structure.parse(str(s)) == s``.

        Raises:
            ConfigError: an unknown family or wrong numbers; the message shows the form.
        """
        return text_forms.read(cls, text)

    @classmethod
    def of(cls, value: Structure | str) -> Structure:
        """The value itself, or the text parsed."""
        if isinstance(value, Structure):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ConfigError(f"a structure is a Structure or a text such as 'btt:1', got {describe(value)}")

    def build(
        self,
        num_rows: int,
        num_cols: int,
        *,
        batch_shape: Sequence[int] = (),
        right_batch_shape: Sequence[int] | None = None,
        rms_cap: bool = False,
    ) -> StructuredMatrix:
        """A matrix of this structure with fresh parameters.

        Args:
            num_rows, num_cols, batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``. A dense
                matrix has no factors, so it has neither of the last two: nothing is shared or capped.

        Raises:
            ConfigError: the structure does not exist at this size.
        """
        check_bool("rms_cap", rms_cap)
        if right_batch_shape is not None:
            check_sizes("right_batch_shape", right_batch_shape)
        kind = FAMILIES[self.family].matrix
        shared: dict[str, Any] = {"batch_shape": batch_shape}
        if issubclass(kind, FactoredMatrix):
            shared |= {"right_batch_shape": right_batch_shape, "rms_cap": rms_cap}
        return kind(num_rows, num_cols, **dict(self.options), **shared)

    def __str__(self) -> str:
        """The text form; raises ``ConfigError`` for options that it cannot say."""
        return text_forms.write(self)
