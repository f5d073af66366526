"""Every Python snippet of the README and the docs runs by itself, and what it prints is on its page."""

import re
import runpy
import shlex
import tomllib
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest
import torch

import structattn as sa
from structattn.layers.build_attention import build_attention
from structattn.layers.layer import LayerShape
from structattn.spec import attention as spec_forms
from structattn.spec.attention import FORMS, all_forms
from structattn_lab.cli.parsing import parse
from structattn_lab.cli.train import TaskCommand
from structattn_lab.settings.overrides import apply_overrides
from structattn_lab.tasks.registry import recipe_for

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A snippet that this file must not run has a comment with the reason in the line before it.
SNIPPET = re.compile(
    r"(?:<!-- not run here: (?P<reason>[^>]+) -->\n+)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def snippets(page: Path) -> list[tuple[int, str]]:
    """The line and the code of every snippet that runs here."""
    text = page.read_text()
    found = [m for m in SNIPPET.finditer(text) if m["reason"] is None]
    return [(text.count("\n", 0, m.start("code")), m["code"]) for m in found]


# In `make test-full` alone.
SLOW = {
    "docs/export.md",
    "docs/fitting.md",
    "docs/neuralforecast.md",
    "docs/serving.md",
    "docs/tutorials/shrink-a-cache.md",
}


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.full] if names(page) in SLOW else []) for page in PAGES if snippets(page)],
    ids=names,
)
def test_snippets_run_by_themselves(page, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spec_forms, "FORMS", dict(FORMS))  # a page adds one
    text = page.read_text()
    for line, code in snippets(page):
        printed = StringIO()  # what the snippet prints, without the progress bars of other packages
        torch.manual_seed(0)
        fresh = {"__name__": "__main__", "print": partial(print, file=printed)}
        exec(compile("\n" * line + code, str(page), "exec"), fresh)
        for shown in printed.getvalue().splitlines():
            assert shown in text, (
                f"the snippet of {names(page)} at line {line} printed {shown!r}, which the page does not show"
            )


def test_snippets_are_found() -> None:
    assert len(snippets(ROOT / "README.md")) == 1
    for name in ("concepts", "tutorials/choose-a-structure", "tutorials/shrink-a-cache", "inference", "family", "mup"):
        assert snippets(ROOT / "docs" / f"{name}.md"), name
    everything = "".join(page.read_text() for page in PAGES)
    assert everything.count("```python") == len(SNIPPET.findall(everything))


def test_the_readme_is_short_enough_to_read() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def test_the_table_of_specs_is_what_the_code_counts() -> None:
    page = (ROOT / "docs" / "specs.md").read_text()
    for form in all_forms().values():
        with torch.device("meta"):
            layer = build_attention(form.example, LayerShape(embed_dim=256, num_heads=4, context_length=1024))
        cost, params = layer.cost(1024), sum(p.numel() for p in layer.parameters())
        spec = form.example.replace("|", "\\|")
        row = f"| `{spec}` | {params:,} | {cost.flops / 1e6:,.0f} | {cost.cache_numbers:,} | {form.meaning} |"
        assert row in page


def test_the_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"^make (\w+)|`make (\w+)`", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(targets) >= 3
    for target in (first or second for first, second in targets):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    demo = re.findall(r"structattn compare (\S+) --preset (\S+)", makefile)
    assert len(demo) == 2
    for task, preset in demo:
        assert len(recipe_for(task, preset).attention) >= 2


def test_commands_in_pages_are_understood() -> None:
    pages = [page for page in PAGES if page.name != "commands.md"]  # which has brackets for what may be left out
    found = 0
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        fenced = "".join(re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
        for line in re.findall(r"^(structattn .*)$", fenced, re.MULTILINE) + re.findall(
            r"^ {4}(structattn .*)$", text, re.MULTILINE
        ):
            command = parse(shlex.split(line, comments=True)[1:])
            if isinstance(command, TaskCommand):
                command.fill()
                apply_overrides(recipe_for(command.task, command.preset), command.set)
            found += 1
    assert found > 30


def test_names_in_pages_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    found = set(re.findall(r"(?:`|::: |from |import )((?:sa|structattn|structattn_lab)(?:\.\w+)+)", text))
    assert len(found) > 50
    for name in sorted(found):
        if not name.startswith("structattn.integrations.kvpress") or find_spec(
            "kvpress"
        ):  # which excludes the extra hf
            resolve_name(re.sub(r"^sa\b", "structattn", name))


def test_every_public_name_has_its_docstring_on_the_site() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    for name in sa.__all__:
        if isinstance(getattr(sa, name), ModuleType | str):
            continue
        assert re.search(rf"^::: structattn\.{name}\b", pages, flags=re.MULTILINE), name


def test_files_named_for_contributors_are_there() -> None:
    for page in ("CONTRIBUTING.md", "docs/architecture.md"):
        named = re.findall(r"`((?:src|lab|tests|benchmarks|docs)[\w/.]*)`", (ROOT / page).read_text())
        assert len(named) > 15
        for path in named:
            assert (ROOT / path).exists(), f"{page} names {path}"


def test_every_page_is_once_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        entry = rf"[ :-] {page.relative_to(ROOT / 'docs')}$"
        assert len(re.findall(entry, navigation, flags=re.MULTILINE)) == 1, f"{page.name} in mkdocs.yml"


def links(page: Path) -> list[str]:
    """The targets of a page, without what follows #."""
    text = re.sub(r"^```.*?^```$|`[^`]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r"^\[[\w.]+\]: (\S+)$", text, re.MULTILINE)
    return [target.partition("#")[0] for target in found]


def test_pages_link_to_files_that_are_there() -> None:
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        for target in links(page):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{names(page)} links to {target}"


def test_links_of_the_readme_work_on_a_package_index_and_name_files_that_are_here() -> None:
    repository = PROJECT["urls"]["Repository"]
    here = re.compile(
        rf"(?:{repository}/blob|{repository.replace('github.com', 'raw.githubusercontent.com')})/main/(.+)"
    )
    targets = links(ROOT / "README.md")
    assert len(targets) > 15
    assert all(target.startswith("https://") for target in targets)
    files = [match[1] for target in targets if (match := here.fullmatch(target))]
    assert len(files) > 10
    for file in [*files, *(match[1] for url in PROJECT["urls"].values() if (match := here.fullmatch(url)))]:
        assert (ROOT / file).is_file(), f"the README or pyproject.toml links to {file}"
    text = (ROOT / "README.md").read_text()
    defined = re.findall(r"^\[(\w+)\]: ", text, re.MULTILINE)
    assert sorted(defined) == sorted(set(re.findall(r"\]\[(\w+)\]", text)))


def test_the_citation_has_the_version_and_the_repository_of_the_package() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {PROJECT['version']}\n" in citation
    assert f'\nrepository-code: "{PROJECT["urls"]["Repository"]}"\n' in citation
    title = re.search(r"title\s*= \{(.*)\}", (ROOT / "README.md").read_text())
    assert title is not None
    assert f'title: "{title[1]}"' in citation


def test_the_changelog_has_its_sections_and_dates() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert len(versions) >= 2
    for version in versions:
        heading = re.match(r"\[([\d.]+)\] - .*\d{4}-\d{2}-\d{2}", version)
        assert heading, version.splitlines()[0]
        sections = re.findall(r"^### (.*)$", version, re.MULTILINE)
        assert sections == [name for name in ("Breaking", "Fixed", "Added", "Faster") if name in sections]
        assert f"\n[{heading[1]}]: {PROJECT['urls']['Repository']}/" in text


def test_the_picture_of_levels_is_drawn_from_a_layout(monkeypatch, tmp_path) -> None:
    script = runpy.run_path(
        str(ROOT / "docs" / "draw_levels.py")
    )  # asserts that the colour of each pair is its shared rank
    monkeypatch.setitem(script["draw"].__globals__, "IMAGE", tmp_path / "levels.png")
    script["draw"]()
    assert (tmp_path / "levels.png").stat().st_size > 20_000
