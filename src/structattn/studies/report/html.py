"""One self-contained HTML page of a comparison: no script, no address outside the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structattn.files import write_atomic
from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.report._common import baseline_score, ranked_rows, score_of
from structattn.studies.report.table import baseline_cells, header, row_cells, verdict
from structattn.studies.tasks.registry import tables_of

if TYPE_CHECKING:
    from structattn.studies.report.figures import Figure

_CSS = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1c1f23;--dim:#5c636b;--line:#d9dde2;--box:#eef5fb;
--edge:#0072b2;
--bar:#9cc7e3;--mark:#f1f7ea;--base:#f6f6f7}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--fg:#e6e8ea;--dim:#a0a7af;--line:#363c43;
--box:#18293a;
--edge:#56b4e9;--bar:#2d6a94;--mark:#1f2c1d;--base:#1d2126}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:74rem;padding:1.5rem 1rem 3rem;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:break-word}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0 .4rem}h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
.question{font-size:1.08rem;margin:.2rem 0 1rem}.dim,figcaption,.notes{color:var(--dim);font-size:.88rem}
.verdict{white-space:pre-line;background:var(--box);border-left:4px solid var(--edge);padding:.8rem 1rem;border-radius:4px;
margin:1rem 0}
.verdict b{display:block;font-size:.78rem;letter-spacing:.05em;text-transform:uppercase;color:var(--edge)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.9rem;
font-variant-numeric:tabular-nums}
th,td{padding:.36rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap;
vertical-align:top}
thead th{font-weight:600;border-bottom:2px solid var(--dim);vertical-align:bottom}
th:first-child,td:first-child{text-align:left}tbody th{font-weight:400;white-space:normal;min-width:9rem}
tr.best{background:var(--mark)}tr.best th,tr.best td:nth-child(2){font-weight:700}
tbody.base tr{background:var(--base)}tbody.base tr:first-child th{text-align:left;font-size:.78rem;
color:var(--dim);
letter-spacing:.05em;text-transform:uppercase;border-top:2px solid var(--dim)}
.bar{display:block;height:4px;margin:3px 0 0 auto;min-width:1px;background:var(--bar);border-radius:2px}
.track{display:block;min-width:6rem}.note{display:block;font-size:.8rem;color:var(--dim)}
figure{margin:1.2rem 0 2rem}.card{background:#fff;border:1px solid var(--line);border-radius:6px;
padding:.6rem}
.card svg{display:block;width:100%;height:auto;max-width:46rem;margin:0 auto}figcaption{margin-top:.4rem}
pre{background:var(--base);border:1px solid var(--line);border-radius:4px;padding:.7rem;
white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.88rem}
.words{text-align:left!important;white-space:normal!important;min-width:11rem}
.plain td,.plain th{text-align:left;white-space:normal;overflow-wrap:anywhere}.plain th{width:16rem;
font-weight:400;
color:var(--dim)}summary{cursor:pointer;margin:.8rem 0 .4rem}
@media (max-width:40rem){.plain th{width:40%}.wide>table:not(.plain) th:first-child{position:sticky;left:0;
background:inherit;min-width:7rem}tbody tr,thead tr{background:var(--bg)}
tr.best{background:var(--mark)}.card{padding:.2rem}}
@media print{:root{--bg:#fff;--fg:#000;--dim:#444;--line:#ccc;--box:#f3f3f3;--base:#f6f6f6;--mark:#f0f0f0}
body{max-width:none;padding:0;font-size:11pt}figure,tr,.verdict{break-inside:avoid}.wide{overflow:visible}
table{font-size:8pt}th,td{padding:.2rem .3rem}*{print-color-adjust:exact}}
"""


def write_report(record: ComparisonRecord, figures: Iterable[Figure], path: Path) -> Path:
    """Writes the page.

    Args:
        record: what ``results.json`` holds.
        figures: what :func:`structattn.studies.report.figures.draw_figures` returned; may be empty.
        path: the file to write; replaced in one step when it exists.

    Returns:
        ``path``.
    """
    title = f"Attention compared: {record.task}"
    shown = "".join(figure_html(figure, index) for index, figure in enumerate(figures))
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="question">{escaped(record.question)}</p>',
        f'<p class="dim">preset {escaped(record.preset)} · {escaped(record.created[:16].replace("T", " "))} UTC · {_seeds(record)}</p>',
        _facts(record),
        f'<div class="verdict"><b>Verdict</b>{escaped(verdict(record))}</div>',
        f"<h2>Results</h2>{_table(record)}",
        f'<p class="dim">Score: {escaped(record.metric)}, {escaped(record.metric_label)}; '
        "lower is better. ★ marks the best attention; the bars show the score on one linear scale.</p>",
        *task_tables(record),
        f"<h2>Figures</h2>{shown}" if shown else "",
        repeat_comparison(record),
        _notes(record),
    ]
    return write_page(title, body, path)


def write_page(title: str, body: Iterable[str], path: Path) -> Path:
    """Writes one self-contained page in the house's style.

    Args:
        title: of the window.
        body: pieces of HTML, text already escaped.
        path: the file to write; replaced in one step when it exists.
    """
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_CSS}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
    write_atomic(Path(path), page.encode("utf-8", "replace"))
    return Path(path)


def escaped(value: Any) -> str:
    """A value as text that is safe inside HTML."""
    return escape(str(value), quote=True)


def _facts(record: ComparisonRecord) -> str:
    """What was compared on what: the data, the length of the training, and every spec in words."""
    training = record.config.get("training") or {}
    facts = list(record.data.items())
    if training:
        most = "at most " if training.get("patience") else ""
        facts.append(("training", f"{most}{training['steps']:,} steps of {training['batch_size']:,} examples"))
    facts += list(record.meanings.items())
    return _pairs(facts) if facts else ""


def _seeds(record: ComparisonRecord) -> str:
    seeds = record.seeds
    word = "seed" if len(seeds) == 1 else "seeds"
    return escaped(f"{word} {', '.join(str(s) for s in seeds)}")


def _table(record: ComparisonRecord) -> str:
    ranked = ranked_rows(record)
    best = ranked[0] if ranked else None
    baselines = record.baselines
    values = [score_of(row) for row in record.rows] + [baseline_score(record, b) for b in baselines]
    top = max((v for v in values if v is not None), default=0.0)

    def line(cells: list[str], score: float | None, css: str = "", note: str = "") -> str:
        share = max(0.0, min(1.0, score / top)) if score is not None and top > 0 else None
        bar = "" if share is None else f'<span class="bar" style="width:{100 * share:.1f}%"></span>'
        star = "★ " if css == "best" else ""
        small = f'<span class="note">{escaped(note)}</span>' if note else ""
        first = f'<th scope="row">{star}{escaped(cells[0])}{small}</th>'
        second = f'<td><span class="track">{escaped(cells[1])}{bar}</span></td>'
        rest = "".join(f"<td>{escaped(cell)}</td>" for cell in cells[2:])
        return f"<tr{f' class={chr(34)}{css}{chr(34)}' if css else ''}>{first}{second}{rest}</tr>"

    names = header(record)
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in names)
    rows = "".join(line(row_cells(record, r), score_of(r), "best" if r is best else "") for r in record.rows)
    base = "".join(line(baseline_cells(record, b), baseline_score(record, b), note=b.note) for b in baselines)
    if base:
        label = f'<tr><th scope="rowgroup" colspan="{len(names)}">Baselines without attention</th></tr>'
        base = f'<tbody class="base">{label}{base}</tbody>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody>{base}</table></div>'


def table_html(header: Iterable[str], lines: Iterable[list[str]]) -> str:
    """A table whose lines are named by their first cell."""
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in header)
    rows = "".join(
        f'<tr><th scope="row">{escaped(line[0])}</th>{"".join(f"<td>{escaped(c)}</td>" for c in line[1:])}</tr>'
        for line in lines
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def task_tables(record: ComparisonRecord) -> list[str]:
    """The tables that the task adds, each below its title."""
    made = {title: make(record) for title, make in tables_of(record.task).items()}
    return [f'<p class="dim">{escaped(title)}</p>{table_html(*table)}' for title, table in made.items() if table]


def figure_html(figure: Figure, index: int) -> str:
    """A figure with its caption, drawn inside the page."""
    svg = inline_svg(figure.path_svg.read_text(encoding="utf-8"), f"f{index}-", figure.alt)
    return f'<figure><div class="card">{svg}</div><figcaption>{escaped(figure.caption)}</figcaption></figure>\n'


def inline_svg(svg: str, prefix: str, alt: str) -> str:
    """An SVG file made fit to stand inside a page.

    Args:
        svg: the file's text as matplotlib writes it.
        prefix: put before every id and every reference to one, so that two figures in a page cannot collide.
        alt: the description for readers who do not see the figure.

    Returns:
        The ``<svg>`` element without prolog, document type, metadata, comments and fixed size.
    """
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<[^<>]*?\sid=")', rf"\g<1>{prefix}", svg)
    svg = re.sub(r'(href=")#', rf"\g<1>#{prefix}", svg)
    svg = re.sub(r"url\(#", f"url(#{prefix}", svg)
    tag, rest = svg.split(">", 1)
    tag = re.sub(r'\s(width|height)="[^"]*"', "", tag)
    return f'{tag} role="img" aria-label="{escaped(alt)}">{rest}'


def _flat(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested settings as dotted names and values."""
    if isinstance(value, Mapping) and value:
        return [pair for key, child in value.items() for pair in _flat(child, f"{name}.{key}" if name else str(key))]
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return [(name, text)]


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f'<tr><th scope="row">{escaped(name)}</th><td>{escaped(value)}</td></tr>' for name, value in pairs)
    return f'<div class="wide"><table class="plain"><tbody>{rows}</tbody></table></div>'


def repeat_comparison(record: ComparisonRecord) -> str:
    """How to repeat a comparison."""
    facts = {"seeds": ", ".join(map(str, record.seeds)), "preset": record.preset}
    return repeat_html(record.command, facts, record.versions, asdict(record.hardware), record.config)


def repeat_html(
    command: str,
    facts: Mapping[str, object],
    versions: Mapping[str, str],
    hardware: Mapping[str, object],
    config: Mapping[str, Any],
) -> str:
    """The command of a run, its seeds and what else decides it, versions, machine, and settings where there are any."""
    where = [(key.replace("_gib", " (GiB)"), _short(value)) for key, value in hardware.items()]
    names = [(f"version of {key}", value) for key, value in versions.items()]
    settings = _flat(config)
    folded = f"<details><summary>All settings ({len(settings)})</summary>{_pairs(settings)}</details>" if config else ""
    said = [(name, str(value)) for name, value in facts.items()]
    return f"<h2>How to repeat this</h2><pre><code>{escaped(command)}</code></pre>{_pairs([*said, *names, *where])}{folded}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _notes(record: ComparisonRecord) -> str:
    several = len(record.seeds) > 1
    notes = [
        f"The score is {record.metric}: {record.metric_label}. Lower is better.",
        "± is the standard deviation over seeds." if several else "One seed was run, so no spread is known.",
        "FLOPs are those of the forward pass of one example, 2 per multiply-add, counted on the structure.",
        "Peak memory is the resident set of the process; seconds are wall-clock on this machine.",
        "Baselines are computed without attention on the same data; their costs were not measured.",
    ]
    return (
        '<h2>What is measured</h2><ul class="notes">' + "".join(f"<li>{escaped(note)}</li>" for note in notes) + "</ul>"
    )
