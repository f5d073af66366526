"""The figures of the reports, drawn with matplotlib's object interface: no pyplot, no window, no state.

Importing this needs matplotlib.
"""

from __future__ import annotations

from structattn.errors import MissingDependencyError

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "figures need matplotlib, which is not installed; pip install 'structattn[train]'"
    ) from error

del matplotlib

from structattn.studies.report.figures.canvas import Figure  # noqa: E402
from structattn.studies.report.figures.comparison import draw_figures  # noqa: E402
from structattn.studies.report.figures.fits import draw_fits  # noqa: E402
from structattn.studies.report.figures.mup import draw_mup  # noqa: E402
from structattn.studies.report.figures.scaling import draw_scaling  # noqa: E402
from structattn.studies.report.figures.search import draw_search  # noqa: E402

__all__ = ["Figure", "draw_figures", "draw_fits", "draw_mup", "draw_scaling", "draw_search"]
