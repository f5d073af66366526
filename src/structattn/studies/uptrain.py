"""From a trained model of transformers to the same model with a smaller cache: text, calibration, training, report, checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from structattn.checks import check_int, check_number
from structattn.errors import ConfigError
from structattn.files import TEMPORARY
from structattn.studies.compare import compare
from structattn.studies.data.corpus import Corpus, PrepareConfig, Source, prepare
from structattn.studies.data.corpus.corpus import MANIFEST
from structattn.studies.grid import points_of
from structattn.studies.recipe import Recipe
from structattn.studies.records.common import Results
from structattn.studies.records.comparison import ComparisonRecord
from structattn.studies.settings import apply_overrides
from structattn.studies.tasks.registry import recipe_for, shared_task
from structattn.studies.training.finished import read_finished

MODEL, CORPUS, RESULTS = "model", "corpus", "results"
_TASK = "uptraining"
# Of the steps, on attention alone; what was tried is in docs/results/uptraining.md.
_ATTENTION_SHARE = 0.8

# A text of one or few files is cut: whole documents are held out, so there must be some for validation and test.
_PARTS = 200
_SHORTEST_PART = 1000  # characters


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
    compression: float = 4.0,
    context_length: int = 512,
    batch_size: int = 16,
    learning_rate: float = 5e-4,
    lora_rank: int = 0,
    attention: str = "",
    changes: tuple[str, ...] = (),
    resume: bool = False,
    command: str = "",
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Uptrained:
    """Gives a trained model a smaller key/value cache and trains it, with the given one as its teacher.

    Args:
        model: the teacher: a folder that ``save_pretrained`` of transformers wrote, or a name on the hub; any decoder that ``structurize`` knows.
        data: text to train on: a file or a folder of text, JSON lines or Parquet, or a corpus with the tokens of the model. A document
            longer than a 200th of the text is cut.
        out: the folder, new or empty: ``corpus`` (tokens), ``results`` (runs, curves, report.html) and ``model`` (the checkpoint).
        tokens: to train on; rounded to whole steps of ``batch_size * context_length``.
        compression: how many times smaller keys and values are at ``context_length``.
        context_length, batch_size: of a step.
        learning_rate: the highest. The best one falls with the width: 2e-3 at width 256 in docs/results/uptraining.md; no large model was measured.
        lora_rank: train adapters of this rank on attention alone, merged at the end. Default 0: all weights.
        attention: the student, instead of ``compression``: a form of the task ``uptraining``, such as ``"mlr:16|8|8,values=16|16"``.
        changes: further settings, such as ``("task.distillation=0", "training.eval_every=50")``.
        resume: continue what ``out`` holds.
        command: the command line, for the record.
        show_progress: progress bars on stderr.
        on_open: called with the folder before training.

    Raises:
        ConfigError: the folder has files and ``resume`` is off; the model cannot be loaded or structurized; no ranks give the compression; a setting is
            out of its range.
        DataError: the text cannot be read, or is shorter than one window.
        TrainingDivergedError: the loss or a weight is not finite; the last checkpoint is from before that.

    Cost: of training the model on ``tokens``, and a forward pass of the teacher for each.
    """
    check_int("tokens", tokens, minimum=1)
    check_number("compression", compression, minimum=1)
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise ConfigError(f"{out} has files: give a new folder, or continue with resume (--resume)")
    corpus = _corpus(str(model), Path(data), out / CORPUS, resume, show_progress)
    steps = max(2, round(tokens / (batch_size * context_length)))
    base: Recipe = recipe_for(_TASK, "default")
    recipe = replace(
        base,
        task=replace(
            base.task,
            model=str(model),
            data=str(corpus),
            context_length=context_length,
            lora_rank=lora_rank,
            attention_steps=0 if lora_rank else int(steps * _ATTENTION_SHARE),
        ),
        training=base.training.replaced(
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            eval_every=max(1, steps // 20),
            checkpoint_every=max(1, steps // 10),
        ),
        attention=(attention or f"cache:{compression:g}",),
    )
    recipe = apply_overrides(recipe, changes)
    results = compare(
        _TASK,
        recipe,
        out / RESULTS,
        command=command,
        resume=resume,
        show_progress=show_progress,
        on_open=on_open,
    )
    folder = out / MODEL
    if not folder.is_dir():
        _write_model(recipe, results.folder, folder)
    return Uptrained(model=folder, results=results)


def _corpus(model: str, data: Path, out: Path, resume: bool, show_progress: bool) -> Path:
    """The folder of a corpus with the tokens of the model: the given one, or a new one."""
    if (data / MANIFEST).is_file():
        Corpus(data)
        return data
    source = Source(path=str(data), longest_document=_longest_document(data, out))
    config = PrepareConfig(source=source, tokens="model", model=model)
    prepare(config, out, resume=resume, show_progress=show_progress)
    return out


def _longest_document(data: Path, out: Path) -> int | None:
    """A part of the text, in characters; of a finished corpus, whose text may be gone, the recorded one; ``None`` for a data set."""
    if (out / MANIFEST).is_file():
        recorded: int | None = Corpus(out).manifest["settings"]["source"].get("longest_document")
        return recorded
    files = Source(path=str(data)).files()
    return None if files is None else max(_SHORTEST_PART, sum(Path(file).stat().st_size for file in files) // _PARTS)


def _write_model(recipe: Recipe, folder: Path, out: Path) -> None:
    """The student of the only run of a comparison, as transformers saves it, with the tokenizer of the teacher."""
    (point,) = points_of(_TASK, recipe)
    (job,) = point.jobs(folder, recipe.attention[0], recipe.training.learning_rate)
    task = cast(Any, shared_task(_TASK, point.recipe.task))
    student = task.build_model(recipe.attention[0])
    student.load_state_dict(read_finished(job.folder).weights)
    model = student.model.merge_and_unload() if recipe.task.lora_rank else student.model
    partial = out.with_name(TEMPORARY + out.name)
    shutil.rmtree(partial, ignore_errors=True)
    model.eval().save_pretrained(partial)
    if task.teacher.tokenizer is not None:
        task.teacher.tokenizer.save_pretrained(partial)
    partial.rename(out)
