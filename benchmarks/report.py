"""Results as files: JSON with every sample, Markdown with the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def crossovers(rows: list[Row], axis: str) -> list[Row]:
    """For every variant: the smallest measured size from which on it is always faster than the baseline.

    Args:
        rows: of all groups.
        axis: the name of the size.

    Returns:
        Rows with mode, label, the other sizes, ``start`` (``None``: not even at the largest) and ``largest``.
    """
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if not row["is_baseline"]:
            others = tuple((name, size) for name, size in row["sizes"].items() if name != axis)
            lines.setdefault((row["mode"], row["label"], others), []).append(row)
    found = []
    for (mode, label, others), line in lines.items():
        start = None
        for row in sorted(line, key=lambda row: -row["sizes"][axis]):
            if row["speedup"] <= 1:
                break
            start = row["sizes"][axis]
        largest = max(row["sizes"][axis] for row in line)
        found.append({"mode": mode, "label": label, "sizes": dict(others), "start": start, "largest": largest})
    return found


def number(value: float) -> str:
    """Three significant digits, without exponents: 0.0123, 1.23, 1,230."""
    digits = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    return digits if "e" not in digits else f"{value:.6f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column left and the others right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _mode_table(result: dict[str, Any], mode: str) -> str:
    rows = [row for row in result["rows"] if row["mode"] == mode]
    names = list(rows[0]["sizes"])
    varying = [n for n in names if n == result["axis"] or len({row["sizes"][n] for row in rows}) > 1]
    fixed = ", ".join(f"{name} = {rows[0]['sizes'][name]:,}" for name in names if name not in varying)
    heads = ["variant", *varying, "FLOP ratio", "median ms", "20-80 % ms", f"times faster than {result['baseline']}"]
    body = [
        [
            row["label"],
            *(f"{row['sizes'][name]:,}" for name in varying),
            number(row["flop_ratio"]),
            number(row["median_ms"]),
            f"{number(row['p20_ms'])} - {number(row['p80_ms'])}",
            number(row["speedup"]),
            number(row["times_floor"]),
        ]
        for row in rows
    ]
    title = f"## {mode.capitalize()}" + (f" ({fixed})" if fixed else "")
    return f"{title}\n\n{table([*heads, 'times the floor'], body)}"


def _crossover_table(result: dict[str, Any], modes: list[str]) -> str:
    axis = result["axis"]
    lines: dict[tuple[str, tuple[Any, ...]], dict[str, str]] = {}
    for row in result["crossover"]:
        text = f"never up to {row['largest']}" if row["start"] is None else str(row["start"])
        lines.setdefault((row["label"], tuple(row["sizes"].items())), {})[row["mode"]] = text
    several = len({sizes for _, sizes in lines}) > 1
    body = [
        [label + (" " + ", ".join(f"{n}={s}" for n, s in sizes) if several else ""), *(found.get(m, "") for m in modes)]
        for (label, sizes), found in lines.items()
    ]
    return (
        f"## Crossover\n\nThe smallest measured {axis} from which on the variant is always faster than {result['baseline']}.\n\n"
        + table(["variant", *modes], body)
    )


def _disturbed(result: dict[str, Any]) -> list[str]:
    """The groups that are not to be trusted, with the number of repeats."""
    axis = result["axis"]
    rows = (row for row in result["rows"] if row["is_baseline"] and row["disturbed"])
    return [f"{row['disturbed']} at {row['mode']} {axis} = {row['sizes'][axis]}" for row in rows]


def markdown(result: dict[str, Any]) -> str:
    """The report of one run."""
    modes = list(dict.fromkeys(row["mode"] for row in result["rows"]))
    machine, ceilings = result["hardware"], result["ceilings"]
    memory = f"{machine.get('memory_gib', 'unknown')} GiB"
    gpu = f"{machine['gpu']}, {machine['gpu_memory_gib']} GiB; " if "gpu" in machine else ""
    facts = [
        f"Command: `{result['command']}`",
        f"Date: {result['date']}; commit: {result['commit']}",
        f"Hardware: {gpu}{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {memory}",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        f"Ceilings measured in this run: {number(ceilings['flops_per_s'] / 1e9)} GFLOP/s (large matrix product), "
        f"{number(ceilings['bytes_per_s'] / 1e9)} GB/s (large copy, read + written)",
        f"{result['repeats']} repeats, each of every variant of a group in shuffled order; disturbed by other programs: "
        + (", ".join(_disturbed(result)) or "none"),
        "FLOP ratio: of the baseline "
        "to the variant. Times faster: median of the ratios within a repeat. Floor: the larger of FLOPs and fewest bytes over "
        "their ceilings. How to read: benchmarks/README.md",
    ]
    parts = [
        f"# {result['benchmark']}, {result['device']}, {result['dtype']}",
        f"{result['about']} Baseline: {result['baseline']}.",
        "\n".join(f"- {fact}" for fact in facts),
        *(_mode_table(result, mode) for mode in modes),
        _crossover_table(result, modes),
    ]
    return "\n\n".join(parts) + "\n"


def write(result: dict[str, Any], folder: Path) -> tuple[Path, Path]:
    """Writes the pair of files, each to a temporary name first, so that a killed run leaves no half of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['date']}-{result['benchmark']}-{result['device']}-{result['dtype']}"
    texts = {".json": json.dumps(result, indent=1, allow_nan=False) + "\n", ".md": markdown(result)}
    for suffix, text in texts.items():
        temporary = folder / f".{stem}{suffix}.tmp"
        temporary.write_text(text)
        temporary.replace(folder / f"{stem}{suffix}")
    return folder / f"{stem}.json", folder / f"{stem}.md"
