"""What trained language models copy from far back: ``python repeats.py FOLDER [FOLDER ...]``.

Each folder is of ``structattn compare text`` with budgets. In test windows the last 64 characters are a span
of the window once more, which begins 96, 192 or 384 characters before. For each run of the largest budget:
nats per character of the last 56 of them, and the same where the first occurrence is replaced by other text.
Rows go to repeats.csv beside this file, a table of means over windows to the standard output.
"""

import csv
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from structattn_lab.training.evaluate import load_run

HERE = Path(__file__).parent
SPAN, LEAD = 64, 8  # characters of a span, and those of its copy that only say which span it is
DISTANCES = (96, 192, 384)


@torch.no_grad()
def nats_of_copies(model, tokens, distance):
    """Nats per character of the copies, with and without what they repeat, for each window."""
    at = tokens.shape[1] - SPAN
    first = slice(at - distance, at - distance + SPAN)
    with_first = tokens.clone()
    with_first[:, at:] = tokens[:, first]
    without = with_first.clone()
    without[:, first] = tokens.roll(1, 0)[:, first]
    found = []
    for windows in (with_first, without):
        logits = torch.cat([model(part[:, :-1]) for part in windows.split(16)])
        nats = F.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none")
        found.append(nats[:, LEAD - SPAN :].mean(dim=1))
    return found


def rows_of(folder):
    """A row for each run of the largest budget and each distance."""
    rows = json.loads((folder / "results.json").read_text())["rows"]
    budget = max(row["budget"] for row in rows)
    wanted = {(row["spec"], row["width"], steps) for row in rows if row["budget"] == budget for steps in row["steps"]}
    for path in sorted(folder.glob("runs/*/*/*/run.json")):
        config = json.loads(path.read_text())
        run_of = config["spec"], config["task_config"]["embed_dim"], config["progress"]["history"][-1]["step"]
        if run_of not in wanted:
            continue
        run = load_run(path.parent)
        tokens = run.task.eval_windows("test").tokens[:, : run.task.config.context_length]
        for distance in DISTANCES:
            again, new = nats_of_copies(run.model, tokens, distance)
            gain = new - again
            yield {
                "attention": run.spec,
                "width": config["task_config"]["embed_dim"],
                "budget": budget,
                "seed": run.seed,
                "distance": distance,
                "nats of the copy": float(again.mean()),
                "nats without the first": float(new.mean()),
                "difference": float(gain.mean()),
                "standard error": float(gain.std() / len(gain) ** 0.5),
            }


def main():
    """See the module."""
    rows = [row for folder in map(Path, sys.argv[1:]) for row in rows_of(folder)]
    with (HERE / "repeats.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    sys.stdout.write("| attention | width |" + "".join(f" {far} back |" for far in DISTANCES) + "\n|---|---:|")
    sys.stdout.write("---:|" * len(DISTANCES) + "\n")
    for spec, width in dict.fromkeys((row["attention"], row["width"]) for row in rows):
        cells = []
        for far in DISTANCES:
            same = [row for row in rows if (row["attention"], row["width"], row["distance"]) == (spec, width, far)]
            again, new = (
                statistics.fmean(row[name] for row in same) for name in ("nats of the copy", "nats without the first")
            )
            cells.append(f" {again:.2f} of {new:.2f} |")
        sys.stdout.write(f"| `{spec.replace('|', chr(92) + '|')}` | {width} |" + "".join(cells) + "\n")


if __name__ == "__main__":
    main()
