"""Writes the table, the correlations and the picture of docs/results/structures.md from finished comparisons.

    python structures.py in-context-regression=RUN/results.json nearest-neighbors=RUN/results.json

Each is the ``results.json`` of ``structattn compare TASK --preset structures``, named for the page. Its rows
go to structures-NAME.csv beside this file, where they replace rows of the same spec: a comparison may be made
in parts (``--attention``, with ``standard`` first in each, which decides the FLOPs of all). The tables go to
the standard output, the picture of all such files to ../images/structures.png. What is counted of a structure
is read from the matrix that its spec builds.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator
from scipy.stats import spearmanr

import structattn as sa
from structattn.layers.scoring_modules import HeadShape

HERE = Path(__file__).parent
PROPERTIES = {
    "rank": "rank of a head",
    "parameters": "parameters of a head",
    "parameters_per_2_flops": "parameters per 2 FLOPs of a product",
}
COLOURS = {
    "standard": "#666666",
    "lowrank": "#D55E00",
    "btt": "#0072B2",
    "monarch": "#56B4E9",
    "mlr": "#E69F00",
    "mlbtc": "#009E73",
    "butterfly": "#CC79A7",
    "kaleidoscope": "#CC79A7",
    "kronecker": "#8c6bb1",
    "dense": "#000000",
}
SHAPES = {"kaleidoscope": "^", "standard": "s", "mlr": "D"}


def family(spec):
    """The colour of a row: an MLBTC whose terms have no stride permutation is an MLR matrix."""
    name, _, numbers = spec.removeprefix("bilinear-").partition(":")
    return "mlr" if name == "mlbtc" and "s" not in numbers else name


def counted(spec, embed_dim, num_heads):
    """Rank, parameters and FLOPs of a product, of one head."""
    parsed = sa.parse_spec(spec)
    heads = parsed.num_heads or num_heads
    matrix = parsed.scoring.build(HeadShape(embed_dim=embed_dim, num_heads=heads, num_kv_heads=heads)).matrix
    scales = getattr(matrix, "alpha", None)  # one number per term of an MLBTC
    numbers = sum(weight.numel() for weight in matrix.parameters()) - (0 if scales is None else scales.numel())
    return {
        "rank": matrix.rank_bound,
        "parameters": numbers // heads,
        "flops": matrix.flops,
        "parameters_per_2_flops": round(2 * numbers / heads / matrix.flops, 3),
    }


def rows_of(record):
    """The rows of a comparison with what is counted of each structure."""
    config = record["config"]["task"]
    embed_dim = config.get("embed_dim", config["dim"])
    rows = []
    for row in record["rows"]:
        rates = [tried["learning_rate"] for tried in row["sweep"]["runs"]]
        rows.append(
            {
                "spec": row["spec"],
                **counted(row["spec"], embed_dim, config["num_heads"]),
                "steps": row["steps"][0],
                "learning_rate": row["learning_rate"],
                "best_rate_is_inside": min(rates) < row["learning_rate"] < max(rates),
                "error": statistics.fmean(row["scores"]),
                "error_std": statistics.stdev(row["scores"]),
                "errors": " ".join(f"{score:.4g}" for score in row["scores"]),
                "model_parameters": row["num_params"],
                "seconds_of_a_run": round(row["seconds"]),
            }
        )
    return rows


def saved(path):
    """The rows of a file that this script wrote, by spec."""
    if not path.exists():
        return {}
    numbers = {"rank": int, "parameters": int, "parameters_per_2_flops": float, "steps": int, "learning_rate": float}
    numbers |= {"error": float, "error_std": float, "best_rate_is_inside": lambda text: text == "True"}
    with path.open(newline="") as file:
        rows = [{key: numbers.get(key, str)(value) for key, value in row.items()} for row in csv.DictReader(file)]
    return {row["spec"]: row for row in rows}


def correlations(rows):
    """Spearman's rank correlation of the error with each property, over the rows."""
    errors = [row["error"] for row in rows]
    values = {name: [row[name] for row in rows] for name in PROPERTIES}
    return {name: spearmanr(of_rows, errors).statistic for name, of_rows in values.items() if len(set(of_rows)) > 1}


def draw(tasks):
    """Error against each property, a row of panels per task."""
    figure, axes = plt.subplots(len(tasks), len(PROPERTIES), figsize=(10.5, 3.4 * len(tasks)), squeeze=False)
    for of_task, (name, rows) in zip(axes, tasks.items(), strict=True):
        rhos = correlations(rows)
        ends = 0.7 * min(row["error"] for row in rows), 1.2 * max(row["error"] + row["error_std"] for row in rows)
        for ax, (key, label) in zip(of_task, PROPERTIES.items(), strict=True):
            for row in rows:
                kind = family(row["spec"])
                ax.errorbar(
                    row[key],
                    row["error"],
                    yerr=row["error_std"],
                    fmt=SHAPES.get(kind, "o"),
                    color=COLOURS[kind],
                    markersize=6,
                    elinewidth=1,
                    label=kind,
                )
            ax.set_yscale("log", nonpositive="clip")
            for set_formatter in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
                set_formatter("{x:g}")
            ax.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            ax.set(xlabel=label, ylim=ends)
            if key != "parameters_per_2_flops":
                ax.set_xscale("log", base=2)
                ax.xaxis.set_major_formatter("{x:g}")
            if key in rhos:
                ax.set_title(f"rank correlation {rhos[key]:+.2f}", fontsize=9)
            ax.grid(color="#e4e4e4")
        of_task[0].set_ylabel(f"error, {name.replace('-', ' ')}")
    unique = {}
    for ax in axes[:, 0]:
        unique |= dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=len(unique), fontsize=8)
    figure.set_layout_engine("constrained")
    figure.savefig(HERE.parent / "images" / "structures.png", dpi=110)


def table(name, rows):
    """The rows as a table of Markdown, below the correlations."""
    rhos = ", ".join(f"{key} {rho:+.2f}" for key, rho in correlations(rows).items())
    lines = [f"{name}: {rhos}"]
    for row in rows:
        cells = (
            f"`{row['spec']}`".replace("|", "\\|"),
            f"{row['parameters']:,}",
            f"{row['parameters_per_2_flops']:g}",
            str(row["rank"]),
            f"{row['steps']:,}",
            f"{row['learning_rate']:g}" + ("" if row["best_rate_is_inside"] else " (end of the sweep)"),
            f"{row['error']:.3f} ± {row['error_std']:.3f}",
            row["errors"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    for word in sys.argv[1:]:
        name, _, path = word.partition("=")
        kept = HERE / f"structures-{name}.csv"
        rows = saved(kept) | {row["spec"]: row for row in rows_of(json.loads(Path(path).read_text()))}
        with kept.open("w", newline="") as file:
            writer = csv.DictWriter(file, next(iter(rows.values())))
            writer.writeheader()
            writer.writerows(rows.values())
    files = sorted(HERE.glob("structures-*.csv"))
    tasks = {file.stem.removeprefix("structures-"): list(saved(file).values()) for file in files}
    for name, rows in tasks.items():
        sys.stdout.write(table(name, rows))
    draw(tasks)


if __name__ == "__main__":
    main()
