"""From a trained model of transformers to the same model with a smaller cache: text, calibration, training,
report, checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from structattn.checks import check_bool, check_int, check_number, check_path, check_size, check_type, quoted
from structattn.errors import ConfigError, DataError
from structattn.files import TEMPORARY, write_atomic
from structattn_lab.compare.comparison import FREE, compare
from structattn_lab.compare.model_card import README, model_card
from structattn_lab.data.corpus import Corpus, PrepareConfig, Source, prepare
from structattn_lab.data.corpus.corpus import MANIFEST
from structattn_lab.data.trained_models import checked_config, model_folder
from structattn_lab.records.common import Results
from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.settings.overrides import Change, apply_overrides
from structattn_lab.settings.recipe import Recipe
from structattn_lab.tasks.factory import TaskFactory
from structattn_lab.tasks.registry import factory_of, recipe_for
from structattn_lab.tasks.uptraining.students import check_student
from structattn_lab.training.finished import read_finished

MODEL, CORPUS, RESULTS = "model", "corpus", "results"
_TASK = "uptraining"
# Of the steps, on attention only; what was tried is in docs/results/uptraining.md.
_ATTENTION_SHARE = 0.8

# A text of one or few files is cut: whole documents are held out, so there must be some for validation and
# test.
_PARTS = 200
_SHORTEST_PART = 1000  # characters
_COMPRESSION = 4.0
_FEWEST_STEPS = 2
_MOST_TOKENS = 2**53
# The options of the command line that give a setting.
_OPTIONS = {
    "task.model": "MODEL",
    "task.data": "--data",
    "task.context_length": "--context-length",
    "task.lora_rank": "--lora-rank",
    "training.steps": "--tokens",
    "training.batch_size": "--batch-size",
    "training.learning_rate": "--learning-rate",
    "attention": "--attention or --compression",
}


@dataclass(frozen=True, kw_only=True)
class Uptrained:
    """What ``uptrain`` wrote.

    Attributes:
        model: the folder of the checkpoint, for ``load_structurized``.
        results: the comparison with the teacher: its record and the folder of its report.
    """

    model: Path
    results: Results[ComparisonRecord]


def uptrain(
    model: str | Path,
    data: str | Path,
    out: Path,
    *,
    tokens: int,
    compression: float | None = None,
    context_length: int = 2048,
    batch_size: int = 4,
    learning_rate: float = 5e-4,
    lora_rank: int = 0,
    attention: str = "",
    document_start: str = "",
    changes: tuple[str, ...] = (),
    resume: bool = False,
    command: str = "",
    show_progress: bool = True,
    on_open: Callable[[Path, str], None] | None = None,
) -> Uptrained:
    """Gives a trained model a smaller key/value cache and trains it, with the given one as its teacher.

    Args:
        model: the teacher: a folder that ``save_pretrained`` of transformers wrote, or a name on the hub; any
            decoder that ``structurize`` knows.
        data: text to train on: a file or a folder of text, JSON lines or Parquet, or a corpus with the tokens
            of the model. A document longer than a 200th of the text is cut.
        out: the folder, new or empty: ``corpus`` (tokens), ``results`` (runs, curves, report.html) and
            ``model`` (the checkpoint).
        tokens: to train on; rounded to whole steps of ``batch_size * context_length``, of which there are at
            least two.
        compression: how many times smaller keys and values are at ``context_length``, by far tokens and bits
            that are chosen for each key head. Default: 4, unless ``attention`` is given.
        context_length, batch_size: of a step. The context length is at most the number of positions of the
            model.
        learning_rate: the highest. The best one falls with the width: 2e-3 at width 256 in
            docs/results/uptraining.md; no large model was measured.
        lora_rank: train adapters of this rank on attention only, merged at the end. Default 0: all weights.
        attention: the student, instead of ``compression``: a form of the task ``uptraining``, such as
            ``"mlr:32|16|16,values=32|16|16"`` for a model whose heads have 64 dimensions, to which the ranks
            of keys and those of values sum.
        document_start: in text files, a line that begins with this begins a document. Default: a file is one,
            and long ones are cut.
        changes: further settings, such as ``("task.distillation=0", "training.eval_every=50")``.
        resume: continue what ``out`` holds; it may hold nothing yet.
        command: the command line, for the record.
        show_progress: progress bars on stderr.
        on_open: called with the folder, and with what it takes in words, once both are known to be right,
            before anything is written.

    Raises:
        ConfigError: the folder has files and ``resume`` is off; the model cannot be loaded or structurized,
            or has fewer positions than a window; no ranks give the compression, or both it and ``attention``
            are given; fewer tokens than two steps; a setting is out of its range, or is that of an argument.
        DataError: the text cannot be read, or is shorter than one window.
        TrainingDivergedError: the loss or a weight is not finite; the last checkpoint is from before that.

    Cost: of training the model on ``tokens``, and a forward pass of the teacher for each.
    """
    check_size("tokens", tokens, _MOST_TOKENS)
    check_size("context_length", context_length)
    check_size("batch_size", batch_size)
    check_number("learning_rate", learning_rate, above=0)
    check_int("lora_rank", lora_rank, minimum=0)
    check_bool("resume", resume)
    for name, text in (("attention", attention), ("document_start", document_start), ("command", command)):
        check_type(name, text, str, "a text")
    if compression is not None:
        check_number("compression", compression, minimum=1)
        if attention:
            raise ConfigError(
                f"--compression {compression:g} and --attention {quoted(attention)} both say what the student is: give "
                "one of the two"
            )
    out, data = check_path("out", out), check_path("data", data)
    _check_changes(changes)
    steps = _whole_steps(tokens, batch_size, context_length)
    _check_folder(out, resume, command)
    is_corpus = (data / MANIFEST).is_file()
    if is_corpus and document_start:
        raise ConfigError(
            f"--document-start is for text, and {data} is a corpus, which has its documents already: leave it out"
        )
    corpus = data if is_corpus else out / CORPUS
    recipe = _recipe(
        str(model),
        corpus,
        steps,
        context_length=context_length,
        batch_size=batch_size,
        learning_rate=learning_rate,
        lora_rank=lora_rank,
    )
    student = attention or f"tokens:{_COMPRESSION if compression is None else compression:g}"
    recipe = apply_overrides(replace(recipe, attention=(student,)), tuple(changes))
    config = checked_config(str(model), context_length, "--context-length")
    check_student(student, config, context_length)
    source = None if is_corpus else _source(data, corpus, document_start)
    if on_open is not None:
        on_open(out, f"{steps * batch_size * context_length:,} tokens, {steps:,} steps")
    if source is None:
        Corpus(data)
    else:
        prepare(
            PrepareConfig(source=source, tokens="model", model=str(model)),
            corpus,
            resume=resume,
            show_progress=show_progress,
        )
    tasks = factory_of(_TASK)
    with _naming_options():
        results = compare(
            tasks,
            recipe,
            out / RESULTS,
            command=command,
            resume=resume,
            show_progress=show_progress,
            free=tuple(name for name in FREE if name != "attention"),  # the model is of one student
        )
    folder = out / MODEL
    if not folder.is_dir():
        _write_model(tasks, recipe, results, data.name, folder)
    return Uptrained(model=folder, results=results)


def _recipe(
    model: str, corpus: Path, steps: int, *, context_length: int, batch_size: int, learning_rate: float, lora_rank: int
) -> Recipe:
    """The default preset with what the arguments say."""
    base: Recipe = recipe_for(_TASK, "default")
    task = replace(
        base.task,
        model=model,
        data=str(corpus),
        context_length=context_length,
        lora_rank=lora_rank,
        attention_steps=0 if lora_rank else int(steps * _ATTENTION_SHARE),
    )
    training = base.training.replaced(
        steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        eval_every=max(1, steps // 20),
        checkpoint_every=max(1, steps // 10),
    )
    return replace(base, task=task, training=training)


def _check_changes(changes: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` for a setting that an argument gives, which would be lost, and for one of a
    comparison.
    """
    for text in changes:
        name = Change.parse(text).name
        if name in _OPTIONS:
            written = text.partition("=")[0]
            raise ConfigError(f"--set {written}: {_OPTIONS[name]} gives this setting: write it there")
        if name.partition(".")[0] in {field.name for field in fields(Recipe)} - {"task", "training"}:
            raise ConfigError(f"--set {name} belongs to structattn compare: leave it out")


@contextmanager
def _naming_options() -> Iterator[None]:
    """Within it, an error calls settings by the options that give them."""
    try:
        yield
    except (ConfigError, DataError) as error:
        text = str(error)
        for setting, option in _OPTIONS.items():
            if "." not in setting:  # a common word
                continue
            text = re.sub(rf"(?<!\S){re.escape(setting)}\b|(?<=\(){re.escape(setting)}\b", option, text)
        raise type(error)(text) from error


def _whole_steps(tokens: int, batch_size: int, context_length: int) -> int:
    """The nearest number of whole steps; raises ``ConfigError`` for fewer than two."""
    step = batch_size * context_length
    if tokens < _FEWEST_STEPS * step:
        raise ConfigError(
            f"--tokens: expected at least {_FEWEST_STEPS * step:,}, {_FEWEST_STEPS} steps of {batch_size:,} windows of "
            f"{context_length:,} tokens, got {tokens:,}: give more, or a smaller --batch-size or --context-length"
        )
    return round(tokens / step)


def _check_folder(out: Path, resume: bool, command: str) -> None:
    """Raises ``ConfigError`` unless a folder is new or empty, or holds what is continued."""
    if not out.is_dir():
        if out.exists():
            raise ConfigError(f"{out} is not a folder: give another --out")
        return
    names = sorted(path.name for path in out.iterdir() if not path.name.startswith(TEMPORARY))
    others = [name for name in names if name not in (MODEL, CORPUS, RESULTS)]
    if others:
        raise ConfigError(
            f"{out} holds {quoted(others[0])}, which structattn uptrain did not write: give --out a folder that is "
            "empty or new"
        )
    if names and not resume:
        line = f"{command} --resume" if command else "resume=True (--resume)"
        raise ConfigError(
            f"{out} has results of structattn uptrain already: continue with {line}, or give another --out"
        )


def _source(data: Path, out: Path, document_start: str) -> Source:
    """The text; raises ``DataError`` if it is not there, unless its corpus is finished."""
    longest = _longest_document(data, out)
    return Source(path=str(data), longest_document=None if document_start else longest, document_start=document_start)


def _longest_document(data: Path, out: Path) -> int | None:
    """A part of the text, in characters; of a finished corpus, whose text may be gone, the recorded one;
    ``None`` for a data set.
    """
    if (out / MANIFEST).is_file():
        recorded: int | None = Corpus(out).manifest["settings"]["source"].get("longest_document")
        return recorded
    files = Source(path=str(data)).files()
    return None if files is None else max(_SHORTEST_PART, sum(Path(file).stat().st_size for file in files) // _PARTS)


def _write_model(tasks: TaskFactory, recipe: Recipe, results: Results[ComparisonRecord], data: str, out: Path) -> None:
    """The student of the only run of a comparison, as transformers saves it, with the tokenizer of the
    teacher and a model card.
    """
    ((run,),) = results.runs
    task = cast(Any, tasks(recipe.task))
    student = task.build_model(recipe.attention[0])
    student.load_state_dict(read_finished(run).weights)
    model = student.model.merge_and_unload() if recipe.task.lora_rank else student.model
    with model_folder(out) as folder:
        model.eval().save_pretrained(folder)
        if task.teacher.tokenizer is not None:
            task.teacher.tokenizer.save_pretrained(folder)
        write_atomic(folder / README, model_card(results.record, model.config, data))
