"""A structure without its size, as a value with a one-line text form: ``btt:2``, ``monarch``,
``mlbtc:1x1x8|4x4x16s``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from structattn import extensions
from structattn.checks import check_bool, check_choice, check_sizes, check_type, describe, quoted
from structattn.errors import ConfigError, nearest_name
from structattn.grammar import check_name, read_term, reading
from structattn.matrices import btt, butterfly, elementary, kaleidoscope, mlbtc, mlr
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.family import Family

_FAMILIES: dict[str, Family] = {
    "dense": elementary.DENSE,
    "lowrank": elementary.LOW_RANK,
    "mlr": mlr.FAMILY,
    "btt": btt.BTT,
    "kronecker": elementary.KRONECKER,
    "monarch": btt.MONARCH,
    "butterfly": butterfly.FAMILY,
    "kaleidoscope": kaleidoscope.FAMILY,
    "mlbtc": mlbtc.FAMILY,
}
FAMILIES: Mapping[str, Family] = MappingProxyType(_FAMILIES)


def register(name: str, family: Family) -> None:
    """Adds a family of another package, for every reader of structures and specs in this process.

    Other processes, such as those of ``compare --jobs``, do not see it: call this at the import of a module
    that ``STRUCTATTN_IMPORT`` names.

    Args:
        name: before the colon of its text form.
        family: with a class that ``structattn.testing.matrix_case.MatrixCase`` can test.

    Raises:
        ConfigError: the name cannot be part of a spec, or is that of another family; or the class is no
            ``StructuredMatrix``.

    Example:
        >>> register("diagonal", Family(Diagonal, "diagonal", "diagonal", "a diagonal matrix"))
    """
    check_type("a family", family, Family, "a structattn.matrices.Family")
    if not (isinstance(family.matrix, type) and issubclass(family.matrix, StructuredMatrix)):
        raise ConfigError(f"the class of a family extends StructuredMatrix, got {describe(family.matrix)}")
    check_name("a family", name)
    if _FAMILIES.setdefault(name, family) is not family:
        raise ConfigError(f"the family {name!r} is taken: choose another name")


def _families(name: object) -> Mapping[str, Family]:
    """All families; a name that is not known may be that of a module that the environment names."""
    if isinstance(name, str) and name not in FAMILIES:
        extensions.import_modules()
    return FAMILIES


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
        check_choice("structure", self.family, _families(self.family))
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
        check_type("a structure", text, str, "text such as 'btt:1'")
        name = text.strip().partition(":")[0]
        families = _families(name)
        if name in families:
            forms = {name: families[name].form}
            help_text = forms[name].help
        else:
            forms = {family: families[family].form for family in families}
            help_text = "A structure is a family and its numbers, such as btt:1"
        with reading("structure", text, help_text):
            family, arguments = read_term(text, forms)
            return cls(family, tuple(arguments.items()))

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
        value, options = FAMILIES[self.family].value, dict(self.options)
        text = self.family
        if value is not None and value.argument in options:
            text += f":{value.write(options[value.argument])}"
        if self.parse(text) != self:
            raise ConfigError(f"{self.family} with the options {options} has no text form: use the object itself")
        return text
