"""Hooks of the documentation site: pages link to the benchmarks, which are outside of docs/ in the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def on_files(files: Files, config: Any) -> Files:
    """Adds the README and the results of benchmarks/ to the site."""
    for path in [BENCHMARKS / "README.md", *sorted((BENCHMARKS / "results").rglob("*"))]:
        if path.suffix in {".md", ".png", ".json"}:
            uri = path.relative_to(BENCHMARKS.parent).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to ../benchmarks from a page of docs/ is one folder less up on the site, where docs/ is the root."""
    return markdown.replace("](../benchmarks/", "](benchmarks/").replace("](../../benchmarks/", "](../benchmarks/")
