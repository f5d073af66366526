"""The one-line text form of an attention variant: scoring + layout, to and from objects.

    standard   standard:1   bilinear-btt:2   bilinear-mlr:16|8|4|4   bilinear-monarch   mlr:32|16|8|8
    mlr:32|32@512|64   mlr-text:32|16|16   sliding:32|32@-|128   window:512   window:252,sink_tokens=4
    global-window:32|32@512
    bilinear-btt:1+mlr:32|16|8|8+window:256
    heads:standard*2/window:252,sink_tokens=4*6

Options follow after commas: ``mlr:32|16|8|8,scaling=paper``, ``bilinear-btt:1,rms_cap=true``.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
from typing import Any, get_args

from structattn import extensions
from structattn.checks import check_size, check_type, describe, quoted
from structattn.errors import ConfigError, NotRegisteredError, StructAttnError, in_words
from structattn.grammar import (
    Form,
    check_name,
    flag,
    named,
    one_of,
    optional,
    positive,
    read_term,
    reading,
    several,
    word,
    write_term,
)
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.layer import CustomAttention
from structattn.layers.scoring import BTT, MLR, Matrix, Standard
from structattn.layers.scoring_modules import ScoreScaling
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.halving import Halving
from structattn.layout.levels import LevelLayout
from structattn.layout.scaling import SCALINGS
from structattn.layout.sink_window import SinkWindow
from structattn.layout.text import UNITS, TextLayout
from structattn.matrices import FAMILIES, Structure

__all__ = ["FORMS", "AttentionSpec", "Halving", "describe_spec", "format_spec", "parse_spec"]

logger = logging.getLogger(__name__)
_SCORING = {"scaling": one_of("scaling", get_args(ScoreScaling)), "rms_cap": flag}
_LAYOUT = {"scaling": one_of("scaling", SCALINGS), "values": several(positive), "sink_tokens": positive}
_TEXT = "text such as 'standard' or 'mlr:32|16|8|8'"
_MOST_HEADS = 2**16
_ALL_FORMS = "structattn specs lists every form; + joins terms"


def _blocks(text: str) -> dict[str, Any]:
    ranks, at, blocks = text.partition("@")
    return {"ranks": several(positive)(ranks), "blocks": several(positive)(blocks) if at else None}


def _windows(text: str) -> dict[str, Any]:
    ranks, at, windows = text.partition("@")
    if not at:
        raise ConfigError("expected ranks and a window for each, - for one without end, such as 32|32@-|128")
    return {
        "ranks": several(positive)(ranks),
        "windows": several(lambda part: None if part == "-" else positive(part))(windows),
    }


def _units(text: str) -> dict[str, Any]:
    ranks, at, units = text.partition("@")
    return {"ranks": several(positive)(ranks), "units": several(one_of("unit", UNITS))(units) if at else ()}


def _ranks_and_window(text: str) -> dict[str, Any]:
    ranks, at, window = text.partition("@")
    values = several(positive)(ranks)
    if not at or len(values) != 2:
        raise ConfigError("expected two ranks and a window, such as 32|32@512")
    return {"ranks": values, "window": positive(window)}


def _standard(num_heads: int | None = None, kv_heads: int | None = None, **options: Any) -> dict[str, Any]:
    heads = {"num_heads": num_heads, "num_kv_heads": kv_heads}
    return {"scoring": Standard(**options)} | {name: count for name, count in heads.items() if count is not None}


def _layout_options(scaling: Any = "variance", values: Any = None, sink_tokens: int = 0) -> dict[str, Any]:
    return {"scaling": scaling, "value_ranks": values, "sink_tokens": sink_tokens}


def _mlr(ranks: Any, blocks: Any, **options: Any) -> dict[str, Any]:
    options = _layout_options(**options)
    return {"layout": Halving(ranks, **options) if blocks is None else LevelLayout(ranks, blocks, **options)}


def _mlr_text(ranks: Any, units: Any, **options: Any) -> dict[str, Any]:
    return {"layout": TextLayout(ranks, units, **_layout_options(**options))}


def _sliding(ranks: Any, windows: Any, **options: Any) -> dict[str, Any]:
    return {"layout": LevelLayout.sliding(ranks, windows, **_layout_options(**options))}


def _window(window: int, sink_tokens: int | None = None, scaling: Any = None) -> dict[str, Any]:
    if sink_tokens is not None:
        return {"layout": SinkWindow(window, sink_tokens, scaling or "variance")}
    if scaling is not None:
        raise ConfigError("a window without sink tokens scales no scores: scaling is an option of the scoring")
    return {"window": window}


def _bilinear(name: str) -> Form:
    """The form ``bilinear-FAMILY`` of a family without a scoring class."""
    family = FAMILIES[name].form

    def make(**arguments: Any) -> dict[str, Any]:
        options = {option: arguments.pop(option) for option in _SCORING if option in arguments}
        return {"scoring": Matrix(matrix=Structure(name, tuple(arguments.items())), **options)}

    syntax, example = f"bilinear-{family.syntax}", f"bilinear-{family.example}"
    meaning = f"score x^T M x' with M {family.meaning}"
    return Form(syntax, example, meaning, value=family.value, options=_SCORING, make=make)


_MLR = (
    "MLR attention: near pairs share more levels; ranks sum to the feature dimension, block sizes are halved; with "
    "values the value dimensions are shared by level too"
)
_MLR_TEXT = (
    "MLR attention whose levels are the whole text and then its units, paragraph, line and word unless UNITs are "
    "given; for language models"
)
_SLIDING = (
    "attention whose levels slide: a pair shares a level where its distance is below the window of the level; W: "
    "windows, - for no limit; ranks sum to the feature dimension; with values the value dimensions are shared by level "
    "too"
)
_OWN_SCORING = ("btt", "mlr")
# What a form makes: the fields of an ``AttentionSpec`` that it sets.
FORMS: dict[str, Form] = {
    "standard": Form(
        "standard[:HEADS][,kv_heads=G]",
        "standard:1",
        "softmax attention; HEADS overrides the heads of the model, G those of keys and values: G = 1 is multi-query "
        "attention",
        value=optional("num_heads", positive),
        options={"kv_heads": positive, "rank": positive, **_SCORING},
        make=_standard,
    ),
    "bilinear-btt": Form(
        "bilinear-btt:S",
        "bilinear-btt:1",
        "score x^T M x' with M a block tensor train of rank S",
        value=named("rank", positive),
        options=_SCORING,
        make=lambda **arguments: {"scoring": BTT(**arguments)},
    ),
    "bilinear-mlr": Form(
        "bilinear-mlr:R|R|...",
        "bilinear-mlr:16|8|4|4",
        "score x^T M x' with M a multi-level low-rank matrix, level 1 first",
        value=named("ranks", several(positive)),
        options={**_SCORING, "divide_by_levels": flag},
        make=lambda **arguments: {"scoring": MLR(**arguments)},
    ),
    **{f"bilinear-{name}": _bilinear(name) for name in FAMILIES if name not in _OWN_SCORING},
    "mlr": Form(
        "mlr:R|R|...[@B|B|...][,values=V|V|...][,sink_tokens=N]",
        "mlr:32|16|8|8",
        _MLR,
        value=_blocks,
        options=_LAYOUT,
        make=_mlr,
    ),
    "mlr-text": Form(
        "mlr-text:R|R|...[@UNIT|...][,values=V|V|...][,sink_tokens=N]",
        "mlr-text:32|16|16",
        _MLR_TEXT,
        value=_units,
        options=_LAYOUT,
        make=_mlr_text,
    ),
    "sliding": Form(
        "sliding:R|R|...@W|W|...[,values=V|V|...][,sink_tokens=N]",
        "sliding:32|16|8|8@-|256|128|64",
        _SLIDING,
        value=_windows,
        options=_LAYOUT,
        make=_sliding,
    ),
    "window": Form(
        "window:W[,sink_tokens=N]",
        "window:512",
        "each query sees the last W positions; with sink_tokens the first N as well",
        value=named("window", positive),
        options={"sink_tokens": positive, "scaling": one_of("scaling", SCALINGS)},
        make=_window,
    ),
    "global-window": Form(
        "global-window:R|R@W",
        "global-window:32|32@512",
        "a global and a windowed softmax, added",
        value=_ranks_and_window,
        options={"scaling": one_of("scaling", get_args(ScoreScaling))},
        make=lambda **arguments: {"layout": GlobalWindowLayout(**arguments)},
    ),
}


HEADS = Form(
    "heads:SPEC*N/SPEC*N/...",
    "heads:standard*2/window:252,sink_tokens=4*6",
    "a layout or a window for each key head: SPEC*N is for the next N heads, SPEC for the next one; a bilinear scoring "
    "for all heads comes before it, as bilinear-btt:1+heads:...",
)
_HEADS = "heads:"

GROUP = "structattn.attention"


def add_form(name: str, form: Form) -> None:
    """Adds a form, such as that of a ``CustomAttention``, for every reader of specs in this process.

    Other processes, such as those of ``compare --jobs``, do not see it: declare an entry point of the group
    ``structattn.attention``, or call this at the import of a module that ``STRUCTATTN_IMPORT`` names.

    Args:
        name: before the colon.
        form: whose ``make`` returns a ``CustomAttention``, or fields of an ``AttentionSpec`` by name.

    Raises:
        ConfigError: the name cannot be used in a spec, or is that of another form.

    Example:
        >>> add_form("mean", Form("mean", "mean", "the mean of all tokens before", make=MeanAttention))
    """
    check_type("a form", form, Form, "a structattn.spec.Form")
    check_name("a form", name)
    if FORMS.setdefault(name, form) is not form:
        raise ConfigError(f"the form {name!r} is taken: choose another name")


def all_forms() -> dict[str, Form]:
    """Every form that this process can read, by name, those of installed packages too; a warning says why one
    of them is left out.
    """
    _import_forms()
    for name in extensions.installed(GROUP):
        try:
            add_form(name, _installed(name))
        except ConfigError as error:
            logger.warning("%s", error)
    return FORMS


def _installed(name: str) -> Form:
    """The form that an installed package declares; its package is imported."""
    form = extensions.load("the form", extensions.installed(GROUP)[name])
    if not isinstance(form, Form):
        raise NotRegisteredError(
            f"the entry point of the form {name!r} must name a structattn.spec.Form, got {describe(form)}"
        )
    return form


def _import_forms() -> None:
    """Imports the modules that the environment names, and adds the forms of matrix families of other
    packages.
    """
    extensions.import_modules()
    for name in FAMILIES:
        FORMS.setdefault(f"bilinear-{name}", _bilinear(name))


def _form(name: str) -> Form:
    """The form of a name. What is not known is looked for in modules that the environment names, then in
    installed packages.

    Raises:
        NotRegisteredError: there is none, or what should define it cannot be imported.
    """
    if name not in FORMS:
        _import_forms()
    if name not in FORMS:
        if name not in (declared := extensions.installed(GROUP)):
            raise extensions.not_registered("form", name, {*FORMS, *declared})
        add_form(name, _installed(name))
    return FORMS[name]


def _read_term(term: str) -> dict[str, Any]:
    """The fields of an ``AttentionSpec`` that a term sets."""
    name = re.split("[:,]", term.strip())[0].strip()
    with reading("attention spec", term, _ALL_FORMS):
        form = _form(name)
    with reading("attention spec", term, form.help):
        _, arguments = read_term(term, {name: form})
        try:
            made: Any = form.make(**arguments)
        except (TypeError, ValueError) as error:
            raise error if isinstance(error, StructAttnError) else ConfigError(in_words(error)) from error
        made = {"custom": made} if isinstance(made, CustomAttention) else made
        if not isinstance(made, dict) or not made.keys() <= {field.name for field in dataclasses.fields(AttentionSpec)}:
            raise ConfigError(
                f"its form must make a CustomAttention, or fields of an AttentionSpec, got {describe(made)}"
            )
        return made


def parse_spec(text: str) -> AttentionSpec:
    """Reads the text form of an attention variant.

    Args:
        text: terms joined by ``+``: at most one scoring, one layout and one window (see ``FORMS``).

    Returns:
        The value; ``parse_spec(str(spec)) == spec``.

    Raises:
        ConfigError: an unknown form (all are listed), a wrong number, or two terms for the same thing.
    """
    check_type("an attention spec", text, str, _TEXT)
    if text.lstrip().startswith("["):
        raise ConfigError(
            f"attention spec {quoted(text)} is a list, one spec per layer: give it to a whole model, or one of its "
            "specs to one layer"
        )
    if text.lstrip().startswith(_HEADS):
        return _parse_heads(text.strip())
    terms, *heads = re.split(rf"\+\s*(?={_HEADS})", text.strip(), maxsplit=1)
    if heads:
        spec = parse_spec(terms)
        with reading("attention spec", text, HEADS.help):
            if spec != AttentionSpec(scoring=spec.scoring) or isinstance(spec.scoring, Standard):
                raise ConfigError("only a bilinear scoring goes before specs of heads: leave out the other terms")
        return dataclasses.replace(spec, heads=_parse_heads(heads[0]).heads)
    fields: dict[str, Any] = {}
    for term in text.strip().split("+"):
        term_fields = _read_term(term)
        with reading("attention spec", text, _ALL_FORMS):
            twice = set(term_fields) & set(fields)
            if "scoring" in twice:
                raise ConfigError("two terms give the scoring, and standard is one: keep one of them")
            if twice:
                hint = "; sink_tokens is an option of the first one, before the window" if "layout" in twice else ""
                raise ConfigError(f"two terms give the {sorted(twice)[0]}{hint}")
        fields.update(term_fields)
    with reading("attention spec", text, _ALL_FORMS):
        return AttentionSpec(**fields)


def _parse_heads(text: str) -> AttentionSpec:
    """The spec of a layer that has one for each key head."""
    heads: list[AttentionSpec] = []
    for part in text.removeprefix(_HEADS).split("/"):
        spec, _, count = part.partition("*")
        with reading("attention spec", text, HEADS.help):
            if not spec.strip():
                raise ConfigError("expected a spec before and after every /")
            number = positive(count) if "*" in part else 1
            check_size("the number of heads of a spec", number, _MOST_HEADS)
        heads += [parse_spec(spec)] * number
    with reading("attention spec", text, HEADS.help):
        check_size("the number of key heads", len(heads), _MOST_HEADS)
        return AttentionSpec(heads=tuple(heads))


def _heads_text(specs: tuple[AttentionSpec, ...]) -> str:
    return _HEADS + "/".join(text if count == 1 else f"{text}*{count}" for text, count in _counted(specs))


def _counted(specs: tuple[AttentionSpec, ...]) -> list[tuple[str, int]]:
    """Each spec as text, and for how many heads in turn it is."""
    return [(str(spec), len(list(same))) for spec, same in itertools.groupby(specs)]


def describe_spec(text: str) -> str:
    """What a spec means, in words: the meaning of each of its terms with its numbers, for tables and
    reports.
    """
    check_type("an attention spec", text, str, _TEXT)
    terms, *heads = re.split(rf"\+\s*(?={_HEADS})", text.strip(), maxsplit=1)
    if heads:
        return f"{describe_spec(terms)}; and {describe_spec(heads[0])}"
    if text.lstrip().startswith(_HEADS):
        counted = _counted(parse_spec(text).heads or ())
        parts = [(describe_spec(spec), f"{count} key {'head' if count == 1 else 'heads'}") for spec, count in counted]
        return "; ".join(f"{heads}: {words}" for words, heads in parts)
    return "; and ".join(filter(None, map(_in_words, text.split("+"))))


def _in_words(term: str) -> str:
    head, _, options = term.strip().partition(",")
    name, _, args = head.partition(":")
    if name not in FORMS:
        return ""
    words = FORMS[name].meaning.partition(";")[0]  # what follows says how to write the form
    if name == "standard" and args:
        words += f", {args} {'head' if args == '1' else 'heads'}"
    if groups := re.search("kv_heads=([0-9]+)", options):
        words += f", {groups[1]} key and value {'head' if groups[1] == '1' else 'heads'}"
    default = " (1 by default)"
    numbers = re.findall("[0-9]+(?:[.][0-9]+)?", args) or (["1"] if default in words else [])
    for letter, number in zip(
        re.findall("[A-Z]+", FORMS[name].syntax), numbers if "|" not in args else (), strict=False
    ):
        words = re.sub(rf"\b{letter}\b", number, words)
    return words.replace(default, "") + (", of the values too" if "values=" in options else "")


def _options(value: Standard | BTT | MLR | Matrix) -> dict[str, object]:
    """The options of a scoring that are not at their defaults."""
    positional = () if isinstance(value, Standard) else ("rank", "ranks", "matrix")
    fields = [item for item in dataclasses.fields(value) if item.name not in positional]
    return {item.name: option for item in fields if (option := getattr(value, item.name)) != item.default}


def _scoring_terms(spec: AttentionSpec) -> list[str]:
    if not isinstance(spec.scoring, Standard) and (spec.num_heads, spec.num_kv_heads) != (None, None):
        raise ConfigError(
            "only standard has numbers of heads in its text form: give them to the model, or keep the object"
        )
    match spec.scoring:
        case Standard() as scoring:
            term = write_term("standard", spec.num_heads, kv_heads=spec.num_kv_heads, **_options(scoring))
            return [] if term == "standard" else [term]
        case BTT() as scoring:
            return [write_term("bilinear-btt", scoring.rank, **_options(scoring))]
        case MLR() as scoring:
            return [write_term("bilinear-mlr", scoring.ranks, **_options(scoring))]
        case Matrix(matrix=Structure() as found) as scoring:
            if found.family in _OWN_SCORING:
                name = found.family
                raise ConfigError(f"Matrix of {name} has no text form: bilinear-{name} is the scoring of that name")
            return [write_term(f"bilinear-{found}", **_options(scoring))]
    raise ConfigError("a score with a given matrix has no text form: give a Structure, or keep the object")


def _layout_terms(spec: AttentionSpec) -> list[str]:
    layout = spec.layout
    if layout is None:
        return []
    scaling = None if layout.scaling == "variance" else layout.scaling
    if isinstance(layout, SinkWindow):
        return [write_term("window", layout.window, sink_tokens=layout.sink_tokens, scaling=scaling)]
    ranks = word(layout.ranks)
    if isinstance(layout, GlobalWindowLayout):
        return [write_term("global-window", f"{ranks}@{layout.window}", scaling=scaling)]
    sink_tokens = layout.sink_tokens or None
    name, at = "mlr", ""
    if isinstance(layout, LevelLayout):
        if layout.boundaries is not None:
            raise ConfigError("a free partition has no text form: keep the LevelLayout")
        at = f"@{word(layout.block_sizes)}"
        if layout.windows is not None:
            name, at = "sliding", f"@{word(tuple('-' if window is None else window for window in layout.windows))}"
    elif isinstance(layout, TextLayout):
        name = "mlr-text"
        at = "" if layout.has_default_units else f"@{word(layout.units)}"
    return [write_term(name, ranks + at, scaling=scaling, values=layout.value_ranks, sink_tokens=sink_tokens)]


def format_spec(spec: AttentionSpec) -> str:
    """The canonical text form of a variant; see ``parse_spec``."""
    check_type("spec", spec, AttentionSpec, "an AttentionSpec", "parse_spec reads text")
    if spec.custom is not None:
        return str(spec.custom)
    if spec.heads is not None:
        return "+".join([*_scoring_terms(spec), _heads_text(spec.heads)])
    window = [] if spec.window is None else [write_term("window", spec.window)]
    return "+".join([*_scoring_terms(spec), *_layout_terms(spec), *window]) or "standard"
