"""What several commands print, and what they need."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from structattn.errors import MissingDependencyError


def require_extra() -> None:
    """Says which extra is missing instead of a bare ImportError deep inside a run."""
    for name in ("accelerate", "jinja2", "matplotlib", "pandas", "tabulate", "tensorboard", "tqdm"):
        if importlib.util.find_spec(name) is None:  # importing all of them would take seconds
            raise MissingDependencyError(
                f"{name} is not installed: pip install 'structattn[train]' brings all that training needs"
            )


def print_paths(folder: Path, report: Path) -> None:
    print(f"results  {folder / 'results.json'}")
    print(f"figures  {folder / 'figures'}")
    print(f"report   {report}")


def print_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"test {name:<20} {value:.6g}")
