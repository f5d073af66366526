"""Results as files: JSON with every sample, Markdown with the tables, a figure where there is a line to
draw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import figure

Row = dict[str, Any]

# Columns that a table has if one of its rows does: head to the key of a row and its unit.
OPTIONAL_COLUMNS = {
    "GFLOP saved": ("flops_saved", 1e9),
    "ms saved": ("ms_saved", 1),
    "tokens/s": ("tokens_per_s", 1),
    "cache bytes per token": ("cache_bytes_per_token", 1),
    "times smaller": ("cache_ratio", 1),
    "MiB between processes": ("wire_bytes", 2**20),
    "times fewer": ("wire_ratio", 1),
    "peak MiB": ("peak_bytes", 2**20),
    "of the baseline's": ("peak_ratio", 1),
    "peak of tensors MiB": ("tensor_bytes", 2**20),
    "of the baseline's tensors": ("tensor_ratio", 1),
}


def crossovers(rows: list[Row], axis: str) -> list[Row]:
    """For every variant: the smallest measured size from which on it is always faster than the baseline.

    Args:
        rows: of all groups.
        axis: the name of the size.

    Returns:
        Rows with mode, label, the other sizes, ``start`` (``None``: not even at the largest) and ``largest``.
    """
    found = []
    for (mode, label, others), line in _lines([row for row in rows if not row["is_baseline"]], axis).items():
        start = None
        for row in sorted(line, key=lambda row: -row["sizes"][axis]):
            if row["speedup"] <= 1:
                break
            start = row["sizes"][axis]
        largest = max(row["sizes"][axis] for row in line)
        found.append({"mode": mode, "label": label, "sizes": dict(others), "start": start, "largest": largest})
    return found


def _lines(rows: list[Row], axis: str) -> dict[tuple[str, str, tuple[Any, ...]], list[Row]]:
    """The rows of each mode, label and set of other sizes."""
    lines: dict[tuple[str, str, tuple[Any, ...]], list[Row]] = {}
    for row in rows:
        others = tuple((name, size) for name, size in row["sizes"].items() if name != axis)
        lines.setdefault((row["mode"], row["label"], others), []).append(row)
    return lines


def exponents(rows: list[Row], axis: str, fit: tuple[int, int]) -> list[Row]:
    """For every variant with 3 sizes or more in a range: p of the law median = c * size^p, by least squares
    in logarithms.

    Args:
        rows: of all groups.
        axis: the name of the size.
        fit: the range of sizes, both ends included.

    Returns:
        Rows with mode, label, the other sizes, ``exponent`` and ``points``, the number of sizes.
    """
    found = []
    for (mode, label, others), line in _lines(rows, axis).items():
        inside = [row for row in line if fit[0] <= row["sizes"][axis] <= fit[1]]
        if len(inside) < 3:
            continue
        x, y = ([math.log(value) for value in values] for values in _points(inside, axis))
        mean = sum(x) / len(x)
        slope = sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x)
        found.append({"mode": mode, "label": label, "sizes": dict(others), "exponent": slope, "points": len(x)})
    return found


def _points(rows: list[Row], axis: str) -> tuple[list[float], list[float]]:
    return [row["sizes"][axis] for row in rows], [row["median_ms"] for row in rows]


def number(value: float) -> str:
    """Three significant digits, without exponents: 0.0123, 1.23, -1,230."""
    digits = f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return digits if "e" not in digits else f"{value:.6f}"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column left and the others right."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def optional_cells(row: Row, heads: Iterable[str]) -> list[str]:
    """The cells of a row under some heads of ``OPTIONAL_COLUMNS``: empty where the row, perhaps of an older
    file, has no such value.
    """
    columns = (OPTIONAL_COLUMNS[head] for head in heads)
    return [number(row[key] / unit) if key in row else "" for key, unit in columns]


def mode_table(result: dict[str, Any], mode: str) -> str:
    """The section of one mode: its title and its table."""
    rows = [row for row in result["rows"] if row["mode"] == mode]
    names = list(rows[0]["sizes"])
    varying = [n for n in names if n == result["axis"] or len({row["sizes"][n] for row in rows}) > 1]
    fixed = ", ".join(f"{name} = {rows[0]['sizes'][name]:,}" for name in names if name not in varying)
    heads = ["variant", *varying, "FLOP ratio", "median ms", "20-80 % ms", f"times faster than {result['baseline']}"]
    heads.append("times the floor")
    optional = [head for head, (key, _) in OPTIONAL_COLUMNS.items() if any(key in row for row in rows)]
    heads += optional
    body = [
        [
            row["label"],
            *(f"{row['sizes'][name]:,}" for name in varying),
            number(row["flop_ratio"]),
            number(row["median_ms"]),
            f"{number(row['p20_ms'])} - {number(row['p80_ms'])}",
            number(row["speedup"]),
            number(row["times_floor"]),
            *optional_cells(row, optional),
        ]
        for row in rows
    ]
    title = f"## {mode.capitalize()}" + (f" ({fixed})" if fixed else "")
    return f"{title}\n\n{table(heads, body)}"


def _variants_by_mode(cells: list[tuple[Row, str]], modes: list[str]) -> str:
    """A table with a line per variant and a column per mode, from rows with mode, label and sizes, and their
    texts.
    """
    lines: dict[tuple[str, tuple[Any, ...]], dict[str, str]] = {}
    for row, text in cells:
        lines.setdefault((row["label"], tuple(row["sizes"].items())), {})[row["mode"]] = text
    of_all = set.intersection(*(set(sizes) for _, sizes in lines))  # they are said above the tables
    body = [
        [
            " ".join((label, ", ".join(f"{n}={s}" for n, s in sizes if (n, s) not in of_all))).rstrip(),
            *(found.get(m, "") for m in modes),
        ]
        for (label, sizes), found in lines.items()
    ]
    return table(["variant", *modes], body)


def _crossover_table(result: dict[str, Any], modes: list[str]) -> str:
    axis = result["axis"]
    cells = [
        (row, f"never up to {row['largest']}" if row["start"] is None else str(row["start"]))
        for row in result["crossover"]
    ]
    return (
        f"## Crossover\n\nThe smallest measured {axis} from which on the variant is always faster than "
        f"{result['baseline']}.\n\n" + _variants_by_mode(cells, modes)
    )


def _exponent_table(result: dict[str, Any]) -> str:
    axis, (low, high) = result["axis"], result["fit"]
    modes = list(dict.fromkeys(row["mode"] for row in result["exponents"]))
    cells = [(row, f"{row['exponent']:.2f}") for row in result["exponents"]]
    return (
        f"## Exponent\n\np of the law median time = c * {axis}^p, fitted from {axis} = {low} to {high}, other sizes as "
        "they are.\n\n" + _variants_by_mode(cells, modes)
    )


def _disturbed(result: dict[str, Any]) -> list[str]:
    """The groups that are not to be trusted, with the number of repeats."""
    names = [result["axis"], *figure.varying(result["rows"], result["axis"])]
    rows = (row for row in result["rows"] if row["is_baseline"] and row["disturbed"])
    return [
        f"{row['disturbed']} at {row['mode']} "
        + " ".join(f"{n} = {row['sizes'][n]}" for n in names if n in row["sizes"])
        for row in rows
    ]


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
        f"{result['repeats']} repeats, each of every variant of a group in shuffled order; disturbed by other "
        "programs: " + (", ".join(_disturbed(result)) or "none"),
        "FLOP ratio: of the baseline to the variant. Times faster: median of the ratios within a repeat. Saved: "
        "baseline less variant for one call, below 0 where "
        "the variant takes more; ms: median of the differences within a repeat. Floor: the larger of FLOPs and fewest "
        "bytes over their ceilings. How to read: benchmarks/README.md",
    ]
    codes: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["code"] and row["label"] not in codes.setdefault(row["code"], []):
            codes[row["code"]].append(row["label"])
    facts += [f"Code {code}: {', '.join(labels)}" for code, labels in codes.items()]
    facts += [f"Left out: {line}" for line in result["left_out"]]
    parts = [
        f"# {result['benchmark']}, {result['device']}, {result['dtype']}",
        f"{result['about']} Baseline: {result['baseline']}.",
        "\n".join(f"- {fact}" for fact in facts),
        *(mode_table(result, mode) for mode in modes),
        _crossover_table(result, modes),
        *([_exponent_table(result)] if result["exponents"] else []),
    ]
    return "\n\n".join(parts) + "\n"


def write(result: dict[str, Any], folder: Path) -> tuple[Path, ...]:
    """Writes the files, each to a temporary name first, so that a killed run leaves no half of a file.

    Returns:
        The JSON file, the Markdown file and, where the axis has 3 sizes or more, the PNG file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{result['date']}-{result['benchmark']}-{result['device']}-{result['dtype']}"
    stem += "-quick" if result["quick"] else ""  # it must not replace the whole measurement of that day
    contents = {".json": json.dumps(result, indent=1, allow_nan=False).encode() + b"\n"}
    contents[".md"] = markdown(result).encode()
    picture = figure.png(result)
    if picture is not None:
        contents[".png"] = picture
    for suffix, content in contents.items():
        temporary = folder / f".{stem}{suffix}.tmp"
        temporary.write_bytes(content)
        temporary.replace(folder / f"{stem}{suffix}")
    return tuple(folder / f"{stem}{suffix}" for suffix in contents)
