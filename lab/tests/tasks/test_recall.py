"""The recall task: its sequences and scores against definitions by loops, and models that know the answer or
guess.
"""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import structattn as sa
from structattn.cli import main
from structattn.errors import ConfigError
from structattn.seeds import generator
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS
from structattn_lab.records import ComparisonRecord
from structattn_lab.records.common import read_file
from structattn_lab.report.figures.comparison import drawings
from structattn_lab.report.writer import write_figures
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.octaves import octaves
from structattn_lab.tasks.recall.sequences import Vocabulary, log_uniform
from structattn_lab.tasks.recall.task import KINDS, RecallConfig, RecallTask
from structattn_lab.tasks.registry import report_of
from structattn_lab.training.loop import train

TINY = RecallConfig(
    context_length=32, num_pairs=3, num_keys=5, num_values=4, num_fillers=3, embed_dim=8, eval_sequences=100
)


def tiny(**changes) -> RecallTask:
    return RecallTask(replace(TINY, **changes))


def in_single_tokens(row: list[int], words: Vocabulary) -> list[int]:
    """A token that is a pair is its value, and its key the filler before."""
    row = list(row)
    for place, token in enumerate(row):
        if token >= words.first_pair:
            assert row[place - 1] < words.first_key
            key, value = divmod(token - words.first_pair, words.num_values)
            row[place - 1 : place + 1] = words.first_key + key, words.first_value + value
    return row


class Oracle(nn.Module):
    """Logits (B, T, V) from the definition: after a token that came before, the token that followed it the
    first time.
    """

    def __init__(self, words: Vocabulary) -> None:
        super().__init__()
        self.words, self.size = words, len(words)
        self.nothing = nn.Parameter(torch.zeros(()))  # it says the device

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, self.size)
        for tokens_of_row, out in zip(tokens.tolist(), logits, strict=True):
            row = in_single_tokens(tokens_of_row, self.words)
            for place, token in enumerate(row):
                if token in row[:place]:
                    out[place, row[row.index(token) + 1]] = 50.0
        return logits


class Guess(nn.Module):
    """Every token with the same probability, and a random first guess among the values."""

    def __init__(self, words: Vocabulary) -> None:
        super().__init__()
        self.words = words
        self.nothing = nn.Parameter(torch.zeros(()))
        self.made = torch.Generator().manual_seed(0)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, len(self.words)) - 100
        values = slice(self.words.first_value, self.words.first_pair)
        logits[..., values] = 1e-6 * torch.rand(*tokens.shape, self.words.num_values, generator=self.made)
        return logits


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), context_length=st.integers(8, 50), seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_sequences_are_what_they_say(kind: str, data, context_length: int, seed: int) -> None:
    pairs = data.draw(st.integers(1, max(1, context_length // 6)))
    task = RecallTask(
        replace(TINY, kind=kind, context_length=context_length, num_pairs=pairs, num_keys=pairs + seed % 3)
    )
    words, expected = task.words, task.kind.num_pairs
    batch = task.batch(seed, 3, 4)
    assert batch["tokens"].shape == (4, context_length + 1)
    for tokens, queries, distances in zip(
        *(batch[name].tolist() for name in ("tokens", "queries", "distances")), strict=True
    ):
        assert sum(token >= words.first_pair for token in tokens) == (expected if kind == "joined" else 0)
        row = in_single_tokens(tokens, words)
        keys = [i for i, token in enumerate(row) if words.first_key <= token < words.first_value]
        values = [i for i, token in enumerate(row) if token >= words.first_value]
        assert values == [i + 1 for i in keys]  # nothing overlaps
        assert len(queries) == len(set(queries)) == expected
        assert len(keys) == 2 * expected
        for query, distance in zip(queries, distances, strict=True):
            first, second = [i for i in keys if row[i] == row[query]]
            assert second == query  # it never asks for a key that comes later
            assert query - (first + 1) == distance >= 1
            assert row[first + 1] == row[query + 1]
            assert query + 1 <= context_length
    if kind == "passkey":
        assert (batch["queries"] == context_length - 1).all()


def test_distances_are_log_uniform() -> None:
    drawn = log_uniform(126, 200_000, generator("test"))
    assert (int(drawn.min()), int(drawn.max())) == (1, 126)
    for low, high in octaves(126):
        share = float(((drawn >= low) & (drawn <= high)).double().mean())
        assert share == pytest.approx(math.log((high + 1) / low) / math.log(127), abs=0.004)


def test_pairs_that_need_room_change_the_distances_little() -> None:
    task = RecallTask(RecallConfig())
    found = torch.cat([task.batch(0, step, 100)["distances"].flatten() for step in range(5)])
    for low, high in octaves(126):
        share = float(((found >= low) & (found <= high)).double().mean())
        assert share == pytest.approx(math.log((high + 1) / low) / math.log(127), abs=0.025)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_pure_and_splits_differ(kind: str) -> None:
    task = tiny(kind=kind)
    batch, again = task.batch(1, 2, 50), task.batch(1, 2, 50)
    assert batch.keys() == again.keys() == {"tokens", "queries", "distances"}
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    splits = [torch.cat([part["tokens"] for part in task.eval_batches(name)]) for name in ("validation", "test")]
    assert [len(split) for split in splits] == [100, 100]
    for one in (task.batch(1, 3, 50), task.batch(2, 2, 50)):
        assert not torch.equal(batch["tokens"], one["tokens"])
    training = torch.cat([task.batch(0, step, 50)["tokens"] for step in range(20)])
    seen = torch.cat([*splits, training])
    assert len(torch.unique(seen, dim=0)) == len(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_one_who_looks_up_is_right_at_all_distances(kind: str) -> None:
    task = tiny(kind=kind, num_fillers=1)
    oracle = Oracle(task.words)
    scores = task.evaluate(oracle, "test")
    assert scores.pop("nats_per_answer") < SIX_DIGITS
    assert scores == {"accuracy": 1.0, "accuracy_near": 1.0, "accuracy_middle": 1.0, "accuracy_far": 1.0}
    details = task.by_distance(oracle)
    assert details["octaves"] == octaves(30)
    assert details["accuracy_by_distance"] == [1.0] * len(details["octaves"])
    assert task.loss(oracle, task.batch(0, 0, 5), 0) < SIX_DIGITS


@pytest.mark.parametrize("kind", KINDS)
def test_one_who_guesses_is_at_chance_at_all_distances(kind: str) -> None:
    task = tiny(kind=kind, eval_sequences=3000, num_pairs=1)
    chance = task.baselines()[0]
    assert chance.metrics == pytest.approx(
        {"nats_per_answer": math.log(4)}
        | dict.fromkeys(["accuracy", "accuracy_near", "accuracy_middle", "accuracy_far"], 0.25)
    )
    guess = Guess(task.words)
    scores = task.evaluate(guess, "test")
    assert scores.keys() == chance.metrics.keys()
    assert scores.pop("nats_per_answer") == pytest.approx(math.log(4), rel=SIX_DIGITS)
    assert list(scores.values()) == pytest.approx([0.25] * 4, abs=0.05)
    assert task.by_distance(guess)["accuracy_by_distance"] == pytest.approx([0.25] * len(octaves(30)), abs=0.08)


def test_scores_by_loops() -> None:
    task = tiny(num_fillers=2, eval_sequences=70)
    torch.manual_seed(0)
    model = task.build_model("standard").double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    assert task.ranges() == {"near": (1, 3), "middle": (4, 9), "far": (10, 30)}
    nats, right = [], {name: [] for name in ("near", "middle", "far")}
    for batch in task.eval_batches("test"):
        for row, queries, distances in zip(batch["tokens"], batch["queries"], batch["distances"], strict=True):
            with torch.no_grad():
                logits = model(row[None, :-1])[0]
            for query, distance in zip(queries.tolist(), distances.tolist(), strict=True):
                answer = int(row[query + 1])
                nats.append(-math.log(float(logits[query].softmax(-1)[answer])))
                name = next(name for name, (low, high) in task.ranges().items() if low <= distance <= high)
                right[name].append(float(logits[query].argmax() == answer))
    found = task.evaluate(model, "test")
    assert len(nats) == 70 * 3
    every = [one for some in right.values() for one in some]
    expected = {f"accuracy_{name}": sum(some) / len(some) for name, some in right.items()}
    expected |= {"nats_per_answer": sum(nats) / len(nats), "accuracy": sum(every) / len(every)}
    assert found == pytest.approx(expected, rel=SAME_MODEL)
    assert task.evaluate_cached(model, "test", 7) == pytest.approx(found, rel=SAME_MODEL)
    storage = sa.Storage(4, 4, group_size=4, residual=1)
    coarse = task.evaluate_cached(model, "test", 7, storage=storage)
    assert task.evaluate_cached(model, "test", 1, storage=storage) == pytest.approx(coarse, rel=SAME_MODEL)
    assert coarse["nats_per_answer"] != pytest.approx(found["nats_per_answer"], rel=1e-6)
    batch = task.batch(0, 0, 4)
    with torch.no_grad():  # the mean over micro-batches is that of the batch
        one_by_one = [
            float(task.loss(model, {name: value[i : i + 1] for name, value in batch.items()}, 0)) for i in range(4)
        ]
        assert float(task.loss(model, batch, 0)) == pytest.approx(sum(one_by_one) / 4, rel=SAME_MODEL)


@pytest.mark.parametrize("kind", ["associative", "joined"])
def test_the_values_before_by_loops(kind: str) -> None:
    task = tiny(kind=kind)
    shares = []
    for batch in task.eval_batches("test"):
        for tokens, queries in zip(batch["tokens"].tolist(), batch["queries"].tolist(), strict=True):
            row = in_single_tokens(tokens, task.words)
            for query in queries:
                before = [token for token in row[:query] if token >= task.words.first_value]
                shares.append(before.count(row[query + 1]) / len(before))
    found = {row.name: row.metrics for row in task.baselines()}
    assert found["values before"] == pytest.approx(
        {"accuracy": sum(shares) / len(shares), "nats_per_answer": -sum(map(math.log, shares)) / len(shares)}
    )
    assert [row.name for row in tiny(kind="passkey").baselines()] == ["chance"]  # the only value before is the answer


def test_a_range_without_queries_has_no_score() -> None:
    task = tiny(kind="passkey", eval_sequences=1)
    model = task.build_model("standard").eval()
    assert len([name for name in task.evaluate(model, "test") if name.startswith("accuracy_")]) == 1
    found = task.by_distance(model)["accuracy_by_distance"]
    assert len([share for share in found if share is not None]) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "assoziative"}, "unknown task.kind 'assoziative'.*did you mean 'associative'"),
        ({"context_length": 7, "num_pairs": 1}, "task.context_length must be an int of at least 8, got 7"),
        ({"num_keys": 7}, r"task.num_keys: expected at least 8, one for each pair \(task.num_pairs\), got 7: raise it"),
        (
            {"num_pairs": 22},
            r"expected at most 21 in 128 tokens .* got 22: lower it, or give a context of at least 132",
        ),
        ({"num_values": 1}, "task.num_values must be an int of at least 2, got 1"),
        ({"num_fillers": 0}, "task.num_fillers must be an int of at least 1, got 0"),
        ({"num_heads": 3}, "num_heads must divide"),
        ({"rotary": "low_fat"}, "did you mean 'low_far'"),
    ],
)
def test_bad_settings_are_named(changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RecallConfig(**changes)


def test_as_many_pairs_as_fit_have_room() -> None:
    """In every context; a passkey has one pair, whatever the settings of associative sequences are."""
    for context_length in range(8, 40):
        pairs = context_length // 6
        RecallTask(replace(TINY, context_length=context_length, num_pairs=pairs, num_keys=pairs)).batch(0, 0, 40)
    assert tiny(kind="passkey", context_length=8, num_pairs=9, num_keys=1).batch(0, 0, 3)["queries"].shape == (3, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_steps_of_training_leave_the_score_of_all_tokens(kind: str, tmp_path: Path) -> None:
    task = tiny(kind=kind)
    config = TrainingConfig(steps=6, batch_size=8, learning_rate=1e-2, eval_every=3)
    result = train(task, "standard", config, seed=0, run_dir=tmp_path, show_progress=False)
    scores = [entry["validation_nats_per_answer"] for entry in result.progress.history]
    assert len(scores) == 2
    assert scores[1] < scores[0] < math.log(len(task.words))  # that of a model before its first step
    assert math.isfinite(float(task.loss(result.model, task.batch(0, 6, 8), 6).detach()))


@pytest.mark.full
def test_the_smoke_preset_trains_and_draws_its_figures(tmp_path: Path, capsys) -> None:
    few = ["training.steps=4", "training.eval_every=2", "task.eval_sequences=32"]
    options = [word for one in few for word in ("--set", one)]
    assert main(["compare", "recall", "--preset", "smoke", "--out", str(tmp_path / "out"), *options]) == 0
    assert "chance" in capsys.readouterr().out
    record = read_file(ComparisonRecord, tmp_path / "out" / "results.json")
    names = set(write_figures(drawings(record, report_of(record)), tmp_path))
    assert {"accuracy-by-distance", "loss-by-distance", "cache", "decode-time"} <= names
    for row in record.rows:
        assert row.details["decode_ms"] > 0
        assert all(math.isfinite(value) for value in row.metrics.values())
        assert len(row.details["octaves"]) == len(row.details["accuracy_by_distance"])
    task = json.loads((tmp_path / "out" / "results.json").read_text())["config"]["task"]
    assert task == asdict(replace(TINY, **task))
