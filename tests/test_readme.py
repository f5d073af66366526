"""The README's example runs, and its numbers are the code's."""

import re
from pathlib import Path

import torch

import structattn as sa
from structattn.spec import FORMS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs(capsys) -> None:
    code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code) == 1
    exec(compile(code[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.startswith("torch.Size([2, 100, 256])")
    assert 0.3 < float(printed.split()[-1]) < 1


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
