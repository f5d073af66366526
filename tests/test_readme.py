"""The examples of the README and the docs run, and their numbers are the code's."""

import re
from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.spec.attention import FORMS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs(capsys) -> None:
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    shapes, saved, levels, cached, generated, fitted = capsys.readouterr().out.splitlines()
    assert shapes.startswith("torch.Size([2, 100, 256])")
    assert 0.3 < float(saved) < 1
    assert levels.startswith("torch.Size([1, 4, 100, 64]) torch.Size([1, 4, 100, 64]) reference: 40000 scores are few")
    assert cached.startswith("20 109 LayerCaches(2 layers, length=109, nbytes=")
    assert generated == "torch.Size([1, 8])"
    assert fitted.startswith("torch.Size([3, 64]) 2048 0.")
    assert fitted.endswith("block coordinate descent, L-BFGS")


def test_the_table_of_variants_is_what_the_code_counts() -> None:
    for form in FORMS.values():
        with torch.device("meta"):
            layer = sa.Attention.from_spec(form.example, embed_dim=256, num_heads=4, context_length=1024)
        cost, params = layer.cost(1024), sum(p.numel() for p in layer.parameters())
        spec = form.example.replace("|", "\\|")
        row = f"| `{spec}` | {params:,} | {cost.flops / 1e6:,.0f} | {cost.key_cache_numbers:,} | {form.meaning} |"
        assert row in README


def test_the_two_commands_exist() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


@pytest.mark.parametrize(("name", "count"), [("family", 11), ("fitting", 3), ("inference", 4), ("mup", 3)])
def test_pages_print_what_they_show(name, count, capsys) -> None:
    page = (Path(__file__).parent.parent / "docs" / f"{name}.md").read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(code, f"{name}.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert all(line in page for line in lines)


def test_pages_link_to_files_that_are_there() -> None:
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
