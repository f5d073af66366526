"""Draws the picture of docs/architecture.md, from the floors of a test: ``python docs/draw_floors.py``."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from test_layering import LAB, LIBRARY, Package

IMAGE = Path(__file__).parent / "images" / "floors.png"
TITLES = {LIBRARY: "structattn: what people import", LAB: "structattn-lab: what people run"}
COLOURS = {LIBRARY: "#9ecae1", LAB: "#fdae6b"}
STYLE = {"font.family": "DejaVu Sans", "font.size": 9.5, "text.color": "#222222"}


def floors_of(package: Package) -> dict[int, list[str]]:
    """The names on each floor, from the lowest."""
    names: dict[int, list[str]] = {}
    for name, number in package.floors.items():
        names.setdefault(number, []).append(name)
    return dict(sorted(names.items()))


def main() -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), width_ratios=(1.25, 1), layout="constrained")
        for ax, package in zip(axes, (LIBRARY, LAB), strict=True):
            floors = floors_of(package)
            for row, names in enumerate(floors.values()):
                ax.barh(row, 1, height=0.86, color=COLOURS[package], alpha=0.75)
                ax.text(0.02, row, "   ".join(names), va="center")
            ax.set(xlim=(0, 1), ylim=(-0.6, max(len(floors), 11) - 0.4))
            ax.set_title(TITLES[package], loc="left", weight="bold")
            ax.axis("off")
        figure.savefig(IMAGE, dpi=130)


if __name__ == "__main__":
    main()
