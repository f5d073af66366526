"""From a trained model of transformers to the same model with a smaller cache, without training, and a report
of what it lost.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structattn.checks import check_int, check_number, check_path, check_size
from structattn.errors import CheckpointError, DataError
from structattn.files import write_atomic
from structattn.machine import has_products
from structattn.progress import doing
from structattn.seeds import generator
from structattn_lab.compare.cache_rows import bits_row, default_row, longest_of, window_row
from structattn_lab.compare.caches import CachesConfig, CacheTask, compare_caches
from structattn_lab.compare.measured_cache import MeasuredCache, Prepared
from structattn_lab.data.corpus.documents import Source
from structattn_lab.data.corpus.tokenizers import model_tokenizer
from structattn_lab.data.trained_models import checked_config, load_model, model_folder, weights_sha256
from structattn_lab.records.caches import CachesRecord
from structattn_lab.records.common import RESULTS, Results, read_file
from structattn_lab.runs.folders import Owner, finished_in, opened

MODEL, CALIBRATION, MEASURED, REPORT = "model", "calibration.safetensors", "measured-text.jsonl", "results"
_PARTIAL = "partial-calibration.safetensors"  # while the model is calibrated
_CALIBRATED_TOKENS = 16384
_SHORTEST_WINDOW, _LONGEST_WINDOW = 1024, 2048  # longer ones take more memory and time, and chose no better
_MOST_CHARACTERS = 4_000_000  # of the text: more are not read


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """What ``shrink`` wrote.

    Attributes:
        model: the folder of the model with the smaller cache, for ``load_structurized``.
        results: what it loses: the record, and the folder of its report.
    """

    model: Path
    results: Results[CachesRecord]


def shrink(
    model: str | Path,
    data: str | Path | None,
    out: Path,
    *,
    compression: float = 8.0,
    context_length: int = 2048,
    num_windows: int = 4,
    num_prompts: int = 1,
    document_start: str = "",
    resume: bool = False,
    command: str = "",
    show_progress: bool = True,
    on_open: Callable[[Path, str], None] | None = None,
) -> Shrunk:
    """Gives a trained model a smaller key/value cache by measurement, and measures what that costs on other
    text.

    Some documents calibrate (``calibrate(model, windows, methods=("tokens", "bits"))``), the others are
    measured (``compare_caches``): the default cache, 4 bits, a window with sink tokens of the same bytes, and
    the model that was written. Their bytes are counted in bfloat16, or in float16 for a model of it, since
    the budget counts numbers of 16 bits. They compute in it where the processor does (``has_products``), else
    in float32, which is faster there.

    Args:
        model: a folder that ``save_pretrained`` of transformers wrote, or a name on the hub.
        data: a file or a folder of text, JSON lines or Parquet; at most its first 4,000,000 characters are
            read. A document of more than half of the text is cut in two. Default: the PEPs of this package.
        out: the folder, new or empty: ``model`` (the checkpoint), ``calibration.safetensors``,
            ``measured-text.jsonl``, and ``results`` (the report).
        compression: how many times smaller than keys and values of 16 bits, at ``context_length``.
        context_length: tokens of a window.
        num_windows: of text that are measured, at most.
        num_prompts: of each retrieval task at each distance; 0: none.
        document_start: in text files, a line that begins with this begins a document. Default: a file is one.
        resume: continue what ``out`` holds; it may hold nothing yet.
        command: the command line, for the record.
        show_progress: a progress bar over caches.
        on_open: called with the folder, and with what it takes in words, before anything is written.

    Raises:
        ConfigError: the folder has files and ``resume`` is off; the model cannot be loaded or structurized,
            or has fewer positions than a window; no choices give the compression.
        DataError: the text cannot be read, or has no two documents, or halves of one, as long as a window.

    Cost: see ``calibrate``, of 16,384 tokens in windows of half of the context, of 1,024 to 2,048
        tokens; and for each of the four caches a forward pass of a context for each window and prompt.
    """
    check_number("compression", compression, minimum=1)
    check_size("context_length", context_length)
    check_size("num_windows", num_windows)
    check_int("num_prompts", num_prompts, minimum=0)
    out = check_path("out", out)
    if data is None:
        data = Path(str(files("structattn_lab.data").joinpath("files", "peps.txt")))
        document_start = "PEP: "
    task = CacheTask(
        model=str(model),
        data=str(out / MEASURED),
        context_length=context_length,
        num_windows=num_windows,
        num_prompts=num_prompts,
    )
    config = checked_config(task.model, context_length, "--context-length", following=task.num_steps + 1)
    task = dataclasses.replace(task, **_dtypes(config.dtype))
    texts = _documents(Source(path=str(data), document_start=document_start))
    owner = Owner(
        command="shrink",
        task="",
        settings={
            "model": task.model,
            "model_sha256": weights_sha256(load_model(task.model, "MODEL")),
            "text_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest(),
            "compression": compression,
            "context_length": context_length,
            "num_windows": num_windows,
            "num_prompts": num_prompts,
        },
        # A budget that nothing fits is known after the calibration, which another one can use.
        free=() if (out / MODEL).exists() else ("compression",),
    )
    _, finished = finished_in(out, owner, resume=resume, read=_finished)
    if finished is not None:
        return finished
    takes = f"{compression:g} times smaller at {context_length:,} tokens"
    began = None if on_open is None else lambda folder: on_open(folder, takes)
    with opened(out, owner, resume=resume, on_open=began) as folder:
        tokenizer = model_tokenizer(task.model)
        length = _calibrated_length(context_length)
        windows, measured = _divided(texts, tokenizer, length, context_length + task.num_steps + 1)
        lines = "".join(f"{json.dumps({'text': text})}\n" for text in measured)
        if not (folder / MEASURED).exists():
            write_atomic(folder / MEASURED, lines)
        expected = _written(folder, task, windows, tokenizer, compression, config.dtype or torch.float32)
        results = compare_caches(
            CachesConfig(task=task),
            folder / REPORT,
            rows=_Rows(folder / MODEL, compression, expected),
            command=command,
            resume=True,
            show_progress=show_progress,
        )
    return Shrunk(model=out / MODEL, results=results)


@dataclass(frozen=True)
class _Rows:
    """The default cache, 4 bits, a window of the same bytes, and the model that was written."""

    model: Path
    compression: float
    expected: float

    def __call__(self, context_length: int, num_steps: int, head_dim: int) -> Iterator[MeasuredCache]:
        yield default_row()
        yield bits_row(4, context_length, num_steps)
        yield window_row(context_length / self.compression, context_length, num_steps)
        yield MeasuredCache(
            name=f"chosen, 1/{self.compression:g}",
            about="tokens and bits of each key head, chosen by allocate and read from the folder that was written; "
            f"expected to change predictions by {self.expected:.3f} nats per token",
            prepare=lambda model: self._chosen(model, longest_of(context_length, num_steps)),
        )

    def _chosen(self, model: Any, longest: int) -> Prepared:
        from structattn.integrations.transformers import level_cache, load_structurized

        smaller = load_structurized(self.model, dtype=model.dtype).eval().requires_grad_(False)
        return Prepared(smaller, lambda: level_cache(smaller, max_length=longest))


def _finished(folder: Path) -> Shrunk | None:
    """What is in a folder with a report; else ``None``."""
    try:
        done = Results(record=read_file(CachesRecord, folder / REPORT / RESULTS), folder=folder / REPORT)
    except CheckpointError:
        return None  # there is none, or it is damaged: it is made again from the rows
    return Shrunk(model=folder / MODEL, results=done) if done.report.is_file() else None


def _documents(source: Source) -> list[str]:
    """The beginning of a text; a document of more than half of it is cut in two, after the end of a line."""
    texts, left = [], _MOST_CHARACTERS
    for document in source.documents():
        texts.append(document.text[:left])
        left -= len(texts[-1])
        if left <= 0:
            break
    half = sum(map(len, texts)) / 2
    cut = []
    for text in texts:
        middle = text.rfind("\n", 0, len(text) // 2) + 1 or len(text) // 2
        cut += [text[:middle], text[middle:]] if len(text) > half else [text]
    return cut


def _dtypes(dtype: torch.dtype | None) -> dict[str, Any]:
    """In which numbers a model of a dtype is measured, and its bytes are counted."""
    name = "float16" if dtype == torch.float16 else "bfloat16"
    return {"dtype": name if has_products(getattr(torch, name)) else "float32", "bytes_dtype": name}


def _calibrated_length(context_length: int) -> int:
    """Tokens of a window to calibrate on: half of the context, whose far tokens shorter ones do not have."""
    return min(context_length, _LONGEST_WINDOW, max(_SHORTEST_WINDOW, context_length // 2))


def _divided(texts: list[str], tokenizer: Any, length: int, longest: int) -> tuple[list[Tensor], list[str]]:
    """Windows (1, length) to calibrate on, and documents to measure on, which are others.

    Args:
        texts: the documents.
        tokenizer: of the model.
        length: tokens of a window.
        longest: of a window that is measured.
    """
    with doing("tokens of the text"):
        ids = [torch.tensor(tokenizer(x, add_special_tokens=False, verbose=False).input_ids) for x in texts]
    kept = max(range(len(texts)), key=lambda number: len(ids[number]), default=None)
    windows: list[Tensor] = []
    chosen = set()
    most = max(1, _CALIBRATED_TOKENS // length)
    for number in torch.randperm(len(texts), generator=generator("documents to calibrate on", 0)).tolist():
        if len(windows) >= most:
            break
        if number != kept and len(ids[number]) >= length:
            chosen.add(number)
            windows += [window[None] for window in ids[number].split(length) if len(window) == length]
    if kept is None or not windows or len(ids[kept]) < longest:
        sizes = sorted((len(x) for x in ids), reverse=True)[:2]
        raise DataError(
            f"expected two documents, or halves of one, of at least {length:,} and {longest:,} tokens, one to "
            f"calibrate on and one to measure; the longest have {' and '.join(f'{size:,}' for size in sizes) or 'none'}"
            ": give more text, or a smaller --context-length"
        )
    return windows[:most], [text for number, text in enumerate(texts) if number not in chosen]


def _written(
    folder: Path, task: CacheTask, windows: list[Tensor], tokenizer: Any, compression: float, dtype: torch.dtype
) -> float:
    """Calibrates in float32 and writes the smaller model in its dtype, each unless that was done before.

    Returns:
        The expected change of the predictions, in nats per token.
    """
    from structattn.integrations.transformers import Calibration, allocate, calibrate, structurize

    path, target = folder / CALIBRATION, folder / MODEL
    if not path.exists():
        model = load_model(task.model, "MODEL").eval()
        calibrate(model, windows, methods=("tokens", "bits"), resume=folder / _PARTIAL).save(path)
    (folder / _PARTIAL).unlink(missing_ok=True)
    calibration = Calibration.load(path)
    with doing("choosing what each head keeps"):
        chosen = allocate(calibration, compression=compression, context_length=task.context_length)
    if not target.is_dir():
        model = load_model(task.model, "MODEL").to(dtype)
        structurize(model, chosen)
        with model_folder(target) as written:
            model.save_pretrained(written)
            tokenizer.save_pretrained(written)
    return chosen.expected_loss
