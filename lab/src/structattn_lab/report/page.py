"""A report as one self-contained HTML page: no script, no address outside the file."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup, escape

from structattn_lab.report.report import Report

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


def page_text(report: Report, figures: Mapping[str, Figure]) -> str:
    """The page of a report with these figures, by name; a section that shows nothing has no heading."""
    sections = []
    for section in report.sections:
        shown = [figures[name] for name in section.drawings if name in figures]
        if shown or section.code or section.table:
            sections.append((section, shown))
    return _template().render(report=report, sections=sections)


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
