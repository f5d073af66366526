"""The text form of a structure without its size: ``btt:2``, ``monarch``, ``mlbtc:1x1x8|4x4x16s``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from structattn.checks import check_type, quoted
from structattn.errors import ConfigError
from structattn.matrices import FAMILIES, BlockTerm, Structure
from structattn.spec.grammar import Form, named, no_value, optional, positive, read_term, reading, several, word


def _blocks(text: str) -> tuple[int, ...]:
    counts = several(positive, "x")(text)
    if len(counts) != 2:
        raise ConfigError(f"expected two numbers of blocks, such as 16x16, got {quoted(text)}")
    return counts


def _term(text: str) -> BlockTerm:
    match = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)x([1-9][0-9]*)(s?)", text)
    if match is None:
        raise ConfigError(
            "expected terms BxCxF, and after them s for the stride permutation, such as 1x1x8|16x16x256s, got "
            f"{quoted(text)}"
        )
    kind = "stride" if match[4] else "identity"
    return BlockTerm(
        left_blocks=positive(match[1]),
        right_blocks=positive(match[2]),
        inner_dim=positive(match[3]),
        left_permutation=kind,  # type: ignore[arg-type]
        right_permutation=kind,  # type: ignore[arg-type]
    )


def _write_term(term: BlockTerm) -> str:
    kinds = {term.left_permutation, term.right_permutation}
    if kinds not in ({"identity"}, {"stride"}):
        raise ConfigError("MLBTC terms with mixed or free permutations have no text form: use the object itself")
    stride = "s" if kinds == {"stride"} else ""
    return f"{term.left_blocks}x{term.right_blocks}x{term.inner_dim}{stride}"


class _Value(NamedTuple):
    """The value of a form, which is one argument of the class."""

    argument: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = word
    is_optional: bool = False


# Of the families that have one.
_VALUES = {
    "lowrank": _Value("rank", positive),
    "mlr": _Value("ranks", several(positive)),
    "btt": _Value("rank", positive),
    "monarch": _Value("num_blocks", _blocks, write=lambda counts: "x".join(map(str, counts)), is_optional=True),
    "butterfly": _Value("rank", positive, is_optional=True),
    "kaleidoscope": _Value("width", positive, is_optional=True),
    "mlbtc": _Value("terms", several(_term), write=lambda terms: "|".join(map(_write_term, terms))),
}


def _reader(value: _Value | None) -> Callable[[str], dict[str, Any]]:
    if value is None:
        return no_value
    return (optional if value.is_optional else named)(value.argument, value.read)


FORMS: dict[str, Form] = {
    name: Form(family.syntax, family.example, family.meaning, value=_reader(_VALUES.get(name)))
    for name, family in FAMILIES.items()
}


def parse_structure(text: str) -> Structure:
    """See ``Structure.parse``."""
    check_type("a structure", text, str, "text such as 'btt:1'")
    form = FORMS.get(text.strip().partition(":")[0])
    with reading("structure", text, form.help if form else "A structure is a family and its numbers, such as btt:1"):
        name, arguments = read_term(text, FORMS)
        return Structure(name, tuple(arguments.items()))


def format_structure(structure: Structure) -> str:
    """The text form; raises ``ConfigError`` for options that it cannot say."""
    value, options = _VALUES.get(structure.family), dict(structure.options)
    text = structure.family
    if value is not None and value.argument in options:
        text += f":{value.write(options[value.argument])}"
    if parse_structure(text) != structure:
        raise ConfigError(f"{structure.family} with the options {options} has no text form: use the object itself")
    return text
