"""What figures share."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from structattn_lab.report.plot import new_canvas, shared_legend, spec_style

LABELS = ["cache:4", "cache:3", "cache:2", "heads:2", "recent:124,sinks=4", "teacher", "sliding:6|10@-|204,values=6|10"]


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("width", [4.0, 6.4])
def test_a_legend_is_as_wide_as_its_figure_at_most(count: int, width: float) -> None:
    figure = Figure(figsize=(width, 3), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for label in LABELS[:count]:
        ax.plot([0, 1], label=label)
    shared_legend(figure, [ax])
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width


def test_a_long_legend_takes_no_room_from_the_panels() -> None:
    heights = []
    for count in (2, 18):
        figure = new_canvas(3.0, 4.0)
        ax = figure.subplots()
        for number in range(count):
            ax.plot([0, 1], label=f"a variant with a long name, number {number}")
        shared_legend(figure, [ax])
        figure.canvas.draw()
        heights.append(ax.get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.15)


def test_no_two_variants_look_alike_as_points() -> None:
    specs = [str(number) for number in range(49)]
    styles = {(style["color"], style["marker"]) for style in (spec_style(specs, spec) for spec in specs)}
    assert len(styles) == 49
