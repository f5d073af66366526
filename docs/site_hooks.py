"""Hooks of the documentation site, which make the pages of the repository render as they do there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def on_files(files: Files, config: Any) -> Files:
    """Adds the README and the results of benchmarks/, which is outside of docs/, to the site."""
    for path in [BENCHMARKS / "README.md", *sorted((BENCHMARKS / "results").rglob("*"))]:
        if path.suffix in {".md", ".png", ".json"}:
            uri = path.relative_to(BENCHMARKS.parent).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to benchmarks/ are one folder less up on the site. In tables ``mlr:32\\|8`` needs its backslash elsewhere, but not here."""
    markdown = markdown.replace("](../benchmarks/", "](benchmarks/").replace("](../../benchmarks/", "](../benchmarks/")
    return re.sub(r"^\|.*$", _unescape_code, markdown, flags=re.MULTILINE)


def _unescape_code(row: re.Match[str]) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0])
