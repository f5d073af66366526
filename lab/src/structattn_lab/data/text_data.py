"""The text of a language model: the packaged excerpt, a text file, or a prepared corpus."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from structattn.errors import DataError
from structattn_lab.data.corpus import Characters, Corpus, Document, Source, SplitTokens, Tokenizer
from structattn_lab.data.plain_text import is_there
from structattn_lab.data.splits import SPLITS


class TextData(NamedTuple):
    """A text in tokens: its tokenizer, its splits by name, the digest of its content, and where it is from,
    for messages.
    """

    tokenizer: Tokenizer
    splits: dict[str, SplitTokens]
    sha256: str
    source: str


def open_text_data(data: str) -> TextData:
    """The data that ``TextConfig.data`` names.

    Raises:
        DataError: the file or the corpus cannot be read, or a character has no token.
    """
    if data and is_there(data) and Path(data).is_dir():
        corpus = Corpus(Path(data))
        corpus.verify()
        return TextData(corpus.tokenizer, corpus.splits, corpus.sha256, data)
    documents, source = _read(data)
    tokenizer = Characters()
    encoded = [tokenizer.encode(document.text, document.name) for document in documents]
    tokens, ends = np.concatenate(encoded), np.cumsum([len(part) for part in encoded])
    sha256 = hashlib.sha256("\0".join(document.text for document in documents).encode()).hexdigest()
    splits: dict[str, SplitTokens] = {}
    length = len(tokens)
    edges = (0, 9 * length // 10, 19 * length // 20, length)
    for name, (a, b) in zip(SPLITS, pairwise(edges), strict=True):
        bounds = [a, *ends[(ends > a) & (ends < b)], b]  # a document at an edge of the splits becomes two
        splits[name] = SplitTokens([tokens[a:b]], np.diff(bounds))
    return TextData(tokenizer, splits, sha256, source)


def _read(path: str) -> tuple[list[Document], str]:
    """The documents and where they are from, for messages."""
    if not path:
        text = files("structattn_lab.data").joinpath("files", "peps.txt").read_text(encoding="ascii")
        return [Document(text, "the packaged text")], "the packaged text"
    if not is_there(path):
        raise DataError(f"expected a text file or a corpus at {path}, got no such file. Check the path")
    documents = list(Source(path=path).documents())
    if not documents:
        raise DataError(f"{path}: expected text, got an empty file or nothing but spaces. Check how it was written")
    return documents, path
