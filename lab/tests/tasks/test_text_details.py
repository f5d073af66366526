"""Loss by position and attention by distance, against loops."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from structattn.layers.attention import Attention
from structattn.layers.rotary import Rotary
from structattn.models.language_model import LanguageModel
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS
from structattn_lab.tasks.octaves import by_octave, octaves
from structattn_lab.tasks.text.details import attention_by_distance, positions_in_documents
from structattn_lab.tasks.text.task import TextConfig, TextTask


@given(st.integers(1, 2000))
def test_octaves_cover_every_place_once(length: int) -> None:
    ranges = octaves(length)
    assert [place for a, b in ranges for place in range(a, b + 1)] == list(range(1, length + 1))
    assert all(b == 2 * a - 1 for a, b in ranges[:-1])


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_sums_by_octave_by_loops(length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(1, length + 1, (17,), generator=generator)
    values, weights = torch.rand(17, generator=generator), torch.rand(17, generator=generator) + 0.1
    for found, (a, b) in zip(by_octave(values, places, length, weights), octaves(length), strict=True):
        inside = (places >= a) & (places <= b)
        if not inside.any():
            assert found is None
        else:
            assert found == pytest.approx(float(values[inside].sum() / weights[inside].sum()), rel=SAME_MODEL)


def test_positions_begin_anew_in_each_document() -> None:
    documents = torch.tensor([[3, 3, 3, 4, 4, 7], [1, 1, 1, 1, 1, 1], [1, 2, 3, 3, 3, 4]])
    expected = [[1, 2, 3, 1, 2, 1], [1, 2, 3, 4, 5, 6], [1, 1, 1, 2, 3, 1]]
    assert positions_in_documents(documents).tolist() == expected


@pytest.mark.parametrize(
    ("spec", "rotary"),
    [
        ("standard", None),
        ("mlr:2|1|1", Rotary()),
        ("mlr:2|2+window:3", None),
        ("mlr:2|2,values=2|2", None),
        ("bilinear-btt:1", None),
    ],
)
def test_weights_are_what_the_output_is_made_of(spec: str, rotary) -> None:
    torch.manual_seed(0)
    attention = Attention.from_spec(spec, embed_dim=8, num_heads=2, context_length=8, rotary=rotary).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    weights = attention.weights(x)
    assert weights.shape == (2, 2, 7, 7)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 7, dtype=torch.float64))
    assert (weights.triu(1) == 0).all()
    if "values" not in spec:
        out = weights @ attention.project(x)[2]
        torch.testing.assert_close(attention.out_proj(out.transpose(1, 2).flatten(-2)), attention(x))


def test_both_softmaxes_of_a_global_window_are_added() -> None:
    attention = Attention.from_spec("global-window:2|2@3", embed_dim=4, num_heads=1, context_length=8)
    weights = attention.weights(torch.randn(1, 6, 4))
    torch.testing.assert_close(weights.sum(-1), torch.full((1, 1, 6), 2.0))


def test_attention_by_distance_by_loops() -> None:
    torch.manual_seed(1)
    model = LanguageModel(11, "standard", num_layers=2, embed_dim=8, num_heads=2, context_length=16).eval()
    for block in model.trunk.layers:
        torch.nn.init.normal_(block.attention.out_proj.weight)
    pieces = [torch.randint(11, (9,)), torch.randint(11, (5,))]
    found = attention_by_distance(model, pieces)
    sums = torch.zeros(2, 9, dtype=torch.float64)
    for piece in pieces:
        x = model.embedding(piece[None]) + model.trunk.position[: len(piece)]
        for layer, block in enumerate(model.trunk.layers):
            weights = block.attention.weights(block.attention_norm(x)).detach().mean((0, 1))
            x = block(x)
            for i in range(len(piece)):
                for j in range(i + 1):
                    sums[layer, i - j] += float(weights[i, j]) / 14
    for layer, expected in zip(found, sums.tolist(), strict=True):
        ranges = [(0, 0), *octaves(8)]
        assert layer == pytest.approx([sum(expected[a : b + 1]) for a, b in ranges], abs=SIX_DIGITS)
        assert sum(layer) == pytest.approx(1.0)


def test_partitions_by_text_are_looked_at_as_they_were_used(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one two\nthree\n\nfour five\n" * 80)
    task = TextTask(
        TextConfig(data=str(path), context_length=16, embed_dim=8, num_layers=2, num_heads=1, eval_windows=4)
    )
    torch.manual_seed(0)
    model = task.build_model("mlr-text:4|2|2").eval()
    layers = task.details(model)["attention_by_distance"]
    assert [sum(layer) for layer in layers] == pytest.approx([1.0, 1.0])


def test_loss_by_position_is_the_metric_taken_apart(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    task = TextTask(
        TextConfig(
            data=str(path), context_length=8, embed_dim=8, num_layers=1, num_heads=1, eval_windows=12, rotary="low_far"
        )
    )
    torch.manual_seed(0)
    model = task.build_model("mlr:4|4").eval()
    torch.nn.init.normal_(model.read_out.weight)
    details = task.details(model)
    counts = [b - a + 1 for a, b in details["octaves"]]
    mean = sum(n * loss for n, loss in zip(counts, details["loss_by_position"], strict=True)) / sum(counts)
    assert mean == pytest.approx(task.evaluate(model, "test")[task.metric], rel=SAME_MODEL)
    assert len(details["attention_by_distance"]) == 1
    assert math.isclose(sum(details["attention_by_distance"][0]), 1.0, rel_tol=1e-6)
