"""A structure without its size, as a value with a one-line text form: ``btt:2``, ``monarch``, ``mlbtc:1x1x8|4x4x16s``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from structattn.checks import check_bool, check_choice, check_sizes, check_type, describe, quoted
from structattn.errors import ConfigError, nearest_name
from structattn.matrices.base import StructuredMatrix
from structattn.matrices.btt import BlockTensorTrain, Monarch
from structattn.matrices.butterfly import Butterfly
from structattn.matrices.elementary import Dense, Kronecker, LowRank
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.kaleidoscope import Kaleidoscope
from structattn.matrices.mlbtc import MLBTC
from structattn.matrices.mlr import MultiLevelLowRank
from structattn.matrices.terms import BlockTerm


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of the text form.

    Attributes:
        matrix: the class.
        syntax, example, meaning: for help texts and error messages.
        read: the text behind the colon (empty if there is none) to the arguments of the class.
        write: the arguments to that text.
    """

    matrix: type[StructuredMatrix]
    syntax: str
    example: str
    meaning: str
    read: Callable[[str], dict[str, Any]]
    write: Callable[[Mapping[str, Any]], str]


def _number(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]*", text):
        raise ConfigError(f"expected a positive whole number, got {quoted(text)}")
    return int(text)


def _nothing(text: str) -> dict[str, Any]:
    if text:
        raise ConfigError(f"this structure has no number, got {quoted(text)}")
    return {}


def _rank(text: str) -> dict[str, Any]:
    return {"rank": _number(text)}


def _optional(name: str) -> Callable[[str], dict[str, Any]]:
    return lambda text: {name: _number(text)} if text else {}


def _ranks(text: str) -> dict[str, Any]:
    return {"ranks": tuple(_number(part) for part in text.split("|"))}


def _blocks(text: str) -> dict[str, Any]:
    if not text:
        return {}
    parts = text.split("x")
    if len(parts) != 2:
        raise ConfigError(f"expected two numbers of blocks, such as 16x16, got {quoted(text)}")
    return {"num_blocks": (_number(parts[0]), _number(parts[1]))}


def _terms(text: str) -> dict[str, Any]:
    terms = []
    for part in text.split("|"):
        found = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)(s?)", part)
        if found is None:
            raise ConfigError(
                f"expected terms BxCxF, with an s behind for the stride permutation, such as 1x1x8|16x16x256s, got {quoted(part)}"
            )
        kind = "stride" if found[4] else "identity"
        terms.append(
            BlockTerm(
                left_blocks=int(found[1]),
                right_blocks=int(found[2]),
                inner_dim=int(found[3]),
                left_permutation=kind,  # type: ignore[arg-type]
                right_permutation=kind,  # type: ignore[arg-type]
            )
        )
    return {"terms": tuple(terms)}


def _write_terms(options: Mapping[str, Any]) -> str:
    parts = []
    for term in options["terms"]:
        kinds = {term.left_permutation, term.right_permutation}
        if kinds not in ({"identity"}, {"stride"}):
            raise ConfigError("MLBTC terms with mixed or free permutations have no text form: use the object itself")
        stride = "s" if kinds == {"stride"} else ""
        parts.append(f"{term.left_blocks}x{term.right_blocks}x{term.inner_dim}{stride}")
    return "|".join(parts)


def _write(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda options: str(options[name]) if name in options else ""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "dense": Family(
            matrix=Dense,
            syntax="dense",
            example="dense",
            meaning="a dense matrix",
            read=_nothing,
            write=lambda options: "",
        ),
        "lowrank": Family(
            matrix=LowRank,
            syntax="lowrank:R",
            example="lowrank:64",
            meaning="low rank, R columns in each factor",
            read=_rank,
            write=_write("rank"),
        ),
        "mlr": Family(
            matrix=MultiLevelLowRank,
            syntax="mlr:R|R|...",
            example="mlr:16|8|4|4",
            meaning="multi-level low rank, one rank per level, 2^(l-1) blocks at level l",
            read=_ranks,
            write=lambda options: "|".join(map(str, options["ranks"])),
        ),
        "btt": Family(
            matrix=BlockTensorTrain,
            syntax="btt:S",
            example="btt:1",
            meaning="block tensor train of rank S",
            read=_rank,
            write=_write("rank"),
        ),
        "kronecker": Family(
            matrix=Kronecker,
            syntax="kronecker",
            example="kronecker",
            meaning="Kronecker product of two matrices of about the root of the size",
            read=_nothing,
            write=lambda options: "",
        ),
        "monarch": Family(
            matrix=Monarch,
            syntax="monarch[:BxC]",
            example="monarch",
            meaning="Monarch with B left and C right blocks, about the root of the size by default",
            read=_blocks,
            write=lambda options: "x".join(map(str, options.get("num_blocks", ()))),
        ),
        "butterfly": Family(
            matrix=Butterfly,
            syntax="butterfly[:S]",
            example="butterfly",
            meaning="butterfly of rank S (1 by default), one stage per prime factor of the size",
            read=_optional("rank"),
            write=_write("rank"),
        ),
        "kaleidoscope": Family(
            matrix=Kaleidoscope,
            syntax="kaleidoscope[:W]",
            example="kaleidoscope",
            meaning="W products of a butterfly and a transposed butterfly (1 by default)",
            read=_optional("width"),
            write=_write("width"),
        ),
        "mlbtc": Family(
            matrix=MLBTC,
            syntax="mlbtc:BxCxF[s]|...",
            example="mlbtc:1x1x16|16x16x256s",
            meaning="sum of block terms with B left and C right blocks and inner dimension F; s: stride permutation",
            read=_terms,
            write=_write_terms,
        ),
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
        ConfigError: the family or an option is unknown, or one is missing; those there are are listed.
    """

    family: str
    options: tuple[tuple[str, Any], ...] = ()

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            family: str,
            options: Sequence[tuple[str, Any]] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        check_choice("structure", self.family, FAMILIES)
        pairs = self.options
        if not isinstance(pairs, tuple | list) or not all(
            isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
        ):
            raise ConfigError(f"the options of a Structure are pairs of a name and a value, got {describe(pairs)}")
        arguments = inspect.signature(FAMILIES[self.family].matrix).parameters
        known = {name: p for name, p in arguments.items() if name not in _SHARED}
        for name, _ in pairs:
            if name not in known:
                raise ConfigError(f"{self.family} has no option {quoted(name)}: {nearest_name(str(name), known)}")
        given = [name for name, _ in pairs]
        missing = [name for name, p in known.items() if p.default is p.empty and name not in given]
        if missing or len(set(given)) != len(given):
            raise ConfigError(
                f"{self.family} needs {', '.join(known)} once each at most, got {', '.join(given) or 'nothing'}"
            )
        frozen = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in pairs)
        object.__setattr__(self, "options", frozen)

    @classmethod
    def parse(cls, text: str) -> Structure:
        """Reads the text form, ``family`` or ``family:numbers``; ``Structure.parse(str(s)) == s``.

        Raises:
            ConfigError: an unknown family or wrong numbers; the message names the form.
        """
        check_type("a structure", text, str, "text such as 'btt:1'")
        name, colon, rest = text.strip().partition(":")
        if name not in FAMILIES:
            raise ConfigError(
                f"structure {quoted(text)}: unknown family {quoted(name)}: {nearest_name(name, FAMILIES)}"
            )
        try:
            options = FAMILIES[name].read(rest)
            if colon and not rest:  # of a form whose value may be left out, with its colon
                raise ConfigError("expected a value after the colon, got nothing")
            return cls(name, tuple(options.items()))
        except ConfigError as error:
            raise ConfigError(f"structure {quoted(text)}: {error}. The form is {FAMILIES[name].syntax}") from None

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
            num_rows, num_cols, batch_shape, right_batch_shape, rms_cap: see ``FactoredMatrix``. A dense matrix has no factors,
                so it has neither of the last two: nothing is shared or capped.

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
        numbers = FAMILIES[self.family].write(dict(self.options))
        text = f"{self.family}:{numbers}" if numbers else self.family
        if Structure.parse(text) != self:
            raise ConfigError(
                f"{self.family} with the options {dict(self.options)} has no text form: use the object itself"
            )
        return text
