"""Writes the table and the picture of the map of caches after ten times the steps: docs/results/cache-map.md.

    python cache_map.py FOLDER [FOLDER ...]

Each folder is of ``structattn compare text --preset cache-map-trained``, which may be made in parts
(``--attention``, with ``standard`` first in each, which decides the FLOPs of all). Models whose caches take a
storage are read once more through caches of 8 and 4 bits, without training. Rows go to cache-map-trained.csv
beside this file, the picture to ../images/cache-map-trained.png, a table to the standard output.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.ticker import FixedLocator, NullLocator

import structattn as sa
from structattn.errors import ConfigError
from structattn_lab.training.evaluate import load_run

HERE = Path(__file__).parent
BITS = (8, 4)
GROUP, RESIDUAL = 32, 32
STYLES = {
    "all tokens, grouped heads": ("#444444", "s"),
    "latent attention": ("#D55E00", "v"),
    "windows": ("#E69F00", "^"),
    "sliding levels": ("#0072B2", "o"),
    "heads that differ": ("#009E73", "D"),
    "equal levels": ("#56B4E9", "P"),
    "means of far keys": ("#CC79A7", "X"),
    "gated delta net": ("#8c6bb1", "*"),
}


def family(spec):
    """What kind of cache a spec has."""
    if "heads:" in spec:
        return "heads that differ"
    names = {"pooled": "means of far keys", "mla": "latent attention", "window": "windows", "mlr": "equal levels"}
    names |= {"gated-delta": "gated delta net", "sliding": "sliding levels"}
    return next((kind for name, kind in names.items() if name in spec), "all tokens, grouped heads")


def run_of(folder, row, seed):
    """The folder of a finished run."""
    for found in sorted(folder.glob(f"runs/*/seed-{seed}-lr-{row['learning_rate']:g}")):
        record = json.loads((found / "run.json").read_text())
        if record["spec"] == row["spec"]:
            return found
    raise SystemExit(f"{folder}: no run of {row['spec']} with seed {seed}")


@torch.no_grad()
def bytes_per_token(model, storage):
    """What the cache of a full context allocates for each token, with numbers of 16 bits."""
    length = model.context_length
    model = model.to(torch.bfloat16)
    caches = model.new_cache(max_length=length, storage=storage)
    model(torch.zeros(1, length, dtype=torch.int64), caches=caches)
    return caches.nbytes / length


def rows_of(folder):
    """The rows of a comparison: one for each attention and number of bits, with the scores of all seeds."""
    record = json.loads((folder / "results.json").read_text())
    length = record["config"]["task"]["context_length"]
    for row in record["rows"]:
        kept = {"spec": row["spec"], "family": family(row["spec"]), "rate": row["learning_rate"]}
        kept |= {"swept": " ".join(f"{tried['learning_rate']:g}" for tried in row["sweep"]["runs"])}
        yield {**kept, "bits": 16, "bytes": 2 * row["cache_numbers"] / length, "scores": row["scores"]}
        for bits in BITS:
            storage, scores, size = sa.Storage(bits, bits, group_size=GROUP, residual=RESIDUAL), [], None
            for seed in record["seeds"]:
                run = load_run(run_of(folder, row, seed))
                try:
                    found = run.task.evaluate_cached(run.model, "test", storage=storage)
                except ConfigError:
                    break
                scores.append(found[record["metric"]])
                size = bytes_per_token(run.model, storage) if size is None else size
            else:
                yield {**kept, "bits": bits, "bytes": size, "scores": scores}


def draw(rows, path):
    """Nats against bytes: a line for each kind of cache, hollow points where fewer bits are fewer bytes."""
    whole = {row["spec"]: row["bytes"] for row in rows if row["bits"] == 16}
    figure, axes = plt.subplots(figsize=(8.5, 5.2), layout="constrained")
    for kind, (colour, shape) in STYLES.items():
        points = sorted(
            (row["bytes"], statistics.fmean(row["scores"]))
            for row in rows
            if (row["family"], row["bits"]) == (kind, 16)
        )
        if not points:
            continue
        axes.plot(*zip(*points, strict=True), color=colour, lw=1, alpha=0.5)
        axes.plot(*zip(*points, strict=True), shape, color=colour, ms=8, label=kind)
        for row in rows:
            if row["family"] == kind and (row["bits"] == 16 or row["bytes"] < whole[row["spec"]]):
                mean, size = statistics.fmean(row["scores"]), row["bytes"]
                if len(row["scores"]) > 1:
                    axes.errorbar(size, mean, statistics.stdev(row["scores"]), color=colour, lw=1)
                if row["bits"] < 16:
                    axes.plot(size, mean, shape, color=colour, ms=6, mfc="none")
    axes.plot([], [], "o", color="#444444", mfc="none", ms=6, label="in 8 or 4 bits, not trained for it")
    axes.set_xscale("log", base=2)
    sizes = [8, 16, 32, 64, 128, 256, 512]
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{size}" for size in sizes])
    axes.set_xlabel("bytes of the cache for each token (left is smaller)")
    axes.set_ylabel("nats per character (lower is better)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)


def main():
    """See the module."""
    rows = {(row["spec"], row["bits"]): row for folder in map(Path, sys.argv[1:]) for row in rows_of(folder)}
    rows = sorted(rows.values(), key=lambda row: (row["bytes"], row["spec"]))
    with (HERE / "cache-map-trained.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["attention", "kind", "bits", "bytes per token", "seed", "nats per character", "rate", "rates tried"]
        writer.writerow(names)
        for row in rows:
            for seed, score in enumerate(row["scores"]):
                numbers = [row["bits"], f"{row['bytes']:.1f}", seed, f"{score:.5f}", row["rate"], row["swept"]]
                writer.writerow([row["spec"], row["family"], *numbers])
    sys.stdout.write("| attention | bits | bytes per token | nats per character |\n|---|---:|---:|---:|\n")
    for row in rows:
        spread = f" ± {statistics.stdev(row['scores']):.3f}" if len(row["scores"]) > 1 else ""
        spec = row["spec"].replace("|", "\\|")
        mean = statistics.fmean(row["scores"])
        sys.stdout.write(f"| `{spec}` | {row['bits']} | {row['bytes']:.0f} | {mean:.3f}{spread} |\n")
    draw(rows, HERE.parent / "images" / "cache-map-trained.png")


if __name__ == "__main__":
    main()
