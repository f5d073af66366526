"""Draws the picture of docs/parallel-extrapolation.md, from the simulation of the lab:
``python docs/draw_parallel.py``.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import structattn as sa
from structattn_lab.planning.parallel_time import SCHEMES, Devices, Layer, layer_time

IMAGE = Path(__file__).parent / "images" / "parallel-extrapolation.png"
T, GPUS, HEADS, DIM = 2**20, 64, 32, 128
LINKS = [2.0 * 1.3**n for n in range(22)]  # GB/s
RANKS = (16,) * 8
LAYOUTS = {
    "one level": sa.LevelLayout.halving((DIM,), T),
    "8 levels, keys and values": sa.LevelLayout.halving(RANKS, T, value_ranks=RANKS),
}
STYLES = {
    "contiguous": ("#222222", "-"),
    "uneven lengths": ("#8c8c8c", "--"),
    "head-tail": ("#d94801", "-"),
    "shared rectangles": ("#4292c6", "--"),
}


def _layer(layout: sa.LevelLayout, groups: int) -> Layer:
    width = HEADS * DIM
    linear = 2 * (2 * width**2 + 2 * width * groups * DIM + 8 * width**2)
    return Layer(layout=layout, num_positions=T, num_heads=HEADS, num_kv_heads=groups, linear_flops=linear)


def _panel(ax: Axes, layer: Layer, title: str) -> None:
    for scheme in SCHEMES:
        times = [
            layer_time(layer, Devices(count=GPUS, flops=4e14, link=link * 1e9), scheme).step() * 1e3 for link in LINKS
        ]
        colour, line = STYLES[scheme]
        ax.plot(LINKS, times, line, color=colour, label=scheme, linewidth=1.8)
    for link, name in ((12.5, "100 Gbit/s"), (50, "400 Gbit/s"), (450, "NVLink")):
        ax.axvline(link, color="#dddddd", linewidth=1, zorder=0)
        ax.text(link, 0.98, name, transform=ax.get_xaxis_transform(), rotation=90, ha="right", va="top", size=7.5)
    ax.set(xscale="log", yscale="log", xlim=(LINKS[0], LINKS[-1]))
    ax.set_title(title, loc="left", size=9.5)
    ax.set_xticks([2, 5, 10, 20, 50, 100, 200, 450], labels=["2", "5", "10", "20", "50", "100", "200", "450"])
    ax.set_xticks([], minor=True)
    low, high = ax.get_ylim()
    ticks = [x for x in (200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000) if low <= x <= high]
    ax.set_yticks(ticks, labels=[f"{x:,}" for x in ticks])
    ax.set_yticks([], minor=True)


def draw() -> None:
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 8.5}):
        figure, axes = plt.subplots(2, 2, figsize=(9.6, 6.6), layout="constrained", sharex=True)
        for row, groups in zip(axes, (8, 32), strict=True):
            for ax, (name, layout) in zip(row, LAYOUTS.items(), strict=True):
                _panel(ax, _layer(layout, groups), f"{name}; 32 heads, {groups} for keys and values")
            row[0].set_ylabel("ms, forward and back, one layer")
        for ax in axes[1]:
            ax.set_xlabel("link of one GPU, GB/s each way")
        figure.legend(*axes[0, 0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=4)
        figure.suptitle(
            "Simulated: one layer of width 4,096, T = 1,048,576 on 64 GPUs of 400 TFLOP/s", size=10.5, weight="bold"
        )
        figure.savefig(IMAGE, dpi=150, facecolor="white")
        plt.close(figure)


if __name__ == "__main__":
    draw()
