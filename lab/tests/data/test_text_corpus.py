"""The text task on prepared corpora: documents do not know of each other, and scores count alike for any
tokens.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from structattn.cli import main
from structattn.errors import DataError
from structattn.testing.tolerances import SOLVED
from structattn_lab.data.corpus import Bytes, Corpus, PrepareConfig, Source, prepare
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training.evaluate import load_language_model, load_run, load_tokenizer

TINY = {"context_length": 24, "embed_dim": 16, "num_layers": 1, "num_heads": 2, "eval_windows": 9}
WORDS = ["near", "keys", "far", "keys", "rank", "one", "caf\u00e9", "score", "\n"]


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def corpus(request, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "source").mkdir()
    rng = np.random.default_rng(0)
    for i in range(150):
        text = " ".join(rng.choice(WORDS, size=int(rng.integers(2, 25))))
        (root / "source" / f"{i:03d}.txt").write_text(text, encoding="utf-8")
    config = PrepareConfig(
        source=Source(path=str(root / "source")),
        tokens=request.param,
        vocab_size=290,
        validation=0.2,
        test=0.2,
        shard_tokens=400,
    )
    prepare(config, root / "corpus", show_progress=False)
    return root / "corpus"


def made(corpus: Path, spec: str, **options) -> tuple[TextTask, torch.nn.Module]:
    task = TextTask(TextConfig(data=str(corpus), **TINY, **options))
    torch.manual_seed(0)
    model = task.build_model(spec).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return task, model


def by_documents(task: TextTask, model: torch.nn.Module, tokens: list[int], documents: list[int]) -> dict[int, float]:
    """Nats of every predicted token of a window by its position, each document read separately."""
    found, begin = {}, 0
    for place in range(1, len(tokens) + 1):
        if place < len(tokens) and documents[place] == documents[begin]:
            continue
        piece = tokens[begin:place]
        if len(piece) > 1:
            with torch.no_grad():
                logs = model(torch.tensor([piece[:-1]]))[0].log_softmax(-1)
            found |= {begin + i + 1: -float(logs[i, token]) for i, token in enumerate(piece[1:])}
        begin = place
    return found


@pytest.mark.parametrize("spec", ["standard", "mlr:4|2|2", "window:5", "bilinear-btt:1", "mlr-text:4|4@word"])
@pytest.mark.parametrize("rotary", ["", "low_far"])
def test_scores_are_those_of_each_document_alone(corpus, spec, rotary) -> None:
    task, model = made(corpus, spec, rotary=rotary)
    sizes = task.tokenizer.token_sizes()
    windows = task.eval_windows("test")
    nats, units = 0.0, 0
    for tokens, documents in zip(windows.tokens.tolist(), windows.documents.tolist(), strict=True):
        found = by_documents(task, model, tokens, documents)
        nats += sum(found.values())
        units += sum(int(sizes[tokens[place]]) for place in found)
    expected = pytest.approx(nats / units, rel=SOLVED)
    assert task.metric == "nats_per_byte"
    assert task.evaluate(model, "test") == {"nats_per_byte": expected}
    for chunk in (7, 64):
        assert task.evaluate_cached(model, "test", chunk) == {"nats_per_byte": expected}


def test_the_loss_of_a_batch_is_the_mean_of_its_parts(corpus) -> None:
    task, model = made(corpus, "mlr:4|2|2")
    batch = next(b for step in range(99) if "documents" in (b := task.batch(0, step, 8)))
    windows = zip(batch["tokens"].tolist(), batch["documents"].tolist(), strict=True)
    nats = [sum(by_documents(task, model, *window).values()) for window in windows]
    loss = task.loss(model, batch, 0)
    assert loss.item() == pytest.approx(sum(nats) / (8 * 24), rel=SOLVED)
    parts = [task.loss(model, {k: v[i : i + 2] for k, v in batch.items()}, 0) for i in (0, 2, 4, 6)]
    assert (sum(parts) / 4).item() == pytest.approx(loss.item(), rel=SOLVED)


def test_no_document_changes_another(corpus) -> None:
    task, model = made(corpus, "standard")
    batch = next(b for step in range(99) if "documents" in (b := task.batch(0, step, 8)))
    row = next(i for i in range(8) if batch["documents"][i, 0] != batch["documents"][i, -1])
    tokens, documents = batch["tokens"][row : row + 1], batch["documents"][row : row + 1]
    first = documents[0] == documents[0, 0]
    changed = torch.where(first, (tokens + 1) % task.tokenizer.vocab_size, tokens)
    grads = []
    for version in (tokens, changed):
        model.zero_grad()
        task.loss(model, {"tokens": version, "documents": documents}, 0).backward()
        grads.append(model.embedding.weight.grad.clone())
    only_later = ~torch.isin(torch.arange(task.tokenizer.vocab_size), torch.cat([tokens[0][first], changed[0][first]]))
    assert grads[0][only_later].any()
    assert torch.equal(grads[0][only_later], grads[1][only_later])


def test_a_batch_within_documents_is_not_packed(corpus, tmp_path) -> None:
    text = "near keys and far keys " * 40
    (tmp_path / "one.txt").write_text(text)
    task = TextTask(TextConfig(data=str(tmp_path / "one.txt"), **TINY))
    assert set(task.batch(0, 0, 4)) == {"tokens"}


def test_baselines_by_loops(corpus) -> None:
    task = TextTask(TextConfig(data=str(corpus), **TINY))
    sizes, vocab = task.tokenizer.token_sizes(), task.tokenizer.vocab_size
    train = task.splits["train"].read(0, len(task.splits["train"])).tolist()
    windows = task.eval_windows("test")
    unigram, bigram, units = 0.0, 0.0, 0
    pairs = list(zip(train, train[1:], strict=False))
    for tokens, documents in zip(windows.tokens.tolist(), windows.documents.tolist(), strict=True):
        for i in range(1, len(tokens)):
            if documents[i] != documents[i - 1]:
                continue
            a, b = tokens[i - 1], tokens[i]
            unigram -= math.log((train.count(b) + 1) / (len(train) + vocab))
            bigram -= math.log((pairs.count((a, b)) + 1) / (train[:-1].count(a) + vocab))
            units += int(sizes[b])
    found = {row.name: row.metrics["nats_per_byte"] for row in task.baselines()}
    assert found == {"unigram": pytest.approx(unigram / units), "bigram": pytest.approx(bigram / units)}


def test_trained_on_a_corpus_it_generates_without_it(corpus, tmp_path, capsys) -> None:
    moved, run = tmp_path / "moved", tmp_path / "run"
    settings = [f"task.{name}={value}" for name, value in TINY.items()]
    settings += ["training.steps=3", "training.warmup_steps=0", "training.batch_size=2", "task.rotary=low_far"]
    words = [word for setting in settings for word in ("--set", setting)]
    corpus.rename(moved)
    try:
        assert main(["train", "text", "--data", str(moved), "--attention", "mlr:4|2|2", *words, "--out", str(run)]) == 0
        assert "nats_per_byte" in capsys.readouterr().out
        assert main(["evaluate", str(run), "--cache"]) == 0
        assert "nats_per_byte" in capsys.readouterr().out
    finally:
        moved.rename(corpus)
    tokenizer = load_tokenizer(run)
    assert tokenizer.description() == Corpus(corpus).tokenizer.description()
    assert load_language_model(run).vocab_size == tokenizer.vocab_size
    capsys.readouterr()
    assert main(["generate", str(run), "--prompt", "caf\u00e9", "--max-new-tokens", "20", "--seed", "1"]) == 0
    assert "20 tokens in" in capsys.readouterr().err
    with pytest.raises(Exception, match="which is not there: put it back"):
        load_run(run)


def test_characters_of_several_tokens_come_whole(corpus, tmp_path) -> None:
    from structattn.models.sampling import GREEDY
    from structattn_lab.inference.generate import TextGeneration

    class Fixed:
        """Produces the bytes of a text."""

        vocab_size, trunk, context_length = 256, None, 99

        def __init__(self, text: str) -> None:
            self.text = text

        def stream(self, rows, *, max_new_tokens, **options):
            return ([byte] for byte in self.text.encode()[:max_new_tokens])

    def pieces(text: str, **options) -> list[str]:
        model = Fixed(text)
        found = TextGeneration(
            model, ("x",), sampling=GREEDY, tokenizer=Bytes(), max_new_tokens=50, use_cache=False, **options
        )
        return [step[0] for step in found]

    assert pieces("a\u00e9\u20ac!") == ["a", "", "\u00e9", "", "", "\u20ac", "!"]
    assert pieces("a\u00e9bc", stop="\u00e9") == ["a", "", "\u00e9"]


@pytest.mark.parametrize("longer", [0, 1])
def test_documents_of_one_token_leave_nothing_to_score(tmp_path, longer) -> None:
    lines = [json.dumps({"text": chr(33 + i % 90)}) for i in range(900)]
    lines += [
        json.dumps({"text": text}) for text in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st")
    ] * longer
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    config = PrepareConfig(source=Source(path=str(tmp_path / "a.jsonl")), validation=0.3, test=0.3)
    prepare(config, tmp_path / "corpus", show_progress=False)

    def score() -> None:
        task = TextTask(
            TextConfig(data=str(tmp_path / "corpus"), context_length=4, embed_dim=8, num_heads=1, eval_windows=1)
        )
        task.evaluate(task.build_model("standard").eval(), "test")

    with pytest.raises(DataError, match="documents of more than one token"):
        score()


def test_a_run_does_not_go_on_with_other_data(tmp_path: Path, capsys) -> None:
    """A text that was replaced at the same path, of the same length and alphabet, is noticed by its
    content.
    """
    text = tmp_path / "text.txt"
    text.write_text("abcd efgh\n" * 200)
    settings = [f"task.{name}={value}" for name, value in TINY.items()]
    settings += ["training.steps=4", "training.batch_size=2", "training.warmup_steps=0", "training.checkpoint_every=2"]
    command = ["train", "text", "--preset", "smoke", "--data", str(text), "--out", str(tmp_path / "run")]
    command += [part for setting in settings for part in ("--set", setting)]
    assert main(command) == 0
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    text.write_text("abcd efgx\n" * 200)
    capsys.readouterr()
    assert main([*command, "--resume"]) == 2
    assert "was begun with content of the data" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run")]) == 2
    assert "the data have changed" in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--max-new-tokens", "2"]) == 0  # needs no data
    record = tmp_path / "run" / "run.json"  # of a version that did not know the data
    known = json.loads(record.read_text())
    for name in ("format_version", "data", "progress", "signature"):
        del known[name]
    record.write_text(json.dumps(known))
    assert main(["evaluate", str(tmp_path / "run")]) == 0
