"""Baselines as a user meets them: trained, loaded, generated from, compiled."""

from pathlib import Path

import pytest
import torch

import structattn as sa
from structattn.cli import main
from structattn.spec.attention import all_forms
from structattn.testing.tolerances import assert_close
from structattn_lab.training.evaluate import load_language_model

FORMS = {name: all_forms()[name] for name in ("gated-delta", "mla", "pooled", "recent", "tpa")}
pytestmark = pytest.mark.full
SPECS = {
    "mla": "mla:6,rope=4",
    "tpa": "tpa:1,query=2",
    "recent": "recent:5,sinks=2",
    "pooled": "pooled:3,window=5",
    "gated-delta": "gated-delta:4,value=6",
}
SMALL = [
    *("--set", "task.context_length=32", "--set", "task.embed_dim=16", "--set", "task.num_layers=2"),
    *("--set", "task.num_heads=2", "--set", "task.eval_windows=6", "--set", "task.rotary=low_far"),
    *("--set", "training.batch_size=4", "--set", "training.steps=5", "--set", "training.warmup_steps=0"),
    *("--set", "training.eval_every=5"),
]


def test_every_baseline_is_here() -> None:
    assert SPECS.keys() == FORMS.keys()


@pytest.mark.parametrize("spec", SPECS.values())
def test_a_trained_one_is_loaded_and_generates(spec: str, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    assert main(["train", "text", *SMALL, "--attention", spec, "--out", str(run)]) == 0
    capsys.readouterr()
    texts = []
    for options in ([], ["--no-cache"]):
        command = ["generate", str(run), "--prompt", "The ", "--max-new-tokens", "12", "--seed", "3", *options]
        assert main(command) == 0
        texts.append(capsys.readouterr()[0])
    assert texts[0] == texts[1]
    assert texts[0].startswith("The ")
    assert main(["evaluate", str(run), "--cache"]) == 0
    assert load_language_model(run).trunk.cache_numbers(20) > 0


@pytest.mark.parametrize("name", ["mla", "pooled", "gated-delta"])
def test_a_compiled_one_does_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = sa.LanguageModel(
        11, SPECS[name], num_layers=1, embed_dim=16, num_heads=2, context_length=32, rotary=sa.Rotary()
    ).double()
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for length in (9, 13):
        tokens = torch.randint(11, (2, length))
        expected, found = model(tokens), compiled(tokens)
        assert_close(found, expected)
        wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
        for one, other in zip(torch.autograd.grad(found.square().sum(), list(model.parameters())), wanted, strict=True):
            assert_close(one, other, gradient=True)
