"""A report as one self-contained HTML page: no script, no address outside the file."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from structattn.errors import CheckpointError
from structattn.files import write_atomic
from structattn_lab.records.common import REPORT, RESULTS, R, ResultRecord, Results, to_json
from structattn_lab.report.table import Table

_REM_PER_POINT = 46 / (
    7.2 * 72
)  # in a page, of a figure's width: letters of 8 points are about as large as those of notes


@dataclass(frozen=True)
class Figure:
    """A figure on disk.

    Attributes:
        name: short name, also the stem of both files.
        path_png: the figure as pixels, 160 per inch.
        path_svg: the figure as vectors.
        caption: one sentence on what is shown and how far it can be trusted.
        alt: a description for readers who do not see the figure.
    """

    name: str
    path_png: Path
    path_svg: Path
    caption: str
    alt: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page, below a heading if it has one: code, a table with its title and notes, figures."""

    heading: str = ""
    code: str = ""
    table: Table | None = None
    figures: Sequence[Figure] = ()


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What it takes to repeat a run: the command line; seeds, versions and machine by name; all settings by
    their dotted names.
    """

    command: str
    facts: Sequence[tuple[str, str]]
    settings: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, record: ResultRecord) -> Origin:
        """From the record of a comparison, of fits, of a muP check or of a sweep."""
        results = vars(record)
        facts: dict[str, Any] = {name: results[name] for name in ("seeds", "seed", "preset") if name in results}
        facts |= {f"version of {name}": version for name, version in record.versions.items()}
        facts |= {name.replace("_gib", " (GiB)"): value for name, value in vars(record.hardware).items()}
        settings = _flat(results["config"]) if results.get("config") else []
        return cls(command=record.command, facts=[(k, _short(v)) for k, v in facts.items()], settings=settings)


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a page shows, in this order.

    Attributes:
        title, question: what was done, and what it answers.
        byline: preset, date and seeds, or as much of it as there is.
        facts: the data, the training and the specs in words, by name.
        verdict: what the numbers show.
        sections: tables and figures.
        origin: how to repeat it.
        notes: what is measured and how.
    """

    title: str
    question: str
    byline: Sequence[str]
    verdict: str
    sections: Sequence[Section]
    origin: Origin
    notes: Sequence[str]
    facts: Mapping[str, str] = field(default_factory=dict)


def write_results(
    record: R, folder: Path, draw: Callable[[R, Path], Sequence[Figure]], page: Callable[[R, Sequence[Figure]], Page]
) -> Results[R]:
    """Writes ``results.json``, figures and ``report.html``.

    Raises:
        CheckpointError: they cannot be written.
    """
    try:
        write_atomic(folder / RESULTS, to_json(record))
        write_page(page(record, draw(record, folder / "figures")), folder / REPORT)
    except OSError as error:
        raise CheckpointError(f"could not write the results to {folder}: {error.strerror or error}") from error
    return Results(record=record, folder=folder)


def write_page(page: Page, path: Path) -> Path:
    """Writes a page to a file, which is replaced in one step when it exists; returns its path."""
    text = _template().render(page=page)
    write_atomic(path, text.encode("utf-8", "replace"))
    return path


@functools.cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["inline_svg"] = inline_svg
    environment.filters["breakable"] = breakable
    return environment.from_string(resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8"))


def breakable(name: str) -> Markup:
    """A name that may go on in a new line after each underscore, so that a table of many metrics fits into
    its page.
    """
    return escape(name).replace("_", Markup("_<wbr>"))


def inline_svg(figure: Figure) -> Markup:
    """The ``<svg>`` element of a figure, for use inside a page.

    It has no prolog, document type, metadata, comments and fixed size. Ids have the figure's name in front,
    so that those of two figures in a page differ.
    """
    svg, prefix = figure.path_svg.read_text(encoding="utf-8"), f"{figure.name}-"
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<[^<>]*?\sid=")', rf"\g<1>{prefix}", svg)
    svg = re.sub(r'(href=")#', rf"\g<1>#{prefix}", svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    tag, rest = svg.split(">", 1)
    tag = re.sub(r'\s(width|height)="[^"]*"', "", tag)
    widest = re.search(r'viewBox="0 0 ([\d.]+) ', tag)
    # Letters have one size in all figures of a page, however wide each was drawn.
    style = f' style="max-width:{_REM_PER_POINT * float(widest[1]):.1f}rem"' if widest else ""
    return Markup(f'{tag}{style} role="img" aria-label="{escape(figure.alt)}">{rest}')


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names and values."""
    if isinstance(value, Mapping) and value:
        return [pair for key, child in value.items() for pair in _flat(child, f"{name}.{key}" if name else str(key))]
    return [(name, value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False))]
