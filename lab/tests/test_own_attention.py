"""An attention variant of another package, through every command: found by its entry point, or by the module
that a variable names.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from structattn import extensions
from structattn.cli import main
from structattn.errors import ConfigError, NotRegisteredError
from structattn.spec import parse_spec
from structattn.spec.attention import FORMS
from structattn_lab.training.evaluate import load_run

MODULE = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from structattn.layers import AttentionLayer, CustomAttention
from structattn.spec import Form, named, number


class DecayLayer(AttentionLayer):
    def __init__(self, rate, shape):
        super().__init__(shape.embed_dim, shape.num_heads)
        self.rate = rate
        self.qkv_proj = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias=False)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=False)

    def mix(self, x):
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        distance = steps[:, None] - steps
        bias = (-self.rate * distance).masked_fill(distance < 0, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Decay(CustomAttention):
    rate: float

    def build(self, shape):
        return DecayLayer(self.rate, shape)

    def __str__(self):
        return f"decay:{self.rate:g}"


FORM = Form("decay:RATE", "decay:0.1", "scores fall by RATE per token", value=named("rate", number), make=Decay)
"""
SMOKE = ["text", "--preset", "smoke", "--set", "training.steps=2", "--set", "training.eval_every=1"]


def forget() -> None:
    """As in a process that has not looked for other packages yet."""
    FORMS.pop("decay", None)
    extensions.installed.cache_clear()
    extensions._imported.clear()


@pytest.fixture(autouse=True)
def _nothing_is_known():
    forget()
    yield
    forget()


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """An installed package with the variant: a module and its metadata, on the path of this process and of
    its workers.
    """
    folder = tmp_path / "site"
    metadata = folder / "decay_attention-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / "decay_attention.py").write_text(MODULE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: decay-attention\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[structattn.attention]\ndecay = decay_attention:FORM\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    return folder


@pytest.mark.full
def test_a_package_is_compared_continued_and_evaluated(package, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    words = ["compare", *SMOKE, "--attention", "standard", "decay:0.1", "--jobs", "2", "--out", str(out)]
    assert main(words) == 0
    record = json.loads((out / "results.json").read_text())
    assert [row["spec"] for row in record["rows"]] == ["standard", "decay:0.1"]
    assert record["rows"][1]["cache_numbers"] is None
    printed = capsys.readouterr().out
    assert "decay:0.1" in printed
    run = next((out / "runs").glob("decay*/seed-0*"))
    # Killed in the middle: results and weights of one run are gone.
    for path in (out / "results.json", run / "run.json"):
        path.unlink()
    forget()
    assert main([*words, "--resume"]) == 0
    again = json.loads((out / "results.json").read_text())
    assert [row["scores"] for row in again["rows"]] == [row["scores"] for row in record["rows"]]
    forget()
    assert main(["evaluate", str(run)]) == 0
    capsys.readouterr()
    assert main(["generate", str(run), "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out.strip("\n")) <= 4


def test_a_run_of_a_package_that_is_not_here_is_not_damaged(package, tmp_path, capsys, monkeypatch) -> None:
    out = tmp_path / "run"
    assert main(["train", *SMOKE, "--attention", "decay:0.1", "--out", str(out)]) == 0
    (package / "decay_attention-1.0.dist-info" / "entry_points.txt").unlink()
    forget()
    with pytest.raises(NotRegisteredError, match="the form 'decay' is not registered"):
        load_run(out)
    capsys.readouterr()
    for words in (
        ["evaluate", str(out)],
        ["generate", str(out)],
        ["train", *SMOKE, "--attention", "decay:0.1", "--resume"],
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "the form 'decay' is not registered: install the package that defines it" in error
        assert "damaged" not in error
        assert error.count("\n") == 1


def test_a_module_is_named_by_a_variable(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_decay.py").write_text(f"{MODULE}\nfrom structattn.spec import add_form\nadd_form('decay', FORM)\n")
    with pytest.raises(ConfigError, match="is not registered"):
        parse_spec("decay:0.1")
    monkeypatch.setenv("STRUCTATTN_IMPORT", "my_decay")
    assert str(parse_spec("decay:0.2")) == "decay:0.2"
    assert main(["train", *SMOKE, "--attention", "decay:0.1", "--out", "run"]) == 0
    capsys.readouterr()
    monkeypatch.setenv("STRUCTATTN_IMPORT", "no_such_module")
    forget()
    assert main(["evaluate", "run"]) == 2
    assert "STRUCTATTN_IMPORT=no_such_module: the module cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ("decay = no_such_module:FORM", "cannot be imported from no_such_module:FORM"),
        ("decay = decay_attention:NOTHING", "cannot be imported from decay_attention:NOTHING"),
        ("decay = decay_attention:MODULES", "cannot be imported|must be"),
    ],
)
def test_a_package_that_is_broken_is_named_and_breaks_nothing_else(package, capsys, points, message) -> None:
    (package / "decay_attention-1.0.dist-info" / "entry_points.txt").write_text(f"[structattn.attention]\n{points}\n")
    with pytest.raises(ConfigError, match=message):
        parse_spec("decay:0.1")
    assert str(parse_spec("mlr:8|8")) == "mlr:8|8"
    assert main(["specs"]) == 0
    assert "mlr:" in capsys.readouterr().out
