"""Draws the picture of docs/concepts.md, from a layout of the library: ``python docs/draw_levels.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

import structattn as sa

IMAGE = Path(__file__).parent / "images" / "levels.png"
LENGTH, QUERY, KEYS = 16, 15, (3, 9, 12, 14)
LAYOUT = sa.LevelLayout.halving(ranks=(32, 16, 8, 8), context_length=LENGTH)
COLOURS = ("#9ecae1", "#4292c6", "#fdae6b", "#d94801")  # level 1 to 4; each is the colour of that level in every panel
INK = "#222222"
STYLE = {"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK}


def _box(ax: Axes, x: float, y: float, width: float, height: float, colour: str, alpha: float = 1.0) -> None:
    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.6, alpha=alpha))


def _slices(ax: Axes) -> None:
    """The head of 64 dimensions, cut into one slice for each level."""
    left = 0
    for level, rank in enumerate(LAYOUT.ranks):
        _box(ax, left, 0, rank, 1, COLOURS[level])
        ax.text(left + rank / 2, 0.5, str(rank), ha="center", va="center", weight="bold", size=11)
        ax.text(left + rank / 2, -0.12, f"level {level + 1}", ha="center", va="top", size=8.5)
        left += rank
    ax.set(xlim=(0, left), ylim=(-0.6, 1.05))
    ax.set_title(
        "1   mlr:32|16|8|8 cuts each query and key (64 dimensions) into slices, one for each level", loc="left"
    )


def _blocks(ax: Axes) -> None:
    """The blocks of each level over the positions: full colour where the query is, a dot for a key that
    shares the block.
    """
    for level, size in enumerate(LAYOUT.block_sizes):
        y = len(LAYOUT.ranks) - level
        for start in range(0, LENGTH, size):
            _box(ax, start, y, size, 0.82, COLOURS[level], 1.0 if start <= QUERY < start + size else 0.3)
        name = "1 block" if size == LENGTH else f"{LENGTH // size} blocks of {size}"
        ax.text(-0.4, y + 0.41, f"level {level + 1}\n{name}", ha="right", va="center", size=8.5)
        for key in KEYS:
            if key // size == QUERY // size:
                ax.plot(key + 0.5, y + 0.41, "o", color=INK, markersize=6)
    for position in range(LENGTH):
        weight = "bold" if position in (*KEYS, QUERY) else "normal"
        ax.text(position + 0.5, 0.65, str(position), ha="center", va="center", size=9, weight=weight)
    ax.add_patch(Rectangle((QUERY, 0.35), 0.97, 4.55, fill=False, edgecolor=INK, linewidth=1.6))
    ax.text(QUERY + 0.5, 5.0, "query", ha="center", va="bottom", size=9, weight="bold")
    for row, key in enumerate(KEYS):
        depth = _depth(QUERY, key)
        ranks = LAYOUT.ranks[:depth]
        levels = "level 1 only" if depth == 1 else f"levels 1 to {depth}"
        total = " + ".join(map(str, ranks)) + (f" = {sum(ranks)}" if depth > 1 else "")
        text = f"key {key}: same block as query {QUERY} at {levels}: {total} dimensions"
        _box(ax, -3.6, -0.55 - 0.66 * row, 0.55, 0.45, COLOURS[depth - 1])
        ax.text(-2.8, -0.33 - 0.66 * row, text, size=9, va="center")
    ax.set(xlim=(-3.6, LENGTH + 0.1), ylim=(-2.7, 5.6))
    ax.set_title("2   A level counts for a pair that lies in one block of that level", loc="left")


def _depth(query: int, key: int) -> int:
    return sum(query // size == key // size for size in LAYOUT.block_sizes)


def _scores(ax: Axes) -> None:
    """The causal score matrix: the colour of a pair is that of the deepest level it shares."""
    for query in range(LENGTH):
        for key in range(query + 1):
            depth = _depth(query, key)
            assert LAYOUT.shared_rank(query, key) == sum(LAYOUT.ranks[:depth])
            _box(ax, key, query, 1, 1, COLOURS[depth - 1])
    for key in KEYS:
        ax.add_patch(Rectangle((key, QUERY), 1, 1, fill=False, edgecolor=INK, linewidth=1.4))
    ax.text(0, -0.3, "key position \u2192", ha="left", va="bottom")
    ax.text(-0.35, 0, "\u2190 query position", ha="right", va="top", rotation=90)
    for row, depth in enumerate(range(1, len(LAYOUT.ranks) + 1)):
        _box(ax, 8.6, 1.2 + 1.3 * row, 1, 1, COLOURS[depth - 1])
        ax.text(9.9, 1.7 + 1.3 * row, f"{sum(LAYOUT.ranks[:depth])} dimensions", va="center", size=9.5)
    ax.set(xlim=(-1.2, LENGTH), ylim=(LENGTH + 0.2, -1.4), aspect="equal")
    ax.set_title("3   Near pairs use more dimensions", loc="left")


def draw() -> None:
    with plt.rc_context({**STYLE, "axes.titlesize": 10.5, "axes.titleweight": "bold"}):
        figure = plt.figure(figsize=(10, 5.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.1, 4.5))
        first = top.subplots()
        second, third = bottom.subplots(1, 2, width_ratios=(1.25, 1))
        for ax, panel in ((first, _slices), (second, _blocks), (third, _scores)):
            panel(ax)
            ax.set_axis_off()
        figure.savefig(IMAGE, dpi=160, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    draw()
