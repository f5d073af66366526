"""The grammar that all text forms share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structattn import grammar, text_forms
from structattn.errors import ConfigError
from structattn.grammar import Form
from structattn.layers.rotary import Rotary, RotaryScaling
from structattn.matrices import FAMILIES, Structure

FORMS = {
    "lr": Form(
        syntax="lr:N[,on=F]", example="lr:3", meaning="", value=grammar.named("n", grammar.positive),
        options={"on": grammar.flag, "by": grammar.several(grammar.number)},
    ),
    "off": Form(syntax="off", example="off", meaning=""),
}  # fmt: skip


def test_terms_are_read_and_written() -> None:
    assert grammar.read_term(" lr:12 , on=true,by=1.5|2 ", FORMS) == ("lr", {"n": 12, "on": True, "by": (1.5, 2.0)})
    assert grammar.write_term("lr", 12, on=True, by=(1.5, 2.0), other=None) == "lr:12,on=true,by=1.5|2"
    assert grammar.read_term("off", FORMS) == ("off", {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lrr:1", "unknown form 'lrr': did you mean 'lr'"),
        ("lr", "positive whole number, got ''"),
        ("lr:" + "9" * 5000, "positive whole number, got '9{20}'"),
        ("lr:٣", "positive whole number"),
        ("lr:1,onn=true", "unknown option 'onn': did you mean 'on'"),
        ("lr:1,on=true,on=true", "the on is given twice"),
        ("lr:1,on", "expected key=value, got 'on'"),
        ("lr:1,on=yes", "true or false, got 'yes'"),
        ("lr:1,by=nan", "a number, such as 4 or 1.5, got 'nan'"),
        ("off:1", "this form has no number"),
        ("off,on=true", "this form has no options"),
        ("off:", "a value after the colon"),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grammar.read_term(text, FORMS)


def test_an_error_shows_the_text_and_its_form() -> None:
    with pytest.raises(ConfigError) as caught, grammar.reading("rate", "lr:x", FORMS["lr"].help):
        grammar.read_term("lr:x", FORMS)
    assert str(caught.value) == (
        "rate 'lr:x': expected a positive whole number, got 'x'. Written lr:N[,on=F], such as lr:3"
    )


@given(st.one_of(st.integers(0, 10**18 - 1), st.booleans(), st.floats(0, 1e300)))
def test_words_round_trip(value: object) -> None:
    read = {int: grammar.whole, bool: grammar.flag, float: grammar.number}[type(value)]
    assert read(grammar.word(value)) == value


@pytest.mark.parametrize(
    "text",
    [*(family.example for family in FAMILIES.values()), "monarch:4x8", "butterfly:2", "kaleidoscope:3", "mlbtc:2x4x8"],
)
def test_structures_round_trip(text: str) -> None:
    assert str(Structure.parse(text)) == text


def test_values_of_lower_floors_find_their_form() -> None:
    value = Rotary(base=500.0, scaling=RotaryScaling(kind="yarn", factor=4, original_length=64))
    assert text_forms.read(Rotary, text_forms.write(value)) == value
    with pytest.raises(ConfigError, match="structure 'btt:x': .*Written btt:S, such as btt:1"):
        Structure.parse("btt:x")
    with pytest.raises(ConfigError, match="has no text form"):
        str(Structure("btt", (("rank", 2), ("row_dims", (4, 4)))))


def test_a_class_that_extends_another_has_its_form() -> None:
    class Slow(Rotary):
        pass

    assert str(Slow(base=500.0)) == "low_far,base=500"
    assert Slow.parse("low_far,base=500") == Rotary(base=500.0)
    with pytest.raises(ConfigError, match="int has no text form"):
        text_forms.write(3)
