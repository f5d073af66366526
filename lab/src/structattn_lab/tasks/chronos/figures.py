"""The figure of Chronos: examples of forecasts."""

from __future__ import annotations

from structattn_lab.report.figures.examples import examples_figure

FIGURES = {"examples": examples_figure}
