"""What becomes of a report: text for a terminal, or figures and one page in a folder."""

from __future__ import annotations

from pathlib import Path

from structattn.errors import CheckpointError
from structattn.files import remove_temporary, write_atomic
from structattn_lab.records.common import REPORT, RESULTS, R, Results, to_json
from structattn_lab.report.page import Figure, page_text
from structattn_lab.report.plot import Drawings, content, in_style
from structattn_lab.report.report import Report


def text(report: Report) -> str:
    """The tables and the verdict for a terminal."""
    return "\n\n".join([*(table.text() for table in report.tables), report.verdict])


def write_results(record: R, report: Report, folder: Path) -> Results[R]:
    """Writes ``results.json``, figures and ``report.html``.

    Raises:
        CheckpointError: they cannot be written.
    """
    try:
        write_atomic(folder / RESULTS, to_json(record))
        write_report(report, folder)
    except OSError as error:
        raise CheckpointError(f"could not write the results to {folder}: {error.strerror or error}") from error
    return Results(record=record, folder=folder)


def write_report(report: Report, folder: Path) -> Path:
    """Writes ``figures/`` and ``report.html``, which is replaced in one step when it exists; returns the
    page.
    """
    drawings = {name: draw for section in report.sections for name, draw in section.drawings.items()}
    page = page_text(report, write_figures(drawings, folder / "figures"))
    write_atomic(folder / REPORT, page.encode("utf-8", "replace"))
    return folder / REPORT


def write_figures(drawings: Drawings, folder: Path) -> dict[str, Figure]:
    """Draws figures and writes each as PNG and SVG, the same bytes for the same data.

    Args:
        drawings: the figures by name, the stem of both files; of one that shows nothing no file is written,
            and an older one is removed.
        folder: where the files go; made when missing.
    """
    figures = {}
    for name, draw in drawings.items():
        with in_style(name):
            drawing = draw()
            png, svg = folder / f"{name}.png", folder / f"{name}.svg"
            if drawing is None:  # those of an earlier report with other rows are not left
                for path in (png, svg):
                    path.unlink(missing_ok=True)
            else:
                canvas, caption, alt = drawing
                for path in (png, svg):
                    remove_temporary(folder)
                    write_atomic(path, content(canvas, path.suffix[1:]))
                figures[name] = Figure(name, png, svg, caption, alt)
    return figures
