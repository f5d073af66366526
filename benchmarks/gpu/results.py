"""The results of a run: one JSON file that is written after every row, and the Markdown file and the summary
made from it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.gpu import tile
from benchmarks.gpu.rows import Settings
from benchmarks.report import number, optional_cells, table
from structattn.errors import ConfigError
from structattn.files import write_atomic

FORMAT_VERSION = 1
DONE = ("ok", "unavailable")  # rows of other statuses are done again, after all that were never done
REPRODUCE = "python -m benchmarks.gpu"
MOST_FAILURES = 12  # that the summary shows
SPEED_COLUMNS = ("GFLOP saved", "ms saved", "tokens/s")


@dataclass(kw_only=True)
class Results:
    """What is known so far.

    Attributes:
        path: the JSON file; it keeps the date of the first call.
        facts: the machine, the versions and the commit of the last call.
        rows: the result of each row by name: ``status``, ``seconds``, ``commit`` and numbers of the row.
    """

    path: Path
    facts: dict[str, Any]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def opened(cls, settings: Settings) -> Results:
        """The results of a folder, to be continued.

        Raises:
            ConfigError: the file is damaged, or of another version.
        """
        device = settings.device
        facts = {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": machine.commit(),
            "rehearsal": settings.rehearse,
            "hardware": machine.hardware(device),
            "versions": machine.versions(device),
        }
        found = sorted(settings.folder.glob("????-??-??-gpu*.json"))
        name = f"{facts['date']}-gpu{'-rehearsal' if settings.rehearse else ''}.json"
        results = cls(path=found[0] if found else settings.folder / name, facts=facts)
        if found:
            try:
                content = json.loads(found[0].read_bytes())
                if content["format_version"] != FORMAT_VERSION:
                    raise ValueError(f"expected format version {FORMAT_VERSION}, got {content['format_version']!r}")
                results.rows = {name: dict(row) for name, row in content["rows"].items()}
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise ConfigError(f"{found[0]} cannot be continued: {error}; give another --out") from error
        return results

    def is_done(self, name: str) -> bool:
        """Whether a row need not be done again."""
        return name in self.rows and self.rows[name]["status"] in DONE

    def add(self, name: str, result: Mapping[str, Any]) -> None:
        """Keeps the result of a row, and writes the file."""
        self.rows[name] = {**result, "commit": self.facts["commit"]}
        content = {"format_version": FORMAT_VERSION, **self.facts, "rows": self.rows}
        write_atomic(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def of_part(self, part: str) -> dict[str, dict[str, Any]]:
        """The rows of a part by name."""
        return {name: row for name, row in self.rows.items() if name.partition("/")[0] == part}

    @property
    def searched(self) -> list[dict[str, Any]]:
        """The rows of the search of tiles that were measured."""
        return [row for row in self.of_part("tile").values() if row["status"] == "ok"]


def reproduction(name: str, settings: Settings) -> str:
    """The command that repeats exactly one row."""
    pattern = "".join(f"\\{letter}" if letter in ".+*?()[]{}^$|\\" else letter for letter in name)
    return f"{REPRODUCE} {'--rehearse ' if settings.rehearse else ''}--only '^{pattern}$'"


def _counts(results: Results, total: Mapping[str, int]) -> str:
    body = []
    for part, count in total.items():
        rows = results.of_part(part)
        found = Counter(row["status"] for row in rows.values())
        failed = sum(n for status, n in found.items() if status not in DONE)
        body.append([part, *map(str, (count, found["ok"], failed, found["unavailable"], count - len(rows)))])
    return table(["part", "rows", "ok", "failed", "cannot run here", "not done yet"], body)


def failures(results: Results, settings: Settings, most: int | None = None) -> list[str]:
    """A line for each row that failed, and the command that repeats it."""
    lines = [
        f"- {row['status']}: {name}: {row['message']}\n  `{reproduction(name, settings)}`"
        for name, row in results.rows.items()
        if row["status"] not in DONE
    ]
    if most is not None and len(lines) > most:
        lines = [*lines[:most], f"- and {len(lines) - most} more"]
    return lines


def _checked(results: Results) -> str:
    """The largest error of each mode and dtype."""
    worst: dict[tuple[str, str], float] = {}
    for name, row in results.of_part("check").items():
        if row["status"] == "ok":
            _, mode, _, dtype = name.split("/")
            worst[mode, dtype] = max(worst.get((mode, dtype), 0.0), row["share of tolerance"])
    dtypes = list(dict.fromkeys(dtype for _, dtype in worst))
    modes = list(dict.fromkeys(mode for mode, _ in worst))
    body = [[mode, *(number(worst[mode, x]) if (mode, x) in worst else "" for x in dtypes)] for mode in modes]
    return "Largest error over its tolerance, of the rows that are right:\n\n" + table(["", *dtypes], body)


def _tiles(results: Results) -> str:
    body = [
        [
            row["kernel"],
            row["shape"],
            row["tiles"],
            number(row["median_ms"]),
            "" if row["gain"] is None else number(row["gain"]),
            str(row["tried"]),
        ]
        for row in tile.gains(results.searched)
    ]
    heads = ["kernel", "shape", "fastest tiles", "median ms", "times faster than the rule", "tiles that ran"]
    return table(heads, body)


def _speed(results: Results) -> str:
    body = []
    for name, row in results.of_part("speed").items():
        if row["status"] == "ok":
            one, base = row["variant"], row["baseline"]
            rates = [number(100 * one[f"of_{rate}_rate"]) for rate in ("matmul", "copy")]
            cells = [number(one["median_ms"]), number(base["median_ms"]), base["code"] or base["label"]]
            queued = number(row["queued"]["speedup"]) if "queued" in row else ""
            cells = [number(one["speedup"]), queued, *cells]
            body.append([name.removeprefix("speed/"), *cells, *rates, *optional_cells(one, SPEED_COLUMNS), one["code"]])
    heads = [
        "variant",
        "times faster",
        "without launches",
        "median ms",
        "baseline ms",
        "baseline",
        "% of matmul rate",
        "% of copy rate",
    ]
    return table([*heads, *SPEED_COLUMNS, "code"], body)


def _trained(results: Results) -> str:
    body, metric = [], ""
    for name, row in results.of_part("train").items():
        if row["status"] == "ok":
            metric = row["metric"]
            for spec, one in row["variants"].items():
                cells = [
                    spec,
                    f"{one['score']:.4f}",
                    str(row["steps"]),
                    number(one["tokens_per_s"]),
                    number(one["mfu"]),
                ]
                body.append([name.removeprefix("train/"), *cells])
    return table(["model", "attention", metric, "steps", "tokens/s", "MFU"], body)


def markdown(results: Results, settings: Settings, total: Mapping[str, int]) -> str:
    """The report: facts, all failures, and the tables of each part."""
    facts = results.facts
    lines = [f"- Date: {facts['date']}; commit: {facts['commit']}"]
    lines += [f"- Hardware: {', '.join(f'{name} {value}' for name, value in facts['hardware'].items())}"]
    lines += [f"- Versions: {', '.join(f'{name} {value}' for name, value in facts['versions'].items())}"]
    parts = [f"# GPU{', rehearsed on a CPU' if settings.rehearse else ''}", "\n".join(lines), _counts(results, total)]
    failed = failures(results, settings)
    parts += ["## Failures\n\n" + "\n".join(failed)] if failed else []
    for title, part, text in SECTIONS:
        if any(row["status"] == "ok" for row in results.of_part(part).values()):
            parts.append(f"## {title}\n\n{text(results)}")
    return "\n\n".join(parts) + "\n"


SECTIONS = [
    ("Checks", "check", _checked),
    ("Tiles", "tile", _tiles),
    ("Speed", "speed", _speed),
    ("Training", "train", _trained),
]


def summary(results: Results, settings: Settings, total: Mapping[str, int]) -> str:
    """What fits on a screen: failures first, the counts last."""
    lines = failures(results, settings, MOST_FAILURES)
    for row in tile.gains(results.searched):
        if row["gain"] is not None and row["gain"] > 1:
            lines.append(f"{row['gain']:6.2f} times the rule's speed  {row['kernel']}, {row['shape']}: {row['tiles']}")
    for name, row in results.of_part("speed").items():
        if row["status"] == "ok":
            rate = 100 * max(row["variant"]["of_matmul_rate"], row["variant"]["of_copy_rate"])
            base = row["baseline"]["code"] or row["baseline"]["label"]
            queued = f" ({row['queued']['speedup']:.2f} without launches)" if "queued" in row else ""
            lines.append(f"{row['variant']['speedup']:6.2f} times as fast as {base}{queued}, {rate:.0f} %  {name[6:]}")
    for name, row in results.of_part("train").items():
        for spec, one in row.get("variants", {}).items():
            lines.append(f"{one['score']:6.3f} {row['metric']}  {name[6:]}, {spec}: {one['tokens_per_s']:.0f} tokens/s")
    return "\n".join([*lines, "", _counts(results, total)])
