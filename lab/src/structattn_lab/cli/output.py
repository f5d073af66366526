"""What several commands print, and what they need."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from structattn.errors import MissingDependencyError
from structattn.extras import install_command

if TYPE_CHECKING:  # imports PyTorch
    from structattn_lab.records.common import Results


def summary_of(kind: type[Any]) -> str:
    """The first paragraph of a docstring, in one line."""
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())


def require_extra() -> None:
    """Says which extra is missing instead of a bare ImportError deep inside a run."""
    for name in ("accelerate", "jinja2", "matplotlib", "pandas", "tabulate", "tensorboard", "tqdm"):
        if importlib.util.find_spec(name) is None:  # importing all of them would take seconds
            raise MissingDependencyError(
                f"{name} is not installed: {install_command('train')} brings all that training needs"
            )


def print_results(text: str, results: Results[Any]) -> None:
    print(f"\n{text}\n")
    print(f"results  {results.folder / 'results.json'}")
    print(f"figures  {results.folder / 'figures'}")
    print(f"report   {results.report}")


def print_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"test {name:<20} {value:.6g}")
