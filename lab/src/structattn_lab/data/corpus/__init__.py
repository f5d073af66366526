"""Text for language models: documents from files or data sets, made into token shards that training maps into
memory.
"""

from structattn_lab.data.corpus.corpus import Corpus, SplitTokens, Tokens, Windows
from structattn_lab.data.corpus.documents import Document, Source
from structattn_lab.data.corpus.preparation import PrepareConfig, prepare
from structattn_lab.data.corpus.tokenizers import (
    BytePairs,
    Bytes,
    Characters,
    Tokenizer,
    text_units,
    tokenizer_from,
)

__all__ = [
    "BytePairs",
    "Bytes",
    "Characters",
    "Corpus",
    "Document",
    "PrepareConfig",
    "Source",
    "SplitTokens",
    "Tokenizer",
    "Tokens",
    "Windows",
    "prepare",
    "text_units",
    "tokenizer_from",
]
