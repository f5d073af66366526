"""Draws the pictures of docs/family.md from the library's own matrices: ``python docs/draw_family.py``.

Nothing is drawn unchecked: ``check_map`` builds both ends of every arrow and compares them, and every row of
factors is multiplied out and compared with ``to_dense()``.
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image
from torch import Tensor

from structattn.matrices import MLBTC, BlockTensorTrain, Butterfly, Kaleidoscope, Structure, StructuredMatrix

IMAGES = Path(__file__).parent / "images"
# The palette of Okabe and Ito, which people with color blindness can read.
BLUE, VERMILLION, GREEN, ORANGE, SKY, BLACK = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#000000"
GREY = "#666666"
WIDTH, DPI = 8.0, 200  # 1600 pixels, shown on 800
STYLE = {"font.family": "DejaVu Sans", "font.size": 9.0, "mathtext.fontset": "dejavusans"}
SIZE = 16  # of the matrices whose factors are shown


def _write(fig: Figure, name: str) -> None:
    """Writes a picture with a palette of 128 colours, which these flat ones do not miss, at a third of the
    size.
    """
    buffer = BytesIO()
    fig.savefig(buffer, dpi=DPI)
    plt.close(fig)
    Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


# ---- the map


@dataclass(frozen=True)
class Node:
    """A family in the map: its place, its name, its number of parameters at E x E, its colour."""

    x: float
    y: float
    name: str
    count: str
    colour: str
    width: float = 1.62
    height: float = 0.62


NODES = {
    "mlbtc": Node(2.62, 5.55, "MLBTC", r"$\sum_l F_l\,(E/b_l + E/c_l)$", GREY, width=4.9, height=0.66),
    "mlr": Node(1.0, 3.85, "MLR", r"$2\,E\,\sum_l r_l$", SKY),
    "lowrank": Node(1.0, 2.2, "Low rank", r"$2\,E\,r$", SKY),
    "dense": Node(1.0, 0.55, "Dense", r"$E^2$", SKY),
    "btt": Node(4.1, 3.85, "BTT", r"$2\,s\,E^{1.5}$", ORANGE),
    "monarch": Node(4.1, 2.2, "Monarch", r"$2\,E^{1.5}$", ORANGE),
    "kronecker": Node(4.1, 0.55, "Kronecker", r"$2\,E$", ORANGE),
    "butterfly": Node(7.02, 3.85, "Butterfly", r"$2\,E\,\log_2 E$ for $s = 1$", GREEN, width=1.86),
    "kaleidoscope": Node(7.02, 5.55, "Kaleidoscope", r"$4\,w\,E\,\log_2 E$", GREEN, width=1.86, height=0.66),
}


def _box(ax: Axes, node: Node) -> None:
    corner = (node.x - node.width / 2, node.y - node.height / 2)
    for face, alpha in (("white", 1.0), (node.colour, 0.25)):
        shape = "round,pad=0,rounding_size=0.1"
        ax.add_patch(FancyBboxPatch(corner, node.width, node.height, boxstyle=shape, fc=face, ec="none", alpha=alpha))
    ax.add_patch(FancyBboxPatch(corner, node.width, node.height, boxstyle=shape, fc="none", ec=node.colour, lw=1.4))
    ax.text(node.x, node.y + 0.13, node.name, ha="center", va="center", weight="bold", size=10.5)
    ax.text(node.x, node.y - 0.14, node.count, ha="center", va="center", size=9)


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], *, line: str = "-", colour: str = BLACK
) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=13, lw=1.4, ls=line, color=colour, shrinkA=2, shrinkB=2
        )
    )


def _label(ax: Axes, x: float, y: float, text: str, ha: str = "left", colour: str = BLACK) -> None:
    ax.text(x, y, text, ha=ha, va="center", size=8.6, color=colour, linespacing=1.25)


def check_map() -> None:
    """Every arrow of the map on random matrices of 16 x 16: both ends are the same matrix."""

    def same(low: StructuredMatrix, high: StructuredMatrix, parameters: dict[str, Tensor]) -> None:
        for name, value in parameters.items():
            high.get_parameter(name).copy_(value)
        torch.testing.assert_close(low.to_dense(), high.to_dense())

    dense, low, mlr, btt = (_built(text) for text in ("dense", "lowrank:3", "mlr:3", "btt:2"))
    monarch, kronecker, butterfly = (_built(text) for text in ("monarch", "kronecker", "butterfly"))
    same(dense, _built("lowrank:16"), {"left": dense.weight, "right": torch.eye(SIZE)})
    same(low, mlr, {"left.0": low.left[None], "right.0": low.right[None]})
    one_block = BlockTensorTrain(SIZE, SIZE, 3, row_dims=(SIZE, 1), col_dims=(1, SIZE)).double()
    same(low, one_block, {"left": low.left[None], "right": low.right[None]})
    blocks = {"left": kronecker.outer.expand(4, 4, 4), "right": kronecker.inner.T.expand(4, 4, 4)}
    same(kronecker, _built("monarch"), blocks)
    same(monarch, _built("btt:1"), {"left": monarch.left, "right": monarch.right})
    two_stages = Butterfly(SIZE, SIZE, 2, row_radices=(4, 4), col_radices=(4, 4)).double()
    same(btt, two_stages, {"left.0": btt.left[None], "right.0": btt.right.transpose(1, 2)[:, None]})
    term = MLBTC.from_matrix(butterfly)
    same(butterfly, _built("btt:1"), {"left": term.left[0], "right": term.right[0]})
    assert term.terms == MLBTC.from_matrix(monarch).terms
    first = {f"left.0.{name}": value for name, value in butterfly.named_parameters()}
    second = {f"right.{name}": torch.eye(2).expand_as(value) for name, value in butterfly.named_parameters()}
    same(butterfly, _built("kaleidoscope"), first | second)
    for text in ("mlr:2|1|1", "btt:2"):
        m = _built(text)
        same(m, MLBTC.from_matrix(m), {})
    # No submatrix of a random Kaleidoscope that a block term could make lacks rank.
    kaleidoscope = _built("kaleidoscope").to_dense()
    for b, c in ((b, c) for b in (1, 2, 4, 8) for c in (1, 2, 4, 8)):
        a, d = SIZE // b, SIZE // c
        ranks = torch.linalg.matrix_rank(kaleidoscope.reshape(a, b, c, d).permute(1, 2, 0, 3))
        assert bool((ranks == min(a, d)).all())


def draw_map() -> None:
    """Which family is a special case of which."""
    fig, ax = plt.subplots(figsize=(WIDTH, 6.55))
    ax.set(xlim=(0, WIDTH), ylim=(-0.6, 5.95))
    ax.axis("off")
    fig.subplots_adjust(0, 0, 1, 1)
    for node in NODES.values():
        _box(ax, node)

    def up(low: str, high: str, text: str, ha: str = "left") -> None:
        x, bottom = NODES[low].x, NODES[low].y + NODES[low].height / 2
        top = NODES[high].y - NODES[high].height / 2
        _arrow(ax, (x, bottom), (x, top))
        _label(ax, x + (0.12 if ha == "left" else -0.12), (bottom + top) / 2, text, ha=ha)

    up("dense", "lowrank", "$r = E$, one factor\nthe identity")
    up("lowrank", "mlr", "one level")
    up("mlr", "mlbtc", "identity permutations,\none term per level,\n$b_l = c_l = p_l,\\ F_l = p_l\\,r_l$")
    up("kronecker", "monarch", "left blocks all equal,\nright blocks all equal")
    up("monarch", "btt", "$s = 1$")
    up("btt", "mlbtc", "one term,\nstride permutations,\n$F = b\\,c\\,s$", ha="right")
    up("butterfly", "kaleidoscope", "$s = w = 1$,\n$B = I$")

    low, btt = NODES["lowrank"], NODES["btt"]
    _arrow(ax, (low.x + low.width / 2, low.y + 0.2), (btt.x - btt.width / 2, btt.y - 0.16))
    _label(ax, 2.66, 2.86, "one block:\n$b = c = 1,\\ s = r$")

    left, right = btt.x + btt.width / 2, NODES["butterfly"].x - NODES["butterfly"].width / 2
    _arrow(ax, (left, btt.y + 0.14), (right, btt.y + 0.14))
    _label(ax, (left + right) / 2, btt.y + 0.31, "$k = 2$ stages", ha="center")
    _arrow(ax, (right, btt.y - 0.14), (left, btt.y - 0.14), line="--", colour=BLUE)
    _label(
        ax,
        left + 0.08,
        btt.y - 0.62,
        "any $k \\geq 2$: each half of\nthe stages becomes one factor,\n$s\\,E\\,(b + c)$ numbers",
        colour=BLUE,
    )

    top, tall = NODES["mlbtc"], NODES["kaleidoscope"]
    start, end = (tall.x - tall.width / 2, tall.y), (top.x + top.width / 2, top.y)
    _arrow(ax, start, end, line=":", colour=VERMILLION)
    middle = (start[0] + end[0]) / 2 + 0.06
    ax.plot([middle], [top.y], marker="x", ms=11, mew=2.6, color=VERMILLION)
    _label(ax, middle, top.y - 0.56, "$k \\geq 2$ stages: no term\nsmaller than dense", ha="center", colour=VERMILLION)

    y = -0.34
    for x, line, colour, text in (
        (0.2, "-", BLACK, "is a special case of"),
        (2.95, "--", BLUE, "can be fused into"),
        (5.45, ":", VERMILLION, "is not a case of"),
    ):
        _arrow(ax, (x, y), (x + 0.55, y), line=line, colour=colour)
        _label(ax, x + 0.65, y, text)
    ax.plot([5.68], [y], marker="x", ms=8, mew=2.2, color=VERMILLION)
    _write(fig, "family-map.png")


# ---- the factors


@dataclass(frozen=True)
class Factor:
    """A matrix to draw: its values, its colour, its name below, and the sign before it."""

    values: Tensor
    colour: str
    name: str
    sign: str = ""


def _shade(values: Tensor, colour: str) -> tuple[Tensor, LinearSegmentedColormap]:
    """Absolute values with a floor, so that every entry that is not zero can be seen, on white to
    ``colour``.
    """
    size = values.abs()
    shade = torch.where(size > 1e-9, 0.3 + 0.7 * (size / size.max()).sqrt(), torch.zeros_like(size))
    return shade, LinearSegmentedColormap.from_list("shade", ["white", colour])


def _permutation(index: Tensor) -> Tensor:
    """P with (P z)[i] = z[index[i]]."""
    return torch.eye(len(index), dtype=torch.float64)[index]


def term_factors(m: MLBTC, level: int) -> list[Factor]:
    """P_L, ⊕ L, P_R and ⊕ Rᵀ of one term; identity permutations are left out."""
    term, (left, right) = m.terms[level], m.used_factors()[level]
    one = term.left_blocks == term.right_blocks == 1
    factors = [
        Factor(_permutation(term.row_index(m.num_rows)), GREY, "$P_L$"),
        Factor(torch.block_diag(*left[0]), BLUE, "$L$" if one else r"$\oplus\,L_{k'}$"),
        Factor(_permutation(term.inner_index()), GREY, "$P_R$"),
        Factor(torch.block_diag(*right[0]).T, VERMILLION, "$R^T$" if one else r"$\oplus\,R_k^T$"),
    ]
    return factors[1::2] if term.left_permutation == "identity" == term.right_permutation else factors


def stage_matrix(m: Butterfly, t: int) -> Tensor:
    """Stage t (0-based) of a butterfly of rank 1 written out: it mixes one index and keeps those outside and
    inside.
    """
    (weight,) = m.used_stage(t)  # (outer, inner, m_t, n_t)
    outer, inner, high, wide = weight.shape
    out = torch.zeros(outer, high, inner, outer, wide, inner, dtype=weight.dtype)
    for i in range(outer):
        for j in range(inner):
            out[i, :, j, i, :, j] = weight[i, j]
    return out.reshape(outer * high * inner, outer * wide * inner)


def _checked(factors: list[Factor], m: StructuredMatrix, name: str = "$M$") -> list[Factor]:
    """The factors and the product behind them, after a check that it is the matrix."""
    dense = m.to_dense()
    total, product = torch.zeros_like(dense), None
    for factor in factors:
        if factor.sign == "+" and product is not None:
            total, product = total + product, None
        product = factor.values if product is None else product @ factor.values
    assert product is not None
    torch.testing.assert_close(total + product, dense)
    return [*factors, Factor(dense, BLACK, name, "=")]


def _row(
    ax: Axes, x: float, y: float, factors: list[Factor], title: str, note: str = "", cell: float = 1.0, tall: int = SIZE
) -> None:
    """Draws factors from left to right below a title, centred on the height ``tall`` in cells."""
    head = ax.text(x, y - 1.6, title, ha="left", va="bottom", weight="bold", size=9.5)
    ax.annotate(note, (1, 0), xycoords=head, xytext=(6, 0), textcoords="offset points", va="bottom", size=8.8)
    for number, factor in enumerate(factors):
        if number:
            ax.text(x + 2.2, y + tall * cell / 2, factor.sign or r"$\cdot$", ha="center", va="center", size=12)
            x += 4.4
        high, wide = (side * cell for side in factor.values.shape)
        top = y + (tall * cell - high) / 2
        shade, colours = _shade(factor.values.detach(), factor.colour)
        ax.imshow(
            shade,
            cmap=colours,
            vmin=0,
            vmax=1,
            extent=(x, x + wide, top + high, top),
            interpolation="nearest",
            zorder=2,
        )
        ax.plot(
            [x, x + wide, x + wide, x, x], [top, top, top + high, top + high, top], color="#999999", lw=0.7, zorder=3
        )
        ax.text(x + wide / 2, top + high + 0.7, factor.name, ha="center", va="top", size=8.6)
        x += wide


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    fig, ax = plt.subplots(figsize=(WIDTH, WIDTH * height / width))
    fig.subplots_adjust(0, 0, 1, 1)
    ax.axis("off")
    return fig, ax


def _save(fig: Figure, ax: Axes, width: float, height: float, name: str) -> None:
    ax.set(xlim=(0, width), ylim=(height, 0))
    ax.set_aspect("equal")
    _write(fig, name)


def _built(text: str, size: int = SIZE) -> StructuredMatrix:
    return Structure.parse(text).build(size, size).double()


def draw_terms() -> None:
    """The families that are sums of block terms."""
    width, height = 137.0, 152.0
    fig, ax = _canvas(width, height)
    dense = _built("dense")
    _row(ax, 2, 5, [Factor(dense.to_dense(), BLACK, "$M$")], "dense")
    low = _built("lowrank:4")
    _row(ax, 27, 5, _checked(term_factors(MLBTC.from_matrix(low), 0), low), "lowrank:4")
    mlr = _built("mlr:2|1|1")
    levels = [term_factors(MLBTC.from_matrix(mlr), level) for level in range(3)]
    joined = [
        Factor(torch.cat([left.values for left, _ in levels], dim=1), BLUE, "$L_1\\,|\\,L_2\\,|\\,L_3$"),
        Factor(torch.cat([right.values for _, right in levels]), VERMILLION, "$R_l^T$ stacked"),
    ]
    _row(ax, 83, 5, _checked(joined, mlr), "mlr:2|1|1", "three levels side by side")
    for y, text, note in (
        (32, "kronecker", "all left blocks are one matrix, all right blocks another"),
        (59, "monarch", "every block its own"),
    ):
        m = _built(text)
        _row(ax, 2, y, _checked(term_factors(MLBTC.from_matrix(m), 0), m), text, note)
    m = _built("btt:2")
    factors = _checked(term_factors(MLBTC.from_matrix(m), 0), m)
    _row(ax, 2, 86, factors, "btt:2", "every right block passes two numbers to every left block", tall=2 * SIZE)
    m = _built("mlbtc:1x1x2|4x4x16s")
    first, second = term_factors(m, 0), term_factors(m, 1)
    second[0] = Factor(second[0].values, second[0].colour, second[0].name, "+")
    _row(
        ax,
        2,
        129,
        _checked([*first, *second], m),
        "mlbtc:1x1x2|4x4x16s",
        "low rank plus Monarch, as an example of a sum",
    )
    _save(fig, ax, width, height, "family-terms.png")


def draw_stages() -> None:
    """Butterfly and Kaleidoscope, stage by stage, and what a butterfly becomes as one term."""
    width, height, cell = 183.0, 99.0, 1.3
    fig, ax = _canvas(width, height)
    m = _built("butterfly")
    assert isinstance(m, Butterfly)
    colours = [BLUE] * m.split + [VERMILLION] * (m.num_stages - m.split)
    stages = [Factor(stage_matrix(m, t), colours[t], f"stage {t + 1}") for t in range(m.num_stages)]
    _row(ax, 2, 7, _checked(stages, m), "butterfly", "stage 4 acts first; each stage mixes pairs", cell=cell)
    factors = _checked(term_factors(MLBTC.from_matrix(m), 0), m)
    _row(ax, 2, 41, factors, "the same matrix, fused", "stages 1 and 2 are one factor, 3 and 4 the other", cell=cell)
    m = _built("kaleidoscope")
    assert isinstance(m, Kaleidoscope)
    first, second = m.butterflies
    stages = [Factor(stage_matrix(first, t), BLUE, f"$A$, stage {t + 1}") for t in range(4)]
    stages += [Factor(stage_matrix(second, t).T, VERMILLION, f"$B^T$, stage {t + 1}") for t in reversed(range(4))]
    _row(ax, 2, 75, _checked(stages, m), "kaleidoscope", "$A\\,B^T$ with two butterflies")
    _save(fig, ax, width, height, "family-stages.png")


# ---- the ranks


def block_ranks(m: StructuredMatrix, *, strided: bool) -> Tensor:
    """The rank of each of the 8 x 8 submatrices of a matrix of size 64: contiguous blocks, or M[(:, k'), (k,
    :)].
    """
    grid = m.to_dense().detach().reshape(8, 8, 8, 8)
    return torch.linalg.matrix_rank(grid.permute(1, 2, 0, 3) if strided else grid.permute(0, 2, 1, 3))


def draw_ranks() -> None:
    """Ranks of submatrices of random members, E = 64."""
    names = ("dense", "lowrank:3", "mlr:2|1|1|1", "kronecker", "monarch", "btt:2", "butterfly", "kaleidoscope")
    fig, axes = plt.subplots(2, len(names), figsize=(WIDTH, 2.8))
    fig.subplots_adjust(0.08, 0.21, 0.985, 0.915, wspace=0.12, hspace=0.08)
    colours = plt.get_cmap("cividis_r", 8)
    for column, text in enumerate(names):
        m = _built(text, 64)
        for row, strided in enumerate((False, True)):
            ax, ranks = axes[row, column], block_ranks(m, strided=strided)
            image = ax.imshow(ranks, cmap=colours, vmin=0.5, vmax=8.5)
            ax.set(xticks=[], yticks=[])
            if len(ranks.unique()) > 1:  # the two corners that only the first level reaches
                for place in ((5.5, 1.5), (1.5, 5.5)):
                    ax.text(*place, int(ranks[0, 7]), ha="center", va="center", size=12)
            else:
                value = int(ranks[0, 0])
                ax.text(3.5, 3.5, value, ha="center", va="center", size=17, color="white" if value > 4 else "black")
        axes[0, column].set_title(text, size=8, weight="bold")
    axes[0, 0].set_ylabel("blocks of\nneighbours", size=8.6)
    axes[1, 0].set_ylabel("strided\nsubmatrices", size=8.6)
    bar = fig.colorbar(image, cax=fig.add_axes((0.3, 0.115, 0.5, 0.04)), orientation="horizontal", ticks=range(1, 9))
    bar.ax.tick_params(labelsize=8.6, length=0)
    fig.text(0.285, 0.135, "rank of the submatrix", ha="right", va="center", size=8.6)
    _write(fig, "family-ranks.png")


def main() -> None:
    """All pictures, into docs/images."""
    torch.manual_seed(0)
    with plt.rc_context(STYLE), torch.no_grad():
        check_map()
        torch.manual_seed(0)  # the pictures do not depend on what the check draws
        draw_map()
        draw_terms()
        draw_stages()
        draw_ranks()


if __name__ == "__main__":
    main()
