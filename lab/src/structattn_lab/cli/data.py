"""The commands for corpora: data prepare, data info."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from structattn.cli.session import Session
from structattn.errors import ConfigError
from structattn_lab.cli.values import OptionalCount, Share, constructor, whole


@dataclass(frozen=True, kw_only=True)
class DataPrepareCommand:
    """Make a corpus (shards of tokens) from text files or a data set, once for any number of runs.

    Example:
      structattn data prepare text --source books/ --tokens bpe --out corpus
    """

    kind: tyro.conf.Positional[Annotated[Literal["text"], tyro.conf.arg(metavar="TASK")]]
    """The kind of the data: text."""
    source: str
    """A text file, a file of JSON lines or Parquet, a folder of them, or the name of a data set, such as
    openwebtext, which is streamed.
    """
    tokens: Literal["chars", "bytes", "bpe", "model"] = "chars"
    """chars, the 96 characters of the paper; bytes; bpe, byte-pair encoding trained on the training
    documents; or model, those of --model.
    """
    model: str = ""
    """The model whose tokens are used: a folder that save_pretrained wrote, or a name on the hub."""
    vocab_size: Annotated[int, constructor(whole(minimum=256, maximum=2**24), several=False)] = 4096
    """Number of tokens of bpe."""
    unknown: Literal["error", "drop"] = "error"
    """What to do with a character that is not among the 96."""
    document_start: str = ""
    """In text files, a line that starts with this text starts a document. Default: each file is a
    document.
    """
    text_column: str = "text"
    """The field of JSON lines, Parquet and data sets that holds the text."""
    dataset_split: str = "train"
    """The split of a data set."""
    max_documents: OptionalCount = None
    """Use only this number of documents, the first ones. Default: all."""
    longest_document: OptionalCount = None
    """Cut longer texts into documents of at most this number of characters, such as a single file into parts
    for train, validation and test.
    """
    validation: Share = 0.05
    """Share of the documents that is kept for validation."""
    test: Share = 0.05
    """Share of the documents that is kept for the test."""
    out: Path
    """Folder of the corpus."""
    resume: bool = False
    """Continue what --out already holds."""

    def execute(self, session: Session) -> None:
        from structattn_lab.data.corpus import Corpus, PrepareConfig, Source, prepare

        if bool(self.model) != (self.tokens == "model"):
            got = f"--tokens {self.tokens} and --model {self.model}" if self.model else "no --model"
            raise ConfigError(f"--model names the model whose tokens --tokens model takes: give both, got {got}")
        if self.validation + self.test >= 1:
            raise ConfigError(
                f"--validation and --test must sum to less than 1, got {self.validation:g} and {self.test:g}"
            )
        if self.unknown == "drop" and self.tokens != "chars":
            raise ConfigError(f"--unknown drop is only for --tokens chars: --tokens {self.tokens} have every character")
        source = Source(
            path=self.source,
            document_start=self.document_start,
            text_column=self.text_column,
            dataset_split=self.dataset_split,
            max_documents=self.max_documents,
            longest_document=self.longest_document,
        )
        config = PrepareConfig(
            source=source,
            tokens=self.tokens,
            model=self.model,
            vocab_size=self.vocab_size,
            unknown=self.unknown,
            validation=self.validation,
            test=self.test,
        )
        prepare(config, self.out, resume=self.resume, on_open=session.began)
        print(Corpus(self.out).summary())


@dataclass(frozen=True)
class DataInfoCommand:
    """Show what a corpus holds; with --verify, check that its files are unchanged.

    Example:
      structattn data info corpus --verify
    """

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="CORPUS")]]
    """The corpus."""
    verify: bool = False
    """Read every file and compare its hash."""

    def execute(self, session: Session) -> None:
        from structattn_lab.data.corpus import Corpus

        corpus = Corpus(self.folder)
        if self.verify:
            corpus.verify()
            print("every file is as it was written")
        print(corpus.summary())
