"""The text form of rotary positions: ``low_far``, ``interleaved,base=500000,ntk=4``; and of their scaling:
``yarn=4@8192``.
"""

from __future__ import annotations

from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.grammar import assignment, number, one_of, read_options, reading, whole, word
from structattn.layers.rotary import ROPE_SCALINGS, Rotary, RotaryScaling

_FORM = "Written SPLIT[,base=B][,linear=S | ,ntk=S | ,yarn=S@LENGTH], such as low_far,base=500000,ntk=4"
_ROPE_SCALING_FORM = "Written linear=S, ntk=S or yarn=S@LENGTH, such as ntk=4"


def parse_rotary_scaling(text: str) -> RotaryScaling:
    """See ``RotaryScaling.parse``."""
    check_type("a rotary scaling", text, str, "text such as 'ntk=4'")
    with reading("rotary scaling", text, _ROPE_SCALING_FORM):
        return _rope_scaling(*assignment(text))


def _rope_scaling(kind: str, value: str) -> RotaryScaling:
    factor, at, length = value.partition("@")
    return RotaryScaling(
        kind=one_of("rotary scaling", ROPE_SCALINGS)(kind),
        factor=number(factor),
        original_length=whole(length) if at else None,
    )


def parse_rotary(text: str) -> Rotary:
    """See ``Rotary.parse``."""
    check_type("Rotary", text, str, "text such as 'low_far'")
    with reading("rotary", text, _FORM):
        split, *texts = (part.strip() for part in text.split(","))
        options = read_options(texts, {"base": number, **dict.fromkeys(ROPE_SCALINGS, str)})
        base = options.pop("base", Rotary.base)
        if len(options) > 1:
            raise ConfigError("the scaling is given twice")
        rope_scalings = [_rope_scaling(kind, value) for kind, value in options.items()]
        return Rotary(base=base, split=split, scaling=rope_scalings[0] if rope_scalings else None)  # type: ignore[arg-type]


def format_rotary_scaling(scaling: RotaryScaling) -> str:
    length = "" if scaling.original_length is None else f"@{scaling.original_length}"
    return f"{scaling.kind}={word(scaling.factor)}{length}"


def format_rotary(rotary: Rotary) -> str:
    base = "" if rotary.base == Rotary.base else f",base={word(rotary.base)}"
    return f"{rotary.split}{base}" + ("" if rotary.scaling is None else f",{rotary.scaling}")
