"""The command that gives a trained model a smaller cache: uptrain."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from structattn.cli.session import Session
from structattn_lab.cli.output import print_results, require_extra
from structattn_lab.cli.values import Count, Positive, constructor, number, whole


@dataclass(frozen=True, kw_only=True)
class UptrainCommand:
    """Give a trained model of transformers a smaller key/value cache, and train it with the original as its
    teacher.

    Examples:
      structattn uptrain MODEL --data books/ --compression 4 --tokens 50000000 --out smaller
      structattn uptrain MODEL --data books --attention "mlr:32|32,values=32|32" --tokens 50000000 --out out
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """A folder that save_pretrained wrote, or a name on the hub."""
    data: Path
    """A file or a folder of text, JSON lines or Parquet; or a corpus with the tokens of the model."""
    tokens: Annotated[int, constructor(whole(minimum=1, maximum=2**53), several=False)]
    """Tokens to train on, in whole steps of --batch-size times --context-length, at least two; the report
    shows the loss against them.
    """
    out: Path
    """Folder of the results: model/, results/report.html, corpus/."""
    compression: Annotated[float | None, constructor(number(minimum=1), several=False)] = None
    """How many times smaller the cache gets: each key head keeps fewer far tokens, in fewer bits.
    Default: 4, unless --attention is given.
    """
    context_length: Count = 2048
    """Tokens of a window, at most the positions of the model."""
    batch_size: Count = 4
    """Windows of a step."""
    learning_rate: Positive = 5e-4
    """The highest learning rate; the best one falls with the width of the model."""
    lora_rank: Annotated[int, constructor(whole(minimum=0), several=False)] = 0
    """Train adapters of this rank on attention, instead of all weights; needs peft."""
    attention: str = ""
    """The student in place of --compression, such as mlr:32|16|16,values=32|16|16 for heads of 64 dimensions:
    ranks sum to these.
    """
    document_start: str = ""
    """In text files, a line that begins with this begins a document, such as "PEP: ". Default: a file is one,
    and long ones are cut.
    """
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as section.field=value, such as task.distillation=0.9; may be repeated (see `structattn
    settings uptraining`).
    """
    resume: bool = False
    """Continue what --out already holds."""

    def execute(self, session: Session) -> None:
        require_extra()
        session.opened(self.out)
        from structattn_lab.compare.pages import text
        from structattn_lab.compare.uptrain import uptrain

        done = uptrain(
            self.model,
            self.data,
            self.out,
            tokens=self.tokens,
            compression=self.compression,
            context_length=self.context_length,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            lora_rank=self.lora_rank,
            attention=self.attention,
            document_start=self.document_start,
            changes=self.set,
            resume=self.resume,
            command=session.line,
            on_open=session.began,
        )
        print_results(text(done.results.record), done.results)
        print(f"model    {done.model}")
