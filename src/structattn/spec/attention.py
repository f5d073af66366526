"""The one-line text form of an attention variant: scoring + layout, to and from objects.

    standard   standard:1   bilinear-btt:2   bilinear-mlr:16|8|4|4   bilinear-monarch   mlr:32|16|8|8   mlr:32|32@512|64
    mlr-text:32|16|16   window:512   global-window:32|32@512   bilinear-btt:1+mlr:32|16|8|8+window:256

Options follow after commas: ``mlr:32|16|8|8,scaling=paper``, ``bilinear-btt:1,rms_cap=true``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from structattn.checks import MAX_LENGTH, check_choice, check_size, check_type, quoted
from structattn.errors import ConfigError, nearest_name
from structattn.layers.scoring import BTT, MLR, LowRank, Matrix
from structattn.layers.scoring_modules import ScoreScaling
from structattn.layout.levels import SCALINGS, GlobalWindowLayout, LevelLayout, Scaling
from structattn.layout.text import UNITS, TextLayout
from structattn.matrices import FAMILIES, Structure

Form = LowRank | BTT | MLR | Matrix


@dataclass(frozen=True)
class Halving:
    """MLR blocks that are halved from a context length that is known only when a model is built.

    Args:
        ranks: dimensions per level, level 1 first.
        scaling, value_ranks: as ``LevelLayout``.
    """

    ranks: tuple[int, ...]
    scaling: Scaling = "variance"
    value_ranks: tuple[int, ...] | None = None

    if TYPE_CHECKING:  # lists are accepted, and kept as tuples

        def __init__(
            self,
            ranks: Sequence[int],
            scaling: Scaling = "variance",
            value_ranks: Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        checked = self.resolve(1)
        object.__setattr__(self, "ranks", checked.ranks)
        object.__setattr__(self, "value_ranks", checked.value_ranks)

    def resolve(self, context_length: int) -> LevelLayout:
        """``LevelLayout.halving`` for that context length."""
        return LevelLayout.halving(self.ranks, context_length, self.scaling, self.value_ranks)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """An attention variant as a value: what ``parse_spec`` reads and ``str`` writes.

    Args:
        scoring: structure of M. Default: standard low rank.
        layout: structure of the score matrix; ``None`` is plain.
        window: sliding window in positions, ``None`` for none.
        num_heads: overrides the model's number of heads (``standard:1``); ``None`` keeps it.
    """

    scoring: Form = field(default_factory=LowRank)
    layout: LevelLayout | GlobalWindowLayout | Halving | TextLayout | None = None
    window: int | None = None
    num_heads: int | None = None

    def __post_init__(self) -> None:
        check_type("scoring", self.scoring, Form, "a scoring.LowRank, BTT, MLR or Matrix", "parse_spec reads text")
        layouts = LevelLayout | GlobalWindowLayout | Halving | TextLayout | None
        check_type("layout", self.layout, layouts, "a layout or None", "parse_spec reads text")
        if self.window is not None:
            check_size("window", self.window, MAX_LENGTH)
            if isinstance(self.layout, GlobalWindowLayout):
                raise ConfigError("a global-window layout has its own window: leave window at None")
        if self.num_heads is not None:
            check_size("num_heads", self.num_heads)

    def layout_for(self, context_length: int) -> LevelLayout | GlobalWindowLayout | TextLayout | None:
        """The layout for a model of that context length (in positions)."""
        return self.layout.resolve(context_length) if isinstance(self.layout, Halving) else self.layout

    def with_scaling(self, scaling: ScoreScaling) -> AttentionSpec:
        """The same variant with another scaling of its scores, as muP needs it (``"mup"``), where it had the default.

        A scaling that was chosen (``"paper"``, say) stays. With a layout it is the layout's that counts.

        Args:
            scaling: ``"variance"`` or ``"mup"``.
        """
        check_choice("scaling", scaling, get_args(ScoreScaling))
        layout, scoring = self.layout, self.scoring
        if layout is not None and layout.scaling == "variance":
            return dataclasses.replace(self, layout=dataclasses.replace(layout, scaling=scaling))
        if layout is None and scoring.scaling == "variance":
            return dataclasses.replace(self, scoring=dataclasses.replace(scoring, scaling=scaling))
        return self

    def __str__(self) -> str:
        return format_spec(self)


@dataclass(frozen=True)
class SpecForm:
    """One form of the language, for help texts: how it is written, an example, and what it means."""

    syntax: str
    example: str
    meaning: str


FORMS: dict[str, SpecForm] = {
    "standard": SpecForm("standard[:HEADS]", "standard:1", "softmax attention; HEADS overrides the heads of the model"),
    "bilinear-btt": SpecForm(
        "bilinear-btt:S", "bilinear-btt:1", "score x^T M x' with M a block tensor train of rank S"
    ),
    "bilinear-mlr": SpecForm(
        "bilinear-mlr:R|R|...",
        "bilinear-mlr:16|8|4|4",
        "score x^T M x' with M multi-level low rank, level 1 first",
    ),
    **{
        f"bilinear-{name}": SpecForm(
            f"bilinear-{family.syntax}", f"bilinear-{family.example}", f"score x^T M x' with M {family.meaning}"
        )
        for name, family in FAMILIES.items()
        if name not in ("btt", "mlr")
    },
    "mlr": SpecForm(
        "mlr:R|R|...[@B|B|...][,values=V|V|...]",
        "mlr:32|16|8|8",
        "MLR attention: near pairs share more levels; ranks sum to the feature dimension, block sizes are halved; with "
        "values the value dimensions are shared by level too",
    ),
    "mlr-text": SpecForm(
        "mlr-text:R|R|...[@UNIT|...][,values=V|V|...]",
        "mlr-text:32|16|16",
        "MLR attention whose levels are all text and then its parts, paragraph, line and word unless UNITs are given; for "
        "language models",
    ),
    "window": SpecForm("window:W", "window:512", "each query sees the last W positions"),
    "global-window": SpecForm(
        "global-window:R|R@W", "global-window:32|32@512", "a global and a windowed softmax, added"
    ),
}


def _fail(term: str, problem: str) -> ConfigError:
    """The error of a term, with the one form that it is of, or else the way to see all of them."""
    form = FORMS.get(re.split("[:,]", term.strip())[0])
    help_text = (
        f"Written {form.syntax}, such as {form.example}" if form else "structattn specs lists every form; + joins terms"
    )
    return ConfigError(f"attention spec {quoted(term)}: {problem}. {help_text}")


def describe_spec(text: str) -> str:
    """What a spec means, in words: the meaning of each of its terms with its numbers, for tables and reports."""
    check_type("an attention spec", text, str, "text such as 'standard' or 'mlr:32|16|8|8'")
    return "; and ".join(filter(None, map(_in_words, text.split("+"))))


def _in_words(term: str) -> str:
    head, _, options = term.strip().partition(",")
    name, _, args = head.partition(":")
    if name not in FORMS:
        return ""
    words = FORMS[name].meaning.partition(";")[0]  # what follows says how to write the form
    if name == "standard" and args:
        words += f", {args} {'head' if args == '1' else 'heads'}"
    default = " (1 by default)"
    numbers = re.findall("[0-9]+", args) or (["1"] if default in words else [])
    for letter, number in zip(
        re.findall("[A-Z]", FORMS[name].syntax), numbers if "|" not in args else (), strict=False
    ):
        words = re.sub(rf"\b{letter}\b", number, words)
    return words.replace(default, "") + (", of the values too" if "values=" in options else "")


def _int(text: str, term: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise _fail(term, f"expected a positive whole number, got {quoted(text[:20])}")
    return int(text)


def _ints(text: str, term: str) -> tuple[int, ...]:
    return tuple(_int(part, term) for part in text.split("|"))


def _bool(text: str, term: str) -> bool:
    if text not in ("true", "false"):
        raise _fail(term, f"expected true or false, got {quoted(text)}")
    return text == "true"


def _scoring_options(options: dict[str, str], term: str, allowed: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in options.items():
        if key not in allowed:
            raise _fail(term, f"unknown option {quoted(key)}: {nearest_name(key, allowed)}")
        if key == "rank":
            out[key] = _int(value, term)
        elif key == "scaling":
            out[key] = value
        else:
            out[key] = _bool(value, term)
    return out


def _layout_scaling(options: dict[str, str], term: str) -> Scaling:
    unknown = set(options) - {"scaling"}
    if unknown:
        raise _fail(term, f"unknown option {quoted(sorted(unknown)[0])}: known: 'scaling', 'values'")
    text = options.get("scaling", "variance")
    for scaling in SCALINGS:
        if scaling == text:
            return scaling
    raise _fail(term, f"scaling must be one of {', '.join(SCALINGS)}, got {quoted(text)}")


def _standard(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    known = _scoring_options(options, term, ("rank", "scaling", "rms_cap"))
    heads = {"num_heads": _int(args, term)} if args else {}
    return {"scoring": LowRank(**known), **heads}


def _bilinear_btt(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    known = _scoring_options(options, term, ("scaling", "rms_cap"))
    return {"scoring": BTT(rank=_int(args, term), **known)}


def _bilinear_mlr(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    known = _scoring_options(options, term, ("scaling", "rms_cap", "divide_by_levels"))
    return {"scoring": MLR(ranks=_ints(args, term), **known)}


def _bilinear(family: str) -> Callable[[str, dict[str, str], str], dict[str, Any]]:
    """The reader of ``bilinear-FAMILY``, for the families that have no scoring of their own."""

    def read(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
        known = _scoring_options(options, term, ("scaling", "rms_cap"))
        return {"scoring": Matrix(matrix=Structure.parse(f"{family}:{args}" if args else family), **known)}

    return read


def _value_ranks(options: dict[str, str], term: str) -> tuple[tuple[int, ...] | None, Scaling]:
    values = _ints(options["values"], term) if "values" in options else None
    return values, _layout_scaling({name: text for name, text in options.items() if name != "values"}, term)


def _mlr(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    ranks, at, blocks = args.partition("@")
    values, scaling = _value_ranks(options, term)
    if not at:
        return {"layout": Halving(_ints(ranks, term), scaling, values)}
    return {"layout": LevelLayout(_ints(ranks, term), _ints(blocks, term), scaling, values)}


def _mlr_text(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    ranks, at, names = args.partition("@")
    values, scaling = _value_ranks(options, term)
    units = []
    for name in names.split("|") if at else ():
        found = [unit for unit in UNITS if unit == name]
        if not found:
            raise _fail(term, f"unknown unit {quoted(name)}: {nearest_name(name, UNITS)}")
        units += found
    return {"layout": TextLayout(_ints(ranks, term), tuple(units), scaling, values)}


def _no_options(options: dict[str, str], term: str) -> None:
    if options:
        raise _fail(term, f"this form has no options, got {quoted(sorted(options)[0])}")


def _window(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    _no_options(options, term)
    return {"window": _int(args, term)}


def _global_window(args: str, options: dict[str, str], term: str) -> dict[str, Any]:
    scaling = _scoring_options(options, term, ("scaling",)).get("scaling", "variance")
    ranks, at, window = args.partition("@")
    values = _ints(ranks, term)
    if not at or len(values) != 2:
        raise _fail(term, "expected two ranks and a window, such as 32|32@512")
    return {"layout": GlobalWindowLayout((values[0], values[1]), _int(window, term), scaling)}


_PARSERS: dict[str, Callable[[str, dict[str, str], str], dict[str, Any]]] = {
    "standard": _standard,
    "bilinear-btt": _bilinear_btt,
    "bilinear-mlr": _bilinear_mlr,
    **{f"bilinear-{name}": _bilinear(name) for name in FAMILIES if name not in ("btt", "mlr")},
    "mlr": _mlr,
    "mlr-text": _mlr_text,
    "window": _window,
    "global-window": _global_window,
}


def parse_spec(text: str) -> AttentionSpec:
    """Reads the text form of an attention variant.

    Args:
        text: terms joined by ``+``: at most one scoring, one layout and one window (see ``FORMS``).

    Returns:
        The value; ``parse_spec(str(spec)) == spec``.

    Raises:
        ConfigError: an unknown form (all are listed), a wrong number, or two terms for the same thing.
    """
    check_type("an attention spec", text, str, "text such as 'standard' or 'mlr:32|16|8|8'")
    if text.lstrip().startswith("["):
        raise ConfigError(
            f"attention spec {quoted(text)} is a list, one spec per layer: give it to a whole model, or one of its specs to one layer"
        )
    fields: dict[str, Any] = {}
    for term in text.strip().split("+"):
        head, *option_texts = term.strip().split(",")
        name, colon, args = head.partition(":")
        if name not in _PARSERS:
            raise _fail(text, f"unknown form {quoted(name)}: {nearest_name(name, FORMS)}")
        options: dict[str, str] = {}
        for option in option_texts:
            key, equals, value = option.partition("=")
            if not equals or key in options:
                raise _fail(term, f"options are written once, as key=value, got {quoted(option)}")
            options[key] = value
        found = _PARSERS[name](args, options, term)
        if colon and not args:  # of a form whose value may be left out, with its colon
            raise _fail(term, "expected a value after the colon, got nothing")
        twice = set(found) & set(fields)
        if "scoring" in twice:
            raise _fail(text, "two terms give the scoring, and standard is one: keep one of them")
        if twice:
            raise _fail(text, f"two terms give the {sorted(twice)[0]}")
        fields.update(found)
    if isinstance(fields.get("layout"), GlobalWindowLayout) and "window" in fields:
        raise _fail(text, "global-window has its own window")
    return AttentionSpec(**fields)


def _options(value: Form) -> str:
    """The options of a scoring that are not at their defaults, as text."""
    texts = []
    for item in dataclasses.fields(value):
        current = getattr(value, item.name)
        positional = item.name in ("rank", "ranks", "matrix") and not isinstance(value, LowRank)
        if positional or current == item.default:
            continue
        texts.append(f",{item.name}={str(current).lower() if isinstance(current, bool) else current}")
    return "".join(texts)


def _bars(values: tuple[int, ...]) -> str:
    return "|".join(map(str, values))


def format_spec(spec: AttentionSpec) -> str:
    """The canonical text form of a variant; see ``parse_spec``."""
    check_type("spec", spec, AttentionSpec, "an AttentionSpec", "parse_spec reads text")
    terms = []
    match spec.scoring:
        case LowRank() as low_rank:
            heads = "" if spec.num_heads is None else f":{spec.num_heads}"
            if heads or _options(low_rank):
                terms.append(f"standard{heads}{_options(low_rank)}")
        case BTT() as btt:
            terms.append(f"bilinear-btt:{btt.rank}{_options(btt)}")
        case MLR() as mlr:
            terms.append(f"bilinear-mlr:{_bars(mlr.ranks)}{_options(mlr)}")
        case Matrix(matrix=Structure(family="btt" | "mlr" as family)):
            raise ConfigError(f"Matrix of {family} has no text form: bilinear-{family} is the scoring of that name")
        case Matrix(matrix=Structure() as structure) as other:
            terms.append(f"bilinear-{structure}{_options(other)}")
        case Matrix():
            raise ConfigError(
                "a score with a matrix of one's own has no text form: give a Structure, or keep the object"
            )
    match spec.layout:
        case GlobalWindowLayout() as both:
            scaling = "" if both.scaling == "variance" else f",scaling={both.scaling}"
            terms.append(f"global-window:{_bars(both.ranks)}@{both.window}{scaling}")
        case LevelLayout(boundaries=tuple()):
            raise ConfigError("a free partition has no text form: keep the LevelLayout")
        case LevelLayout() | Halving() | TextLayout() as layout:
            scaling = "" if layout.scaling == "variance" else f",scaling={layout.scaling}"
            blocks = f"@{_bars(layout.block_sizes)}" if isinstance(layout, LevelLayout) else ""
            values = "" if layout.value_ranks is None else f",values={_bars(layout.value_ranks)}"
            name = "mlr"
            if isinstance(layout, TextLayout):
                name = "mlr-text"
                blocks = "" if layout.has_default_units else f"@{'|'.join(layout.units)}"
            terms.append(f"{name}:{_bars(layout.ranks)}{blocks}{scaling}{values}")
        case None:
            pass
    if spec.window is not None:
        terms.append(f"window:{spec.window}")
    return "+".join(terms) or "standard"
