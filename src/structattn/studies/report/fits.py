"""Fits of structures to matrices: the text table, the figure error against parameters, and the page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structattn.studies.report._common import fmt_count, fmt_seconds
from structattn.studies.report.html import escaped, figure_html, repeat_html, write_page

if TYPE_CHECKING:
    from structattn.studies.report.figures import Figure

Results = Mapping[str, Any]
Row = Mapping[str, Any]

_BUDGET = 0.25
_HEADER = ("structure", "parameters", "of dense", "error", "method", "seconds")


def _cells(matrix: Row, row: Row) -> list[str]:
    size = matrix["num_rows"] * matrix["num_cols"]
    method = f"{row['method']}{' (optimal)' if row['is_optimal'] else ''}"
    if row["detail"]:
        method += f": {row['detail']}"
    return [
        row["structure"],
        f"{row['num_params']:,}",
        f"{100 * row['num_params'] / size:.1f}%",
        fmt_error(row["relative_error"]),
        method,
        fmt_seconds(row["seconds"]),
    ]


def fmt_error(value: float) -> str:
    """A relative error with three digits: ``0.0612``, ``2.1e-05``."""
    return f"{value:.1e}" if 0 < value < 1e-3 else f"{value:.4f}" if value else "0"


def _ordered(matrix: Row) -> list[Row]:
    return sorted(matrix["rows"], key=lambda row: (row["num_params"], row["relative_error"]))


def _nearest(matrix: Row) -> Row | None:
    """The smallest error within a quarter of the parameters of a dense matrix; the fewest parameters among equals."""
    budget = _BUDGET * matrix["num_rows"] * matrix["num_cols"]
    rows = [row for row in matrix["rows"] if row["num_params"] <= budget]
    return min(rows, key=lambda row: (max(row["relative_error"], 1e-9), row["num_params"]), default=None)


def format_fits(results: Results) -> str:
    """The results as one aligned table per matrix, in the order of parameters."""
    blocks = []
    for matrix in results["matrices"]:
        lines = [list(_HEADER), *(_cells(matrix, row) for row in _ordered(matrix))]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
        best = _nearest(matrix)
        text = [f"{matrix['name']}  {matrix['num_rows']} x {matrix['num_cols']}: {matrix['about']}"]
        for line in lines:
            cells = [
                cell.ljust(width) if column in (0, 4) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            mark = "*" if best is not None and line[0] == best["structure"] else " "
            text.append(f"{mark} {'  '.join(cells)}".rstrip())
        blocks.append("\n".join(text))
    return "\n\n".join([*blocks, "error: relative, Frobenius norm; * nearest within a quarter of the dense parameters"])


def fit_verdict(results: Results) -> str:
    """For every matrix, what is nearest within a quarter of the dense parameters, beside low rank."""
    sentences = []
    for matrix in results["matrices"]:
        best = _nearest(matrix)
        if best is None:
            sentences.append(f"{matrix['name']}: nothing was fitted within a quarter of the dense parameters.")
            continue
        low = _nearest({**matrix, "rows": [row for row in matrix["rows"] if row["family"] == "lowrank"]})
        beside = f"; low rank: {fmt_error(low['relative_error'])}" if low is not None and low is not best else ""
        sentences.append(f"{matrix['name']}: {best['structure']}, {fmt_error(best['relative_error'])}{beside}.")
    return f"Nearest within {100 * _BUDGET:.0f} % of the parameters of a dense matrix. " + " ".join(sentences)


def _words(column: int) -> str:
    return ' class="words"' if _HEADER[column] == "method" else ""


def write_fit_report(results: Results, figure: Figure, path: Path) -> Path:
    """Writes the self-contained page: verdict, figure, a table per matrix, how to repeat it."""
    parts = []
    for matrix in results["matrices"]:
        best = _nearest(matrix)
        head = "".join(f'<th scope="col"{_words(i)}>{escaped(name)}</th>' for i, name in enumerate(_HEADER))
        lines = []
        for row in _ordered(matrix):
            cells = _cells(matrix, row)
            css = ' class="best"' if row is best else ""
            rest = "".join(f"<td{_words(i)}>{escaped(cell)}</td>" for i, cell in enumerate(cells) if i)
            lines.append(f'<tr{css}><th scope="row">{"★ " if css else ""}{escaped(cells[0])}</th>{rest}</tr>')
        parts.append(
            f"<h2>{escaped(matrix['name'])}, {matrix['num_rows']} x {matrix['num_cols']}</h2>"
            f'<p class="dim">{escaped(matrix["about"])}; a dense matrix has '
            f"{fmt_count(matrix['num_rows'] * matrix['num_cols'])} parameters</p>"
            f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
        )
    title = "Structures fitted to matrices"
    body = [
        f"<h1>{title}</h1>",
        '<p class="question">How near does each structure come to a given matrix, and at how many parameters?</p>',
        f'<p class="dim">{escaped(results["created"])}</p>',
        f'<div class="verdict"><b>Verdict</b>{escaped(fit_verdict(results))}</div>',
        figure_html(figure, 0),
        *parts,
        repeat_html(
            results["command"],
            {name: results[name] for name in ("seed", "preset") if name in results},
            results["versions"],
            results["hardware"],
            results.get("config", {}),
        ),
        '<h2>What is measured</h2><ul class="notes"><li>Error: ||M - A|| / ||A|| in the Frobenius norm, in float64.</li>'
        "<li>Optimal: no matrix of the structure is nearer. Otherwise the error is the best found and an upper bound.</li>"
        "<li>★ and *: the nearest within a quarter of the parameters of a dense matrix.</li>"
        "<li>Seconds are wall-clock on this machine, one run.</li></ul>",
    ]
    return write_page(title, body, path)
