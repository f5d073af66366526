"""``compare_caches``: what a trained model loses through each of several caches."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from structattn.checks import MAX_SEED, check_field_types, check_int, check_size
from structattn.errors import CheckpointError, ConfigError, in_words
from structattn.files import write_atomic
from structattn.progress import progress_bar, say
from structattn.typed_records import read_as
from structattn_lab.compare.cache_rows import cache_rows, chosen_rows
from structattn_lab.compare.measured_cache import MeasuredCache, UnavailableError
from structattn_lab.data.corpus.documents import Source
from structattn_lab.data.corpus.tokenizers import model_tokenizer
from structattn_lab.data.trained_models import checked_config, load_model, weights_sha256
from structattn_lab.records.caches import CacheRow, CachesRecord, RecallRow
from structattn_lab.records.common import RESULTS, Results, read_file, to_json
from structattn_lab.records.environment import origin
from structattn_lab.runs.folders import Owner, finished_in, opened

ROWS = "rows"  # the folder of what is measured, a file for each cache


@dataclass(frozen=True, kw_only=True)
class CacheTask:
    """What is measured.

    Attributes:
        model: a folder that ``save_pretrained`` wrote, or a name on the hub.
        data: a file or folder of text, which the model has not been calibrated on.
        only: a part of the names or descriptions of the caches that are measured, besides the first, such as
            ``"bits"`` or ``"kvpress"``; empty: all.
        calibration: a file of ``calibrate(...).save``, of other text, for caches that ``allocate`` chooses;
            empty: none of these.
        context_length: tokens of a prefill.
        num_steps: tokens that follow one by one, whose loss is measured.
        num_windows: of text, for the loss.
        num_prompts: of each retrieval task at each distance; 0: none.
        dtype: of the model.
        bytes_dtype: of the model when the bytes of the cache are counted; empty: ``dtype``.
        seed: of windows and prompts.
    """

    model: str = ""
    data: str = ""
    only: str = ""
    calibration: str = ""
    context_length: int = 1024
    num_steps: int = 64
    num_windows: int = 8
    num_prompts: int = 4
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    bytes_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    seed: int = 0

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        for name in ("context_length", "num_steps", "num_windows"):
            check_size(f"task.{name}", getattr(self, name))
        check_int("task.num_prompts", self.num_prompts, minimum=0)
        check_int("task.seed", self.seed, minimum=0, maximum=MAX_SEED)


@dataclass(frozen=True, kw_only=True)
class CachesConfig:
    """The settings of ``structattn compare caches``."""

    task: CacheTask = field(default_factory=CacheTask)


def compare_caches(
    config: CachesConfig,
    out: Path | None = None,
    *,
    rows: Callable[[int, int, int], Any] = cache_rows,
    command: str = "",
    resume: bool = False,
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Results[CachesRecord]:
    """Measures a model with every cache by the same windows and prompts (``evaluate_cache``); writes
    ``results.json``, two figures and ``report.html``.

    Args:
        config: what is measured.
        out: output folder, created. Default: see ``folders.opened``.
        rows: makes the caches of a context length, a number of steps and a head dimension, the model as it is
            first.
        command: the command line, for the record.
        resume: keep the rows that ``out`` holds, and measure the others; ``task.only`` may differ from
            before.
        show_progress: a progress bar over caches.
        on_open: called with the output folder before anything is measured.

    Raises:
        ConfigError: no model or no text is named, there is no such model, or it has fewer positions than a
            window.
        DataError: the text cannot be read, or is shorter than a window.

    Cost: for each cache, a forward pass of a context for each window and prompt, and the steps of the
        windows. The weights are read once more for their digest, by which ``resume`` knows the model.
    """
    task = config.task
    for name, option in (("model", "--set task.model=FOLDER"), ("data", "--data TEXT")):
        if not getattr(task, name):
            raise ConfigError(f"expected task.{name}, got none: give {option}")
    checked = checked_config(task.model, task.context_length, following=task.num_steps + 1)
    model_config = checked.get_text_config(decoder=True)
    heads = model_config.num_attention_heads
    head_dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    tokenizer = model_tokenizer(task.model)
    texts = [
        torch.tensor(tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids)
        for document in Source(path=task.data).documents()
    ]
    settings = dataclasses.asdict(config)
    first, *caches = rows(task.context_length, task.num_steps, head_dim)
    if task.calibration:
        if not Path(task.calibration).is_file():
            raise ConfigError(
                f"task.calibration: there is no {task.calibration}; calibrate(model, texts).save writes it"
            )
        caches += chosen_rows(task.calibration, task.context_length, task.num_steps)
    caches = [cache for cache in caches if task.only in cache.name or task.only in cache.about]
    if task.only and not caches:
        raise ConfigError(f"task.only: no cache has {task.only!r} in its name or description; leave it away for all")
    caches.insert(0, first)
    read = hashlib.sha256(b"".join(text.numpy().tobytes() for text in texts)).hexdigest()
    owner = Owner(
        command="compare caches",
        task="",
        settings=settings
        | {
            "text_sha256": read,
            "model_sha256": weights_sha256(load_model(task.model)),
            "calibration_sha256": _file_sha256(task.calibration),
        },
        free=("task.only",),
        label="compare-caches",
    )
    from structattn_lab.report.caches import report  # matplotlib is optional
    from structattn_lab.report.writer import write_results

    out, finished = finished_in(out, owner, resume=resume, read=lambda folder: _finished(folder, settings))
    if finished is not None:
        return finished
    with opened(out, owner, resume=resume, on_open=on_open) as folder:
        measured: list[CacheRow] = []
        with progress_bar(total=len(caches), desc="caches", show=show_progress) as bar:
            for cache in caches:
                say(bar, cache.name)
                path = folder / ROWS / f"{re.sub('[^a-z0-9.]+', '-', cache.name.lower())}.json"
                row = _kept(path, cache) or _row(cache, task, texts, tokenizer, measured[0] if measured else None)
                if not row.note and not path.exists():
                    write_atomic(path, to_json(row))
                measured.append(row)
                bar.update()
        record = CachesRecord(
            **origin(command),
            config=settings,
            model_name=Path(task.model).name,
            text_name=Path(task.data).name,
            num_tokens=sum(map(len, texts)),
            num_windows=len(measured[0].losses),
            rows=tuple(measured),
        )
        return write_results(record, report(record), folder)


def _file_sha256(path: str) -> str:
    """The digest of a file; empty without one."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _finished(folder: Path, settings: dict[str, Any]) -> Results[CachesRecord] | None:
    """The results of a folder with a report of the same settings; else ``None``."""
    try:
        done = Results(record=read_file(CachesRecord, folder / RESULTS), folder=folder)
    except CheckpointError:
        return None  # there are none, or they are damaged: they are made again from the rows
    return done if done.report.is_file() and done.record.config == json.loads(json.dumps(settings)) else None


def _kept(path: Path, cache: MeasuredCache) -> CacheRow | None:
    """The row that an earlier call measured; ``None``: there is none."""
    if not path.exists():
        return None
    try:
        row = read_as(CacheRow, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): remove it to measure {cache.name} again") from error
    return dataclasses.replace(row, about=cache.about)


def _row(cache: MeasuredCache, task: CacheTask, texts: list[Any], tokenizer: Any, first: CacheRow | None) -> CacheRow:
    """What a model loses through a cache; the first row is that of the model as it is."""
    from structattn.integrations.transformers import evaluate_cache
    from structattn.integrations.transformers.evaluation.scores import Estimate

    dtype: torch.dtype = getattr(torch, task.dtype)
    counted_in: torch.dtype = getattr(torch, task.bytes_dtype or task.dtype)
    try:
        prepared = cache.prepare(load_model(task.model).eval().requires_grad_(False).to(dtype))
        scores = evaluate_cache(
            prepared.model,
            prepared.new_cache,
            texts,
            tokenizer=tokenizer,
            context_length=task.context_length,
            num_steps=task.num_steps,
            num_windows=task.num_windows,
            num_prompts=max(1, task.num_prompts),
            tasks=None if task.num_prompts else (),
            seed=task.seed,
            press=prepared.press,
        )
        nbytes = scores.nbytes
        if counted_in != dtype:
            nbytes = evaluate_cache(
                prepared.model.to(counted_in),
                prepared.new_cache,
                texts,
                context_length=task.context_length,
                num_steps=task.num_steps,
                num_windows=1,
                tasks=(),
                press=prepared.press,
            ).nbytes
    except UnavailableError as error:
        return CacheRow(name=cache.name, about=cache.about, note=str(error))
    except Exception as error:  # other packages raise what they like
        if first is None:
            raise
        return CacheRow(name=cache.name, about=cache.about, note=f"it fails: {in_words(error)}")
    # The first row keeps all keys and values in the dtype of the model.
    per_16_bits = nbytes / counted_in.itemsize * 2
    if first is not None:
        per_16_bits = first.nbytes / first.size  # type: ignore[operator]
    needed = None
    if cache.kept is not None and first is not None:
        share = (cache.kept * task.context_length + task.num_steps) / (task.context_length + task.num_steps)
        needed = share * first.size  # type: ignore[operator]
    above = Estimate.of([a - b for a, b in zip(scores.losses, (first or scores).losses, strict=True)])
    return CacheRow(
        name=cache.name,
        about=cache.about,
        nbytes=nbytes,
        size=nbytes / per_16_bits,
        needed=needed,
        loss=scores.loss.mean,
        losses=scores.losses,
        above=above.mean,
        interval=(above.low, above.high) if math.isfinite(above.low) else None,
        recall=tuple(RecallRow(task=x.task, distance=x.distance, share=x.share, count=x.count) for x in scores.recall),
        step_ms=scores.step_ms,
        prefill_ms=scores.prefill_ms,
    )
