"""The command that measures caches of a trained model: compare caches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro

from structattn.cli.session import Session
from structattn_lab.cli.output import print_results, require_extra


@dataclass(frozen=True, kw_only=True)
class CompareCachesCommand:
    """Measure what a trained model of transformers loses through each of several caches: loss, retrieval,
    bytes and time, in a table, two figures and a report.

    Settings, with --set task.NAME=VALUE: model, context_length (1024), num_steps (64), num_windows (8),
    num_prompts (4, of each retrieval task at each distance; 0: none), dtype (float32, bfloat16, float16),
    seed (0), only (a part of the names or descriptions of the caches that are measured: bits, kvpress),
    calibration (a file of calibrate(...).save, for caches that allocate chooses).

    Examples:
      structattn compare caches --set task.model=FOLDER --data book.txt
      structattn compare caches --set task.model=FOLDER --set task.context_length=4096 --data books/
    """

    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as task.model=FOLDER; may be repeated."""
    data: Path | None = None
    """A file or a folder of text, JSON lines or Parquet."""
    out: Path | None = None
    """Output folder. Default: runs/compare-caches-DATE-TIME."""
    resume: bool = False
    """Continue what --out already holds."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn_lab.compare.caches import CachesConfig, compare_caches
        from structattn_lab.report.caches import report
        from structattn_lab.report.writer import text
        from structattn_lab.settings.overrides import apply_overrides

        data = () if self.data is None else (f"task.data={self.data}",)
        config = apply_overrides(CachesConfig(), (*self.set, *data))
        done = compare_caches(config, self.out, command=session.line, resume=self.resume, on_open=session.began)
        print_results(text(report(done.record)), done)
