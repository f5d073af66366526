"""Hooks of the documentation site, which make the pages of the repository render as they do there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


def on_config(config: Any) -> Any:
    """The address of the repository and the version, which every page shows, are those of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = project["urls"]["Repository"]
    config.repo_name = f"{project['name']} {project['version']}"
    config.copyright = f'<a href="{config.repo_url}">{config.repo_name}</a>, {project["license"]}'
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the changelog, and the README and the results of benchmarks/, which are outside of docs/, to the
    site.
    """
    files.append(File.generated(config, "CHANGELOG.md", abs_src_path=str(ROOT / "CHANGELOG.md")))
    for path in [BENCHMARKS / "README.md", *sorted((BENCHMARKS / "results").rglob("*"))]:
        if path.suffix in {".md", ".png", ".json"}:
            uri = path.relative_to(BENCHMARKS.parent).as_posix()
            files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to benchmarks/ are one folder less up on the site, and those of the changelog to docs/ one less
    down. In tables ``mlr:32\\|8`` needs its backslash elsewhere, but not here.
    """
    markdown = markdown.replace("](../benchmarks/", "](benchmarks/").replace("](../../benchmarks/", "](../benchmarks/")
    if page.file.src_uri == "CHANGELOG.md":
        markdown = markdown.replace("](docs/", "](")
    return re.sub(r"^\|.*$", _unescape_code, markdown, flags=re.MULTILINE)


def _unescape_code(row: re.Match[str]) -> str:
    return re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), row[0])
